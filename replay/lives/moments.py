"""The timeline of a group: what each of its records says, in time order, one sentence fragment each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from replay.lives.facts import Dispatch, Failure, Letter, Moment
from replay.lives.phrases import counted
from replay.lives.run import RunFacts
from replay.lives.seek import FINISHED, id_of, place, type_of
from replay.lives.trail import Trail, events
from streams.events import (
    GroupCompleted,
    GroupDropped,
    MembersMissing,
    RewardAssigned,
    StepSkipped,
    TaskDispatched,
    TaskSkipped,
    TrajectoryFinished,
    WeightsPublished,
)
from streams.log import Record


def in_order(moments: Iterable[Moment]) -> list[Moment]:
    """By time; what happened in the same millisecond stays in the order of the data path."""
    return sorted(moments, key=lambda each: each.at_ms)


def dispatches_of(trail: Trail, index: int | None = None) -> list[Dispatch]:
    """Of the whole group, or of one member."""
    return [
        Dispatch(
            at_ms=event.dispatched_ms or entry.timestamp_ms,
            place=place("tasks", trail.partition, entry.offset),
            attempt=event.attempt,
            indices=list(event.indices),
            min_version=event.min_version,
        )
        for entry, event in events(trail.tasks, TaskDispatched)
        if index is None or not event.indices or index in event.indices
    ]


def task_moments(trail: Trail, index: int | None = None) -> Iterator[Moment]:
    for each in dispatches_of(trail, index):
        what = "dispatched" if each.attempt == 0 else f"dispatched again, attempt {each.attempt}"
        members = f"members {each.indices}, " if each.indices else ""
        detail = f"{members}partition {trail.partition}, engines from version {each.min_version} on"
        yield Moment(at_ms=each.at_ms, place=each.place, what=what, detail=detail)
    for entry, event in events(trail.tasks, TaskSkipped):
        at = place("tasks", trail.partition, entry.offset)
        yield Moment(
            at_ms=entry.timestamp_ms, place=at, what="row skipped", detail=f"{event.reason}: {event.detail}"
        )


def trajectory_moments(event: TrajectoryFinished, record: Record) -> Iterator[Moment]:
    at = place("trajectories", record.partition, record.offset)
    if event.started_ms:
        yield Moment(
            at_ms=event.started_ms,
            place=at,
            what="generation started",
            detail=f"{event.uid} on {event.engine}",
        )
    runs = ", ".join(f"e{epoch}-v{version} × {count}" for epoch, version, count in event.versions)
    detail = f"{event.uid}: {event.finish_reason}, {counted(event.n_response_tokens, 'token')} ({runs})"
    yield Moment(
        at_ms=event.finished_ms or record.timestamp_ms, place=at, what="generation finished", detail=detail
    )


def record_moments(trail: Trail, uid: str | None = None) -> Iterator[Moment]:
    """Of trajectories that are not opened: when they came to the log."""
    for record in trail.trajectories:
        if type_of(record) == FINISHED and (uid is None or id_of(record) == uid):
            at = place("trajectories", record.partition, record.offset)
            yield Moment(at_ms=record.timestamp_ms, place=at, what="sample written", detail=id_of(record))


def reward_moments(trail: Trail, uid: str | None = None) -> Iterator[Moment]:
    for entry, event in events(trail.rewards, RewardAssigned):
        if uid is None or event.uid == uid:
            at = place("rewards", trail.partition, entry.offset)
            detail = f"{event.uid}: {event.reward:g} ({event.scoring_s:.3g} s)"
            yield Moment(at_ms=entry.timestamp_ms, place=at, what="reward assigned", detail=detail)


def group_moments(trail: Trail, index: int | None = None) -> Iterator[Moment]:
    for entry in trail.groups:
        event, at = entry.event, place("groups", trail.partition, entry.offset)
        if isinstance(event, MembersMissing) and (index is None or index in event.indices):
            detail = (
                f"members {event.indices}, {event.reason}; wanted as attempt {event.attempt}. {event.detail}"
            )
            yield Moment(at_ms=entry.timestamp_ms, place=at, what="members missing", detail=detail)
        elif isinstance(event, GroupCompleted):
            detail = f"{len(event.members)} of {event.n_samples} members"
            yield Moment(at_ms=entry.timestamp_ms, place=at, what="group completed", detail=detail)
        elif isinstance(event, GroupDropped):
            detail = f"{event.reason} {event.detail}".rstrip()
            yield Moment(at_ms=entry.timestamp_ms, place=at, what="dropped by the collector", detail=detail)


def ledger_moments(run: RunFacts, trail: Trail) -> Iterator[Moment]:
    for each in trail.mentions:
        void = each.entry.void
        if each.group is not None:
            what, detail = (
                f"cut into step {each.cut.step}",
                f"epoch {each.record.epoch}, limit {each.cut.limit}",
            )
            if void:
                detail += f"; void: epoch {run.epoch_in_charge(each.entry.offset)} was in charge"
        else:
            assert each.drop is not None
            what, detail = "dropped", f"{each.drop.reason} {each.drop.detail}".rstrip()
        yield Moment(at_ms=each.at_ms, place=each.place, what=what, detail=detail, is_void=void)
    decided = trail.decided
    if decided is not None and decided.group is not None:
        yield from step_moments(run, decided.cut.step, decided.entry.offset)


def step_moments(run: RunFacts, step: int, after: int) -> Iterator[Moment]:
    """What became of a step: its version, or that it was skipped."""
    for entry in run.ledger:
        event, at = entry.event, place("ledger", 0, entry.offset)
        if entry.offset <= after or entry.void:
            continue
        if isinstance(event, WeightsPublished) and event.step == step:
            detail = f"e{event.epoch}-v{event.version}"
            yield Moment(
                at_ms=event.published_ms or entry.timestamp_ms,
                place=at,
                what="weights published",
                detail=detail,
            )
            return
        if isinstance(event, StepSkipped) and event.step == step:
            detail = f"{event.reason} {event.detail}".rstrip()
            yield Moment(at_ms=entry.timestamp_ms, place=at, what="step skipped", detail=detail)
            return


# ---------------------------------------------------------------- what went wrong
def failure_moments(failures: Sequence[Failure]) -> Iterator[Moment]:
    for each in failures:
        if each.stage != "collector":  # members missing have a moment of their own
            detail = f"{each.uid}: {each.reason} {each.detail}".rstrip()
            yield Moment(at_ms=each.at_ms, place=each.place, what=f"{each.stage} failed", detail=detail)


def letter_moments(letters: Sequence[Letter]) -> Iterator[Moment]:
    for each in letters:
        detail = f"{each.stage}: {each.reason} {each.detail}".rstrip()
        yield Moment(at_ms=each.at_ms, place=each.place, what="refused (dead letter)", detail=detail)
