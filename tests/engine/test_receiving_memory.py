"""Which memory a version is received in: never one that a broadcast which was given up may still write into."""

from __future__ import annotations

import multiprocessing
import threading
import time
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from engine.interfaces import EngineError
from engine.rollout.receiving import GroupReceiver
from engine.weights import broadcasts, bucketing, collective
from engine.weights.store import digest
from engine.weights.tensors import raw
from streams.events import TensorInfo, TransferGroupFormed, WeightsPublished

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.engine.transfer_daemons"])
LONGEST = timedelta(seconds=30)
SIZE = 1 << 18
BUCKET = 4 * SIZE


def weights(version: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((SIZE,), float(version)) for name in ("a", "b", "c")}


def published(version: int) -> WeightsPublished:
    tensors = weights(version)
    infos = [TensorInfo(name, [SIZE], "F32", 4 * SIZE) for name in tensors]
    return WeightsPublished(
        epoch=0, version=version, step=version, digest=digest(tensors), uris={}, tensors=infos, nbytes=0
    )


def lead(orders: Any) -> None:
    """The trainer, in a process of its own: a group at a time; on the order "send N" that version goes through it."""
    group: Any = None
    while True:
        order, _, what = orders.recv().partition(" ")
        if order == "meet":
            listener = collective.Listener("127.0.0.1", 0, 2, LONGEST)
            orders.send(listener.port)
            group = collective.join(
                "127.0.0.1", listener.port, 0, 2, what, "gloo", LONGEST, listener=listener
            )
        elif order == "send":
            event, tensors = published(int(what)), weights(int(what))
            buckets = bucketing.plan(event.tensors, BUCKET)
            raws = {name: raw(each) for name, each in tensors.items()}
            broadcasts.send_all(group, raws, buckets, bucketing.Buffers("cpu"), time.monotonic() + 20)


def join(receiver: GroupReceiver, orders: Any, name: str) -> None:
    orders.send(f"meet {name}")
    formed = TransferGroupFormed(
        epoch=0,
        group=name,
        address="127.0.0.1",
        port=orders.recv(),
        world_size=2,
        backend="gloo",
        members=[("rollout-0", 1, 1)],
        bucket_bytes=BUCKET,
        deadline_s=LONGEST.total_seconds(),
    )
    receiver.join(formed, 1)


def test_memory_of_a_broadcast_that_was_given_up_is_not_that_of_the_next_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, start = threading.Semaphore(0), collective.Group.start

    def told(*given: Any) -> Any:
        wait = start(*given)
        begun.release()
        return wait

    monkeypatch.setattr(collective.Group, "start", told)
    orders, theirs = CONTEXT.Pipe()
    trainer = CONTEXT.Process(target=lead, args=(theirs,), daemon=True)
    trainer.start()
    receiver, failed = GroupReceiver("cpu"), []
    try:
        join(receiver, orders, "first")

        def receive() -> None:
            try:
                receiver.receive(published(1), "first", BUCKET)
            except EngineError as error:
                failed.append(str(error))

        waiting = threading.Thread(target=receive)
        waiting.start()
        for _ in range(2):  # as many as are under way at a time; nothing comes
            assert begun.acquire(timeout=LONGEST.total_seconds())
        given_up = list(receiver._spare)  # held, or its place might be given out again
        receiver.leave("first")
        waiting.join(LONGEST.total_seconds())
        assert given_up and "left meanwhile" in failed[0]

        join(receiver, orders, "second")
        orders.send("send 2")
        received = receiver.receive(published(2), "second", BUCKET)
        assert digest(received) == published(2).digest
        places = {each.data_ptr() for each in received.values()}
        assert not places & {each.data_ptr() for each in given_up}
    finally:
        receiver.close()
        trainer.kill()
