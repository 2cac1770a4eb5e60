"""Ratios of probabilities of sampled tokens, and what they make over a whole sequence."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Ratios are taken of log-ratios within ±20: beyond, exp() overflows float32 in the branch of a min() that is not
# chosen, and its gradient becomes 0 · inf = NaN. e^20 is far outside of every clip range.
LOG_RATIO_CAP = 20.0


def ratio(logprobs: Tensor, other: Tensor) -> Tensor:
    """exp(logprobs − other), within e^±20."""
    return bounded_exp(logprobs - other)


def bounded_exp(log_ratios: Tensor) -> Tensor:
    return log_ratios.clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP).exp()


class Sequences(NamedTuple):
    """Which trained token is of which sequence. The trained tokens of a sequence lie side by side, none elsewhere."""

    of_token: Tensor  # int64 [n], from 0 on, ascending
    count: int

    def total(self, values: Tensor) -> Tensor:
        """Float [n]: each token gets the sum over its sequence."""
        sums = values.new_zeros(self.count).index_add(0, self.of_token, values)
        return sums.index_select(0, self.of_token)

    def mean(self, values: Tensor) -> Tensor:
        """Float [n]: each token gets the mean over the trained tokens of its sequence."""
        return self.total(values) / self.total(torch.ones_like(values))

    def any(self, flags: Tensor) -> Tensor:
        """Bool [n]: whether it is true of any token of the sequence."""
        return self.total(flags.float()) > 0
