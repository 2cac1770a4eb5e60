"""One rank of the megatron trainer: engine/trainer/parts.py's RankPart. Made by engine/trainer/megatron/start.py.

model folder ─► Shape ─► groups, GPTModel, optimizer ─► weights of the folder
MegatronPolicy (steps) · hf_weights.stream (weights out) · state (snapshots, loads)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from engine.interfaces import CheckpointError
from engine.trainer.megatron import hf_weights, state
from engine.trainer.megatron.held import (
    make_optimizer,
    publish_masters,
    set_step_count,
    shards,
    step_count,
    what_is_held,
)
from engine.trainer.megatron.model import build, join_groups
from engine.trainer.megatron.policy import Cut, MegatronPolicy
from engine.trainer.megatron.settings import MegatronSettings
from engine.trainer.megatron.shape import check_cut, read_shape
from engine.trainer.parts import DataParallel, PartSettings, Processes
from engine.trainer.policy import Policy
from engine.trainer.torch_backend import MODEL_FILE, Limits
from streams.errors import ConfigError


class MegatronPart:
    """Collective when it is made, but for `layout`, in every method."""

    def __init__(self, settings: PartSettings, options: MegatronSettings, processes: Processes) -> None:
        """Raises ConfigError for a model or settings that this trainer does not know."""
        self._torch = msgspec.structs.replace(settings.torch, device=str(processes.device))
        self._options, self._processes = options, processes
        folder = Path(settings.model)
        self._shape = read_shape(folder)
        check_cut(self._shape, options)
        self._place = join_groups(options, seed=self._torch.seed)
        self._model = build(self._shape, self._torch, options, self._place)
        self._optimizer = make_optimizer(self._model, self._torch)
        self._held = what_is_held(self._model, self._shape, self._place)
        self._shards = shards(self._optimizer)
        hf_weights.load(folder, self._held, self._shards, self._shape)
        self._entries = hf_weights.catalogue(self._held)
        self._layout = hf_weights.layout(self._entries, getattr(torch, self._torch.dtype), self._shape)
        self.policy: Policy = MegatronPolicy(
            self._model,
            self._optimizer,
            Cut(self._shape, self._place, options),
            self._torch,
            processes,
            self._reference(Path(self._torch.ref_model or folder)),
        )
        self.limits = Limits(self._shape.vocab_size, self._shape.max_length)
        self.data_parallel = DataParallel(*self._place.data)
        self.speaks = self._place.tensor[0] == 0 and self._place.is_last_stage

    def _reference(self, folder: Path) -> Any:
        """The frozen model that the loss is tied to; None without a KL term. Nothing of it is in a checkpoint."""
        if not self._torch.needs_reference:
            return None
        shape = read_shape(folder, key="trainer.ref_model")
        if shape.vocab_size != self._shape.vocab_size:
            raise ConfigError(
                f"trainer.ref_model = {str(folder)!r}: {shape.vocab_size} tokens, the model has "
                f"{self._shape.vocab_size}; a reference model needs the same vocabulary"
            )
        check_cut(shape, self._options)
        frozen = build(shape, self._torch, self._options, self._place, trained=False)
        hf_weights.load(folder, what_is_held(frozen, shape, self._place), {}, shape)
        return frozen

    # ---------------------------------------------------------------- weights
    @property
    def layout(self) -> Mapping[str, Tensor]:
        return self._layout

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return hf_weights.stream(self._entries, self._held, self._shape)

    # ---------------------------------------------------------------- state
    def snapshot(self) -> Callable[[Path, torch.distributed.ProcessGroup], None]:
        tensors = state.kept(self._held, self._shards, state.ALL_KINDS)
        step = step_count(self._optimizer)
        return state.writer(tensors, self._shape, step, self._processes.device, self._processes.rank)

    def load(self, folder: Path, *, fresh_optimizer: bool = False) -> None:
        kinds = (state.MASTER,) if fresh_optimizer else state.ALL_KINDS
        tensors = state.kept(self._held, self._shards, kinds)
        device, rank = self._processes.device, self._processes.rank
        read: tuple[list[Tensor], int] = ([], 0)
        rng: dict[str, Tensor] | None = None
        failed: CheckpointError | None = None
        try:
            if fresh_optimizer and (folder / MODEL_FILE).is_file():  # of the torch trainer
                read = state.read_hugging_face(folder, tensors, self._shape), 0
            else:
                read = state.read(folder, tensors, self._shape)
            if not fresh_optimizer:
                rng = state.read_generators(folder, rank, device)
        except CheckpointError as error:
            failed = error
        state.agree(failed)
        self._take_up(tensors, *read, fresh_optimizer=fresh_optimizer)
        if rng is not None:
            state.set_generators(rng, device)

    @torch.no_grad()
    def _take_up(
        self, tensors: list[state.Kept], values: list[Tensor], step: int, *, fresh_optimizer: bool
    ) -> None:
        for each, value in zip(tensors, values, strict=True):
            each.values.copy_(value)
        if fresh_optimizer:
            for shard in self._shards.values():
                for moment in shard.moments.values():
                    moment.zero_()
        set_step_count(self._optimizer, 0 if fresh_optimizer else step)
        publish_masters(self._optimizer, self._model)
