"""Settings of the trainer that nothing would look at. One that was set and does nothing is refused, not passed over.

Each rule says of some settings when they count and what they go with. A setting counts as set when it differs from its
default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from engine.config_fields import get, leaves
from engine.config_problems import Problem
from engine.config_toml import show
from engine.settings import Config, TrainerConfig

_REWARDS_OF_TOKENS = ("reinforce_plus_plus", "ppo")
WITHOUT_ADVANTAGES = frozenset({"sft", "opd"})  # losses that look at no reward


class Rule(NamedTuple):
    names: tuple[str, ...]  # of `trainer`
    counts: Callable[[TrainerConfig], bool]
    cause: str  # the setting of `trainer` by which it does not count
    goes_with: str


def _weighs(trainer: TrainerConfig) -> bool:
    return trainer.loss in ("tis", "decoupled_ppo") or trainer.use_tis


def _clips(trainer: TrainerConfig) -> bool:
    return trainer.loss in ("ppo", "decoupled_ppo", "gspo", "opd")


_WEIGHTS = 'trainer.loss = "tis" or "decoupled_ppo" and with trainer.use_tis = true'
RULES = (
    Rule(
        ("kl_coef", "kl_reward_type", "gamma"),
        lambda trainer: trainer.advantage_estimator in _REWARDS_OF_TOKENS,
        "advantage_estimator",
        "reinforce_plus_plus and ppo",
    ),
    Rule(
        (
            "lambd",
            "normalize_advantages",
            "value_clip",
            "critic_lr",
            "critic_lr_warmup",
            "num_critic_only_steps",
        ),
        lambda trainer: trainer.advantage_estimator == "ppo",
        "advantage_estimator",
        "ppo",
    ),
    Rule(
        ("advantage_estimator",),
        lambda trainer: trainer.loss not in WITHOUT_ADVANTAGES,
        "loss",
        "losses that look at rewards",
    ),
    Rule(
        ("eps_clip", "eps_clip_high"),
        lambda trainer: _clips(trainer) or trainer.loss == "cispo",
        "loss",
        'trainer.loss = "ppo", "decoupled_ppo", "gspo", "cispo" or "opd"',
    ),
    Rule(("eps_clip_c",), _clips, "loss", 'trainer.loss = "ppo", "decoupled_ppo", "gspo" or "opd"'),
    Rule(("m2_threshold",), lambda trainer: trainer.loss == "m2po", "loss", 'trainer.loss = "m2po"'),
    Rule(
        ("proximal_policy",),
        lambda trainer: trainer.loss == "decoupled_ppo" or trainer.use_tis,
        "loss",
        'trainer.loss = "decoupled_ppo"',
    ),
    Rule(("tis_clip", "tis_clip_low", "tis_mode", "tis_level"), _weighs, "loss", _WEIGHTS),
    Rule(
        ("tis_veto",),
        lambda trainer: trainer.loss != "sft",
        "loss",
        "losses that look at the policy that sampled",
    ),
    Rule(
        ("use_opsm",),
        lambda trainer: trainer.loss not in WITHOUT_ADVANTAGES,
        "loss",
        "losses that look at rewards and at the policy that sampled",
    ),
    Rule(("opsm_delta",), lambda trainer: trainer.use_opsm, "use_opsm", "trainer.use_opsm = true"),
    Rule(
        ("kl_loss_type", "use_unbiased_kl"),
        lambda trainer: trainer.kl_loss_coef > 0,
        "kl_loss_coef",
        "trainer.kl_loss_coef above 0",
    ),
    Rule(
        ("ref_model",),
        lambda trainer: trainer.kl_loss_coef > 0 or trainer.kl_coef > 0,
        "kl_loss_coef",
        "trainer.kl_loss_coef or trainer.kl_coef above 0",
    ),
    Rule(
        ("loss_constant_length",),
        lambda trainer: trainer.loss_aggregation == "constant",
        "loss_aggregation",
        'trainer.loss_aggregation = "constant"',
    ),
    Rule(
        ("lr_hold", "lr_end"),
        lambda trainer: trainer.lr_schedule != "constant",
        "lr_schedule",
        'trainer.lr_schedule = "linear" or "cosine"',
    ),
    Rule(
        ("lora.alpha", "lora.target_modules"),
        lambda trainer: trainer.lora.rank > 0,
        "lora.rank",
        "trainer.lora.rank above 0",
    ),
    *(
        Rule(
            tuple(
                leaf.key.removeprefix("trainer.")
                for leaf in leaves()
                if leaf.key.startswith(f"trainer.{backend}.")
            ),
            lambda trainer, backend=backend: trainer.backend == backend,
            "backend",
            f'trainer.backend = "{backend}"',
        )
        for backend in ("fsdp2", "megatron")
    ),
)
_DEFAULTS = Config().trainer


def find_without_effect(config: Config) -> Iterator[Problem]:
    trainer = config.trainer
    for rule in RULES:
        if rule.counts(trainer):
            continue
        cause = f"trainer.{rule.cause}"
        for name in rule.names:
            value = get(trainer, name)
            if value != get(_DEFAULTS, name):
                yield Problem(
                    (f"trainer.{name}", cause),
                    f"{_shown(f'trainer.{name}', value)} with {_shown(cause, get(config, cause))}: it goes with "
                    f"{rule.goes_with} only; remove it, or change {cause}",
                )


def _shown(key: str, value: Any) -> str:
    return f"{key} unset" if value is None else f"{key} = {show(value)}"
