"""The one interface that everything above the log uses.

A log is a set of topics; a topic is a fixed number of partitions; a partition is a total order of records with
dense offsets 0, 1, 2, … (a log may leave holes, as Kafka's transaction markers do: always read on from
`Batch.next_position`, never count records). A *position* is always the next offset to read.

Guarantees (checked by tests/contracts/test_event_log.py on every implementation):
  - `append` returns, or its future resolves, only when the records are durable by the log's setting and
    visible to every reader; the records of one call are contiguous and in order.
  - One writer's appends to a partition keep their order, also when they are pipelined through `submit`.
  - Readers never see a record that a crash of its writer could still take back.
  - `read` returns at once; `wait` is the only call that sleeps, and it has a deadline.

Example:
    >>> from streams.memory import MemoryLog
    >>> from streams.log import NewRecord
    >>> log = MemoryLog()
    >>> log.create_topic("demo.tasks", 2)
    >>> log.append("demo.tasks", 0, [NewRecord(b"hello")])
    0
    >>> log.read("demo.tasks", 0, 0).records[0].value
    b'hello'
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from typing import NamedTuple, TypeVar

from streams.errors import LogUnavailable, TopicMismatch, UnknownTopic

Headers = tuple[tuple[str, bytes], ...]

_Log = TypeVar("_Log", bound="EventLog")

DEFAULT_TIMEOUT = timedelta(seconds=30)


class TopicPartition(NamedTuple):
    topic: str
    partition: int


class NewRecord(NamedTuple):
    value: bytes
    headers: Headers = ()
    timestamp_ms: int | None = None  # None: the log's clock when it is appended


class Record(NamedTuple):
    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    headers: Headers
    value: bytes

    def header(self, name: str) -> bytes | None:
        """The first header of that name, or None."""
        for key, value in self.headers:
            if key == name:
                return value
        return None


class Batch(NamedTuple):
    """Result of one read. `next_position` is where the next read goes on, also when `records` is empty."""

    records: list[Record]
    next_position: int


class Membership(abc.ABC):
    """A role's share of the partitions. Lost when its process dies; released by close()."""

    @abc.abstractmethod
    def partitions(self) -> frozenset[int]:
        """The partitions that are this member's now. Call it often: on some logs it also is the heartbeat.

        One that was another's for a while since the last answer is missing from one answer before it is back.
        """

    @property
    @abc.abstractmethod
    def generation(self) -> int:
        """Of the last answer of `partitions()`: another number for another answer. What is new in it the owner
        rebuilds from its output; what is missing it forgets."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give the share back."""


class EventLog(abc.ABC):
    """An append-only log of partitioned topics. All methods are safe to call from several threads."""

    moves_shares: bool = False  # an elastic member is given the shares of absent ones

    # -- topics
    @abc.abstractmethod
    def create_topic(self, topic: str, partitions: int, *, kept: bool = False) -> None:
        """Create it, or check that it is as it should be (`check_topic`).

        `kept`: nothing of it is ever removed by age or size, whatever retention the log has for other topics.
        """

    def check_topic(self, topic: str, partitions: int, *, kept: bool = False) -> None:
        """Raise UnknownTopic when it does not exist, and TopicMismatch when it has another number of partitions or
        settings under which this log's promises would not hold, naming which."""
        found = self.partitions(topic)
        if not found:
            raise UnknownTopic(f"topic {topic!r} does not exist")
        if found != partitions:
            raise TopicMismatch(f"topic {topic!r} has {found} partitions, {partitions} were asked for")

    @abc.abstractmethod
    def topics(self) -> dict[str, int]:
        """Topic name → number of partitions, of all topics: many others may be on the same log, so this is for those
        who show them. A question about one topic is `partitions`."""

    def partitions(self, topic: str) -> int:
        """Number of partitions of that topic; 0 while it does not exist."""
        return self.topics().get(topic, 0)

    # -- writing
    @abc.abstractmethod
    def submit(self, topic: str, partition: int, records: Sequence[NewRecord]) -> Future[int]:
        """Queue an append; the future gives the offset of its first record once all of it is durable.

        Blocks only while the log's own budget of bytes in flight is spent. The future fails with LogFull,
        RecordTooLarge, UnknownTopic, LogUnavailable or LogClosed, and then nothing of this call is visible
        (LogUnavailable: nothing of it may ever be trusted, a retry can leave a duplicate).
        """

    def append(
        self,
        topic: str,
        partition: int,
        records: Sequence[NewRecord],
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> int:
        """Append durably and return the offset of the first record.

        Raises what `submit`'s future holds, and LogUnavailable when the deadline passes (the append may still land).
        """
        try:
            return self.submit(topic, partition, records).result(timeout.total_seconds())
        except FutureTimeout:
            raise LogUnavailable(
                f"{topic}/{partition}: {len(records)} records were not acknowledged within "
                f"{timeout.total_seconds():.0f} s; they may still be appended"
            ) from None

    def flush(self, timeout: timedelta = DEFAULT_TIMEOUT) -> dict[TopicPartition, int]:
        """Wait until everything submitted so far is durable or has failed. Returns what is neither when the time is
        over: records by partition (nothing, when all is well)."""
        return {}

    # -- reading
    @abc.abstractmethod
    def start(self, topic: str, partition: int) -> int:
        """Offset of the first kept record (equal to `end` when there is none)."""

    @abc.abstractmethod
    def end(self, topic: str, partition: int) -> int:
        """Position after the last visible record."""

    def recent_end(self, topic: str, partition: int) -> int:
        """An end that was true a moment ago (at most a second), without asking a broker: for pacing and display."""
        return self.end(topic, partition)

    @abc.abstractmethod
    def read(
        self,
        topic: str,
        partition: int,
        position: int,
        *,
        max_records: int = 500,
        max_bytes: int = 8 << 20,
    ) -> Batch:
        """Records from `position` on, at once, at least one if there is one (even if over max_bytes).

        Raises OffsetOutOfRange below `start` or above `end`, CorruptRecord when the record at `position` is
        damaged (records before a damaged one are returned first).
        """

    @abc.abstractmethod
    def wait(self, positions: Mapping[TopicPartition, int], timeout: timedelta) -> bool:
        """Sleep until any partition has a record at or after its position. False when the time is over."""

    @abc.abstractmethod
    def offset_at(self, topic: str, partition: int, timestamp_ms: int) -> int:
        """Offset of the first record whose timestamp is ≥ `timestamp_ms`, or the end position."""

    # -- groups
    @abc.abstractmethod
    def join(
        self,
        group: str,
        topic: str,
        *,
        replica: int,
        replicas: int,
        member: str = "",
        elastic: bool = False,
    ) -> Membership:
        """Take share `replica` of `replicas` of the topic's partitions for this group.

        `elastic`: where the log can tell who is alive (`moves_shares`), the shares of absent members go to those who
        are there, and back when they return. Other logs pass it over: an absent member's share then waits for it.
        Raises ShareHeld while another live member holds this share.
        """

    @abc.abstractmethod
    def commit_hint(self, group: str, positions: Mapping[TopicPartition, int]) -> None:
        """Remember positions for lag display. Never the truth about what was done; never waits for the disk."""

    @abc.abstractmethod
    def hints(self, group: str) -> dict[TopicPartition, int]:
        """The positions last remembered for that group."""

    @abc.abstractmethod
    def groups(self, beginning: str = "") -> list[str]:
        """Names, in order, of the groups that have hints and begin so. Others' groups cost nothing then."""

    # -- retention
    @abc.abstractmethod
    def truncate_before(self, topic: str, partition: int, offset: int) -> int:
        """Allow records below `offset` to be removed; returns the new start (whole segments go, so it may
        stay below `offset`). The caller answers for what readers still need (DESIGN §4, Poison)."""

    def settle(self, topic: str, partition: int) -> None:  # noqa: B027 - most logs have nothing to do
        """Decide what becomes of appends whose writer has died, or was told LogUnavailable by this handle: when this
        returns, each of them is visible or never will be. Raises LogUnavailable when that cannot be had in time.

        A broker decides it by itself; a log of files may leave it to its next writer.
        """

    # -- life
    @abc.abstractmethod
    def close(self) -> None:
        """Flush what was submitted (bounded by a deadline) and let go of every resource. Twice is harmless.

        Raises LogUnavailable, after letting go, when something submitted is not durable, saying how much of what.
        """

    def __enter__(self: _Log) -> _Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def share(partitions: int, replica: int, replicas: int) -> frozenset[int]:
    """The partitions of share `replica` of `replicas`: every partition belongs to exactly one share."""
    if not 0 <= replica < replicas:
        raise ValueError(f"replica must be in [0, {replicas}), got {replica}")
    return frozenset(range(replica, partitions, replicas))


def read_all(
    log: EventLog, topic: str, partition: int, position: int, end: int | None = None
) -> Iterable[Record]:
    """Every record from `position` up to `end` (default: the end when called), by position, never by count."""
    stop = log.end(topic, partition) if end is None else end
    while position < stop:
        batch = log.read(topic, partition, position)
        for record in batch.records:
            if record.offset >= stop:
                return
            yield record
        if batch.next_position <= position:
            return
        position = batch.next_position
