"""What a life looks like on paper: a head and a few kinds of parts, which every renderer knows how to draw.

Sheet ── title, verdict, notes
      ── Facts      names and values
      ── Table      rows under a head
      ── Bars       amounts beside each other
      ── Stretches  spans of time under each other
      ── Tokens     a response with its mask and versions
      ── Moments    the timeline
"""

from __future__ import annotations

from typing import NamedTuple

from replay.lives.facts import Moment, Span

GOOD, BAD, WAITING = "good", "bad", "waiting"  # tones of a verdict


class Facts(NamedTuple):
    title: str
    pairs: list[tuple[str, str]]


class Table(NamedTuple):
    title: str
    head: list[str]
    rows: list[list[str]]


class Bar(NamedTuple):
    name: str
    amount: float
    text: str


class Bars(NamedTuple):
    title: str
    bars: list[Bar]


class Stretch(NamedTuple):
    name: str
    begin_ms: int
    end_ms: int


class Stretches(NamedTuple):
    """All on one axis, which begins with the first and ends with the last."""

    title: str
    stretches: list[Stretch]


class Tokens(NamedTuple):
    title: str
    prompt: str  # text, or ids
    spans: list[Span]


class Moments(NamedTuple):
    title: str
    moments: list[Moment]


Section = Facts | Table | Bars | Stretches | Tokens | Moments


class Sheet(NamedTuple):
    title: str  # as in "sample 0-3/1/0"
    run: str
    tone: str
    verdict: str
    explanations: list[str]
    notes: list[str]
    sections: list[Section]
