"""A window on one partition: what was read ahead of its readers, and a little of what they have read already.

    begin ─────────── read ─────────────── next_position
      │ kept behind     │ read ahead             │ the next fetch brings what is from here on
      └ a second reader of the partition, close behind the first, finds its records here

Not safe for threads: Reader's lock is held around every call. Times are seconds of the monotonic clock.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import attrgetter

from streams.log import Batch, Record

RECORD_OVERHEAD = 400  # bytes that a record takes in memory beside its value and headers

_offset = attrgetter("offset")


def record_bytes(record: Record) -> int:
    """Value and headers."""
    size = len(record.value)
    for name, content in record.headers:
        size += len(name) + len(content)
    return size


def cut(
    records: Sequence[Record], totals: Sequence[int], first: int, max_records: int, max_bytes: int
) -> int:
    """Where a read that begins at index `first` ends: within its limits, and never without a record.

    `totals[i]` is the number of bytes of records[: i + 1], from any origin.
    """
    stop = min(len(records), first + max(1, max_records))
    before = totals[first] - record_bytes(records[first])
    if totals[stop - 1] - before > max_bytes:
        stop = max(first + 1, bisect_right(totals, before + max_bytes, first, stop))
    return stop


class Feed:
    def __init__(self, position: int, now: float) -> None:
        self.used_at = now
        self.waiters = 0  # calls of wait() that hang on it now: it is not dropped
        self.live = False  # its consumer has had the time to begin with it
        self.paused = False  # full
        self.gone = False  # dropped, because its position is none (any more)
        self.jump(position, now)

    def jump(self, position: int, now: float) -> None:
        """Go on from another place, with nothing buffered."""
        self.begin = self.next_position = position
        self.since = now
        self.came_at = self.checked_at = (
            now  # when anything came, and when the end was asked for because nothing did
        )
        self.missed_since: float | None = None  # since when something is known to be there that did not come
        self.overtaken_at: float | None = None  # when a reader was first further on than next_position
        self.stopped = False  # a damaged record stands at next_position: nothing more comes
        self._records: list[Record] = []
        self._totals: list[int] = []  # bytes of all records up to and with this one
        self._read = 0  # index of the first record that no reader has had

    def is_left_behind(self, now: float, patience_s: float) -> bool:
        """A reader is further on: what is buffered is of no use. True when that has been so for `patience_s`, and when
        more has come since then, which did not reach the reader either."""
        self.begin, self._records, self._totals, self._read = self.next_position, [], [], 0
        if self.overtaken_at is None:
            self.overtaken_at = now
        return self.came_at > self.overtaken_at or now - self.overtaken_at > patience_s

    def extend(self, records: Sequence[Record], next_position: int, now: float) -> None:
        self.came_at, self.missed_since = now, None
        total = self._totals[-1] if self._totals else 0
        for record in records:
            total += record_bytes(record)
            self._totals.append(total)
        self._records += records
        self.next_position = next_position

    @property
    def ahead_bytes(self) -> int:
        """Memory taken by what nobody has read yet."""
        unread = len(self._records) - self._read
        if not unread:
            return 0
        before = (
            self._totals[self._read - 1] if self._read else self._totals[0] - record_bytes(self._records[0])
        )
        return self._totals[-1] - before + unread * RECORD_OVERHEAD

    def take(self, position: int, max_records: int, max_bytes: int) -> Batch | None:
        """The records from `position` on; None where the window has nothing to say about it."""
        if not self.begin <= position < self.next_position:
            return None
        records, first = self._records, self._read
        expected = first < len(records) and position <= records[first].offset
        if not (expected and (first == 0 or records[first - 1].offset < position)):
            first = bisect_left(records, position, key=_offset)
        if first == len(records):
            return Batch([], self.next_position)
        stop = cut(records, self._totals, first, max_records, max_bytes)
        taken = records[first:stop]
        self._read = max(self._read, stop)
        return Batch(taken, self.next_position if stop == len(records) else taken[-1].offset + 1)

    def forget_read(self, keep_bytes: int) -> None:
        """Let go of what has been read, but for its last `keep_bytes` or half of them (so that it is seldom done)."""
        if not self._read:
            return
        first = self._totals[0] - record_bytes(self._records[0])
        read = self._totals[self._read - 1]
        if read - first + self._read * RECORD_OVERHEAD <= keep_bytes:
            return
        count = bisect_left(self._totals, read - keep_bytes // 2, 0, self._read)
        count = max(count + 1, self._read - keep_bytes // (2 * RECORD_OVERHEAD))
        count = min(count, self._read)
        self.begin = self._records[count - 1].offset + 1
        del self._records[:count]
        del self._totals[:count]
        self._read -= count
