"""The CPU: one device for all ranks of a host."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Mapping
from typing import Any

from engine.devices.base import Device, Memory


class Cpu(Device):
    kind = "cpu"
    collectives = weight_group = "gloo"
    has_ipc = has_fused_adamw = True
    has_varlen_attention = has_fused_rms_norm = captures_graphs = False
    needs_cpu_init = saves_from_host = True
    sglang_args = (
        *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"),
        *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
        *("--mem-fraction-static", "0.3", "--max-total-tokens", "16384"),
    )

    @property
    def group_backend(self) -> str:
        return self.collectives

    def check(self, key: str) -> None:
        pass

    def at(self, local_rank: int, key: str) -> Device:
        return self

    def use(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def memory(self) -> Memory:
        """Of the machine; `allocated` and `peak` are this process's resident memory."""
        page = os.sysconf("SC_PAGE_SIZE")
        free = os.sysconf("SC_AVPHYS_PAGES") * page if "SC_AVPHYS_PAGES" in os.sysconf_names else 0
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        resident = _resident(page) or peak
        return Memory(free, os.sysconf("SC_PHYS_PAGES") * page, resident, max(resident, peak))

    def rng_state(self) -> dict[str, Any]:
        import torch

        return {"cpu": torch.get_rng_state()}

    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        import torch

        torch.set_rng_state(state["cpu"].clone())

    def set_deterministic(self, deterministic: bool) -> None:
        pass

    def has_pinned_memory(self) -> bool:
        return False  # main memory is where its tensors lie

    def identity(self) -> str:
        return ""

    def hardware(self) -> str:
        return platform.machine()


def _resident(page: int) -> int:
    """Bytes; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * page
    except OSError:
        return 0
