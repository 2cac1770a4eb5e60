"""The processes of one trainer: how they meet, what they ask each other, which device each has.

    alone          one process, no connection
    followers      rank 0 starts n − 1 processes of its own on this machine (engine/trainer/followers.py)
    torchrun       every process was started with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, over any hosts

In the second case rank 0 hands these same variables to its followers, so that there is one way to meet: a TCPStore.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.distributed_c10d import Store

from engine import devices
from engine.trainer.parts import RankPart
from streams.errors import ConfigError

MEET = timedelta(minutes=10)  # for all processes to be there: they load torch, perhaps from a slow disk
COLLECTIVE = timedelta(minutes=30)  # longest wait for the other ranks in one collective
c10d: Any = dist  # its stores are not among its exported types


class Place(NamedTuple):
    """One process among all."""

    rank: int
    size: int
    local_rank: int  # on its host
    address: str  # of the store
    port: int
    hosts_store: bool
    prefix: str  # of the store's keys: torchrun uses one store for all its attempts


def place_of(environ: Mapping[str, str]) -> Place | None:
    """Where torchrun (or whatever sets its variables) has put this process; None: nobody has.

    Raises ConfigError when they are not whole.
    """
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    try:
        rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        return Place(
            rank,
            size,
            int(environ.get("LOCAL_RANK", rank)),
            environ["MASTER_ADDR"],
            int(environ["MASTER_PORT"]),
            hosts_store=rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            prefix=f"millstream/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        )
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"RANK and WORLD_SIZE are set, but not all of what goes with them ({error!r}): torchrun sets RANK, "
            "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; unset RANK if this trainer was not started by it"
        ) from error


def variables(place: Place) -> dict[str, str]:
    """The same, for a process that is started at this place."""
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.size),
        "LOCAL_RANK": str(place.local_rank),
        "MASTER_ADDR": place.address,
        "MASTER_PORT": str(place.port),
        "TORCHELASTIC_USE_AGENT_STORE": str(not place.hosts_store),
    }


def store_of(place: Place) -> Store:
    """The store at which all meet."""
    store = c10d.TCPStore(
        place.address,
        place.port,
        is_master=place.hosts_store,
        timeout=MEET,
        wait_for_workers=False,
    )
    return c10d.PrefixStore(place.prefix, store)


def device_of(first: str, local_rank: int) -> torch.device:
    """`cuda` → cuda:<local rank>; `cuda:2` → that many after the second. The CPU is one for all.

    Raises ConfigError when this host has none, or fewer.
    """
    return devices.ready(first).at(local_rank, "model.device").torch


class ProcessGroup:
    """All processes (engine/trainer/parts.py, Processes), and torch's default group of them while it lives.

    `sums` and `saving` are groups of their own, over Gloo: the second is for a thread that writes checkpoints while
    the main thread trains.
    """

    def __init__(self, rank: int, size: int, device: torch.device, store: Store | None) -> None:
        self.rank, self.size, self.device = rank, size, device
        if dist.is_initialized():
            raise RuntimeError("torch.distributed is in use in this process already")
        own = devices.named(device)
        own.use()
        dist.init_process_group(
            own.group_backend,
            device_id=own.group_device_id,
            store=c10d.HashStore() if store is None else store,
            rank=rank,
            world_size=size,
            timeout=COLLECTIVE,
        )
        self.sums: Any = dist.new_group(backend="gloo", timeout=COLLECTIVE) if size > 1 else None
        self.saving: Any = dist.new_group(backend="gloo", timeout=COLLECTIVE)

    def gather(self, values: Sequence[float]) -> NDArray[np.float64]:
        own = torch.tensor(list(values), dtype=torch.float64)
        if self.size == 1:
            return own[None].numpy()
        every = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(every, own, group=self.sums)
        return torch.stack(every).numpy()

    def most(self, count: int) -> int:
        return int(self.gather([count]).max())

    def close(self) -> None:
        dist.destroy_process_group()


class DataParallelRanks:
    """The data-parallel ranks of a step (engine/trainer/policy.py, Ranks). Collective when it is made."""

    def __init__(self, processes: ProcessGroup, part: RankPart) -> None:
        self.rank, self.size = part.data_parallel
        self._processes = processes
        self.shares = processes.gather([self.rank, float(part.speaks)])  # [processes, 2]
        speakers = np.flatnonzero(self.shares[:, 1])
        self.speakers = speakers[np.argsort(self.shares[speakers, 0])]  # process of each data-parallel rank

    def sum(self, values: Sequence[float]) -> list[float]:
        every = self._processes.gather(values)[self.speakers]
        total = np.zeros(every.shape[1])
        for each in every:  # in the order of ranks, whatever numpy would do
            total = total + each
        return total.tolist()
