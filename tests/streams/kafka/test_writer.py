"""The writing side of the Kafka log, against real brokers that are killed, stopped and let hang."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from streams.errors import LogClosed, LogError, LogUnavailable, RecordTooLarge, UnknownTopic
from streams.log import NewRecord, TopicPartition

pytest.importorskip("kafka")
pytest.importorskip("confluent_kafka")

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer
from kafka.admin import NewTopic
from kafka.structs import TopicPartition as Place

from streams.broker.node import Node
from streams.kafka import python_producer
from streams.kafka.budget import Budget
from streams.kafka.errors import Refused
from streams.kafka.lanes import Lanes
from streams.kafka.link import Append, Done, Link
from streams.kafka.settings import KafkaSettings
from streams.kafka.writer import Writer
from tests.support.kafka import QUICK

ROOT = Path(__file__).parents[3]
SOON = 30.0


@pytest.fixture(params=["kafka-python", "confluent"])
def client(request: pytest.FixtureRequest) -> str:
    return request.param


class Log:
    """A broker, the settings to reach it, and the writers opened on it."""

    def __init__(self, address: str, prefix: str, client: str) -> None:
        self.address, self.prefix, self.client = address, prefix, client
        self.writers: list[Writer] = []
        self.acked: list[tuple[TopicPartition, int, int]] = []
        self.undelivered: dict[TopicPartition, int] = {}

    def create(self, topic: str, partitions: int = 1, **configs: str) -> None:
        """Not by our own admin.py: what is tested here is only the writer."""
        admin = KafkaAdminClient(bootstrap_servers=self.address)
        try:
            wanted = {"max.message.bytes": str(17 << 20), **configs}
            admin.create_topics([NewTopic(self.prefix + topic, partitions, 1, topic_configs=wanted)])
        finally:
            admin.close()

    def open(self, **changes: Any) -> Writer:
        settings = KafkaSettings((self.address,), self.prefix, client=self.client, **changes)  # pyright: ignore
        writer = Writer(settings, lambda *told: self.acked.append(told))
        self.writers.append(writer)
        return writer

    def read(self, topic: str, partition: int = 0) -> list[bytes]:
        """Every record, by a plain consumer; the index is the offset."""
        consumer = KafkaConsumer(
            bootstrap_servers=self.address, enable_auto_commit=False, isolation_level="read_committed"
        )
        try:
            place = Place(self.prefix + topic, partition)
            consumer.assign([place])
            consumer.seek(place, 0)
            end = consumer.end_offsets([place])[place]
            found: list[bytes] = []
            deadline = time.monotonic() + SOON
            while len(found) < end:
                assert time.monotonic() < deadline, f"{len(found)} of {end} records read"
                for records in consumer.poll(timeout_ms=500).values():
                    for record in records:
                        assert record.offset == len(found)
                        found.append(record.value)
            return found
        finally:
            consumer.close()


@pytest.fixture
def shared(kafka: str, prefix: str, client: str) -> Iterator[Log]:
    """On the broker that all tests share."""
    log = Log(kafka, prefix, client)
    yield log
    for writer in log.writers:
        writer.close(timedelta(0))


@pytest.fixture(scope="module")
def broker(kafka_folder: Path) -> Iterator[Node]:
    """One that these tests kill, stop and start."""
    node = Node(kafka_folder / "writer", port=0, java_options=QUICK)
    yield node
    node.kill()


@pytest.fixture
def both(broker: Node, prefix: str) -> Iterator[list[Log]]:
    """Both clients on that broker, so that they go through the same outage."""
    broker.start()
    logs = [
        Log(broker.address, prefix + "python.", "kafka-python"),
        Log(broker.address, prefix + "rd.", "confluent"),
    ]
    yield logs
    if broker.pid is not None:
        broker.resume()
    for log in logs:
        for writer in log.writers:
            writer.close(timedelta(0))


def one(text: str) -> list[NewRecord]:
    return [NewRecord(text.encode())]


def results(futures: Sequence[Future[int]], timeout: float = SOON) -> list[int]:
    deadline = time.monotonic() + timeout
    return [future.result(max(0.0, deadline - time.monotonic())) for future in futures]


def errors(futures: Sequence[Future[int]], timeout: float = SOON) -> list[BaseException | None]:
    deadline = time.monotonic() + timeout
    return [future.exception(max(0.0, deadline - time.monotonic())) for future in futures]


def eventually(claim: Callable[[], bool], what: str, timeout: float = SOON) -> None:
    deadline = time.monotonic() + timeout
    while not claim():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(0.01)


# -- order and offsets


def test_pipelined_appends_keep_their_order_and_know_their_offsets(shared: Log) -> None:
    shared.create("t")
    writer = shared.open()
    futures = [
        writer.submit("t", 0, [NewRecord(f"{i} {part}".encode()) for part in range(1 + i % 3)])
        for i in range(600)
    ]
    offsets = results(futures)
    read = shared.read("t")
    assert read == [f"{i} {part}".encode() for i in range(600) for part in range(1 + i % 3)]
    assert all(read[offset] == f"{i} 0".encode() for i, offset in enumerate(offsets))
    assert writer.bytes_in_flight == 0


def test_every_thread_keeps_its_order_and_every_call_is_contiguous(shared: Log) -> None:
    shared.create("t")
    writer = shared.open()
    futures: dict[int, list[Future[int]]] = {thread: [] for thread in range(6)}

    def write(thread: int) -> None:
        for i in range(80):
            count = 1 + (i + thread) % 3
            records = [NewRecord(f"{thread} {i} {part} {count}".encode()) for part in range(count)]
            futures[thread].append(writer.submit("t", 0, records))

    threads = [threading.Thread(target=write, args=(thread,)) for thread in futures]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    read = [tuple(map(int, value.split())) for value in shared_read_when_done(shared, futures)]
    for thread, of_thread in futures.items():
        offsets = results(of_thread)
        assert offsets == sorted(offsets)
        for i, offset in enumerate(offsets):
            count = 1 + (i + thread) % 3
            assert read[offset : offset + count] == [(thread, i, part, count) for part in range(count)]


def shared_read_when_done(log: Log, futures: dict[int, list[Future[int]]]) -> list[bytes]:
    for of_thread in futures.values():
        results(of_thread)
    return log.read("t")


def test_records_come_with_their_headers_and_timestamps(shared: Log) -> None:
    shared.create("t")
    writer = shared.open()
    headers = (("type", b"task"), ("twice", b"1"), ("twice", b""))
    results([writer.submit("t", 0, [NewRecord(b"", headers, 1000), NewRecord(b"b", (), None)])])
    results([writer.submit("t", 0, [NewRecord(b"c", headers, 2000)])])
    consumer = KafkaConsumer(bootstrap_servers=shared.address, enable_auto_commit=False)
    place = Place(shared.prefix + "t", 0)
    consumer.assign([place])
    consumer.seek(place, 0)
    found: list[Any] = []
    deadline = time.monotonic() + SOON
    while len(found) < 3 and time.monotonic() < deadline:
        for records in consumer.poll(timeout_ms=500).values():
            found += records
    consumer.close()
    assert [record.value for record in found] == [b"", b"b", b"c"]
    assert found[0].headers == found[2].headers == list(headers)
    assert [found[0].timestamp, found[2].timestamp] == [1000, 2000]
    assert abs(found[1].timestamp - time.time() * 1000) < 60_000


OTHER_PROCESS = """
    import sys
    from datetime import timedelta
    from streams.kafka.settings import KafkaSettings
    from streams.kafka.writer import Writer
    from streams.log import NewRecord
    address, prefix, client = sys.argv[1:]
    writer = Writer(KafkaSettings((address,), prefix, client=client), lambda *_: None)
    writer.submit("t.ledger", 0, [NewRecord(b"other begins")]).result(30)
    print("ready", flush=True)
    sys.stdin.readline()
    for i in range(120):
        future = writer.submit("t.ledger", 0, [NewRecord(f"other {i} {part}".encode()) for part in range(4)])
        if i % 4 == 0:
            future.result(30)
    assert writer.close(timedelta(seconds=30)) == {}
"""


def test_records_of_one_call_are_contiguous_beside_another_process(shared: Log) -> None:
    shared.create("t.ledger")
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(OTHER_PROCESS),
        shared.address,
        shared.prefix,
        shared.client,
    ]
    writer = shared.open()
    results([writer.submit("t.ledger", 0, one("mine begins"))])
    futures: list[Future[int]] = []
    pipe, environ = subprocess.PIPE, {**os.environ, "PYTHONPATH": str(ROOT)}
    other = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environ, text=True)
    try:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        other.stdin.write("go\n")
        other.stdin.flush()
        while other.poll() is None or len(futures) < 120:
            count = 1 if len(futures) % 5 == 4 else 4
            futures.append(
                writer.submit(
                    "t.ledger",
                    0,
                    [NewRecord(f"mine {len(futures)} {part}".encode()) for part in range(count)],
                )
            )
            if len(futures) % 4 == 0:
                results(futures[-1:])
        offsets = results(futures)
        assert other.wait(SOON) == 0
    finally:
        other.kill()
        other.communicate()
    read = [value.decode().split() for value in shared.read("t.ledger")]
    for i, offset in enumerate(offsets):
        count = 1 if i % 5 == 4 else 4
        assert read[offset : offset + count] == [["mine", str(i), str(part)] for part in range(count)]
    others = [at for at, words in enumerate(read) if words[0] == "other" and words[2:] == ["0"]]
    assert len(others) == 120
    for i, offset in enumerate(others):
        assert read[offset : offset + 4] == [["other", str(i), str(part)] for part in range(4)]
    changes = sum(one[0] != other[0] for one, other in pairwise(read))
    assert changes > 10, "the two processes did not write at the same time"


def test_kafka_python_still_has_the_lock_that_keeps_a_call_in_one_batch(kafka: str, prefix: str) -> None:
    Log(kafka, prefix, "kafka-python").create("t")
    producer = KafkaProducer(bootstrap_servers=kafka, linger_ms=0)
    try:
        lock = python_producer._reentrant(producer, prefix + "t", 0)
        assert lock is not None
        producer.partitions_for(prefix + "t")
        with lock:
            first = producer.send(prefix + "t", b"1", partition=0)
            time.sleep(0.3)
            second = producer.send(prefix + "t", b"2", partition=0)
            assert not first.is_done
        assert (first.get(SOON).offset, second.get(SOON).offset) == (0, 1)
        assert getattr(first, "_produce_future") is getattr(second, "_produce_future")  # noqa: B009  (one batch)
    finally:
        producer.close()


# -- refusals


def test_a_record_over_our_limit_is_refused_before_it_is_sent(shared: Log) -> None:
    shared.create("t")
    writer = shared.open(max_record_bytes=1000)
    with pytest.raises(RecordTooLarge, match=r"1001 bytes.*1000"):
        writer.submit("t", 0, [NewRecord(b"fits"), NewRecord(b"x" * 1001)]).result(SOON)
    many = [NewRecord(b"x" * 700, tuple((f"h{i % 10}", b"") for i in range(3000)))]
    with pytest.raises(RecordTooLarge):
        writer.submit("t", 0, many).result(SOON)
    with pytest.raises(LogError, match="at least one record"):
        writer.submit("t", 0, []).result(SOON)
    with pytest.raises(TypeError):
        writer.submit("t", 0, [NewRecord("text")])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="timestamp"):
        writer.submit("t", 0, [NewRecord(b"x", (), -5)])
    assert results([writer.submit("t", 0, [NewRecord(b"x" * 1000)])]) == [0]


def test_a_record_over_the_topics_limit_is_refused_naming_size_and_setting_and_hurts_nobody(
    shared: Log,
) -> None:
    shared.create("small", 1, **{"max.message.bytes": "2000"})
    shared.create("t")
    writer = shared.open()
    results([writer.submit("t", 0, one("warm")), writer.submit("small", 0, one("warm"))])
    large = writer.submit("small", 0, [NewRecord(b"x" * 5000)])
    neighbours = [writer.submit("t", 0, one(str(i))) for i in range(20)]
    with pytest.raises(RecordTooLarge, match=r"50\d\d bytes.*log\.max_record_bytes"):
        large.result(SOON)
    # Neighbours may have to try again, but are never told that they are too large themselves.
    assert {type(error) for error in errors(neighbours)} <= {type(None), LogUnavailable}
    assert results([writer.submit("small", 0, one("after"))]) == [1]
    assert results([writer.submit("t", 0, one("after"))])[0] >= 1


def test_one_refused_record_among_good_ones_is_found_out(shared: Log) -> None:
    shared.create("t", 1, **{"message.timestamp.after.max.ms": "1000"})
    writer = shared.open(linger=timedelta(milliseconds=50))
    results([writer.submit("t", 0, one("warm"))])
    bad = [NewRecord(b"bad", (), int(time.time() * 1000) + 3_600_000)]
    futures = [writer.submit("t", 0, bad if i == 3 else one(str(i))) for i in range(8)]
    told = errors(futures)
    assert isinstance(told[3], LogUnavailable | Refused)
    assert {type(error) for i, error in enumerate(told) if i != 3} <= {type(None), LogUnavailable}
    again = [writer.submit("t", 0, bad if i == 3 else one(str(i))) for i in range(8) if told[i] is not None]
    verdicts = errors(again)
    assert [type(error) for error in verdicts if error is not None] == [Refused]
    assert "message.timestamp" in str(next(error for error in verdicts if error is not None))
    assert set(shared.read("t")) == {b"warm", *(str(i).encode() for i in range(8) if i != 3)}


def test_an_unknown_topic_or_partition_is_named(shared: Log) -> None:
    shared.create("t")
    writer = shared.open()
    good = writer.submit("t", 0, one("a"))
    unknown = [writer.submit("absent", 0, one("x")), writer.submit("t", 7, one("x"))]
    for future, name in zip(unknown, ("absent", "t"), strict=True):
        with pytest.raises(UnknownTopic, match=name):
            future.result(SOON)
    assert good.result(SOON) == 0
    shared.create("absent")
    assert writer.submit("absent", 0, one("x")).result(SOON) == 0


# -- the budget


def test_a_spent_budget_holds_submit_back_until_its_deadline(both: list[Log], broker: Node) -> None:
    interrupted = threading.Event()
    writers: list[Writer] = []
    for log in both:
        log.create("t")
        writers.append(
            log.open(
                bytes_in_flight=100_000, delivery_timeout=timedelta(seconds=2), interrupted=interrupted.is_set
            )
        )
        results([writers[-1].submit("t", 0, one("warm"))])
    broker.pause()
    started = time.monotonic()
    # Larger than the budget: goes alone.
    large = [writer.submit("t", 0, [NewRecord(b"x" * 400_000)]) for writer in writers]
    waiter = threading.Timer(0.3, interrupted.set)
    waiter.start()
    for writer in writers:
        with pytest.raises(LogUnavailable, match=r"no room.*bytes_in_flight.*interrupted"):
            writer.submit("t", 0, one("x")).result(0)
    assert time.monotonic() - started < 1.5
    interrupted.clear()
    waiter.join()
    small = [writer.submit("t", 0, one("y")) for writer in writers]  # wait for the large one to be given up
    assert {type(error) for error in errors(large, 1)} == {LogUnavailable}  # room first, then the future
    assert time.monotonic() - started < 2 + 1
    broker.resume()
    for writer in writers:
        eventually(
            lambda writer=writer: writer.submit("t", 0, one("z")).exception(SOON) is None, "an append after"
        )
    assert {type(error) for error in errors(small)} <= {type(None), LogUnavailable}


def test_a_control_topic_has_a_budget_of_its_own(shared: Log) -> None:
    shared.create("bulk")
    shared.create("run.ledger")
    # What lingers in idle lanes, or waits to be sent, holds the whole budget of bulk topics.
    writer = shared.open(bytes_in_flight=8000, linger=timedelta(seconds=1.2), batch_bytes=1 << 20)
    results([writer.submit("run.ledger", 0, one("warm"))])
    futures = [writer.submit("bulk", 0, [NewRecord(b"x" * 7000)])]
    waiting = threading.Thread(
        target=lambda: futures.append(writer.submit("bulk", 0, [NewRecord(b"y" * 7000)]))
    )
    waiting.start()
    eventually(lambda: writer.bytes_in_flight > 7000, "the budget is spent")
    started = time.monotonic()
    assert results([writer.submit("run.ledger", 0, one("quick"))]) == [1]
    assert time.monotonic() - started < 1
    assert len(futures) == 1, "the second one waits"
    waiting.join(SOON)
    assert results(futures) == [0, 1]


def test_a_large_claim_on_the_budget_is_not_passed_by_small_ones() -> None:
    budget, served = Budget(100, lambda: False), []

    def claim(size: int) -> None:
        budget.claim(size, time.monotonic() + SOON, "a test")
        served.append(size)

    budget.claim(60, 0.0, "a test")
    threads = [threading.Thread(target=claim, args=(size,)) for size in (90, 10, 11)]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    assert served == []
    budget.release(60)
    threads[0].join(SOON)
    threads[1].join(SOON)
    assert served == [90, 10]
    assert budget.used == 100
    budget.release(90)
    threads[2].join(SOON)
    assert served == [90, 10, 11]
    with pytest.raises(LogUnavailable, match=r"no room for 99 bytes.*21 of 100"):
        budget.claim(99, time.monotonic() + 0.05, "a test")
    budget.close()
    with pytest.raises(LogClosed):
        budget.claim(1, time.monotonic() + SOON, "a test")


def test_bulk_lingers_to_travel_together_and_a_flush_sends_it_at_once(shared: Log) -> None:
    shared.create("bulk")
    writer = shared.open(linger=timedelta(seconds=0.4))
    results([writer.submit("bulk", 0, one("warm"))])
    started = time.monotonic()
    futures = [writer.submit("bulk", 0, one(str(i))) for i in range(5)]
    assert results(futures) == [1, 2, 3, 4, 5]
    assert 0.3 < time.monotonic() - started < 3
    started = time.monotonic()
    future = writer.submit("bulk", 0, one("flushed"))
    assert writer.flush(timedelta(seconds=10)) == {}
    assert future.result(0) == 6
    assert time.monotonic() - started < 0.35


def test_a_callback_may_submit_while_the_budget_is_spent(shared: Log) -> None:
    shared.create("t")
    writer = shared.open(bytes_in_flight=5000)
    chained: list[Future[int]] = []

    def more(_: Future[int]) -> None:
        chained.append(writer.submit("t", 0, [NewRecord(b"y" * 4000)]))

    futures = [writer.submit("t", 0, [NewRecord(b"x" * 4000)]) for _ in range(1)]
    futures[0].add_done_callback(more)
    results(futures)
    for _ in range(20):
        future = writer.submit("t", 0, [NewRecord(b"x" * 4000)])
        future.add_done_callback(more)
        results([future])
    eventually(lambda: len(chained) == 21, "every callback ran")
    results(chained)


def test_memory_stays_flat_while_a_broker_hangs_and_everything_is_delivered_once_after(
    both: list[Log], broker: Node
) -> None:
    budget, size, count = 16 << 20, 256 << 10, 200  # 50 MiB are offered to each
    for log in both:
        log.create("t", 4)
        writer = log.open(bytes_in_flight=budget)
        results([writer.submit("t", p, one("warm")) for p in range(4)])
    broker.pause()
    before = _resident_bytes()
    futures: list[list[Future[int]]] = [[], []]

    def offer(log: Log, futures: list[Future[int]]) -> None:
        (writer,) = log.writers
        for i in range(count):
            value = i.to_bytes(4, "big") + os.urandom(size - 4)
            futures.append(writer.submit("t", i % 4, [NewRecord(value)]))

    offering = [threading.Thread(target=offer, args=each) for each in zip(both, futures, strict=True)]
    for thread in offering:
        thread.start()
    eventually(lambda: min(map(len, futures)) * size > budget - 2 * size, "the budgets are spent")
    time.sleep(0.5)  # in which no more may be taken
    grown, offered = _resident_bytes() - before, [len(each) for each in futures]
    broker.resume()
    for thread in offering:
        thread.join(SOON)
        assert not thread.is_alive()
    assert max(offered) * size <= budget
    assert grown < 2 * 2 * budget, f"{grown >> 20} MiB more for two budgets of {budget >> 20} MiB"
    for log, each in zip(both, futures, strict=True):
        results(each)
        numbers = [int.from_bytes(value[:4], "big") for p in range(4) for value in log.read("t", p)[1:]]
        assert numbers == [i for p in range(4) for i in range(p, count, 4)]


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# -- outages


def test_what_a_stopped_broker_did_not_take_is_reported_and_what_comes_in_time_is_there_once(
    both: list[Log], broker: Node
) -> None:
    """Case O03, both halves; and writers that were opened while the broker was away."""
    for log in both:
        log.create("hopeless")
        log.create("patient")
        hopeless, patient = log.open(delivery_timeout=timedelta(seconds=3)), log.open()
        results([hopeless.submit("hopeless", 0, one("before")), patient.submit("patient", 0, one("before"))])
    broker.kill()
    started = time.monotonic()
    late = [log.open().submit("patient", 0, one("late")) for log in both]
    unsent = [
        log.open(delivery_timeout=timedelta(seconds=1)).submit("hopeless", 0, one("unsent")) for log in both
    ]
    lost = [[log.writers[0].submit("hopeless", 0, one(str(i))) for i in range(10)] for log in both]
    kept = [[log.writers[1].submit("patient", 0, one(str(i))) for i in range(10)] for log in both]
    assert time.monotonic() - started < 1, "no caller is held back"

    closing = [threading.Thread(target=_close_undelivered, args=(log,)) for log in both]
    for thread in closing:
        thread.start()
    for future in unsent:
        with pytest.raises(LogUnavailable, match=rf"{broker.address}.*nothing of it was appended"):
            future.result(SOON)
    assert time.monotonic() - started < 2.5
    for log in both:
        assert log.writers[1].flush(timedelta(seconds=0.1)) == {TopicPartition("patient", 0): 10}
    for thread in closing:
        thread.join(SOON)
    assert time.monotonic() - started < 6
    for log, futures in zip(both, lost, strict=True):
        assert log.undelivered == {TopicPartition("hopeless", 0): 10}
        assert {type(error) for error in errors(futures, 0)} == {LogUnavailable}

    broker.start()
    back = time.monotonic()
    for log, futures, future in zip(both, kept, late, strict=True):
        assert log.writers[1].flush(timedelta(seconds=20)) == {}
        assert future.result(SOON) >= 1
        results(futures, 0)
    assert time.monotonic() - back < 10
    for log in both:
        read = log.read("patient")
        assert read[0] == b"before"
        assert [value for value in read if value.isdigit()] == [str(i).encode() for i in range(10)]
        assert read.count(b"late") == 1 and len(read) == 12
        assert log.read("hopeless")[0] == b"before"
        for writer in log.writers:
            assert writer.close(timedelta(seconds=5)) == {}


def _close_undelivered(log: Log) -> None:
    log.undelivered = log.writers[0].close(timedelta(seconds=3))


def test_a_broker_killed_and_restarted_in_mid_stream_loses_nothing_that_was_acknowledged(
    both: list[Log], broker: Node
) -> None:
    futures: list[list[Future[int]]] = [[], []]
    stop = threading.Event()

    def write(writer: Writer, futures: list[Future[int]]) -> None:
        while not stop.is_set():
            count = 1 + len(futures) % 2
            records = [NewRecord(f"{len(futures)} {part} ".encode() + b"x" * 2000) for part in range(count)]
            futures.append(writer.submit("t", len(futures) % 3, records))
            time.sleep(0.003)

    for log in both:
        log.create("t", 3)
        log.open(delivery_timeout=timedelta(seconds=20))
    writing = [
        threading.Thread(target=write, args=(log.writers[0], each))
        for log, each in zip(both, futures, strict=True)
    ]
    for thread in writing:
        thread.start()
    time.sleep(0.7)
    broker.kill()
    broker.start()
    time.sleep(0.7)
    stop.set()
    for thread in writing:
        thread.join(SOON)
    for log, each in zip(both, futures, strict=True):
        told = errors(each)
        assert {type(error) for error in told} <= {type(None), LogUnavailable}
        assert told.count(None) > len(told) / 2
        read = [[value.split()[:2] for value in log.read("t", p)] for p in range(3)]
        for i, (future, error) in enumerate(zip(each, told, strict=True)):
            if error is None:
                for part in range(1 + i % 2):
                    words = read[i % 3][future.result() + part]
                    assert words == [str(i).encode(), str(part).encode()]
        for of_partition in read:
            found = [(int(i), int(part)) for i, part in of_partition]
            assert found == sorted(set(found)), "in order, and each at most once"


def test_an_outage_longer_than_the_limit_fails_in_time_and_then_it_works_again(
    both: list[Log], broker: Node
) -> None:
    for log in both:
        log.create("t", 2)
        writer = log.open(delivery_timeout=timedelta(seconds=1), request_timeout=timedelta(seconds=0.7))
        results([writer.submit("t", p, one("before")) for p in range(2)])
    broker.pause()
    outcomes: list[tuple[float, BaseException | None]] = []
    ended = time.monotonic() + 4  # the clients give up after 2 s

    def keep_trying(writer: Writer) -> None:
        while time.monotonic() < ended:
            started = time.monotonic()
            error = writer.submit("t", len(outcomes) % 2, one("during")).exception(SOON)
            outcomes.append((time.monotonic() - started, error))

    trying = [threading.Thread(target=keep_trying, args=(log.writers[0],)) for log in both]
    for thread in trying:
        thread.start()
    for thread in trying:
        thread.join(SOON)
    assert {type(error) for _, error in outcomes} == {LogUnavailable}
    assert max(took for took, _ in outcomes) < 1 + 0.7
    assert all(broker.address in str(error) for _, error in outcomes)
    broker.resume()
    back = time.monotonic()
    for log in both:
        (writer,) = log.writers
        for p in range(2):
            for i in range(5):
                eventually(
                    lambda w=writer, p=p, i=i: w.submit("t", p, one(f"after {i}")).exception(SOON) is None,
                    "an append after the outage",
                )
    assert time.monotonic() - back < 10
    for log in both:
        for p in range(2):
            read = log.read("t", p)
            assert read[0] == b"before"
            firsts = [read.index(f"after {i}".encode()) for i in range(5)]
            assert firsts == sorted(firsts)
        assert log.writers[0].close(timedelta(seconds=5)) == {}


def test_closing_never_hangs_on_a_broker_that_does(both: list[Log], broker: Node) -> None:
    for log in both:
        log.create("t")
        results([log.open().submit("t", 0, one("before"))])
    broker.pause()
    for log in both:
        (writer,) = log.writers
        futures = [
            writer.submit("t", 0, one("x")),
            writer.submit("t", 0, [NewRecord(b"y"), NewRecord(b"z")]),
        ]
        started = time.monotonic()
        assert writer.close(timedelta(seconds=0.5)) == {TopicPartition("t", 0): 3}
        assert time.monotonic() - started < 3
        assert {type(error) for error in errors(futures, 0)} == {LogUnavailable}
        with pytest.raises(LogClosed):
            writer.submit("t", 0, one("x")).result(0)
        assert writer.close(timedelta(seconds=5)) == {}


def test_a_submitted_append_cannot_be_cancelled_and_is_told_before_its_future(shared: Log) -> None:
    shared.create("t.fleet")
    writer = shared.open()
    future = writer.submit("t.fleet", 0, [NewRecord(b"a"), NewRecord(b"b")])
    seen: list[list[Any]] = []
    future.add_done_callback(lambda _: seen.append(list(shared.acked)))
    assert not future.cancel()
    assert future.result(SOON) == 0
    eventually(lambda: bool(seen), "the callback")
    assert seen == [[(TopicPartition("t.fleet", 0), 0, 2)]]


# -- a client that cannot be relied upon


class Silent(Link):
    """Takes everything and never says what became of it."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.closed = False

    def knows(self, place: TopicPartition) -> bool:
        return True

    def learn(self, place: TopicPartition) -> bool:
        raise AssertionError("it knows every topic")

    def hand(self, append: Append, kind: int, done: Done) -> Callable[[], None]:
        self.taken.append(append.records[0].value.decode())
        return lambda: None

    def push(self) -> None:
        pass

    def is_spoiled_by(self, error: LogError) -> bool:
        return True

    def broken(self) -> LogError | None:
        return None

    def close(self, timeout_s: float) -> None:
        self.closed = True


def test_nobody_is_told_anything_while_a_caller_that_queues_holds_its_own_lock() -> None:
    lanes = Lanes(KafkaSettings(("127.0.0.1:1",)), Silent, window=1 << 20)
    lanes.close(0.0)
    told: list[Exception | None] = []
    go_on = lanes.queue("t", 0, one("x"), lambda _, error: told.append(error), time.monotonic() + SOON)
    assert told == []
    go_on()
    assert [type(error) for error in told] == [LogClosed]


def test_a_wedged_client_cannot_keep_an_owner_waiting_and_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("streams.kafka.lanes._WEDGED_S", 0.1)
    links: list[Silent] = []

    def connect() -> Link:
        links.append(Silent())
        return links[-1]

    settings = KafkaSettings(("127.0.0.1:1",), delivery_timeout=timedelta(seconds=0.3))
    lanes = Lanes(settings, connect, window=1 << 20)
    told: list[tuple[float, Exception | None]] = []
    started = time.monotonic()
    while len(links) < 2:
        assert time.monotonic() - started < SOON
        sent = time.monotonic()
        over = threading.Event()

        def answer(_: int, error: Exception | None, sent: float = sent, over: threading.Event = over) -> None:
            told.append((time.monotonic() - sent, error))
            over.set()

        lanes.send("t", 0, one(str(len(told))), answer, sent + 0.3)
        assert over.wait(SOON)
    lanes.close(0.0)
    assert all(isinstance(error, LogUnavailable) for _, error in told)
    assert max(took for took, _ in told) < 1
    assert links[0].closed and links[1].closed
    assert links[0].taken == [str(i) for i in range(len(links[0].taken))]


def test_settling_waits_until_nothing_that_was_given_up_can_still_land() -> None:
    class Slow(Silent):
        """Acknowledges once it is let go, long after the owner was told that it was not."""

        def hand(self, append: Append, kind: int, done: Done) -> Callable[[], None]:
            let_go.append(lambda: done(7, None))
            return lambda: None

    let_go: list[Callable[[], None]] = []
    lanes = Lanes(
        KafkaSettings(("127.0.0.1:1",), delivery_timeout=timedelta(seconds=SOON)), Slow, window=1 << 20
    )
    place, over = TopicPartition("t", 0), threading.Event()
    assert lanes.settle(place, 0.0), "there is nothing on its way"
    told: list[Exception | None] = []

    def answer(_: int, error: Exception | None) -> None:
        told.append(error)
        over.set()

    lanes.send("t", 0, one("x"), answer, time.monotonic() + 0.2)
    assert over.wait(SOON)
    assert [type(error) for error in told] == [LogUnavailable]
    assert not lanes.settle(place, 0.1)
    assert lanes.settle(TopicPartition("t", 1), 0.0), "another partition has nothing to wait for"
    threading.Timer(0.2, let_go[0]).start()
    assert lanes.settle(place, SOON)
    lanes.close(0.0)
