"""Hugging Face weights into this rank's parameters, and whole Hugging Face tensors out of all ranks' parts.

    safetensors ── one weight's tensors at a time, each rank its part ──► parameters (and the optimizer's masters)
    parameters  ── one weight at a time, to rank 0 ──► full tensors by Hugging Face name

Memory stays at the largest single weight in both directions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.trainer.megatron.held import Held, Shard
from engine.trainer.megatron.names import Weight, cut, hf_shapes, whole
from engine.trainer.megatron.shape import Shape
from streams.errors import ConfigError

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"


class HuggingFaceFolder:
    """The tensors of a model folder, mapped from its files one at a time. A context manager."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError for a folder without safetensors files."""
        self.folder, self._stack, self._open = folder, ExitStack(), {}
        if (folder / INDEX_FILE).is_file():
            self._files: dict[str, str] = json.loads((folder / INDEX_FILE).read_text("utf-8"))["weight_map"]
        elif (folder / SINGLE_FILE).is_file():
            self._files = dict.fromkeys(self._file(SINGLE_FILE).keys(), SINGLE_FILE)
        else:
            raise ConfigError(
                f"model.path = {str(folder)!r}: neither {SINGLE_FILE} nor {INDEX_FILE} is there; the megatron "
                "trainer reads safetensors alone"
            )

    def __enter__(self) -> HuggingFaceFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Raises ConfigError for one that is missing, or has another shape."""
        if name not in self._files:
            raise ConfigError(f"model.path = {str(self.folder)!r}: no weights for {name}")
        tensor = self._file(self._files[name]).get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ConfigError(
                f"model.path = {str(self.folder)!r}: {name} is {list(tensor.shape)}, by config.json {list(shape)}"
            )
        return tensor

    def _file(self, name: str) -> Any:
        if name not in self._open:
            try:
                opened = safe_open(self.folder / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{self.folder / name}: cannot be read ({error})") from error
            self._open[name] = self._stack.enter_context(opened)
        return self._open[name]


def parts(folder: Path, held: Sequence[Held], shape: Shape) -> Iterator[tuple[Held, Tensor]]:
    """This rank's part of each weight, one at a time. Raises ConfigError."""
    with HuggingFaceFolder(folder) as files:
        for each in held:
            shapes = hf_shapes(each.weight, shape)
            tensors = [files.read(*pair) for pair in zip(each.weight.hf, shapes, strict=True)]
            yield each, cut(each.weight, tensors, each.rank, each.size, shape)


@torch.no_grad()
def load(
    folder: Path, held: Sequence[Held], shards: Mapping[torch.nn.Parameter, Shard], shape: Shape
) -> None:
    """Set every parameter, and the masters without the rounding of a bfloat16 parameter. Raises ConfigError."""
    for each, part in parts(folder, held, shape):
        each.parameter.data.copy_(part)
        if shard := shards.get(each.parameter):
            shard.master.copy_(part.reshape(-1)[shard.start : shard.end])


class Entry(NamedTuple):
    """One whole weight, and the ranks that hold its parts, in order of the parts."""

    weight: Weight
    holders: tuple[int, ...]
    part_shape: tuple[int, ...]


def catalogue(held: Sequence[Held]) -> list[Entry]:
    """Collective: all weights of the model, in an order that does not depend on the cut; the same on every rank."""
    own = [
        (each.weight, each.rank, each.size, tuple(each.parameter.shape)) for each in held if not each.is_copy
    ]
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    holders: dict[Weight, list[int | None]] = {}
    shapes: dict[Weight, tuple[int, ...]] = {}
    for rank, weights in enumerate(of_ranks):
        for weight, part, size, part_shape in weights:
            parts = holders.setdefault(weight, [None] * (1 if weight.axis is None else size))
            shapes[weight] = part_shape
            if part < len(parts) and parts[part] is None:
                parts[part] = rank
    made = []
    for weight, parts in holders.items():
        ranks = tuple(rank for rank in parts if rank is not None)
        if len(ranks) != len(parts):
            raise RuntimeError(f"no rank holds part {parts.index(None)} of {weight.name}")
        made.append(Entry(weight, ranks, shapes[weight]))
    return sorted(made, key=lambda entry: _place(entry.weight.name))


def _place(name: str) -> tuple[Any, ...]:
    """
    >>> sorted(["output_layer", "layers.10.x", "layers.9.y", "layers.9.b", "embedding"], key=_place)
    ['embedding', 'layers.9.b', 'layers.9.y', 'layers.10.x', 'output_layer']
    """
    section = ("embedding", "layers", "final_layernorm", "output_layer").index(name.partition(".")[0])
    return section, [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


def layout(entries: Sequence[Entry], dtype: torch.dtype, shape: Shape) -> dict[str, Tensor]:
    """All weights as they are published, without their bytes; tied names are one object."""
    made = {
        name: torch.empty(size, dtype=dtype, device="meta")
        for entry in entries
        for name, size in zip(entry.weight.hf, hf_shapes(entry.weight, shape), strict=True)
    }
    if shape.is_tied:
        made["lm_head.weight"] = made["model.embed_tokens.weight"]
    return made


@torch.no_grad()
def stream(entries: Sequence[Entry], held: Sequence[Held], shape: Shape) -> Iterator[tuple[str, Tensor]]:
    """Collective: full tensors on rank 0, one weight after the other; on other ranks nothing comes out."""
    own = {each.weight.name: each.parameter for each in held if not each.is_copy}
    rank, like = dist.get_rank(), held[0].parameter
    for entry in entries:
        if rank == 0:
            parts = [
                own[entry.weight.name].detach()
                if holder == 0
                else torch.empty(entry.part_shape, dtype=like.dtype, device=like.device)
                for holder in entry.holders
            ]
            waits = [
                dist.irecv(part, holder)
                for part, holder in zip(parts, entry.holders, strict=True)
                if holder != 0
            ]
            for wait in waits:
                if wait is not None:
                    wait.wait()
            yield from zip(entry.weight.hf, whole(entry.weight, parts, shape), strict=True)
        elif rank in entry.holders:
            dist.send(own[entry.weight.name].detach(), 0)
