"""One rank's part of a model that is sharded with FSDP2 (engine/trainer/parts.py, RankPart).

    weights in float32, a shard on each rank ─► whole layers in model.dtype, as they are needed ─► gradients summed in
    float32 ─► a shard on each rank ─► AdamW over this rank's shards, as plain tensors

The optimizer sees this rank's rows of each weight and nothing else, so its arithmetic is that of the torch trainer,
element by element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from engine.algorithms.logprobs import (
    FlatBatch,
    MicroBatch,
    micro_batches,
    packed_micro_batches,
    token_logprobs,
)
from engine.trainer import dcp, fsdp2_model
from engine.trainer.fsdp2_settings import Fsdp2Settings
from engine.trainer.fsdp2_weights import FullWeights
from engine.trainer.parts import DataParallel, PartSettings, Processes, padded
from engine.trainer.policy import MicroLoss, Policy
from engine.trainer.torch_backend import Limits
from engine.trainer.torch_settings import TorchSettings
from engine.trainer.torch_state import make_optimizer, moments_of
from streams.errors import ConfigError


class Fsdp2Policy:
    """What a step asks of the model and its AdamW (engine/trainer/policy.py)."""

    def __init__(
        self,
        model: nn.Module,
        settings: TorchSettings,
        processes: Processes,
        reference: nn.Module | None,
        *,
        stays_whole: bool = False,
    ) -> None:
        """`stays_whole`: between the micro-batches of a step."""
        self.settings, self.model, self.processes = settings, model, processes
        self._stays_whole = stays_whole
        self.device = processes.device
        self._reference = reference
        self.parameters: dict[str, Any] = dict(fsdp2_model.named_shards(model))
        with torch.no_grad():
            self.shards: dict[str, Tensor] = {name: each.to_local() for name, each in self.parameters.items()}
        self.optimizer = make_optimizer(self.shards.values(), settings)

    def micro_batches(self, flat: FlatBatch, rows: NDArray[np.int64]) -> list[MicroBatch]:
        most, limit = self.processes.most, self.settings.micro_batch_tokens
        if self.settings.packing:
            found = packed_micro_batches(flat, rows, limit, self.device)
            count = most(len(found))
            if count > len(found):
                found = packed_micro_batches(flat, rows, limit, self.device, count)
        else:
            found = list(micro_batches(flat, rows, limit, self.device))
            count = most(len(found))
        return padded(found, count, self.device)

    def backward(self, micros: Sequence[MicroBatch], loss: MicroLoss) -> None:
        for at, micro in enumerate(micros, 1):
            if self._stays_whole:
                fsdp2_model.keep_whole(self.model, keep=at < len(micros))
            now = token_logprobs(
                self.model,
                micro,
                temperature=self.settings.temperature,
                with_entropy_gradient=self.settings.entropy_coef > 0,
            )
            loss(micro, now).backward()

    def score(self, micros: Sequence[MicroBatch]) -> Iterator[tuple[MicroBatch, Tensor]]:
        return self._score(self.model, micros)

    def score_reference(self, micros: Sequence[MicroBatch]) -> Iterator[tuple[MicroBatch, Tensor]]:
        return self._score(self._reference, micros)

    @torch.no_grad()
    def _score(self, model: Any, micros: Sequence[MicroBatch]) -> Iterator[tuple[MicroBatch, Tensor]]:
        for micro in micros:
            yield micro, token_logprobs(model, micro, temperature=self.settings.temperature).logprobs

    def clip_gradient(self, limit: float) -> float:
        """Norms are added over ranks in float64, in their order."""
        gradients = []
        for name, parameter in self.parameters.items():
            gradient = None if parameter.grad is None else parameter.grad.to_local()
            self.shards[name].grad = gradient
            if gradient is not None and gradient.numel():
                gradients.append(gradient)
        own = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
        norm = math.sqrt(float((self.processes.gather([own]) ** 2).cumsum()[-1]))
        if math.isfinite(limit):  # as clip_grad_norm_ does, also where the norm is just below the limit
            torch.nn.utils.clip_grads_with_norm_(
                self.shards.values(), limit, torch.tensor(norm, device=_device_of(gradients, self.device))
            )
        return norm

    def apply(self, rate: float) -> None:
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()

    def forget_gradient(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = self.shards[name].grad = None

    def copy_state(self) -> Callable[[], None]:
        copies = [tensor.detach().clone() for tensor in self._state()]

        @torch.no_grad()
        def put_back() -> None:
            for tensor, before in zip(self._state(), copies, strict=True):
                tensor.copy_(before)

        return put_back

    def _state(self) -> list[Tensor]:
        return [*self.shards.values(), *moments_of(self.optimizer).values()]


class Fsdp2Part:
    """One rank. Made on all ranks together. Raises ConfigError."""

    speaks = True

    def __init__(self, settings: PartSettings, processes: Processes) -> None:
        self.settings, self.processes = settings.torch, processes
        try:
            self._options = msgspec.convert(settings.options, Fsdp2Settings)
        except msgspec.ValidationError as error:
            raise ConfigError(f"trainer.fsdp2: {error}") from error
        self.data_parallel = DataParallel(processes.rank, processes.size)
        self.model = self._build(Path(settings.model), "model.path", is_trained=True)
        self.limits = Limits.of(self.model)
        # a single rank has memory for all of it anyway, unless it is to lie in main memory
        may_stay = processes.size == 1 or not self._options.sync_each_micro_batch
        stays_whole = may_stay and not self._options.cpu_offload
        policy = Fsdp2Policy(
            self.model, self.settings, processes, self._reference(settings), stays_whole=stays_whole
        )
        self.policy: Policy = policy
        self._full = FullWeights(
            self.model, policy.shards, self.settings.dtype, processes, settings.bucket_bytes
        )
        self._state = dcp.ShardedState(self.model, policy, processes)

    def _build(self, folder: Path, key: str, *, is_trained: bool) -> nn.Module:
        return fsdp2_model.build(
            folder, self.settings, self._options, self.processes, key=key, is_trained=is_trained
        )

    def _reference(self, settings: PartSettings) -> nn.Module | None:
        """The frozen model that the loss is tied to, sharded too; None without a KL term."""
        if not self.settings.needs_reference:
            return None
        folder = Path(self.settings.ref_model) if self.settings.ref_model else Path(settings.model)
        reference = self._build(folder, "trainer.ref_model", is_trained=False)
        if Limits.of(reference).vocab_size != self.limits.vocab_size:
            raise ConfigError(
                f"trainer.ref_model = {str(folder)!r}: {Limits.of(reference).vocab_size} tokens, the model has "
                f"{self.limits.vocab_size}; a reference model needs the same vocabulary"
            )
        return reference

    @property
    def layout(self) -> Mapping[str, Tensor]:
        return self._full.layout

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._full.gather()

    def snapshot(self) -> Callable[[Path, torch.distributed.ProcessGroup], None]:
        return self._state.snapshot()

    def load(self, folder: Path, *, fresh_optimizer: bool = False) -> None:
        self._state.load(folder, fresh_optimizer=fresh_optimizer)


def _device_of(tensors: Sequence[Tensor], otherwise: torch.device) -> torch.device:
    return tensors[0].device if tensors else otherwise
