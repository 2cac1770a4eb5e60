"""Losses, log-probs and telemetry: values worked out by hand, gradients against plain float64 arithmetic."""

import math
from typing import Literal

import numpy as np
import pytest
import torch

from consumers.telemetry import SUMS, summarize, trajectory_sums
from engine.algorithms.logprobs import FORWARD_OVERHEAD_TOKENS, flatten, micro_batches, token_logprobs
from engine.algorithms.losses import LOSSES, LossSettings, TokenInputs, token_loss
from engine.algorithms.ratios import Sequences
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
    mu, p, a = (torch.tensor([value], dtype=torch.float64) for value in (behaviour, proximal, advantage))
    result = LOSSES[name](TokenInputs(logprobs, mu, p, a), settings or LossSettings())
    (gradient,) = torch.autograd.grad(result.loss.sum(), logprobs)
    return result.loss.item(), gradient.item(), bool(result.is_clipped)


log = math.log
POLICY_LOSSES = [name for name in LOSSES if name not in ("opd", "sft")]  # those that look at rewards


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


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_without_staleness_every_loss_has_the_policy_gradient(name: str):
    for advantage in (-1.5, 0.7):
        assert evaluate(name, log(0.3), log(0.3), log(0.3), advantage)[1] == pytest.approx(-advantage)


@pytest.mark.parametrize(
    ("ratio", "loss", "gradient", "is_clipped"),
    [
        (1.5, 3.0, 3.0, False),  # worse than its group and likelier now: the whole push back
        (4.0, 6.0, 0.0, True),  # PPO would push with 8; c · |A| = 6 is the most
        (0.5, 1.6, 0.0, True),  # as without
    ],
)
def test_dual_clip_bounds_what_a_bad_sample_may_count(ratio, loss, gradient, is_clipped):
    settings = LossSettings(eps_clip_c=3.0)
    want = (pytest.approx(loss), pytest.approx(gradient), is_clipped)
    assert evaluate("ppo", log(0.1 * ratio), log(0.1), 0, -2.0, settings) == want
    good = evaluate("ppo", log(0.4), log(0.1), 0, 2.0, settings)
    assert good == evaluate("ppo", log(0.4), log(0.1), 0, 2.0) == (pytest.approx(-2.4), 0.0, True)


def test_cispo_caps_the_weight_and_keeps_every_gradient():
    settings = LossSettings(eps_clip=0.2, eps_clip_high=0.5)
    # w = 6 becomes 1.5; A = 2
    capped = evaluate("cispo", log(0.6), log(0.1), 0, 2.0, settings)
    assert capped == (pytest.approx(-3 * log(0.6)), pytest.approx(-3.0), True)
    # w = 0.5: no lower bound
    low = evaluate("cispo", log(0.1), log(0.2), 0, -2.0, settings)
    assert low == (pytest.approx(log(0.1)), pytest.approx(1.0), False)


def test_sft_is_the_negative_log_likelihood_whatever_the_advantage():
    for advantage in (-2.0, 0.0, 3.0):
        assert evaluate("sft", log(0.3), -9.0, -9.0, advantage) == (pytest.approx(-log(0.3)), -1.0, False)


def in_two_sequences(name: str, settings: LossSettings | None = None, **inputs: list[float]):
    """(loss, gradient) [3] of three tokens, the first two of which are of one sequence."""
    tensors = {key: torch.tensor(values, dtype=torch.float64) for key, values in inputs.items()}
    tensors["logprobs"].requires_grad_()
    tensors.setdefault("proximal", tensors["behaviour"])
    sequences = Sequences(torch.tensor([0, 0, 1]), 2)
    result = token_loss(name, TokenInputs(**tensors, sequences=sequences), settings or LossSettings())
    (gradient,) = torch.autograd.grad(result.loss.sum(), tensors["logprobs"])
    return result, gradient.tolist()


def test_gspo_takes_the_geometric_mean_of_a_sequence_for_the_ratio_of_its_tokens():
    # ratios 2 and 1/2 (geometric mean 1) and 1.25; A = 1 and 3
    result, gradient = in_two_sequences(
        "gspo",
        logprobs=[log(0.4), log(0.1), log(0.5)],
        behaviour=[log(0.2), log(0.2), log(0.4)],
        advantages=[1.0, 1.0, 3.0],
    )
    assert result.loss.tolist() == pytest.approx([-1.0, -1.0, -3.6])  # 1.25 is clipped to 1.2
    assert result.is_clipped.tolist() == [False, False, True]
    # the sum over two tokens of −s · A, s with half of each log-ratio
    assert gradient == pytest.approx([-1.0, -1.0, 0.0])


def test_opd_pulls_towards_the_teacher_and_not_to_the_reward():
    # π = 0.4 and T = 0.8: B = log 2; π = 0.4 and T = 0.1: B = −log 4; the third is far from μ and clipped
    result, gradient = in_two_sequences(
        "opd",
        logprobs=[log(0.4), log(0.4), log(0.4)],
        behaviour=[log(0.4), log(0.4), log(0.2)],
        advantages=[100.0, -100.0, 5.0],
        teacher=[log(0.8), log(0.1), log(0.8)],
    )
    assert gradient == pytest.approx([-log(2), log(4), 0.0])
    assert result.loss.tolist() == pytest.approx([-log(2), log(4), -1.2 * log(2)])
    with pytest.raises(ValueError, match="no teacher"):
        evaluate("opd", 0.0, 0.0, 0.0, 1.0)


def test_the_gradient_of_opd_is_that_of_the_reverse_kl():
    """Over all tokens of a small vocabulary, each as often as the policy says: Σ π ∇loss = ∇ KL(π ‖ T)."""
    logits = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    teacher = torch.log_softmax(torch.randn(6, dtype=torch.float64), -1)
    logits.requires_grad_()
    logp = torch.log_softmax(logits, -1)
    frozen = logp.detach()
    inputs = TokenInputs(logp, frozen, frozen, torch.zeros(6), teacher=teacher)
    mean = (frozen.exp() * LOSSES["opd"](inputs, LossSettings()).loss).sum()
    (ours,) = torch.autograd.grad(mean, logits, retain_graph=True)
    (theirs,) = torch.autograd.grad((logp.exp() * (logp - teacher)).sum(), logits)
    assert ours.tolist() == pytest.approx(theirs.tolist())


def test_m2po_masks_the_largest_harmful_moves_alone():
    # (log r)² of 0.04, 0.09, 0.25 (harmful) and 1 (harmless: a bad token that is likelier now)
    steps = [0.2, -0.3, 0.5, 1.0]
    logprobs = torch.tensor(steps, dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 2.0, -1.0], dtype=torch.float64)
    zero = torch.zeros(4, dtype=torch.float64)
    inputs = TokenInputs(logprobs, zero, zero, advantages)
    result = LOSSES["m2po"](inputs, LossSettings(m2_threshold=0.07))  # of 0.04, 0.09, 0.25 the mean is 0.127
    assert result.is_masked.tolist() == [False, False, True, False]
    (gradient,) = torch.autograd.grad(result.loss.sum(), logprobs)
    want = [-math.exp(0.2), math.exp(-0.3), 0.0, math.exp(1.0)]
    assert gradient.tolist() == pytest.approx(want) and result.loss.tolist() == pytest.approx(want)
    assert not LOSSES["m2po"](inputs, LossSettings(m2_threshold=0.13)).is_masked.any()
    given = inputs._replace(
        outliers=torch.tensor([True, False, False, False])
    )  # judged over a whole minibatch
    assert LOSSES["m2po"](given, LossSettings()).loss.tolist()[0] == 0.0


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_gradients_agree_with_plain_float64_arithmetic(name: str, mode: Literal["truncate", "mask"]):
    """Central differences of the formulas as they stand in the docstring, weights and masks held fixed."""
    settings = LossSettings(
        eps_clip=0.2,
        eps_clip_high=0.3,
        eps_clip_c=1.8,
        tis_clip=1.4,
        tis_clip_low=0.6,
        tis_mode=mode,
        m2_threshold=0.1,
    )
    rng = np.random.default_rng(7)
    behaviour = -3 * rng.random(60)
    proximal, now = behaviour + rng.normal(0, 0.3, 60), behaviour + rng.normal(0, 0.4, 60)
    teacher = behaviour + rng.normal(0, 0.5, 60)
    of_token = np.arange(60) // 5
    advantages = rng.normal(0, 1, 12)[of_token] if name == "gspo" else rng.normal(0, 1, 60)
    masked = brute_force_outliers(now - behaviour, advantages, 0.1)

    def clipped(r: float, advantage: float) -> float:
        gain = min(r * advantage, min(max(r, 0.8), 1.3) * advantage)
        return -max(gain, 1.8 * advantage) if advantage < 0 else -gain

    def corrected(w: float) -> float:
        inside = min(max(w, 0.6), 1.4)
        return w if w == inside else (inside if mode == "truncate" else 0.0)

    def plain(x: np.ndarray, i: int) -> float:
        a, fixed = advantages[i], now[i]
        if name == "ppo":
            return clipped(math.exp(x[i] - behaviour[i]), a)
        if name == "recomputed_ppo":
            return clipped(math.exp(x[i] - proximal[i]), a)
        if name == "decoupled_ppo":
            weight = corrected(math.exp(proximal[i] - behaviour[i]))
            return weight * clipped(math.exp(x[i] - proximal[i]), a)
        if name == "tis":
            return -corrected(math.exp(fixed - behaviour[i])) * a * x[i]
        if name == "cispo":
            return -min(math.exp(fixed - behaviour[i]), 1.3) * a * x[i]
        if name == "gspo":
            mine = of_token == of_token[i]
            return clipped(math.exp((x[mine] - behaviour[mine]).mean()), a)
        if name == "m2po":
            return 0.0 if masked[i] else -math.exp(x[i] - behaviour[i]) * a
        if name == "opd":
            return clipped(math.exp(x[i] - behaviour[i]), teacher[i] - fixed)
        assert name == "sft"
        return -x[i]

    def total(x: np.ndarray) -> float:
        return sum(plain(x, i) for i in range(60))

    logprobs = torch.tensor(now, requires_grad=True)
    mu, p, a = (torch.tensor(values) for values in (behaviour, proximal, advantages))
    sequences = Sequences(torch.tensor(of_token), 12)
    inputs = TokenInputs(logprobs, mu, p, a, sequences, torch.tensor(teacher))
    loss = LOSSES[name](inputs, settings).loss
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert loss.tolist() == pytest.approx([plain(now, i) for i in range(60)])
    h = 1e-6
    differences = [(total(now + h * unit) - total(now - h * unit)) / (2 * h) for unit in np.eye(60)]
    assert gradient.tolist() == pytest.approx(differences, abs=1e-6, rel=1e-5)


def brute_force_outliers(log_ratios: np.ndarray, advantages: np.ndarray, limit: float) -> np.ndarray:
    """Take the largest away, one after the other, until the mean of the others is at most the limit."""
    masked = np.zeros(len(log_ratios), bool)
    harmful = [
        i for i in range(len(log_ratios)) if log_ratios[i] * advantages[i] > 0
    ]  # good and likelier, or bad and less likely
    harmful.sort(key=lambda i: log_ratios[i] ** 2)
    while harmful and np.mean([log_ratios[i] ** 2 for i in harmful]) > limit:
        masked[harmful.pop()] = True
    return masked


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("gap", [200.0, -200.0])
def test_a_huge_log_ratio_gives_finite_gradients_in_float32(name: str, advantage: float, gap: float):
    logprobs = torch.tensor([-250.0 + max(gap, 0)], requires_grad=True)
    anchor = logprobs.detach() - gap
    inputs = TokenInputs(logprobs, anchor, anchor, torch.tensor([advantage]), teacher=anchor)
    loss = LOSSES[name](inputs, LossSettings()).loss.sum()
    loss.backward()
    assert math.isfinite(loss.item()) and logprobs.grad is not None and math.isfinite(logprobs.grad.item())


@pytest.mark.parametrize("name", LOSSES)
def test_a_forward_without_a_trained_token_adds_nothing(name: str):
    none = torch.zeros(0, requires_grad=True)
    inputs = TokenInputs(none, torch.zeros(0), torch.zeros(0), torch.zeros(0), teacher=torch.zeros(0))
    loss = token_loss(name, inputs, LossSettings(tis_veto=1e-4, opsm_delta=0.1)).loss.sum()
    loss.backward()
    assert loss.item() == 0.0


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
    assert sums[0].tolist() == pytest.approx([2, 0, 2 * two, 2 * two**2, 2.5, 4.25, 1, 1, 2.0, 1, two, 0])
    assert sums[1].tolist() == [0] * 12
    e = math.log(1.1)
    assert sums[2].tolist() == pytest.approx([2, e, e, e * e, 2.1, 2.21, 0, 0, 1.1, 2, e, 0])
    assert sums.shape[1] == len(SUMS) == 12
    is_masked = np.array([False, False, True, True])
    masked = trajectory_sums(log_ratios, np.array([0, 0, 2, 2]), 3, is_clipped, is_masked)
    assert masked[:, -1].tolist() == [0, 0, 2] and masked[:, :-1].tolist() == sums[:, :-1].tolist()


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
    assert measures["clip_fraction"] == 0.25 and measures["masked_fraction"] == 0.0
    assert measures["max_abs_log_ratio"] == pytest.approx(two)


def test_measures_of_columns_that_a_writer_did_not_know_are_left_out():
    sums = trajectory_sums(np.log([2.0, 0.5]), np.array([0, 1]), 2)
    sums[0, SUMS.index("n_masked")] = sums[0, SUMS.index("max_abs_log_ratio")] = np.nan
    assert {"masked_fraction", "max_abs_log_ratio"}.isdisjoint(summarize(sums))
    assert summarize(sums)["max_ratio"] == 2.0 and "masked_fraction" in summarize(sums[1:])


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
        "max_abs_log_ratio": 0.0,
        "max_ratio": 1.0,
        "kl_k1": 0.0,
        "kl_k3": 0.0,
        "ess_token": 1.0,
        "ess_sequence": 1.0,
        "ratio_outside": 0.0,
        "clip_fraction": 0.0,
        "masked_fraction": 0.0,
    }
    assert summarize(np.zeros((3, len(SUMS)))) == {}


def test_absurd_log_ratios_overflow_nothing():
    measures = summarize(trajectory_sums(np.array([5000.0, -5000.0]), np.array([0, 1]), 2))
    assert all(math.isfinite(value) for value in measures.values())
    assert measures["ess_token"] == pytest.approx(0.5)
