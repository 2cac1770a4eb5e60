"""The reward stage: each trajectory gets a verdict, or a typed failure; never a 0 for want of one.

    trajectories p ──► seen this uid? ──► scoring pool (deadline, killable) ──► rewards p
                             │ twin: counted      │ no verdict: ScoringFailed(reason)
                             │ conflict: dead     │
    waits for: a trajectory to arrive, a verdict, an append to be acknowledged.

Which inputs are done is read from the stage's own output (consumers/runner.py). With `group = True` the members of
a group are held until all are there and scored together; a member that failed in rollout passes on alone. What is
held takes no place in flight: members of many groups come mixed, and the missing ones may lie behind them. The
deadline of a held group runs on progress, as the collector's do.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import msgspec

from consumers.lanes import Lanes
from consumers.ledger import Ledger
from consumers.losses import Losses, OnLost
from consumers.outbox import Outbox
from consumers.rewards.calls import PoolError
from consumers.rewards.pool import NotScored, Outcome, Scored, ScoringPool
from consumers.rewards.types import RewardInput
from consumers.runner import (
    NEARLY,
    Clock,
    Inputs,
    Patience,
    ProgressClock,
    Reader,
    Stop,
    exit_code,
    now_ms,
    recover,
    stamp,
    with_progress,
)
from streams import codec, columns
from streams.errors import CodecError, InvalidEvent, LogUnavailable
from streams.events import Event, Metrics, RewardAssigned, RolloutFailed, ScoringFailed, TrajectoryFinished
from streams.log import EventLog, Record, TopicPartition
from streams.topics import Topics
from streams.trajectory import payload_digest

logger = logging.getLogger(__name__)

BUNDLE, QUICK_S = 32, 0.001  # samples of one request, when one takes less than this
SEEN_UIDS = 20_000  # twins are recognised among this many latest uids of a partition


class _Lane:
    """One partition: its place in the input, what is being scored, what is being appended."""

    def __init__(self, stage: RewardStage, partition: int) -> None:
        place = recover(
            *(stage.log, stage.topics, "rewards", partition, ["trajectories"]),
            losses=stage.losses,
            of=(RewardAssigned, ScoringFailed),
        )
        self.partition = partition
        self.inputs = Inputs(place.positions["trajectories"], place.reached["trajectories"])
        self.position = place.positions["trajectories"]
        self.outbox = Outbox(stage.log, stage.topics.name("rewards"), partition)
        self.done = {event.uid for event in place.done if isinstance(event, (RewardAssigned, ScoringFailed))}
        self.done_offsets = place.finished["trajectories"]
        self.seen: OrderedDict[str, bytes] = OrderedDict()  # uid → digest of its record
        self.held: dict[str, dict[int, tuple[int, TrajectoryFinished]]] = {}  # group → index → member
        self.held_since: dict[str, float] = {}  # on this clock
        self.clock = ProgressClock(stage.monotonic)
        self.pending: list[tuple[Future[list[Outcome]], list[tuple[int, TrajectoryFinished]]]] = []

    @property
    def in_flight(self) -> int:
        return self.inputs.in_flight

    @property
    def n_held(self) -> int:
        return sum(len(members) for members in self.held.values())


class RewardStage:
    """`RewardStage(log, topics, pool).run(stop)` scores its share of partitions until the run is finished."""

    def __init__(
        self,
        log: EventLog,
        topics: Topics,
        pool: ScoringPool,
        *,
        group: bool = False,
        group_deadline: timedelta = timedelta(seconds=600),
        with_ids: bool = True,
        replica: int = 0,
        replicas: int = 1,
        max_in_flight: int = 512,
        on_lost: OnLost = "stop",
        clock: Clock = now_ms,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.log, self.topics, self.pool = log, topics, pool
        self.group, self.group_deadline, self.with_ids = group, group_deadline, with_ids
        self.replica, self.replicas, self.max_in_flight = replica, replicas, max_in_flight
        self.clock, self.monotonic = clock, monotonic
        self.name = f"reward-{replica}"
        self.reader = Reader(log, topics, self.name, clock)
        self.losses = Losses(self.name, on_lost)
        self.counts = {"scored_total": 0, "failed_total": 0, "duplicates_total": 0, "conflicts_total": 0}
        self._lanes: Lanes[_Lane] = Lanes(
            lambda partition: _Lane(self, partition),
            abandoned=lambda lane: pool.forget(future for future, _ in lane.pending),
        )
        self.ledger = Ledger(log, topics)
        self._verdict_came = threading.Event()
        self._scoring_s = 1.0  # of a sample, lately; nothing is known at first
        self._patience = Patience(self.name)
        self._reported = 0

    # -- life
    def start(self) -> None:
        """Take this replica's share of the partitions."""
        self._lanes.join(
            self.log,
            self.topics.group("reward"),
            self.topics.name("trajectories"),
            replica=self.replica,
            replicas=self.replicas,
            member=self.name,
        )

    def close(self) -> int:
        """Send the verdicts that are there, wait a moment for what was sent, then give the share back. Returns how many
        events are not delivered."""
        for lane in self._lanes.values():
            try:
                self._collect(lane)
            except PoolError:
                pass  # what has ended the stage is no verdict, and said elsewhere
        return self._lanes.close()

    def run(self, stop: Stop) -> int:
        """0 when the run is finished or `stop()` is true; 1 if verdicts that were made could not be delivered."""
        self.start()
        undelivered = 0
        try:
            self._rounds(stop)
        except LogUnavailable as error:
            if not stop():
                raise
            logger.warning("%s: stopped before the log had answered: %s", self.name, error)
        finally:
            undelivered = self.close()
        return exit_code(self.name, 0 if self.ledger.finished is not None else undelivered)

    def _rounds(self, stop: Stop) -> None:
        while not stop():
            if self.round():
                self._patience.reset()
                continue
            if self.ledger.finished is not None:
                return
            self._patience.waiting(self._waits_for)
            self._wait()

    def _wait(self) -> None:
        """For a verdict while samples are being scored (looking for new ones in between), else for the log."""
        if any(lane.pending for lane in self._lanes.values()):
            self._verdict_came.wait(0.005)
            self._verdict_came.clear()
            return
        self.log.wait(self._watched(), timedelta(milliseconds=20 if self._lanes.is_sending else 100))

    def round(self) -> bool:
        """Take in verdicts and acknowledgements, then new trajectories; True if anything moved."""
        self._lanes.rebalance()
        self.ledger.catch_up()
        moved = False
        for lane in self._lanes.values():
            moved = lane.outbox.poll() > 0 or moved
            moved = self._collect(lane) or moved
            if not lane.outbox.stuck:
                moved = self._read(lane) or moved
            self._expire_held(lane)
        self._report()
        return moved

    def _watched(self) -> dict[TopicPartition, int]:
        topic = self.topics.name("trajectories")
        return {TopicPartition(topic, p): lane.position for p, lane in self._lanes.items()}

    def _waits_for(self) -> str:
        if not self._lanes:
            return "a share of the partitions"
        held = sum(lane.n_held for lane in self._lanes.values())
        scoring = sum(len(lane.pending) for lane in self._lanes.values())
        return f"trajectories ({scoring} requests being scored, {held} members held for their groups)"

    # -- input
    def _read(self, lane: _Lane) -> bool:
        room = self.max_in_flight - (lane.in_flight - lane.n_held)
        if room <= 0:
            return False
        topic = self.topics.name("trajectories")
        batch = self.losses.read(self.log, topic, lane.partition, lane.position, max_records=min(room, 256))
        failures: list[tuple[int, ScoringFailed]] = []
        ready: list[tuple[int, TrajectoryFinished]] = []
        for record in batch.records:
            event = self.reader.decode(record)
            lane.inputs.started(record.offset)
            if not isinstance(event, (TrajectoryFinished, RolloutFailed)) or self._is_twin(
                lane, record, event
            ):
                lane.inputs.finished(record.offset)
            elif isinstance(event, RolloutFailed):
                failures.append((record.offset, _rollout_failed(event, record.offset)))
            elif self.group:
                self._hold(lane, record.offset, event)
            else:
                ready.append((record.offset, event))
        # Verdicts of one request come together: quick rules go in bundles, slow ones alone.
        size = BUNDLE if self._scoring_s < QUICK_S else 1
        for at in range(0, len(ready), size):
            self._score(lane, ready[at : at + size])
        lane.position = batch.next_position
        lane.inputs.advance(batch.next_position)
        self._send(lane, failures)
        return bool(batch.records)

    def _is_twin(self, lane: _Lane, record: Record, event: TrajectoryFinished | RolloutFailed) -> bool:
        """Identity removes duplicates (DESIGN §4.2): the first body of a uid stays, another body is a conflict."""
        digest = _body_digest(event)
        known = lane.seen.get(event.uid)
        if known is None:
            lane.seen[event.uid] = digest
            if len(lane.seen) > SEEN_UIDS:
                lane.seen.popitem(last=False)
            # done by an earlier incarnation of this stage?
            return event.uid in lane.done or record.offset in lane.done_offsets
        self.counts["duplicates_total"] += 1
        if known != digest:
            self.counts["conflicts_total"] += 1
            self.reader.refuse(record, reason="conflict", detail=f"{event.uid} is known with another body")
        return True

    def _hold(self, lane: _Lane, offset: int, event: TrajectoryFinished) -> None:
        members = lane.held.setdefault(event.group_id, {})
        lane.held_since.setdefault(event.group_id, lane.clock.seconds)
        if event.index in members:  # asked for again while its group was incomplete: the newest is awaited
            self.counts["duplicates_total"] += 1
            lane.inputs.finished(members[event.index][0])
        members[event.index] = (offset, event)
        if len(members) == event.n_samples:
            del lane.held[event.group_id], lane.held_since[event.group_id]
            self._score(lane, [members[index] for index in sorted(members)])

    def _score(self, lane: _Lane, members: list[tuple[int, TrajectoryFinished]]) -> None:
        inputs = [self._input(event) for _, event in members]
        future = self.pool.submit(inputs)
        future.add_done_callback(lambda _: self._verdict_came.set())
        lane.pending.append((future, members))

    def _input(self, event: TrajectoryFinished) -> RewardInput:
        return RewardInput(
            uid=event.uid,
            group_id=event.group_id,
            index=event.index,
            prompt=event.prompt,
            response=event.response,
            response_ids=columns.decode_ids(event.response_ids) if self.with_ids else None,
            label=event.label,
            metadata=event.metadata,
            finish_reason=event.finish_reason,
            response_length=event.n_response_tokens,
        )

    def _expire_held(self, lane: _Lane) -> None:
        """A group whose members never all come: its members fail by name, so the collector can judge."""
        limit = self.group_deadline.total_seconds()
        end = self.log.recent_end(self.topics.name("trajectories"), lane.partition)
        behind = end - lane.position >= NEARLY
        lane.clock.tick(running=not (behind or self.ledger.paused or lane.outbox.stuck))
        for group, since in list(lane.held_since.items()):
            if lane.clock.seconds - since > limit and not behind:
                members = lane.held.pop(group)
                del lane.held_since[group]
                reason = f"{len(members)} members were there after {limit:.0f} s"
                failed = [
                    (offset, _scoring_failed(event, offset, "group_incomplete", reason))
                    for offset, event in members.values()
                ]
                self._send(lane, failed)

    # -- output
    def _collect(self, lane: _Lane) -> bool:
        done, waiting = [], []
        for entry in lane.pending:  # each is asked once: one that ends in between is taken next time
            (done if entry[0].done() else waiting).append(entry)
        if not done:
            return False
        lane.pending = waiting
        verdicts: list[tuple[int, Event]] = []
        for future, members in done:
            for (offset, event), outcome in zip(members, future.result(), strict=True):
                verdicts.append((offset, self._verdict(event, offset, outcome)))
        self._send(lane, verdicts)
        return True

    def _verdict(self, event: TrajectoryFinished, offset: int, outcome: Outcome) -> Event:
        if isinstance(outcome, NotScored):
            self.counts["failed_total"] += 1
            logger.warning(
                "%s: no verdict on %s: %s: %s", self.name, event.uid, outcome.reason, outcome.detail
            )
            return _scoring_failed(event, offset, outcome.reason, outcome.detail)
        assert isinstance(outcome, Scored)
        self._scoring_s += 0.1 * (outcome.seconds - self._scoring_s)
        try:
            runs = columns.trainable_runs(event.versions, columns.decode_mask(event.loss_mask))
        except (CodecError, InvalidEvent) as error:
            return _scoring_failed(event, offset, "bad_payload", str(error))
        self.counts["scored_total"] += 1
        return RewardAssigned(
            **_identity(event),
            reward=outcome.reward,
            components=outcome.components,
            trajectory_offset=offset,
            n_prompt_tokens=event.n_prompt_tokens,
            n_response_tokens=event.n_response_tokens,
            trainable_versions=runs,
            payload_digest=payload_digest(event),
            finish_reason=event.finish_reason,
            scoring_s=outcome.seconds,
            started_ms=event.started_ms,
            finished_ms=event.finished_ms,
        )

    def _send(self, lane: _Lane, verdicts: list[tuple[int, Any]]) -> None:
        if not verdicts:
            return
        progress = {"trajectories": lane.inputs.progress()}
        events = stamp([event for _, event in verdicts], progress)
        records = [codec.encode(event, producer=self.name) for event in events]
        offsets = [offset for offset, _ in verdicts]

        def acknowledged(_: int) -> None:
            for offset in offsets:
                lane.inputs.finished(offset)

        lane.outbox.send(records, acknowledged)

    # -- metrics
    def _report(self) -> None:
        now = self.clock()
        if now - self._reported < 1000:
            return
        self._reported = now
        values = {key: float(value) for key, value in self.counts.items()}
        values["pending"] = float(sum(lane.in_flight for lane in self._lanes.values()))
        values["dead_letters"] = float(self.reader.dead_letters)
        values["unknown_types"] = float(self.reader.unknown_types)
        values["lost"] = float(self.losses.count)
        metrics = Metrics(source=self.name, values=values, at_ms=now)
        self.log.submit(self.topics.name("metrics"), 0, [codec.encode(metrics, producer=self.name)])
        topic = self.topics.name("trajectories")
        done = {TopicPartition(topic, p): lane.inputs.low_water for p, lane in self._lanes.items()}
        self.log.commit_hint(self.topics.group("reward"), done)  # so that lag is what has no verdict yet


def _body_digest(event: TrajectoryFinished | RolloutFailed) -> bytes:
    """Digest of what the sample is, without the writer's progress, which differs between honest copies."""
    body = msgspec.msgpack.encode(with_progress(event, {}))
    return hashlib.blake2b(body, digest_size=16).digest()


def _identity(event: TrajectoryFinished | RolloutFailed) -> dict[str, Any]:
    return {
        "uid": event.uid,
        "group_id": event.group_id,
        "seq": event.seq,
        "index": event.index,
        "attempt": event.attempt,
        "n_samples": event.n_samples,
        "task_offset": event.task_offset,
    }


def _scoring_failed(event: TrajectoryFinished, offset: int, reason: str, detail: str) -> ScoringFailed:
    return ScoringFailed(
        **_identity(event), stage="reward", reason=reason, detail=detail[:2000], trajectory_offset=offset
    )


def _rollout_failed(event: RolloutFailed, offset: int) -> ScoringFailed:
    return ScoringFailed(
        **_identity(event),
        stage="rollout",
        reason=event.reason,
        detail=event.detail[:2000],
        trajectory_offset=offset,
    )
