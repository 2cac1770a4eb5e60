"""A trainer's sender and an engine's daemon in two processes, for benchmarks of weights: the real parts, no training.

    Trainer (this process)                          engine_process (its own)
    store ─► ledger ─► Sender ── group or file ──►  Transfers, WeightsWatch ─► engine.receive / engine.update
         ◄──────────────── fleet: EngineReady(load_s, stall_s) ─────────────┘  (and generates all the while)

`publish` gives a version as the trainer's publisher does; `ready` waits until the engine serves it.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from consumers.ledger import Ledger
from engine.interfaces import EngineError, Sampling
from engine.rollout.loading import on_disk
from engine.rollout.receiving import Transfers
from engine.rollout.watch import WeightsWatch
from engine.weights.membership import Members
from engine.weights.sender import Sender
from engine.weights.store import DeltaPolicy, WeightStore
from streams import codec
from streams.events import (
    EngineFailed,
    EngineJoined,
    EngineReady,
    EpochStarted,
    Event,
    Metrics,
    WeightsPublished,
)
from streams.log import EventLog, read_all
from streams.open import open_log
from streams.topics import Topics

CONTEXT = multiprocessing.get_context("spawn")
TOPICS = Topics("bench", 1)

MakeEngine = Callable[..., Any]  # at the top of a module: it goes to another process by its name


def eventually(condition: Callable[[], Any], what: str, deadline_s: float) -> Any:
    end = time.monotonic() + deadline_s
    while not (found := condition()):
        if time.monotonic() >= end:
            raise TimeoutError(f"not within {deadline_s:.0f} s: {what}")
        time.sleep(0.002)
    return found


# ---------------------------------------------------------------- engine
def engine_process(folder: str, replica: int, make: MakeEngine, options: dict[str, Any], asks: int) -> None:
    """Serve until the parent ends. `asks`: requests that are always under way."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    asyncio.run(_serve(Path(folder), replica, make(f"rollout-{replica}", **options), asks))


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


async def _serve(folder: Path, replica: int, engine: Any, asks: int) -> None:
    log, name = open_log(f"file://{folder}/log"), f"rollout-{replica}"

    def tell(event: Event, topic: str = "fleet") -> None:
        log.append(TOPICS.name(topic), 0, [codec.encode(event, producer=name)])

    ledger = Ledger(log, TOPICS, limit=0)
    transfers = Transfers(log, TOPICS, name)
    watch = WeightsWatch(engine, ledger, name=name, locate=on_disk(folder), tell=tell, updated=lambda: None)
    tell(
        EngineJoined(
            engine=name,
            replica=replica,
            host=socket.gethostname(),
            n_ranks=engine.n_ranks,
            device=engine.device,
        )
    )
    gap = _Gap(engine)
    tasks: list[asyncio.Task[None]] = []
    beat = -1.0
    while watch.fatal is None:
        news = [event for _, event in ledger.catch_up()]
        actions = transfers.catch_up(news, ledger.epoch) if engine.n_ranks else []
        if actions or news:
            watch.act(actions, ledger.published)
        watch.keep_current()
        if engine.held is not None and not tasks:
            tasks = [asyncio.ensure_future(_generate(engine, index)) for index in range(asks)]
        for task in tasks:
            if task.done():
                task.result()
        if time.monotonic() - beat > 0.4:
            beat = time.monotonic()
            tell(Metrics(source=name, values={"longest_gap_s": gap.take(), **engine.stats()}), "metrics")
        await asyncio.sleep(0.002)
    raise RuntimeError(f"the engine serves no longer: {watch.fatal}")


class _Gap(threading.Thread):
    """The longest time without a new token, from outside: on a thread that looks every millisecond."""

    def __init__(self, engine: Any) -> None:
        super().__init__(daemon=True)
        self._engine, self._longest = engine, 0.0
        self._tokens, self._since = -1.0, time.monotonic()
        self.start()

    def take(self) -> float:
        longest, self._longest = self._longest, 0.0
        return longest

    def run(self) -> None:
        while True:
            tokens, now = (
                self._engine.stats().get("rounds", 0.0) or self._engine.stats()["tokens"],
                time.monotonic(),
            )
            if tokens != self._tokens:
                self._tokens, self._since = tokens, now
            elif tokens > 0:
                self._longest = max(self._longest, now - self._since)
            time.sleep(0.001)


async def _generate(engine: Any, index: int) -> None:
    ids = [1, *np.random.default_rng(index).integers(4, 30, 15).tolist()]
    for number in range(1 << 30):
        try:
            await engine.generate(ids, Sampling(128), request_id=f"{index}-{number}")
        except EngineError as error:
            if error.reason in ("engine_closed", "engine_died"):
                raise


class Holder:
    """An engine that holds tensors and generates nothing."""

    n_ranks = 1

    def __init__(self, name: str, device: str = "cpu") -> None:
        from engine.rollout.loading import Loader
        from engine.rollout.receiving import GroupReceiver

        self.name, self.device, self.held = name, device.partition(":")[0], None
        self._files, self._receiver = Loader("torch"), GroupReceiver(device)
        self._tensors: dict[str, Any] = {}

    async def update(self, published: WeightsPublished, path: Path) -> float:
        from engine.rollout.receiving import on_a_thread

        tensors = await on_a_thread(self._files.load, published, path)
        return self._hold(published, tensors, from_disk=True)

    async def join_group(self, formed: Any, first_rank: int) -> None:
        from engine.rollout.receiving import on_a_thread

        await on_a_thread(self._receiver.join, formed, first_rank)

    async def leave_group(self, group: str) -> None:
        self._receiver.leave(group)

    async def receive(self, published: WeightsPublished, group: str, bucket_bytes: int) -> float:
        from engine.rollout.receiving import on_a_thread

        tensors = await on_a_thread(self._receiver.receive, published, group, bucket_bytes)
        return self._hold(published, tensors, from_disk=False)

    def _hold(self, published: WeightsPublished, tensors: dict[str, Any], *, from_disk: bool) -> float:
        from engine.rollout.loading import weights_id

        self._tensors, self.held = tensors, weights_id(published)
        self._receiver.in_service(from_disk=from_disk)
        return 0.0

    def checksum(self) -> str:
        return ""

    def stats(self) -> dict[str, float]:
        return {"tokens": 0.0}


# ---------------------------------------------------------------- trainer
class Trainer:
    """`with Trainer(folder) as trainer: trainer.start(0, make_engine); trainer.publish(tensors); trainer.ready(0)`."""

    def __init__(self, folder: Path, *, keep: int = 3, deltas: DeltaPolicy | None = None) -> None:
        folder.mkdir(parents=True)
        self.folder, self.log = folder, open_log(f"file://{folder}/log")
        TOPICS.create(self.log)
        self.epoch = self.write("ledger", EpochStarted(producer="bench", started_ms=1))
        self.store = WeightStore(folder / "weights", keep=keep, deltas=deltas)
        self.version, self.sender, self.processes = -1, None, {}
        self._fleet = _Follower(self.log, "fleet")
        self._metrics = _Follower(self.log, "metrics")
        self._events: list[Event] = []

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        if self.sender is not None:
            self.sender.close()
        for process in self.processes.values():
            process.kill()
            process.join(10)
        self.log.close()

    def write(self, word: str, event: Event) -> int:
        return self.log.append(TOPICS.name(word), 0, [codec.encode(event, producer="trainer")])

    def new_sender(
        self, backend: str, bucket_bytes: int, *, device: str = "cpu", deadline_s: float = 60.0
    ) -> None:
        if self.sender is not None:
            self.sender.close()
        self.sender = Sender(
            Members(self.log, TOPICS),
            lambda event: self.write("fleet", event),
            epoch=self.epoch,
            bucket_bytes=bucket_bytes,
            deadline=timedelta(seconds=deadline_s),
            backend=backend,
            device=device,
        )

    def no_sender(self) -> None:
        if self.sender is not None:
            self.sender.close()
            self.sender = None

    def start(self, replica: int, make: MakeEngine, *, asks: int = 0, **options: Any) -> Any:
        process = CONTEXT.Process(
            target=engine_process, args=(str(self.folder), replica, make, options, asks), daemon=True
        )
        process.start()
        self.processes[replica] = process
        return process

    def whole(self, *replicas: int, deadline_s: float = 120.0) -> None:
        """Wait until these engines may be counted on."""
        sender = self.sender
        assert sender is not None
        names = [f"rollout-{each}" for each in replicas]

        def there() -> bool:
            self._check_alive()
            with sender._fleet:
                sender._members.catch_up()
                return [each.engine for each in sender._members.candidates()] == names

        eventually(there, f"{', '.join(names)} to be there", deadline_s)

    def publish(
        self, tensors: Mapping[str, Any], *, like: WeightsPublished | None = None
    ) -> WeightsPublished:
        """The next version: by its file, and by the sender's group. `like`: no file, digest and tensors as of this."""
        self.version += 1
        if like is None:
            event = self.store.publish(tensors, epoch=self.epoch, version=self.version, step=self.version)
            self.store.prune()
        else:
            event = msgspec.structs.replace(
                like, version=self.version, step=self.version, epoch=self.epoch, uris={"disk": "none"}
            )
        if self.sender is not None:
            event = self.sender.prepare(event)
        self.write("ledger", event)
        if self.sender is not None:
            self.sender.send(event, tensors)
        return event

    def sent(self, deadline_s: float = 120.0) -> float:
        """Seconds of the transfer that is under way, at its end; an error if it failed."""
        assert self.sender is not None
        if not self.sender.wait(timedelta(seconds=deadline_s)):
            raise TimeoutError("the sender's thread is not free")
        sent = self.sender.sent
        if sent is None or sent.published.version != self.version:
            raise RuntimeError(f"version {self.version} was not sent to a group")
        if sent.error:
            raise RuntimeError(sent.error)
        return sent.seconds

    def ready(self, replica: int, deadline_s: float = 120.0) -> EngineReady:
        """What this engine said of the newest version."""
        name = f"rollout-{replica}"

        def found() -> EngineReady | None:
            self._check_alive()
            self._events += self._fleet.news()
            for each in self._events:
                if isinstance(each, EngineReady) and (each.engine, each.version) == (name, self.version):
                    return each
            return None

        try:
            return eventually(found, f"{name} at version {self.version}", deadline_s)
        except TimeoutError as error:
            failures = [each.detail for each in self._events if isinstance(each, EngineFailed)]
            raise TimeoutError(f"{error}; {failures[-1:]}") from None

    def gauges(self, replica: int) -> list[dict[str, float]]:
        """Those that the engine has told since the last call."""
        name = f"rollout-{replica}"
        return [
            dict(each.values)
            for each in self._metrics.news()
            if isinstance(each, Metrics) and each.source == name
        ]

    def _check_alive(self) -> None:
        for replica, process in self.processes.items():
            if process.exitcode is not None:
                raise RuntimeError(f"the process of rollout-{replica} ended with {process.exitcode}")


class _Follower:
    """Events of one topic, as they come."""

    def __init__(self, log: EventLog, word: str) -> None:
        self._log, self._topic, self._position = log, TOPICS.name(word), 0

    def news(self) -> Iterator[Event]:
        for record in read_all(self._log, self._topic, 0, self._position):
            self._position = record.offset + 1
            decoded = codec.decode(record)
            if isinstance(decoded, codec.Known):
                yield decoded.event
