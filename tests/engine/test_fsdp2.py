"""The fsdp2 trainer on 1, 2 and 4 processes over Gloo: the step of the torch trainer, its bits kept by bad steps and by
checkpoints, its weights whole."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule

from engine.interfaces import BadStep, CheckpointError
from engine.trainer import fsdp2, fsdp2_model
from engine.trainer.plan import plan_step
from engine.trainer.ranked_backend import RankedBackend
from engine.trainer.split import split
from engine.trainer.torch_backend import TorchBackend
from engine.trainer.torch_settings import TorchSettings
from engine.weights.tensors import digest
from tests.engine.ranks_support import SETTINGS, Worlds, torch_as_it_was
from tests.engine.trainer_support import batch_of, folder_of, tiny_gpt2, tiny_qwen3

pytestmark = pytest.mark.timeout(600)  # a process with torch takes its time to start on a busy machine
MANY: dict[str, Any] = {
    "loss": "decoupled_ppo",
    "num_steps_per_rollout": 2,
    "entropy_coef": 0.05,
    "kl_loss_coef": 0.1,
    "loss_aggregation": "prompt",
}

OF_THE_WHOLE: dict[str, Any] = {
    "loss": "m2po",
    "m2_threshold": 0.02,
    "advantage_estimator": "reinforce_plus_plus",
    "gamma": 0.9,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tiny_qwen3(), tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    with torch_as_it_was():
        made = Worlds(tmp_path_factory.mktemp("worlds"))
        try:
            yield made
        finally:
            made.close()
    assert made.gave_up == []


def alone(folder: Path, **settings: Any) -> TorchBackend:
    return TorchBackend(folder, TorchSettings(**(SETTINGS | settings)))


def same_step(ours: dict[str, float], theirs: dict[str, float]) -> None:
    for name in ("loss", "grad_norm", "entropy", "mean_abs_log_ratio", "clip_fraction"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-7), name
    assert ours["n_tokens"] == theirs["n_tokens"] and ours["lr"] == theirs["lr"]


def held_by_ranks(backend: RankedBackend, folder: Path) -> dict[str, bytes]:
    """Every byte of state that the ranks would save; `.metadata` has a random id."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    backend.snapshot()(folder)
    files = {path for path in folder.rglob("*") if path.is_file() and path.name != ".metadata"}
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


# ---------------------------------------------------------------- one rank, in this process
@pytest.mark.parametrize(
    "options",
    [{}, {"reshard_after_forward": False}, {"activation_checkpointing": True}, {"cpu_offload": True}],
    ids=lambda options: "-".join(options) or "plain",
)
def test_one_rank_takes_the_steps_of_the_torch_trainer_bit_for_bit(
    worlds: Worlds, folder: Path, options: dict[str, Any]
):
    backend, reference = worlds.of(1, folder, options=options, **MANY), alone(folder, **MANY)
    for step in (1, 2, 3):
        batch = batch_of(16, seed=step, step=step)
        same_step(backend.step(batch), reference.step(batch))
        assert digest(backend.weights()) == digest(reference.weights())


@pytest.mark.parametrize("tied", [False, True])
def test_gpt2_is_sharded_too_and_its_tied_head_stays_tied(worlds: Worlds, tmp_path: Path, tied: bool):
    folder = folder_of(tiny_gpt2(tied=tied), tmp_path)
    backend, reference = worlds.of(1, folder), alone(folder)
    batch = batch_of(16, seed=1)
    same_step(backend.step(batch), reference.step(batch))
    ours = backend.weights()
    assert digest(ours) == digest(reference.weights())
    head, embedding = ours["lm_head.weight"], ours["transformer.wte.weight"]
    assert (head.data_ptr() == embedding.data_ptr()) is tied


def test_bfloat16_computes_near_float32_and_keeps_float32_weights(worlds: Worlds, tmp_path: Path):
    model = tiny_qwen3()
    with torch.no_grad():
        for parameter in model.parameters():  # as small as weights are: large ones multiply the rounding
            parameter.mul_(0.2)
    folder = folder_of(model, tmp_path)
    backend, reference = worlds.of(1, folder, dtype="bfloat16"), alone(folder)
    batch = batch_of(40, seed=2)
    ours, theirs = backend.step(batch), reference.step(batch)
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-2)
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-2)
    assert {str(each.dtype) for each in backend.weights().values()} == {"torch.bfloat16"}
    shards = backend.rank.part.policy.shards  # pyright: ignore[reportAttributeAccessIssue]
    assert {each.dtype for each in shards.values()} == {torch.float32}


def test_a_single_rank_keeps_all_whole_until_the_last_micro_batch_of_a_step(
    worlds: Worlds, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    kept: list[bool] = []
    keep_whole = fsdp2_model.keep_whole

    def noted(model: Any, *, keep: bool) -> None:
        kept.append(keep)
        keep_whole(model, keep=keep)

    monkeypatch.setattr(fsdp2_model, "keep_whole", noted)
    backend = worlds.of(1, folder)
    layers = [module for module in backend.rank.part.model.modules() if isinstance(module, FSDPModule)]  # pyright: ignore[reportAttributeAccessIssue]
    assert len(layers) == 3  # two decoder layers and the root
    backend.step(batch_of(16, seed=1))
    assert len(kept) > 2 and kept == [True] * (len(kept) - 1) + [False]
    offloaded = worlds.of(1, folder, options={"cpu_offload": True})
    count = len(kept)
    offloaded.step(batch_of(16, seed=1))
    assert len(kept) == count  # each micro-batch is summed where the weights are


def test_a_trainer_that_failed_in_the_middle_of_a_step_takes_no_other(
    worlds: Worlds, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """Gradients of its first micro-batches are there still, and would be part of the next step."""
    backend = worlds.of(1, folder)
    calls = iter(range(100))
    token_logprobs = fsdp2.token_logprobs

    def failing(*arguments: Any, **options: Any) -> Any:
        if next(calls) == 2:
            raise torch.OutOfMemoryError("no room")
        return token_logprobs(*arguments, **options)

    monkeypatch.setattr(fsdp2, "token_logprobs", failing)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="no room"):
            backend.step(batch_of(16, seed=1))
        for again in (lambda: backend.step(batch_of(16, seed=1)), backend.weights, backend.snapshot):
            with pytest.raises(
                RuntimeError, match=r"ended in the middle of something \(OutOfMemoryError: no room\)"
            ):
                again()
    finally:
        worlds.close()


def test_what_stays_whole_between_micro_batches_gives_the_bits_of_shards_summed_after_each(
    worlds: Worlds, tmp_path: Path
):
    # not tied: both uses of a tied weight are added in another precision
    folder, digests = folder_of(tiny_gpt2(tied=False), tmp_path), []
    for stays_whole in (True, False):
        backend = worlds.of(1, folder, dtype="bfloat16")
        policy: Any = backend.rank.part.policy
        counted = []
        assert policy._stays_whole or not stays_whole
        policy._stays_whole = stays_whole
        for step in (1, 2):
            batch = batch_of(16, seed=step, step=step)
            flat = plan_step(batch, backend.settings).flat
            counted.append(len(policy.micro_batches(flat, np.arange(len(batch.samples)))))
            backend.step(batch)
        assert min(counted) > 2
        digests.append(digest(backend.weights()))
    assert digests[0] == digests[1]


# ---------------------------------------------------------------- two ranks
@pytest.mark.parametrize(
    ("settings", "options", "is_packed"),
    [
        (OF_THE_WHOLE, {}, True),
        (MANY, {}, False),
        (MANY, {"sync_each_micro_batch": False, "activation_checkpointing": True}, True),
    ],
    ids=["packed, what a loss needs of the whole batch", "padded", "summed once a minibatch"],
)
def test_two_ranks_take_the_steps_of_one_process(
    worlds: Worlds, folder: Path, settings: dict[str, Any], options: dict[str, Any], is_packed: bool
):
    backend = worlds.of(2, folder, options=options, packing=is_packed, **settings)
    policy: Any = backend.rank.part.policy
    assert policy._stays_whole is (not options.get("sync_each_micro_batch", True))
    reference = alone(folder, **settings)
    for step in (1, 2, 3):
        batch = batch_of(17, seed=step, step=step)
        same_step(backend.step(batch), reference.step(batch))
        np.testing.assert_allclose(backend.trajectory_sums, reference.trajectory_sums, rtol=2e-4, atol=2e-5)
    assert backend.optimizer_steps == reference.optimizer_steps >= 3
    for name, tensor in reference.weights().items():
        assert (backend.weights()[name] - tensor).abs().max().item() < 1e-5


def test_two_ranks_may_gather_and_sum_once_a_step(worlds: Worlds, folder: Path):
    n_units = 3  # two decoder layers and the root
    for each in (True, False):
        backend = worlds.of(2, folder, options={"sync_each_micro_batch": each})
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            backend.step(batch_of(16, seed=1))
        done = [event.name.partition(" (")[0] for event in profile.events() or ()]
        counts = [done.count(f"FSDP::{what}") for what in ("all_gather", "post_backward_reduce")]
        assert min(counts) >= 2 * n_units if each else counts == [n_units, n_units], counts


@pytest.mark.parametrize("settings", [MANY, {}], ids=["in the last of two minibatches", "in the only one"])
def test_what_is_not_finite_on_rank_1_alone_changes_no_bit_on_any_rank(
    worlds: Worlds, folder: Path, tmp_path: Path, settings: dict[str, Any]
):
    backend = worlds.of(2, folder, **settings)
    backend.step(batch_of(12, seed=1))
    before = held_by_ranks(backend, tmp_path / "before")
    assert {"model/__0_0.distcp", "model/__1_0.distcp", "optimizer/__1_0.distcp"} <= before.keys()
    bad = batch_of(12, seed=5)
    plan = plan_step(bad, backend.settings)
    shares = split(plan, 2)
    last = plan.parts[-1].rows  # those before it have moved the weights already
    of_rank_1 = plan.flat.sample[shares[1].tokens]
    place = next(int(row) for row in of_rank_1 if row in last)
    samples = list(bad.samples)
    samples[place] = samples[place]._replace(advantage=math.nan)
    with pytest.raises(BadStep) as caught:
        backend.step(bad._replace(samples=samples))
    assert caught.value.reason == "nonfinite_loss"
    assert held_by_ranks(backend, tmp_path / "after") == before
    backend.step(batch_of(12, seed=9))
    weights = digest(backend.weights())
    other = worlds.of(2, folder, **settings)  # and it goes on as one that never saw the bad step
    for seed in (1, 9):
        other.step(batch_of(12, seed=seed))
    assert digest(other.weights()) == weights


def test_two_ranks_hold_half_of_the_weights_each(worlds: Worlds, folder: Path):
    backend = worlds.of(2, folder)
    policy: Any = backend.rank.part.policy
    own = sum(shard.numel() for shard in policy.shards.values())
    whole = sum(parameter.numel() for parameter in policy.parameters.values())
    assert whole / 2 <= own <= whole / 2 + max(policy.parameters.values(), key=torch.numel).numel() / 2


def test_the_same_batches_give_the_same_bits_on_the_same_number_of_ranks(worlds: Worlds, folder: Path):
    digests = []
    for _ in range(2):
        backend = worlds.of(2, folder)
        for step in (1, 2):
            backend.step(batch_of(20, seed=step, step=step))
        digests.append(digest(backend.weights()))
    assert digests[0] == digests[1]


def test_a_batch_with_fewer_rows_than_ranks_is_a_step_like_any_other(worlds: Worlds, folder: Path):
    backend, reference = worlds.of(2, folder), alone(folder)
    batch = batch_of(1, seed=5)
    assert batch.samples[0].loss_mask.any()
    same_step(backend.step(batch), reference.step(batch))


def test_weights_come_whole_in_bounded_buckets_and_reused_memory(worlds: Worlds, folder: Path):
    reference = alone(folder)
    backend = worlds.of(2, folder)  # buckets of 2000 bytes; the largest weight has 1536
    full: Any = backend.rank.part._full  # pyright: ignore[reportAttributeAccessIssue]
    assert len(full._buckets) > 8
    in_use, places, rooms = None, set(), set()
    for _ in range(6):
        in_use = backend.weights()  # the version before is let go
        places.add(next(iter(in_use.values())).data_ptr())
        rooms.add(tuple(room.data_ptr() for room in full._room))
    assert in_use is not None and digest(in_use) == digest(reference.weights())
    assert list(in_use) == list(reference.weights())
    assert backend._rooms.made == len(places) == 2  # the version that is held, and the one that is made
    assert len(rooms) == 1
    assert [room.nbytes for room in full._room] <= [1000, 2000, 1600]


def test_a_save_goes_on_while_the_next_steps_are_taken(worlds: Worlds, folder: Path, tmp_path: Path):
    backend = worlds.of(2, folder)
    backend.step(batch_of(12, seed=1))
    held = digest(backend.weights())
    write = backend.snapshot()
    for seed in (2, 3):
        backend.step(batch_of(12, seed=seed))
    (tmp_path / "state").mkdir()
    write(tmp_path / "state")
    after = digest(backend.weights())
    backend.load(tmp_path / "state")
    assert digest(backend.weights()) == held != after
    for seed in (2, 3):
        backend.step(batch_of(12, seed=seed))
    assert digest(backend.weights()) == after


def test_a_snapshot_that_was_never_written_is_no_part_of_the_next(
    worlds: Worlds, folder: Path, tmp_path: Path
):
    backend = worlds.of(2, folder)
    backend.snapshot()  # a full disk, say, before any file of it
    backend.step(batch_of(12, seed=1))
    held = digest(backend.weights())
    held_by_ranks(backend, tmp_path / "state")
    backend.step(batch_of(12, seed=2))
    backend.load(tmp_path / "state")
    assert digest(backend.weights()) == held


def test_a_checkpoint_without_an_optimizer_is_refused_unless_a_fresh_one_is_asked_for(
    worlds: Worlds, folder: Path, tmp_path: Path
):
    backend = worlds.of(2, folder)
    backend.step(batch_of(12, seed=1))
    held = digest(backend.weights())
    held_by_ranks(backend, tmp_path / "state")
    shutil.rmtree(tmp_path / "state" / "optimizer")
    backend.step(batch_of(12, seed=2))
    before = digest(backend.weights())
    with pytest.raises(CheckpointError, match="optimizer: is missing"):
        backend.load(tmp_path / "state")
    assert digest(backend.weights()) == before and backend.optimizer_steps == 2
    backend.load(tmp_path / "state", fresh_optimizer=True)
    assert digest(backend.weights()) == held and backend.optimizer_steps == 0


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda state: (state / "model" / "__1_0.distcp").unlink(), "rank 1 cannot read its part"),
        (lambda state: (state / "model" / "__0_0.distcp").unlink(), "model: cannot be read"),
        (lambda state: (state / "model" / ".metadata").write_bytes(b"no pickle"), "model: cannot be read"),
        (lambda state: (state / "rng-1.safetensors").unlink(), "rank 1 cannot read its part"),
        (lambda state: (state / "trainer.json").unlink(), r"trainer\.json: cannot be read"),
        (lambda state: (state / "ranks.json").write_text("{}"), "ranks is None, a count is needed"),
    ],
    ids=[
        "the file of rank 1",
        "the file of rank 0",
        "metadata",
        "generators of rank 1",
        "counters",
        "number of ranks",
    ],
)
def test_a_damaged_checkpoint_is_refused_by_all_ranks_and_changes_nothing(
    worlds: Worlds, folder: Path, tmp_path: Path, damage: Any, reason: str
):
    backend = worlds.of(2, folder)
    held_by_ranks(backend, tmp_path / "state")
    damage(tmp_path / "state")
    backend.step(batch_of(12, seed=2))
    before = held_by_ranks(backend, tmp_path / "before")
    with pytest.raises(CheckpointError, match=reason):
        backend.load(tmp_path / "state")
    assert held_by_ranks(backend, tmp_path / "after") == before


def test_a_checkpoint_of_another_model_is_refused(worlds: Worlds, folder: Path, tmp_path: Path):
    backend = worlds.of(1, folder_of(tiny_gpt2(), tmp_path / "gpt2"))
    held_by_ranks(backend, tmp_path / "state")
    with pytest.raises(CheckpointError, match=r"model: lacks .*model\.embed_tokens\.weight"):
        worlds.of(1, folder).load(tmp_path / "state")


# ---------------------------------------------------------------- other numbers of ranks
@pytest.mark.slow
def test_saved_on_two_ranks_and_resumed_on_one_two_and_four(worlds: Worlds, folder: Path, tmp_path: Path):
    """Counters and every moment are the saved ones (difference 0), and the next step is that of the unbroken run."""
    backend = worlds.of(2, folder)
    for step in (1, 2):
        backend.step(batch_of(16, seed=step, step=step))
    held_by_ranks(backend, tmp_path / "two")
    weights, unbroken = digest(backend.weights()), backend.step(batch_of(16, seed=3, step=3))
    saved = whole_state(tmp_path / "two")
    for n_ranks in (2, 1, 4):  # in an order that keeps the one that is there
        other = worlds.of(n_ranks, folder)
        other.load(tmp_path / "two")
        assert other.optimizer_steps == 2 and digest(other.weights()) == weights
        held_by_ranks(other, tmp_path / f"again-{n_ranks}")
        again = whole_state(tmp_path / f"again-{n_ranks}")
        assert again.keys() == saved.keys()
        assert max(float((again[name] - saved[name]).abs().max()) for name in saved) == 0.0
        same_step(other.step(batch_of(16, seed=3, step=3)), unbroken)


def whole_state(folder: Path) -> dict[str, torch.Tensor]:
    """Weights and moments of a checkpoint, put together by torch itself."""
    from torch.distributed.checkpoint import format_utils

    found: dict[str, torch.Tensor] = {}
    for part in ("model", "optimizer"):
        out = folder / f"{part}.pt"
        format_utils.dcp_to_torch_save(folder / part, out)
        found |= torch.load(out)
    return found


def test_each_rank_goes_on_with_the_generators_that_it_saved(worlds: Worlds, folder: Path, tmp_path: Path):
    """Under one name for all ranks, rank 1 would go on with those of rank 0, and nobody would see it."""
    backend = worlds.of(2, folder)
    torch.manual_seed(123)  # of rank 0 alone
    before = held_by_ranks(backend, tmp_path / "state")
    ours, theirs = (load_file(tmp_path / "state" / f"rng-{rank}.safetensors")["cpu"] for rank in (0, 1))
    assert not torch.equal(ours, theirs)
    torch.manual_seed(7)
    backend.load(tmp_path / "state")
    assert held_by_ranks(backend, tmp_path / "again") == before


def test_a_checkpoint_of_the_torch_trainer_goes_on_in_shards(worlds: Worlds, folder: Path, tmp_path: Path):
    reference = alone(folder)
    for step in (1, 2):
        reference.step(batch_of(16, seed=step, step=step))
    (tmp_path / "state").mkdir()
    reference.snapshot()(tmp_path / "state")
    backend = worlds.of(2, folder)
    backend.load(tmp_path / "state")
    assert backend.optimizer_steps == 2 and digest(backend.weights()) == digest(reference.weights())
    same_step(backend.step(batch_of(16, seed=3)), reference.step(batch_of(16, seed=3)))
