"""The trainer: the one writer of outcomes. Rank 0 alone runs this loop.

    groups ──► Buffer ──► stale now? ──► enough? ──► payloads checked ──► BatchCut ═══ the commit
                 │            │ GroupsDropped            │ bad: dropped        │
                 │            ▼                                               step ──► weights v+1 ──► publisher
                 └── waits for: completed groups; a Resumed; DataEnded          │                    (beside it)
                                                                               checkpoint every n steps

A life: RunStarted (first ever) → EpochStarted, and everything of older epochs is void → `resume` (checkpoint, then
the ledger replayed) → the newest version is published → live → every open group gets its outcome → RunFinished.
A newer epoch in the ledger means that somebody else owns the run: Fenced is raised and nothing is written any more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from consumers.batches import Buffer, Rule
from consumers.ledger import Ledger
from consumers.losses import Losses
from consumers.outbox import append_patiently
from consumers.runner import Clock, Patience, Reader, Stop, now_ms, records_backwards, task_event
from engine.interfaces import BadStep, TrainBatch, TrainerBackend
from engine.trainer.checkpoint import prune_checkpoints, save_checkpoint
from engine.trainer.lost import LOST, lost_groups
from engine.trainer.mismatch import Maker, MismatchWatch, compared_makers, recall
from engine.trainer.ownership import Ownership
from engine.trainer.payloads import BadPayload, Payloads, train_batch
from engine.trainer.probe import Probed, Score, probe
from engine.trainer.publisher import Publisher
from engine.trainer.reporting import step_events
from engine.trainer.resume import Start, resume
from engine.trainer.saver import Saver
from engine.trainer.settings import LoopSettings
from engine.weights.sender import Sender
from engine.weights.store import WeightStore, digest
from streams import codec
from streams.errors import LogFull, LogUnavailable, MillstreamError
from streams.events import (
    BatchCut,
    CheckpointSaved,
    CutGroup,
    Event,
    GroupCompleted,
    GroupDropped,
    GroupsDropped,
    RunEnding,
    RunFinished,
    StepSkipped,
    WeightsPublished,
)
from streams.log import EventLog, Record, TopicPartition
from streams.ranges import as_ranges
from streams.topics import Topics

logger = logging.getLogger(__name__)

QUARANTINED = (
    "quarantined"  # outcome of groups with a sample of an engine whose log-probs are not to be believed
)
SAVE_LAST = timedelta(seconds=1)  # for a checkpoint under way when the trainer is asked to stop
PUBLISH_DEADLINE = timedelta(minutes=15)  # of writing weights that are on their way when the loop ends


class TooManyBadSteps(MillstreamError):
    """Several steps in a row could not be taken: going on would only burn samples."""


class _Stopped(Exception):
    """Asked to stop in the middle of a recovery or of a wait."""


MakeSender = Callable[[int], Sender]  # of an epoch


class Trainer:
    """`Trainer(log, topics, backend, store, settings, checkpoints).run(stop)` → exit code.

    `make_sender`: for versions that are broadcast too; None: engines take files alone. `score`: for samples that are to
    be measured under their own version; None: only those compare that are trained by the version that sampled them.
    """

    def __init__(
        self,
        log: EventLog,
        topics: Topics,
        backend: TrainerBackend,
        store: WeightStore,
        settings: LoopSettings,
        checkpoints: Path,
        *,
        make_sender: MakeSender | None = None,
        score: Score | None = None,
        clock: Clock = now_ms,
        poll: timedelta = timedelta(milliseconds=100),
    ) -> None:
        self.log, self.topics, self.backend, self.store = log, topics, backend, store
        self.settings, self.checkpoints, self.clock, self.poll = settings, checkpoints, clock, poll
        self.ledger = Ledger(log, topics, limit=settings.max_weight_staleness)
        self.reader = Reader(log, topics, "trainer", clock)
        self.losses = Losses("trainer", settings.on_lost)
        self.payloads = Payloads(log, topics, backend.refuses, with_teacher=backend.inputs.with_teacher)
        self.mismatch = MismatchWatch(settings.max_logprob_mismatch)
        self._history: list[tuple[Record, Event]] = []  # valid ledger records read before the epoch begins
        self.step = self.version = 0
        self._bad_steps = 0
        self._drops: dict[str, int] = {}
        self._patience = Patience("trainer")
        self._ended_at = time.monotonic()  # of the last step
        self._checkpointed = 0
        self._stop: Stop = lambda: False
        self._make_sender, self._sender = make_sender, None
        self._score = score
        self._ownership = Ownership(self.ledger, topics, settings, self._append, clock)

    @property
    def epoch(self) -> int:
        return self._ownership.epoch

    # -- life
    def start(self) -> None:
        """Begin an epoch, recover, and publish the newest version."""
        history, self._history = self._ownership.begin(self._history), []
        start = resume(
            self.log,
            self.topics,
            self.ledger,
            history,
            self.backend,
            self.checkpoints,
            digest=digest,
            beat=self._give_way,
        )
        self.step, self.version, self._checkpointed = start.step, start.version, start.step
        for cut, bad in start.unrecorded:  # killed between the cut and its StepSkipped
            self._append_skipped(cut, bad)
        if self.settings.max_logprob_mismatch is not None:
            cuts = [(event.epoch, event.step) for _, event in history if isinstance(event, BatchCut)]
            recall(self.log, self.topics, cuts, self.mismatch)
            self._quarantine()  # killed before it was written
        self.buffer = self._buffer(start)
        if self._make_sender is not None:
            self._sender = self._make_sender(self.epoch)
        self._publisher = Publisher(self._write_weights, self._append, self._sender)
        self._saver = Saver()
        self._publish(forked_at=start.forked_at)

    def _buffer(self, start: Start) -> Buffer:
        """Waiting groups from where the last cut left off; those that retention has removed are dropped."""
        topic, positions = self.topics.name("groups"), list(start.positions)
        for partition, wanted in enumerate(start.positions):
            begin = self.log.start(topic, partition)
            positions[partition] = self.losses.position(topic, partition, wanted=wanted, start=begin)
        buffer = Buffer(self.topics.partitions, start.frontier, positions)
        if self.settings.on_lost == "continue":
            # without a gap too: an earlier incarnation may have ended between passing one and writing its drops
            for partition, position in enumerate(positions):
                self._drop_lost(buffer, partition, position)
        return buffer

    def _drop_lost(self, buffer: Buffer, partition: int, read_to: int) -> None:
        waiting = {event.seq for _, _, event in buffer.waiting()}
        lost = lost_groups(
            *(self.log, self.topics, partition, buffer.frontier, self.losses),
            read_to=read_to,
            waiting=waiting,
        )
        for seq, group_id in lost.items():
            buffer.drop(group_id, seq, LOST, detail="its outcome was gone before it was read")

    def close(self) -> None:
        """End the threads that write. A version on its way is finished; so is a checkpoint, if that is quick: one that
        is abandoned was not announced, and is no loss."""
        self._publisher.close()
        if self._sender is not None:
            self._sender.close()
        try:
            self._saver.flush(SAVE_LAST)
        except TimeoutError:
            logger.warning("trainer: stopped while a checkpoint was written; it does not count")

    def run(self, stop: Stop) -> int:
        self._history += self.ledger.catch_up()
        if self.ledger.finished is not None:
            logger.info("trainer: the run is finished already, at step %d", self.ledger.step)
            return 0
        self._stop = stop
        try:
            self.start()
            try:
                while not stop() and self.ledger.finished is None:
                    if self.round():
                        self._patience.reset()
                        continue
                    self._patience.waiting(self._waits_for)
                    self.log.wait(self._watched(), self.poll)
                if not stop():
                    self._publisher.flush(PUBLISH_DEADLINE, beat=self._give_way)
            finally:
                self.close()
        except _Stopped:
            logger.info("trainer: stopped; what was under way is made again from the ledger")
        except (LogFull, LogUnavailable) as error:
            if not stop():
                raise
            logger.warning("trainer: stopped; what the ledger did not take is made again: %s", error)
        return 0

    def _give_way(self) -> None:
        if self._stop():
            raise _Stopped

    def _beat(self) -> None:
        """In every long wait: obey a stop, and notice another trainer."""
        self._give_way()
        self.ledger.catch_up()
        self._ownership.check(self.step)

    # -- one round
    def round(self) -> bool:
        """Read, drop what must go, cut and train if there is enough; True if anything was written."""
        self.ledger.catch_up()
        self._ownership.check(self.step)
        self._publisher.check()
        self._saver.check()
        self._read_groups()
        if self.ledger.paused or not self._is_published:
            return False
        if self.ledger.ending is not None or self._steps_reached():
            return self._end("steps_reached")
        rule = self._rule()
        self.buffer.sweep(rule)
        size = self._batch_size()
        if size and self._prepare(size):
            self._train(size, rule)
            return True
        if self.buffer.drops:
            self._write_drops()
            return True
        if self._all_closed():
            return self._end("data_ended")
        return False

    @property
    def _is_published(self) -> bool:
        """This epoch's first version is in the ledger: no earlier does it say where older epochs' versions fork."""
        published = self.ledger.published
        return published is not None and published.epoch == self.epoch

    def _rule(self) -> Rule:
        return Rule(self.version, self.ledger.limit, self.settings.on_stale, self.ledger.lineage)

    def _watched(self) -> dict[TopicPartition, int]:
        watched = {TopicPartition(self.topics.name("ledger"), 0): self.ledger.position}
        for partition, position in enumerate(self.buffer.read_to):
            watched[TopicPartition(self.topics.name("groups"), partition)] = position
        return watched

    def _waits_for(self) -> str:
        if self.ledger.paused:
            return "the run to be resumed"
        if not self._is_published:
            return f"version {self.version} to be published"
        if self.ledger.ending is not None:
            return "the feeder's DataEnded"
        there = f"{len(self.buffer)} of {self.settings.rollout_batch_size} are there"
        quarantined = sorted({engine for engine, _ in self.ledger.quarantined})
        if quarantined:
            there += f" (quarantined so far, and of use again once started anew: {', '.join(quarantined)})"
        return f"groups for step {self.step + 1}: {there}"

    def _read_groups(self) -> None:
        topic = self.topics.name("groups")
        for partition, position in enumerate(list(self.buffer.read_to)):
            lost = self.losses.count
            batch = self.losses.read(self.log, topic, partition, position)
            for record in batch.records:
                event = self.reader.decode(record)
                if isinstance(event, (GroupCompleted, GroupDropped)):
                    self.buffer.offer(partition, record.offset, event)
            if self.losses.count > lost:
                self._drop_lost(self.buffer, partition, position)
            self.buffer.advance(partition, batch.next_position)

    # -- cutting
    def _batch_size(self) -> int:
        """Groups to cut now; 0: wait. The last batch may be short."""
        size, waiting = self.settings.rollout_batch_size, len(self.buffer)
        if waiting >= size:
            return size
        ended = self.ledger.data_ended
        if ended is None or waiting == 0 or len(self.buffer.frontier) + waiting < ended.count:
            return 0
        if self.settings.last_batch == "train":
            return waiting
        for _, _, event in self.buffer.waiting():
            self.buffer.refuse(event.seq, "surplus", "short last batch (trainer.last_batch = drop)")
        return 0

    def _prepare(self, size: int) -> bool:
        """Have the payloads of the next `size` groups; a group with a bad one, or with one that a quarantined engine
        made, is dropped by name."""
        good = True
        for partition, _, event in self.buffer.waiting()[:size]:
            try:
                makers = self.payloads.prepare(partition, event)
            except BadPayload as bad:
                logger.warning("trainer: group %s dropped: %s", event.group_id, bad)
                self.buffer.refuse(event.seq, "bad_payload", str(bad))
                good = False
                continue
            if banned := sorted(makers & self.ledger.quarantined.keys()):
                detail = ", ".join(f"made by {engine} {incarnation}" for engine, incarnation in banned)
                self.buffer.refuse(event.seq, QUARANTINED, detail)
                good = False
        return good

    def _train(self, size: int, rule: Rule) -> None:
        waited = time.monotonic() - self._ended_at
        cut = self._cut(size, rule)
        began = time.monotonic()
        batch = train_batch(cut, self.payloads, self.ledger.lineage, self.backend.inputs)
        makers = compared_makers(batch, self.ledger.lineage, self.settings.num_steps_per_rollout)
        try:
            metrics = self.backend.step(batch)
        except BadStep as bad:
            self._skip(cut, bad)
            return
        self._bad_steps = 0
        self.version += 1
        if self.version % self.settings.update_weights_interval == 0 or self._steps_reached():
            self._publish()
        if self.step % self.settings.checkpoint_every == 0:
            self._save_checkpoint()
        probed = self._probe(batch)
        self._ended_at = time.monotonic()
        metrics["step_s"], metrics["wait_s"] = self._ended_at - began, waited
        metrics["busy"] = (self._ended_at - began) / max(1e-9, waited + self._ended_at - began)
        self._report(cut, metrics, makers, probed)
        self._quarantine()

    def _probe(self, batch: TrainBatch) -> Probed | None:
        return None if self._score is None else probe(self._score, batch, self.mismatch, self.ledger.recent)

    def _quarantine(self) -> None:
        """Engines whose log-probs are too far from the trainer's: from this record on nothing of theirs is trained."""
        for found in self.mismatch.over():
            if found.maker not in self.ledger.quarantined:
                logger.error("trainer: step %d: %s", self.step, found.sentence())
                self._append(found.record(epoch=self.epoch, step=self.step, at_ms=self.clock()))
                self.ledger.catch_up()
            self.mismatch.forget(found.maker)

    def _cut(self, size: int, rule: Rule) -> BatchCut:
        """Append the step's record. From here on it is this step, whatever happens to this process."""
        chosen = self.buffer.cut(size, rule)
        drops, duplicates = self._take_drops(chosen.groups)
        cut = BatchCut(
            epoch=self.epoch,
            version=self.version,
            step=self.step + 1,
            groups=chosen.groups,
            positions=chosen.positions,
            drops=drops,
            duplicates=duplicates,
            frontier=self.buffer.frontier.low,
            closed_above=as_ranges(self.buffer.frontier.above),
            limit=rule.limit,
            on_stale=rule.on_stale,
            seed=_step_seed(self.settings.seed, self.step + 1),
            ledger_read_to=self.ledger.position,
            cut_ms=self.clock(),
            last=self.ledger.data_ended is not None and not len(self.buffer),
        )
        self._append(cut)
        self.step += 1
        self.ledger.catch_up()
        self._ownership.check(self.step)
        return cut

    def _skip(self, cut: BatchCut, bad: BadStep) -> None:
        self._bad_steps += 1
        logger.error("trainer: step %d skipped: %s (%d in a row)", cut.step, bad, self._bad_steps)
        self._append_skipped(cut, bad)
        if self._bad_steps > self.settings.max_bad_steps:
            raise TooManyBadSteps(
                f"{self._bad_steps} steps in a row could not be taken (trainer.max_bad_steps = "
                f"{self.settings.max_bad_steps}); the last: {bad}"
            )

    def _append_skipped(self, cut: BatchCut, bad: BadStep) -> None:
        self._append(
            StepSkipped(
                epoch=self.epoch, step=cut.step, version=cut.version, reason=bad.reason, detail=bad.detail
            )
        )

    def _write_drops(self) -> None:
        drops, duplicates = self._take_drops()
        self._append(
            GroupsDropped(
                epoch=self.epoch,
                version=self.version,
                drops=drops,
                duplicates=duplicates,
                frontier=self.buffer.frontier.low,
                closed_above=as_ranges(self.buffer.frontier.above),
            )
        )

    def _take_drops(self, chosen: Sequence[CutGroup] = ()):
        drops, duplicates = self.buffer.take_drops()
        for drop in drops:
            self._drops[drop.reason] = self._drops.get(drop.reason, 0) + 1
        if duplicates:
            self._drops["duplicate"] = self._drops.get("duplicate", 0) + duplicates
        if drops:
            wanted = {
                (partition, member.trajectory_offset)
                for partition, _, event in self.buffer.waiting()
                for member in event.members
            }
            wanted |= {
                (group.partition, each.trajectory_offset) for group in chosen for each in group.members
            }
            self.payloads.keep_only(wanted)
        return drops, duplicates

    # -- weights and checkpoints
    def _publish(self, *, forked_at: int = -1) -> None:
        self._publisher.publish(
            self.backend.weights(),
            self.version,
            self.step,
            forked_at=forked_at,
            beat=self._beat,
        )

    def _write_weights(self, tensors, version: int, step: int) -> WeightsPublished:
        event = self.store.publish(tensors, epoch=self.epoch, version=version, step=step)
        self.store.prune()
        return event

    def _save_checkpoint(self) -> None:
        """Copy the state now; it is written and announced beside the next steps."""
        save = partial(
            self._write_checkpoint, self.backend.snapshot(), self.step, self.version, self.ledger.position
        )
        self._saver.save(save, beat=self._beat)
        self._checkpointed = self.step

    def _write_checkpoint(
        self, write: Callable[[Path], None], step: int, version: int, ledger_position: int
    ) -> None:
        """On the saver's thread."""
        path, checksum = save_checkpoint(
            self.checkpoints,
            epoch=self.epoch,
            step=step,
            version=version,
            ledger_position=ledger_position,
            write=write,
        )
        self._append(
            CheckpointSaved(
                epoch=self.epoch,
                version=version,
                step=step,
                path=f"checkpoints/{path.name}",
                digest=checksum,
                ledger_position=ledger_position,
                saved_ms=self.clock(),
            )
        )
        if self._newest_epoch() > self.epoch:  # what the other trainer resumed from is not ours to remove
            return
        prune_checkpoints(
            self.checkpoints,
            keep_last=self.settings.checkpoint_keep_last,
            keep_every=self.settings.checkpoint_keep_every,
        )

    def _newest_epoch(self) -> int:
        """Asked of the log, for a thread that must not touch the fold."""
        for record in records_backwards(self.log, self.topics.name("ledger"), 0):
            if record.header("type") == b"epoch_started":
                return record.offset
        return -1

    # -- the end
    def _steps_reached(self) -> bool:
        return self.settings.steps is not None and self.step >= self.settings.steps

    def _all_closed(self) -> bool:
        ended = self.ledger.data_ended
        return ended is not None and len(self.buffer.frontier) >= ended.count

    def _end(self, reason: str) -> bool:
        """Ask the feeder to stop, give every open group its outcome, finish. True if anything was written."""
        ended = self.ledger.data_ended
        if ended is None:
            if self.ledger.ending is None:
                self._append(RunEnding(epoch=self.epoch, step=self.step, reason=reason))
                return True
            return False
        for seq, group_id in self._open_groups(ended.count).items():
            self.buffer.drop(group_id, seq, "surplus", detail="open when the run ended")
        if self.buffer.drops:
            self._write_drops()
        if self._checkpointed < self.step:
            self._save_checkpoint()
        if self.version % self.settings.update_weights_interval:
            self._publish()  # the last version, off the interval
        self._publisher.flush(PUBLISH_DEADLINE, beat=self._beat)
        self._saver.flush(PUBLISH_DEADLINE, beat=self._beat)
        finished = RunFinished(
            epoch=self.epoch, step=self.step, version=self.version, reason=reason, finished_ms=self.clock()
        )
        self._append(finished)
        self.ledger.catch_up()
        logger.info("trainer: run finished at step %d: %s", self.step, reason)
        return True

    def _open_groups(self, count: int) -> dict[int, str]:
        """seq → group id of every dispatched group without an outcome."""
        frontier, found = self.buffer.frontier, {}
        for partition in range(self.topics.partitions):
            for record in records_backwards(self.log, self.topics.name("tasks"), partition, self.losses):
                event = task_event(record)
                if event is None:
                    continue
                if event.seq not in frontier and event.seq < count:
                    found[event.seq] = event.group_id
                if event.next_seq <= frontier.low:
                    break
        return dict(sorted(found.items()))

    # -- writing
    def _append(self, event: Event) -> int:
        """Append to the ledger; a log that has no room or does not answer pauses the run, it loses nothing.

        Raises LogFull or LogUnavailable only when the trainer is asked to stop meanwhile.
        """
        record = codec.encode(event, producer="trainer")
        ledger = self.topics.name("ledger")
        return append_patiently(self.log, ledger, 0, [record], who="trainer", stop=self._stop)

    def _report(
        self,
        cut: BatchCut,
        metrics: dict[str, float],
        makers: Sequence[Maker | None],
        probed: Probed | None = None,
    ) -> None:
        sums = self.backend.trajectory_sums
        gauges = self._compare(cut.step, makers, sums, probed) | self._gauges()
        told = step_events(cut, metrics, sums, makers, probed, gauges=gauges, at_ms=self.clock())
        records = [codec.encode(each, producer="trainer") for each in told]
        self.log.submit(self.topics.name("metrics"), 0, records)
        self.log.commit_hint(
            self.topics.group("trainer"),
            {
                TopicPartition(self.topics.name("groups"), partition): position
                for partition, position in enumerate(cut.positions)
            },
        )

    def _gauges(self) -> dict[str, float]:
        """Of this process, as they are now."""
        values = {
            "groups_buffered": float(len(self.buffer)),
            "version": float(self.version),
            "lost": float(self.losses.count),
            "checkpoint_s": self._saver.seconds,
            "checkpoints_failed": float(self._saver.failed),
        }
        if self._sender is not None:
            values |= self._sender.gauges()
        return values | {f"dropped/{reason}": float(count) for reason, count in self._drops.items()}

    def _compare(
        self,
        step: int,
        makers: Sequence[Maker | None],
        sums: NDArray[np.float64],
        probed: Probed | None,
    ) -> dict[str, float]:
        """Metrics of the mismatch watch."""
        if probed is None:
            return self.mismatch.add(step, makers, sums)
        return self.mismatch.add(
            step, [*makers[: len(sums)], *probed.makers], np.concatenate([sums, probed.sums])
        )


def _step_seed(seed: int, step: int) -> int:
    return (seed * 1_000_003 + step) % (1 << 31)
