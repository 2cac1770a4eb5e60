"""The ledger folded into what stages need to know: who owns the run, what is closed, what is published.

Rules of the fold (DESIGN §4.4): an epoch is named by the offset of its `EpochStarted`; once a newer one has begun,
records of older epochs are void for every reader. Records of the command line and of the feeder carry no epoch and
are never void. Every reader folds the same way, so all agree on every group's outcome.

The staleness limit: a `LimitChanged` waits until the next step is one that it is for (`from_step`), and then it is in
force; a newer one takes the place of one that waits. The fold is in the order of the ledger, so a cut that had read
it up to here is cut at `limit`, and any later reader finds out the same (replay/ledger.py does so by itself).

A quarantine is of one incarnation of an engine, for good: what it made is refused from the record on, over every
later epoch too, and what was cut before stays cut.
"""

from __future__ import annotations

import logging
from collections import deque

from consumers.staleness import Lineage
from streams import codec
from streams.codec import Known
from streams.errors import CodecError, RecordsLost, SchemaTooNew
from streams.events import (
    BatchCut,
    CheckpointSaved,
    Closing,
    DataEnded,
    EngineQuarantined,
    EpochStarted,
    Event,
    GroupsDropped,
    LimitChanged,
    Paused,
    Resumed,
    RunEnding,
    RunFinished,
    RunStarted,
    StepSkipped,
    WeightsPublished,
)
from streams.log import EventLog, Record
from streams.ranges import from_ranges
from streams.topics import Topics

logger = logging.getLogger(__name__)

RECENT_VERSIONS = 16


class Ledger:
    """Follows the ledger. Call `catch_up` often; the attributes then are the state at `position`.

    >>> from streams.memory import MemoryLog
    >>> log, topics = MemoryLog(), Topics("demo", 1)
    >>> topics.create(log)
    >>> ledger = Ledger(log, topics)
    >>> fresh = ledger.catch_up(); ledger.epoch, ledger.position
    (-1, 0)
    """

    def __init__(self, log: EventLog, topics: Topics, *, limit: int = 0) -> None:
        """Raises RecordsLost when the ledger does not begin at its beginning: half of it is another run's story."""
        self._log, self._topic = log, topics.name("ledger")
        self.position = 0
        self._is_complete(log.start(self._topic, 0))
        self.run: RunStarted | None = None
        self.epoch = -1
        self.owner = ""  # who began that epoch: one incarnation of a trainer
        self.limit = limit  # in force for the next step: the configured one until a LimitChanged binds
        self.waiting_limit: LimitChanged | None = None  # for a later step than the next
        self.paused = False
        self.frontier = 0  # every seq below it has its outcome
        self.closed_above: set[int] = set()
        self.last_cut: BatchCut | None = None
        self.published: WeightsPublished | None = None  # the newest valid one …
        self.recent: deque[WeightsPublished] = deque(maxlen=RECENT_VERSIONS)  # … and those before it
        self.checkpoints: list[CheckpointSaved] = []
        self.lineage = Lineage()
        self.quarantined: dict[
            tuple[str, str], EngineQuarantined
        ] = {}  # (engine, incarnation) → the first record
        self.ending: RunEnding | None = None
        self.data_ended: DataEnded | None = None
        self.finished: RunFinished | None = None
        self.void_records = 0
        self.unreadable = 0
        self.step = 0  # of the newest valid cut
        self._untrained_cuts: list[tuple[int, int, int]] = []  # (step, version, groups) not yet published
        self._has_caught_up = False

    def _is_complete(self, start: int) -> None:
        if start:
            raise RecordsLost(
                f"{self._topic}: its first {start} records are gone, and with them what became of their groups; "
                "nothing may remove ledger records (retention.ms and retention.bytes of this topic must be -1)",
                *(self._topic, 0, 0, start, start),
            )

    def catch_up(self, until: int | None = None) -> list[tuple[Record, Event]]:
        """Fold everything up to the end (or up to `until`) and return the valid records just read.

        The first time the end is asked for, since a stage that recovers must not take a ledger whose records are
        still on their way for an empty one. Later it is where a read finds nothing more: what this process has
        appended is before that, and a record of another that comes a moment later is read in the next round.
        """
        fresh: list[tuple[Record, Event]] = []
        if until is None and not self._has_caught_up:
            fresh = self.catch_up(self._log.end(self._topic, 0))
            self._has_caught_up = True
        elif until is None:
            self._log.recent_end(
                self._topic, 0
            )  # asks nobody, but a log that has not answered lately says so here
        while until is None or self.position < until:
            most = 500 if until is None else min(500, until - self.position)
            batch = self._log.read(self._topic, 0, self.position, max_records=most)
            for record in batch.records:
                event = self._decode(record)
                if event is not None and self.apply(record.offset, event):
                    fresh.append((record, event))
            if batch.next_position <= self.position:
                break
            self.position = batch.next_position
        return fresh

    def _decode(self, record: Record) -> Event | None:
        """A record that nobody can read decides nothing, for every reader alike; the audit shows it.

        One of a newer schema stops the reader: a newer trainer can read it, so it may be an outcome. Raises
        SchemaTooNew, and CorruptRecord from the log for stored bytes that were damaged.
        """
        try:
            decoded = codec.decode(record)
        except SchemaTooNew:
            raise
        except CodecError as error:
            self.unreadable += 1
            logger.error("ledger: record %d cannot be read and is void: %s", record.offset, error)
            return None
        return decoded.event if isinstance(decoded, Known) else None

    def apply(self, offset: int, event: Event) -> bool:
        """Fold one record; False when it is void."""
        if isinstance(event, EpochStarted):
            if offset > self.epoch:
                self.epoch, self.owner = offset, event.producer
                self.lineage.started(offset)
            return True
        epoch = getattr(event, "epoch", None)
        if epoch is not None and epoch != self.epoch:
            self.void_records += 1
            return False
        if isinstance(event, Closing):
            self._close(event)
        elif isinstance(event, WeightsPublished):
            self.lineage.published(event.epoch, event.version, event.forked_at)
            self.published = event
            self.recent.append(event)
            self._untrained_cuts = [cut for cut in self._untrained_cuts if cut[1] >= event.version]
        elif isinstance(event, StepSkipped):
            self._untrained_cuts = [cut for cut in self._untrained_cuts if cut[0] != event.step]
        elif isinstance(event, CheckpointSaved):
            self.checkpoints.append(event)
        elif isinstance(event, EngineQuarantined):
            self.quarantined.setdefault((event.engine, event.incarnation), event)
        elif isinstance(event, LimitChanged):
            self.waiting_limit = event
            self._bind_limit()
        elif isinstance(event, (Paused, Resumed)):
            self.paused = isinstance(event, Paused)
        elif isinstance(event, RunStarted):
            self.run = self.run or event
        elif isinstance(event, RunEnding):
            self.ending = event
        elif isinstance(event, DataEnded):
            self.data_ended = self.data_ended or event
        elif isinstance(event, RunFinished):
            self.finished = event
        return True

    def _close(self, event: BatchCut | GroupsDropped | Closing) -> None:
        self.frontier, self.closed_above = event.frontier, from_ranges(event.closed_above)
        if isinstance(event, BatchCut):
            self.last_cut, self.step = event, event.step
            self._untrained_cuts.append((event.step, event.version, len(event.groups)))
            self._bind_limit()

    def _bind_limit(self) -> None:
        waiting = self.waiting_limit
        if waiting is not None and waiting.from_step <= self.step + 1:
            self.limit, self.waiting_limit = waiting.limit, None

    def limit_at(self, step: int) -> int:
        """The limit that will be in force at this step (the next one, or later), as far as the ledger says now."""
        waiting = self.waiting_limit
        return self.limit if waiting is None or step < waiting.from_step else waiting.limit

    @property
    def has_caught_up(self) -> bool:
        """It was read to its end once. Before, what it says is of some moment in the run's past."""
        return self._has_caught_up

    def is_closed(self, seq: int) -> bool:
        return seq < self.frontier or seq in self.closed_above

    @property
    def closed_count(self) -> int:
        return self.frontier + len(self.closed_above)

    @property
    def untrained_groups(self) -> int:
        """Groups that a cut has closed but whose step has neither published a version nor been skipped.

        Admission counts them as open: a task dispatched for the next version before that version is published
        would be generated by weights that are one version too old (at limit 0 every one of them would be stale).
        """
        return sum(groups for _, _, groups in self._untrained_cuts)

    @property
    def untrained_steps(self) -> int:
        """Steps that are cut and have neither published a version nor been skipped."""
        return len(self._untrained_cuts)


class Frontier:
    """Closed seqs: all below `low`, and a set above it.

    >>> frontier = Frontier()
    >>> frontier.close(1); frontier.low, sorted(frontier.above)
    (0, [1])
    >>> frontier.close(0); frontier.low, sorted(frontier.above)
    (2, [])
    """

    def __init__(self, low: int = 0, above: set[int] | None = None) -> None:
        self.low, self.above = low, set(above or ())

    def __contains__(self, seq: int) -> bool:
        return seq < self.low or seq in self.above

    def close(self, seq: int) -> None:
        if seq < self.low:
            return
        self.above.add(seq)
        while self.low in self.above:
            self.above.remove(self.low)
            self.low += 1

    def __len__(self) -> int:
        return self.low + len(self.above)
