"""Two processes, one process group: sums and a broadcast that are compared bit by bit.

    python -m engine.doctor.two_ranks RANK STORE BACKEND KIND N_BYTES ──► NUL and one JSON object

`together` starts both, and ends both at the deadline.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

_WORLD = 2
_SEED = 7


class RanksFailed(Exception):
    """One of them failed or hung; the message names it."""


def together(backend: str, kind: str, n_bytes: int, deadline_s: float) -> list[dict[str, Any]]:
    """What each rank says. Raises RanksFailed."""
    with tempfile.TemporaryDirectory(prefix="millstream-doctor-") as folder:
        store = Path(folder) / "store"
        ranks = [_start(rank, store, backend, kind, n_bytes) for rank in range(_WORLD)]
        end, said = time.monotonic() + deadline_s, []
        try:
            for rank, process in enumerate(ranks):
                try:
                    out, err = process.communicate(timeout=max(0.1, end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    raise RanksFailed(f"{backend}: rank {rank} did not end within {deadline_s:g} s") from None
                _, mark, answer = out.rpartition(b"\0")
                if process.returncode or not mark:
                    lines = err.decode("utf-8", "replace").strip().splitlines()
                    raise RanksFailed(f"{backend}: rank {rank}: {lines[-1] if lines else process.returncode}")
                said.append(json.loads(answer))
        finally:
            for process in ranks:
                process.kill()
                process.communicate()  # closes its pipes
    return said


def _start(rank: int, store: Path, backend: str, kind: str, n_bytes: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", __name__, str(rank), str(store), backend, kind, str(n_bytes)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ))


def main(arguments: list[str]) -> None:
    rank, store, backend, kind, n_bytes = int(arguments[0]), *arguments[1:4], int(arguments[4])
    import torch
    import torch.distributed as dist

    device = "cpu" if kind == "cpu" else f"{kind}:{rank}"
    if kind != "cpu":
        getattr(torch, kind).set_device(rank)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=_WORLD, timeout=timedelta(seconds=60)
    )
    ones = torch.full((1024,), float(rank + 1), device=device)
    dist.all_reduce(ones)
    bucket = torch.zeros(n_bytes, dtype=torch.uint8)
    if rank == 0:
        bucket = torch.randint(
            0, 256, (n_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(_SEED)
        )
    bucket = bucket.to(device)
    dist.broadcast(bucket[:16], 0)  # the first opens the connections
    _wait(torch, kind)
    began = time.monotonic()
    dist.broadcast(bucket, 0)
    _wait(torch, kind)
    seconds = time.monotonic() - began
    digest = hashlib.sha256(bucket.cpu().numpy().tobytes()).hexdigest()
    said = {
        "sum": float(ones[0]),
        "is_sum_right": bool((ones == 3.0).all()),
        "digest": digest,
        "seconds": seconds,
    }
    sys.stdout.write("\0" + json.dumps(said))
    sys.stdout.flush()
    dist.destroy_process_group()


def _wait(torch: Any, kind: str) -> None:
    if kind != "cpu":
        getattr(torch, kind).synchronize()


if __name__ == "__main__":
    main(sys.argv[1:])
