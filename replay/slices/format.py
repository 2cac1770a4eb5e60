"""The file format of a slice. Everything is little-endian.

    file    magic "MSSLICE\\n" · major u16 · minor u16 · blocks
    block   kind u8 · stored bytes u32 · opened bytes u32 · crc32 u32 of kind, both sizes and payload
            · payload, one zstd frame of MessagePack
    kinds   1 manifest (the first block, once)   2 records: [word, partition, offset, timestamp ms, headers, value] …
            3 a piece of a file: [name, bytes], in order   4 end: numbers of records and files, SHA-256 of all before it

A block is opened only when its checksum holds, and a slice counts only with its end: a file that was cut short or
changed is refused by name, and nothing of it is used.

>>> with SliceWriter(path, manifest) as writer:      # doctest: +SKIP
...     writer.record("ledger", record)
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from types import TracebackType
from typing import Any, NamedTuple

import msgspec
import zstandard

from streams.codec import decompress
from streams.embedded.files import sync_folder
from streams.errors import CodecError, MillstreamError
from streams.log import Headers, Record

MAGIC = b"MSSLICE\n"
MAJOR, MINOR = 1, 0
SUFFIX = ".mslice"
BLOCK_BYTES = 4 << 20  # of records, opened
MOST_BLOCK_BYTES = (1 << 30) + (16 << 20)  # the largest record that there may be, and its block
MANIFEST, RECORDS, FILE, END = 1, 2, 3, 4

_HEAD = Struct("<8sHH")
_BLOCK = Struct("<BIII")
_SIZES = Struct("<BII")
_LEVEL = 12


class SliceError(MillstreamError):
    """A slice that cannot be used; the message says which and why."""


class Manifest(msgspec.Struct, frozen=True):
    """What a slice says of itself."""

    run: str
    partitions: int
    schema: str  # of events
    source: str  # kind of log that it was taken from: "file", "kafka", "memory"
    made_ms: int
    chosen: str  # for people
    config: str  # TOML; paths in the run directory count from a placeholder
    fingerprint: str  # of the configuration that the slice was made with
    topics: dict[str, list[tuple[int, int]]]  # word → (start, end) of each partition
    files: dict[str, int] = {}  # path in the run directory → bytes


class SlicedRecord(NamedTuple):
    word: str
    partition: int
    offset: int
    timestamp_ms: int
    headers: Headers
    value: bytes


class FilePiece(NamedTuple):
    name: str
    content: bytes


class SliceWriter:
    """Writes `path` so that it is there whole or not at all."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        """Raises SliceError when there is such a file already."""
        self._path, self._draft = path, path.with_name(f".{path.name}.{os.getpid()}.new")
        if path.exists():
            raise SliceError(f"{path} exists: name a new file")
        self._file = open(self._draft, "wb")  # noqa: SIM115 - closed by __exit__
        self._digest = hashlib.sha256()
        self._waiting: list[Any] = []
        self._waiting_bytes = 0
        self.n_records = self.n_files = 0
        self._put(_HEAD.pack(MAGIC, MAJOR, MINOR))
        self._block(MANIFEST, manifest)

    def record(self, word: str, record: Record) -> None:
        """Records of a partition come in order."""
        item = (word, record.partition, record.offset, record.timestamp_ms, record.headers, record.value)
        self._waiting.append(item)
        self._waiting_bytes += len(record.value) + 100
        self.n_records += 1
        if self._waiting_bytes >= BLOCK_BYTES:
            self._flush()

    def file(self, name: str, path: Path) -> None:
        self._flush()
        self.n_files += 1
        with open(path, "rb") as file:
            piece = file.read(BLOCK_BYTES)
            self._block(FILE, (name, piece))
            while piece := file.read(BLOCK_BYTES):
                self._block(FILE, (name, piece))

    def _flush(self) -> None:
        if self._waiting:
            self._block(RECORDS, self._waiting)
        self._waiting, self._waiting_bytes = [], 0

    def _block(self, kind: int, content: Any) -> None:
        opened = msgspec.msgpack.encode(content)
        stored = zstandard.ZstdCompressor(level=_LEVEL).compress(opened)
        sizes = _SIZES.pack(kind, len(stored), len(opened))
        crc = zlib.crc32(stored, zlib.crc32(sizes))
        self._put(_BLOCK.pack(kind, len(stored), len(opened), crc) + stored)

    def _put(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)

    def __enter__(self) -> SliceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._flush()
                self._block(END, (self.n_records, self.n_files, self._digest.hexdigest()))
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
                self._draft.replace(self._path)
                sync_folder(self._path.parent)
        finally:
            self._file.close()
            self._draft.unlink(missing_ok=True)


class SliceReader:
    """`manifest`, then `content()`: everything in order, one block in memory at a time."""

    def __init__(self, path: Path) -> None:
        """Raises SliceError for what is no slice, and for one of a newer format."""
        self._path = path
        self._file = open(path, "rb")  # noqa: SIM115 - closed by __exit__
        self._digest = hashlib.sha256()
        try:
            self._check_head()
            kind, opened = self._block()
            if kind != MANIFEST:
                raise SliceError(f"{path} is damaged: it does not begin with its manifest")
            self.manifest: Manifest = self._decoded(opened, Manifest)
        except BaseException:
            self._file.close()
            raise

    def content(self) -> Iterator[SlicedRecord | FilePiece]:
        """Raises SliceError at the first damage, and at the end when the slice is not whole."""
        n_records, names = 0, set()
        while True:
            digest = self._digest.hexdigest()
            kind, opened = self._block()
            if kind == RECORDS:
                for item in self._decoded(opened, list[SlicedRecord]):
                    n_records += 1
                    yield item
            elif kind == FILE:
                piece = self._decoded(opened, FilePiece)
                names.add(piece.name)
                yield piece
            elif kind == END:
                wanted = self._decoded(opened, tuple[int, int, str])
                if (n_records, len(names), digest) != wanted or self._file.read(1):
                    raise SliceError(f"{self._path} is damaged: its parts are not those that it was made of")
                return
            else:
                raise SliceError(f"{self._path} is damaged: a block of the unknown kind {kind}")

    def _check_head(self) -> None:
        raw = self._file.read(_HEAD.size)
        self._digest.update(raw)
        magic, major, minor = _HEAD.unpack(raw.ljust(_HEAD.size, b"\0"))
        if magic != MAGIC:
            raise SliceError(
                f"{self._path} is no slice of a run: it does not begin with {MAGIC.decode().strip()}"
            )
        if len(raw) < _HEAD.size:
            raise SliceError(f"{self._path} ends in its first bytes: it is truncated")
        if major > MAJOR:
            raise SliceError(
                f"{self._path} has slice format {major}.{minor}, this version reads up to {MAJOR}.x: update millstream"
            )

    def _block(self) -> tuple[int, bytes]:
        """(kind, opened payload) of the next block."""
        at = self._file.tell()
        head = self._file.read(_BLOCK.size)
        if len(head) < _BLOCK.size:
            raise SliceError(f"{self._path} ends at byte {at}, before its end block: it is truncated")
        kind, n_stored, n_opened, crc = _BLOCK.unpack(head)
        left = os.fstat(self._file.fileno()).st_size - self._file.tell()
        if n_stored > left:
            raise SliceError(
                f"{self._path} is truncated or damaged: the block at byte {at} says {n_stored} bytes, {left} follow"
            )
        stored = self._file.read(n_stored)
        if zlib.crc32(stored, zlib.crc32(_SIZES.pack(kind, n_stored, n_opened))) != crc:
            raise SliceError(f"{self._path} is damaged: the checksum of the block at byte {at} is wrong")
        self._digest.update(head + stored)
        try:
            return kind, decompress(stored, cap=min(n_opened, MOST_BLOCK_BYTES))
        except CodecError as error:
            raise SliceError(f"{self._path} is damaged: the block at byte {at}: {error}") from error

    def _decoded(self, opened: bytes, kind: Any) -> Any:
        try:
            return msgspec.msgpack.decode(opened, type=kind)
        except msgspec.MsgspecError as error:
            raise SliceError(f"{self._path} cannot be read: {error}") from error

    def __enter__(self) -> SliceReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
