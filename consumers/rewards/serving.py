"""What runs in a worker process: it loads the function, calls it for each sample that comes, one after another or in
one loop, marks on the board whose turn it is, reports each outcome, and ends with its parent.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import faulthandler
import mmap
import os
import queue
import signal
import struct
import sys
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from consumers.rewards.code_tests import MARK, kill_group
from consumers.rewards.load import Scorer, call_sync, describe, load_reward, outcomes_of
from consumers.rewards.types import (
    REWARD_ERROR,
    REWARD_TIMEOUT,
    NotScored,
    Outcome,
    RewardInput,
    decode_hook,
)
from consumers.rewards.wire import KEPT, NOBODY, REVOKED, TRACE_AT, TURN, Report, Setup, encoder, framed
from streams.errors import ConfigError

# What the new interpreter is given to run: the parent's sys.path as JSON, then the arguments of serve().
BOOTSTRAP = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from consumers.rewards.serving import serve
serve(*map(int, sys.argv[2:]))
"""

_Calls = list[tuple[int, list[RewardInput]]]


def serve(fd_in: int, fd_out: int, fd_board: int, parent: int) -> None:
    """Main function of a worker process."""
    _die_with(parent)
    os.lseek(fd_board, TRACE_AT, os.SEEK_SET)
    faulthandler.register(signal.SIGUSR1, file=fd_board, all_threads=False)
    read_setup = msgspec.msgpack.Decoder(Setup)
    read_calls = msgspec.msgpack.Decoder(tuple[int, _Calls], dec_hook=decode_hook)
    setup = read_setup.decode(_read_frame(fd_in))
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(fd_in, inbox), daemon=True).start()
    board = mmap.mmap(fd_board, TRACE_AT)
    sys.argv = [setup.path]

    def report(what: Report) -> None:
        data = memoryview(framed(encoder.encode(what)))
        while data:
            data = data[os.write(fd_out, data) :]

    try:
        scorer = load_reward(setup.path, setup.options, group=setup.group, config=setup.config)
    except BaseException as error:  # SystemExit on import included
        text = str(error) if isinstance(error, ConfigError) else describe(error)
        report(Report(-1, error=text or type(error).__name__))
        return
    report(Report(-1, is_async=scorer.is_async))
    if scorer.is_async:
        asyncio.run(
            _serve_async(scorer, lambda: read_calls.decode(inbox.get())[1], report, board, setup.timeout_s)
        )
    while True:
        message, calls = read_calls.decode(inbox.get())
        for number, inputs in calls:
            if _read(board, REVOKED) >= message and _read(board, KEPT) != number:  # in this order
                continue
            board[TURN] = struct.pack("<q", number)
            outcomes = call_sync(scorer, inputs)
            board[TURN] = struct.pack("<q", NOBODY)
            report(Report(number, outcomes))


def _read(board: mmap.mmap, what: slice) -> int:
    return struct.unpack("<q", board[what])[0]


_turn: contextvars.ContextVar[int] = contextvars.ContextVar("turn", default=NOBODY)


async def _serve_async(
    scorer: Scorer,
    next_calls: Callable[[], _Calls],
    report: Callable[[Report], None],
    board: mmap.mmap,
    timeout_s: float,
) -> None:
    loop = asyncio.get_running_loop()

    def make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **given: Any) -> asyncio.Task[Any]:
        return asyncio.Task(_on_board(coroutine, _turn.get(), board), loop=loop, **given)

    async def run(number: int, inputs: list[RewardInput]) -> None:
        begun = time.perf_counter()
        try:
            result = await asyncio.wait_for(scorer.call(inputs if scorer.is_group else inputs[0]), timeout_s)
            outcomes = outcomes_of(scorer, inputs, result, time.perf_counter() - begun)
        except BaseException as error:
            if isinstance(error, asyncio.TimeoutError) and time.perf_counter() - begun >= timeout_s:
                outcomes: list[Outcome] = [
                    NotScored(REWARD_TIMEOUT, f"no reward within {timeout_s:g} s")
                ] * len(inputs)
            else:
                outcomes = [NotScored(REWARD_ERROR, describe(error))] * len(inputs)
        report(Report(number, outcomes))

    loop.set_task_factory(make_task)  # pyright: ignore[reportArgumentType]
    tasks: set[asyncio.Task[None]] = set()
    with ThreadPoolExecutor(1) as reader:  # one of its own: user code may fill the loop's
        while True:
            for number, inputs in await loop.run_in_executor(reader, next_calls):
                _turn.set(number)
                task = asyncio.create_task(run(number, inputs))
                tasks.add(task)  # the loop holds tasks weakly
                task.add_done_callback(tasks.discard)
                _turn.set(NOBODY)


async def _on_board(coroutine: Any, number: int, board: mmap.mmap) -> Any:
    return await _steps(coroutine, struct.pack("<q", number), board)


@types.coroutine
def _steps(coroutine: Any, mine: bytes, board: mmap.mmap) -> Any:
    """Drive a coroutine; while one of its steps runs, the board shows whose it is."""
    nobody = struct.pack("<q", NOBODY)
    value, error = None, None
    while True:
        board[TURN] = mine
        try:
            waits_for = coroutine.send(value) if error is None else coroutine.throw(error)
        except StopIteration as end:
            return end.value
        finally:
            board[TURN] = nobody
        value, error = None, None
        try:
            value = yield waits_for
        except BaseException as thrown:
            error = thrown


def _receive(fd: int, inbox: queue.SimpleQueue[bytes]) -> None:
    """Read frames until the other side is gone, then end this worker and all it started."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # the main thread's stack is wanted
    while True:
        inbox.put(_read_frame(fd))


def _read_frame(fd: int) -> bytes:
    (size,) = struct.unpack("<I", _read_exactly(fd, 4))
    return _read_exactly(fd, size)


def _read_exactly(fd: int, size: int) -> bytes:
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            kill_group(os.getpid(), os.environ.get(MARK, "no mark"))
            os._exit(1)  # not reached: the group is ours
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _die_with(parent: int) -> None:
    """Have the kernel end this process with its parent, also while user code holds the interpreter."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)  # it was gone before that
