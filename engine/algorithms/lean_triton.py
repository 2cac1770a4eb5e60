"""Log-probs and entropies of half-precision logits in one pass over them, and their gradient in another (Triton, CUDA).

The plain kernels of engine/algorithms/lean.py write float32 tables of all logits five times over; with a vocabulary of
150,000 that is some 7 % of a training step of a 0.6B model. Here a row of logits is read once, block by block, with the
running maximum and sums of online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867):

    m = max x,  s = Σ exp(x − m),  u = Σ (x − m) exp(x − m)       x = logits / temperature
    log p[target] = x[target] − m − log s,   entropy = log s − u / s,   gradient (1[target] − p) · g / temperature

The arithmetic is float32 and every sum has one fixed order, so that a step gives the same bits again.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.devices.launching import current

_BLOCK = 8192  # logits of a row at a time
_WARPS = 16


@triton.jit
def _forward(
    logits, stride, targets, logprobs, entropies, normalizers, temperature, width, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    m = -1.0e30  # below every logit but −inf, and finite: differences of it never are NaN
    s = 0.0
    u = 0.0
    for start in range(0, width, BLOCK):
        places = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + places, mask=places < width, other=float("-inf")).to(tl.float32)
        x = x / temperature
        higher = tl.maximum(m, tl.max(x, axis=0))
        shrunk = tl.exp(m - higher)
        e = tl.exp(x - higher)
        u = shrunk * (u + (m - higher) * s) + tl.sum(tl.where(e > 0, (x - higher) * e, 0.0), axis=0)
        s = shrunk * s + tl.sum(e, axis=0)
        m = higher
    normalizer = m + tl.log(s)
    target = tl.load(targets + row)
    chosen = tl.load(logits + row * stride + target).to(tl.float32) / temperature
    tl.store(logprobs + row, chosen - normalizer)
    tl.store(entropies + row, tl.log(s) - u / s)
    tl.store(normalizers + row, normalizer)


@triton.jit
def _backward(
    logits, stride, targets, normalizers, scales, gradient, temperature, width, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target, scale, normalizer = tl.load(targets + row), tl.load(scales + row), tl.load(normalizers + row)
    for start in range(0, width, BLOCK):
        places = start + tl.arange(0, BLOCK)
        inside = places < width
        x = tl.load(logits + row * stride + places, mask=inside, other=float("-inf")).to(tl.float32)
        p = tl.exp(x / temperature - normalizer)
        found = (tl.where(places == target, 1.0, 0.0) - p) * scale
        tl.store(gradient + row * width + places, found.to(gradient.dtype.element_ty), mask=inside)


class TritonLogprobs(torch.autograd.Function):
    """As LeanLogprobs: logits [n, V] of a half precision, targets [n] → (log-probs [n], entropies [n]), float32."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logits = logits if logits.stride(-1) == 1 else logits.contiguous()
        logprobs = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        entropy, normalizers = torch.empty_like(logprobs), torch.empty_like(logprobs)
        if len(logits):
            with current(logits.device):
                launch: Any = _forward[(len(logits),)]
                launch(
                    logits, logits.stride(0), targets, logprobs, entropy, normalizers, float(temperature),
                    logits.shape[1], BLOCK=_BLOCK, num_warps=_WARPS,
                )  # fmt: skip
        ctx.save_for_backward(logits, targets, normalizers)
        ctx.temperature = float(temperature)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        logits, targets, normalizers = ctx.saved_tensors
        scales = (gradients[0] / ctx.temperature).contiguous()
        result = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        if len(logits):
            with current(logits.device):
                launch: Any = _backward[(len(logits),)]
                launch(
                    logits, logits.stride(0), targets, normalizers, scales, result, ctx.temperature,
                    logits.shape[1], BLOCK=_BLOCK, num_warps=_WARPS,
                )  # fmt: skip
        return result, None, None
