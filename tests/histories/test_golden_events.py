"""Records that earlier versions of the schema wrote still decode to what they meant.

tests/histories/events-<major>.<minor>.jsonl holds one record of every event type as it lay in the log: its headers,
its value (base64) and its meaning (JSON). Files are only ever added: `python tests/histories/test_golden_events.py`
writes the file of the present schema if there is none.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streams import codec
from streams.events import EVENT_TYPES, SCHEMA_MAJOR, SCHEMA_MINOR, Event
from streams.log import Record
from tests.support.events import decoded

FOLDER = Path(__file__).parent
PRESENT = FOLDER / f"events-{SCHEMA_MAJOR}.{SCHEMA_MINOR}.jsonl"


def meaning(event: Event) -> Any:
    return json.loads(msgspec.json.encode(event))


def golden(path: Path) -> list[tuple[Record, Any]]:
    found = []
    for line in path.read_text("utf-8").splitlines():
        entry = json.loads(line)
        headers = tuple((name, base64.b64decode(value)) for name, value in entry["headers"])
        record = Record("run.topic", 0, 0, 0, headers, base64.b64decode(entry["value"]))
        found.append((record, entry["meaning"]))
    return found


def as_known_then(present, expected):
    """What is there now without the fields, at any depth, that nobody knew of then: of an array they are at its end."""
    if isinstance(expected, dict) and isinstance(present, dict):
        return {key: as_known_then(present[key], value) for key, value in expected.items()}
    if isinstance(expected, list) and isinstance(present, list) and len(expected) <= len(present):
        return [as_known_then(now, then) for now, then in zip(present, expected, strict=False)]
    return present


@pytest.mark.parametrize("path", sorted(FOLDER.glob("events-*.jsonl")), ids=lambda path: path.stem)
def test_records_of_every_schema_still_mean_what_they_meant(path):
    for record, expected in golden(path):
        present = meaning(decoded(record))
        # a field that came later has its default; everything that was there is unchanged
        assert as_known_then(present, expected) == expected


def test_the_present_schema_has_a_golden_record_of_every_event_type():
    assert {entry["type"] for _, entry in golden(PRESENT)} == set(EVENT_TYPES)


def example(kind: type[Any]) -> Any:
    """An event with every field filled, each value recognisable."""
    values: dict[str, Any] = {}
    for number, field in enumerate(msgspec.structs.fields(kind), start=1):
        values[field.name] = _value(msgspec.inspect.type_info(field.type), number, field.name)
    return kind(**values)


def _value(info: Any, number: int, name: str) -> Any:
    inspect = msgspec.inspect
    if isinstance(info, inspect.BoolType):
        return True
    if isinstance(info, inspect.IntType):
        return number
    if isinstance(info, inspect.FloatType):
        return number + 0.5
    if isinstance(info, inspect.BytesType):
        return bytes([number, 0, 255])
    if isinstance(info, inspect.ListType):
        return [_value(info.item_type, number, name)]
    if isinstance(info, inspect.DictType):
        return {f"{name}-key": _value(info.value_type, number, name)}
    if isinstance(info, inspect.TupleType):
        return tuple(_value(each, number + place, name) for place, each in enumerate(info.item_types))
    if isinstance(info, inspect.StructType):
        return example(info.cls)
    return f"{name} {number}"


def write_present() -> None:
    lines = []
    for tag in sorted(EVENT_TYPES):
        event = example(EVENT_TYPES[tag])
        made = codec.encode(event, producer="golden")
        headers = [[name, base64.b64encode(value).decode()] for name, value in made.headers]
        value = base64.b64encode(made.value).decode()
        lines.append(json.dumps({"headers": headers, "value": value, "meaning": meaning(event)}))
    PRESENT.write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    if PRESENT.exists():
        raise SystemExit(f"{PRESENT.name} is there already; golden files are never written again")
    write_present()
