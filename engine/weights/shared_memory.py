"""Buckets in main memory that several processes of a host have mapped.

A memfd has no name: its descriptors go over the socket, and it ends with its last user, also after kill -9. Nor does it
count against the size of /dev/shm, which is 64 MB in many containers.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engine.weights import bucketing
from engine.weights.collective import TransferError
from streams.events import TensorInfo


class HostRooms:
    """`count` of them, of the one who fills them. Same questions as engine/weights/cuda_ipc.py."""

    device = ""

    def __init__(self, name: str, nbytes: int, count: int) -> None:
        self.nbytes, self.handles = nbytes, []
        self.descriptors = [os.memfd_create(f"millstream-{name}", os.MFD_CLOEXEC) for _ in range(count)]
        try:
            for each in self.descriptors:
                os.ftruncate(each, nbytes)
            self._mapped = [mmap.mmap(each, nbytes) for each in self.descriptors]
        except OSError as error:
            self.handed_over()
            raise TransferError(f"no shared memory of {nbytes} bytes ({error.strerror})") from error

    def fill(self, number: int, bucket: Sequence[TensorInfo], tensors: Mapping[str, Any]) -> None:
        import torch

        bucketing.fill(
            torch.frombuffer(self._mapped[number % len(self._mapped)], dtype=torch.uint8), bucket, tensors
        )

    def handed_over(self) -> None:
        """All ranks have mapped them: from now on only these mappings keep the memory."""
        while self.descriptors:
            os.close(self.descriptors.pop())

    def close(self) -> None:
        self.handed_over()
        self._mapped = []


class HostView:
    """The same, of one who reads them."""

    def __init__(self, nbytes: int, descriptors: Sequence[int]) -> None:
        if not descriptors or any(os.fstat(each).st_size != nbytes for each in descriptors):
            raise TransferError(f"no shared memory of {nbytes} bytes came")
        self._mapped = [
            np.frombuffer(mmap.mmap(each, nbytes, prot=mmap.PROT_READ), np.uint8) for each in descriptors
        ]

    def copy_to(self, target: Any, number: int) -> None:
        """`target`: uint8, in main memory too."""
        np.copyto(target.numpy(), self._mapped[number % len(self._mapped)][: target.numel()])

    def close(self) -> None:
        self._mapped = []
