"""A whole run in one process, one step of one stage at a time: the real stages on the in-memory log.

Nothing waits and nothing sleeps: a test decides which stage moves next, and may throw any stage away at any moment
(a crash) and make a new one from the log (a restart). The rollout is a small stand-in that answers at once; every
other stage is the real one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Executor, Future
from datetime import timedelta
from pathlib import Path
from typing import Any

from consumers.collector import Collector
from consumers.dataset import Row
from consumers.enrichers.teacher import Teacher, TeacherStage
from consumers.feeder import Feeder
from consumers.ledger import Ledger
from consumers.reward import RewardStage
from consumers.rewards.pool import ScoringPool
from consumers.runner import recover
from engine.interfaces import Inputs
from engine.trainer.loop import Trainer
from engine.trainer.scalar_backend import ScalarBackend
from engine.trainer.settings import LoopSettings
from engine.weights.store import WeightStore
from streams import codec, trajectory
from streams.events import InputProgress, Progress, RolloutFailed, TaskDispatched, TrajectoryFinished
from streams.log import EventLog
from streams.memory import MemoryLog
from streams.topics import Topics
from streams.trajectory import SampleData
from tests.support.events import decoded


class AtOnce(Executor):
    """Does what it is asked in the call itself."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


class Rows:
    """A dataset in memory."""

    def __init__(self, rows: list) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, index: int):
        return self.rows[index]


class Rollout:
    """Answers tasks of one partition in order; loses, doubles or breaks samples when it is told to."""

    def __init__(self, world: World, partition: int) -> None:
        self.world, self.partition = world, partition
        place = recover(world.log, world.topics, "trajectories", partition, ["tasks"])
        self.position = place.positions["tasks"]
        self.done = {
            event.uid for event in place.done if isinstance(event, (TrajectoryFinished, RolloutFailed))
        }
        self.ledger = Ledger(world.log, world.topics)

    def round(self) -> bool:
        world, topics = self.world, self.world.topics
        self.ledger.catch_up()
        if self.ledger.published is None:
            return False
        batch = world.log.read(topics.name("tasks"), self.partition, self.position, max_records=1)
        for record in batch.records:
            event = decoded(record)
            if isinstance(event, TaskDispatched):
                if self.ledger.published.version < event.min_version:
                    return False
                self._answer(event, record.offset)
        self.position = batch.next_position
        return bool(batch.records)

    def _answer(self, task: TaskDispatched, offset: int) -> None:
        world = self.world
        first = offset if task.first_offset < 0 else task.first_offset
        progress = {"tasks": InputProgress(offset + 1, offset, [])}
        for index in task.indices or range(task.n_samples):
            uid = f"{task.group_id}/{index}/{task.attempt}"
            if uid in self.done or world.loses(uid):
                continue
            published = self.ledger.published
            assert published is not None, "round() answers only once there are weights"
            sample = SampleData(
                uid=uid,
                group_id=task.group_id,
                seq=task.seq,
                index=index,
                attempt=task.attempt,
                n_samples=task.n_samples,
                task_offset=first,
                prompt_ids=[1, task.seq % 50],
                response_ids=[index, 7, task.seq % 91],
                logprobs=[-0.5, -0.25, -0.125],
                loss_mask=[1, 0, 1],
                versions=[(published.epoch, published.version, 3)],
                finish_reason="stop",
                response=str((task.seq + index) % 3),
                label="1",
            )
            record = codec.encode(world.packed(sample, progress, self.partition), producer="rollout")
            copies = 2 if world.doubles(uid) else 1
            for _ in range(copies):
                world.log.append(world.topics.name("trajectories"), self.partition, [record])


class World:
    """All stages of one run. `crash(name)` forgets a stage; the next `move(name)` makes a new one from the log."""

    def __init__(
        self,
        folder: Path,
        *,
        partitions: int = 2,
        rows: int = 6,
        data_epochs: int | None = 2,
        steps: int | None = None,
        batch: int = 2,
        n_samples: int = 2,
        limit: int = 1,
        patience: float = 100,
        log: EventLog | None = None,
        teacher: Teacher | None = None,
        loses=lambda uid: False,
        doubles=lambda uid: False,
        **loop,
    ) -> None:
        self.folder, self.loses, self.doubles, self.teacher = folder, loses, doubles, teacher
        self.log, self.topics = log or MemoryLog(), Topics("run", partitions)
        self.topics.create(self.log)
        self.rows = Rows([Row(f"prompt {index}", "1", {}) for index in range(rows)])
        self.data_epochs, self.n_samples, self.limit = data_epochs, n_samples, limit
        self.batch, self.patience = batch, patience
        self.pool = ScoringPool("exact", {}, workers=0, timeout=timedelta(seconds=5), group=False)
        self.settings = LoopSettings(
            **{
                "run": "run",
                "config_fingerprint": "test",
                "seed": 3,
                "rollout_batch_size": batch,
                "n_samples_per_prompt": n_samples,
                "max_weight_staleness": limit,
                "on_stale": "drop",
                "steps": steps,
                "checkpoint_every": 2,
                **loop,
            }
        )
        self.stages: dict[str, Any] = {}
        self.crashes = 0
        self.moves = 0  # the clock of the collector's deadlines: one second a move

    @property
    def names(self) -> list[str]:
        rollouts = [f"rollout-{partition}" for partition in range(self.topics.partitions)]
        teacher = [] if self.teacher is None else ["teacher"]
        return ["feeder", *rollouts, "reward", *teacher, "collector", "trainer"]

    def packed(self, sample: SampleData, progress: Progress, partition: int) -> TrajectoryFinished:
        """What the rollout of this partition publishes."""
        return trajectory.pack(sample, progress=progress)

    def move(self, name: str) -> bool:
        stage = self.stages.get(name)
        if stage is None:
            stage = self.stages[name] = self._make(name)
        self.moves += 1
        moved = stage.round()
        if isinstance(stage, Trainer):  # its writing threads are no part of the schedule
            stage._publisher.flush(timedelta(seconds=30))
            stage._saver.flush(timedelta(seconds=30))
        return moved

    def crash(self, name: str) -> None:
        """As kill -9 does: nothing is flushed, nothing is said; only the membership lease dies with it."""
        stage = self.stages.pop(name, None)
        membership = getattr(getattr(stage, "_lanes", None), "membership", None)
        if membership is not None:
            membership.close()
        if isinstance(stage, Trainer):
            stage._publisher.close()
        self.crashes += stage is not None

    def run(
        self,
        choose: random.Random,
        *,
        crash_rate: float = 0.0,
        most_crashes: int = 60,
        most: int = 20_000,
        meanwhile: Callable[[Ledger], object] = lambda ledger: None,
    ) -> Ledger:
        """Move stages in a random order until the run is finished; a move may be the last of its stage.

        `meanwhile` is called after each move: what people do to a live run.
        Crashes end after `most_crashes`: a collector that never lives as long as a deadline can judge nobody late.
        """
        ledger = Ledger(self.log, self.topics)
        for _ in range(most):
            name = choose.choice(self.names)
            self.move(name)
            if choose.random() < crash_rate and self.crashes < most_crashes:
                self.crash(name)
            ledger.catch_up()
            meanwhile(ledger)
            if ledger.finished is not None:
                return ledger
        raise AssertionError(f"not finished after {most} moves: {self.state(ledger)}")

    def state(self, ledger: Ledger) -> str:
        return (
            f"step {ledger.step}, frontier {ledger.frontier}, above {sorted(ledger.closed_above)}, "
            f"ended {ledger.data_ended}, crashes {self.crashes}"
        )

    def _make(self, name: str):
        if name == "feeder":
            feeder = Feeder(
                self.log,
                self.topics,
                self.rows,
                rollout_batch_size=self.batch,
                n_samples=self.n_samples,
                limit=self.limit,
                data_epochs=self.data_epochs,
            )
            feeder.recover()
            return feeder
        if name.startswith("rollout"):
            return Rollout(self, int(name.split("-")[1]))
        if name == "reward":
            stage = RewardStage(self.log, self.topics, self.pool)
            stage.start()
            return stage
        if name == "teacher":
            assert self.teacher is not None
            stage = TeacherStage(self.log, self.topics, self.teacher, executor=AtOnce())
            stage.start()
            return stage
        if name == "collector":
            stage = Collector(
                self.log,
                self.topics,
                with_teacher=self.teacher is not None,
                member_deadline=timedelta(seconds=self.patience),
                monotonic=lambda: self.moves,
            )
            stage.start()
            return stage
        return self.trainer()

    def backend(self) -> ScalarBackend:
        backend = ScalarBackend()
        backend.inputs = Inputs(with_teacher=self.teacher is not None)
        return backend

    def trainer(self) -> Trainer:
        trainer = Trainer(
            self.log,
            self.topics,
            self.backend(),
            WeightStore(self.folder / "weights", keep=50),
            self.settings,
            self.folder / "checkpoints",
        )
        trainer.start()
        return trainer

    def close(self) -> None:
        for name in list(self.stages):
            self.crash(name)
        self.pool.close()
