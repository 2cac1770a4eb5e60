"""Admission, placement, recovery of the feeder from the log alone."""

from __future__ import annotations

import time
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest

from consumers.dataset import BadRow, JsonLines, Order, Row
from consumers.feeder import Feeder
from streams.errors import ConfigError, LogFull
from streams.events import (
    BatchCut,
    CutGroup,
    DataEnded,
    EpochStarted,
    GroupDropped,
    GroupsDropped,
    LimitChanged,
    MembersMissing,
    Paused,
    Resumed,
    RunEnding,
    StepSkipped,
    TaskDispatched,
    TaskSkipped,
    WeightsPublished,
)
from tests.support.events import completed, events, put, run_log
from tests.support.world import Rows


def feeder(log, topics, rows: int = 100, **changes) -> Feeder:
    dataset = changes.pop("dataset", None) or Rows(
        [Row(f"prompt {index}", None, {}) for index in range(rows)]
    )
    settings = {"rollout_batch_size": 4, "n_samples": 2, "limit": 1, "shuffle": False, **changes}
    made = Feeder(log, topics, dataset, poll=timedelta(milliseconds=1), **settings)
    made.recover()
    return made


def settle(stage: Feeder) -> None:
    for _ in range(50):
        if not stage.round():
            return
    raise AssertionError("the feeder never comes to rest")


def seqs(log, topics) -> list[int]:
    return sorted(
        event.seq
        for partition in range(topics.partitions)
        for event in events(log, topics, "tasks", partition)
        if isinstance(event, (TaskDispatched, TaskSkipped)) and not getattr(event, "attempt", 0)
    )


def cut(step: int, closed: range, version: int, epoch: int = 0, frontier: int | None = None) -> BatchCut:
    return BatchCut(
        epoch=epoch,
        version=version,
        step=step,
        groups=[CutGroup(f"0-{seq}", seq, 0, seq, []) for seq in closed],
        positions=[0],
        frontier=closed.stop if frontier is None else frontier,
        limit=1,
        on_stale="drop",
        seed=0,
        ledger_read_to=0,
        cut_ms=0,
    )


def published(version: int, epoch: int = 0) -> WeightsPublished:
    return WeightsPublished(epoch=epoch, version=version, step=version, digest=f"d{version}", uris={})


@pytest.fixture
def parts():
    log, topics = run_log()
    put(log, topics, "ledger", EpochStarted(producer="t", started_ms=0))
    put(log, topics, "ledger", published(0))
    return log, topics


def test_no_more_groups_are_open_than_the_limit_allows(parts):
    log, topics = parts
    settle(feeder(log, topics))
    assert seqs(log, topics) == list(range(8))  # (1 + 1) x 4


def test_a_used_group_makes_room_only_when_its_version_is_published(parts):
    log, topics = parts
    stage = feeder(log, topics)
    settle(stage)
    put(log, topics, "ledger", cut(1, range(4), version=0))
    settle(stage)
    assert len(seqs(log, topics)) == 8
    put(log, topics, "ledger", published(1))
    settle(stage)
    assert seqs(log, topics) == list(range(12))
    # 4 groups are ahead of these: their batch is cut at version 2, so at limit 1 they need version 1
    assert [event.min_version for event in events(log, topics, "tasks")[-4:]] == [1, 1, 1, 1]


def test_a_skipped_step_makes_room_too(parts):
    log, topics = parts
    stage = feeder(log, topics)
    settle(stage)
    put(log, topics, "ledger", cut(1, range(4), version=0))
    put(log, topics, "ledger", StepSkipped(epoch=0, step=1, version=0, reason="nonfinite_loss"))
    settle(stage)
    assert seqs(log, topics) == list(range(12))


def test_dropped_groups_are_replaced_at_once(parts):
    log, topics = parts
    stage = feeder(log, topics)
    settle(stage)
    put(log, topics, "ledger", GroupsDropped(epoch=0, version=0, frontier=1, closed_above=[(4, 5), (6, 7)]))
    settle(stage)
    assert seqs(log, topics) == list(range(11))


def test_the_same_record_twice_floods_nothing(parts):
    log, topics = parts
    stage = feeder(log, topics)
    settle(stage)
    for _ in range(3):
        put(log, topics, "ledger", GroupsDropped(epoch=0, version=0, frontier=2))
    settle(stage)
    assert seqs(log, topics) == list(range(10))


def test_a_record_of_an_older_epoch_is_void(parts):
    log, topics = parts
    put(log, topics, "ledger", EpochStarted(producer="u", started_ms=0))
    stage = feeder(log, topics)
    settle(stage)
    put(log, topics, "ledger", GroupsDropped(epoch=0, version=0, frontier=8))
    settle(stage)
    assert seqs(log, topics) == list(range(8))


def test_a_changed_limit_and_a_pause_bind(parts):
    log, topics = parts
    stage = feeder(log, topics)
    settle(stage)
    put(log, topics, "ledger", Paused(by="me"))
    put(log, topics, "ledger", LimitChanged(limit=3))
    settle(stage)
    assert len(seqs(log, topics)) == 8
    put(log, topics, "ledger", Resumed(by="me"))
    settle(stage)
    assert len(seqs(log, topics)) == 16


def close_step(log, topics, step: int) -> None:
    """Groups of this step are used, and its version is published."""
    put(log, topics, "ledger", cut(step, range(4 * step - 4, 4 * step), version=step - 1))
    put(log, topics, "ledger", published(step))


def test_a_higher_limit_that_waits_opens_the_gate_for_the_groups_of_its_own_steps(parts):
    log, topics = parts
    put(log, topics, "ledger", LimitChanged(limit=3, from_step=4))
    stage = feeder(log, topics)
    settle(stage)
    assert seqs(log, topics) == list(range(8)), "steps 1 and 2 are under the old limit"
    close_step(log, topics, 1)
    settle(stage)
    assert seqs(log, topics) == list(range(20)), "steps 2 to 5, from version 1 on"
    newest = {event.seq: event.min_version for event in events(log, topics, "tasks")[8:]}
    # should groups before them be dropped, some of these are cut in step 3, where the limit is still 1
    assert newest == dict.fromkeys(range(8, 20), 1)
    close_step(log, topics, 2)
    settle(stage)
    assert [event.min_version for event in events(log, topics, "tasks")[20:]] == [2] * 4
    close_step(log, topics, 3)
    settle(stage)
    assert stage.ledger.limit == 3 and len(seqs(log, topics)) == 28
    assert [event.min_version for event in events(log, topics, "tasks")[24:]] == [3] * 4


def test_nothing_is_generated_for_a_step_whose_lower_limit_would_refuse_it(parts):
    log, topics = parts
    put(log, topics, "ledger", LimitChanged(limit=0, from_step=3))
    stage = feeder(log, topics, limit=3)
    settle(stage)
    assert seqs(log, topics) == list(range(8)), "steps 1 and 2"
    close_step(log, topics, 1)
    settle(stage)
    assert len(seqs(log, topics)) == 8
    close_step(log, topics, 2)
    settle(stage)
    assert seqs(log, topics) == list(range(12)), "step 3, from its own version"
    assert [event.min_version for event in events(log, topics, "tasks")[8:]] == [2] * 4


def test_groups_that_are_open_when_the_limit_falls_drain_and_then_the_feeder_goes_on(parts):
    log, topics = parts
    stage = feeder(log, topics, limit=3)
    settle(stage)
    assert len(seqs(log, topics)) == 16
    put(log, topics, "ledger", LimitChanged(limit=0))
    close_step(log, topics, 1)
    settle(stage)
    assert len(seqs(log, topics)) == 16 and stage.capacity == 4
    put(log, topics, "ledger", GroupsDropped(epoch=0, version=1, frontier=13))  # nine of them are too old
    settle(stage)
    assert seqs(log, topics) == list(range(17))
    assert events(log, topics, "tasks")[16].min_version == 1


def test_a_restarted_feeder_knows_the_limit_and_the_one_that_waits(parts):
    log, topics = parts
    put(log, topics, "ledger", LimitChanged(limit=2))
    put(log, topics, "ledger", LimitChanged(limit=0, from_step=3))
    close_step(log, topics, 1)
    stage = feeder(log, topics)
    assert (stage.ledger.limit_at(2), stage.ledger.limit_at(3), stage.ledger.limit_at(9)) == (2, 0, 0)
    assert stage.capacity == 4  # step 2; those of step 3 need its own version


def test_tasks_go_where_the_fewest_are_unfinished(parts):
    _, _ = parts
    log, topics = run_log(partitions=2)
    stage = feeder(log, topics, limit=0)
    settle(stage)
    assert [len(events(log, topics, "tasks", p)) for p in (0, 1)] == [2, 2]
    for seq in (1, 3):  # partition 1 is quick, partition 0 is slow
        put(log, topics, "groups", completed(seq), partition=1)
    put(log, topics, "ledger", EpochStarted(producer="t", started_ms=0))
    put(log, topics, "ledger", GroupsDropped(epoch=0, version=0, frontier=0, closed_above=[(1, 2), (3, 4)]))
    settle(stage)
    assert [len(events(log, topics, "tasks", p)) for p in (0, 1)] == [2, 4]


def test_missing_members_are_dispatched_again_once_an_attempt_on_the_same_partition(parts):
    log, topics = parts
    stage = feeder(log, topics)
    settle(stage)
    missing = MembersMissing(
        group_id="0-2", seq=2, task_offset=2, indices=[1], attempt=1, reason="member_missing"
    )
    put(log, topics, "groups", missing)
    put(log, topics, "groups", missing)
    settle(stage)
    again = [event for event in events(log, topics, "tasks") if event.attempt]
    assert [(e.group_id, e.indices, e.attempt, e.first_offset, e.prompt) for e in again] == [
        ("0-2", [1], 1, 2, "prompt 2")
    ]
    settle(feeder(log, topics))  # a new one finds its own re-dispatch
    assert len([event for event in events(log, topics, "tasks") if event.attempt]) == 1


def test_a_request_that_nobody_answered_is_answered_after_a_restart(parts):
    log, topics = parts
    settle(feeder(log, topics))
    put(
        log,
        topics,
        "groups",
        MembersMissing(group_id="0-2", seq=2, task_offset=2, indices=[0], attempt=1, reason="x"),
    )
    settle(feeder(log, topics))
    assert [event.indices for event in events(log, topics, "tasks") if event.attempt] == [[0]]


def test_a_restart_goes_on_where_the_log_ends(parts):
    log, topics = parts
    settle(feeder(log, topics))
    put(log, topics, "ledger", cut(1, range(4), version=0))
    put(log, topics, "ledger", published(1))
    settle(feeder(log, topics))
    assert seqs(log, topics) == list(range(12))


def test_the_hole_of_a_crash_between_two_partitions_is_filled_first():
    log, topics = run_log(partitions=2)
    first = feeder(log, topics, limit=0)
    for seq in (0, 1, 3):  # 2 was on its way to the other partition
        first.next_seq = seq + 1 if seq < 3 else 4
        put(log, topics, "tasks", first._task(seq, ahead=0), partition=seq % 2)
    stage = feeder(log, topics, limit=0)
    assert stage.holes == [2] and stage.open_groups == 3
    settle(stage)
    assert seqs(log, topics) == [0, 1, 2, 3]


def test_the_end_of_the_data_is_announced_with_its_count_once(parts):
    log, topics = parts
    stage = feeder(log, topics, rows=3, data_epochs=2)
    settle(stage)
    settle(feeder(log, topics, rows=3, data_epochs=2))
    ended = [event for event in events(log, topics, "ledger") if isinstance(event, DataEnded)]
    assert [event.count for event in ended] == [6]
    assert seqs(log, topics) == list(range(6))


def test_when_the_trainer_wants_no_more_the_feeder_says_how_many_there_were(parts):
    log, topics = parts
    stage = feeder(log, topics)
    settle(stage)
    put(log, topics, "ledger", RunEnding(epoch=0, step=9, reason="steps_reached"))
    settle(stage)
    assert [event.count for event in events(log, topics, "ledger") if isinstance(event, DataEnded)] == [8]


def test_a_bad_row_is_skipped_by_name_and_keeps_its_place():
    log, topics = run_log()
    rows = Rows([Row("good", None, {}), BadRow("missing_prompt", "row 1"), Row("good too", None, {})])
    settle(feeder(log, topics, dataset=rows, data_epochs=1))
    written = events(log, topics, "tasks")
    assert [type(event).__name__ for event in written] == ["TaskDispatched", "TaskSkipped", "TaskDispatched"]
    assert (written[1].seq, written[1].reason) == (1, "missing_prompt")


def test_groups_that_the_collector_dropped_free_their_partition_but_not_admission(parts):
    log, topics = parts
    stage = feeder(log, topics)
    settle(stage)
    put(log, topics, "groups", GroupDropped(group_id="0-0", seq=0, task_offset=0, reason="incomplete"))
    settle(stage)
    assert stage._load == [7]
    assert len(seqs(log, topics)) == 8  # the trainer is the arbiter: the ledger has not said so yet


def test_the_order_depends_on_seed_and_pass_alone():
    order = Order(10, seed=7, shuffle=True)
    first = [order(seq) for seq in range(20)]
    again = Order(10, seed=7, shuffle=True)
    assert [again(seq) for seq in reversed(range(20))] == first[::-1]
    assert sorted(row for epoch, row in first[:10]) == list(range(10)) and {e for e, _ in first[10:]} == {1}
    assert [row for _, row in first[:10]] != [row for _, row in first[10:]]
    assert [Order(10, seed=7, shuffle=False)(seq) for seq in (3, 13)] == [(0, 3), (1, 3)]


def test_jsonl_rows_are_read_by_key_and_bad_ones_are_named(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"q": "1+1", "a": 2}\n\n{"question": "x"}\n{"q": broken\n{"q": "p", "metadata": 3}\n')
    data = JsonLines(path, prompt_key="q", label_key="a")
    assert len(data) == 4
    assert data.row(0) == Row("1+1", 2, {})
    refused: list[Any] = [data.row(index) for index in (1, 2, 3)]
    assert [row.reason for row in refused] == ["missing_prompt", "bad_json", "bad_metadata"]
    assert "'q'" in refused[0].detail and "question" in refused[0].detail
    data.close()


@pytest.mark.parametrize(("content", "says"), [(None, "cannot be opened"), ("\n\n", "no rows")])
def test_a_missing_or_empty_dataset_is_a_configuration_error(tmp_path, content, says):
    path = tmp_path / "data.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=says):
        JsonLines(path)


def test_a_full_log_neither_ends_the_feeder_nor_loses_a_group(parts, monkeypatch):
    log, topics = parts
    submit, refusals = log.submit, iter([True] * 3)

    def full(topic, partition, records):
        if topic == topics.name("tasks") and next(refusals, False):
            future = Future()
            future.set_exception(LogFull("no room"))
            return future
        return submit(topic, partition, records)

    monkeypatch.setattr(log, "submit", full)
    settle(feeder(log, topics))
    assert seqs(log, topics) == list(range(8))


def test_a_feeder_stops_in_time_although_the_log_takes_nothing(parts, monkeypatch):
    log, topics = parts

    def full(topic, partition, records):
        future = Future()
        future.set_exception(LogFull("no room"))
        return future

    monkeypatch.setattr(log, "submit", full)
    began = time.monotonic()
    assert feeder(log, topics).run(lambda: time.monotonic() - began > 0.2) == 0
    assert time.monotonic() - began < 2
    monkeypatch.undo()
    settle(feeder(log, topics))
    assert seqs(log, topics) == list(range(8))


def test_a_dataset_without_one_usable_row_ends_the_feeder_with_the_reason():
    log, topics = run_log()
    rows = Rows([BadRow("missing_prompt", f"row {index}: needs a key 'prompt'") for index in range(3)])
    stage = feeder(log, topics, dataset=rows, limit=9)
    with pytest.raises(ConfigError, match=r"no row can be used.*missing_prompt"):
        settle(stage)
