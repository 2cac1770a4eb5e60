"""Log-probs and entropies of half-precision logits, a slice of positions at a time.

With a vocabulary of 150,000, each float32 copy of the logits of 8,000 positions takes 5 GB, and the plain formula makes
four: widened, log-softmax, its gradient, the gradient widened. Here the logits are kept as they came, and a slice
of them is widened when it is asked for: forward log p[target] and −Σ p log p, backward (1[target] − p) · g.
The arithmetic is float32 in both, as in the plain formula.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_SLICE_ELEMENTS = 1 << 27  # logits widened at a time


class LeanLogprobs(torch.autograd.Function):
    """`LeanLogprobs.apply(logits [n, V], targets [n], temperature)` → (log-probs [n], entropies [n]), float32.

    The entropies carry no gradient.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(logits, targets)
        ctx.temperature = temperature
        logprobs = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        entropy = torch.empty_like(logprobs)
        for part in _slices(logits):
            logp = torch.log_softmax(_tempered(logits[part], temperature), -1, dtype=torch.float32)
            logprobs[part] = logp.gather(1, targets[part, None])[:, 0]
            p = logp.exp()
            # a forbidden token has log p = −inf, and 0 · −inf would be NaN
            logp.clamp_(min=torch.finfo(torch.float32).min)
            entropy[part] = -torch.bmm(p[:, None], logp[..., None])[:, 0, 0]
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        logits, targets = ctx.saved_tensors
        scale = gradients[0] / ctx.temperature
        result = torch.empty_like(logits)
        for part in _slices(logits):
            p = torch.softmax(_tempered(logits[part], ctx.temperature), -1, dtype=torch.float32)
            p.mul_(-scale[part, None])
            chosen = targets[part, None]
            p.scatter_(1, chosen, p.gather(1, chosen) + scale[part, None])
            result[part] = p
        return result, None, None


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1.0 else logits.float() / temperature


def _slices(logits: Tensor) -> list[slice]:
    rows = max(1, _SLICE_ELEMENTS // logits.shape[1])
    return [slice(at, at + rows) for at in range(0, len(logits), rows)]
