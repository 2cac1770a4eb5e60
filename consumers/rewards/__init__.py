"""Rewards: pure functions of one sample, and the machinery that runs user code under a deadline.

BUILT_INS    name → function; every one is `reward(sample: RewardInput, **options) -> float | dict`
load.py      a path or a built-in name → a checked Scorer
adapter.py   functions written for Miles or Slime
pool.py      scoring in processes that can be killed; of it calls.py, slot.py, process.py, serving.py and wire.py
"""

from __future__ import annotations

from consumers.rewards import code_tests, exact, json_format, numeric, regex
from consumers.rewards.types import NotScored, Outcome, RewardFunction, RewardInput, Scored

BUILT_INS: dict[str, RewardFunction] = {
    "exact": exact.reward,
    "numeric": numeric.reward,
    "regex": regex.reward,
    "json_format": json_format.reward,
    "code_tests": code_tests.reward,
}

__all__ = ["BUILT_INS", "NotScored", "Outcome", "RewardFunction", "RewardInput", "Scored"]
