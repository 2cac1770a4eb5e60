"""The torch trainer: right steps, repeatable bits, nothing changed by a bad step, whole saves and loads."""

import copy
import json
import logging
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.algorithms.logprobs import flatten
from engine.algorithms.losses import LOSSES, LossSettings, TokenInputs
from engine.interfaces import BadStep, CheckpointError, TrainBatch, TrainerBackend
from engine.trainer.plan import minibatches
from engine.trainer.torch_backend import TorchBackend
from engine.trainer.torch_settings import TorchSettings, learning_rate
from engine.weights.store import digest, snapshot
from streams.errors import ConfigError
from tests.engine.trainer_support import (
    batch_of,
    folder_of,
    in_float64,
    reference_logprobs,
    tiny_gpt2,
    tiny_qwen3,
)

MODELS = {"gpt2": tiny_gpt2, "gpt2-tied": lambda: tiny_gpt2(tied=True), "qwen3": tiny_qwen3}


@pytest.fixture(autouse=True)
def switches_of_torch() -> Iterator[None]:
    """A backend settles them for its process; here each test gets them back."""
    threads, rng = torch.get_num_threads(), torch.get_rng_state()
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(rng)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: folder_of(make(), tmp_path_factory.mktemp(name)) for name, make in MODELS.items()}


@pytest.fixture
def folder(folders: dict[str, Path]) -> Path:
    return folders["gpt2"]


def make(folder: Path, **settings: Any) -> TorchBackend:
    return TorchBackend(folder, TorchSettings(**{"lr": 0.01, "threads": 1} | settings))


def every_bit(backend: TorchBackend, folder: Path) -> dict[str, bytes]:
    """All files that the backend would save."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    backend.snapshot()(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ---------------------------------------------------------------- one step against a plain reference
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "settings",
    [
        {"loss": "ppo", "eps_clip": 0.2, "eps_clip_high": 0.28},
        {"loss": "tis", "tis_clip": 1.3, "temperature": 0.8},
        {"loss": "decoupled_ppo", "entropy_coef": 0.05},
        {"loss": "ppo", "use_rollout_logprobs": False, "use_tis": True, "tis_mode": "mask"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_a_step_is_that_of_a_float64_model_fed_one_sample_at_a_time(
    folders: dict[str, Path], name: str, settings: dict[str, Any]
):
    """The gradient is seen through AdamW with a large eps, whose first update is −lr · g / (|g| + eps)."""
    rate, eps, limit = 0.5, 3.0, 0.4
    backend = make(folders[name], lr=rate, adam_eps=eps, clip_grad=limit, micro_batch_tokens=24, **settings)
    reference = in_float64(backend.model)
    batch = batch_of(16, seed=4)
    metrics = backend.step(batch)

    pairs = [reference_logprobs(reference, sample, backend.settings.temperature) for sample in batch.samples]
    logprobs, entropy = (torch.cat([pair[place] for pair in pairs]) for place in (0, 1))
    behaviour = np.concatenate([sample.payload.logprobs[sample.loss_mask] for sample in batch.samples])
    advantages = [sample.advantage for sample in batch.samples for trained in sample.loss_mask if trained]
    inputs = TokenInputs(
        logprobs,
        torch.tensor(behaviour, dtype=torch.float64),
        logprobs.detach(),
        torch.tensor(advantages, dtype=torch.float64),
    )
    used = LossSettings(
        eps_clip=backend.settings.eps_clip,
        eps_clip_high=backend.settings.eps_clip_high,
        tis_clip=backend.settings.tis_clip,
        tis_mode=backend.settings.tis_mode,
    )
    per_token, is_clipped, _ = LOSSES[backend.settings.loss_function](inputs, used)
    loss = per_token.mean() - backend.settings.entropy_coef * entropy.mean()
    loss.backward()
    parameters = list(reference.parameters())
    norm = math.sqrt(sum(float((parameter.grad**2).sum()) for parameter in parameters))
    assert norm > limit  # clipping is part of what is compared
    n_tokens = len(logprobs)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert metrics["clip_fraction"] == pytest.approx(is_clipped.sum().item() / n_tokens)
    assert metrics["entropy"] == pytest.approx(entropy.mean().item(), rel=1e-4)
    log_ratio = (logprobs.detach() - inputs.behaviour).numpy()
    assert metrics["mean_abs_log_ratio"] == pytest.approx(abs(log_ratio).mean(), rel=1e-4)
    assert metrics["kl_k3"] == pytest.approx((np.exp(log_ratio) - 1 - log_ratio).mean(), rel=1e-3)
    assert metrics["n_tokens"] == n_tokens == backend.trajectory_sums[:, 0].sum()
    for ours, theirs in zip(backend.model.parameters(), parameters, strict=True):
        gradient = theirs.grad * (limit / norm)
        want = theirs.detach() - rate * gradient / (gradient.abs() + eps)
        assert (ours.double() - want).abs().max().item() < 3e-6


@pytest.mark.parametrize("name", MODELS)
def test_splitting_into_micro_batches_changes_the_gradient_by_rounding_only(
    folders: dict[str, Path], name: str
):
    batch = batch_of(24, seed=1)
    backends = [make(folders[name], adam_eps=1.0, micro_batch_tokens=size) for size in (1, 30, 100_000)]
    norms = [backend.step(batch)["grad_norm"] for backend in backends]
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)
    one, *others = (torch.cat([p.detach().reshape(-1) for p in b.model.parameters()]) for b in backends)
    for other in others:
        assert (one - other).abs().max().item() < 1e-6


def test_several_minibatches_are_several_steps_of_their_own_samples(folder: Path):
    """Each is the token mean over its own samples, against the proximal policy of the step's beginning."""
    settings = {"loss": "decoupled_ppo", "num_steps_per_rollout": 3, "adam_eps": 1.0, "lr": 0.2}
    backend = make(folder, **settings)
    reference, model = in_float64(backend.model), backend.model
    batch = batch_of(17, seed=6)
    parts = minibatches(flatten(batch.samples), 3, batch.seed)
    assert sorted(np.concatenate(parts).tolist()) == list(range(17)) and [len(part) for part in parts] == [
        6,
        6,
        5,
    ]
    with torch.no_grad():
        proximal = [reference_logprobs(reference, sample)[0] for sample in batch.samples]
    optimizer = torch.optim.AdamW(
        reference.parameters(), lr=0.2, betas=(0.9, 0.95), eps=1.0, weight_decay=0.0
    )
    for part in parts:
        samples = [batch.samples[place] for place in part]
        inputs = TokenInputs(
            torch.cat([reference_logprobs(reference, sample)[0] for sample in samples]),
            torch.cat(
                [torch.tensor(sample.payload.logprobs[sample.loss_mask]).double() for sample in samples]
            ),
            torch.cat([proximal[place] for place in part]),
            torch.cat(
                [torch.full([int(s.loss_mask.sum())], s.advantage, dtype=torch.float64) for s in samples]
            ),
        )
        optimizer.zero_grad()
        LOSSES["decoupled_ppo"](inputs, LossSettings()).loss.mean().backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
    backend.step(batch)
    assert backend.optimizer_steps == 3
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert (ours.double() - theirs).abs().max().item() < 2e-5


def test_minibatches_depend_on_the_seed_alone_and_leave_out_what_has_no_token():
    flat = flatten(batch_of(40, seed=3).samples)
    one, same, other = (minibatches(flat, 4, seed) for seed in (1, 1, 2))
    assert [part.tolist() for part in one] == [part.tolist() for part in same]
    assert [part.tolist() for part in one] != [part.tolist() for part in other]
    assert minibatches(flat, 1, 1)[0].tolist() == list(range(40))
    few = flatten(batch_of(2, seed=3).samples)
    assert [len(part) for part in minibatches(few, 4, 0)] == [1, 1]


def test_training_raises_the_likelihood_of_what_was_good(folder: Path):
    backend, batch = make(folder, lr=0.02), batch_of(8, seed=2)
    good = batch._replace(samples=[sample._replace(advantage=1.0) for sample in batch.samples])

    def mean_logprob() -> float:
        # log-ratio + behaviour = log-prob; sums of the last step's forward
        behaviour = sum(float(sample.payload.logprobs.sum()) for sample in good.samples)
        return (backend.trajectory_sums[:, 1].sum() + behaviour) / backend.trajectory_sums[:, 0].sum()

    backend.step(good)
    before = mean_logprob()
    for _ in range(4):
        backend.step(good)
    assert mean_logprob() > before + 0.1


# ---------------------------------------------------------------- the same bits
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("steps", [1, 3])
def test_the_same_state_and_batches_give_the_same_bits(
    folders: dict[str, Path], name: str, steps: int, tmp_path: Path
):
    results = []
    for which in ("one", "two"):
        torch.manual_seed(len(results))  # the global generator does not matter
        backend = make(
            folders[name], num_steps_per_rollout=steps, loss="decoupled_ppo", micro_batch_tokens=40
        )
        torch.manual_seed(0)
        for number in range(3):
            backend.step(batch_of(12, seed=number, step=number + 1))
        results.append((digest(backend.weights()), every_bit(backend, tmp_path / which)))
    assert results[0] == results[1]


def test_lost_doubled_or_reordered_samples_change_the_bits(folder: Path):
    samples = batch_of(12, seed=1).samples

    def after(chosen: list) -> str:
        backend = make(folder)
        backend.step(TrainBatch(1, 0, 0, chosen))
        return digest(backend.weights())

    assert len({after(samples), after(samples[1:]), after([samples[0], *samples])}) == 3


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_and_loaded_trainer_goes_on_with_the_same_bits(
    folders: dict[str, Path], name: str, tmp_path: Path
):
    settings = {"lr_warmup": 3, "lr_schedule": "linear", "total_steps": 20, "num_steps_per_rollout": 2}
    backend, other = make(folders[name], **settings), make(folders[name], **settings)
    for number in range(2):
        backend.step(batch_of(12, seed=number))
    state = every_bit(backend, tmp_path / "state")
    rng = torch.get_rng_state()
    torch.manual_seed(99)
    other.load(tmp_path / "state")
    assert every_bit(other, tmp_path / "again") == state and torch.equal(torch.get_rng_state(), rng)
    for each in (backend, other):
        assert each.step(batch_of(12, seed=7))["lr"] == pytest.approx(0.01 * (1 - 2 / 17))  # optimizer step 6
    assert every_bit(backend, tmp_path / "one") == every_bit(other, tmp_path / "two")


def test_a_saved_state_is_a_hugging_face_folder(folders: dict[str, Path], tmp_path: Path):
    backend = make(folders["gpt2-tied"])
    backend.step(batch_of(8))
    backend.snapshot()(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    assert digest(model.state_dict()) == digest(backend.weights())


# ---------------------------------------------------------------- bad steps
def poisoned(batch: TrainBatch, place: int, advantage: float) -> TrainBatch:
    samples = list(batch.samples)
    samples[place] = samples[place]._replace(advantage=advantage)
    return batch._replace(samples=samples)


def unmasked(batch: TrainBatch) -> TrainBatch:
    """Every sample has something to train."""
    samples = [sample._replace(loss_mask=np.ones_like(sample.loss_mask)) for sample in batch.samples]
    return batch._replace(samples=samples)


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("n_minibatches", [1, 3])
@pytest.mark.parametrize(
    ("advantage", "reason"),
    [(math.nan, "nonfinite_loss"), (-math.inf, "nonfinite_loss"), (-1e37, "nonfinite_gradient")],
)
def test_a_bad_step_leaves_every_bit_as_it_was(
    folder: Path, tmp_path: Path, before: int, n_minibatches: int, advantage: float, reason: str
):
    backend = make(folder, num_steps_per_rollout=n_minibatches, loss="tis", weight_decay=0.1)
    for number in range(before):
        backend.step(batch_of(12, seed=number))
    state = every_bit(backend, tmp_path / "before")
    bad = unmasked(batch_of(12, seed=5))
    # in the last minibatch: those before it have moved the weights already
    place = int(minibatches(flatten(bad.samples), n_minibatches, bad.seed)[-1][-1])
    bad = poisoned(bad, place, advantage)
    with pytest.raises(BadStep) as caught:
        backend.step(bad)
    assert caught.value.reason == reason
    assert every_bit(backend, tmp_path / "after") == state
    assert all(parameter.grad is None for parameter in backend.model.parameters())
    # and the next step is that of a trainer which never saw the bad one
    other = make(folder, num_steps_per_rollout=n_minibatches, loss="tis", weight_decay=0.1)
    for number in (*range(before), 9):
        other.step(batch_of(12, seed=number))
    backend.step(batch_of(12, seed=9))
    assert digest(backend.weights()) == digest(other.weights())


def test_any_other_failure_in_the_middle_of_a_step_puts_the_state_back_too(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    backend = make(folder, num_steps_per_rollout=2)
    state = every_bit(backend, tmp_path / "before")
    take, calls = backend._stepper._minibatch, []

    def fails_at_the_second(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError("no memory")
        return take(*arguments, **named)

    monkeypatch.setattr(backend._stepper, "_minibatch", fails_at_the_second)
    with pytest.raises(MemoryError):
        backend.step(batch_of(12))
    assert every_bit(backend, tmp_path / "after") == state


def test_a_batch_without_a_trainable_token_is_a_bad_step(folder: Path, tmp_path: Path):
    backend = make(folder)
    state = every_bit(backend, tmp_path / "before")
    samples = [sample._replace(loss_mask=np.zeros_like(sample.loss_mask)) for sample in batch_of(5).samples]
    for chosen in (samples, []):
        with pytest.raises(BadStep, match="no_trainable_tokens") as caught:
            backend.step(TrainBatch(1, 0, 0, chosen))
        assert caught.value.reason == "no_trainable_tokens"
    assert every_bit(backend, tmp_path / "after") == state


def test_samples_that_the_model_cannot_take_are_a_bad_step_and_not_a_crash(folder: Path):
    backend, batch = make(folder), batch_of(4)
    payload = batch.samples[2].payload
    ids = payload.response_ids.copy()
    ids[-1] = 23
    samples = list(batch.samples)
    samples[2] = samples[2]._replace(payload=payload._replace(response_ids=ids))
    with pytest.raises(BadStep, match="bad_token_id: 0-2/0/0: token 23, the model has 23"):
        backend.step(batch._replace(samples=samples))
    with pytest.raises(BadStep, match=r"too_long: .* tokens, the model takes 16"):
        backend.step(batch_of(8, longest=40))


# ---------------------------------------------------------------- loading
@pytest.fixture
def saved(folder: Path, tmp_path: Path) -> tuple[TorchBackend, Path]:
    backend = make(folder)
    backend.step(batch_of(8))
    backend.snapshot()(tmp_path)
    return backend, tmp_path


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors", None, "model.safetensors: cannot be read"),
        ("model.safetensors", b"", "truncated"),
        ("optimizer.safetensors", None, "optimizer.safetensors: cannot be read"),
        ("optimizer.safetensors", b"\x00" * 50, "damaged"),
        ("rng.safetensors", None, "rng.safetensors: cannot be read"),
        ("trainer.json", None, "trainer.json: cannot be read"),
        ("trainer.json", b"{", "trainer.json: damaged"),
        ("trainer.json", b"[]", "list instead of an object"),
        ("trainer.json", b"{}", "optimizer_steps is None"),
    ],
)
def test_a_missing_or_damaged_part_is_refused_and_nothing_is_loaded(
    folder: Path, saved: tuple[TorchBackend, Path], name: str, content: bytes | None, message: str
):
    _, state = saved
    (state / name).unlink()
    if content is not None:
        (state / name).write_bytes(content)
    other = make(folder)
    before = digest(other.weights())
    with pytest.raises(CheckpointError, match=message):
        other.load(state)
    assert digest(other.weights()) == before and other.optimizer_steps == 0


def test_a_fresh_optimizer_must_be_asked_for(folder: Path, saved: tuple[TorchBackend, Path], tmp_path: Path):
    backend, state = saved
    (state / "optimizer.safetensors").unlink()
    other = make(folder)
    other.step(batch_of(8, seed=3))  # its own optimizer state must go
    with pytest.raises(CheckpointError, match="optimizer"):
        other.load(state)
    other.load(state, fresh_optimizer=True)
    assert digest(other.weights()) == digest(backend.weights()) and other.optimizer_steps == 0
    new = make(state)
    for each in (other, new):
        each.step(batch_of(8, seed=4))
    assert digest(other.weights()) == digest(new.weights())


def test_the_state_of_another_model_is_refused_with_the_first_names_that_differ(
    folders: dict[str, Path], saved: tuple[TorchBackend, Path]
):
    with pytest.raises(CheckpointError, match=r"lacks model\.embed_tokens\.weight, .* \(24 in all\)"):
        make(folders["qwen3"]).load(saved[1])


def test_a_state_made_with_other_threads_is_loaded_with_a_warning(
    folder: Path, saved: tuple[TorchBackend, Path], caplog: pytest.LogCaptureFixture
):
    path = saved[1] / "trainer.json"
    state = json.loads(path.read_text())
    state["made_with"]["threads"] = 48
    path.write_text(json.dumps(state))
    with caplog.at_level(logging.WARNING):
        make(folder).load(saved[1])
    assert "threads 48 then, 1 now: steps may not repeat bit for bit" in caplog.text


def test_a_model_folder_without_all_weights_is_refused(folder: Path, tmp_path: Path):
    from engine.weights import tensors

    shutil.copytree(folder, tmp_path / "half")
    path = tmp_path / "half" / "model.safetensors"
    kept = {name: tensor for name, tensor in tensors.read_raw(path).items() if "h.1.mlp.c_fc" not in name}
    content = {name: tensor._replace(data=tensor.data.copy()) for name, tensor in kept.items()}
    with open(path, "wb") as file:
        tensors.write_file(file, content, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"no weights for transformer\.h\.1\.mlp\.c_fc\.bias"):
        make(tmp_path / "half")
    with pytest.raises(ConfigError, match=r"model\.path = .*nowhere.*cannot be loaded"):
        make(tmp_path / "nowhere")


# ---------------------------------------------------------------- weights and settings
def test_published_weights_have_the_names_of_the_model_and_keep_ties(folders: dict[str, Path]):
    backend = make(folders["gpt2-tied"])
    weights = backend.weights()
    assert list(weights) == list(backend.model.state_dict())
    assert weights["lm_head.weight"].data_ptr() == weights["transformer.wte.weight"].data_ptr()


def test_bfloat16_trains_float32_weights_and_publishes_bfloat16(folders: dict[str, Path]):
    backend = make(folders["gpt2-tied"], dtype="bfloat16", lr=1e-5)
    before = copy.deepcopy(backend.model.state_dict())
    published = snapshot(backend.weights())
    metrics = backend.step(batch_of(8))
    assert math.isfinite(metrics["loss"]) and metrics["n_tokens"] > 0
    assert all(parameter.dtype is torch.float32 for parameter in backend.model.parameters())
    name = "transformer.ln_f.weight"  # about 1, where bfloat16 has steps of 4e-3 to 8e-3
    assert (backend.model.state_dict()[name] != before[name]).all()
    assert all(tensor.dtype is torch.bfloat16 for tensor in published.values())
    assert published["lm_head.weight"] is published["transformer.wte.weight"]


def test_learning_rates_rise_and_fall_as_set():
    def rates(steps: list[int], **settings: Any) -> list[float]:
        return [learning_rate(TorchSettings(lr=1.0, **settings), step) for step in steps]

    assert rates([1, 9]) == [1.0, 1.0]
    assert rates([1, 2, 3, 4, 5, 50], lr_warmup=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates([1, 2, 5, 8, 9, 99], lr_schedule="linear", total_steps=8, lr_end=0.2) == pytest.approx(
        [1.0, 0.9, 0.6, 0.3, 0.2, 0.2]
    )
    held = rates([1, 4, 5, 7, 9], lr_schedule="linear", total_steps=8, lr_hold=0.5, lr_end=0.2)
    assert held == pytest.approx([1.0, 1.0, 1.0, 0.6, 0.2])
    assert rates([2, 3, 5, 7, 8], lr_schedule="cosine", total_steps=6, lr_warmup=2) == pytest.approx(
        [1.0, 1.0, 0.5, 0.0, 0.0]
    )


def test_the_rate_of_each_step_is_used_and_reported(folder: Path):
    backend = make(folder, lr=0.1, lr_warmup=2, adam_eps=1e-12, clip_grad=0)
    for want in (0.05, 0.1):
        before = copy.deepcopy(backend.model.state_dict())
        assert backend.step(batch_of(8))["lr"] == want
        if want == 0.05:  # the first step of Adam moves every weight with a gradient by exactly the rate
            moves = (backend.model.state_dict()["lm_head.weight"] - before["lm_head.weight"]).abs()
            assert moves.max().item() == pytest.approx(0.05, rel=1e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float16"}, "needs loss scaling"),
        ({"lr_schedule": "linear"}, r"needs a number of steps; set run\.steps"),
        ({"temperature": 0.0}, "must be above 0"),
    ],
)
def test_settings_that_cannot_be_done_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        TorchSettings(**settings)


def test_the_backend_answers_the_protocol(folder: Path):
    backend: TrainerBackend = make(folder)
    metrics = backend.step(batch_of(4))
    assert {"loss", "grad_norm", "clip_fraction", "entropy", "n_tokens", "seconds", "lr", "ess_token"} <= set(
        metrics
    )
    assert all(isinstance(value, float) for value in metrics.values())
