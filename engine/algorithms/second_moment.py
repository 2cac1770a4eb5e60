"""Which tokens M2PO leaves out: the ones that move the second moment of the log-ratios over its limit.

Zheng, Zhao and Chen 2025, "Prosperity before collapse: how far can off-policy RL reach with stale data on LLMs?", arXiv
2510.01161, section 4: the largest (log π/μ)² of the tokens that the update would carry further off are masked until
the mean of the remaining ones is at most τ (0.04). Few tokens do the harm, so few are lost.

The mask is of a whole minibatch, however it is cut into forwards and spread over ranks. Ranks agree on it through sums
alone: a float32 above 0 grows with the number that its 32 bits spell, so the limit is found digit by digit, 8 bits at
a time, from a table of counts and sums that all ranks add up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Total = Callable[[Sequence[float]], list[float]]  # sums over the ranks, the same on all of them

_DIGITS = 256


def squares_of_harmful(log_ratios: Tensor, advantages: Tensor) -> Tensor:
    """Float32 [n]: (log π/μ)² where a step on the token would move π further from μ, −1 elsewhere."""
    log_ratios = log_ratios.detach().float()
    is_harmful = ((advantages > 0) & (log_ratios > 0)) | ((advantages < 0) & (log_ratios < 0))
    return torch.where(is_harmful | log_ratios.isnan(), log_ratios.square(), -1.0)


def least_masked(squares: NDArray[np.float32], limit: float, total: Total = list) -> float:
    """The smallest square that is masked, so that the mean of those below is at most `limit`; infinite if none is.

    `squares` are this rank's, of harmful tokens (others, below 0, are passed over). Equal ones are masked together.

    >>> least_masked(np.array([0.01, 0.04, 0.09, 0.25], np.float32), 0.05)
    0.25
    """
    squares = squares[~(squares < 0)]
    bits = squares.view(np.uint32)
    # digits found so far; count and sum of the squares that are kept for sure
    prefix, below, sum_below = 0, 0.0, 0.0
    for place, shift in enumerate((24, 16, 8, 0)):
        digit = (bits >> np.uint32(shift)) & np.uint32(_DIGITS - 1)
        counts = np.bincount(digit, minlength=_DIGITS)
        sums = np.bincount(digit, squares.astype(np.float64), _DIGITS)
        table = np.array(total([*counts.tolist(), *sums.tolist()])).reshape(2, _DIGITS)
        kept, sum_kept = below + np.cumsum(table[0]), sum_below + np.cumsum(table[1])
        over = np.flatnonzero(sum_kept > limit * kept)
        if place == 0 and not len(over):
            return float("inf")
        # later digits add up what an earlier one found over the limit; by rounding it may now seem to be just at it
        first = int(over[0]) if len(over) else int(np.flatnonzero(table[0])[-1])
        below, sum_below = float(kept[first] - table[0, first]), float(sum_kept[first] - table[1, first])
        prefix = (prefix << 8) | first
        inside = digit == first
        bits, squares = bits[inside], squares[inside]
    return float(np.array([prefix], np.uint32).view(np.float32)[0])


def outliers(log_ratios: Tensor, advantages: Tensor, limit: float, total: Total = list) -> Tensor:
    """Bool [n]: the tokens of a minibatch that are masked; log-ratios log π/μ and advantages [n] of this rank's."""
    squares = squares_of_harmful(log_ratios, advantages)
    return squares >= least_masked(squares.cpu().numpy(), limit, total)
