"""The run behind every life: its ledger, read once, and what can be asked of it."""

from __future__ import annotations

from typing import NamedTuple

from consumers.staleness import Lineage
from replay.evidence import kept
from replay.ledger import LedgerEntry, read_ledger
from replay.lives.seek import place
from streams.errors import CorruptRecord, OffsetOutOfRange, SchemaTooNew
from streams.events import (
    BatchCut,
    Closing,
    CutGroup,
    Drop,
    EpochStarted,
    StepSkipped,
    WeightsPublished,
)
from streams.log import EventLog
from streams.topics import Topics


class Mention(NamedTuple):
    """One ledger record that names a group: its cut or its drop."""

    entry: LedgerEntry
    record: Closing
    group: CutGroup | None  # None: dropped
    drop: Drop | None

    @property
    def cut(self) -> BatchCut:
        assert isinstance(self.record, BatchCut)
        return self.record

    @property
    def at_ms(self) -> int:
        return self.cut.cut_ms if self.group is not None else self.entry.timestamp_ms

    @property
    def place(self) -> str:
        return place("ledger", 0, self.entry.offset)


class RunFacts:
    """`RunFacts(log, topics)` reads the ledger; everything else is answered from it.

    A run that has just begun may have none. Raises SchemaTooNew for one that only a newer Millstream can read.
    `estimator`: of consumers.advantages, by which the run makes advantages of rewards; "": its loss looks at none.
    """

    def __init__(self, log: EventLog, topics: Topics, estimator: str = "grpo") -> None:
        self.log, self.topics, self.estimator = log, topics, estimator
        self.ledger, self.view = read_ledger(log, topics)
        self._refuse()
        self.notes = self._unreadable()

    def _refuse(self) -> None:
        for problem in self.view.problems:
            if problem.problem.startswith(SchemaTooNew.__name__):
                raise SchemaTooNew(
                    f"{self.topics.name('ledger')}/0:{problem.offset} may decide what became of a group and cannot be "
                    f"read: {problem.problem.partition(': ')[2]}"
                )

    def _unreadable(self) -> list[str]:
        problems = [each.problem for each in self.view.problems if not each.unknown_type]
        return [f"the ledger cannot be read whole, so this may not be all: {problems[0]}"] if problems else []

    # -- outcomes
    def mentions(self, group_id: str) -> list[Mention]:
        """Every ledger record that names the group, void ones too, in order."""
        found = []
        for entry in self.ledger:
            event = entry.event
            if not isinstance(event, Closing):
                continue
            if isinstance(event, BatchCut):
                found += [
                    Mention(entry, event, each, None) for each in event.groups if each.group_id == group_id
                ]
            found += [Mention(entry, event, None, each) for each in event.drops if each.group_id == group_id]
        return found

    def is_skipped(self, cut: BatchCut) -> StepSkipped | None:
        found = [each for each in self.view.skipped if each.step == cut.step]
        return found[0] if found else None

    def is_done(self, cut: BatchCut) -> bool:
        """Its step was taken: a later version was published, or a later step cut."""
        return self.view.step > cut.step or self.view.version > cut.version

    def limit_at(self, record: Closing, offset: int) -> int | None:
        """The limit in force at a closing record, as the ledger has it: only cuts say theirs."""
        if isinstance(record, BatchCut):
            return record.limit
        later = [cut.event.limit for cut in self.view.cuts if cut.offset > offset]
        earlier = [cut.event.limit for cut in self.view.cuts if cut.offset < offset]
        begun = [event.limit for at, event in self.view.epochs if at < offset and event.limit >= 0]
        return next(iter(later + earlier[::-1] + begun[::-1]), None)

    def cuts_of_step(self, step: int) -> list[LedgerEntry]:
        """Every cut of that step, void ones too."""
        return [each for each in self.ledger if isinstance(each.event, BatchCut) and each.event.step == step]

    def epoch_in_charge(self, offset: int) -> int:
        return max((at for at, _ in self.view.epochs if at < offset), default=-1)

    # -- versions
    def lineage(self, until: int | None = None) -> Lineage:
        """Which versions are the same weights, as known at a ledger offset (an audit judges by no later one)."""
        found = Lineage()
        for entry in self.ledger:
            if until is not None and entry.offset >= until:
                break
            if isinstance(entry.event, EpochStarted):
                found.started(entry.offset)
            elif isinstance(entry.event, WeightsPublished) and not entry.void:
                found.published(entry.event.epoch, entry.event.version, entry.event.forked_at)
        return found

    def version_at(self, at_ms: int, before: int) -> int | None:
        """The newest version published by a moment, and before a ledger offset; None before the first."""
        newest = None
        for entry in self.ledger:
            event = entry.event
            if entry.offset >= before or entry.void or not isinstance(event, WeightsPublished):
                continue
            if (event.published_ms or entry.timestamp_ms) <= at_ms:
                newest = event.version
        return newest

    def publications(self, version: int) -> list[LedgerEntry]:
        return [
            each
            for each in self.ledger
            if isinstance(each.event, WeightsPublished) and each.event.version == version
        ]

    @property
    def now_ms(self) -> int:
        """The newest moment that the log knows: a finished run stands still, a live one reports each second."""
        topic = self.topics.name("metrics")
        start, end = kept(self.log, topic, 0)
        if start == end:
            return self.view.last_ms
        try:
            newest = self.log.read(topic, 0, end - 1, max_records=1).records
        except (CorruptRecord, OffsetOutOfRange):
            newest = []
        return max([self.view.last_ms, *(each.timestamp_ms for each in newest)])
