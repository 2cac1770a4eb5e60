"""What the event model is fed with: every duration of a run, as its log shows it.

    dispatched ─pickup─► generated (one time a sample) ─collect─► complete ─wake or turn─► cut ─train─► new version
        ▲                                                                                                   │
        └──────────────── feed ◄──────────────────── publish ◄──────────────────────────────────────────────┘
                                                        └─sync─► engines hold it

Groups are kept in the order of their dispatch and are drawn in blocks of some batches: groups that are under way
together share a load peak, a tool that hangs, a slow scorer, and drawn one by one the slowest of a batch would be too
slow, and would be overtaken too often.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from replay.ages.crowding import Busy, Crowding, busy_times, measure_crowding, surroundings
from replay.ages.history import STALE, SURPLUS, USED, GroupLife, History, Step
from streams.errors import MillstreamError

LEAST_STEPS = 8  # from which a model is made
_IN_ORDER = 0.8  # share of neighbours; about a half where the order is left to chance
_LEAST_CHANCES, _OVERTAKE = 0.02, 0.1  # share of groups that could overtake others, and of these, that did
_LEAST_OF_A_KIND = 5  # waits of one kind, below which both kinds are drawn from together


class GroupTimes(NamedTuple):
    """One recorded group. `work_s` are seconds that each sample would have taken alone on its engine."""

    work_s: tuple[float, ...]
    n_tokens: int
    pickup_s: float
    collect_s: float
    is_slow: bool  # of the slowest quarter
    is_refused: bool  # the collector dropped it (a filter): it closes without being trained
    is_first: bool = True  # of the groups that were dispatched together, for one version


class Durations(NamedTuple):
    """Pools to draw from, in seconds, and the sizes of the run."""

    groups: list[GroupTimes]
    train_s: list[float]  # cut to the end of the step
    turn_s: list[float]  # end of a step to the next cut, where the groups were there
    wake_s: list[float]  # the last group that a batch needed to the cut, where the trainer waited for it
    publish_s: list[float]  # end of the step to the version in the ledger
    feed_s: list[float]  # a version in the ledger to the dispatch of the groups that it makes room for
    sync_s: list[float]  # a version in the ledger to an engine that holds it
    collects_in_order: bool  # groups were complete in the order in which their last samples ended
    waves_keep_order: bool  # no group ended before those that were dispatched for an earlier version
    stall_s: float  # that an engine stands still while it takes a version
    crowding: Crowding
    engines: int
    slots: int  # samples in flight on one engine, at most
    batch: int  # groups of a step
    partitions: int  # that engines share


class Recorded(msgspec.Struct, frozen=True):
    """What really happened over the steps that the durations come from."""

    limit: int
    on_stale: str
    first_step: int
    last_step: int
    steps_per_s: float
    wait_share: float  # of the time, the trainer had not enough groups
    mean_staleness: float  # over trained samples
    max_staleness: int
    waste: float  # tokens dropped as stale / tokens of all groups closed by the trainer's rule
    slow_ratio: (
        float  # of the slowest quarter: its share of the trained groups by its share of all; 1 is fair
    )
    in_flight: float  # samples, mean


def steady_steps(history: History) -> list[Step]:
    """The newest steps that were cut at one limit, less the first few, in which the pipeline still filled.

    Raises MillstreamError, saying how many there are, when they are too few to make a model from.
    """
    steps = [step for step in history.steps if step.ended_ms > 0]
    same: list[Step] = []
    for step in reversed(steps):
        if step.cut.limit != steps[-1].cut.limit:
            break
        same.append(step)
    same.reverse()
    if len(same) < LEAST_STEPS:
        have = f"{len(same)} at limit {same[-1].cut.limit}" if same else "none"
        raise MillstreamError(
            f"a what-if needs at least {LEAST_STEPS} measured steps that were cut at one limit; there are {have}: "
            "let the run go on and ask again"
        )
    fills = 2 * (same[-1].cut.limit + 1)
    return same[min(fills, len(same) // 4) :]


def measure_durations(history: History, *, slots: int | None = None) -> tuple[Durations, Recorded]:
    """Durations and outcome of the steady part of a run. `slots`: of one engine; None: the most seen in flight."""
    steps = steady_steps(history)
    closed = _closed_in(history, steps)
    complete = [group for group in closed if group.decided_ms and group.samples]
    if not complete:
        raise MillstreamError(
            "no group of the newest steps has its samples in the log: nothing to make a model from"
        )
    engines = max(1, len({event.engine for event in history.ready}))
    busy = busy_times(history, steps)
    slots = slots or max(1, -(-busy.most // engines))
    crowding = measure_crowding(complete, steps, busy, engines)
    slow_from = slow_threshold(complete)
    beside = _Beside(busy, crowding, engines, slots, slow_from, _held_ms(history))
    run = history.view.run
    durations = Durations(
        groups=[
            _group_times(group, beside, is_first=before is None or before.min_version != group.min_version)
            for before, group in zip([None, *complete], complete, strict=False)
        ],
        train_s=[_work(step, busy, crowding) for step in steps],
        **_trainer_waits(history, steps),
        publish_s=_publish_s(history, steps),
        feed_s=_feed_s(history, closed),
        sync_s=_sync_s(history, steps),
        collects_in_order=_in_order(complete),
        waves_keep_order=_waves_keep_order(complete),
        stall_s=float(np.mean([event.stall_s for event in history.ready])) if history.ready else 0.0,
        crowding=crowding,
        engines=engines,
        slots=slots,
        batch=run.rollout_batch_size if run is not None else len(steps[-1].cut.groups),
        partitions=run.partitions if run is not None else engines,
    )
    return durations, _recorded(history, steps, closed, slow_from, busy)


def slow_threshold(groups: Sequence[GroupLife]) -> float:
    """Seconds of generation from which a group is of the slowest quarter."""
    return float(np.quantile([group.generation_s for group in groups], 0.75, method="inverted_cdf"))


def _closed_in(history: History, steps: Sequence[Step]) -> list[GroupLife]:
    """Groups that ended in these steps, in the order of dispatch; those left over at the end of the run are not."""
    first, last = steps[0].cut.cut_ms, steps[-1].cut.cut_ms
    found = [
        group
        for group in history.groups.values()
        if first <= group.closed_ms <= last and group.outcome != SURPLUS
    ]
    return sorted(found, key=lambda group: group.seq)


# ---------------------------------------------------------------- pools
class _Beside(NamedTuple):
    """What the times of a group are judged by."""

    busy: Busy
    crowding: Crowding
    engines: int
    slots: int
    slow_from: float
    held_ms: dict[int, int]  # version → when an engine first had it or a newer one


def _held_ms(history: History) -> dict[int, int]:
    held: dict[int, int] = {}
    for event in history.ready:
        held[event.version] = min(event.at_ms, held.get(event.version, event.at_ms))
    first: int | None = None
    for version in range(max(held, default=-1), -1, -1):
        known = [each for each in (held.get(version), first) if each is not None]
        held[version] = first = min(known)
    return held


def _group_times(group: GroupLife, beside: _Beside, *, is_first: bool) -> GroupTimes:
    samples = list(group.samples.values())
    in_flight, training = surroundings(samples, beside.busy)
    crowding = beside.crowding
    slower = 1 + crowding.per_sample * in_flight / beside.engines
    slower *= 1 + crowding.beside_training * training
    seconds = np.array([max(1, each.finished_ms - each.started_ms) for each in samples]) / 1000
    last = max(each.finished_ms for each in samples)
    return GroupTimes(
        work_s=tuple((seconds / slower).tolist()),
        n_tokens=group.n_tokens,
        pickup_s=_pickup_s(group, beside),
        collect_s=max(0, group.decided_ms - last) / 1000,
        is_slow=group.generation_s >= beside.slow_from,
        is_refused=bool(group.refused),
        is_first=is_first,
    )


def _pickup_s(group: GroupLife, beside: _Beside) -> float:
    """From when its first sample could have been started to when it was; 0 where there was no slot for it."""
    all_slots = beside.engines * beside.slots
    at = np.array([group.dispatched_ms / 1000])
    if beside.busy.generation.mean(at, at + 1e-3)[0] > max(0, all_slots - group.n_samples):
        return 0.0
    first_ms = min(each.started_ms for each in group.samples.values())
    could_ms = max(group.dispatched_ms, beside.held_ms.get(group.min_version, 0))
    return max(0, first_ms - could_ms) / 1000


def _in_order(groups: Sequence[GroupLife]) -> bool:
    """Scorer and collector take one after the other, unless scoring has workers of its own that overtake."""
    ends = sorted((max(each.finished_ms for each in g.samples.values()), g.decided_ms) for g in groups)
    kept = [before[1] <= after[1] for before, after in itertools.pairwise(ends)]
    return sum(kept) >= _IN_ORDER * len(kept)


def _waves_keep_order(groups: Sequence[GroupLife]) -> bool:
    """An engine that decodes in one batch ends its samples in the order in which they began, even through a hiccup;
    where tools or lengths differ widely, later groups overtake. Known only where groups had the chance to."""
    had_chance = overtook = 0
    earlier_ms = latest_ms = version = 0
    for group in groups:
        if group.min_version != version:
            version, earlier_ms = group.min_version, latest_ms
        ended_ms = max(each.finished_ms for each in group.samples.values())
        latest_ms = max(latest_ms, ended_ms)
        had_chance += min(each.started_ms for each in group.samples.values()) < earlier_ms
        overtook += ended_ms < earlier_ms
    return had_chance >= _LEAST_CHANCES * len(groups) and overtook < _OVERTAKE * had_chance


def _work(step: Step, busy: Busy, crowding: Crowding) -> float:
    begin, end = np.array([step.cut.cut_ms / 1000]), np.array([step.ended_ms / 1000])
    beside = float(busy.generation.share(begin, end)[0])
    return max(1e-4, float(end[0] - begin[0]) / (1 + crowding.beside_generation * beside))


def _trainer_waits(history: History, steps: Sequence[Step]) -> dict[str, list[float]]:
    """Pools "turn_s" and "wake_s"."""
    turn_s: list[float] = []
    wake_s: list[float] = []
    for before, step in follow(history, steps):
        ready_ms = complete_ms(history, step)
        waits = ready_ms > before.ended_ms
        pool = wake_s if waits else turn_s
        pool.append(max(0, step.cut.cut_ms - max(ready_ms, before.ended_ms)) / 1000)
    both = [*turn_s, *wake_s] or [0.0]
    return {
        "turn_s": turn_s if len(turn_s) >= _LEAST_OF_A_KIND else both,
        "wake_s": wake_s if len(wake_s) >= _LEAST_OF_A_KIND else both,
    }


def follow(history: History, steps: Sequence[Step]) -> list[tuple[Step, Step]]:
    """Steps with the one before, where the trainer went from one to the other without a pause or a restart."""
    stops = sorted(history.pauses_ms)
    return [
        (before, step)
        for before, step in itertools.pairwise(steps)
        if before.cut.epoch == step.cut.epoch
        and not any(before.cut.cut_ms <= at_ms <= step.cut.cut_ms for at_ms in stops)
    ]


def complete_ms(history: History, step: Step) -> int:
    """When the last group that this step needed was there."""
    groups = (history.groups.get(group.seq) for group in step.cut.groups)
    return max((group.decided_ms for group in groups if group is not None), default=0)


def _publish_s(history: History, steps: Sequence[Step]) -> list[float]:
    made = {(event.epoch, event.version): event.published_ms for event in history.view.versions}
    found = [
        made[step.cut.epoch, step.cut.version + 1] - step.ended_ms
        for step in steps
        if (step.cut.epoch, step.cut.version + 1) in made
    ]
    return [max(0, each) / 1000 for each in found] or [0.0]


def _feed_s(history: History, groups: Sequence[GroupLife]) -> list[float]:
    """One for each publication after which something was dispatched: to the first dispatch."""
    first: dict[int, int] = {}
    for group in groups:
        published_ms = history.published_before(group.dispatched_ms)
        if published_ms is not None:
            waited = group.dispatched_ms - published_ms
            first[published_ms] = min(waited, first.get(published_ms, waited))
    return [each / 1000 for each in first.values()] or [0.0]


def _sync_s(history: History, steps: Sequence[Step]) -> list[float]:
    made = {(event.epoch, event.version): event.published_ms for event in history.view.versions}
    begin, end = steps[0].cut.cut_ms, steps[-1].ended_ms
    found = [
        max(0, event.at_ms - made[event.epoch, event.version]) / 1000
        for event in history.ready
        if (event.epoch, event.version) in made and begin <= event.at_ms <= end
    ]
    return found or [0.0]


# ---------------------------------------------------------------- what really happened
def _recorded(
    history: History, steps: Sequence[Step], closed: Sequence[GroupLife], slow_from: float, busy: Busy
) -> Recorded:
    pairs = follow(history, steps)
    took_ms = sum(step.cut.cut_ms - before.cut.cut_ms for before, step in pairs)
    waited_ms = sum(max(0, complete_ms(history, step) - before.ended_ms) for before, step in pairs)
    ages = [m.staleness for step in steps for g in step.cut.groups for m in g.members if m.staleness >= 0]
    used = [group for group in closed if group.outcome == USED]
    kept = [group for group in closed if group.samples and not group.refused]
    stale = sum(group.n_tokens for group in closed if group.outcome == STALE)
    in_flight = busy.generation.mean(np.array([busy.begin_s]), np.array([busy.end_s]))
    return Recorded(
        limit=steps[-1].cut.limit,
        on_stale=steps[-1].cut.on_stale,
        first_step=steps[0].cut.step,
        last_step=steps[-1].cut.step,
        steps_per_s=1000 * len(pairs) / max(1, took_ms),
        wait_share=waited_ms / max(1, took_ms),
        mean_staleness=float(np.mean(ages)) if ages else 0.0,
        max_staleness=max(ages, default=0),
        waste=stale / max(1, stale + sum(group.n_tokens for group in used)),
        slow_ratio=_slow_share(used, slow_from) / max(1e-9, _slow_share(kept, slow_from)),
        in_flight=float(in_flight[0]),
    )


def _slow_share(groups: Sequence[GroupLife], slow_from: float) -> float:
    return sum(group.generation_s >= slow_from for group in groups) / max(1, len(groups))
