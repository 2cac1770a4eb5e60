"""The reading side of the Kafka log, against real brokers that are killed, paused and truncated."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from streams.errors import CorruptRecord, LogClosed, LogUnavailable, OffsetOutOfRange
from streams.log import Batch, Record, TopicPartition

pytest.importorskip("kafka")
pytest.importorskip("confluent_kafka")

from kafka import KafkaAdminClient, KafkaProducer
from kafka.admin import NewTopic
from kafka.structs import TopicPartition as KafkaPlace

from streams.broker.node import Node
from streams.kafka import follower
from streams.kafka.feed import Feed
from streams.kafka.process_consumer import ProcessConsumer
from streams.kafka.reader import Reader
from streams.kafka.settings import KafkaSettings
from tests.support.kafka import QUICK

SOON = timedelta(seconds=20)
MB = 1 << 20


class Way(NamedTuple):
    client: str
    ingest: str


THREADS = [Way("kafka-python", "thread"), Way("confluent", "thread")]
WAYS = [*THREADS, Way("kafka-python", "process"), Way("confluent", "process")]


class World:
    """A broker, a producer that is not ours, and the readers opened on it."""

    def __init__(self, address: str, prefix: str, way: Way) -> None:
        self.address, self.prefix, self.way = address, prefix, way
        self.readers: list[Reader] = []
        self._producer: KafkaProducer | None = None

    def create(self, topic: str, partitions: int = 1) -> None:
        wanted = {"max.message.bytes": str(17 * MB)}
        with_admin(
            self.address,
            lambda a: a.create_topics([NewTopic(self.prefix + topic, partitions, 1, topic_configs=wanted)]),
        )

    def open(self, **changes: Any) -> Reader:
        settings = {"prefix": self.prefix, "client": self.way.client, "ingest": self.way.ingest, **changes}
        self.readers.append(Reader(KafkaSettings((self.address,), **settings)))
        return self.readers[-1]

    def append(self, topic: str, *values: bytes, partition: int = 0, batches: bool = False) -> int:
        """The offset of the first; `batches`: each value is a batch of its own."""
        if self._producer is None:
            self._producer = KafkaProducer(
                bootstrap_servers=self.address,
                acks="all",
                max_request_size=17 * MB,
                batch_size=MB,
                linger_ms=2,
            )
        futures: list[Any] = []
        for value in values:
            futures.append(self._producer.send(self.prefix + topic, value, partition=partition))
            if batches:
                futures[-1].get(SOON.total_seconds())
        self._producer.flush(SOON.total_seconds())
        return futures[0].get(SOON.total_seconds()).offset

    def transactional(self, name: str) -> KafkaProducer:
        producer = KafkaProducer(
            bootstrap_servers=self.address, acks="all", transactional_id=self.prefix + name
        )
        producer.init_transactions()
        return producer

    def delete_before(self, topic: str, offset: int) -> None:
        with_admin(
            self.address, lambda admin: admin.delete_records({KafkaPlace(self.prefix + topic, 0): offset})
        )

    def rest(self) -> None:
        """Before its broker goes: a plain producer leaks sockets while it tries to connect."""
        if self._producer is not None:
            self._producer.close(timeout=1)
            self._producer = None

    def close(self) -> None:
        for reader in self.readers:
            reader.close()
        self.rest()


def with_admin(address: str, do: Callable[[KafkaAdminClient], Any]) -> None:
    admin = KafkaAdminClient(bootstrap_servers=address)
    try:
        do(admin)
    finally:
        admin.close()


@pytest.fixture(params=THREADS, ids=lambda way: f"{way.client} in a {way.ingest}")
def way(request: pytest.FixtureRequest) -> Way:
    return request.param


@pytest.fixture
def world(kafka: str, prefix: str, way: Way) -> Iterator[World]:
    """On the broker that all tests share."""
    world = World(kafka, prefix, way)
    yield world
    world.close()


@pytest.fixture(scope="module")
def node(kafka_folder: Path) -> Iterator[Node]:
    """One that these tests kill, pause, stop and start."""
    node = Node(kafka_folder / "reader", port=0, java_options=QUICK)
    yield node
    node.kill()


@pytest.fixture
def own(node: Node, prefix: str, way: Way) -> Iterator[World]:
    node.start()
    world = World(node.address, prefix, way)
    yield world
    node.start()
    world.close()


@pytest.fixture
def owns(node: Node, prefix: str) -> Iterator[list[World]]:
    """Every way to read on that broker, so that all go through the same outage. (A child of the other client is no
    other than this one.)"""
    node.start()
    ways = [*THREADS, Way("kafka-python", "process")]
    worlds = [World(node.address, f"{prefix}{i}.", way) for i, way in enumerate(ways)]
    yield worlds
    node.start()
    for world in worlds:
        world.close()


def together(worlds: Sequence[World], do: Callable[[World], object]) -> None:
    """Each in a thread of its own; raises what the first of them raised."""
    with ThreadPoolExecutor(len(worlds)) as pool:
        for future in [pool.submit(do, world) for world in worlds]:
            future.result()


def read_all(reader: Reader, topic: str, position: int = 0, partition: int = 0) -> list[Record]:
    records: list[Record] = []
    end = reader.end(topic, partition)
    deadline = time.monotonic() + SOON.total_seconds()
    while position < end:
        batch = reader.read(topic, partition, position, 500, 8 * MB)
        assert batch.next_position > position, f"stuck at {position} of {end}"
        assert time.monotonic() < deadline
        records += batch.records
        position = batch.next_position
    return records


def patiently(read: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    """As a stage does that goes on when the log is unavailable for a while."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return read()
        except LogUnavailable:
            assert time.monotonic() < deadline


def values(records: list[Record]) -> list[bytes]:
    return [record.value for record in records]


def numbered(start: int, stop: int, size: int = 0) -> list[bytes]:
    return [b"%d" % number + b"." * size for number in range(start, stop)]


def tail(reader: Reader, topic: str, position: int, partition: int = 0) -> None:
    """Bring it to where a live feed stands at that position, which is the end."""
    place = TopicPartition(topic, partition)
    assert not reader.wait({place: position}, timedelta(seconds=0.4))
    assert reader.read(topic, partition, position, 10, MB) == Batch([], position)


# -- the window of a feed


def records(start: int, stop: int, size: int = 100, step: int = 1) -> list[Record]:
    return [Record("t", 0, offset, 0, (), bytes(size)) for offset in range(start, stop, step)]


def offsets(batch: Batch | None) -> list[int] | None:
    return None if batch is None else [record.offset for record in batch.records]


def test_a_window_that_a_reader_has_overtaken_is_left_behind_after_a_while_or_when_more_came_in_vain() -> (
    None
):
    feed = Feed(0, 0.0)
    feed.extend(records(0, 10), 10, 1.0)
    assert [feed.is_left_behind(now, 0.5) for now in (2.0, 2.4, 2.6)] == [False, False, True]
    assert offsets(feed.take(5, 3, MB)) is None, "what a reader has passed is let go of"
    feed.jump(20, 3.0)
    assert not feed.is_left_behind(4.0, 0.5)
    feed.extend(records(20, 30), 30, 4.1)
    assert feed.is_left_behind(4.2, 0.5)


def test_a_window_gives_what_lies_in_it_within_the_limits_of_the_read() -> None:
    feed = Feed(10, 0.0)
    feed.extend(records(10, 20), 22, 0.0)
    assert offsets(feed.take(10, 3, MB)) == [10, 11, 12]
    assert offsets(feed.take(13, 500, 250)) == [13, 14]
    assert offsets(feed.take(15, 500, 1)) == [15]
    assert feed.take(16, 500, MB) == Batch(records(16, 20), 22), (
        "the markers behind the last record are passed over"
    )
    assert feed.take(20, 500, MB) == Batch([], 22)
    assert feed.take(22, 500, MB) is None
    assert feed.take(9, 500, MB) is None


def test_a_second_reader_close_behind_the_first_finds_its_records_in_the_window() -> None:
    feed = Feed(0, 0.0)
    feed.extend(records(0, 100, step=2), 100, 0.0)
    assert offsets(feed.take(0, 30, MB)) == list(range(0, 60, 2))
    before = feed.ahead_bytes
    assert offsets(feed.take(7, 3, MB)) == [8, 10, 12]
    assert feed.ahead_bytes == before
    feed.forget_read(5000)
    assert feed.take(7, 3, MB) is None
    assert offsets(feed.take(55, 2, MB)) == [56, 58]
    assert offsets(feed.take(60, 500, MB)) == list(range(60, 100, 2))
    assert feed.ahead_bytes == 0


def test_what_is_kept_of_what_was_read_is_bounded() -> None:
    feed = Feed(0, 0.0)
    for start in range(0, 10_000, 100):
        feed.extend(records(start, start + 100, 1000), start + 100, 0.0)
        position = start
        while position < start + 100:
            batch = feed.take(position, 7, MB)
            assert batch is not None and batch.records[0].offset == position
            position = batch.next_position
            feed.forget_read(50_000)
        assert feed.begin >= position - 50
    assert feed.begin > 9900


# -- reading


@pytest.mark.parametrize("way", WAYS, indirect=True, ids=lambda way: f"{way.client} in a {way.ingest}")
def test_o08_reading_to_the_end_passes_over_markers_and_aborted_records(world: World) -> None:
    world.create("t")
    producer = world.transactional("x")
    producer.begin_transaction()
    for value in numbered(0, 5):
        producer.send(world.prefix + "t", value, partition=0)
    producer.commit_transaction()
    producer.begin_transaction()
    for value in numbered(6, 9):
        producer.send(world.prefix + "t", value, partition=0)
    producer.flush()
    producer.abort_transaction()
    producer.close()
    reader = world.open()
    assert reader.end("t", 0) == 10
    for _ in range(2):
        started = time.monotonic()
        position, seen = 0, []
        while position < 10:
            batch = reader.read("t", 0, position, 500, MB)
            seen += batch.records
            assert batch.next_position > position
            position = batch.next_position
        assert time.monotonic() - started < 5
        assert (position, values(seen)) == (10, numbered(0, 5))
        assert reader.end("t", 0) - position == 0
    for position in range(5, 10):
        assert reader.read("t", 0, position, 1, 1) == Batch([], 10)
    assert reader.wait({TopicPartition("t", 0): 5}, SOON), "there is something to read, if only markers"
    world.append("t", b"after")
    assert reader.wait({TopicPartition("t", 0): 10}, SOON)
    assert values(reader.read("t", 0, 10, 500, MB).records) == [b"after"]


def test_what_an_open_transaction_holds_back_is_not_there_until_it_ends(world: World) -> None:
    world.create("t")
    world.append("t", b"before")
    reader = world.open()
    producer = world.transactional("x")
    producer.begin_transaction()
    producer.send(world.prefix + "t", b"held", partition=0)
    producer.flush()
    offset = world.append("t", b"ours")
    reader.acked(TopicPartition("t", 0), offset, 1)
    assert reader.end("t", 0) == 1
    assert reader.read("t", 0, 1, 10, MB) == Batch([], 1)
    assert not reader.wait({TopicPartition("t", 0): 1}, timedelta(seconds=0.3))
    producer.commit_transaction()
    producer.close()
    assert reader.wait({TopicPartition("t", 0): 1}, SOON)
    assert values(read_all(reader, "t", 1)) == [b"held", b"ours"]


def test_what_was_acknowledged_is_there_for_the_next_read(world: World) -> None:
    world.create("t")
    reader = world.open()
    times: list[float] = []
    for number in range(40):
        offset = world.append("t", b"%d" % number)
        reader.acked(TopicPartition("t", 0), offset, 1)
        started = time.monotonic()
        batch = reader.read("t", 0, offset, 10, MB)
        times.append((time.monotonic() - started) * 1000)
        assert (values(batch.records), batch.next_position) == ([b"%d" % number], offset + 1)
    print(
        f"{world.way}: read after acknowledgement: median {sorted(times)[20]:.1f} ms, at most {max(times):.1f}"
    )


def test_what_the_end_said_is_there_for_the_next_read_while_others_write(world: World) -> None:
    world.create("t")
    reader, stop = world.open(), threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            world.append("t", *numbered(number, number + 3))
            number += 3

    thread = threading.Thread(target=write)
    thread.start()
    try:
        position = 0
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            end = reader.end("t", 0)
            while position < end:
                batch = reader.read("t", 0, position, 2, MB)
                assert batch.records and batch.records[0].offset == position
                assert batch.records[0].value == b"%d" % position
                position = batch.next_position
        assert position > 20
    finally:
        stop.set()
        thread.join(SOON.total_seconds())


def test_a_read_at_the_end_is_empty_and_outside_the_range_an_error_with_the_real_bounds(world: World) -> None:
    world.create("t")
    reader = world.open()
    assert reader.read("t", 0, 0, 10, MB) == Batch([], 0)
    world.append("t", b"a", b"b", b"c")
    world.delete_before("t", 1)
    assert reader.read("t", 0, 3, 10, MB) == Batch([], 3)
    for position in (-1, 0, 4, 1000):
        with pytest.raises(OffsetOutOfRange) as raised:
            reader.read("t", 0, position, 10, MB)
        error = raised.value
        assert (error.offset, error.start, error.end) == (position, 1, 3)
    assert (reader.start("t", 0), reader.end("t", 0), reader.offset_at("t", 0, -5)) == (1, 3, 1)


def test_random_reads_and_windows_backwards_give_what_was_written(world: World) -> None:
    world.create("t")
    chance = random.Random(3)
    written = [b"%d " % number + chance.randbytes(chance.randrange(20_000)) for number in range(1000)]
    world.append("t", *written)
    reader = world.open()
    for offset in chance.sample(range(1000), 100):
        batch = reader.read("t", 0, offset, 1, 8 * MB)
        assert batch == Batch(
            [Record("t", 0, offset, batch.records[0].timestamp_ms, (), written[offset])], offset + 1
        )
    for offset in sorted(chance.sample(range(1000), 200)):
        (record,) = reader.read("t", 0, offset, 1, 1).records
        assert (record.offset, record.value) == (offset, written[offset])
    end, seen = 1000, []
    while end:
        begin = position = max(0, end - 256)
        window: list[Record] = []
        while position < end:
            batch = reader.read("t", 0, position, end - position, 8 * MB)
            window += batch.records
            position = batch.next_position
        seen += reversed(window)
        end = begin
    assert values(seen) == written[::-1]


@pytest.mark.parametrize("way", WAYS, indirect=True, ids=lambda way: f"{way.client} in a {way.ingest}")
def test_records_of_3_and_12_mb_come_whole_from_anywhere_and_in_order(world: World) -> None:
    world.create("t")
    sizes = [10, 3 * MB, 5, 12 * MB, 12 * MB, 7]
    written = [random.Random(size + i).randbytes(size) for i, size in enumerate(sizes)]
    world.append("t", *written)
    reader = world.open(prefetch_bytes=4 * MB)  # a record larger than the budget passes all the same
    for offset in (4, 1, 3, 5, 0):
        (record,) = reader.read("t", 0, offset, 1, 1).records
        assert record.value == written[offset]
    assert reader.wait({TopicPartition("t", 0): 0}, SOON)
    assert values(read_all(reader, "t")) == written
    world.append("t", written[3], b"end")
    assert values(read_all(reader, "t", 6)) == [written[3], b"end"]


# -- reading ahead


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_what_is_read_ahead_is_bounded_and_starves_nobody(world: World) -> None:
    world.create("t", 3)
    total = 96 * MB
    value = random.Random(1).randbytes(64 << 10)
    for _ in range(3):
        world.append("t", *[value] * (total // 3 // len(value)))
    budget = 8 * MB
    reader = world.open(prefetch_bytes=budget)
    places = [TopicPartition("t", partition) for partition in range(3)]
    before = resident()
    assert reader.wait({places[0]: 0, places[1]: 0}, SOON)
    time.sleep(1.0)
    ahead = [feed.ahead_bytes for place in places[:2] if (feed := reader._bulk.feed(place))]
    assert sum(ahead) <= budget + max(budget // 2, MB) + 2 * len(value), (
        "the budget, and one answer of the broker"
    )
    grown = resident() - before
    print(
        f"{world.way}: {sum(ahead) / MB:.1f} MB ahead of {total / MB:.0f}, the process grew by {grown / MB:.0f} MB"
    )
    assert grown < 60 * MB
    threading.Timer(0.2, lambda: world.append("t", b"elsewhere", partition=2)).start()
    assert reader.wait({places[2]: 0}, SOON), (
        "a partition that is waited for is read whatever the others hold"
    )
    assert values(read_all(reader, "t", partition=2)) == [b"elsewhere"]
    assert len(read_all(reader, "t")) == total // len(value)


def test_a_live_feed_answers_without_asking_a_broker(own: World, node: Node) -> None:
    own.create("t")
    own.append("t", b"a", b"b")
    reader = own.open(timeout=timedelta(seconds=1))
    assert values(read_all(reader, "t")) == [b"a", b"b"]
    tail(reader, "t", 2)
    assert reader.recent_end("t", 0) == 2
    node.pause()
    try:
        started = time.monotonic()
        assert reader.recent_end("t", 0) == 2
        for _ in range(1000):
            assert reader.read("t", 0, 2, 500, MB) == Batch([], 2)
        assert time.monotonic() - started < 0.5
        with pytest.raises(LogUnavailable, match=rf"t/0: its end.*{own.address}.*within 1 s"):
            reader.end("t", 0)
        with pytest.raises(LogUnavailable):
            reader.read("t", 0, 3, 1, 1)
    finally:
        node.resume()
    assert reader.end("t", 0) == 2


@pytest.mark.parametrize("way", WAYS, indirect=True, ids=lambda way: f"{way.client} in a {way.ingest}")
def test_wait_wakes_within_milliseconds_of_an_append(world: World) -> None:
    world.create("t", 2)
    reader = world.open()
    tail(reader, "t", 0, 0)
    tail(reader, "t", 0, 1)
    latencies: list[float] = []
    for position in range(25):
        done: list[float] = []

        def append(done: list[float] = done) -> None:
            world.append("t", b"x", partition=1)
            done.append(time.monotonic())

        timer = threading.Timer(0.01, append)
        timer.start()
        assert reader.wait({TopicPartition("t", 0): 0, TopicPartition("t", 1): position}, SOON)
        woken = time.monotonic()
        (record,) = reader.read("t", 1, position, 10, MB).records
        assert record.offset == position
        timer.join()
        latencies.append((woken - done[0]) * 1000)
    print(f"{world.way}: wait returned {sorted(latencies)[12]:.1f} ms after the acknowledgement (median)")
    assert sorted(latencies)[12] < 100


def test_own_appends_wake_a_wait_at_once_and_a_wait_ends_at_its_deadline(world: World) -> None:
    world.create("t")
    reader, place = world.open(), TopicPartition("t", 0)
    started = time.monotonic()
    assert not reader.wait({place: 0}, timedelta(seconds=0.2))
    assert 0.19 < time.monotonic() - started < 2
    assert not reader.wait({place: 0}, timedelta(0))
    offset = world.append("t", b"a")
    threading.Timer(0.05, lambda: reader.acked(place, offset, 1)).start()
    assert reader.wait({place: 0}, SOON)
    assert reader.wait({place: 0}, timedelta(0))
    assert values(reader.read("t", 0, 0, 10, MB).records) == [b"a"]


def test_closing_ends_waits_and_reads_in_other_threads(own: World, node: Node) -> None:
    own.create("t")
    own.append("t", b"a")
    reader = own.open(timeout=timedelta(seconds=30))
    assert reader.end("t", 0) == 1
    node.pause()
    try:
        ended: list[str] = []

        def closed(name: str, call: Callable[[], Any]) -> None:
            with pytest.raises(LogClosed):
                call()
            ended.append(name)

        place = TopicPartition("t", 0)
        calls: dict[str, Callable[[], Any]] = {
            "wait": lambda: reader.wait({place: 1}, timedelta(seconds=30)),
            "read": lambda: reader.read("t", 0, 0, 1, 1),
            "end": lambda: reader.end("t", 0),
        }
        threads = [threading.Thread(target=closed, args=item) for item in calls.items()]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        reader.close()
        for thread in threads:
            thread.join(10)
        assert sorted(ended) == ["end", "read", "wait"]
        for call in calls.values():
            with pytest.raises(LogClosed):
                call()
        reader.close()
    finally:
        node.resume()


def test_control_records_come_quickly_beside_bulk(world: World) -> None:
    world.create("t")
    world.create("ledger")
    reader, stop = world.open(), threading.Event()
    value = random.Random(2).randbytes(64 << 10)
    read_bytes = [0]

    def write_bulk() -> None:
        while not stop.is_set():
            world.append("t", *[value] * 16)
            time.sleep(0.03)

    def read_bulk() -> None:
        position = 0
        while not stop.is_set():
            if reader.wait({TopicPartition("t", 0): position}, timedelta(seconds=0.1)):
                batch = reader.read("t", 0, position, 500, 8 * MB)
                position = batch.next_position
                read_bytes[0] += sum(len(record.value) for record in batch.records)

    control = World(world.address, world.prefix, world.way)  # a producer of its own
    threads = [threading.Thread(target=write_bulk), threading.Thread(target=read_bulk)]
    for thread in threads:
        thread.start()
    latencies: list[float] = []
    started = time.monotonic()
    try:
        for position in range(50):
            control.append("ledger", b"e" * 200)
            acknowledged = time.monotonic()
            assert reader.wait({TopicPartition("ledger", 0): position}, SOON)
            assert len(reader.read("ledger", 0, position, 500, MB).records) == 1
            latencies.append((time.monotonic() - acknowledged) * 1000)
            time.sleep(0.01)
    finally:
        stop.set()
        for thread in threads:
            thread.join(SOON.total_seconds())
        control.close()
    rate = read_bytes[0] / 1e6 / (time.monotonic() - started)
    latencies.sort()
    print(
        f"{world.way}: beside {rate:.0f} MB/s of bulk a control record is read {latencies[25]:.1f} ms (median), "
        f"{latencies[48]:.1f} ms (p98) after its acknowledgement"
    )
    assert latencies[48] < 400
    assert rate > 1


# -- when things go wrong


def test_a_killed_broker_is_waited_for_and_all_goes_on_when_it_is_back(owns: list[World], node: Node) -> None:
    place = TopicPartition("t", 0)

    def follow(world: World) -> None:
        world.create("t", 2)
        world.append("t", *numbered(0, 20))
        reader = world.open(timeout=timedelta(seconds=1))
        batch = patiently(lambda: reader.read("t", 0, 0, 5, MB))  # a child takes a while to start
        assert values(batch.records) == numbered(0, 5)
        tail(reader, "t", 20)
        world.rest()

    def be_without(world: World) -> None:
        (reader,) = world.readers
        started = time.monotonic()
        assert reader.read("t", 0, 20, 10, MB) == Batch([], 20)
        assert not reader.wait({place: 20}, timedelta(seconds=0.2))
        reader.acked(TopicPartition("t", 1), 7, 1)
        absent = rf"t/1: records from 3 on: not from {world.address} within 1 s"
        with pytest.raises(LogUnavailable, match=absent):
            reader.read("t", 1, 3, 10, MB)
        with pytest.raises(LogUnavailable, match="its start"):
            reader.start("t", 0)
        assert time.monotonic() - started < 6

    def go_on(world: World) -> None:
        (reader,) = world.readers
        back = time.monotonic()
        world.append("t", b"20")
        assert reader.wait({place: 20}, SOON)
        print(f"{world.way}: read again {time.monotonic() - back:.1f} s after the broker answered")
        assert time.monotonic() - back < 10
        assert values(patiently(lambda: read_all(reader, "t"))) == numbered(0, 21)
        with pytest.raises(OffsetOutOfRange):
            patiently(lambda: reader.read("t", 1, 3, 10, MB))
        assert time.monotonic() - back < 10

    together(owns, follow)
    node.kill()
    together(owns, be_without)
    node.start()
    together(owns, go_on)


def test_a_wait_for_the_broker_ends_when_the_process_is_to_stop(own: World, node: Node) -> None:
    own.create("t")
    stopping = threading.Event()
    reader = own.open(timeout=timedelta(seconds=30), interrupted=stopping.is_set)
    assert reader.end("t", 0) == 0
    node.pause()
    try:
        threading.Timer(0.2, stopping.set).start()
        started = time.monotonic()
        with pytest.raises(LogUnavailable, match="interrupted"):
            reader.end("t", 0)
        assert not reader.wait({TopicPartition("t", 0): 0}, timedelta(seconds=30))
        assert time.monotonic() - started < 2
    finally:
        node.resume()


def test_a_feed_whose_records_were_removed_gives_way_to_an_error_and_goes_on(world: World) -> None:
    world.create("t")
    world.append("t", *numbered(0, 10))
    reader = world.open()
    tail(reader, "t", 10)
    assert values(reader.read("t", 0, 2, 3, MB).records) == numbered(2, 5)
    world.append("t", *numbered(10, 20))
    world.delete_before("t", 15)
    assert reader.start("t", 0) == 15
    for position in (2, 5):
        with pytest.raises(OffsetOutOfRange, match="removed by retention") as raised:
            reader.read("t", 0, position, 10, MB)
        assert (raised.value.start, raised.value.end) == (15, 20)
    assert values(read_all(reader, "t", 15)) == numbered(15, 20)


def test_a_partition_made_anew_does_not_leave_a_reader_stuck(world: World) -> None:
    world.create("t")
    world.append("t", *numbered(0, 50))
    reader, place = world.open(timeout=timedelta(seconds=5)), TopicPartition("t", 0)
    tail(reader, "t", 50)
    with_admin(world.address, lambda admin: admin.delete_topics([world.prefix + "t"]))
    time.sleep(0.5)
    world.create("t")
    world.append("t", b"new")
    deadline = time.monotonic() + SOON.total_seconds()
    with pytest.raises(OffsetOutOfRange) as raised:
        while time.monotonic() < deadline:
            reader.wait({place: 50}, timedelta(seconds=0.5))
            reader.read("t", 0, 50, 10, MB)
    assert (raised.value.start, raised.value.end) == (0, 1)
    assert values(read_all(reader, "t")) == [b"new"]
    world.append("t", b"newer")
    assert reader.wait({place: 1}, SOON)
    assert values(reader.read("t", 0, 1, 10, MB).records) == [b"newer"]


def test_a_damaged_batch_is_an_error_that_says_where_reading_can_go_on(owns: list[World], node: Node) -> None:
    good = [b"damage me %d" % number for number in range(20)]
    for world in owns:
        world.create("t")
        for start in (0, 5, 10, 15):
            world.append("t", *good[start : start + 5])
        world.rest()
    node.stop()
    for world in owns:
        (segment,) = node.data.glob(f"**/{world.prefix}t-0/00000000000000000000.log")
        content = segment.read_bytes()
        at = content.index(b"damage me 7")
        segment.write_bytes(content[:at] + b"D" + content[at + 1 :])
    node.start()

    def read_around_it(world: World) -> None:
        reader, place = world.open(), TopicPartition("t", 0)
        for _ in range(2):  # by seeking, then with a feed
            before = values(patiently(lambda: reader.read("t", 0, 0, 500, MB)).records)
            assert before == good[:5], "what lies before it comes first"
            for position in (5, 7, 9):
                with pytest.raises(CorruptRecord) as raised:
                    reader.read("t", 0, position, 500, MB)
                error = raised.value
                assert (error.topic, error.partition, error.offset) == ("t", 0, position)
                assert error.next_offset == 10
            assert values(read_all(reader, "t", 10)) == good[10:]
            assert reader.wait({place: 0}, SOON)
            time.sleep(0.3)
        assert reader.wait({place: 5}, SOON), "a damaged record is there to be read: the read says so"

    together(owns, read_around_it)


@pytest.mark.parametrize("way", [Way("kafka-python", "process")], indirect=True, ids=["process"])
def test_a_consumer_that_hangs_is_noticed_and_made_anew(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "_CHECK_S", 0.3)
    world.create("t")
    reader, place = world.open(), TopicPartition("t", 0)
    tail(reader, "t", 0)
    child = reader._bulk._consumer
    assert isinstance(child, ProcessConsumer)
    os.kill(child.pid, signal.SIGSTOP)
    world.append("t", b"a")
    assert reader.wait({place: 0}, SOON), "the broker is asked when nothing comes for a while"
    assert values(reader.read("t", 0, 0, 10, MB).records) == [b"a"]
    deadline = time.monotonic() + SOON.total_seconds()
    while reader._bulk._consumer in (child, None):
        reader.wait({place: 1}, timedelta(seconds=0.1))
        assert time.monotonic() < deadline
    world.append("t", b"b")
    assert reader.wait({place: 1}, SOON)
    assert values(reader.read("t", 0, 1, 10, MB).records) == [b"b"]
