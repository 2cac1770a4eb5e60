"""Finding records by what their headers say, without opening their values.

A record's `id` and `type` headers are enough to pass it over; what is wanted is opened, the rest is not. What could
not be read (damage) is told to the caller: it may have been what was looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from replay.evidence import kept
from replay.records import MAX_BYTES, entry_of
from streams.errors import CorruptRecord, OffsetOutOfRange
from streams.events import RolloutFailed, TrajectoryFinished, tag_of
from streams.log import EventLog, Record

FINISHED, FAILED = tag_of(TrajectoryFinished), tag_of(RolloutFailed)
READ_RECORDS = 2000
CLOCKS_MS = 60_000  # by which the clocks of two machines may differ
AFTERWARDS_MS = 600_000  # how long after its end copies of a thing are looked for


class Window(NamedTuple):
    """Milliseconds since 1970 within which something is looked for; None: to the end of the topic."""

    begin_ms: int = 0
    end_ms: int | None = None


EVER = Window()


def around(begin_ms: int, end_ms: int | None, after_ms: int) -> Window:
    """From one moment to another (None: to the end), with room for clocks that differ and for copies after it."""
    return Window(max(0, begin_ms - CLOCKS_MS), None if end_ms is None else end_ms + after_ms)


def records_where(
    log: EventLog,
    topic: str,
    partition: int,
    is_wanted: Callable[[Record], bool],
    *,
    window: Window = EVER,
    tell: Callable[[str], None] = lambda note: None,
) -> Iterator[Record]:
    """Records whose headers are wanted, in order, of those that were appended within the window."""
    position, end = _range(log, topic, partition, window)
    while position < end:
        try:
            batch = log.read(topic, partition, position, max_records=READ_RECORDS, max_bytes=MAX_BYTES)
        except CorruptRecord as damage:
            stop = max(damage.next_offset, position + 1)
            tell(
                f"{topic}/{partition}: records {damage.offset} to {stop - 1} are damaged and may belong here"
            )
            position = stop
            continue
        except OffsetOutOfRange as outside:  # retention moved under us
            if position >= outside.start:
                raise
            position = outside.start
            continue
        for record in batch.records:
            if record.offset < end and is_wanted(record):
                yield record
        if batch.next_position <= position:
            return
        position = batch.next_position


def _range(log: EventLog, topic: str, partition: int, window: Window) -> tuple[int, int]:
    start, end = kept(log, topic, partition)
    if start == end:
        return start, end
    if window.begin_ms > 0:
        start = max(start, log.offset_at(topic, partition, window.begin_ms))
    if window.end_ms is not None:
        end = min(end, log.offset_at(topic, partition, window.end_ms))
    return start, end


def type_of(record: Record) -> str:
    return (record.header("type") or b"").decode("ascii", "replace")


def id_of(record: Record) -> str:
    """The uid or group id that a record carries; one without headers (written by hand) is opened for it."""
    identity = record.header("id")
    if identity is not None:
        return identity.decode("utf-8", "replace")
    if record.header("type") is not None:
        return ""
    event = entry_of(record).event
    return getattr(event, "uid", "") or getattr(event, "group_id", "")


def of_group(group_id: str) -> Callable[[Record], bool]:
    """Wants what carries this group's id or that of one of its samples."""
    prefix = group_id + "/"

    def is_wanted(record: Record) -> bool:
        identity = id_of(record)
        return identity == group_id or identity.startswith(prefix)

    return is_wanted


def place(word: str, partition: int, offset: int) -> str:
    return f"{word}/{partition}:{offset}"
