"""A device named `musa` and a library named `mccl`, simulated in main memory. No MUSA hardware: for tests alone.

    MusaTensor   says that it lies on musa:0, and is a tensor in main memory; every operation runs there
    MusaModule   torch.musa: streams, events, generators, memory
    Mccl         a backend of torch.distributed for tensors on musa; Gloo does the work. It refuses others, connects its
                 ranks in the first broadcast, and its work ends for a stream, not for the thread that waits

What is true to the real thing is the wiring: which backend a group takes for which tensor, what may not lie on the CPU,
which generator a state comes from. It has no kernels of its own, no memory of its own and no asynchronous copies;
DeviceMesh (FSDP2), torch.distributed.checkpoint and graphs cannot be simulated so.

`install()` changes this process for good (torch knows one name for such a device): only in a process of its own. The
way in is an experimental one of torch's (torch.utils.backend_registration).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

c10d: Any = torch._C._distributed_c10d  # pyright: ignore[reportAttributeAccessIssue]
aten: Any = torch.ops.aten
DEVICES = 2
CAN_BE_INSTALLED = "__init__" in vars(c10d.Backend)  # older torch takes no backend written in Python
LONGEST_S = 60.0  # no wait of the simulation is longer


# ---------------------------------------------------------------- tensors
class MusaTensor(torch.Tensor):
    """`held`: its elements, in main memory."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> MusaTensor:
        return torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=torch.device("musa", 0),
        )  # fmt: skip

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    # what C++ would ask a storage for
    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()

    def set_(self, *source: Any) -> MusaTensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return MusaTensor(torch.empty(0, dtype=self.dtype).set_(*source))

    @property
    def data(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.detach()

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        if not isinstance(other, MusaTensor) or other.shape != self.shape:
            raise RuntimeError(
                f"fake musa: {other.device} {list(other.shape)} in place of {list(self.shape)}"
            )
        self.held = other.held

    def __repr__(self, **_: Any) -> str:
        return f"MusaTensor({self.held!r})"

    def tolist(self) -> Any:
        return self.held.tolist()


def held(value: Any) -> Any:
    return value.held if isinstance(value, MusaTensor) else value


def _in_main_memory(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "musa" else value


def _on_musa(value: Any) -> Any:
    return (
        MusaTensor(value) if isinstance(value, torch.Tensor) and not isinstance(value, MusaTensor) else value
    )


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation on tensors that lie on musa, or that makes one."""
    if func.namespace == "c10d":
        return _collective(func, args)
    if func.overloadpacket is aten.to:  # in inference mode it comes as it is written
        return func.decompose(*args, **kwargs)
    if func is aten.detach.default:
        return MusaTensor(args[0].held.detach())
    wanted = kwargs.get("device")
    plain, plain_kwargs = tree_map(held, args), tree_map(held, kwargs)
    if func is aten._to_copy.default:
        if wanted is not None and torch.device(wanted).type != "musa":
            return func(*plain, **plain_kwargs)
        return MusaTensor(func(*plain, **plain_kwargs | {"device": torch.device("cpu")}))
    if func is aten.copy_.default:  # from or to any device
        plain[0].copy_(plain[1])
        return args[0]
    _refuse_mixture(func, args)
    plain, plain_kwargs = tree_map(_in_main_memory, plain), tree_map(_in_main_memory, plain_kwargs)
    if (
        "generator" in {each.name for each in func._schema.arguments}
        and plain_kwargs.get("generator") is None
    ):
        plain_kwargs["generator"] = MODULE.generator
    result = func(*plain, **plain_kwargs)
    first = func._schema.arguments[0] if func._schema.arguments else None
    if func._schema.is_mutable and first is not None and first.alias_info is not None and result is plain[0]:
        return args[0]
    outs = [kwargs[each.name] for each in func._schema.arguments if each.is_out and each.name in kwargs]
    if outs:
        return outs[0] if len(outs) == 1 else tuple(outs)
    return tree_map(_on_musa, result)


def _refuse_mixture(func: Any, args: Any) -> None:
    """As a real device does: of tensors in main memory only scalars are taken."""
    if func in (aten._copy_from.default, aten.set_.source_Tensor) or "index" in func.__name__:
        return
    tensors = [each for each in args if isinstance(each, torch.Tensor)]
    others = [each for each in tensors if not isinstance(each, MusaTensor) and each.ndim]
    if others and len(others) < len(tensors):
        raise RuntimeError(f"fake musa: {func} of tensors on musa:0 and on {others[0].device}")


# ---------------------------------------------------------------- torch.musa
class Stream:
    """Work of the device is done at once here; only collectives are under way. Waiting for an event is really done."""

    def __init__(self, device: Any = None, **_: Any) -> None:
        self.pending: list[Any] = []

    def wait_event(self, event: Event) -> None:
        event.synchronize()

    def wait_stream(self, stream: Stream) -> None:
        stream.synchronize()

    def synchronize(self) -> None:
        _wait_for(self.pending)
        self.pending = []


class Event:
    def __init__(self, **_: Any) -> None:
        self._pending: list[Any] = []

    def record(self, stream: Stream | None = None) -> None:
        self._pending = list((stream or MODULE.current_stream()).pending)

    def query(self) -> bool:
        return all(each.is_completed() for each in self._pending)

    def synchronize(self) -> None:
        _wait_for(self._pending)


def _wait_for(works: list[Any]) -> None:
    end = time.monotonic() + LONGEST_S
    while not all(each.is_completed() for each in works):
        if time.monotonic() > end:
            raise RuntimeError(f"fake musa: {len(works)} collectives did not end within {LONGEST_S} s")
        time.sleep(0.001)


class MusaModule:
    """As torch.musa, as far as the engine asks it."""

    Stream, Event = Stream, Event

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self._current = 0
        self._streams = threading.local()
        self.calls: list[str] = []

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return DEVICES

    def current_device(self) -> int:
        return self._current

    def set_device(self, device: Any) -> None:
        self._current = torch.device(device).index or 0

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._streams.current = self.current_stream(), stream
        try:
            yield
        finally:
            self._streams.current = before

    def current_stream(self, device: Any = None) -> Stream:
        if not hasattr(self._streams, "current"):
            self._streams.current = Stream()
        return self._streams.current

    def synchronize(self, device: Any = None) -> None:
        self.calls.append("synchronize")

    def get_device_name(self, device: Any = None) -> str:
        return "fake MTT (simulated)"

    def get_device_properties(self, device: Any = None) -> Any:
        return type("Properties", (), {"name": self.get_device_name()})()

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return 3 << 30, 4 << 30

    def memory_allocated(self, device: Any = None) -> int:
        return 1 << 20

    def max_memory_allocated(self, device: Any = None) -> int:
        return 2 << 20

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return self.generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        self.generator.set_state(state)

    def manual_seed(self, seed: int) -> None:
        self.generator.manual_seed(seed + 1)  # its numbers are not the CPU's

    manual_seed_all = manual_seed

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


MODULE = MusaModule()


# ---------------------------------------------------------------- mccl
class Work(c10d.Work):
    """Its `wait` holds up the current stream, never the thread."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def wait(self, timeout: Any = None) -> bool:
        MODULE.current_stream().pending.append(self)
        return True

    def is_completed(self) -> bool:
        return self.inner.is_completed()


class Mccl(c10d.Backend):
    """`calls`: what was asked of all of them in this process."""

    calls: ClassVar[list[str]] = []

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._place = store, rank, size, timeout
        self._gloo: Any = None
        self._works: list[Any] = []  # C++ holds only its half of them

    def getBackendName(self) -> str:
        return "mccl"

    def broadcast(self, tensors: list[Any], options: Any) -> Any:
        return self._begin("broadcast", tensors, lambda gloo, plain: gloo.broadcast(plain, options))

    def allreduce(self, tensors: list[Any], options: Any) -> Any:
        return self._begin("allreduce", tensors, lambda gloo, plain: gloo.allreduce(plain, options))

    def _begin(self, name: str, tensors: list[Any], call: Callable[[Any, list[Any]], Any]) -> Any:
        self.calls.append(name)
        for each in tensors:
            if not isinstance(each, MusaTensor):
                raise RuntimeError(
                    f"mccl: {name} of a tensor on {each.device}; MCCL takes tensors on musa alone"
                )
        if self._gloo is None:
            self._gloo = c10d.ProcessGroupGloo(*self._place)
        work = Work(call(self._gloo, tree_map(held, tensors)))
        self._works = [each for each in self._works if not each.is_completed()] + [work]
        return work

    def abort(self) -> None:
        self.calls.append("abort")
        self._gloo = None

    def shutdown(self) -> None:
        self.calls.append("shutdown")
        self._gloo = None


def _collective(func: Any, args: Any) -> Any:
    """torch's dispatcher has found tensors on musa: the group's backend for that device has the work."""
    backend: Any = dist.ProcessGroup.unbox(args[1])._get_backend(torch.device("musa"))
    if func.__name__ == "broadcast_.default":
        defaults: tuple[Any, ...] = (
            None,
            None,
            0,
            0,
            True,
            -1,
        )  # of the operation: the dispatcher leaves them out at the end
        tensors, _, root, root_tensor, is_async, timeout_ms = (*args, *defaults[len(args) :])
        options: Any = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = root, root_tensor, is_async
        if timeout_ms > 0:
            options.timeout = timedelta(milliseconds=timeout_ms)
        return tensors, backend.broadcast(tensors, options).boxed()
    if func.__name__ == "allreduce_.default":
        tensors = args[0]
        return tensors, backend.allreduce(tensors, c10d.AllreduceOptions()).boxed()
    raise NotImplementedError(f"fake mccl: {func}")


_LIBRARY: list[Any] = []


def install() -> None:
    """Once, in a process of its own, before anything lies on musa."""
    if _LIBRARY:
        return
    _setup_privateuseone_for_python_backend("musa", backend_module=MODULE)
    torch.version.musa = "0.0-fake"  # pyright: ignore[reportAttributeAccessIssue]
    library = torch.library.Library("aten", "IMPL")
    for name, func in {
        "empty.memory_format": aten.empty.memory_format,
        "empty_strided": aten.empty_strided.default,
        "_copy_from": aten._copy_from.default,
        "_to_copy": aten._to_copy.default,
    }.items():
        library.impl(name, lambda *args, _func=func, **kwargs: run(_func, args, kwargs), "PrivateUse1")
    _LIBRARY.append(library)
    dist.Backend.register_backend("mccl", Mccl, devices=["musa"])
