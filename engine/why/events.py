"""What the run's log says of trouble: counted by kind and reason, with the first and the last moment.

Payloads are not read: `trajectories` is left out, since what failed there is said again, in `rewards` or `groups`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from engine.commands import common
from engine.settings import Config
from streams.codec import Known, decode
from streams.errors import MillstreamError
from streams.events import (
    DeadLetter,
    EngineFailed,
    EngineQuarantined,
    Event,
    GroupDropped,
    MembersMissing,
    RunFinished,
    ScoringFailed,
    StepSkipped,
    TaskSkipped,
    TeacherFailed,
)
from streams.log import EventLog, read_all
from streams.topics import Topics

_LOOK_S = 15.0  # for a log that may not answer
_TOPICS = ("ledger", "fleet", "rewards", "groups", "dead", "tasks")
_KINDS = {
    b"step_skipped": "step skipped",
    b"engine_quarantined": "engine quarantined",
    b"engine_failed": "engine failed",
    b"scoring_failed": "sample failed",
    b"teacher_failed": "teacher failed",
    b"group_dropped": "group dropped",
    b"members_missing": "members missing",
    b"dead_letter": "dead letter",
    b"task_skipped": "row skipped",
}


class Trouble(msgspec.Struct, kw_only=True):
    """All events of one kind and reason."""

    kind: str
    reason: str
    count: int = 0
    first: float = 0.0  # seconds since 1970
    last: float = 0.0
    example: str = ""  # of the first: what it was about, and its detail


class Said(msgspec.Struct, kw_only=True):
    """What the log says of the whole run."""

    troubles: list[Trouble] = []
    steps: int = 0
    finished: str = ""  # its reason; "": it has not finished
    has_begun: bool = True  # there is a log
    problem: str = ""  # why it could not be read


def look(config: Config) -> Said:
    """Never raises for a log that is not there or does not answer: then `problem` says so."""
    try:
        if not common.has_log(config):
            return Said(has_begun=False)
        until = time.monotonic() + _LOOK_S
        from engine.roles import open_run_log

        with open_run_log(config, readonly=True, interrupted=lambda: time.monotonic() > until) as log:
            return _read(log, common.topics_of(config))
    except (MillstreamError, OSError) as error:
        return Said(problem=f"the log cannot be read: {error}")


def _read(log: EventLog, topics: Topics) -> Said:
    found: dict[tuple[str, str], Trouble] = {}
    said = Said()
    for word in _TOPICS:
        for timestamp_ms, tag, event in _events(log, topics, word):
            if isinstance(event, RunFinished):
                said.finished, said.steps = event.reason, max(said.steps, event.step)
            elif tag == b"batch_cut":
                said.steps += 1
            if tag not in _KINDS or event is None:
                continue
            reason, example = _told(event)
            key = (_KINDS[tag], reason)
            trouble = found.setdefault(
                key, Trouble(kind=key[0], reason=reason, first=timestamp_ms / 1000, example=example)
            )
            trouble.count += 1
            trouble.last = max(trouble.last, timestamp_ms / 1000)
    said.troubles = sorted(found.values(), key=lambda each: each.first)
    return said


def _events(log: EventLog, topics: Topics, word: str) -> Iterator[tuple[int, bytes, Event | None]]:
    topic = topics.name(word)
    for partition in range(log.partitions(topic)):
        for record in read_all(log, topic, partition, log.start(topic, partition)):
            tag = record.header("type") or b""
            if tag == b"batch_cut":
                yield record.timestamp_ms, tag, None
            elif tag in _KINDS or tag == b"run_finished":
                decoded = decode(record)
                yield record.timestamp_ms, tag, decoded.event if isinstance(decoded, Known) else None


def _told(event: Any) -> tuple[str, str]:
    """(reason, what it was about)."""
    if isinstance(event, ScoringFailed):
        return f"{event.stage}: {event.reason}", f"{event.uid}: {event.detail}"
    if isinstance(event, TeacherFailed):
        return event.reason, f"{event.uid}: {event.detail}"
    if isinstance(event, EngineFailed):
        return event.reason, f"{event.engine}: {event.detail}"
    if isinstance(event, EngineQuarantined):
        return "mismatch", f"{event.engine}: {event.mismatch:.3g} nat per token, limit {event.limit:.3g}"
    if isinstance(event, StepSkipped):
        return event.reason, f"step {event.step}: {event.detail}"
    if isinstance(event, (GroupDropped, MembersMissing, TaskSkipped)):
        return event.reason, f"group {event.group_id}: {event.detail}"
    if isinstance(event, DeadLetter):
        return event.reason, str(getattr(event, "detail", ""))
    return "", ""
