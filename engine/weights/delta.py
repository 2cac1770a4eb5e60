"""A version as what it changed of the one before it: positions and new values.

    preamble   magic │ bytes of the file │ bytes of the index │ sha256 over these two and the index
    blocks     one zstandard frame per 4 Mi elements of a tensor: [gaps, plane by plane │ new values, plane by plane]
    index      JSON: Head, with each tensor and the size and sha256 of its blocks

New values and never differences: a delta that is applied twice, or again after half of it, gives the same weights.
Bits are compared, so NaNs and signed zeros are values like others. Blocks are made and applied one by one, side by
side on threads; a tensor that did not change is one line of the index. The preamble is filled in last, so a file that
was cut off is known by its size, and one with any other byte by a digest.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray

from engine.weights import tensors as files
from engine.weights.tensors import WeightsError

SUFFIX = ".delta"

MAGIC = b"msdelta1"
PREAMBLE = struct.Struct("<8sQQ32s")
_MAX_INDEX_BYTES = 1 << 30
_MOST_THREADS = 8

_Result = TypeVar("_Result")


class WrongBase(WeightsError):
    """The weights that a delta was to be applied to are not those that it was made on."""


class Block(msgspec.Struct, frozen=True, array_like=True):
    start: int  # first element
    n_changed: int
    planes: int  # bytes of a gap that are stored
    nbytes: int  # of the frame
    sha256: str  # of the frame


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor. A RawTensor's layout without its bytes."""

    dtype: str  # word of a safetensors header
    shape: list[int]
    n_changed: int  # elements
    digest: str  # sha256 of its new bytes
    blocks: list[Block]


class Head(msgspec.Struct, frozen=True, kw_only=True):
    epoch: int
    version: int
    base_epoch: int
    base_version: int
    base_digest: str
    digest: str  # of the new state
    tensors: dict[str, Changes]
    tied: dict[str, str] = {}  # name → name of the tensor above whose bytes it shares

    @property
    def n_changed(self) -> int:
        return sum(changes.n_changed for changes in self.tensors.values())

    @property
    def full_bytes(self) -> int:
        return sum(files.size_of(changes) for changes in self.tensors.values())


# ---------------------------------------------------------------- reading
class Delta:
    """An opened delta. The file is mapped: removing it meanwhile does no harm."""

    def __init__(self, path: Path, head: Head, data: NDArray[np.uint8]) -> None:
        self.path, self.head, self.nbytes = path, head, len(data)
        self._data = data
        self._places = _places_of(head)

    def check_base(self, tensors: Mapping[str, files.Layout]) -> None:
        """Raise WrongBase unless these are the tensors, by name, dtype and shape, that it overwrites parts of."""
        wanted = {**self.head.tensors, **{name: self.head.tensors[of] for name, of in self.head.tied.items()}}
        for what, names in (
            ("lacks", wanted.keys() - tensors.keys()),
            ("has", tensors.keys() - wanted.keys()),
        ):
            if names:
                other = "" if what == "lacks" else ", which is none of the delta's"
                raise WrongBase(f"{self.path.name}: its base {what} {', '.join(sorted(names)[:4])}{other}")
        for name, changes in wanted.items():
            held = tensors[name]
            if held.dtype != changes.dtype or list(held.shape) != changes.shape:
                raise WrongBase(
                    f"{self.path.name}: {name} of its base is {held.dtype} {list(held.shape)}, "
                    f"made on {changes.dtype} {changes.shape}"
                )

    def overwrite(self, targets: Mapping[str, NDArray[np.uint8]]) -> None:
        """Put the new values of these tensors in their places; `targets`: name → its bytes, writable.

        Raises WeightsError for a damaged block; then some targets are half done and none may be used.
        """
        jobs = [
            (block, at, name, targets[name])
            for name in targets
            for block, at in zip(self.head.tensors[name].blocks, self._places[name], strict=True)
        ]
        if len(jobs) == 1:
            self._overwrite(*jobs[0])
            return
        for _ in in_order(self._overwrite, jobs):
            pass

    def _overwrite(self, block: Block, at: int, name: str, target: NDArray[np.uint8]) -> None:
        frame = self._data[at : at + block.nbytes].data
        if hashlib.sha256(frame).hexdigest() != block.sha256:
            raise WeightsError(f"{self.path}: the block of {name} at byte {at} is damaged")
        item = files.item_bytes(self.head.tensors[name].dtype)
        n, split = block.n_changed, block.planes * block.n_changed
        body = zstandard.ZstdDecompressor().decompress(frame, max_output_size=split + n * item)
        if len(body) != split + n * item:
            raise WeightsError(f"{self.path}: the block of {name} at byte {at} has {len(body)} bytes")
        gaps = _joined(np.frombuffer(body, np.uint8, split), n, 4)
        values = _joined(np.frombuffer(body, np.uint8, n * item, split), n, item)
        places = np.cumsum(gaps, dtype=np.int64)
        places += np.arange(block.start, block.start + n, dtype=np.int64)
        elements = target.view(values.dtype)
        if places[-1] >= len(elements):
            raise WeightsError(
                f"{self.path}: the block of {name} at byte {at} goes beyond its {len(elements)} elements"
            )
        elements[places] = values


def open_delta(path: Path) -> Delta:
    """Raises WeightsError when the file is missing, truncated, damaged in its head, or longer than it should be.

    Damage in a block is found when the block is read.
    """
    try:
        size = path.stat().st_size
        data = np.memmap(path, np.uint8, mode="r").view(np.ndarray) if size else np.empty(0, np.uint8)
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read ({error.strerror})") from None
    if len(data) < PREAMBLE.size:
        raise WeightsError(f"{path}: truncated, {len(data)} bytes do not hold the head of a delta")
    magic, total, index_bytes, checksum = PREAMBLE.unpack(data[: PREAMBLE.size].tobytes())
    if magic != MAGIC:
        raise WeightsError(f"{path}: is no delta that this version reads (it begins with {magic!r})")
    if len(data) < total:
        raise WeightsError(f"{path}: truncated, or its head is damaged: {len(data)} bytes of {total}")
    if len(data) > total:
        raise WeightsError(f"{path}: {len(data) - total} bytes follow its end, or its head is damaged")
    if index_bytes > min(total - PREAMBLE.size, _MAX_INDEX_BYTES):
        raise WeightsError(f"{path}: its head is damaged (an index of {index_bytes} bytes)")
    index = data[total - index_bytes :].tobytes()
    if checksum_of(total, index) != checksum:
        raise WeightsError(f"{path}: its head or its index is damaged")
    return Delta(path, _head_of(path, index, total - index_bytes - PREAMBLE.size), data)


def _head_of(path: Path, index: bytes, blocks_bytes: int) -> Head:
    """What a foreign writer may have got wrong, since the bytes are those that were written."""
    try:
        head = msgspec.json.decode(index, type=Head)
        layouts = {**head.tensors, **{name: head.tensors[of] for name, of in head.tied.items()}}
        contents = {name: bytes.fromhex(layouts[name].digest) for name in layouts}
        said = files.digest_of_parts(layouts, contents)
    except (msgspec.MsgspecError, KeyError, ValueError) as error:
        raise WeightsError(f"{path}: its index cannot be read ({error!r})") from None
    if said != head.digest:
        raise WeightsError(f"{path}: its tensors have digest {said}, it says {head.digest}")
    blocks = [block for changes in head.tensors.values() for block in changes.blocks]
    if sum(block.nbytes for block in blocks) != blocks_bytes:
        raise WeightsError(f"{path}: its blocks do not take {blocks_bytes} bytes")
    if any(block.start < 0 or block.n_changed < 1 or not 1 <= block.planes <= 4 for block in blocks):
        raise WeightsError(f"{path}: a block of its index cannot be")
    return head


def _places_of(head: Head) -> dict[str, list[int]]:
    """Where each tensor's blocks begin in the file. They lie in the order of the index."""
    at, places = PREAMBLE.size, {}
    for name, changes in head.tensors.items():
        places[name] = []
        for block in changes.blocks:
            places[name].append(at)
            at += block.nbytes
    return places


# ---------------------------------------------------------------- applying
def apply(delta: Delta, tensors: Mapping[str, Any], *, held: str = "") -> dict[str, Any]:
    """The new state of `tensors` (numpy arrays or torch tensors in main memory), which stay as they are.

    What did not change is shared with them. `held`: their digest, if the caller has verified it. Weights that are the
    new state already come back as they are. Raises WrongBase for any others, and WeightsError for a damaged delta.
    """
    held = held or files.digest(tensors)
    head = delta.head
    if held == head.digest:
        return dict(tensors)
    if held != head.base_digest:
        raise WrongBase(
            f"{delta.path.name} is a delta on version {head.base_version} of digest {head.base_digest}, "
            f"the weights at hand have digest {held}"
        )
    new = advance(tensors, [delta])
    found = files.digest(new)
    if found != head.digest:
        raise WeightsError(f"{delta.path}: gives weights of digest {found}, should be {head.digest}")
    return new


def advance(tensors: Mapping[str, Any], deltas: Sequence[Delta]) -> dict[str, Any]:
    """These deltas applied in order, without a look at any digest: the caller verifies what comes out.

    Tensors that change are copied, once each; the others are shared.
    """
    layouts = {name: files.raw(tensor) for name, tensor in tensors.items()}
    for delta in deltas:
        delta.check_base(layouts)
    result = dict(tensors)
    for name in {name for delta in deltas for name in changed_in(delta)}:
        result[name] = copy(tensors[name])
    overlay(result, deltas)
    return result


def overlay(tensors: dict[str, Any], deltas: Sequence[Delta]) -> None:
    """As `advance`, in place: every tensor that changes must lie in one piece of writable main memory."""
    targets = {name: files.raw(tensors[name]).data for delta in deltas for name in changed_in(delta)}
    for delta in deltas:
        delta.overwrite({name: targets[name] for name in changed_in(delta)})
        for name, of in delta.head.tied.items():
            tensors[name] = tensors[of]


def changed_in(delta: Delta) -> list[str]:
    return [name for name, changes in delta.head.tensors.items() if changes.n_changed]


def copy(tensor: Any) -> Any:
    """In one piece, and by its own library: kernels may round otherwise for memory of another alignment."""
    if hasattr(tensor, "detach"):
        import torch  # it is loaded already: a tensor came

        return tensor.detach().clone(memory_format=torch.contiguous_format)
    return np.array(tensor, tensor.dtype.newbyteorder("<"), order="C", copy=True)


# ---------------------------------------------------------------- parts
def checksum_of(total: int, index: bytes) -> bytes:
    return hashlib.sha256(total.to_bytes(8, "little") + len(index).to_bytes(8, "little") + index).digest()


def _joined(planes: NDArray[np.uint8], n: int, item: int) -> NDArray[np.unsignedinteger]:
    """The inverse of `_planes`; bytes of which no plane is stored are 0."""
    stored = len(planes) // n
    joined = np.zeros((n, item), np.uint8) if stored < item else np.empty((n, item), np.uint8)
    joined[:, :stored] = planes.reshape(stored, n).T
    return joined.reshape(-1).view(f"<u{item}")


def in_order(function: Callable[..., _Result], jobs: Iterable[tuple[Any, ...]]) -> Iterator[_Result]:
    """Results in the order of the jobs, worked out on threads; only a few are ever under way."""
    threads = min(_MOST_THREADS, os.cpu_count() or 1)
    pool, waiting = ThreadPoolExecutor(threads), deque()
    try:
        for job in jobs:
            waiting.append(pool.submit(function, *job))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
