"""What the trainer records of each step (StepMeasured) is what the step was: its samples, in the order of its cut."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from consumers.staleness import Lineage
from consumers.telemetry import BAND, SUMS
from engine.interfaces import BadStep, TrainBatch
from engine.trainer.loop import Trainer
from engine.trainer.payloads import Payloads, train_batch
from engine.trainer.scalar_backend import ScalarBackend
from engine.trainer.torch_backend import TorchBackend
from engine.trainer.torch_settings import TorchSettings
from streams.events import BatchCut, StepMeasured, StepSkipped
from tests.engine.trainer_support import folder_of, in_float64, reference_logprobs, tiny_gpt2
from tests.support.events import events
from tests.support.world import World


def measured(world: World) -> dict[int, list[StepMeasured]]:
    """step → every event about it."""
    found: dict[int, list[StepMeasured]] = {}
    for event in events(world.log, world.topics, "metrics"):
        if isinstance(event, StepMeasured):
            found.setdefault(event.step, []).append(event)
    return found


def cuts(world: World) -> list[BatchCut]:
    return [event for event in events(world.log, world.topics, "ledger") if isinstance(event, BatchCut)]


class Numbering(ScalarBackend):
    """Measures of a sample that say which one it was, and in which step."""

    def step(self, batch: TrainBatch) -> dict[str, float]:
        metrics = super().step(batch)
        self.trajectory_sums = np.array([number_of(batch.step, each.uid) for each in batch.samples])
        return metrics


def number_of(step: int, uid: str) -> list[float]:
    group, index, attempt = uid.split("/")
    epoch, row = group.split("-")
    return [float(each) for each in (step, epoch, row, index, attempt)] + [0.0] * (len(SUMS) - 5)


def run(
    folder: Path, backend: Callable[[], object], monkeypatch, crash_rate: float = 0.0, **settings
) -> World:
    monkeypatch.setattr("tests.support.world.ScalarBackend", backend)
    world = World(folder, **settings)
    world.run(random.Random(4), crash_rate=crash_rate)
    return world


def rows(event: StepMeasured) -> np.ndarray:
    return np.frombuffer(event.sums, "<f8").reshape(event.n_samples, len(event.names))


@pytest.mark.parametrize("crash_rate", [0.0, 0.05])
def test_each_step_is_measured_once_and_row_by_row_as_its_cut_names_its_samples(
    tmp_path, monkeypatch, crash_rate
):
    world = run(tmp_path, Numbering, monkeypatch, crash_rate, rows=8)
    try:
        found = measured(world)
        assert [len(each) for each in found.values()] == [1] * len(found)
        assert (
            len(found) == len(cuts(world)) == 8
        )  # World throws a trainer away only between two of its rounds
        for cut in cuts(world):
            (event,) = found[cut.step]
            assert (event.epoch, event.version, event.names) == (cut.epoch, cut.version, list(SUMS))
            members = [member.uid for group in cut.groups for member in group.members]
            assert rows(event).tolist() == [number_of(cut.step, uid) for uid in members]
    finally:
        world.close()


def test_what_the_torch_trainer_records_equals_a_recomputation_from_the_log(tmp_path, monkeypatch):
    """Bit for bit against a second trainer that takes the same steps, and against a float64 model fed one by one."""
    model = folder_of(tiny_gpt2(), tmp_path / "model")
    threads = torch.get_num_threads()

    def backend() -> TorchBackend:
        return TorchBackend(model, TorchSettings(lr=0.01, threads=1))

    world = run(tmp_path / "run", backend, monkeypatch)
    again, payloads = backend(), Payloads(world.log, world.topics)
    try:
        for cut in cuts(world):
            batch = train_batch(cut, payloads, Lineage())
            expected = [reference_row(again, sample) for sample in batch.samples]
            metrics = again.step(batch)
            (event,) = measured(world)[cut.step]
            assert event.sums == again.trajectory_sums.astype("<f8").tobytes()
            assert rows(event)[:, :9] == pytest.approx(np.array(expected), rel=1e-4, abs=1e-5)
            assert {name: event.values[name] for name in metrics if name != "seconds"} == {
                name: value for name, value in metrics.items() if name != "seconds"
            }
            assert event.values["step_s"] > 0 and event.values["wait_s"] >= 0
    finally:
        world.close()
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)


def reference_row(backend: TorchBackend, sample) -> list[float]:
    """The first nine sums of one sample, each formula spelled out."""
    logprobs, _ = reference_logprobs(in_float64(backend.model), sample)
    ratios = (logprobs.detach().numpy() - sample.payload.logprobs[sample.loss_mask]).tolist()
    weights = [float(np.exp(each)) for each in ratios]
    return [
        len(ratios),
        sum(ratios),
        sum(abs(each) for each in ratios),
        sum(each**2 for each in ratios),
        sum(weights),
        sum(each**2 for each in weights),
        sum(each < BAND[0] for each in weights),
        sum(each > BAND[1] for each in weights),
        max(weights),
    ]


def test_the_trainer_of_one_number_measures_no_sample(tmp_path, monkeypatch):
    world = run(tmp_path, ScalarBackend, monkeypatch)
    try:
        found = measured(world)
        assert sorted(found) == [cut.step for cut in cuts(world)]
        for (event,) in found.values():
            assert (event.n_samples, event.sums) == (0, b"")
            assert {"loss", "grad_norm", "step_s", "wait_s"} <= set(event.values)
    finally:
        world.close()


def test_a_step_whose_trainer_died_before_it_was_measured_is_not_measured_by_the_next_one(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("tests.support.world.ScalarBackend", Numbering)
    world = World(tmp_path, rows=8, checkpoint_every=1000)
    report = Trainer._report

    def dies(trainer: Trainer, cut: BatchCut, *rest) -> None:
        if cut.step == 3 and world.crashes == 0:
            raise KeyboardInterrupt
        report(trainer, cut, *rest)

    monkeypatch.setattr(Trainer, "_report", dies)
    try:
        with pytest.raises(KeyboardInterrupt):
            world.run(random.Random(4))
        world.crash("trainer")
        world.run(random.Random(5))
        assert sorted(measured(world)) == [1, 2, 4, 5, 6, 7, 8]
        assert all(len(each) == 1 for each in measured(world).values())
    finally:
        world.close()


def test_a_step_that_was_skipped_is_not_measured(tmp_path, monkeypatch):
    world = run(tmp_path, Refusing, monkeypatch, rows=8)
    try:
        skipped = [e.step for e in events(world.log, world.topics, "ledger") if isinstance(e, StepSkipped)]
        assert skipped == [2]
        assert sorted(measured(world)) == [1, 3, 4, 5, 6, 7, 8]
    finally:
        world.close()


class Refusing(Numbering):
    def step(self, batch: TrainBatch) -> dict[str, float]:
        if batch.step == 2:
            raise BadStep("nonfinite_loss", "inf")
        return super().step(batch)
