"""What every EventLog promises, run on every implementation.

A `Backend` says how to open one and what it can do. Tests that need other processes take the `shared` fixture,
which only has backends that can be opened by several processes; all others take `backend`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from streams.errors import (
    LogClosed,
    LogError,
    OffsetOutOfRange,
    RecordTooLarge,
    ShareHeld,
    TopicMismatch,
    UnknownTopic,
)
from streams.log import EventLog, NewRecord, Record, TopicPartition, read_all
from streams.open import open_log

ROOT = Path(__file__).resolve().parents[2]
SOON = timedelta(seconds=20)


class Kind(NamedTuple):
    name: str
    url: Callable[[Path, str], str]  # of a folder, and of a broker's address for one that needs it
    settings: dict[str, Any] = {}  # noqa: RUF012
    processes: bool = False  # several processes can open it
    takes_clock: bool = False  # the `clock_ms` setting
    needs_kafka: bool = False
    claims: bool = False  # what is over `max_record_bytes` goes to files beside the log (streams/claims.py)


class Backend(NamedTuple):
    """One empty log of a kind, for one test."""

    kind: Kind
    url: str
    folder: Path

    @property
    def settings(self) -> dict[str, Any]:
        return {**self.kind.settings, **({"claims": f"{self.folder}/claims"} if self.kind.claims else {})}

    def open(self, **settings: Any) -> EventLog:
        return open_log(self.url, **{**self.settings, **settings})


def on_kafka(folder: Path, address: str) -> str:
    """A prefix of the test's own on the broker that all tests share."""
    return f"kafka://{address}/t{uuid.uuid4().hex[:10]}."


KINDS = [
    Kind("memory", lambda folder, _: f"memory://{uuid.uuid4().hex}", takes_clock=True),
    Kind("file", lambda folder, _: f"file://{folder}/log", processes=True, takes_clock=True),
    Kind(
        "file, small segments",
        lambda folder, _: f"file://{folder}/log",
        {"segment_bytes": 4096},
        processes=True,
        takes_clock=True,
    ),
    Kind(
        "file, claim-checked",
        lambda folder, _: f"file://{folder}/log",
        {"max_record_bytes": 400},
        processes=True,
        takes_clock=True,
        claims=True,
    ),
    Kind("kafka", on_kafka, processes=True, needs_kafka=True),
    Kind("kafka, confluent", on_kafka, {"client": "confluent"}, processes=True, needs_kafka=True),
    Kind("kafka, ingest process", on_kafka, {"ingest": "process"}, processes=True, needs_kafka=True),
]


def new_backend(request: pytest.FixtureRequest, folder: Path) -> Backend:
    kind: Kind = request.param
    address = request.getfixturevalue("kafka") if kind.needs_kafka else ""
    return Backend(kind, kind.url(folder, address), folder)


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    return new_backend(request, tmp_path)


@pytest.fixture(params=[kind for kind in KINDS if kind.processes], ids=lambda kind: kind.name)
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    return new_backend(request, tmp_path)


@pytest.fixture(params=[kind for kind in KINDS if kind.takes_clock], ids=lambda kind: kind.name)
def clocked(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    return new_backend(request, tmp_path)


@pytest.fixture
def log(backend: Backend) -> Iterator[EventLog]:
    with backend.open() as log:
        log.create_topic("t", 4)
        yield log


def eventually(claim: Callable[[], bool], what: str, timeout: timedelta = SOON) -> None:
    deadline = time.monotonic() + timeout.total_seconds()
    while not claim():
        assert time.monotonic() < deadline, f"not within {timeout}: {what}"
        time.sleep(0.002)


def values(log: EventLog, partition: int = 0, topic: str = "t") -> list[bytes]:
    return [record.value for record in read_all(log, topic, partition, log.start(topic, partition))]


def new(*texts: str) -> list[NewRecord]:
    return [NewRecord(text.encode()) for text in texts]


# -- topics


def test_a_topic_is_created_once_and_found_by_every_later_open(backend: Backend) -> None:
    with backend.open() as log:
        assert log.topics() == {}
        log.create_topic("run.tasks", 3)
        log.create_topic("run.tasks", 3)
        log.create_topic("run.ledger", 1)
    with backend.open() as log:
        assert log.topics() == {"run.tasks": 3, "run.ledger": 1}


def test_one_topic_is_asked_for_by_its_name_before_and_after_it_exists(backend: Backend) -> None:
    with backend.open() as maker, backend.open() as log:
        assert log.partitions("run.tasks") == 0
        maker.create_topic("run.tasks", 3)
        eventually(lambda: log.partitions("run.tasks") == 3, "the topic is seen")
        assert (log.partitions("run.task"), log.partitions("run")) == (0, 0)
    with backend.open() as log:
        assert log.partitions("run.tasks") == 3


def test_a_topic_that_does_not_exist_is_named_by_a_check(log: EventLog) -> None:
    log.check_topic("t", 4)
    with pytest.raises(UnknownTopic, match=r"^topic 'run\.other' does not exist$"):
        log.check_topic("run.other", 2)


def test_a_topic_with_another_number_of_partitions_is_refused(log: EventLog) -> None:
    with pytest.raises(TopicMismatch, match=r"'t' has 4 partitions, 5"):
        log.create_topic("t", 5)
    assert log.topics() == {"t": 4}


def test_a_topic_that_some_log_could_not_store_is_refused_by_all(log: EventLog) -> None:
    for name in ("", ".", "..", "a/b", "../up", "a b", "-a", "x" * 201, "ü"):
        with pytest.raises(LogError, match="topic name"):
            log.create_topic(name, 1)
    with pytest.raises(LogError, match="partitions"):
        log.create_topic("none", 0)


# -- writing and reading


def test_records_come_back_as_they_were_written(log: EventLog) -> None:
    written = [
        NewRecord(b"first", (("type", b"task"), ("schema", b"1.0"), ("empty", b"")), 1000),
        NewRecord(b"", (), 2000),
        NewRecord(bytes(range(256)) * 3, (("twice", b"1"), ("twice", b"2")), 3000),
    ]
    assert log.append("t", 2, written) == 0
    batch = log.read("t", 2, 0)
    assert batch.records == [
        Record("t", 2, 0, 1000, written[0].headers, b"first"),
        Record("t", 2, 1, 2000, (), b""),
        Record("t", 2, 2, 3000, written[2].headers, bytes(range(256)) * 3),
    ]
    assert batch.next_position == log.end("t", 2)
    assert batch.records[2].header("twice") == b"1"
    assert batch.records[1].header("twice") is None
    assert log.end("t", 0) == 0


def test_values_of_any_size_up_to_the_limit_come_back_whole(log: EventLog) -> None:
    sizes = (1, 4095, 4096, 4097, 65_535, 1_000_000, 3 << 20)
    written: list[bytes] = []
    for size in sizes:
        call = [b"before", random.Random(size).randbytes(size), b"after"]
        log.append("t", 0, [NewRecord(value) for value in call])
        written += call
    assert values(log) == written


def test_a_record_without_a_timestamp_gets_the_time_of_its_append(log: EventLog) -> None:
    before = time.time_ns() // 1_000_000
    log.append("t", 0, new("a"))
    (record,) = log.read("t", 0, 0).records
    assert before <= record.timestamp_ms <= time.time_ns() // 1_000_000


def test_pipelined_appends_of_one_writer_keep_their_order(log: EventLog) -> None:
    futures = [log.submit("t", 1, new(f"{i}a", f"{i}b")) for i in range(400)]
    offsets = [future.result(SOON.total_seconds()) for future in futures]
    read = values(log, 1)
    assert read == [f"{i}{part}".encode() for i in range(400) for part in "ab"]
    assert all(read[offset] == f"{i}a".encode() for i, offset in enumerate(offsets))


def test_an_append_is_visible_when_its_future_resolves(log: EventLog) -> None:
    for i in range(50):
        offset = log.submit("t", 0, new(str(i))).result(SOON.total_seconds())
        assert log.end("t", 0) == offset + 1
        assert log.read("t", 0, offset).records[0].value == str(i).encode()


def test_records_of_one_call_are_contiguous_among_many_threads(log: EventLog) -> None:
    def write(thread: int) -> None:
        for i in range(30):
            log.append("t", 0, new(*(f"{thread} {i} {part}" for part in range(3))))

    threads = [threading.Thread(target=write, args=(thread,)) for thread in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON.total_seconds())
        assert not thread.is_alive()
    read = [tuple(map(int, value.split())) for value in values(log)]
    assert len(read) == 6 * 30 * 3
    calls = [read[at : at + 3] for at in range(0, len(read), 3)]
    assert all(call == [(*call[0][:2], part) for part in range(3)] for call in calls)
    for thread in range(6):
        assert [call[0][1] for call in calls if call[0][0] == thread] == list(range(30))


def test_a_read_stops_at_its_limits_and_goes_on_from_its_next_position(log: EventLog) -> None:
    log.append("t", 0, [NewRecord(bytes([i]) * 1000) for i in range(20)])
    batch = log.read("t", 0, 3, max_records=4)
    assert [record.offset for record in batch.records] == [3, 4, 5, 6]
    batch = log.read("t", 0, batch.next_position, max_bytes=3500)
    assert batch.records[0].offset == 7
    assert 1 <= len(batch.records) <= 3
    batch = log.read("t", 0, batch.next_position, max_bytes=1)
    assert len(batch.records) == 1


def test_reading_to_the_end_by_position_sees_each_record_once(log: EventLog) -> None:
    log.append("t", 0, new(*map(str, range(1234))))
    seen: list[bytes] = []
    position, end = log.start("t", 0), log.end("t", 0)
    while position < end:
        batch = log.read("t", 0, position, max_records=100)
        assert batch.next_position > position
        seen += [record.value for record in batch.records]
        position = batch.next_position
    assert seen == [str(i).encode() for i in range(1234)]


def test_any_position_can_be_read_first(backend: Backend) -> None:
    with backend.open() as log:
        log.create_topic("t", 1)
        for i in range(20):
            log.append("t", 0, [NewRecord(f"{i} {j}".encode() + b"." * 97 * (j % 5)) for j in range(20)])
    order = list(range(400))
    random.Random(7).shuffle(order)
    with backend.open() as log:
        for offset in order[:100]:
            (record,) = log.read("t", 0, offset, max_records=1).records
            assert record.offset == offset
            assert record.value.startswith(f"{offset // 20} {offset % 20}".encode())


def test_a_read_at_the_end_is_empty_and_outside_the_kept_range_an_error(log: EventLog) -> None:
    log.append("t", 0, new("a", "b"))
    assert log.read("t", 0, 2) == ([], 2)
    with pytest.raises(OffsetOutOfRange) as beyond:
        log.read("t", 0, 3)
    assert (beyond.value.offset, beyond.value.start, beyond.value.end) == (3, 0, 2)
    with pytest.raises(OffsetOutOfRange):
        log.read("t", 0, -1)


def test_an_append_of_nothing_is_refused(log: EventLog) -> None:
    with pytest.raises(LogError, match="at least one record"):
        log.append("t", 0, [])


def test_a_record_over_the_limit_is_refused_and_nothing_of_its_call_is_visible(backend: Backend) -> None:
    with backend.open(**{"max_claim_bytes" if backend.kind.claims else "max_record_bytes": 1000}) as log:
        log.create_topic("t", 1)
        future = log.submit("t", 0, [NewRecord(b"fits"), NewRecord(b"x" * 990, (("name", b"y" * 10),))])
        with pytest.raises(RecordTooLarge, match=r"1004 bytes.*1000"):
            future.result(SOON.total_seconds())
        assert log.end("t", 0) == 0
        assert log.append("t", 0, [NewRecord(b"x" * 1000)]) == 0


def test_a_submitted_append_cannot_be_cancelled(log: EventLog) -> None:
    future = log.submit("t", 0, new("a"))
    assert not future.cancel()
    assert future.result(SOON.total_seconds()) == 0


def test_what_was_appended_is_there_after_a_reopen_and_offsets_go_on(backend: Backend) -> None:
    with backend.open() as log:
        log.create_topic("t", 2)
        log.append("t", 0, new("a", "b"))
    with backend.open() as log:
        assert log.append("t", 0, new("c")) == 2
    with backend.open() as log:
        assert values(log) == [b"a", b"b", b"c"]
        assert log.end("t", 1) == 0


def test_two_open_logs_see_each_other_and_append_in_turn(backend: Backend) -> None:
    with backend.open() as one, backend.open() as other:
        one.create_topic("t", 1)
        for i in range(40):
            assert (one if i % 2 else other).append("t", 0, [NewRecord(str(i).encode() * 100)]) == i
        assert values(one) == values(other) == [str(i).encode() * 100 for i in range(40)]


# -- waiting


def test_wait_says_at_once_that_a_record_is_there(log: EventLog) -> None:
    log.append("t", 3, new("a"))
    started = time.monotonic()
    assert log.wait({TopicPartition("t", 0): 0, TopicPartition("t", 3): 0}, SOON)
    assert time.monotonic() - started < 5


def test_wait_ends_at_its_deadline_when_nothing_comes(log: EventLog) -> None:
    log.append("t", 0, new("a"))
    started = time.monotonic()
    assert not log.wait({TopicPartition("t", 0): 1, TopicPartition("t", 1): 0}, timedelta(seconds=0.1))
    assert 0.09 < time.monotonic() - started < 5
    assert not log.wait({TopicPartition("t", 0): 1}, timedelta(0))


def test_wait_wakes_when_a_record_comes(log: EventLog) -> None:
    latencies: list[float] = []
    for i in range(20):
        timer = threading.Timer(0.01, lambda: log.append("t", 1, new("x")))
        started = time.monotonic()
        timer.start()
        assert log.wait({TopicPartition("t", 0): 0, TopicPartition("t", 1): i}, SOON)
        latencies.append(time.monotonic() - started)
        timer.join()
    assert sorted(latencies)[10] < 1


def test_closing_a_log_ends_a_wait_on_it(backend: Backend) -> None:
    log = backend.open()
    log.create_topic("t", 1)
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(LogClosed):
            log.wait({TopicPartition("t", 0): 0}, SOON)
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    log.close()
    assert ended.wait(SOON.total_seconds())
    thread.join()


# -- time


def test_look_up_by_time_finds_the_first_record_at_or_after_it(backend: Backend) -> None:
    stamps = [100, 100, 300, 250, 900, 900, 400, 1000, 50, 5000] * 12  # writers' clocks differ
    with backend.open() as log:
        log.create_topic("t", 1)
        for at in range(0, len(stamps), 8):
            chunk = [NewRecord(b"x" * 300, (), stamp) for stamp in stamps[at : at + 8]]
            log.append("t", 0, chunk)
        for wanted in [-5, 0, 50, 99, 100, 101, 250, 299, 300, 301, 899, 900, 901, 1000, 1001, 5000, 5001]:
            expected = next((i for i, stamp in enumerate(stamps) if stamp >= wanted), len(stamps))
            assert log.offset_at("t", 0, wanted) == expected, wanted


def test_look_up_by_time_in_an_empty_partition_gives_its_end(log: EventLog) -> None:
    assert log.offset_at("t", 0, 0) == 0


def test_timestamps_never_step_back_with_the_clock(clocked: Backend) -> None:
    ticks = iter([1000, 2000, 500, 1500, 3000, 10])
    with clocked.open(clock_ms=lambda: next(ticks)) as log:
        log.create_topic("t", 1)
        for _ in range(5):
            log.append("t", 0, new("x"))
    with clocked.open(clock_ms=lambda: next(ticks)) as log:  # knows the newest after a reopen, too
        log.append("t", 0, new("x"))
        stamps = [record.timestamp_ms for record in read_all(log, "t", 0, 0)]
        assert stamps == [1000, 2000, 2000, 2000, 3000, 3000]
        assert [log.offset_at("t", 0, at) for at in (1, 1001, 2001, 3001)] == [0, 1, 4, 6]


# -- groups


def test_the_shares_of_a_group_cover_each_partition_once(log: EventLog) -> None:
    members = [log.join("g", "t", replica=i, replicas=3) for i in range(3)]
    shares = [member.partitions() for member in members]
    assert sorted(partition for share in shares for partition in share) == [0, 1, 2, 3]
    assert [member.generation for member in members] == [member.generation for member in members]


def test_a_second_holder_of_a_share_is_refused_and_told_who_has_it(backend: Backend) -> None:
    with backend.open() as one, backend.open() as other:
        one.create_topic("t", 4)
        held = one.join("g", "t", replica=0, replicas=2, member="rollout-0")
        for log in (one, other):
            with pytest.raises(ShareHeld, match=r"rollout-0.*0/2"):
                log.join("g", "t", replica=0, replicas=2)
        assert other.join("g", "t", replica=1, replicas=2).partitions() == {1, 3}
        assert other.join("another", "t", replica=0, replicas=2).partitions() == {0, 2}
        held.close()
        held.close()
        assert other.join("g", "t", replica=0, replicas=2).partitions() == {0, 2}


def test_a_member_that_splits_the_partitions_otherwise_is_refused(log: EventLog) -> None:
    log.join("g", "t", replica=0, replicas=2)
    with pytest.raises(ShareHeld, match=r"1/3.*0/2"):
        log.join("g", "t", replica=1, replicas=3)


def test_topics_with_similar_names_have_shares_of_their_own(log: EventLog) -> None:
    log.create_topic("t.0", 2)
    log.join("g", "t.0", replica=0, replicas=1)
    assert log.join("g", "t", replica=0, replicas=2).partitions() == {0, 2}


def test_closing_the_log_gives_its_shares_back(backend: Backend) -> None:
    with backend.open() as log:
        log.create_topic("t", 1)
        log.join("g", "t", replica=0, replicas=1)
    with backend.open() as log:
        assert log.join("g", "t", replica=0, replicas=1).partitions() == {0}


def test_a_replica_outside_its_count_is_refused(log: EventLog) -> None:
    with pytest.raises(ValueError, match=r"\[0, 2\), got 2"):
        log.join("g", "t", replica=2, replicas=2)


def test_hints_are_remembered_by_group_and_survive_a_reopen(backend: Backend) -> None:
    with backend.open() as log:
        log.create_topic("t", 3)
        log.create_topic("u", 1)
        assert log.groups() == []
        assert log.hints("g") == {}
        log.commit_hint("g", {TopicPartition("t", 0): 5, TopicPartition("u", 0): 0})
        log.commit_hint("g", {TopicPartition("t", 0): 3, TopicPartition("t", 2): 1 << 40})
        log.commit_hint("other", {TopicPartition("t", 1): 1})
    with backend.open() as log:
        assert log.hints("g") == {
            TopicPartition("t", 0): 3,
            TopicPartition("t", 2): 1 << 40,
            TopicPartition("u", 0): 0,
        }
        assert log.hints("other") == {TopicPartition("t", 1): 1}
        assert log.groups() == ["g", "other"]
        assert (log.groups("o"), log.groups("others")) == (["other"], [])
        assert log.hints("unknown") == {}


# -- retention


def test_retention_removes_only_records_below_the_offset(backend: Backend) -> None:
    with backend.open() as log:
        log.create_topic("t", 1)
        for i in range(100):
            log.append("t", 0, [NewRecord(f"{i} ".encode() + b"x" * 500, (), 1000 + i)])
        assert log.truncate_before("t", 0, 0) == log.start("t", 0) == 0
        start = log.truncate_before("t", 0, 60)
        assert log.start("t", 0) == start <= 60
        assert [int(value.split()[0]) for value in values(log)] == list(range(start, 100))
        assert log.truncate_before("t", 0, 10) == start, "retention never goes back"
        assert log.append("t", 0, new("100 ")) == 100
        assert log.offset_at("t", 0, 0) == start
        assert log.offset_at("t", 0, 1080) == 80
        if start:
            with pytest.raises(OffsetOutOfRange, match="removed by retention"):
                log.read("t", 0, start - 1)
        with pytest.raises(OffsetOutOfRange):
            log.truncate_before("t", 0, 102)
    with backend.open() as log:
        assert (log.start("t", 0), log.end("t", 0)) == (start, 101)


# -- wrong use


USES: dict[str, Callable[[EventLog, str, int], Any]] = {
    "append": lambda log, topic, partition: log.append(topic, partition, [NewRecord(b"x")]),
    "submit": lambda log, topic, partition: log.submit(topic, partition, [NewRecord(b"x")]).result(20),
    "start": lambda log, topic, partition: log.start(topic, partition),
    "end": lambda log, topic, partition: log.end(topic, partition),
    "read": lambda log, topic, partition: log.read(topic, partition, 0),
    "wait": lambda log, topic, partition: log.wait({TopicPartition(topic, partition): 0}, timedelta(0)),
    "offset_at": lambda log, topic, partition: log.offset_at(topic, partition, 0),
    "commit_hint": lambda log, topic, partition: log.commit_hint("g", {TopicPartition(topic, partition): 0}),
    "truncate_before": lambda log, topic, partition: log.truncate_before(topic, partition, 0),
}


def test_an_unknown_topic_or_partition_is_named_by_every_use_of_it(log: EventLog) -> None:
    for use in USES.values():
        with pytest.raises(UnknownTopic, match=r"no topic 'nope'; this log has: t"):
            use(log, "nope", 0)
        with pytest.raises(UnknownTopic, match=r"'t' has partitions 0 to 3, not 4"):
            use(log, "t", 4)
        with pytest.raises(UnknownTopic):
            use(log, "t", -1)
    with pytest.raises(UnknownTopic, match="nope"):
        log.join("g", "nope", replica=0, replicas=1)


def test_every_use_after_close_is_refused(backend: Backend) -> None:
    uses = {
        **USES,
        "topics": lambda log, topic, partition: log.topics(),
        "partitions": lambda log, topic, partition: log.partitions("nope"),
        "create_topic": lambda log, topic, partition: log.create_topic(topic, 4),
        "join": lambda log, topic, partition: log.join("g", topic, replica=0, replicas=1),
        "hints": lambda log, topic, partition: log.hints("g"),
        "groups": lambda log, topic, partition: log.groups(),
    }
    log = backend.open()
    log.create_topic("t", 4)
    log.append("t", 0, new("a"))
    log.close()
    for use in uses.values():
        with pytest.raises(LogClosed):
            use(log, "t", 0)


def test_closing_flushes_what_was_submitted_and_twice_is_harmless(backend: Backend) -> None:
    log = backend.open()
    log.create_topic("t", 1)
    futures = [log.submit("t", 0, new(str(i))) for i in range(300)]
    log.close()
    log.close()
    assert [future.result(0) for future in futures] == list(range(300))
    with backend.open() as log:
        assert len(values(log)) == 300


# -- several processes


CHILD = """
import json, os, sys, time
from datetime import timedelta
from hashlib import sha256
from streams.log import NewRecord, TopicPartition
from streams.open import open_log

def say(*words):
    print(*words, flush=True)

log = open_log(sys.argv[1], **json.loads(sys.argv[2]))
argument = json.loads(sys.argv[3])
"""

WRITE_COUNTED = """
for i in range(argument["count"]):
    value = f"{argument['writer']} {i} ".encode() + b"x" * (i * 37 % 900)
    log.append("t", 0, [NewRecord(value), NewRecord(value + b"!")])
log.close()
"""

READ_TO_COUNT = """
digest, position = sha256(), 0
while position < argument["count"]:
    if not log.wait({TopicPartition("t", 0): position}, timedelta(seconds=30)):
        sys.exit(f"nothing after {position}")
    batch = log.read("t", 0, position)
    for record in batch.records:
        digest.update(record.value)
    position = batch.next_position
say(digest.hexdigest())
log.close()
"""

WRITE_PACED = """
say("ready")
for i in range(argument["count"]):
    time.sleep(0.005)
    log.append("t", 0, [NewRecord(str(time.monotonic_ns()).encode())])
log.close()
"""

WRITE_UNTIL_KILLED = """
i = argument["first"]
say("ready")
while True:
    futures = []
    for _ in range(8):
        body = f"{i} ".encode() + os.urandom(i * 131 % 3000)
        futures.append((i, log.submit("t", 0, [NewRecord(sha256(body).digest() + body)])))
        i += 1
    for number, future in futures:
        future.result(30)
        say(number)
"""

HOLD_SHARE = """
membership = log.join("g", "t", replica=0, replicas=1, member="holder")
say(os.getpid())
time.sleep(600)
"""


# kafka-python reads its message schemas in a way that Python 3.11 calls deprecated
WARNINGS = ["-W", "error"]
for word in ("open_text", "read_text"):
    WARNINGS += ["-W", f"ignore:{word} is deprecated:DeprecationWarning"]


@contextmanager
def child(backend: Backend, code: str, **argument: Any) -> Iterator[subprocess.Popen[str]]:
    settings = json.dumps(backend.settings)
    process = subprocess.Popen(
        [sys.executable, *WARNINGS, "-c", CHILD + code, backend.url, settings, json.dumps(argument)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        with process:
            yield process
    finally:
        process.kill()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def test_several_writer_and_reader_processes_agree_on_one_order(shared: Backend) -> None:
    with shared.open() as log:
        log.create_topic("t", 1)
        with (
            child(shared, READ_TO_COUNT, count=600) as reader_1,
            child(shared, READ_TO_COUNT, count=600) as reader_2,
            child(shared, WRITE_COUNTED, writer=0, count=100) as writer_0,
            child(shared, WRITE_COUNTED, writer=1, count=100) as writer_1,
            child(shared, WRITE_COUNTED, writer=2, count=100) as writer_2,
        ):
            for writer in (writer_0, writer_1, writer_2):
                assert writer.wait(60) == 0
            read = values(log)
            digest = sha256(b"".join(read)).hexdigest()
            assert (said(reader_1), said(reader_2)) == (digest, digest)
        assert len(read) == 600
        assert all(second == first + b"!" for first, second in zip(read[::2], read[1::2], strict=True))
        for number in range(3):
            mine = [value for value in read[::2] if value.startswith(b"%d " % number)]
            assert [int(value.split()[1]) for value in mine] == list(range(100))


def test_a_record_reaches_a_reader_in_another_process_soon(shared: Backend) -> None:
    """Once it follows the partition: on a busy machine what it reads with may take a second to start."""
    latencies_ms: deque[float] = deque(maxlen=50)
    deadline, position = time.monotonic() + SOON.total_seconds(), 0
    with shared.open() as log:
        log.create_topic("t", 1)
        with child(shared, WRITE_PACED, count=3000) as writer:
            assert said(writer) == "ready"
            # Generous, for a busy machine; benchmarks/log.py measures it.
            while len(latencies_ms) < 50 or sorted(latencies_ms)[25] > 50:
                assert time.monotonic() < deadline, sorted(latencies_ms)
                assert log.wait({TopicPartition("t", 0): position}, SOON)
                batch = log.read("t", 0, position)
                position = batch.next_position
                for record in batch.records:
                    latencies_ms.append((time.monotonic_ns() - int(record.value)) / 1e6)
            writer.kill()


def test_killed_writers_lose_nothing_acknowledged_and_leave_nothing_torn(shared: Backend) -> None:
    chance = random.Random(11)
    with shared.open() as log:
        log.create_topic("t", 1)
        acknowledged: list[int] = []
        first = 0
        for _ in range(5 if shared.kind.needs_kafka else 12):
            with child(shared, WRITE_UNTIL_KILLED, first=first) as writer:
                assert said(writer) == "ready"
                for _ in range(chance.randrange(1, 120)):
                    acknowledged.append(int(said(writer)))
                time.sleep(chance.random() * 0.004)  # so that the kill falls anywhere in a write
                writer.send_signal(signal.SIGKILL)
                assert writer.stdout
                acknowledged += [int(line) for line in writer.stdout if line.endswith("\n")]
            started = time.monotonic()
            log.append("t", 0, [NewRecord(sha256(b"-1 ").digest() + b"-1 ")])
            assert time.monotonic() - started < 10, "a killed writer blocks nobody"
            numbers = []
            for value in values(log):
                assert sha256(value[32:]).digest() == value[:32]
                numbers.append(int(value[32:].split()[0]))
            written = [number for number in numbers if number >= 0]
            assert written == sorted(set(written))
            assert set(acknowledged) <= set(written)
            first = max(written) + 1


def test_a_share_held_in_another_process_is_refused_and_freed_by_kill_9(shared: Backend) -> None:
    with shared.open() as log:
        log.create_topic("t", 2)
        with child(shared, HOLD_SHARE) as holder:
            pid = said(holder)
            with pytest.raises(ShareHeld, match=f"{pid}.*holder"):
                log.join("g", "t", replica=0, replicas=1)
            holder.send_signal(signal.SIGKILL)
            holder.wait(20)

        def joined() -> bool:
            try:
                log.join("g", "t", replica=0, replicas=1)
            except ShareHeld:
                return False
            return True

        eventually(joined, "the share of a killed process is free")
