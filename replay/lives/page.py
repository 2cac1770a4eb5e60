"""A sheet as one HTML file: no script, no request to anywhere, readable in light and dark and with the keyboard alone.

Everything that comes from the log goes through `esc`: prompts and responses are what a model or a user wrote.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from replay.lives import phrases
from replay.lives.facts import Moment, Span
from replay.lives.page_style import STYLE
from replay.lives.phrases import plain
from replay.lives.sheet import Bars, Facts, Section, Sheet, Stretches, Table, Tokens
from replay.lives.text import span_style, use_words

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_HUES = 6  # colours of versions; they come again after that, and each span says its version in words
_CHART = 640  # width of a chart
_ROW = 26
MANY_FACTS = 16  # more are set in columns
SHORT_CELL = 40  # characters


def esc(text: str) -> str:
    """Text from the log, safe inside an element or a quoted attribute."""
    return html.escape(plain(text, keep="\n\t"), quote=True)


def as_page(sheet: Sheet) -> str:
    title = esc(f"{sheet.title} · {sheet.run}")
    sections = "".join(
        f'<section id="s{count}" aria-labelledby="h{count}"><h2 id="h{count}">{esc(section.title)}</h2>\n'
        f"{''.join(_section(section))}</section>\n"
        for count, section in enumerate(sheet.sections)
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        '<a class="skip" href="#main">to the content</a>\n'
        f'{_head(sheet)}{_contents(sheet.sections)}<main id="main">\n{sections}</main>\n</body>\n</html>\n'
    )


def _head(sheet: Sheet) -> str:
    kind, _, name = sheet.title.partition(" ")
    said = "".join(f"<p>{esc(text)}</p>" for text in sheet.explanations)
    notes = "".join(f"<li>{esc(note)}</li>" for note in sheet.notes)
    return (
        f'<header><p class="kind">{esc(kind)} of run {esc(sheet.run)}</p><h1>{esc(name)}</h1>\n'
        f'<div class="verdict {sheet.tone}"><p><strong>{esc(sheet.verdict)}</strong></p>{said}</div>\n'
        + (f'<ul class="notes" aria-label="notes">{notes}</ul>\n' if notes else "")
        + "</header>\n"
    )


def _contents(sections: Sequence[Section]) -> str:
    links = "".join(
        f'<li><a href="#s{count}">{esc(section.title)}</a></li>' for count, section in enumerate(sections)
    )
    return f'<nav aria-label="contents"><ul>{links}</ul></nav>\n'


def _section(section: Section) -> Iterator[str]:
    if isinstance(section, Facts):
        yield _facts(section)
    elif isinstance(section, Table):
        yield _table(section.title, section.head, section.rows)
    elif isinstance(section, Bars):
        yield _bars(section)
    elif isinstance(section, Stretches):
        yield _stretches(section)
    elif isinstance(section, Tokens):
        yield from _tokens(section)
    else:
        yield _moments(section.moments)


def _facts(section: Facts) -> str:
    if len(section.pairs) > MANY_FACTS:
        pairs = "".join(
            f"<div><dt>{esc(name)}</dt><dd>{esc(value)}</dd></div>" for name, value in section.pairs
        )
        return f'<dl class="many">{pairs}</dl>\n'
    pairs = "".join(f"<dt>{esc(name)}</dt><dd>{esc(value)}</dd>" for name, value in section.pairs)
    return f"<dl>{pairs}</dl>\n"


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    numeric = [all(_is_number(row[at]) for row in rows) for at in range(len(head))]
    names = "".join(
        f'<th scope="col"{_cell_class(is_number, name)}>{esc(name)}</th>'
        for name, is_number in zip(head, numeric, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{_cell_class(is_number, cell)}>{esc(cell)}</td>"
            for cell, is_number in zip(row, numeric, strict=True)
        )
        + "</tr>\n"
        for row in rows
    )
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{esc(title)}">'
        f"<table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table></div>\n"
    )


def _cell_class(is_number: bool, cell: str) -> str:
    """Numbers to the right; what is short stays on one line."""
    classes = ["n"] * is_number + ["short"] * (len(cell) <= SHORT_CELL)
    return f' class="{" ".join(classes)}"' if classes else ""


def _is_number(cell: str) -> bool:
    return cell == "-" or cell.lstrip("+-").replace(".", "", 1).isdecimal()


# ---------------------------------------------------------------- charts
def _bars(section: Bars) -> str:
    most = max(bar.amount for bar in section.bars) or 1
    rows = [(bar.name, 0.0, bar.amount / most, bar.text) for bar in section.bars]
    return _chart(section.title, rows, name_width=60)


def _stretches(section: Stretches) -> str:
    begin = min(each.begin_ms for each in section.stretches)
    whole = (max(each.end_ms for each in section.stretches) - begin) or 1
    rows = [
        (
            each.name,
            (each.begin_ms - begin) / whole,
            (each.end_ms - begin) / whole,
            f"{(each.end_ms - each.begin_ms) / 1000:.3f} s",
        )
        for each in section.stretches
    ]
    return _chart(section.title, rows, name_width=190)


def _chart(title: str, rows: Sequence[tuple[str, float, float, str]], *, name_width: int) -> str:
    """Rows of (name, left, right, text), left and right as shares of the width."""
    height = _ROW * len(rows) + 6
    width = name_width + _CHART + 190
    parts = []
    for at, (name, left, right, text) in enumerate(rows):
        y = 3 + _ROW * at
        x = name_width + left * _CHART
        length = max(2.0, (right - left) * _CHART)
        parts.append(
            f'<text class="label" x="{name_width - 10}" y="{y + 16}" text-anchor="end">{esc(name)}</text>'
            f'<rect class="track" x="{name_width}" y="{y + 3}" width="{_CHART}" height="18" rx="3"/>'
            f'<rect class="bar" x="{x:.1f}" y="{y + 3}" width="{length:.1f}" height="18" rx="3"/>'
            f'<text class="label" x="{name_width + _CHART + 10}" y="{y + 16}">{esc(text)}</text>'
        )
    told = esc("; ".join(f"{name}: {text}" for name, _, _, text in rows))
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{esc(title)}">'
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{told}">{"".join(parts)}</svg></div>\n'
    )


# ---------------------------------------------------------------- tokens
def _tokens(section: Tokens) -> Iterator[str]:
    hue_of: dict[tuple[int, int], int] = {}
    for span in section.spans:
        hue_of.setdefault((span.epoch, span.version), len(hue_of) % _HUES)
    yield _legend(section.spans, hue_of)
    yield f'<p class="prompt"><span class="who">prompt</span> {esc(section.prompt)}</p>\n'
    spans = "".join(_span(span, hue_of[span.epoch, span.version]) for span in section.spans)
    yield f'<p class="response">{spans}</p>\n'
    rows = [_span_row(span) for span in section.spans]
    head = ["tokens", "by", "use", "version", "mean log-prob", "content"]
    table = _table("stretches", head, rows)
    yield f"<details><summary>the same as a table, {len(rows)} stretches</summary>{table}</details>\n"


def _legend(spans: Sequence[Span], hue_of: dict[tuple[int, int], int]) -> str:
    """What the looks mean: one sample of each that occurs."""
    looks = dict.fromkeys(
        (span_style(span), "environment" if span.by == "environment" else use_words(span)) for span in spans
    )
    uses = "".join(f'<li><span class="tok {style}">{esc(text)}</span></li>' for style, text in looks)
    versions = "".join(
        f'<li><span class="tok v{hue}">e{epoch}-v{version}</span></li>'
        for (epoch, version), hue in hue_of.items()
    )
    return f'<ul class="legend" aria-label="legend">{uses}{versions}</ul>\n'


def _span(span: Span, hue: int) -> str:
    """Nothing is put between spans but a place where a line may break: the page shows what the policy said."""
    said = (
        f"tokens {span.begin} to {span.end - 1}, {span.by}, {use_words(span)}, e{span.epoch}-v{span.version}"
    )
    content = esc(span.text) if span.text is not None else esc(" ".join(map(str, span.ids)))
    return f'<span class="tok {span_style(span)} v{hue}" title="{esc(said)}">{content}</span><wbr>'


def _span_row(span: Span) -> list[str]:
    return [
        f"{span.begin}–{span.end}",
        span.by,
        use_words(span),
        f"e{span.epoch}-v{span.version}",
        "-" if span.mean_logprob is None else f"{span.mean_logprob:.3f}",
        span.text if span.text is not None else phrases.ids(span.ids),
    ]


# ---------------------------------------------------------------- timeline
def _moments(moments: Sequence[Moment]) -> str:
    first = moments[0].at_ms
    items = "".join(
        f'<li{" class=void" if each.is_void else ""}><time datetime="{phrases.stamp(each.at_ms)}">'
        f'{phrases.stamp(each.at_ms)}</time> <span class="since">{(each.at_ms - first) / 1000:+.3f} s</span> '
        f"<strong>{esc(each.what)}</strong>{' (void)' if each.is_void else ''} {esc(each.detail)} "
        f"<code>{esc(each.place)}</code></li>\n"
        for each in moments
    )
    return f'<ol class="timeline">{items}</ol>\n'
