"""Processes for tests of broadcasts: rollout daemons whose engine holds tensors alone, and a trainer that publishes.

The daemon is the real one (RolloutWorker, intake, watch) over the embedded log; its engine receives through real
Gloo groups, and has faults on demand: (fault, version, bucket).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.distributed_c10d

from engine.config import CONFIG_FILE, Config, dump_toml, load_config
from engine.demo import demo_config, write_rows
from engine.interfaces import EngineError, Sampling
from engine.roles import serve
from engine.rollout.loading import Loader, on_disk, weights_id
from engine.rollout.receiving import GroupReceiver, on_a_thread
from engine.rollout.scripted import ScriptedEngine
from engine.rollout.worker import RolloutWorker
from engine.tasks import get_task, tiny
from engine.weights import collective, shared
from engine.weights.membership import Members
from engine.weights.sender import Sender
from engine.weights.store import WeightStore, digest
from streams import codec
from streams.events import EpochStarted, Event, TransferGroupFormed, WeightsPublished
from streams.log import EventLog, read_all
from streams.open import open_log
from streams.topics import Topics

PARTITIONS = 4
TOPICS = Topics("test", PARTITIONS)
BUCKET_BYTES = 8 << 20


class Fault(NamedTuple):
    # "kill", "stop": this process, in a bucket; "raise"; "corrupt": one bit of what came; "no_join"
    kind: str
    version: int = -1
    bucket: int = 1


def weights_of(version: int, n_tensors: int = 3) -> dict[str, Any]:
    """About 8 MiB a tensor, more than the sockets hold: a frozen receiver is felt."""
    made: dict[str, Any] = {"bias": torch.full((3,), float(version), dtype=torch.bfloat16)}
    for number in range(n_tensors):
        made[f"w{number}"] = torch.full((1024, 2040), version + number / 8, dtype=torch.float32)
    return made


class Holder(ScriptedEngine):
    """Holds tensors and serves nobody; `n_ranks` 1."""

    def __init__(self, name: str, fault: Fault | None) -> None:
        super().__init__(lambda *_: ([], []), name=name)  # pyright: ignore[reportArgumentType]
        self.n_ranks = 1
        self.tensors: dict[str, Any] = {}
        self.fault_at = fault
        self.files = Loader("torch")
        self.receiver = GroupReceiver("cpu")

    async def update(self, published: WeightsPublished, path: Path) -> float:
        self.tensors = await on_a_thread(self.files.load, published, path)
        self._held = weights_id(published)
        self.receiver.in_service(from_disk=True)
        return 0.0

    async def join_group(self, formed: TransferGroupFormed, first_rank: int) -> None:
        if self.fault_at is not None and self.fault_at.kind == "no_join":
            raise EngineError("transfer_failed", "no way to the trainer")
        await on_a_thread(self.receiver.join, formed, first_rank)

    async def leave_group(self, group: str) -> None:
        self.receiver.leave(group)

    async def receive(self, published: WeightsPublished, group: str, bucket_bytes: int) -> float:
        if self.fault_at is not None and self.fault_at.version == published.version:
            fault, self.fault_at = self.fault_at, None
            _at_bucket(fault)
        self.tensors = await on_a_thread(self.receiver.receive, published, group, bucket_bytes)
        self._held = weights_id(published)
        self.receiver.in_service(from_disk=False)
        return 0.0

    def checksum(self) -> str:
        return digest(self.tensors)  # of what it holds, at the moment at which it says that it is ready


def _at_bucket(fault: Fault) -> None:
    """From the next bucket on, count them and do it at that one, in any kind of group."""
    places: list[Any] = [collective.Group, shared.Reader, shared.Owner]
    starts = [getattr(place, word) for place, word in zip(places, _STARTS, strict=True)]
    count = iter(range(1 << 30))

    def broken_by(start: Callable[..., Any]) -> Callable[..., Any]:
        def broken(self: Any, tensor: Any, *limits: Any) -> Any:
            if next(count) != fault.bucket:
                return start(self, tensor, *limits)
            for place, word, whole in zip(places, _STARTS, starts, strict=True):
                setattr(place, word, whole)
            if fault.kind in ("kill", "stop"):
                os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
            if fault.kind == "raise":
                raise collective.TransferError("no memory for this bucket")
            waits = start(self, tensor, *limits)

            def corrupt() -> None:
                waits()
                tensor[7] ^= 1

            return corrupt if fault.kind == "corrupt" else waits

        return broken

    for place, word, start in zip(places, _STARTS, starts, strict=True):
        setattr(place, word, broken_by(start))


_STARTS = ("start", "start", "_post")  # what begins a bucket in a Group, in a Reader and in an Owner


def rollout(folder: str, replica: int, fault: Fault | None) -> None:
    """One rollout daemon, until it is killed or the run is finished."""
    _set_up(folder, f"rollout-{replica}")
    log = open_log(f"file://{folder}/log")
    worker = RolloutWorker(
        log,
        TOPICS,
        Holder(f"rollout-{replica}", fault),
        lambda *_: None,  # pyright: ignore[reportArgumentType]
        locate=on_disk(Path(folder)),
        sampling=Sampling(max_tokens=1),
        replica=replica,
        replicas=PARTITIONS,
    )
    parent = os.getppid()
    sys.exit(worker.run(lambda: os.getppid() != parent))


def _set_up(folder: str, name: str) -> None:
    torch.set_num_threads(1)
    logging.basicConfig(filename=f"{folder}/{name}.log", level=logging.INFO, format="%(asctime)s %(message)s")


class TestTrainer:
    """Publishes by file and by broadcast, as the trainer's publisher does."""

    __test__ = False

    def __init__(
        self, folder: Path, *, deadline_s: float = 20.0, bucket_bytes: int = BUCKET_BYTES, **sender: Any
    ) -> None:
        self.folder, self.log = folder, open_log(f"file://{folder}/log")
        TOPICS.create(self.log)
        self.epoch = self.write("ledger", EpochStarted(producer="test", started_ms=1))
        self.store = WeightStore(folder / "weights", keep=100)
        self.members = Members(self.log, TOPICS)
        self.sender = Sender(
            self.members,
            lambda event: self.write("fleet", event),
            epoch=self.epoch,
            deadline=timedelta(seconds=deadline_s),
            bucket_bytes=bucket_bytes,
            **sender,
        )

    def write(self, word: str, event: Event) -> int:
        return self.log.append(TOPICS.name(word), 0, [codec.encode(event, producer="trainer")])

    def publish(self, version: int, *, wait_s: float = 60.0) -> WeightsPublished:
        tensors = weights_of(version)
        event = self.store.publish(tensors, epoch=self.epoch, version=version, step=version)
        event = self.sender.prepare(event)
        self.write("ledger", event)
        self.sender.send(event, tensors)
        assert self.sender.wait(timedelta(seconds=wait_s)) or not wait_s, "the sender is not done"
        return event

    def close(self) -> None:
        self.sender.close()
        self.log.close()


def trainer_that_dies(folder: str, version: int, backend: str) -> None:
    """A trainer that publishes `version` to a group and is killed in its second bucket."""
    _set_up(folder, "trainer")
    trainer = TestTrainer(Path(folder), backend=backend)
    eventually(lambda: _candidates(trainer), "an engine to be there")
    trainer.publish(version)
    assert trainer.sender.sent is not None and not trainer.sender.sent.error
    _at_bucket(Fault("kill", bucket=1))
    trainer.publish(version + 1)


def _candidates(trainer: TestTrainer) -> list[str]:
    with trainer.sender._fleet:
        return [each.engine for each in trainer.members.candidates()]


def eventually(condition: Callable[[], Any], what: str, deadline_s: float = 60.0) -> Any:
    end = time.monotonic() + deadline_s
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.02)


def fleet(log: EventLog) -> list[Any]:
    found = []
    for record in read_all(log, TOPICS.name("fleet"), 0, 0):
        decoded = codec.decode(record)
        assert isinstance(decoded, codec.Known)
        found.append(decoded.event)
    return found


# ---------------------------------------------------------------- a whole run
def tiny_run(
    folder: Path, *, steps: int = 6, max_weight_staleness: int = 0, transport: str = "distributed"
) -> Config:
    """A run directory of a few steps of a tiny model that was never trained, with two engines."""
    task = get_task("guess")
    overrides = [
        f'weights.transport="{transport}"',
        "weights.bucket_bytes=65536",
        "weights.transfer_deadline_s=60",
        "rollout.replicas=2",
        "log.partitions=2",
        "trainer.rollout_batch_size=4",
        "rollout.n_samples_per_prompt=2",
        "trainer.num_steps_per_rollout=1",
        "trainer.global_batch_size=8",
    ]
    config = demo_config(
        task, folder, max_steps=steps, max_weight_staleness=max_weight_staleness, overrides=overrides
    )
    folder.mkdir()
    write_rows(folder / "prompts.jsonl", task.rows(seed=1))
    write_rows(folder / "held_out.jsonl", task.held_out(4, 1))
    tiny.save(Path(config.model.path), tiny.build_model(task, 1), tiny.build_tokenizer(task))
    (folder / CONFIG_FILE).write_text(dump_toml(config), encoding="utf-8")
    return config


def serve_role(folder: str, role: str, replica: int, replicas: int) -> None:
    """One daemon of the run in this folder, until the run is finished."""
    _set_up(folder, f"{role}-{replica}")
    parent, config = os.getppid(), load_config(Path(folder), environ={})
    sys.exit(serve(role, config, replica=replica, replicas=replicas, stop=lambda: os.getppid() != parent))
