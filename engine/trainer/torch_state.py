"""Parts of the torch trainer's state: AdamW with its moments, random generators, and their files."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine import devices
from engine.interfaces import CheckpointError
from engine.trainer.torch_settings import TorchSettings
from engine.weights import tensors as files
from engine.weights.tensors import WeightsError

logger = logging.getLogger(__name__)

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # AdamW's state of one parameter


def make_optimizer(parameters: Iterable[Tensor], settings: TorchSettings) -> torch.optim.AdamW:
    parameters = list(parameters)
    is_fused = devices.named(parameters[0].device).has_fused_adamw
    optimizer = torch.optim.AdamW(
        parameters,
        lr=settings.lr,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_eps,
        weight_decay=settings.weight_decay,
        fused=is_fused,
    )
    # AdamW makes this state at its first step; made here, there is one shape of state from the beginning on.
    for parameter in parameters:
        count = torch.zeros((), dtype=torch.float32, device=parameter.device if is_fused else "cpu")
        moments = (count, torch.zeros_like(parameter), torch.zeros_like(parameter))
        optimizer.state[parameter] = dict(zip(_MOMENTS, moments, strict=True))
    return optimizer


def moments_of(
    optimizer: torch.optim.AdamW, parameters: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """AdamW's live tensors as "exp_avg/<name of the parameter>" and so on."""
    ordered = optimizer.param_groups[0]["params"]
    names = parameters if parameters is not None else map(str, range(len(ordered)))
    return {
        f"{moment}/{name}": optimizer.state[parameter][moment]
        for name, parameter in zip(names, ordered, strict=True)
        for moment in _MOMENTS
    }


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """States of torch's generators. Nothing in a step draws from them; a model of one's own might."""
    return devices.named(device).rng_state()


def set_rng_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    devices.named(device).set_rng_state(state)


def environment(device: torch.device) -> dict[str, Any]:
    """What must be equal for equal bits."""
    name = devices.named(device).hardware()
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    return {"torch": torch.__version__, "device": f"{device.type} {name}", "threads": threads}


def warn_of_other_machine(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    changed = [
        f"{key} {then[key]} then, {now[key]} now" for key in now if key in then and then[key] != now[key]
    ]
    if changed:
        logger.warning("checkpoint made with %s: steps may not repeat bit for bit", "; ".join(changed))


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    with open(path, "wb") as file:
        files.write_file(
            file, {name: files.raw(tensor) for name, tensor in tensors.items()}, {"format": "pt"}
        )


def read_tensors(path: Path, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file, which must be those wanted, by name, shape and dtype. Raises CheckpointError."""
    try:
        found = files.to_framework(files.read_raw(path), "torch")
    except WeightsError as error:
        raise CheckpointError(str(error)) from error
    for what, names in (
        ("lacks", wanted.keys() - found.keys()),
        ("has the unknown", found.keys() - wanted.keys()),
    ):
        if names:
            raise CheckpointError(f"{path}: {what} {', '.join(sorted(names)[:4])} ({len(names)} in all)")
    for name, tensor in wanted.items():
        read = found[name]
        if read.shape != tensor.shape or read.dtype != tensor.dtype:
            raise CheckpointError(
                f"{path}: {name} is {read.dtype} {list(read.shape)}, needed {tensor.dtype} {list(tensor.shape)}"
            )
    return found


def read_json(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged ({error})") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: damaged, {type(state).__name__} instead of an object")
    return state
