"""The embedded log: `file:///path`, for the processes of one machine.

Example:
    >>> log = EmbeddedLog("/tmp/run/log")
    >>> log.create_topic("demo.tasks", 2)
    >>> log.append("demo.tasks", 0, [NewRecord(b"hello")])
    0
    >>> log.close()

What a crash can take, by `fsync`:
    "group"   nothing that was acknowledged (one fdatasync for all that is queued; the default)
    "always"  nothing that was acknowledged (one fdatasync for every append)
    "never"   nothing when a process is killed; up to some seconds of records when the machine loses power,
              which later readers see as CorruptRecord or as the end of the log
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from streams.checks import MAX_RECORD_BYTES, check_records, no_such
from streams.embedded.catalog import Catalog, FileMembership
from streams.embedded.committer import Append, Committer
from streams.embedded.files import storage, storage_error
from streams.embedded.mark import Mark, MarkDamaged
from streams.embedded.reader import PartitionReader
from streams.embedded.segment import HEAD, NewBytes, Prepared, encode_headers, payload_crc
from streams.embedded.writer import PartitionWriter, create_partition
from streams.errors import LogClosed, LogError, LogUnavailable, RecordTooLarge
from streams.log import DEFAULT_TIMEOUT, Batch, EventLog, NewRecord, TopicPartition

FSYNC_MODES = ("group", "always", "never")
MAX_APPEND_BYTES = 1 << 30  # of one call; positions in the index are u32
_MAX_HEADERS = 0xFFFF
_POLL_MIN_S, _POLL_MAX_S = 0.0002, 0.005
_CLOSE_TIMEOUT_S = 10.0

_open_logs: weakref.WeakSet[EmbeddedLog] = weakref.WeakSet()  # only for the hook after a fork


class _Partition(NamedTuple):
    mark: Mark
    reader: PartitionReader
    writer: PartitionWriter | None  # None: the log is open read-only


class EmbeddedLog(EventLog):
    """Lifecycle: open (recovers what a crash left) → create_topic, append, read, … → close.

    `readonly=True` opens an existing log and creates, locks and changes nothing at all.
    After a fork the child may go on using it; its shares stay with the parent.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        readonly: bool = False,
        fsync: str = "group",
        segment_bytes: int = 64 << 20,
        max_record_bytes: int = MAX_RECORD_BYTES,
        bytes_in_flight: int = 64 << 20,
        timeout: timedelta = DEFAULT_TIMEOUT,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        """`timeout` bounds the wait for room in flight, and for a lock that another process holds.

        Raises LogError when the folder is not a log and not empty, or has a newer format.
        """
        if fsync not in FSYNC_MODES:
            raise LogError(f"fsync = {fsync!r}: needs one of {', '.join(FSYNC_MODES)}")
        if not 1 << 10 <= segment_bytes <= 1 << 30:
            raise LogError(f"segment_bytes = {segment_bytes}: needs 1 KiB to 1 GiB")
        self._readonly = readonly
        self._fsync = fsync
        self._segment_bytes = segment_bytes
        self._max_record_bytes = max_record_bytes
        self._bytes_in_flight = bytes_in_flight
        self._timeout_s = timeout.total_seconds()
        self._clock_ms = clock_ms
        self._closed = False
        self._lock = threading.Lock()  # guards the dictionaries below
        self._topics: dict[str, int] = {}
        self._partitions: dict[TopicPartition, _Partition] = {}
        self._memberships: list[FileMembership] = []
        self._catalog = Catalog(Path(path), readonly=readonly, lock_timeout_s=self._timeout_s)
        self._committer = self._new_committer()
        if not readonly:
            for topic, partitions in self._catalog.topics().items():
                for partition in range(partitions):
                    self._partition(TopicPartition(topic, partition))
        _open_logs.add(self)

    def _new_committer(self) -> Committer:
        return Committer(
            self._commit,
            bytes_in_flight=self._bytes_in_flight,
            one_by_one=self._fsync == "always",
            timeout_s=self._timeout_s,
        )

    # -- topics

    def create_topic(self, topic: str, partitions: int, *, kept: bool = False) -> None:
        self._check_open()
        with storage(self._catalog.root, f"creating topic {topic!r}"):
            self._catalog.create_topic(topic, partitions)

    def topics(self) -> dict[str, int]:
        self._check_open()
        return self._catalog.topics()

    def partitions(self, topic: str) -> int:
        self._check_open()
        return self._catalog.partitions(topic) or 0

    # -- writing

    def submit(self, topic: str, partition: int, records: Sequence[NewRecord]) -> Future[int]:
        try:
            place = TopicPartition(topic, partition)
            self._check_writable()
            check_records(records, self._max_record_bytes)
            self._partition(place)
            append = _prepared(records)
            self._committer.submit(place, append)
            return append.future
        except LogError as error:
            failed: Future[int] = Future()
            failed.set_exception(error)
            return failed

    def append(
        self,
        topic: str,
        partition: int,
        records: Sequence[NewRecord],
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> int:
        future = self.submit(topic, partition, records)
        try:
            return future.result(timeout.total_seconds())
        except FutureTimeout:
            raise LogUnavailable(
                f"{topic}/{partition}: an append was not durable after {timeout.total_seconds():g} s; "
                "it may still become visible"
            ) from None

    def _commit(self, place: TopicPartition, appends: Sequence[Append]) -> None:
        """Called by the committer's thread."""
        writer = self._partitions[place].writer  # opened by submit; used while closing, too
        assert writer is not None
        while appends:
            try:
                offset, count = writer.append([append.prepared for append in appends])
            except (LogError, OSError) as error:
                if isinstance(error, OSError):
                    error = storage_error(error, self._catalog.partition_folder(*place), "an append")
                for append in appends:
                    append.future.set_exception(error)
                return
            for append in appends[:count]:
                append.future.set_result(offset)
                offset += len(append.prepared.records)
            appends = appends[count:]

    # -- reading

    def start(self, topic: str, partition: int) -> int:
        return self._partition(TopicPartition(topic, partition)).mark.load().start

    def end(self, topic: str, partition: int) -> int:
        return self._partition(TopicPartition(topic, partition)).mark.load().end

    def read(
        self,
        topic: str,
        partition: int,
        position: int,
        *,
        max_records: int = 500,
        max_bytes: int = 8 << 20,
    ) -> Batch:
        return self._partition(TopicPartition(topic, partition)).reader.read(position, max_records, max_bytes)

    def wait(self, positions: Mapping[TopicPartition, int], timeout: timedelta) -> bool:
        """Polls the marks in memory: every 0.2 ms at first, then a tenth of the time waited, at most 5 ms."""
        marks = [(self._partition(TopicPartition(*place)).mark, at) for place, at in positions.items()]
        started = time.monotonic()
        left = timeout.total_seconds()
        while True:
            for mark, position in marks:
                if mark.load().end > position:
                    return True
            self._check_open()
            waited = time.monotonic() - started
            if waited >= left:
                return False
            time.sleep(min(max(_POLL_MIN_S, waited / 10), _POLL_MAX_S, left - waited))

    def offset_at(self, topic: str, partition: int, timestamp_ms: int) -> int:
        return self._partition(TopicPartition(topic, partition)).reader.offset_at(timestamp_ms)

    # -- groups

    def join(
        self,
        group: str,
        topic: str,
        *,
        replica: int,
        replicas: int,
        member: str = "",
        elastic: bool = False,
    ) -> FileMembership:
        self._partition(TopicPartition(topic, 0))
        with storage(self._catalog.root, f"joining group {group!r}"):
            membership = self._catalog.join(group, topic, self._topics[topic], replica, replicas, member)
        with self._lock:
            self._memberships.append(membership)
        return membership

    def commit_hint(self, group: str, positions: Mapping[TopicPartition, int]) -> None:
        self._check_writable()
        for place in positions:
            self._partition(TopicPartition(*place))
        with self._lock, storage(self._catalog.root, f"keeping hints of group {group!r}"):
            self._catalog.commit_hint(group, positions, self._topics)

    def hints(self, group: str) -> dict[TopicPartition, int]:
        self._check_open()
        return self._catalog.hints(group)

    def groups(self, beginning: str = "") -> list[str]:
        self._check_open()
        return self._catalog.groups(beginning)

    # -- retention

    def truncate_before(self, topic: str, partition: int, offset: int) -> int:
        self._check_writable()
        writer = self._partition(TopicPartition(topic, partition)).writer
        assert writer is not None
        with storage(self._catalog.root, f"removing old segments of {topic}/{partition}"):
            return writer.truncate_before(topic, partition, offset)

    def settle(self, topic: str, partition: int) -> None:
        self._check_writable()
        writer = self._partition(TopicPartition(topic, partition)).writer
        assert writer is not None
        with storage(self._catalog.root, f"settling {topic}/{partition}"):
            writer.settle()

    # -- life

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        idle = self._committer.close(_CLOSE_TIMEOUT_S)
        with self._lock:
            for partition in self._partitions.values():
                partition.reader.close()
                if idle:  # else a write hangs in the disk, and has the files
                    partition.mark.close()
                    if partition.writer is not None:
                        partition.writer.close()
            self._catalog.close()
            for membership in self._memberships:
                membership.close()
        _open_logs.discard(self)

    def _check_open(self) -> None:
        if self._closed:
            raise LogClosed(f"the log {self._catalog.root} was closed; open it again to go on")

    def _check_writable(self) -> None:
        self._check_open()
        if self._readonly:
            raise LogError(f"the log {self._catalog.root} is open read-only")

    def _partition(self, place: TopicPartition) -> _Partition:
        known = self._partitions.get(place)
        if known is not None and not self._closed:
            return known
        with self._lock:
            self._check_open()
            known = self._partitions.get(place)
            if known is None:
                known = self._open_partition(place)
                self._partitions[place] = known
            return known

    def _open_partition(self, place: TopicPartition) -> _Partition:
        partitions = self._catalog.partitions(place.topic)
        if partitions is None or not 0 <= place.partition < partitions:
            raise no_such(place.topic, place.partition, self._catalog.topics())
        self._topics[place.topic] = partitions
        folder = self._catalog.partition_folder(*place)
        try:
            if not self._readonly and not (folder / "mark").exists():
                create_partition(folder)
            mark = Mark(folder / "mark", readonly=self._readonly)
            reader = PartitionReader(folder, mark, *place)
            if self._readonly:
                mark.load()
                return _Partition(mark, reader, None)
            writer = PartitionWriter(
                folder,
                mark,
                segment_bytes=self._segment_bytes,
                sync=self._fsync != "never",
                lock_timeout_s=self._timeout_s,
                clock_ms=self._clock_ms,
            )
            writer.recover()
        except (OSError, MarkDamaged) as error:
            raise LogError(f"{place.topic}/{place.partition} cannot be opened: {error}") from error
        return _Partition(mark, reader, writer)

    def _after_fork(self) -> None:
        """In the child: let go of the parent's locks and shares, and start afresh on the same files."""
        self._lock = threading.Lock()
        for membership in self._memberships:
            membership.forget()
        self._memberships = []
        for partition in self._partitions.values():
            partition.reader.release()
            if partition.writer is not None:
                partition.writer.release()
        self._partitions = {}
        self._committer = self._new_committer()


def _prepared(records: Sequence[NewRecord]) -> Append:
    """Headers and checksums are made by the caller's thread, while the committer's waits for the disk."""
    prepared: list[NewBytes] = []
    size = len(records) * HEAD.size
    for value, headers, timestamp_ms in records:
        raw = encode_headers(headers) if headers else b""
        if len(raw) > _MAX_HEADERS:
            raise RecordTooLarge(f"headers take {len(raw)} bytes; the limit of a record is {_MAX_HEADERS}")
        prepared.append((timestamp_ms, raw, value, payload_crc(raw, value)))
        size += len(raw) + len(value)
    if size > MAX_APPEND_BYTES:
        raise RecordTooLarge(f"an append of {size} bytes; the limit of a call is {MAX_APPEND_BYTES}")
    return Append(Prepared(prepared, size))


def _renew_after_fork() -> None:
    for log in list(_open_logs):
        log._after_fork()


os.register_at_fork(after_in_child=_renew_after_fork)
