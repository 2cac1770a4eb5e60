"""The mark of a partition: the commit point that readers obey, in a mapped file of 4 KiB.

A writer stores a new mark only after its records are durable, so what lies below the mark is never taken
back. Readers poll memory, not a file. Two slots are written in turn, each with a sequence number and a
checksum: a store that a crash cut short, or a reader saw half done, leaves the other slot valid.

    file  magic "MSMK" · zeros up to 64 · slot 0 (64 bytes) · slot 1 (64 bytes) · zeros
    slot  sequence i64 · end offset i64 · segment i64 · position in it i64 · start offset i64
          · newest timestamp i64 · crc32 of these i64 · 0
Both slots lie in one disk sector. The file needs no fsync: after a power cut an old mark may come back, and
recovery then takes over every whole append that lies beyond it.
"""

from __future__ import annotations

import mmap
import os
import time
import zlib
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from streams.embedded.files import write_at
from streams.embedded.segment import NO_TIMESTAMP, RECORDS_AT
from streams.errors import LogClosed

MAGIC = b"MSMK"
SIZE = 4096
_SLOTS_AT = 64
_SLOT = Struct("<6q")
_CRC = Struct("<q")


class MarkState(NamedTuple):
    sequence: int = 1
    end: int = 0  # next offset to be written
    segment: int = 0  # base offset of the last segment
    position: int = RECORDS_AT  # bytes of the last segment that are committed
    start: int = 0  # first kept offset
    newest_ms: int = NO_TIMESTAMP  # largest timestamp of any record


class MarkDamaged(Exception):
    """Neither slot of the mark is valid."""


def create_mark(path: Path, state: MarkState | None = None) -> None:
    """Write and sync the file; whole blocks, so that storing a mark never needs room on the disk."""
    words = _SLOT.pack(*(state or MarkState()))
    slot = words + _CRC.pack(zlib.crc32(words)) + bytes(8)
    content = (MAGIC.ljust(_SLOTS_AT, b"\0") + bytes(64) + slot).ljust(SIZE, b"\0")  # sequence 1: slot 1
    temporary = path.with_suffix(".new")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


class Mark:
    """One process's view of a mark file."""

    def __init__(self, path: Path, *, readonly: bool) -> None:
        """A writer fills up a short file in place, for recovery to rebuild; a reader refuses it."""
        with open(path, "rb" if readonly else "r+b") as file:
            size = os.fstat(file.fileno()).st_size
            if size < SIZE:
                if readonly:
                    raise MarkDamaged(f"{path} has {size} bytes, it needs {SIZE}")
                write_at(file.fileno(), bytes(SIZE - size), size)
            access = mmap.ACCESS_READ if readonly else mmap.ACCESS_WRITE
            self._map = mmap.mmap(file.fileno(), SIZE, access=access)
        self._path = path
        self._words = memoryview(self._map).cast("q")  # stores through it are aligned and 8 bytes wide
        self._seen = (b"", MarkState())  # one attribute, so that threads never mix two marks

    def load(self) -> MarkState:
        """The newest valid mark. Cheap when nothing changed: it is what a waiting reader polls."""
        try:
            raw = self._map[64:192]
        except ValueError:
            raise LogClosed(f"the log of {self._path} was closed") from None
        seen, state = self._seen
        if raw == seen:
            return state
        for _ in range(100):
            slots = [state for state in map(_decode, (raw[:64], raw[64:])) if state is not None]
            if slots:
                state = max(slots)
                self._seen = (raw, state)
                return state
            time.sleep(0.001)  # a writer stored twice while this copy was taken
            raw = self._map[64:192]
        raise MarkDamaged(f"{self._path}: neither slot is valid")

    def store(self, state: MarkState) -> None:
        """Commit. The caller holds the partition's lock and has made the records durable."""
        words = _SLOT.pack(*state)
        at = 8 + 8 * (state.sequence & 1)
        view = self._words
        for index, word in enumerate(state):
            view[at + index] = word
        view[at + 6] = zlib.crc32(words)
        self._seen = (self._map[64:192], state)  # the next load need not decode it

    def reset(self, state: MarkState) -> None:
        """Replace a damaged mark. In place, because other processes may have the file mapped."""
        self.store(state)
        self.store(state._replace(sequence=state.sequence + 1))

    def close(self) -> None:
        self._words.release()
        self._map.close()


def _decode(slot: bytes) -> MarkState | None:
    words = slot[: _SLOT.size]
    (crc,) = _CRC.unpack_from(slot, _SLOT.size)
    if zlib.crc32(words) != crc:
        return None
    state = MarkState._make(_SLOT.unpack(words))
    return state if state.sequence else None
