"""What the rest of the engine may ask of a device. This is the whole surface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from streams.errors import ConfigError


class Memory(NamedTuple):
    """In bytes. Of an accelerator: `allocated` and `peak` are this process's own tensors."""

    free: int
    total: int
    allocated: int
    peak: int


class Device(ABC):
    """One device of this machine; `name` as torch writes it. Making one imports nothing.

        device = devices.ready("musa:1")
        device.use()
        dist.init_process_group(device.group_backend, device_id=device.group_device_id, …)

    Subclasses are in cpu.py, cuda.py and musa.py.
    """

    kind: ClassVar[str]  # torch's word: "cpu", "cuda", "musa"
    collectives: ClassVar[
        str
    ]  # library of torch.distributed for tensors that lie on it: "gloo", "nccl", "mccl"
    weight_group: ClassVar[str]  # backend of a group in which weights are broadcast, for all of its ranks
    visible_variables: ClassVar[
        tuple[str, ...]
    ] = ()  # that hide devices from a process; the first one decides
    error_variable: ClassVar[str] = ""  # says what the library's watchdog does to the process after an error
    # What is to be had:
    has_ipc: ClassVar[bool]  # memory that other processes of the host can read (engine/weights/shared.py)
    has_fused_adamw: ClassVar[bool]  # one kernel for a whole step of AdamW, with its counters on the device
    has_varlen_attention: ClassVar[bool]  # torch's own kernel for rows of different lengths
    has_fused_rms_norm: ClassVar[bool]  # torch's rms_norm is one kernel there, not its parts one by one
    captures_graphs: ClassVar[bool]  # kernels recorded once and replayed, in the torch engines
    # What it asks for:
    needs_cpu_init: ClassVar[bool]  # Megatron makes its weights in main memory
    saves_from_host: ClassVar[bool]  # torch.distributed.checkpoint takes tensors in main memory alone
    sglang_args: ClassVar[tuple[str, ...]] = ()  # of launch_server, for a model of any kind

    # A default group that is bound to a device makes torch derive every later group from it (split_from), also one
    # whose ranks are others, as those of a weight update are. MUSA's takes no device at all.
    group_device_id: ClassVar[None] = None

    def __init__(self, name: str) -> None:
        kind, _, index = name.partition(":")
        if kind != self.kind or (index and not index.isdigit()):
            raise ConfigError(f"device {name!r}: needed {self.kind}, or {self.kind}:<number>")
        self.name = name
        self.index = int(index) if index else None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    @property
    @abstractmethod
    def group_backend(self) -> str:
        """Backend of a trainer's group: Gloo for tensors in main memory, the device's own library beside it."""

    @property
    def torch(self) -> Any:
        """As a torch.device."""
        import torch

        return torch.device(self.name)

    @abstractmethod
    def check(self, key: str) -> None:
        """Raises ConfigError, naming the setting `key`, when this process cannot use it."""

    @abstractmethod
    def at(self, local_rank: int, key: str) -> Device:
        """That of a rank of this host: so many after this one. Raises ConfigError when there are not so many."""

    @abstractmethod
    def use(self) -> None:
        """Make it the one that this process means when it names none."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all that was asked of it."""

    @abstractmethod
    def memory(self) -> Memory: ...

    def seed(self, seed: int) -> None:
        """Torch's generators of this process, in main memory and on the device."""
        import torch

        torch.manual_seed(seed)

    @abstractmethod
    def rng_state(self) -> dict[str, Any]:
        """States of these generators, by "cpu" and "device" (uint8, in main memory)."""

    @abstractmethod
    def set_rng_state(self, state: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def set_deterministic(self, deterministic: bool) -> None:
        """The switches for equal bits that torch.use_deterministic_algorithms does not have."""

    @abstractmethod
    def has_pinned_memory(self) -> bool:
        """Whether it copies to and from page-locked memory while the CPU goes on."""

    @abstractmethod
    def identity(self) -> str:
        """The same in every process, however it counts devices; "": not known."""

    @abstractmethod
    def hardware(self) -> str:
        """Its name, as in "NVIDIA H200"."""
