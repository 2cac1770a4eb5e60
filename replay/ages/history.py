"""The lives of all groups of a run, folded from its log: what was dispatched, generated, scored, and how it ended.

    tasks ───► dispatched                 ledger ──► used by a step, or dropped, and when
    rewards ─► the samples, their tokens  metrics ─► how long each step took, how busy the engines were
    groups ──► complete, and when         fleet ───► which version an engine had when

Payloads are never read. One group and its samples take about a kilobyte of memory.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from consumers.staleness import Lineage
from replay.ledger import LedgerEntry, RunView, read_ledger
from replay.progress import Engine
from replay.records import entries
from streams.events import (
    BatchCut,
    Closing,
    EngineReady,
    Event,
    GroupCompleted,
    GroupDropped,
    Metrics,
    Paused,
    RewardAssigned,
    StepMeasured,
    TaskDispatched,
    VersionRuns,
)
from streams.log import EventLog
from streams.topics import Topics

USED, OPEN, STALE = "used", "open", "stale"
SURPLUS = "surplus"  # left over when the run ended: says nothing about a rule


class Sample(NamedTuple):
    """One scored sample of a group."""

    dispatched_ms: int  # of the attempt that made it
    started_ms: int
    finished_ms: int
    n_tokens: int  # that the policy sampled
    n_response_tokens: int
    version: int  # of its oldest trainable token; -1: unknown


class GroupLife(msgspec.Struct):
    """A dispatched group. Times are milliseconds since 1970; 0 where a thing has not happened."""

    seq: int
    group_id: str
    data_epoch: int
    row: int
    n_samples: int
    dispatched_ms: int
    min_version: int = 0  # an engine had to hold at least this one
    attempts: dict[int, int] = {}  # attempt → when it was dispatched
    samples: dict[tuple[int, int], Sample] = {}  # (index, attempt) → sample
    decided_ms: int = 0  # when the collector's word on it could be read
    refused: str = ""  # the collector's reason, if it dropped the group
    outcome: str = OPEN  # "used", the reason of its drop, or "open"
    closed_ms: int = 0
    trainer_version: int = -1  # when it was closed
    step: int = -1  # that used it

    @property
    def generation_s(self) -> float:
        """Seconds of its slowest sample."""
        return max((each.finished_ms - each.started_ms for each in self.samples.values()), default=0) / 1000

    @property
    def longest(self) -> int:
        """Response tokens of its longest sample."""
        return max((each.n_response_tokens for each in self.samples.values()), default=0)

    @property
    def n_tokens(self) -> int:
        """That the policy sampled, over all its samples."""
        return sum(each.n_tokens for each in self.samples.values())


class Step(NamedTuple):
    """One step of the ledger, with the trainer's own clock where its metrics arrived (else -1)."""

    cut: BatchCut
    ended_ms: int
    step_s: float
    wait_s: float
    reward: float  # mean of its samples


class History(NamedTuple):
    """Everything that the report and the model are made from."""

    view: RunView
    groups: dict[int, GroupLife]  # by seq
    steps: list[Step]  # ascending
    measured: dict[tuple[int, int], StepMeasured]  # (epoch, step) → the trainer's sums
    engines: dict[str, Engine]
    ready: list[EngineReady]
    published: list[tuple[int, int]]  # (when, version), in time order
    pauses_ms: list[int]  # when the run was paused
    unreadable: int  # records of the topics read that are damaged, or of a newer major schema
    removed: int  # records of the data topics that retention took before

    def version_at(self, at_ms: int) -> int:
        """The newest published version at that time; -1 before the first."""
        place = bisect.bisect_right(self.published, (at_ms, 1 << 62))
        return self.published[place - 1][1] if place else -1

    def published_before(self, at_ms: int) -> int | None:
        """When the newest version at that time was published; None before the first."""
        place = bisect.bisect_right(self.published, (at_ms, 1 << 62))
        return self.published[place - 1][0] if place else None

    @property
    def first_ready_ms(self) -> int:
        """When an engine first had weights: nothing could be generated before."""
        return min((event.at_ms for event in self.ready), default=0)


class _Told(NamedTuple):
    """What the topic `metrics` holds."""

    steps: dict[int, Metrics]  # of a step made twice, the later
    measured: dict[tuple[int, int], StepMeasured]
    engines: dict[str, Engine]


def read_history(log: EventLog, topics: Topics) -> History:
    """Fold the log up to its present end; reads every topic but `trajectories` and `dead`."""
    ledger, view = read_ledger(log, topics)
    source = _Source(log, topics)
    told = _told(source)
    groups = _dispatched(source)
    _add_samples(source, groups, view.lineage())
    for timestamp_ms, event in source.events("groups"):
        if isinstance(event, (GroupCompleted, GroupDropped)):
            _decide(groups.get(event.seq), timestamp_ms, event)
    _close(groups, ledger)
    ready = [event for _, event in source.events("fleet") if isinstance(event, EngineReady)]
    return History(
        view=view,
        groups=groups,
        steps=[_step(cut.event, told.steps.get(cut.event.step)) for cut in view.cuts],
        measured=told.measured,
        engines=told.engines,
        ready=ready,
        published=sorted((event.published_ms, event.version) for event in view.versions),
        pauses_ms=[entry.timestamp_ms for entry in ledger if isinstance(entry.event, Paused)],
        unreadable=source.unreadable + sum(not entry.unknown_type for entry in view.problems),
        removed=source.removed(),
    )


class _Source:
    """The events of a run's topics; counts what cannot be read."""

    def __init__(self, log: EventLog, topics: Topics) -> None:
        self._log, self._topics = log, topics
        self.unreadable = 0

    def events(self, word: str) -> Iterator[tuple[int, Event]]:
        """(timestamp, event) of every readable record of a topic."""
        for partition in range(self._topics.count(word)):
            for entry in entries(self._log, self._topics.name(word), partition):
                if entry.event is not None:
                    yield entry.timestamp_ms, entry.event
                elif entry.unknown is None:
                    self.unreadable += 1

    def removed(self) -> int:
        known = self._log.topics()
        return sum(
            self._log.start(self._topics.name(word), partition)
            for word in ("tasks", "rewards", "groups")
            for partition in range(known.get(self._topics.name(word), 0))
        )


def _told(source: _Source) -> _Told:
    told = _Told({}, {}, {})
    for _, event in source.events("metrics"):
        if isinstance(event, StepMeasured):
            told.measured[event.epoch, event.step] = event
        elif isinstance(event, Metrics) and event.source == "trainer" and event.step >= 0:
            told.steps[event.step] = event
        elif isinstance(event, Metrics) and event.source.startswith("rollout"):
            told.engines.setdefault(event.source, Engine()).add(event)
    return told


def _dispatched(source: _Source) -> dict[int, GroupLife]:
    groups: dict[int, GroupLife] = {}
    for timestamp_ms, event in source.events("tasks"):
        if not isinstance(event, TaskDispatched):
            continue
        at_ms = event.dispatched_ms or timestamp_ms
        group = groups.get(event.seq)
        if group is None:
            where = (event.group_id, event.data_epoch, event.row)
            group = GroupLife(event.seq, *where, event.n_samples, at_ms, event.min_version)
            groups[event.seq] = group
        group.attempts.setdefault(event.attempt, at_ms)
    return groups


def _add_samples(source: _Source, groups: dict[int, GroupLife], lineage: Lineage) -> None:
    for _, event in source.events("rewards"):
        if not isinstance(event, RewardAssigned) or event.seq not in groups:
            continue
        group = groups[event.seq]
        sample = Sample(
            dispatched_ms=group.attempts.get(event.attempt, group.dispatched_ms),
            started_ms=event.started_ms,
            finished_ms=event.finished_ms,
            n_tokens=sum(n_tokens for _, _, n_tokens in event.trainable_versions),
            n_response_tokens=event.n_response_tokens,
            version=_oldest(event.trainable_versions, lineage),
        )
        group.samples.setdefault((event.index, event.attempt), sample)


def _oldest(runs: VersionRuns, lineage: Lineage) -> int:
    found = [lineage.effective(epoch, version) for epoch, version, n_tokens in runs if n_tokens]
    known = [version for version in found if version is not None]
    return min(known) if known and len(known) == len(found) else -1


def _decide(group: GroupLife | None, timestamp_ms: int, event: GroupCompleted | GroupDropped) -> None:
    """The first word of the collector is the one that counts."""
    if group is not None and not group.decided_ms:
        group.decided_ms = timestamp_ms
        group.refused = event.reason if isinstance(event, GroupDropped) else ""


def _close(groups: dict[int, GroupLife], ledger: list[LedgerEntry]) -> None:
    """Outcomes, by the ledger's valid records: the first mention of a group decides."""
    for entry in ledger:
        event = entry.event
        if entry.void or not isinstance(event, Closing):
            continue
        at_ms = event.cut_ms if isinstance(event, BatchCut) else entry.timestamp_ms
        outcomes = [(drop.seq, drop.reason, -1) for drop in event.drops]
        if isinstance(event, BatchCut):
            outcomes += [(group.seq, USED, event.step) for group in event.groups]
        for seq, outcome, step in outcomes:
            group = groups.get(seq)
            if group is not None and group.outcome == OPEN:
                group.outcome, group.step = outcome, step
                group.closed_ms, group.trainer_version = at_ms, event.version


def _step(cut: BatchCut, metrics: Metrics | None) -> Step:
    rewards = [member.reward for group in cut.groups for member in group.members]
    mean = sum(rewards) / max(1, len(rewards))
    if metrics is None or metrics.at_ms < cut.cut_ms:
        return Step(cut, -1, -1.0, -1.0, mean)
    values = metrics.values
    return Step(cut, metrics.at_ms, values.get("step_s", -1.0), values.get("wait_s", -1.0), mean)
