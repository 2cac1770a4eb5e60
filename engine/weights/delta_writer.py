"""Making a delta: what changed of a base, found by comparing bits, block by block on threads.

    base, new (both in main memory) ─► which tensors differ, by their sha256 ─► blocks: compare, pick, compress ─► file
                                                                     └─ too much changed ─► FullIsDue

Where both lie on an accelerator too, it compares and picks there (engine/weights/delta_device.py), to the same bytes.
The format, and how a delta is read and applied: engine/weights/delta.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray

from engine.weights import delta_device
from engine.weights import tensors as files
from engine.weights.delta import MAGIC, PREAMBLE, Block, Changes, Head, checksum_of, in_order
from engine.weights.snapshots import DeviceSnapshot, raw_tensors
from engine.weights.tensors import RawTensor, WeightsError

_BLOCK = 1 << 22  # elements: bounds the memory of one thread, and lets every gap fit 32 bits
_LEVEL = 1  # of zstandard; on these planes 3 is slower and no smaller
_LOOK = 1 << 16  # elements of each tensor that are looked at before anything is encoded


class FullIsDue(WeightsError):
    """These weights are no delta on that base; the message says why. Publish them in full."""


class DeltaPolicy(NamedTuple):
    """When a version is published as a delta; otherwise in full."""

    full_every: int = 20  # versions from one full one to the next, at most: the longest chain to read
    most_changed: float = 0.25  # share of the elements
    most_bytes: float = 0.5  # share of what the full version takes


class State(NamedTuple):
    """Weights in main memory, and what identifies them."""

    contents: Mapping[str, RawTensor]
    digests: Mapping[str, bytes]  # sha256 of each tensor's bytes
    digest: str  # of the whole
    on_device: Mapping[str, Any] | None = None  # the same, side by side on an accelerator


def state_of(tensors: Mapping[str, Any]) -> State:
    """The bytes of numpy arrays or torch tensors with their digests; nothing is copied that lies in main memory."""
    state = state_of_bytes(raw_tensors(tensors))
    return state._replace(on_device=tensors) if isinstance(tensors, DeviceSnapshot) else state


def state_of_bytes(contents: Mapping[str, RawTensor]) -> State:
    digests = files.content_digests(contents)
    return State(contents, digests, files.digest_of_parts(contents, digests))


def write_delta(
    file: BinaryIO,
    base: State,
    new: State,
    *,
    epoch: int,
    version: int,
    base_version: int,
    base_epoch: int | None = None,
    policy: DeltaPolicy | None = None,
) -> Head:
    """Write `new` as overwrites of `base`. `base_epoch` is `epoch` unless said.

    Raises FullIsDue when a tensor appeared, vanished or has another shape, dtype or tie, or when more has changed than
    the policy allows (none: anything may); what was written until then is worth nothing.
    """
    stored, tied = files.split_tied(new.contents)
    _check_same(base, new, stored, tied)
    changed = [name for name in stored if base.digests[name] != new.digests[name]]
    limits = _Limits(stored, policy or DeltaPolicy(most_changed=1.0, most_bytes=float("inf")))
    limits.look(base, new, stored)
    file.write(bytes(PREAMBLE.size))
    blocks: dict[str, list[Block]] = {name: [] for name in stored}
    for name, start, encoded in _encoded(base, new, changed):
        if encoded is None:
            continue
        limits.count(encoded.n_changed, len(encoded.frame))
        file.write(encoded.frame)
        checksum = hashlib.sha256(encoded.frame).hexdigest()
        blocks[name].append(Block(start, encoded.n_changed, encoded.planes, len(encoded.frame), checksum))
    head = Head(
        epoch=epoch,
        version=version,
        base_epoch=epoch if base_epoch is None else base_epoch,
        base_version=base_version,
        base_digest=base.digest,
        digest=new.digest,
        tensors={name: _changes(tensor, blocks[name], new.digests[name]) for name, tensor in stored.items()},
        tied=tied,
    )
    _seal(file, head)
    return head


def _check_same(base: State, new: State, stored: Mapping[str, RawTensor], tied: Mapping[str, str]) -> None:
    for what, names in (
        ("appeared", new.contents.keys() - base.contents.keys()),
        ("vanished", base.contents.keys() - new.contents.keys()),
    ):
        if names:
            raise FullIsDue(f"{', '.join(sorted(names)[:4])} {what} ({len(names)} in all)")
    for name, tensor in new.contents.items():
        before = base.contents[name]
        if (before.dtype, before.shape) != (tensor.dtype, tensor.shape):
            raise FullIsDue(
                f"{name} was {before.dtype} {list(before.shape)}, is {tensor.dtype} {list(tensor.shape)}"
            )
    if files.split_tied(base.contents)[1] != tied:
        raise FullIsDue("other tensors share their memory than before")
    for name, tensor in stored.items():
        is_changed = base.digests[name] != new.digests[name]
        if is_changed and np.may_share_memory(tensor.data, base.contents[name].data):
            raise FullIsDue(f"{name} was overwritten in place: what it was before is gone")


class _Limits:
    """How much may change before a full version is the better one. Raises FullIsDue."""

    def __init__(self, stored: Mapping[str, RawTensor], policy: DeltaPolicy) -> None:
        self._policy = policy
        self._elements = sum(_n_elements(tensor) for tensor in stored.values())
        self._most_bytes = policy.most_bytes * sum(tensor.data.nbytes for tensor in stored.values())
        self._n_changed = self._nbytes = 0

    def look(self, base: State, new: State, stored: Mapping[str, RawTensor]) -> None:
        """A glance at the start of each tensor spares the work where nearly everything changed (float32 weights)."""
        seen = differ = 0
        for name in stored:
            before, after = (_bits(state.contents[name])[:_LOOK] for state in (base, new))
            seen += len(after)
            differ += int(np.count_nonzero(before != after))
        if seen >= _LOOK and differ > 2 * self._policy.most_changed * seen:
            raise FullIsDue(f"{differ / seen:.0%} of the first elements of each tensor changed")

    def count(self, n_changed: int, nbytes: int) -> None:
        self._n_changed += n_changed
        self._nbytes += nbytes
        if self._n_changed > self._policy.most_changed * self._elements:
            self._too_much(self._n_changed)
        if self._nbytes > self._most_bytes:
            raise FullIsDue(
                f"the delta takes more than {self._policy.most_bytes:.0%} of the bytes of a full version"
            )

    def _too_much(self, n_changed: int) -> None:
        raise FullIsDue(
            f"more than {self._policy.most_changed:.0%} of the elements changed "
            f"(at least {n_changed:,} of {self._elements:,})"
        )


class _Encoded(NamedTuple):
    n_changed: int
    planes: int
    frame: bytes


def _encoded(base: State, new: State, names: Sequence[str]) -> Iterator[tuple[str, int, _Encoded | None]]:
    """Blocks of these tensors, in order; None: nothing changed in one."""
    if base.on_device is not None and new.on_device is not None:
        found = delta_device.find(base.on_device, new.on_device, names, _BLOCK)
        return in_order(_encode_found, ((each,) for each in found))
    parts = ((name, *part) for name in names for part in _parts(base.contents[name], new.contents[name]))
    return in_order(_encode, parts)


def _parts(
    base: RawTensor, new: RawTensor
) -> Iterator[tuple[int, NDArray[np.unsignedinteger], NDArray[np.unsignedinteger]]]:
    before, after = _bits(base), _bits(new)
    for start in range(0, len(after), _BLOCK):
        yield start, before[start : start + _BLOCK], after[start : start + _BLOCK]


def _encode(
    name: str, start: int, before: NDArray[np.unsignedinteger], after: NDArray[np.unsignedinteger]
) -> tuple[str, int, _Encoded | None]:
    places = np.flatnonzero(before != after)
    if not len(places):
        return name, start, None
    gaps = (np.diff(places, prepend=-1) - 1).astype("<u4")
    return name, start, _packed(_planes(gaps), _planes(after[places]))


def _encode_found(found: delta_device.Found) -> tuple[str, int, _Encoded | None]:
    return found.name, found.start, _packed(found.gaps, found.values)


def _packed(gaps: NDArray[np.uint8], values: NDArray[np.uint8]) -> _Encoded:
    """`gaps` [planes, n], `values` [bytes of an item, n]. Upper planes of gaps that are all zero are left out."""
    planes = len(gaps)
    while planes > 1 and not gaps[planes - 1].any():
        planes -= 1
    body = b"".join(plane.tobytes() for plane in (*gaps[:planes], *values))
    return _Encoded(values.shape[1], planes, zstandard.ZstdCompressor(level=_LEVEL).compress(body))


def _changes(tensor: RawTensor, blocks: list[Block], digest: bytes) -> Changes:
    return Changes(
        dtype=tensor.dtype,
        shape=list(tensor.shape),
        n_changed=sum(block.n_changed for block in blocks),
        digest=digest.hex(),
        blocks=blocks,
    )


def _seal(file: BinaryIO, head: Head) -> None:
    index = msgspec.json.encode(head)
    file.write(index)
    total = file.tell()
    file.seek(0)
    file.write(PREAMBLE.pack(MAGIC, total, len(index), checksum_of(total, index)))
    file.seek(total)


# ---------------------------------------------------------------- bits
def _bits(tensor: RawTensor) -> NDArray[np.unsignedinteger]:
    """Elements as unsigned integers of their size."""
    return tensor.data.view(f"<u{files.item_bytes(tensor.dtype)}")


def _n_elements(tensor: RawTensor) -> int:
    return tensor.data.nbytes // files.item_bytes(tensor.dtype)


def _planes(values: NDArray[np.unsignedinteger]) -> NDArray[np.uint8]:
    """[n] of k bytes → [k, n]: first bytes of all, then second bytes, …: like stands beside like, for zstandard."""
    return np.ascontiguousarray(values.view(np.uint8).reshape(len(values), values.itemsize).T)
