"""Where two arrays of a GPU differ, by kernels of Triton. Imported where Triton is, by engine/weights/delta_words.py.

    old, new ─► compare: a bit for each item that differs, how many in each part ─► sums ─► collect ─► places, values
    places, values ─► split: gaps and values, in planes of bytes

All weights are read once, by `compare`; `collect` reads its bits, and of the weights the words that changed. A word is
8 bytes: 4 items of bf16, 2 of float32. Places and sums are 32 bits wide.
"""

# pyright: reportGeneralTypeIssues=false
# (static_range cannot be iterated over by Python: the compiler unrolls it)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from engine.devices.launching import current

PART = 256  # words whose changes are counted together: 8 for each thread of a warp
PARTS = 4  # of one program
ROW = 256  # changes of one program of `split`

# without the last, Triton 3.9 warns of a default that will change; nothing here is a float
_COMPARE = {"PART": PART, "PARTS": PARTS, "num_warps": PARTS, "enable_fp_fusion": False}
_COLLECT = {"PART": PART, "PARTS": PARTS, "num_warps": 1, "enable_fp_fusion": False}
_SPLIT = {"ROW": ROW, "num_warps": ROW // 32, "enable_fp_fusion": False}


def changes(old: Any, new: Any, item: Any) -> tuple[Any, Any]:
    """What changed: (places in items, int32 [n], ascending; new values, `item` [n]).

    `old`, `new`: int64 [words], contiguous, on one GPU (in main memory under TRITON_INTERPRET=1); fewer than 2^31 items
    in all. `item`: an integer type of torch, as wide as an item. On the current stream, for which it waits once.
    """
    bits, device, n_words = 8 * item.itemsize, old.device, len(old)
    programs = triton.cdiv(n_words, PARTS * PART)
    masks = torch.empty(n_words, dtype=torch.uint8, device=device)
    counts = torch.empty(programs * PARTS, dtype=torch.int32, device=device)
    with current(device):
        compare[(programs,)](old, new, masks, counts, n_words, BITS=bits, **_COMPARE)
        ends = counts.cumsum(0, dtype=torch.int32)
        n = int(ends[-1])
        places = torch.empty(n, dtype=torch.int32, device=device)
        values = torch.empty(n, dtype=item, device=device)
        if n:
            collect[(programs,)](masks, new, ends, places, values, n_words, 1, BITS=bits, **_COLLECT)
    return places, values


def planes(places: Any, values: Any) -> tuple[Any, Any]:
    """What engine/weights/delta_words.py says of `planes`. Waits for nothing."""
    n, item, device = len(places), values.itemsize, places.device
    made = torch.empty((item + 4, n), dtype=torch.uint8, device=device)
    programs = triton.cdiv(n, ROW)
    widest = torch.empty(programs, dtype=torch.int32, device=device)
    with current(device):
        split[(programs,)](places, values, made, widest, n, ITEM=item, **_SPLIT)
    return made, widest.max()


@triton.jit
def compare(old, new, masks, counts, n_words, BITS: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr):
    """masks[word]: bit k is set where its item k differs; counts[part]: how many items differ."""
    program = tl.program_id(0)
    at = program * (PARTS * PART) + tl.arange(0, PARTS * PART)
    inside = at < n_words
    differ = tl.load(old + at, mask=inside, other=0) ^ tl.load(new + at, mask=inside, other=0)
    mask = tl.zeros((PARTS * PART,), tl.int32)
    count = tl.zeros((PARTS * PART,), tl.int32)
    for lane in tl.static_range(64 // BITS):
        is_other = (((differ >> (lane * BITS)) << (64 - BITS)) != 0).to(tl.int32)
        mask += is_other << lane
        count += is_other
    tl.store(masks + at, mask.to(tl.uint8), mask=inside)
    sums = tl.sum(tl.reshape(count, (PARTS, PART)), axis=1)
    tl.store(counts + program * PARTS + tl.arange(0, PARTS), sums)


@triton.jit(do_not_specialize=["step"])
def collect(
    masks, new, ends, places, values, n_words, step,
    BITS: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Places and values of the items whose bits are set, in order. ends[part]: items that differ up to its end.

    `step` is 1, which the compiler must not know: it gives each thread 8 neighbours then, and moves everything between
    threads before each of the stores.
    """
    for each in range(PARTS):
        part = tl.program_id(0) * PARTS + each
        at = part * PART + tl.arange(0, PART) * step
        mask = tl.load(masks + at, mask=at < n_words, other=0).to(tl.int32)
        word = tl.load(new + at, mask=mask != 0, other=0)
        count = tl.zeros((PART,), tl.int32)
        for lane in tl.static_range(64 // BITS):
            count += (mask >> lane) & 1
        to = tl.load(ends + part - 1, mask=part > 0, other=0) + tl.cumsum(count, axis=0) - count
        for lane in tl.static_range(64 // BITS):
            is_other = (mask >> lane) & 1
            value = (word >> (lane * BITS)).to(values.dtype.element_ty)
            tl.store(places + to, at * (64 // BITS) + lane, mask=is_other != 0)
            tl.store(values + to, value, mask=is_other != 0)
            to += is_other


@triton.jit(do_not_specialize=["n"])
def split(places, values, planes, widest, n, ITEM: tl.constexpr, ROW: tl.constexpr):
    """planes[k, change]: byte k of its value, then of the items between it and the change before."""
    program = tl.program_id(0)
    at = program * ROW + tl.arange(0, ROW)
    inside = at < n
    gap = tl.load(places + at, mask=inside, other=0) - 1
    gap -= tl.load(places + at - 1, mask=inside & (at > 0), other=0)
    value = tl.load(values + at, mask=inside, other=0)
    length = n.to(tl.int64)  # so many planes may have more than 2^31 bytes
    for plane in tl.static_range(ITEM):
        tl.store(planes + length * plane + at, (value >> (8 * plane)).to(tl.uint8), mask=inside)
    for plane in tl.static_range(4):
        tl.store(planes + length * (ITEM + plane) + at, (gap >> (8 * plane)).to(tl.uint8), mask=inside)
    tl.store(widest + program, tl.max(gap, axis=0))
