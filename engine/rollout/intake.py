"""The rollout daemon's reading side: one thread that follows tasks and ledger and hands news to the event loop.

    membership ─► lanes (recovered from the worker's own output) ─► tasks: which members are not done yet ─► deliver
    ledger     ─► newest weights, pause, end, closed groups ─► deliver
    waits for: a task (while there is room), a ledger record.

The guarantee "a member is generated once over crashes" lives here, in `_members`: its uid is neither among the
outputs that recovery found nor among those taken since. Groups that the ledger has closed need no samples.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

from consumers.ledger import Ledger
from consumers.losses import Losses, OnLost
from consumers.runner import Clock, Reader, now_ms, recover
from engine.rollout.publisher import Lane
from engine.rollout.receiving import Action, Transfers
from streams.errors import LogFull, LogUnavailable
from streams.events import Event, RolloutFailed, TaskDispatched, TrajectoryFinished, WeightsPublished
from streams.log import EventLog, Membership, TopicPartition
from streams.topics import Topics

logger = logging.getLogger(__name__)

REMEMBERED_UIDS = 20_000  # of a partition; a copy of an older one is known by its closed group downstream
_OUTAGE_PAUSE_S = 1.0


class Member(NamedTuple):
    """One sample to generate. Ordered by age of its group."""

    seq: int
    index: int
    order: int  # of arrival, so that no two are equal
    task: TaskDispatched
    offset: int  # of the record that asks for it
    task_offset: int  # of the group's first dispatch
    lane: Lane

    @property
    def uid(self) -> str:
        return f"{self.task.group_id}/{self.index}/{self.task.attempt}"


class _Place:
    """Reading state of one partition."""

    def __init__(self, log: EventLog, topics: Topics, partition: int, losses: Losses) -> None:
        place = recover(log, topics, "trajectories", partition, ["tasks"], losses=losses)
        self.position = place.positions["tasks"]
        self.lane = Lane(partition, self.position, place.reached["tasks"])
        self.finished = place.finished["tasks"]
        self.known: OrderedDict[str, None] = OrderedDict(
            (event.uid, None)
            for event in place.done
            if isinstance(event, (TrajectoryFinished, RolloutFailed))
        )


Deliver = Callable[["list[Member]"], None]
# What is to be done about broadcasts, and the newest version that this takes account of.
DeliverActions = Callable[["list[Action]", "WeightsPublished | None"], None]


class Intake:
    """Lifecycle: construct, `start`, `close`. `deliver` is called on this thread whenever there is news.

    `ledger` is read by the worker too (attributes only); `room` says how many more samples it wants waiting, and
    `is_settled` whether all that was sent of a partition is in the log: one that comes back is not rebuilt before.
    `transfers` are followed for an engine that takes part in broadcasts; `act` gets their news, before `deliver`.
    """

    def __init__(
        self,
        log: EventLog,
        topics: Topics,
        *,
        name: str,
        replica: int,
        replicas: int,
        deliver: Deliver,
        room: Callable[[], int],
        is_settled: Callable[[int], bool] = lambda partition: True,
        transfers: Transfers | None = None,
        act: DeliverActions = lambda actions, published: None,
        on_lost: OnLost = "stop",
        clock: Clock = now_ms,
        poll: timedelta = timedelta(milliseconds=100),
    ) -> None:
        self.log, self.topics, self.poll = log, topics, poll
        self.ledger = Ledger(log, topics)
        self.reader = Reader(log, topics, name, clock)
        self.losses = Losses(name, on_lost)
        self.error: BaseException | None = None
        self.duplicates = 0  # members dispatched twice
        self.already_closed = 0  # tasks of groups that had their outcome
        self._name, self._replica, self._replicas = name, replica, replicas
        self._deliver, self._room, self._is_settled = deliver, room, is_settled
        self._transfers, self._act = transfers, act
        self._unmatched: list[Event] = []  # of the ledger, not yet seen by `transfers`
        self._places: dict[int, _Place] = {}
        self._membership: Membership | None = None
        self._generation: int | None = None
        self._order = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{name} intake", daemon=True)

    def start(self) -> None:
        """Join the group and start reading. Raises ShareHeld while another live process has this share."""
        self._membership = self.log.join(
            self.topics.group("rollout"),
            self.topics.name("tasks"),
            replica=self._replica,
            replicas=self._replicas,
            member=self._name,
            elastic=True,
        )
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(1)
        if self._membership is not None:
            self._membership.close()

    def positions(self) -> dict[TopicPartition, int]:
        """How far tasks are finished, per partition: for lag display."""
        tasks = self.topics.name("tasks")
        return {
            TopicPartition(tasks, partition): place.lane.progress()["tasks"].low_water
            for partition, place in list(self._places.items())
        }

    # -- the thread
    def _run(self) -> None:
        said = False
        while not self._stop.is_set():
            try:
                if not self._round():
                    self.log.wait(self._watched(), self.poll)
                said = False
            except (LogUnavailable, LogFull) as error:  # full: a dead letter could not be written
                if not said:
                    logger.warning(
                        "%s: the log does not serve (%s); reading goes on when it does", self._name, error
                    )
                said = True
                self._stop.wait(_OUTAGE_PAUSE_S)
            except BaseException as error:  # handed to the worker, which ends with it
                if not self._stop.is_set():
                    self.error = error
                    self._deliver([])
                return

    def _round(self) -> bool:
        """One look at everything; True if there was news."""
        news = self._rebalance()
        fresh = [event for _, event in self.ledger.catch_up()]
        self._follow_transfers(fresh)
        news = bool(fresh) or news
        if news:
            self._deliver([])
        room = self._room()
        for place in self._places.values():
            if room <= 0:
                break
            members = self._read(place, room)
            room -= len(members)
            if members:
                self._deliver(members)
                news = True
        return news

    def _follow_transfers(self, fresh: list[Event]) -> None:
        if self._transfers is None:
            return
        self._unmatched += fresh
        actions = self._transfers.catch_up(self._unmatched, self.ledger.epoch)
        if actions or self._unmatched:
            self._unmatched = []
            self._act(actions, self.ledger.published)

    def _rebalance(self) -> bool:
        """True if a partition came or went."""
        assert self._membership is not None
        partitions = self._membership.partitions()
        generation = self._membership.generation
        if generation == self._generation:
            return False
        lost, gained = set(self._places) - partitions, partitions - set(self._places)
        for partition in sorted(lost):
            self._places.pop(partition).lane.is_lost = True
            logger.info("%s: partition %d is not its own any more", self._name, partition)
        ready = sorted(filter(self._is_settled, gained))
        for partition in ready:
            self._own(partition)
        if len(ready) == len(gained):
            self._generation = generation  # not before: what could not be rebuilt is tried again
        return bool(lost or ready)

    def _own(self, partition: int) -> None:
        began = time.monotonic()
        self._places[partition] = place = _Place(self.log, self.topics, partition, self.losses)
        logger.info(
            "%s: owns partition %d, goes on at task %d with %d samples done (%.2f s)",
            self._name,
            partition,
            place.position,
            len(place.known),
            time.monotonic() - began,
        )

    def _watched(self) -> dict[TopicPartition, int]:
        watched = {TopicPartition(self.topics.name("ledger"), 0): self.ledger.position}
        if self._transfers is not None:
            watched |= self._transfers.watched
        if self._room() > 0:
            for partition, place in self._places.items():
                watched[TopicPartition(self.topics.name("tasks"), partition)] = place.position
        return watched

    def _read(self, place: _Place, room: int) -> list[Member]:
        batch = self.losses.read(
            self.log,
            self.topics.name("tasks"),
            place.lane.partition,
            place.position,
            max_records=min(room, 64),
        )
        decoded = [(record.offset, self.reader.decode(record)) for record in batch.records]
        members: list[
            Member
        ] = []  # nothing may fail from here on: a uid counts as taken once it is remembered
        for offset, event in decoded:
            if isinstance(event, TaskDispatched):
                found = [] if offset in place.finished else self._members(place, offset, event)
                place.lane.started(offset, len(found))
                members += found
            place.finished.discard(offset)
        place.position = batch.next_position
        place.lane.advance(batch.next_position)
        return members

    def _members(self, place: _Place, offset: int, task: TaskDispatched) -> list[Member]:
        """The members of this task that are still to be generated."""
        if self.ledger.is_closed(task.seq):
            self.already_closed += 1
            return []
        found: list[Member] = []
        for index in task.indices or range(task.n_samples):
            self._order += 1
            first = task.first_offset if task.first_offset >= 0 else offset
            member = Member(task.seq, index, self._order, task, offset, first, place.lane)
            if member.uid in place.known:
                self.duplicates += 1
                continue
            place.known[member.uid] = None
            found.append(member)
        while len(place.known) > REMEMBERED_UIDS:
            place.known.popitem(last=False)
        return found
