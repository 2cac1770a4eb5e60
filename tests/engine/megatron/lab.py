"""Ranks for tests of the megatron trainer: real processes over Gloo, with the CPU's answers in place of CUDA's.

    test ── (how many, what) ──► one lab process, with torch and megatron imported ── fork ──► a process for each rank
         ◄── what each returned, or the first error ──

Megatron takes a quarter of a minute to import, and its shim must not reach the test process: so it is imported once,
in a process of its own, and ranks are forked from that.
"""

from __future__ import annotations

import atexit
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from tests.engine.megatron import crossing

DEADLINE_S = 180.0  # of one call, all ranks
_IMPORTED_S = 300.0
_lab: tuple[subprocess.Popen[bytes], Connection] | None = None


def on_ranks(size: int, function: str, *args: Any) -> list[Any]:
    """What `function(processes, *args)` of tests/engine/megatron/on_rank.py returns on each rank."""
    lab = _start()
    lab.send((size, function, args))
    if not lab.poll(DEADLINE_S + 20):
        raise TimeoutError("the lab does not answer")
    results, errors = pickle.loads(lab.recv_bytes())
    if errors:
        raise AssertionError("\n".join(f"rank {rank}: {text}" for rank, text in errors))
    return results


def _start() -> Connection:
    global _lab
    if _lab is None:
        here, there = Pipe()
        command = [sys.executable, "-m", "tests.engine.megatron.lab", str(there.fileno())]
        process = subprocess.Popen(
            command, pass_fds=[there.fileno()], env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        there.close()
        _lab = process, here
        atexit.register(_end)
        if not here.poll(_IMPORTED_S):
            raise TimeoutError("megatron is not imported in time")
        here.recv()
    return _lab[1]


def _end() -> None:
    if _lab is not None:
        _lab[1].close()
        _lab[0].kill()
        _lab[0].wait(20)


# ---------------------------------------------------------------- in the lab
def serve(connection: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    from tests.engine.megatron import on_rank

    on_rank.import_all()
    connection.send("ready")
    while True:
        try:
            size, name, args = connection.recv()
        except EOFError:
            return
        connection.send_bytes(crossing.dumps(_run(size, getattr(on_rank, name), args)))


def _run(size: int, function: Callable[..., Any], args: Any) -> tuple[list[Any], list[tuple[int, str]]]:
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_fork(rank, size, f"{folder}/store", function, args) for rank in range(size)]
        answers: dict[int, tuple[bool, Any]] = {}
        end = time.monotonic() + DEADLINE_S
        while len(answers) < size and (left := end - time.monotonic()) > 0:
            absent = {read: rank for rank, (_, read) in enumerate(ranks) if rank not in answers}
            for read in wait(list(absent), timeout=left):
                answers[absent[read]] = _receive(read)  # pyright: ignore[reportArgumentType]
            if any(not is_right for is_right, _ in answers.values()):
                end = min(end, time.monotonic() + 2)  # the others may wait for it in vain
        for pid, read in ranks:
            if len(answers) < size:
                os.kill(pid, 9)
            os.waitpid(pid, 0)
            read.close()
    errors = [(rank, text) for rank, (is_right, text) in answers.items() if not is_right]
    if not errors and len(answers) < size:
        errors = [(rank, f"no end within {DEADLINE_S} s") for rank in range(size) if rank not in answers]
    return [answers[rank][1] if rank in answers else None for rank in range(size)], errors


def _fork(
    rank: int, size: int, store: str, function: Callable[..., Any], args: Any
) -> tuple[int, Connection]:
    read, write = Pipe(duplex=False)
    if pid := os.fork():
        write.close()
        return pid, read
    try:
        write.send_bytes(crossing.dumps((True, _be_rank(rank, size, store, function, args))))
    except BaseException:
        write.send_bytes(crossing.dumps((False, traceback.format_exc())))
    finally:
        os._exit(0)


def _be_rank(rank: int, size: int, store: str, function: Callable[..., Any], args: Any) -> Any:
    import torch
    from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

    from engine.trainer.ranks import ProcessGroup

    return function(ProcessGroup(rank, size, torch.device("cpu"), FileStore(store, size)), *args)


def _receive(read: Connection) -> tuple[bool, Any]:
    try:
        return pickle.loads(read.recv_bytes())
    except EOFError:
        return False, "ended without an answer"


if __name__ == "__main__":
    from tests.support import megatron_cpu

    megatron_cpu.install()
    serve(Connection(int(sys.argv[1])))
