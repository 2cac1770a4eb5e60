"""The trainer loop on the in-memory log, with the trainer of one number."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import Future
from datetime import timedelta

import msgspec
import pytest

from consumers.staleness import Judgement
from engine.interfaces import BadStep
from engine.trainer.loop import TooManyBadSteps, Trainer
from engine.trainer.scalar_backend import ScalarBackend
from engine.weights.store import WeightStore
from streams.errors import ConfigError, Fenced, LogError, LogFull, LogUnavailable, RecordsLost
from streams.events import (
    BatchCut,
    CheckpointSaved,
    EpochStarted,
    GroupsDropped,
    LimitChanged,
    Paused,
    Resumed,
    RunFinished,
    RunStarted,
    StepSkipped,
    WeightsPublished,
)
from tests.support.events import EPOCH, completed, events, finished, put, run_log, task
from tests.support.world import World


class Bench:
    """One trainer and a log that a test fills by hand: groups of two members with payloads."""

    def __init__(self, folder, **settings) -> None:
        self.world = World(folder, partitions=1, data_epochs=None, **{"batch": 2, "limit": 2, **settings})
        self.log, self.topics = self.world.log, self.world.topics
        self.trainer = self.world.trainer()
        self.flush()

    def flush(self) -> None:
        self.trainer._publisher.flush(timedelta(seconds=10))
        self.trainer._saver.flush(timedelta(seconds=10))

    def group(self, seq: int, version: int = 0, offset: int | None = None) -> None:
        offsets = [
            put(
                self.log, self.topics, "trajectories", finished(seq, index, seq, version=version, n_samples=2)
            )
            for index in range(2)
        ]
        event = completed(seq, version=version, offsets=offsets if offset is None else [offset] * 2)
        put(self.log, self.topics, "groups", event)

    def settle(self) -> None:
        for _ in range(50):
            moved = self.trainer.round()
            self.flush()
            if not moved:
                return
        raise AssertionError("the trainer never comes to rest")

    def ledger(self, kind) -> list:
        return [event for event in events(self.log, self.topics, "ledger") if isinstance(event, kind)]


@pytest.fixture
def bench(tmp_path):
    made = Bench(tmp_path)
    yield made
    made.trainer.close()
    made.world.close()


def test_a_run_begins_with_its_manifest_its_epoch_and_version_zero(bench):
    kinds = [type(event) for event in events(bench.log, bench.topics, "ledger")]
    assert kinds == [RunStarted, EpochStarted, WeightsPublished]
    assert bench.trainer.epoch == EPOCH == 1
    assert bench.ledger(WeightsPublished)[0].version == 0


def test_the_batch_is_written_before_the_step_and_says_everything_about_it(bench, monkeypatch):
    seen = []
    step = bench.trainer.backend.step
    monkeypatch.setattr(
        bench.trainer.backend,
        "step",
        lambda batch: (seen.append(len(bench.ledger(BatchCut))), step(batch))[1],
    )
    for seq in range(3):
        bench.group(seq)
    bench.settle()
    assert seen == [1]
    (cut,) = bench.ledger(BatchCut)
    assert (cut.step, cut.version, cut.limit, cut.on_stale, cut.epoch) == (1, 0, 2, "drop", EPOCH)
    assert [group.seq for group in cut.groups] == [0, 1]
    assert (cut.frontier, cut.closed_above, cut.positions) == (2, [], [2])
    assert [member.uid for member in cut.groups[1].members] == ["0-1/0/0", "0-1/1/0"]
    assert bench.ledger(WeightsPublished)[-1].version == 1


def test_stale_groups_are_reported_at_once_while_no_batch_can_be_cut(bench):
    bench.trainer.version = 3  # three versions on, limit 2
    bench.group(0, version=0)
    bench.settle()
    (dropped,) = bench.ledger(GroupsDropped)
    assert [(drop.seq, drop.reason, drop.staleness) for drop in dropped.drops] == [(0, "stale", 3)]
    assert dropped.frontier == 1 and not bench.ledger(BatchCut)


def test_a_bad_step_changes_nothing_publishes_nothing_and_is_recorded(bench, monkeypatch):
    before = bench.trainer.backend.weights()["w"].tobytes()

    def broken(batch):
        raise BadStep("nonfinite_loss", "loss is nan")

    monkeypatch.setattr(bench.trainer.backend, "step", broken)
    for seq in range(2):
        bench.group(seq)
    bench.settle()
    (skipped,) = bench.ledger(StepSkipped)
    assert (skipped.step, skipped.version, skipped.reason) == (1, 0, "nonfinite_loss")
    assert bench.trainer.backend.weights()["w"].tobytes() == before
    assert [event.version for event in bench.ledger(WeightsPublished)] == [0]
    monkeypatch.undo()
    for seq in range(2, 4):
        bench.group(seq)
    bench.settle()
    assert [(cut.step, cut.version) for cut in bench.ledger(BatchCut)] == [(1, 0), (2, 0)]
    assert bench.ledger(WeightsPublished)[-1].version == 1


def test_too_many_bad_steps_in_a_row_stop_the_run(tmp_path, monkeypatch):
    bench = Bench(tmp_path, max_bad_steps=1)

    def broken(batch):
        raise BadStep("nonfinite_gradient")

    monkeypatch.setattr(bench.trainer.backend, "step", broken)
    for seq in range(4):
        bench.group(seq)
    with pytest.raises(TooManyBadSteps, match="2 steps in a row"):
        bench.settle()
    bench.trainer.close()
    bench.world.close()


def test_a_group_whose_payload_cannot_be_used_is_dropped_before_any_cut_names_it(bench):
    bench.group(0, offset=99)
    bench.group(1)
    bench.group(2)
    bench.settle()
    (cut,) = bench.ledger(BatchCut)
    assert [group.seq for group in cut.groups] == [1, 2]
    drops = [drop for event in bench.ledger((BatchCut, GroupsDropped)) for drop in event.drops]
    assert [(drop.seq, drop.reason) for drop in drops] == [(0, "bad_payload")]
    assert "0-0/0/0" in drops[0].detail


def test_a_pause_stops_cutting_and_a_changed_limit_binds_from_the_next_cut(bench):
    put(bench.log, bench.topics, "ledger", Paused(by="me"))
    for seq in range(2):
        bench.group(seq)
    bench.settle()
    assert not bench.ledger(BatchCut)
    put(bench.log, bench.topics, "ledger", LimitChanged(limit=5, by="me"))
    put(bench.log, bench.topics, "ledger", Resumed(by="me"))
    bench.settle()
    (cut,) = bench.ledger(BatchCut)
    assert cut.limit == 5
    changed = next(
        offset
        for offset, event in enumerate(events(bench.log, bench.topics, "ledger"))
        if isinstance(event, LimitChanged)
    )
    assert cut.ledger_read_to > changed


def test_a_limit_that_was_changed_from_a_step_on_binds_at_that_step_and_not_before(bench):
    put(bench.log, bench.topics, "ledger", LimitChanged(limit=0, from_step=2, by="me"))
    for seq in range(4):
        bench.group(seq)  # all of version 0
    bench.settle()
    assert [(cut.step, cut.limit) for cut in bench.ledger(BatchCut)] == [(1, 2)]
    (dropped,) = bench.ledger(GroupsDropped)
    assert [(drop.seq, drop.reason, drop.staleness) for drop in dropped.drops] == [
        (2, "stale", 1),
        (3, "stale", 1),
    ]
    for seq in range(4, 6):
        bench.group(seq, version=1)
    bench.settle()
    assert [(cut.step, cut.limit) for cut in bench.ledger(BatchCut)] == [(1, 2), (2, 0)]


def test_a_change_of_the_limit_outlives_the_trainer_that_had_read_it(bench):
    put(bench.log, bench.topics, "ledger", LimitChanged(limit=5))
    put(bench.log, bench.topics, "ledger", LimitChanged(limit=1, from_step=3))
    for seq in range(2):
        bench.group(seq)
    bench.settle()
    bench.trainer.close()
    bench.trainer = bench.world.trainer()
    bench.flush()
    for seq in range(2, 6):
        bench.group(seq, version=1)
    bench.settle()
    assert [event.limit for event in bench.ledger(EpochStarted)] == [2, 5]
    assert [(cut.step, cut.limit) for cut in bench.ledger(BatchCut)] == [(1, 5), (2, 5), (3, 1)]


def test_a_newer_epoch_fences_this_trainer_before_it_steps(bench, monkeypatch):
    stepped = []
    monkeypatch.setattr(bench.trainer.backend, "step", stepped.append)
    put(bench.log, bench.topics, "ledger", EpochStarted(producer="other", started_ms=0))
    for seq in range(2):
        bench.group(seq)
    with pytest.raises(Fenced, match=r"epoch 3 \(other\) has taken over"):
        bench.trainer.round()
    assert not stepped


def test_a_zombie_that_wakes_between_its_read_and_its_cut_takes_no_step(bench, monkeypatch):
    """The new epoch's record lands just before the zombie's cut, which is then void."""
    stepped = []
    monkeypatch.setattr(bench.trainer.backend, "step", stepped.append)
    for seq in range(2):
        bench.group(seq)
    append = bench.trainer._append

    def late(event):
        if isinstance(event, BatchCut):
            put(bench.log, bench.topics, "ledger", EpochStarted(producer="other", started_ms=0))
        return append(event)

    monkeypatch.setattr(bench.trainer, "_append", late)
    with pytest.raises(Fenced):
        bench.trainer.round()
    assert not stepped


def test_a_full_disk_pauses_the_trainer_and_it_goes_on_when_there_is_room(bench, monkeypatch, caplog):
    refusals = iter([LogFull("no room")] * 2)
    append = bench.log.append

    def full(topic, partition, records, *rest):
        if topic == bench.topics.name("ledger") and (error := next(refusals, None)) is not None:
            raise error
        return append(topic, partition, records, *rest)

    monkeypatch.setattr(bench.log, "append", full)
    for seq in range(2):
        bench.group(seq)
    bench.settle()
    assert len(bench.ledger(BatchCut)) == 1
    assert "trainer: paused, run.ledger/0 cannot be written" in caplog.text


@pytest.mark.parametrize(("last_batch", "steps", "surplus"), [("train", 2, 0), ("drop", 1, 1)])
def test_the_short_last_batch_is_trained_or_dropped_as_configured(tmp_path, last_batch, steps, surplus):
    world = World(tmp_path, rows=3, data_epochs=1, batch=2, last_batch=last_batch)
    try:
        ledger = world.run(random.Random(1))
        written = events(world.log, world.topics, "ledger")
    finally:
        world.close()
    drops = [
        drop for event in written if isinstance(event, (BatchCut, GroupsDropped)) for drop in event.drops
    ]
    assert ledger.finished is not None and ledger.finished.step == steps
    assert [drop.reason for drop in drops] == ["surplus"] * surplus


def test_weights_are_published_each_interval_and_at_the_end(tmp_path):
    world = World(tmp_path, data_epochs=None, steps=5, limit=2, update_weights_interval=2)
    try:
        world.run(random.Random(2))
        written = events(world.log, world.topics, "ledger")
    finally:
        world.close()
    versions = [event.version for event in written if isinstance(event, WeightsPublished)]
    assert versions[:3] == [0, 2, 4] and versions[-1] == 5


def test_a_finished_run_is_left_as_it_is(tmp_path):
    world = World(tmp_path, rows=4, data_epochs=1)
    try:
        world.run(random.Random(3))
        world.crash("trainer")
        before = len([e for e in events(world.log, world.topics, "ledger") if isinstance(e, RunFinished)])
        again = world.trainer()
        assert again.run is not None and again.ledger.finished is not None
        again.close()
        after = events(world.log, world.topics, "ledger")
    finally:
        world.close()
    assert before == 1 and sum(isinstance(event, RunFinished) for event in after) == 1


def test_a_resumed_trainer_goes_on_from_its_checkpoint_and_never_goes_back(tmp_path):
    bench = Bench(tmp_path)
    for seq in range(6):
        bench.group(seq)
    bench.settle()
    assert bench.trainer.step == 3
    weights = bench.trainer.backend.weights()["w"].tobytes()
    assert [event.step for event in bench.ledger(CheckpointSaved)] == [2]
    bench.trainer.close()
    again = bench.world.trainer()
    again._publisher.flush(timedelta(seconds=10))
    assert (again.step, again.version) == (3, 3)
    assert again.backend.weights()["w"].tobytes() == weights
    published = bench.ledger(WeightsPublished)
    assert [event.version for event in published] == [0, 1, 2, 3, 3]
    assert published[-1].epoch == again.epoch > EPOCH and published[-1].forked_at == 3
    again.close()
    bench.world.close()


def test_without_any_checkpoint_the_whole_ledger_is_replayed(tmp_path):
    bench = Bench(tmp_path, checkpoint_every=1000)
    for seq in range(4):
        bench.group(seq)
    bench.settle()
    weights = bench.trainer.backend.weights()["w"].tobytes()
    bench.trainer.close()
    again = bench.world.trainer()
    assert (again.step, again.backend.weights()["w"].tobytes()) == (2, weights)
    again.close()
    bench.world.close()


def test_versions_that_come_out_differently_are_a_fork(tmp_path, monkeypatch):
    """Another learning rate after the restart: what was published after the checkpoint is another future."""
    bench = Bench(tmp_path)
    for seq in range(6):
        bench.group(seq)
    bench.settle()
    bench.trainer.close()
    monkeypatch.setattr("tests.support.world.ScalarBackend", lambda: ScalarBackend(lr=0.5))
    again = bench.world.trainer()
    again._publisher.flush(timedelta(seconds=10))
    newest = bench.ledger(WeightsPublished)[-1]
    assert (newest.version, newest.forked_at) == (3, 2)
    assert again.ledger.lineage is not None
    again.ledger.catch_up()
    assert again.ledger.lineage.effective(EPOCH, 3) == 2
    again.close()
    bench.world.close()


def test_a_trainer_is_refused_a_log_with_another_number_of_partitions(tmp_path):
    from streams.errors import TopicMismatch

    log, _ = run_log(partitions=3)
    with pytest.raises(TopicMismatch):
        World(tmp_path, partitions=2, log=log)


def test_a_step_whose_skip_was_never_written_does_not_block_the_run(tmp_path, monkeypatch):
    """Killed between BatchCut and StepSkipped: the groups of that cut must not count as untrained for ever."""
    bench = Bench(tmp_path, limit=0)
    bench.group(0)
    bench.group(1)

    def refuse(batch):
        raise BadStep("nonfinite_loss", "inf")

    monkeypatch.setattr(ScalarBackend, "step", lambda self, batch: refuse(batch))
    monkeypatch.setattr(bench.trainer, "_skip", lambda cut, bad: None)  # kill -9 just before it
    bench.settle()
    assert len(bench.ledger(BatchCut)) == 1 and not bench.ledger(StepSkipped)
    bench.trainer.close()
    again = bench.world.trainer()
    again._publisher.flush(timedelta(seconds=10))
    again.ledger.catch_up()
    assert [(event.step, event.version) for event in bench.ledger(StepSkipped)] == [(1, 0)]
    assert again.ledger.untrained_groups == 0
    again.close()
    third = bench.world.trainer()  # and it is written once
    third._publisher.flush(timedelta(seconds=10))
    assert len(bench.ledger(StepSkipped)) == 1
    third.close()
    bench.world.close()


def test_a_recorded_skip_is_skipped_in_replay_whatever_this_machine_makes_of_it(tmp_path, monkeypatch):
    bench = Bench(tmp_path, checkpoint_every=1000)

    def refuse(batch):
        raise BadStep("nonfinite_loss", "inf")

    bench.group(0)
    bench.group(1)
    with monkeypatch.context() as patched:
        patched.setattr(bench.trainer.backend, "step", refuse)
        bench.settle()
    weights = bench.trainer.backend.weights()["w"].tobytes()
    bench.trainer.close()
    again = bench.world.trainer()
    assert (again.step, again.version) == (1, 0)
    assert again.backend.weights()["w"].tobytes() == weights
    again.close()
    bench.world.close()


def test_a_version_that_cannot_be_published_ends_the_trainer_and_not_only_its_thread(bench, monkeypatch):
    """At limit 0 the trainer has no later version to publish: everybody waits for this one."""

    def full(*args, **kwargs):
        raise OSError("no room")

    monkeypatch.setattr(bench.trainer.store, "publish", full)
    bench.group(0)
    bench.group(1)
    bench.trainer.round()
    bench.trainer._publisher._idle.wait(10)
    with pytest.raises(OSError, match="no room"):
        bench.trainer.round()


def test_nothing_is_cut_before_the_ledger_says_where_the_older_epoch_forks(tmp_path, monkeypatch):
    """Tokens of an abandoned version 3 are as old as the fork point, 2, from the first cut on."""
    bench = Bench(tmp_path)
    for seq in range(6):
        bench.group(seq)
    bench.settle()
    bench.trainer.close()
    monkeypatch.setattr("tests.support.world.ScalarBackend", lambda: ScalarBackend(lr=0.5))
    for seq in range(6, 8):
        bench.group(seq, version=3)
    allowed = threading.Event()
    write = WeightStore.publish
    monkeypatch.setattr(
        WeightStore, "publish", lambda *args, **named: (allowed.wait(10), write(*args, **named))[1]
    )
    again = bench.world.trainer()
    assert not again.round() and "version 3 to be published" in again._waits_for()
    assert len(bench.ledger(BatchCut)) == 3
    allowed.set()
    again._publisher.flush(timedelta(seconds=10))
    assert again.round()
    cut = bench.ledger(BatchCut)[-1]
    assert {member.staleness for group in cut.groups for member in group.members} == {1}
    again.close()
    bench.world.close()


def test_an_outage_while_payloads_are_fetched_drops_nothing(bench, monkeypatch):
    bench.group(0)
    bench.group(1)
    read = bench.log.read

    def away(topic, *args, **named):
        if topic == bench.topics.name("trajectories"):
            raise LogUnavailable("the broker is gone")
        return read(topic, *args, **named)

    with monkeypatch.context() as patched:
        patched.setattr(bench.log, "read", away)
        with pytest.raises(LogUnavailable):
            bench.trainer.round()
    bench.settle()
    assert [group.seq for group in bench.ledger(BatchCut)[0].groups] == [0, 1]
    assert not bench.ledger(GroupsDropped)


def test_payloads_of_a_cut_are_fetched_once_also_when_it_names_drops(bench, monkeypatch):
    bench.trainer.version = 3
    bench.group(0, version=0)  # stale
    for seq in range(1, 3):
        bench.group(seq, version=0)
    fetched = []
    fetch = bench.trainer.payloads.fetch
    monkeypatch.setattr(
        bench.trainer.payloads, "fetch", lambda *place: (fetched.append(place), fetch(*place))[1]
    )
    monkeypatch.setattr(
        "consumers.batches.refused",
        lambda event, rule: Judgement("stale", 3, 0) if event.seq == 0 else None,
    )
    bench.settle()
    assert [drop.seq for drop in bench.ledger(BatchCut)[0].drops] == [0]
    assert len(fetched) == 4


@pytest.mark.parametrize("when", ["live", "recovering"])
def test_a_trainer_stops_within_two_seconds_although_the_ledger_takes_nothing(bench, monkeypatch, when):
    bench.trainer.close()
    folder = bench.world.folder
    store = WeightStore(folder / "weights", keep=50)
    again = Trainer(
        bench.log, bench.topics, ScalarBackend(), store, bench.world.settings, folder / "checkpoints"
    )
    started, failing = threading.Event(), threading.Event()
    submit = bench.log.submit

    def full(topic, partition, records):
        if topic == bench.topics.name("ledger") and failing.is_set():
            started.set()
            future = Future()
            future.set_exception(LogFull("no room"))
            return future
        return submit(topic, partition, records)

    monkeypatch.setattr(bench.log, "submit", full)
    if when == "recovering":
        failing.set()
    asked = threading.Event()
    codes = []
    thread = threading.Thread(target=lambda: codes.append(again.run(asked.is_set)), daemon=True)
    thread.start()
    if when == "live":
        while again.ledger.published is None or not again._is_published:
            time.sleep(0.01)
        failing.set()
        bench.group(0)
        bench.group(1)
    assert started.wait(10)
    asked.set()
    thread.join(2)
    assert codes == [0]


def test_a_log_that_holds_a_run_of_another_configuration_is_refused(bench):
    settings = bench.world.settings
    bench.world.settings = msgspec.structs.replace(settings, config_fingerprint="another")
    with pytest.raises(ConfigError, match=r"holds run .* of another configuration"):
        bench.world.trainer()
    bench.world.settings = settings
    bench.world.trainer().close()


def test_a_late_copy_of_its_own_epoch_is_no_takeover(bench):
    mine = next(event for event in bench.ledger(EpochStarted))
    put(bench.log, bench.topics, "ledger", mine)
    with pytest.raises(LogUnavailable, match=r"own EpochStarted .* landed late"):
        bench.trainer.round()
    again = bench.world.trainer()  # and a fresh start goes on
    assert again.epoch > bench.trainer.epoch
    again.close()


def lose_groups(bench, before: int = 3) -> None:
    """Six groups are complete, the first three records of them are removed before a second trainer has read any."""
    for seq in range(6):
        put(bench.log, bench.topics, "tasks", task(seq, n_samples=2))
    for seq in range(6):
        offsets = [
            put(bench.log, bench.topics, "trajectories", finished(seq, index, seq, n_samples=2))
            for index in range(2)
        ]
        put(
            bench.log,
            bench.topics,
            "groups",
            completed(seq, offsets=offsets, frontier=seq + 1, progress={}),
        )
    put(bench.log, bench.topics, "tasks", task(6, n_samples=2))  # still open
    bench.log.truncate_before(bench.topics.name("groups"), 0, before)


def test_a_trainer_whose_groups_were_removed_unread_stops_and_says_so(bench):
    lose_groups(bench)
    with pytest.raises(RecordsLost, match=r"trainer: 3 events of run\.groups/0 are lost \(offsets 0 to 2\)"):
        bench.world.trainer()


def test_a_trainer_told_to_continue_drops_the_removed_groups_by_name_and_trains_the_rest(tmp_path):
    bench = Bench(tmp_path, on_lost="continue")
    try:
        lose_groups(bench)
        bench.trainer.close()
        bench.trainer = bench.world.trainer()
        bench.flush()
        bench.settle()
        (first, *_) = bench.ledger(BatchCut)
        assert [(drop.seq, drop.reason) for drop in first.drops] == [(0, "lost"), (1, "lost"), (2, "lost")]
        trained = [group.seq for cut in bench.ledger(BatchCut) for group in cut.groups]
        assert trained == [3, 4]
        assert bench.trainer.losses.count == 3
        assert bench.trainer.ledger.frontier == 5 and not bench.trainer.ledger.is_closed(6)
    finally:
        bench.trainer.close()
        bench.world.close()


def test_a_living_trainer_that_retention_overtakes_drops_the_removed_groups_and_trains_what_waits(tmp_path):
    bench = Bench(tmp_path, on_lost="continue")
    try:
        put(bench.log, bench.topics, "tasks", task(7, n_samples=2))
        bench.group(7)  # waits in the trainer's memory when its record goes
        bench.settle()
        lose_groups(bench, before=4)
        bench.settle()
        dropped = [(drop.seq, drop.reason) for cut in bench.ledger(BatchCut) for drop in cut.drops]
        assert dropped == [(0, "lost"), (1, "lost"), (2, "lost")]
        trained = [group.seq for cut in bench.ledger(BatchCut) for group in cut.groups]
        assert trained == [3, 4, 5, 7] and bench.trainer.losses.count == 3
        assert bench.trainer.ledger.frontier == 6, "group 6 alone is open"
    finally:
        bench.trainer.close()
        bench.world.close()


def test_a_trainer_that_ended_between_a_gap_and_its_drops_leaves_them_to_the_next_one(tmp_path):
    bench = Bench(tmp_path, on_lost="continue")
    try:
        lose_groups(bench)
        cut_past_the_gap = BatchCut(
            epoch=EPOCH, version=0, step=1, groups=[], positions=[5], frontier=0, closed_above=[(3, 5)],
            limit=2, on_stale="drop", seed=0, ledger_read_to=3, cut_ms=1,
        )  # fmt: skip
        put(bench.log, bench.topics, "ledger", cut_past_the_gap)
        put(bench.log, bench.topics, "ledger", StepSkipped(epoch=EPOCH, step=1, version=0, reason="test"))
        bench.trainer.close()
        bench.trainer = bench.world.trainer()
        bench.flush()
        bench.settle()
        (drops,) = bench.ledger(GroupsDropped)
        assert [(drop.seq, drop.reason) for drop in drops.drops] == [(0, "lost"), (1, "lost"), (2, "lost")]
        assert drops.frontier == 5
    finally:
        bench.trainer.close()
        bench.world.close()


def test_a_trainer_that_cannot_make_a_step_again_says_what_is_missing(bench):
    for seq in range(2):
        bench.group(seq)
    bench.settle()
    assert len(bench.ledger(BatchCut)) == 1
    bench.log.truncate_before(bench.topics.name("trajectories"), 0, 2)
    with pytest.raises(LogError, match=r"step 1 cannot be made again from the log: .* removed by retention"):
        bench.world.trainer()


def test_a_fenced_trainer_names_the_other_one(bench):
    other = bench.world.trainer()
    other._publisher.flush(timedelta(seconds=10))
    try:
        with pytest.raises(
            Fenced, match=rf"epoch {other.epoch} \(trainer-\d+-[0-9a-f]+ on .+\) has taken over"
        ):
            bench.trainer.round()
    finally:
        other.close()


def test_a_zombie_removes_no_checkpoint_of_the_trainer_that_took_over(tmp_path):
    bench = Bench(tmp_path, checkpoint_every=1, checkpoint_keep_last=1)
    for seq in range(2):
        bench.group(seq)
    bench.settle()
    (kept,) = [path for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith("e")]
    other = bench.world.trainer()
    bench.trainer._write_checkpoint(bench.trainer.backend.snapshot(), 9, 9, 9)  # it was frozen meanwhile
    assert kept.exists()
    assert bench.world.trainer().step == 1
    other.close()
    bench.trainer.close()
    bench.world.close()


def test_of_two_first_trainers_the_one_with_another_configuration_begins_no_epoch(tmp_path):
    world = World(tmp_path)
    late = world.trainer
    world.settings = msgspec.structs.replace(world.settings, config_fingerprint="another")
    other = RunStarted(
        run="run",
        config_fingerprint="test",
        partitions=world.topics.partitions,
        rollout_batch_size=2,
        n_samples_per_prompt=2,
        seed=3,
        started_ms=0,
    )
    put(world.log, world.topics, "ledger", other)
    with pytest.raises(ConfigError, match="another configuration"):
        late()
    assert [type(event) for event in events(world.log, world.topics, "ledger")] == [RunStarted]
    world.close()
