"""Weight versions on an SGLang server: the label that it carries, and the spans that it reports.

    label(3, 17) = "e3-v17"       set with the last bucket of an update
    [{"version": "e3-v16", "start": 0, "end": 120}, {"version": "e3-v17", "start": 120, "end": 200}]
      ─► version runs [(3, 16, 120), (3, 17, 80)]

The guarantee "each token tells which weights made it" rests on `version_runs`: spans that leave a token out, count
one twice or carry a label that is not ours are refused, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from engine.rollout.sglang.errors import BadAnswer
from streams.columns import VersionRun, merge_runs

_LABEL = re.compile(r"e(0|[1-9][0-9]{0,18})-v(0|[1-9][0-9]{0,18})")
_FIELD = "meta_info.weight_versions"


class Span(NamedTuple):
    """Tokens [start, end) of one response, made by the weights that had this label."""

    label: str
    start: int
    end: int


def label(epoch: int, version: int) -> str:
    """The `weight_version` of a server that holds these weights."""
    return f"e{epoch}-v{version}"


def parse_label(text: str) -> tuple[int, int] | None:
    """(epoch, version); None for every other text, such as the "default" of a server that nobody has updated."""
    found = _LABEL.fullmatch(text)
    return (int(found[1]), int(found[2])) if found else None


def version_runs(spans: Sequence[Span], n_tokens: int) -> list[VersionRun]:
    """The runs over `n_tokens` tokens. Raises BadAnswer: "length_mismatch" or "unknown_version"."""
    runs: list[VersionRun] = []
    at = 0
    for index, span in enumerate(spans):
        if span.start != at or span.end < span.start or (span.end == span.start and n_tokens):
            raise BadAnswer(
                "length_mismatch",
                f"{_FIELD}[{index}]",
                f"needed a span that begins at {at}, got [{span.start}, {span.end})",
            )
        at = span.end
        identity = parse_label(span.label)
        if identity is None:
            if at == span.start:
                continue
            raise BadAnswer(
                "unknown_version",
                f"{_FIELD}[{index}].version",
                f"{span.label!r} is not a version that this run published (those look like {label(3, 17)!r}); the "
                f"server has not been given any, or someone else updates it",
            )
        runs.append((*identity, span.end - span.start))
    if at != n_tokens:
        raise BadAnswer("length_mismatch", _FIELD, f"the spans end at {at}, the answer has {n_tokens} tokens")
    return merge_runs(runs)
