"""Fused norms: the formula of the models that have it, and no other model's."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from engine.algorithms import norms
from engine.devices.cpu import Cpu
from tests.engine.trainer_support import tiny_gpt2, tiny_qwen3


@pytest.fixture
def fused_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's rms_norm on a CPU is no single kernel, but the same function."""
    monkeypatch.setattr(Cpu, "has_fused_rms_norm", True)


def random(kind: type[nn.Module], width: int = 64) -> Any:
    module: Any = kind(width)
    with torch.no_grad():
        module.weight.copy_(torch.randn(width))
    return module


@pytest.mark.parametrize("kind", [LlamaRMSNorm, MistralRMSNorm, Qwen3RMSNorm])
def test_a_fused_norm_is_as_near_to_the_formula_in_float64_as_the_models_own(
    kind: type[nn.Module], fused_here: None
):
    torch.manual_seed(1)
    own, hidden = random(kind), torch.randn(200, 64).bfloat16()
    exact = copy.deepcopy(own).double()
    x = hidden.double().requires_grad_()
    right = exact.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + exact.variance_epsilon)
    weights = torch.randn(200, 64)
    (right * weights).sum().backward()
    own, errors = own.bfloat16(), []
    for fused in (False, True):
        module = copy.deepcopy(own)
        assert norms.use_in(nn.Sequential(module), "cpu") == 1 if fused else True
        given = hidden.clone().requires_grad_()
        result = module(given)
        assert result.dtype == torch.bfloat16
        (result.float() * weights).sum().backward()
        found = (result, given.grad, module.weight.grad)
        errors.append([_apart(a, b) for a, b in zip(found, (right, x.grad, exact.weight.grad), strict=True)])
    for written_out, fused in zip(*errors, strict=True):
        assert fused <= 1.2 * written_out < 0.02


def _apart(a: Any, b: Any) -> float:
    return float((a.detach().double() - b.detach()).norm() / b.detach().norm())


def test_float32_and_weights_of_another_type_keep_a_models_own_arithmetic(fused_here: None):
    own, hidden = random(Qwen3RMSNorm), torch.randn(5, 64)
    module = copy.deepcopy(own)
    norms.use_in(nn.Sequential(module), "cpu")
    assert torch.equal(module(hidden), own(hidden))
    assert torch.equal(module(hidden.bfloat16()), own(hidden.bfloat16()))  # as under autocast
    assert module(hidden.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize(
    "kind", [GemmaRMSNorm, T5LayerNorm], ids=["1 is added to the weight", "another name"]
)
def test_norms_of_another_formula_or_name_stay_as_they_are(kind: type[nn.Module], fused_here: None):
    assert norms.use_in(nn.Sequential(random(kind)), "cpu") == 0


def test_all_norms_of_a_model_and_of_its_copy_use_their_own_weights(fused_here: None):
    model = tiny_qwen3()
    assert norms.use_in(model, "cpu") == 4 * 2 + 1  # two layers of four, and the last one
    assert norms.use_in(tiny_gpt2(), "cpu") == 0
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.norm.weight.zero_()
    hidden = torch.randn(2, other.model.norm.weight.numel()).bfloat16()
    assert not other.bfloat16().model.norm(hidden).any() and model.bfloat16().model.norm(hidden).any()


class AddingRMSNorm(Qwen3RMSNorm):
    """By its formula while nothing is added."""

    def forward(self, hidden_states: Any, residual: Any = None) -> Any:
        return super().forward(hidden_states if residual is None else hidden_states + residual)


def test_a_norm_that_takes_more_than_one_argument_keeps_them(fused_here: None):
    module = random(AddingRMSNorm).bfloat16()
    norms.use_in(nn.Sequential(module), "cpu")
    assert module(torch.ones(2, 64).bfloat16(), residual=torch.ones(2, 64).bfloat16()).shape == (2, 64)


def test_a_model_that_was_pickled_has_its_own_norms(fused_here: None):
    model = nn.Sequential(random(Qwen3RMSNorm).bfloat16())
    own = copy.deepcopy(model)
    assert norms.use_in(model, "cpu") == 1
    again, hidden = pickle.loads(pickle.dumps(model)), torch.randn(9, 64).bfloat16()
    assert torch.equal(again(hidden), own(hidden))


@pytest.mark.parametrize("has_kernel", [True, False], ids=["another device", "torch before 2.9"])
def test_a_device_without_the_kernel_is_left_alone(monkeypatch: pytest.MonkeyPatch, has_kernel: bool):
    monkeypatch.setattr(Cpu, "has_fused_rms_norm", not has_kernel)
    monkeypatch.setattr(norms, "_has_kernel", lambda: has_kernel)
    model = tiny_qwen3()
    assert norms.use_in(model, "cpu") == norms.use_in(model, "musa") == 0
    assert "forward" not in vars(model.model.norm)
