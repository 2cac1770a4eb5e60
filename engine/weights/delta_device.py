"""Finding what a delta holds where the weights lie: on their accelerator, so that only the result comes to the host.

    old, new (side by side on the device) ─► where do bits differ? ─► places ─► gaps ─┐
                                                                     └► new values ───┴► byte planes ─► host, pinned

Weights lie in few long pieces of memory (a DeviceSnapshot in one), and a piece is searched as one array, whatever
tensors are in it: a handful of kernels for hundreds of millions of elements, and two waits for the device. Blocks are
those of engine/weights/delta_writer.py, so are their bytes. Memory on the device beside the weights: a byte for each
element of a pass and some 20 for each that changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine import devices

PASS = 1 << 28  # elements that are searched at once; places are 32 bits wide

_FAR = (1 << 31) - 1


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
    packed = _packed(piece, blocks)
    if packed is None:
        return
    bounds, n_planes, planes = packed
    for each, begin, end in zip(blocks, bounds[:-1], bounds[1:], strict=True):
        if end > begin:
            yield Found(each.name, each.start, planes[:n_planes, begin:end], planes[n_planes:, begin:end])


def _packed(piece: _Piece, blocks: Sequence[_Block]) -> tuple[list[int], int, NDArray[np.uint8]] | None:
    """(first change of each block and the end, planes of gaps, [planes of gaps + of values, changes]); None: none."""
    import torch

    begin, end = blocks[0].at, blocks[-1].at + blocks[-1].length
    places = (piece.old[begin:end] != piece.new[begin:end]).nonzero().view(-1).to(torch.int32)
    n = len(places)
    if not n:
        return None
    values = piece.new[begin:end].index_select(0, places)
    starts = torch.tensor([each.at - begin for each in blocks], dtype=torch.int32, device=places.device)
    firsts = torch.searchsorted(places, starts)
    gaps = _gaps(places, starts, firsts)
    *bounds, widest = torch.cat((firsts, gaps.max().view(1))).tolist()
    n_planes, item = max(1, (int(widest).bit_length() + 7) // 8), values.element_size()
    planes = torch.empty((n_planes + item, n), dtype=torch.uint8, device=places.device)
    planes[:n_planes] = gaps.view(torch.uint8).view(n, -1)[:, :n_planes].T
    planes[n_planes:] = values.view(torch.uint8).view(n, item).T
    return [*bounds, n], n_planes, on_host(planes)


def _gaps(places: Any, starts: Any, firsts: Any) -> Any:
    """Elements between one change and the one before it, or the start of its block: int32 [n]."""
    import torch

    gaps = torch.empty_like(places)
    gaps[0] = places[0] + 1
    torch.sub(places[1:], places[:-1], out=gaps[1:])
    gaps -= 1
    # of the blocks without a change in front of one, the nearest start is the right one, and gives the least
    heads = firsts.clamp(max=len(places) - 1)
    from_start = torch.where(firsts < len(places), places[heads] - starts, _FAR)
    return gaps.scatter_reduce_(0, heads, from_start, "amin")


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
