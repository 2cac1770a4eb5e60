"""The state of a sharded trainer in a checkpoint's folder: whole tensors, whichever rank holds which part of them.

    model/, optimizer/        torch.distributed.checkpoint: `.metadata` and a file of each rank, for any number to read
    rng-<rank>.safetensors    one rank's own generators
    ranks.json                how many ranks saved

Copies are taken at once; files are written later, from a thread of each rank, over a process group of its own. What is
one rank's own is kept under its rank: under one name for all, every rank would go on with the state of rank 0.

`.metadata` is a pickle (torch's format): read only folders whose digest the ledger names.
"""

from __future__ import annotations

import json
import logging
import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from engine.interfaces import CheckpointError
from engine.trainer.host_memory import Rooms
from engine.trainer.parts import Processes
from engine.trainer.torch_backend import MODEL_FILE, OPTIMIZER_FILE
from engine.trainer.torch_state import (
    moments_of,
    read_json,
    read_tensors,
    rng_state,
    set_rng_state,
    write_tensors,
)

logger = logging.getLogger(__name__)

MODEL, OPTIMIZER, RANKS_FILE = "model", "optimizer", "ranks.json"
_METADATA = ".metadata"


class Sharded(Protocol):
    """A policy whose parameters are cut over the ranks along their first dimension."""

    parameters: dict[str, Any]  # DTensors
    shards: dict[str, Tensor]  # this rank's rows of each
    optimizer: torch.optim.AdamW


class ShardedState:
    """`snapshot` and `load` of engine/trainer/parts.py, RankPart. `load` takes the files of the torch trainer too."""

    def __init__(self, model: nn.Module, policy: Sharded, processes: Processes) -> None:
        self._policy, self._processes = policy, processes
        buffers = dict(model.named_buffers())
        self._buffers = {name: buffers[name] for name in model.state_dict() if name in buffers}
        first: dict[int, str] = {}
        self._tied = {  # name → the first name of the same parameter
            name: first.setdefault(id(value), name)
            for name, value in model.state_dict(keep_vars=True).items()
        }
        self._rooms = Rooms(processes.device)
        self._mesh = init_device_mesh("cpu", (processes.size,))  # of the copies

    def snapshot(self) -> Callable[[Path, Any], None]:
        parts = {MODEL: self._policy.shards | self._buffers, OPTIMIZER: self._moments()}
        live = {f"{part}/{name}": tensor for part, of in parts.items() for name, tensor in of.items()}
        layout = {key: torch.empty_like(tensor, device="meta") for key, tensor in live.items()}
        copies = self._rooms.gather(layout, live.items())
        model, optimizer = (
            {name: self._as_part_of(self._parameter(name), copies[f"{part}/{name}"]) for name in of}
            for part, of in parts.items()
        )
        rng = {name: tensor.clone() for name, tensor in rng_state(self._processes.device).items()}
        rank, size = self._processes.rank, self._processes.size

        def write(folder: Path, group: Any) -> None:
            save(folder / MODEL, model, group)
            save(folder / OPTIMIZER, optimizer, group)
            write_tensors(folder / rng_file(rank), rng)
            if rank == 0:
                (folder / RANKS_FILE).write_text(json.dumps({"ranks": size}) + "\n", encoding="utf-8")

        return write

    def load(self, folder: Path, *, fresh_optimizer: bool = False) -> None:
        """Raises CheckpointError, on all ranks or on none, and then nothing has changed."""
        failure: CheckpointError | None = None
        settle: Callable[[], None] | None = None
        try:
            settle = self._read(folder, fresh_optimizer)
        except CheckpointError as error:
            failure = error
        failed = np.flatnonzero(self._processes.gather([0.0 if failure is None else 1.0])[:, 0])
        if failure is not None:
            logger.error("trainer, rank %d: %s", self._processes.rank, failure)
            raise failure
        if len(failed):
            raise CheckpointError(f"{folder}: rank {failed[0]} cannot read its part; its log says why")
        assert settle is not None
        settle()

    def _read(self, folder: Path, fresh_optimizer: bool) -> Callable[[], None]:
        """All of it in memory, or CheckpointError; what is returned puts it in place."""
        own, moments = self._policy.shards | self._buffers, self._moments()
        rng = None
        if (
            folder / MODEL_FILE
        ).exists():  # of the torch trainer: whole tensors, of which each rank takes its rows
            weights = self._cut(folder / MODEL_FILE, {name: own[of] for name, of in self._tied.items()})
            read = None if fresh_optimizer else self._cut(folder / OPTIMIZER_FILE, moments)
        else:
            weights = self._loaded(folder / MODEL, own)
            read = None if fresh_optimizer else self._loaded(folder / OPTIMIZER, moments)
            rng = None if fresh_optimizer else self._rng(folder)

        @torch.no_grad()
        def settle() -> None:
            for name, tensor in own.items():
                tensor.copy_(weights[name])
            for name, tensor in moments.items():
                tensor.zero_() if read is None else tensor.copy_(read[name])
            if rng is not None:
                set_rng_state(rng, self._processes.device)

        return settle

    def _rng(self, folder: Path) -> dict[str, Tensor] | None:
        """This rank's own; None where fewer ranks saved, so that it never had any."""
        saved_by = read_json(folder / RANKS_FILE).get("ranks")
        if not isinstance(saved_by, int) or saved_by < 1:
            raise CheckpointError(f"{folder / RANKS_FILE}: ranks is {saved_by!r}, a count is needed")
        if self._processes.rank >= saved_by:
            return None
        return read_tensors(folder / rng_file(self._processes.rank), rng_state(self._processes.device))

    def _loaded(self, folder: Path, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of each of `own`, this rank's part, in main memory."""
        room = {
            name: self._as_part_of(self._parameter(name), torch.empty_like(tensor, device="cpu"))
            for name, tensor in own.items()
        }
        load(folder, room)
        return {name: _local(tensor) for name, tensor in room.items()}

    def _cut(self, path: Path, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        wanted = {name: self._whole_like(name, tensor) for name, tensor in own.items()}
        found = read_tensors(path, wanted)
        return {name: self._rows_of(name, found[name], own[name]) for name in own}

    # ---------------------------------------------------------------- parts
    def _parameter(self, name: str) -> str:
        """`exp_avg/<parameter>` or a tied name → the parameter."""
        name = name.partition("/")[2] or name
        return self._tied.get(name, name)

    def _moments(self) -> dict[str, Tensor]:
        return moments_of(self._policy.optimizer, self._policy.shards)

    def _as_part_of(self, parameter: str, local: Tensor) -> Tensor:
        """A local tensor as this rank's rows of what its parameter is; scalars and buffers are the same on all."""
        whole = self._policy.parameters.get(parameter)
        if whole is None or local.shape != self._policy.shards[parameter].shape or not local.ndim:
            return local
        return DTensor.from_local(
            local, self._mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def _whole_like(self, name: str, local: Tensor) -> Tensor:
        part = self._as_part_of(self._parameter(name), torch.empty_like(local, device="cpu"))
        return torch.empty(part.shape, dtype=local.dtype, device="meta")

    def _rows_of(self, name: str, whole: Tensor, local: Tensor) -> Tensor:
        if self._parameter(name) not in self._policy.parameters or not local.ndim:
            return whole
        rows = -(-whole.shape[0] // self._processes.size)
        begin = min(self._processes.rank * rows, whole.shape[0])
        return whole[begin : begin + len(local)]


def rng_file(rank: int) -> str:
    return f"rng-{rank}.safetensors"


def save(folder: Path, tensors: Mapping[str, Tensor], group: Any) -> None:
    """Collective over `group`. Raises CheckpointError or OSError."""
    writer = FileSystemWriter(folder, single_file_per_rank=True)
    try:
        state_dict_saver.save(dict(tensors), storage_writer=writer, process_group=group)
    except CheckpointException as error:
        raise CheckpointError(f"{folder}: {_first_of(error)}") from error


def load(folder: Path, room: dict[str, Tensor]) -> None:
    """Fill `room` in place with the tensors of these names, this rank's parts of those that are DTensors.

    Each rank reads for itself. Raises CheckpointError for what is missing, unknown, or of another shape or type.
    """
    reader = FileSystemReader(folder)
    if not (folder / _METADATA).is_file():
        raise CheckpointError(f"{folder}: is missing")
    try:
        found = reader.read_metadata().state_dict_metadata
        _compare(folder, found, room)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # it is not asked
            state_dict_loader.load(dict(room), storage_reader=reader, no_dist=True)
    except (OSError, EOFError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{folder}: cannot be read ({error})") from error
    except CheckpointException as error:
        raise CheckpointError(f"{folder}: cannot be read ({_first_of(error)})") from error


def _compare(folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Tensor]) -> None:
    for what, names in (
        ("lacks", wanted.keys() - found.keys()),
        ("has the unknown", found.keys() - wanted.keys()),
    ):
        if names:
            raise CheckpointError(f"{folder}: {what} {', '.join(sorted(names)[:4])} ({len(names)} in all)")
    for name, tensor in wanted.items():
        entry = found[name]
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{folder}: {name} is no tensor")
        dtype, shape = entry.properties.dtype, list(entry.size)
        if shape != list(tensor.shape) or dtype != tensor.dtype:
            raise CheckpointError(
                f"{folder}: {name} is {dtype} {shape}, needed {tensor.dtype} {list(tensor.shape)}"
            )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _first_of(error: Any) -> str:
    """The first rank's reason, without its traceback."""
    rank, failure = min(error.failures.items())
    return f"rank {rank}: {failure[0]}"
