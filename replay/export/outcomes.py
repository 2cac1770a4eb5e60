"""What the ledger says became of each sample and each group, packed: 24 bytes a trained sample, a small tuple a group.

    ledger ──► read_outcomes ──► Outcomes.of_sample(partition, offset) · of_group(seq) · is_void(entry)

The fold is that of replay/ledger.py (the first mention of a group decides, records of an older epoch are void), without
keeping the records: an export of a long run must not hold every cut in memory.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from consumers.advantages import of_cut
from replay.records import Entry, entries
from streams.events import BatchCut, Closing, CutGroup, EpochStarted, RunFinished, RunStarted, StepSkipped
from streams.log import EventLog
from streams.topics import Topics

TRAINED, SKIPPED, DROPPED, OPEN = "trained", "skipped", "dropped", "open"
UNUSED, DUPLICATE = "unused", "duplicate"


class Trained(NamedTuple):
    """How a cut took one sample."""

    staleness: int | None  # None: all of it was masked
    n_trainable_tokens: int
    advantage: float


class Closed(NamedTuple):
    """The outcome of a group."""

    outcome: str
    step: int | None
    reason: str | None
    detail: str | None
    version: int  # of the trainer
    at_ms: int


class Outcomes:
    """Built by `read_outcomes`; valid up to ledger position `end`."""

    def __init__(self, estimator: str = "grpo") -> None:
        self._estimator = estimator
        self.end = 0
        self.began = ""  # which run this is, of all that had its name; "": nothing says so yet
        self.finished = False
        self.cut_ms: dict[int, int] = {}  # step → when
        self.skipped: dict[int, str] = {}  # step → reason
        self._epochs: list[int] = []  # offsets of EpochStarted
        self._groups: dict[int, Closed] = {}  # seq → outcome
        self._samples: dict[int, _Samples] = {}  # partition → its trained samples

    @property
    def last_step(self) -> int:
        return max(self.cut_ms, default=0)

    def is_final(self, step: int, later: int = 1) -> bool:
        """Whether no record still to come can say something new of this step: so many steps have been cut after it."""
        return self.finished or step <= self.last_step - later

    def is_void(self, entry: Entry) -> bool:
        """Of a ledger entry."""
        epoch = getattr(entry.event, "epoch", None)  # those of the command line and the feeder carry none
        before = bisect_left(self._epochs, entry.offset)
        return epoch is not None and epoch != (self._epochs[before - 1] if before else -1)

    def of_group(self, seq: int) -> Closed | None:
        found = self._groups.get(seq)
        if found is not None and found.step in self.skipped and found.outcome == TRAINED:
            return found._replace(outcome=SKIPPED, reason=self.skipped[found.step])
        return found

    def of_sample(self, partition: int, offset: int) -> Trained | None:
        """None unless a valid cut names this record."""
        samples = self._samples.get(partition)
        return None if samples is None else samples.at(offset)

    def add(self, entry: Entry) -> None:
        event = entry.event
        if isinstance(event, EpochStarted):
            self._epochs.append(entry.offset)
        if event is None or self.is_void(entry):
            return
        if isinstance(event, Closing):
            self._close(entry, event)
        elif isinstance(event, RunStarted):
            self.began = self.began or f"{event.started_ms}-{event.config_fingerprint[:12]}"
        elif isinstance(event, StepSkipped):
            self.skipped[event.step] = event.reason
        elif isinstance(event, RunFinished):
            self.finished = True

    def _close(self, entry: Entry, event: Closing) -> None:
        step, at_ms = None, entry.timestamp_ms
        if isinstance(event, BatchCut):
            step, at_ms = event.step, event.cut_ms
            self.cut_ms[step] = at_ms
            used = Closed(TRAINED, step, None, None, event.version, at_ms)
            for group, advantages in zip(event.groups, of_cut(event, self._estimator), strict=True):
                self._groups.setdefault(group.seq, used)
                self._samples.setdefault(group.partition, _Samples()).add(group, advantages)
        for drop in event.drops:
            dropped = Closed(DROPPED, None, drop.reason, drop.detail or None, event.version, at_ms)
            self._groups.setdefault(drop.seq, dropped)


class _Samples:
    """The trained samples of one partition, as columns sorted by offset once they are asked for."""

    def __init__(self) -> None:
        self._columns = _empty()
        self._sorted: list[NDArray] = []

    def add(self, group: CutGroup, values: NDArray[np.float32]) -> None:
        offsets, staleness, tokens, advantages = self._columns
        for member, advantage in zip(group.members, values, strict=True):
            offsets.append(member.trajectory_offset)
            staleness.append(member.staleness)
            tokens.append(member.n_trainable_tokens)
            advantages.append(float(advantage))

    def at(self, offset: int) -> Trained | None:
        if not self._sorted:
            columns = [np.frombuffer(column, column.typecode) for column in self._columns]
            order = np.argsort(columns[0], kind="stable")
            self._sorted = [column[order] for column in columns]
            self._columns = _empty()
        offsets, staleness, tokens, advantages = self._sorted
        place = int(np.searchsorted(offsets, offset))
        if place == len(offsets) or offsets[place] != offset:
            return None
        age = int(staleness[place])
        return Trained(None if age < 0 else age, int(tokens[place]), float(advantages[place]))


def _empty() -> tuple[array[int], array[int], array[int], array[float]]:
    """Offsets, staleness, trained tokens, advantages."""
    return array("q"), array("i"), array("q"), array("f")


def read_outcomes(log: EventLog, topics: Topics, estimator: str = "grpo") -> Outcomes:
    """Fold the ledger up to its present end. `estimator`: of the run's advantages."""
    outcomes = Outcomes(estimator)
    for entry in ledger_entries(log, topics):
        outcomes.add(entry)
        outcomes.end = entry.offset + 1
    return outcomes


def ledger_entries(log: EventLog, topics: Topics) -> Iterator[Entry]:
    return entries(log, topics.name("ledger"), 0)
