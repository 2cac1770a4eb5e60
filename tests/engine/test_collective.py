"""Groups and buckets: one plan on every side, bytes that arrive as they were, and no wait beyond its deadline."""

from __future__ import annotations

import multiprocessing
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from engine.weights import broadcasts, bucketing, collective  # noqa: E402
from engine.weights import tensors as files  # noqa: E402
from engine.weights.bucketing import plan  # noqa: E402
from engine.weights.collective import Listener, TransferError, join  # noqa: E402
from engine.weights.tensors import WeightsError, raw  # noqa: E402
from streams.events import TensorInfo  # noqa: E402

TIMEOUT = timedelta(seconds=20)
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.engine.transfer_daemons"])


def info(name: str, dtype: str, *shape: int) -> TensorInfo:
    made = TensorInfo(name, list(shape), dtype, 0)
    return TensorInfo(name, list(shape), dtype, files.size_of(made))


def infos_of(tensors: dict[str, Any]) -> list[TensorInfo]:
    raws = {name: raw(tensor) for name, tensor in tensors.items()}
    return [TensorInfo(name, list(each.shape), each.dtype, each.data.nbytes) for name, each in raws.items()]


TENSORS = st.lists(
    st.tuples(
        st.sampled_from(["F64", "F32", "BF16", "F8_E4M3", "U8", "BOOL", "I64"]),
        st.lists(st.integers(0, 5), max_size=3),
    ),
    min_size=1,
    max_size=12,
)


@given(TENSORS, st.integers(1, 200))
@settings(deadline=None, max_examples=200)
def test_every_tensor_is_in_one_bucket_aligned_to_its_items_and_no_bucket_is_too_large_but_for_one_tensor(
    drawn: list[tuple[str, list[int]]], bucket_bytes: int
) -> None:
    published = [info(str(place), dtype, *shape) for place, (dtype, shape) in enumerate(drawn)]
    buckets = plan(published, bucket_bytes)
    assert sorted((each.name for bucket in buckets for each in bucket), key=int) == [
        each.name for each in published
    ]
    for bucket in buckets:
        at = 0
        for each in bucket:
            assert at % files.item_bytes(each.dtype) == 0
            at += each.nbytes
        largest = max(each.nbytes for each in bucket)
        assert at <= max(bucket_bytes, largest)
        assert at <= bucket_bytes or sum(each.nbytes > 0 for each in bucket) == 1


def test_a_bucket_that_was_filled_gives_back_the_same_bits() -> None:
    tensors = {
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(3, 5).bfloat16(),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "scalar": torch.tensor(7.5, dtype=torch.float64),
        "none": torch.empty(0, 4),
    }
    (bucket,) = plan(infos_of(tensors), 1 << 16)
    buffer = torch.zeros(1000, dtype=torch.uint8)
    part = bucketing.fill(buffer, bucket, {name: raw(tensor) for name, tensor in tensors.items()})
    back = bucketing.views(part.clone(), bucket)
    assert files.digest(back) == files.digest(tensors)


def test_what_a_snapshot_holds_is_sent_without_a_copy() -> None:
    tensors = files.snapshot({f"w{place}": torch.randn(3, 5) for place in range(4)})
    raws = {name: raw(tensor) for name, tensor in tensors.items()}
    (bucket,) = plan(infos_of(tensors), 1 << 16)
    part = bucketing.as_it_lies(bucket, raws, "cpu")
    assert part is not None and part.data_ptr() == tensors["w0"].data_ptr()
    assert files.digest(bucketing.views(part, bucket)) == files.digest(tensors)
    apart = {name: raw(tensor.clone()) for name, tensor in tensors.items()}
    assert bucketing.as_it_lies(bucket, apart, "cpu") is None


def test_a_list_whose_sizes_are_not_those_of_its_shapes_is_refused() -> None:
    with pytest.raises(WeightsError, match="w is published with 12 bytes, its shape has 16"):
        bucketing.check_layout([TensorInfo("w", [4], "F32", 12)])


def test_a_port_that_is_taken_is_passed_over_and_none_left_is_said_with_the_setting_that_helps() -> None:
    first = Listener("127.0.0.1", 0, 2, TIMEOUT)
    second = Listener("127.0.0.1", first.port, 2, TIMEOUT)
    assert first.port < second.port < first.port + collective.PORTS_TRIED
    with pytest.raises(TransferError, match=r"set weights\.master_address"):
        Listener("192.0.2.1", 0, 2, TIMEOUT)  # an address of nobody (RFC 5737)
    first.close()
    second.close()


def test_a_rank_that_does_not_come_ends_joining_by_the_deadline_on_all_sides_and_is_known() -> None:
    listener = Listener("127.0.0.1", 0, 3, timedelta(seconds=2))
    failed: list[BaseException] = []

    def waits_long() -> None:
        try:
            join("127.0.0.1", listener.port, 1, 3, "late", "gloo", timedelta(seconds=60))
        except TransferError as error:
            failed.append(error)

    waiting = threading.Thread(target=waits_long)
    waiting.start()
    began = time.monotonic()
    end = began + 30
    while listener.arrived("late", [1], "gloo") != [1]:
        assert time.monotonic() < end
        time.sleep(0.02)
    assert listener.arrived("late", [1, 2], "gloo") == [1]
    listener.close()  # as the trainer does when it gives up: whoever waits in there is free at once
    waiting.join(30)
    assert not waiting.is_alive() and len(failed) == 1


def test_nobody_at_the_address_is_an_error_by_the_deadline() -> None:
    listener = Listener("127.0.0.1", 0, 2, TIMEOUT)
    port = listener.port
    listener.close()
    began = time.monotonic()
    with pytest.raises(TransferError, match="group nobody"):
        join("127.0.0.1", port, 1, 2, "nobody", "gloo", timedelta(seconds=1))
    assert time.monotonic() - began < 15


def receive(port: int, infos: list[TensorInfo], answer: Any) -> None:
    """In a process of its own: rank 1 takes one version, then waits for another that does not come."""
    group = join("127.0.0.1", port, 1, 2, "pair", "gloo", TIMEOUT)
    buckets = plan(infos, 64)
    memory = bucketing.memory_for(buckets, "cpu")
    assert bucketing.memory_for(buckets, "cpu", memory)[0] is memory[0]
    answer.send(files.digest(broadcasts.receive_all(group, buckets, memory, time.monotonic() + 20)))
    began = time.monotonic()
    try:
        broadcasts.receive_all(group, buckets, memory, began + 1)
    except TransferError:
        answer.send(time.monotonic() - began)
    group.close()


def test_what_is_sent_in_buckets_arrives_bit_for_bit_and_a_receiver_waits_no_longer_than_its_deadline() -> (
    None
):
    tensors = {f"w{place}": torch.randn(place, 7).bfloat16() for place in range(5)}
    tensors |= {"b": torch.randn(3), "large": torch.randn(100, dtype=torch.float64), "none": torch.empty(0)}
    listener = Listener("127.0.0.1", 0, 2, TIMEOUT)
    mine, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=receive, args=(listener.port, infos_of(tensors), theirs), daemon=True)
    process.start()
    try:
        group = join("127.0.0.1", listener.port, 0, 2, "pair", "gloo", TIMEOUT, listener=listener)
        raws = {name: raw(tensor) for name, tensor in tensors.items()}
        buckets, buffers = plan(infos_of(tensors), 64), bucketing.Buffers("cpu")
        measured = broadcasts.send_all(group, raws, buckets, buffers, time.monotonic() + 20)
        assert measured.nbytes == sum(each.nbytes for each in infos_of(tensors))
        assert mine.poll(30) and mine.recv() == files.digest(tensors)
        assert mine.poll(30) and 0.9 < mine.recv() < 10
        process.join(20)
        with pytest.raises(TransferError, match="group pair"):  # the other end is gone
            for _ in range(2):
                broadcasts.send_all(group, raws, buckets, buffers, time.monotonic() + 20)
        group.close()
        group.close()
        with pytest.raises(TransferError, match="group pair is closed"):
            group.start(torch.zeros(1), time.monotonic() + 1)
    finally:
        process.kill()
        listener.close()


def test_all_broadcasts_of_a_version_are_under_way_before_the_receiver_does_anything_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it does between two of them the trainer waits for, once for each bucket."""
    seen: list[str] = []

    class Queueing:
        backend = "nccl"

        def start(self, buffer: Any, deadline: float, give_up: Any) -> Any:
            seen.append("start")
            return lambda: seen.append("wait")

    views = bucketing.views
    monkeypatch.setattr(broadcasts, "views", lambda *given: seen.append("views") or views(*given))
    infos = [info("a", "F32", 4), info("b", "BF16", 8), info("c", "F32", 0), info("d", "U8", 16)]
    buckets = plan(infos, 16)
    memory = bucketing.memory_for(buckets, "cpu")
    group: Any = Queueing()
    received = broadcasts.receive_all(group, buckets, memory, time.monotonic() + 9)
    assert seen == ["start"] * 3 + ["views"] * len(buckets) + ["wait"] * 3
    assert {name: list(each.shape) for name, each in received.items()} == {
        each.name: each.shape for each in infos
    }
