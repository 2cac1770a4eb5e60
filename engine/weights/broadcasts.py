"""A version through a group: its buckets broadcast by rank 0, and received by all others.

    trainer: send_all ─► bucket, bucket, … ─► engines: receive_all

From main memory and from a device; over NCCL and MCCL copies and broadcasts follow one another on a stream, over Gloo
this thread keeps two on their way.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.weights.bucketing import Buffers, as_it_lies, as_it_lies_on_device, fill, largest, size_of, views
from engine.weights.collective import GiveUp, Group, never
from streams.events import TensorInfo

if TYPE_CHECKING:
    from engine.weights.shared import Owner, Reader

_UNDER_WAY = 2  # broadcasts over Gloo at a time: nothing stands still while the end of one is noticed


class Measured(NamedTuple):
    """Of one version that went through a group."""

    nbytes: int
    seconds: float


def send_all(
    group: Group | Owner,
    tensors: Mapping[str, Any],
    buckets: Sequence[Sequence[TensorInfo]],
    buffers: Buffers,
    deadline: float,
    give_up: GiveUp = never,
) -> Measured:
    """Broadcast all buckets in order. `tensors`: RawTensors, or for a device torch's that lie on it."""
    began = time.monotonic()
    if not isinstance(group, Group):  # it has memory of its own for buckets
        group.send(tensors, buckets, deadline, give_up)
    elif buffers.device == "cpu":
        _send_in_turn(group, tensors, buckets, buffers, deadline, give_up)
    else:
        _send_queued(group, tensors, buckets, buffers, deadline, give_up)
    return Measured(sum(map(size_of, buckets)), time.monotonic() - began)


def _send_in_turn(
    group: Group,
    tensors: Mapping[str, Any],
    buckets: Sequence[Sequence[TensorInfo]],
    buffers: Buffers,
    deadline: float,
    give_up: GiveUp,
) -> None:
    begun: deque[Callable[[], None]] = deque()
    sent = 0
    for bucket in buckets:
        while len(begun) >= _UNDER_WAY:  # only the last one that was begun is on its way then
            begun.popleft()()
        part = as_it_lies(bucket, tensors, buffers.device)
        if part is None:
            part = fill(buffers.of(largest(buckets))[sent % 2], bucket, tensors)
        if part.numel():
            begun.append(group.start(part, deadline, give_up))
            sent += 1
    while begun:
        begun.popleft()()


def _send_queued(
    group: Group,
    tensors: Mapping[str, Any],
    buckets: Sequence[Sequence[TensorInfo]],
    buffers: Buffers,
    deadline: float,
    give_up: GiveUp,
) -> None:
    """On a device copies and broadcasts follow one another without this thread, on a stream of their own."""
    import torch

    module: Any = torch.get_device_module(buffers.device)
    begun: list[Any] = []
    with module.device(buffers.device):
        stream = module.Stream()
        follow(stream, tensors, buffers.device)
        with module.stream(stream):
            for bucket in buckets:
                part = as_it_lies_on_device(bucket, tensors)
                if part is None:
                    if len(begun) >= 2:  # its buffer is free when the broadcast before the last has ended
                        stream.wait_event(begun[-2].ended)
                    part = fill(buffers.of(largest(buckets))[len(begun) % 2], bucket, tensors)
                if part.numel():
                    begun.append(group.start(part, deadline, give_up))
            for wait in begun:
                wait()


def follow(stream: Any, tensors: Mapping[str, Any], device: Any) -> None:
    """What `stream` does from here on, it does after these tensors were made.

    A DeviceSnapshot says when that was; of others all is waited for that was asked of the device until now.
    """
    import torch

    ready = getattr(tensors, "ready", None)
    if ready is not None:
        stream.wait_event(ready)
    else:
        module: Any = torch.get_device_module(device)
        stream.wait_stream(module.current_stream(device))


def receive_all(
    group: Group | Reader,
    buckets: Sequence[Sequence[TensorInfo]],
    memory: Sequence[Any],
    deadline: float,
    give_up: GiveUp = never,
) -> dict[str, Any]:
    """All tensors, as views of `memory` (of `memory_for`). Raises TransferError; then it holds a mixture."""
    received: dict[str, Any] = {}
    begun: deque[Callable[[], None]] = deque()
    # NCCL queues them, and needs nobody between one and the next
    most = {"ipc": 1, "gloo": _UNDER_WAY}.get(group.backend, len(buckets))
    for buffer in memory:
        while len(begun) >= most:
            begun.popleft()()
        if buffer.numel():
            begun.append(group.start(buffer, deadline, give_up))
    # views take longer to make than broadcasts to start: beside those, not between them
    for bucket, buffer in zip(buckets, memory, strict=True):
        received.update(views(buffer, bucket))
    while begun:
        begun.popleft()()
    return received
