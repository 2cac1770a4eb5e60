"""Importance-sampling corrections: a weight and a mask for each token, from the policy that sampled it and another.

With μ the behaviour policy (recorded) and p the policy whose expectation is wanted (the proximal or the current one):

    level       token      ρ_t = p(t)/μ(t)                       biased where the states differ, small variance
                sequence   ρ = Π_t p(t)/μ(t)                     unbiased, its variance grows with the length
                geometric  ρ = (Π_t p(t)/μ(t))^(1/length)        the drift per token of a sequence
    mode        truncate   min(max(ρ, low), high)                TIS: Ionides 2008, "Truncated importance sampling"
                mask       ρ inside [low, high], 0 outside       token: IcePop; sequence, geometric: MIS

TIS between an engine and its trainer: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
training". IcePop: Ling team 2025, "Small leak can sink a great ship" (double-sided masking). MIS: Liu and Li 2025,
"When speed kills stability". A sequence-level weight is that of every token of the sequence.

Besides, whole sequences may be rejected: for one token that p finds next to impossible (a veto), or for having a
negative advantage and a large drift (OPSM: DeepSeek-V3.2, arXiv 2512.02556, section 3.1).

None carries a gradient. A token that is masked counts where the loss is averaged, as one that adds nothing: how many
tokens a minibatch has does not depend on the weights.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from torch import Tensor

from engine.algorithms.ratios import Sequences, bounded_exp

Level = Literal["token", "sequence", "geometric"]
Mode = Literal["truncate", "mask"]


class Importance(NamedTuple):
    weight: Tensor  # [n]
    is_capped: Tensor  # bool [n]: it was outside of the bounds
    is_masked: Tensor  # bool [n]: and is 0 therefore


def importance(
    target: Tensor,
    behaviour: Tensor,
    sequences: Sequences,
    *,
    level: Level = "token",
    mode: Mode = "truncate",
    low: float = 0.0,
    high: float,
) -> Importance:
    """Weights of tokens sampled by `behaviour` for an expectation under `target`; log-probs [n] of both."""
    log_ratios = target.detach() - behaviour
    if level == "sequence":
        log_ratios = sequences.total(log_ratios)
    elif level == "geometric":
        log_ratios = sequences.mean(log_ratios)
    weight = bounded_exp(log_ratios)
    is_capped = (weight > high) | (weight < low)
    if mode == "mask":
        return Importance(weight.masked_fill(is_capped, 0.0), is_capped, is_capped)
    return Importance(weight.clamp(low, high), is_capped, is_capped.new_zeros(is_capped.shape))


def vetoed(target: Tensor, behaviour: Tensor, sequences: Sequences, least: float) -> Tensor:
    """Bool [n]: tokens of sequences in which the ratio target/behaviour of any token is below `least`.

    A token that was sampled and is next to impossible now says that something broke, not that the policy learned.
    """
    return sequences.any(target.detach() - behaviour < math.log(least))


def off_policy(
    logprobs: Tensor, behaviour: Tensor, advantages: Tensor, sequences: Sequences, delta: float
) -> Tensor:
    """Bool [n]: tokens with a negative advantage, of sequences in which the mean of log μ − log π is over `delta`.

    What the policy does no longer, it need not be pushed away from: such pushes are far off-policy and unbounded.
    """
    return (sequences.mean(behaviour - logprobs.detach()) > delta) & (advantages < 0)
