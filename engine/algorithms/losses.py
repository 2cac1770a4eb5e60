"""Policy losses, one small function each, over the trained tokens of a batch laid side by side.

With A the advantage of a token's sample, π the policy being trained, μ the behaviour policy that sampled the token
(its log-probs are in the log), and p the proximal policy, π as it was when the step began:

    ppo             −min(r·A, clip(r, 1−ε, 1+ε')·A)         r = π/μ
    recomputed_ppo  −min(u·A, clip(u, 1−ε, 1+ε')·A)         u = π/p: ignores μ, so only for samples of p itself
    decoupled_ppo   −w·min(u·A, clip(u, 1−ε, 1+ε')·A)       u = π/p, w = p/μ capped, no gradient
    tis             −w·A·log π                              w = π/μ capped, no gradient

Each returns a loss per token; the caller takes the mean over all trained tokens of the optimizer step, whatever
their sample (token mean: DAPO, arXiv 2503.14476, section 3.3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

# Ratios are taken of log-ratios within ±20: beyond, exp() overflows float32 in the branch of a min() that is not
# chosen, and its gradient becomes 0 · inf = NaN. e^20 is far outside of every clip range.
LOG_RATIO_CAP = 20.0


class LossSettings(msgspec.Struct, frozen=True, kw_only=True):
    eps_clip: float = 0.2  # ε
    eps_clip_high: float | None = None  # ε'; None: ε
    tis_clip: float = 2.0  # cap of importance weights
    tis_mode: Literal["truncate", "mask"] = "truncate"  # a weight over the cap becomes the cap, or 0


class TokenInputs(NamedTuple):
    """Float [n] each, over the n trained tokens of a batch. Only `logprobs` carries a gradient."""

    logprobs: Tensor  # log π
    behaviour: Tensor  # log μ
    proximal: Tensor  # log p
    advantages: Tensor


class TokenLoss(NamedTuple):
    loss: Tensor  # [n]
    is_clipped: Tensor  # bool [n]: the clip range or the cap took gradient away from this token


Loss = Callable[[TokenInputs, LossSettings], TokenLoss]


def ppo(inputs: TokenInputs, settings: LossSettings) -> TokenLoss:
    """PPO-clip against the behaviour policy: Schulman et al. 2017, arXiv 1707.06347, equation 7.

    A wider upper range is "clip-higher" (DAPO, arXiv 2503.14476, section 3.1). With stale samples this is a trust
    region around the policy that sampled them.
    """
    return _clipped(inputs.logprobs, inputs.behaviour, inputs.advantages, settings)


def recomputed_ppo(inputs: TokenInputs, settings: LossSettings) -> TokenLoss:
    """PPO-clip (equation 7 as above) against log-probs recomputed when the step began."""
    return _clipped(inputs.logprobs, inputs.proximal, inputs.advantages, settings)


def decoupled_ppo(inputs: TokenInputs, settings: LossSettings) -> TokenLoss:
    """PPO whose proximal policy is not the behaviour policy: Hilton et al. 2021, arXiv 2110.00641, section 3.

    As used for asynchronous training of language models by AReaL, arXiv 2505.24298, section 5.2. The behaviour
    weight p/μ is truncated (as in Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training") or masked at the cap, since its variance is unbounded.
    """
    weight, is_capped = _importance(inputs.proximal, inputs.behaviour, settings)
    loss, is_clipped = _clipped(inputs.logprobs, inputs.proximal, inputs.advantages, settings)
    return TokenLoss(weight * loss, is_clipped | is_capped)


def tis(inputs: TokenInputs, settings: LossSettings) -> TokenLoss:
    """REINFORCE with truncated importance sampling (Ionides 2008, "Truncated importance sampling").

    The gradient is min(π/μ, C)·A·∇log π, the policy term of V-trace (IMPALA, arXiv 1802.01561, section 4.2).
    """
    weight, is_capped = _importance(inputs.logprobs, inputs.behaviour, settings)
    return TokenLoss(-weight * inputs.advantages * inputs.logprobs, is_capped)


LOSSES: dict[str, Loss] = {
    "ppo": ppo,
    "recomputed_ppo": recomputed_ppo,
    "decoupled_ppo": decoupled_ppo,
    "tis": tis,
}


def ratio(logprobs: Tensor, other: Tensor) -> Tensor:
    """exp(logprobs − other), within e^±20."""
    return (logprobs - other).clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP).exp()


def _clipped(logprobs: Tensor, anchor: Tensor, advantages: Tensor, settings: LossSettings) -> TokenLoss:
    low = 1.0 - settings.eps_clip
    high = 1.0 + (settings.eps_clip if settings.eps_clip_high is None else settings.eps_clip_high)
    r = ratio(logprobs, anchor)
    gain = torch.minimum(r * advantages, r.clamp(low, high) * advantages)
    r = r.detach()
    return TokenLoss(-gain, ((advantages > 0) & (r > high)) | ((advantages < 0) & (r < low)))


def _importance(logprobs: Tensor, behaviour: Tensor, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """(weight [n] without gradient, whether it was over the cap)."""
    weight = ratio(logprobs.detach(), behaviour)
    is_capped = weight > settings.tis_clip
    if settings.tis_mode == "mask":
        return weight.masked_fill(is_capped, 0.0), is_capped
    return weight.clamp(max=settings.tis_clip), is_capped
