"""A rank of the trainer other than rank 0: it takes commands, and ends with rank 0, however that ends.

    met ─► Begin: its part of the model ─► Take, Snapshot, Load, Weights … on the main thread ─► Close
                                           Write on the thread that writes

    python -m engine.trainer.follower     with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT set (engine/trainer/ranks.py)

It reads no log and no configuration: all that it needs is in its commands. An error here that is not the error of all
ranks ends the process, and rank 0 with it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from engine.interfaces import BadStep, CheckpointError
from engine.launch.child import die_with_parent
from engine.trainer import followers, links, messages, ranks
from engine.trainer.links import Link
from engine.trainer.messages import Answer
from engine.trainer.rank import Rank
from engine.trainer.ranks import Place, ProcessGroup
from streams.errors import ConfigError

logger = logging.getLogger(__name__)

_CONNECT = timedelta(seconds=60)
_FAILED = 1
_CLOSE_S = 10.0  # for the main thread to come to the Close that was heard


class Follower:
    """One life: `Follower(place).run()` → exit code."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._store = ranks.store_of(place)
        self._commands: queue.Queue[messages.Command] = queue.Queue()
        self._writes: queue.Queue[messages.Write] = queue.Queue()
        self._snapshots: dict[int, Callable[[Path], None]] = {}  # by the number of their command
        self._is_told_to_close = False
        self._closes = threading.Event()  # the main thread has heard of it
        address = json.loads(self._store.get(followers.CONTROL))
        connection = links.connect(address["host"], address["port"], _CONNECT)
        self._link = Link(connection, messages.FromRankZero, self._heard, self._ended)
        self._link.send(
            messages.Hello(place.rank, address["token"], host=socket.gethostname(), pid=os.getpid())
        )
        self._rank: Rank | None = None

    def run(self) -> int:
        threading.Thread(target=self._write_all, name="saver", daemon=True).start()
        while not isinstance(command := self._commands.get(), messages.Close):
            try:
                answer = self._answer(command)
            except BaseException as error:  # told to rank 0, which ends with it
                self._fail(command, error)
                os._exit(_FAILED)  # not through what torch would still wait for
            self._link.send(answer)
        self._closes.set()
        self._link.close()
        if self._rank is not None:
            self._rank.processes.close()
        return 0

    def _answer(self, command: messages.Command) -> Answer:
        assert not isinstance(command, messages.Close)
        number = command.number
        try:
            arrays = self._obey(command)
        except BadStep as bad:
            return Answer(number, error="bad_step", reason=bad.reason, detail=bad.detail)
        except CheckpointError as error:
            return Answer(number, error="checkpoint", detail=str(error))
        return Answer(number, arrays=arrays)

    def _obey(self, command: messages.Command) -> dict[str, Any]:
        if isinstance(command, messages.Begin):
            device = ranks.device_of(command.part.torch.device, self.place.local_rank)
            processes = ProcessGroup(self.place.rank, self.place.size, device, self._store)
            self._rank = Rank(command.part, processes)
            return {}
        rank = self._rank
        if rank is None:
            raise RuntimeError(f"{type(command).__name__} before Begin")
        if isinstance(command, messages.Take):
            measured = rank.stepper.take(command.plan)
            return messages.arrays_of(measured, len(command.plan.flat.targets)) if rank.part.speaks else {}
        if isinstance(command, messages.Snapshot):
            self._snapshots[command.number] = rank.snapshot()
        elif isinstance(command, messages.Load):
            rank.load(
                Path(command.folder),
                fresh_optimizer=command.fresh_optimizer,
                optimizer_steps=command.optimizer_steps,
            )
        elif isinstance(command, messages.Weights):
            for _ in rank.part.weights():
                pass
        return {}

    def _write_all(self) -> None:
        """On a thread of its own."""
        while True:
            command = self._writes.get()
            error = ""
            try:
                self._snapshot(command.snapshot)(Path(command.folder))
            except (OSError, CheckpointError) as failure:  # rank 0 decides what becomes of this checkpoint
                error = f"rank {self.place.rank}: {failure}"
            except BaseException as failure:
                self._fail(command, failure)
                os._exit(_FAILED)
            self._link.send(Answer(command.number, error="checkpoint" if error else "", detail=error))

    def _snapshot(self, number: int) -> Callable[[Path], None]:
        found = self._snapshots[number]
        for older in [each for each in list(self._snapshots) if each <= number]:  # the main thread adds
            del self._snapshots[older]
        return found

    def _heard(self, message: messages.Command) -> None:
        """On the link's thread."""
        if isinstance(message, messages.Write):
            self._writes.put(message)
        else:
            self._is_told_to_close |= isinstance(message, messages.Close)
            self._commands.put(message)

    def _ended(self, reason: str) -> None:
        """On the link's thread, while the main thread may be in a collective that never ends."""
        if self._is_told_to_close and self._closes.wait(_CLOSE_S):
            return  # an orderly end, which the main thread is coming to
        logger.error("trainer, rank %d: ends with rank 0: %s", self.place.rank, reason)
        logging.shutdown()
        os._exit(_FAILED)

    def _fail(self, command: messages.Command, error: BaseException) -> None:
        logger.error("trainer, rank %d: %s", self.place.rank, traceback.format_exc())
        number = -1 if isinstance(command, messages.Close) else command.number
        what = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        self._link.send(Answer(number, error="failed", detail=what))


def serve(place: Place) -> int:
    """Be this rank until rank 0 says that it is over. Stops are for rank 0 to hear."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    return Follower(place).run()


def main(arguments: list[str], environ: Mapping[str, str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.trainer.follower")
    parser.add_argument("--with-parent", type=int, default=0)
    parser.add_argument("--log-level", default="INFO")
    args = parser.parse_args(arguments)
    if args.with_parent:
        die_with_parent(args.with_parent, signal.SIGKILL)
    logging.basicConfig(level=args.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    place = ranks.place_of(environ)
    if place is None:
        parser.error("RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not set")
    return serve(place)


if __name__ == "__main__":
    code = main(sys.argv[1:], os.environ)
    logging.shutdown()
    os._exit(code)  # what torch's threads still wait for is of no interest
