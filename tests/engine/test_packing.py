"""Packed rows give the log-probs and gradients of padded ones, and rows are dealt evenly."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine.algorithms import lean, packing
from engine.algorithms.logprobs import flatten, micro_batches, packed_micro_batches, token_logprobs
from engine.trainer.torch_backend import TorchBackend
from engine.trainer.torch_settings import TorchSettings
from tests.engine.ranks_support import torch_as_it_was
from tests.engine.trainer_support import batch_of, folder_of, tiny_gpt2, tiny_qwen3

CPU = torch.device("cpu")


def of_micros(model, flat, micros):
    """(log-probs [N], entropies [N], gradient of a weighted sum of log-probs)."""
    logprobs, entropy = torch.empty(len(flat.targets)), torch.empty(len(flat.targets))
    model.zero_grad()
    for micro in micros:
        now = token_logprobs(model, micro, temperature=0.9)
        logprobs[micro.tokens], entropy[micro.tokens] = now.logprobs.detach(), now.entropy
        (now.logprobs * torch.from_numpy(flat.advantages[micro.tokens])).sum().backward()
    return logprobs, entropy, torch.cat([each.grad.reshape(-1) for each in model.parameters()])


def sliding_qwen3():
    """Its second layer sees the last three tokens alone."""
    config = Qwen3Config(
        **tiny_qwen3().config.to_dict()
        | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1, "layer_types": None}
    )
    torch.manual_seed(4)
    return Qwen3ForCausalLM(config)


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_qwen3, sliding_qwen3])
@pytest.mark.parametrize("capacity", [7, 30, 1000])
def test_packed_rows_give_the_log_probs_and_gradients_of_padded_ones(make, capacity: int):
    model = make().eval()
    flat = flatten(batch_of(24, seed=3, longest=11).samples)
    rows = np.arange(24)
    padded = of_micros(model, flat, micro_batches(flat, rows, 1, CPU))  # each row alone
    packing.use_in(model)
    packed = packed_micro_batches(flat, rows, capacity, CPU)
    assert sum(micro.ids.numel() for micro in packed) == flat.fed.sum()  # nothing is padding
    for theirs, ours in zip(padded, of_micros(model, flat, packed), strict=True):
        assert (theirs - ours).abs().max().item() <= 1e-5 * max(1.0, theirs.abs().max().item())


def test_one_sample_of_a_packed_forward_does_not_see_another():
    model = tiny_qwen3().eval()
    packing.use_in(model)
    batch = batch_of(6, seed=1, longest=5)
    other = batch.samples[2].payload._replace(response_ids=batch.samples[2].payload.response_ids[::-1].copy())
    changed = batch._replace(
        samples=[*batch.samples[:2], batch.samples[2]._replace(payload=other), *batch.samples[3:]]
    )
    of = []
    for each in (batch, changed):
        flat = flatten(each.samples)
        (micro,) = packed_micro_batches(flat, np.arange(6), 1000, CPU)
        of.append((flat.sample[micro.tokens], token_logprobs(model, micro).logprobs.detach().numpy()))
    same = of[0][0] != 2
    assert np.array_equal(of[0][1][same], of[1][1][same])
    assert not np.array_equal(of[0][1][~same], of[1][1][~same])


def test_attention_that_would_leave_something_out_is_refused():
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"asks for softcap, .*set trainer\.packing = false"):
        packing.attend(torch.nn.Linear(1, 1), q, q, q, None, softcap=30.0)


def test_the_torch_trainer_takes_the_same_step_packed(tmp_path):
    folder = folder_of(tiny_qwen3(), tmp_path)
    batch = batch_of(30, seed=5, longest=12)
    metrics = []
    with torch_as_it_was():
        for is_packed in (False, True):
            settings = TorchSettings(
                lr=0.01, threads=1, micro_batch_tokens=40, packing=is_packed, loss="tis", entropy_coef=0.01
            )
            metrics.append(TorchBackend(folder, settings).step(batch))
    for name in ("loss", "grad_norm", "entropy", "mean_abs_log_ratio"):
        assert metrics[1][name] == pytest.approx(metrics[0][name], rel=1e-5)
    fed = flatten(batch.samples).fed.sum()
    assert metrics[1]["n_padded_tokens"] == fed < metrics[0]["n_padded_tokens"]


# ---------------------------------------------------------------- dealing
@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), max_size=30), capacity=st.integers(1, 60), count=st.integers(0, 12)
)
def test_every_row_is_in_one_bin_and_none_is_too_full(lengths: list[int], capacity: int, count: int):
    found = packing.bins(np.array(lengths, np.int64), capacity, count)
    assert sorted(place for each in found for place in each.tolist()) == list(range(len(lengths)))
    for each in found:
        assert len(each) <= 1 or sum(lengths[place] for place in each) <= capacity
        assert each.tolist() == sorted(each.tolist())
    assert len(found) >= count
    again = packing.bins(np.array(lengths, np.int64), capacity, count)
    assert [each.tolist() for each in again] == [each.tolist() for each in found]


def test_bins_are_as_few_as_first_fit_finds_and_even():
    lengths = np.array([9, 7, 6, 5, 4, 4, 3, 2])
    found = packing.bins(lengths, 20)
    assert [int(lengths[each].sum()) for each in found] == [20, 20]
    assert [int(lengths[each].sum()) for each in packing.bins(lengths, 20, 4)] == [11, 10, 10, 9]


# ---------------------------------------------------------------- half precision
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("slice_elements", [1 << 27, 100])
def test_lean_log_probs_are_those_of_the_plain_formula(
    temperature: float, slice_elements: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lean, "_SLICE_ELEMENTS", slice_elements)
    torch.manual_seed(1)
    logits = (torch.randn(13, 41) * 4).bfloat16()
    logits[3, 5] = -torch.inf  # a forbidden token
    targets, weights = torch.randint(6, 41, (13,)), torch.randn(13)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    logprobs, entropy = lean.LeanLogprobs.apply(ours, targets, temperature)
    (logprobs * weights).sum().backward()
    logp = torch.log_softmax(theirs.float() / temperature, -1)
    (logp.gather(1, targets[:, None])[:, 0] * weights).sum().backward()
    assert torch.equal(logprobs, logp.gather(1, targets[:, None])[:, 0])
    p = logp.detach().double().exp()
    assert entropy.double() == pytest.approx((-torch.special.xlogy(p, p)).sum(-1), rel=1e-5)
    assert not entropy.requires_grad
    assert ours.grad is not None and theirs.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=2**-8, atol=1e-6)
