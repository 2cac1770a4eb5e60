"""The KL term: values by hand, and what its gradient is on average, over every token of a small vocabulary."""

import math

import pytest
import torch

from engine.algorithms.reference_kl import KlType, reference_kl, unbiased

log = math.log
KINDS: tuple[KlType, ...] = ("k1", "k2", "k3", "low_var_kl")


def value(now: float, reference: float, kind: KlType) -> tuple[float, float]:
    logprobs = torch.tensor([now], dtype=torch.float64, requires_grad=True)
    kl = reference_kl(logprobs, torch.tensor([reference], dtype=torch.float64), kind)
    return kl.item(), torch.autograd.grad(kl.sum(), logprobs)[0].item()


def test_the_estimators_are_those_of_the_table():
    # π = 0.4, ref = 0.2: d = −log 2
    assert value(log(0.4), log(0.2), "k1") == (pytest.approx(log(2)), 1.0)
    assert value(log(0.4), log(0.2), "k2") == (pytest.approx(log(2) ** 2 / 2), pytest.approx(log(2)))
    for kind in ("k3", "low_var_kl"):
        assert value(log(0.4), log(0.2), kind) == (pytest.approx(0.5 - 1 + log(2)), pytest.approx(0.5))


def test_low_var_kl_is_cut_off_at_ten():
    assert value(-20.0, -15.0, "k3")[0] == pytest.approx(math.exp(5) - 6)
    assert value(-20.0, -15.0, "low_var_kl") == (10.0, 0.0)


def test_a_token_that_the_reference_finds_impossible_is_infinitely_far():
    for kind in ("k1", "k2", "k3"):
        assert value(-1.0, -math.inf, kind)[0] == math.inf
    assert math.isfinite(value(-100.0, 0.0, "k3")[0])


@pytest.fixture
def policies():
    generator = torch.Generator().manual_seed(5)
    logits, reference, behaviour = (
        torch.randn(7, dtype=torch.float64, generator=generator) for _ in range(3)
    )
    return logits.requires_grad_(), torch.log_softmax(reference, -1), torch.log_softmax(behaviour, -1)


def mean_gradient(term: torch.Tensor, sampled_by: torch.Tensor, logits: torch.Tensor) -> list[float]:
    mean = (sampled_by.detach().exp() * term).sum()
    return torch.autograd.grad(mean, logits, retain_graph=True)[0].tolist()


def test_on_fresh_samples_k1_pulls_nowhere_k2_by_the_reverse_and_k3_by_the_forward_kl(policies):
    logits, reference, _ = policies
    logp = torch.log_softmax(logits, -1)
    (reverse,) = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), logits, retain_graph=True)
    (forward,) = torch.autograd.grad((reference.exp() * (reference - logp)).sum(), logits, retain_graph=True)
    k1, k2, k3, _ = (mean_gradient(reference_kl(logp, reference, kind), logp, logits) for kind in KINDS)
    assert k1 == pytest.approx([0.0] * 7, abs=1e-12)
    assert k2 == pytest.approx(reverse.tolist())
    assert k3 == pytest.approx(forward.tolist()) and k3 != pytest.approx(reverse.tolist())


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_weighted_by_the_ratio_value_and_gradient_are_those_of_the_reverse_kl_on_stale_samples_too(
    policies, kind: KlType
):
    logits, reference, behaviour = policies
    logp = torch.log_softmax(logits, -1)
    kl = (logp.exp() * (logp - reference)).sum()
    (reverse,) = torch.autograd.grad(kl, logits, retain_graph=True)
    plain = reference_kl(logp, reference, kind)
    term = unbiased(plain, logp, behaviour)
    assert (behaviour.exp() * term).sum().item() == pytest.approx(kl.item())
    assert mean_gradient(term, behaviour, logits) == pytest.approx(reverse.tolist())
    assert mean_gradient(plain, behaviour, logits) != pytest.approx(reverse.tolist(), abs=1e-3)
