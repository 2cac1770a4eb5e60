"""The log in memory: for tests, examples and single-process runs. Same behaviour as the stored ones, no disk.

A `MemoryStore` holds the records; every `MemoryLog` is one handle on a store, as one process is on a stored
log. Handles of one store see each other's records, hold shares against each other, and close on their own.

Example:
    >>> store = MemoryStore()
    >>> with MemoryLog(store) as writer, MemoryLog(store) as reader:
    ...     writer.create_topic("demo", 1)
    ...     writer.append("demo", 0, [NewRecord(b"hello")])
    ...     reader.read("demo", 0, 0).records[0].value
    0
    b'hello'
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta

from streams.checks import MAX_RECORD_BYTES, check_name, check_partitions, check_records, no_such
from streams.errors import LogClosed, LogError, OffsetOutOfRange, ShareHeld, TopicMismatch
from streams.log import Batch, EventLog, Membership, NewRecord, Record, TopicPartition, share


def wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


class _Partition:
    """Kept records; `records[0]` has offset `start`."""

    __slots__ = ("newest_ms", "records", "start")

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.start = 0
        self.newest_ms = 0

    @property
    def end(self) -> int:
        return self.start + len(self.records)


class MemoryStore:
    """What several handles share. `changed` guards everything and is notified when records arrive."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.topics: dict[str, list[_Partition]] = {}
        self.hints: dict[str, dict[TopicPartition, int]] = {}
        self.shares: dict[tuple[str, str, int], MemoryMembership] = {}


class MemoryMembership(Membership):
    def __init__(
        self, store: MemoryStore, group: str, topic: str, replica: int, replicas: int, member: str
    ) -> None:
        self._store = store
        self._key = (group, topic, replica)
        self.replica, self.replicas, self.member = replica, replicas, member
        self.since_ms = wall_clock_ms()
        self._partitions = share(len(store.topics[topic]), replica, replicas)

    def partitions(self) -> frozenset[int]:
        return self._partitions

    @property
    def generation(self) -> int:
        return 1

    def close(self) -> None:
        with self._store.changed:
            if self._store.shares.get(self._key) is self:
                del self._store.shares[self._key]


class MemoryLog(EventLog):
    """One handle on a `MemoryStore` (a fresh one by default)."""

    def __init__(
        self,
        store: MemoryStore | None = None,
        *,
        max_record_bytes: int = MAX_RECORD_BYTES,
        clock_ms: Callable[[], int] = wall_clock_ms,
    ) -> None:
        self._store = store or MemoryStore()
        self._max_record_bytes = max_record_bytes
        self._clock_ms = clock_ms
        self._memberships: list[MemoryMembership] = []
        self._closed = False

    # -- topics

    def create_topic(self, topic: str, partitions: int, *, kept: bool = False) -> None:
        check_name("topic", topic)
        check_partitions(topic, partitions)
        with self._store.changed:
            self._check_open()
            known = self._store.topics.setdefault(topic, [_Partition() for _ in range(partitions)])
            if len(known) != partitions:
                raise TopicMismatch(
                    f"topic {topic!r} has {len(known)} partitions, {partitions} were asked for"
                )

    def topics(self) -> dict[str, int]:
        with self._store.changed:
            self._check_open()
            return self._counts()

    def partitions(self, topic: str) -> int:
        with self._store.changed:
            self._check_open()
            return len(self._store.topics.get(topic, ()))

    # -- writing

    def submit(self, topic: str, partition: int, records: Sequence[NewRecord]) -> Future[int]:
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()  # so that cancel() cannot promise what append has done
        try:
            offset = self._append(topic, partition, records)
        except LogError as error:
            future.set_exception(error)
        else:
            future.set_result(offset)
        return future

    def _append(self, topic: str, partition: int, records: Sequence[NewRecord]) -> int:
        check_records(records, self._max_record_bytes)
        with self._store.changed:
            kept = self._partition(topic, partition)
            first = kept.end
            for record in records:
                stamp = record.timestamp_ms
                if stamp is None:
                    stamp = max(kept.newest_ms, self._clock_ms())
                kept.newest_ms = max(kept.newest_ms, stamp)
                kept.records.append(
                    Record(topic, partition, kept.end, stamp, tuple(record.headers), record.value)
                )
            self._store.changed.notify_all()
        return first

    # -- reading

    def start(self, topic: str, partition: int) -> int:
        with self._store.changed:
            return self._partition(topic, partition).start

    def end(self, topic: str, partition: int) -> int:
        with self._store.changed:
            return self._partition(topic, partition).end

    def read(
        self,
        topic: str,
        partition: int,
        position: int,
        *,
        max_records: int = 500,
        max_bytes: int = 8 << 20,
    ) -> Batch:
        with self._store.changed:
            kept = self._partition(topic, partition)
            if not kept.start <= position <= kept.end:
                raise OffsetOutOfRange(topic, partition, position, kept.start, kept.end)
            at = position - kept.start
            candidates = kept.records[at : at + max(1, max_records)]
        records: list[Record] = []
        size = 0
        for record in candidates:
            size += len(record.value)
            if records and size > max_bytes:
                break
            records.append(record)
        return Batch(records, position + len(records))

    def wait(self, positions: Mapping[TopicPartition, int], timeout: timedelta) -> bool:
        deadline = time.monotonic() + timeout.total_seconds()
        with self._store.changed:
            while True:
                if any(self._partition(*place).end > position for place, position in positions.items()):
                    return True
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._store.changed.wait(left)

    def offset_at(self, topic: str, partition: int, timestamp_ms: int) -> int:
        with self._store.changed:
            kept = self._partition(topic, partition)
            for record in kept.records:
                if record.timestamp_ms >= timestamp_ms:
                    return record.offset
            return kept.end

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
    ) -> MemoryMembership:
        check_name("group", group)
        with self._store.changed:
            self._partition(topic, 0)
            share(1, replica, replicas)  # refuses a replica outside [0, replicas)
            for (other_group, other_topic, other), holder in self._store.shares.items():
                if (other_group, other_topic) != (group, topic):
                    continue
                if other == replica or holder.replicas != replicas:
                    raise ShareHeld(
                        f"group {group!r} on {topic!r}: share {replica}/{replicas} was asked for, but "
                        f"{holder.member or 'another member'} holds share {other}/{holder.replicas} "
                        f"of it since {holder.since_ms} (ms since 1970)"
                    )
            membership = MemoryMembership(self._store, group, topic, replica, replicas, member)
            self._store.shares[group, topic, replica] = membership
            self._memberships.append(membership)
        return membership

    def commit_hint(self, group: str, positions: Mapping[TopicPartition, int]) -> None:
        check_name("group", group)
        with self._store.changed:
            for place in positions:
                self._partition(*place)
            self._store.hints.setdefault(group, {}).update(positions)

    def hints(self, group: str) -> dict[TopicPartition, int]:
        with self._store.changed:
            self._check_open()
            return dict(self._store.hints.get(group, {}))

    def groups(self, beginning: str = "") -> list[str]:
        with self._store.changed:
            self._check_open()
            return sorted(group for group in self._store.hints if group.startswith(beginning))

    # -- retention

    def truncate_before(self, topic: str, partition: int, offset: int) -> int:
        with self._store.changed:
            kept = self._partition(topic, partition)
            if offset > kept.end:
                raise OffsetOutOfRange(topic, partition, offset, kept.start, kept.end)
            removed = max(0, offset - kept.start)
            del kept.records[:removed]
            kept.start += removed
            return kept.start

    # -- life

    def close(self) -> None:
        with self._store.changed:
            if self._closed:
                return
            self._closed = True
            for membership in self._memberships:
                membership.close()
            self._store.changed.notify_all()  # a wait() of this handle ends with LogClosed

    def _check_open(self) -> None:
        if self._closed:
            raise LogClosed("this log was closed; open it again to go on")

    def _counts(self) -> dict[str, int]:
        return {topic: len(partitions) for topic, partitions in self._store.topics.items()}

    def _partition(self, topic: str, partition: int) -> _Partition:
        self._check_open()
        partitions = self._store.topics.get(topic)
        if partitions is None or not 0 <= partition < len(partitions):
            raise no_such(topic, partition, self._counts())
        return partitions[partition]
