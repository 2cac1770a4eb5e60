"""Whole weights gathered in main memory, in rooms that are used again.

    tensors, one after the other ─► one room (pinned where there is an accelerator) ─► Snapshot: name → view of it
                                       ▲                                                  │ nobody refers to it any more
                                       └──────────────────────────────────────────────────┘

Fresh memory costs more than the copy into it (pages are made as they are touched, pinning is slower still), so a room
goes back once the last view of it is gone. There are as many as versions are on their way, usually two or three.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine import devices
from engine.weights.tensors import Snapshot


class Rooms:
    """`gather` what a generator yields. Not for several threads at once."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pins = device, devices.named(device).has_pinned_memory()
        self._free: list[Tensor] = []
        self.made = 0

    def gather(self, layout: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]]) -> Snapshot:
        """Copies by the names of `layout`, in its order; names with the same tensor object there share memory.

        `tensors` yields each distinct one of them under any one of its names, on any device; one is read before the
        next is asked for, or in the same stream of its device.
        """
        places: dict[int, Tensor] = {}
        room, at = self._take(_bytes_of(layout)), 0
        for meta in layout.values():
            if id(meta) not in places:
                at += -at % meta.itemsize
                part = room[at : at + meta.nbytes]
                places[id(meta)] = torch.from_numpy(part).view(meta.dtype).reshape(meta.shape)
                at += meta.nbytes
        missing = set(places)
        for name, tensor in tensors:
            places[id(layout[name])].copy_(tensor.detach(), non_blocking=True)
            missing.discard(id(layout[name]))
        if self._device.type != "cpu":
            torch.get_device_module(self._device).current_stream(self._device).synchronize()
        if missing:
            absent = [name for name, meta in layout.items() if id(meta) in missing]
            raise RuntimeError(f"no weights came for {', '.join(absent[:4])} ({len(absent)} in all)")
        return Snapshot((name, places[id(meta)]) for name, meta in layout.items())

    def _take(self, nbytes: int) -> NDArray[np.uint8]:
        fitting = [at for at, room in enumerate(self._free) if room.numel() >= nbytes]
        if fitting:
            room = self._free.pop(fitting[0])
        else:
            room = torch.empty(max(nbytes, 1), dtype=torch.uint8, pin_memory=self._pins)
            self.made += 1
        whole = room.numpy()
        # every view refers to `whole`, none to `room`
        weakref.finalize(whole, self._free.append, room).atexit = False
        return whole


def _bytes_of(layout: Mapping[str, Tensor]) -> int:
    """Enough, whatever is lost between two tensors so that each begins at a multiple of its items."""
    distinct = {id(meta): meta for meta in layout.values()}
    return sum(meta.nbytes + meta.itemsize - 1 for meta in distinct.values())
