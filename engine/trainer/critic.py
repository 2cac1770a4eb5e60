"""PPO's critic: a second model that says what reward is to be expected, and the step of policy and critic together.

    plan ─► critic: V of each trained token ─► GAE ─► plan with advantages ─► Stepper (the policy's step)
                │                               └─ returns ─► the critic's own gradient, judged
                └──────────── applied once the policy's step has been taken ◄─┘

The critic is the policy's architecture with an output layer of one row, which starts at 0: its first word on every
token is "nothing to be expected", and the first advantages are plain returns. It begins with the weights of model.path
and has its own AdamW. Whole or not at all, as every step: what is not finite leaves both models as they were.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.algorithms.critic import explained_variance, value_loss
from engine.algorithms.logprobs import FlatBatch, MicroBatch, logits_at, micro_batches
from engine.algorithms.returns import Gae, gae, normalized, token_rewards
from engine.devices.moving import moved, on_device
from engine.interfaces import BadStep, CheckpointError
from engine.trainer.plan import Part, Plan
from engine.trainer.stepper import Measured, Stepper
from engine.trainer.torch_settings import TorchSettings
from engine.trainer.torch_state import make_optimizer, moments_of, read_json, read_tensors, write_tensors
from engine.weights.tensors import snapshot

logger = logging.getLogger(__name__)

MODEL_FILE, OPTIMIZER_FILE, STATE_FILE = "critic.safetensors", "critic_optimizer.safetensors", "critic.json"
_COUNTERS = ("steps", "optimizer_steps")


class Critic:
    """One value model on one device, with its AdamW.

        critic = Critic(load_model(folder, settings), settings)
        values = critic.values(plan.flat)                      # [N]
        judged = critic.judge(plan.flat, plan.parts[0], values, returns)
        critic.apply()

    `steps` counts training steps, `optimizer_steps` its own.
    """

    def __init__(self, model: Any, settings: TorchSettings) -> None:
        """`model`: a causal language model in float32; its output layer is replaced."""
        rate = settings.lr if settings.critic_lr is None else settings.critic_lr
        self.settings, self.rate, self.device = settings, rate, torch.device(settings.device)
        self.model = moved(_with_value_head(model), self.device)
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = make_optimizer(self.parameters.values(), msgspec.structs.replace(settings, lr=rate))
        self.steps = self.optimizer_steps = 0

    # ---------------------------------------------------------------- training
    @torch.no_grad()
    def values(self, flat: FlatBatch) -> NDArray[np.float32]:
        """V of the state before each trained token, [N]."""
        found = np.zeros(len(flat.targets), np.float32)
        for micro in self._micro_batches(flat, np.arange(len(flat.fed))):
            found[micro.tokens] = self._values_at(micro).cpu().numpy()
        return found

    def judge(
        self, flat: FlatBatch, part: Part, before: NDArray[np.float32], returns: NDArray[np.float64]
    ) -> Judged:
        """The gradient of one minibatch, clipped. Raises BadStep where it is not finite; nothing is applied."""
        losses, n_clipped = [], 0
        for micro in self._micro_batches(flat, part.rows):
            each = value_loss(
                self._values_at(micro),
                self._of(before, micro),
                self._of(returns.astype(np.float32), micro),
                self.settings.value_clip,
            )
            loss = each.loss.sum() / part.n_tokens
            loss.backward()
            losses.append(float(loss.detach()))
            n_clipped += int(each.is_clipped.sum())
        loss = math.fsum(losses) if all(map(math.isfinite, losses)) else math.nan
        if not math.isfinite(loss):
            raise BadStep("nonfinite_loss", f"critic: loss {loss} over {part.n_tokens} tokens")
        limit = self.settings.clip_grad or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters.values(), limit))
        if not math.isfinite(norm):
            raise BadStep("nonfinite_gradient", f"critic: gradient norm {norm} over {part.n_tokens} tokens")
        return Judged(loss, norm, n_clipped, part.n_tokens)

    def apply(self) -> float:
        """One optimizer step on the gradient that was judged; returns its learning rate."""
        self.optimizer_steps += 1
        warmup = self.settings.critic_lr_warmup
        rate = self.rate * min(1.0, self.optimizer_steps / warmup) if warmup else self.rate
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        self.forget_gradient()
        return rate

    def forget_gradient(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def copy_state(self) -> Callable[[], None]:
        """Copies of weights and optimizer; what is returned puts them back, bit for bit."""
        copies = [tensor.detach().clone() for tensor in self._state()]
        counted = self.optimizer_steps

        @torch.no_grad()
        def put_back() -> None:
            for tensor, before in zip(self._state(), copies, strict=True):
                tensor.copy_(before)
            self.optimizer_steps = counted

        return put_back

    def _state(self) -> list[Tensor]:
        return [*self.parameters.values(), *moments_of(self.optimizer).values()]

    def _micro_batches(self, flat: FlatBatch, rows: NDArray[np.int64]) -> Sequence[MicroBatch]:
        return list(micro_batches(flat, rows, self.settings.micro_batch_tokens, self.device))

    def _values_at(self, micro: MicroBatch) -> Tensor:
        with self._autocast():
            return logits_at(self.model, micro)[:, 0].float()

    def _of(self, values: NDArray[np.float32], micro: MicroBatch) -> Tensor:
        return on_device(values[micro.tokens], self.device)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.settings.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, getattr(torch, self.settings.dtype))

    # ---------------------------------------------------------------- state
    def snapshot(self) -> Callable[[Path], None]:
        """Copies in main memory; what is returned writes them: weights, moments, counters."""
        parts = {
            MODEL_FILE: snapshot(self.model.state_dict()),
            OPTIMIZER_FILE: snapshot(moments_of(self.optimizer, self.parameters)),
        }
        counters = {name: getattr(self, name) for name in _COUNTERS}

        def write(folder: Path) -> None:
            for name, tensors in parts.items():
                write_tensors(folder / name, tensors)
            (folder / STATE_FILE).write_text(json.dumps(counters) + "\n", encoding="utf-8")

        return write

    def read(self, folder: Path, *, fresh_optimizer: bool = False) -> Callable[[], None]:
        """A saved state, checked; what is returned puts it in place, and cannot fail.

        `fresh_optimizer` takes the weights alone; where the folder has no critic, this one stays as it was made. Raises
        CheckpointError naming the part that is missing or does not fit.
        """
        if fresh_optimizer and not (folder / MODEL_FILE).exists():
            logger.warning("%s has no critic: a fresh one begins", folder)
            return lambda: None
        held = dict(self.model.state_dict()), moments_of(self.optimizer, self.parameters)
        weights = read_tensors(folder / MODEL_FILE, held[0])
        if fresh_optimizer:
            moments = {name: torch.zeros_like(tensor) for name, tensor in held[1].items()}
            counters = dict.fromkeys(_COUNTERS, 0)
        else:
            moments = read_tensors(folder / OPTIMIZER_FILE, held[1])
            counters = _counters(folder / STATE_FILE)

        @torch.no_grad()
        def settle() -> None:
            for live, read in zip(held, (weights, moments), strict=True):
                for name, tensor in live.items():
                    tensor.copy_(read[name])
            for name, count in counters.items():
                setattr(self, name, count)

        return settle


class Judged(NamedTuple):
    """One minibatch of the critic."""

    loss: float
    grad_norm: float  # before clipping
    n_clipped: int
    n_tokens: int


class Taken(NamedTuple):
    measured: Measured  # of the policy
    metrics: dict[str, float]  # of the critic


class ActorCritic:
    """The step of a policy and its critic: the same minibatches, the same bad steps."""

    def __init__(self, stepper: Stepper, critic: Critic) -> None:
        self.stepper, self.critic, self.settings = stepper, critic, stepper.settings

    def take(self, plan: Plan) -> Taken:
        """Raises BadStep; both models are then as they were."""
        values = self.critic.values(plan.flat)
        found = self.advantages(plan, values)
        plan = plan._replace(flat=plan.flat._replace(advantages=self._weights(found)))
        learn = self.critic.steps >= self.settings.num_critic_only_steps
        # of several minibatches all but the last are applied before the policy is judged
        put_back = self.critic.copy_state() if len(plan.parts) > 1 else None
        try:
            judged = self._judge(plan, values, found.returns)
            measured = self.stepper.take(plan, learn=learn)
        except BaseException:
            self.critic.forget_gradient()
            if put_back is not None:
                put_back()
            raise
        rate = self.critic.apply()
        self.critic.steps += 1
        n_tokens = sum(each.n_tokens for each in judged)
        return Taken(
            measured,
            {
                "value_loss": sum(each.loss * each.n_tokens for each in judged) / n_tokens,
                "value_clip_fraction": sum(each.n_clipped for each in judged) / n_tokens,
                "value_mean": float(values.mean(dtype=np.float64)),
                "return_mean": float(found.returns.mean()),
                "explained_variance": explained_variance(values, found.returns),
                "critic_grad_norm": max(each.grad_norm for each in judged),
                "critic_lr": rate,
            },
        )

    def advantages(self, plan: Plan, values: NDArray[np.float32]) -> Gae:
        """By GAE over the trained tokens, with the KL term of the reward if there is one."""
        flat, settings = plan.flat, self.settings
        rewards = token_rewards(flat.advantages, flat.token_starts, self.stepper.penalties(plan))
        return gae(rewards, values, flat.token_starts, gamma=settings.gamma, lambd=settings.lambd)

    def _weights(self, found: Gae) -> NDArray[np.float32]:
        values = normalized(found.advantages) if self.settings.normalize_advantages else found.advantages
        return values.astype(np.float32)

    def _judge(self, plan: Plan, values: NDArray[np.float32], returns: NDArray[np.float64]) -> list[Judged]:
        """Every minibatch, the last of them not yet applied."""
        judged = [self.critic.judge(plan.flat, plan.parts[0], values, returns)]
        for part in plan.parts[1:]:
            self.critic.apply()
            judged.append(self.critic.judge(plan.flat, part, values, returns))
        return judged


def _with_value_head(model: Any) -> Any:
    """The model with an output layer of one row, at 0, and nothing tied to it."""
    model.config.tie_word_embeddings = False
    width = model.get_output_embeddings().in_features
    head = torch.nn.Linear(width, 1, bias=False, dtype=torch.float32)
    torch.nn.init.zeros_(head.weight)
    model.set_output_embeddings(head)
    return model.requires_grad_(True).eval()


def _counters(path: Path) -> dict[str, int]:
    state = read_json(path)
    for name in _COUNTERS:
        if type(state.get(name)) is not int or state[name] < 0:
            raise CheckpointError(f"{path}: {name} is {state.get(name)!r}, a count is needed")
    return {name: state[name] for name in _COUNTERS}
