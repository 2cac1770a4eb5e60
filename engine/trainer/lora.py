"""Training a low-rank adapter instead of the model: PEFT puts it in, and only it is trained, saved and published.

    load_model ─► inject(rank r: A random, B zero; the base frozen) ─► step … ─► tensors(): as PEFT saves them

At B = 0 the adapted model is the base model. A is drawn from the run's seed, so that a run begins with the same bits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.trainer.torch_settings import TorchSettings
from engine.weights.lora import PREFIX
from streams.errors import ConfigError

ADAPTER_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
ALL_LINEAR = "all-linear"

_OURS = ".default."  # PEFT's name of the adapter, inside the model alone


class Adapter:
    """The adapter of one model. `inject` changes the model in place and freezes all but the adapter."""

    def __init__(self, model: Any, settings: TorchSettings) -> None:
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ImportError:
            raise ConfigError(
                "trainer.lora.rank is above 0, and peft is not installed: pip install 'millstream[lora]'"
            ) from None
        targets = settings.lora_target_modules
        self.config = LoraConfig(
            r=settings.lora_rank,
            lora_alpha=settings.lora_alpha,  # pyright: ignore[reportArgumentType] PEFT takes any number
            target_modules=ALL_LINEAR if targets == (ALL_LINEAR,) else list(_matching(model, targets)),
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
        )
        _refuse_other_than_linear(model, targets)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            inject_adapter_in_model(self.config, model)
        self._model = model
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(_OURS in name)
        model.eval()

    def tensors(self) -> dict[str, Tensor]:
        """The live tensors by the names that PEFT saves them under, in the model's order."""
        return {
            PREFIX + name.replace(_OURS, "."): parameter
            for name, parameter in self._model.named_parameters()
            if _OURS in name
        }

    def write_config(self, folder: Path) -> None:
        """adapter_config.json: with the adapter's file, a folder that PEFT opens."""
        said: Mapping[str, Any] = self.config.to_dict()
        plain = {key: sorted(each) if isinstance(each, set) else each for key, each in said.items()}
        text = json.dumps(plain, indent=1, sort_keys=True, default=str)
        (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")


def _matching(model: Any, targets: tuple[str, ...]) -> tuple[str, ...]:
    """Raises ConfigError for a target that names no layer of the model."""
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    if unknown := sorted(set(targets) - names):
        known = sorted({name.rpartition(".")[2] for name, each in model.named_modules() if _is_linear(each)})
        raise ConfigError(
            f"trainer.lora.target_modules: the model has no {', '.join(unknown)}; linear layers: {', '.join(known)}"
        )
    return targets


def _refuse_other_than_linear(model: Any, targets: tuple[str, ...]) -> None:
    """GPT-2's Conv1D keeps its weights transposed; engines merge [out, in] alone."""
    wanted = {
        type(each).__name__
        for name, each in model.named_modules()
        if (name.rpartition(".")[2] in targets or targets == (ALL_LINEAR,)) and hasattr(each, "weight")
        and not _is_linear(each) and type(each).__name__ == "Conv1D"
    }  # fmt: skip
    if wanted:
        raise ConfigError(
            "trainer.lora.rank is above 0: adapters go on torch.nn.Linear layers, and this model has Conv1D ones "
            "(GPT-2); use a model of another family"
        )


def _is_linear(module: Any) -> bool:
    return isinstance(module, nn.Linear)
