"""Looking at a run on a real broker, and where its records lie: transactions of others, replay beside the live run,
partitions (cases O08, O13, O25)."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kafka")

from kafka import KafkaProducer

from engine.config import Config
from engine.log_settings import kafka_settings
from engine.roles import open_run_log, topics_of
from replay.records import TopicReader
from streams import codec
from streams.events import Event, GroupCompleted, RunStarted
from streams.kafka.log import KafkaLog
from streams.log import TopicPartition
from streams.topics import ALL_TOPICS
from tests.support.events import events, put, rewarded, task
from tests.support.kafka_runs import Daemons, ends, eventually, millstream, put_all, run_on

# -- O08: the end is a position, not a number of records


def test_a_topic_with_commit_and_abort_marks_is_read_to_its_end_twice_alike(
    kafka: str, prefix: str, tmp_path: Path
) -> None:
    """Case O08. We write no transactions, others may."""
    config = run_on(tmp_path, kafka, prefix)
    topics = topics_of(config)
    rewards = TopicPartition(topics.name("rewards"), 0)
    with open_run_log(config) as log, Daemons(config) as daemons:
        put_all(log, topics, "tasks", [task(seq, n_samples=1) for seq in range(8)])
        _in_transactions(config, "rewards", [(range(5), True), (range(5, 8), False)])
        assert log.end(*rewards) == 10
        for _ in range(2):
            began = time.monotonic()
            done = millstream("tail", config.run.dir, "rewards", "-e", "-f", "%o %k\\n")
            assert time.monotonic() - began < 5, "it waits for nothing"
            assert done.returncode == 0, done.stderr
            assert done.stdout.splitlines() == [f"{seq} 0-{seq}/0/0" for seq in range(5)]
        reader = TopicReader(log, *rewards)
        assert [entry.offset for entry in reader.catch_up()] == list(range(5))
        assert reader.position == 10

        collector = daemons.start("collector")
        eventually(lambda: log.hints(topics.group("collector")).get(rewards) == 10, "the position 10", 60, collector)
        rows = [json.loads(row) for row in millstream("topics", config.run.dir, "--json").stdout.splitlines()]
        (row,) = [row for row in rows if row["topic"] == rewards.topic]
        assert (row["end"], row["groups"]["collector"], row["lag"]["collector"]) == (10, 10, 0)
        assert [e.seq for e in events(log, topics, "groups") if isinstance(e, GroupCompleted)] == list(range(5))


def _in_transactions(config: Config, word: str, parts: Sequence[tuple[range, bool]]) -> None:
    """Verdicts on these groups, each part in a transaction that is committed, or aborted."""
    settings = kafka_settings(config)
    topic = settings.full(topics_of(config).name(word))
    producer = KafkaProducer(bootstrap_servers=settings.servers[0], transactional_id=f"{topic}.test")
    try:
        producer.init_transactions()
        for seqs, is_committed in parts:
            producer.begin_transaction()
            for seq in seqs:
                record = codec.encode(rewarded(seq, 0, seq, 1.0, n_samples=1), producer="test")
                producer.send(topic, value=record.value, headers=list(record.headers), partition=0)
            producer.flush(timeout=30)
            if is_committed:
                producer.commit_transaction()
            else:
                producer.abort_transaction()
    finally:
        producer.close()
