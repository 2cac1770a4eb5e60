"""The part of benchmarks/log.py about Kafka: our log with either client beside the bare client libraries.

    python benchmarks/log.py [--kafka-only | --no-kafka] [--quick]

    parent ── commands, a line of JSON each ──► workers: a process for each side, ours or raw, with either client
       └── starts and removes the broker and the topics

Both sides of a row write and read the same bytes on the same broker, with the same acknowledgement (acks=all,
idempotent, in order), batches, linger, fetch sizes and checksums, no compression, and hand out value, headers, offset
and timestamp of every record. A raw producer has the one thing added that no use of it can do without: a bound on
the bytes in flight. Workers are connected and know their topics before anything is timed. CPU is that of a worker and
its children, without the broker.

    produce  single records, from the first submit until the last acknowledgement
    consume  one partition from its first record to its last; another one in each round, so nothing was read ahead
    latency  from before the append in one process to after the read in another
    stall    memory of a process that goes on writing and reading while the broker is stopped (SIGSTOP)
    fetch    single records by offset, at random and as the trainer asks for them (a group's samples at a time)
    lock     a loop of pure Python beside a thread that ingests 50 MB/s: what either keeps of its speed
    gain     what the confluent client saves end to end, through our log
"""

from __future__ import annotations

import abc
import importlib.util
import json
import os
import random
import select
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from streams.errors import LogError, MillstreamError  # noqa: E402
from streams.kafka.settings import KafkaSettings  # noqa: E402
from streams.log import EventLog, NewRecord, TopicPartition  # noqa: E402

Row = dict[str, Any]
Add = Callable[[Row], None]
MB = 1e6
KB = 1 << 10
HEADERS = (("schema", b"1.0"), ("type", b"trajectory_finished"), ("id", b"0-17/3/0"), ("by", b"rollout-0"))
MODULES = {"kafka-python": "kafka", "confluent": "confluent_kafka"}
STEP_S = 120.0  # most that one step of a worker may take, beside the time that it is asked to run

# The bars. What misses one says so in its row.
LOWEST_RATIO = 0.85
LONGEST_P99_MS = 25.0
MOST_GROWTH_MB = 16.0  # of memory from 5 s into a stall on: the bytes in flight are all queued by then


def milliseconds(duration: timedelta) -> int:
    return round(duration.total_seconds() * 1000)


# What our log sets, so that the raw clients work under the same conditions.
OURS = KafkaSettings(servers=("",))
MAX_MESSAGE_BYTES = OURS.max_record_bytes + (1 << 20)
FETCH_BYTES = OURS.prefetch_bytes // 2
PARTITION_FETCH_BYTES = 4 << 20
LINGER_MS = milliseconds(OURS.linger)


def in_ms(seconds: Sequence[float]) -> Row:
    cuts = quantiles(seconds, n=100)
    return {"p50_ms": round(cuts[49] * 1e3, 2), "p99_ms": round(cuts[98] * 1e3, 2)}


# -- the sides


class Side(abc.ABC):
    """One way to use a log. Several threads may use it, each for topics of its own."""

    @abc.abstractmethod
    def produce(self, place: TopicPartition, values: Sequence[bytes], count: int) -> None:
        """`count` records, going round `values`; returns when the last is acknowledged."""

    @abc.abstractmethod
    def append(self, place: TopicPartition, value: bytes, linger: bool) -> None:
        """One record, acknowledged. `linger` is for the raw sides: our log knows by the topic's name."""

    @abc.abstractmethod
    def end(self, place: TopicPartition) -> int: ...

    @abc.abstractmethod
    def follow(self, positions: dict[TopicPartition, int]) -> Iterator[list[bytes]]:
        """Values of one topic as they come; an empty list when none came for half a second. Never ends by itself."""

    @abc.abstractmethod
    def fetch(self, place: TopicPartition, offset: int) -> bytes: ...

    @abc.abstractmethod
    def close(self) -> None: ...


class Ours(Side):
    """Any log by its URL: the embedded one, too."""

    def __init__(self, url: str, **settings: Any) -> None:
        from streams.open import open_log

        self.log: EventLog = open_log(url, **settings)

    def produce(self, place: TopicPartition, values: Sequence[bytes], count: int) -> None:
        sent: list[Future[int]] = []
        for i in range(count):
            sent.append(self.log.submit(*place, [NewRecord(values[i % len(values)], HEADERS)]))
        for future in sent:
            future.result(STEP_S)

    def append(self, place: TopicPartition, value: bytes, linger: bool) -> None:
        self.log.append(*place, [NewRecord(value, HEADERS)])

    def end(self, place: TopicPartition) -> int:
        return self.log.end(*place)

    def follow(self, positions: dict[TopicPartition, int]) -> Iterator[list[bytes]]:
        positions = dict(positions)
        while True:
            some = False
            for place, position in positions.items():
                batch = self.log.read(*place, position)
                positions[place] = batch.next_position
                if batch.records:
                    some = True
                    yield [record.value for record in batch.records]
            if not some and not self.log.wait(positions, timedelta(seconds=0.5)):
                yield []

    def fetch(self, place: TopicPartition, offset: int) -> bytes:
        (record,) = self.log.read(*place, offset, max_records=1).records
        return record.value

    def close(self) -> None:
        self.log.close()


class RawPython(Side):
    """kafka-python alone; one consumer a topic."""

    def __init__(self, server: str) -> None:
        self.common = {
            "bootstrap_servers": server,
            "request_timeout_ms": milliseconds(OURS.request_timeout),
            "metrics_enabled": False,
        }
        self.producers: dict[int, Any] = {}
        self.consumers: dict[str, Any] = {}

    def producer(self, linger_ms: int) -> Any:
        from kafka import KafkaProducer

        if linger_ms not in self.producers:
            self.producers[linger_ms] = KafkaProducer(
                **self.common,
                acks="all",
                enable_idempotence=True,
                linger_ms=linger_ms,
                batch_size=OURS.batch_bytes,
                max_request_size=MAX_MESSAGE_BYTES,
                delivery_timeout_ms=milliseconds(OURS.delivery_timeout),
            )
        return self.producers[linger_ms]

    def consumer(self, purpose: str, partition_bytes: int = PARTITION_FETCH_BYTES) -> Any:
        from kafka import KafkaConsumer

        if purpose not in self.consumers:
            self.consumers[purpose] = KafkaConsumer(
                **self.common,
                enable_auto_commit=False,
                isolation_level="read_committed",
                fetch_max_wait_ms=milliseconds(OURS.fetch_max_wait),
                fetch_max_bytes=FETCH_BYTES,
                max_partition_fetch_bytes=partition_bytes,
            )
        return self.consumers[purpose]

    def produce(self, place: TopicPartition, values: Sequence[bytes], count: int) -> None:
        producer, headers = self.producer(LINGER_MS), list(HEADERS)
        topic, partition = place
        sent: deque[Any] = deque()
        most = max(1, OURS.bytes_in_flight // len(values[0]))
        for i in range(count):
            if len(sent) >= most:
                sent.popleft().get(STEP_S)
            value = values[i % len(values)]
            sent.append(producer.send(topic, value=value, headers=headers, partition=partition))
        for future in sent:
            future.get(STEP_S)

    def append(self, place: TopicPartition, value: bytes, linger: bool) -> None:
        topic, partition = place
        producer = self.producer(LINGER_MS if linger else 0)
        producer.send(topic, value=value, headers=list(HEADERS), partition=partition).get(STEP_S)

    def end(self, place: TopicPartition) -> int:
        theirs = self.place(place)
        return self.consumer(place.topic).end_offsets([theirs])[theirs]

    def follow(self, positions: dict[TopicPartition, int]) -> Iterator[list[bytes]]:
        consumer = self.consumer(next(iter(positions)).topic)
        consumer.assign([self.place(place) for place in positions])
        for place, position in positions.items():
            consumer.seek(self.place(place), position)
        while True:
            found = consumer.poll(500)
            yield [record.value for records in found.values() for record in records]

    def fetch(self, place: TopicPartition, offset: int) -> bytes:
        consumer = self.consumer("fetch", 64 * KB)  # more would only be thrown away by the next seek
        theirs = self.place(place)
        if theirs not in consumer.assignment():
            consumer.assign([theirs])
        consumer.seek(theirs, offset)
        ((record,),) = consumer.poll(STEP_S * 1000, max_records=1).values()
        return record.value

    @staticmethod
    def place(place: TopicPartition) -> Any:
        from kafka.structs import TopicPartition as Place

        return Place(*place)

    def close(self) -> None:
        for client in (*self.producers.values(), *self.consumers.values()):
            client.close()


class RawConfluent(Side):
    """confluent-kafka alone; one consumer a topic."""

    def __init__(self, server: str) -> None:
        self.common = {"bootstrap.servers": server}
        self.producers: dict[int, Any] = {}
        self.consumers: dict[str, Any] = {}
        self.failed: list[str] = []

    def producer(self, linger_ms: int) -> Any:
        from confluent_kafka import Producer

        if linger_ms not in self.producers:
            self.producers[linger_ms] = Producer(
                {
                    **self.common,
                    "acks": "all",
                    "enable.idempotence": True,
                    "linger.ms": linger_ms,
                    "batch.size": OURS.batch_bytes,
                    "message.max.bytes": MAX_MESSAGE_BYTES,
                    "request.timeout.ms": milliseconds(OURS.request_timeout),
                    "delivery.timeout.ms": milliseconds(OURS.delivery_timeout),
                    "queue.buffering.max.kbytes": OURS.bytes_in_flight // KB,
                    "compression.type": "none",
                }
            )
        return self.producers[linger_ms]

    def consumer(self, purpose: str, partition_bytes: int = PARTITION_FETCH_BYTES) -> Any:
        from confluent_kafka import Consumer

        if purpose not in self.consumers:
            self.consumers[purpose] = Consumer(
                {
                    **self.common,
                    "group.id": f"bench-{uuid.uuid4().hex}",  # it demands one; nothing joins or commits
                    "enable.auto.commit": False,
                    "enable.auto.offset.store": False,
                    "auto.offset.reset": "error",
                    "isolation.level": "read_committed",
                    "check.crcs": True,
                    "fetch.wait.max.ms": milliseconds(OURS.fetch_max_wait),
                    "fetch.max.bytes": max(FETCH_BYTES, MAX_MESSAGE_BYTES),
                    "max.partition.fetch.bytes": partition_bytes,
                    "queued.max.messages.kbytes": OURS.prefetch_bytes // KB,
                    "fetch.queue.backoff.ms": 5,  # 1 s by default: what it waits once its queue was full
                }
            )
        return self.consumers[purpose]

    def delivered(self, error: Any, message: Any) -> None:
        if error is not None:
            self.failed.append(str(error))

    def produce(self, place: TopicPartition, values: Sequence[bytes], count: int) -> None:
        producer, headers = self.producer(LINGER_MS), list(HEADERS)
        topic, partition = place
        for i in range(count):
            value = values[i % len(values)]
            while True:
                try:
                    producer.produce(
                        topic, value, partition=partition, headers=headers, on_delivery=self.delivered
                    )
                    break
                except BufferError:
                    producer.poll(0.01)
            producer.poll(0)
        if producer.flush(STEP_S) or self.failed:
            raise RuntimeError(f"not delivered: {self.failed[:1] or 'time is over'}")

    def append(self, place: TopicPartition, value: bytes, linger: bool) -> None:
        topic, partition = place
        producer = self.producer(LINGER_MS if linger else 0)
        reports: list[Any] = []
        producer.produce(
            topic,
            value,
            partition=partition,
            headers=list(HEADERS),
            on_delivery=lambda error, _: reports.append(error),
        )
        while not reports:  # not flush(), which does not linger
            producer.poll(STEP_S)
        if reports[0] is not None:
            raise RuntimeError(f"not delivered: {reports[0]}")

    def end(self, place: TopicPartition) -> int:
        return self.consumer(place.topic).get_watermark_offsets(self.place(place), timeout=STEP_S)[1]

    def follow(self, positions: dict[TopicPartition, int]) -> Iterator[list[bytes]]:
        consumer = self.consumer(next(iter(positions)).topic)
        consumer.assign([self.place(place, position) for place, position in positions.items()])
        while True:
            values: list[bytes] = []
            # One message after another hands them out as they come; consume(500) would wait to have 500 of them.
            for message in consumer.consume(1, 0.5) + consumer.consume(499, 0):
                if message.error() is not None:
                    raise RuntimeError(message.error().str())
                values.append(message.value())
                _ = message.headers(), message.offset(), message.timestamp()
            yield values

    def fetch(self, place: TopicPartition, offset: int) -> bytes:
        consumer = self.consumer("fetch", 64 * KB)  # more would only be thrown away by the next seek
        consumer.assign([self.place(place, offset)])
        message = consumer.poll(STEP_S)
        return message.value()

    @staticmethod
    def place(place: TopicPartition, offset: int = 0) -> Any:
        from confluent_kafka import TopicPartition as Place

        return Place(place.topic, place.partition, offset)

    def close(self) -> None:
        for client in self.consumers.values():
            client.close()


# -- in a worker


def cpu_s() -> float:
    """Processor time of this process and of its children."""
    ticks = 0
    for child in children(os.getpid()):
        fields = Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def rss_mb(pid: int) -> float:
    """Resident memory of a process and of its children."""
    pages = sum(int(Path(f"/proc/{each}/statm").read_text().split()[1]) for each in (pid, *children(pid)))
    return pages * os.sysconf("SC_PAGE_SIZE") / MB


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found


class Work:
    """The commands of a worker; what they return becomes the answer."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.values: dict[int, list[bytes]] = {}

    def values_of(self, size: int) -> list[bytes]:
        """Random ones, so that nothing on the way can make them smaller; enough of them to fill any cache."""
        if size not in self.values:
            self.values[size] = [os.urandom(size) for _ in range((16 << 20) // size)]
        return self.values[size]

    def warm(self, topics: dict[str, int]) -> list[int]:
        """Connect and learn of the topics; the end of each partition."""
        return [
            self.side.end(TopicPartition(topic, partition))
            for topic, partitions in topics.items()
            for partition in range(partitions)
        ]

    def produce(self, topic: str, partition: int, size: int, count: int) -> Row:
        values = self.values_of(size)
        return self.timed(lambda: self.side.produce(TopicPartition(topic, partition), values, count))

    def consume(self, topic: str, partitions: list[int], count: int, size: int) -> Row:
        """Partitions of `count` records together; `first`: seconds until the first of them came."""
        first = 0.0

        def read() -> None:
            nonlocal first
            records = length = 0
            for values in self.side.follow({TopicPartition(topic, partition): 0 for partition in partitions}):
                if values and not records:
                    first = time.perf_counter() - started
                records += len(values)
                length += sum(map(len, values))
                if records >= count:
                    break
            if length != count * size:
                raise RuntimeError(
                    f"{records} records of {length} bytes came, not {count} of {size} bytes each"
                )

        started = time.perf_counter()
        return {**self.timed(read), "first": first}

    def timed(self, work: Callable[[], None]) -> Row:
        before, started = cpu_s(), time.perf_counter()
        work()
        return {"took": time.perf_counter() - started, "cpu": cpu_s() - before}

    def fetch(self, topic: str, partition: int, offsets: list[int]) -> Row:
        place = TopicPartition(topic, partition)
        before, times = cpu_s(), []
        for offset in offsets:
            started = time.perf_counter()
            self.side.fetch(place, offset)
            times.append(time.perf_counter() - started)
        return {"times": times, "cpu": cpu_s() - before}

    def write_stamped(self, topic: str, per_s: float, count: int, size: int, linger: bool) -> None:
        """Records that hold the time at which they were appended, at a steady pace."""
        place, body, next_at = TopicPartition(topic, 0), os.urandom(size - 8), time.monotonic()
        for _ in range(count):
            next_at += 1 / per_s
            time.sleep(max(0.0, next_at - time.monotonic()))
            self.side.append(place, time.monotonic_ns().to_bytes(8, "big") + body, linger)

    def write_bulk(self, topic: str, size: int, mb_s: float, seconds: float) -> float:
        """A steady stream of bulk in pieces of 20 ms; the MB/s that came of it."""
        place, values = TopicPartition(topic, 0), self.values_of(size)
        done, started = 0, time.monotonic()
        while (passed := time.monotonic() - started) < seconds:
            due = int((passed + 0.02) * mb_s * MB / size) - done
            if due > 0:
                self.side.produce(place, values, due)
                done += due
            time.sleep(0.02)
        return done * size / MB / passed

    def follow_stamped(self, topic: str, count: int, bulk: str) -> Row:
        """Seconds that each stamped record was on its way, reading `bulk` in another thread if it is not ""."""
        place, stop = TopicPartition(topic, 0), threading.Event()
        position = self.side.end(place)
        reader = BulkReader(self.side, TopicPartition(bulk, 0), stop) if bulk else None
        took: list[float] = []
        for values in self.side.follow({place: position}):
            now = time.monotonic_ns()
            took += [(now - int.from_bytes(value[:8], "big")) / 1e9 for value in values]
            if len(took) >= count:
                break
        stop.set()
        return {"times": took, "bulk_mb": reader.result() if reader else 0.0}

    def load(self, topic: str, size: int, mb_s: float, seconds: float) -> Row:
        """Write so much, or what the log takes of it, and read it back; when each record was acknowledged."""
        assert isinstance(self.side, Ours)
        place, values, log = TopicPartition(topic, 0), self.values_of(size), self.side.log
        acked: list[float] = []
        failed: list[str] = []

        def settled(future: Future[int]) -> None:
            error = future.exception()
            acked.append(time.monotonic()) if error is None else failed.append(str(error))

        stop = threading.Event()
        reader = BulkReader(self.side, place, stop)
        deadline, index = time.monotonic() + seconds, 0
        while time.monotonic() < deadline:
            index += 1
            # A value of its own, as every trajectory has: one that others share would take no memory in a queue.
            value = index.to_bytes(8, "big") + values[index % len(values)][8:]
            log.submit(*place, [NewRecord(value, HEADERS)]).add_done_callback(settled)
            time.sleep(size / (mb_s * MB))
        log.flush(timedelta(seconds=STEP_S))
        stop.set()
        reader.result()
        return {"acked": acked, "failed": len(failed), "why": failed[:1]}

    def lock(self, topic: str, partitions: list[int], count: int, mb_s: float, seconds: float) -> Row:
        """Loops a second of pure Python alone, then beside an ingest of `mb_s` in another thread: partitions of
        `count` records each, one after the other."""
        alone = loops_a_second(seconds)
        stop = threading.Event()
        read = 0
        failures: list[Exception] = []

        def read_partitions() -> None:
            nonlocal read
            started = time.monotonic()
            for partition in partitions:
                records = 0
                for values in self.side.follow({TopicPartition(topic, partition): 0}):
                    records += len(values)
                    read += sum(map(len, values))
                    if stop.wait(max(0.0, read / (mb_s * MB) - (time.monotonic() - started))):
                        return
                    if records >= count:
                        break

        def ingest() -> None:
            try:
                read_partitions()
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=ingest)
        thread.start()
        time.sleep(0.2)
        before, started = read, time.monotonic()
        beside = loops_a_second(seconds)
        came = (read - before) / MB / (time.monotonic() - started)
        stop.set()
        thread.join(STEP_S)
        if failures:
            raise failures[0]
        return {"alone": alone, "beside": beside, "mb_s": came}


class BulkReader:
    """A thread that reads a partition from its end on until it is stopped."""

    def __init__(self, side: Side, place: TopicPartition, stop: threading.Event) -> None:
        self.side, self.place, self.stop = side, place, stop
        self.position = side.end(place)
        self.size = 0
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        try:
            for values in self.side.follow({self.place: self.position}):
                self.size += sum(map(len, values))
                if self.stop.is_set():
                    return
        except Exception as error:
            self.error = error

    def result(self) -> float:
        """MB that were read; raises what went wrong."""
        self.thread.join(STEP_S)
        if self.error:
            raise self.error
        return self.size / MB


def loops_a_second(seconds: float) -> float:
    """What the main thread gets done while others want the interpreter, too."""
    done, number, started = 0, 1, time.perf_counter()
    while (passed := time.perf_counter() - started) < seconds:
        for _ in range(2000):
            number = number * 3 % 1000003
        done += 1
    return done / passed


def serve(kind: str, where: str, settings: dict[str, Any]) -> None:
    sides = {"ours": Ours, "raw kafka-python": RawPython, "raw confluent": RawConfluent}
    side = sides[kind](where, **settings)
    work = Work(side)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        print(json.dumps(getattr(work, name)(**arguments)), flush=True)
    side.close()


# -- in the parent


class Worker:
    """A process that serves one side."""

    def __init__(self, kind: str, where: str, **settings: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, json.dumps([kind, where, settings])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.name = " ".join([kind, *map(str, settings.values())])
        self.answer()

    def start(self, name: str, **arguments: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps([name, arguments]) + "\n")
        self.process.stdin.flush()

    def answer(self, seconds: float = 0.0) -> Any:
        """What the command gave; it may take `seconds`, and STEP_S more."""
        assert self.process.stdout
        if not select.select([self.process.stdout], [], [], seconds + STEP_S)[0]:
            raise RuntimeError(f"{self.name}: no answer in {seconds + STEP_S:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name}: failed, see above")
        return json.loads(line)

    def ask(self, name: str, **arguments: Any) -> Any:
        self.start(name, **arguments)
        return self.answer()

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Way(NamedTuple):
    """How one side of a row reaches the log."""

    kind: str  # "ours", "raw", "embedded"
    client: str = ""
    ingest: str = "thread"

    @property
    def words(self) -> str:
        return self.client + (", own process" if self.ingest == "process" else "")


class Bench:
    """Kafka's rows. `address` is of the broker; `node` has it if it is ours to stop."""

    def __init__(self, folder: Path, address: str, node: Any, quick: bool, add: Add) -> None:
        self.folder, self.address, self.node, self.quick, self.add = folder, address, node, quick, add
        self.run = f"bench-{uuid.uuid4().hex[:8]}"
        self.clients = [client for client, module in MODULES.items() if importlib.util.find_spec(module)]
        self.rounds = 3 if quick else 5
        self.written = (64 if quick else 128) << 20  # bytes of one round
        self.filled = (
            128 if quick else 256
        ) << 20  # of a partition that is read: far more than is read ahead
        self.gains: dict[tuple[str, str], tuple[float, float]] = {}  # (bench, client) → MB/s, CPU ms/MB

    def worker(self, way: Way) -> Worker:
        if way.kind == "raw":
            return Worker(f"raw {way.client}", self.address)
        if way.kind == "embedded":
            return Worker("ours", f"file://{self.folder}/embedded")
        return Worker("ours", f"kafka://{self.address}", client=way.client, ingest=way.ingest)

    @contextmanager
    def workers(self, ways: Sequence[Way]) -> Iterator[dict[Way, Worker]]:
        started: dict[Way, Worker] = {}
        try:
            for way in ways:
                started[way] = self.worker(way)
            yield started
        finally:
            for worker in started.values():
                worker.close()

    @contextmanager
    def topics(self, **partitions: int) -> Iterator[list[str]]:
        """New topics on the broker and in the embedded log, by their full names; removed at the end."""
        from kafka import KafkaAdminClient

        from streams.embedded.log import EmbeddedLog

        full = {f"{self.run}.{name}": count for name, count in partitions.items()}
        configs = {"max.message.bytes": MAX_MESSAGE_BYTES, "retention.ms": -1}
        new: Any = {
            name: {"num_partitions": count, "replication_factor": 1, "configs": configs}
            for name, count in full.items()
        }
        admin = KafkaAdminClient(bootstrap_servers=self.address)
        try:
            admin.create_topics(new, timeout_ms=15000)
            with EmbeddedLog(self.folder / "embedded") as log:
                for name, count in full.items():
                    log.create_topic(name, count)
            yield list(full)
        finally:
            admin.delete_topics(list(full), timeout_ms=15000)
            admin.close()
            shutil.rmtree(self.folder / "embedded", ignore_errors=True)

    # -- throughput

    def produce(self, size: int) -> None:
        ways = [Way("embedded"), *(Way(kind, client) for client in self.clients for kind in ("ours", "raw"))]
        names = {way: f"to{index}" for index, way in enumerate(ways)}
        with self.topics(**dict.fromkeys(names.values(), 1)), self.workers(ways) as side:

            def once(way: Way, turn: int) -> Row:
                topic = f"{self.run}.{names[way]}"
                return side[way].ask(
                    "produce", topic=topic, partition=0, size=size, count=self.written // size
                )

            took = self.turns("produce", ways, once, self.rounds)
        self.compare("produce", size, self.written, took)

    def consume(self, size: int, full: str, together: int = 1) -> None:
        """`full` has been filled; `together` partitions are read at once."""
        ways = [Way("embedded")]
        for client in self.clients:
            ways += [Way("ours", client), Way("ours", client, "process"), Way("raw", client)]
        with self.workers(ways) as side:

            def once(way: Way, turn: int) -> Row:
                if turn == 0:
                    side[way].ask("warm", topics={full: (self.rounds + 1) * together})
                partitions = list(range(turn * together, (turn + 1) * together))
                count = self.filled // together // size * together
                return side[way].ask("consume", topic=full, partitions=partitions, count=count, size=size)

            took = self.turns("consume", ways, once, self.rounds)
        self.compare("consume", size, self.filled, took, f" x {together}" if together > 1 else "")

    def fill(self, full: str, size: int, together: int = 1) -> None:
        """One round's bytes into every `together` partitions, of the broker's topic and of the embedded one."""
        count = self.filled // together // size
        for way in (Way("embedded"), Way("raw", self.clients[-1])):
            with self.workers([way]) as side:
                for partition in range((self.rounds + 1) * together):
                    side[way].ask("produce", topic=full, partition=partition, size=size, count=count)

    def turns(
        self,
        bench: str,
        ways: Sequence[Way],
        once: Callable[[Way, int], Row],
        rounds: int,
        warm: bool = True,
    ) -> dict[Way, list[Row]]:
        """Each side once in each round, another one first each time; round 0 warms up and does not count. A side that
        fails gets a row that says so, and the others go on."""
        took: dict[Way, list[Row]] = {way: [] for way in ways}
        for turn in range(0 if warm else 1, rounds + 1):
            first = turn % len(ways)
            for way in (*ways[first:], *ways[:first]):
                if way not in took:
                    continue
                try:
                    result = once(way, turn)
                except (RuntimeError, OSError) as error:
                    del took[way]
                    self.failed(bench, error)
                    continue
                if turn:
                    took[way].append(result)
        return took

    def failed(self, bench: str, error: Exception) -> None:
        self.add({"bench": bench, "case": "failed", "why": f"{type(error).__name__}: {error}"})

    def compare(self, bench: str, size: int, total: int, took: dict[Way, list[Row]], more: str = "") -> None:
        done = total // size * size / MB
        for way, ours in took.items():
            if way.kind == "raw":
                continue
            row: Row = {"bench": bench, "case": f"{size // KB} KB{more}, {way.words or 'embedded'}"}
            row["log_mb_s"] = round(median(done / each["took"] for each in ours), 1)
            row["log_cpu_ms_mb"] = round(median(each["cpu"] / done * 1e3 for each in ours), 2)
            raw = took.get(Way("raw", way.client))
            if raw:
                row["raw_mb_s"] = round(median(done / each["took"] for each in raw), 1)
                row["raw_cpu_ms_mb"] = round(median(each["cpu"] / done * 1e3 for each in raw), 2)
                pairs = list(zip(ours, raw, strict=True))
                row["ratio"] = round(median(theirs["took"] / mine["took"] for mine, theirs in pairs), 2)
                row["cpu_ratio"] = round(median(mine["cpu"] / theirs["cpu"] for mine, theirs in pairs), 2)
                row["bar"] = verdict(row["ratio"] >= LOWEST_RATIO)
            if "first" in ours[0]:
                row["first_ms"] = round(median(each["first"] for each in ours) * 1e3, 1)
            if raw and "first" in raw[0]:
                row["raw_first_ms"] = round(median(each["first"] for each in raw) * 1e3, 1)
            if way.ingest == "thread" and way.client and not more:
                self.gains[bench, way.client] = row["log_mb_s"], row["log_cpu_ms_mb"]
            self.add(row)

    def gain(self, size: int) -> None:
        """Of the last size measured: once written and once read."""
        speed: dict[str, float] = {}
        cpu: dict[str, float] = {}
        for client in MODULES:
            both = [self.gains[bench, client] for bench in ("produce", "consume")]
            speed[client] = 1 / sum(1 / mb_s for mb_s, _ in both)
            cpu[client] = sum(cpu_ms for _, cpu_ms in both)
        self.add(
            {
                "bench": "gain",
                "case": f"{size // KB} KB, confluent",
                "mb_s_of_kafka-python": round(speed["confluent"] / speed["kafka-python"], 2),
                "cpu_of_kafka-python": round(cpu["confluent"] / cpu["kafka-python"], 2),
                "cpu_ms_mb": round(cpu["confluent"], 2),
                "kafka-python_cpu_ms_mb": round(cpu["kafka-python"], 2),
            }
        )

    # -- latency

    def latency(self, topic: str, size: int, ways: Sequence[Way], bulk_mb_s: float) -> None:
        """One row for each of our ways, with the raw client's figures beside it."""
        linger, per_s = topic != "ledger", 100 if topic == "ledger" else 50
        turns, count = (1, per_s * 4) if self.quick else (2, per_s * 15)
        bulk_came: dict[Way, float] = {}

        def once(way: Way, turn: int) -> Row:
            with self.topics(**{topic: 1, "bulk": 1}) as (full, bulk):
                found = self.one_latency(way, full, bulk, size, per_s, count, linger, bulk_mb_s)
            bulk_came[way] = found["bulk_mb"] / (count / per_s)
            return found

        took = self.turns("latency", ways, once, turns, warm=False)
        times = {  # the first half a second warms up
            way: [time for found in rounds for time in found["times"][per_s // 2 :]]
            for way, rounds in took.items()
        }
        what = f"{topic}, {size} B" + (f", beside {bulk_mb_s:.0f} MB/s" if bulk_mb_s else "")
        for way in times:
            if way.kind == "raw":
                continue
            row: Row = {"bench": "latency", "case": f"{what}, {way.words}", **in_ms(times[way])}
            if Way("raw", way.client) in times:
                row |= {f"raw_{name}": value for name, value in in_ms(times[Way("raw", way.client)]).items()}
            if bulk_mb_s:
                row["bulk_read_mb_s"] = round(bulk_came[way], 1)
            if topic == "ledger":
                row["bar"] = verdict(row["p99_ms"] <= LONGEST_P99_MS)
            self.add(row)

    def one_latency(
        self,
        way: Way,
        full: str,
        bulk: str,
        size: int,
        per_s: float,
        count: int,
        linger: bool,
        bulk_mb_s: float,
    ) -> Row:
        seconds = count / per_s
        reading, writing, loading = (self.worker(way) for _ in range(3))
        try:
            for worker in (reading, writing, loading):
                worker.ask("warm", topics={full: 1, bulk: 1})
            writing.ask("write_stamped", topic=full, per_s=per_s, count=5, size=size, linger=linger)
            reading.start("follow_stamped", topic=full, count=count, bulk=bulk if bulk_mb_s else "")
            time.sleep(0.5)  # until its consumers are in position
            if bulk_mb_s:
                loading.start("write_bulk", topic=bulk, size=32 * KB, mb_s=bulk_mb_s, seconds=seconds + 1.5)
                time.sleep(0.5)
            writing.ask("write_stamped", topic=full, per_s=per_s, count=count, size=size, linger=linger)
            found = reading.answer(seconds)
            if bulk_mb_s:
                loading.answer(seconds)
            return found
        finally:
            for worker in (reading, writing, loading):
                worker.close()

    # -- the rest

    def fetch(self, full: str, size: int) -> None:
        """From one partition of `filled` bytes; a new connection's first fetch does not count."""
        end = self.filled // size
        chance = random.Random(1)
        tries = min(end, 300 if self.quick else 1000)
        window = min(256, end // 2)  # the samples of a group lie between those of others that ran beside them
        asked = {
            "random": [chance.randrange(end) for _ in range(tries)],
            "like a trainer": [
                start + offset
                for start in range(0, end - window, 8)
                for offset in sorted(chance.sample(range(window), 8))
            ],
        }
        for words, offsets in asked.items():
            for client in self.clients:
                ways = [Way("ours", client), Way("raw", client)]
                with self.workers(ways) as side:
                    for worker in side.values():
                        worker.ask("warm", topics={full: 2})
                        worker.ask("fetch", topic=full, partition=1, offsets=[0])
                    took = {
                        way: side[way].ask("fetch", topic=full, partition=0, offsets=offsets[:tries])
                        for way in ways
                    }
                ours, raw = (took[way]["times"] for way in ways)
                self.add(
                    {
                        "bench": "fetch",
                        "case": f"{size // KB} KB, {words}, {client}",
                        **in_ms(ours),
                        "per_s": round(len(ours) / sum(ours)),
                        **{f"raw_{name}": value for name, value in in_ms(raw).items()},
                        "raw_per_s": round(len(raw) / sum(raw)),
                    }
                )

    def lock(self, full: str, size: int, mb_s: float = 50.0) -> None:
        ways = [Way("embedded")]
        for client in self.clients:
            ways += [Way("ours", client), Way("ours", client, "process"), Way("raw", client)]
        rounds, seconds = (1, 1.5) if self.quick else (3, 4.0)
        with self.workers(ways) as side:

            def once(way: Way, turn: int) -> Row:
                if turn == 0:
                    side[way].ask("warm", topics={full: self.rounds + 1})
                return side[way].ask(
                    "lock",
                    topic=full,
                    partitions=[(turn + index) % (self.rounds + 1) for index in range(self.rounds)],
                    count=self.filled // size,
                    mb_s=mb_s,
                    seconds=seconds,
                )

            took = self.turns("lock", ways, once, rounds)
        for way, found in took.items():
            self.add(
                {
                    "bench": "lock",
                    "case": f"{mb_s:.0f} MB/s, {way.kind if way.kind != 'ours' else ''} {way.words}".strip(),
                    "loop_percent": round(100 * median(each["beside"] / each["alone"] for each in found)),
                    "ingest_mb_s": round(median(each["mb_s"] for each in found), 1),
                }
            )

    def stall(self, client: str) -> None:
        seconds, lead, after = (10.0, 4.0, 10.0) if self.quick else (60.0, 6.0, 20.0)
        way = Way("ours", client)
        with self.topics(stall=1) as (full,), self.workers([way]) as side:
            worker = side[way]
            worker.ask("warm", topics={full: 1})
            worker.start("load", topic=full, size=256 * KB, mb_s=50.0, seconds=lead + seconds + after)
            time.sleep(lead)
            before = rss_mb(worker.process.pid)
            seen: list[tuple[float, float]] = []
            self.node.pause()
            try:
                stalled = time.monotonic()
                while (passed := time.monotonic() - stalled) < seconds:
                    seen.append((passed, rss_mb(worker.process.pid)))
                    time.sleep(0.1)
            finally:
                self.node.resume()
            resumed = time.monotonic()
            found = worker.answer(lead + seconds + after)
        settled = max((mb for passed, mb in seen if passed <= 5), default=0.0)
        peak = max(mb for _, mb in seen)
        again = [at - resumed for at in found["acked"] if at > resumed]
        self.add(
            {
                "bench": "stall",
                "case": f"{seconds:.0f} s, 256 KB, {client}",
                "rss_mb": round(before),
                "after_5_s": round(settled),
                "peak": round(peak),
                "failed": found["failed"],
                "acked_again_s": round(min(again), 2) if again else None,
                "bar": verdict(peak - settled <= MOST_GROWTH_MB and bool(again)),
            }
        )

    def all(self) -> None:
        ours = [Way("ours", client) for client in self.clients]
        raw = [Way("raw", client) for client in self.clients]
        for size in (256 * KB, 32 * KB):
            self.attempt("produce", lambda size=size: self.produce(size))
            with self.topics(filled=self.rounds + 1) as (full,):
                self.fill(full, size)
                self.attempt("consume", lambda size=size, full=full: self.consume(size, full))
                if all(
                    (bench, client) in self.gains for bench in ("produce", "consume") for client in MODULES
                ):
                    self.attempt("gain", lambda size=size: self.gain(size))
                if size == 32 * KB:
                    self.attempt("fetch", lambda size=size, full=full: self.fetch(full, size))
                    self.attempt("lock", lambda size=size, full=full: self.lock(full, size))
        with self.topics(filled=(self.rounds + 1) * 8) as (full,):
            self.fill(full, 32 * KB, together=8)
            self.attempt("consume", lambda: self.consume(32 * KB, full, together=8))
        beside = [*ours, *(Way("ours", client, "process") for client in self.clients), *raw]
        self.attempt("latency", lambda: self.latency("ledger", 300, [*ours, *raw], 0))
        self.attempt("latency", lambda: self.latency("trajectories", 32 * KB, [*ours, *raw], 0))
        self.attempt("latency", lambda: self.latency("ledger", 300, beside, 20))
        if self.node is None:
            self.add(
                {"bench": "stall", "case": "left out", "why": "the broker is not this benchmark's to stop"}
            )
            return
        for client in self.clients:
            self.attempt("stall", lambda client=client: self.stall(client))

    def attempt(self, bench: str, work: Callable[[], None]) -> None:
        """A part that fails is a row, and the others are still measured."""
        try:
            work()
        except (RuntimeError, LogError, OSError, KeyError) as error:
            self.failed(bench, error)


def verdict(met: bool) -> str:
    return "met" if met else "MISSED"


def rows(folder: Path, quick: bool, add: Add) -> None:
    """Measure on the broker of MILLSTREAM_TEST_KAFKA (host:port), or on one of our own in `folder`."""
    if importlib.util.find_spec("kafka") is None:
        add(
            {
                "bench": "kafka",
                "case": "left out",
                "why": "needs kafka-python: pip install 'millstream[kafka]'",
            }
        )
        return
    given = os.environ.get("MILLSTREAM_TEST_KAFKA")
    if given:
        Bench(folder, given, None, quick, add).all()
        return
    from streams.broker.node import Node

    # Room for requests in the heap: a small one spends its time collecting garbage.
    node = Node(folder / "broker", port=0, java_options=("-Xms1g", "-Xmx1g"))
    try:
        try:
            node.start()
        except MillstreamError as error:
            add({"bench": "kafka", "case": "left out", "why": str(error).replace("\n", " ")})
            return
        Bench(folder, node.address, node, quick, add).all()
    finally:
        node.kill()


if __name__ == "__main__":
    if len(sys.argv) == 2:
        serve(*json.loads(sys.argv[1]))
    else:
        print("benchmarks/log.py --kafka-only runs this")
