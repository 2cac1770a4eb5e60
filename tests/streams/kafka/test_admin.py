"""Topics of a real broker: made as the log needs them, and refused by name where they are not so."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from kafka import KafkaAdminClient, KafkaProducer
from kafka.admin import ConfigResource, ConfigResourceType

from streams.broker.node import Node
from streams.errors import LogClosed, LogError, LogUnavailable, OffsetOutOfRange, TopicMismatch, UnknownTopic
from streams.kafka.admin import Admin
from streams.kafka.settings import KafkaSettings

Open = Callable[..., Admin]
NOBODY = "127.0.0.1:1"  # no broker listens there


@pytest.fixture
def open_admin(kafka: str, prefix: str) -> Iterator[Open]:
    """`open_admin(**settings)` → an Admin on the shared broker, under this test's prefix."""
    opened: list[Admin] = []

    def make(**settings) -> Admin:
        opened.append(Admin(KafkaSettings(**{"servers": (kafka,), "prefix": prefix, **settings})))
        return opened[-1]

    yield make
    for admin in opened:
        admin.close()


@pytest.fixture
def client(kafka: str) -> Iterator[Any]:
    """Somebody else's administration of the same broker."""
    client = KafkaAdminClient(bootstrap_servers=kafka)
    yield client
    client.close()


def settings_on(client: Any, topic: str) -> dict[str, str]:
    resource = ConfigResource(ConfigResourceType.TOPIC, topic)
    described = client.describe_configs([resource], config_filter="all")["topic"][topic]
    return {name: value["value"] for name, value in described.items()}


def make_by_hand(client: Any, topic: str, partitions: int = 1, **configs: str) -> None:
    settings = {name.replace("_", "."): value for name, value in configs.items()}
    client.create_topics(
        {topic: {"num_partitions": partitions, "replication_factor": 1, "configs": settings}},
        wait_for_metadata=True,
    )


def commands_in(message: str) -> list[list[str]]:
    """The commands that the message says would mend it."""
    return [
        shlex.split(line) for line in re.findall(r"^ *python (-m kafka\.admin .*)$", message, re.MULTILINE)
    ]


def mend(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m MODULE ARGUMENT…`, in this process: a new one for each of many takes its time."""
    python_m, module, *arguments = command
    assert python_m == "-m"
    with warnings.catch_warnings(), monkeypatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setattr(sys, "argv", [module, *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(module, run_name="__main__")
    assert not ended.value.code


def produce(kafka: str, topic: str, count: int) -> None:
    producer = KafkaProducer(bootstrap_servers=kafka)
    for number in range(count):
        producer.send(topic, str(number).encode(), partition=0)
    producer.flush(10)
    producer.close()


def all_threads_end(before: int) -> None:
    deadline = time.monotonic() + 10
    while threading.active_count() > before:
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.05)


# -- what there is


def test_only_the_topics_of_this_log_are_listed(open_admin: Open, client: Any, prefix: str) -> None:
    admin = open_admin()
    assert admin.topics() == {}
    make_by_hand(client, f"other-{prefix}x")
    admin.create_topic("run.tasks", 3, False)
    admin.create_topic("run.ledger", 1, True)
    assert admin.topics() == {"run.tasks": 3, "run.ledger": 1}
    everything = open_admin(prefix="").topics()
    assert everything[f"{prefix}run.tasks"] == 3
    assert not [name for name in everything if name.startswith("__")]


def test_an_unknown_topic_is_reported_at_once_and_not_made_by_asking(open_admin: Open) -> None:
    admin = open_admin()
    admin.create_topic("there", 2, False)
    started = time.monotonic()
    with pytest.raises(UnknownTopic, match=r"no topic 'nope'; this log has: there"):
        admin.partitions("nope")
    with pytest.raises(UnknownTopic, match="nope"):
        admin.check_topic("nope", 1, False)
    with pytest.raises(UnknownTopic, match="'there' has partitions 0 to 1, not 2"):
        admin.truncate_before("there", 2, 0)
    assert time.monotonic() - started < 2
    assert admin.topics() == {"there": 2}


def test_the_number_of_partitions_is_asked_for_once(open_admin: Open, client: Any, prefix: str) -> None:
    admin = open_admin()
    admin.create_topic("t", 3, False)
    client.delete_topics([f"{prefix}t"])
    assert admin.partitions("t") == 3


# -- made, and refused


def test_a_topic_is_made_with_every_setting_that_matters(open_admin: Open, client: Any, prefix: str) -> None:
    admin = open_admin(
        retention=timedelta(days=2), retention_bytes=1 << 30, min_insync_replicas=1, max_record_bytes=5 << 20
    )
    admin.create_topic("data", 2, False)
    admin.create_topic("kept", 1, True)
    expected = {
        "cleanup.policy": "delete",
        "message.timestamp.type": "CreateTime",
        "message.timestamp.after.max.ms": str((1 << 63) - 1),
        "min.insync.replicas": "1",
    }
    data, kept = settings_on(client, f"{prefix}data"), settings_on(client, f"{prefix}kept")
    assert expected.items() <= data.items()
    assert expected.items() <= kept.items()
    assert (data["retention.ms"], data["retention.bytes"]) == (str(2 * 86_400_000), str(1 << 30))
    assert (kept["retention.ms"], kept["retention.bytes"]) == ("-1", "-1")
    assert int(data["max.message.bytes"]) > 5 << 20
    admin.check_topic("data", 2, False)
    admin.check_topic("kept", 1, True)


def test_a_new_topic_can_be_written_at_once_and_also_by_a_clock_that_is_ahead(
    open_admin: Open, kafka: str, prefix: str
) -> None:
    admin = open_admin()
    producer = KafkaProducer(bootstrap_servers=kafka, retries=0, enable_idempotence=False)
    tomorrow_ms = (time.time_ns() // 1_000_000) + 26 * 3_600_000
    for name in ("a", "b", "c"):
        admin.create_topic(name, 4, False)
        for partition in range(4):
            sent = producer.send(f"{prefix}{name}", b"x", partition=partition, timestamp_ms=tomorrow_ms)
            assert sent.get(10).offset == 0
    producer.close()


def test_many_creators_at_once_make_one_topic(open_admin: Open) -> None:
    admins = [open_admin() for _ in range(4)]
    failed: list[BaseException] = []

    def create(admin: Admin) -> None:
        try:
            for name in ("x", "y"):
                admin.create_topic(name, 3, False)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=create, args=(admin,)) for admin in admins]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failed == []
    assert open_admin().topics() == {"x": 3, "y": 3}


def test_another_number_of_partitions_is_refused_naming_how_to_remove_the_topic(
    open_admin: Open, client: Any, prefix: str
) -> None:
    admin = open_admin()
    admin.create_topic("t", 4, False)
    with pytest.raises(TopicMismatch, match=r"'t' has 4 partitions, 5 were asked for") as refused:
        admin.create_topic("t", 5, False)
    with pytest.raises(TopicMismatch):
        admin.check_topic("t", 5, False)
    (command,) = commands_in(str(refused.value))
    subprocess.run([sys.executable, "-W", "ignore", *command], check=True, capture_output=True, timeout=30)
    open_admin().create_topic("t", 5, False)


def test_each_setting_that_disagrees_is_named_with_the_command_that_mends_it(
    open_admin: Open, client: Any, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_by_hand(
        client,
        f"{prefix}t",
        cleanup_policy="compact",
        retention_ms="60000",
        retention_bytes="1000000",
        max_message_bytes="100000",
        message_timestamp_type="LogAppendTime",
        unclean_leader_election_enable="true",
    )
    admin = open_admin(retention=timedelta(hours=1), retention_bytes=2_000_000, min_insync_replicas=2)
    with pytest.raises(TopicMismatch) as refused:
        admin.create_topic("t", 1, False)
    message = str(refused.value)
    for found in (
        r"'t' is not as this run needs it",
        r"cleanup\.policy is compact, needed is delete",
        r"retention\.ms is 60000, needed is at least 3600000 \(1:00:00\)",
        r"retention\.bytes is 1000000, needed is at least 2000000",
        r"max\.message\.bytes is 100000, needed is \d+",
        r"message\.timestamp\.type is LogAppendTime, needed is CreateTime",
        r"unclean\.leader\.election\.enable is true, needed is false",
        r"min\.insync\.replicas is 1, needed is 2",
    ):
        assert re.search(found, message), found
    for command in commands_in(message):
        mend(command, monkeypatch)
    admin.check_topic("t", 1, False)
    with pytest.raises(TopicMismatch, match=r"retention\.ms is 3600000, needed is at least -1 \(for ever\)"):
        admin.check_topic("t", 1, True)


def test_a_topic_that_keeps_its_records_longer_than_needed_is_fine(open_admin: Open) -> None:
    open_admin().create_topic("t", 1, True)
    open_admin(retention=timedelta(hours=1), retention_bytes=10).check_topic("t", 1, False)


def test_too_few_brokers_for_the_copies_asked_for_are_named(open_admin: Open) -> None:
    with pytest.raises(
        LogError, match=r"'t' cannot be created.*replication factor of 3.*log\.kafka\.replication_factor"
    ):
        open_admin(replication_factor=3).create_topic("t", 1, False)
    open_admin().create_topic("t", 1, False)
    with pytest.raises(TopicMismatch, match=r"it has 1 replicas, log\.kafka\.replication_factor is 3"):
        open_admin(replication_factor=3).create_topic("t", 1, False)


def test_a_name_that_kafka_cannot_tell_from_another_is_refused(open_admin: Open) -> None:
    admin = open_admin()
    admin.create_topic("run.a", 1, False)
    with pytest.raises(LogError, match=r"'run_a' cannot be created.*collides.*'\.' and '_' are the same"):
        admin.create_topic("run_a", 1, False)
    assert admin.topics() == {"run.a": 1}


# -- removing


def test_records_below_an_offset_are_removed_and_the_start_never_goes_back(
    open_admin: Open, kafka: str, prefix: str
) -> None:
    admin = open_admin()
    admin.create_topic("t", 1, False)
    produce(kafka, f"{prefix}t", 20)
    assert admin.truncate_before("t", 0, 0) == 0
    assert admin.truncate_before("t", 0, -1) == 0
    assert admin.truncate_before("t", 0, 12) == 12
    assert admin.truncate_before("t", 0, 5) == 12
    with pytest.raises(OffsetOutOfRange) as beyond:
        admin.truncate_before("t", 0, 21)
    assert (beyond.value.start, beyond.value.end) == (12, 20)
    assert admin.truncate_before("t", 0, 20) == 20


# -- when nobody answers


def test_an_absent_broker_is_named_when_the_time_is_over_and_leaves_no_thread_behind() -> None:
    before = threading.active_count()
    admin = Admin(KafkaSettings(servers=(NOBODY,), timeout=timedelta(seconds=0.6)))
    for _ in range(3):
        started = time.monotonic()
        with pytest.raises(
            LogUnavailable, match=r"could not .* within 0\.6 s: no Kafka broker at 127\.0\.0\.1:1 .*refused"
        ):
            admin.topics()
        assert 0.5 < time.monotonic() - started < 3
    admin.close()
    all_threads_end(before)


def test_a_wait_for_the_broker_ends_soon_after_an_interrupt() -> None:
    interrupted = threading.Event()
    settings = KafkaSettings(servers=(NOBODY,), timeout=timedelta(seconds=30), interrupted=interrupted.is_set)
    admin = Admin(settings)
    threading.Timer(0.3, interrupted.set).start()
    started = time.monotonic()
    with pytest.raises(LogUnavailable, match="interrupted"):
        admin.partitions("t")
    assert time.monotonic() - started < 2
    admin.close()


def test_closing_ends_waits_and_refuses_what_comes_later() -> None:
    before = threading.active_count()
    admin = Admin(KafkaSettings(servers=(NOBODY,), timeout=timedelta(seconds=30)))
    threading.Timer(0.3, admin.close).start()
    started = time.monotonic()
    with pytest.raises(LogClosed):
        admin.topics()
    assert time.monotonic() - started < 2
    with pytest.raises(LogClosed):
        admin.partitions("t")
    admin.close()
    all_threads_end(before)


def test_a_broker_that_makes_topics_by_itself_is_never_brought_to_and_its_restart_goes_unnoticed(
    make_kafka: Callable[..., Node],
) -> None:
    node = make_kafka(properties={"auto.create.topics.enable": "true"})
    node.start()
    admin = Admin(KafkaSettings(servers=(node.address,), timeout=timedelta(seconds=40)))
    for _ in range(2):
        with pytest.raises(UnknownTopic):
            admin.partitions("nope")
    admin.create_topic("t", 2, False)
    node.kill()
    restart = threading.Timer(0.5, node.start)
    restart.start()
    admin.create_topic("u", 1, True)  # asked while it is away
    assert admin.topics() == {"t": 2, "u": 1}
    restart.join(60)
    admin.close()
