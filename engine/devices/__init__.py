"""What differs between a CPU, CUDA GPUs and Moore Threads GPUs (MUSA), in one object that is picked once.

    model.device ─► named("musa:1") ─► facts: backends, variables, what is to be had there      (without torch)
                 └► ready("musa:1") ─► the same, when torch has said that it is there           (else ConfigError)

Whoever learns its device from the configuration asks `ready` and hands the object, or its name, down. Nothing falls
back: a device that was asked for and is not there ends the daemon, with a sentence that says how to mend it.
"""

from __future__ import annotations

from engine.devices.base import Device, Memory
from streams.errors import ConfigError

__all__ = ["KINDS", "Device", "Memory", "is_accelerator", "named", "ready", "with_collectives"]

KINDS = ("cpu", "cuda", "musa")


def named(device: object) -> Device:
    """The device of this name, as in `cpu`, `cuda:1`, `musa` (or of a torch.device). Raises ConfigError for others."""
    name = str(device)
    kind = name.partition(":")[0]
    if kind == "cpu":
        from engine.devices.cpu import Cpu

        return Cpu(name)
    if kind == "cuda":
        from engine.devices.cuda import Cuda

        return Cuda(name)
    if kind == "musa":
        from engine.devices.musa import Musa

        return Musa(name)
    raise ConfigError(f"device {name!r}: must be one of {', '.join(KINDS)}, or one of several as in cuda:1")


def ready(device: object, *, key: str = "model.device") -> Device:
    """The same, once torch can use it. `key`: the setting that asks for it, for errors.

    Raises ConfigError saying what is missing; what torch_musa raises while it is imported is passed on as it is.
    """
    found = named(device)
    found.check(key)
    return found


def with_collectives(backend: str) -> Device | None:
    """The kind of device whose tensors a library moves ("nccl" → cuda, "mccl" → musa); None: Gloo and ipc move any."""
    for kind in KINDS[1:]:
        found = named(kind)
        if found.collectives == backend:
            return found
    return None


def is_accelerator(kind: str) -> bool:
    """Whether tensors of this type of torch's (`tensor.device.type`) lie on one of our accelerators."""
    return kind in KINDS[1:]
