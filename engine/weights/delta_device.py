"""Finding what a delta holds where the weights lie: on their accelerator, so that only the result comes to the host.

    old, new (side by side on the device) ─► where do bits differ? ─► places ─► gaps ─┐
                                                                     └► new values ───┴► byte planes ─► host, pinned

Weights lie in few long pieces of memory (a DeviceSnapshot in one), and a piece is searched as one array, whatever
tensors are in it: a handful of kernels for hundreds of millions of elements, and three or four waits for it.
Only engine/weights/delta_words.py looks at all elements; what follows looks at those that changed. Blocks are those of
engine/weights/delta_writer.py, so are their bytes. Memory on the device beside the weights: a byte for each 8 bytes of
a pass, and for each element that changed some 20, without Triton some 50.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine import devices
from engine.weights import delta_words

PASS = 1 << 28  # elements that are searched at once; places are 32 bits wide


class Found(NamedTuple):
    """What changed in one block of n ≥ 1 elements; planes as in the file, less significant ones first."""

    name: str
    start: int  # of the block, in elements of the tensor
    gaps: NDArray[np.uint8]  # [planes, n]; the last may be all zero
    values: NDArray[np.uint8]  # [bytes of an item, n]


class _Block(NamedTuple):
    name: str
    start: int
    at: int  # where it begins, in elements of its piece
    length: int


class _Piece(NamedTuple):
    """Memory of tensors that lie side by side, both old and new."""

    old: Any  # integers [n], as wide as an item
    new: Any
    blocks: list[_Block]


def find(old: Mapping[str, Any], new: Mapping[str, Any], names: Sequence[str], block: int) -> Iterator[Found]:
    """What changed in the tensors of these names, block by block (of `block` elements), in the order of `names`.

    Tensors of torch on one device (or in main memory), contiguous, each pair of one dtype and shape.
    """
    for piece in _pieces(old, new, names, block):
        for blocks in _passes(piece.blocks):
            yield from _search(piece, blocks)


def _search(piece: _Piece, blocks: Sequence[_Block]) -> Iterator[Found]:
    import torch

    begin, end = blocks[0].at, blocks[-1].at + blocks[-1].length
    starts = [each.at - begin for each in blocks]
    # before the search: a copy to the device waits for all that is queued there
    starts_there = torch.tensor(starts, dtype=torch.int32, device=piece.new.device)
    places, values = delta_words.changes(piece.old[begin:end], piece.new[begin:end])
    if not len(places):
        return
    bounds, rows = _packed(places, values, starts, starts_there)
    item = values.itemsize
    for each, begin, end in zip(blocks, bounds[:-1], bounds[1:], strict=True):
        if end > begin:
            yield Found(each.name, each.start, rows[item:, begin:end], rows[:item, begin:end])


def _packed(
    places: Any, values: Any, starts: Sequence[int], starts_there: Any
) -> tuple[list[int], NDArray[np.uint8]]:
    """(first change of each block and the end, planes of values and of gaps [.., changes]) in main memory."""
    import torch

    n, item = len(places), values.itemsize
    planes, widest = delta_words.planes(places, values)
    firsts = torch.searchsorted(places, starts_there, out_int32=True)
    heads = places.index_select(0, firsts.clamp(max=n - 1))
    *numbers, widest = torch.cat((firsts, heads, widest.view(1))).tolist()
    bounds, heads = [*numbers[: len(starts)], n], numbers[len(starts) :]
    # gaps there are from one change to the next, wherever blocks begin: those of each block's first are known here
    changed = [block for block in range(len(starts)) if bounds[block + 1] > bounds[block]]
    gaps = np.array([heads[block] - starts[block] for block in changed], "<u4")
    n_planes = max(1, (max(widest, int(gaps.max())).bit_length() + 7) // 8)
    rows = on_host(planes[: item + n_planes])
    rows[item:, [bounds[block] for block in changed]] = gaps.view(np.uint8).reshape(-1, 4)[:, :n_planes].T
    return bounds, rows


def on_host(tensor: Any) -> NDArray[Any]:
    """A device's tensor as an array in main memory; pinned, and the memory is used again when nobody has the array."""
    import torch

    if tensor.device.type == "cpu":
        return tensor.numpy()
    pins = devices.named(tensor.device).has_pinned_memory()
    room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pins)
    room.copy_(tensor, non_blocking=True)
    torch.get_device_module(tensor.device).current_stream(tensor.device).synchronize()
    return room.numpy()


# ---------------------------------------------------------------- pieces
def _pieces(
    old: Mapping[str, Any], new: Mapping[str, Any], names: Sequence[str], block: int
) -> Iterator[_Piece]:
    """As few as there can be: neighbours in both memories are one piece."""
    together: list[str] = []
    for name in names:
        if together and not (_follows(old, together[-1], name) and _follows(new, together[-1], name)):
            yield _piece(old, new, together, block)
            together = []
        if new[name].numel():
            together.append(name)
    if together:
        yield _piece(old, new, together, block)


def _follows(tensors: Mapping[str, Any], first: str, second: str) -> bool:
    before, after = tensors[first], tensors[second]
    return (
        before.itemsize == after.itemsize
        and before.data_ptr() + before.nbytes == after.data_ptr()
        and before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
    )


def _piece(old: Mapping[str, Any], new: Mapping[str, Any], names: Sequence[str], block: int) -> _Piece:
    blocks, at = [], 0
    for name in names:
        length = new[name].numel()
        blocks += [
            _Block(name, start, at + start, min(block, length - start)) for start in range(0, length, block)
        ]
        at += length
    return _Piece(_integers(old[names[0]], at), _integers(new[names[0]], at), blocks)


def _integers(first: Any, length: int) -> Any:
    """Items from the first of `first` on, as integers of their width."""
    import torch

    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[first.itemsize]
    storage = first.untyped_storage()
    at = (first.data_ptr() - storage.data_ptr()) // first.itemsize
    return torch.empty(0, dtype=dtype, device=first.device).set_(storage, at, (length,), (1,))


def _passes(blocks: Sequence[_Block]) -> Iterator[list[_Block]]:
    """Neighbouring blocks, PASS elements at most."""
    together: list[_Block] = []
    for each in blocks:
        if together and each.at + each.length - together[0].at > PASS:
            yield together
            together = []
        together.append(each)
    if together:
        yield together
