"""A trainer that publishes, and rollout daemons on SGLang servers, over a real log and real Gloo groups.

    fleet = Fleet(folder, model)
    engine = fleet.start(0, double.url)         # a real RolloutWorker on a thread of this process
    fleet.whole(0); fleet.publish(1); fleet.ready(0, 1).transport

The daemons have no tasks: requests are sent to their engines with `fleet.call`.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

from engine.interfaces import Sampling
from engine.rollout.loading import on_disk
from engine.rollout.sglang.engine import SGLangEngine
from engine.rollout.worker import RolloutWorker
from engine.weights import collective
from engine.weights.membership import Members
from engine.weights.sender import Sender
from engine.weights.store import WeightStore
from streams import codec
from streams.events import (
    EngineFailed,
    EngineReady,
    EpochStarted,
    Event,
    TransferGroupEnded,
    WeightsPublished,
)
from streams.log import read_all
from streams.open import open_log
from streams.topics import Topics
from tests.support.sglang_versions import Published, Versions

PARTITIONS = 4
TOPICS = Topics("test", PARTITIONS)
BUCKET_BYTES = 64 << 10  # the tests' model takes some of them
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.support.sglang_fleet"])


class Trainer:
    """Publishes by file and by broadcast, as the trainer's publisher does."""

    def __init__(self, folder: Path, model: Path, *, deadline_s: float) -> None:
        self.folder, self.log = folder, open_log(f"file://{folder}/log")
        TOPICS.create(self.log)
        self.epoch = self.write("ledger", EpochStarted(producer="test", started_ms=1))
        self.versions = Versions(model, folder)
        self.store = WeightStore(folder / "weights", keep=100)
        self.members = Members(self.log, TOPICS)
        self.sender = Sender(
            self.members,
            lambda event: self.write("fleet", event),
            epoch=self.epoch,
            bucket_bytes=BUCKET_BYTES,
            deadline=timedelta(seconds=deadline_s),
        )

    def write(self, word: str, event: Event) -> int:
        return self.log.append(TOPICS.name(word), 0, [codec.encode(event, producer="trainer")])

    def publish(self, version: int, *, wait_s: float = 60.0) -> Published:
        tensors = self.versions.tensors(version)
        event = self.store.publish(tensors, epoch=self.epoch, version=version, step=version)
        event = self.sender.prepare(event)
        self.write("ledger", event)
        self.sender.send(event, tensors)
        assert self.sender.wait(timedelta(seconds=wait_s)) or not wait_s, "the sender is not done"
        return Published(event, self.folder / event.uris["disk"], tensors)

    def candidates(self) -> list[str]:
        with self.sender._fleet:
            return [each.engine for each in self.members.candidates()]

    def close(self) -> None:
        self.sender.close()
        self.log.close()


class Fleet:
    def __init__(self, folder: Path, model: Path, *, deadline_s: float = 20.0) -> None:
        self.folder, self.model, self.deadline_s = folder, model, deadline_s
        self.trainer = Trainer(folder, model, deadline_s=deadline_s)
        self.weights: dict[tuple[int, int], dict[str, Any]] = {}  # (epoch, version) → tensors
        self.engines: dict[int, SGLangEngine] = {}
        self.workers: dict[int, RolloutWorker] = {}
        self.codes: dict[int, Future[int]] = {}
        self._stops: dict[int, threading.Event] = {}

    def start(self, replica: int, url: str, **options: Any) -> SGLangEngine:
        name = f"rollout-{replica}"
        engine = SGLangEngine(
            self.model,
            url=url,
            folder=self.folder / "weights" / "served" / name,
            locate=on_disk(self.folder),
            name=name,
            **options,
        )
        worker = RolloutWorker(
            open_log(f"file://{self.folder}/log"),
            TOPICS,
            engine,
            lambda *_: None,  # pyright: ignore[reportArgumentType]
            locate=on_disk(self.folder),
            sampling=Sampling(max_tokens=1),
            replica=replica,
            replicas=PARTITIONS,
        )
        stop, code = threading.Event(), Future[int]()
        self.engines[replica], self.workers[replica] = engine, worker
        self._stops[replica], self.codes[replica] = stop, code
        run = threading.Thread(
            target=_into, args=(code, lambda: worker.run(stop.is_set)), name=name, daemon=True
        )
        run.start()
        return engine

    def publish(self, version: int, *, wait_s: float = 60.0) -> WeightsPublished:
        made = self.trainer.publish(version, wait_s=wait_s)
        self.weights[made.event.epoch, version] = made.tensors
        return made.event

    def new_trainer(self) -> None:
        self.trainer.close()
        self.trainer = Trainer(self.folder, self.model, deadline_s=self.deadline_s)

    def call(self, replica: int, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """On the daemon's own event loop."""
        loop = eventually(lambda: self.workers[replica]._loop, "the daemon's loop")
        return asyncio.run_coroutine_threadsafe(work, loop)

    def whole(self, *replicas: int) -> None:
        """Wait until these and no others may be counted on."""
        names = [f"rollout-{replica}" for replica in replicas]
        eventually(lambda: self.trainer.candidates() == names, f"{names} to be candidates")

    def killed_trainer(self, version: int) -> int:
        """Another trainer publishes `version`, and is killed in the second bucket of the next. Returns its epoch."""
        dying = CONTEXT.Process(
            target=trainer_that_dies, args=(str(self.folder), str(self.model), version), daemon=True
        )
        dying.start()
        dying.join(60)
        assert dying.exitcode == -signal.SIGKILL, dying.exitcode
        return max(each.epoch for each in self.events(EngineReady))

    def ready(self, replica: int, version: int, epoch: int | None = None) -> EngineReady:
        """The first time that this daemon says that it holds this version (of the present epoch)."""
        wanted = (f"rollout-{replica}", self.trainer.epoch if epoch is None else epoch, version)
        return eventually(
            lambda: next(
                (
                    each
                    for each in self.events(EngineReady)
                    if (each.engine, each.epoch, each.version) == wanted
                ),
                None,
            ),
            f"{wanted} to be ready",
        )

    def ways(self, version: int, *replicas: int) -> list[str]:
        return [self.ready(replica, version).transport for replica in replicas]

    def failures(self, replica: int) -> list[EngineFailed]:
        return [each for each in self.events(EngineFailed) if each.engine == f"rollout-{replica}"]

    def endings(self) -> list[TransferGroupEnded]:
        return self.events(TransferGroupEnded)

    def events(self, kind: type) -> list[Any]:
        found = []
        for record in read_all(self.trainer.log, TOPICS.name("fleet"), 0, 0):
            decoded = codec.decode(record)
            if isinstance(decoded, codec.Known) and isinstance(decoded.event, kind):
                found.append(decoded.event)
        return found

    def close(self) -> None:
        for stop in self._stops.values():
            stop.set()
        for code in self.codes.values():
            code.exception(30)
        self.trainer.close()


def trainer_that_dies(folder: str, model: str, version: int) -> None:
    """The process of a trainer that publishes `version` to a group, and is killed in the second bucket of the next."""

    trainer = Trainer(Path(folder), Path(model), deadline_s=30)
    eventually(trainer.candidates, "an engine to be there")
    trainer.publish(version)
    sent = trainer.sender.sent
    assert sent is not None and not sent.error, sent
    at_bucket(1, lambda: os.kill(os.getpid(), signal.SIGKILL))
    trainer.publish(version + 1)


def at_bucket(number: int, happens: Callable[[], object]) -> None:
    """Before the `number`-th broadcast from now on that this process begins."""
    group_class: Any = collective.Group
    start, count = group_class.start, iter(range(1 << 30))

    def counted(self: Any, *given: Any) -> Callable[[], None]:
        if next(count) == number:
            group_class.start = start
            happens()
        return start(self, *given)

    group_class.start = counted


def eventually(condition: Callable[[], Any], what: str, deadline_s: float = 60.0) -> Any:
    end = time.monotonic() + deadline_s
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.02)


def _into(future: Future[int], function: Callable[[], int]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
