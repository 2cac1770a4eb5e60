"""Retention that removed what a stage had not read (case O06): loud in every stage, counted where it may go on."""

from __future__ import annotations

from datetime import timedelta

import pytest

from consumers.collector import Collector
from consumers.dataset import Row
from consumers.feeder import Feeder
from consumers.ledger import Ledger
from consumers.losses import Losses, OnLost
from consumers.reward import RewardStage
from consumers.rewards.pool import ScoringPool
from consumers.runner import records_backwards, recover
from streams.errors import CorruptRecord, OffsetOutOfRange, RecordsLost
from streams.events import (
    DeadLetter,
    EpochStarted,
    GroupCompleted,
    GroupDropped,
    InputProgress,
    MembersMissing,
    Metrics,
    RewardAssigned,
    RunStarted,
    TaskDispatched,
)
from streams.log import Batch, NewRecord
from streams.memory import MemoryLog
from streams.topics import Topics
from tests.support.events import completed, decoded, events, finished, put, rewarded, run_log, task


def single(seq: int) -> TaskDispatched:
    return task(seq, n_samples=1)


def world_after_a_long_stop():
    """Eighty groups of one sample; the collector stopped after thirty, and retention has eaten fifty rewards."""
    log, topics = run_log()
    for seq in range(80):
        put(log, topics, "tasks", single(seq))
        put(log, topics, "rewards", rewarded(seq, 0, seq, 1.0, n_samples=1))
    progress = {"tasks": InputProgress(80, 30, []), "rewards": InputProgress(30, 30, [])}
    put(
        log,
        topics,
        "groups",
        completed(29, n_samples=1, frontier=30, progress=progress),
    )
    log.truncate_before(topics.name("rewards"), 0, 50)
    return log, topics


def settle(stage) -> None:
    for _ in range(50):
        if not stage.round():
            return
    raise AssertionError("the stage never comes to rest")


def test_a_collector_stops_and_says_which_events_it_has_lost():
    log, topics = world_after_a_long_stop()
    stage = Collector(log, topics)
    stage.start()
    with pytest.raises(RecordsLost) as caught:
        stage.round()
    assert (caught.value.topic, caught.value.partition) == (topics.name("rewards"), 0)
    assert (caught.value.begin, caught.value.end, caught.value.count) == (30, 50, 20)
    text = str(caught.value)
    assert "collector-0: 20 events of run.rewards/0 are lost (offsets 30 to 49)" in text
    assert 'log.on_lost = "continue"' in text and "log.retention_s" in text
    assert len(events(log, topics, "groups")) == 1, "it has written nothing"


def test_a_collector_told_to_continue_goes_on_at_the_earliest_and_counts(caplog: pytest.LogCaptureFixture):
    log, topics = world_after_a_long_stop()
    stage = Collector(log, topics, on_lost="continue", member_deadline=timedelta(seconds=1000))
    stage.start()
    settle(stage)
    outcomes = [event for event in events(log, topics, "groups")[1:] if isinstance(event, GroupCompleted)]
    assert [event.seq for event in outcomes] == list(range(50, 80)), "thirty, from 50 on, never from the end"
    metrics = [event for event in events(log, topics, "metrics") if isinstance(event, Metrics)]
    assert metrics[-1].values["lost"] == 20.0
    assert "20 events of run.rewards/0 are lost" in caplog.text


def test_inputs_that_were_finished_are_no_loss():
    log, topics = run_log()
    for seq in range(10):
        put(log, topics, "trajectories", finished(seq, 0, seq, n_samples=1))
    progress = {"trajectories": InputProgress(8, 2, [(4, 8)])}
    event = rewarded(7, 0, 7, 1.0, n_samples=1)
    put(log, topics, "rewards", RewardAssigned(**{**_fields(event), "progress": progress}))
    log.truncate_before(topics.name("trajectories"), 0, 6)
    losses = Losses("reward-0", "continue")
    place = recover(log, topics, "rewards", 0, ["trajectories"], losses)
    assert (place.positions["trajectories"], losses.count) == (6, 2)  # 2 and 3, for 4 and 5 were scored


def _fields(event) -> dict:
    return {name: getattr(event, name) for name in event.__struct_fields__}


def test_a_stage_that_never_wrote_anything_has_lost_what_it_never_read():
    log, topics = run_log()
    for seq in range(10):
        put(log, topics, "trajectories", finished(seq, 0, seq, n_samples=1))
    log.truncate_before(topics.name("trajectories"), 0, 4)
    with pytest.raises(RecordsLost, match=r"4 events of run\.trajectories/0 are lost \(offsets 0 to 3\)"):
        recover(log, topics, "rewards", 0, ["trajectories"])


def test_a_stage_whose_own_output_is_gone_says_so():
    log, topics = run_log()
    for seq in range(10):
        put(log, topics, "trajectories", finished(seq, 0, seq, n_samples=1))
        put(log, topics, "rewards", rewarded(seq, 0, seq, 1.0, n_samples=1))
    for word in ("trajectories", "rewards"):
        log.truncate_before(topics.name(word), 0, 10)
    with pytest.raises(RecordsLost, match="at most, for its own output, which says where it was"):
        recover(log, topics, "rewards", 0, ["trajectories"])


@pytest.mark.parametrize("on_lost", ["stop", "continue"])
def test_retention_that_overtakes_a_living_stage_is_a_loss_too(on_lost):
    log, topics = run_log()
    pool = ScoringPool("exact", {}, workers=0, timeout=timedelta(seconds=5), group=False)
    try:
        stage = RewardStage(log, topics, pool, on_lost=on_lost)
        stage.start()
        settle(stage)
        for seq in range(10):
            put(log, topics, "trajectories", finished(seq, 0, seq, n_samples=1))
        log.truncate_before(topics.name("trajectories"), 0, 3)
        if on_lost == "stop":
            with pytest.raises(RecordsLost, match="3 events"):
                stage.round()
            return
        settle(stage)
        assert [event.seq for event in events(log, topics, "rewards")] == list(range(3, 10))
        assert stage.losses.count == 3
        assert stage._lanes[0].inputs.progress() == InputProgress(10, 10, [])
    finally:
        pool.close()


def test_a_place_beyond_the_end_is_never_taken_for_a_loss():
    """The newest records are gone (a broker that lost its disk): no place to read from is right."""
    log, topics = run_log()
    put(log, topics, "tasks", single(0))
    with pytest.raises(OffsetOutOfRange):
        Losses("x", "continue").read(log, topics.name("tasks"), 0, 5)


def test_a_ledger_without_its_beginning_is_refused():
    log, topics = run_log()
    for started_ms in range(3):
        put(log, topics, "ledger", EpochStarted(producer="t", started_ms=started_ms))
    log.truncate_before(topics.name("ledger"), 0, 1)
    with pytest.raises(RecordsLost, match=r"run\.ledger: its first 1 records are gone"):
        Ledger(log, topics)


class Rows:
    def __len__(self) -> int:
        return 100

    def row(self, index: int) -> Row:
        return Row(f"prompt {index}", str(index), {})


def feeder(log, topics, on_lost: OnLost = "stop", **changes) -> Feeder:
    return Feeder(
        log,
        topics,
        Rows(),
        rollout_batch_size=4,
        n_samples=2,
        limit=1,
        shuffle=False,
        data_epochs=1,
        on_lost=on_lost,
        **changes,
    )


def begun(log, topics) -> None:
    put(
        log,
        topics,
        "ledger",
        RunStarted(
            run="run",
            config_fingerprint="f",
            partitions=1,
            rollout_batch_size=4,
            n_samples_per_prompt=2,
            seed=0,
            started_ms=1,
        ),
    )


def test_a_feeder_whose_open_dispatches_are_gone_stops_or_dispatches_them_anew(
    caplog: pytest.LogCaptureFixture,
):
    log, topics = run_log()
    begun(log, topics)
    first = feeder(log, topics)
    first.recover()
    first.round()
    assert [event.seq for event in events(log, topics, "tasks")] == list(range(8))
    log.truncate_before(topics.name("tasks"), 0, 3)
    with pytest.raises(RecordsLost, match=r"3 events of run\.tasks/0 are lost"):
        feeder(log, topics).recover()
    again = feeder(log, topics, "continue")
    again.recover()
    again.round()
    assert [event.seq for event in events(log, topics, "tasks")] == [3, 4, 5, 6, 7, 0, 1, 2]
    assert again.losses.count == 3 and "so many groups without an outcome" in caplog.text


def test_a_member_whose_dispatch_is_gone_is_asked_for_again_from_its_row(caplog: pytest.LogCaptureFixture):
    log, topics = run_log()
    begun(log, topics)
    stage = feeder(log, topics, "continue")
    stage.recover()
    stage.round()
    first = events(log, topics, "tasks")[1]
    log.truncate_before(topics.name("tasks"), 0, 3)
    missing = MembersMissing(
        group_id=first.group_id, seq=1, task_offset=1, indices=[1], attempt=1, reason="member_missing"
    )
    put(log, topics, "groups", missing)
    stage.round()
    again = events(log, topics, "tasks")[-1]
    assert (again.group_id, again.prompt, again.label) == (first.group_id, first.prompt, first.label)
    assert (again.indices, again.attempt, again.first_offset, again.n_samples) == ([1], 1, 1, 2)
    assert (
        "1 events" not in caplog.text and "2 events of run.tasks/0 are lost (offsets 1 to 2)" in caplog.text
    )


def test_terminal_events_that_the_feeder_missed_are_counted():
    log, topics = run_log()
    begun(log, topics)
    stage = feeder(log, topics, "continue")
    stage.recover()
    stage.round()
    for seq in range(4):
        put(
            log,
            topics,
            "groups",
            GroupDropped(group_id=f"0-{seq}", seq=seq, task_offset=seq, reason="zero_variance"),
        )
    log.truncate_before(topics.name("groups"), 0, 2)
    log.append(topics.name("groups"), 0, [NewRecord(b"\xc1")])
    stage.round()
    assert stage.losses.count == 2


def test_retention_that_overtakes_a_living_collector_in_tasks_leaves_no_group_without_an_outcome():
    log, topics = run_log()
    begun(log, topics)
    now = [1_000_000]
    source = feeder(log, topics, "continue", clock=lambda: now[0])
    source.recover()
    collector = Collector(log, topics, on_lost="continue", member_deadline=timedelta(seconds=1000))
    collector.start()
    collector.round()
    source.round()
    log.truncate_before(topics.name("tasks"), 0, 8)  # all of them, before anybody has read one
    settle(collector)
    assert collector.losses.count == 8 and not collector._lanes[0].open
    assert not source.round(), "it does not look all the time"
    now[0] += 10_000
    assert source.round()
    assert [event.seq for event in events(log, topics, "tasks")] == list(range(8)), "the same groups, once"
    settle(collector)
    assert [group.seq for group in collector._lanes[0].open.values()] == list(range(8))
    now[0] += 10_000
    assert not source.round(), "what is there is left alone"


def test_a_group_that_the_collector_had_opened_before_its_dispatch_was_removed_stays_one_group():
    log, topics = run_log()
    begun(log, topics)
    now = [1_000_000]
    source = feeder(log, topics, "continue", clock=lambda: now[0])
    source.recover()
    source.round()
    collector = Collector(log, topics, on_lost="continue", member_deadline=timedelta(seconds=1000))
    collector.start()
    settle(collector)
    log.truncate_before(topics.name("tasks"), 0, 2)
    now[0] += 10_000
    assert source.round()
    assert [event.seq for event in events(log, topics, "tasks")] == [2, 3, 4, 5, 6, 7, 0, 1]
    settle(collector)
    assert len(collector._lanes[0].open) == 8 and collector.counts["duplicates_total"] == 2
    assert collector.losses.count == 0


class HungryRetention(MemoryLog):
    """Removes three records more at each of the first `meals` reads of `tasks`."""

    meals = 0

    def read(self, topic: str, partition: int, position: int, **limits) -> Batch:
        if self.meals and topic.endswith("tasks"):
            self.meals -= 1
            self.truncate_before(topic, partition, position + 3)
        return super().read(topic, partition, position, **limits)


def test_retention_that_moves_again_while_a_loss_is_counted_is_a_loss_too():
    log, topics = HungryRetention(), Topics("run", 1)
    topics.create(log)
    for seq in range(10):
        put(log, topics, "tasks", single(seq))
    log.meals, losses = 2, Losses("x", "continue")
    batch = losses.read(log, topics.name("tasks"), 0, 0)
    assert (batch.records[0].offset, losses.count) == (6, 6)


def test_a_scan_backwards_ends_where_retention_catches_up_with_it():
    log, topics = run_log()
    for seq in range(600):
        put(log, topics, "tasks", single(seq))
    seen: list[int] = []
    for record in records_backwards(log, topics.name("tasks"), 0):
        seen.append(record.offset)
        if len(seen) == 10:
            log.truncate_before(topics.name("tasks"), 0, 300)
    assert seen == list(range(599, 299, -1))


class DamagedLog(MemoryLog):
    """The records [begin, end) of one topic fail their checksum."""

    topic, begin, end_of_damage = "", 0, 0

    def read(self, topic: str, partition: int, position: int, *, max_records: int = 500, **limits) -> Batch:
        if topic == self.topic and self.begin <= position < self.end_of_damage:
            raise CorruptRecord(
                topic, partition, position, self.end_of_damage, "its batch fails its checksum"
            )
        if topic == self.topic and position < self.begin:
            max_records = min(max_records, self.begin - position)
        return super().read(topic, partition, position, max_records=max_records, **limits)


def damaged_rewards():
    log, topics = DamagedLog(), Topics("run", 1)
    topics.create(log)
    for seq in range(10):
        put(log, topics, "tasks", single(seq))
        put(log, topics, "rewards", rewarded(seq, 0, seq, 1.0, n_samples=1))
    log.topic, log.begin, log.end_of_damage = topics.name("rewards"), 4, 6
    return log, topics


def test_damaged_records_end_a_stage_with_their_place_and_the_setting():
    log, topics = damaged_rewards()
    stage = Collector(log, topics)
    stage.start()
    with pytest.raises(
        RecordsLost, match=r"2 events of run\.rewards/0 are damaged \(offsets 4 to 5\)"
    ) as caught:
        settle(stage)
    assert 'log.on_lost = "continue"' in str(caught.value)
    assert (caught.value.begin, caught.value.end, caught.value.count) == (4, 6, 2)
    assert events(log, topics, "dead") == []


def test_a_stage_told_to_continue_names_damaged_records_in_dead_and_goes_on_behind_them():
    log, topics = damaged_rewards()
    stage = Collector(log, topics, on_lost="continue", member_deadline=timedelta(seconds=1000))
    stage.start()
    settle(stage)
    done = [event.seq for event in events(log, topics, "groups") if isinstance(event, GroupCompleted)]
    assert done == [0, 1, 2, 3, 6, 7, 8, 9] and stage.losses.count == 2
    (letter,) = events(log, topics, "dead")
    assert isinstance(letter, DeadLetter) and letter.raw == b""
    assert (letter.topic, letter.partition, letter.offset) == ("run.rewards", 0, 4)
    assert (letter.stage, letter.reason) == ("collector-0", "damaged") and "offsets 4 to 5" in letter.detail


def test_a_scan_backwards_counts_each_damaged_record_once_though_its_windows_meet_inside_the_damage():
    log, topics = damaged_rewards()
    losses = Losses("x", "continue")
    seen = [record.offset for record in records_backwards(log, topics.name("rewards"), 0, losses, window=5)]
    seen += [record.offset for record in records_backwards(log, topics.name("rewards"), 0, losses, window=5)]
    assert seen == [9, 8, 7, 6, 3, 2, 1, 0] * 2 and losses.count == 2
    with pytest.raises(RecordsLost, match="are damaged"):
        list(records_backwards(log, topics.name("rewards"), 0))


def test_a_dispatch_that_is_damaged_is_made_again_by_the_living_feeder():
    log, topics = DamagedLog(), Topics("run", 1)
    topics.create(log)
    begun(log, topics)
    now = [1_000_000]
    source = feeder(log, topics, "continue", clock=lambda: now[0])
    source.recover()
    source.round()
    log.topic, log.begin, log.end_of_damage = topics.name("tasks"), 0, 1
    now[0] += 10_000
    assert source.round()
    last = log.read(topics.name("tasks"), 0, 8).records
    assert len(last) == 1 and decoded(last[0]).seq == 0
