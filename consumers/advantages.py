"""Advantages: how the rewards of a batch become what its samples are weighed by.

    rewards of each group ──► estimator (a line in ESTIMATORS) ──► one advantage per sample, of all its tokens alike

r_i are the rewards of a group (the samples of one prompt), n_i the numbers of their trained tokens:

    grpo, gspo                    (r_i − mean) / std             of the group
    dr_grpo                        r_i − mean                    of the group
    rloo                           r_i − mean of the others      = n / (n − 1) · (r_i − mean), n members
    reinforce_plus_plus           (r_i − mean) / std             of all trained tokens of the batch
    reinforce_plus_plus_baseline  (r_i − mean of the group) / its root mean square over all trained tokens of the batch
    ppo                            r_i                           the critic makes advantages of it, token by token

A member without a reward is left out of every mean and out of training: a failure is not a reward of 0. Where rewards
are equal up to rounding, in a group or (reinforce_plus_plus) in the batch, nothing is to be learnt and all
advantages are exactly 0.

What depends on tokens (KL in the reward, discounts, a critic's values) is in engine/algorithms/returns.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streams.events import BatchCut

_FLAT = 1e-6  # relative to the largest |reward|, from 1 on: rounding of equal rewards is far below it
_EPS = 1e-6  # the least that is divided by


class Group(NamedTuple):
    """What an estimator sees of one group of n samples."""

    rewards: Sequence[float | None]  # [n]; None or NaN: missing
    n_tokens: Sequence[int]  # [n] trained ones


Estimator = Callable[[Sequence[Group]], list[NDArray[np.float32]]]  # [n] of each group; 0 of a missing reward


class Advantages(NamedTuple):
    """Of one group of n members. Never NaN."""

    values: NDArray[np.float32]  # [n], 0 where `members` is False
    members: NDArray[np.bool_]  # [n], True where there is a reward
    mean: float  # over members; 0.0 without any
    std: float  # population, over members
    is_flat: bool  # no spread: all values are 0 and the group teaches nothing


def group_advantages(
    rewards: Sequence[float | None] | NDArray[np.floating], *, divide_by_std: bool = True, eps: float = _EPS
) -> Advantages:
    """GRPO advantages of one group's rewards [n]; None or NaN is a missing reward.

    A_i = (r_i − mean(r)) / std(r), mean and population standard deviation over the members that have a reward:
    DeepSeekMath, arXiv 2402.03300, section 4.1.2. Not divided by it: Dr. GRPO, arXiv 2503.20783, section 3.2.

    `eps` is a floor, max(std, eps), not a summand. A summand of 1e-6 bends every advantage a little and one of 1e-4
    changes the fourth digit (1.4142 becomes 1.4139); a floor leaves groups with a real spread exactly as the formula
    says. It only bounds groups with a tiny one, and those without any are flat by a test of their own.

    >>> group_advantages([1, 0, None, 0]).values.round(4).tolist()
    [1.414199948310852, -0.7070999741554260, 0.0, -0.7070999741554260]

    Raises ValueError for an infinite reward, or when a centred reward does not fit in float32.
    """
    scores, members = _scores(rewards)
    mean, std = _mean_std(scores[members])
    values = _centred(scores, members)
    if divide_by_std:
        values /= max(std, eps)
    return Advantages(_as_float32(values, scores), members, mean, std, _is_flat(std, scores[members]))


def is_flat(rewards: Sequence[float | None] | NDArray[np.floating]) -> bool:
    """True if the members' rewards have no spread beyond rounding: the rule behind "zero variance"."""
    return group_advantages(rewards, divide_by_std=False).is_flat


# ---------------------------------------------------------------- of a batch
def grpo(groups: Sequence[Group]) -> list[NDArray[np.float32]]:
    """(r − mean) / std of the group: DeepSeekMath, arXiv 2402.03300, section 4.1.2."""
    return [group_advantages(group.rewards).values for group in groups]


def dr_grpo(groups: Sequence[Group]) -> list[NDArray[np.float32]]:
    """r − mean of the group, undivided: a division favours very easy and very hard prompts.

    Dr. GRPO, arXiv 2503.20783, section 3.2. Its other half, no division by the length of a response, is a matter of
    the loss's reduction.
    """
    return [group_advantages(group.rewards, divide_by_std=False).values for group in groups]


def rloo(groups: Sequence[Group]) -> list[NDArray[np.float32]]:
    """r − mean of the OTHER members: REINFORCE leave-one-out.

    Kool, van Hoof and Welling 2019, "Buy 4 REINFORCE samples, get a baseline for free!"; for language models Ahmadian
    et al. 2024, arXiv 2402.14740. A group of one has no others, so it teaches nothing.
    """
    found = []
    for group in groups:
        each = group_advantages(group.rewards, divide_by_std=False)
        count = int(each.members.sum())
        found.append(each.values * np.float32(count / (count - 1)) if count > 1 else each.values)
    return found


def reinforce_plus_plus(groups: Sequence[Group]) -> list[NDArray[np.float32]]:
    """(r − mean) / std over all trained tokens of the batch: REINFORCE++, arXiv 2501.03262, global normalisation.

    Each token of a sample has the sample's reward as its return, so that a reward counts as often as the sample has
    trained tokens. With a KL term in the reward or a discount, returns differ from token to token: the trainer works
    out the same there (engine/algorithms/returns.py).
    """
    scores, members, weights = _side_by_side(groups)
    values = np.zeros(len(scores), np.float64)
    mean, std = _mean_std(scores[members], weights[members])
    if not _is_flat(std, scores[members]):
        values[members] = (scores[members] - mean) / max(std, _EPS)
    return _apart(_as_float32(values, scores), groups)


def reinforce_plus_plus_baseline(groups: Sequence[Group]) -> list[NDArray[np.float32]]:
    """r − mean of the group, divided by the root mean square of that over all trained tokens of the batch.

    REINFORCE++ with baseline, arXiv 2501.03262: the spread is one of the batch, since the group's own is correlated
    with the reward that it divides. The groups' means are the centre, so none is subtracted again (with samples of
    equal length it would be 0), and flat groups stay 0.
    """
    centred = np.concatenate([np.zeros(0), *(_centred(*_scores(group.rewards)) for group in groups)])
    scores, members, weights = _side_by_side(groups)
    _, spread = _mean_std(centred[members], weights[members], around=0.0)
    return _apart(_as_float32(centred / max(spread, _EPS), scores), groups)


def reward(groups: Sequence[Group]) -> list[NDArray[np.float32]]:
    """The rewards as they are. PPO's advantages are those of a critic: engine/algorithms/returns.py."""
    scores, members, _ = _side_by_side(groups)
    return _apart(_as_float32(np.where(members, scores, 0.0), scores), groups)


ESTIMATORS: dict[str, Estimator] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "gspo": grpo,  # arXiv 2507.18071, section 4.1: GRPO's advantages under a ratio of whole sequences
    "ppo": reward,
}
OF_BATCH = frozenset(
    {"reinforce_plus_plus", "reinforce_plus_plus_baseline"}
)  # a group alone does not tell them
OF_CRITIC = frozenset({"ppo"})  # nor do rewards


def of_cut(cut: BatchCut, estimator: str) -> list[NDArray[np.float32]]:
    """Advantages of a step's samples, from its ledger record alone: [n] of each group, in the record's order."""
    return ESTIMATORS[estimator](
        [
            Group(
                [member.reward for member in group.members],
                [member.n_trainable_tokens for member in group.members],
            )
            for group in cut.groups
        ]
    )


# ---------------------------------------------------------------- parts
def _scores(
    rewards: Sequence[float | None] | NDArray[np.floating],
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """(rewards [n], NaN where missing; whether there is one [n])."""
    scores = np.array([math.nan if each is None else each for each in rewards], dtype=np.float64)
    if np.isinf(scores).any():
        raise ValueError(f"rewards must be finite, got {scores.tolist()}")
    return scores, ~np.isnan(scores)


def _side_by_side(
    groups: Sequence[Group],
) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.float64]]:
    """Rewards [S] of all samples, whether each has one, and its trained tokens."""
    scores, members = _scores([each for group in groups for each in group.rewards])
    return scores, members, np.array([each for group in groups for each in group.n_tokens], np.float64)


def _apart(values: NDArray[np.float32], groups: Sequence[Group]) -> list[NDArray[np.float32]]:
    ends = np.cumsum([len(group.rewards) for group in groups])[:-1]
    return np.split(values, ends) if groups else []


def _centred(scores: NDArray[np.float64], members: NDArray[np.bool_]) -> NDArray[np.float64]:
    """r − mean over the members [n]; 0 for the others, and for all of a flat group."""
    values = np.zeros(len(scores), np.float64)
    mean, std = _mean_std(scores[members])
    if not _is_flat(std, scores[members]):
        values[members] = scores[members] - mean
    return values


def _mean_std(
    scores: NDArray[np.float64], weights: NDArray[np.float64] | None = None, around: float | None = None
) -> tuple[float, float]:
    """Mean, and root mean square distance from it or from `around`; (0, 0) of nothing, or where all weights are 0."""
    if not len(scores) or (weights is not None and not weights.any()):
        return 0.0, 0.0
    scale = max(1.0, _largest(scores))  # squares of very large rewards would overflow
    scaled = scores / scale
    if weights is None:
        return float(scaled.mean() * scale), float(scaled.std() * scale)
    mean = float(np.average(scaled, weights=weights)) if around is None else around / scale
    spread = math.sqrt(float(np.average((scaled - mean) ** 2, weights=weights)))
    return mean * scale, spread * scale


def _is_flat(std: float, scores: NDArray[np.float64]) -> bool:
    return std <= _FLAT * max(1.0, _largest(scores))


def _as_float32(values: NDArray[np.float64], scores: NDArray[np.float64]) -> NDArray[np.float32]:
    if np.abs(values).max(initial=0.0) > np.finfo(np.float32).max:
        raise ValueError(
            f"rewards {scores.tolist()}: an advantage does not fit in float32; scale the rewards down"
        )
    return values.astype(np.float32)


def _largest(scores: NDArray[np.float64]) -> float:
    return float(np.abs(scores).max(initial=0.0))
