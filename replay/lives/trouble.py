"""What went wrong on the way: failed attempts, members asked for again, refused records, second copies."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from replay.lives.facts import Copy, Failure, Letter
from replay.lives.reasons import explain
from replay.lives.seek import FAILED, FINISHED, id_of, place, type_of
from replay.lives.trail import Trail, events, id_of_letter
from replay.records import Entry, entry_of
from streams.events import (
    MembersMissing,
    RolloutFailed,
    ScoringFailed,
    TaskDispatched,
    TeacherFailed,
    TeacherScored,
)
from streams.log import Record


def failures_of(trail: Trail, *, uid: str | None = None) -> list[Failure]:
    """Of the whole group, or of one attempt at one member, in time order."""
    found = [*_rollout_failures(trail), *_scoring_failures(trail), *_missing(trail)]
    return sorted((each for each in found if uid is None or each.uid == uid), key=lambda each: each.at_ms)


def _rollout_failures(trail: Trail) -> Iterator[Failure]:
    for record in trail.trajectories:
        entry = entry_of(record) if type_of(record) == FAILED else None
        if entry is not None and isinstance(entry.event, RolloutFailed):
            event = entry.event
            detail = f"{event.engine}: {event.detail}" if event.engine else event.detail
            yield _failure(entry, "trajectories", trail, "rollout", event.uid, event.reason, detail)


def _scoring_failures(trail: Trail) -> Iterator[Failure]:
    for entry, event in events(trail.rewards, ScoringFailed):
        if event.stage != "rollout":  # else it only hands on a RolloutFailed
            yield _failure(entry, "rewards", trail, event.stage, event.uid, event.reason, event.detail)


def _missing(trail: Trail) -> Iterator[Failure]:
    for entry, event in events(trail.groups, MembersMissing):
        for index in event.indices:
            uid = f"{trail.group_id}/{index}/{event.attempt - 1}"
            detail = f"asked for again as attempt {event.attempt}. {event.detail}".rstrip()
            yield _failure(entry, "groups", trail, "collector", uid, event.reason, detail)


def _failure(
    entry: Entry, word: str, trail: Trail, stage: str, uid: str, reason: str, detail: str
) -> Failure:
    known = explain(reason)
    return Failure(
        at_ms=entry.timestamp_ms,
        place=place(word, trail.partition, entry.offset),
        stage=stage,
        uid=uid,
        reason=reason,
        meaning=known.meaning,
        setting=known.setting,
        detail=detail,
    )


def letters_of(trail: Trail, uid: str | None = None) -> list[Letter]:
    """Refused records of the group; of one sample, those that name it or no sample at all."""
    return [
        Letter(
            at_ms=letter.at_ms or entry.timestamp_ms,
            place=place("dead", 0, entry.offset),
            record=f"{letter.topic}/{letter.partition}:{letter.offset}" if letter.offset >= 0 else "",
            stage=letter.stage,
            reason=letter.reason,
            meaning=explain(letter.reason).meaning,
            detail=letter.detail,
        )
        for entry, letter in trail.letters
        if uid is None or id_of_letter(letter) in (uid, trail.group_id, "")
    ]


# ---------------------------------------------------------------- copies
def copies_of(trail: Trail, uid: str | None = None) -> list[Copy]:
    """Second records of one identity: dispatches, trajectories, verdicts, outcomes. Each is passed over by all."""
    found = [*_trajectory_copies(trail), *_entry_copies(trail)]
    return [copy for name, copy in found if uid is None or name == uid]


def _trajectory_copies(trail: Trail) -> Iterator[tuple[str, Copy]]:
    seen: dict[str, Record] = {}
    for record in trail.trajectories:
        uid = id_of(record)
        first = seen.setdefault(uid, record)
        if first is not record:
            what = "a second trajectory" if type_of(record) == FINISHED else "a second failure"
            yield (
                uid,
                Copy(
                    at_ms=record.timestamp_ms,
                    place=place("trajectories", record.partition, record.offset),
                    what=f"{what} of {uid}",
                    is_same=_body(first) == _body(record),
                ),
            )


def _body(record: Record) -> object:
    """What the sample is, without the writer's progress, which differs between honest copies."""
    event = entry_of(record).event
    return record.value if event is None else msgspec.structs.replace(event, progress={})  # pyright: ignore[reportArgumentType]


def _entry_copies(trail: Trail) -> Iterator[tuple[str, Copy]]:
    seen: set[tuple[str, str]] = set()
    for word, entries in (("tasks", trail.tasks), ("rewards", trail.rewards), ("groups", trail.groups)):
        for entry in entries:
            if entry.event is None or isinstance(entry.event, (MembersMissing, TeacherScored, TeacherFailed)):
                continue
            identity = _identity(trail, entry)
            if (word, identity) in seen:
                what = f"a second {type(entry.event).__name__} of {identity}"
                at = place(word, trail.partition, entry.offset)
                yield identity, Copy(at_ms=entry.timestamp_ms, place=at, what=what)
            seen.add((word, identity))


def _identity(trail: Trail, entry: Entry) -> str:
    event = entry.event
    if isinstance(event, TaskDispatched) and event.attempt:
        return f"{trail.group_id} attempt {event.attempt}, members {event.indices}"
    return getattr(event, "uid", trail.group_id)
