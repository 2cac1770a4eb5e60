"""Where two arrays differ, and what the new one holds there: several items compared at once, as words of 8 bytes.

    old, new ─► aligned words ─┬─ Triton on CUDA: engine/weights/delta_triton.py ─┐
                               └─ any device: words that differ, then their items ┴► places, new values ─► byte planes
             └► items before and after them, or all where no words can be made: compared one by one

Both ways give the same. Memory of a device beside the arrays: a byte for each word, and for each change some 20 bytes;
without Triton some 50 for each word that changed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

WORD = 8  # bytes

Changes = tuple[Any, Any]  # places in items, int32 [n], ascending; new values, of the type of the items [n]


class Kernels(NamedTuple):
    """One way to do both; nothing else depends on which."""

    changes: Callable[
        [Any, Any, Any], Changes
    ]  # of old and new words, int64 [words], and the type of the items
    planes: Callable[[Any, Any], tuple[Any, Any]]  # of places and values


def changes(old: Any, new: Any) -> Changes:
    """Items of two arrays that differ: integers [n] of torch, contiguous, of one type, on one device; n < 2^31.

    On the current stream of the device. Waits for it, since how much changed decides what memory is taken.
    """
    import torch

    begin, end = _words(old, new)
    parts = [_one_by_one(old, new, 0, begin)] if begin else []
    if end > begin:
        before, after = (each[begin:end].view(torch.int64) for each in (old, new))
        places, values = kernels_on(old.device, old.dtype).changes(before, after, old.dtype)
        parts.append((places.add_(begin) if begin else places, values))
    if end < len(old):
        parts.append(_one_by_one(old, new, end, len(old)))
    if len(parts) == 1:
        return parts[0]
    return torch.cat([places for places, _ in parts]), torch.cat([values for _, values in parts])


def planes(places: Any, values: Any) -> tuple[Any, Any]:
    """Of n ≥ 1 changes: ([bytes of an item + 4, n], uint8; widest gap, int32 []).

    First the bytes of the values, then those of the gaps: items between a change and the one before it. That of the
    first is anything. Less significant ones first.
    """
    return kernels_on(places.device, values.dtype).planes(places, values)


def _words(old: Any, new: Any) -> tuple[int, int]:
    """From the first to before the second item both arrays are aligned words; both are the end where there are none."""
    item, n = old.itemsize, len(old)
    places = {each.data_ptr() % WORD for each in (old, new)}
    bases = {each.untyped_storage().data_ptr() % WORD for each in (old, new)}
    if len(places) > 1 or bases != {0}:  # torch counts words from the start of the memory
        return n, n
    begin = min(n, -places.pop() % WORD // item)
    return begin, begin + (n - begin) // (WORD // item) * (WORD // item)


def _one_by_one(old: Any, new: Any, begin: int, end: int) -> Changes:
    import torch

    places = (old[begin:end] != new[begin:end]).nonzero().view(-1).add_(begin)
    return places.to(torch.int32), new.index_select(0, places)


# ---------------------------------------------------------------- torch
def _changes_of_torch(old: Any, new: Any, item: Any) -> Changes:
    """Words that differ are picked first, then their items: what is costly is to look for places among many."""
    import torch

    found = (old != new).nonzero().view(-1)
    after = new.index_select(0, found)
    if item.itemsize == WORD:
        return found.to(torch.int32), after
    differ = (old.index_select(0, found) ^ after).view(item)
    found = found.to(torch.int32)
    inner = differ.nonzero().view(-1)
    del differ
    lanes = WORD // item.itemsize  # a power of two
    places = found.index_select(0, inner >> (lanes.bit_length() - 1)).mul_(lanes)
    return places.add_(inner & (lanes - 1)), after.view(item).index_select(0, inner)


def _planes_of_torch(places: Any, values: Any) -> tuple[Any, Any]:
    import torch

    n, item = len(places), values.itemsize
    gaps = places - 1
    gaps[1:] -= places[:-1]
    made = torch.empty((item + 4, n), dtype=torch.uint8, device=places.device)
    made[:item] = values.view(torch.uint8).view(n, item).T
    made[item:] = gaps.view(torch.uint8).view(n, 4).T
    return made, gaps.max()


OF_TORCH = Kernels(_changes_of_torch, _planes_of_torch)


# ---------------------------------------------------------------- which way
@functools.cache
def kernels_on(device: Any, item: Any) -> Kernels:
    """Triton's, if they can be compiled for this device and find what torch finds; else torch's, and why is said."""
    if device.type != "cuda":
        return OF_TORCH
    try:
        from engine.weights import delta_triton

        kernels = Kernels(delta_triton.changes, delta_triton.planes)
        _try(kernels, device, item)
    except (
        Exception
    ) as error:  # of a compiler, a driver, a cache folder: whatever it is, there is another way
        reason = (str(error).strip().splitlines() or [""])[0]
        _say(f"{device} ({type(error).__name__}: {reason[:200]})")
        return OF_TORCH
    return kernels


@functools.cache  # once, whatever items there are
def _say(what: str) -> None:
    logger.warning(
        "weights: what changed is found by torch, a few times slower than by Triton's kernels, which do not run on %s",
        what,
    )


def _try(kernels: Kernels, device: Any, item: Any) -> None:
    """Compiles. Raises RuntimeError when what is found is not what changed."""
    import torch

    old = torch.arange(10_000, dtype=torch.int64, device=device) * 0x0123_4567_89AB_CDEF
    new = old.clone()
    for step, bit in ((3, 0), (7, 21), (11, 42), (13, 63)):
        new[::step] ^= torch.tensor(1, device=device) << bit
    right, found = (
        (*changed, *way.planes(*changed))
        for way in (OF_TORCH, kernels)
        for changed in [way.changes(old, new, item)]
    )
    if not all(torch.equal(*each) for each in zip(right, found, strict=True)):
        raise RuntimeError(f"a trial with items of {item} found other changes than torch does")
