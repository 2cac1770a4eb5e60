"""What stands in an imported log where a slice has no record: offsets are references, so they must not move.

A partition has no holes, only a start. So below the first record of a slice nothing is kept, as after retention, and
between two records there are fillers: events of a type that no reader knows, which each passes over and counts, and
which tail shows as what they are.
"""

from __future__ import annotations

import msgspec

from replay.records import Entry
from streams.events import SCHEMA_MAJOR, SCHEMA_MINOR
from streams.log import NewRecord

LEFT_OUT = "left_out"

_HEADERS = (("schema", f"{SCHEMA_MAJOR}.{SCHEMA_MINOR}".encode()), ("type", LEFT_OUT.encode()))
_VALUE = msgspec.msgpack.encode({"type": LEFT_OUT})


def filler(timestamp_ms: int) -> NewRecord:
    """The record of one offset that the slice does not have."""
    return NewRecord(_VALUE, _HEADERS, timestamp_ms)


def is_left_out(entry: Entry | None) -> bool:
    return entry is not None and entry.unknown is not None and entry.unknown.type == LEFT_OUT
