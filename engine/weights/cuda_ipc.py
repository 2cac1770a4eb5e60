"""Memory on a CUDA device that other processes of the host can read, by the driver's own IPC handles.

    owner: cuMemAlloc ─► cuIpcGetMemHandle ─► 64 bytes ─► reader: cuIpcOpenMemHandle ─► copies ─► cuIpcCloseMemHandle

The driver is called here and not torch's sharing of tensors, for three reasons: nothing is pickled, no file of a
reference count is left in /dev/shm after kill -9, and it does not matter how torch's own allocator gets its memory
(expandable segments cannot be exported). The memory goes when its process ends, however that is.

A reader finds the owner's device by its identity (UUID), not by its number: with CUDA_VISIBLE_DEVICES each process may
count its own way. It is the reader's own device, or a visible one that this can copy from.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from engine import devices
from engine.weights import bucketing
from engine.weights.broadcasts import follow
from engine.weights.collective import TransferError
from streams.events import TensorInfo

_HANDLE_BYTES = 64
_ROUND = 2 << 20  # a handle is of a whole allocation of the driver's
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class DeviceRooms:
    """`count` pieces of memory on `device`, of the one who fills them."""

    def __init__(self, nbytes: int, device: str, count: int) -> None:
        import torch

        self._here = _numbered(device)
        self.nbytes, self.descriptors = -(-nbytes // _ROUND) * _ROUND, []
        self.device = devices.named(self._here).identity()
        if not self.device:
            raise TransferError("this torch does not tell the UUID of a device, which ipc needs")
        self._pointers: list[int] = []
        self.handles: list[bytes] = []
        try:
            with _current(self._here):
                for _ in range(count):
                    self._allocate()
                self._tensors = [_tensor(each, self.nbytes, self._here) for each in self._pointers]
                self._stream: Any = torch.cuda.Stream(self._here)
        except BaseException:
            self.close()
            raise

    def _allocate(self) -> None:
        pointer, handle = ctypes.c_uint64(), _Handle()
        _call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(self.nbytes))
        self._pointers.append(pointer.value)
        _call("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
        self.handles.append(bytes(handle))

    def fill(self, number: int, bucket: Sequence[TensorInfo], tensors: Mapping[str, Any]) -> None:
        """Returns when it is there: another process reads it. On a stream of its own, beside training."""
        import torch

        room = self._tensors[number % len(self._tensors)]
        with torch.cuda.device(self._here):
            follow(self._stream, tensors, self._here)
            with torch.cuda.stream(self._stream):
                bucketing.fill(room, bucket, tensors)
            self._stream.synchronize()

    def handed_over(self) -> None:
        pass

    def close(self) -> None:
        """No other process may have them open."""
        self._tensors = []
        pointers, self._pointers = self._pointers, []
        with _current(self._here):
            for each in pointers:
                _call("cuMemFree_v2", ctypes.c_uint64(each))


class DeviceView:
    """The same, of one who reads them onto `device`."""

    def __init__(self, owner: str, nbytes: int, handles: Sequence[bytes], device: str) -> None:
        import torch

        if torch.device(device).type != "cuda":
            raise TransferError(
                f"the trainer's weights are on a CUDA device, this engine's device is {device}"
            )
        self._here = _numbered(device)
        self._there = _find(owner, self._here)
        self._stream: Any = torch.cuda.Stream(self._here)
        self._pointers: list[int] = []
        try:
            with _current(self._there):
                for each in handles:
                    self._pointers.append(_opened(each))
                self._tensors = [_tensor(each, nbytes, self._there) for each in self._pointers]
        except BaseException:
            self.close()
            raise

    def copy_to(self, target: Any, number: int) -> None:
        """Returns when it is there: the owner fills the room again after that."""
        import torch

        room = self._tensors[number % len(self._tensors)]
        with torch.cuda.device(self._here):
            self._stream.wait_stream(torch.cuda.current_stream(self._here))  # it may still use `target`
            with torch.cuda.stream(self._stream):
                target.copy_(room[: target.numel()], non_blocking=True)
            self._stream.synchronize()

    def close(self) -> None:
        self._tensors = []
        pointers, self._pointers = self._pointers, []
        with _current(self._there):
            for each in pointers:
                _call("cuIpcCloseMemHandle", ctypes.c_uint64(each))


def _opened(handle: bytes) -> int:
    if len(handle) != _HANDLE_BYTES:
        raise TransferError(f"a handle of {len(handle)} bytes came, {_HANDLE_BYTES} are needed")
    pointer = ctypes.c_uint64()
    _call(
        "cuIpcOpenMemHandle_v2",
        ctypes.byref(pointer),
        _Handle.from_buffer_copy(handle),
        ctypes.c_uint(_LAZY_PEER_ACCESS),
    )
    return pointer.value


def _find(owner: str, own: Any) -> Any:
    """The device of this identity, if `own` can copy from it."""
    import torch

    for number in range(torch.cuda.device_count()):
        if devices.named(f"cuda:{number}").identity() != owner:
            continue
        if number != own.index and not torch.cuda.can_device_access_peer(own.index, number):
            raise TransferError(
                f"cuda:{own.index} of this engine cannot copy from the trainer's cuda:{number} (no peer access); use "
                'weights.transport = "distributed"'
            )
        return torch.device("cuda", number)
    raise TransferError(
        f"the trainer's GPU ({owner}) is none of those that this engine sees; show it to both (CUDA_VISIBLE_DEVICES), "
        'or use weights.transport = "distributed"'
    )


def _numbered(device: str) -> Any:
    import torch

    named = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device() if named.index is None else named.index)


@contextmanager
def _current(device: Any) -> Iterator[None]:
    """The driver's calls go to the context that is current on this thread: make it the one of this device."""
    import torch

    with torch.cuda.device(device):
        torch.cuda.Stream(
            device
        ).synchronize()  # any call of the runtime does that; this one waits for no work
        yield


class _Memory:
    """What torch takes for an array on a device."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 2,
        }


def _tensor(pointer: int, nbytes: int, device: Any) -> Any:
    import torch

    tensor = torch.as_tensor(_Memory(pointer, nbytes), device=device)
    if tensor.data_ptr() != pointer:
        raise TransferError(
            "this torch copies memory of the driver's instead of using it; ipc is not possible"
        )
    return tensor


def _call(name: str, *arguments: Any) -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    function = getattr(driver, name)
    function.restype = ctypes.c_int
    code = function(*arguments)
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(ctypes.c_int(code), ctypes.byref(text))
        raise TransferError(f"{name}: CUDA error {code} ({(text.value or b'').decode()})")
