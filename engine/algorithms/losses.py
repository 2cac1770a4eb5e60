"""Policy losses, one small function each, over the trained tokens of a batch laid side by side.

With A the advantage of a token, π the policy being trained, μ the behaviour policy that sampled the token (its
log-probs are in the log), p the proximal policy (π as it was when the step began, or between μ and π), T a teacher, and
s the geometric mean of π/μ over the trained tokens of a sequence:

    ppo             −min(r·A, clip(r, 1−ε, 1+ε')·A)         r = π/μ
    recomputed_ppo  −min(u·A, clip(u, 1−ε, 1+ε')·A)         u = π/p: ignores μ, so only for samples of p itself
    decoupled_ppo   −w·min(u·A, clip(u, 1−ε, 1+ε')·A)       u = π/p, w = p/μ corrected, no gradient
    tis             −w·A·log π                              w = π/μ corrected, no gradient
    cispo           −w·A·log π                              w = min(π/μ, 1+ε'), no gradient
    gspo            −min(s·A, clip(s, 1−ε, 1+ε')·A)         for each token of the sequence
    m2po            −r·A                                    r = π/μ, less the tokens over the second-moment limit
    opd             −min(r·B, clip(r, 1−ε, 1+ε')·B)         r = π/μ, B = log T − log π
    sft             −log π

Corrections of the weights w, and sequences that are rejected as a whole: engine/algorithms/corrections.py.
Each gives a loss per token; what they are averaged over is said in engine/trainer/plan.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from engine.algorithms.corrections import Importance, Level, Mode, importance, off_policy, vetoed
from engine.algorithms.ratios import Sequences, ratio
from engine.algorithms.second_moment import outliers


class LossSettings(msgspec.Struct, frozen=True, kw_only=True):
    eps_clip: float = 0.2  # ε
    eps_clip_high: float | None = None  # ε'; None: ε
    eps_clip_c: float | None = None  # dual clip, above 1; None: off
    m2_threshold: float = 0.04  # m2po: largest mean of (log π/μ)²
    tis_clip: float = 2.0  # cap of importance weights
    tis_clip_low: float = 0.0  # their floor
    tis_mode: Mode = "truncate"  # a weight outside becomes the bound, or 0
    tis_level: Level = "token"
    tis_veto: float | None = None  # a sequence with a ratio below it is rejected; None: none is
    opsm_delta: float | None = None  # off-policy sequence masking; None: off


class TokenInputs(NamedTuple):
    """Float [n] each, over the n trained tokens of some whole sequences. Only `logprobs` carries a gradient."""

    logprobs: Tensor  # log π
    behaviour: Tensor  # log μ
    proximal: Tensor  # log p
    advantages: Tensor
    sequences: Sequences | None = None  # None: all tokens are of one sequence
    teacher: Tensor | None = None  # log T
    outliers: Tensor | None = None  # bool [n], for m2po, of a whole minibatch; None: these tokens are one


class TokenLoss(NamedTuple):
    loss: Tensor  # [n]
    is_clipped: Tensor  # bool [n]: the clip range, a cap or a mask took gradient away from this token
    is_masked: Tensor  # bool [n]: those that a mask took it all away from


Loss = Callable[[TokenInputs, LossSettings], TokenLoss]


def ppo(inputs: TokenInputs, settings: LossSettings) -> TokenLoss:
    """PPO-clip against the behaviour policy: Schulman et al. 2017, arXiv 1707.06347, equation 7.

    A wider upper range is "clip-higher" (DAPO, arXiv 2503.14476, section 3.1). With stale samples this is a trust
    region around the policy that sampled them.
    """
    return _clipped(ratio(inputs.logprobs, inputs.behaviour), inputs.advantages, settings)


def recomputed_ppo(inputs: TokenInputs, settings: LossSettings) -> TokenLoss:
    """PPO-clip (equation 7 as above) against log-probs recomputed when the step began."""
    return _clipped(ratio(inputs.logprobs, inputs.proximal), inputs.advantages, settings)


def decoupled_ppo(inputs: TokenInputs, settings: LossSettings) -> TokenLoss:
    """PPO whose proximal policy is not the behaviour policy: Hilton et al. 2021, arXiv 2110.00641, section 3.

    As used for asynchronous training of language models by AReaL, arXiv 2505.24298, section 5.2. The behaviour
    weight p/μ is truncated or masked (engine/algorithms/corrections.py), since its variance is unbounded.
    """
    correction = _importance(inputs.proximal, inputs, settings)
    loss, is_clipped, _ = recomputed_ppo(inputs, settings)
    return TokenLoss(correction.weight * loss, is_clipped | correction.is_capped, correction.is_masked)


def tis(inputs: TokenInputs, settings: LossSettings) -> TokenLoss:
    """REINFORCE with truncated importance sampling (Ionides 2008, "Truncated importance sampling").

    The gradient is min(π/μ, C)·A·∇log π, the policy term of V-trace (IMPALA, arXiv 1802.01561, section 4.2).
    """
    correction = _importance(inputs.logprobs, inputs, settings)
    loss = -correction.weight * inputs.advantages * inputs.logprobs
    return TokenLoss(loss, correction.is_capped, correction.is_masked)


def cispo(inputs: TokenInputs, settings: LossSettings) -> TokenLoss:
    """Clipped importance weights instead of clipped updates: MiniMax-M1, arXiv 2506.13585, equations 4 and 5.

    No token loses its gradient. As there, the weight has no lower bound; the upper one is 1 + ε'.
    """
    correction = importance(inputs.logprobs, inputs.behaviour, _sequences(inputs), high=_range(settings)[1])
    return TokenLoss(
        -correction.weight * inputs.advantages * inputs.logprobs, correction.is_capped, correction.is_masked
    )


def gspo(inputs: TokenInputs, settings: LossSettings) -> TokenLoss:
    """Sequence-level ratio and clip: GSPO, arXiv 2507.18071, equations 5 to 7.

    The ratio is the geometric mean over the sequence, (Π π/μ)^(1/length), so one range fits all lengths: 3e-4 and 4e-4
    in the paper for thousands of tokens, 0.2 and 0.28 for a few. The paper averages over sequences
    (`loss_aggregation = "sample"`).
    """
    drift = _sequences(inputs).mean(inputs.logprobs - inputs.behaviour)
    return _clipped(ratio(drift, torch.zeros_like(drift)), inputs.advantages, settings)


def m2po(inputs: TokenInputs, settings: LossSettings) -> TokenLoss:
    """Importance-weighted policy gradient under a limit on the second moment: M2PO, arXiv 2510.01161, section 4."""
    masked = inputs.outliers
    if masked is None:
        log_ratios = inputs.logprobs - inputs.behaviour
        masked = outliers(log_ratios, inputs.advantages, settings.m2_threshold)
    gain = ratio(inputs.logprobs, inputs.behaviour) * inputs.advantages
    return TokenLoss(-gain.masked_fill(masked, 0.0), masked, masked)


def opd(inputs: TokenInputs, settings: LossSettings) -> TokenLoss:
    """On-policy distillation: towards KL(π ‖ T) = 0, the reverse KL, on the policy's own samples.

    Agarwal et al. 2023, "On-policy distillation of language models" (GKD), arXiv 2306.13649, with one sampled token
    for the expectation: the gradient is E[(log π − log T)·∇log π], a policy gradient whose advantage is log T − log π
    of the token. On stale samples it is clipped as in PPO. Rewards play no part.
    """
    if inputs.teacher is None:
        raise ValueError("the batch has no teacher log-probs")
    gaps = inputs.teacher - inputs.logprobs.detach()
    return _clipped(ratio(inputs.logprobs, inputs.behaviour), gaps, settings)


def sft(inputs: TokenInputs, settings: LossSettings) -> TokenLoss:
    """Negative log-likelihood of the trained tokens. Neither rewards nor the policy that sampled play a part."""
    none = torch.zeros_like(inputs.logprobs, dtype=torch.bool)
    return TokenLoss(-inputs.logprobs, none, none)


LOSSES: dict[str, Loss] = {
    "ppo": ppo,
    "recomputed_ppo": recomputed_ppo,
    "decoupled_ppo": decoupled_ppo,
    "tis": tis,
    "cispo": cispo,
    "gspo": gspo,
    "m2po": m2po,
    "opd": opd,
    "sft": sft,
}


def token_loss(name: str, inputs: TokenInputs, settings: LossSettings) -> TokenLoss:
    """The loss of that name, less the sequences that the settings reject."""
    result = LOSSES[name](inputs, settings)
    for rejected in _rejected(name, inputs, settings):
        result = TokenLoss(
            result.loss.masked_fill(rejected, 0.0), result.is_clipped | rejected, result.is_masked | rejected
        )
    return result


def _rejected(name: str, inputs: TokenInputs, settings: LossSettings) -> list[Tensor]:
    """Bool [n] each."""
    found = []
    if settings.tis_veto is not None:
        target = inputs.proximal if name == "decoupled_ppo" else inputs.logprobs
        found.append(vetoed(target, inputs.behaviour, _sequences(inputs), settings.tis_veto))
    if settings.opsm_delta is not None:
        found.append(
            off_policy(
                inputs.logprobs, inputs.behaviour, inputs.advantages, _sequences(inputs), settings.opsm_delta
            )
        )
    return found


def _clipped(r: Tensor, advantages: Tensor, settings: LossSettings) -> TokenLoss:
    """−min(r·A, clip(r)·A). With dual clip no more than c·|A| where A < 0: Ye et al. 2019, arXiv 1912.09729, eq. 5."""
    low, high = _range(settings)
    gain = torch.minimum(r * advantages, r.clamp(low, high) * advantages)
    is_bad = advantages < 0
    fixed = r.detach()
    is_clipped = ((advantages > 0) & (fixed > high)) | (is_bad & (fixed < low))
    if settings.eps_clip_c is not None:
        gain = torch.where(is_bad, torch.maximum(gain, settings.eps_clip_c * advantages), gain)
        is_clipped |= is_bad & (fixed > settings.eps_clip_c)
    return TokenLoss(-gain, is_clipped, torch.zeros_like(is_clipped))


def _range(settings: LossSettings) -> tuple[float, float]:
    above = settings.eps_clip if settings.eps_clip_high is None else settings.eps_clip_high
    return 1.0 - settings.eps_clip, 1.0 + above


def _importance(target: Tensor, inputs: TokenInputs, settings: LossSettings) -> Importance:
    return importance(
        target,
        inputs.behaviour,
        _sequences(inputs),
        level=settings.tis_level,
        mode=settings.tis_mode,
        low=settings.tis_clip_low,
        high=settings.tis_clip,
    )


def _sequences(inputs: TokenInputs) -> Sequences:
    if inputs.sequences is not None:
        return inputs.sequences
    n = len(inputs.logprobs)
    return Sequences(torch.zeros(n, dtype=torch.int64, device=inputs.logprobs.device), min(n, 1))
