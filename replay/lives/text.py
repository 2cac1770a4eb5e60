"""A sheet as lines for a terminal: pieces of text with the name of a style each, or just the text when piped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from replay.lives import phrases
from replay.lives.facts import Span
from replay.lives.phrases import plain
from replay.lives.sheet import Bars, Facts, Moments, Section, Sheet, Stretches, Table, Tokens

WIDEST = 150  # characters of a table; a wider one is written as blocks, one a row
LONGEST_SPAN = 160  # characters of one span's tokens
MOST_SPANS = 60  # spans of one response
MOST_ROWS = 64  # of one table; --json and --html have them all
_CHART = 40  # characters of a bar

# style names; what they look like is the terminal's affair (engine/commands/show.py)
TITLE, HEADING, NAME, DIM, VOID = "title", "heading", "name", "dim", "void"


class Piece(NamedTuple):
    text: str
    style: str = ""


Line = list[Piece]


def lines_of(sheet: Sheet) -> Iterator[Line]:
    """Nothing that a terminal acts on leaves here, whatever the log holds."""
    for line in _lines(sheet):
        yield [Piece(plain(piece.text), piece.style) for piece in line]


def _lines(sheet: Sheet) -> Iterator[Line]:
    yield [Piece(sheet.title, TITLE), Piece(f"  of run {sheet.run}", DIM)]
    yield [Piece(sheet.verdict, sheet.tone)]
    for text in sheet.explanations:
        yield [Piece(text)]
    for note in sheet.notes:
        yield [Piece("note: ", NAME), Piece(note)]
    for section in sheet.sections:
        yield []
        yield [Piece(section.title, HEADING)]
        yield from _section(section)


def as_text(sheet: Sheet) -> str:
    """Without styles."""
    return "".join("".join(piece.text for piece in line).rstrip() + "\n" for line in lines_of(sheet))


def _section(section: Section) -> Iterator[Line]:
    if isinstance(section, Facts):
        yield from _facts(section.pairs)
    elif isinstance(section, Table):
        yield from _table(section)
    elif isinstance(section, Bars):
        yield from _bars(section)
    elif isinstance(section, Stretches):
        yield from _stretches(section)
    elif isinstance(section, Tokens):
        yield from _tokens(section)
    else:
        yield from _moments(section)


def _facts(pairs: Sequence[tuple[str, str]]) -> Iterator[Line]:
    width = max(len(plain(name)) for name, _ in pairs)
    for name, value in pairs:
        yield [Piece(f"  {plain(name):<{width}}  ", NAME), Piece(value)]


# ---------------------------------------------------------------- tables
def _table(table: Table) -> Iterator[Line]:
    head, *rows = [[plain(cell) for cell in row] for row in (table.head, *table.rows[:MOST_ROWS])]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    if sum(widths) + 2 * len(widths) > WIDEST:
        yield from _blocks(head, rows)
    else:
        right = [_is_numeric([row[at] for row in rows]) for at in range(len(widths))]
        yield [Piece("  " + _cells(head, widths, right), NAME)]
        for row in rows:
            yield [Piece("  " + _cells(row, widths, right))]
    if len(table.rows) > MOST_ROWS:
        yield [Piece(f"  … {len(table.rows) - MOST_ROWS} more; --json and --html have them all", DIM)]


def _blocks(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[Line]:
    """One row after the other, its cells under each other; cells without a word are left out."""
    for count, row in enumerate(rows):
        if count:
            yield []
        yield from _facts([(name, cell) for name, cell in zip(head, row, strict=True) if cell != "-"])


def _cells(row: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    return "  ".join(
        cell.rjust(width) if is_right else cell.ljust(width)
        for cell, width, is_right in zip(row, widths, right, strict=True)
    )


def _is_numeric(column: Sequence[str]) -> bool:
    return all(cell == "-" or cell.lstrip("+-").replace(".", "", 1).isdecimal() for cell in column)


# ---------------------------------------------------------------- charts
def _bars(bars: Bars) -> Iterator[Line]:
    most = max(bar.amount for bar in bars.bars)
    width = max(len(bar.name) for bar in bars.bars)
    for bar in bars.bars:
        length = round(_CHART * bar.amount / most) if most > 0 else 0
        yield [
            Piece(f"  {bar.name:>{width}}  ", NAME),
            Piece("█" * length + " " * (_CHART - length)),
            Piece(f"  {bar.text}"),
        ]


def _stretches(section: Stretches) -> Iterator[Line]:
    begin = min(each.begin_ms for each in section.stretches)
    whole = max(each.end_ms for each in section.stretches) - begin
    width = max(len(each.name) for each in section.stretches)
    for each in section.stretches:
        left = round(_CHART * (each.begin_ms - begin) / whole) if whole else 0
        right = round(_CHART * (each.end_ms - begin) / whole) if whole else 0
        left = min(left, _CHART - 1)
        length = max(1, right - left)
        yield [
            Piece(f"  {each.name:<{width}}  ", NAME),
            Piece("·" * left, DIM),
            Piece("█" * length),
            Piece("·" * (_CHART - left - length), DIM),
            Piece(f"  {(each.end_ms - each.begin_ms) / 1000:9.3f} s"),
        ]


# ---------------------------------------------------------------- tokens
def _tokens(section: Tokens) -> Iterator[Line]:
    yield [Piece("  prompt  ", NAME), Piece(phrases.shortened(section.prompt, 1000))]
    yield [
        Piece("  " + f"{'tokens':>13}  {'by':<11}  {'use':<9}  {'version':<8}  {'logprob':>7}  content", NAME)
    ]
    spans = section.spans
    for span in spans[: MOST_SPANS // 2] if len(spans) > MOST_SPANS else spans:
        yield _span(span)
    if len(spans) > MOST_SPANS:
        left_out = len(spans) - MOST_SPANS
        yield [Piece(f"  … {left_out} more stretches; --json and --html have them all", DIM)]
        for span in spans[-(MOST_SPANS // 2) :]:
            yield _span(span)


def _span(span: Span) -> Line:
    text = span.text if span.text is not None else " ".join(map(str, span.ids[:LONGEST_SPAN]))
    logprob = "-" if span.mean_logprob is None else f"{span.mean_logprob:.3f}"
    version = f"e{span.epoch}-v{span.version}"
    head = (
        f"  {span.begin:>6}–{span.end:<6}  {span.by:<11}  {use_words(span):<9}  {version:<8}  {logprob:>7}  "
    )
    return [Piece(head, DIM), Piece(phrases.shortened(text, LONGEST_SPAN), span_style(span))]


def use_words(span: Span) -> str:
    return {"too_old": "too old", "trainable": "not used"}.get(span.use, span.use)


def span_style(span: Span) -> str:
    """`environment`, or what became of a token of the policy."""
    return "environment" if span.by == "environment" else span.use


# ---------------------------------------------------------------- timeline
def _moments(section: Moments) -> Iterator[Line]:
    first = section.moments[0].at_ms
    width = max(len(each.what) for each in section.moments)
    places = max(len(each.place) for each in section.moments)
    for each in section.moments:
        style = VOID if each.is_void else ""
        since = (each.at_ms - first) / 1000
        yield [
            Piece(f"  {phrases.stamp(each.at_ms)} {since:>+10.3f} s  {each.place:<{places}}  ", DIM),
            Piece(f"{each.what:<{width}}  ", style or NAME),
            Piece(each.detail, style),
        ]
