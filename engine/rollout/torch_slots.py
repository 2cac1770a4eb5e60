"""Rows that decode together: a key-value cache with one row per request, each as long as that request is.

    slot   0 [prompt of A][tokens of A]·······
           1 [prompt of B]·····················     ← a row joins with one prefill, and leaves by a copy of the
           2 [prompt of C][tokens of C]···          last row over it; nothing is ever shifted or re-padded

The model sees it as an ordinary Hugging Face cache: a layer's `update` writes the new key and value at each row's own
position and gives the used part back, and a mask hides what lies behind it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache, DynamicLayer

_GROW_ROWS, _GROW_LENGTH = 16, 64


class _SlotLayer(DynamicLayer):
    """One layer's keys and values, [rows, heads, length, head size], and where the coming token goes."""

    def __init__(self, slots: Slots) -> None:
        super().__init__()
        self._slots = slots

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        slots = self._slots
        n, length = slots.n_rows, slots.used_length
        assert self.keys is not None and self.values is not None
        self.keys[slots.row_index, :, slots.position_index] = key_states[:, :, 0]
        self.values[slots.row_index, :, slots.position_index] = value_states[:, :, 0]
        return self.keys[:n, :, :length], self.values[:n, :, :length]

    def write(self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Fill rows from a prefill: keys and values [len(rows), heads, prefilled length, head size]."""
        self._fit(keys, values)
        assert self.keys is not None and self.values is not None
        length = keys.shape[2]
        self.keys[rows, :, :length] = keys
        self.values[rows, :, :length] = values

    def grow(self) -> None:
        if self.keys is not None and self.values is not None:
            self._fit(self.keys, self.values)

    def _fit(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        rows, length = self._slots.rows_capacity, self._slots.length_capacity
        if self.keys is not None and self.keys.shape[0] >= rows and self.keys.shape[2] >= length:
            return
        for name, like in (("keys", keys), ("values", values)):
            grown = like.new_zeros((rows, like.shape[1], length, like.shape[3]))
            held = getattr(self, name)
            if held is not None:
                grown[: held.shape[0], :, : held.shape[2]] = held
            setattr(self, name, grown)
        self.device, self.is_initialized = keys.device, True

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if self.keys is not None and self.values is not None:
            self.keys[target] = self.keys[source]
            self.values[target] = self.values[source]


class Slots(Cache):
    """Rows 0 … n_rows-1 are in use. `lengths[i]` tokens of row i are in the cache."""

    def __init__(self, n_layers: int, device: torch.device, *, use_bool_mask: bool = True) -> None:
        super().__init__(layers=[_SlotLayer(self) for _ in range(n_layers)])
        self._device, self._use_bool_mask = device, use_bool_mask
        self.n_rows = 0
        self.rows_capacity, self.length_capacity = 0, 0
        self.lengths: NDArray[np.int64] = np.zeros(0, np.int64)
        self.row_index = self.position_index = torch.zeros(0, dtype=torch.int64)
        self.used_length = 0

    def begin(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Before a decode forward: (positions [n, 1], mask [n, 1, 1, used length]) of the coming tokens."""
        n = self.n_rows
        lengths = self.lengths[:n]
        self.used_length = int(lengths.max()) + 1
        self._reserve(n, self.used_length)
        self.position_index = torch.from_numpy(lengths.copy()).to(self._device)
        self.row_index = torch.arange(n, device=self._device)
        places = torch.arange(self.used_length, device=self._device)
        mask = (places <= self.position_index[:, None])[:, None, None]
        if not self._use_bool_mask:
            mask = torch.zeros(mask.shape, device=self._device).masked_fill_(
                ~mask, torch.finfo(torch.float32).min
            )
        return self.position_index[:, None], mask

    def end(self) -> None:
        """After it: each row is one token longer."""
        self.lengths[: self.n_rows] += 1

    def join(self, prefilled: Any, take: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        """Take the rows `take` of a prefill's cache as new rows, `lengths` tokens of each."""
        first = self.n_rows
        self._reserve(first + len(take), int(lengths.max()))
        self.n_rows += len(take)
        self.lengths[first : self.n_rows] = lengths
        self.overwrite(np.arange(first, self.n_rows), prefilled, take)

    def overwrite(self, rows: NDArray[np.int64], prefilled: Any, take: NDArray[np.int64]) -> None:
        """Fill rows from the rows `take` of a prefill of the same lengths (under other weights, say)."""
        target, source = (torch.from_numpy(each).to(self._device) for each in (rows, take))
        for layer, filled in zip(self.layers, prefilled.layers, strict=True):
            layer.write(target, filled.keys[source], filled.values[source])  # pyright: ignore

    def leave(self, gone: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Free rows; the last ones move into the holes. Returns (source, target) of the moves."""
        kept = self.n_rows - len(gone)
        target = gone[gone < kept]
        tail = np.arange(kept, self.n_rows)
        source = tail[~np.isin(tail, gone)]
        if len(source):
            to_source, to_target = (torch.from_numpy(each).to(self._device) for each in (source, target))
            for layer in self.layers:
                layer.move(to_source, to_target)  # pyright: ignore[reportAttributeAccessIssue]
            self.lengths[target] = self.lengths[source]
        self.n_rows = kept
        return source, target

    def _reserve(self, rows: int, length: int) -> None:
        """Make room; grows by half at least, so that growing stays rare."""
        if rows > self.rows_capacity:
            self.rows_capacity = max(rows, self.rows_capacity * 3 // 2, _GROW_ROWS)
            lengths = np.zeros(self.rows_capacity, np.int64)
            lengths[: len(self.lengths)] = self.lengths
            self.lengths = lengths
        if length > self.length_capacity:
            self.length_capacity = max(length, self.length_capacity * 3 // 2, _GROW_LENGTH)
        for layer in self.layers:
            layer.grow()  # pyright: ignore[reportAttributeAccessIssue]
