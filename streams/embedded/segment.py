"""The format of segment files, and their index. Everything is little-endian.

    segment   <base offset, 20 digits>.log
      header  magic "MSLG" · major u16 · minor u16 · base offset i64 · newest timestamp before it i64 · crc32
      records one after the other, until the end of the file (or until the mark, in the last segment)
    record    length u32 · crc32 u32 · offset i64 · timestamp ms i64 · length of headers u16 · flags u16
              · headers (MessagePack array of [name, value] pairs; nothing when there are none) · value
    index     <base offset>.idx: one entry for every INDEX_SPACING bytes of records
      entry   offset - base u32 · position of the record u32 · newest timestamp before the record i64

`length` counts what follows the crc. The crc covers the same bytes, first headers and value, then offset to
flags: so the long part is done by the thread that submits, before the offset is known. A record whose MORE flag
is set is followed by more of the same append: recovery takes an append as a whole or not at all.
The index only makes look-ups faster: entries may be missing, and each is checked against the record.
"newest timestamp" is a running maximum over the partition, so that look-up by time stays exact when
writers give their own timestamps or clocks step back.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import msgspec

from streams.errors import LogError
from streams.log import Headers, Record

MAGIC = b"MSLG"
MAJOR, MINOR = 1, 0
MORE = 1  # flag: the next record belongs to the same append

HEADER = Struct("<4sHHqqI4x")
_HEADER_BODY = Struct("<4sHHqq")
_PREFIX = Struct("<II")
_FIXED = Struct("<qqHH")
HEAD = Struct("<IIqqHH")
INDEX_ENTRY = Struct("<IIq")

RECORDS_AT = HEADER.size  # position of a segment's first record
MIN_LENGTH = _FIXED.size  # smallest `length` of a record
INDEX_SPACING = 4096
NO_TIMESTAMP = -(1 << 63)  # before any record
_SCAN_BYTES = 64 << 10
_HEADERS_READ = 512  # enough for a head and usual headers

encode_headers = msgspec.msgpack.Encoder().encode
decode_headers = msgspec.msgpack.Decoder(Headers).decode

_new_tuple = tuple.__new__


NewBytes = tuple[int | None, bytes, bytes, int]  # timestamp, encoded headers, value, crc of these two


class Prepared(NamedTuple):
    """The records of one append, ready but for their offsets and timestamps."""

    records: list[NewBytes]
    size: int  # bytes on disk


class Encoded(NamedTuple):
    """Records ready to be written at one position."""

    parts: list[bytes]  # to be written one after the other
    size: int  # of all parts
    newest_ms: int
    index: bytes  # entries that belong to the records
    indexed_at: int  # position of the newest index entry


class Head(NamedTuple):
    """A record's head, as found by a scan."""

    position: int
    length: int
    offset: int
    timestamp_ms: int
    flags: int

    @property
    def stop(self) -> int:
        return self.position + _PREFIX.size + self.length


def segment_name(base: int) -> str:
    return f"{base:020d}.log"


def index_name(base: int) -> str:
    return f"{base:020d}.idx"


def list_segments(folder: Path) -> list[int]:
    """Base offsets of the segments in a partition's folder, ascending."""
    return sorted(int(name[:20]) for name in os.listdir(folder) if len(name) == 24 and name.endswith(".log"))


def encode_segment_header(base: int, newest_ms: int) -> bytes:
    body = _HEADER_BODY.pack(MAGIC, MAJOR, MINOR, base, newest_ms)
    return HEADER.pack(MAGIC, MAJOR, MINOR, base, newest_ms, zlib.crc32(body))


def newest_before(fd: int, path: Path) -> int | None:
    """The header's newest timestamp before this segment; None when the header is damaged.

    Raises LogError for a segment of a higher major format.
    """
    raw = os.pread(fd, HEADER.size, 0)
    if len(raw) < HEADER.size:
        return None
    magic, major, minor, _, newest_ms, crc = HEADER.unpack(raw)
    if magic != MAGIC or zlib.crc32(raw[: _HEADER_BODY.size]) != crc:
        return None
    if major > MAJOR:
        raise LogError(f"{path} has format {major}.{minor}; this version reads up to {MAJOR}.x")
    return newest_ms


def payload_crc(headers: bytes, value: bytes) -> int:
    return zlib.crc32(value, zlib.crc32(headers))


def encode(
    appends: Sequence[Prepared],
    *,
    base: int,
    offset: int,
    position: int,
    newest_ms: int,
    now_ms: int,
    indexed_at: int,
) -> Encoded:
    """Bytes of whole appends that start with `offset` at `position` of the segment `base`."""
    crc32, pack_fixed, pack_prefix = zlib.crc32, _FIXED.pack, _PREFIX.pack
    parts: list[bytes] = []
    index: list[bytes] = []
    begin = position
    for records, _ in appends:
        left = len(records)
        for timestamp_ms, headers, value, crc in records:
            left -= 1
            if position - indexed_at >= INDEX_SPACING:
                index.append(INDEX_ENTRY.pack(offset - base, position, newest_ms))
                indexed_at = position
            if timestamp_ms is None:
                timestamp_ms = newest_ms if newest_ms > now_ms else now_ms
            if timestamp_ms > newest_ms:
                newest_ms = timestamp_ms
            fixed = pack_fixed(offset, timestamp_ms, len(headers), MORE if left else 0)
            length = MIN_LENGTH + len(headers) + len(value)
            parts += (pack_prefix(length, crc32(fixed, crc)), fixed, headers, value)
            offset += 1
            position += 8 + length
    return Encoded(parts, position - begin, newest_ms, b"".join(index), indexed_at)


def decode(
    data: bytes, topic: str, partition: int, offset: int, max_records: int, max_bytes: int, out: list[Record]
) -> int:
    """Append the records at the start of `data`, the first with `offset`, to `out`; returns the bytes used.

    Stops before a record that is damaged, incomplete or not the next offset; the caller finds out which.
    """
    unpack_head, crc32, append, view = HEAD.unpack_from, zlib.crc32, out.append, memoryview(data)
    size, at, last_head = len(data), 0, len(data) - HEAD.size
    stop_offset = offset + max_records
    while at <= last_head and offset < stop_offset:
        length, crc, found, timestamp_ms, headers_length, _ = unpack_head(data, at)
        stop = at + 8 + length
        if stop > size or found != offset or length < MIN_LENGTH + headers_length:
            break
        if stop > max_bytes and out:
            break
        if crc32(view[at + 8 : at + 28], crc32(view[at + 28 : stop])) != crc:
            break
        value_at = at + 28 + headers_length
        headers = decode_headers(view[at + 28 : value_at]) if headers_length else ()
        append(_new_tuple(Record, (topic, partition, offset, timestamp_ms, headers, data[value_at:stop])))
        offset += 1
        at = stop
    return at


def read_one(
    fd: int, position: int, limit: int, topic: str, partition: int, offset: int, out: list[Record]
) -> int:
    """As `decode`, for one record that need not be read yet: its value is read once and never copied."""
    raw = os.pread(fd, min(_HEADERS_READ, limit - position), position)
    if len(raw) < HEAD.size:
        return 0
    length, crc, found, timestamp_ms, headers_length, _ = HEAD.unpack_from(raw)
    value_at = HEAD.size + headers_length
    if found != offset or length < MIN_LENGTH + headers_length or 8 + length > limit - position:
        return 0
    if len(raw) < value_at:
        raw = os.pread(fd, value_at, position)
    value = os.pread(fd, 8 + length - value_at, position + value_at)
    packed = raw[HEAD.size : value_at]
    if value_at + len(value) != 8 + length or zlib.crc32(raw[8:28], payload_crc(packed, value)) != crc:
        return 0
    headers = decode_headers(packed) if headers_length else ()
    out.append(Record(topic, partition, offset, timestamp_ms, headers, value))
    return 8 + length


def check(fd: int, head: Head) -> bool:
    """Whether the whole record of `head` is there and its checksum holds."""
    if head.length < MIN_LENGTH:
        return False
    raw = os.pread(fd, head.stop - head.position, head.position)
    if len(raw) < head.stop - head.position:
        return False
    length, crc, _, _, headers_length, _ = HEAD.unpack_from(raw)
    return (
        length == head.length
        and length >= MIN_LENGTH + headers_length
        and zlib.crc32(raw[8:28], zlib.crc32(memoryview(raw)[28:])) == crc
    )


def read_head(fd: int, position: int) -> Head | None:
    raw = os.pread(fd, HEAD.size, position)
    if len(raw) < HEAD.size:
        return None
    length, _, offset, timestamp_ms, _, flags = HEAD.unpack(raw)
    return Head(position, length, offset, timestamp_ms, flags)


def heads(fd: int, position: int, limit: int) -> Iterator[Head]:
    """Heads of the records from `position` up to `limit`, hopping by length; ends at the first that cannot be
    one. Checksums are not looked at."""
    chunk, chunk_at, step = b"", position, 512
    while position + HEAD.size <= limit:
        at = position - chunk_at
        if at + HEAD.size > len(chunk):
            chunk, chunk_at, at = os.pread(fd, step, position), position, 0
            step = _SCAN_BYTES  # the first record is often the one that is looked for
            if len(chunk) < HEAD.size:
                return
        length, _, offset, timestamp_ms, _, flags = HEAD.unpack_from(chunk, at)
        head = Head(position, length, offset, timestamp_ms, flags)
        if length < MIN_LENGTH or head.stop > limit:
            return
        yield head
        position = head.stop


class IndexEntry(NamedTuple):
    offset: int
    position: int
    newest_ms: int  # before the record


def last_entry(path: Path, base: int, holds: Callable[[IndexEntry], bool]) -> IndexEntry | None:
    """The last index entry for which `holds` is true; by bisection, so it must hold for a prefix of them."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        found: IndexEntry | None = None
        low, high = 0, os.fstat(fd).st_size // INDEX_ENTRY.size
        while low < high:
            middle = (low + high) // 2
            raw = os.pread(fd, INDEX_ENTRY.size, middle * INDEX_ENTRY.size)
            if len(raw) < INDEX_ENTRY.size:
                return found
            relative, position, newest_ms = INDEX_ENTRY.unpack(raw)
            entry = IndexEntry(base + relative, position, newest_ms)
            if holds(entry):
                found, low = entry, middle + 1
            else:
                high = middle
        return found
    finally:
        os.close(fd)
