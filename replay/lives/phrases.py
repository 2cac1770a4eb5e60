"""Words for values: numbers, moments, sizes and texts as every renderer writes them."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

import msgspec

from replay.lives.facts import VersionTokens


def plain(text: str, keep: str = "") -> str:
    """Nothing that a terminal or a browser acts on: what is not printable is written as an escape.

    >>> plain("a\\x1b[2J")
    'a\\\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(_escaped(sign, keep) for sign in text)


def _escaped(sign: str, keep: str) -> str:
    if sign in keep or sign.isprintable() or unicodedata.category(sign) == "Zs":
        return sign
    return sign.encode("unicode_escape").decode("ascii")


def number(value: float | None, digits: int = 4) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.4g}"


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"


def stamp(at_ms: int) -> str:
    """RFC 3339 in UTC, to the millisecond; "-" for a moment that nothing says."""
    if at_ms <= 0:
        return "-"
    moment = datetime.fromtimestamp(at_ms / 1000, tz=timezone.utc)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{at_ms % 1000:03d}Z"


def size(nbytes: int) -> str:
    """
    >>> size(216064)
    '211 KiB'
    """
    amount, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{amount:.4g} {unit}" if unit == "B" else f"{amount:.3g} {unit}"


def runs(versions: Sequence[VersionTokens]) -> str:
    """
    >>> runs([VersionTokens(epoch=1, version=65, n_tokens=2)])
    'e1-v65 × 2'
    """
    return ", ".join(f"e{each.epoch}-v{each.version} × {each.n_tokens}" for each in versions) or "-"


def value(anything: Any, most: int = 2000) -> str:
    """Text as it is, everything else as JSON; cut with a word of how much is left."""
    if anything is None or anything == "":
        return "-"
    text = anything if isinstance(anything, str) else msgspec.json.encode(anything, enc_hook=repr).decode()
    return shortened(text, most)


def shortened(text: str, most: int) -> str:
    more = len(text) - most
    return text if more <= 0 else f"{text[:most]} … ({more} more characters)"


def ids(numbers: Sequence[int], most: int = 200) -> str:
    shown = " ".join(map(str, numbers[:most]))
    more = len(numbers) - most
    return shown if more <= 0 else f"{shown} … ({more} more)"


def counted(amount: int, noun: str) -> str:
    """
    >>> counted(1, "version"), counted(0, "version")
    ('1 version', '0 versions')
    """
    return f"{amount} {noun}" if amount == 1 else f"{amount} {noun}s"
