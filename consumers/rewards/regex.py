"""Regular expression: the response matches a pattern.

Python's engine can backtrack for ever on some pattern and text; the scoring pool's deadline ends that.
"""

from __future__ import annotations

import re

from consumers.rewards.types import RewardInput, option


def reward(
    sample: RewardInput, *, pattern: str | None = None, full_match: bool = False, ignore_case: bool = False
) -> float:
    """1.0 iff `pattern` is found anywhere in the response (`full_match`: covers all of it). `.` matches newlines too.

    The pattern stands in metadata["pattern"] or in the options. Raises ValueError without one.
    """
    pattern = option(sample, "pattern", pattern)
    if not isinstance(pattern, str):
        raise ValueError(
            f"{sample.uid}: the regex reward needs a pattern: a text in metadata.pattern or reward.options.pattern, "
            f"got {pattern!r}"
        )
    flags = re.DOTALL | (re.IGNORECASE if option(sample, "ignore_case", ignore_case) else 0)
    find = re.fullmatch if option(sample, "full_match", full_match) else re.search
    return float(find(pattern, sample.response, flags) is not None)
