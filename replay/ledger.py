"""The ledger for people and audits: every record in order, the void ones too, and what it all adds up to.

    ledger ──► LedgerReader.catch_up() ──► Entry(offset, event, void, problem) ──► RunView.add(entry)

After an `EpochStarted` at offset E, records of an older epoch are void for every reader (DESIGN §4.4). The stages'
fold (consumers/ledger.py) forgets void records and stops at what it cannot read; this one keeps and shows both, so
that an audit does not lean on the code that it audits.

Example:
    >>> from streams.memory import MemoryLog
    >>> log, topics = MemoryLog(), Topics("demo", 1)
    >>> topics.create(log)
    >>> read_run(log, topics).epoch
    -1
"""

from __future__ import annotations

import bisect
from typing import NamedTuple

from consumers.staleness import Lineage
from replay.records import Entry, TopicReader
from streams.events import (
    BatchCut,
    CheckpointSaved,
    Closing,
    CutGroup,
    DataEnded,
    Drop,
    EngineQuarantined,
    EpochStarted,
    Event,
    LimitChanged,
    Paused,
    Resumed,
    RunEnding,
    RunFinished,
    RunStarted,
    StepSkipped,
    WeightsPublished,
)
from streams.log import EventLog
from streams.topics import Topics


class LedgerEntry(NamedTuple):
    offset: int
    timestamp_ms: int
    event: Event | None  # None: unreadable, or of a type that this reader does not know
    void: bool = False  # of an epoch that was not, or no longer, in charge
    problem: str = ""  # why there is no event
    unknown_type: str = (
        ""  # there is no event because a newer writer knows more types: passed over and counted
    )


class Cut(NamedTuple):
    offset: int
    event: BatchCut


class Dropped(NamedTuple):
    offset: int
    drop: Drop


class RunView:
    """What the valid records so far add up to. Lists are in ledger order."""

    def __init__(self) -> None:
        self.run: RunStarted | None = None
        self.epochs: list[tuple[int, EpochStarted]] = []  # (its number, the record)
        self.cuts: list[Cut] = []
        self.drops: list[Dropped] = []
        self.skipped: list[StepSkipped] = []
        self.versions: list[WeightsPublished] = []
        self.checkpoints: list[CheckpointSaved] = []
        self.quarantines: list[tuple[int, EngineQuarantined]] = []  # (offset, the record)
        self.limits: list[tuple[int, LimitChanged]] = []  # (offset, the record)
        self.paused = False
        self.ending: RunEnding | None = None
        self.data_ended: DataEnded | None = None
        self.finished: RunFinished | None = None
        self.duplicates = 0  # copies of groups that the trainer passed over
        self.void: list[LedgerEntry] = []
        self.problems: list[LedgerEntry] = []
        self.first_ms = 0
        self.last_ms = 0

    @property
    def epoch(self) -> int:
        return self.epochs[-1][0] if self.epochs else -1

    @property
    def step(self) -> int:
        return self.cuts[-1].event.step if self.cuts else 0

    @property
    def version(self) -> int:
        """Of the newest published weights; -1 before the first."""
        return self.versions[-1].version if self.versions else -1

    def lineage(self) -> Lineage:
        """Which versions of older epochs are which of the present one, after all records so far."""
        lineage = Lineage()
        for epoch, _ in self.epochs:
            lineage.started(epoch)
        for event in self.versions:
            lineage.published(event.epoch, event.version, event.forked_at)
        return lineage

    def groups_trained(self) -> list[tuple[BatchCut, CutGroup]]:
        """Every group of every cut, with its cut; groups of skipped steps too (they are closed all the same)."""
        return [(cut.event, group) for cut in self.cuts for group in cut.event.groups]

    def limit_changed_before(self, ledger_position: int, step: int) -> LimitChanged | None:
        """The change that binds the cut of this step, which had read the ledger up to this position; None: none does.

        It is the newest one that the cut had read and that had begun before its successor came: a change that still
        waited for its step then was replaced.
        """
        begun = step
        for offset, event in reversed(self.limits):
            if offset >= ledger_position:
                continue
            if event.from_step <= begun:
                return event
            begun = self._step_before(offset) + 1
        return None

    def _step_before(self, offset: int) -> int:
        """The newest step that was cut before this offset of the ledger."""
        place = bisect.bisect_left(self.cuts, offset, key=lambda cut: cut.offset)
        return self.cuts[place - 1].event.step if place else 0

    def add(self, entry: LedgerEntry) -> None:
        self.first_ms = self.first_ms or entry.timestamp_ms
        self.last_ms = max(self.last_ms, entry.timestamp_ms)
        if entry.event is None:
            self.problems.append(entry)
        elif entry.void:
            self.void.append(entry)
        else:
            self._apply(entry.offset, entry.event)

    def _apply(self, offset: int, event: Event) -> None:
        if isinstance(event, Closing):
            self.duplicates += event.duplicates
            self.drops += [Dropped(offset, drop) for drop in event.drops]
        if isinstance(event, BatchCut):
            self.cuts.append(Cut(offset, event))
        elif isinstance(event, EpochStarted):
            self.epochs.append((offset, event))
        elif isinstance(event, WeightsPublished):
            self.versions.append(event)
        elif isinstance(event, CheckpointSaved):
            self.checkpoints.append(event)
        elif isinstance(event, StepSkipped):
            self.skipped.append(event)
        elif isinstance(event, EngineQuarantined):
            self.quarantines.append((offset, event))
        elif isinstance(event, LimitChanged):
            self.limits.append((offset, event))
        elif isinstance(event, (Paused, Resumed)):
            self.paused = isinstance(event, Paused)
        elif isinstance(event, RunStarted):
            self.run = self.run or event
        elif isinstance(event, RunEnding):
            self.ending = event
        elif isinstance(event, DataEnded):
            self.data_ended = self.data_ended or event
        elif isinstance(event, RunFinished):
            self.finished = self.finished or event


class LedgerReader:
    """Follows the ledger; each `catch_up` returns the entries that are new and has added them to `view`."""

    def __init__(self, log: EventLog, topics: Topics) -> None:
        self._reader = TopicReader(log, topics.name("ledger"), 0)
        self.view = RunView()

    def catch_up(self) -> list[LedgerEntry]:
        fresh = [self._judged(entry) for entry in self._reader.catch_up()]
        return fresh

    def _judged(self, entry: Entry) -> LedgerEntry:
        epoch = getattr(entry.event, "epoch", None)  # records of the command line and the feeder carry none
        void = epoch is not None and epoch != self.view.epoch
        unknown_type = entry.unknown.type if entry.unknown is not None else ""
        judged = LedgerEntry(entry.offset, entry.timestamp_ms, entry.event, void, entry.problem, unknown_type)
        self.view.add(judged)
        return judged


def read_ledger(log: EventLog, topics: Topics) -> tuple[list[LedgerEntry], RunView]:
    """Every entry up to the present end, and the view of them all."""
    reader = LedgerReader(log, topics)
    return reader.catch_up(), reader.view


def read_run(log: EventLog, topics: Topics) -> RunView:
    return read_ledger(log, topics)[1]
