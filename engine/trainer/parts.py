"""The seam of a sharded trainer: what one of its processes must answer.

    rank 0   TrainerBackend (engine/trainer/ranked_backend.py) ── commands ──► followers (engine/trainer/follower.py)
                        │                                                              │
                        ▼                                                              ▼
                     RankPart  ◄── the collectives of its own library (NCCL, Gloo) ──► RankPart

Rank 0 plans each step, gives each rank the rows of its data-parallel share, and every rank runs the same Stepper over
its part's policy. All that is not about sharding happens above: plans, losses, learning rates, bad steps, commands,
deadlines, the death of a rank, the counter of optimizer steps. A backend is one class with these few methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.algorithms.logprobs import MicroBatch
from engine.trainer.policy import Policy
from engine.trainer.torch_backend import Limits
from engine.trainer.torch_settings import TorchSettings
from engine.weights.bucketing import BUCKET_BYTES
from streams.errors import ConfigError


class DataParallel(NamedTuple):
    """Which share of a batch's rows a process takes. Ranks of one tensor- or pipeline-parallel group take the same."""

    rank: int
    size: int


class Processes(Protocol):
    """All processes of the trainer, on one host or many. Torch's default group is theirs (`cpu:gloo` and, where there
    is a device, its own library)."""

    rank: int
    size: int
    device: torch.device  # of this process

    def gather(self, values: Sequence[float]) -> NDArray[np.float64]:
        """Collective: the values of every rank, [size, k], the same on all."""
        ...

    def most(self, count: int) -> int:
        """Collective: the largest of the ranks' counts."""
        ...


class PartSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What every rank makes its part from; rank 0 sends it to the others."""

    backend: str  # "fsdp2", "megatron"
    model: str  # folder, the same on every host
    torch: TorchSettings  # its device is the first one of each host
    options: dict[str, Any]  # the backend's own table of [trainer], as plain values
    bucket_bytes: int = BUCKET_BYTES  # of whole weights put together at a time


def make_part(settings: PartSettings, processes: Processes) -> RankPart:
    """Collective. Raises ConfigError for what cannot be done."""
    if settings.backend == "fsdp2":
        from engine.trainer.fsdp2 import Fsdp2Part

        return Fsdp2Part(settings, processes)
    if settings.backend == "megatron":
        from engine.trainer.megatron.start import megatron_part

        return megatron_part(settings, processes)
    raise ConfigError(
        f"trainer.backend = {settings.backend!r}: no trainer of several ranks; known: fsdp2, megatron"
    )


class RankPart(Protocol):
    """One process's piece of the model, its optimizer and its random generators.

    Made on every rank with the same settings; torch's default process group is there by then. "Collective": every rank
    makes this call, in the same order among such calls, from its main thread. A part begins with the weights of
    model.path and an optimizer that has taken no step.
    """

    policy: Policy
    limits: Limits  # of the whole model; asked on rank 0 alone
    data_parallel: DataParallel
    speaks: bool
    """Whether it answers for its data-parallel rank: one process of each does, and it is one that sees the losses.

    Log-probs and sums are taken from these alone (megatron: tensor-parallel rank 0 of the last pipeline stage).
    """

    @property
    def layout(self) -> Mapping[str, Tensor]:
        """All weights as they are published: Hugging Face name → tensor on the `meta` device (shape and dtype).

        Names that are tied map to the same tensor object. Asked on rank 0 alone; costs nothing.
        """
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Collective: full tensors by Hugging Face name, as in `layout`; of those that are tied the first alone.

        Rank 0 gets each of them, on any device; each is valid until the next is asked for, so buffers may be used
        again, and no more than a bucket of them lies in memory at a time. The other ranks iterate to the end as well;
        what they get is not looked at, and it may be nothing.
        """
        ...

    def snapshot(self) -> Callable[[Path, torch.distributed.ProcessGroup], None]:
        """Collective: copies in main memory of all that the next step depends on: weights, optimizer, generators.

        The function returned is called on every rank, later and on another thread, while training goes on. It writes
        this rank's files into the folder, which exists and is the same on all ranks (shared over hosts). It may use
        the process group given to it (Gloo, of all ranks, only for this) and no other. File names differ between
        ranks. State that is one rank's own (generators) is kept under its rank. What counts optimizer steps is not
        part of it: trainer.json is written above.
        """
        ...

    def load(self, folder: Path, *, fresh_optimizer: bool = False) -> None:
        """Collective: put that state back, whole or not at all, also when other numbers of ranks saved it.

        `fresh_optimizer` takes the weights alone and starts the optimizer anew, whatever the folder holds. Raises
        CheckpointError, on all ranks alike, naming the part that is missing or does not fit.
        """
        ...


def padded(micros: Sequence[MicroBatch], count: int, device: torch.device) -> list[MicroBatch]:
    """The same micro-batches, and empty ones (one token is fed, none trained) up to `count`.

    Where a forward is collective, every rank must make as many: `count` is the most that any of them has.
    """
    return [*micros, *(empty(device) for _ in range(count - len(micros)))]


def empty(device: torch.device) -> MicroBatch:
    """A forward of one token, of which none is trained: its loss is an empty sum, its gradient 0."""
    none = torch.empty(0, dtype=torch.int64, device=device)
    fed = torch.zeros((1, 1), dtype=torch.int64, device=device)
    return MicroBatch(ids=fed, positions=none, targets=none, tokens=np.empty(0, np.int64))
