"""The staleness report of a run so far: how old, why, who is dropped for it, what it costs and what it does.

A sample's age has two parts (DESIGN §7). In seconds: in flight from its dispatch to its end, in queue from there to
the cut. In versions: those that were published while it was in flight, and those that were made while it waited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from consumers.starvation import TRIES
from replay.ages import gauges
from replay.ages.durations import complete_ms, follow
from replay.ages.history import OPEN, STALE, SURPLUS, USED, GroupLife, History, Sample
from replay.ages.slope import Slope, slope

_QUARTERS = ("shortest quarter", "second quarter", "third quarter", "longest quarter")
_LAST_STEPS = 50  # over which reward slope and mean age are taken


class Spread(msgspec.Struct, frozen=True):
    """A distribution in five numbers."""

    mean: float
    p50: float
    p95: float
    most: float
    count: int


class Ages(msgspec.Struct, frozen=True, kw_only=True):
    """How old samples were when their group ended, over those of a known version."""

    samples: int
    staleness: dict[int, int]  # versions → samples
    mean: float
    most: int
    in_flight_s: Spread | None  # dispatch (or the first engine with weights) to finish; None without samples
    waiting_s: Spread | None  # of it, dispatch to start: for a slot and for a version
    in_queue_s: Spread | None  # finish to cut
    in_flight_versions: float  # mean
    in_queue_versions: float  # mean; the two add up to `mean`


class LengthClass(msgspec.Struct, frozen=True, kw_only=True):
    """Groups by length, in quarters of all; of a group the longest sample counts."""

    name: str
    up_to: float  # of the measure, the last class's is the largest seen
    groups: int
    outcomes: dict[str, int]
    share_trained: float  # of the groups of this class, less those open or left over at the end of the run
    share_of_trained: (
        float  # of all trained groups; as large as its share of all groups where nothing is biased
    )
    share_of_all: float


class RowTried(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the dataset whose groups end as stale."""

    row: int
    stale: int  # drops since it was last trained, or ever
    trained: int  # times it was trained before that
    is_starved: bool  # as the feeder warns of it
    generation_s: float  # of its slowest sample, mean over its groups
    groups: list[str]  # the newest of them


class Waste(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that the policy sampled and that never trained."""

    generated: int  # of scored samples
    trained: int
    dropped: dict[str, int]  # reason → tokens of groups that ended so
    not_trained: int  # of samples of trained groups: masked, or copies
    open: int  # of groups that have no outcome yet
    share: (
        float  # lost / (trained + lost), without groups that are open or were left over at the end of the run
    )


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the time between the first cut and the last, pauses and restarts left out."""

    steps_per_s: float
    training: float  # the trainer in a step
    waiting: float  # for groups
    overhead: float  # neither: reading, checking, writing the cut
    engine_busy: float | None  # mean of what engines say of themselves
    engine_idle: float | None
    in_flight: float  # samples, mean


class Learning(msgspec.Struct, frozen=True, kw_only=True):
    """Stands beside the gauges: ESS, KL and clip share look better when learning stalls."""

    steps: int
    reward: float  # mean of these steps
    reward_slope: Slope  # of the mean training reward, per step
    mean_staleness: float  # of the same steps


class Report(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    steps: int
    version: int
    limit: int
    on_stale: str
    limits: list[tuple[int, int]]  # (from step, limit) wherever the limit in force changed
    trained: Ages
    dropped: Ages  # as stale
    outcomes: dict[str, int]  # groups
    by_seconds: list[LengthClass]
    by_tokens: list[LengthClass]
    rows: list[RowTried]
    waste: Waste
    times: Times | None  # None with one step
    mismatch: dict[str, float]  # gauges of samples of staleness 0; {} without any
    gauges: list[gauges.Gauges]
    if_smaller: list[gauges.WhatIfSmaller]
    drift: gauges.Drift | None
    learning: Learning
    unmeasured: list[int]  # steps without StepMeasured
    unreadable: int  # records that are left out
    removed: int  # records that retention took: the report is of the rest


def measure(history: History) -> Report:
    """The report. `history` must have at least one step."""
    last = history.steps[-1].cut
    groups = list(history.groups.values())
    rows, unmeasured = gauges.trained_rows(history.steps, history.measured)
    by_age = gauges.by_staleness(rows)
    return Report(
        run=history.view.run.run if history.view.run is not None else "",
        steps=len(history.steps),
        version=history.view.version,
        limit=last.limit,
        on_stale=last.on_stale,
        limits=_limits(history),
        trained=_ages(history, _trained_samples(history)),
        dropped=_ages(history, _stale_samples(history)),
        outcomes=_outcomes(groups),
        by_seconds=_classes(groups, lambda group: group.generation_s),
        by_tokens=_classes(groups, lambda group: group.longest),
        rows=_rows(groups),
        waste=_waste(history),
        times=_times(history),
        mismatch=next((each.values for each in by_age if each.staleness == 0), {}),
        gauges=by_age,
        if_smaller=gauges.if_smaller(rows, last.limit, last.on_stale),
        drift=gauges.drift(rows),
        learning=_learning(history),
        unmeasured=unmeasured,
        unreadable=history.unreadable,
        removed=history.removed,
    )


def _limits(history: History) -> list[tuple[int, int]]:
    changes: list[tuple[int, int]] = []
    for step in history.steps:
        if not changes or changes[-1][1] != step.cut.limit:
            changes.append((step.cut.step, step.cut.limit))
    return changes


# ---------------------------------------------------------------- ages
_Aged = tuple[GroupLife, Sample, int]  # (its group, the sample, its staleness when the group ended)


def _trained_samples(history: History) -> Iterable[_Aged]:
    for step in history.steps:
        for cut in step.cut.groups:
            group = history.groups.get(cut.seq)
            if group is None or group.step != step.cut.step:
                continue
            for member in cut.members:
                sample = group.samples.get(_place(member.uid))
                if sample is not None and member.staleness >= 0:
                    yield group, sample, member.staleness


def _stale_samples(history: History) -> Iterable[_Aged]:
    """Every sample of a group that was dropped as stale, the fresh ones too: one old one is enough."""
    for group in history.groups.values():
        for sample in group.samples.values() if group.outcome == STALE else ():
            if 0 <= sample.version <= group.trainer_version:
                yield group, sample, group.trainer_version - sample.version


def _place(uid: str) -> tuple[int, int]:
    """(index, attempt) of a uid."""
    _, index, attempt = uid.rsplit("/", 2)
    return int(index), int(attempt)


def _ages(history: History, samples: Iterable[_Aged]) -> Ages:
    found = list(samples)
    ages = [age for _, _, age in found]
    in_queue = [min(age, max(0, _queued(history, group, sample))) for group, sample, age in found]
    asked_ms = [max(each.dispatched_ms, history.first_ready_ms) for _, each, _ in found]
    starts_ms = [each.started_ms for _, each, _ in found]
    ends_ms = [each.finished_ms for _, each, _ in found]
    return Ages(
        samples=len(found),
        staleness={age: ages.count(age) for age in sorted(set(ages))},
        mean=_mean(ages),
        most=max(ages, default=0),
        in_flight_s=_spread(asked_ms, ends_ms),
        waiting_s=_spread(asked_ms, starts_ms),
        in_queue_s=_spread(ends_ms, [group.closed_ms for group, _, _ in found]),
        in_flight_versions=_mean(ages) - _mean(in_queue),
        in_queue_versions=_mean(in_queue),
    )


def _queued(history: History, group: GroupLife, sample: Sample) -> int:
    """Versions from its finish to the end of its group."""
    return group.trainer_version - max(0, history.version_at(sample.finished_ms))


def _spread(begins_ms: Sequence[int], ends_ms: Sequence[int]) -> Spread | None:
    if not begins_ms:
        return None
    seconds = np.maximum(0, np.asarray(ends_ms) - np.asarray(begins_ms)) / 1000
    p50, p95 = np.quantile(seconds, [0.5, 0.95])
    return Spread(float(seconds.mean()), float(p50), float(p95), float(seconds.max()), len(seconds))


# ---------------------------------------------------------------- who is dropped
def _outcomes(groups: Sequence[GroupLife]) -> dict[str, int]:
    names = [group.outcome for group in groups]
    return {name: names.count(name) for name in sorted(set(names), key=lambda each: (each != USED, each))}


def _classes(groups: Sequence[GroupLife], length: Callable[[GroupLife], float]) -> list[LengthClass]:
    """Quarters of all groups that have samples; fewer classes where lengths are equal."""
    known = [group for group in groups if group.samples]
    if not known:
        return []
    lengths = np.array([length(group) for group in known])
    bounds = np.quantile(lengths, [0.25, 0.5, 0.75, 1.0], method="inverted_cdf")
    place = np.searchsorted(bounds, lengths)
    n_trained = sum(group.outcome == USED for group in known)
    found = []
    for quarter, name in enumerate(_QUARTERS):
        here = [group for group, at in zip(known, place, strict=True) if at == quarter]
        if not here:
            continue
        outcomes = _outcomes(here)
        trained = outcomes.get(USED, 0)
        judged = len(here) - outcomes.get(OPEN, 0) - outcomes.get(SURPLUS, 0)
        found.append(
            LengthClass(
                name=name if len(here) < len(known) else "all",
                up_to=float(bounds[quarter]),
                groups=len(here),
                outcomes=outcomes,
                share_trained=trained / max(1, judged),
                share_of_trained=trained / max(1, n_trained),
                share_of_all=len(here) / len(known),
            )
        )
    return found


def _rows(groups: Sequence[GroupLife]) -> list[RowTried]:
    """Rows that were dropped as stale whenever they were tried, and those that starve now; the worst first."""
    tried: dict[int, list[GroupLife]] = {}
    for group in groups:
        if group.outcome in (USED, STALE):
            tried.setdefault(group.row, []).append(group)
    found = []
    for row, each in tried.items():
        each.sort(key=lambda group: (group.closed_ms, group.seq))
        used = [place for place, group in enumerate(each) if group.outcome == USED]
        since = each[used[-1] + 1 :] if used else each
        if since and (not used or len(since) >= TRIES):
            found.append(
                RowTried(
                    row=row,
                    stale=len(since),
                    trained=len(used),
                    is_starved=len(since) >= TRIES,
                    generation_s=_mean([group.generation_s for group in since]),
                    groups=[group.group_id for group in since[-TRIES:]],
                )
            )
    return sorted(found, key=lambda each: (-each.stale, each.row))


def _waste(history: History) -> Waste:
    generated = dict.fromkeys(_outcomes(list(history.groups.values())), 0)
    for group in history.groups.values():
        generated[group.outcome] += group.n_tokens
    trained = sum(
        member.n_trainable_tokens
        for step in history.steps
        for group in step.cut.groups
        if group.seq in history.groups and history.groups[group.seq].samples
        for member in group.members
    )
    used, still_open = generated.pop(USED, 0), generated.pop(OPEN, 0)
    lost = sum(generated.values()) - generated.get(SURPLUS, 0) + max(0, used - trained)
    return Waste(
        generated=used + still_open + sum(generated.values()),
        trained=trained,
        dropped=generated,
        not_trained=max(0, used - trained),
        open=still_open,
        share=lost / max(1, trained + lost),
    )


# ---------------------------------------------------------------- time and learning
def _times(history: History) -> Times | None:
    pairs = [pair for pair in follow(history, history.steps) if pair[0].ended_ms > 0]
    took = sum(step.cut.cut_ms - before.cut.cut_ms for before, step in pairs)
    if took <= 0:
        return None
    training = sum(before.ended_ms - before.cut.cut_ms for before, _ in pairs)
    waiting = sum(
        max(0, min(complete_ms(history, step), step.cut.cut_ms) - before.ended_ms) for before, step in pairs
    )
    first, last = pairs[0][0].cut.cut_ms, pairs[-1][1].cut.cut_ms
    busy = [
        share for engine in history.engines.values() for at_ms, share in engine.busy if first <= at_ms <= last
    ]
    idle = [1 - share for share in busy]
    return Times(
        steps_per_s=1000 * len(pairs) / took,
        training=training / took,
        waiting=waiting / took,
        overhead=max(0.0, 1 - (training + waiting) / took),
        engine_busy=_mean(busy) if busy else None,
        engine_idle=_mean(idle) if idle else None,
        in_flight=_in_flight(history, first, last),
    )


def _in_flight(history: History, first_ms: int, last_ms: int) -> float:
    overlap = sum(
        max(0, min(sample.finished_ms, last_ms) - max(sample.started_ms, first_ms))
        for group in history.groups.values()
        for sample in group.samples.values()
    )
    return overlap / max(1, last_ms - first_ms)


def _learning(history: History) -> Learning:
    steps = history.steps[-_LAST_STEPS:]
    rewards = [step.reward for step in steps]
    ages = [
        member.staleness
        for step in steps
        for group in step.cut.groups
        for member in group.members
        if member.staleness >= 0
    ]
    return Learning(
        steps=len(steps),
        reward=_mean(rewards),
        reward_slope=slope([step.cut.step for step in steps], rewards),
        mean_staleness=_mean(ages),
    )


def _mean(values: Sequence[Any]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
