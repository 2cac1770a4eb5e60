"""Records that are too large for the log: claim-checked to files, read back transparently, never half there."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streams import claim_files, claim_sweep, codec
from streams.claims import ClaimCheck
from streams.embedded.log import EmbeddedLog
from streams.errors import (
    ClaimLost,
    LogClosed,
    LogError,
    LogFull,
    LogUnavailable,
    OffsetOutOfRange,
    RecordTooLarge,
    UnknownTopic,
)
from streams.events import RolloutFailed
from streams.kafka.settings import KafkaSettings
from streams.kafka.topic_settings import largest_batch
from streams.log import Batch, EventLog, NewRecord, Record, TopicPartition, read_all
from streams.memory import MemoryLog, MemoryStore
from streams.open import open_log

ROOT = Path(__file__).resolve().parents[2]
LIMIT, CAP = 1000, 100_000
NO_GRACE = timedelta(0)
SOON_S = 30.0

Open = Callable[..., ClaimCheck]


@pytest.fixture(params=["memory", "embedded"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens the same log and folder again, with other settings of the claim check."""
    store = MemoryStore()
    opened: list[ClaimCheck] = []

    def open_again(**changes) -> ClaimCheck:
        inner: EventLog
        if request.param == "memory":
            inner = MemoryLog(store, max_record_bytes=LIMIT)
        else:
            readonly = changes.get("readonly", False)
            inner = EmbeddedLog(
                tmp_path / "log", max_record_bytes=LIMIT, segment_bytes=4096, readonly=readonly
            )
        fields = {"max_record_bytes": LIMIT, "max_claim_bytes": CAP, **changes}
        opened.append(ClaimCheck(inner, tmp_path / "claims", **fields))
        return opened[-1]

    yield open_again
    for log in opened:
        log.close()


@pytest.fixture
def log(reopen: Open) -> ClaimCheck:
    made = reopen(grace=NO_GRACE)
    made.create_topic("t", 2)
    return made


def large(seed: int = 0, size: int = 5000) -> bytes:
    return random.Random(seed).randbytes(size)


def files(folder: Path) -> list[Path]:
    """The claims files, without locks and the id."""
    return sorted(
        path
        for path in (folder / "claims").rglob("*")
        if path.is_file() and path.name not in ("lock", "claims.id")
    )


def values(log: EventLog, partition: int = 0) -> list[bytes]:
    return [record.value for record in read_all(log, "t", partition, log.start("t", partition))]


def why_lost(record: Record) -> str:
    with pytest.raises(ClaimLost) as lost:
        codec.decode(record)
    return str(lost.value)


# -- there and back


def test_a_value_over_the_limit_lies_in_a_file_and_the_log_keeps_the_headers_and_a_reference(
    log: ClaimCheck, tmp_path: Path
) -> None:
    headers = (("type", b"trajectory_finished"), ("by", b"rollout-0"), ("id", b"0-1/2/0"))
    log.append("t", 1, [NewRecord(large(), headers, 1234)])
    (stored,) = log.inner.read("t", 1, 0).records
    assert (stored.value, stored.timestamp_ms, stored.headers[:3]) == (b"", 1234, headers)
    name, reference = stored.headers[3]
    digest = sha256(large()).hexdigest()
    assert name == "claim" and reference.startswith(b"5000 ") and reference.endswith(f"t/1/{digest}".encode())
    assert sum(len(name) + len(value) for name, value in stored.headers) < 300
    assert [path.read_bytes() for path in files(tmp_path)] == [large()]
    assert log.read("t", 1, 0).records == [Record("t", 1, 0, 1234, headers, large())]


@pytest.mark.parametrize("size", [0, 1, LIMIT - 4, LIMIT - 3, LIMIT, LIMIT + 1, CAP - 4])
def test_a_record_of_any_size_up_to_the_cap_comes_back_whole(
    log: ClaimCheck, tmp_path: Path, size: int
) -> None:
    record = NewRecord(large(size=size), (("n", b"abc"),))
    log.append("t", 0, [record, record._replace(value=b"next")])
    read = log.read("t", 0, 0)
    assert [(each.value, each.headers) for each in read.records] == [
        (record.value, record.headers),
        (b"next", record.headers),
    ]
    assert len(files(tmp_path)) == (size + 4 > LIMIT)


def test_large_and_small_records_of_one_thread_keep_their_order(log: ClaimCheck) -> None:
    written, futures = [], []
    for at in range(60):
        batch = [large(at, 3000), b"%d" % at] if at % 3 else [b"%d" % at]
        written += batch
        futures.append(log.submit("t", 0, [NewRecord(value) for value in batch]))
    offsets = [future.result(SOON_S) for future in futures]
    assert offsets == sorted(offsets)
    assert values(log) == written


def test_a_header_of_our_own_name_is_kept_and_is_not_taken_for_a_reference(log: ClaimCheck) -> None:
    record = NewRecord(b"small", (("claim", b"5000 t/0/" + b"0" * 64),))
    log.append("t", 0, [record])
    (read,) = log.read("t", 0, 0).records
    assert (read.value, read.headers) == (record.value, record.headers)


def test_a_read_counts_the_values_in_files_against_its_limit_and_reads_each_reference_once(
    tmp_path: Path,
) -> None:
    class Counting(MemoryLog):
        handed_out = 0

        def read(
            self, topic: str, partition: int, position: int, *, max_records: int = 500, max_bytes: int = 1
        ) -> Batch:
            batch = super().read(topic, partition, position, max_records=max_records, max_bytes=max_bytes)
            self.handed_out += len(batch.records)
            return batch

    inner = Counting(max_record_bytes=LIMIT)
    log = ClaimCheck(inner, tmp_path / "claims", max_record_bytes=LIMIT)
    log.create_topic("t", 1)
    log.append("t", 0, [NewRecord(large(at, 4000 if at % 2 else 10)) for at in range(40)])
    sizes, position = [], 0
    while position < 40:
        batch = log.read("t", 0, position, max_bytes=10_000)
        assert [record.value for record in batch.records] == [
            large(at, 4000 if at % 2 else 10) for at in range(position, batch.next_position)
        ]
        sizes.append(sum(len(record.value) for record in batch.records))
        position = batch.next_position
    assert max(sizes) <= 10_000
    assert inner.handed_out == 40
    assert [record.offset for record in log.read("t", 0, 7, max_bytes=1).records] == [7]
    assert len(log.read("t", 0, 8, max_records=3).records) == 3


def test_every_process_with_the_folder_reads_what_any_wrote(log: ClaimCheck, reopen: Open) -> None:
    log.append("t", 0, [NewRecord(large())])
    assert values(reopen()) == values(reopen(readonly=True)) == [large()]


def test_a_log_opened_by_url_has_the_claims_folder_it_is_given(tmp_path: Path) -> None:
    url, claims = f"file://{tmp_path}/log", tmp_path / "claims"
    with open_log(url, claims=claims, max_record_bytes=LIMIT) as log:
        log.create_topic("t", 1)
        log.append("t", 0, [NewRecord(large())])
    with open_log(url, readonly=True, claims=claims) as log:
        assert values(log) == [large()]
    with open_log(url, readonly=True) as log:
        text = why_lost(log.read("t", 0, 0).records[0])
        assert "opened without its claims folder" in text and sha256(large()).hexdigest() in text


# -- refused


def test_a_record_over_the_cap_is_refused_naming_the_sample_its_size_the_limit_and_the_setting(
    log: ClaimCheck, tmp_path: Path
) -> None:
    headers = (("type", b"trajectory_finished"), ("id", b"0-7/1/0"))
    future = log.submit("t", 0, [NewRecord(b"fits"), NewRecord(bytes(CAP), headers)])
    size = CAP + sum(len(name) + len(value) for name, value in headers)
    with pytest.raises(RecordTooLarge) as refused:
        future.result(SOON_S)
    for needed in ("0-7/1/0", "trajectory_finished", str(size), str(CAP), "log.max_claim_bytes"):
        assert needed in str(refused.value)
    assert log.end("t", 0) == 0 and not files(tmp_path)


def test_an_event_that_no_reader_would_open_is_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_EVENT_BYTES", 10_000)
    event = RolloutFailed(
        uid="0-7/1/0", group_id="0-7", seq=7, index=1, attempt=0, n_samples=2, task_offset=0, reason="x",
        detail="y" * 20_000,
    )  # fmt: skip
    with pytest.raises(RecordTooLarge, match=r"0-7/1/0: the event has 20\d\d\d bytes.* 10000"):
        codec.encode(event, producer="test")


def test_what_packs_so_well_that_it_looks_like_a_bomb_is_stored_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    event = RolloutFailed(
        uid="0-7/1/0", group_id="0-7", seq=7, index=1, attempt=0, n_samples=2, task_offset=0, reason="x",
        detail="y" * 200_000,
    )  # fmt: skip
    packed = codec.encode(event, producer="test")
    assert len(packed.value) < 1000
    monkeypatch.setattr(codec, "DEFAULT_CAP", 100_000)
    record = Record("t", 0, 0, 0, packed.headers, packed.value)
    with pytest.raises(codec.OverCap):
        codec.decode(record)
    plain = codec.encode(event, producer="test")
    assert len(plain.value) > 200_000
    assert codec.decode(Record("t", 0, 0, 0, plain.headers, plain.value)) == codec.Known(event)


def test_a_large_record_for_a_topic_that_does_not_exist_or_a_closed_log_leaves_no_file(
    log: ClaimCheck, tmp_path: Path
) -> None:
    for topic, partition in (("nope", 0), ("t", 2)):
        with pytest.raises(UnknownTopic):
            log.append(topic, partition, [NewRecord(large())])
    log.close()
    with pytest.raises(LogClosed):
        log.append("t", 0, [NewRecord(large())])
    assert not files(tmp_path)


def test_limits_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="max_claim_bytes = 10 is below max_record_bytes = 20"):
        ClaimCheck(MemoryLog(), tmp_path, max_record_bytes=20, max_claim_bytes=10)


@pytest.mark.parametrize(("max_record_bytes", "allowed"), [(1_000_000, 1_048_588), (8 << 20, 9 << 20)])
def test_one_setting_is_enough_to_agree_with_what_a_kafka_cluster_allows(
    max_record_bytes: int, allowed: int
) -> None:
    settings = KafkaSettings(servers=("127.0.0.1:9092",), max_record_bytes=max_record_bytes)
    assert max_record_bytes < largest_batch(settings) <= allowed  # 1,048,588: Kafka's own max.message.bytes


# -- disks


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, LogFull), (errno.EDQUOT, LogFull), (errno.EIO, LogUnavailable),
                         (errno.ESTALE, LogUnavailable), (errno.EROFS, LogError)],
)  # fmt: skip
def test_what_the_disk_refuses_is_never_referred_to_and_can_be_tried_again(
    log: ClaimCheck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[LogError]
) -> None:
    real, calls = os.fsync, []

    def refuse(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if "/claims/t/" in path and path.endswith(".new"):
            calls.append(path)
            if len(calls) == 2:
                raise OSError(number, os.strerror(number))
        real(fd)

    monkeypatch.setattr(os, "fsync", refuse)
    records = [NewRecord(large(1)), NewRecord(large(2)), NewRecord(b"small")]
    with pytest.raises(LogError) as refused:
        log.append("t", 0, records)
    assert type(refused.value) is kind
    assert log.end("t", 0) == 0
    assert not [path for path in files(tmp_path) if path.name.endswith(".new")]
    assert log.append("t", 0, records) == 0
    assert values(log) == [large(1), large(2), b"small"]
    assert len(calls) == 3, "the first value was found and not written again"


def test_a_full_disk_is_log_full_and_no_part_of_a_file_is_left(log: ClaimCheck, tmp_path: Path) -> None:
    log.append("t", 0, [NewRecord(large(1))])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # as a full disk: the write ends in the middle
    try:
        with pytest.raises(LogFull, match=r"claims/t/0"):
            log.append("t", 0, [NewRecord(large(2, 50_000))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(files(tmp_path)) == 1 and log.end("t", 0) == 1
    assert log.append("t", 0, [NewRecord(large(2, 50_000))]) == 1


def test_a_retry_writes_nothing_twice(log: ClaimCheck, tmp_path: Path) -> None:
    for _ in range(3):
        log.append("t", 0, [NewRecord(large())])
    (path,) = files(tmp_path)
    made = path.stat().st_ino
    log.append("t", 0, [NewRecord(large(1)), NewRecord(large())])
    assert path.stat().st_ino == made and len(files(tmp_path)) == 2
    assert values(log) == [large()] * 3 + [large(1), large()]


def test_a_file_that_was_damaged_is_written_again_by_the_next_append_of_the_same_value(
    log: ClaimCheck, tmp_path: Path
) -> None:
    log.append("t", 0, [NewRecord(large())])
    (path,) = files(tmp_path)
    path.write_bytes(b"x" * 5000)
    log.append("t", 0, [NewRecord(large())])
    assert values(log) == [large(), large()]


def test_the_file_and_its_folder_are_synced_before_the_reference_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    real_sync, real_replace = os.fsync, os.replace

    class Watched(MemoryLog):
        def submit(self, topic: str, partition: int, records: Sequence[NewRecord]) -> Future[int]:
            steps.append("submit")
            return super().submit(topic, partition, records)

    def sync(fd: int) -> None:
        real_sync(fd)
        steps.append("sync " + ("folder" if os.path.isdir(f"/proc/self/fd/{fd}") else "file"))

    def replace(source: str, target: str) -> None:
        real_replace(source, target)
        steps.append("rename")

    log = ClaimCheck(Watched(max_record_bytes=LIMIT), tmp_path / "claims", max_record_bytes=LIMIT)
    log.create_topic("t", 1)
    log.append("t", 0, [NewRecord(large(1))])  # makes the folders
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    steps.clear()
    log.append("t", 0, [NewRecord(large(2)), NewRecord(b"small"), NewRecord(large(3))])
    assert steps == ["sync file", "rename", "sync file", "rename", "sync folder", "submit"]
    steps.clear()
    log.append("t", 0, [NewRecord(large(2))])
    assert steps == ["sync folder", "submit"], "its first writer may have died before the folder was synced"


# -- lost and damaged


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: path.unlink(), "is missing (5000 bytes)"),
    "cut": (lambda path: os.truncate(path, 4999), "has 4999 bytes, 5000 were written"),
    "empty": (lambda path: os.truncate(path, 0), "has 0 bytes, 5000 were written"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"!"), "has 5001 bytes"),
    "other bytes": (lambda path: path.write_bytes(b"x" * 5000), "is damaged: the SHA-256"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_lost_value_is_an_error_that_names_the_file_and_the_records_around_it_are_not_harmed(
    log: ClaimCheck, tmp_path: Path, damage: str
) -> None:
    log.append("t", 0, [NewRecord(b"before"), NewRecord(large(), (("type", b"x"),)), NewRecord(b"after")])
    (path,) = files(tmp_path)
    DAMAGES[damage][0](path)
    batch = log.read("t", 0, 0)
    assert batch.next_position == 3
    assert [record.value for record in batch.records] == [b"before", b"", b"after"]
    assert batch.records[1].header("type") == b"x"
    text = why_lost(batch.records[1])
    assert str(path) in text and DAMAGES[damage][1] in text


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"x",
        b"5 0123456789abcdef ../../etc/passwd",
        b"5 0123456789abcdef ../0/" + b"0" * 64,
        b"5 0123456789abcdef /t/0/" + b"0" * 64,
        b"99999999999 0123456789abcdef t/0/" + b"0" * 64,
    ],
)
def test_a_reference_that_is_none_is_lost_and_opens_no_other_file(log: ClaimCheck, header: bytes) -> None:
    log.inner.append("t", 0, [NewRecord(b"", (("claim", header),))])
    (record,) = log.read("t", 0, 0).records
    assert "needs a size, a folder's id and a path" in why_lost(record)


def test_a_folder_that_is_not_there_is_an_outage_and_no_loss(log: ClaimCheck, tmp_path: Path) -> None:
    log.append("t", 0, [NewRecord(b"before"), NewRecord(large())])
    (tmp_path / "claims").rename(tmp_path / "unmounted")
    assert [record.value for record in log.read("t", 0, 0).records] == [b"before"]
    with pytest.raises(LogUnavailable, match=r"is not there.*must share its run directory"):
        log.read("t", 0, 1)
    (tmp_path / "unmounted").rename(tmp_path / "claims")
    assert values(log) == [b"before", large()]


def test_another_folder_in_its_place_is_an_outage_and_no_loss(
    log: ClaimCheck, reopen: Open, tmp_path: Path
) -> None:
    log.append("t", 0, [NewRecord(large())])
    (tmp_path / "claims").rename(
        tmp_path / "elsewhere"
    )  # as on a machine that does not share the run directory
    other = reopen()
    other.append("t", 1, [NewRecord(large(2))])
    with pytest.raises(LogUnavailable, match="is another one"):
        other.read("t", 0, 0)


def test_a_read_only_log_shows_an_absent_folder_as_a_problem_and_makes_nothing(
    log: ClaimCheck, reopen: Open, tmp_path: Path
) -> None:
    log.append("t", 0, [NewRecord(large()), NewRecord(b"after")])
    (tmp_path / "claims").rename(tmp_path / "unmounted")
    looking = reopen(readonly=True)
    records = looking.read("t", 0, 0).records
    assert "is not there" in why_lost(records[0]) and records[1].value == b"after"
    assert not (tmp_path / "claims").exists()


def test_a_value_that_retention_removed_under_a_read_is_out_of_range_and_not_lost(
    log: ClaimCheck, reopen: Open
) -> None:
    for at in range(40):
        log.append("t", 0, [NewRecord(large(at, 1200)), NewRecord(bytes(900))])
    reader = reopen()
    assert (
        reader.read("t", 0, 0, max_bytes=3000).next_position == 2
    )  # it has the next references in its hands
    assert log.truncate_before("t", 0, 60) > 2
    with pytest.raises(OffsetOutOfRange, match="removed by retention"):
        reader.read("t", 0, 2)


# -- removing


def test_retention_removes_the_files_of_removed_records_and_no_other(log: ClaimCheck, tmp_path: Path) -> None:
    for at in range(60):
        log.append("t", 0, [NewRecord(large(at, 1200)), NewRecord(bytes(500))])
        log.append("t", 1, [NewRecord(large(at, 1300))])
    start = log.truncate_before("t", 0, 61)
    assert 0 < start <= 61
    kept = {sha256(large(at, 1200)).hexdigest() for at in range(60) if at * 2 >= start}
    assert {path.name for path in files(tmp_path) if path.parent.name == "0"} == kept
    assert len(files(tmp_path)) == len(kept) + 60
    assert [value for value in values(log) if value != bytes(500)] == [
        large(at, 1200) for at in range(60) if at * 2 >= start
    ]


def test_a_file_that_a_later_record_refers_to_again_outlives_the_first(
    log: ClaimCheck, tmp_path: Path
) -> None:
    log.append("t", 0, [NewRecord(large()), NewRecord(large(1))])
    for _ in range(20):
        log.append("t", 0, [NewRecord(bytes(900))])
    log.append("t", 0, [NewRecord(large())])
    assert log.truncate_before("t", 0, 15) > 1
    assert [path.name for path in files(tmp_path)] == [sha256(large()).hexdigest()]
    assert values(log)[-1] == large()


def test_what_a_crash_left_is_removed_once_it_is_old_enough(
    log: ClaimCheck, reopen: Open, tmp_path: Path
) -> None:
    log.append("t", 0, [NewRecord(large())])
    (path,) = files(tmp_path)
    folder = path.parent
    (folder / sha256(b"orphan").hexdigest()).write_bytes(b"orphan")
    (folder / f"{'0' * 64}.{'1' * 32}.new").write_bytes(b"half")
    (folder / "notes.txt").write_text("a person's file")
    assert reopen().sweep("t", 0) == 0, "younger than an hour"
    for name in folder.iterdir():
        os.utime(name, (time.time() - 4000, time.time() - 4000))
    assert reopen(readonly=True).inner.end("t", 0) == 1
    assert reopen().sweep("t", 0) == 2
    assert {each.name for each in folder.iterdir()} == {path.name, "lock", "notes.txt"}
    assert values(log) == [large()]


def test_a_read_only_log_removes_nothing(log: ClaimCheck, reopen: Open, tmp_path: Path) -> None:
    log.append("t", 0, [NewRecord(large())])
    (path,) = files(tmp_path)
    orphan = path.parent / sha256(b"orphan").hexdigest()
    orphan.write_bytes(b"orphan")
    looking = reopen(readonly=True, grace=NO_GRACE)
    assert values(looking) == [large()]
    assert looking.sweep("t", 0) == 0
    assert orphan.exists()


def test_nothing_is_removed_while_an_append_with_a_file_is_on_its_way(tmp_path: Path) -> None:
    class Slow(MemoryLog):
        """Appends land when `land` is called, as with a broker that is slow to answer."""

        waiting: Callable[[], None] | None = None

        def submit(self, topic: str, partition: int, records: Sequence[NewRecord]) -> Future[int]:
            future: Future[int] = Future()
            self.waiting = lambda: future.set_result(super(Slow, self)._append(topic, partition, records))
            return future

    store = MemoryStore()
    slow = Slow(store)
    writer = ClaimCheck(slow, tmp_path / "claims", max_record_bytes=LIMIT)
    other = ClaimCheck(MemoryLog(store), tmp_path / "claims", max_record_bytes=LIMIT, grace=NO_GRACE)
    other.create_topic("t", 2)
    future = writer.submit("t", 0, [NewRecord(large())])
    assert not future.done() and len(files(tmp_path)) == 1
    assert other.sweep("t", 0) == 0 and len(files(tmp_path)) == 1
    assert slow.waiting is not None
    slow.waiting()
    assert future.result(0) == 0
    assert other.sweep("t", 0) == 0
    assert values(other) == [large()]
    other.truncate_before("t", 0, 1)
    assert not files(tmp_path)


def test_a_file_of_a_killed_writers_append_that_the_next_writer_takes_over_is_kept(tmp_path: Path) -> None:
    claims, path = tmp_path / "claims", tmp_path / "log"
    with ClaimCheck(EmbeddedLog(path), claims, max_record_bytes=LIMIT, grace=NO_GRACE) as log:
        log.create_topic("t", 1)
        log.append("t", 0, [NewRecord(b"first")])
        (mark,) = path.rglob("mark")
        before = mark.read_bytes()
        with ClaimCheck(EmbeddedLog(path), claims, max_record_bytes=LIMIT) as writer:
            writer.append("t", 0, [NewRecord(large())])
        with open(mark, "r+b") as file:  # as if it had been killed between its write and the mark
            file.write(before)
        assert log.end("t", 0) == 1
        assert log.sweep("t", 0) == 0
        assert values(log) == [b"first", large()]


def test_a_damaged_record_in_the_partition_keeps_every_file(tmp_path: Path) -> None:
    with EmbeddedLog(tmp_path / "log", max_record_bytes=LIMIT) as inner:
        log = ClaimCheck(inner, tmp_path / "claims", max_record_bytes=LIMIT, grace=NO_GRACE)
        log.create_topic("t", 1)
        log.append("t", 0, [NewRecord(large(at)) for at in range(3)])
        (segment,) = (tmp_path / "log").rglob("*.log")
        raw = segment.read_bytes()
        at = raw.index(sha256(large(1)).hexdigest().encode())
        segment.write_bytes(raw[:at] + b"?" + raw[at + 1 :])
        assert log.sweep("t", 0) == 0
        assert len(files(tmp_path)) == 3


def test_a_process_that_writes_files_sweeps_in_the_background_after_retention(
    log: ClaimCheck, reopen: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for at in range(40):
        log.append("t", 0, [NewRecord(large(at)), NewRecord(bytes(900))])
    assert log.inner.truncate_before("t", 0, 40) > 20  # as a broker does: nobody is told
    assert len(files(tmp_path)) == 40
    monkeypatch.setattr(claim_sweep, "_LOOK_EVERY_S", 0.0)
    writer = reopen(grace=NO_GRACE)
    deadline = time.monotonic() + SOON_S
    at = 40
    while len(files(tmp_path)) >= at:
        assert time.monotonic() < deadline, "the background sweep never came"
        writer.append("t", 0, [NewRecord(large(at))])
        at += 1
        time.sleep(0.01)
    assert [value for value in values(log) if value != bytes(900)][-1] == large(at - 1)


def test_closing_ends_a_sweep_in_the_background_soon(
    log: ClaimCheck, reopen: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    for at in range(40):
        log.append("t", 0, [NewRecord(large(at)), NewRecord(bytes(900))])
    log.inner.truncate_before("t", 0, 40)
    monkeypatch.setattr(claim_sweep, "_LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(claim_sweep, "_IDLE_SHARE", 1e6)
    writer = reopen(grace=NO_GRACE)
    writer.append("t", 0, [NewRecord(large(99))])
    time.sleep(0.05)
    started = time.monotonic()
    writer.close()
    assert time.monotonic() - started < 5


# -- several threads and processes


def test_threads_that_write_the_same_value_at_once_all_succeed(log: ClaimCheck, tmp_path: Path) -> None:
    problems: list[BaseException] = []

    def write() -> None:
        try:
            for at in range(10):
                log.append("t", 0, [NewRecord(large(at))])
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    assert not problems and len(files(tmp_path)) == 10
    assert sorted(values(log)) == sorted(large(at) for at in range(10) for _ in range(4))


WRITE_UNTIL_KILLED = """
import json, os, sys
from streams.log import NewRecord
from streams.open import open_log

log = open_log(sys.argv[1], claims=sys.argv[2], max_record_bytes=1000)
i = int(sys.argv[3])
print("ready", flush=True)
while True:
    futures = []
    for _ in range(4):
        futures.append((i, log.submit("t", 0, [NewRecord(b"%d " % i + os.urandom(2000 + i % 500)), NewRecord(b"-")])))
        i += 1
    for number, future in futures:
        future.result(30)
        print(number, flush=True)
"""


def test_killed_writers_and_a_busy_sweeper_lose_no_value_that_a_record_refers_to(tmp_path: Path) -> None:
    chance = random.Random(5)
    url, claims = f"file://{tmp_path}/log", tmp_path / "claims"
    stop = threading.Event()
    removed: list[int] = []
    inner = EmbeddedLog(tmp_path / "log", segment_bytes=4096)
    log = ClaimCheck(inner, claims, max_record_bytes=LIMIT, grace=NO_GRACE)
    log.create_topic("t", 1)

    def sweep() -> None:
        while not stop.is_set():
            removed.append(log.sweep("t", 0))
            time.sleep(0.001)

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    acknowledged: list[int] = []
    try:
        first = 0
        for _ in range(8):
            with subprocess.Popen(
                [sys.executable, "-c", WRITE_UNTIL_KILLED, url, str(claims), str(first)],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            ) as writer:
                assert writer.stdout and writer.stdout.readline() == "ready\n"
                for _ in range(chance.randrange(1, 40)):
                    acknowledged.append(int(writer.stdout.readline()))
                time.sleep(chance.random() * 0.01)  # so that the kill falls anywhere in a write
                writer.send_signal(signal.SIGKILL)
                acknowledged += [int(line) for line in writer.stdout if line.endswith("\n")]
            first = max(acknowledged) + 100
            found = []
            for record in read_all(log, "t", 0, log.start("t", 0)):
                assert record.header("claim") is None, why_lost(record)
                if record.value != b"-":
                    found.append(int(record.value.split(b" ")[0]))
            assert set(acknowledged) <= set(found) and len(found) == len(set(found))
            if len(removed) % 2:
                log.truncate_before("t", 0, log.end("t", 0) // 4)
                acknowledged = [each for each in acknowledged if each in _numbers(log)]
    finally:
        stop.set()
        sweeper.join(SOON_S)
    log.sweep("t", 0)
    assert {path.name for path in files(tmp_path)} == {
        sha256(record.value).hexdigest()
        for record in read_all(log, "t", 0, log.start("t", 0))
        if record.value != b"-"
    }
    log.close()


def _numbers(log: EventLog) -> set[int]:
    return {int(value.split(b" ")[0]) for value in values(log) if value != b"-"}


FORK = """
import os, sys, warnings
from streams.log import NewRecord
from streams.open import open_log

warnings.simplefilter("ignore", DeprecationWarning)
log = open_log(sys.argv[1], claims=sys.argv[2], max_record_bytes=1000)
log.create_topic("t", 1)
log.append("t", 0, [NewRecord(bytes(3000))])
child = os.fork()
log.append("t", 0, [NewRecord(b"%d" % (child == 0) * 3000)])
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
log.append("t", 0, [NewRecord(b"after" * 3000)])
log.close()
"""


def test_a_forked_child_uses_the_log_and_its_files_on_its_own(tmp_path: Path) -> None:
    url, claims = f"file://{tmp_path}/log", tmp_path / "claims"
    subprocess.run(
        [sys.executable, "-c", FORK, url, str(claims)],
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with open_log(url, claims=claims, max_record_bytes=1000) as log:
        read = values(log)
    assert read[0] == bytes(3000) and sorted(read[1:3]) == [b"0" * 3000, b"1" * 3000]
    assert read[3] == b"after" * 3000


# -- any sizes, any crash points


class Crash(Exception):
    """The process is gone: nothing after this point happens."""


class Crashing(MemoryLog):
    """Loses what is submitted, or takes it and never answers, as its script says."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store, max_record_bytes=LIMIT)
        self.then = "ok"

    def submit(self, topic: str, partition: int, records: Sequence[NewRecord]) -> Future[int]:
        then, self.then = self.then, "ok"
        if then == "crash before":
            raise Crash
        future: Future[int] = Future()
        if then == "refused":
            future.set_exception(LogFull("no room"))
            return future
        future = super().submit(topic, partition, records)
        if then == "crash after":
            raise Crash
        if then == "unanswered":
            lost: Future[int] = Future()
            lost.set_exception(LogUnavailable("no answer, but it has landed"))
            return lost
        return future


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["ok", "ok", "ok", "refused", "unanswered", "crash before", "crash after", "truncate", "sweep"]
        ),
        st.lists(
            st.tuples(st.integers(0, 6), st.sampled_from([0, 10, 999, 1001, 3000])), min_size=1, max_size=4
        ),
    ),
    max_size=25,
)
HARMS = st.lists(st.tuples(st.integers(0, 50), st.sampled_from(sorted(DAMAGES))), max_size=3)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS, HARMS, st.integers(0, 10**9))
def test_whatever_crashes_between_file_and_reference_each_record_reads_as_it_was_submitted(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[str, list[tuple[int, int]]]],
    harms: list[tuple[int, str]],
    seed: int,
) -> None:
    folder = tmp_path_factory.mktemp("claims")
    store = MemoryStore()
    inner = Crashing(store)
    log = ClaimCheck(inner, folder / "claims", max_record_bytes=LIMIT, grace=NO_GRACE)
    log.create_topic("t", 1)
    submitted: list[bytes] = []  # in order, as they landed
    for then, drawn in steps:
        if then == "sweep":
            log.sweep("t", 0)
            continue
        if then == "truncate":
            log.truncate_before("t", 0, random.Random(seed).randint(log.start("t", 0), log.end("t", 0)))
            continue
        batch = [random.Random(key).randbytes(size) for key, size in drawn]
        inner.then = then
        try:
            log.append("t", 0, [NewRecord(value) for value in batch])
        except Crash:
            log._files.close()  # as the kernel does with a dead process's locks
            inner = Crashing(store)
            log = ClaimCheck(inner, folder / "claims", max_record_bytes=LIMIT, grace=NO_GRACE)
        except (LogFull, LogUnavailable):
            pass
        if then not in ("refused", "crash before"):
            submitted += batch
    start = log.start("t", 0)
    assert values(log) == submitted[start:]
    log.sweep("t", 0)
    assert values(log) == submitted[start:]
    wanted = {sha256(value).hexdigest() for value in submitted[start:] if len(value) > LIMIT}
    assert {path.name for path in files(folder)} == wanted
    # and whatever happens to the files: a value is right or it is lost by name
    there = files(folder)
    harmed = set()
    for at, damage in harms:
        path = there[at % len(there)] if there else None
        if path is not None and path.name not in harmed:
            if damage == "cut":
                os.truncate(path, path.stat().st_size - 1)
            elif damage == "other bytes":
                path.write_bytes(bytes(path.stat().st_size))
            else:
                DAMAGES[damage][0](path)
            harmed.add(path.name)
    for record, value in zip(read_all(log, "t", 0, start), submitted[start:], strict=True):
        name = sha256(value).hexdigest()
        if name in harmed and len(value) > LIMIT:
            assert name in why_lost(record) and record.value == b""
        else:
            assert record.value == value
    log.close()


def test_processes_that_make_the_folder_at_once_agree_on_its_id(tmp_path: Path) -> None:
    place = TopicPartition("t", 0)
    folders = [claim_files.ClaimFolder(tmp_path / "claims") for _ in range(6)]
    started = threading.Barrier(len(folders))
    claims: list[claim_files.Claim] = []

    def write(folder: claim_files.ClaimFolder, at: int) -> None:
        started.wait(SOON_S)
        folder.hold(place)
        claims.extend(folder.write(place, [large(at)]))
        folder.release(place)

    threads = [threading.Thread(target=write, args=(folder, at)) for at, folder in enumerate(folders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    assert len(claims) == 6 and len({claim.folder for claim in claims}) == 1
    assert [claim_files.parse(claim.header()[1]) for claim in claims] == claims
