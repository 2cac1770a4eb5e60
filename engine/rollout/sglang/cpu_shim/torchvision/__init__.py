"""Enough of torchvision to be imported by transformers and SGLang where no picture is ever looked at."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "0.0.0"


class _AnyMember(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Missing(metaclass=_AnyMember):
    """Stands for every class and enumeration; it cannot be used."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("torchvision is not in this environment")


def _attribute(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Missing


def _module(name: str) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = []
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__getattr__ = _attribute  # type: ignore[method-assign]
    sys.modules[name] = module
    return module


for _name in (
    "transforms",
    "transforms.functional",
    "transforms.v2",
    "transforms.v2.functional",
    "io",
    "ops",
    "models",
    "utils",
):
    _made = _module(f"{__name__}.{_name}")
    if "." not in _name:
        globals()[_name] = _made
