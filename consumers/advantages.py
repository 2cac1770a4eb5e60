"""Advantages from the rewards of one group.

GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2): A_i = (r_i - mean(r)) / std(r), mean and population standard
deviation over the members that have a reward. `divide_by_std=False` is Dr. GRPO (arXiv 2503.20783, section 3.2).

A member without a reward is left out of both and out of training: a failure is not a reward of 0.

`eps` is a floor, max(std, eps), not a summand. A summand of 1e-6 bends every advantage a little and one of 1e-4
changes the fourth digit (1.4142 becomes 1.4139); a floor leaves groups with a real spread exactly as the formula
says. It only bounds groups with a tiny one, and those without any are flat by a test of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_FLAT = 1e-6  # relative to the largest |reward|, from 1 on: rounding of equal rewards is far below it


class Advantages(NamedTuple):
    """Of one group of n members. Never NaN."""

    values: NDArray[np.float32]  # [n], 0 where `members` is False
    members: NDArray[np.bool_]  # [n], True where there is a reward
    mean: float  # over members; 0.0 without any
    std: float  # population, over members
    is_flat: bool  # no spread: all values are 0 and the group teaches nothing


def group_advantages(
    rewards: Sequence[float | None] | NDArray[np.floating], *, divide_by_std: bool = True, eps: float = 1e-6
) -> Advantages:
    """GRPO advantages of one group's rewards [n]; None or NaN is a missing reward.

    >>> group_advantages([1, 0, None, 0]).values.round(4).tolist()
    [1.414199948310852, -0.7070999741554260, 0.0, -0.7070999741554260]

    Raises ValueError for an infinite reward, or when a centred reward does not fit in float32.
    """
    scores = np.array([math.nan if each is None else each for each in rewards], dtype=np.float64)
    if np.isinf(scores).any():
        raise ValueError(f"rewards must be finite, got {scores.tolist()}")
    members = ~np.isnan(scores)
    values = np.zeros(len(scores), np.float64)
    mean, std = _mean_std(scores[members])
    is_flat = std <= _FLAT * max(1.0, _largest(scores[members]))
    if not is_flat:
        values[members] = scores[members] - mean
        if divide_by_std:
            values /= max(std, eps)
    if np.abs(values).max(initial=0.0) > np.finfo(np.float32).max:
        raise ValueError(
            f"rewards {scores.tolist()}: an advantage does not fit in float32; scale the rewards down"
        )
    return Advantages(values.astype(np.float32), members, mean, std, is_flat)


def is_flat(rewards: Sequence[float | None] | NDArray[np.floating]) -> bool:
    """True if the members' rewards have no spread beyond rounding: the rule behind "zero variance"."""
    return group_advantages(rewards, divide_by_std=False).is_flat


def _mean_std(scores: NDArray[np.float64]) -> tuple[float, float]:
    if not len(scores):
        return 0.0, 0.0
    scale = max(1.0, _largest(scores))  # squares of very large rewards would overflow
    scaled = scores / scale
    return float(scaled.mean() * scale), float(scaled.std() * scale)


def _largest(scores: NDArray[np.float64]) -> float:
    return float(np.abs(scores).max(initial=0.0))
