"""RMSNorm in one kernel, where a Hugging Face model writes it out in eight.

    x / sqrt(mean(x²) + ε) · weight         Zhang & Sennrich 2019, arXiv 1910.07467, equation 4

In half precision on CUDA: widening, squaring and rounding again moved more bytes than all else in a training step of
0.6 B parameters, and kept several copies of the activations for the backward. torch's own `rms_norm` computes in
float32 as well, and rounds once, as the kernels of SGLang and vLLM do; a model that writes it out rounds before the
weight, too. Elsewhere, and in float32, a model's own norms stay as they are.
"""

from __future__ import annotations

import functools
import inspect
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine import devices

_HALF = (torch.bfloat16, torch.float16)


def use_in(model: Any, device: object) -> int:
    """Let this model's norms be computed by torch's kernel, on devices that have it; returns how many will be.

    A model that is pickled and read again has its own norms.
    """
    if not devices.named(device).has_fused_rms_norm or not _has_kernel():
        return 0
    count = 0
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and _is_the_formula(type(module)):
            module.forward = MethodType(forward, module)
            count += 1
    return count


def _has_kernel() -> bool:
    """From torch 2.9 on; before that its rms_norm is its parts, too."""
    return hasattr(torch.ops.aten, "_fused_rms_norm_backward")


def forward(self: Any, hidden_states: Tensor) -> Tensor:
    """In place of a module's own `forward`; of that name, since a bound method is pickled by it."""
    weight = self.weight
    if hidden_states.dtype in _HALF and weight.dtype == hidden_states.dtype:
        return functional.rms_norm(hidden_states, weight.shape, weight, _epsilon(self))
    return type(self).forward(self, hidden_states)


def _epsilon(module: Any) -> float:
    return module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps


@functools.cache
def _is_the_formula(kind: type) -> bool:
    """Tried on a few numbers: some models add 1 to the weight, have none, or do more under this name."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(3, 8, generator=generator), torch.randn(8, generator=generator)
    epsilon = 0.25  # large enough to be seen
    own: Any = kind
    if len(inspect.signature(own.forward).parameters) != 2:
        return False  # a residual to add, say
    try:
        result = own.forward(SimpleNamespace(weight=weight, variance_epsilon=epsilon, eps=epsilon), hidden)
    except Exception:  # it asks for more than a weight and an epsilon
        return False
    return isinstance(result, Tensor) and torch.allclose(
        result, functional.rms_norm(hidden, weight.shape, weight, epsilon), rtol=1e-5, atol=1e-6
    )
