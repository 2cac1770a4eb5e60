"""What the torch trainer needs to know, apart from the model folder. No torch here: settings are checked early."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from engine.interfaces import Inputs
from streams.errors import ConfigError

LossName = Literal["ppo", "decoupled_ppo", "tis", "gspo", "cispo", "m2po", "opd", "sft"]
Aggregation = Literal["token", "sample", "prompt", "constant"]
EstimatorName = Literal[
    "grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gspo", "ppo"
]


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
    eps_clip_c: float | None = None  # dual clip; None: off
    m2_threshold: float = 0.04  # m2po
    proximal_policy: Literal["recomputed", "interpolated"] = "recomputed"  # of decoupled PPO
    tis_clip: float = 2.0  # cap of importance weights
    tis_clip_low: float = 0.0  # their floor
    tis_mode: Literal["truncate", "mask"] = "truncate"
    tis_level: Literal["token", "sequence", "geometric"] = "token"
    tis_veto: float | None = None  # None: off
    use_opsm: bool = False  # off-policy sequence masking
    opsm_delta: float = 1e-4
    loss_aggregation: Aggregation | None = None  # None: "sample" for gspo, else "token"
    loss_constant_length: int = 1024  # tokens; with loss_aggregation = "constant"
    entropy_coef: float = 0.0
    kl_loss_coef: float = 0.0
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "k3"
    use_unbiased_kl: bool = False  # weigh it by the ratio to the behaviour policy
    ref_model: str = ""  # folder of the reference model; "": that of the model itself
    temperature: float = 1.0  # of the sampling, so that log-probs are those of the policy that sampled
    # advantages
    advantage_estimator: EstimatorName = "grpo"
    kl_coef: float = 0.0  # of the KL to the reference model in the reward of each token
    kl_reward_type: Literal["k1", "k2", "k3", "low_var_kl"] = "k1"
    gamma: float = 1.0  # discount of a reward for each trained token before it
    lambd: float = 1.0  # λ of GAE
    normalize_advantages: bool = False  # of "ppo": over the trained tokens of a step
    # critic of "ppo"
    value_clip: float = 0.2  # how far from the value before the step; 0: no clipping
    critic_lr: float | None = None  # None: lr
    critic_lr_warmup: int = 0  # optimizer steps
    num_critic_only_steps: int = 0  # training steps at the beginning that leave the policy as it is
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
    # adapter
    lora_rank: int = 0  # 0: the whole model is trained
    lora_alpha: float = 16.0
    lora_target_modules: tuple[str, ...] = ("all-linear",)
    seed: int = 0  # of its first weights
    # machine
    micro_batch_tokens: int = 8192  # padded tokens of one forward
    packing: bool = False  # rows one after another instead of padded (engine/algorithms/packing.py)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "cpu"
    attn_implementation: str = "sdpa"
    deterministic: bool = True
    threads: int | None = None  # torch's threads on the CPU; None: as they are

    def __post_init__(self) -> None:
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
        return self.loss_function in ("recomputed_ppo", "decoupled_ppo") and not self.interpolates

    @property
    def interpolates(self) -> bool:
        return self.loss_function == "decoupled_ppo" and self.proximal_policy == "interpolated"

    @property
    def discounts(self) -> bool:
        """Whether the returns of a sample's tokens differ, so that they are made beside the model and not in a cut."""
        return self.advantage_estimator == "reinforce_plus_plus" and (self.kl_coef > 0 or self.gamma < 1)

    @property
    def needs_reference(self) -> bool:
        return self.kl_loss_coef > 0 or self.kl_coef > 0

    @property
    def inputs(self) -> Inputs:
        """What samples must carry: rewards as they are, where advantages are made of them token by token."""
        return Inputs(
            "ppo" if self.discounts else self.advantage_estimator,
            with_ages=self.interpolates,
            with_teacher=self.loss == "opd",
        )

    @property
    def aggregation(self) -> Aggregation:
        return self.loss_aggregation or ("sample" if self.loss == "gspo" else "token")


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
