"""A small run around a rollout worker: a log, published weights, tasks, and a worker on a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from engine.interfaces import Sampling
from engine.rollout.generate import single_turn
from engine.rollout.loading import on_disk
from engine.rollout.worker import RolloutWorker
from engine.weights.store import WeightStore
from streams import codec
from streams.events import EpochStarted, Event, RunFinished, TaskDispatched, WeightsPublished
from streams.log import EventLog, read_all
from streams.memory import MemoryLog
from streams.topics import Topics

DEADLINE_S = 30.0


def eventually(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """Poll until the condition holds and return what it gave."""
    end = time.monotonic() + deadline_s
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.005)


class Run:
    """A run directory and its log, with the writers that surround a rollout worker."""

    def __init__(self, folder: Path, partitions: int = 2, log: EventLog | None = None) -> None:
        self.folder, self.log = folder, log or MemoryLog()
        self.topics = Topics("test", partitions)
        self.topics.create(self.log)
        self.store = WeightStore(folder / "weights", keep=100)
        self.epoch = self.write("ledger", EpochStarted(producer="test", started_ms=1))
        self.seq = 0

    def write(self, word: str, event: Event, partition: int = 0) -> int:
        return self.log.append(self.topics.name(word), partition, [codec.encode(event, producer="test")])

    def events(self, word: str, partition: int | None = None) -> list[Any]:
        places = range(self.topics.count(word)) if partition is None else [partition]
        found = []
        for place in places:
            for record in read_all(self.log, self.topics.name(word), place, 0):
                decoded = codec.decode(record)
                assert isinstance(decoded, codec.Known)
                found.append(decoded.event)
        return found

    def of(self, word: str, kind: type[Event], partition: int | None = None) -> list[Any]:
        return [event for event in self.events(word, partition) if isinstance(event, kind)]

    def publish(self, version: int, tensors: dict[str, Any] | None = None) -> WeightsPublished:
        weights = {"w": np.array([float(version)])} if tensors is None else tensors
        event = self.store.publish(weights, epoch=self.epoch, version=version, step=version)
        self.write("ledger", event)
        return event

    def dispatch(self, prompt: Any = "say", *, n_samples: int = 2, partition: int = 0, **fields: Any) -> int:
        seq = self.seq
        self.seq += 1
        task = TaskDispatched(
            group_id=f"0-{seq}", seq=seq, data_epoch=0, row=seq, n_samples=n_samples, prompt=prompt,
            next_seq=self.seq, dispatched_ms=1, **fields,
        )  # fmt: skip
        return self.write("tasks", task, partition)

    def finish(self) -> None:
        self.write(
            "ledger", RunFinished(epoch=self.epoch, step=1, version=1, reason="data_ended", finished_ms=1)
        )


class OnThread:
    """Runs a worker (anything with run(stop)) on a thread; leaves it stopped and joined."""

    def __init__(self, worker: Any) -> None:
        self.worker, self.code, self.error = worker, None, None
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.code = self.worker.run(self.stop.is_set)
        except BaseException as error:
            self.error = error

    def __enter__(self) -> OnThread:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.join()

    def join(self) -> int | None:
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive(), "the worker did not end"
        return self.code


def make_worker(run: Run, engine: Any, generate: Any = single_turn, **fields: Any) -> RolloutWorker:
    settings: dict[str, Any] = {
        "locate": on_disk(run.folder),
        "sampling": Sampling(max_tokens=16),
        "max_concurrency": 8,
        "task_deadline": timedelta(seconds=20),
        **fields,
    }
    return RolloutWorker(run.log, run.topics, engine, generate, **settings)
