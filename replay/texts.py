"""Values as short texts of one line. Binary is never shown raw, control characters are escaped."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

LONGEST_TEXT = 60  # characters of one value
SHOWN_ITEMS = 4  # of a list
VERBATIM_BYTES = 2000  # of what cannot be read; JSON has all of it

_NEEDS_QUOTES = re.compile(r'[\s"={}\[\]]').search
_encode, _encode_ascii = json.JSONEncoder(ensure_ascii=False).encode, json.JSONEncoder().encode


class Shown(str):
    """A text that is ready to be shown as it is."""


def short(value: Any) -> str:
    """One value, abbreviated.

    >>> short([1, 2, 3, 4, 5]), short("two words"), short(0.25)
    ('[1,2,3,4,…5]', '"two words"', '0.25')
    """
    known = SHORT.get(type(value))
    if known is not None:
        return known(value)
    if isinstance(value, Mapping):
        return "{" + " ".join(f"{_clipped(str(name))}={short(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, msgspec.Struct):
        return "(" + ",".join(short(getattr(value, name)) for name in value.__struct_fields__) + ")"
    return str(value)


def quoted(text: str) -> str:
    """Quoted when it has blanks or anything that a terminal would act on."""
    if not text.isprintable():
        return _encode_ascii(text)
    return text if text and _NEEDS_QUOTES(text) is None else _encode(text)


def as_printable_json(value: Any) -> str:
    """JSON without anything that a terminal would act on; bytes as Python writes them."""
    text = json.dumps(value, default=verbatim, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(value, default=verbatim)


def verbatim(value: Any) -> str:
    """Bytes as Python writes them."""
    if not isinstance(value, (bytes, bytearray, memoryview)):
        return str(value)
    raw = bytes(value[:VERBATIM_BYTES])
    more = len(value) - len(raw)
    return repr(raw) + (f"…+{more} bytes" if more > 0 else "")


def _clipped(text: str) -> str:
    return quoted(text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…")


def _bytes(value: bytes) -> str:
    return verbatim(value) if len(value) <= LONGEST_TEXT else f"<{len(value)} bytes>"


def _list(value: list[Any] | tuple[Any, ...]) -> str:
    shown = ",".join([short(item) for item in value[:SHOWN_ITEMS]])
    return f"[{shown}]" if len(value) <= SHOWN_ITEMS else f"[{shown},…{len(value)}]"


def _itself(value: Shown) -> str:
    return value


# `short` of the usual types, for who cannot afford one more call
SHORT: dict[type, Callable[[Any], str]] = {
    int: str,
    str: _clipped,
    Shown: _itself,
    float: "%g".__mod__,
    bytes: _bytes,
    list: _list,
    tuple: _list,
    bool: str,
    type(None): str,
}
