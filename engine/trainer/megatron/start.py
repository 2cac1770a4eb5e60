"""From settings to a part of the megatron trainer: what it refuses, and the order in which things are imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from engine.trainer.megatron.bootstrap import prepare
from engine.trainer.megatron.settings import MegatronSettings
from engine.trainer.parts import PartSettings, Processes, RankPart
from engine.trainer.torch_settings import TorchSettings
from streams.errors import ConfigError


def megatron_part(settings: PartSettings, processes: Processes) -> RankPart:
    """Collective. Settles the process-wide groups of megatron-core. Raises ConfigError for what cannot be done."""
    options = megatron_settings(settings.options)
    refuse_what_others_have(settings.torch)
    options.data_parallel_size(processes.size)
    prepare(str(processes.device))
    from engine.trainer.megatron.part import MegatronPart  # imports megatron

    return MegatronPart(settings, options, processes)


def megatron_settings(options: Mapping[str, Any]) -> MegatronSettings:
    """Raises ConfigError for an unknown or ill-typed option."""
    try:
        return msgspec.convert(dict(options), MegatronSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"trainer.megatron: {error}") from error


def refuse_what_others_have(settings: TorchSettings) -> None:
    """Raises ConfigError."""
    if settings.lora_rank:
        raise ConfigError(
            f"trainer.lora.rank = {settings.lora_rank}: the megatron trainer trains whole models alone; set it to 0, "
            'or use trainer.backend = "torch"'
        )
    if settings.advantage_estimator == "ppo":
        raise ConfigError(
            'trainer.advantage_estimator = "ppo": the megatron trainer has no critic; use another estimator, or '
            'trainer.backend = "torch"'
        )
