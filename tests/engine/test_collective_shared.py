"""Groups of `ipc`: bytes that arrive as they were, waits that end, and memory that nobody keeps after its processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")

from engine.weights import broadcasts, bucketing, collective, shared  # noqa: E402
from engine.weights import tensors as files  # noqa: E402
from engine.weights.bucketing import plan  # noqa: E402
from engine.weights.collective import Listener, TransferError, join  # noqa: E402
from engine.weights.tensors import raw  # noqa: E402
from streams.events import TensorInfo  # noqa: E402

TIMEOUT = timedelta(seconds=20)
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.engine.transfer_daemons"])


def version(number: int, width: int = 7) -> dict[str, Any]:
    tensors = {f"w{place}": torch.full((place, width), number + place / 8).bfloat16() for place in range(5)}
    tied = torch.full((100,), float(number), dtype=torch.float64)
    return {**tensors, "large": tied, "tied": tied, "none": torch.empty(0)}


def infos_of(tensors: dict[str, Any]) -> list[TensorInfo]:
    raws = {name: raw(tensor) for name, tensor in tensors.items()}
    _, tied = files.split_tied(raws)
    return [
        TensorInfo(name, list(each.shape), each.dtype, each.data.nbytes, tied.get(name, ""))
        for name, each in raws.items()
    ]


def send(group: Any, tensors: dict[str, Any], bucket_bytes: int = 64, give_up: Any = lambda: "") -> int:
    raws, buckets = {name: raw(each) for name, each in tensors.items()}, plan(infos_of(tensors), bucket_bytes)
    end = time.monotonic() + 20
    return broadcasts.send_all(group, raws, buckets, bucketing.Buffers("cpu"), end, give_up).nbytes


def receive(
    group: Any, infos: list[TensorInfo], bucket_bytes: int = 64, seconds: float = 20
) -> dict[str, Any]:
    buckets = plan(infos, bucket_bytes)
    memory = bucketing.memory_for(buckets, "cpu")
    received = broadcasts.receive_all(group, buckets, memory, time.monotonic() + seconds)
    return bucketing.with_tied(infos, received)


class Pair:
    """Rank 0 here, the others on threads."""

    def __init__(self, world_size: int, name: str = "pair") -> None:
        self.listener = Listener("127.0.0.1", 0, world_size, TIMEOUT)
        self.readers: dict[int, Any] = {}
        threads = [
            threading.Thread(target=self._join, args=(name, rank, world_size))
            for rank in range(1, world_size)
        ]
        for thread in threads:
            thread.start()
        address = ("127.0.0.1", self.listener.port)
        self.owner = join(*address, 0, world_size, name, "ipc", TIMEOUT, listener=self.listener)
        for thread in threads:
            thread.join(20)

    def _join(self, name: str, rank: int, world_size: int) -> None:
        self.readers[rank] = join("127.0.0.1", self.listener.port, rank, world_size, name, "ipc", TIMEOUT)

    def close(self) -> None:
        for group in (self.owner, *self.readers.values()):
            group.close()
        self.listener.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(2)
    yield made
    made.close()


def on_thread(function: Any, *arguments: Any) -> Any:
    """Its result or its error, later."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(function(*arguments))
        except TransferError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def result() -> Any:
        thread.join(30)
        assert not thread.is_alive()
        return found[0]

    return result


def test_versions_arrive_bit_for_bit_at_every_rank_in_rooms_that_grow_and_tied_bytes_go_once() -> None:
    group = Pair(3)
    for number, width in ((1, 7), (2, 7), (3, 900)):
        tensors = version(number, width)
        waiting = [on_thread(receive, reader, infos_of(tensors)) for reader in group.readers.values()]
        own = {name: each for name, each in tensors.items() if name != "tied"}
        assert send(group.owner, tensors) == sum(each.nbytes for each in own.values())
        for result in waiting:
            came = result()
            assert list(came) == list(tensors) and files.digest(came) == files.digest(tensors)
            assert came["tied"].data_ptr() == came["large"].data_ptr()
    group.close()


def test_a_reader_waits_no_longer_than_its_deadline_and_an_owner_not_for_one_who_copies_nothing(
    pair: Pair,
) -> None:
    infos = infos_of(version(1))
    began = time.monotonic()
    with pytest.raises(TransferError, match="the trainer did not answer within the deadline"):
        receive(pair.readers[1], infos, seconds=0.5)
    assert time.monotonic() - began < 10
    with pytest.raises(TransferError, match="group pair: enough"):
        send(pair.owner, version(1), give_up=lambda: "enough")


def test_a_group_that_is_closed_ends_the_waits_of_both_sides_and_is_of_no_use_any_more(pair: Pair) -> None:
    infos = infos_of(version(1))
    waiting = on_thread(receive, pair.readers[1], infos)
    pair.owner.close()
    assert "the trainer is gone" in str(waiting())
    with pytest.raises(TransferError, match="group pair is closed"):
        send(pair.owner, version(1))
    pair.readers[1].close()
    pair.readers[1].close()
    with pytest.raises(TransferError, match="group pair is closed"):
        receive(pair.readers[1], infos)


def test_a_reader_that_leaves_in_the_middle_ends_its_own_wait_and_the_owners(pair: Pair) -> None:
    waiting = on_thread(receive, pair.readers[1], infos_of(version(1)))
    time.sleep(0.1)
    pair.readers[1].close()
    assert "it was left meanwhile" in str(waiting()) or "closed" in str(waiting())
    with pytest.raises(TransferError, match="rank 1"):
        send(pair.owner, version(1))


def test_ranks_that_do_not_come_are_named_and_callers_that_do_not_belong_are_no_ranks() -> None:
    listener = Listener("127.0.0.1", 0, 3, TIMEOUT)
    owner = on_thread(
        lambda: join("127.0.0.1", 0, 0, 3, "few", "ipc", timedelta(seconds=8), listener=listener)
    )
    end = time.monotonic() + 20
    while not listener.store.check(["millstream/ipc/few"]):  # a get would keep the store from its other user
        assert time.monotonic() < end
        time.sleep(0.01)
    address = listener.store.get("millstream/ipc/few").decode()
    for hello in (shared.Hello("other", 1), shared.Hello("few", 7), shared.Copied(0)):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
            caller.connect(address)
            caller.send(msgspec.msgpack.encode(hello))
            caller.settimeout(20)
            assert caller.recv(100) == b""  # turned away
    with pytest.raises(TransferError, match="rank 2"):  # it waits for rank 1
        join("127.0.0.1", listener.port, 2, 3, "few", "ipc", timedelta(seconds=1))
    assert "ranks 1 of 3 did not come" in str(owner())
    listener.close()


def test_a_word_that_is_none_of_the_protocol_is_an_error_and_never_more(pair: Pair) -> None:
    waiting = on_thread(receive, pair.readers[1], infos_of(version(1)))
    pair.owner._lines[0].socket.send(b"\x80\x04cos\nsystem\n")  # what pickle would obey
    assert "no word of this protocol" in str(waiting())


def test_an_engine_of_another_host_is_told_that_ipc_is_for_one_host() -> None:
    listener = Listener("127.0.0.1", 0, 2, TIMEOUT)
    listener.store.set("millstream/ipc/far", "\0millstream/far/of-nobody-here")
    with pytest.raises(TransferError, match="ipc wants trainer and engines on one host"):
        join("127.0.0.1", listener.port, 1, 2, "far", "ipc", TIMEOUT)
    listener.close()


def test_a_device_that_ipc_does_not_know_is_refused_by_name() -> None:
    with pytest.raises(TransferError, match="this trainer's device is musa:0"):
        shared._make_rooms("g", 100, "musa:0")


def test_two_ranks_on_one_gpu_are_refused_before_nccl_waits_for_ever() -> None:
    listener = Listener("127.0.0.1", 0, 3, TIMEOUT)
    collective.claim_device(listener.store, "g", 0, "cuda:0", "GPU-a")
    collective.claim_device(listener.store, "g", 1, "cuda:1", "GPU-b")
    collective.claim_device(listener.store, "other", 1, "cuda:0", "GPU-a")
    with pytest.raises(
        TransferError, match=r'rank 2 is on the same GPU \(GPU-a\).*weights\.transport = "ipc"'
    ):
        collective.claim_device(listener.store, "g", 2, "cuda:0", "GPU-a")
    listener.close()


# ---------------------------------------------------------------- kill -9
def users_of(name: str) -> set[int]:
    """Processes that have memory of this name, open or mapped."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            mapped = name in (process / "maps").read_text("utf-8", "replace")
            opened = any(name in os.readlink(each) for each in (process / "fd").iterdir())
        except OSError:  # gone, or not ours
            continue
        if mapped or opened:
            found.add(int(process.name))
    return found


def owner_process(name: str, place: Any) -> None:
    listener = Listener("127.0.0.1", 0, 2, TIMEOUT)
    place.send(listener.port)
    group = join("127.0.0.1", 0, 0, 2, name, "ipc", TIMEOUT, listener=listener)
    send(group, version(1))
    send(group, version(2), give_up=lambda: "")  # its reader copies nothing of this one


def reader_process(name: str, port: int, place: Any) -> None:
    group = join("127.0.0.1", port, 1, 2, name, "ipc", TIMEOUT)
    place.send(files.digest(receive(group, infos_of(version(1)))))
    time.sleep(60)


@pytest.mark.parametrize("first", ["owner", "reader"])
def test_after_kill_9_of_either_side_and_then_the_other_nothing_of_the_memory_is_left(first: str) -> None:
    name = f"kill-{first}-{os.getpid()}"
    (ours, owners), (mine, readers) = CONTEXT.Pipe(), CONTEXT.Pipe()
    owner = CONTEXT.Process(target=owner_process, args=(name, owners), daemon=True)
    owner.start()
    assert ours.poll(180)
    reader = CONTEXT.Process(target=reader_process, args=(name, ours.recv(), readers), daemon=True)
    reader.start()
    try:
        assert mine.poll(180) and mine.recv() == files.digest(version(1))
        assert users_of(f"millstream-{name}") == {owner.pid, reader.pid}
        assert not [each for each in os.listdir("/dev/shm") if name in each]
        order = [owner, reader] if first == "owner" else [reader, owner]
        os.kill(order[0].pid or 0, signal.SIGKILL)
        order[0].join(20)
        if order[1] is owner:  # it ends by itself: its reader is gone
            owner.join(20)
        else:
            os.kill(reader.pid or 0, signal.SIGKILL)
        order[1].join(20)
        assert not owner.is_alive() and not reader.is_alive()
        assert users_of(f"millstream-{name}") == set()
    finally:
        for process in (owner, reader):
            process.kill()
