"""Rows from records: one source for each topic that tables come from, asked for one entry after the other.

    entry ──► Source.look ──► Look(rows of whichever tables, rows that are open)

A row that a later record may still change (an open group, a sample without its verdict) is open: the export writes it
last, apart, and looks at its record again the next time. Each record gives a row somewhere: what is a copy,
void, of an unknown type or unreadable is a row of `failures`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from consumers.telemetry import recorded_sums, summarize
from replay.export import outcomes as words
from replay.export.lookups import Dispatches, Measurements, Verdicts, completions
from replay.export.outcomes import Outcomes
from replay.export.tables import (
    DROPS,
    FAILURES,
    FLEET,
    GROUPS,
    METRICS,
    REWARDS,
    SAMPLES,
    STEPS,
    VERSIONS,
    Row,
)
from replay.fields import type_of
from replay.records import Entry
from streams import columns
from streams.errors import CodecError, InvalidEvent
from streams.events import (
    BatchCut,
    Closing,
    DeadLetter,
    Event,
    MemberOf,
    MembersMissing,
    Metrics,
    RewardAssigned,
    RolloutFailed,
    ScoringFailed,
    StepMeasured,
    TaskDispatched,
    TaskSkipped,
    TeacherFailed,
    TeacherScored,
    TrajectoryFinished,
    VersionRuns,
    WeightsPublished,
)
from streams.log import EventLog, read_all
from streams.topics import Topics
from streams.trajectory import open_payload

Rows = Sequence[tuple[str, Row]]  # (table, row)


class Look(NamedTuple):
    rows: Rows = ()
    open: Rows = ()


class Source:
    """Rows of one topic. `begin` comes before the entries of a partition, which come in order."""

    def __init__(self, log: EventLog, topics: Topics, outcomes: Outcomes, word: str) -> None:
        self.log, self.topics, self.outcomes, self.word = log, topics, outcomes, word

    def begin(self, partition: int, position: int) -> None:
        """Entries before `position` were looked at by an earlier export."""

    def look(self, partition: int, entry: Entry, *, again: bool = False) -> Look:
        """`again`: an earlier look at this entry gave open rows; only these are given again."""
        if entry.event is None:
            return self._failed(partition, entry, reason="unknown type" if entry.unknown else "unreadable")
        return self.rows(partition, entry, entry.event, again)

    def rows(self, partition: int, entry: Entry, event: Event, again: bool) -> Look:
        return Look()

    def _failed(self, partition: int, entry: Entry, **said: Any) -> Look:
        row = {
            "topic": self.word,
            "partition": partition,
            "offset": entry.offset,
            "type": type_of(entry),
            "uid": getattr(entry.event, "uid", None),
            "group_id": getattr(entry.event, "group_id", None),
            "stage": None,
            "detail": entry.problem or None,
            "engine": getattr(entry.event, "engine", None) or None,
            "at_ms": entry.timestamp_ms or None,
            **said,
        }
        return Look([(FAILURES, row)])

    def _copy(self, partition: int, entry: Entry) -> Look:
        return self._failed(partition, entry, reason=words.DUPLICATE)


class Trajectories(Source):
    """Samples, each with its verdict and the outcome of its group."""

    def begin(self, partition: int, position: int) -> None:
        self._verdicts = Verdicts(self.log, self.topics, partition)
        self._dispatches = Dispatches(self.log, self.topics, partition)
        self._seen: dict[str, int] = {}  # group id and attempt → bits of the indices that came
        topic = self.topics.name(self.word)
        for record in read_all(self.log, topic, partition, self.log.start(topic, partition), position):
            if record.header("type") == b"trajectory_finished":
                self._is_copy((record.header("id") or b"").decode("utf-8", "replace"))

    def _is_copy(self, uid: str) -> bool:
        group_id, index, attempt = uid.rsplit("/", 2) if uid.count("/") >= 2 else (uid, "0", "0")
        key, bit = f"{group_id}/{attempt}", 1 << min(int(index) if index.isdecimal() else 0, 1 << 16)
        known = self._seen.get(key, 0)
        self._seen[key] = known | bit
        return bool(known & bit)

    def rows(self, partition: int, entry: Entry, event: Event, again: bool) -> Look:
        if isinstance(event, RolloutFailed):
            return self._failed(
                partition, entry, stage="rollout", reason=event.reason, detail=event.detail or None
            )
        if not isinstance(event, TrajectoryFinished):
            return self._failed(partition, entry, reason="unexpected")
        is_copy = not again and self._is_copy(event.uid)
        try:
            payload = open_payload(event)
        except (CodecError, InvalidEvent) as error:
            return self._failed(partition, entry, reason="unreadable", detail=str(error))
        verdict = self._verdicts.of(entry.offset)
        row = {
            **_member(event),
            "partition": partition,
            "offset": entry.offset,
            **self._result(partition, entry.offset, event, is_copy),
            **_scored(verdict),
            "prompt": event.prompt,
            "prompt_ids": payload.prompt_ids,
            "response": event.response,
            "response_ids": payload.response_ids,
            "logprobs": payload.logprobs,
            "loss_mask": payload.loss_mask,
            "versions": payload.versions,
            "turns": event.turns,
            "n_prompt_tokens": event.n_prompt_tokens,
            "n_response_tokens": event.n_response_tokens,
            "finish_reason": event.finish_reason,
            "label": event.label,
            "metadata": event.metadata,
            "temperature": event.temperature,
            "engine": event.engine,
            "claims": event.claims or None,
            "dispatched_ms": self._dispatches.at_ms(event.task_offset, event.attempt),
            "started_ms": event.started_ms or None,
            "finished_ms": event.finished_ms or entry.timestamp_ms,
        }
        row["in_flight_s"] = _seconds(row["dispatched_ms"], event.finished_ms)
        row["in_queue_s"] = _seconds(event.finished_ms, row["closed_ms"])
        rows = [(SAMPLES, row)]
        return Look(rows) if self._is_settled(row, verdict) else Look(open=rows)

    def _result(
        self, partition: int, offset: int, event: TrajectoryFinished, is_copy: bool
    ) -> dict[str, Any]:
        trained = self.outcomes.of_sample(partition, offset)
        closed = self.outcomes.of_group(event.seq)
        outcome = words.OPEN if closed is None else closed.outcome
        if trained is None and is_copy:
            outcome, closed = words.DUPLICATE, None
        elif trained is None and outcome in (words.TRAINED, words.SKIPPED):
            outcome = words.UNUSED
        return {
            "outcome": outcome,
            "step": closed.step if closed and trained else None,
            "reason": closed.reason if closed else None,
            "closed_ms": closed.at_ms if closed else None,
            "advantage": trained.advantage if trained else None,
            "staleness": trained.staleness if trained else None,
            "n_trainable_tokens": trained.n_trainable_tokens if trained else None,
        }

    def _is_settled(self, row: Row, verdict: Entry | None) -> bool:
        if self.outcomes.finished or row["outcome"] == words.DUPLICATE:
            return True
        is_closed = row["outcome"] != words.OPEN
        return (
            is_closed and verdict is not None and (row["step"] is None or self.outcomes.is_final(row["step"]))
        )


class Rewards(Source):
    def begin(self, partition: int, position: int) -> None:
        self._verdicts = Verdicts(self.log, self.topics, partition)

    def rows(self, partition: int, entry: Entry, event: Event, again: bool) -> Look:
        if isinstance(event, (TeacherScored, TeacherFailed)):
            return Look()  # no verdict, and no table of its own
        if not isinstance(event, (RewardAssigned, ScoringFailed)):
            return self._failed(partition, entry, reason="unexpected")
        if self._verdicts.place(event.trajectory_offset) not in (entry.offset, None):
            return self._copy(partition, entry)
        if isinstance(event, ScoringFailed):
            return self._failed(
                partition, entry, stage=event.stage, reason=event.reason, detail=event.detail or None
            )
        row = {
            **_member(event),
            "partition": partition,
            "offset": entry.offset,
            "trajectory_offset": event.trajectory_offset,
            "reward": event.reward,
            "components": event.components,
            "n_prompt_tokens": event.n_prompt_tokens,
            "n_response_tokens": event.n_response_tokens,
            "n_trainable_tokens": _count(event.trainable_versions),
            "finish_reason": event.finish_reason,
            "scoring_s": event.scoring_s,
            "started_ms": event.started_ms or None,
            "finished_ms": event.finished_ms or None,
            "scored_ms": entry.timestamp_ms,
            "payload_digest": event.payload_digest or None,
        }
        return Look([(REWARDS, row)])


class Tasks(Source):
    """Groups, from their first dispatches."""

    def begin(self, partition: int, position: int) -> None:
        self._dispatches = Dispatches(self.log, self.topics, partition)
        self._completions = completions(self.log, self.topics, partition)

    def rows(self, partition: int, entry: Entry, event: Event, again: bool) -> Look:
        if not isinstance(event, (TaskDispatched, TaskSkipped)):
            return self._failed(partition, entry, reason="unexpected")
        if isinstance(event, TaskDispatched) and event.attempt:
            return Look()  # counted in the row of its group
        if not self._dispatches.is_first(event.seq, entry.offset):
            return self._copy(partition, entry)
        row = self._group(partition, entry, event)
        rows = [(GROUPS, row)]
        is_final = self.outcomes.finished or (
            row["outcome"] != words.OPEN and (row["step"] is None or self.outcomes.is_final(row["step"]))
        )
        look = Look(rows) if is_final else Look(open=rows)
        if isinstance(event, TaskSkipped) and not again:
            failed = self._failed(
                partition, entry, stage="feeder", reason=event.reason, detail=event.detail or None
            )
            look = look._replace(rows=[*look.rows, *failed.rows])
        return look

    def _group(self, partition: int, entry: Entry, event: TaskDispatched | TaskSkipped) -> dict[str, Any]:
        closed = self.outcomes.of_group(event.seq)
        complete = self._completions.get(event.seq)
        task = event if isinstance(event, TaskDispatched) else None
        return {
            "group_id": event.group_id,
            "seq": event.seq,
            "partition": partition,
            "offset": entry.offset,
            "data_epoch": event.data_epoch,
            "row": event.row,
            "n_samples": task.n_samples if task else None,
            "outcome": closed.outcome if closed else words.OPEN,
            "step": closed.step if closed else None,
            "reason": closed.reason if closed else None,
            "detail": closed.detail if closed else None,
            "trainer_version": closed.version if closed else None,
            "closed_ms": closed.at_ms if closed else None,
            "min_version": task.min_version if task else None,
            "redispatches": self._dispatches.redispatches(entry.offset),
            "n_members": complete.n_members if complete else None,
            "reward_mean": complete.reward_mean if complete else None,
            "reward_std": complete.reward_std if complete else None,
            "n_response_tokens": complete.n_response_tokens if complete else None,
            "dispatched_ms": (task.dispatched_ms if task else 0) or entry.timestamp_ms,
            "completed_ms": complete.at_ms if complete else None,
            "prompt": task.prompt if task else None,
            "label": task.label if task else None,
            "metadata": task.metadata if task else None,
        }


class Groups(Source):
    """Completed and dropped groups are in the tables of `tasks` and of the ledger; what was missing is here."""

    def rows(self, partition: int, entry: Entry, event: Event, again: bool) -> Look:
        if not isinstance(event, MembersMissing):
            return Look()
        detail = f"members {event.indices}, asked for as attempt {event.attempt}"
        detail += f": {event.detail}" if event.detail else ""
        return self._failed(partition, entry, stage="collector", reason=event.reason, detail=detail)


class Ledger(Source):
    def begin(self, partition: int, position: int) -> None:
        self._measurements = Measurements(self.log, self.topics)

    def rows(self, partition: int, entry: Entry, event: Event, again: bool) -> Look:
        if self.outcomes.is_void(entry):
            return self._failed(partition, entry, stage="trainer", reason="void")
        rows: list[tuple[str, Row]] = []
        if isinstance(event, Closing) and not again:
            rows += [(DROPS, row) for row in _drops(entry, event)]
        if isinstance(event, WeightsPublished):
            rows.append((VERSIONS, _version(entry, event)))
        if not isinstance(event, BatchCut):
            return Look(rows)
        step = (STEPS, self._step(entry, event))
        return Look([*rows, step]) if self.outcomes.is_final(event.step, later=2) else Look(rows, [step])

    def _step(self, entry: Entry, event: BatchCut) -> dict[str, Any]:
        members = [member for group in event.groups for member in group.members]
        ages = [member.staleness for member in members if member.staleness >= 0]
        return {
            "step": event.step,
            "epoch": event.epoch,
            "version": event.version,
            "partition": 0,
            "offset": entry.offset,
            "cut_ms": event.cut_ms,
            "limit": event.limit,
            "on_stale": event.on_stale,
            "seed": event.seed,
            "n_groups": len(event.groups),
            "n_samples": len(members),
            "n_trainable_tokens": sum(member.n_trainable_tokens for member in members),
            "reward_mean": float(np.mean([member.reward for member in members])) if members else None,
            "staleness_mean": float(np.mean(ages)) if ages else None,
            "staleness_max": max(ages, default=None),
            "n_dropped": len(event.drops),
            "duplicates": event.duplicates,
            "last": event.last,
            "skipped": self.outcomes.skipped.get(event.step),
            "metrics": _measures(self._measurements.of(event.epoch, event.step)),
        }


class Fleet(Source):
    def rows(self, partition: int, entry: Entry, event: Event, again: bool) -> Look:
        names = ("engine", "replica", "host", "pid", "epoch", "version", "digest", "load_s", "stall_s")
        row: dict[str, Any] = {name: getattr(event, name, None) for name in (*names, "reason", "detail")}
        at_ms = getattr(event, "at_ms", 0) or entry.timestamp_ms
        place = {"type": type_of(entry), "partition": partition, "offset": entry.offset, "at_ms": at_ms}
        return Look([(FLEET, row | place)])


class Gauges(Source):
    def rows(self, partition: int, entry: Entry, event: Event, again: bool) -> Look:
        if not isinstance(event, Metrics):
            return Look()  # what the trainer measured of a step is in the row of the step
        place = {
            "source": event.source,
            "step": event.step if event.step >= 0 else None,
            "partition": partition,
            "offset": entry.offset,
            "at_ms": event.at_ms or entry.timestamp_ms,
        }
        return Look(
            [(METRICS, {**place, "name": name, "value": value}) for name, value in event.values.items()]
        )


class Letters(Source):
    def rows(self, partition: int, entry: Entry, event: Event, again: bool) -> Look:
        if not isinstance(event, DeadLetter):
            return self._failed(partition, entry, reason="unexpected")
        identity = dict(event.raw_headers).get("id", b"").decode("utf-8", "replace")
        where = f"{event.topic}/{event.partition}:{event.offset}"
        return self._failed(
            partition,
            entry,
            uid=identity if "/" in identity else None,
            group_id=identity.split("/")[0] or None,
            stage=event.stage,
            reason=event.reason,
            detail=f"{where}: {event.detail}" if event.detail else where,
        )


SOURCES: dict[str, type[Source]] = {
    "tasks": Tasks,
    "trajectories": Trajectories,
    "rewards": Rewards,
    "groups": Groups,
    "ledger": Ledger,
    "fleet": Fleet,
    "metrics": Gauges,
    "dead": Letters,
}
# what `--topic` stands for: the topics that must be read, and the tables that they give (failures apart)
READ = {word: (word,) for word in SOURCES} | {"groups": ("tasks", "groups")}
GIVES = {
    "tasks": (GROUPS,),
    "trajectories": (SAMPLES,),
    "rewards": (REWARDS,),
    "groups": (GROUPS,),
    "ledger": (STEPS, DROPS, VERSIONS),
    "fleet": (FLEET,),
    "metrics": (METRICS,),
    "dead": (),
}


def _member(event: MemberOf) -> dict[str, Any]:
    return {
        "uid": event.uid,
        "group_id": event.group_id,
        "seq": event.seq,
        "index": event.index,
        "attempt": event.attempt,
    }


def _scored(verdict: Entry | None) -> dict[str, Any]:
    event = verdict.event if verdict is not None else None
    is_scored = isinstance(event, RewardAssigned)
    failure = f"{event.reason}: {event.detail}".rstrip(": ") if isinstance(event, ScoringFailed) else None
    return {
        "reward": event.reward if is_scored else None,
        "components": event.components if is_scored else None,
        "scoring_failure": failure,
        "scored_ms": verdict.timestamp_ms or None if verdict is not None else None,
        "scoring_s": event.scoring_s if is_scored else None,
    }


def _drops(entry: Entry, event: Closing) -> list[Row]:
    step, at_ms = None, entry.timestamp_ms
    if isinstance(event, BatchCut):
        step, at_ms = event.step, event.cut_ms
    return [
        {
            "group_id": drop.group_id,
            "seq": drop.seq,
            "reason": drop.reason,
            "detail": drop.detail or None,
            "staleness": drop.staleness if drop.staleness >= 0 else None,
            "step": step,
            "epoch": event.epoch,
            "trainer_version": event.version,
            "partition": 0,
            "offset": entry.offset,
            "closed_ms": at_ms,
        }
        for drop in event.drops
    ]


def _version(entry: Entry, event: WeightsPublished) -> dict[str, Any]:
    return {
        "version": event.version,
        "epoch": event.epoch,
        "step": event.step,
        "partition": 0,
        "offset": entry.offset,
        "kind": event.kind,
        "base_version": event.base_version if event.base_version >= 0 else None,
        "digest": event.digest,
        "nbytes": event.nbytes,
        "uris": event.uris,
        "forked_at": event.forked_at if event.forked_at >= 0 else None,
        "published_ms": event.published_ms or entry.timestamp_ms,
    }


def _measures(measured: StepMeasured | None) -> dict[str, float] | None:
    if measured is None:
        return None
    values = dict(measured.values)
    if (
        sums := recorded_sums(measured)
    ) is not None:  # else the values that were recorded as such are still true
        values |= summarize(sums)
    return values


def _seconds(begin_ms: int | None, end_ms: int | None) -> float | None:
    return (end_ms - begin_ms) / 1000 if begin_ms and end_ms else None


def _count(runs: VersionRuns) -> int:
    return sum(n_tokens for _, _, n_tokens in columns.merge_runs(runs))
