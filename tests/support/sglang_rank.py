"""A rank of a real Gloo group for the double, so that a trainer may broadcast to it as to an SGLang server.

Made without torch's list of groups, which knows each name once in a process: trainer and doubles share one here. Keys
are those of `init_custom_process_group`, so real servers and doubles may meet in one group.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any


class Rank:
    """Blocks until all ranks have met; raises RuntimeError when the other side goes."""

    def __init__(
        self, address: str, port: int, rank: int, world_size: int, group: str, timeout_s: float
    ) -> None:
        import torch.distributed.distributed_c10d

        c10d: Any = torch.distributed
        timeout = timedelta(seconds=timeout_s)
        store = c10d.TCPStore(
            address, port, world_size, is_master=False, timeout=timeout, wait_for_workers=False
        )
        for prefix in (group, f"{group}/", "cpu/"):
            store = c10d.PrefixStore(prefix, store)
        self._group: Any = c10d.distributed_c10d.ProcessGroupGloo(store, rank, world_size, timeout)

    def receive(self, nbytes: int) -> bytes:
        """One broadcast of rank 0."""
        import torch
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        self._group.broadcast([buffer], options).wait()
        return buffer.numpy().tobytes()

    def close(self) -> None:
        self._group = None
