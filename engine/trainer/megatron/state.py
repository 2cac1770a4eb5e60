"""A rank's state in memory and on disk, so that ranks that cut the model otherwise can take it up.

    masters, moments ─► pieces of whole tensors, copied ─► torch.distributed.checkpoint (its own group, its own thread)
    generators       ─► rng-<rank>.safetensors

The whole tensors have the same names and shapes for every cut: a piece is a rectangle of one, and who loads asks for
those that it needs. megatron-core's own checkpoints would not do here: they are collective over the groups that a
training step uses at the same time, and start processes.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from engine.interfaces import CheckpointError
from engine.trainer import dcp
from engine.trainer.megatron import hf_weights
from engine.trainer.megatron.held import MOMENTS, Held, Shard
from engine.trainer.megatron.names import Block, blocks
from engine.trainer.megatron.shape import Shape
from engine.trainer.torch_state import read_tensors, rng_state, set_rng_state, write_tensors
from streams.errors import ConfigError

STATE = "megatron"  # folder of torch.distributed.checkpoint
MASTER, STEP = "master", "adam_step"
ALL_KINDS = (MASTER, *MOMENTS)
Rectangles = dict[tuple[int, ...], Tensor]  # offset in the whole → values


class Pieces(Tensor):
    """Rectangles of one whole tensor, as torch.distributed.checkpoint asks for them. It holds no values itself."""

    rectangles: Rectangles

    @staticmethod
    def __new__(cls, shape: Sequence[int], rectangles: Rectangles) -> Pieces:
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=torch.device("cpu"))  # pyright: ignore[reportAttributeAccessIssue]
        made.rectangles = rectangles
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} on pieces of a tensor")

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties(dtype=torch.float32), size=self.size()
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(offset), values.shape)
            for offset, values in self.rectangles.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.rectangles[tuple(index.offset)]


class Kept(NamedTuple):
    """One flat tensor [end - start] of this rank, and its name among the state's."""

    kind: str  # MASTER or one of MOMENTS
    values: Tensor
    held: Held
    start: int


def kept(
    held: Sequence[Held], shards: Mapping[torch.nn.Parameter, Shard], kinds: Sequence[str]
) -> list[Kept]:
    found = []
    for each in held:
        if shard := shards.get(each.parameter):
            for kind in kinds:
                values = shard.master if kind == MASTER else shard.moments[kind]
                found.append(Kept(kind, values, each, shard.start))
    return found


def pieces(tensors: Sequence[Kept], shape: Shape, *, to_write: bool) -> dict[str, Pieces]:
    """By name. What several ranks hold is written by one of them: tensor-parallel rank 0, the first stage."""
    found: dict[str, tuple[tuple[int, ...], Rectangles]] = {}
    for kind, values, held, start in tensors:
        if to_write and (held.is_copy or (held.weight.axis is None and held.rank > 0)):
            continue
        local = held.parameter.shape
        for block in blocks(held.weight, local, held.rank, held.size, shape):
            for offset, part in _rectangles(values, start, local, block):
                _, rectangles = found.setdefault(f"{kind}/{block.name}", (block.shape, {}))
                rectangles[offset] = part
    return {name: Pieces(*each) for name, each in found.items()}


def _rectangles(
    values: Tensor, start: int, local: torch.Size, block: Block
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """The flat elements from `start` of a local parameter, as far as they are the block's: views, with their offsets.

    A flat run over rows of C elements is the end of a row, whole rows, and the beginning of a row, at most.
    """
    width = math.prod(local[1:])
    at, end = max(start, block.first_row * width), min(start + len(values), block.end_row * width)
    while at < end:
        row, column = divmod(at, width)
        if column == 0 and end - at >= width:
            count = (end - at) // width * width
            part = values[at - start : at - start + count].view(-1, *local[1:])
        else:
            count = min(width - column, end - at)
            part = values[at - start : at - start + count].view(1, count)
        yield (block.offset[0] + row - block.first_row, *(each + column for each in block.offset[1:])), part
        at += count


# ---------------------------------------------------------------- generators
def generators(device: torch.device) -> dict[str, Tensor]:
    """States of this rank's generators, Megatron's too. Nothing in a step draws from them."""
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    tracked = tracker.get_states()
    return rng_state(device) | {f"megatron/{name}": state.clone() for name, state in tracked.items()}


def set_generators(state: Mapping[str, Tensor], device: torch.device) -> None:
    set_rng_state(state, device)
    tracked = {
        name.removeprefix("megatron/"): each.clone()
        for name, each in state.items()
        if name.startswith("megatron/")
    }
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    tracker.set_states(tracked)


# ---------------------------------------------------------------- files
def writer(
    tensors: Sequence[Kept], shape: Shape, step: int, device: torch.device, rank: int
) -> Callable[[Path, Any], None]:
    """Copies now; what is returned writes this rank's files, with the others over `group` (None: there is one rank)."""
    copies = [each._replace(values=_copy(each.values)) for each in tensors]
    state: dict[str, Tensor] = {**pieces(copies, shape, to_write=True)}
    if rank == 0:
        state[STEP] = torch.tensor(step)
    rng = {name: each.cpu() for name, each in generators(device).items()}

    def write(folder: Path, group: Any) -> None:
        dcp.save(folder / STATE, state, group)  # its failure is every rank's
        write_tensors(folder / dcp.rng_file(rank), rng)  # may fail on one alone: after all that is collective

    return write


def read(folder: Path, tensors: Sequence[Kept], shape: Shape) -> tuple[list[Tensor], int]:
    """(values of each, AdamW's count of steps), in new memory. This rank alone. Raises CheckpointError."""
    room = [each._replace(values=torch.full(each.values.shape, torch.nan)) for each in tensors]
    wanted = pieces(room, shape, to_write=False)
    state: dict[str, Tensor] = {**wanted, STEP: torch.tensor(0)}
    if not (folder / STATE / ".metadata").is_file():
        raise CheckpointError(f"{folder / STATE}: is missing; this is no checkpoint of the megatron trainer")
    try:
        state_dict_loader.load(state, checkpoint_id=folder / STATE, no_dist=True)
    except CheckpointException as error:
        failures = error.failures.values()
        reason = next((each[0] for each in failures), error)
        raise CheckpointError(f"{folder / STATE}: cannot be read ({reason})") from error
    except (OSError, EOFError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{folder / STATE}: cannot be read ({error})") from error
    for name, of_whole in wanted.items():
        if any(bool(values.isnan().any()) for values in of_whole.rectangles.values()):
            raise CheckpointError(f"{folder / STATE}: {name} is not whole")
    # what is left are rows of the embedding that stand for no token, and lie nowhere
    return [each.values.nan_to_num_(nan=0.0) for each in room], int(state[STEP])


def read_hugging_face(folder: Path, tensors: Sequence[Kept], shape: Shape) -> list[Tensor]:
    """The same of masters, from a folder with a model in Hugging Face's names. Raises CheckpointError."""
    try:
        whole = hf_weights.parts(folder, [each.held for each in tensors], shape)
        return [
            part.reshape(-1)[each.start : each.start + len(each.values)].float()
            for each, (_, part) in zip(tensors, whole, strict=True)
        ]
    except ConfigError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def read_generators(folder: Path, rank: int, device: torch.device) -> dict[str, Tensor] | None:
    """None: fewer ranks saved this state, and this one goes on with its own. Raises CheckpointError."""
    path = folder / dcp.rng_file(rank)
    return read_tensors(path, generators(device)) if path.is_file() else None


def agree(error: CheckpointError | None) -> None:
    """Collective: raises CheckpointError on all ranks when one has met it."""
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, None if error is None else str(error))
    for rank, text in enumerate(texts):
        if text is not None:
            raise CheckpointError(text if len(texts) == 1 else f"rank {rank}: {text}") from error


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
