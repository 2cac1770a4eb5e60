"""The buckets in which weights go from a trainer to engines, as SGLang's flattened buckets are laid out.

    published list ─► plan ─► buckets ─► fill (or as the tensors lie) ─► … ─► memory_for ─► views ─► with_tied

A bucket is one uint8 tensor: the tensors of `plan`, one after the other without gaps. Both sides make the same plan
from the published list, so nothing but bytes is sent; the digest of the version says whether they were the right ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engine import devices
from engine.weights import tensors as files
from engine.weights.tensors import RawTensor, WeightsError
from streams.events import TensorInfo

BUCKET_BYTES = 64 << 20  # Gloo was fastest at this size, and memory is touched once
# NCCL: smaller ones wait for a busy CPU (docs/benchmarks.md). MCCL by analogy
DEVICE_BUCKET_BYTES = 512 << 20


def default_bytes(backend: str) -> int:
    """Of one broadcast by this library, where the configuration names none.

    >>> default_bytes("nccl") // default_bytes("gloo")
    8
    """
    return BUCKET_BYTES if devices.with_collectives(backend) is None else DEVICE_BUCKET_BYTES


def plan(tensors: Sequence[TensorInfo], bucket_bytes: int) -> list[list[TensorInfo]]:
    """Which tensors go in which bucket, in the order of the published list; the same on every side.

    A tied tensor is in none: its bytes go once, under the other name. A tensor larger than `bucket_bytes` has a bucket
    of its own. Within a bucket the widest types come first: so every tensor begins at a multiple of its item, without
    gaps, as SGLang's flattened buckets demand.

    >>> infos = [TensorInfo("a", [3], "BF16", 6), TensorInfo("b", [2], "F32", 8), TensorInfo("c", [9], "F32", 36)]
    >>> [[info.name for info in bucket] for bucket in plan(infos, 16)]
    [['b', 'a'], ['c']]
    """
    buckets: list[list[TensorInfo]] = []
    room = 0
    for info in tensors:
        if info.tied:
            continue
        if not buckets or info.nbytes > room:
            buckets.append([])
            room = max(bucket_bytes, info.nbytes)
        buckets[-1].append(info)
        room -= info.nbytes
    for bucket in buckets:
        bucket.sort(key=lambda info: -files.item_bytes(info.dtype))
    return buckets


def size_of(bucket: Sequence[TensorInfo]) -> int:
    return sum(info.nbytes for info in bucket)


def check_layout(tensors: Sequence[TensorInfo]) -> None:
    """Raise WeightsError for a published list whose sizes are not those of its shapes: no plan can be made of it."""
    for info in tensors:
        if files.size_of(info) != info.nbytes:
            raise WeightsError(
                f"{info.name} is published with {info.nbytes} bytes, its shape has {files.size_of(info)}"
            )
    own = {info.name for info in tensors if not info.tied}
    for info in tensors:
        if info.tied and info.tied not in own:
            raise WeightsError(
                f"{info.name} is published as tied to {info.tied}, which has no bytes of its own"
            )


def fill(buffer: Any, bucket: Sequence[TensorInfo], tensors: Mapping[str, Any]) -> Any:
    """Copy a bucket's tensors (RawTensor, or torch's on the device) into `buffer` (uint8); returns what is filled."""
    at = 0
    for info in bucket:
        if info.nbytes:
            buffer[at : at + info.nbytes].copy_(_flat(tensors[info.name]))
        at += info.nbytes
    return buffer[:at]


def _flat(tensor: Any) -> Any:
    import torch

    if isinstance(tensor, RawTensor):
        return torch.from_numpy(tensor.data)
    return tensor.detach().reshape(-1).view(torch.uint8)


def views(buffer: Any, bucket: Sequence[TensorInfo]) -> dict[str, Any]:
    """The tensors of a bucket that was received: views of its memory, no copies."""
    import torch

    found, at = {}, 0
    for info in bucket:
        dtype = getattr(torch, files.dtype_name(info.dtype))
        found[info.name] = buffer[at : at + info.nbytes].view(dtype).reshape(info.shape)
        at += info.nbytes
    return found


def with_tied(tensors: Sequence[TensorInfo], received: Mapping[str, Any]) -> dict[str, Any]:
    """All tensors of the published list, in its order; tied ones share memory."""
    return {info.name: received[info.tied or info.name] for info in tensors}


class Buffers:
    """Memory for buckets that are sent, used again for every version: fresh pages cost as much as the sending."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._two: list[Any] = []

    def clear(self) -> None:
        self._two = []

    def of(self, nbytes: int) -> list[Any]:
        """Two buffers, uint8 of at least so many bytes: one is filled while the other is on its way."""
        import torch

        if not self._two or self._two[0].numel() < nbytes:
            self._two = []  # before the new ones: never four at a time
            self._two = [torch.empty(nbytes, dtype=torch.uint8, device=self.device) for _ in range(2)]
        return self._two


def largest(buckets: Sequence[Sequence[TensorInfo]]) -> int:
    return max((size_of(bucket) for bucket in buckets), default=0)


def side_by_side(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """A snapshot on the device, in one piece of memory: buckets of it need no copy. What is tied stays tied."""
    import torch

    distinct = {_same(each): each.detach() for each in tensors.values()}
    copies: dict[Any, Any] = {}
    device = next(iter(distinct.values())).device if distinct else "cpu"
    n_bytes = sum(each.nbytes + each.itemsize for each in distinct.values())
    room, at = torch.empty(n_bytes, dtype=torch.uint8, device=device), 0
    for key, each in distinct.items():
        at += -at % each.itemsize
        copies[key] = room[at : at + each.nbytes].view(each.dtype).reshape(each.shape).copy_(each)
        at += each.nbytes
    return {name: copies[_same(each)] for name, each in tensors.items()}


def _same(tensor: Any) -> Any:
    """Equal for tensors that are the same elements of the same memory."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def memory_for(buckets: Sequence[Sequence[TensorInfo]], device: str, old: Sequence[Any] = ()) -> list[Any]:
    """A buffer (uint8) for each bucket; those of `old` if they have the sizes."""
    import torch

    sizes = [size_of(bucket) for bucket in buckets]
    if [buffer.numel() for buffer in old] == sizes:
        return list(old)
    return [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]


def as_it_lies(bucket: Sequence[TensorInfo], tensors: Mapping[str, Any], device: str) -> Any | None:
    """A bucket whose tensors lie side by side in main memory, as those of a snapshot do, needs no copy."""
    import torch

    first = tensors[bucket[0].name].data
    at: int = first.__array_interface__["data"][0]
    for info in bucket:
        data = tensors[info.name].data
        if data.__array_interface__["data"][0] != at:
            return None
        at += data.nbytes
    if device != "cpu" or not first.flags.writeable:
        return None
    return torch.from_numpy(np.lib.stride_tricks.as_strided(first, (size_of(bucket),), (1,)))


def as_it_lies_on_device(bucket: Sequence[TensorInfo], tensors: Mapping[str, Any]) -> Any | None:
    """The same of tensors on a device, as those of `side_by_side`."""
    import torch

    first: Any = tensors[bucket[0].name]
    if isinstance(first, RawTensor):
        return None
    storage, at = first.untyped_storage(), first.data_ptr()
    offset = at - storage.data_ptr()
    for info in bucket:
        tensor: Any = tensors[info.name]
        if isinstance(tensor, RawTensor) or tensor.data_ptr() != at or not tensor.is_contiguous():
            return None
        at += info.nbytes
    if offset + size_of(bucket) > storage.nbytes():  # neighbours by chance
        return None
    whole = torch.empty(0, dtype=torch.uint8, device=first.device)
    return whole.set_(storage, offset, (size_of(bucket),), (1,))
