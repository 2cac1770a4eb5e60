"""A broker that thousands of other runs share is asked only about the topics and groups of this one."""

# pyright: reportAttributeAccessIssue=false
# (the stubs that come with pyright are those of kafka-python 2)

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from kafka import KafkaAdminClient
from kafka.cluster import ClusterMetadata

from replay.topics import partition_rows, waiting
from streams.errors import UnknownTopic
from streams.kafka.log import KafkaLog
from streams.log import NewRecord, TopicPartition
from streams.topics import ALL_TOPICS, Topics

RUN = Topics("run", 2)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What kafka-python's clients of this process ask the broker's metadata for: names, or None for all topics."""
    names: list[Any] = []
    describe, request = KafkaAdminClient.describe_topics, ClusterMetadata.metadata_request
    offsets = KafkaAdminClient.list_group_offsets

    def describing(self: Any, topics: Any = None) -> Any:
        names.extend([None] if topics is None else topics)
        return describe(self, topics)

    def requesting(self: Any) -> Any:
        found = request(self)
        names.extend([None] if found.topics is None else [topic.name for topic in found.topics])
        return found

    def asking(self: Any, groups: Any, *args: Any, **named: Any) -> Any:
        names.extend(groups)
        return offsets(self, groups, *args, **named)

    monkeypatch.setattr(KafkaAdminClient, "describe_topics", describing)
    monkeypatch.setattr(KafkaAdminClient, "list_group_offsets", asking)
    monkeypatch.setattr(ClusterMetadata, "metadata_request", requesting)
    yield names


def test_a_run_and_its_view_ask_for_nothing_of_other_runs(kafka: str, prefix: str, asked: list[Any]) -> None:
    mine, place = TopicPartition("run.tasks", 0), ("run.tasks", 0)
    with KafkaLog((kafka,), prefix) as log:
        log.create_topic("other.tasks", 1)
        log.commit_hint("other.rollout", {TopicPartition("other.tasks", 0): 7})
    asked.clear()
    with KafkaLog((kafka,), prefix) as log:
        assert RUN.create(log) == [RUN.name(word) for word in ALL_TOPICS]
        assert RUN.create(log) == []
        RUN.check(log)
        log.append(*place, [NewRecord(b"x")])
        assert len(log.read(*place, 0).records) == 1
        membership = log.join(RUN.group("rollout"), "run.tasks", replica=0, replicas=1)
        assert membership.partitions() == {0, 1}
        log.commit_hint(RUN.group("rollout"), {mine: 1})
        assert not log.wait({mine: 1}, timedelta(0))
        assert waiting(log, RUN, "tasks", "rollout") == 0
    with KafkaLog((kafka,), prefix, readonly=True) as log:
        assert [row.groups for row in partition_rows(log, RUN) if row.groups] == [{"rollout": 1}]
        with pytest.raises(UnknownTopic, match=r"topics absent\.tasks, .* do not exist"):
            Topics("absent", 2).check(log)
    assert {name.removeprefix(prefix).partition(".")[0] for name in asked} == {"run", "absent"}
