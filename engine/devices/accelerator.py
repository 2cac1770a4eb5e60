"""What CUDA and MUSA have in common: a module of torch's (`torch.cuda`, `torch.musa`) with the same names in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.devices.base import Device, Memory
from streams.errors import ConfigError


class Accelerator(Device):
    needs_cpu_init = saves_from_host = False

    @property
    def module(self) -> Any:
        import torch

        return torch.get_device_module(self.kind)

    @property
    def group_backend(self) -> str:
        return f"cpu:gloo,{self.kind}:{self.collectives}"

    def check(self, key: str) -> None:
        self._check_there(key)
        count = self.module.device_count()
        if (self.index or 0) >= count:
            raise ConfigError(
                f"{key} = {self.name!r}: this process sees {count} {self.kind} device(s), counted from 0; lower the "
                f"number, or show it more ({self.visible_variables[0]})"
            )

    def _check_there(self, key: str) -> None:
        """Raises ConfigError when there is none at all."""
        raise NotImplementedError

    def at(self, local_rank: int, key: str) -> Device:
        index, count = (self.index or 0) + local_rank, self.module.device_count()
        if index >= count:
            raise ConfigError(
                f"{key} = {self.name!r}: rank {local_rank} of this host needs {self.kind}:{index}, which has {count} "
                f"devices in all; lower trainer.n_ranks"
            )
        return type(self)(f"{self.kind}:{index}")

    def use(self) -> None:
        self.module.set_device(self.torch)

    def synchronize(self) -> None:
        self.module.synchronize(self.torch)

    def memory(self) -> Memory:
        free, total = self.module.mem_get_info(self.torch)
        allocated = self.module.memory_allocated(self.torch)
        return Memory(free, total, allocated, self.module.max_memory_allocated(self.torch))

    def rng_state(self) -> dict[str, Any]:
        import torch

        return {"cpu": torch.get_rng_state(), "device": self.module.get_rng_state(self.torch)}

    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        import torch

        torch.set_rng_state(state["cpu"].clone())
        if "device" in state:
            self.module.set_rng_state(state["device"].clone(), self.torch)

    def identity(self) -> str:
        return str(getattr(self.module.get_device_properties(self.torch), "uuid", ""))

    def hardware(self) -> str:
        return self.module.get_device_name(self.torch)
