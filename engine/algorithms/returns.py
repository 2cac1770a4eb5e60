"""Advantages token by token: KL in the reward, discounted returns, generalised advantage estimation. Numpy alone.

    rewards of samples ──► rewards of tokens ──┬─► discounted returns ──► normalised            (REINFORCE++)
    KL to the reference ─┘                     └─► GAE with the critic's values ──► (normalised) (PPO)

The steps of an episode are its TRAINED tokens, in their order. Token t is an action in the state before it: all that
the model was fed when it predicted t. What the environment says in between (a tool's answer), and tokens masked for
their age, are no actions: the state after token t is the state before the next trained token, environment's words
included, and it takes one step of γ and λ however many words there were. So a chain never breaks, and never decays
over words that the policy did not say. The sample's reward comes with its last trained token; after that nothing
more is expected (value 0), also where a response ended at its length limit.

Arrays are [N], N trained tokens side by side as in a FlatBatch; those of sample s are token_starts[s] … [s+1].
Sums are in float64. A sample is whole on one rank, so only `normalized` needs the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

KlType = Literal["k1", "k2", "k3", "low_var_kl"]
Sum = Callable[[Sequence[float]], list[float]]  # over the ranks
Floats = NDArray[np.floating]

_FLAT = 1e-6  # as in consumers/advantages.py
_LOW_VAR_CAP = 10.0


class Gae(NamedTuple):
    advantages: NDArray[np.float64]  # [N]
    returns: NDArray[np.float64]  # [N], what a critic learns to say


def kl_terms(log_ratio: Floats, kind: KlType) -> NDArray[np.float64]:
    """Estimates [N] of KL(π ‖ reference) from samples of π; log_ratio = log π − log reference.

    Schulman 2020, "Approximating KL divergence": with lr the log-ratio, k1 = lr, k2 = lr² / 2, k3 = e^−lr − 1 + lr.
    low_var_kl is k3 within ±10.
    """
    lr = log_ratio.astype(np.float64)
    if kind == "k1":
        return lr
    if kind == "k2":
        return lr * lr / 2
    k3 = np.expm1(np.minimum(-lr, 300.0)) + lr
    return np.clip(k3, -_LOW_VAR_CAP, _LOW_VAR_CAP) if kind == "low_var_kl" else k3


def token_rewards(
    rewards: Floats, token_starts: NDArray[np.int64], penalties: Floats | None = None
) -> NDArray[np.float64]:
    """The reward of a sample on its last trained token, less each token's penalty.

    Args:
        rewards: [N] of each token's sample.
        penalties: [N], as in kl_coef · KL: REINFORCE++, arXiv 2501.03262; InstructGPT, arXiv 2203.02155, equation 2.
    """
    found = np.zeros(len(rewards)) if penalties is None else -penalties.astype(np.float64)
    last = token_starts[1:][np.diff(token_starts) > 0] - 1
    found[last] += rewards[last]
    return found


def discounted_returns(rewards: Floats, token_starts: NDArray[np.int64], gamma: float) -> NDArray[np.float64]:
    """G_t = r_t + γ · G_{t+1} within each sample: Sutton and Barto, "Reinforcement Learning", 2nd ed., equation 3.9."""
    returns = rewards.astype(np.float64)
    for now, has_next in _backwards(token_starts):
        if has_next:
            returns[now] += gamma * returns[now + 1]
    return returns


def gae(
    rewards: Floats, values: Floats, token_starts: NDArray[np.int64], *, gamma: float, lambd: float
) -> Gae:
    """Generalised advantage estimation: Schulman et al. 2016, arXiv 1506.02438, equation 16.

        δ_t = r_t + γ V_{t+1} − V_t        A_t = δ_t + γλ A_{t+1}        return_t = A_t + V_t

    Args:
        values: [N] the critic's V of the state before each token; after the last one it is 0.
    """
    values = values.astype(np.float64)
    advantages = rewards - values
    for now, has_next in _backwards(token_starts):
        if has_next:
            advantages[now] += gamma * (values[now + 1] + lambd * advantages[now + 1])
    return Gae(advantages, advantages + values)


def normalized(values: Floats, sum_over_ranks: Sum = list) -> NDArray[np.float64]:
    """(x − mean) / std over the trained tokens of all ranks; 0 where they are equal up to rounding.

    Twice over the ranks: the spread is taken around the mean, not as a difference of large sums.
    """
    x = values.astype(np.float64)
    count, total = sum_over_ranks([float(len(x)), float(x.sum())])
    if not count:
        return x
    mean = total / count
    (squares,) = sum_over_ranks([float(((x - mean) ** 2).sum())])
    std = math.sqrt(squares / count)
    if std <= _FLAT * max(1.0, abs(mean)):
        return np.zeros_like(x)
    return (x - mean) / std


def _backwards(token_starts: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], bool]]:
    """Places of the last token of every sample, then of the one before it, …; and whether a token follows them."""
    lengths, ends = np.diff(token_starts), token_starts[1:]
    rows = np.argsort(-lengths, kind="stable")
    lengths, ends = lengths[rows], ends[rows]
    for back in range(1, int(lengths.max(initial=0)) + 1):
        yield ends[: np.searchsorted(-lengths, -back, side="right")] - back, back > 1
