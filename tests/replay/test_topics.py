"""What `millstream topics` shows: offsets and lag, from the log alone."""

from __future__ import annotations

import msgspec

from replay.topics import as_json, as_table, columns, partition_rows, waiting
from streams.log import TopicPartition
from streams.memory import MemoryLog
from streams.topics import Topics
from tests.support.recorded import recorded


def test_rows_come_in_the_order_of_the_data_path():
    log, topics = recorded()
    rows = partition_rows(log, topics)
    assert [(row.topic, row.partition, row.records) for row in rows] == [
        ("run.tasks", 0, 3),
        ("run.tasks", 1, 3),
        ("run.trajectories", 0, 6),
        ("run.trajectories", 1, 6),
        ("run.rewards", 0, 0),
        ("run.rewards", 1, 0),
        ("run.groups", 0, 3),
        ("run.groups", 1, 3),
        ("run.ledger", 0, 11),
        ("run.fleet", 0, 3),
        ("run.metrics", 0, 0),
        ("run.dead", 0, 0),
    ]


def test_a_topic_that_is_not_there_and_one_of_another_run_are_left_out():
    log = MemoryLog()
    log.create_topic("run.tasks", 1)
    log.create_topic("other.tasks", 1)
    assert [row.topic for row in partition_rows(log, Topics("run", 1))] == ["run.tasks"]


def test_groups_of_other_runs_on_the_same_log_are_left_out():
    log, topics = recorded()
    place = TopicPartition("run.tasks", 0)
    for group in ("run.rollout", "run2.rollout", "run.b.rollout", "rollout"):
        log.commit_hint(group, {place: 1})
    assert partition_rows(log, topics)[0].groups == {"rollout": 1}
    assert (topics.group("rollout"), topics.role("run.rollout")) == ("run.rollout", "rollout")


def test_what_waits_is_quick_to_tell():
    log, topics = recorded()
    assert waiting(log, topics, "tasks", "rollout") == 6
    log.commit_hint("run.rollout", {TopicPartition("run.tasks", 0): 1, TopicPartition("run.tasks", 1): 3})
    assert waiting(log, topics, "tasks", "rollout") == 2


def test_lag_is_what_lies_between_the_hint_and_the_end():
    log, topics = recorded()
    log.commit_hint("run.rollout", {TopicPartition("run.tasks", 0): 1, TopicPartition("run.tasks", 1): 3})
    rows = partition_rows(log, topics)
    assert [row.lag("rollout") for row in rows[:2]] == [2, 0]


def test_a_hint_from_before_retention_counts_only_what_is_still_there():
    log, topics = recorded()
    log.commit_hint("run.rollout", {TopicPartition("run.tasks", 0): 0})
    log.truncate_before("run.tasks", 0, 2)
    row = partition_rows(log, topics)[0]
    assert (row.start, row.end, row.records, row.lag("rollout")) == (2, 3, 1, 1)


def test_the_tables_are_kafkas():
    log, topics = recorded()
    assert "GROUP" not in as_table(partition_rows(log, topics))
    log.commit_hint("run.rollout", {TopicPartition("run.tasks", 0): 1})
    lines = [line.split() for line in as_table(partition_rows(log, topics)).splitlines()]
    assert lines[0] == ["TOPIC", "PARTITION", "START", "END", "RECORDS"]
    assert lines[1] == ["run.tasks", "0", "0", "3", "3"]
    assert lines[-2] == ["GROUP", "TOPIC", "PARTITION", "CURRENT-OFFSET", "LOG-END-OFFSET", "LAG"]
    assert lines[-1] == ["rollout", "run.tasks", "0", "1", "3", "2"]


def test_json_is_one_object_per_partition():
    log, topics = recorded()
    log.commit_hint("run.rollout", {TopicPartition("run.tasks", 0): 1})
    first = msgspec.json.decode(as_json(partition_rows(log, topics)).splitlines()[0])
    assert first == {
        "topic": "run.tasks",
        "partition": 0,
        "start": 0,
        "end": 3,
        "groups": {"rollout": 1},
        "records": 3,
        "lag": {"rollout": 2},
    }


def test_columns_put_numbers_to_the_right():
    assert columns([("NAME", "N"), ("a", "5"), ("long name", "1234")]) == (
        "NAME          N\na             5\nlong name  1234\n"
    )
