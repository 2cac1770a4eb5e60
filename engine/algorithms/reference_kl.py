"""Distance of the policy to a frozen reference policy, per token, as a term of the loss.

With d = log π_ref − log π at a sampled token (Schulman 2020, "Approximating KL divergence"):

               value           gradient of the term, on fresh samples      its mean
    k1         −d              ∇log π                                      0: no pull at all
    k2         d²/2            −d · ∇log π                                 ∇ KL(π ‖ ref), the reverse KL
    k3         e^d − 1 − d     (1 − e^d) · ∇log π                          ∇ KL(ref ‖ π), the forward KL
    low_var_kl k3 within ±10   the same, 0 where it is cut off

As values of KL(π ‖ ref) k1 and k3 are unbiased and k2 is not; as terms of a loss it is the other way round, since the
samples are not differentiated through. On stale samples none has its mean. `unbiased` weights each term by r = π/μ and
differentiates that too: then value and gradient of r·k1 and r·k3 are unbiased for KL(π ‖ ref), whatever the staleness
(DeepSeek-V3.2, arXiv 2512.02556, section 3.1).
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from engine.algorithms.ratios import LOG_RATIO_CAP, ratio

KlType = Literal["k1", "k2", "k3", "low_var_kl"]


def reference_kl(logprobs: Tensor, reference: Tensor, kind: KlType) -> Tensor:
    """[n], with a gradient through `logprobs`. Infinite where the reference finds a token impossible."""
    d = reference - logprobs
    if kind == "k1":
        return -d
    if kind == "k2":
        return d.square() / 2
    near = d.clamp(max=LOG_RATIO_CAP)  # both terms: −d alone would push away from the reference
    k3 = near.exp() - 1 - near
    return k3.clamp(-10.0, 10.0) if kind == "low_var_kl" else k3


def unbiased(kl: Tensor, logprobs: Tensor, behaviour: Tensor) -> Tensor:
    """The same [n] for tokens of another policy: weighted by π/μ, with its gradient."""
    return ratio(logprobs, behaviour) * kl
