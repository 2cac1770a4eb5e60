"""Groups: missing members, verdicts that never came, twins (cases O13, O18, O19, O21)."""

from __future__ import annotations

import logging
from datetime import timedelta

import msgspec
import pytest

from consumers.collector import Collector, Heartbeats
from consumers.runner import ProgressClock
from streams import codec
from streams.errors import LogUnavailable
from streams.events import GroupCompleted, GroupDropped, MembersMissing, Metrics, TaskSkipped
from streams.memory import MemoryLog
from streams.patient import PatientLog
from streams.topics import Topics
from tests.support.events import events, failed, put, rewarded, run_log, task


def collector(log, topics, **changes) -> Collector:
    made = Collector(log, topics, member_deadline=timedelta(seconds=5), **changes)
    made.start()
    return made


def settle(stage: Collector) -> None:
    for _ in range(20):
        if not stage.round():
            return
    raise AssertionError("the collector never comes to rest")


def kinds(log, topics, partition: int = 0) -> list[str]:
    return [type(event).__name__ for event in events(log, topics, "groups", partition)]


@pytest.fixture
def parts():
    log, topics = run_log()
    return log, topics, collector(log, topics)


def test_a_group_is_complete_when_its_last_member_has_come(parts):
    log, topics, stage = parts
    put(log, topics, "tasks", task(0))
    for index in (2, 0, 3):
        put(log, topics, "rewards", rewarded(0, index, 0, float(index)))
    settle(stage)
    assert kinds(log, topics) == []
    put(log, topics, "rewards", rewarded(0, 1, 0, 1.0))
    settle(stage)
    (group,) = events(log, topics, "groups")
    assert isinstance(group, GroupCompleted)
    assert [(member.index, member.reward) for member in group.members] == [
        (0, 0.0),
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
    ]


def test_a_member_that_is_too_large_for_the_log_ends_its_whole_group_at_once():
    log, topics = run_log()
    stage = collector(log, topics, min_group_size=2)
    put(log, topics, "tasks", task(0))
    for index in range(3):
        put(log, topics, "rewards", rewarded(0, index, 0, float(index)))
    refused = msgspec.structs.replace(failed(0, 3, 0, "record_too_large"), detail="0-0/3/0 is 9 bytes")
    put(log, topics, "rewards", refused)
    settle(stage)
    (dropped,) = events(log, topics, "groups")
    assert isinstance(dropped, GroupDropped), "neither asked for again nor trained without it"
    assert (dropped.reason, dropped.detail) == ("record_too_large", "0-0/3/0 is 9 bytes")


def test_an_aborted_member_is_asked_for_once_and_then_its_group_is_dropped(parts):
    log, topics, stage = parts
    put(log, topics, "tasks", task(0))
    for index, reward in ((0, 1.0), (1, 0.0), (3, 0.0)):
        put(log, topics, "rewards", rewarded(0, index, 0, reward))
    put(log, topics, "rewards", failed(0, 2, 0, "aborted"))
    settle(stage)
    (missing,) = events(log, topics, "groups")
    assert isinstance(missing, MembersMissing)
    assert (missing.indices, missing.attempt, missing.reason) == ([2], 1, "aborted")
    put(log, topics, "rewards", failed(0, 2, 0, "aborted", attempt=1))
    settle(stage)
    dropped = events(log, topics, "groups")[-1]
    assert isinstance(dropped, GroupDropped) and dropped.reason == "aborted"
    assert stage.counts["dropped/aborted"] == 1


def test_with_a_least_size_the_group_trains_on_the_members_that_are_there():
    log, topics = run_log()
    stage = collector(log, topics, min_group_size=2, max_redispatch=0)
    put(log, topics, "tasks", task(0))
    for index, reward in ((0, 1.0), (1, 0.0), (3, 0.0)):
        put(log, topics, "rewards", rewarded(0, index, 0, reward))
    put(log, topics, "rewards", failed(0, 2, 0, "aborted"))
    settle(stage)
    (group,) = events(log, topics, "groups")
    assert [member.index for member in group.members] == [0, 1, 3]


def test_with_a_least_size_one_survivor_is_too_few():
    log, topics = run_log()
    stage = collector(log, topics, min_group_size=2, max_redispatch=0)
    put(log, topics, "tasks", task(0))
    put(log, topics, "rewards", rewarded(0, 0, 0, 1.0))
    for index in (1, 2, 3):
        put(log, topics, "rewards", failed(0, index, 0, "reward_missing"))
    settle(stage)
    (dropped,) = events(log, topics, "groups")
    assert (dropped.reason, "1 of 4" in dropped.detail) == ("incomplete", True)


def test_a_missing_reward_never_counts_as_zero(parts):
    log, topics, stage = parts
    put(log, topics, "tasks", task(0))
    for index in range(4):
        put(log, topics, "rewards", failed(0, index, 0, "reward_missing"))
        put(log, topics, "rewards", failed(0, index, 0, "reward_missing", attempt=1))
    settle(stage)
    dropped = [event for event in events(log, topics, "groups") if isinstance(event, GroupDropped)]
    assert [event.reason for event in dropped] == ["reward_missing"]
    assert "GroupCompleted" not in kinds(log, topics)


class Time:
    """The partition's progress clock, turned by hand."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def pass_by(self, stage: Collector, seconds: float) -> None:
        for _ in range(round(seconds * 2)):
            self.seconds += 0.5
            stage.round()


def test_the_sample_that_never_comes_is_named_asked_for_once_and_given_up(caplog):
    log, topics = run_log()
    clock = Time()
    stage = collector(log, topics, monotonic=clock)
    put(log, topics, "tasks", task(0))
    for index in (0, 1, 2):
        put(log, topics, "rewards", rewarded(0, index, 0, 1.0))
    with caplog.at_level(logging.WARNING):
        clock.pass_by(stage, 6)
    (missing,) = events(log, topics, "groups")
    assert (missing.indices, missing.attempt, missing.reason) == ([3], 1, "member_missing")
    assert "group 0-0" in caplog.text and "[3]" in caplog.text
    assert stage.counts["missing_total"] == 1
    clock.pass_by(stage, 6)
    assert kinds(log, topics) == ["MembersMissing", "GroupDropped"]
    assert events(log, topics, "groups")[-1].reason == "member_missing"


def test_the_late_first_try_beside_the_second_makes_no_group_of_five():
    log, topics = run_log()
    clock = Time()
    stage = collector(log, topics, monotonic=clock)
    put(log, topics, "tasks", task(0))
    for index in (0, 1, 2):
        put(log, topics, "rewards", rewarded(0, index, 0, 1.0))
    clock.pass_by(stage, 6)
    put(log, topics, "tasks", task(0, attempt=1, indices=[3], first_offset=0))
    put(log, topics, "rewards", rewarded(0, 3, 0, 0.5, attempt=1))
    put(log, topics, "rewards", rewarded(0, 3, 0, 0.25))  # the lost one turns up after all
    clock.pass_by(stage, 1)
    group = events(log, topics, "groups")[-1]
    assert isinstance(group, GroupCompleted) and len(group.members) == 4
    assert group.members[3].uid == "0-0/3/1"
    assert stage.counts["duplicates_total"] == 1


def test_deadlines_stand_still_while_nobody_could_make_progress():
    log, topics = run_log()
    clock = Time()
    alive = {"engine": False}
    stage = collector(log, topics, monotonic=clock, owner_alive=lambda partition: alive["engine"])
    put(log, topics, "tasks", task(0))
    clock.pass_by(stage, 60)
    assert kinds(log, topics) == []
    alive["engine"] = True
    clock.pass_by(stage, 6)
    assert kinds(log, topics) == ["MembersMissing"]


def test_a_stage_that_itself_stood_still_counts_one_second_at_most():
    time = Time()
    clock = ProgressClock(time)
    time.seconds = 0.5
    clock.tick(running=True)
    time.seconds = 500
    clock.tick(running=True)
    assert clock.seconds == 1.5


def test_a_closed_group_never_opens_again_also_after_a_restart(parts):
    log, topics, stage = parts
    for seq in range(3):
        put(log, topics, "tasks", task(seq, n_samples=1))
    put(log, topics, "rewards", rewarded(1, 0, 1, 1.0, n_samples=1))
    settle(stage)
    settle(stage)
    stage.close()
    stage = collector(log, topics)
    put(log, topics, "rewards", rewarded(1, 0, 1, 9.0, n_samples=1, attempt=1))
    put(log, topics, "rewards", rewarded(0, 0, 0, 1.0, n_samples=1))
    put(log, topics, "rewards", rewarded(2, 0, 2, 1.0, n_samples=1))
    settle(stage)
    assert [event.group_id for event in events(log, topics, "groups")] == ["0-1", "0-0", "0-2"]
    assert stage.counts["duplicates_total"] >= 1


def test_a_restart_remembers_what_it_asked_for(parts):
    log, topics, stage = parts
    put(log, topics, "tasks", task(0))
    put(log, topics, "rewards", failed(0, 2, 0, "reward_timeout"))
    settle(stage)
    stage.close()
    stage = collector(log, topics)
    settle(stage)
    assert kinds(log, topics) == ["MembersMissing"]  # not asked for twice
    put(log, topics, "rewards", failed(0, 2, 0, "reward_timeout", attempt=1))
    settle(stage)
    assert kinds(log, topics) == ["MembersMissing", "GroupDropped"]


def test_a_reward_from_beyond_what_was_read_of_tasks_is_held(parts):
    log, topics, stage = parts
    put(log, topics, "rewards", rewarded(0, 0, 0, 1.0, n_samples=1))
    settle(stage)
    assert kinds(log, topics) == []
    put(log, topics, "tasks", task(0, n_samples=1))
    settle(stage)
    assert kinds(log, topics) == ["GroupCompleted"]


def test_a_skipped_row_gets_its_outcome(parts):
    log, topics, stage = parts
    put(
        log, topics, "tasks", TaskSkipped(group_id="0-0", seq=0, data_epoch=0, row=0, reason="missing_prompt")
    )
    settle(stage)
    (dropped,) = events(log, topics, "groups")
    assert (dropped.seq, dropped.reason) == (0, "task_skipped")


def test_the_partition_of_the_task_decides_where_its_group_is_built():
    """Case O13: nothing is re-hashed, so members cannot spread over partitions however a client would hash."""
    log, topics = run_log(partitions=2)
    stage = collector(log, topics)
    put(log, topics, "tasks", task(0), partition=1)
    for index in range(4):
        put(log, topics, "rewards", rewarded(0, index, 0, 1.0), partition=1)
    settle(stage)
    assert kinds(log, topics, 0) == [] and kinds(log, topics, 1) == ["GroupCompleted"]


def test_a_producer_with_another_number_of_partitions_is_refused_at_start():
    from streams.errors import TopicMismatch
    from streams.topics import Topics

    log, _ = run_log(partitions=6)
    with pytest.raises(TopicMismatch, match=r"6.*8|8.*6"):
        Topics("run", 8).create(log)


def test_the_deadline_of_a_member_stands_still_while_the_log_does_not_answer(monkeypatch):
    """Case: the broker is gone for ten minutes, the deadline is five seconds."""

    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

        def sleep(self, seconds: float) -> None:
            self.now += seconds

    clock = Clock()
    monkeypatch.setattr("streams.patient.time", clock)

    class Broker(MemoryLog):
        back_at = 0.0

        def read(self, *args, **kw):
            if clock.now < self.back_at:
                raise LogUnavailable("no broker answers")
            return super().read(*args, **kw)

    log, topics = Broker(), Topics("run", 1)
    topics.create(log)
    stage = collector(PatientLog(log, stop=lambda: False), topics, monotonic=clock.monotonic)
    put(log, topics, "tasks", task(0))
    settle(stage)
    for _ in range(3):  # three outages
        log.back_at = clock.now + 600
        stage.round()
        assert clock.now >= log.back_at
    assert stage._lanes[0].clock.seconds <= 3.0
    assert kinds(log, topics) == []
    for _ in range(3):
        clock.now += 1
        stage.round()
    assert kinds(log, topics) == ["MembersMissing"], "and runs again when it does"


@pytest.mark.parametrize(("moves", "alive"), [(False, [True, False]), (True, [True, True])])
def test_any_living_replica_owns_a_partition_where_the_log_moves_shares(moves, alive):
    log, topics = run_log(2)
    log.moves_shares = moves
    heartbeats = Heartbeats(log, topics, {"rollout": 2})
    assert [heartbeats(partition) for partition in (0, 1)] == [False, False]
    event = Metrics(source="rollout-0", values={}, at_ms=1)
    log.append(topics.name("metrics"), 0, [codec.encode(event, producer="rollout-0")])
    assert [heartbeats(partition) for partition in (0, 1)] == alive


def test_an_engine_that_holds_no_weights_gives_no_sign_of_life():
    """Its server may take minutes to start, and no group must be given up for that."""
    log, topics = run_log(1)
    heartbeats = Heartbeats(log, topics, {"rollout": 1})
    for version, is_alive in ((-1, False), (0, True)):
        event = Metrics(source="rollout-0", values={"version": version}, at_ms=1)
        log.append(topics.name("metrics"), 0, [codec.encode(event, producer="rollout-0")])
        assert heartbeats(0) is is_alive


def test_a_replica_that_was_added_later_is_a_sign_of_life_too():
    log, topics = run_log(2)
    log.moves_shares = True
    heartbeats = Heartbeats(log, topics, {"rollout": 2, "reward": 1})
    for producer in ("rollout-7", "reward-1"):
        event = Metrics(source=producer, values={}, at_ms=1)
        log.append(topics.name("metrics"), 0, [codec.encode(event, producer=producer)])
    assert heartbeats(0) and heartbeats(1)
