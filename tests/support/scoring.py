"""Reward functions of tests, in a module that a scoring worker imports in no time."""

from __future__ import annotations

import os
import time
from typing import Any

POLL_S = 0.01


def reward(
    sample: Any, *, calls: str, seconds: float = 0.0, slow: str = "", slow_s: float = 0.0, gate: str = ""
) -> float:
    """1.0, after `seconds` (`slow_s` for the uids that `slow` lists, parted by commas), and not before the file `gate`
    is there. Each call is one line in the file `calls`: the uid."""
    with open(calls, "a", encoding="utf-8") as file:
        file.write(f"{sample.uid}\n")
    time.sleep(slow_s if sample.uid in slow.split(",") else seconds)
    while gate and not os.path.exists(gate):
        time.sleep(POLL_S)
    return 1.0
