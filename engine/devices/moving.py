"""Moving a model to its device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

Model = TypeVar("Model")


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
