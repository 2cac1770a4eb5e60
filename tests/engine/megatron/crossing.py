"""Results with tensors, from one process to another: as their bytes alone, whatever is attached to them there."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch


def dumps(value: Any) -> bytes:
    """For `pickle.loads`."""
    into = io.BytesIO()
    _Pickler(into).dump(value)
    return into.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return tensor_of, (data, str(value.dtype).removeprefix("torch."), tuple(value.shape))


def tensor_of(data: bytes, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).reshape(shape)
