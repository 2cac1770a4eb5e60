"""The feeder: dataset rows become tasks, and this is the only admission control.

    dataset ──► open groups < (limit + 1) × B ? ──► least loaded partition of tasks
                      ▲                                    ▲
        ledger: closed, published, limit, pause     groups: MembersMissing → dispatched again, same partition
                                                            terminal → its partition has one task less

    waits for: a group to be closed (ledger), a member to go missing (groups), a change of limit or pause.
    The limit is the one that will be in force when the group's own batch is cut (consumers/admission.py).

A group counts as open from its dispatch until it is dropped, or until the step that used it has published its
version (or was skipped): so at limit 0 nothing is generated before the weights that it needs exist, and no sample
exceeds the limit while groups finish in order. Counting is over distinct `seq`s folded from the log, so repeated
records, skipped steps and restarts can neither starve nor flood it.

A row that is dropped as too old again and again is named (consumers/starvation.py).

With `log.on_lost = "continue"` an open group whose dispatch retention has removed, or damage has taken, is dispatched
anew in its partition: nobody else could name it. Who had read the first copy passes the second one over.

State after a crash comes from the log alone: `tasks` is scanned back to the first record whose `next_seq` is not
above the ledger's frontier; seqs that are missing in between are holes of a crash between two partitions, and are
dispatched first.
"""

from __future__ import annotations

import logging
from datetime import timedelta

from consumers.admission import batches_allowed, least_version, newest_version
from consumers.dataset import BadRow, Dataset, Order, Row, group_id
from consumers.ledger import Ledger
from consumers.losses import Losses, OnLost
from consumers.outbox import append_patiently, settled
from consumers.runner import (
    Clock,
    Patience,
    Reader,
    Stop,
    events_backwards,
    now_ms,
    records_backwards,
    task_event,
)
from consumers.starvation import Starvation
from streams import codec
from streams.codec import Known
from streams.errors import ConfigError, CorruptRecord, LogFull, LogUnavailable, OffsetOutOfRange
from streams.events import (
    Closing,
    DataEnded,
    Event,
    GroupCompleted,
    GroupDropped,
    MembersMissing,
    Metrics,
    TaskDispatched,
    TaskSkipped,
)
from streams.log import EventLog, NewRecord, Record, TopicPartition
from streams.topics import Topics

logger = logging.getLogger(__name__)

TERMINAL = (GroupCompleted, GroupDropped)
_LOOK_MS = 10_000  # between two looks whether the oldest open dispatches are still there
_PROMPT_SHOWN = 60  # characters of a prompt in a warning
_APPEND = timedelta(seconds=60)  # of the log's own deadline for an append, a generous multiple


class Feeder:
    """Lifecycle: `Feeder(...)`, then `run(stop)`, which recovers, feeds, and returns 0 at the end of the run."""

    def __init__(
        self,
        log: EventLog,
        topics: Topics,
        dataset: Dataset,
        *,
        rollout_batch_size: int,
        n_samples: int,
        limit: int,
        seed: int = 0,
        shuffle: bool = True,
        data_epochs: int | None = None,
        max_open_groups: int | None = None,
        on_lost: OnLost = "stop",
        clock: Clock = now_ms,
        poll: timedelta = timedelta(milliseconds=100),
    ) -> None:
        self.log, self.topics, self.dataset = log, topics, dataset
        self.rollout_batch_size, self.n_samples = rollout_batch_size, n_samples
        self.order = Order(len(dataset), seed=seed, shuffle=shuffle)
        self.total = None if data_epochs is None else data_epochs * len(dataset)
        self.max_open_groups, self.clock, self.poll = max_open_groups, clock, poll
        self.ledger = Ledger(log, topics, limit=limit)
        self.reader = Reader(log, topics, "feeder", clock)
        self.losses = Losses("feeder", on_lost)
        self.starvation = Starvation()
        self.next_seq = 0
        self.holes: list[int] = []
        self.dispatched_total = 0
        self.redispatched_total = 0
        self._skipped_in_a_row = 0
        self._partition_of: dict[int, int] = {}  # unfinished seq → partition (its load)
        self._offset_of: dict[int, int] = {}  # unfinished seq → where its dispatch lies in that partition
        self._load = [0] * topics.partitions
        self._looked = clock()
        self._redispatched: set[tuple[str, int, int]] = set()  # (group_id, attempt, index)
        self._positions = [0] * topics.partitions  # in groups
        self._patience = Patience("feeder")
        self._reported = 0
        self._stop: Stop = lambda: False

    # -- life
    def run(self, stop: Stop) -> int:
        self._stop = stop
        try:
            return self._run(stop)
        except (LogFull, LogUnavailable) as error:
            if not stop():
                raise
            logger.warning("feeder: stopped; the next one dispatches what the log did not take: %s", error)
            return 0

    def _run(self, stop: Stop) -> int:
        self.recover()
        while not stop():
            if self.round():
                self._patience.reset()
                continue
            if self.ledger.finished is not None:
                logger.info("feeder: the run is finished")
                return 0
            self._patience.waiting(self._waits_for)
            self.log.wait(self._watched(), self.poll)
        return 0

    def round(self) -> bool:
        """One look at the log and everything that follows from it; True if anything was written."""
        outcomes = self.ledger.catch_up()
        wrote = self._read_groups()
        self._look_for_starved(outcomes)
        if self.ledger.finished is None:
            wrote = self._feed() or wrote
            wrote = self._dispatch_gone() or wrote
        self._report()
        return wrote

    def _watched(self) -> dict[TopicPartition, int]:
        watched = {TopicPartition(self.topics.name("ledger"), 0): self.ledger.position}
        for partition, position in enumerate(self._positions):
            watched[TopicPartition(self.topics.name("groups"), partition)] = position
        return watched

    def _waits_for(self) -> str:
        if self.ledger.paused:
            return "the run to be resumed"
        if self.ledger.data_ended is not None:
            return f"the end of the run ({self.open_groups} groups are open)"
        return f"a group to be closed ({self.open_groups} open, {self.capacity} allowed)"

    # -- admission
    @property
    def open_groups(self) -> int:
        """Distinct groups that are dispatched and not yet closed, plus those whose version is not yet published."""
        return self.next_seq - len(self.holes) - self.ledger.closed_count + self.ledger.untrained_groups

    @property
    def capacity(self) -> int:
        """How many groups may be open."""
        allowed = batches_allowed(self.ledger) * self.rollout_batch_size
        return allowed if self.max_open_groups is None else min(allowed, self.max_open_groups)

    def _feed(self) -> bool:
        if self.ledger.data_ended is not None:
            return False
        if self.ledger.ending is not None:
            self._end()
            return True
        if self.ledger.paused:
            return False
        batches: dict[int, list[TaskDispatched | TaskSkipped]] = {}
        room = self.capacity - self.open_groups
        sent: list[int] = []
        while room > 0:
            seq = self._take()
            if seq is None:
                break
            event = self._task(seq, ahead=self.open_groups - 1)
            partition = self._least_loaded()
            batches.setdefault(partition, []).append(event)
            self._load[partition] += 1
            self._partition_of[seq] = partition
            sent.append(seq)
            room -= 1
        records = {
            partition: [codec.encode(event, producer="feeder") for event in events]
            for partition, events in batches.items()
        }
        topic = self.topics.name("tasks")
        futures = {partition: self.log.submit(topic, partition, each) for partition, each in records.items()}
        for partition, future in futures.items():
            try:
                what = f"feeder: an append to {topic}/{partition}"
                base = settled(future, what, stop=self._stop, timeout=_APPEND)
            except (LogFull, LogUnavailable):
                if self._stop():
                    raise
                # a copy that lands twice is passed over
                base = self._append("tasks", partition, records[partition])
            for offset, event in enumerate(batches[partition], base):
                self._offset_of[event.seq] = offset
        self.dispatched_total += len(sent)
        if self.total is not None and self.next_seq >= self.total and not self.holes and room > 0:
            self._end()
            return True
        return bool(sent)

    def _take(self) -> int | None:
        """The next seq to dispatch: holes first."""
        if self.holes:
            return self.holes.pop(0)
        if self.total is not None and self.next_seq >= self.total:
            return None
        self.next_seq += 1
        return self.next_seq - 1

    def _task(self, seq: int, *, ahead: int) -> TaskDispatched | TaskSkipped:
        data_epoch, index = self.order(seq)
        row = self.dataset.row(index)
        common = {
            "group_id": group_id(data_epoch, index),
            "seq": seq,
            "data_epoch": data_epoch,
            "row": index,
            "next_seq": self.next_seq,
        }
        if isinstance(row, BadRow):
            self._skipped_in_a_row += 1
            if self.total is None and self._skipped_in_a_row > len(self.dataset):
                raise ConfigError(f"data.path: no row can be used; the last: {row.reason}: {row.detail}")
            logger.warning("feeder: skipped %s: %s", row.reason, row.detail)
            return TaskSkipped(reason=row.reason, detail=row.detail, **common)
        self._skipped_in_a_row = 0
        return TaskDispatched(
            n_samples=self.n_samples,
            prompt=row.prompt,
            label=row.label,
            metadata=row.metadata,
            min_version=least_version(self.ledger, ahead // self.rollout_batch_size),
            dispatched_ms=self.clock(),
            **common,
        )

    def _least_loaded(self) -> int:
        return min(range(self.topics.partitions), key=lambda partition: (self._load[partition], partition))

    def _end(self) -> None:
        ended = DataEnded(count=self.next_seq, producer="feeder")
        self._append("ledger", 0, [codec.encode(ended, producer="feeder")])
        self._look_for_starved(self.ledger.catch_up())
        logger.info("feeder: data ended after %d groups", self.next_seq)

    def _append(self, word: str, partition: int, records: list[NewRecord]) -> int:
        """A full log is no reason to end: the feeder waits for room."""
        topic = self.topics.name(word)
        return append_patiently(self.log, topic, partition, records, who="feeder", stop=self._stop)

    # -- dispatches that are gone
    def _dispatch_gone(self) -> bool:
        """Dispatch open groups anew whose dispatch cannot be read any more; True if there were any.

        A stage that had not read one would never know of its group, and the group would count as open for ever.
        Retention takes the oldest first, and a damaged one becomes the oldest, so only those are looked at.
        """
        now = self.clock()
        if self.losses.on_lost != "continue" or now - self._looked < _LOOK_MS:
            return False
        if self.ledger.paused or self.ledger.ending is not None:
            return False
        self._looked = now
        for seq in [seq for seq in self._partition_of if self.ledger.is_closed(seq)]:
            self._finished(seq)  # its outcome may be gone from `groups`
        dispatches: dict[int, list[tuple[int, int]]] = {}
        for seq, partition in self._partition_of.items():
            dispatches.setdefault(partition, []).append((self._offset_of[seq], seq))
        wrote = False
        for partition, each in dispatches.items():
            for offset, seq in sorted(each):
                if self._is_kept(partition, offset):
                    break
                logger.warning("feeder: the dispatch of open group %d is gone; dispatched anew", seq)
                record = codec.encode(self._task(seq, ahead=0), producer="feeder")
                self._offset_of[seq] = self._append("tasks", partition, [record])
                wrote = True
        return wrote

    def _is_kept(self, partition: int, offset: int) -> bool:
        try:
            self.log.read(self.topics.name("tasks"), partition, offset, max_records=1)
        except OffsetOutOfRange as outside:
            return offset >= outside.start
        except CorruptRecord as error:
            self.losses.damaged(self.log, error)
            return False
        return True

    # -- groups: load and re-dispatch
    def _read_groups(self) -> bool:
        wrote = False
        topic = self.topics.name("groups")
        for partition, position in enumerate(self._positions):
            batch = self.losses.read(self.log, topic, partition, position)
            for record in batch.records:
                event = self.reader.decode(record)
                if isinstance(event, TERMINAL):
                    self._terminal(event)
                elif isinstance(event, MembersMissing):
                    wrote = self._redispatch(event, partition) or wrote
            self._positions[partition] = batch.next_position
        return wrote

    def _terminal(self, event: GroupCompleted | GroupDropped) -> None:
        self._finished(event.seq)
        if isinstance(event, GroupCompleted):
            self.starvation.finished(event)

    def _finished(self, seq: int) -> None:
        partition = self._partition_of.pop(seq, None)
        self._offset_of.pop(seq, None)
        if partition is not None:
            self._load[partition] -= 1

    def _redispatch(self, missing: MembersMissing, partition: int) -> bool:
        """Dispatch members again, once an attempt, on the partition where their group lives."""
        wanted = [
            index
            for index in missing.indices
            if (missing.group_id, missing.attempt, index) not in self._redispatched
        ]
        if not wanted or self.ledger.is_closed(missing.seq) or self.ledger.finished is not None:
            return False
        first = self._first_dispatch(missing, partition)
        if first is None:
            return False
        again = TaskDispatched(
            group_id=first.group_id,
            seq=first.seq,
            data_epoch=first.data_epoch,
            row=first.row,
            attempt=missing.attempt,
            indices=wanted,
            n_samples=first.n_samples,
            prompt=first.prompt,
            label=first.label,
            metadata=first.metadata,
            min_version=newest_version(self.ledger),
            first_offset=missing.task_offset,
            next_seq=self.next_seq,
            dispatched_ms=self.clock(),
        )
        self._append("tasks", partition, [codec.encode(again, producer="feeder")])
        self._redispatched.update((missing.group_id, missing.attempt, index) for index in wanted)
        self.redispatched_total += len(wanted)
        logger.warning(
            "feeder: dispatched members %s of group %s again (attempt %d): %s",
            wanted,
            missing.group_id,
            missing.attempt,
            missing.reason,
        )
        return True

    def _first_dispatch(self, missing: MembersMissing, partition: int) -> TaskDispatched | None:
        topic = self.topics.name("tasks")
        try:
            records = self.log.read(topic, partition, missing.task_offset, max_records=1).records
        except (OffsetOutOfRange, CorruptRecord) as gone:
            if isinstance(gone, CorruptRecord):
                self.losses.damaged(self.log, gone)
            else:
                self.losses.position(topic, partition, wanted=missing.task_offset, start=gone.start)
            made_again = self._task(missing.seq, ahead=0)  # its row says all that the record said
            return made_again if isinstance(made_again, TaskDispatched) else None
        decoded = codec.decode(records[0]) if records else None
        event = decoded.event if isinstance(decoded, Known) else None
        if isinstance(event, TaskDispatched) and event.group_id == missing.group_id:
            return event
        logger.error(
            "feeder: tasks/%d:%d is not the dispatch of group %s",
            partition,
            missing.task_offset,
            missing.group_id,
        )
        return None

    # -- recovery
    def recover(self) -> None:
        """Rebuild counter, holes, load and re-dispatches from the log."""
        self._look_for_starved(self.ledger.catch_up())
        frontier = self.ledger.frontier
        seen: set[int] = set()
        first_open: list[int | None] = [None] * self.topics.partitions
        removed: list[int] = []  # partitions whose records do not reach back to a time when all was closed
        for partition in range(self.topics.partitions):
            for record in records_backwards(self.log, self.topics.name("tasks"), partition, self.losses):
                event = task_event(record)
                if event is None:
                    continue
                self.next_seq = max(self.next_seq, event.next_seq, event.seq + 1)
                if event.seq >= frontier:
                    self._recover_task(event, partition, record.offset, seen)
                    first_open[partition] = record.offset
                if event.next_seq <= frontier:
                    break
            else:
                removed += [partition] if self.log.start(self.topics.name("tasks"), partition) else []
        self.next_seq = max(self.next_seq, frontier)
        self.holes = [
            seq
            for seq in range(frontier, self.next_seq)
            if seq not in seen and not self.ledger.is_closed(seq)
        ]
        if self.holes and removed:
            self._lost_dispatches(removed[0])
        self._recover_groups(first_open)
        if self.next_seq:
            logger.info(
                "feeder: goes on at group %d, %d open, %d holes",
                self.next_seq,
                self.open_groups,
                len(self.holes),
            )

    def _lost_dispatches(self, partition: int) -> None:
        """Open groups whose dispatch is gone are dispatched anew, as holes are; only nobody may think all is well."""
        topic = self.topics.name("tasks")
        start = self.log.start(topic, partition)
        self.losses.found(topic, partition, 0, start, len(self.holes), "so many groups without an outcome")

    def _recover_task(
        self, event: TaskDispatched | TaskSkipped, partition: int, offset: int, seen: set[int]
    ) -> None:
        if isinstance(event, TaskDispatched) and event.attempt:
            self._redispatched.update((event.group_id, event.attempt, index) for index in event.indices)
            return
        if event.seq not in seen and not self.ledger.is_closed(event.seq):
            self._partition_of[event.seq], self._offset_of[event.seq] = partition, offset
            self._load[partition] += 1
        seen.add(event.seq)

    def _recover_groups(self, first_open: list[int | None]) -> None:
        """Outcomes and requests that the collector wrote about groups that may still be open."""
        topic = self.topics.name("groups")
        for partition, offset in enumerate(first_open):
            self._positions[partition] = self.log.end(topic, partition)
            if offset is None:
                continue
            requests: list[MembersMissing] = []
            for event in events_backwards(self.log, topic, partition, self.losses):
                progress = getattr(event, "progress", {}).get("tasks")
                if progress is not None and progress.read_to <= offset:
                    break
                if isinstance(event, TERMINAL):
                    self._terminal(event)
                elif isinstance(event, MembersMissing):
                    requests.append(event)
            for request in reversed(requests):
                self._redispatch(request, partition)

    # -- starvation
    def _look_for_starved(self, outcomes: list[tuple[Record, Event]]) -> None:
        """Follow the outcomes; groups that were completed before them have been read by now."""
        closings = [event for _, event in outcomes if isinstance(event, Closing)]
        for event in closings:
            self.starvation.closed(event)
        if closings:
            self.starvation.forget(self.ledger.is_closed)
            if warning := self.starvation.warning(self._prompt):
                logger.warning("feeder: %s", warning)

    def _prompt(self, row: int) -> str:
        found = self.dataset.row(row) if row < len(self.dataset) else None
        text = repr(found.prompt) if isinstance(found, Row) else "no prompt"
        return text if len(text) <= _PROMPT_SHOWN else f"{text[:_PROMPT_SHOWN]}…"

    # -- metrics
    def _report(self) -> None:
        now = self.clock()
        if now - self._reported < 1000:
            return
        self._reported = now
        values = {
            "open_groups": float(self.open_groups),
            "capacity": float(self.capacity),
            "dispatched_total": float(self.dispatched_total),
            "redispatched_total": float(self.redispatched_total),
            "unknown_types": float(self.reader.unknown_types),
            "dead_letters": float(self.reader.dead_letters),
            "lost": float(self.losses.count),
            "starved": float(len(self.starvation.starved)),
        }
        for name, share in self.starvation.trained_shares().items():
            values[f"trained_length/{name}"] = share
        metrics = Metrics(source="feeder", values=values, at_ms=now)
        self.log.submit(self.topics.name("metrics"), 0, [codec.encode(metrics, producer="feeder")])
        self.log.commit_hint(self.topics.group("feeder"), self._watched())
