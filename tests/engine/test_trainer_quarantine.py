"""Whole runs on the in-memory log in which one of two engines records log-probs that are not its own."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from consumers.ledger import Ledger
from consumers.telemetry import trajectory_sums
from engine.interfaces import TrainBatch
from engine.trainer.loop import Trainer
from engine.trainer.scalar_backend import ScalarBackend
from engine.weights.store import digest
from replay.ledger import RunView, read_run
from replay.verify import verify
from streams import trajectory
from streams.events import (
    BatchCut,
    EngineQuarantined,
    EngineReady,
    EpochStarted,
    Metrics,
    Progress,
    StepMeasured,
    TrajectoryFinished,
)
from streams.trajectory import SampleData
from tests.support.events import events, put
from tests.support.world import World

LENGTH = 16  # policy tokens of a sample
TRUE = np.linspace(-0.9, -0.1, LENGTH, dtype=np.float32)  # their log-probs, whatever the version
LIMIT = 0.1  # nat per token
BENT = "rollout-1"


class Measuring(ScalarBackend):
    """Knows what the log-probs should be."""

    def step(self, batch: TrainBatch) -> dict[str, float]:
        metrics = super().step(batch)
        masks = [sample.loss_mask for sample in batch.samples]
        ratios = [
            TRUE[mask] - each.payload.logprobs[mask] for each, mask in zip(batch.samples, masks, strict=True)
        ]
        owners = np.repeat(np.arange(len(masks)), [int(mask.sum()) for mask in masks])
        self.trajectory_sums = trajectory_sums(np.concatenate(ratios), owners, len(masks))
        return metrics


class Fleet(World):
    """Partition p is served by engine rollout-p. `shift` says by how much an incarnation's log-probs are wrong.

    An engine that is quarantined starts anew as its next incarnation as soon as its daemon reads that.
    """

    def __init__(self, folder: Path, *, shift=lambda engine, incarnation: 0.0, **settings) -> None:
        defaults = {"batch": 4, "n_samples": 4, "limit": 1, "rows": 8, "data_epochs": None, "steps": 24}
        super().__init__(folder, **{**defaults, "max_logprob_mismatch": LIMIT, **settings})
        self.shift = shift
        self.numbers = {f"rollout-{partition}": 1 for partition in range(self.topics.partitions)}
        self.told: set[tuple[str, int, int]] = set()

    def backend(self) -> ScalarBackend:
        return Measuring()

    def incarnation(self, engine: str) -> str:
        return f"{engine}#{self.numbers[engine]}"

    def move(self, name: str) -> bool:
        stage = self.stages.get(name)
        if name in self.numbers and stage is not None:
            is_quarantined = (name, self.incarnation(name)) in stage.ledger.quarantined
            if is_quarantined:
                self.numbers[name] += 1
                self.crash(name)
        return super().move(name)

    def packed(self, sample: SampleData, progress: Progress, partition: int) -> TrajectoryFinished:
        engine = f"rollout-{partition}"
        incarnation, (epoch, version, _) = self.incarnation(engine), sample.versions[0]
        if (incarnation, epoch, version) not in self.told:
            self.told.add((incarnation, epoch, version))
            self.acknowledge(engine, incarnation, epoch, version)
        sample.engine, sample.response_ids = engine, list(range(LENGTH))
        sample.logprobs = np.minimum(TRUE + self.shift(engine, incarnation), 0)
        sample.loss_mask, sample.versions = [1] * LENGTH, [(epoch, version, LENGTH)]
        return trajectory.pack(sample, progress=progress, incarnation=incarnation)

    def acknowledge(self, engine: str, incarnation: str, epoch: int, version: int) -> None:
        digest = next(
            each.digest
            for each in read_run(self.log, self.topics).versions
            if (each.epoch, each.version) == (epoch, version)
        )
        event = EngineReady(
            engine=engine, incarnation=incarnation, epoch=epoch, version=version, digest=digest
        )
        put(self.log, self.topics, "fleet", event)

    # -- what came of it
    @property
    def view(self) -> RunView:
        return read_run(self.log, self.topics)

    def written(self, kind: type) -> list:
        return [event for event in events(self.log, self.topics, "ledger") if isinstance(event, kind)]

    def samples(self) -> list[list[TrajectoryFinished]]:
        """Per partition, by offset."""
        return [events(self.log, self.topics, "trajectories", each) for each in range(self.topics.partitions)]

    def makers_trained(self) -> dict[int, set[str]]:
        """Step → incarnations whose samples it trained."""
        samples = self.samples()
        return {
            cut.event.step: {
                samples[group.partition][member.trajectory_offset].incarnation
                for group in cut.event.groups
                for member in group.members
            }
            for cut in self.view.cuts
        }


def first_is_bent(engine: str, incarnation: str) -> float:
    return -0.4 if incarnation == f"{BENT}#1" else 0.0


def drops(world: Fleet) -> list[str]:
    return [each.drop.reason for each in world.view.drops]


def test_an_engine_whose_log_probs_are_off_is_quarantined_and_nothing_of_it_is_trained_from_then_on(tmp_path):
    world = Fleet(tmp_path, shift=first_is_bent)
    try:
        ledger = world.run(random.Random(4))
        [(offset, record)] = world.view.quarantines
        assert (record.engine, record.incarnation) == (BENT, f"{BENT}#1")
        assert record.mismatch == pytest.approx(0.4, rel=1e-3) and record.limit == LIMIT
        assert record.n_samples >= 16 and record.n_tokens == LENGTH * record.n_samples
        before = {cut.event.step for cut in world.view.cuts if cut.offset < offset}
        trained = world.makers_trained()
        assert any(f"{BENT}#1" in trained[step] for step in before), "it was trusted first"
        after = set().union(*(makers for step, makers in trained.items() if step not in before))
        assert after == {"rollout-0#1", f"{BENT}#2"}, "its next incarnation is judged by its own samples"
        assert "quarantined" in drops(world)
        details = {each.drop.detail for each in world.view.drops if each.drop.reason == "quarantined"}
        assert details == {f"made by {BENT} {BENT}#1"}
        assert ledger.finished is not None and ledger.finished.step == 24
        assert verify(world.log, world.topics).holds
    finally:
        world.close()


def test_the_mismatch_of_each_engine_is_a_metric_and_the_compared_samples_are_on_record(tmp_path):
    world = Fleet(tmp_path, shift=first_is_bent, max_logprob_mismatch=None, steps=8)
    try:
        world.run(random.Random(4))
        assert not world.view.quarantines, "without a limit it is measured only"
        metrics = [
            event for event in events(world.log, world.topics, "metrics") if isinstance(event, Metrics)
        ]
        values = [event.values for event in metrics if event.source == "trainer"]
        bent = [each[f"mismatch/{BENT}"] for each in values if f"mismatch/{BENT}" in each]
        good = [each["mismatch/rollout-0"] for each in values if "mismatch/rollout-0" in each]
        assert bent == pytest.approx([0.4] * len(bent), rel=1e-3) and good == pytest.approx([0.0] * len(good))
        assert bent and good
        largest = [each[f"mismatch_max/{BENT}"] for each in values if f"mismatch_max/{BENT}" in each]
        assert largest == pytest.approx([0.4] * len(largest), rel=1e-3)
        cuts = {(cut.event.epoch, cut.event.step): cut.event for cut in world.view.cuts}
        measured = [
            each for each in events(world.log, world.topics, "metrics") if isinstance(each, StepMeasured)
        ]
        samples = world.samples()
        for event in measured:
            cut = cuts[event.epoch, event.step]
            places = np.frombuffer(event.compared, "<i2")
            members = [(group.partition, member) for group in cut.groups for member in group.members]
            for place, (partition, member) in zip(places, members, strict=True):
                made = samples[partition][member.trajectory_offset]
                assert (place >= 0) == (member.staleness == 0)
                assert place < 0 or tuple(event.engines[place]) == (made.engine, made.incarnation)
    finally:
        world.close()


def test_a_trainer_killed_right_after_the_record_refuses_the_same_engine_when_it_is_back(tmp_path):
    world = Fleet(tmp_path, shift=first_is_bent)
    killed = []

    def kill(ledger: Ledger) -> None:
        if ledger.quarantined and not killed:
            killed.append(ledger.step)
            world.crash("trainer")

    try:
        world.run(random.Random(4), meanwhile=kill)
        assert len(killed) == 1 and len(world.written(EpochStarted)) == 2
        assert len(world.view.quarantines) == 1
        assert all(
            f"{BENT}#1" not in makers for step, makers in world.makers_trained().items() if step > killed[0]
        )
        assert "quarantined" in drops(world)
        assert verify(world.log, world.topics).holds
    finally:
        world.close()


def test_a_trainer_killed_just_before_the_record_comes_to_the_same_judgement(tmp_path, monkeypatch):
    world = Fleet(tmp_path, shift=first_is_bent)
    append, killed = Trainer._append, []

    def dies(trainer: Trainer, event) -> int:
        if isinstance(event, EngineQuarantined) and not killed:
            killed.append(event)
            raise KeyboardInterrupt
        return append(trainer, event)

    monkeypatch.setattr(Trainer, "_append", dies)
    try:
        with pytest.raises(KeyboardInterrupt):
            world.run(random.Random(4))
        assert not world.view.quarantines
        world.crash("trainer")
        world.move("trainer")
        [(_, record)] = world.view.quarantines
        was = killed[0]
        assert (record.mismatch, record.n_samples, record.n_tokens, record.step) == (
            was.mismatch, was.n_samples, was.n_tokens, was.step
        )  # fmt: skip
        assert record.epoch > was.epoch
        world.run(random.Random(5))
        assert len(world.view.quarantines) == 1
        assert verify(world.log, world.topics).holds
    finally:
        world.close()


def test_the_quarantine_of_a_fenced_trainer_is_void(tmp_path):
    world = Fleet(tmp_path)
    try:
        world.move("trainer")
        first = world.view.epoch
        world.crash("trainer")
        world.move("trainer")
        late = EngineQuarantined(
            epoch=first, engine="rollout-0", incarnation="rollout-0#1", step=1, mismatch=1.0, limit=LIMIT,
            n_samples=64, n_tokens=1024,
        )  # fmt: skip
        put(world.log, world.topics, "ledger", late)
        world.run(random.Random(6))
        assert not world.view.quarantines and "quarantined" not in drops(world)
        assert any("rollout-0#1" in makers for makers in world.makers_trained().values())
        assert verify(world.log, world.topics).holds
    finally:
        world.close()


def test_an_engine_that_stays_bad_is_quarantined_once_for_each_of_its_incarnations(tmp_path):
    def twice(engine: str, incarnation: str) -> float:
        return -0.4 if incarnation in (f"{BENT}#1", f"{BENT}#2") else 0.0

    world = Fleet(tmp_path, shift=twice, steps=40)
    try:
        world.run(random.Random(7))
        assert [each.incarnation for _, each in world.view.quarantines] == [f"{BENT}#1", f"{BENT}#2"]
        assert f"{BENT}#3" in set().union(*world.makers_trained().values())
        assert verify(world.log, world.topics).holds
    finally:
        world.close()


def test_a_trainer_without_any_trusted_engine_says_whom_it_waits_for_and_goes_on_with_their_next_incarnations(
    tmp_path,
):
    def all_bent(engine: str, incarnation: str) -> float:
        return -0.4 if incarnation.endswith("#1") else 0.0

    world = Fleet(tmp_path, shift=all_bent)
    said: set[str] = set()

    def listen(ledger: Ledger) -> None:
        trainer = world.stages.get("trainer")
        if trainer is not None and len(ledger.quarantined) == 2 and trainer._is_published:
            said.add(trainer._waits_for())

    try:
        world.run(random.Random(8), meanwhile=listen)
        assert any(
            "quarantined so far, and of use again once started anew: rollout-0, rollout-1" in each
            for each in said
        )
        assert world.view.finished is not None and verify(world.log, world.topics).holds
    finally:
        world.close()


@pytest.mark.parametrize("seed", range(6))
def test_whoever_is_killed_nothing_of_a_quarantined_engine_is_trained_and_every_group_has_its_outcome(
    tmp_path, seed
):
    world = Fleet(tmp_path, shift=first_is_bent, steps=16)
    try:
        world.run(random.Random(seed), crash_rate=0.02, most_crashes=25)
        report = verify(world.log, world.topics)
        assert report.holds, report.as_table()
        assert {each.incarnation for _, each in world.view.quarantines} == {f"{BENT}#1"}
    finally:
        world.close()


def test_the_outcome_of_a_replayed_step_does_not_depend_on_the_quarantine(tmp_path):
    """What was cut before stays cut: recovery trains it again, and comes to the same weights."""
    world = Fleet(tmp_path, shift=first_is_bent, checkpoint_every=1000)
    try:
        world.run(random.Random(4))
        published = {each.version: each.digest for each in world.view.versions}
        assert any(f"{BENT}#1" in makers for makers in world.makers_trained().values())
        world.crash("trainer")
        cuts = len(world.written(BatchCut))
        again = world.trainer()
        again.close()
        assert again.step == cuts and again.ledger.quarantined.keys() == {(BENT, f"{BENT}#1")}
        assert digest(again.backend.weights()) == published[again.version]
    finally:
        world.close()
