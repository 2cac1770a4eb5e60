"""Whole weights out of a sharded model, a bucket at a time.

    shards of some weights, in the published dtype ─► one send buffer ─► all-gather ─► each weight, put together

Buffers are made once and used for every bucket and every version, so memory stays flat: a bucket of shards, a bucket
of all shards, and the largest weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.trainer.parts import Processes


class _Piece(NamedTuple):
    """One weight in a bucket."""

    name: str
    shape: torch.Size
    begin: int  # of its shard in the send buffer, elements
    chunk: int  # elements of the largest shard


class FullWeights:
    """`layout` says what comes; `gather` is collective, and what it yields is valid until the next is asked for."""

    def __init__(
        self,
        model: nn.Module,
        shards: Mapping[str, Tensor],
        dtype: str,
        processes: Processes,
        bucket_bytes: int,
    ) -> None:
        """`bucket_bytes`: of whole weights; a larger one has a bucket of its own."""
        self._shards, self._processes = shards, processes
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._parameters = dict(model.named_parameters())
        self._buffers = {
            name: value for name, value in model.state_dict().items() if name in dict(model.named_buffers())
        }
        self.layout = self._layout(model)
        self._buckets = self._planned(bucket_bytes // self._dtype.itemsize)
        self._room: tuple[Tensor, Tensor, Tensor] | None = None

    def gather(self) -> Iterator[tuple[str, Tensor]]:
        """One after the other, in the published dtype, on the device."""
        for bucket in self._buckets:
            yield from self._alone(bucket) if self._processes.size == 1 else self._of_all(bucket)
        yield from self._buffers.items()

    @torch.no_grad()
    def _alone(self, bucket: list[_Piece]) -> Iterator[tuple[str, Tensor]]:
        for piece in bucket:
            yield piece.name, self._shards[piece.name].to(self._dtype)

    @torch.no_grad()
    def _of_all(self, bucket: list[_Piece]) -> Iterator[tuple[str, Tensor]]:
        send, received, whole = self._rooms()
        size, used = self._processes.size, bucket[-1].begin + bucket[-1].chunk
        for piece in bucket:
            shard = self._shards[piece.name].reshape(-1)
            send[piece.begin : piece.begin + shard.numel()].copy_(shard)
        dist.all_gather_into_tensor(received[: size * used], send[:used])
        by_rank = received[: size * used].view(size, used)
        for piece in bucket:
            full = whole[: size * piece.chunk]
            full.view(size, piece.chunk).copy_(by_rank[:, piece.begin : piece.begin + piece.chunk])
            yield piece.name, full[: piece.shape.numel()].view(piece.shape)

    def _rooms(self) -> tuple[Tensor, Tensor, Tensor]:
        if self._room is None:
            size = self._processes.size
            send = max(bucket[-1].begin + bucket[-1].chunk for bucket in self._buckets)
            largest = max(piece.chunk for bucket in self._buckets for piece in bucket)
            send_room, received, whole = (
                torch.zeros(count, dtype=self._dtype, device=self._processes.device)
                for count in (send, size * send, size * largest)
            )
            self._room = send_room, received, whole
        return self._room

    def _planned(self, most_elements: int) -> list[list[_Piece]]:
        size, buckets, used = self._processes.size, [], 0
        for name, parameter in self._parameters.items():
            chunk = math.ceil(parameter.shape[0] / size) * parameter.shape[1:].numel()
            if not buckets or (used + chunk) * size > most_elements:
                buckets.append([])
                used = 0
            buckets[-1].append(_Piece(name, parameter.shape, used, chunk))
            used += chunk
        return buckets

    def _layout(self, model: nn.Module) -> dict[str, Tensor]:
        """In the order of the model's state; tied names have the same tensor object."""
        made: dict[int, Tensor] = {}
        found = {}
        for name, value in model.state_dict(keep_vars=True).items():
            if id(value) not in made:
                dtype = self._dtype if value.is_floating_point() else value.dtype
                made[id(value)] = torch.empty(value.shape, dtype=dtype, device="meta")
            found[name] = made[id(value)]
        return found
