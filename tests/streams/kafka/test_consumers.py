"""The reading seam, on both clients, in this process and in a child of it, against a real broker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from streams.errors import LogError, OffsetOutOfRange
from streams.log import Record, TopicPartition

pytest.importorskip("kafka")
pytest.importorskip("confluent_kafka")

from kafka import KafkaAdminClient, KafkaProducer
from kafka.admin import NewTopic

from streams.kafka import process_consumer
from streams.kafka.clients import EARLIEST, LATEST, Consumer, Fetched, new_consumer
from streams.kafka.consumer_process import settings_of
from streams.kafka.frames import AskSecret
from streams.kafka.process_consumer import ProcessConsumer, _begin
from streams.kafka.settings import KafkaSettings, Security

ROOT = Path(__file__).parents[3]
SOON = 30.0
P0, P1, P2 = (TopicPartition("t", partition) for partition in range(3))


class Way(NamedTuple):
    client: str
    ingest: str


WAYS = [Way(client, ingest) for ingest in ("thread", "process") for client in ("kafka-python", "confluent")]


@pytest.fixture(params=WAYS, ids=lambda way: f"{way.client} in a {way.ingest}")
def way(request: pytest.FixtureRequest) -> Way:
    return request.param


@pytest.fixture
def settings(kafka: str, prefix: str, way: Way) -> KafkaSettings:
    return KafkaSettings((kafka,), prefix, client=way.client, ingest=way.ingest)  # pyright: ignore[reportArgumentType]


@pytest.fixture
def consumer(settings: KafkaSettings) -> Iterator[Consumer]:
    consumer = new_consumer(settings)
    yield consumer
    consumer.close()


@pytest.fixture(scope="module")
def producer(kafka: str) -> Iterator[KafkaProducer]:
    producer = KafkaProducer(bootstrap_servers=kafka, acks="all", linger_ms=0)
    yield producer
    producer.close()


@pytest.fixture
def append(kafka: str, prefix: str, producer: KafkaProducer) -> Callable[..., int]:
    """`append(partition, *values, **more)` → the offset of the first of them. The topic `t` has three partitions."""
    admin = KafkaAdminClient(bootstrap_servers=kafka)
    admin.create_topics([NewTopic(prefix + "t", 3, 1)])
    admin.close()

    def append(partition: int, *values: bytes | None, **more: Any) -> int:
        futures = [producer.send(prefix + "t", value, partition=partition, **more) for value in values]
        producer.flush(SOON)
        return futures[0].get(SOON).offset

    return append


def collect(
    consumer: Consumer, until: Callable[[Mapping[TopicPartition, list[Record]]], bool]
) -> list[Fetched]:
    fetched: list[Fetched] = []
    deadline = time.monotonic() + SOON
    while not until(records_of(fetched)):
        assert time.monotonic() < deadline, f"only {fetched}"
        fetched += consumer.poll(0.1)
    return fetched


def records_of(fetched: list[Fetched]) -> dict[TopicPartition, list[Record]]:
    records: dict[TopicPartition, list[Record]] = {}
    for each in fetched:
        records.setdefault(each.place, []).extend(each.records)
    return records


def count(place: TopicPartition, number: int) -> Callable[[Mapping[TopicPartition, list[Record]]], bool]:
    return lambda records: len(records.get(place, ())) >= number


def test_records_come_whole_and_under_the_logs_own_topic_name(
    consumer: Consumer, append: Callable[..., int]
) -> None:
    append(1, b"first", headers=[("type", b"task"), ("empty", b"")], timestamp_ms=1000)
    append(1, b"", timestamp_ms=2000)
    append(1, None, timestamp_ms=3000, key=b"tombstone of a stranger")
    consumer.assign({P1: 0})
    fetched = collect(consumer, count(P1, 3))
    assert records_of(fetched)[P1] == [
        Record("t", 1, 0, 1000, (("type", b"task"), ("empty", b"")), b"first"),
        Record("t", 1, 1, 2000, (), b""),
        Record("t", 1, 2, 3000, (), b""),
    ]
    assert fetched[-1].next_position == 3
    assert all(type(record.value) is bytes for record in records_of(fetched)[P1])


def test_assigning_another_partition_leaves_the_others_where_they_are(
    consumer: Consumer, append: Callable[..., int]
) -> None:
    append(0, *(b"%d" % i for i in range(300)))
    append(1, *(b"%d" % i for i in range(300)))
    consumer.assign({P0: 0})
    fetched = collect(consumer, count(P0, 1))
    consumer.assign({P0: fetched[-1].next_position, P1: 100})
    fetched += collect(consumer, lambda records: count(P1, 200)(records))
    fetched += collect(
        consumer, lambda records: len(records_of(fetched)[P0]) + len(records.get(P0, ())) >= 300
    )
    records = records_of(fetched)
    assert [record.offset for record in records[P0]] == list(range(300))
    assert [record.offset for record in records[P1]] == list(range(100, 300))
    consumer.assign({P1: 290})
    assert [record.offset for record in records_of(collect(consumer, count(P1, 10)))[P1]] == list(
        range(290, 300)
    )


def test_nothing_comes_of_a_paused_partition_and_everything_after_it_is_resumed(
    consumer: Consumer, append: Callable[..., int]
) -> None:
    append(0, b"a")
    append(1, b"b")
    consumer.assign({P0: 0, P1: 0})
    collect(consumer, lambda records: len(records) == 2)
    consumer.pause([P0])
    for _ in range(20):  # what was asked for before the pause may still come, and has nothing to bring
        assert consumer.poll(0.01) == []
    append(0, b"while paused")
    append(1, b"not paused")
    records = records_of(collect(consumer, count(P1, 1)))
    for _ in range(10):
        records |= records_of(consumer.poll(0.02))
    assert P0 not in records
    consumer.resume([P0])
    records = records_of(collect(consumer, count(P0, 1)))
    assert [record.value for record in records[P0]] == [b"while paused"]


def test_a_position_out_of_range_is_said_of_its_partition_and_harms_no_other(
    consumer: Consumer, append: Callable[..., int]
) -> None:
    append(0, b"a")
    append(1, b"b")
    consumer.assign({P0: 0, P1: 7})
    fetched: list[Fetched] = []
    with pytest.raises(OffsetOutOfRange) as raised:
        deadline = time.monotonic() + SOON
        while time.monotonic() < deadline:
            fetched += consumer.poll(0.1)
    error = raised.value
    assert (error.topic, error.partition, error.offset, error.start, error.end) == ("t", 1, 7, -1, -1)
    append(0, b"c")
    while len(records_of(fetched).get(P0, [])) < 2:
        fetched += consumer.poll(0.1)
        assert time.monotonic() < deadline
    assert [record.value for record in records_of(fetched)[P0]] == [b"a", b"c"]
    consumer.assign({P0: 2, P1: 0})
    assert records_of(collect(consumer, count(P1, 1)))[P1][0].value == b"b"


def test_offsets_are_told_by_kind_and_by_time(consumer: Consumer, append: Callable[..., int]) -> None:
    for stamp in (1000, 3000, 2000):
        append(0, b"x", timestamp_ms=stamp)
    assert consumer.offsets([P0, P1], EARLIEST, 10.0) == {P0: 0, P1: 0}
    assert consumer.offsets([P0, P1], LATEST, 10.0) == {P0: 3, P1: 0}
    assert consumer.offsets([P0, P1], 1500, 10.0) == {P0: 1, P1: 0}
    assert consumer.offsets([P0], 3001, 10.0) == {P0: 3}
    assert consumer.offsets([P0], 0, 10.0) == {P0: 0}


def test_a_record_comes_within_milliseconds_of_its_acknowledgement(
    consumer: Consumer, append: Callable[..., int], way: Way
) -> None:
    append(0, b"first")
    consumer.assign({P0: 0})
    collect(consumer, count(P0, 1))
    latencies: list[float] = []
    for _ in range(15):
        append(0, b"x")
        started = time.monotonic()
        collect(consumer, count(P0, 1))
        latencies.append((time.monotonic() - started) * 1000)
    print(
        f"{way}: median {sorted(latencies)[7]:.1f} ms after the acknowledgement, at most {max(latencies):.1f}"
    )
    assert sorted(latencies)[7] < 100


def test_an_absent_broker_is_no_error_and_closing_twice_is_harmless(way: Way) -> None:
    settings = KafkaSettings(("127.0.0.1:1",), client=way.client, ingest=way.ingest)  # pyright: ignore
    if way == Way("kafka-python", "thread"):
        with pytest.raises(LogError, match=r"127\.0\.0\.1:1"):  # it asks the broker for its version first
            new_consumer(settings)
        return
    consumer = new_consumer(settings)
    consumer.assign({P0: 0})
    assert consumer.poll(0.1) == []
    with pytest.raises(LogError):
        consumer.offsets([P0], LATEST, 0.2)
    consumer.close()
    consumer.close()


# -- the child


@pytest.fixture
def child(kafka: str, prefix: str) -> Iterator[ProcessConsumer]:
    consumer = ProcessConsumer(KafkaSettings((kafka,), prefix, ingest="process"))
    yield consumer
    consumer.close()


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def ignores(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(mask.split()[1], 16) >> (number - 1) & 1)


def eventually(claim: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SOON
    while not claim():
        assert time.monotonic() < deadline, f"not within {SOON:.0f} s: {what}"
        time.sleep(0.01)


def test_a_killed_child_is_replaced_and_nothing_is_lost_or_doubled(
    child: ProcessConsumer, append: Callable[..., int]
) -> None:
    append(0, *(b"%d" % i + b"." * 5000 for i in range(2000)))
    append(1, *(b"%d" % i for i in range(50)))
    child.assign({P0: 0, P1: 0})
    pids = [child.pid]
    got: dict[TopicPartition, list[Record]] = {P0: [], P1: []}

    def read_until(claim: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SOON
        while not claim():
            assert time.monotonic() < deadline, {place: len(records) for place, records in got.items()}
            for place, records in records_of(child.poll(0.1)).items():
                got[place] += records

    for _ in range(3):
        reached = len(got[P0])
        read_until(lambda reached=reached: len(got[P0]) > reached or reached == 2000)
        os.kill(child.pid, signal.SIGKILL)
        read_until(lambda: child.pid != pids[-1])
        pids.append(child.pid)
    read_until(lambda: len(got[P0]) >= 2000 and len(got[P1]) >= 50)
    assert all(child.poll(0.02) == [] for _ in range(10))
    assert [record.offset for record in got[P0]] == list(range(2000))
    assert [record.value for record in got[P1]] == [b"%d" % i for i in range(50)]
    assert len(set(pids)) == 4
    assert all(gone(pid) for pid in pids[:-1])


def test_a_paused_partition_stays_paused_in_the_next_child(
    child: ProcessConsumer, append: Callable[..., int]
) -> None:
    append(0, b"a")
    append(1, b"b")
    child.assign({P0: 0, P1: 0})
    child.pause([P0])
    collect(child, count(P1, 1))
    os.kill(child.pid, signal.SIGKILL)
    append(1, b"c")
    fetched = collect(child, count(P1, 1))
    for _ in range(10):
        fetched += child.poll(0.02)
    assert P0 not in records_of(fetched)
    child.resume([P0])
    assert records_of(collect(child, count(P0, 1)))[P0][0].value == b"a"


def test_children_that_die_at_once_are_given_up_with_a_sentence(
    kafka: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_consumer, "_LEAST_PAUSE_S", 0.001)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    consumer = ProcessConsumer(KafkaSettings((kafka,), prefix, ingest="process"))
    with pytest.raises(LogError, match=r'ended 6 times in a row.*exit status 1.*ingest = "thread"'):
        for _ in range(20):
            consumer.poll(0.5)
    consumer.close()


PARENT = """
import sys, time
from streams.kafka.process_consumer import ProcessConsumer
from streams.kafka.settings import KafkaSettings
consumer = ProcessConsumer(KafkaSettings((sys.argv[1],), ingest="process"))
consumer.poll(0.1)
print(consumer.pid, flush=True)
time.sleep(600)
"""


def test_the_child_dies_with_its_parent_however_that_dies(kafka: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, kafka],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert parent.stdout
    with parent.stdout:
        pid = int(parent.stdout.readline())
        eventually(lambda: ignores(pid, signal.SIGTERM), "the child has started")
        assert os.getsid(pid) == pid, (
            "what a terminal or a shell sends to a group of processes does not reach it"
        )
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.1)
        assert not gone(pid)
        parent.kill()
        parent.wait(SOON)
        eventually(lambda: gone(pid), "the child of a killed parent ends")


def test_closing_ends_the_child(child: ProcessConsumer) -> None:
    pid = child.pid
    assert not gone(pid)
    child.close()
    assert gone(pid)


SECRET = "the one that nobody may see"


def test_secrets_go_to_the_child_when_it_asks_and_are_on_no_command_line(kafka: str) -> None:
    told: list[str] = []

    def password() -> str:
        told.append("asked")
        return SECRET

    security = Security("SASL_PLAINTEXT", "PLAIN", username="me", password=password)
    settings = KafkaSettings((kafka,), security=security, ingest="process")
    assert SECRET not in repr(_begin(settings))
    asked: list[str] = []
    theirs = settings_of(_begin(settings), lambda name: asked.append(name) or "an answer")
    assert theirs.security.password is not None
    assert theirs.security.password() == "an answer"
    assert (theirs.security.username, theirs.security.token) == ("me", None)
    assert (theirs.fetch_max_wait, theirs.servers) == (settings.fetch_max_wait, settings.servers)

    consumer = ProcessConsumer(settings)
    try:
        consumer.assign({P0: 0})
        eventually(lambda: consumer.poll(0.1) == [] and bool(told), "the child asks for the password")
        for name in ("cmdline", "environ"):
            assert SECRET.encode() not in Path(f"/proc/{consumer.pid}/{name}").read_bytes()
    finally:
        consumer.close()


def test_a_secret_that_cannot_be_read_is_said_to_the_child(kafka: str) -> None:
    def password() -> str:
        raise OSError("no such file")

    security = Security("SASL_PLAINTEXT", "PLAIN", username="me", password=password)
    consumer = ProcessConsumer(KafkaSettings((kafka,), security=security, ingest="process"))
    try:
        answer = consumer._secret(AskSecret(3, "password"))
        assert answer.value is None
        assert "log.kafka.sasl_password" in answer.error and "no such file" in answer.error
        with pytest.raises(LogError, match=r"log\.kafka\.sasl_password.*no such file"):
            for _ in range(100):
                consumer.poll(0.1)
    finally:
        consumer.close()
