"""Copies of the weights that the next steps do not change.

    trainer's weights on an accelerator ─► DeviceSnapshot: one copy there, queued behind the step; the loop goes on
                                              ├─► host(): to main memory, pinned, once (the publisher's thread)
                                              └─► buckets of a broadcast, deltas: from where it lies
    in main memory, or two snapshots on the device are in use still ─► a copy in main memory

A snapshot on the device takes as much of its memory as a version has bytes. There are two at the most: the version that
is on its way (or the one that the next delta is made on), and the next.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine import devices
from engine.weights import tensors as files
from engine.weights.bucketing import side_by_side
from engine.weights.tensors import RawTensor

logger = logging.getLogger(__name__)

MOST_ON_DEVICE = 2
PORTION = 256 << 20  # bytes of pinned memory for a digest


class DeviceSnapshot(Mapping[str, Any]):
    """Tensors by name, side by side in one piece of a device's memory; tied ones share it.

    Making one waits for nothing: the copies are queued on the current stream, in front of whatever changes the weights
    next. `ready` is the event at which they are done.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        import torch

        self._tensors = side_by_side(tensors)
        device = next(iter(self._tensors.values())).device
        self.device = str(device)
        self._module: Any = torch.get_device_module(device)
        self.ready = self._module.Event()
        self.ready.record(self._module.current_stream(device))
        self._host: dict[str, RawTensor] | None = None
        self._copying = threading.Lock()

    def __getitem__(self, name: str) -> Any:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def host(self) -> Mapping[str, RawTensor]:
        """The same in main memory, where it is copied at the first call. Blocks, on a stream of its own.

        The memory is pinned, and torch's allocator keeps it for the next version; it rounds up to a power of two.
        """
        with self._copying:
            if self._host is None:
                with self._module.device(self.device):
                    self._host = self._copied()
            return self._host

    def _copied(self) -> dict[str, RawTensor]:
        whole = _whole(self._tensors)
        stream = self._module.Stream()
        stream.wait_event(self.ready)
        with self._module.stream(stream):
            room = _pinned(whole.numel(), whole.device)
            room.copy_(whole, non_blocking=True)
        stream.synchronize()
        return _cut(self._tensors, room.numpy(), whole.data_ptr())


def _cut(tensors: Mapping[str, Any], data: NDArray[np.uint8], start: int) -> dict[str, RawTensor]:
    """`data`: a copy of the memory in which the tensors lie from address `start` on."""
    raws = {}
    for name, tensor in tensors.items():
        at = tensor.data_ptr() - start if tensor.nbytes else 0
        part = data[at : at + tensor.nbytes]
        raws[name] = _layout(tensor)._replace(data=part, memory=(part.ctypes.data, part.nbytes))
    return raws


def _whole(tensors: Mapping[str, Any]) -> Any:
    """All of the memory that `side_by_side` laid these in, uint8."""
    import torch

    first = next(iter(tensors.values()))
    storage = first.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=first.device).set_(storage, 0, (storage.nbytes(),), (1,))


class Snapshots:
    """`take(weights)`, on the thread that trains. `on_device`: where they are on an accelerator, if that has room."""

    def __init__(self, *, on_device: bool) -> None:
        self._on_device = on_device
        self._taken: list[weakref.ref[DeviceSnapshot]] = []
        self._said = False

    def take(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._on_device and _is_on_accelerator(tensors):
            self._taken = [each for each in self._taken if each() is not None]
            if len(self._taken) < MOST_ON_DEVICE and (made := self._made(tensors)) is not None:
                self._taken.append(weakref.ref(made))
                return made
        return files.snapshot(tensors)

    def _made(self, tensors: Mapping[str, Any]) -> DeviceSnapshot | None:
        import torch

        try:
            return DeviceSnapshot(tensors)
        except torch.OutOfMemoryError:
            if not self._said:
                self._said = True
                logger.warning(
                    "trainer: the device has no room for a copy of the weights (%.1f GB); versions are copied to main "
                    "memory while the trainer waits", sum(each.nbytes for each in tensors.values()) / 1e9,
                )  # fmt: skip
            return None


def _is_on_accelerator(tensors: Mapping[str, Any]) -> bool:
    return bool(tensors) and all(
        devices.is_accelerator(getattr(getattr(each, "device", None), "type", "cpu"))
        for each in tensors.values()
    )


def raw_tensors(tensors: Mapping[str, Any]) -> Mapping[str, RawTensor]:
    """The bytes of a set of weights in main memory, wherever it lies; what lies there already is not copied."""
    if isinstance(tensors, DeviceSnapshot):
        return tensors.host()
    return {name: files.raw(tensor) for name, tensor in tensors.items()}


def digest(tensors: Mapping[str, Any]) -> str:
    """As files.digest. What lies on an accelerator passes through pinned memory, some of it at a time."""
    if not _is_on_accelerator(tensors):
        return files.digest(tensors)
    distinct = {_key(tensor): tensor for tensor in tensors.values()}
    found: dict[Any, bytes] = {}
    for keys in _portions(distinct):
        host = _on_host([distinct[key] for key in keys])
        found |= files.content_digests(dict(zip(keys, host, strict=True)))
    layouts = {name: _layout(tensor) for name, tensor in tensors.items()}
    return files.digest_of_parts(layouts, {name: found[_key(tensor)] for name, tensor in tensors.items()})


def _key(tensor: Any) -> Any:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _layout(tensor: Any) -> RawTensor:
    return RawTensor(files.word_of(tensor.dtype), tuple(tensor.shape), np.empty(0, np.uint8))


def _portions(tensors: Mapping[Any, Any]) -> Iterator[list[Any]]:
    """Keys of neighbours that have PORTION bytes at the most, or of one tensor that alone has more."""
    together, nbytes = [], 0
    for key, tensor in tensors.items():
        if together and nbytes + tensor.nbytes > PORTION:
            yield together
            together, nbytes = [], 0
        together.append(key)
        nbytes += tensor.nbytes
    if together:
        yield together


def _on_host(tensors: Sequence[Any]) -> list[RawTensor]:
    import torch

    device = tensors[0].device
    room = _pinned(sum(each.nbytes for each in tensors), device)
    at, parts = 0, []
    for each in tensors:
        part = room[at : at + each.nbytes]
        part.copy_(each.contiguous().view(-1).view(torch.uint8), non_blocking=True)
        parts.append(_layout(each)._replace(data=part.numpy()))
        at += each.nbytes
    if device.type != "cpu":
        torch.get_device_module(device).current_stream(device).synchronize()
    return parts


def _pinned(nbytes: int, device: Any) -> Any:
    """Main memory to which this device copies at its full speed; torch's allocator uses it again."""
    import torch

    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=devices.named(device).has_pinned_memory())
