"""What is wrong with a configuration, as one sentence with the fix."""

from __future__ import annotations

from typing import NamedTuple


class Problem(NamedTuple):
    keys: tuple[str, ...]  # full keys that the check read
    text: str
