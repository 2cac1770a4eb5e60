"""Rank 0's side of its followers: they are started, greeted, commanded, and watched.

    listening ─► followers started (unless torchrun did) ─► Hello from each ─► commands ─► Close
                                                               │ one ends, falls silent, or fails
                                                               └─► `lost`: the first cause, with its rank

A collective that waits for a lost rank may wait for long, and cannot be called off. So whoever waits here gets RankLost
at once, and if the main thread has not come out of its collective LAST_RESORT after, this process ends: nothing is
lost by that, since every state is in the log and the checkpoints.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed.distributed_c10d import Store

from engine.launch.daemon import describe_exit
from engine.trainer import ranks
from engine.trainer.links import Link, LinkLost
from engine.trainer.messages import Answer, Close, Command, FromFollower, Hello
from engine.trainer.ranks import Place
from streams.errors import MillstreamError

logger = logging.getLogger(__name__)

CONTROL = "control"  # key of the store: where rank 0 listens
COMMAND = timedelta(hours=2)  # longest wait for the answers to one command
LAST_RESORT = timedelta(seconds=10)
_END = timedelta(seconds=10)  # for followers to end by themselves
_SAY_AGAIN_S = 10.0
_SLICE_S = 0.2


class RankLost(MillstreamError):
    """A follower is gone, silent or failed; the message names it and the cause."""


class _Follower(NamedTuple):
    rank: int
    link: Link
    host: str
    pid: int


def end_process(reason: str) -> None:
    """What is left when the main thread does not come back."""
    logger.critical("trainer: ending at once: %s", reason)
    logging.shutdown()
    os._exit(1)


class Followers:
    """`start` or `accept` them, then `send` commands and collect `answers`; `close` ends them.

    `last_resort` is called with the cause when this process cannot go on and nobody has noticed.
    """

    def __init__(self, last_resort: Callable[[str], None] = end_process) -> None:
        self._last_resort = last_resort
        self._changed = threading.Condition()
        self._followers: dict[int, _Follower] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._answers: dict[int, dict[int, Answer]] = {}  # number → rank → answer
        self._lost = ""
        self._timer: threading.Timer | None = None
        self._number = 0
        self._is_closing = False

    # ---------------------------------------------------------------- meeting
    def start(self, n_ranks: int) -> tuple[Place, Store]:
        """Start n − 1 processes on this machine and wait until they are there. Raises RankLost."""
        store = ranks.c10d.TCPStore(
            "127.0.0.1", 0, is_master=True, timeout=ranks.MEET, wait_for_workers=False
        )
        place = Place(0, n_ranks, 0, "127.0.0.1", store.port, hosts_store=True, prefix="millstream/0")
        for rank in range(1, n_ranks):
            of_rank = place._replace(rank=rank, local_rank=rank, hosts_store=False)
            self._processes[rank] = subprocess.Popen(
                [sys.executable, "-m", "engine.trainer.follower", "--with-parent", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                env=os.environ | ranks.variables(of_rank),
            )
        prefixed = ranks.c10d.PrefixStore(place.prefix, store)
        self.accept(place, prefixed)
        return place, prefixed

    def accept(self, place: Place, store: Store) -> None:
        """Wait for the other processes of `place`, whoever starts them. Raises RankLost."""
        token = secrets.token_hex(16)
        is_local = place.address in ("127.0.0.1", "localhost")
        listener = socket.create_server(("127.0.0.1" if is_local else "", 0))
        try:
            address = {"host": place.address, "port": listener.getsockname()[1], "token": token}
            store.set(CONTROL, json.dumps(address))
            self._wait_for_all(listener, place.size, token)
        finally:
            listener.close()

    def _wait_for_all(self, listener: socket.socket, size: int, token: str) -> None:
        listener.settimeout(_SLICE_S)
        deadline, say_at = _deadline(ranks.MEET), time.monotonic() + _SAY_AGAIN_S
        while len(self._followers) < size - 1:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                self._look_after_processes()
            else:
                self._greet(connection, token)
            absent = [rank for rank in range(1, size) if rank not in self._followers]
            if time.monotonic() > deadline:
                raise RankLost(
                    f"rank {absent[0]} is not there after {ranks.MEET.total_seconds():.0f} s ({len(absent)} of "
                    f"{size} are missing)"
                )
            if absent and time.monotonic() > say_at:
                say_at += _SAY_AGAIN_S
                logger.warning("trainer waits for ranks %s of %d to be there", absent, size)

    def _greet(self, connection: socket.socket, token: str) -> None:
        """A connection is a follower's once it has said so with the token; any other is closed."""
        hello: list[Hello] = []
        told = threading.Event()

        def listen(message: Hello | Answer) -> None:
            if hello:
                self._heard(hello[0].rank, message)
            elif isinstance(message, Hello) and secrets.compare_digest(message.token, token):
                hello.append(message)
                told.set()

        def end(reason: str) -> None:
            if hello:
                self._lose(hello[0].rank, reason)
            told.set()

        link = Link(connection, FromFollower, listen, end)
        if not told.wait(10.0) or not hello or hello[0].rank in self._followers:
            link.close()
            return
        rank, host, pid = hello[0].rank, hello[0].host, hello[0].pid
        with self._changed:
            self._followers[rank] = _Follower(rank, link, host, pid)
        logger.info("trainer: rank %d is process %d on %s", rank, pid, host)

    # ---------------------------------------------------------------- commands
    def number(self) -> int:
        """Of the next command."""
        with self._changed:
            self._number += 1
            return self._number

    def send(self, command_of: Callable[[int], Command]) -> None:
        """To each its command, by its rank. Raises RankLost."""
        for follower in self._in_order():
            try:
                follower.link.send(command_of(follower.rank))
            except LinkLost as error:
                raise RankLost(self._name_lost(follower.rank, str(error))) from error

    def answers(self, number: int, *, deadline: timedelta = COMMAND) -> list[Answer]:
        """Of all followers, in the order of ranks. Raises RankLost."""
        end, say_at = _deadline(deadline), time.monotonic() + 6 * _SAY_AGAIN_S
        with self._changed:
            while len(self._answers.get(number, {})) < len(self._followers):
                if self._lost:
                    raise RankLost(self._lost)
                absent = sorted(self._followers.keys() - self._answers.get(number, {}).keys())
                if time.monotonic() > end:
                    reason = f"no answer within {deadline.total_seconds():.0f} s"
                    raise RankLost(self._name_lost(absent[0], reason))
                if time.monotonic() > say_at:
                    say_at += 6 * _SAY_AGAIN_S
                    logger.warning("trainer waits for ranks %s", absent)
                self._changed.wait(_SLICE_S)
            found = self._answers.pop(number, {})
        return [found[rank] for rank in sorted(found)]

    def lost(self, within: timedelta = timedelta(0)) -> str:
        """Why this trainer cannot go on, as soon as that is known; "" if it can."""
        end = _deadline(within)
        with self._changed:
            while not self._lost and self._followers and time.monotonic() < end:
                self._changed.wait(_SLICE_S)
            return self._lost

    # ---------------------------------------------------------------- the end
    def close(self) -> None:
        """Let them end by themselves; those that this process started are ended if they do not."""
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
            if self._timer is not None:
                self._timer.cancel()
        for follower in self._in_order():
            try:
                follower.link.send(Close())
            except LinkLost:
                pass

    def join(self) -> None:
        """After `close`: wait for the processes that were started here, for the others' connections to be closed by
        them, and take down what is left. Closing first would look to them as if this process had died."""
        deadline = _deadline(_END)
        for process in self._processes.values():
            try:
                process.wait(0.0 if self._lost else max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for follower in self._in_order():
            if not self._lost:
                follower.link.wait(max(0.0, deadline - time.monotonic()))
            follower.link.close()

    # ---------------------------------------------------------------- parts
    def _in_order(self) -> Sequence[_Follower]:
        with self._changed:
            return [self._followers[rank] for rank in sorted(self._followers)]

    def _heard(self, rank: int, message: Any) -> None:
        if not isinstance(message, Answer):
            return
        if message.error == "failed":
            self._lose(rank, f"it failed: {message.detail}")
            return
        with self._changed:
            self._answers.setdefault(message.number, {})[rank] = message
            self._changed.notify_all()

    def _lose(self, rank: int, reason: str) -> None:
        self._name_lost(rank, reason)

    def _name_lost(self, rank: int, reason: str) -> str:
        """Keep the first cause, and return it."""
        process = self._processes.get(rank)
        if process is not None and "failed" not in reason:
            try:
                reason = f"{reason} ({describe_exit(process.wait(1.0))})"
            except subprocess.TimeoutExpired:
                pass
        with self._changed:
            if self._lost or self._is_closing:
                return self._lost or reason
            follower = self._followers.get(rank)
            where = "" if follower is None else f" (process {follower.pid} on {follower.host})"
            self._lost = f"rank {rank}{where}: {reason}"
            self._timer = threading.Timer(LAST_RESORT.total_seconds(), lambda: self._last_resort(self._lost))
            self._timer.daemon = True
            self._timer.start()
            self._changed.notify_all()
        logger.error("trainer: %s; this trainer ends, to be started again with all its ranks", self._lost)
        return self._lost

    def _look_after_processes(self) -> None:
        for rank, process in self._processes.items():
            code = process.poll()
            if code is not None:
                raise RankLost(f"rank {rank} ended at its start: {describe_exit(code)}")


def _deadline(wait: timedelta) -> float:
    return time.monotonic() + wait.total_seconds()
