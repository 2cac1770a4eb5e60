"""Rollout daemons whose partitions move while they generate: nothing is lost, what a lost one ran is let go."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from pathlib import Path

from engine.rollout.generate import single_turn
from engine.rollout.scripted import ScriptedEngine, from_table
from engine.rollout.text import ByteTokenizer
from engine.rollout.worker import RolloutWorker
from streams.events import TrajectoryFinished
from streams.topics import Topics
from tests.engine.rollout_support import OnThread, Run, eventually, make_worker
from tests.support.shares import LateLog, SharedStore, Shares

TASKS, PARTITIONS = 60, 4


def engine(replica: int) -> ScriptedEngine:
    return ScriptedEngine(from_table({}, "ok", ByteTokenizer()), name=f"rollout-{replica}")


def worker_of(run: Run, store: SharedStore, replica: int, generate=single_turn, **fields) -> RolloutWorker:
    """One of two daemons, with a log of its own."""
    worker_run = Run.__new__(Run)
    worker_run.__dict__.update(run.__dict__, log=LateLog(store))
    return make_worker(worker_run, engine(replica), generate, replica=replica, replicas=2, **fields)


def shares_of(store: SharedStore, topics: Topics) -> Shares:
    return eventually(lambda: store.groups.get(topics.group("rollout")), "somebody joins")


def test_every_sample_is_there_however_the_partitions_move(tmp_path: Path) -> None:
    store, choose = SharedStore(), random.Random(3)
    run = Run(tmp_path, PARTITIONS, LateLog(store))
    run.publish(0)
    for number in range(TASKS):
        run.dispatch(f"prompt {number}", partition=number % PARTITIONS)

    async def slow(context, task, index):
        await asyncio.sleep(choose.random() * 0.05)
        return await single_turn(context, task, index)

    def uids() -> Counter[str]:
        return Counter(event.uid for event in run.of("trajectories", TrajectoryFinished))

    workers = [worker_of(run, store, replica, slow, max_concurrency=4) for replica in (0, 1)]
    with OnThread(workers[0]) as first, OnThread(workers[1]) as second:
        shares = shares_of(store, run.topics)
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            shares.move(choose)
            time.sleep(0.01)
        eventually(lambda: len(uids()) == 2 * TASKS, "every sample of every task")
        eventually(
            lambda: not any(worker._running or worker._waiting for worker in workers), "nothing is left over"
        )
    assert (first.error, second.error) == (None, None)
    assert shares.moves > 50
    assert set(uids()) == {f"0-{seq}/{index}/0" for seq in range(TASKS) for index in range(2)}
    before = uids()
    with OnThread(worker_of(run, store, 0)) as again:  # and its own output says that all is done
        eventually(lambda: again.worker.intake.positions(), "it has its partitions")
        time.sleep(0.3)
    assert uids() == before


def test_samples_of_a_partition_that_another_has_now_are_let_go_and_made_anew_when_it_returns(
    tmp_path: Path,
) -> None:
    store = SharedStore()
    run = Run(tmp_path, 2, LateLog(store))
    run.publish(0)
    started: list[str] = []
    go = threading.Event()

    async def hangs(context, task, index):
        started.append(context.request_id)
        while not go.is_set():
            await asyncio.sleep(0.01)
        return await single_turn(context, task, index)

    worker = worker_of(run, store, 0, hangs)
    with OnThread(worker):
        shares = shares_of(store, run.topics)
        eventually(lambda: len(worker.intake.positions()) == 2, "alone it has both")
        run.dispatch("a", n_samples=1, partition=1)
        eventually(lambda: started, "the sample runs")
        other = LateLog(store).join(
            run.topics.group("rollout"), run.topics.name("tasks"), replica=1, replicas=2, elastic=True
        )
        assert other.partitions() == {1}
        eventually(lambda: not worker._running, "it is let go")
        other.close()  # and back
        assert shares.owner[1] is not other
        eventually(lambda: len(started) == 2, "it is made anew")
        assert not run.of("trajectories", TrajectoryFinished)
        go.set()
        eventually(lambda: run.of("trajectories", TrajectoryFinished), "it ends")
    assert [event.uid for event in run.of("trajectories", TrajectoryFinished)] == ["0-0/0/0"]
