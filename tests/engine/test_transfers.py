"""Versions sent to engines in processes of their own, over Gloo and by shared memory, and every way that this fails.

After each failure: the trainer was held up no longer than the deadline, what an engine says it holds is what the
trainer published, bit for bit, and the next version goes by broadcast to those that are left.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from engine.cli import main
from engine.roles import topics_of
from engine.weights import broadcasts, bucketing
from engine.weights.store import digest
from streams.events import (
    EngineFailed,
    EngineReady,
    Metrics,
    Paused,
    Resumed,
    TransferGroupEnded,
    TransferGroupFormed,
)
from streams.open import open_log
from tests.engine.transfer_daemons import (
    Fault,
    TestTrainer,
    _candidates,
    eventually,
    fleet,
    rollout,
    serve_role,
    tiny_run,
    trainer_that_dies,
    weights_of,
)
from tests.support.events import events, put

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.engine.transfer_daemons"])


class Fleet:
    """A trainer in this process, and engines in others."""

    def __init__(self, folder: Path, backend: str) -> None:
        self.folder, self.backend, self.processes = folder, backend, {}
        self.way = "ipc" if backend == "ipc" else "distributed"
        self.trainers: list[TestTrainer] = []

    def trainer(self, **settings: Any) -> TestTrainer:
        self.trainers.append(TestTrainer(self.folder, backend=self.backend, **settings))
        return self.trainers[-1]

    def start(self, replica: int, fault: Fault | None = None) -> None:
        process = CONTEXT.Process(target=rollout, args=(str(self.folder), replica, fault), daemon=True)
        process.start()
        self.processes[replica] = process

    def signal(self, replica: int, number: int) -> None:
        os.kill(self.processes[replica].pid, number)
        if number == signal.SIGKILL:  # it holds its share of the partitions until it is gone
            self.processes[replica].join(30)

    def whole(self, *replicas: int) -> None:
        """Wait until these and no others may be counted on."""
        names = [f"rollout-{replica}" for replica in replicas]
        trainer = self.trainers[-1]
        eventually(lambda: _candidates(trainer) == names, f"{names} to be candidates")

    def ready(self, replica: int, version: int) -> EngineReady:
        name = f"rollout-{replica}"
        return eventually(
            lambda: next(
                (each for each in self.events(EngineReady) if (each.engine, each.version) == (name, version)),
                None,
            ),
            f"{name} at {version}",
        )

    def ways(self, version: int, *replicas: int) -> list[str]:
        return [self.ready(replica, version).transport for replica in replicas]

    def events(self, kind: type) -> list[Any]:
        return [event for event in fleet(self.trainers[-1].log) if isinstance(event, kind)]

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()  # a stopped one too
            process.join(10)
        for trainer in self.trainers:
            trainer.close()


BOTH = pytest.mark.parametrize("engines", ["gloo", "ipc"], indirect=True)


@pytest.fixture
def engines(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    made = Fleet(tmp_path, getattr(request, "param", "gloo"))
    try:
        yield made
        for event in made.events(EngineReady):  # never a mixture: what it held then, digested by itself
            assert event.checksum == event.digest == digest(weights_of(event.version))
    finally:
        made.close()


def timed(call: Callable[[], Any]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


@BOTH
def test_versions_come_by_broadcast_to_all_who_are_there_and_one_who_joins_is_in_the_next_group(
    engines: Fleet,
) -> None:
    trainer = engines.trainer()
    # nobody is there: no group, no wait
    assert engines.way not in trainer.publish(1).uris and trainer.sender.sent is None
    engines.start(0)
    engines.whole(0)
    first = trainer.publish(2)
    again = trainer.publish(3)
    assert engines.ways(1, 0) == ["disk"] and engines.ways(2, 0) == engines.ways(3, 0) == [engines.way]
    assert first.uris[engines.way] == again.uris[engines.way]
    engines.start(1)
    engines.whole(0, 1)
    assert trainer.publish(4).uris[engines.way] != first.uris[engines.way]
    assert engines.ways(4, 0, 1) == [engines.way] * 2
    (ended,) = engines.events(TransferGroupEnded)
    assert (ended.group, ended.reason, ended.detail) == (
        first.uris[engines.way],
        "membership",
        "new: rollout-1",
    )
    # it leaves: the next version costs nothing and needs no group
    engines.processes[1].terminate()
    engines.processes[0].terminate()
    eventually(lambda: not _candidates(trainer), "no engine to be counted on", 20)
    assert engines.way not in trainer.publish(5).uris


def test_o27_an_engine_killed_just_before_a_version_is_named_and_the_next_goes_to_the_others(
    engines: Fleet,
) -> None:
    trainer = engines.trainer(deadline_s=10)
    trainer.publish(3)
    for replica in (0, 1, 2):
        engines.start(replica)
    engines.whole(0, 1, 2)
    trainer.publish(4)
    assert engines.ways(4, 0, 1, 2) == [engines.way] * 3
    engines.signal(2, signal.SIGKILL)
    assert timed(lambda: trainer.publish(5)) <= 15
    sent = trainer.sender.sent
    assert sent is not None and sent.error and sent.lost == ["rollout-2"]
    assert engines.events(TransferGroupEnded)[-1].lost == ["rollout-2"]
    engines.ready(0, 5)
    engines.ready(1, 5)
    engines.whole(0, 1)
    trainer.publish(6)
    sent = trainer.sender.sent
    assert sent is not None and not sent.error and sent.receivers == ["rollout-0", "rollout-1"]
    assert engines.ways(6, 0, 1) == [engines.way] * 2


@BOTH
def test_o28_a_version_of_which_a_bucket_failed_is_not_acknowledged_before_it_came_whole_from_disk(
    engines: Fleet,
) -> None:
    trainer = engines.trainer()
    trainer.publish(4)
    engines.start(0, Fault("raise", version=5))
    engines.start(1)
    engines.whole(0, 1)
    trainer.publish(5)
    assert engines.ready(0, 5).transport == "disk"  # the fixture compares its digest with the trainer's
    engines.ready(1, 5)
    mine = [event for event in fleet(trainer.log) if getattr(event, "engine", "") == "rollout-0"]
    failed = next(place for place, event in enumerate(mine) if isinstance(event, EngineFailed))
    assert "no memory for this bucket" in mine[failed].detail
    assert not any(isinstance(event, EngineReady) and event.version == 5 for event in mine[:failed])
    engines.whole(0, 1)
    trainer.publish(6)
    assert engines.ways(6, 0, 1) == [engines.way] * 2


@BOTH
def test_weights_that_came_damaged_to_one_engine_are_taken_from_disk_by_it_alone_and_the_group_goes_on(
    engines: Fleet,
) -> None:
    trainer = engines.trainer()
    trainer.publish(4)
    engines.start(0, Fault("corrupt", version=5))
    engines.start(1)
    engines.whole(0, 1)
    trainer.publish(5)
    assert engines.ways(5, 0, 1) == ["disk", engines.way]
    (failed,) = engines.events(EngineFailed)
    assert (failed.engine, failed.reason) == ("rollout-0", "weights_mismatch")
    trainer.publish(6)
    assert engines.ways(6, 0, 1) == [engines.way] * 2
    assert len(engines.events(TransferGroupFormed)) == 1


@BOTH
def test_an_engine_killed_in_the_middle_of_a_broadcast_takes_no_other_with_it(engines: Fleet) -> None:
    trainer = engines.trainer(deadline_s=10)
    trainer.publish(4)
    for replica, fault in ((0, None), (1, Fault("kill", version=5))):
        engines.start(replica, fault)
    engines.whole(0, 1)
    assert timed(lambda: trainer.publish(5)) <= 15
    sent = trainer.sender.sent
    assert sent is not None and sent.lost == ["rollout-1"]
    engines.ready(0, 5)
    engines.whole(0)
    trainer.publish(6)
    assert engines.ways(6, 0) == [engines.way]


@BOTH
def test_a_trainer_that_ends_in_the_middle_of_a_broadcast_says_so_and_blames_nobody(engines: Fleet) -> None:
    trainer = engines.trainer(deadline_s=40)
    trainer.publish(4)
    engines.start(0, Fault("stop", version=5))
    engines.whole(0)
    trainer.publish(5, wait_s=0)
    eventually(lambda: trainer.sender._group is not None, "the group to be whole")
    assert timed(trainer.sender.close) <= 15
    [ended] = engines.events(TransferGroupEnded)
    assert (ended.reason, ended.lost) == ("finished", [])
    assert "version 5 was still on its way" in ended.detail
    engines.signal(0, signal.SIGCONT)
    assert engines.ways(5, 0) == ["disk"]


def test_a_trainer_without_room_for_its_buckets_blames_no_engine_and_takes_smaller_ones(
    engines: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = engines.trainer(bucket_bytes=512 << 20)
    trainer.publish(4)
    engines.start(0)
    engines.whole(0)
    room, asked = bucketing.BUCKET_BYTES, []
    send_all = broadcasts.send_all

    def without_room(*arguments: Any) -> Any:
        asked.append(trainer.sender._bucket_bytes)
        if asked[-1] > room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 512 MiB")
        return send_all(*arguments)

    monkeypatch.setattr(broadcasts, "send_all", without_room)
    trainer.publish(5)
    assert trainer.sender.sent is not None and trainer.sender.sent.lost == []
    assert engines.ways(5, 0) == ["disk"]
    engines.whole(0)
    trainer.publish(6)
    assert engines.ways(6, 0) == ["distributed"] and asked == [512 << 20, room]
    [ended] = engines.events(TransferGroupEnded)
    assert (ended.reason, ended.lost) == ("failed", []) and "out of memory" in ended.detail
    assert engines.events(TransferGroupFormed)[-1].bucket_bytes == room


@BOTH
def test_a_frozen_engine_holds_nobody_up_and_catches_up_from_disk_when_it_goes_on(engines: Fleet) -> None:
    trainer = engines.trainer(deadline_s=40)
    trainer.publish(4)
    for replica, fault in ((0, None), (1, Fault("stop", version=5)), (2, None)):
        engines.start(replica, fault)
    engines.whole(0, 1, 2)
    began = time.monotonic()
    trainer.publish(5, wait_s=0)
    # while that is on its way a version goes by its file alone, and the trainer does not wait
    assert engines.way not in trainer.publish(6, wait_s=0).uris
    assert time.monotonic() - began < 3
    engines.ready(0, 6)
    engines.ready(2, 6)
    assert trainer.sender.wait(timedelta(seconds=20))
    assert time.monotonic() - began < 20  # it gave no sign of life any more: long before the deadline
    sent = trainer.sender.sent
    assert sent is not None and sent.lost == ["rollout-1"] and "no sign of life of rollout-1" in sent.error
    engines.whole(0, 2)
    trainer.publish(7)
    assert engines.ways(7, 0, 2) == [engines.way] * 2
    engines.signal(1, signal.SIGCONT)
    assert engines.ready(1, 7).transport == "disk"
    engines.whole(0, 1, 2)
    trainer.publish(8)
    assert engines.ways(8, 0, 1, 2) == [engines.way] * 3


def test_a_frozen_engine_is_cut_off_by_the_deadline_if_that_is_sooner(engines: Fleet) -> None:
    trainer = engines.trainer(deadline_s=2)
    trainer.publish(4)
    for replica, fault in ((0, None), (1, Fault("stop", version=5))):
        engines.start(replica, fault)
    engines.whole(0, 1)
    assert timed(lambda: trainer.publish(5)) <= 10  # deadline, and looking for who was lost
    sent = trainer.sender.sent
    assert sent is not None and sent.lost == ["rollout-1"]
    engines.ready(0, 5)


def test_an_engine_that_never_joins_is_named_and_after_three_times_left_out(engines: Fleet) -> None:
    trainer = engines.trainer(deadline_s=3)
    trainer.publish(1)
    engines.start(0)
    engines.start(1, Fault("no_join"))
    for version in (2, 3, 4):
        engines.whole(0, 1)
        trainer.publish(version)
        sent = trainer.sender.sent
        assert sent is not None and sent.lost == ["rollout-1"]
        engines.ready(0, version)
        engines.ready(1, version)
    engines.whole(0)
    trainer.publish(5)
    assert engines.ways(5, 0, 1) == [engines.way, "disk"]


@BOTH
def test_a_trainer_killed_in_the_middle_of_a_broadcast_leaves_engines_whole_for_the_next(
    engines: Fleet,
) -> None:
    engines.trainer().publish(1)
    engines.start(0)
    engines.whole(0)
    dying = CONTEXT.Process(
        target=trainer_that_dies, args=(str(engines.folder), 2, engines.backend), daemon=True
    )
    dying.start()
    dying.join(60)
    assert dying.exitcode == -signal.SIGKILL
    assert engines.ways(2, 0) == [engines.way]
    assert engines.ways(3, 0) == ["disk"]  # its file was there before the broadcast began
    trainer = engines.trainer()
    engines.whole(0)
    trainer.publish(4)
    assert engines.ways(4, 0) == [engines.way]


# ---------------------------------------------------------------- a whole run
STEPS = 6


def test_a_run_with_broadcasts_is_whole_and_its_engines_say_how_each_version_came(tmp_path: Path) -> None:
    config = tiny_run(tmp_path / "run")
    processes = [
        CONTEXT.Process(target=serve_role, args=(config.run.dir, role, replica, replicas), daemon=True)
        for role, replica, replicas in (
            *(("feeder", 0, 1), ("reward", 0, 1), ("collector", 0, 1), ("trainer", 0, 1)),
            *(("rollout", 0, 2), ("rollout", 1, 2)),
        )
    ]
    log, topics = open_log(config.log.url), topics_of(config)
    topics.create(log)
    # no step before both engines are there, so that every version after the first is broadcast
    put(log, topics, "ledger", Paused(by="test"))
    try:
        for process in processes:
            process.start()
        eventually(
            lambda: both_are_there(log, topics), "both engines to hold version 0 and to show life", 240
        )
        put(log, topics, "ledger", Resumed(by="test"))
        for process in processes:
            process.join(240)
            assert process.exitcode == 0, process
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
    ready = {
        (event.engine, event.version): event.transport
        for event in events(log, topics, "fleet")
        if isinstance(event, EngineReady)
    }
    for engine in ("rollout-0", "rollout-1"):
        # (the last version comes when the run ends, and so do the engines)
        assert [ready[engine, version] for version in range(STEPS)] == ["disk"] + ["distributed"] * (
            STEPS - 1
        )
    assert not [event for event in events(log, topics, "fleet") if isinstance(event, EngineFailed)]
    log.close()
    assert main(["verify", config.run.dir]) == 0


def both_are_there(log: Any, topics: Any) -> bool:
    ready = {event.engine for event in events(log, topics, "fleet") if isinstance(event, EngineReady)}
    signs = [event.source for event in events(log, topics, "metrics") if isinstance(event, Metrics)]
    return len(ready) == 2 and all(signs.count(engine) >= 3 for engine in ready)
