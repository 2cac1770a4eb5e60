"""Values of an entry by name, as plain Python: what `--where` and `--json` see.

Columns (token ids, log-probs, mask, the trainer's sums) are opened only when somebody asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from replay.records import Entry
from replay.texts import verbatim
from streams import columns
from streams.errors import CodecError
from streams.events import Event, StepMeasured, TrajectoryFinished, tag_of

# of the record, not of its event; `event.offset` is the event's own field of that name
PLACE_NAMES = ("partition", "offset", "timestamp_ms", "type", "headers", "problem", "event")
WITHOUT_EVENT = frozenset(
    ("partition", "offset", "timestamp_ms", "type", "headers")
)  # known before it is decoded

COLUMNS: dict[str, Callable[[bytes], Any]] = {
    "prompt_ids": columns.decode_ids,
    "response_ids": columns.decode_ids,
    "logprobs": columns.decode_logprobs,
    "loss_mask": columns.decode_mask,
}


def sums_of(event: StepMeasured) -> np.ndarray:
    """The sums of each sample, float64 [n_samples, len(names)]. Raises CodecError when their bytes do not fit."""
    if len(event.sums) != 8 * event.n_samples * len(event.names):
        raise CodecError(
            f"sums: {len(event.sums)} bytes are not {event.n_samples} samples of {len(event.names)} float64 values"
        )
    return np.frombuffer(event.sums, "<f8").reshape(event.n_samples, len(event.names))


def opened(event: Event, name: str) -> Any:
    """One field of an event, a column as a list. Raises CodecError for a damaged column, AttributeError."""
    value = getattr(event, name)
    if isinstance(event, TrajectoryFinished) and name in COLUMNS:
        return COLUMNS[name](value).tolist()
    if isinstance(event, StepMeasured) and name == "sums":
        return sums_of(event).tolist()
    return value


def plain(event: Event) -> dict[str, Any]:
    """All fields as plain values in the event's order: columns as lists, parts of events as mappings by name.

    A column that cannot be read becomes a text that says why and shows its bytes.
    """
    return {name: _plain_field(event, name) for name in event.__struct_fields__}


def _plain_field(event: Event, name: str) -> Any:
    try:
        return _named(opened(event, name))
    except CodecError as error:
        return f"<{error}> {verbatim(getattr(event, name))}"


def _named(value: Any) -> Any:
    """Structs as mappings, also those that the log stores as arrays."""
    if isinstance(value, msgspec.Struct):
        return {name: _named(getattr(value, name)) for name in value.__struct_fields__}
    if type(value) is list and value and isinstance(value[0], msgspec.Struct):
        return [_named(item) for item in value]
    if type(value) is dict and value:
        return {name: _named(inner) for name, inner in value.items()}
    return value


def value_at(entry: Entry, path: Sequence[str]) -> Any:
    """What lies at a path such as ("metadata", "level"); None where there is nothing.

    A path through a list gives the list of what its items hold there: `members.reward` is every member's reward.
    """
    first, rest = path[0], path[1:]
    record = entry.record
    if first == "partition":
        value = None if record is None else record.partition
    elif first == "offset":
        value = entry.offset
    elif first == "timestamp_ms":
        value = entry.timestamp_ms
    elif first == "type":
        value = type_of(entry)
    elif first == "headers":
        value = {} if record is None else {name: text_of(raw) for name, raw in record.headers}
    elif first == "problem":
        value = entry.problem or None
    elif first == "event":
        return _field(entry, rest) if rest else None
    else:
        return _field(entry, path)
    return inside(value, rest)


def type_of(entry: Entry) -> str | None:
    """The event's word, also of an unknown type or (by its header) of a record that is not decoded."""
    if entry.event is not None:
        return tag_of(entry.event)
    if entry.unknown is not None:
        return entry.unknown.type
    raw = entry.record.header("type") if entry.record is not None else None
    return None if raw is None else text_of(raw)


def _field(entry: Entry, path: Sequence[str]) -> Any:
    if entry.unknown is not None:
        return inside(entry.unknown.fields, path)
    event, name = entry.event, path[0]
    if event is None or name not in event.__struct_fields__:
        return None
    try:
        return inside(opened(event, name), path[1:])
    except CodecError:
        return None


def inside(value: Any, path: Sequence[str]) -> Any:
    """Follow a path into nested mappings, structs and lists."""
    for place, name in enumerate(path):
        if isinstance(value, Mapping):
            value = value.get(name)
        elif isinstance(value, msgspec.Struct):
            value = getattr(value, name) if name in value.__struct_fields__ else None
        elif isinstance(value, (list, tuple)):
            if not name.isdecimal():
                return [inside(item, path[place:]) for item in value]
            value = value[int(name)] if int(name) < len(value) else None
        else:
            return None
    return value


def text_of(raw: bytes) -> str:
    """Bytes as text, those that are none escaped."""
    return raw.decode("utf-8", "backslashreplace")
