"""Moore Threads GPUs, by torch_musa, which registers itself with torch under the name `musa`. docs/musa.md.

Not run on hardware: no MUSA device was at hand. Names and rules are those of torch_musa's own sources and of other
trainers' ports (THUDM/slime, slime/utils/accelerator/musa.py); tests simulate the device.
"""

from __future__ import annotations

import importlib
import os
from functools import cache
from typing import Any

from engine.devices.accelerator import Accelerator
from streams.errors import ConfigError

_INSTALL = (
    "use the vendor's image, or install torch and torch_musa of one release from the vendor's index with --no-deps "
    "(docs/musa.md)"
)


class Musa(Accelerator):
    kind = "musa"
    collectives = "mccl"
    weight_group = "cpu:gloo,musa:mccl"  # MCCL takes tensors of its devices alone
    visible_variables = ("MUSA_VISIBLE_DEVICES", "MTHREADS_VISIBLE_DEVICES")
    error_variable = "TORCH_MCCL_ASYNC_ERROR_HANDLING"
    has_ipc = has_fused_adamw = has_varlen_attention = has_fused_rms_norm = captures_graphs = False
    needs_cpu_init = saves_from_host = True
    # piecewise graphs of the prefill are off in every reported set-up (verl's plugin: disable_piecewise_cuda_graph)
    sglang_args = ("--device", "musa", "--cuda-graph-backend-prefill", "disabled")

    def _check_there(self, key: str) -> None:
        import torch  # an installed torch_musa is loaded by it; what it raises then is the best explanation

        module: Any = getattr(torch, "musa", None)
        if module is None:
            module = self._imported(key, torch.__version__)
        if not module.is_available():
            masks = ", ".join(
                f"{name}={os.environ[name]}" for name in self.visible_variables if name in os.environ
            )
            raise ConfigError(
                f"{key} = {self.name!r}: torch_musa is there and sees no device ({masks or 'no mask is set'}); check "
                "the driver (mthreads-gmi), and in a container that it was started with MTHREADS_VISIBLE_DEVICES"
            )

    def _imported(self, key: str, version: str) -> Any:
        """Releases that torch does not load by itself (or TORCH_DEVICE_BACKEND_AUTOLOAD=0)."""
        try:
            importlib.import_module("torch_musa")
        except ModuleNotFoundError as error:
            if error.name != "torch_musa":
                raise
            raise ConfigError(
                f"{key} = {self.name!r}: torch {version} has no such device, torch_musa is not installed beside it; "
                f"{_INSTALL}"
            ) from None
        return self.module

    def set_deterministic(self, deterministic: bool) -> None:
        pass  # torch_musa has no switch of its own

    def has_pinned_memory(self) -> bool:
        return _pins()


@cache
def _pins() -> bool:
    """Asked once: not every release of torch_musa gives torch an allocator for such memory."""
    import torch

    try:
        torch.empty(1, dtype=torch.uint8, pin_memory=True)
    except (RuntimeError, NotImplementedError):
        return False
    return True
