"""Lets megatron-core run on a CPU, for tests alone: its CUDA calls are answered by what a CPU has.

    from tests.support import megatron_cpu
    megatron_cpu.install()          # before the first model, in a process of its own

Megatron has no device of its own to choose: it asks torch.cuda for the current one, writes device="cuda" in places, and
compares names of tensor types. What this shows is wiring, cutting over ranks, the optimizer and checkpoints; it
shows nothing of speed, kernels, overlap, or of dropout's random numbers (there is one generator instead of several).
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def install() -> None:
    """For the whole process, and it cannot be undone."""
    if getattr(torch.cuda, "_answered_by_cpu", False):
        return
    torch.compile = _plain  # pyright: ignore[reportAttributeAccessIssue]  # half of the time that megatron takes to import
    torch.cuda._answered_by_cpu = True  # pyright: ignore[reportAttributeAccessIssue]
    torch.cuda.current_device = lambda: torch.device("cpu")  # pyright: ignore[reportAttributeAccessIssue]
    for name in ("synchronize", "empty_cache", "manual_seed", "manual_seed_all", "set_rng_state"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.cuda.Stream = torch.cuda.Event = _InOrder  # pyright: ignore[reportAttributeAccessIssue]
    torch.cuda.current_stream = lambda *_: _InOrder()  # pyright: ignore[reportAttributeAccessIssue]
    torch.cuda.stream = lambda *_: nullcontext()  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.record_stream = lambda *_: None  # pyright: ignore[reportAttributeAccessIssue]
    _name_types_as_on_cuda()
    _ToCpu().__enter__()
    _share_one_generator()
    _count_for_the_host()


def _plain(function: Any = None, **_: Any) -> Any:
    return function if function is not None else _plain


class _InOrder:
    """A stream or event of a device that does one thing after the other."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_, **__: _InOrder()


def _count_for_the_host() -> None:
    """How many tokens go to each expert is made numpy as it comes from a device, and there is none."""
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    def on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    dispatcher.maybe_move_tensor_to_cpu = on_host


def _share_one_generator() -> None:
    import megatron.core.tensor_parallel.random as random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda *_, **__: None


def _name_types_as_on_cuda() -> None:
    """Megatron tells types by their names: 'torch.cuda.FloatTensor'."""
    plain = torch.Tensor.type

    def type_of(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = plain(self, *args, **kwargs)
        if isinstance(answer, str) and not answer.startswith("torch.cuda."):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    torch.Tensor.type = type_of  # pyright: ignore[reportAttributeAccessIssue]


class _ToCpu(TorchFunctionMode):
    """Where a call says "cuda", the CPU is meant."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "cuda" and args and isinstance(args[0], torch.Tensor):
            return args[0]
        if "device" in kwargs:
            kwargs["device"] = _cpu(kwargs["device"])
        if name == "to":
            args = tuple(_cpu(each) if isinstance(each, (str, torch.device)) else each for each in args)
        return func(*args, **kwargs)


def _cpu(device: Any) -> Any:
    is_cuda = device is not None and not isinstance(device, int) and torch.device(device).type == "cuda"
    return torch.device("cpu") if is_cuda else device
