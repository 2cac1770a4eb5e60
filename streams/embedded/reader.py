"""The reading side of one partition. It takes no lock that a writer knows of, and writes nothing.

    load the mark · find the record by cursor or index · read up to the mark · check every checksum

A damaged record is an error that says where reading can go on, never a silent skip.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from pathlib import Path
from struct import pack

from streams.embedded import segment as segments
from streams.embedded.mark import Mark, MarkState
from streams.embedded.segment import INDEX_ENTRY, RECORDS_AT, index_name, list_segments, segment_name
from streams.errors import CorruptRecord, LogError, OffsetOutOfRange
from streams.log import Batch, Record

_READ_BYTES = 512 << 10  # one read of the disk, unless a record is larger
_LEAST_READ = 4096
_LARGE_RECORD = 64 << 10  # from here on records are read one by one, without a copy
_OPEN_SEGMENTS = 4
_CURSORS = 256


class PartitionReader:
    """Reads of one partition by this process; keeps a few segments open and remembers where reads ended."""

    def __init__(self, folder: Path, mark: Mark, topic: str, partition: int) -> None:
        self._folder = folder
        self._mark = mark
        self._topic, self._partition = topic, partition
        self._lock = threading.Lock()
        self._bases: list[int] = []
        self._fds: dict[int, int] = {}
        self._record_bytes = 1024  # of the last records read: a guess for the next read
        self._cursors: dict[int, tuple[int, int]] = {}  # offset -> (base, position)

    def read(self, position: int, max_records: int, max_bytes: int) -> Batch:
        with self._lock:
            for _ in range(3):
                state = self._mark.load()
                if not state.start <= position <= state.end:
                    raise OffsetOutOfRange(self._topic, self._partition, position, state.start, state.end)
                try:
                    return self._read(state, position, max(1, max_records), max_bytes)
                except FileNotFoundError:  # retention removed it between the mark and the open
                    self._bases = []
            raise self._damaged(state, position, state.segment, None, "its segment file is missing")

    def _read(self, state: MarkState, offset: int, max_records: int, max_bytes: int) -> Batch:
        records: list[Record] = []
        first = offset
        while offset < state.end and len(records) < max_records and max_bytes > 0:
            base, _following = self._segment_of(offset, state)
            fd = self._open(base)
            limit = self._limit(base, fd, state)
            at = self._locate(fd, base, offset, limit)
            if at is None:
                used = 0
            elif records and self._record_bytes > max_bytes:
                break
            else:
                used = self._read_some(fd, at, limit, offset, max_records - len(records), max_bytes, records)
            if used == 0 or at is None:
                if records:
                    break
                raise self._damaged(state, offset, base, at, "its checksum or its place is wrong")
            self._record_bytes = used // (first + len(records) - offset)
            offset = first + len(records)
            max_bytes -= used
            self._remember(offset, base, at + used)
        return Batch(records, offset)

    def _read_some(
        self, fd: int, at: int, limit: int, offset: int, max_records: int, max_bytes: int, out: list[Record]
    ) -> int:
        """Append records from byte `at` on to `out`, from one read of the disk; returns the bytes used."""
        used = 0
        if self._record_bytes < _LARGE_RECORD:
            size = min(limit - at, _READ_BYTES, max_bytes, (self._record_bytes + 64) * max_records)
            data = os.pread(fd, max(size, min(limit - at, _LEAST_READ)), at)
            used = segments.decode(data, self._topic, self._partition, offset, max_records, max_bytes, out)
        if used == 0:  # large, or larger than was guessed
            used = segments.read_one(fd, at, limit, self._topic, self._partition, offset, out)
        return used

    def offset_at(self, timestamp_ms: int) -> int:
        """Offset of the first record with that timestamp or a later one."""
        with self._lock:
            for _ in range(3):
                state = self._mark.load()
                if state.newest_ms < timestamp_ms or state.start == state.end:
                    return state.end
                try:
                    return self._offset_at(state, timestamp_ms)
                except FileNotFoundError:
                    self._bases = []
        return state.start

    def _offset_at(self, state: MarkState, timestamp_ms: int) -> int:
        bases = self._list(state)
        if state.position == RECORDS_AT and len(bases) > 1:
            bases = bases[:-1]  # empty; its file may not be there yet
        low, high = 0, len(bases) - 1  # the last segment with only older records before it
        while low < high:
            middle = (low + high + 1) // 2
            path = self._folder / segment_name(bases[middle])
            before = segments.newest_before(self._open(bases[middle]), path)
            if before is not None and before < timestamp_ms:
                low = middle
            else:
                high = middle - 1
        for base in bases[low:]:
            fd = self._open(base)
            limit = self._limit(base, fd, state)
            path = self._folder / index_name(base)
            entry = segments.last_entry(
                path,
                base,
                lambda entry, limit=limit: entry.position < limit and entry.newest_ms < timestamp_ms,
            )
            offset, at = self._trusted(fd, base, entry)
            for head in segments.heads(fd, at, limit):
                if head.offset != offset:
                    break
                if head.timestamp_ms >= timestamp_ms:
                    return offset
                offset, at = offset + 1, head.stop
            if at < limit:
                return offset  # a damaged record: reading it says so
        return state.end

    # -- finding records

    def _list(self, state: MarkState) -> list[int]:
        """Base offsets of the kept segments."""
        if not self._bases or self._bases[-1] != state.segment or self._bases[0] < state.start:
            kept = {base for base in list_segments(self._folder) if state.start <= base <= state.segment}
            self._bases = sorted(kept | {state.segment})
        return self._bases

    def _segment_of(self, offset: int, state: MarkState) -> tuple[int, int]:
        """Base of the segment that holds the offset, and of the next one (the end, in the last)."""
        bases = self._list(state)
        index = max(0, bisect_right(bases, offset) - 1)
        return bases[index], bases[index + 1] if index + 1 < len(bases) else state.end

    def _limit(self, base: int, fd: int, state: MarkState) -> int:
        return state.position if base == state.segment else os.fstat(fd).st_size

    def _open(self, base: int) -> int:
        fd = self._fds.get(base)
        if fd is None:
            if len(self._fds) >= _OPEN_SEGMENTS:
                os.close(self._fds.pop(next(iter(self._fds))))
            path = self._folder / segment_name(base)
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                segments.newest_before(fd, path)  # refuses a newer format
            except LogError:
                os.close(fd)
                raise
            self._fds[base] = fd
        return fd

    def _remember(self, offset: int, base: int, at: int) -> None:
        if len(self._cursors) >= _CURSORS:
            del self._cursors[next(iter(self._cursors))]
        self._cursors[offset] = (base, at)

    def _trusted(self, fd: int, base: int, entry: segments.IndexEntry | None) -> tuple[int, int]:
        """Offset and position to scan from: the index entry if a record stands there, else the beginning."""
        if entry is not None:
            head = segments.read_head(fd, entry.position)
            if head is not None and head.offset == entry.offset and segments.check(fd, head):
                return entry.offset, entry.position
        return base, RECORDS_AT

    def _locate(self, fd: int, base: int, offset: int, limit: int) -> int | None:
        """Position of the record; None when damage before it or in it hides where it begins."""
        if offset == base:
            return RECORDS_AT
        known = self._cursors.get(offset)
        if known is not None and known[0] == base and known[1] < limit:
            return known[1]
        path = self._folder / index_name(base)
        entry = segments.last_entry(path, base, lambda entry: entry.offset <= offset)
        found, at = self._trusted(fd, base, entry)
        for head in segments.heads(fd, at, limit):
            if head.offset != found:
                break
            if found == offset:
                return head.position
            found, at = found + 1, head.stop
        if found == offset:
            return at
        return _search(fd, at, limit, offset)

    def _damaged(self, state: MarkState, offset: int, base: int, at: int | None, what: str) -> CorruptRecord:
        """The error for a record that cannot be read, with the next one that can."""
        path = self._folder / segment_name(base)
        where = f"{what}, {path.name}" + ("" if at is None else f" at byte {at}")
        _, following = self._segment_of(offset, state)
        fd = self._fds.get(base)
        if fd is not None:
            following = self._next_readable(fd, base, offset, at, self._limit(base, fd, state), following)
        return CorruptRecord(self._topic, self._partition, offset, following, where)

    def _next_readable(
        self, fd: int, base: int, offset: int, at: int | None, limit: int, following: int
    ) -> int:
        """By its length, else by a search for the next offset, else by the index, else the next segment."""
        head = None if at is None else segments.read_head(fd, at)
        if head is not None and segments.MIN_LENGTH <= head.length <= limit - head.position:
            if head.stop == limit and offset + 1 == following:
                return following
            after = segments.read_head(fd, head.stop)
            if after is not None and after.offset == offset + 1 and segments.check(fd, after):
                self._remember(offset + 1, base, after.position)
                return offset + 1
        position = _search(fd, RECORDS_AT if at is None else at + 1, limit, offset + 1)
        if position is not None:
            self._remember(offset + 1, base, position)
            return offset + 1
        raw = b""
        path = self._folder / index_name(base)
        if path.exists():
            raw = path.read_bytes()
        for relative, entry_at, _ in INDEX_ENTRY.iter_unpack(raw[: len(raw) // 16 * 16]):
            if base + relative > offset and entry_at < limit:
                head = segments.read_head(fd, entry_at)
                if head is not None and head.offset == base + relative and segments.check(fd, head):
                    self._remember(head.offset, base, entry_at)
                    return head.offset
        return following

    # -- life

    def close(self) -> None:
        with self._lock:
            self.release()

    def release(self) -> None:
        """Close the files. Takes no thread's lock, for a fork may have left it held."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()


def _search(fd: int, position: int, limit: int, offset: int) -> int | None:
    """Position of the valid record with that offset at or after `position`, by looking for its bytes."""
    pattern, step = pack("<q", offset), 1 << 20
    while position < limit:
        data = os.pread(fd, min(step + segments.HEAD.size, limit - position), position)
        found = data.find(pattern, 8)
        while found >= 0:
            head = segments.read_head(fd, position + found - 8)
            if head is not None and head.stop <= limit and segments.check(fd, head):
                return head.position
            found = data.find(pattern, found + 1)
        position += step
    return None
