"""Events to records and back.

    encode:  event ── MessagePack map ── zstd where it pays ──► NewRecord(value, headers)
    decode:  Record ──► Known(event) | Unknown(type, fields) | raises CodecError (→ dead letter)

    value:   the map                                        no `enc`
             zstd frame of the map                          enc: zstd
             zstd frame of the map's head ++ its last n bytes as they are     enc: zstd, raw: n

Headers (short ASCII, under 300 bytes): `schema` "major.minor", `type` the tag word, `id` uid or group id,
`by` the producer, `enc` "zstd" when the value is compressed, `raw` the bytes after the frame, in decimal. Readers
can route on them without opening the value.

The raw tail is a float32 log-prob column, last in its map: two thirds of a trajectory, of which zstd saves 5 %. Left
out of the frame it costs a copy instead of half the time of compressing and opening a trajectory.

An event may have MAX_EVENT_BYTES once it is opened, and only so many times what is stored of it (`cap_of`): a small
record never takes a gigabyte of a reader. encode keeps to what decode accepts, so nothing is written that cannot be
read; how large what is stored may be is the log's affair (streams/checks.py).

A higher major is refused (SchemaTooNew). A higher minor, an unknown field or an unknown type is passed over: the
first two decode as usual, the last comes back as Unknown, which stages count and replay shows. A lower major is
upcast step by step: register `upcasts[(major, type)]`, a function from that major's plain dict to the next one's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import zstandard

from streams import columns
from streams.checks import MOST_CLAIM_BYTES
from streams.claim_files import CLAIM, LOST
from streams.errors import ClaimLost, CodecError, OverCap, RecordTooLarge, SchemaTooNew
from streams.events import (
    EVENT_TYPES,
    SCHEMA_MAJOR,
    SCHEMA_MINOR,
    Event,
    TeacherScored,
    TrajectoryFinished,
)
from streams.log import NewRecord, Record

MAX_EVENT_BYTES = MOST_CLAIM_BYTES  # of one event, opened; what is stored is never larger
DEFAULT_CAP = 64 << 20  # bytes that any value may have once it is opened
_MOST_GROWTH = 32  # a larger one: so many times what is stored. Real columns grow 1.2 … 4 times
COMPRESS_FROM = 512  # bytes; smaller values gain nothing
# Measured on token columns: no level above 1 pays. Against level 1's own choice for a few kilobytes, a hash table of
# 2**12 entries is quicker to clear, and matches from 7 bytes on are fewer to code: a tenth of the time for 2 % of size.
_PARAMETERS = zstandard.ZstdCompressionParameters(compression_level=1, hash_log=12, min_match=7)
# The head of a value with a raw tail is a quarter of it, so leaving out the entropy coding of literals costs 1 … 2 % of
# the whole. At 1,800 tokens it saves 25 % of the head's compressing and 40 % of opening; at 8,000, 10 and 25 %.
_HEAD_PARAMETERS = zstandard.ZstdCompressionParameters(compression_level=-1, hash_log=12, min_match=5)

_SCHEMA_HEADER = ("schema", f"{SCHEMA_MAJOR}.{SCHEMA_MINOR}".encode())
_TYPE_HEADERS = {kind: ("type", tag.encode()) for tag, kind in EVENT_TYPES.items()}
_ZSTD_HEADER = ("enc", b"zstd")
_PRESENT_SCHEMA = _SCHEMA_HEADER[1]

Upcast = Callable[[dict[str, Any]], dict[str, Any]]


class Known(NamedTuple):
    event: Event


class Unknown(NamedTuple):
    """An event of a type that this reader does not know (a newer minor): shown, counted, passed over."""

    type: str
    fields: dict[str, Any]


Decoded = Known | Unknown

upcasts: dict[tuple[int, str], Upcast] = {}

_encoder = msgspec.msgpack.Encoder()
_decoders = {tag: msgspec.msgpack.Decoder(kind) for tag, kind in EVENT_TYPES.items()}
_local = threading.local()


def encode(event: Event, *, producer: str, timestamp_ms: int | None = None) -> NewRecord:
    """The record of one event. Large values are compressed.

    Raises RecordTooLarge for an event of more than MAX_EVENT_BYTES, and TypeError, ValueError or OverflowError for what
    has no form in the log.
    """
    value = _encoder.encode(event)
    headers = [_SCHEMA_HEADER, _TYPE_HEADERS[type(event)], ("by", producer.encode()[:64])]
    identity = getattr(event, "uid", "") or getattr(event, "group_id", "")
    if identity:
        headers.append(("id", identity.encode()[:120]))
    if len(value) > MAX_EVENT_BYTES:
        raise RecordTooLarge(
            f"{identity or type(event).__name__}: the event has {len(value)} bytes; no event may have more than "
            f"{MAX_EVENT_BYTES}, whatever the settings"
        )
    if len(value) >= COMPRESS_FROM:
        n_raw = _raw_bytes(event)
        head = value[: len(value) - n_raw]
        packed = (_head_compressor() if n_raw else _compressor()).compress(head)
        if len(packed) < len(head) and len(value) <= cap_of(len(packed) + n_raw):
            headers.append(_ZSTD_HEADER)
            if n_raw:
                headers.append(("raw", b"%d" % n_raw))
                packed += value[len(head) :]
            value = packed
    return NewRecord(value, tuple(headers), timestamp_ms)


def cap_of(stored: int) -> int:
    """Bytes that a stored value of this size may have once it is opened: a small record never takes a gigabyte."""
    return min(MAX_EVENT_BYTES, max(DEFAULT_CAP, _MOST_GROWTH * stored))


def decode(record: Record, *, cap: int | None = None) -> Decoded:
    """The event of one record. `cap`: bytes that it may have once it is opened (default: `cap_of` what is stored).

    Raises SchemaTooNew, OverCap, ClaimLost, or CodecError with what was wrong; the caller makes a dead letter of it.
    """
    headers = dict(record.headers)
    if CLAIM in headers:
        raise _without_value(headers)
    if cap is None:
        cap = cap_of(len(record.value))
    major = _major(headers.get("schema"))
    if major > SCHEMA_MAJOR:
        raise SchemaTooNew(
            f"schema {headers['schema'].decode('ascii', 'replace')} is newer than this reader's "
            f"{SCHEMA_MAJOR}.{SCHEMA_MINOR}: update millstream to read this log"
        )
    value = record.value
    encoding, raw = headers.get("enc", b""), headers.get("raw")
    if encoding == b"zstd":
        value = decompress(value, cap=cap) if raw is None else _join(value, raw, cap)
    elif encoding:
        raise CodecError(f"unknown content encoding {encoding[:32]!r}; known: zstd")
    elif raw is not None:
        raise CodecError(f"raw header {raw[:32]!r} on a value that is not compressed")
    tag = headers.get("type", b"").decode("ascii", "replace")
    if major < SCHEMA_MAJOR:
        return _decode_old(value, tag, major)
    decoder = _decoders.get(tag)
    try:
        if decoder is not None:
            return Known(decoder.decode(value))
        fields = msgspec.msgpack.decode(value)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise CodecError(f"{tag or 'record without a type'}: {error}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("type"), str):
        raise CodecError("record without a type header and without a type field: not an event")
    if tag and fields["type"] != tag:
        raise CodecError(f"type header says {tag!r}, the value says {fields['type']!r}")
    if not tag and fields["type"] in _decoders:
        return _known(value, fields["type"])
    return Unknown(fields["type"], fields)


def _without_value(headers: dict[str, bytes]) -> CodecError:
    """Why a record has no value: it lies in a file, see streams/claims.py."""
    if LOST in headers:
        return ClaimLost(headers[LOST].decode("utf-8", "replace"))
    where = headers[CLAIM][:300].decode("utf-8", "replace")
    return ClaimLost(
        f"the value lies in a claims file ({where}), and this log was opened without its claims folder"
    )


def _raw_bytes(event: Event) -> int:
    """How many bytes at the end of an event's map are left out of the frame."""
    if isinstance(event, (TrajectoryFinished, TeacherScored)) and columns.holds_float32(event.logprobs):
        return len(event.logprobs)
    return 0


def _join(value: bytes, raw: bytes, cap: int) -> bytes:
    """The map of a frame and the `raw` bytes after it; both count against the cap."""
    n_raw = int(raw) if raw.isdigit() and len(raw) < 16 else -1
    if not 0 <= n_raw <= len(value):
        raise CodecError(f"raw header {raw[:32]!r} is no number of bytes within the value's {len(value)}")
    if n_raw > cap:
        raise OverCap(f"value states {n_raw} raw bytes, the cap is {cap}")
    at = len(value) - n_raw  # bytes slices: for a few kilobytes quicker than memoryviews
    return decompress(value[:at], cap=cap - n_raw) + value[at:]


def decompress(data: bytes, *, cap: int = DEFAULT_CAP) -> bytes:
    """One whole zstd frame, nothing before or after it, at most `cap` bytes once opened.

    The stated size is checked before a byte is written; frames that state none are opened in bounded pieces.
    Raises OverCap, or CodecError for a truncated, trailing or damaged frame.
    """
    try:
        stated = zstandard.frame_content_size(data)
        if stated > cap:
            raise OverCap(f"value states {stated} bytes once opened, the cap is {cap}")
        if stated >= 0:
            return _decompressor().decompress(data, allow_extra_data=False)
        _check_unsized(data, cap)
        opened = zstandard.ZstdDecompressor().decompressobj()
        value = opened.decompress(data)
    except zstandard.ZstdError as error:
        raise CodecError(f"damaged zstd frame of {len(data)} bytes: {error}") from error
    if not opened.eof:
        raise CodecError(f"truncated zstd frame: {len(data)} bytes end before the frame does")
    if opened.unused_data:
        raise CodecError(f"{len(opened.unused_data)} bytes trail the zstd frame")
    return value


def _check_unsized(data: bytes, cap: int) -> None:
    """Stream through a frame that states no size and stop once it passes the cap."""
    total = 0
    with zstandard.ZstdDecompressor().stream_reader(data) as reader:
        while chunk := reader.read(1 << 20):
            total += len(chunk)
            if total > cap:
                raise OverCap(f"value grows beyond the cap of {cap} bytes")


def _known(value: bytes, tag: str) -> Known:
    try:
        return Known(_decoders[tag].decode(value))
    except (msgspec.MsgspecError, ValueError) as error:
        raise CodecError(f"{tag}: {error}") from error


def _decode_old(value: bytes, tag: str, major: int) -> Decoded:
    """Upcast a lower major one version at a time, then decode as today's."""
    try:
        fields = msgspec.msgpack.decode(value)
    except (msgspec.MsgspecError, ValueError) as error:
        raise CodecError(f"{tag}: {error}") from error
    if not isinstance(fields, dict):
        raise CodecError(f"{tag}: schema {major} record is no map")
    for version in range(major, SCHEMA_MAJOR):
        upcast = upcasts.get((version, tag))
        if upcast is not None:
            fields = upcast(fields)
            tag = fields.get("type", tag)
    if tag not in EVENT_TYPES:
        return Unknown(tag, fields)
    try:
        return Known(msgspec.convert(fields, EVENT_TYPES[tag]))
    except msgspec.ValidationError as error:
        raise CodecError(f"{tag}: upcast from schema {major} does not fit: {error}") from error


def _major(schema: bytes | None) -> int:
    if schema == _PRESENT_SCHEMA:
        return SCHEMA_MAJOR
    if schema is None:
        return SCHEMA_MAJOR  # written by hand, without headers: judged by its value alone
    try:
        return int(schema.split(b".", 1)[0])
    except ValueError:
        raise CodecError(f"schema header {schema[:32]!r} is not major.minor") from None


def _compressor() -> zstandard.ZstdCompressor:
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
    return _local.compressor


def _head_compressor() -> zstandard.ZstdCompressor:
    if not hasattr(_local, "head_compressor"):
        _local.head_compressor = zstandard.ZstdCompressor(compression_params=_HEAD_PARAMETERS)
    return _local.head_compressor


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    return _local.decompressor
