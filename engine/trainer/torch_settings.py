"""What the torch trainer needs to know, apart from the model folder. No torch here: settings are checked early."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from streams.errors import ConfigError

LossName = Literal["ppo", "decoupled_ppo", "tis"]


class TorchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Names as in the configuration's section `trainer`.

    An optimizer step is one minibatch; a training step (a batch of the ledger) has `num_steps_per_rollout` of them.
    Raises ConfigError for what cannot be done.
    """

    # loss
    loss: LossName = "ppo"
    use_rollout_logprobs: bool = True  # with "ppo": clip against the recorded log-probs, else recomputed ones
    use_tis: bool = False  # with recomputed ones: weight by recomputed / recorded
    eps_clip: float = 0.2
    eps_clip_high: float | None = None  # None: eps_clip
    tis_clip: float = 2.0  # cap of importance weights
    tis_mode: Literal["truncate", "mask"] = "truncate"
    entropy_coef: float = 0.0
    kl_loss_coef: float = 0.0
    temperature: float = 1.0  # of the sampling, so that log-probs are those of the policy that sampled
    # optimizer
    num_steps_per_rollout: int = 1
    lr: float = 1e-6
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    lr_warmup: int = 0  # optimizer steps
    lr_hold: float = (
        0.0  # share of the steps after the warm-up at full rate before it falls ("WSD" schedules)
    )
    lr_end: float = 0.0  # reached after total_steps
    total_steps: int | None = None  # optimizer steps; needed unless the schedule is constant
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0  # largest global norm; 0: no clipping
    # machine
    micro_batch_tokens: int = 8192  # padded tokens of one forward
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "cpu"
    attn_implementation: str = "sdpa"
    deterministic: bool = True
    threads: int | None = None  # torch's threads on the CPU; None: as they are

    def __post_init__(self) -> None:
        if self.kl_loss_coef > 0:
            raise ConfigError(
                f"trainer.kl_loss_coef = {self.kl_loss_coef}: this version has no KL term to a reference model; "
                "set it to 0"
            )
        if self.dtype == "float16":
            raise ConfigError(
                'model.dtype = "float16": training in it needs loss scaling, which this version does not have; '
                'use "bfloat16" or "float32"'
            )
        if self.lr_schedule != "constant" and self.total_steps is None:
            raise ConfigError(
                f'trainer.lr_schedule = "{self.lr_schedule}" needs a number of steps; set run.steps, or '
                'lr_schedule = "constant"'
            )
        if not self.temperature > 0:
            raise ConfigError(
                f"rollout.rollout_temperature = {self.temperature}: must be above 0 to train on"
            )

    @property
    def loss_function(self) -> str:
        """Name in `engine.algorithms.losses.LOSSES`."""
        if self.loss == "ppo" and not self.use_rollout_logprobs:
            return "decoupled_ppo" if self.use_tis else "recomputed_ppo"
        return self.loss

    @property
    def needs_proximal(self) -> bool:
        """Whether the loss looks at the policy as it was when the step began."""
        return self.loss_function in ("recomputed_ppo", "decoupled_ppo")


def learning_rate(settings: TorchSettings, step: int) -> float:
    """Rate of optimizer step 1, 2, …: up to `lr`, held, then by schedule to `lr_end` after total_steps."""
    if step <= settings.lr_warmup:
        return settings.lr * step / settings.lr_warmup
    if settings.lr_schedule == "constant" or settings.total_steps is None:
        return settings.lr
    after_warmup = max(settings.total_steps - settings.lr_warmup, 1)
    held = round(after_warmup * settings.lr_hold)
    done = (step - 1 - settings.lr_warmup - held) / max(after_warmup - held, 1)
    done = min(max(done, 0.0), 1.0)
    fall = done if settings.lr_schedule == "linear" else (1 - math.cos(math.pi * done)) / 2
    return settings.lr + (settings.lr_end - settings.lr) * fall
