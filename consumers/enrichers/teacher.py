"""The teacher stage: what another model thinks of each token that was sampled, beside the reward in the log.

    trajectories p ──► seen this uid? ──► teacher (one thread, the daemon's model) ──► rewards p: TeacherScored
                             │ twin: counted      │ the model cannot take it: TeacherFailed(reason)
    waits for: a trajectory to arrive, scores, an append to be acknowledged.

Its place in the input is read from its own output (consumers/runner.py): of the events of `rewards` these alone are
its own, and the reward stage's are not. Exactly once as every stage: outputs carry the input position, uids remove
duplicates, nothing advances past an append that is not acknowledged. A sample that failed in rollout has no tokens to
think of; the reward stage says of it that it failed. What ends the model (memory, a lost device) ends this daemon:
that is an outage, which a restart mends, and no fault of the samples.

The collector waits for a sample's scores as it does for its reward, so a group is complete only with both, and the
batch that it is cut into refers to them: no batch is ever trained on scores that are not there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from consumers.lanes import Lanes
from consumers.ledger import Ledger
from consumers.losses import Losses, OnLost
from consumers.outbox import Outbox
from consumers.runner import Clock, Inputs, Patience, Reader, Stop, exit_code, now_ms, recover, stamp
from streams import codec, columns
from streams.errors import CodecError, InvalidEvent, LogUnavailable
from streams.events import Event, Metrics, TeacherFailed, TeacherScored, TrajectoryFinished
from streams.log import EventLog, TopicPartition
from streams.topics import Topics
from streams.trajectory import LOGPROB_TOLERANCE, Payload, open_payload, payload_digest

logger = logging.getLogger(__name__)

BUNDLE = 64  # samples that the model is given at a time
SEEN_UIDS = 20_000  # twins are recognised among this many latest uids of a partition


class Refused(NamedTuple):
    """Why a model cannot score a sample."""

    reason: str  # one word
    detail: str


class Teacher(Protocol):
    """The model. Everything else about a device is behind this one question."""

    name: str

    def score(self, payloads: Sequence[Payload]) -> list[NDArray[np.float32] | Refused]:
        """Log-probs [T] of the T tokens of each sample that its mask keeps. One call at a time, on one thread."""
        ...


class _Sample(NamedTuple):
    offset: int
    event: TrajectoryFinished
    payload: Payload


class _Lane:
    """One partition: its place in the input, what is being scored, what is being appended."""

    def __init__(self, stage: TeacherStage, partition: int) -> None:
        place = recover(
            *(stage.log, stage.topics, "rewards", partition, ["trajectories"]),
            losses=stage.losses,
            of=(TeacherScored, TeacherFailed),
        )
        self.partition = partition
        self.inputs = Inputs(place.positions["trajectories"], place.reached["trajectories"])
        self.position = place.positions["trajectories"]
        self.outbox = Outbox(stage.log, stage.topics.name("rewards"), partition)
        self.done = {event.uid for event in place.done if isinstance(event, (TeacherScored, TeacherFailed))}
        self.done_offsets = place.finished["trajectories"]
        self.seen: OrderedDict[str, None] = OrderedDict()
        self.pending: list[tuple[Future[_Answer], list[_Sample]]] = []


class _Answer(NamedTuple):
    scores: list[NDArray[np.float32] | Refused]
    seconds: float  # of one sample


class TeacherStage:
    """`TeacherStage(log, topics, teacher).run(stop)` scores its share of partitions until the run is finished."""

    def __init__(
        self,
        log: EventLog,
        topics: Topics,
        teacher: Teacher,
        *,
        replica: int = 0,
        replicas: int = 1,
        max_in_flight: int = 512,
        on_lost: OnLost = "stop",
        clock: Clock = now_ms,
        executor: Executor | None = None,
    ) -> None:
        """`executor`: where the teacher is asked, one call at a time; default: a thread of its own."""
        self.log, self.topics, self.teacher = log, topics, teacher
        self.replica, self.replicas, self.max_in_flight = replica, replicas, max_in_flight
        self.clock, self.name = clock, f"teacher-{replica}"
        self.reader = Reader(log, topics, self.name, clock)
        self.losses = Losses(self.name, on_lost)
        self.counts = {"scored_total": 0, "failed_total": 0, "duplicates_total": 0}
        self.ledger = Ledger(log, topics)
        self._lanes: Lanes[_Lane] = Lanes(lambda partition: _Lane(self, partition))
        self._thread = executor or ThreadPoolExecutor(1, thread_name_prefix=self.name)
        self._answer_came = threading.Event()
        self._patience = Patience(self.name)
        self._reported = 0

    # -- life
    def start(self) -> None:
        """Take this replica's share of the partitions."""
        self._lanes.join(
            self.log,
            self.topics.group("teacher"),
            self.topics.name("trajectories"),
            replica=self.replica,
            replicas=self.replicas,
            member=self.name,
        )

    def close(self) -> int:
        """Wait a moment for what was sent, then give the share back. Returns how many events are not delivered."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        return self._lanes.close()

    def run(self, stop: Stop) -> int:
        """0 when the run is finished or `stop()` is true; 1 if scores that were made could not be delivered."""
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
        if any(lane.pending for lane in self._lanes.values()):
            self._answer_came.wait(0.02)
            self._answer_came.clear()
            return
        self.log.wait(self._watched(), timedelta(milliseconds=20 if self._lanes.is_sending else 100))

    def round(self) -> bool:
        """Take in scores and acknowledgements, then new trajectories; True if anything moved."""
        self._lanes.rebalance()
        self.ledger.catch_up()
        moved = False
        for lane in self._lanes.values():
            moved = lane.outbox.poll() > 0 or moved
            moved = self._collect(lane) or moved
            if not lane.outbox.stuck:
                moved = self._read(lane) or moved
        self._report()
        return moved

    def _watched(self) -> dict[TopicPartition, int]:
        topic = self.topics.name("trajectories")
        return {TopicPartition(topic, p): lane.position for p, lane in self._lanes.items()}

    def _waits_for(self) -> str:
        if not self._lanes:
            return "a share of the partitions"
        return (
            f"trajectories ({sum(len(lane.pending) for lane in self._lanes.values())} bundles being scored)"
        )

    # -- input
    def _read(self, lane: _Lane) -> bool:
        room = self.max_in_flight - lane.inputs.in_flight
        if room <= 0:
            return False
        topic = self.topics.name("trajectories")
        batch = self.losses.read(self.log, topic, lane.partition, lane.position, max_records=min(room, 256))
        ready: list[_Sample] = []
        failures: list[tuple[int, Event]] = []
        for record in batch.records:
            event = self.reader.decode(record)
            lane.inputs.started(record.offset)
            if not isinstance(event, TrajectoryFinished) or self._is_twin(lane, record.offset, event.uid):
                lane.inputs.finished(record.offset)
                continue
            try:
                ready.append(_Sample(record.offset, event, open_payload(event)))
            except (CodecError, InvalidEvent) as error:
                failures.append((record.offset, _failed(event, record.offset, "bad_payload", str(error))))
        for at in range(0, len(ready), BUNDLE):
            self._score(lane, ready[at : at + BUNDLE])
        lane.position = batch.next_position
        lane.inputs.advance(batch.next_position)
        self._send(lane, failures)
        return bool(batch.records)

    def _is_twin(self, lane: _Lane, offset: int, uid: str) -> bool:
        """Identity removes duplicates (DESIGN §4.2); that one uid has two bodies is for the reward stage to say."""
        if uid in lane.seen:
            self.counts["duplicates_total"] += 1
            return True
        lane.seen[uid] = None
        if len(lane.seen) > SEEN_UIDS:
            lane.seen.popitem(last=False)
        return uid in lane.done or offset in lane.done_offsets

    def _score(self, lane: _Lane, samples: list[_Sample]) -> None:
        future = self._thread.submit(self._ask, [sample.payload for sample in samples])
        future.add_done_callback(lambda _: self._answer_came.set())
        lane.pending.append((future, samples))

    def _ask(self, payloads: Sequence[Payload]) -> _Answer:
        began = time.monotonic()
        scores = self.teacher.score(payloads)
        return _Answer(scores, (time.monotonic() - began) / len(payloads))

    # -- output
    def _collect(self, lane: _Lane) -> bool:
        done, waiting = [], []
        for entry in lane.pending:
            (done if entry[0].done() else waiting).append(entry)
        lane.pending = waiting
        for future, samples in done:
            answer = future.result()  # what the model raises ends the stage
            outputs = [
                (sample.offset, self._verdict(sample, found, answer.seconds))
                for sample, found in zip(samples, answer.scores, strict=True)
            ]
            self._send(lane, outputs)
        return bool(done)

    def _verdict(self, sample: _Sample, found: NDArray[np.float32] | Refused, seconds: float) -> Event:
        if not isinstance(found, Refused):
            found = _refusal(sample, found) or found
        if isinstance(found, Refused):
            self.counts["failed_total"] += 1
            logger.warning(
                "%s: %s is not scored: %s: %s", self.name, sample.event.uid, found.reason, found.detail
            )
            return _failed(sample.event, sample.offset, found.reason, found.detail)
        self.counts["scored_total"] += 1
        return TeacherScored(
            **_identity(sample.event),
            trajectory_offset=sample.offset,
            payload_digest=payload_digest(sample.event),
            teacher=self.teacher.name,
            scoring_s=seconds,
            logprobs=columns.encode_logprobs(np.minimum(found, 0)),
        )

    def _send(self, lane: _Lane, outputs: list[tuple[int, Any]]) -> None:
        if not outputs:
            return
        events = stamp([event for _, event in outputs], {"trajectories": lane.inputs.progress()})
        records = [codec.encode(event, producer=self.name) for event in events]
        offsets = [offset for offset, _ in outputs]

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
        values["pending"] = float(sum(lane.inputs.in_flight for lane in self._lanes.values()))
        values["dead_letters"] = float(self.reader.dead_letters)
        values["lost"] = float(self.losses.count)
        metrics = Metrics(source=self.name, values=values, at_ms=now)
        self.log.submit(self.topics.name("metrics"), 0, [codec.encode(metrics, producer=self.name)])
        topic = self.topics.name("trajectories")
        done = {TopicPartition(topic, p): lane.inputs.low_water for p, lane in self._lanes.items()}
        self.log.commit_hint(self.topics.group("teacher"), done)  # so that lag is what has no scores yet


def _refusal(sample: _Sample, logprobs: NDArray[np.float32]) -> Refused | None:
    """What must never be trained on is refused where it is written."""
    count = int(np.count_nonzero(sample.payload.loss_mask))
    if logprobs.shape != (count,):
        return Refused("length_mismatch", f"{logprobs.size} log-probs for {count} sampled tokens")
    bad = ~np.isfinite(logprobs) | (logprobs > LOGPROB_TOLERANCE)
    if bad.any():
        at = int(bad.argmax())
        return Refused("bad_logprob", f"log-prob {logprobs[at]} of sampled token {at}")
    return None


def _failed(event: TrajectoryFinished, offset: int, reason: str, detail: str) -> TeacherFailed:
    return TeacherFailed(**_identity(event), reason=reason, detail=detail[:2000], trajectory_offset=offset)


def _identity(event: TrajectoryFinished) -> dict[str, Any]:
    return {
        "uid": event.uid,
        "group_id": event.group_id,
        "seq": event.seq,
        "index": event.index,
        "attempt": event.attempt,
        "n_samples": event.n_samples,
        "task_offset": event.task_offset,
    }
