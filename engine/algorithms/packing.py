"""Packing: rows laid one after another in one forward, each attending to itself alone.

    rows of 5, 2 and 3 tokens ──► ids [1, 10], position ids 0 1 2 3 4 0 1 0 1 2, starts 0 5 7 10
                                         └─► `attend`: causal attention within each row

No token is padding, so a forward of T tokens does the work of T tokens, whatever the rows' lengths. `attend` takes the
place of the model's attention function (transformers' AttentionInterface). In half precision on CUDA it is the
variable-length kernel that comes with torch (FlashAttention-2, arXiv 2307.08691); elsewhere one call of
scaled_dot_product_attention per row, which never makes a T × T mask. Models loaded with flash_attention_2 or _3 keep
those, which take the same row starts.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from engine import devices

ATTENTION = "millstream_packed"
_OF_THEIR_OWN = ("flash_attention_2", "flash_attention_3")


def use_in(model: Any) -> None:
    """Let a Hugging Face model take packed rows. Raises ValueError where its attention cannot be replaced."""
    from transformers import AttentionInterface

    if model.config._attn_implementation in _OF_THEIR_OWN:
        return
    AttentionInterface.register(ATTENTION, attend)
    model.set_attn_implementation(ATTENTION)
    if model.config._attn_implementation != ATTENTION:
        raise ValueError(f"{type(model).__name__} does not let its attention be replaced")


def row_arguments(
    position_ids: Tensor, starts: Tensor, bounds: Sequence[int], longest: int
) -> dict[str, Any]:
    """What the model is called with beside the ids: int64 [1, T], int32 [rows + 1], the same on the host, tokens."""
    return {
        "position_ids": position_ids,
        "cu_seq_lens_q": starts,
        "cu_seq_lens_k": starts,
        "max_length_q": longest,
        "max_length_k": longest,
        "row_bounds": bounds,
    }


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    row_bounds: Sequence[int] | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each row; [B, heads, T, D] → [B, T, heads, D]. Without row starts each of the B is one.

    Raises ValueError for what a model asks beyond that (soft-capped scores, sinks), which would be left out silently.
    """
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None]
    if unknown or dropout:
        raise ValueError(
            f"trainer.packing: {type(module).__name__} asks for {', '.join(unknown) or 'dropout'}, which packed "
            'attention does not have; set trainer.packing = false, or model.attn_implementation = "flash_attention_2"'
        )
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype
    query, key, value = (each.to(dtype) for each in (query, key, value))
    if cu_seq_lens_q is None:
        return _of_row(query, key, value, scaling, sliding_window).transpose(1, 2), None
    if query.dtype in (torch.bfloat16, torch.float16) and devices.named(kind).has_varlen_attention:
        return _varlen(query, key, value, cu_seq_lens_q, max_length_q, scaling, sliding_window), None
    bounds = cu_seq_lens_q.tolist() if row_bounds is None else row_bounds
    lengths = [end - begin for begin, end in pairwise(bounds)]
    queries, keys, values = (each.split(lengths, dim=2) for each in (query, key, value))
    parts = [_of_row(q, k, v, scaling, sliding_window) for q, k, v in zip(queries, keys, values, strict=True)]
    return torch.cat(parts, dim=2).transpose(1, 2), None


def _of_row(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    length = query.shape[2]
    mask = None
    if window is not None and window < length:
        places = torch.arange(length, device=query.device)
        back = places[:, None] - places[None, :]
        mask = (back >= 0) & (back < window)
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    longest: int | None,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """FlashAttention-2 over rows of variable length, as torch has it built in; grouped keys as they are."""
    if longest is None:
        longest = int(starts.diff().max())
    found = torch.ops.aten._flash_attention_forward(
        *(each[0].transpose(0, 1) for each in (query, key, value)),  # [T, heads, D]
        *(starts, starts, longest, longest),
        0.0,  # dropout
        True,  # causal
        False,
        scale=scaling,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )
    return found[0].unsqueeze(0)


def bins(lengths: NDArray[np.int64], capacity: int, count: int = 0) -> list[NDArray[np.int64]]:
    """Places of the rows that go together: sums of at most `capacity`, and as even as can be. A longer row goes alone.

    As few bins as first-fit-decreasing finds, or `count` if that is more: then the rows are spread over all of them,
    and bins are empty only where there are fewer rows. Deterministic. Places ascend in each bin.

    >>> [each.tolist() for each in bins(np.array([5, 2, 3, 4]), 8)]
    [[0, 1], [2, 3]]
    """
    fitted = _first_fit(lengths, capacity)
    even = spread(lengths, max(len(fitted), count))
    if all(lengths[each].sum() <= capacity for each in even if len(each) > 1):
        return even
    return [np.array(sorted(each), np.int64) for each in fitted] + [np.empty(0, np.int64)] * (
        count - len(fitted)
    )


def _first_fit(sizes: NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Longest first, each to the first bin that has room."""
    lengths, order = sizes.tolist(), np.argsort(-sizes, kind="stable").tolist()
    found: list[list[int]] = []
    rooms: list[int] = []
    for place in order:
        at = next((at for at, room in enumerate(rooms) if room >= lengths[place]), -1)
        if at < 0:
            at = len(found)
            found.append([])
            rooms.append(capacity)
        found[at].append(place)
        rooms[at] -= lengths[place]
    return found


def spread(lengths: NDArray[np.int64], count: int) -> list[NDArray[np.int64]]:
    """Places of the rows dealt to `count` bins: longest first, each to the one with the least in it. Places ascend."""
    found: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, at) for at in range(count)]
    for place in np.argsort(-lengths, kind="stable").tolist():
        load, at = loads[0]
        found[at].append(place)
        heapq.heapreplace(loads, (load + int(lengths[place]), at))
    return [np.array(sorted(each), np.int64) for each in found]
