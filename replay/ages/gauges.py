"""How far the policy had moved from the one that sampled, by the age of the sample: the off-policy gauges.

    ledger (who was trained, how old) + StepMeasured (sums of each sample) ─► rows ─► gauges of any subset of them

At staleness 0 the policies are the same, so what is measured there is the mismatch between engine and trainer. What
is more at staleness k came from k steps of training: the drift.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from consumers.telemetry import SUMS, recorded_sums, summarize
from replay.ages.history import Step
from streams.events import StepMeasured

DRIFT_SHARE = 6  # the drift is that of the sixth of the steps in which it was largest …
_DRIFT_STEPS = 40  # … but of no fewer steps; the budgets that drift is held against were found so
_MOVED = SUMS.index("sum_abs_log_ratio")
_OLDEST_FOR_DRIFT = 4  # above it, mean |log ratio| grows more slowly than the age


class Rows(NamedTuple):
    """One row a trained sample, in the order of the ledger."""

    step: NDArray[np.int64]  # [N]
    staleness: NDArray[np.int64]  # [N] of its oldest token that trained
    group_staleness: NDArray[np.int64]  # [N] the largest of its group
    group: NDArray[np.int64]  # [N] a number of its group
    sums: NDArray[np.float64]  # [N, 12], columns as in consumers.telemetry.SUMS

    def where(self, chosen: NDArray[np.bool_]) -> Rows:
        return Rows(
            self.step[chosen],
            self.staleness[chosen],
            self.group_staleness[chosen],
            self.group[chosen],
            self.sums[chosen],
        )


class Gauges(msgspec.Struct, frozen=True):
    """Gauges of the samples of one age, or of up to one age."""

    staleness: int
    samples: int
    tokens: int
    values: dict[str, float]  # consumers.telemetry.summarize


class WhatIfSmaller(msgspec.Struct, frozen=True):
    """What would have been left of the trained groups at a smaller limit."""

    limit: int
    groups_share: float
    tokens_share: float
    values: dict[str, float]


class Drift(msgspec.Struct, frozen=True):
    """mean |log ratio| that each version of age adds, in nats a token."""

    per_version: float  # of the steps in which it was largest
    whole_run: float
    first_step: int  # of those steps
    last_step: int


def trained_rows(
    steps: Sequence[Step], measured: Mapping[tuple[int, int], StepMeasured]
) -> tuple[Rows, list[int]]:
    """Rows of every trained sample, and the steps that have no measurement (their trainer was killed first)."""
    parts: list[tuple[NDArray[np.int64], NDArray[np.float64]]] = []
    missing: list[int] = []
    group_number = 0
    for step in steps:
        cut = step.cut
        keys = []
        for group in cut.groups:
            oldest = max((member.staleness for member in group.members), default=-1)
            keys += [(cut.step, member.staleness, oldest, group_number) for member in group.members]
            group_number += 1
        sums = _sums(measured.get((cut.epoch, cut.step)), len(keys))
        if sums is None:
            missing.append(cut.step)
        else:
            parts.append((np.array(keys, dtype=np.int64).reshape(-1, 4), sums))
    keys = np.concatenate([part[0] for part in parts]) if parts else np.zeros((0, 4), np.int64)
    sums = np.concatenate([part[1] for part in parts]) if parts else np.zeros((0, len(SUMS)))
    rows = Rows(keys[:, 0], keys[:, 1], keys[:, 2], keys[:, 3], sums)
    return rows.where(rows.staleness >= 0), missing


def _sums(event: StepMeasured | None, n_samples: int) -> NDArray[np.float64] | None:
    """[S, 12] in the order of SUMS; None where there is none, or it is not of these samples."""
    return None if event is None or event.n_samples != n_samples else recorded_sums(event)


def by_staleness(rows: Rows) -> list[Gauges]:
    return [
        Gauges(int(age), int(here.sum()), int(rows.sums[here, 0].sum()), summarize(rows.sums[here]))
        for age in np.unique(rows.staleness)
        for here in [rows.staleness == age]
    ]


def if_smaller(rows: Rows, limit: int, on_stale: str) -> list[WhatIfSmaller]:
    """What limits below `limit` would have accepted of what was trained, and the gauges of that.

    Only a filter on the record: the run would also have been paced otherwise (the sweep models that). With "drop" a
    group goes when one of its samples does. With "mask" a sample goes whole; in a run its newer tokens would train.
    """
    age = rows.group_staleness if on_stale == "drop" else rows.staleness
    groups, tokens = max(1, len(np.unique(rows.group))), max(1.0, float(rows.sums[:, 0].sum()))
    found = []
    for smaller in range(min(limit, int(age.max(initial=0)) + 1)):
        kept = rows.where(age <= smaller)
        share = len(np.unique(kept.group)) / groups
        tokens_share = float(kept.sums[:, 0].sum()) / tokens
        found.append(WhatIfSmaller(smaller, share, tokens_share, summarize(kept.sums)))
    return found


def drift(rows: Rows) -> Drift | None:
    """None while nothing older than its version was trained.

    A stalled policy moves little, so a mean over the whole run would flatter a limit that stalled it: what counts is
    the sixth of the run in which the drift was largest.
    """
    steps = np.unique(rows.step)
    whole = _per_version(rows)
    if whole is None:
        return None
    size = min(len(steps), max(_DRIFT_STEPS, len(steps) // DRIFT_SHARE))
    best = Drift(whole, whole, int(steps[0]), int(steps[-1]))
    if size == len(steps):
        return best
    largest = -1.0
    for begin in range(0, len(steps) - size + 1, max(1, size // 4)):
        first, last = int(steps[begin]), int(steps[begin + size - 1])
        here = _per_version(rows.where((rows.step >= first) & (rows.step <= last)))
        if here is not None and here > largest:
            largest, best = here, Drift(here, whole, first, last)
    return best


def _per_version(rows: Rows) -> float | None:
    """Token-weighted mean of (mean |log ratio| − mismatch) / age over samples that are 1 to 4 versions old."""
    fresh = rows.sums[rows.staleness == 0]
    mismatch = fresh[:, _MOVED].sum() / fresh[:, 0].sum() if fresh[:, 0].sum() > 0 else 0.0
    moved = tokens = 0.0
    for age in range(1, _OLDEST_FOR_DRIFT + 1):
        here = rows.sums[rows.staleness == age]
        n_tokens = float(here[:, 0].sum())
        if n_tokens > 0:
            moved += max(0.0, here[:, _MOVED].sum() - mismatch * n_tokens) / age
            tokens += n_tokens
    return float(moved / tokens) if tokens else None
