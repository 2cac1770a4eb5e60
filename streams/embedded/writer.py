"""The writing side of one partition: appends under a lock that every process takes for one write at a time.

    lock · load the mark · take over or cut what a killed writer left beyond it · roll if the segment is full
         · write · fdatasync · store the mark · unlock

    folder   mark · lock · <base>.log · <base>.idx

The order "fdatasync, then mark" is the guarantee that readers never see what a crash can take back.
A segment that is not the last one is complete and durable: only the last one is ever cut.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from streams.embedded import segment as segments
from streams.embedded.files import (
    fdatasync,
    lock,
    storage_error,
    sync_folder,
    try_lock,
    unlock,
    write_at,
    write_new,
    write_parts,
)
from streams.embedded.mark import Mark, MarkDamaged, MarkState, create_mark
from streams.embedded.segment import (
    INDEX_ENTRY,
    INDEX_SPACING,
    MORE,
    NO_TIMESTAMP,
    RECORDS_AT,
    Prepared,
    index_name,
    list_segments,
    segment_name,
)
from streams.errors import OffsetOutOfRange

logger = logging.getLogger(__name__)


def create_partition(folder: Path) -> None:
    """Make the folder, its mark and its lock file; what is there stays."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "mark").exists():
        create_mark(folder / "mark")
    os.close(os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
    sync_folder(folder)


class PartitionWriter:
    """Appends of this process to one partition. Other processes may append between any two calls."""

    def __init__(
        self,
        folder: Path,
        mark: Mark,
        *,
        segment_bytes: int,
        sync: bool,
        lock_timeout_s: float,
        clock_ms: Callable[[], int],
    ) -> None:
        self._folder = folder
        self._mark = mark
        self._segment_bytes = segment_bytes
        self._sync = sync
        self._lock_timeout_s = lock_timeout_s
        self._clock_ms = clock_ms
        self._thread_lock = threading.Lock()
        self._lock_fd = -1
        self._base = -1  # of the open segment
        self._fd = -1
        self._index_fd = -1
        self._sequence = -1  # of the mark when this writer last let go
        self._indexed_at = 0  # position of the newest index entry
        self._index_end = 0  # bytes of the index

    # -- appending

    def append(self, appends: Sequence[Prepared]) -> tuple[int, int]:
        """Write as many of the appends as fit the segment, at least one, all or none.

        Returns the first offset and the number of appends that are now durable and visible.
        Raises LogFull or LogError when the disk refuses, LogUnavailable when the lock is not to be had.
        """
        with self._locked():
            state = self._catch_up()
            count, total = 1, appends[0].size
            if state.position > RECORDS_AT and state.position + total > self._segment_bytes:
                state = self._roll(state)
            room = self._segment_bytes - state.position
            while count < len(appends) and total + appends[count].size <= room:
                total += appends[count].size
                count += 1
            self._write(state, appends[:count])
            return state.end, count

    def _write(self, state: MarkState, appends: Sequence[Prepared]) -> None:
        encoded = segments.encode(
            appends,
            base=state.segment,
            offset=state.end,
            position=state.position,
            newest_ms=state.newest_ms,
            now_ms=self._clock_ms(),
            indexed_at=self._indexed_at,
        )
        try:
            write_parts(self._fd, encoded.parts, encoded.size, state.position)
            if self._sync:
                fdatasync(self._fd)
        except OSError as error:
            self._take_back(state.position)
            path = self._folder / segment_name(state.segment)
            raise storage_error(error, path, f"appending {encoded.size} bytes") from error
        if encoded.index:
            self._add_to_index(encoded.index)
            self._indexed_at = encoded.indexed_at
        self._store(
            state._replace(
                end=state.end + sum(len(append.records) for append in appends),
                position=state.position + encoded.size,
                newest_ms=encoded.newest_ms,
            )
        )

    def _take_back(self, position: int) -> None:
        """Remove a failed append. If even that fails, spoil its first head so that nobody adopts it."""
        try:
            os.ftruncate(self._fd, position)
        except OSError:
            try:
                os.pwrite(self._fd, bytes(segments.HEAD.size), position)
            except OSError as error:
                logger.error("%s: a failed append could not be taken back: %s", self._folder, error)

    def _add_to_index(self, entries: bytes) -> None:
        """The index only makes look-ups faster, so a full disk here costs speed and nothing else."""
        try:
            write_at(self._index_fd, entries, self._index_end)
            self._index_end += len(entries)
        except OSError as error:
            logger.warning("%s: index not written: %s", self._folder, error)

    def _store(self, state: MarkState) -> MarkState:
        state = state._replace(sequence=state.sequence + 1)
        self._mark.store(state)
        self._sequence = state.sequence
        return state

    # -- segments

    def _roll(self, state: MarkState) -> MarkState:
        """Go on in a new segment. The mark names it first: a crash in between leaves a segment to be made,
        never an unknown one."""
        state = self._store(state._replace(segment=state.end, position=RECORDS_AT))
        self._open(state)
        return state

    def _open(self, state: MarkState) -> None:
        """Open the mark's segment for writing, and make it if it is not there yet."""
        self._close_files()
        path = self._folder / segment_name(state.segment)
        try:
            if not path.exists():
                write_new(path, segments.encode_segment_header(state.segment, state.newest_ms))
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            segments.newest_before(self._fd, path)  # refuses a newer format
            index = self._folder / index_name(state.segment)
            self._index_fd = os.open(index, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            self._close_files()
            raise storage_error(error, path, "opening a segment") from error
        self._base = state.segment
        self._find_index_end(state)

    def _catch_up(self) -> MarkState:
        """The mark, with the files open at it and nothing beyond it. Called with the lock held."""
        state = self._mark.load()
        if self._base != state.segment:
            path = self._folder / segment_name(state.segment)
            if state.position > RECORDS_AT and not path.exists():
                return self._recover(state)
            self._open(state)
        if os.fstat(self._fd).st_size != state.position:
            return self._recover(state)
        if self._sequence != state.sequence:
            self._find_index_end(state)
        return state

    def _find_index_end(self, state: MarkState) -> None:
        """Where the index goes on, after others may have written it. Half an entry is written over."""
        self._index_end = os.fstat(self._index_fd).st_size // INDEX_ENTRY.size * INDEX_ENTRY.size
        self._indexed_at = self._last_indexed(state)

    def _last_indexed(self, state: MarkState) -> int:
        path = self._folder / index_name(state.segment)
        entry = segments.last_entry(path, state.segment, lambda entry: entry.position < state.position)
        return entry.position if entry else RECORDS_AT

    # -- recovery

    def recover(self) -> None:
        """Check the partition after a crash; nothing to do when a live writer has the lock, for it did.

        Keeps no file open: a process writes to few of the partitions that it checks.
        """
        with self._thread_lock:
            try:
                if not try_lock(self._open_lock()):
                    return
                bases = list_segments(self._folder)
                try:
                    state = self._mark.load()
                except MarkDamaged as error:
                    logger.error("%s; rebuilding it from the segments", error)
                    state = self._rebuild_mark(bases)
                if bases and (bases[-1] > state.segment or bases[0] > state.start):
                    self._recover(state)
                elif bases or state.position > RECORDS_AT:
                    self._catch_up()
            finally:
                self.release()

    def _rebuild_mark(self, bases: list[int]) -> MarkState:
        state = MarkState()
        if bases:
            state = MarkState(end=bases[-1], segment=bases[-1], start=bases[0])
        self._mark.reset(state)
        return self._mark.load()

    def _recover(self, state: MarkState) -> MarkState:
        """Take over whole, valid appends beyond the mark (a power cut may have lost the mark, not them), and
        cut the last segment at the first byte that is not one."""
        bases = list_segments(self._folder)
        if bases and bases[0] > state.start:
            state = state._replace(start=bases[0])
        if bases and bases[-1] > state.segment:
            state = state._replace(end=bases[-1], segment=bases[-1], position=RECORDS_AT)
        path = self._folder / segment_name(state.segment)
        size = path.stat().st_size if path.exists() else 0
        if size < state.position and state.position > RECORDS_AT:
            logger.error(
                "%s has %d bytes, but %d were acknowledged: the records lost are up to offset %d; "
                "going on in a new segment, reading them gives CorruptRecord",
                path, size, state.position, state.end - 1,
            )  # fmt: skip
            return self._roll(state)
        self._open(state)
        if size < RECORDS_AT:
            write_at(self._fd, segments.encode_segment_header(state.segment, state.newest_ms), 0)
            size = RECORDS_AT
        before = segments.newest_before(self._fd, path)
        state = state._replace(newest_ms=max(state.newest_ms, NO_TIMESTAMP if before is None else before))
        good = self._adopt(state, size)
        if good.position < size:
            logger.warning("%s: cut %d bytes of an unfinished append", path, size - good.position)
            os.ftruncate(self._fd, good.position)
        if self._sync:
            os.fsync(self._fd)
        return self._store(good)

    def _adopt(self, state: MarkState, size: int) -> MarkState:
        """The state after the last whole, valid append of the last segment; makes its index entries anew."""
        good, offset, newest_ms = state, state.end, state.newest_ms
        entries: list[tuple[int, bytes]] = []
        indexed_at = self._last_indexed(state)
        for head in segments.heads(self._fd, state.position, size):
            if head.offset != offset or not segments.check(self._fd, head):
                break
            if head.position - indexed_at >= INDEX_SPACING:
                raw = INDEX_ENTRY.pack(offset - state.segment, head.position, newest_ms)
                entries.append((head.position, raw))
                indexed_at = head.position
            offset += 1
            newest_ms = max(newest_ms, head.timestamp_ms)
            if not head.flags & MORE:
                good = good._replace(end=offset, position=head.stop, newest_ms=newest_ms)
        self._cut_index(state)
        self._add_to_index(b"".join(raw for position, raw in entries if position < good.position))
        self._find_index_end(good)
        if good.end > state.end:
            logger.info("%s: took over %d records beyond the mark", self._folder, good.end - state.end)
        return good

    def _cut_index(self, state: MarkState) -> None:
        kept, previous = 0, RECORDS_AT
        raw = os.pread(self._index_fd, os.fstat(self._index_fd).st_size, 0)
        for _, position, _ in INDEX_ENTRY.iter_unpack(raw[: len(raw) // INDEX_ENTRY.size * INDEX_ENTRY.size]):
            if not previous < position < state.position:
                break
            kept, previous = kept + 1, position
        os.ftruncate(self._index_fd, kept * INDEX_ENTRY.size)
        self._index_end = kept * INDEX_ENTRY.size

    def settle(self) -> None:
        """Take over or cut what a killed writer left."""
        with self._locked():
            self._catch_up()

    # -- retention

    def truncate_before(self, topic: str, partition: int, offset: int) -> int:
        """Remove the segments that lie wholly below `offset`; returns the new start."""
        with self._locked():
            state = self._catch_up()
            if offset > state.end:
                raise OffsetOutOfRange(topic, partition, offset, state.start, state.end)
            bases = list_segments(self._folder)
            start = max([base for base in bases if base <= offset], default=state.start)
            if start <= state.start:
                return state.start
            self._store(state._replace(start=start))  # first, so that nobody looks for what is going
            for base in bases:
                if base < start:
                    (self._folder / segment_name(base)).unlink(missing_ok=True)
                    (self._folder / index_name(base)).unlink(missing_ok=True)
            sync_folder(self._folder)
            return start

    # -- life

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._thread_lock:
            lock(self._open_lock(), self._folder / "lock", self._lock_timeout_s)
            try:
                yield
            finally:
                unlock(self._lock_fd)

    def _open_lock(self) -> int:
        if self._lock_fd < 0:
            self._lock_fd = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        return self._lock_fd

    def _close_files(self) -> None:
        for fd in (self._fd, self._index_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._index_fd = self._base = -1

    def close(self) -> None:
        with self._thread_lock:
            self.release()

    def release(self) -> None:
        """Close the files, and so the lock; the next append opens them again. Takes no thread's lock, for a
        fork may have left it held."""
        self._close_files()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
