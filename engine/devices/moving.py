"""Moving a model, or arrays of this process, to a device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from engine import devices

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Model = TypeVar("Model")


def on_device(values: NDArray[np.generic], device: Any) -> Any:
    """A tensor of these values on the device. An accelerator works on meanwhile, and nobody waits for it.

    By page-locked memory: a copy out of any other makes the CPU wait for all that the device was asked before, and
    then the device for the CPU. On a CPU it shares the array's memory.
    """
    import torch

    tensor = torch.from_numpy(values)
    if device.type != "cpu" and devices.named(device).has_pinned_memory():
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def moved(model: Model, device: Any, dtype: Any = None) -> Model:
    """`model.to(device)`, in which what was one parameter under several names still is one.

    torch makes parameters anew, name by name, where a device's tensors cannot take the place of the CPU's: so on
    devices of its plug-ins, unless these say that they can. Tied weights would part without a word, and train apart.
    """
    module: Any = model
    tied = list(_tied(module))
    module.to(device, dtype) if dtype is not None else module.to(device)
    for first, *others in tied:
        kept = module.get_parameter(first)
        for name in others:
            owner, _, leaf = name.rpartition(".")
            module.get_submodule(owner)._parameters[leaf] = kept
    return model


def _tied(module: Any) -> Iterator[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    yield from (each for each in names.values() if len(each) > 1)
