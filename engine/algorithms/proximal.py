"""A proximal policy without a forward of its own."""

from __future__ import annotations

from torch import Tensor


def interpolated(logprobs: Tensor, behaviour: Tensor, ages: Tensor) -> Tensor:
    """Log-probs [n] between the behaviour policy and the current one, by the token's age in versions.

        log p = log π + (log μ − log π) / max(age, 1)

    A-3PO (arXiv 2512.06547; as AReaL documents it, `prox_approx.md`): the proximal policy is one version behind the
    current one, which lies `age` versions from the one that sampled, and log-probs move evenly with the versions. A
    token of age 0 or 1 has μ itself, which makes it plain PPO-clip. No gradient.
    """
    now = logprobs.detach()
    return now + (behaviour - now) / ages.clamp(min=1)
