"""Losses, log-probs and telemetry: values worked out by hand, gradients against plain float64 arithmetic."""

import math
from typing import Literal

import numpy as np
import pytest
import torch

from consumers.telemetry import SUMS, summarize, trajectory_sums
from engine.algorithms.logprobs import FORWARD_OVERHEAD_TOKENS, flatten, micro_batches, token_logprobs
from engine.algorithms.losses import LOSSES, LossSettings, TokenInputs
from engine.interfaces import TrainSample
from streams.trajectory import Payload
from tests.engine.trainer_support import batch_of, in_float64, reference_logprobs, tiny_gpt2, tiny_qwen3

CPU = torch.device("cpu")


def evaluate(
    name: str,
    now: float,
    behaviour: float,
    proximal: float,
    advantage: float,
    settings: LossSettings | None = None,
) -> tuple[float, float, bool]:
    """(loss, its derivative by log π, is_clipped) of one token."""
    logprobs = torch.tensor([now], dtype=torch.float64, requires_grad=True)
    others = [torch.tensor([value], dtype=torch.float64) for value in (behaviour, proximal, advantage)]
    result = LOSSES[name](TokenInputs(logprobs, *others), settings or LossSettings())
    (gradient,) = torch.autograd.grad(result.loss.sum(), logprobs)
    return result.loss.item(), gradient.item(), bool(result.is_clipped)


log = math.log


# ---------------------------------------------------------------- losses by hand
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "is_clipped"),
    [
        (1.1, 2.0, -2.2, -2.2, False),
        (1.5, 2.0, -2.4, 0.0, True),  # good and already much likelier: no further
        (0.5, 2.0, -1.0, -1.0, False),  # good but less likely now: full pull back
        (0.5, -2.0, 1.6, 0.0, True),
        (1.5, -2.0, 3.0, 3.0, False),
        (1.5, 0.0, 0.0, 0.0, False),
    ],
)
def test_ppo_clips_only_where_the_policy_has_moved_far_enough_already(
    ratio, advantage, loss, gradient, is_clipped
):
    want = (pytest.approx(loss), pytest.approx(gradient), is_clipped)
    assert evaluate("ppo", log(0.2 * ratio), log(0.2), -9.0, advantage) == want
    assert evaluate("recomputed_ppo", log(0.2 * ratio), -9.0, log(0.2), advantage) == want


def test_the_upper_clip_range_can_be_wider():
    settings = LossSettings(eps_clip=0.1, eps_clip_high=0.6)
    assert evaluate("ppo", log(0.3), log(0.2), 0, 1.0, settings) == (
        pytest.approx(-1.5),
        pytest.approx(-1.5),
        False,
    )
    assert evaluate("ppo", log(0.34), log(0.2), 0, 1.0, settings) == (pytest.approx(-1.6), 0.0, True)
    assert evaluate("ppo", log(0.17), log(0.2), 0, -1.0, settings) == (pytest.approx(0.9), 0.0, True)


def test_decoupled_ppo_weighs_by_proximal_over_behaviour():
    # w = 0.3 / 0.2 = 1.5, u = 0.33 / 0.3 = 1.1, A = 2
    assert evaluate("decoupled_ppo", log(0.33), log(0.2), log(0.3), 2.0) == (
        pytest.approx(-3.3),
        pytest.approx(-3.3),
        False,
    )
    # u = 1.5 is clipped to 1.2
    assert evaluate("decoupled_ppo", log(0.45), log(0.2), log(0.3), 2.0) == (pytest.approx(-3.6), 0.0, True)


def test_a_behaviour_weight_over_the_cap_is_truncated_or_masked():
    arguments = ("decoupled_ppo", log(0.66), log(0.1), log(0.6), 1.0)  # w = 6, u = 1.1
    assert evaluate(*arguments) == (pytest.approx(-2.2), pytest.approx(-2.2), True)
    masked = LossSettings(tis_clip=5.0, tis_mode="mask")
    assert evaluate(*arguments, masked) == (0.0, 0.0, True)
    assert evaluate(*arguments, LossSettings(tis_clip=7.0, tis_mode="mask"))[0] == pytest.approx(-6.6)


def test_tis_is_reinforce_with_a_capped_weight():
    # w = 0.3 / 0.2 = 1.5: loss −1.5 · 2 · log 0.3, gradient −1.5 · 2
    assert evaluate("tis", log(0.3), log(0.2), 0, 2.0) == (
        pytest.approx(-3 * log(0.3)),
        pytest.approx(-3.0),
        False,
    )
    # w = 6 becomes 2
    assert evaluate("tis", log(0.6), log(0.1), 0, 1.0) == (
        pytest.approx(-2 * log(0.6)),
        pytest.approx(-2.0),
        True,
    )


@pytest.mark.parametrize("name", LOSSES)
def test_without_staleness_every_loss_has_the_policy_gradient(name: str):
    for advantage in (-1.5, 0.7):
        assert evaluate(name, log(0.3), log(0.3), log(0.3), advantage)[1] == pytest.approx(-advantage)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_gradients_agree_with_plain_float64_arithmetic(name: str, mode: Literal["truncate", "mask"]):
    """Central differences of the formulas as they stand in the docstring, weights held fixed."""
    settings = LossSettings(eps_clip=0.2, eps_clip_high=0.3, tis_clip=1.4, tis_mode=mode)
    rng = np.random.default_rng(7)
    behaviour = -3 * rng.random(200)
    proximal, now = behaviour + rng.normal(0, 0.3, 200), behaviour + rng.normal(0, 0.4, 200)
    advantages = rng.normal(0, 1, 200)

    def plain(x: float, i: int) -> float:
        def clipped(anchor: float) -> float:
            r = math.exp(x - anchor)
            return -min(r * advantages[i], min(max(r, 0.8), 1.3) * advantages[i])

        def capped(w: float) -> float:
            return w if w <= 1.4 else (1.4 if mode == "truncate" else 0.0)

        if name == "ppo":
            return clipped(behaviour[i])
        if name == "recomputed_ppo":
            return clipped(proximal[i])
        if name == "decoupled_ppo":
            return capped(math.exp(proximal[i] - behaviour[i])) * clipped(proximal[i])
        return -capped(math.exp(now[i] - behaviour[i])) * advantages[i] * x

    logprobs = torch.tensor(now, requires_grad=True)
    others = (torch.tensor(values) for values in (behaviour, proximal, advantages))
    loss = LOSSES[name](TokenInputs(logprobs, *others), settings).loss
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert loss.tolist() == pytest.approx([plain(now[i], i) for i in range(200)])
    h = 1e-6
    differences = [(plain(now[i] + h, i) - plain(now[i] - h, i)) / (2 * h) for i in range(200)]
    assert gradient.tolist() == pytest.approx(differences, abs=1e-7, rel=1e-6)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("gap", [200.0, -200.0])
def test_a_huge_log_ratio_gives_finite_gradients_in_float32(name: str, advantage: float, gap: float):
    logprobs = torch.tensor([-250.0 + max(gap, 0)], requires_grad=True)
    anchor = logprobs.detach() - gap
    inputs = TokenInputs(logprobs, anchor, anchor, torch.tensor([advantage]))
    loss = LOSSES[name](inputs, LossSettings()).loss.sum()
    loss.backward()
    assert math.isfinite(loss.item()) and logprobs.grad is not None and math.isfinite(logprobs.grad.item())


# ---------------------------------------------------------------- log-probs
@pytest.mark.parametrize("make", [tiny_gpt2, tiny_qwen3])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("max_tokens", [1, 20, 10_000])
def test_logprobs_agree_with_a_float64_forward_of_each_sample_alone(
    make, temperature: float, max_tokens: int
):
    model = make(seed=3).eval()
    samples = batch_of(12, seed=5).samples
    flat = flatten(samples)
    logprobs, entropy = np.full((2, len(flat.targets)), np.nan)
    for micro in micro_batches(flat, np.arange(12), max_tokens, CPU):
        result = token_logprobs(model, micro, temperature=temperature)
        assert result.logprobs.dtype is torch.float32
        logprobs[micro.tokens] = result.logprobs.detach()
        entropy[micro.tokens] = result.entropy
    reference = in_float64(model)
    with torch.no_grad():
        want = [reference_logprobs(reference, sample, temperature) for sample in samples]
    assert logprobs == pytest.approx(torch.cat([each[0] for each in want]).numpy(), abs=2e-5)
    assert entropy == pytest.approx(torch.cat([each[1] for each in want]).numpy(), abs=2e-5)


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_qwen3])
def test_gradients_through_logprobs_and_entropy_agree_with_float64(make):
    model = make(seed=1).eval()
    samples = batch_of(8, seed=2).samples
    flat = flatten(samples)
    weights = torch.linspace(-1, 1, len(flat.targets), dtype=torch.float64)
    for micro in micro_batches(flat, np.arange(8), 24, CPU):
        result = token_logprobs(model, micro, temperature=1.3, with_entropy_gradient=True)
        (result.logprobs * weights[micro.tokens].float() + 0.3 * result.entropy).sum().backward()
    reference = in_float64(model)
    pairs = [reference_logprobs(reference, sample, 1.3) for sample in samples]
    (
        torch.cat([pair[0] for pair in pairs]) * weights + 0.3 * torch.cat([pair[1] for pair in pairs])
    ).sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        scale = theirs.grad.abs().max().item()
        assert (ours.grad - theirs.grad).abs().max().item() <= 2e-5 * max(scale, 1), name


def test_bfloat16_logits_are_widened_before_the_softmax():
    model = tiny_gpt2(seed=3).eval().bfloat16()
    micro = next(micro_batches(flatten(batch_of(3).samples), np.arange(3), 1000, CPU))
    assert token_logprobs(model, micro).logprobs.dtype is torch.float32


def test_the_output_layer_sees_the_trained_positions_only():
    model = tiny_gpt2().eval()
    flat = flatten(batch_of(6).samples)
    shapes = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape)))
    for micro in micro_batches(flat, np.arange(6), 1000, CPU):
        token_logprobs(model, micro)
    assert shapes == [(1, len(flat.targets), 23)]
    assert not model.lm_head._forward_pre_hooks  # the hook is gone


def sample_with(n_prompt: int, mask: list[int]) -> TrainSample:
    ids = np.arange(n_prompt + len(mask), dtype=np.int32)
    loss_mask = np.array(mask, bool)
    payload = Payload(
        ids[:n_prompt], ids[n_prompt:], -np.ones(len(mask), np.float32), loss_mask, [(0, 0, len(mask))]
    )
    return TrainSample("u", payload, loss_mask, 1.0)


def test_a_row_is_fed_up_to_its_last_trained_token_and_no_further():
    flat = flatten([sample_with(2, [1, 0, 1, 0, 0]), sample_with(1, [0, 0]), sample_with(3, [1])])
    assert flat.fed.tolist() == [4, 0, 3]  # 2 + 3 − 1: the last trained token is predicted, not fed
    assert flat.sample.tolist() == [0, 0, 2]
    assert flat.column.tolist() == [1, 3, 2] and flat.targets.tolist() == [2, 4, 3]
    (micro,) = micro_batches(flat, np.array([0, 1, 2]), 100, CPU)
    assert micro.ids.tolist() == [[0, 1, 2, 0], [0, 1, 2, 3]]  # rows 2 and 0: short ones first
    assert micro.positions.tolist() == [2, 5, 7] and micro.tokens.tolist() == [2, 0, 1]


@pytest.mark.parametrize("max_tokens", [1, 7, 30, 100_000])
def test_micro_batches_hold_every_trained_token_once_and_keep_to_the_budget(max_tokens: int):
    samples = batch_of(60, seed=9, longest=12).samples
    flat = flatten(samples)
    chosen = np.arange(10, 60)
    seen: list[int] = []
    for micro in micro_batches(flat, chosen, max_tokens, CPU):
        rows, length = micro.ids.shape
        assert rows == 1 or rows * length <= max_tokens
        seen += micro.tokens.tolist()
        for position, token in zip(micro.positions.tolist(), micro.tokens.tolist(), strict=True):
            row, column = divmod(position, length)
            at = flat.row_starts[flat.sample[token]]
            assert micro.ids[row, : column + 1].tolist() == flat.ids[at : at + column + 1].tolist()
    assert sorted(seen) == list(range(flat.token_starts[10], len(flat.targets)))


def test_rows_of_very_different_length_are_not_padded_to_one():
    short = [sample_with(1, [1]) for _ in range(FORWARD_OVERHEAD_TOKENS)]
    flat = flatten([*short, sample_with(1, [1] * 40), *short])
    shapes = [tuple(micro.ids.shape) for micro in micro_batches(flat, np.arange(len(flat.fed)), 10**6, CPU)]
    assert shapes == [(2 * FORWARD_OVERHEAD_TOKENS, 1), (1, 40)]


def test_a_model_that_mixes_positions_after_its_output_layer_is_refused():
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(1, 5)

        def get_output_embeddings(self) -> torch.nn.Module:
            return self.head

        def forward(self, input_ids, use_cache):
            logits = self.head(input_ids[..., None].float())
            return type("Output", (), {"logits": logits[:, :1]})

    micro = next(micro_batches(flatten([sample_with(2, [1, 1])]), np.arange(1), 100, CPU))
    with pytest.raises(ValueError, match=r"Odd gave logits \[1, 1, 5\] for 2 positions"):
        token_logprobs(Odd(), micro)


# ---------------------------------------------------------------- telemetry
def test_the_sums_of_a_trajectory_are_those_worked_out_by_hand():
    log_ratios = np.log([2.0, 0.5, 1.0, 1.1])
    is_clipped = np.array([True, False, True, True])
    sums = trajectory_sums(log_ratios, np.array([0, 0, 2, 2]), 3, is_clipped)
    two = math.log(2)
    assert sums[0].tolist() == pytest.approx([2, 0, 2 * two, 2 * two**2, 2.5, 4.25, 1, 1, 2.0, 1])
    assert sums[1].tolist() == [0] * 10
    e = math.log(1.1)
    assert sums[2].tolist() == pytest.approx([2, e, e, e * e, 2.1, 2.21, 0, 0, 1.1, 2])
    assert sums.shape[1] == len(SUMS) == 10


def test_measures_of_a_step_are_those_worked_out_by_hand():
    is_clipped = np.array([True, False, False, False])
    sums = trajectory_sums(np.log([2.0, 0.5, 1.0, 1.1]), np.array([0, 0, 2, 2]), 3, is_clipped)
    measures = summarize(sums)
    e, two = math.log(1.1), math.log(2)
    assert measures["mean_abs_log_ratio"] == pytest.approx((2 * two + e) / 4)
    assert measures["max_ratio"] == 2.0
    assert measures["kl_k1"] == pytest.approx(-e / 4)
    assert measures["kl_k3"] == pytest.approx(((2 - 1 - two) + (0.5 - 1 + two) + 0 + (0.1 - e)) / 4)
    assert measures["ess_token"] == pytest.approx(4.6**2 / (4 * 6.46))
    assert measures["ess_sequence"] == pytest.approx((1 + 1.1) ** 2 / (2 * (1 + 1.21)))
    assert measures["ratio_outside"] == 0.5
    assert measures["clip_fraction"] == 0.25


def test_the_sums_of_a_subset_give_the_measures_of_that_subset():
    rng = np.random.default_rng(0)
    log_ratios, sample = rng.normal(0, 0.3, 500), np.sort(rng.integers(0, 40, 500))
    whole = trajectory_sums(log_ratios, sample, 40)
    kept = sample % 3 == 0
    alone = trajectory_sums(log_ratios[kept], sample[kept], 40)
    assert summarize(whole[::3]) == pytest.approx(summarize(alone))


def test_an_unmoved_policy_has_no_drift_and_a_full_effective_sample():
    measures = summarize(trajectory_sums(np.zeros(5), np.array([0, 0, 1, 1, 1]), 2))
    assert measures == {
        "mean_abs_log_ratio": 0.0,
        "max_ratio": 1.0,
        "kl_k1": 0.0,
        "kl_k3": 0.0,
        "ess_token": 1.0,
        "ess_sequence": 1.0,
        "ratio_outside": 0.0,
        "clip_fraction": 0.0,
    }
    assert summarize(np.zeros((3, len(SUMS)))) == {}


def test_absurd_log_ratios_overflow_nothing():
    measures = summarize(trajectory_sums(np.array([5000.0, -5000.0]), np.array([0, 1]), 2))
    assert all(math.isfinite(value) for value in measures.values())
    assert measures["ess_token"] == pytest.approx(0.5)
