"""Broadcasts of weights over NCCL between two CUDA devices: speed beside a bare one, stall, failures, a whole run.

    trainer process, cuda:0                                   engine process, cuda:1
    steps (matrix products) in the main thread                BatchedEngine, generating all the time
    Members, Sender: own threads      ── NCCL ──►             Transfers, join_group, receive
             └──────── events of an embedded log ────────────────┘

Weights are random, of Qwen3's shapes, in bf16. Each version differs in every element. Three ways by turns, in one run:
`bare` (torch's broadcast of one buffer of as many bytes, in a plain default group), `device` (what is sent is a copy
on cuda:0) and `host` (a snapshot in main memory, as the trainer takes it). The digest is timed by itself.

One call of a few minutes; prints a short table last. Needs two CUDA devices, torch, transformers, msgspec, zstandard.

    NCCL_NVLS_ENABLE=0 PYTHONPATH=. python benchmarks/gpu/weights_sync.py [--only speed stall faults demo delta]
        [--sizes 0.6B 4B] [--ways device host]
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed.distributed_c10d
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.gpu.weights_ipc import move
from engine.interfaces import EngineError, Sampling
from engine.rollout.loading import PauseMode
from engine.rollout.receiving import Join, Receive, Transfers, sent_by
from engine.tasks import GUESS, tiny
from engine.weights import broadcasts, bucketing, collective
from engine.weights import tensors as files
from engine.weights.delta_writer import DeltaPolicy
from engine.weights.membership import Members
from engine.weights.sender import Sender
from engine.weights.snapshots import DeviceSnapshot
from engine.weights.store import WeightStore, digest, snapshot
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
MIB = 1 << 20
TIMES = "times of broadcasts"
NOWHERE = "none"  # a version that goes by broadcast alone
ROWS: list[tuple[str, str, str]] = []
SHAPES = {"0.6B": (1024, 3072, 28, 16), "4B": (2560, 9728, 36, 32)}


def qwen3(folder: Path, size: str) -> Path:
    hidden, inner, layers, heads = SHAPES[size]
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device("cuda:0"):
        model: Any = Qwen3ForCausalLM(config)
        model = model.to(torch.bfloat16)
    model.save_pretrained(folder)
    tiny.build_tokenizer(GUESS).save_pretrained(folder)
    return folder


def _smaller(folder: Path) -> Path:
    model = folder / "0.6B"
    return model if model.is_dir() else qwen3(model, "0.6B")


# ---------------------------------------------------------------- engine
class Fault(NamedTuple):
    kind: str  # "kill": this process, in a bucket; "no_join": this process, when it is to join
    version: int = -1
    bucket: int = 3


def engine_process(folder: str, model: str, replica: int, fault: Fault | None, pause_mode: PauseMode) -> None:
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    asyncio.run(_engine(Path(folder), Path(model), replica, fault, pause_mode))


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


async def _engine(
    folder: Path, model: Path, replica: int, fault: Fault | None, pause_mode: PauseMode
) -> None:
    from engine.rollout.batched import BatchedEngine

    name = f"rollout-{replica}"
    log = open_log(f"file://{folder}/log")
    engine = BatchedEngine(model, name=name, dtype="bfloat16", device="cuda:1", pause_mode=pause_mode)

    def write(word: str, event: Event) -> None:
        log.append(TOPICS.name(word), 0, [codec.encode(event, producer=name)])

    transfers = Transfers(log, TOPICS, name)
    receiving = timed_receiving()
    ledger = Follower(log, "ledger")
    write("fleet", EngineJoined(engine=name, replica=replica, host=_host(), n_ranks=1, device="cuda"))
    published = [each for each in ledger.news() if isinstance(each, WeightsPublished)]
    await take(
        engine, write, published[-1], lambda: engine.update(published[-1], _file(folder, published[-1]))
    )
    beats = asyncio.create_task(_beat(write, name, engine))
    asks = [asyncio.create_task(_generate(engine, index)) for index in range(64)]
    joins: dict[str, asyncio.Task[None]] = {}
    sizes: dict[str, int] = {}
    while True:
        news = [each for each in ledger.news() if isinstance(each, WeightsPublished)]
        for action in transfers.catch_up(news, 0):
            if isinstance(action, Join):
                if fault is not None and fault.kind == "no_join":
                    os.kill(os.getpid(), signal.SIGKILL)
                group = action.formed.group
                sizes[group] = action.formed.bucket_bytes
                joins[group] = asyncio.create_task(engine.join_group(action.formed, action.first_rank))
            elif isinstance(action, Receive):
                if fault is not None and fault.version == action.published.version:
                    _kill_at(fault.bucket)
                seen = time.monotonic()
                await _receive(engine, write, folder, action, joins, sizes)
                times = {"version": float(action.published.version), "seen": seen, **receiving}
                write("metrics", Metrics(source=TIMES, values=times))
            else:
                await engine.leave_group(action.group)
        for version in news:
            if not sent_by(version)[1] and version.uris["disk"] != NOWHERE:
                update = functools.partial(engine.update, version, _file(folder, version))
                await take(engine, write, version, update)
        for task in (beats, *asks):
            if task.done():
                task.result()
        await asyncio.sleep(0.002)


async def _receive(
    engine: Any, write: Any, folder: Path, action: Receive, joins: dict[str, Any], sizes: dict[str, int]
) -> None:
    published, group = action.published, action.group

    async def receive() -> float:
        await joins[group]
        return await engine.receive(published, group, sizes[group])

    try:
        await take(engine, write, published, receive, transport="distributed")
    except EngineError as error:
        write("fleet", EngineFailed(engine=engine.name, reason=error.reason, detail=str(error)[:300]))
        await engine.leave_group(group)
        await take(engine, write, published, lambda: engine.update(published, _file(folder, published)))


async def take(engine: Any, write: Any, published: Any, way: Any, *, transport: str = "disk") -> None:
    began = time.monotonic()
    stall_s = await way()
    write(
        "fleet",
        EngineReady(
            engine=engine.name,
            epoch=published.epoch,
            version=published.version,
            digest=engine.held.digest,
            load_s=time.monotonic() - began,
            stall_s=stall_s,
            transport=transport,
        ),
    )


async def _beat(write: Any, name: str, engine: Any) -> None:
    while True:
        write("metrics", Metrics(source=name, values=engine.stats()))
        await asyncio.sleep(0.5)


async def _generate(engine: Any, index: int) -> None:
    number = 0
    while True:
        ids = np.random.default_rng(index).integers(4, 20_000, 15).tolist()
        await engine.generate([1, *ids], Sampling(256), request_id=f"{index}-{number}")
        number += 1


def timed_receiving() -> dict[str, float]:
    """When the last broadcast began and ended on this side, by the clock that all processes of a host share."""
    times: dict[str, float] = {}
    receive_all = broadcasts.receive_all

    def timed(*arguments: Any) -> Any:
        times["began"] = time.monotonic()
        received = receive_all(*arguments)
        times["ended"] = time.monotonic()
        return received

    broadcasts.receive_all = timed
    return times


def _kill_at(bucket: int) -> None:
    group_class: Any = collective.Group
    start, count = group_class.start, iter(range(1 << 30))

    def broken(self: Any, *arguments: Any) -> Any:
        if next(count) == bucket:
            os.kill(os.getpid(), signal.SIGKILL)
        return start(self, *arguments)

    group_class.start = broken


def _file(folder: Path, published: WeightsPublished) -> Path:
    return folder / published.uris["disk"]


def _host() -> str:
    import socket

    return socket.gethostname()


class Follower:
    """Events of one topic, as they come."""

    def __init__(self, log: EventLog, word: str) -> None:
        self._log, self._topic, self._position = log, TOPICS.name(word), 0

    def news(self) -> Iterator[Event]:
        for record in read_all(self._log, self._topic, 0, self._position):
            self._position = record.offset + 1
            decoded = codec.decode(record)
            assert isinstance(decoded, codec.Known)
            yield decoded.event


# ---------------------------------------------------------------- trainer
class Trainer:
    """Publishes versions of random weights; its main thread takes "steps" meanwhile and notes how long they took."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self.log = open_log(f"file://{folder}/log")
        TOPICS.create(self.log)
        self.write("ledger", EpochStarted(producer="bench", started_ms=1))
        self.store = WeightStore(folder / "weights", keep=3)
        loaded: Any = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        loaded = loaded.to("cuda:0")
        self.tensors = bucketing.side_by_side(loaded.state_dict())
        del loaded
        # tied names go once
        self.n_bytes = sum({each.data_ptr(): each.nbytes for each in self.tensors.values()}.values())
        self.version, self.processes = -1, {}
        self.fleet, self.metrics = Follower(self.log, "fleet"), Follower(self.log, "metrics")
        self.events: list[Event] = []
        self.sender: Any = None
        self.product = torch.randn(4096, 4096, device="cuda:0", dtype=torch.bfloat16)
        self.publish("device", on_disk=True)

    def write(self, word: str, event: Event) -> int:
        return self.log.append(TOPICS.name(word), 0, [codec.encode(event, producer="trainer")])

    def new_sender(self, bucket_bytes: int, deadline_s: float = 30.0) -> None:
        if self.sender is not None:
            self.sender.close()
        self.members = Members(self.log, TOPICS)
        self.sender = Sender(
            self.members,
            lambda event: self.write("fleet", event),
            epoch=0,
            bucket_bytes=bucket_bytes,
            deadline=timedelta(seconds=deadline_s),
            backend="nccl",
            device="cuda:0",
        )

    def start(self, replica: int, fault: Fault | None = None, pause_mode: PauseMode = "retract") -> Any:
        arguments = (str(self.folder), str(self.model), replica, fault, pause_mode)
        process = CONTEXT.Process(target=engine_process, args=arguments, daemon=True)
        process.start()
        self.processes[replica] = process
        return process

    def whole(self, *replicas: int, deadline_s: float = 90.0) -> None:
        names = [f"rollout-{each}" for each in replicas]

        def there() -> bool:
            for process in self.processes.values():
                assert process.exitcode in (None, -9), f"an engine ended with {process.exitcode}"
            with self.sender._fleet:
                self.members.catch_up()
                return [each.engine for each in self.members.candidates()] == names

        eventually(there, f"{names} to be there", deadline_s)

    def publish(self, way: str, *, on_disk: bool = False) -> WeightsPublished:
        """The next version, each element of it another; returns when its broadcast has begun."""
        self.version += 1
        for tensor in {tensor.data_ptr(): tensor for tensor in self.tensors.values()}.values():
            tensor.view(torch.int16).bitwise_xor_(1 + self.version % 3)
        sent: dict[str, Any] = self.tensors if way == "device" else snapshot(self.tensors)
        torch.cuda.synchronize(0)
        if on_disk:
            event = self.store.publish(sent, epoch=0, version=self.version, step=self.version)
            self.template = event
        else:
            event = msgspec.structs.replace(
                self.template, version=self.version, digest=digest(sent), uris={"disk": NOWHERE}
            )
        if self.sender is not None:
            event = self.sender.prepare(event)
        self.write("ledger", event)
        self.began = time.monotonic()
        if self.sender is not None:
            self.sender.send(event, sent)
        return event

    def ready(self, replica: int, version: int, deadline_s: float = 60.0) -> EngineReady:
        def found() -> Any:
            assert self.processes[replica].exitcode is None, f"the engine ended, waited for version {version}"
            self.events += self.fleet.news()
            return next(
                (
                    each
                    for each in self.events
                    if isinstance(each, EngineReady)
                    and (each.engine, each.version) == (f"rollout-{replica}", version)
                ),
                None,
            )

        return eventually(found, f"rollout-{replica} at version {version}", deadline_s)

    def times(self, version: int) -> dict[str, float]:
        """Of the engine's side: seconds after this trainer had the record in the ledger."""

        def found() -> Any:
            for each in self.metrics.news():
                if isinstance(each, Metrics) and each.source == TIMES and each.values["version"] == version:
                    return each.values
            return None

        values = eventually(found, f"the engine's times of version {version}", 60.0)
        return {name: value - self.began for name, value in values.items() if name != "version"}

    def train_while_sending(self, deadline_s: float = 60.0) -> tuple[float, float, int]:
        """(seconds until the sender is free, longest step, steps)."""
        longest, steps, end = 0.0, 0, time.monotonic() + deadline_s
        while not self.sender.wait(timedelta(0)):
            assert time.monotonic() < end, "the sender's thread is not free"
            longest, steps = max(longest, self.step()), steps + 1
        return time.monotonic() - self.began, longest, steps

    def step(self) -> float:
        began = time.monotonic()
        for _ in range(8):
            torch.mm(self.product, self.product)
        torch.cuda.current_stream().synchronize()
        return time.monotonic() - began

    def close(self) -> None:
        if self.sender is not None:
            self.sender.close()
        for process in self.processes.values():
            process.kill()
            process.join(10)
        self.log.close()


def eventually(condition: Callable[[], Any], what: str, deadline_s: float) -> Any:
    end = time.monotonic() + deadline_s
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.005)
    return found


# ---------------------------------------------------------------- bare
def bare_process(rank: int, path: str, n_bytes: int, rounds: int, queue: Any) -> None:
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{path}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    buffer = torch.randint(0, 255, (n_bytes,), dtype=torch.uint8, device=f"cuda:{rank}")
    taken = []
    for _ in range(rounds + 2):
        dist.barrier(device_ids=[rank])
        torch.cuda.synchronize()
        began = time.monotonic()
        dist.broadcast(buffer, 0)
        torch.cuda.synchronize()
        taken.append(time.monotonic() - began)
    queue.put((rank, taken[2:]))
    dist.destroy_process_group()


def bare(folder: Path, n_bytes: int, rounds: int = 7) -> float:
    queue = CONTEXT.Queue()
    path = str(folder / f"meet-{time.monotonic_ns()}")
    ranks = [
        CONTEXT.Process(target=bare_process, args=(rank, path, n_bytes, rounds, queue), daemon=True)
        for rank in (0, 1)
    ]
    for rank in ranks:
        rank.start()
    try:
        taken = dict(queue.get(timeout=90) for _ in ranks)
    finally:
        for rank in ranks:
            rank.join(15)
            rank.kill()
    return max(statistics.median(each) for each in taken.values())


# ---------------------------------------------------------------- transport alone
BUCKETS = {"64 MiB": 64 * MIB, "512 MiB": 512 * MIB, "one": 8 << 30}
ROUNDS = 8


def receiver_process(port: int, infos: list[Any], cases: list[tuple[str, str]], queue: Any) -> None:
    group = collective.join("127.0.0.1", port, 1, 2, "bench", "nccl", timedelta(seconds=60), device="cuda:1")
    for _, bucket in cases:
        buckets = bucketing.plan(infos, BUCKETS[bucket])
        memory = bucketing.memory_for(buckets, "cuda:1")
        for _ in range(ROUNDS):
            tensors = broadcasts.receive_all(group, buckets, memory, time.monotonic() + 60)
        queue.put(digest(bucketing.with_tied(infos, tensors)))
        del memory, tensors
        torch.cuda.empty_cache()
    time.sleep(1)
    group.close()


def transport(trainer: Trainer, size: str, ways: list[str], bare_s: float) -> None:
    """send_all and receive_all back to back: what the buckets cost without news, digest and exchange."""
    infos, cases = trainer.template.tensors, [(way, bucket) for bucket in BUCKETS for way in ways]
    listener = collective.Listener("127.0.0.1", 0, 2, timedelta(seconds=60))
    queue = CONTEXT.Queue()
    receiver = CONTEXT.Process(
        target=receiver_process, args=(listener.port, infos, cases, queue), daemon=True
    )
    receiver.start()
    group = collective.join(
        *("127.0.0.1", listener.port, 0, 2, "bench", "nccl", timedelta(seconds=60)),
        listener=listener,
        device="cuda:0",
    )
    host = snapshot(trainer.tensors)
    raws, right = {name: files.raw(tensor) for name, tensor in host.items()}, digest(host)
    torch.cuda.synchronize(0)
    buffers = bucketing.Buffers("cuda:0")
    for way, bucket in cases:
        sent = trainer.tensors if way == "device" else raws
        buckets, taken = bucketing.plan(infos, BUCKETS[bucket]), []
        for _ in range(ROUNDS):
            taken.append(broadcasts.send_all(group, sent, buckets, buffers, time.monotonic() + 60).seconds)
        s, gb = statistics.median(taken[2:]), trainer.n_bytes / 1e9
        came = queue.get(timeout=60)
        row(
            f"{size} transport {way}, {bucket}",
            f"{s * 1e3:.1f} ms, {gb / s:.1f} GB/s = {bare_s / s:.0%} of bare; first {taken[0]:.2f} s, "
            + ("digest equal" if came == right else "ANOTHER digest"),
            "ok" if came == right else "FAILED",
        )
    group.close()
    receiver.join(10)
    receiver.kill()


# ---------------------------------------------------------------- checks
def speed(folder: Path, size: str, ways: list[str]) -> None:
    model, rounds = qwen3(folder / size, size), 4 if size == "0.6B" else 1
    torch.cuda.empty_cache()
    with running(folder / f"{size}-run", model) as trainer:
        gb = trainer.n_bytes / 1e9
        peer = torch.cuda.can_device_access_peer(0, 1)
        bare_s = bare(folder, trainer.n_bytes)
        row(
            f"{size} bare broadcast",
            f"{gb:.2f} GB: {bare_s * 1e3:.1f} ms, {gb / bare_s:.1f} GB/s (peer {peer})",
        )
        began = time.monotonic()
        host = snapshot(trainer.tensors)
        snap_s = time.monotonic() - began
        began = time.monotonic()
        files.digest(host)
        row(
            f"{size} snapshot, digest",
            f"{snap_s:.3f} s to main memory, {time.monotonic() - began:.3f} s sha256",
        )
        del host
        check(f"{size} transport", lambda: transport(trainer, size, ways, bare_s) or "done")
        began = time.monotonic()
        trainer.start(0)
        trainer.new_sender(64 * MIB)
        trainer.whole(0)
        row(f"{size} engine start", f"{time.monotonic() - began:.1f} s, first version from disk")
        for name, bucket in BUCKETS.items() if size == "0.6B" else list(BUCKETS.items())[1:]:
            trainer.new_sender(bucket)
            trainer.whole(0)
            for way in ways:
                check(f"{size} {way}, {name}", lambda way=way: _updates(trainer, way, bare_s, gb, rounds))


def stalls(folder: Path) -> None:
    """How long an engine generates nothing for the sake of a version, by broadcast and by file."""
    model = _smaller(folder)
    modes: tuple[PauseMode, ...] = ("retract", "in_place")
    with running(folder / "stalls", model) as trainer:
        for replica, mode in enumerate(modes):
            trainer.start(replica, pause_mode=mode)
            trainer.new_sender(512 * MIB)
            trainer.whole(replica)
            check(f"{mode}, by broadcast", lambda replica=replica: _stall(trainer, replica))
            check(f"{mode}, by files", lambda replica=replica: _by_files(trainer, replica))
            trainer.processes[replica].kill()
            trainer.sender.close()
            trainer.sender = None
            trainer.publish("device", on_disk=True)  # what the next engine begins with


def _stall(trainer: Trainer, replica: int) -> str:
    readies = []
    for _ in range(5):
        event = trainer.publish("device")
        trainer.train_while_sending()
        assert not trainer.sender.sent.error, trainer.sender.sent.error
        readies.append(trainer.ready(replica, event.version))
        assert readies[-1].transport == "distributed" and readies[-1].digest == event.digest
    stall, load = ([getattr(each, name) for each in readies[1:]] for name in ("stall_s", "load_s"))
    return (
        f"stall {statistics.median(stall) * 1e3:.1f} ms, at most {max(stall) * 1e3:.1f}; ready "
        f"{statistics.median(load):.2f} s after it began to receive, digest checked"
    )


def _updates(trainer: Trainer, way: str, bare_s: float, gb: float, rounds: int) -> str:
    sending, loads, stalls, longest, first = [], [], [], 0.0, 0.0
    alone = statistics.median(trainer.step() for _ in range(50))
    for number in range(1 + rounds):
        event = trainer.publish(way)
        _, slowest, _ = trainer.train_while_sending()
        sent = trainer.sender.sent
        assert sent.published.version == event.version, "it was not sent"
        assert not sent.error, sent.error
        ready = trainer.ready(0, event.version)
        assert ready.transport == "distributed" and ready.digest == event.digest
        if not number:
            first = sent.seconds
            continue
        longest = max(longest, slowest)
        sending.append(sent.seconds)
        loads.append(ready.load_s)
        stalls.append(ready.stall_s)
    idle, seen, together = [], [], []
    for _ in range(1 + rounds):  # and with a trainer that does nothing beside it
        event = trainer.publish(way)
        assert trainer.sender.wait(timedelta(seconds=30))
        idle.append(trainer.sender.sent.seconds)
        trainer.ready(0, event.version)
        times = trainer.times(event.version)
        seen.append(times["seen"])
        together.append(times["ended"] - times["began"])  # both sides are there
    s, quiet, alone_s = statistics.median(sending), statistics.median(idle), statistics.median(together)
    return (
        f"{quiet * 1e3:.1f} ms, {gb / quiet:.1f} GB/s = {bare_s / quiet:.0%} of bare; in these the engine reads of it "
        f"after {statistics.median(seen) * 1e3:.1f} ms, and receives for {alone_s * 1e3:.1f} ms = "
        f"{bare_s / alone_s:.0%}; beside steps {s * 1e3:.0f} ms ({bare_s / s:.0%}); first {first:.2f} s; "
        f"engine: {statistics.median(loads):.3f} s with digest, stall {statistics.median(stalls) * 1e3:.1f}, at most "
        f"{max(stalls) * 1e3:.1f} ms; step {alone * 1e3:.1f}, longest {longest * 1e3:.1f} ms"
    )


def _by_files(trainer: Trainer, replica: int) -> str:
    """Versions that go by their file alone, the first in full: found on the device, written, read, put in service."""
    store, said = WeightStore(trainer.folder / "weights", keep=8, deltas=DeltaPolicy()), []
    for share in (1.0, 0.01, 0.01, 0.03, 0.03):  # the first delta compiles its kernels
        if share < 1:
            move(trainer.tensors, share, trainer.version)
        trainer.version += 1
        began = time.monotonic()
        event = store.publish(
            DeviceSnapshot(trainer.tensors), epoch=0, version=trainer.version, step=trainer.version
        )
        written_s = time.monotonic() - began
        assert event.kind == ("full" if share == 1 else "delta"), event.kind
        trainer.write("ledger", event)
        ready = trainer.ready(replica, event.version)
        assert ready.digest == event.digest and ready.transport == "disk"
        said.append(
            f"{event.kind} {share:.0%}: {event.nbytes / 1e6:.0f} MB, published after {written_s:.2f} s, ready "
            f"{ready.load_s:.2f} s later, stall {ready.stall_s * 1e3:.0f} ms"
        )
    return "; ".join(said)


def faults(folder: Path) -> None:
    model = _smaller(folder)
    with running(folder / "faults", model) as trainer:
        trainer.new_sender(64 * MIB)
        trainer.start(0, Fault("kill", version=2))
        trainer.whole(0)
        trainer.publish("device")
        trainer.train_while_sending()
        check("killed in a bucket", lambda: _killed(trainer, 0))
        check("  a new engine", lambda: _newcomer(trainer, 1))
        # gone before it connects: NCCL itself waits for it without a limit
        trainer.processes[1].kill()
        trainer.start(2, Fault("no_join"))
        trainer.whole(2)
        check("killed before it connects", lambda: _killed(trainer, 2))
        check("  a new engine", lambda: _newcomer(trainer, 3))


def _killed(trainer: Trainer, replica: int) -> str:
    event = trainer.publish("device", on_disk=True)
    free_s, longest, steps = trainer.train_while_sending()
    sent = trainer.sender.sent
    assert sent.published.version == event.version and sent.error, "it did not fail"
    assert sent.lost == [f"rollout-{replica}"], sent
    x = torch.randn(1024, 1024, device="cuda:0")  # is the device still of use?
    assert torch.allclose((x @ torch.linalg.inv(x) @ x), x, atol=1.0)
    torch.cuda.synchronize(0)
    return (
        f"sender free after {free_s:.1f} s, {steps} steps meanwhile, longest {longest * 1e3:.0f} ms; "
        f"{sent.error[:80]}"
    )


def _newcomer(trainer: Trainer, replica: int) -> str:
    trainer.start(replica)
    began = time.monotonic()
    trainer.whole(replica)
    disk = trainer.ready(replica, trainer.version)
    assert disk.transport == "disk", disk
    for _ in range(2):
        event = trainer.publish("device", on_disk=True)  # what the next one finds
        trainer.train_while_sending()
        assert not trainer.sender.sent.error, trainer.sender.sent
        assert trainer.ready(replica, event.version).transport == "distributed"
    return f"{time.monotonic() - began:.1f} s with its start: from disk, then two versions by broadcast"


@contextmanager
def running(folder: Path, model: Path) -> Iterator[Trainer]:
    folder.mkdir()
    trainer = Trainer(folder, model)
    try:
        yield trainer
    finally:
        trainer.close()


# Daemons of a run share `model.device`: a rollout daemon gets another GPU by what it is shown.
SITE = """
import os, sys
if "rollout" in sys.orig_argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
"""


def demo(folder: Path, kind: str = "full", *, two_devices: bool = True) -> str:
    run, site = folder / f"demo-{kind}-{two_devices}", folder / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(SITE, encoding="utf-8")
    path = os.pathsep.join([*([str(site)] if two_devices else []), os.environ.get("PYTHONPATH", "")])
    began = time.perf_counter()
    settings = (
        *("model.device=cuda", "weights.transport=distributed", "weights.transfer_deadline_s=20"),
        f"weights.kind={kind}",
    )
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "engine.cli", "demo", "--plain", "--dir", str(run), "--max-steps", "40"),
            *(word for setting in settings for word in ("--set", setting)),
        ],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    took = time.perf_counter() - began
    log = "\n".join(
        path.read_text("utf-8", "replace")[-1500:] for path in sorted((run / "logs").glob("*.log"))
    )
    assert ended.returncode == 0, ended.stderr[-1500:] + log
    words = [sys.executable, "-m", "engine.cli"]
    audit = subprocess.run(
        [*words, "verify", str(run)], capture_output=True, text=True, timeout=60, check=False
    )
    assert audit.returncode == 0, audit.stdout[-1500:]
    ways: dict[str, int] = {}
    failed: dict[str, int] = {}
    for event in _fleet_of(run):
        if isinstance(event, EngineReady):
            ways[event.transport] = ways.get(event.transport, 0) + 1
        if isinstance(event, EngineFailed):
            failed[event.reason] = failed.get(event.reason, 0) + 1
            print("  ", event.reason, event.detail[:200])
    if not ways.get("distributed"):
        print(log)
    assert not two_devices or ways.get("distributed"), (ways, failed)
    summary = json.loads((run / "summary.json").read_text("utf-8"))
    return (
        f"exit 0, verify clean, {took:.0f} s; reward {summary['first_reward']:.2f} to {summary['last_reward']:.2f}; "
        f"versions by {ways}, failures {failed}"
    )


def demos(folder: Path) -> None:
    for kind in ("delta", "full"):
        check(f"demo, 2 devices, {kind}", lambda kind=kind: demo(folder, kind))
    check("demo, both on one device", lambda: demo(folder, two_devices=False))


def _fleet_of(run: Path) -> Iterator[Event]:
    from engine.config import load_config
    from engine.roles import topics_of

    config = load_config(run, environ={})
    log = open_log(config.log.url)
    for record in read_all(log, topics_of(config).name("fleet"), 0, 0):
        decoded = codec.decode(record)
        if isinstance(decoded, codec.Known):
            yield decoded.event
    log.close()


def delta(folder: Path) -> None:
    """Encode of one step of 0.6B on the processor, against one copy of old and new weights and one read of both."""
    from engine.weights.delta_writer import State, write_delta

    model = _smaller(folder)
    loaded: Any = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    old = {name: files.raw(tensor) for name, tensor in snapshot(dict(loaded.state_dict())).items()}
    old, _ = files.split_tied(old)
    rng = np.random.default_rng(1)
    for share in (0.01, 0.03):
        new = {}
        for name, tensor in old.items():
            bits = tensor.data.view("<u2").copy()
            places = rng.integers(0, len(bits), int(share * len(bits)))
            bits[places] ^= 1
            new[name] = tensor._replace(data=bits.view(np.uint8))
        states = []
        for contents in (old, new):
            parts = files.content_digests(contents)
            states.append(State(contents, parts, files.digest_of_parts(contents, parts)))
        nbytes = sum(tensor.data.nbytes for tensor in old.values())
        encode, read = [], []
        room = np.empty(nbytes, np.uint8)
        for _ in range(3):
            began = time.monotonic()
            at = 0
            for contents in (old, new):
                at = 0
                for tensor in contents.values():
                    room[at : at + tensor.data.nbytes] = tensor.data
                    at += tensor.data.nbytes
            read.append(time.monotonic() - began)
            with open(folder / "delta", "wb") as file:
                began = time.monotonic()
                write_delta(file, states[0], states[1], epoch=1, version=2, base_version=1)
                encode.append(time.monotonic() - began)
        e, r = statistics.median(encode), statistics.median(read)
        size = (folder / "delta").stat().st_size
        row(
            f"delta 0.6B, {share:.0%} changed",
            f"encode {e:.2f} s, copy of old and new by one thread {r:.2f} s: {e / r:.1f} times; "
            f"{nbytes / size:.0f} times smaller",
        )


def row(name: str, text: str, state: str = "ok") -> None:
    ROWS.append((name, state, text))
    print(*ROWS[-1], sep=" | ", flush=True)


def check(name: str, function: Callable[[], str]) -> None:
    try:
        row(name, function())
    except Exception as error:
        traceback.print_exc()
        row(name, f"{type(error).__name__}: {str(error)[:300]}", "FAILED")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("speed", "stall", "faults", "demo", "delta")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--sizes", nargs="+", choices=list(SHAPES), default=["0.6B"])
    parser.add_argument("--ways", nargs="+", choices=("device", "host"), default=["device", "host"])
    args = parser.parse_args()
    print(torch.__version__, torch.cuda.get_device_name(0), torch.cuda.device_count(), flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = {
            "speed": lambda: [speed(folder, size, args.ways) for size in args.sizes],
            "stall": lambda: stalls(folder),
            "faults": lambda: faults(folder),
            "demo": lambda: demos(folder),
            "delta": lambda: delta(folder),
        }
        for part in parts:
            if part in args.only:
                try:
                    run[part]()
                except Exception as error:
                    traceback.print_exc()
                    row(part, f"{type(error).__name__}: {str(error)[:300]}", "FAILED")
    print(f"\n{'check':28s} {'':7s} figure ({time.monotonic() - began:.0f} s in all)")
    for each in ROWS:
        print(f"{each[0]:28s} {each[1]:7s} {each[2]}")
    return int(any(each[1] != "ok" for each in ROWS))


if __name__ == "__main__":
    raise SystemExit(main())
