"""NVIDIA GPUs."""

from __future__ import annotations

import os

from engine.devices.accelerator import Accelerator
from streams.errors import ConfigError


class Cuda(Accelerator):
    kind = "cuda"
    collectives = weight_group = "nccl"
    visible_variables = ("CUDA_VISIBLE_DEVICES",)
    error_variable = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    has_ipc = has_fused_adamw = has_varlen_attention = has_fused_rms_norm = captures_graphs = True

    def _check_there(self, key: str) -> None:
        import torch

        if not self.module.is_available():
            built = torch.version.cuda  # pyright: ignore[reportAttributeAccessIssue]
            why = f"it was built for CUDA {built}" if built else "it was built without CUDA"
            raise ConfigError(
                f"{key} = {self.name!r}: torch {torch.__version__} sees no CUDA device ({why}); check the driver "
                f"(nvidia-smi) and CUDA_VISIBLE_DEVICES, or set another device"
            )

    def has_pinned_memory(self) -> bool:
        return True

    def set_deterministic(self, deterministic: bool) -> None:
        import torch

        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
        torch.backends.cudnn.benchmark = not deterministic
