"""Log-probs and entropies of half-precision logits, a slice of positions at a time.

With a vocabulary of 150,000, each float32 copy of the logits of 8,000 positions takes 5 GB, and the plain formula makes
four: widened, log-softmax, its gradient, the gradient widened. Here the logits are kept as they came, and a slice
of them is widened when it is asked for: forward log p[target] and −Σ p log p, backward (1[target] − p) · g.
The arithmetic is float32 in both, as in the plain formula.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_SLICE_ELEMENTS = 1 << 27  # logits widened at a time


def lean_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(Log-probs [n], entropies [n]) in float32 of half-precision logits [n, V]; the entropies carry no gradient.

    By two kernels of Triton on a CUDA device where they can be compiled, else by those of torch.
    """
    function = _kernels() if logits.is_cuda else None
    return (function or LeanLogprobs).apply(logits, targets, temperature)


@functools.cache
def _kernels() -> type[torch.autograd.Function] | None:
    """Tried once in a process: Triton may be missing, or the C compiler that it needs."""
    try:
        from engine.algorithms.lean_triton import TritonLogprobs

        with torch.enable_grad():
            logits = torch.zeros((1, 16), dtype=torch.bfloat16, device="cuda", requires_grad=True)
            targets = torch.zeros(1, dtype=torch.int64, device="cuda")
            TritonLogprobs.apply(logits, targets, 1.0)[0].sum().backward()
        return TritonLogprobs
    except Exception as error:
        logger.warning("log-probs are computed without Triton's kernels, which is slower: %r", error)
        return None


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
