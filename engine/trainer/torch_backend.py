"""The trainer of a Hugging Face causal language model on one device.

    step(batch)   flatten ─► [proximal log-probs] ─► for each minibatch:
                                                       micro-batches: log-probs ─► loss / N ─► backward
                                                       loss and gradient finite? ─► clip ─► AdamW
                  anything not finite ─► every bit as before the step, and BadStep

Deterministic: no dropout (the model stays in evaluation mode), a fixed order of samples, torch's deterministic
kernels, so the same state and batch give the same bits on the same machine with the same number of threads.

Weights are held in float32 whatever the model computes in: in bfloat16 a small update would round to nothing.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from consumers.telemetry import SUMS, summarize, trajectory_sums
from engine.algorithms.logprobs import FlatBatch, MicroBatch, flatten, micro_batches, token_logprobs
from engine.algorithms.losses import LOSSES, LossSettings, TokenInputs
from engine.interfaces import BadStep, CheckpointError, TrainBatch
from engine.trainer.torch_settings import TorchSettings, learning_rate
from engine.trainer.torch_state import (
    environment,
    make_optimizer,
    moments_of,
    read_json,
    read_tensors,
    rng_state,
    set_rng_state,
    warn_of_other_machine,
    write_tensors,
)
from engine.weights.tensors import snapshot
from streams.errors import ConfigError
from streams.trajectory import Payload

MODEL_FILE, OPTIMIZER_FILE, STATE_FILE = "model.safetensors", "optimizer.safetensors", "trainer.json"
RNG_FILE = "rng.safetensors"


class TorchBackend:
    """One model and its AdamW. `step` until done; `snapshot` and `load` between steps, on the same thread.

    Settles process-wide switches of torch (threads, deterministic kernels) when it is made.

        backend = TorchBackend(Path("model"), TorchSettings(lr=1e-3))
        metrics = backend.step(batch)
        store.publish(backend.weights(), epoch=0, version=1, step=1)
    """

    def __init__(self, model_folder: Path, settings: TorchSettings) -> None:
        self.settings = settings
        self.device = torch.device(settings.device)
        set_up_torch(settings)
        self.model = _load_model(model_folder, settings).to(self.device)
        self._parameters = dict(self.model.named_parameters())  # a tied one under its first name
        self._optimizer = make_optimizer(self._parameters.values(), settings)
        self._vocab_size = self.model.get_input_embeddings().num_embeddings
        self._max_length = self.model.config.get_text_config().max_position_embeddings or 1 << 31
        self._loss = LOSSES[settings.loss_function]
        self._loss_settings = LossSettings(
            eps_clip=settings.eps_clip,
            eps_clip_high=settings.eps_clip_high,
            tis_clip=settings.tis_clip,
            tis_mode=settings.tis_mode,
        )
        self.optimizer_steps = 0
        self.trajectory_sums: NDArray[np.float64] = np.zeros((0, len(SUMS)))

    # ---------------------------------------------------------------- training
    def refuses(self, payload: Payload) -> str:
        """What the model has no row for: on an accelerator that would end the process, not the step."""
        length = len(payload.prompt_ids) + len(payload.response_ids)
        if length > self._max_length:
            return f"{length} tokens, the model takes {self._max_length}"
        top = max(int(payload.prompt_ids.max()), int(payload.response_ids.max()))
        return f"token {top}, the model has {self._vocab_size}" if top >= self._vocab_size else ""

    def step(self, batch: TrainBatch) -> dict[str, float]:
        """One training step. Metrics are over all trained tokens; of several minibatches, `grad_norm` is the largest.

        Log-ratios are taken at each sample's own forward: with several minibatches, later ones are measured
        against weights that earlier ones have moved. Raises BadStep.
        """
        started = time.perf_counter()
        flat = flatten(batch.samples)
        if not len(flat.targets):
            raise BadStep("no_trainable_tokens", f"{len(batch.samples)} samples, all masked")
        self._check(flat, batch)
        parts = minibatches(flat, self.settings.num_steps_per_rollout, batch.seed)
        saved = self._copy_state() if len(parts) > 1 else None  # one part changes nothing before it is judged
        try:
            proximal = self._proximal(flat) if self.settings.needs_proximal and len(parts) > 1 else None
            results = [self._minibatch(flat, part, proximal) for part in parts]
        except BaseException:
            if saved is not None:
                self._put_back(saved)
            raise
        finally:
            self._forget_gradient()
        return self._metrics(flat, results) | {"seconds": time.perf_counter() - started}

    def _check(self, flat: FlatBatch, batch: TrainBatch) -> None:
        """Refuse what the model has no row for: on an accelerator that would end the process, not the step."""
        lengths = np.diff(flat.row_starts)
        top, longest = flat.ids.max(), lengths.max()
        if top >= self._vocab_size:
            row = int(np.searchsorted(flat.row_starts, flat.ids.argmax(), side="right")) - 1
            raise BadStep(
                "bad_token_id", f"{batch.samples[row].uid}: token {top}, the model has {self._vocab_size}"
            )
        if longest > self._max_length:
            uid = batch.samples[int(lengths.argmax())].uid
            raise BadStep("too_long", f"{uid}: {longest} tokens, the model takes {self._max_length}")

    def _minibatch(self, flat: FlatBatch, chosen: NDArray[np.int64], proximal: Tensor | None) -> _Result:
        """Gradient of the token mean over all chosen samples, then one optimizer step. Raises BadStep."""
        n_tokens = int((flat.token_starts[chosen + 1] - flat.token_starts[chosen]).sum())
        seen = [
            self._backward(flat, micro, proximal, n_tokens) for micro in self._micro_batches(flat, chosen)
        ]
        loss = float(torch.stack([each.loss for each in seen]).sum())
        if not math.isfinite(loss):
            raise BadStep("nonfinite_loss", f"loss {loss} over {n_tokens} tokens")
        limit = self.settings.clip_grad or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters.values(), limit))
        if not math.isfinite(norm):
            raise BadStep("nonfinite_gradient", f"gradient norm {norm} over {n_tokens} tokens")
        self.optimizer_steps += 1
        rate = learning_rate(self.settings, self.optimizer_steps)
        self._optimizer.param_groups[0]["lr"] = rate
        self._optimizer.step()
        self._forget_gradient()
        return _Result(seen, loss, norm, rate, n_tokens)

    def _backward(self, flat: FlatBatch, micro: MicroBatch, proximal: Tensor | None, n_tokens: int) -> _Seen:
        """Add one micro-batch's share of the gradient."""
        with self._autocast():
            logprobs, entropy = token_logprobs(
                self.model,
                micro,
                temperature=self.settings.temperature,
                with_entropy_gradient=self.settings.entropy_coef > 0,
            )
        now = logprobs.detach()
        inputs = TokenInputs(
            logprobs,
            behaviour=self._of(flat.behaviour, micro),
            # with one minibatch the step begins with these very weights
            proximal=now if proximal is None else proximal[torch.from_numpy(micro.tokens).to(self.device)],
            advantages=self._of(flat.advantages, micro),
        )
        per_token, is_clipped = self._loss(inputs, self._loss_settings)
        if self.settings.entropy_coef > 0:
            per_token = per_token - self.settings.entropy_coef * entropy
        loss = per_token.sum() / n_tokens
        loss.backward()
        return _Seen(micro.tokens, now, loss.detach(), is_clipped, entropy.detach().sum(), micro.ids.numel())

    def _forget_gradient(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def _proximal(self, flat: FlatBatch) -> Tensor:
        """Log-probs [N] of the policy as it is now."""
        result = torch.empty(len(flat.targets), device=self.device)
        for micro in self._micro_batches(flat, np.arange(len(flat.fed))):
            with self._autocast():
                now = token_logprobs(self.model, micro, temperature=self.settings.temperature).logprobs
            result[torch.from_numpy(micro.tokens).to(self.device)] = now
        return result

    def _micro_batches(self, flat: FlatBatch, chosen: NDArray[np.int64]) -> Iterator[MicroBatch]:
        return micro_batches(flat, chosen, self.settings.micro_batch_tokens, self.device)

    def _of(self, values: NDArray[np.float32], micro: MicroBatch) -> Tensor:
        return torch.from_numpy(values[micro.tokens]).to(self.device)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.settings.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, getattr(torch, self.settings.dtype))

    def _metrics(self, flat: FlatBatch, results: Sequence[_Result]) -> dict[str, float]:
        seen = [each for result in results for each in result.seen]
        logprobs = np.empty(len(flat.targets), np.float32)
        is_clipped = np.zeros(len(flat.targets), bool)
        for each in seen:
            logprobs[each.tokens] = each.logprobs.cpu().numpy()
            is_clipped[each.tokens] = each.is_clipped.cpu().numpy()
        log_ratios = logprobs.astype(np.float64) - flat.behaviour
        self.trajectory_sums = trajectory_sums(log_ratios, flat.sample, len(flat.fed), is_clipped)
        n_tokens = sum(result.n_tokens for result in results)
        return {
            "loss": sum(result.loss * result.n_tokens for result in results) / n_tokens,
            "grad_norm": max(result.grad_norm for result in results),
            "lr": results[-1].lr,
            "entropy": sum(float(each.entropy) for each in seen) / n_tokens,
            "n_tokens": float(n_tokens),
            "n_padded_tokens": float(sum(each.n_padded for each in seen)),
            **summarize(self.trajectory_sums),
        }

    # ---------------------------------------------------------------- putting back
    def _copy_state(self) -> _Saved:
        tensors = [*self._parameters.values(), *moments_of(self._optimizer).values()]
        return _Saved([tensor.detach().clone() for tensor in tensors], self.optimizer_steps)

    @torch.no_grad()
    def _put_back(self, saved: _Saved) -> None:
        tensors = [*self._parameters.values(), *moments_of(self._optimizer).values()]
        for tensor, before in zip(tensors, saved.tensors, strict=True):
            tensor.copy_(before)
        self.optimizer_steps = saved.optimizer_steps

    # ---------------------------------------------------------------- weights and state
    def weights(self) -> dict[str, Tensor]:
        """All weights by their Hugging Face names, in `dtype`; tied ones share memory.

        In float32 they are the live tensors: take a snapshot if the next step comes before they are written.
        """
        state = self.model.state_dict()
        if self.settings.dtype == "float32":
            return dict(state)
        dtype = getattr(torch, self.settings.dtype)
        cast: dict[tuple[Any, ...], Tensor] = {}
        for name, tensor in state.items():
            key = (tensor.data_ptr(), tensor.shape, tensor.stride())
            if key not in cast:
                cast[key] = tensor.to(dtype) if tensor.is_floating_point() else tensor
            state[name] = cast[key]
        return dict(state)

    def snapshot(self) -> Callable[[Path], None]:
        """Copies in main memory of model, moments, RNG and counters.

        What is returned writes model.safetensors (float32, with config.json: a Hugging Face folder) and beside it
        optimizer.safetensors, rng.safetensors and trainer.json.
        """
        parts = {
            MODEL_FILE: snapshot(self.model.state_dict()),
            OPTIMIZER_FILE: snapshot(moments_of(self._optimizer, self._parameters)),
            RNG_FILE: snapshot(rng_state(self.device)),
        }
        state = {"optimizer_steps": self.optimizer_steps, "made_with": environment(self.device)}

        def write(folder: Path) -> None:
            self.model.config.save_pretrained(folder)
            for name, tensors in parts.items():
                write_tensors(folder / name, tensors)
            (folder / STATE_FILE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")

        return write

    def load(self, folder: Path, *, fresh_optimizer: bool = False) -> None:
        """Put a saved state back, whole or not at all.

        `fresh_optimizer` takes the weights alone and starts AdamW and its schedule anew, whatever the folder holds.
        Raises CheckpointError naming the part that is missing or does not fit.
        """
        weights = read_tensors(folder / MODEL_FILE, self.model.state_dict())
        own = moments_of(self._optimizer, self._parameters)
        if fresh_optimizer:
            moments, state, rng = {name: torch.zeros_like(held) for name, held in own.items()}, {}, None
        else:
            moments = read_tensors(folder / OPTIMIZER_FILE, own)
            state = read_json(folder / STATE_FILE)
            rng = read_tensors(folder / RNG_FILE, rng_state(self.device))
        steps = state.get("optimizer_steps", 0 if fresh_optimizer else None)
        if not isinstance(steps, int) or steps < 0:
            raise CheckpointError(f"{folder / STATE_FILE}: optimizer_steps is {steps!r}, a count is needed")
        with torch.no_grad():
            for held, read in ((self.model.state_dict(), weights), (own, moments)):
                for name, tensor in held.items():
                    tensor.copy_(read[name])
        if rng is not None:
            set_rng_state(rng, self.device)
        self.optimizer_steps = steps
        warn_of_other_machine(state.get("made_with", {}), environment(self.device))


def minibatches(flat: FlatBatch, count: int, seed: int) -> list[NDArray[np.int64]]:
    """Samples of each optimizer step, sizes equal to within one; those without a trained token are left out.

    One minibatch keeps the order of the batch. Several are dealt in the order of random numbers drawn from `seed`:
    `Random.random` is the one source whose sequence Python promises not to change.
    """
    order = np.arange(len(flat.fed))
    if count > 1:
        draw = random.Random(seed)
        keys = [draw.random() for _ in order]
        order = np.argsort(np.array(keys), kind="stable")
    parts = [np.sort(part) for part in np.array_split(order, count)]
    return [part for part in parts if flat.fed[part].any()]


def set_up_torch(settings: TorchSettings) -> None:
    """Threads and deterministic kernels, for the whole process."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    torch.use_deterministic_algorithms(settings.deterministic)
    torch.backends.cudnn.benchmark = not settings.deterministic
    # filling fresh memory only makes wrong kernels repeatable, and costs a quarter of a small step
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


class _Seen(NamedTuple):
    """What is kept of one micro-batch of n trained tokens; tensors stay on the device until the step is over."""

    tokens: NDArray[np.int64]  # [n] places in the FlatBatch
    logprobs: Tensor  # [n]
    loss: Tensor  # this micro-batch's share
    is_clipped: Tensor  # bool [n]
    entropy: Tensor  # sum
    n_padded: int


class _Result(NamedTuple):
    """One minibatch."""

    seen: list[_Seen]
    loss: float
    grad_norm: float  # before clipping
    lr: float
    n_tokens: int


class _Saved(NamedTuple):
    tensors: list[Tensor]
    optimizer_steps: int


def _load_model(folder: Path, settings: TorchSettings) -> Any:
    """The model in float32, in evaluation mode (no dropout), every weight trained.

    Raises ConfigError for a folder that does not hold all of the weights: Hugging Face would draw them at random.
    """
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation=settings.attn_implementation,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path = {str(folder)!r}: cannot be loaded ({error})") from error
    model, info = loaded
    absent = sorted({*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])})
    if absent:
        raise ConfigError(f"model.path = {str(folder)!r}: no weights for {', '.join(absent[:4])}")
    for parameter in model.parameters():
        # weights mapped from a file lie unaligned, and some kernels then round otherwise: bits must not depend on it
        parameter.data = parameter.data.clone()
    return model.requires_grad_(True).eval()
