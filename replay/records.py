"""Reading a partition for people and audits: nothing stops it, nothing is left out.

A record that cannot be read, one of an unknown type and a damaged stretch of the log are entries like the others,
with a `problem` instead of an event. By position, never by count; nothing is committed and no group is joined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from streams import codec
from streams.codec import Unknown
from streams.errors import CodecError, CorruptRecord, OffsetOutOfRange, UnknownTopic
from streams.events import Event
from streams.log import Batch, EventLog, Record

MAX_BYTES = 8 << 20  # of one read
_new_tuple = tuple.__new__  # half the time of Entry(…), where many are made and few are looked at


class Entry(NamedTuple):
    """One place in a partition. Exactly one of `event` and `problem` is there; neither while it is sealed."""

    offset: int
    timestamp_ms: int  # 0 where the log itself is damaged
    event: Event | None
    problem: str = ""
    record: Record | None = None  # None where the log itself is damaged
    unknown: Unknown | None = None  # an event of a newer minor schema: its fields, verbatim


class TopicReader:
    """Follows one partition from `position` (default: its start).

    `lost` counts offsets that retention removed before they were read. `decode`: `sealed` leaves it to the caller.
    """

    def __init__(
        self,
        log: EventLog,
        topic: str,
        partition: int,
        position: int | None = None,
        *,
        decode: Callable[[Record], Entry] | None = None,
    ) -> None:
        self._log, self.topic, self.partition = log, topic, partition
        self._position = position
        self._decode = decode or entry_of
        self.lost = 0

    @property
    def position(self) -> int:
        if self._position is None:
            self._position = self._log.start(self.topic, self.partition)
        return self._position

    def catch_up(self) -> Iterator[Entry]:
        """Entries up to the end as it is now; none while the topic does not exist."""
        try:
            end = self._log.end(self.topic, self.partition)
            begin = self.position
        except UnknownTopic:
            return
        while begin < end:
            yield from self.read(end)
            if self.position <= begin:
                return
            begin = self.position

    def read(self, end: int, max_records: int = 500, max_bytes: int = MAX_BYTES) -> list[Entry]:
        """The next few entries below `end`."""
        try:
            batch = self._log.read(
                self.topic, self.partition, self.position, max_records=max_records, max_bytes=max_bytes
            )
        except CorruptRecord as damage:
            self._position = damage.next_offset
            return [Entry(damage.offset, 0, None, str(damage))]
        except OffsetOutOfRange as outside:
            if self.position >= outside.start:
                raise
            self.lost += outside.start - self.position
            self._position = outside.start
            return []
        self._advance(batch, end)
        decode = self._decode
        return [decode(record) for record in batch.records if record.offset < end]

    def _advance(self, batch: Batch, end: int) -> None:
        self._position = min(batch.next_position, max(end, self.position))


def sealed(record: Record) -> Entry:
    """An entry that is not decoded: for who needs no more than its place and its headers, or decodes later."""
    return _new_tuple(Entry, (record.offset, record.timestamp_ms, None, "", record, None))


def entry_of(record: Record) -> Entry:
    try:
        decoded = codec.decode(record)
    except CodecError as error:
        return Entry(record.offset, record.timestamp_ms, None, f"{type(error).__name__}: {error}", record)
    if isinstance(decoded, Unknown):
        problem = f"unknown type {decoded.type!r}"
        return Entry(record.offset, record.timestamp_ms, None, problem, record, decoded)
    return Entry(record.offset, record.timestamp_ms, decoded.event, "", record)


def entries(log: EventLog, topic: str, partition: int, position: int | None = None) -> Iterator[Entry]:
    """Every entry of a partition from `position` (default: the start) to the end as it is now."""
    return TopicReader(log, topic, partition, position).catch_up()
