"""What a training step asks of a model that Megatron cuts over ranks: engine/trainer/policy.py, on one rank.

micro-batches ─► Megatron's schedule (1F1B where there are pipeline stages)
                   last stage: hidden states ─► only trained positions ─► this rank's columns of the logits
                               ─► vocab-parallel log-probs ─► loss ─► backward
                 ─► gradients summed over data-parallel ranks in float32
other stages are told the log-probs afterwards, so that every rank sees the same losses and judges a step alike
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from numpy.typing import NDArray
from torch import Tensor

from engine.algorithms.logprobs import (
    FlatBatch,
    MicroBatch,
    TokenLogprobs,
    micro_batches,
    packed_micro_batches,
)
from engine.trainer.megatron.held import MOMENTS, set_step_count, shards, step_count
from engine.trainer.megatron.model import Place
from engine.trainer.megatron.modules import Packed
from engine.trainer.megatron.settings import MegatronSettings
from engine.trainer.megatron.shape import Shape
from engine.trainer.megatron.vocab import vocab_logprobs
from engine.trainer.parts import Processes, padded
from engine.trainer.policy import MicroLoss
from engine.trainer.torch_settings import TorchSettings


class Cut(NamedTuple):
    """How the model is cut, and where in that this rank is."""

    shape: Shape
    place: Place
    settings: MegatronSettings


class MegatronPolicy:
    """A wrapped GPTModel and its distributed optimizer; `reference`: a frozen one beside it, or None."""

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        cut: Cut,
        settings: TorchSettings,
        processes: Processes,
        reference: Any = None,
    ) -> None:
        self.model, self.optimizer, self.cut, self.settings = model, optimizer, cut, settings
        self.device, self._processes, self._reference = processes.device, processes, reference
        self._shards = shards(optimizer)
        self.forget_gradient()

    # ---------------------------------------------------------------- forward and backward
    def micro_batches(self, flat: FlatBatch, rows: NDArray[np.int64]) -> list[MicroBatch]:
        limit, most = self.settings.micro_batch_tokens, self._processes.most
        if self.settings.packing:
            made = packed_micro_batches(flat, rows, limit, self.device)
            count = most(max(len(made), 1))
            if count > len(made):
                made = packed_micro_batches(flat, rows, limit, self.device, count)
        else:
            made = list(micro_batches(flat, rows, limit, self.device))
            count = most(max(len(made), 1))
        made = padded(made, count, self.device)
        multiple = self.cut.place.tensor[1] if self.cut.settings.sequence_parallel else 1
        return [_widened(micro, multiple) for micro in made]

    def backward(self, micros: Sequence[MicroBatch], loss: MicroLoss) -> None:
        with_gradient = self.settings.entropy_coef > 0
        seen = self._run(self.model, micros, loss=loss, with_entropy_gradient=with_gradient)
        if not self.cut.place.is_last_stage:
            for micro, now in zip(micros, seen, strict=True):
                loss(micro, now)

    def score(self, micros: Sequence[MicroBatch]) -> Iterator[tuple[MicroBatch, Tensor]]:
        return self._score(self.model, micros)

    def score_reference(self, micros: Sequence[MicroBatch]) -> Iterator[tuple[MicroBatch, Tensor]]:
        return self._score(self._reference, micros)

    def _score(self, model: Any, micros: Sequence[MicroBatch]) -> Iterator[tuple[MicroBatch, Tensor]]:
        with torch.no_grad():
            seen = self._run(model, micros)
        yield from zip(micros, (now.logprobs for now in seen), strict=True)

    def _run(
        self,
        model: Any,
        micros: Sequence[MicroBatch],
        *,
        loss: MicroLoss | None = None,
        with_entropy_gradient: bool = False,
    ) -> list[TokenLogprobs]:
        """Log-probs of each, without a gradient, the same on all ranks that were given these rows."""
        seen: list[TokenLogprobs] = []

        def forward(data: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
            micro = next(data)
            with self._trained_positions(model, micro):
                output = model(micro.ids, _positions(micro.ids), None, packed_seq_params=self._packed(micro))

            def measured(logits: Tensor, **_: Any) -> Any:
                now = self._logprobs(logits, micro, with_entropy_gradient)
                seen.append(TokenLogprobs(now.logprobs.detach(), now.entropy.detach()))
                if loss is None:
                    return None
                # the count of tokens is what Megatron would divide by, and is told not to
                return loss(micro, now), torch.ones((), dtype=torch.int, device=self.device), None

            return output, measured

        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(micros),
            model=[model],
            num_microbatches=len(micros),
            seq_length=micros[0].ids.shape[1],  # with pipeline stages, shapes are sent along with each
            micro_batch_size=micros[0].ids.shape[0],
            forward_only=loss is None,
            collect_non_loss_data=loss is None,
        )
        return self._told_by_last_stage(micros, seen)

    def _packed(self, micro: MicroBatch) -> Packed | None:
        if micro.packed is None:
            return None
        is_local = self.cut.settings.transformer_impl == "local"
        bounds = micro.packed.bounds
        if bounds[-1] < micro.ids.shape[1]:  # what was added for sequence parallelism is a row of its own
            bounds = [*bounds, micro.ids.shape[1]]
        return Packed.of(bounds, torch.device("cpu") if is_local else self.device)

    def _logprobs(self, logits: Tensor, micro: MicroBatch, with_entropy_gradient: bool) -> TokenLogprobs:
        """logits [1, n, v] of this rank's columns."""
        rank, size = self.cut.place.tensor
        columns = logits.shape[-1]
        return vocab_logprobs(
            logits[0],
            micro.targets,
            first=rank * columns,
            real=min(max(self.cut.shape.vocab_size - rank * columns, 0), columns),
            group=parallel_state.get_tensor_model_parallel_group() if size > 1 else None,
            temperature=self.settings.temperature,
            with_entropy_gradient=with_entropy_gradient,
        )

    @contextmanager
    def _trained_positions(self, model: Any, micro: MicroBatch) -> Iterator[None]:
        """The output layer is given hidden states [n, 1, H] of trained positions, instead of [T, B, H]."""
        if not self.cut.place.is_last_stage:
            yield
            return

        def keep_trained(module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            hidden = inputs[0]
            if self.cut.settings.sequence_parallel:
                # the output layer sums gradients over ranks itself
                hidden = tensor_parallel.gather_from_sequence_parallel_region(
                    hidden, tensor_parallel_output_grad=False
                )
            rows = hidden.transpose(0, 1).reshape(-1, hidden.shape[-1])
            return (rows.index_select(0, micro.positions).unsqueeze(1), *inputs[1:])

        output_layer = _innermost(model).output_layer
        hook = output_layer.register_forward_pre_hook(keep_trained)
        try:
            yield
        finally:
            hook.remove()

    def _told_by_last_stage(
        self, micros: Sequence[MicroBatch], seen: list[TokenLogprobs]
    ) -> list[TokenLogprobs]:
        if self.cut.place.pipeline[1] == 1:
            return seen
        counts = [len(micro.targets) for micro in micros]
        told = torch.empty(2, sum(counts), device=self.device)
        if self.cut.place.is_last_stage:
            torch.cat([each.logprobs for each in seen], out=told[0])
            torch.cat([each.entropy for each in seen], out=told[1])
        group: Any = parallel_state.get_pipeline_model_parallel_group()
        dist.broadcast(told, dist.get_global_rank(group, dist.get_world_size(group) - 1), group=group)
        return [TokenLogprobs(*each) for each in zip(*(part.split(counts) for part in told), strict=True)]

    # ---------------------------------------------------------------- the optimizer
    def clip_gradient(self, limit: float) -> float:
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        factor = limit / (norm + 1e-6)  # as torch has it
        if factor < 1.0:
            for shard in self._shards.values():
                if shard.master.grad is not None:
                    shard.master.grad.mul_(factor)
        return norm

    def apply(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step_with_ready_grads()

    def forget_gradient(self) -> None:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def copy_state(self) -> Callable[[], None]:
        copies, count = [tensor.detach().clone() for tensor in self._state()], step_count(self.optimizer)

        @torch.no_grad()
        def put_back() -> None:
            for tensor, before in zip(self._state(), copies, strict=True):
                tensor.copy_(before)
            set_step_count(self.optimizer, count)

        return put_back

    def _state(self) -> list[Tensor]:
        return [
            *(parameter.data for parameter in self.model.parameters()),
            *(shard.master for shard in self._shards.values()),
            *(shard.moments[name] for shard in self._shards.values() for name in MOMENTS),
        ]


def _positions(ids: Tensor) -> Tensor:
    """Of each token in its row; Megatron counts rotary positions itself."""
    return torch.arange(ids.shape[1], device=ids.device).expand_as(ids)


def _widened(micro: MicroBatch, multiple: int) -> MicroBatch:
    """Rows of a length that `multiple` divides, padded on the right with each row's first token."""
    length = micro.ids.shape[1]
    more = -length % multiple
    if not more:
        return micro
    ids = torch.cat([micro.ids, micro.ids[:, :1].expand(-1, more)], dim=1)
    rows = torch.div(micro.positions, length, rounding_mode="floor")
    return micro._replace(ids=ids, positions=micro.positions + rows * more)


def _innermost(model: Any) -> Any:
    while hasattr(model, "module"):
        model = model.module
    return model
