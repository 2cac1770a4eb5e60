"""Losses inside of a step: what they are averaged over, what they need of the whole minibatch, and steps gone wrong."""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from consumers.telemetry import SUMS
from engine.algorithms.logprobs import flatten
from engine.algorithms.losses import TokenInputs, token_loss
from engine.algorithms.ratios import Sequences
from engine.algorithms.reference_kl import reference_kl, unbiased
from engine.interfaces import BadStep, TrainBatch
from engine.trainer.plan import plan_step
from engine.trainer.stepper import loss_settings
from engine.trainer.torch_backend import TorchBackend
from engine.trainer.torch_settings import Aggregation, TorchSettings
from streams.errors import ConfigError
from tests.engine.trainer_support import batch_of, folder_of, in_float64, reference_logprobs, tiny_gpt2

# a step is seen through AdamW with a large eps: with it the update grows with the gradient
SEEN = {"adam_eps": 1.0, "lr": 0.3, "clip_grad": 0.0, "threads": 1}
M2_LIMIT = 0.05  # some tokens of the batch are over it, and some are not


@pytest.fixture(autouse=True)
def switches_of_torch() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tiny_gpt2(), tmp_path_factory.mktemp("model"))


def make(folder: Path, **settings: Any) -> TorchBackend:
    return TorchBackend(folder, TorchSettings(**{**SEEN, **settings}))


def batch(n: int = 18, seed: int = 4, *, groups: int = 5) -> TrainBatch:
    """Samples of some prompts, in their order, with ages from 0 to 3; one has nothing to train."""
    made = batch_of(n, seed=seed)
    samples = [
        each._replace(
            group=place * groups // n,
            ages=np.full(len(each.loss_mask), place % 4, np.int32),
            loss_mask=each.loss_mask & (place != 1),
        )
        for place, each in enumerate(made.samples)
    ]
    return made._replace(samples=samples)


def float64_step(backend: TorchBackend, given: TrainBatch, aggregation: Aggregation, **more: Any) -> Any:
    """(loss, gradient of every parameter) of the whole batch in float64, one sample at a time."""
    settings = backend.settings
    reference = in_float64(backend.model)
    trained = [each for each in given.samples if each.loss_mask.any()]
    logprobs = [reference_logprobs(reference, each)[0] for each in trained]
    counts = [len(each) for each in logprobs]
    now = torch.cat(logprobs)
    behaviour = torch.cat([torch.tensor(each.payload.logprobs[each.loss_mask]).double() for each in trained])
    ages = torch.cat([torch.tensor(each.ages[each.loss_mask]) for each in trained if each.ages is not None])
    proximal = now.detach()
    if settings.proximal_policy == "interpolated":
        proximal = proximal + (behaviour - proximal) / ages.clamp(min=1)
    of_token = torch.repeat_interleave(torch.arange(len(trained)), torch.tensor(counts))
    advantages = torch.tensor([each.advantage for each in trained], dtype=torch.float64)[of_token]
    inputs = TokenInputs(now, behaviour, proximal, advantages, Sequences(of_token, len(trained)))
    per_token = token_loss(settings.loss_function, inputs, loss_settings(settings)).loss
    if "reference" in more:
        with torch.no_grad():
            anchor = torch.cat([reference_logprobs(more["reference"], each)[0] for each in trained])
        kl = reference_kl(now, anchor, settings.kl_loss_type)
        if settings.use_unbiased_kl:
            kl = unbiased(kl, now, behaviour)
        per_token = per_token + settings.kl_loss_coef * kl
        more["reference"].kl = kl.mean().item()
    each_sample = list(per_token.split(counts))
    if aggregation == "token":
        loss = per_token.mean()
    elif aggregation == "sample":
        loss = torch.stack([each.mean() for each in each_sample]).mean()
    elif aggregation == "constant":
        loss = torch.stack([each.sum() / 7 for each in each_sample]).mean()
    else:
        prompts = sorted({each.group for each in trained})
        of_prompts = [
            torch.cat([part for part, each in zip(each_sample, trained, strict=True) if each.group == prompt])
            for prompt in prompts
        ]
        loss = torch.stack([part.mean() for part in of_prompts]).mean()
    loss.backward()
    return loss.item(), [parameter.grad for parameter in reference.parameters()]


def check(
    backend: TorchBackend, given: TrainBatch, aggregation: Aggregation, **more: Any
) -> dict[str, float]:
    loss, gradients = float64_step(backend, given, aggregation, **more)
    before = [parameter.detach().clone() for parameter in backend.model.parameters()]
    metrics = backend.step(given)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
    norm = math.sqrt(sum(float((each**2).sum()) for each in gradients))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    if backend.optimizer_steps > 1:  # a first update shows the gradient itself, a later one a mean of them
        return metrics
    for then, now, gradient in zip(before, backend.model.parameters(), gradients, strict=True):
        want = then - 0.3 * gradient / (gradient.abs() + 1.0)
        assert (now.double() - want).abs().max().item() < 5e-6
    return metrics


# ---------------------------------------------------------------- what a loss is averaged over
@pytest.mark.parametrize("aggregation", ["token", "sample", "prompt", "constant"])
@pytest.mark.parametrize("micro_batch_tokens", [1, 30, 100_000])
def test_a_loss_is_averaged_over_what_was_asked_for(
    folder: Path, aggregation: Aggregation, micro_batch_tokens: int
):
    settings = {"loss_aggregation": aggregation, "loss_constant_length": 7}
    backend = make(folder, micro_batch_tokens=micro_batch_tokens, **settings)
    check(backend, batch(), aggregation)


def test_unless_asked_gspo_counts_samples_alike_and_every_other_loss_tokens():
    kinds = {name: TorchSettings(loss=name).aggregation for name in ("ppo", "tis", "m2po", "sft", "gspo")}
    assert kinds == {"ppo": "token", "tis": "token", "m2po": "token", "sft": "token", "gspo": "sample"}
    assert TorchSettings(loss="gspo", loss_aggregation="token").aggregation == "token"


def test_weights_and_divisors_are_those_of_each_minibatch():
    given = batch()
    counts = np.array([int(each.loss_mask.sum()) for each in given.samples])
    groups = np.array([each.group for each in given.samples])
    for aggregation in ("sample", "prompt", "constant", "token"):
        settings = TorchSettings(
            loss_aggregation=aggregation, num_steps_per_rollout=3, loss_constant_length=10
        )
        plan = plan_step(given, settings)
        assert len(plan.parts) == 3
        for part in plan.parts:
            used = part.rows[counts[part.rows] > 0]
            assert part.n_tokens == counts[used].sum()
            if aggregation in ("token", "constant"):
                assert plan.flat.weights is None
                assert part.divisor == (part.n_tokens if aggregation == "token" else 10 * len(used))
                continue
            weights = plan.flat.weights
            assert weights is not None
            units = groups if aggregation == "prompt" else np.arange(len(counts))
            assert part.divisor == len(set(units[used].tolist()))
            for row in used:
                together = counts[used][units[used] == units[row]].sum()
                mine = weights[plan.flat.token_starts[row] : plan.flat.token_starts[row + 1]]
                assert mine.tolist() == [np.float32(1 / together)] * counts[row]


# ---------------------------------------------------------------- losses of whole sequences and minibatches
@pytest.mark.parametrize("micro_batch_tokens", [1, 30, 100_000])
@pytest.mark.parametrize(
    "settings",
    [
        {"loss": "gspo", "eps_clip": 0.1, "eps_clip_high": 0.15},
        {"loss": "m2po", "m2_threshold": M2_LIMIT},
        {"loss": "tis", "tis_level": "sequence", "tis_clip": 1.5},
        {"loss": "ppo", "use_opsm": True, "opsm_delta": 0.05, "tis_veto": 0.02},
        {"loss": "decoupled_ppo", "proximal_policy": "interpolated", "tis_mode": "mask", "tis_clip_low": 0.8},
        {"loss": "cispo", "eps_clip_high": 0.1},
        {"loss": "sft"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_however_rows_are_packed_a_step_is_that_of_the_whole_batch(
    folder: Path, settings: dict[str, Any], micro_batch_tokens: int
):
    backend = make(folder, micro_batch_tokens=micro_batch_tokens, **settings)
    metrics = check(backend, batch(), backend.settings.aggregation)
    if settings["loss"] in ("m2po", "decoupled_ppo") or "use_opsm" in settings:
        assert 0 < metrics["masked_fraction"] < 0.6 and metrics["clip_fraction"] >= metrics["masked_fraction"]
    else:
        assert metrics["masked_fraction"] == 0


def test_masked_tokens_are_counted_for_each_sample(folder: Path):
    backend, given = make(folder, loss="m2po", m2_threshold=M2_LIMIT, micro_batch_tokens=20), batch()
    flat = flatten(given.samples)
    reference = in_float64(backend.model)
    with torch.no_grad():
        now = torch.cat([reference_logprobs(reference, each)[0] for each in given.samples]).numpy()
    backend.step(given)
    lr = now - flat.behaviour
    harmful = np.flatnonzero(lr * flat.advantages > 0)
    order = harmful[np.argsort(lr[harmful] ** 2)]
    kept = sum((lr[order[:n]] ** 2).mean() <= M2_LIMIT for n in range(1, len(order) + 1))
    masked = np.zeros(len(lr), bool)
    masked[order[kept:]] = True
    assert 0 < kept < len(order)
    want = np.bincount(flat.sample, masked, len(given.samples))
    assert backend.trajectory_sums[:, SUMS.index("n_masked")].tolist() == want.tolist()


def test_m2po_judges_every_minibatch_by_the_weights_that_it_finds(folder: Path):
    """Its second minibatch is that of a backend whose step begins with what the first left."""
    settings = {"loss": "m2po", "m2_threshold": M2_LIMIT, "lr": 0.02, "adam_eps": 1e-3}
    both = make(folder, num_steps_per_rollout=2, micro_batch_tokens=20, **settings)
    given = batch()
    first, second = (part.rows for part in plan_step(given, both.settings).parts)
    both.step(given)
    one_by_one = make(folder, micro_batch_tokens=100_000, **settings)
    for rows in (first, second):
        one_by_one.step(given._replace(samples=[given.samples[row] for row in rows]))
    for ours, theirs in zip(both.model.parameters(), one_by_one.model.parameters(), strict=True):
        assert (ours - theirs).abs().max().item() < 1e-5


def test_with_several_minibatches_the_proximal_policy_may_be_interpolated_too(folder: Path):
    settings = {"loss": "decoupled_ppo", "proximal_policy": "interpolated", "num_steps_per_rollout": 2}
    backend = make(folder, **settings)
    assert backend.settings.interpolates and not backend.settings.needs_proximal
    assert backend.inputs.with_ages
    assert math.isfinite(backend.step(batch())["loss"])


# ---------------------------------------------------------------- a reference model
@pytest.mark.parametrize(
    "settings",
    [
        {"kl_loss_type": "k3"},
        {"kl_loss_type": "k2", "loss_aggregation": "sample"},
        {"kl_loss_type": "low_var_kl", "loss": "gspo"},
        {"kl_loss_type": "k1", "use_unbiased_kl": True},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_the_loss_holds_the_policy_to_the_weights_that_the_run_began_with(
    folder: Path, settings: dict[str, Any]
):
    backend = make(folder, kl_loss_coef=0.7, micro_batch_tokens=30, **settings)
    reference = in_float64(backend.model)
    first = check(backend, batch(), backend.settings.aggregation, reference=reference)
    if not backend.settings.use_unbiased_kl:
        assert first["kl_loss"] == pytest.approx(0.0, abs=1e-6)  # there is no distance yet
    second = check(backend, batch(seed=11), backend.settings.aggregation, reference=reference)
    assert second["kl_loss"] == pytest.approx(reference.kl, rel=1e-3, abs=1e-7)
    assert abs(second["kl_loss"]) > 1e-4


def test_the_reference_is_the_same_after_a_resume_and_in_no_checkpoint(folder: Path, tmp_path: Path):
    running, plain = make(folder, kl_loss_coef=0.5), make(folder)
    running.step(batch())
    running.snapshot()(tmp_path)
    assert {path.name: path.stat().st_size for path in tmp_path.iterdir()} == sizes(plain, tmp_path / "plain")
    resumed = make(folder, kl_loss_coef=0.5)
    resumed.load(tmp_path)
    again, there = running.step(batch(seed=8)), resumed.step(batch(seed=8))
    assert again["kl_loss"] == there["kl_loss"] > 0 and again["loss"] == there["loss"]


def sizes(backend: TorchBackend, folder: Path) -> dict[str, int]:
    folder.mkdir()
    backend.snapshot()(folder)
    return {path.name: path.stat().st_size for path in folder.iterdir()}


def test_another_model_can_be_the_reference(folder: Path, tmp_path: Path):
    other = tiny_gpt2(seed=9)
    backend = make(folder, kl_loss_coef=0.7, ref_model=str(folder_of(other, tmp_path / "other")))
    metrics = check(backend, batch(), "token", reference=in_float64(other))
    assert metrics["kl_loss"] > 0.1
    with pytest.raises(ConfigError, match=r"trainer\.ref_model = .*nowhere.*: cannot be loaded"):
        make(folder, kl_loss_coef=0.7, ref_model=str(tmp_path / "nowhere"))


# ---------------------------------------------------------------- bad steps
def every_bit(backend: TorchBackend, folder: Path) -> dict[str, bytes]:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    backend.snapshot()(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("several", [1, 3])
@pytest.mark.parametrize(
    "settings",
    [
        {"loss": "ppo"},
        {"loss": "decoupled_ppo", "tis_mode": "mask"},
        {"loss": "decoupled_ppo", "proximal_policy": "interpolated"},
        {"loss": "tis", "tis_level": "sequence"},
        {"loss": "gspo"},
        {"loss": "m2po"},
        {"loss": "m2po", "micro_batch_tokens": 10},
        {"loss": "cispo"},
        {"loss": "ppo", "use_opsm": True, "tis_veto": 1e-3},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_a_behaviour_logprob_that_is_not_a_number_changes_no_bit(
    folder: Path, tmp_path: Path, settings: dict[str, Any], several: int
):
    backend = make(folder, num_steps_per_rollout=several, **settings)
    backend.step(batch(seed=4))
    before = every_bit(backend, tmp_path / "before")
    given = batch(seed=9)
    place = next(i for i, each in enumerate(given.samples) if each.loss_mask.sum() > 1)
    broken = given.samples[place].payload.logprobs.copy()
    broken[given.samples[place].loss_mask.argmax()] = math.nan
    given.samples[place] = given.samples[place]._replace(
        payload=given.samples[place].payload._replace(logprobs=broken)
    )
    with pytest.raises(BadStep) as caught:
        backend.step(given)
    assert caught.value.reason in ("nonfinite_loss", "nonfinite_gradient")
    assert every_bit(backend, tmp_path / "after") == before
    assert math.isfinite(backend.step(batch(seed=5))["loss"])


@pytest.mark.parametrize("several", [1, 2])
def test_an_infinite_distance_to_the_reference_changes_no_bit(folder: Path, tmp_path: Path, several: int):
    backend = make(folder, kl_loss_coef=0.1, num_steps_per_rollout=several)
    backend.step(batch(seed=4))
    before = every_bit(backend, tmp_path / "before")
    with torch.no_grad():  # one token is impossible under the reference
        backend.policy._reference.lm_head.weight[batch(seed=9).samples[2].payload.response_ids[0]] = math.inf
    with pytest.raises(BadStep, match="nonfinite"):
        backend.step(batch(seed=9))
    assert every_bit(backend, tmp_path / "after") == before


def test_samples_without_a_trained_token_leave_their_minibatch_out(folder: Path):
    given = batch(6)
    masked = [
        each._replace(loss_mask=np.zeros_like(each.loss_mask)) if place else each
        for place, each in enumerate(given.samples)
    ]
    for aggregation in ("token", "sample", "prompt", "constant"):
        backend = make(folder, num_steps_per_rollout=3, loss_aggregation=aggregation)
        one = given._replace(samples=masked)
        backend.step(one)
        assert backend.optimizer_steps == 1
        with pytest.raises(BadStep, match="no_trainable_tokens"):
            backend.step(given._replace(samples=masked[1:]))


def test_a_minibatch_that_is_masked_whole_is_a_step_without_a_gradient(folder: Path):
    backend, given = make(folder, loss="tis", tis_mode="mask", tis_clip=1e-9), batch()
    before = [parameter.detach().clone() for parameter in backend.model.parameters()]
    metrics = backend.step(given)
    assert metrics["masked_fraction"] == 1.0 and metrics["grad_norm"] == 0.0 and metrics["loss"] == 0.0
    for then, now in zip(before, backend.model.parameters(), strict=True):
        assert torch.equal(then, now)
