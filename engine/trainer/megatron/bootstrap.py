"""What must happen before megatron-core is imported, and whether it can run here at all.

On Moore Threads GPUs (MUSA) megatron-core works only after the vendor's patch, which is not on any package index:
`musa_titan` in MUSA_TITAN_PATH, or the older `musa_patch` in MUSA_PATCH_PATH, imported before the first `megatron`
module. Not yet run on hardware: no MUSA device was at hand; what is tested is this order of imports.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

from engine import devices
from streams.errors import ConfigError

# module, the variable that says where it lies, the function to call once it is imported ("": importing it is all)
MUSA_PATCHES = (("musa_titan", "MUSA_TITAN_PATH", "apply_rl_patch"), ("musa_patch", "MUSA_PATCH_PATH", ""))


def prepare(device: str, environ: Mapping[str, str] = os.environ) -> None:
    """Once in a process, before anything else imports megatron. Raises ConfigError saying what is missing."""
    if devices.named(device).kind == "musa":
        _patch_for_musa(environ)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Transformer Engine, Apex and others that are not installed
            importlib.import_module("megatron.core")
            importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
            importlib.import_module("megatron.core.optimizer")
    except ImportError as error:
        raise ConfigError(
            f'trainer.backend = "megatron": megatron-core cannot be imported ({error}); '
            "pip install 'millstream[megatron]'"
        ) from error
    _need_accelerator(device)


def _patch_for_musa(environ: Mapping[str, str]) -> None:
    for module, variable, function in MUSA_PATCHES:
        folder = environ.get(variable)
        if not folder:
            continue
        if module not in sys.modules and any(name.partition(".")[0] == "megatron" for name in sys.modules):
            raise ConfigError(
                f"{variable}: {module} must be imported before megatron, and megatron is imported already"
            )
        if not Path(folder).is_dir():
            raise ConfigError(f"{variable} = {folder!r}: no such folder")
        if folder not in sys.path:
            sys.path.insert(0, folder)
        try:
            patch = importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(f"{variable} = {folder!r}: {module} cannot be imported ({error})") from error
        if function:
            getattr(patch, function)()
        return
    raise ConfigError(without_musa_patch({})[0])


def without_musa_patch(environ: Mapping[str, str]) -> list[str]:
    """The sentence to refuse a run with where no variable names the patch; nothing where one does."""
    if any(environ.get(variable) for _, variable, _ in MUSA_PATCHES):
        return []
    names = " or ".join(f"{variable} (folder of {module})" for module, variable, _ in MUSA_PATCHES)
    return [f'trainer.backend = "megatron" on musa needs the vendor\'s patch of Megatron: set {names}']


def _need_accelerator(device: str) -> None:
    """Megatron asks torch.cuda for its device throughout (MUSA's patch answers for it)."""
    import torch

    try:
        torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:
        raise ConfigError(
            f'trainer.backend = "megatron" with model.device = "{device}": megatron-core runs on CUDA devices, and '
            f'torch has none here ({error}); use trainer.backend = "torch" or "fsdp2"'
        ) from error
