"""The trainer of a Hugging Face causal language model on one device.

    TorchBackend.step:  batch ─► plan ─► stepper ─► TorchPolicy (this model, its AdamW) ─► measures

Deterministic: no dropout (the model stays in evaluation mode), a fixed order of samples, torch's deterministic
kernels, so the same state and batch give the same bits on the same machine with the same number of threads.

Weights are held in float32 whatever the model computes in: in bfloat16 a small update would round to nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from consumers.telemetry import SUMS, summarize, trajectory_sums
from engine import devices
from engine.algorithms import packing
from engine.algorithms.logprobs import (
    FlatBatch,
    MicroBatch,
    micro_batches,
    packed_micro_batches,
    token_logprobs,
)
from engine.devices.moving import moved
from engine.interfaces import BadStep, CheckpointError, TrainBatch
from engine.trainer.critic import ActorCritic, Critic
from engine.trainer.lora import ADAPTER_FILE, Adapter
from engine.trainer.plan import plan_step
from engine.trainer.policy import Alone, MicroLoss
from engine.trainer.stepper import Measured, Stepper
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
from engine.weights.lora import Base
from engine.weights.tensors import snapshot
from streams.errors import ConfigError
from streams.trajectory import Payload

MODEL_FILE, OPTIMIZER_FILE, STATE_FILE = "model.safetensors", "optimizer.safetensors", "trainer.json"
RNG_FILE = "rng.safetensors"


class TorchPolicy:
    """The model and its AdamW: what a step asks of them (engine/trainer/policy.py)."""

    def __init__(self, model: Any, settings: TorchSettings, reference: Any = None) -> None:
        self.settings, self.model, self._reference = settings, model, reference
        self.device = torch.device(settings.device)
        # those that are trained; a tied one under its first name
        self.parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self.optimizer = make_optimizer(self.parameters.values(), settings)

    def micro_batches(self, flat: FlatBatch, rows: NDArray[np.int64]) -> list[MicroBatch]:
        if self.settings.packing:
            return packed_micro_batches(flat, rows, self.settings.micro_batch_tokens, self.device)
        return list(micro_batches(flat, rows, self.settings.micro_batch_tokens, self.device))

    def backward(self, micros: Sequence[MicroBatch], loss: MicroLoss) -> None:
        for micro in micros:
            with self._autocast():
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
            with self._autocast():
                now = token_logprobs(model, micro, temperature=self.settings.temperature).logprobs
            yield micro, now

    def clip_gradient(self, limit: float) -> float:
        return float(torch.nn.utils.clip_grad_norm_(self.parameters.values(), limit))

    def apply(self, rate: float) -> None:
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()

    def forget_gradient(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def copy_state(self) -> Callable[[], None]:
        copies = [tensor.detach().clone() for tensor in self._state()]

        @torch.no_grad()
        def put_back() -> None:
            for tensor, before in zip(self._state(), copies, strict=True):
                tensor.copy_(before)

        return put_back

    def _state(self) -> list[Tensor]:
        return [*self.parameters.values(), *moments_of(self.optimizer).values()]

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.settings.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, getattr(torch, self.settings.dtype))


class TorchBackend:
    """One model and its AdamW. `step` until done; `snapshot` and `load` between steps, on the same thread.

    Settles process-wide switches of torch (threads, deterministic kernels) when it is made.

        backend = TorchBackend(Path("model"), TorchSettings(lr=1e-3))
        metrics = backend.step(batch)
        store.publish(backend.weights(), epoch=0, version=1, step=1)
    """

    def __init__(self, model_folder: Path, settings: TorchSettings) -> None:
        self.settings = settings
        self.device = devices.ready(settings.device).torch
        set_up_torch(settings)
        self.model = load_model(model_folder, settings)
        self._base = Base(model_folder) if settings.lora_rank else None
        self._adapter = Adapter(self.model, settings) if settings.lora_rank else None
        moved(self.model, self.device)
        self.policy = TorchPolicy(self.model, settings, self._load_reference(model_folder))
        self._stepper = Stepper(self.policy, Alone(), settings, partial(learning_rate, settings))
        is_ppo = settings.advantage_estimator == "ppo"
        self._critic = Critic(load_model(model_folder, settings), settings) if is_ppo else None
        self.inputs = settings.inputs
        self._limits = Limits.of(self.model)
        self.trajectory_sums: NDArray[np.float64] = np.zeros((0, len(SUMS)))

    def _load_reference(self, model_folder: Path) -> Any:
        """The frozen model that the loss is tied to; None without a KL term. Nothing of it is in a checkpoint."""
        if not self.settings.needs_reference:
            return None
        folder = Path(self.settings.ref_model) if self.settings.ref_model else model_folder
        reference = load_model(folder, self.settings, key="trainer.ref_model").requires_grad_(False)
        if Limits.of(reference).vocab_size != Limits.of(self.model).vocab_size:
            raise ConfigError(
                f"trainer.ref_model = {str(folder)!r}: {Limits.of(reference).vocab_size} tokens, the model has "
                f"{Limits.of(self.model).vocab_size}; a reference model needs the same vocabulary"
            )
        return moved(reference, self.device)

    @property
    def optimizer_steps(self) -> int:
        return self._stepper.optimizer_steps

    # ---------------------------------------------------------------- training
    def refuses(self, payload: Payload) -> str:
        return self._limits.refuses(payload)

    def step(self, batch: TrainBatch) -> dict[str, float]:
        """One training step. Metrics are over all trained tokens; of several minibatches, `grad_norm` is the largest.

        Log-ratios are taken at each sample's own forward: with several minibatches, later ones are measured
        against weights that earlier ones have moved. Raises BadStep.
        """
        started = time.perf_counter()
        plan = plan_step(batch, self.settings)
        self._limits.check(batch)
        more: dict[str, float] = {}
        if self._critic is None:
            measured = self._stepper.take(plan)
        else:
            measured, more = ActorCritic(self._stepper, self._critic).take(plan)
        self.trajectory_sums = sums_of(plan.flat, measured)
        more["seconds"] = time.perf_counter() - started
        return metrics_of(measured, self.trajectory_sums) | more

    # ---------------------------------------------------------------- weights and state
    def weights(self) -> dict[str, Tensor]:
        """All weights by their Hugging Face names, in `dtype`; tied ones share memory. Of an adapter: it alone.

        In float32 they are the live tensors: take a snapshot if the next step comes before they are written.
        """
        if self._adapter is not None:
            return self._adapter.tensors()
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

    @property
    def _weights_file(self) -> str:
        return MODEL_FILE if self._adapter is None else ADAPTER_FILE

    def _trained(self) -> dict[str, Tensor]:
        """What a checkpoint keeps of the model: live tensors, in float32."""
        return dict(self.model.state_dict()) if self._adapter is None else self._adapter.tensors()

    def snapshot(self) -> Callable[[Path], None]:
        """Copies in main memory of model, moments, RNG and counters.

        What is returned writes model.safetensors (float32, with config.json: a Hugging Face folder) and beside it
        optimizer.safetensors, rng.safetensors and trainer.json. Of an adapter: the folder that PEFT opens, without the
        base model, whose digest is in trainer.json.
        """
        parts = {
            self._weights_file: snapshot(self._trained()),
            OPTIMIZER_FILE: snapshot(moments_of(self.policy.optimizer, self.policy.parameters)),
            RNG_FILE: snapshot(rng_state(self.device)),
        }
        state = {"optimizer_steps": self.optimizer_steps, "made_with": environment(self.device)}
        if self._base is not None:
            state["base_digest"] = self._base.digest

        write_critic = None if self._critic is None else self._critic.snapshot()

        def write(folder: Path) -> None:
            if write_critic is not None:
                write_critic(folder)
            if self._adapter is None:
                self.model.config.save_pretrained(folder)
            else:
                self._adapter.write_config(folder)
            for name, tensors in parts.items():
                write_tensors(folder / name, tensors)
            (folder / STATE_FILE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")

        return write

    def load(self, folder: Path, *, fresh_optimizer: bool = False) -> None:
        """Put a saved state back, whole or not at all.

        `fresh_optimizer` takes the weights alone and starts AdamW and its schedule anew, whatever the folder holds.
        Raises CheckpointError naming the part that is missing or does not fit.
        """
        weights = read_tensors(folder / self._weights_file, self._trained())
        own = moments_of(self.policy.optimizer, self.policy.parameters)
        if fresh_optimizer:
            moments, state, rng = {name: torch.zeros_like(held) for name, held in own.items()}, {}, None
        else:
            moments = read_tensors(folder / OPTIMIZER_FILE, own)
            state = read_json(folder / STATE_FILE)
            rng = read_tensors(folder / RNG_FILE, rng_state(self.device))
        steps = state.get("optimizer_steps", 0 if fresh_optimizer else None)
        if not isinstance(steps, int) or steps < 0:
            raise CheckpointError(f"{folder / STATE_FILE}: optimizer_steps is {steps!r}, a count is needed")
        if self._base is not None and state.get("base_digest", self._base.digest) != self._base.digest:
            raise CheckpointError(
                f"{folder}: an adapter of a base model with digest {state['base_digest'][:16]}, model.path holds "
                f"{self._base.digest[:16]}"
            )
        settle_critic = None
        if self._critic is not None:
            settle_critic = self._critic.read(folder, fresh_optimizer=fresh_optimizer)
        with torch.no_grad():
            for held, read in ((self._trained(), weights), (own, moments)):
                for name, tensor in held.items():
                    tensor.copy_(read[name])
        if settle_critic is not None:
            settle_critic()
        if rng is not None:
            set_rng_state(rng, self.device)
        self._stepper.optimizer_steps = steps
        warn_of_other_machine(state.get("made_with", {}), environment(self.device))


class Limits:
    """What a model has a row for: on an accelerator, anything else would end the process, not the step."""

    def __init__(self, vocab_size: int, max_length: int) -> None:
        self.vocab_size, self.max_length = vocab_size, max_length

    @classmethod
    def of(cls, model: Any) -> Limits:
        positions = model.config.get_text_config().max_position_embeddings or 1 << 31
        return cls(model.get_input_embeddings().num_embeddings, positions)

    def refuses(self, payload: Payload) -> str:
        """Why a sample can never be trained on; "" if it can."""
        length = len(payload.prompt_ids) + len(payload.response_ids)
        if length > self.max_length:
            return f"{length} tokens, the model takes {self.max_length}"
        top = max(int(payload.prompt_ids.max(initial=0)), int(payload.response_ids.max(initial=0)))
        return f"token {top}, the model has {self.vocab_size}" if top >= self.vocab_size else ""

    def check(self, batch: TrainBatch) -> None:
        """Raises BadStep naming the sample."""
        for sample in batch.samples:
            if refusal := self.refuses(sample.payload):
                reason = "bad_token_id" if refusal.startswith("token") else "too_long"
                raise BadStep(reason, f"{sample.uid}: {refusal}")


def sums_of(flat: FlatBatch, measured: Measured) -> NDArray[np.float64]:
    """The step's sums of each trajectory, [S, 10]."""
    log_ratios = measured.logprobs.astype(np.float64) - flat.behaviour
    return trajectory_sums(log_ratios, flat.sample, len(flat.fed), measured.is_clipped, measured.is_masked)


def metrics_of(measured: Measured, sums: NDArray[np.float64]) -> dict[str, float]:
    return {
        "loss": measured.loss,
        "grad_norm": measured.grad_norm,
        "lr": measured.lr,
        "entropy": measured.entropy,
        **({} if measured.kl is None else {"kl_loss": measured.kl}),
        "n_tokens": float(measured.n_tokens),
        "n_padded_tokens": float(measured.n_padded_tokens),
        **summarize(sums),
    }


def set_up_torch(settings: TorchSettings) -> None:
    """Threads and deterministic kernels, for the whole process."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    devices.named(settings.device).set_deterministic(settings.deterministic)
    torch.use_deterministic_algorithms(settings.deterministic)
    # filling fresh memory only makes wrong kernels repeatable, and costs a quarter of a small step
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def load_model(folder: Path, settings: TorchSettings, *, key: str = "model.path") -> Any:
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
        raise ConfigError(f"{key} = {str(folder)!r}: cannot be loaded ({error})") from error
    model, info = loaded
    absent = sorted({*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])})
    if absent:
        raise ConfigError(f"{key} = {str(folder)!r}: no weights for {', '.join(absent[:4])}")
    for parameter in model.parameters():
        # weights mapped from a file lie unaligned, and some kernels then round otherwise: bits must not depend on it
        parameter.data = parameter.data.clone()
    if settings.packing:
        packing.use_in(model)
    return model.requires_grad_(True).eval()
