"""Looking at a run on a real broker, and where its records lie: transactions of others, replay beside the live run,
partitions (cases O08, O13, O25)."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("kafka")

from kafka import KafkaProducer

from consumers.collector import Collector
from engine.config import CONFIG_FILE, Config, fingerprint
from engine.log_settings import kafka_settings
from engine.roles import open_run_log, topics_of
from replay.records import TopicReader
from replay.tail import Tail, parse_start
from streams import codec
from streams.events import GroupCompleted, RunStarted
from streams.kafka.admin import Admin
from streams.kafka.log import KafkaLog
from streams.log import TopicPartition
from streams.topics import ALL_TOPICS, Topics
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
            tail = Tail(log, rewards.topic, [0], parse_start("beginning"), until_end=True)
            assert [entry.offset for _, entry in tail] == list(range(5))
            assert time.monotonic() - began < 5, "it waits for nothing"
            done = millstream("tail", config.run.dir, "rewards", "-e", "-f", "%o %k\\n", timeout_s=30)
            assert done.returncode == 0, done.stderr
            assert done.stdout.splitlines() == [f"{seq} 0-{seq}/0/0" for seq in range(5)]
        reader = TopicReader(log, *rewards)
        assert [entry.offset for entry in reader.catch_up()] == list(range(5))
        assert reader.position == 10

        collector = daemons.start("collector")
        eventually(
            lambda: log.hints(topics.group("collector")).get(rewards) == 10, "the position 10", collector
        )
        rows = [json.loads(row) for row in millstream("topics", config.run.dir, "--json").stdout.splitlines()]
        (row,) = [row for row in rows if row["topic"] == rewards.topic]
        assert (row["end"], row["groups"]["collector"], row["lag"]["collector"]) == (10, 10, 0)
        groups = [e for e in events(log, topics, "groups") if isinstance(e, GroupCompleted)]
        assert [group.seq for group in groups] == list(range(5))


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


# -- O25: looking has no side effects


@pytest.mark.slow
def test_a_replay_beside_a_live_collector_moves_no_commit_wakes_no_rebalance_and_writes_nothing(
    kafka: str, prefix: str, tmp_path: Path
) -> None:
    """Case O25: the collector is at 500; offsets 100 to 199 are replayed twice at the same time."""
    config = run_on(tmp_path, kafka, prefix)
    topics, settings = topics_of(config), kafka_settings(config)
    rewards = TopicPartition(topics.name("rewards"), 0)
    group = topics.group("collector")
    admin = Admin(settings)
    with open_run_log(config) as log, Daemons(config) as daemons, contextlib.closing(admin):
        put_all(log, topics, "tasks", [task(seq, n_samples=1) for seq in range(500)])
        put_all(log, topics, "rewards", [rewarded(seq, 0, seq, 1.0, n_samples=1) for seq in range(500)])
        collector = daemons.start("collector")
        eventually(lambda: log.hints(group).get(rewards) == 500, "the collector to be at 500", collector)
        eventually(lambda: log.end(topics.name("groups"), 0) == 500, "its 500 groups", collector)
        quiet = [word for word in ALL_TOPICS if word != "metrics"]  # in which the live collector goes on
        members, written = admin.group(settings.full(group)), ends(log, topics, quiet)
        assert len(members) == 1

        arguments = ("tail", config.run.dir, "rewards", "-o", "100", "-c", "100", "-e", "-f", "%o\\n")
        commits: list[int] = []
        with ThreadPoolExecutor(2) as pool:
            replays = [pool.submit(millstream, *arguments) for _ in range(2)]
            while not all(replay.done() for replay in replays):
                commits.append(log.hints(group)[rewards])
                assert admin.group(settings.full(group)) == members, "same members, nobody has joined anew"
                time.sleep(0.05)
        for replay in replays:
            assert replay.result().returncode == 0, replay.result().stderr
            assert replay.result().stdout.split() == [str(offset) for offset in range(100, 200)]
        assert commits and set(commits) == {500}
        assert ends(log, topics, quiet) == written
        assert admin.group(settings.full(group)) == members
        assert sorted(log.groups()) == [group]

        put(log, topics, "tasks", task(500, n_samples=1))
        put(log, topics, "rewards", rewarded(500, 0, 500, 1.0, n_samples=1))
        eventually(lambda: log.end(topics.name("groups"), 0) == 501, "and it goes on", collector)


# -- O13: a group stays where it was put


def test_a_producer_with_other_partitions_than_the_run_began_with_is_refused_at_the_start(
    kafka: str, prefix: str, tmp_path: Path
) -> None:
    """Case O13: 8 partitions, 6 in the manifest; from the run's own directory, and from another one."""
    config = run_on(tmp_path, kafka, prefix, log={"partitions": 6})
    topics = topics_of(config)
    with open_run_log(config) as log:
        started = RunStarted(
            run=topics.run,
            config_fingerprint=fingerprint(config),
            partitions=6,
            rollout_batch_size=4,
            n_samples_per_prompt=4,
            seed=0,
            started_ms=1000,
        )
        put(log, topics, "ledger", started)
        before = ends(log, topics, ALL_TOPICS)
        elsewhere = ("--set", f"run.dir={tmp_path}/elsewhere")
        for arguments in (
            ("serve", "feeder", config.run.dir),
            ("serve", "rollout", str(Path(config.run.dir) / CONFIG_FILE), *elsewhere),
        ):
            done = millstream(*arguments, "--set", "log.partitions=8")
            assert done.returncode == 2
            assert "log.partitions: the run has 6, asked for 8" in done.stderr
        assert ends(log, topics, ALL_TOPICS) == before
        assert log.topics()[topics.name("tasks")] == 6


def test_members_of_a_group_written_by_different_clients_make_one_group(
    kafka: str, prefix: str, tmp_path: Path
) -> None:
    """Case O13: clients hash keys differently, and we have no keys: the partition of the task is that of the group."""
    pytest.importorskip("confluent_kafka")
    topics, where = Topics("run", 6), 4
    with (
        KafkaLog((kafka,), prefix) as one,
        KafkaLog((kafka,), prefix, client="confluent") as other,
    ):
        topics.create(one)
        offset = put(one, topics, "tasks", task(42), where)
        for log, indices in ((one, (0, 1)), (other, (2, 3))):
            put_all(log, topics, "rewards", [rewarded(42, i, offset, i % 2) for i in indices], where)
        first, second = (Collector(log, topics, replica=i, replicas=2) for i, log in enumerate((one, other)))
        first.start()
        second.start()
        deadline = time.monotonic() + 30
        while not (groups := events(one, topics, "groups", where)):
            first.round()
            second.round()
            assert time.monotonic() < deadline, "no group"
        first.close()
        second.close()
        assert [[member.uid for member in group.members] for group in groups] == [
            [f"0-42/{i}/0" for i in range(4)]
        ]
        assert sum(one.end(topics.name("groups"), p) for p in range(6)) == 1
