"""Names that SGLang imports for a CPU and that a dense model with `torch_native` attention never calls."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name}: there is no kernel for this CPU")

    return missing
