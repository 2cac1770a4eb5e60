"""Rows of a step over the data-parallel ranks: balanced by tokens, the same wherever it is worked out.

    Plan (whole batch) ──► for each minibatch: longest row first, to the rank with the fewest tokens ──► Plan per rank

A rank's plan holds its rows alone, renumbered, and the numbers of the whole minibatch (tokens, divisors).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.algorithms import packing
from engine.algorithms.logprobs import PER_SAMPLE, PER_TOKEN, FlatBatch, ranges, starts_of
from engine.trainer.plan import Plan


class Share(NamedTuple):
    """One rank's part of a plan."""

    plan: Plan
    tokens: NDArray[np.int64]  # [n] place in the whole FlatBatch of each of its trained tokens


def split(plan: Plan, size: int) -> list[Share]:
    """The shares of `size` ranks. They have every minibatch of the plan, some perhaps without a row."""
    if size == 1:
        return [Share(plan, np.arange(len(plan.flat.targets)))]
    dealt = [
        [part.rows[places] for places in packing.spread(plan.flat.fed[part.rows], size)]
        for part in plan.parts
    ]
    return [_share(plan, [rows[rank] for rows in dealt]) for rank in range(size)]


def _share(plan: Plan, rows_of_parts: list[NDArray[np.int64]]) -> Share:
    chosen = np.sort(np.concatenate([np.empty(0, np.int64), *rows_of_parts]))
    flat, tokens = take_rows(plan.flat, chosen)
    parts = [
        part._replace(rows=np.searchsorted(chosen, rows))
        for part, rows in zip(plan.parts, rows_of_parts, strict=True)
    ]
    return Share(plan._replace(flat=flat, parts=parts), tokens)


def take_rows(flat: FlatBatch, rows: NDArray[np.int64]) -> tuple[FlatBatch, NDArray[np.int64]]:
    """A FlatBatch of these samples alone, and the place in `flat` of each of its trained tokens."""
    lengths = flat.row_starts[rows + 1] - flat.row_starts[rows]
    counts = flat.token_starts[rows + 1] - flat.token_starts[rows]
    tokens = ranges(flat.token_starts[rows], counts)
    values: dict[str, Any] = {name: _taken(getattr(flat, name), rows) for name in PER_SAMPLE}
    values |= {name: _taken(getattr(flat, name), tokens) for name in PER_TOKEN}
    values |= {
        "ids": flat.ids[ranges(flat.row_starts[rows], lengths)],
        "row_starts": starts_of(lengths),
        "token_starts": starts_of(counts),
        "sample": np.repeat(np.arange(len(rows)), counts),
    }
    return FlatBatch(**values), tokens


def _taken(values: NDArray[Any] | None, places: NDArray[np.int64]) -> NDArray[Any] | None:
    return None if values is None else values[places]
