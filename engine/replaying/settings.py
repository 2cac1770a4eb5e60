"""Which settings of a run may be changed for a replay, and which cannot matter to one.

Everything up to the batch is history: prompts, sampling, scoring and the groups of each step are what the log holds.
What a replay can change is how the trainer learns from them, and, downwards, how old they may be.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from engine.config import Config, load_config
from engine.config_fields import get, leaves
from engine.config_toml import show
from streams.errors import ConfigError

# where the steps are made again, which is no other experiment
PLACES = ("model.device", "model.path", "trainer.n_ranks")
LIMIT, ON_STALE = "staleness.max_weight_staleness", "staleness.on_stale"
_SCALAR = ("trainer.advantage_estimator", "trainer.lr", "trainer.adam_beta1", "trainer.adam_beta2")
_TORCH = (
    *("trainer.loss", "trainer.advantage_estimator", "trainer.use_rollout_logprobs", "trainer.use_tis"),
    *("trainer.behaviour_policy", "trainer.proximal_policy", "trainer.m2_threshold"),
    *("trainer.eps_clip", "trainer.eps_clip_high", "trainer.eps_clip_c"),
    *(
        "trainer.tis_clip",
        "trainer.tis_clip_low",
        "trainer.tis_mode",
        "trainer.tis_level",
        "trainer.tis_veto",
    ),
    *("trainer.use_opsm", "trainer.opsm_delta", "trainer.loss_aggregation", "trainer.loss_constant_length"),
    *("trainer.entropy_coef", "trainer.kl_loss_coef", "trainer.kl_loss_type", "trainer.use_unbiased_kl"),
    "trainer.ref_model",
    *("trainer.kl_coef", "trainer.kl_reward_type", "trainer.gamma", "trainer.lambd"),
    *("trainer.normalize_advantages", "trainer.value_clip", "trainer.critic_lr", "trainer.critic_lr_warmup"),
    "trainer.num_critic_only_steps",
    *("trainer.lr", "trainer.lr_schedule", "trainer.lr_warmup", "trainer.lr_hold", "trainer.lr_end"),
    *("trainer.adam_beta1", "trainer.adam_beta2", "trainer.adam_eps", "trainer.weight_decay"),
    *("trainer.clip_grad", "trainer.num_steps_per_rollout", "trainer.global_batch_size"),
    *("trainer.micro_batch_tokens", "trainer.packing", "trainer.deterministic"),
    *("model.dtype", "model.attn_implementation"),
)


class Changed(NamedTuple):
    key: str
    recorded: Any
    now: Any

    def words(self) -> str:
        return f"{self.key} = {show(self.now)} instead of {show(self.recorded)}"


class Plan(NamedTuple):
    """What to make again, and with which settings."""

    own: Config  # as the run had them
    recorded: Config  # the same at the places of this machine (model.device, model.path)
    asked: Config  # with every --set
    changes: list[Changed]  # empty: the replay is to give what was recorded

    def changed(self, *keys: str) -> bool:
        return any(change.key in keys for change in self.changes)


def make_plan(args: argparse.Namespace) -> Plan:
    """What to replay, from CONFIG and --set. Raises ConfigError for a setting that cannot matter."""
    own = load_config(args.config)
    overrides = list(args.overrides)
    keys = [item.partition("=")[0].strip() for item in overrides]
    known = {leaf.key for leaf in leaves()}
    _refuse_pointless([key for key in keys if key in known], own)
    asked = load_config(args.config, [*overrides, *_without_own_cap(keys)])  # refuses unknown keys
    _refuse_pointless(keys, own)  # keys inside of a free-form table
    places = [item for item, key in zip(overrides, keys, strict=True) if key in PLACES]
    changes = [
        Changed(leaf.key, get(own, leaf.key), get(asked, leaf.key))
        for leaf in leaves()
        if leaf.key in keys and leaf.key not in PLACES and get(own, leaf.key) != get(asked, leaf.key)
    ]
    return Plan(own, load_config(args.config, places), asked, changes)


def changeable(config: Config) -> tuple[str, ...]:
    """The settings that change what a step makes of its batch, or the batch itself."""
    own = _SCALAR if config.trainer.backend == "scalar" else _TORCH
    schedule = ("run.steps",) if config.trainer.lr_schedule != "constant" else ()  # where the schedule ends
    return (*own, *schedule, LIMIT, ON_STALE)


def _without_own_cap(keys: list[str]) -> list[str]:
    """A cap on generation must fit to the limit in a live run; here nothing is generated."""
    return ["rollout.max_open_groups=none"] if LIMIT in keys else []


def _refuse_pointless(keys: list[str], config: Config) -> None:
    known = changeable(config)
    for key in keys:
        if key not in known and key not in PLACES:
            raise ConfigError(f"--set {key}: {_why(key, config)}; a replay can change {', '.join(known)}")


def _why(key: str, config: Config) -> str:
    if key in _TORCH:
        return 'trainer.backend = "scalar" does not look at it'
    if key == "run.steps":
        return 'with trainer.lr_schedule = "constant" it only says when to stop; use --to'
    if key.startswith(("run.", "log.")):
        return (
            "a replay reads the run where CONFIG says that it is, and changing this would not change a step"
        )
    if key.startswith(("data.", "rollout.", "reward.", "collector.")):
        return "the samples are in the log as they were drawn and scored, so it cannot matter any more"
    return "it has no effect on steps that are made again from the log"
