"""Showing one entry: a line for people, a JSON object for programs, or kcat's format string.

    line       time topic/partition:offset type name=value …     abbreviated (replay/glance.py); plain, or with colours
    as_json    everything, columns as lists, other bytes in base64
    formatter  %t %p %o %k %T %S %h from the record alone, %s the event as JSON

What cannot be read, what is of an unknown type and what lies in a dead letter is shown verbatim.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any, NamedTuple

import msgspec

from replay import fields
from replay.glance import Decoder, Fields, glance, spoken
from replay.records import Entry
from replay.texts import SHORT, Shown, as_printable_json, quoted, short, verbatim
from streams import columns
from streams.errors import CodecError, ConfigError
from streams.events import TrajectoryFinished, tag_of

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\"}


class Look(NamedTuple):
    """How lines look: widths to which columns are filled up, colours, and what makes text of token ids."""

    place_width: int = 0
    type_width: int = 0
    is_coloured: bool = False
    text: Decoder | None = None


PLAIN = Look()


# ---------------------------------------------------------------- a line
def line(word: str, partition: int, entry: Entry, look: Look = PLAIN) -> str:
    """One entry, without a newline. `word`: the topic as it shall be called."""
    time, place = time_text(entry.timestamp_ms), f"{word}/{partition}:{entry.offset}"
    if entry.event is not None:
        tag, shown = tag_of(entry.event), glance(entry.event, look.text)
        pairs = _coloured_pairs(shown) if look.is_coloured else _pairs(shown)
    elif entry.unknown is not None:
        tag = f"?{quoted(entry.unknown.type)}"
        pairs = _fields_of_unknown(entry)
    else:
        raw = entry.record.value if entry.record is not None else b""
        tag, pairs = "UNREADABLE", f"{entry.problem} raw={verbatim(raw)}"
    if look is PLAIN:
        return f"{time} {place} {tag} {pairs}".rstrip()
    tag, place = tag.ljust(look.type_width), place.ljust(look.place_width)
    if look.is_coloured:
        time, place, tag = f"{_DIM}{time}{_END}", f"{_CYAN}{place}{_END}", f"{_tag_colour(tag)}{tag}{_END}"
    return f"{time} {place} {tag} {pairs}".rstrip()


def _pairs(shown: Fields) -> str:
    known = SHORT.get
    parts = [f"{name}={known(type(value), short)(value)}" for name, value in shown.items()]
    return " ".join(parts)


def _fields_of_unknown(entry: Entry) -> str:
    try:
        return as_printable_json(entry.unknown.fields if entry.unknown is not None else {})
    except TypeError:  # a key that is no text
        return verbatim(entry.record.value if entry.record is not None else b"")


def time_text(timestamp_ms: int) -> str:
    """A time in UTC, as in 2026-11-01T10:00:00.250Z."""
    seconds, ms = divmod(timestamp_ms, 1000)
    return f"{_second(seconds)}.{ms:03d}Z"


@functools.lru_cache(maxsize=16)
def _second(seconds: int) -> str:
    try:
        return datetime.fromtimestamp(seconds, tz=timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")
    except (ValueError, OverflowError, OSError):  # beyond the year 9999: whoever wrote it had another unit
        return f"@{seconds}"


# ---------------------------------------------------------------- colours
_DIM, _BOLD, _END = "\x1b[2m", "\x1b[1m", "\x1b[0m"
_RED, _GREEN, _YELLOW, _MAGENTA, _CYAN = (f"\x1b[{code}m" for code in (31, 32, 33, 35, 36))
_BAD = ("failed", "dropped", "skipped", "letter", "UNREADABLE")
_UNUSUAL = ("missing", "changed", "paused", "resumed", "ending", "?")
_COLOURS: dict[type, str] = {int: _CYAN, float: _CYAN, bool: _MAGENTA, type(None): _MAGENTA, str: _GREEN}


def _tag_colour(tag: str) -> str:
    if any(word in tag for word in _BAD):
        return _BOLD + _RED
    return _BOLD + (_YELLOW if any(word in tag for word in _UNUSUAL) else _GREEN)


def _coloured_pairs(shown: Fields) -> str:
    return " ".join([f"{_DIM}{name}={_END}{_coloured(value)}" for name, value in shown.items()])


def _coloured(value: Any) -> str:
    colour = _COLOURS.get(type(value), "")
    text = short(value)
    if isinstance(value, Shown):
        begin, end = "⟦", "⟧"
        text = text.replace(begin, _YELLOW + begin).replace(end, end + _END)
    return f"{colour}{text}{_END}" if colour else text


# ---------------------------------------------------------------- JSON
def as_json(topic: str, partition: int, entry: Entry, text: Decoder | None = None) -> str:
    """The whole entry as one JSON object on one line; `text` adds the tokens as text, in stretches."""
    shown: Fields = {
        "topic": topic,
        "partition": partition,
        "offset": entry.offset,
        "timestamp_ms": entry.timestamp_ms,
        "headers": _headers(entry),
        "type": fields.type_of(entry) if entry.event is not None or entry.unknown is not None else "",
    }
    if entry.event is not None:
        shown["event"] = fields.plain(entry.event)
        if text is not None and isinstance(entry.event, TrajectoryFinished):
            shown["text"] = _spoken(entry.event, text)
    elif entry.unknown is not None:
        shown["event"] = entry.unknown.fields
    else:
        raw = entry.record.value if entry.record is not None else b""
        shown |= {"problem": entry.problem, "raw": base64.b64encode(raw).decode()}
    return _JSON.encode(shown).decode()


# `repr` of what MessagePack has and JSON has not, such as extension types and keys that are no text
_JSON = msgspec.json.Encoder(enc_hook=repr)


def _spoken(event: TrajectoryFinished, text: Decoder) -> Fields:
    try:
        prompt = text(columns.decode_ids(event.prompt_ids).tolist())
        parts = spoken(event, text)
    except CodecError as error:
        return {"problem": str(error)}
    return {
        "prompt": prompt,
        "response": [{"trained": is_policy, "text": said} for is_policy, said in parts],
    }


def _headers(entry: Entry) -> dict[str, str]:
    headers = entry.record.headers if entry.record is not None else ()
    return {name: fields.text_of(value) for name, value in headers}


# ---------------------------------------------------------------- kcat's format
Shower = Callable[[str, int, Entry], str]


class Format(NamedTuple):
    """A format such as `%t/%p:%o %s\\n`, ready for use. Make it with `formatter`."""

    show: Shower
    needs_event: bool  # whether a record must be decoded; the other signs are known before


def formatter(template: str) -> Format:
    """Raises ConfigError for a sign that is unknown.

    %t topic, %p partition, %o offset, %k id of the sample or group, %s the event as JSON, %S bytes of the stored
    value, %T milliseconds since 1970, %h headers, %% a percent sign; \\n \\t \\r \\0 \\\\ as in C.
    """
    literals, signs = _parse(template)
    frame = "%s".join(literal.replace("%", "%%") for literal in literals)
    getters = [_SIGNS[sign] for sign in signs]

    def show(topic: str, partition: int, entry: Entry) -> str:
        return frame % tuple([get(topic, partition, entry) for get in getters])

    return Format(show, "s" in signs)


def _parse(template: str) -> tuple[list[str], list[str]]:
    """The texts before, between and after the signs of a format, and the signs."""
    literals, signs = [""], []
    letters = iter(template)
    for letter in letters:
        if letter not in "%\\":
            literals[-1] += letter
            continue
        code = next(letters, "")
        known = (*_SIGNS, "%") if letter == "%" else tuple(_ESCAPES)
        if code not in known or not code:
            names = " ".join(letter + name for name in known)
            raise ConfigError(f"-f {template!r}: {letter + code!r} is unknown; known are {names}")
        if letter == "%" and code != "%":
            signs.append(code)
            literals.append("")
        else:
            literals[-1] += _ESCAPES.get(code, code) if letter == "\\" else code
    return literals, signs


def _identity(topic: str, partition: int, entry: Entry) -> str:
    raw = entry.record.header("id") if entry.record is not None else None
    return "" if raw is None else fields.text_of(raw)


def _header_text(topic: str, partition: int, entry: Entry) -> str:
    headers = entry.record.headers if entry.record is not None else ()
    return ",".join([f"{name}={fields.text_of(value)}" for name, value in headers])


def _payload(topic: str, partition: int, entry: Entry) -> str:
    if entry.event is not None:
        return _JSON.encode({"type": tag_of(entry.event), **fields.plain(entry.event)}).decode()
    if entry.unknown is not None:
        return _JSON.encode(entry.unknown.fields).decode()
    return verbatim(entry.record.value if entry.record is not None else b"")


_SIGNS: dict[str, Callable[[str, int, Entry], Any]] = {
    "t": lambda topic, partition, entry: topic,
    "p": lambda topic, partition, entry: partition,
    "o": lambda topic, partition, entry: entry.offset,
    "k": _identity,
    "s": _payload,
    "S": lambda topic, partition, entry: len(entry.record.value) if entry.record is not None else 0,
    "T": lambda topic, partition, entry: entry.timestamp_ms,
    "h": _header_text,
}
