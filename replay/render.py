"""Showing one entry: a line for people, a JSON object for programs, or kcat's format string.

Binary is never printed raw: columns are decoded or counted, control characters are escaped. What cannot be read, what
is of an unknown type and what lies in a dead letter is shown verbatim.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any

import msgspec

from replay.records import Entry
from streams import columns
from streams.errors import CodecError, ConfigError
from streams.events import (
    BatchCut,
    DeadLetter,
    Event,
    GroupCompleted,
    Metrics,
    TrajectoryFinished,
    WeightsPublished,
    tag_of,
)

Fields = dict[str, Any]

LONGEST_TEXT = 60  # characters of one value in a line
SHOWN_ITEMS = 4  # of a list in a line
VERBATIM_BYTES = 2000  # of what cannot be read; JSON has all of it

_COLUMNS: dict[str, Callable[[bytes], Any]] = {
    "prompt_ids": columns.decode_ids,
    "response_ids": columns.decode_ids,
    "logprobs": columns.decode_logprobs,
    "loss_mask": columns.decode_mask,
}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\"}


# ---------------------------------------------------------------- a line
def line(word: str, partition: int, entry: Entry) -> str:
    """`time topic/partition:offset type name=value …`, without a newline. `word`: the topic as it shall be called."""
    head = f"{_time(entry.timestamp_ms)} {word}/{partition}:{entry.offset}"
    if entry.event is not None:
        return f"{head} {tag_of(entry.event)} {_pairs(_summary(entry.event))}".rstrip()
    if entry.unknown is not None:
        return f"{head} ?{entry.unknown.type} {json.dumps(entry.unknown.fields, default=_verbatim, ensure_ascii=False)}"
    raw = entry.record.value if entry.record is not None else b""
    return f"{head} UNREADABLE {entry.problem} raw={_verbatim(raw)}"


def _summary(event: Event) -> Fields:
    """What is worth a place in the line, in order."""
    special = _SUMMARIES.get(type(event))
    return special(event) if special else _said(event)


def _said(event: Event) -> Fields:
    """Every field that is not at its default."""
    fields: Fields = {}
    for field in msgspec.structs.fields(event):
        value = getattr(event, field.name)
        default = field.default if field.default is not msgspec.NODEFAULT else None
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        if field.required or value != default:
            fields[field.name] = value
    return fields


def _trajectory(event: TrajectoryFinished) -> Fields:
    fields = _said(event)
    for name in ("group_id", "seq", "index", "attempt", "n_samples", "progress", "loss_mask"):
        fields.pop(name, None)
    fields["versions"] = ",".join(
        f"e{epoch}v{version}×{n_tokens}" for epoch, version, n_tokens in event.versions
    )
    for name, decode in _COLUMNS.items():
        if name in fields:
            fields[name] = _decoded(decode, fields[name])
    return fields


def _cut(event: BatchCut) -> Fields:
    members = [member for group in event.groups for member in group.members]
    ages = [member.staleness for member in members if member.staleness >= 0]
    return {
        "step": event.step,
        "version": event.version,
        "epoch": event.epoch,
        "limit": event.limit,
        "groups": [group.group_id for group in event.groups],
        "samples": len(members),
        "tokens": sum(member.n_trainable_tokens for member in members),
        "reward": round(sum(member.reward for member in members) / max(1, len(members)), 4),
        "staleness": f"{min(ages)}..{max(ages)}" if ages else "-",
        "drops": [f"{drop.group_id}:{drop.reason}" for drop in event.drops],
        "duplicates": event.duplicates,
        "frontier": event.frontier,
        "positions": event.positions,
    } | ({"last": True} if event.last else {})


def _completed(event: GroupCompleted) -> Fields:
    return {
        "group_id": event.group_id,
        "seq": event.seq,
        "members": f"{len(event.members)}/{event.n_samples}",
        "rewards": [member.reward for member in event.members],
        "tokens": sum(member.n_response_tokens for member in event.members),
        "frontier": event.frontier,
    }


def _published(event: WeightsPublished) -> Fields:
    return _said(event) | {"digest": event.digest[:16], "tensors": len(event.tensors)}


def _metrics(event: Metrics) -> Fields:
    step = {"step": event.step} if event.step >= 0 else {}
    return {
        "source": event.source,
        **step,
        **{name: round(value, 6) for name, value in sorted(event.values.items())},
    }


def _letter(event: DeadLetter) -> Fields:
    return {
        "at": f"{event.topic}/{event.partition}:{event.offset}",
        "stage": event.stage,
        "reason": event.reason,
        "detail": event.detail,
        "headers": dict(event.raw_headers),
        "raw": _Verbatim(_verbatim(event.raw)),
    }


_SUMMARIES: dict[type[Event], Callable[[Any], Fields]] = {
    TrajectoryFinished: _trajectory,
    BatchCut: _cut,
    GroupCompleted: _completed,
    WeightsPublished: _published,
    Metrics: _metrics,
    DeadLetter: _letter,
}


class _Verbatim(str):
    """A text that is shown whole."""


def _pairs(fields: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={_short(value)}" for name, value in fields.items())


def _short(value: Any) -> str:
    """One value, abbreviated."""
    if isinstance(value, _Verbatim):
        return value
    if isinstance(value, bytes):
        return _verbatim(value) if len(value) <= LONGEST_TEXT else f"<{len(value)} bytes>"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return "{" + _pairs({_text(str(name)): inner for name, inner in value.items()}) + "}"
    if isinstance(value, msgspec.Struct):
        return "(" + ",".join(_short(getattr(value, name)) for name in value.__struct_fields__) + ")"
    if isinstance(value, (list, tuple)):
        shown = ",".join(_short(item) for item in value[:SHOWN_ITEMS])
        return f"[{shown}]" if len(value) <= SHOWN_ITEMS else f"[{shown},…{len(value)}]"
    return str(value)


def _text(text: str) -> str:
    """Quoted when it has blanks or anything that a terminal would act on."""
    if len(text) > LONGEST_TEXT:
        text = text[: LONGEST_TEXT - 1] + "…"
    plain = text.isprintable() and text and not any(sign in text for sign in ' "={}[]')
    return text if plain else json.dumps(text, ensure_ascii=not text.isprintable())


def _verbatim(value: Any) -> str:
    if not isinstance(value, (bytes, bytearray, memoryview)):
        return str(value)
    raw = bytes(value)
    more = len(raw) - VERBATIM_BYTES
    return repr(raw[:VERBATIM_BYTES]) + (f"…+{more} bytes" if more > 0 else "")


def _time(timestamp_ms: int) -> str:
    moment = datetime.fromtimestamp(timestamp_ms / 1000, tz=timezone.utc)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{timestamp_ms % 1000:03d}Z"


# ---------------------------------------------------------------- JSON
def as_json(topic: str, partition: int, entry: Entry) -> str:
    """The whole entry as one JSON object on one line; token columns as lists, other bytes in base64."""
    shown: Fields = {
        "topic": topic,
        "partition": partition,
        "offset": entry.offset,
        "timestamp_ms": entry.timestamp_ms,
        "headers": _headers(entry),
        "type": _type(entry),
    }
    if entry.event is not None or entry.unknown is not None:
        shown["event"] = _whole(entry)
    else:
        raw = entry.record.value if entry.record is not None else b""
        shown |= {"problem": entry.problem, "raw": base64.b64encode(raw).decode()}
    return msgspec.json.encode(shown).decode()


def _type(entry: Entry) -> str:
    if entry.event is not None:
        return tag_of(entry.event)
    return entry.unknown.type if entry.unknown is not None else ""


def _whole(entry: Entry) -> Any:
    if entry.unknown is not None:
        return msgspec.to_builtins(entry.unknown.fields)
    fields = msgspec.to_builtins(entry.event)
    fields.pop("type", None)
    if isinstance(entry.event, TrajectoryFinished):
        for name, decode in _COLUMNS.items():
            fields[name] = _decoded(decode, getattr(entry.event, name))
    return fields


def _decoded(decode: Callable[[bytes], Any], column: bytes) -> Any:
    try:
        return decode(column).tolist()
    except CodecError as error:
        return _Verbatim(f"<{error}> {_verbatim(column)}")


def _headers(entry: Entry) -> dict[str, str]:
    headers = entry.record.headers if entry.record is not None else ()
    return {name: value.decode("utf-8", "backslashreplace") for name, value in headers}


# ---------------------------------------------------------------- kcat's format
def formatter(template: str) -> Callable[[str, int, Entry], str]:
    """A function (topic, partition, entry) → text for a format such as `%t/%p:%o %s\\n`. Raises ConfigError.

    %t topic, %p partition, %o offset, %k id of the sample or group, %s the event as JSON, %S bytes of the stored
    value, %T milliseconds since 1970, %h headers, %% a percent sign; \\n \\t \\r \\0 \\\\ as in C.
    """
    parts = list(_parse(template))
    return lambda topic, partition, entry: "".join(
        part if isinstance(part, str) else part(topic, partition, entry) for part in parts
    )


def _parse(template: str):
    signs = iter(template)
    for sign in signs:
        if sign not in "%\\":
            yield sign
            continue
        code = next(signs, "")
        known = _CODES if sign == "%" else _ESCAPES
        if code not in known or not code:
            names = " ".join(sign + name for name in known)
            raise ConfigError(f"-f {template!r}: {sign + code!r} is unknown; known are {names}")
        yield known[code]


_CODES: dict[str, Any] = {
    "t": lambda topic, partition, entry: topic,
    "p": lambda topic, partition, entry: str(partition),
    "o": lambda topic, partition, entry: str(entry.offset),
    "k": lambda topic, partition, entry: _headers(entry).get("id", ""),
    "s": lambda topic, partition, entry: _payload(entry),
    "S": lambda topic, partition, entry: str(len(entry.record.value) if entry.record is not None else 0),
    "T": lambda topic, partition, entry: str(entry.timestamp_ms),
    "h": lambda topic, partition, entry: ",".join(
        f"{name}={value}" for name, value in _headers(entry).items()
    ),
    "%": "%",
}


def _payload(entry: Entry) -> str:
    if entry.event is None and entry.unknown is None:
        return _verbatim(entry.record.value if entry.record is not None else b"")
    return msgspec.json.encode(_whole(entry)).decode()
