"""The trainer of several processes, as the loop on rank 0 sees it: an ordinary TrainerBackend.

    step   plan (here) ─► each rank the rows of its data-parallel share ─► Stepper.take on all ─► log-probs gathered
    save   copies on all ranks now ─► files of all ranks, on a thread of each, while training goes on
    load, weights: the same call on all ranks

Rank 0 fetches and checks the payloads of a batch before it appends the cut, so it has them all: it sends each rank its
rows, and no other rank reads the log. Whatever a rank does differently from the others ends the trainer (RankLost):
it is started again with all its ranks, and replays.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from consumers.telemetry import SUMS
from engine.interfaces import BadStep, CheckpointError, TrainBatch
from engine.trainer import messages, ranks
from engine.trainer.followers import Followers, RankLost, end_process
from engine.trainer.host_memory import Rooms
from engine.trainer.messages import Answer, Command
from engine.trainer.parts import PartSettings
from engine.trainer.plan import plan_step
from engine.trainer.rank import Rank, read_counters, write_counters
from engine.trainer.ranks import Place, ProcessGroup
from engine.trainer.split import Share, split
from engine.trainer.stepper import Measured
from engine.trainer.torch_backend import metrics_of, sums_of
from engine.trainer.torch_state import warn_of_other_machine
from streams.errors import MillstreamError
from streams.trajectory import Payload

logger = logging.getLogger(__name__)

_NOTICE = timedelta(seconds=5)  # for the death of a rank to be known, after a collective has failed of it


class RankedBackend:
    """Rank 0. `n_ranks` processes on this machine, or those that torchrun has started (`place`).

        backend = RankedBackend(settings, n_ranks=2)
        metrics = backend.step(batch)
        backend.close()

    Raises ConfigError for what cannot be done, and RankLost, from any call, when a rank is gone. `last_resort` as in
    engine/trainer/followers.py.
    """

    def __init__(
        self,
        settings: PartSettings,
        n_ranks: int = 1,
        *,
        place: Place | None = None,
        last_resort: Callable[[str], None] = end_process,
    ) -> None:
        self.settings, self.inputs = settings.torch, settings.torch.inputs
        self._followers = Followers(last_resort)
        self._rank: Rank | None = None
        self._broken = ""  # what ended something that the ranks do together, halfway
        # nobody has to call close(): a process that ends lets its followers end
        self._groups: list[ProcessGroup] = []  # one, once it is there
        self._closing = weakref.finalize(self, _close, self._followers, self._groups)
        try:
            self._start(settings, n_ranks, place)
        except BaseException:
            self.close()
            raise
        self.trajectory_sums: NDArray[np.float64] = np.zeros((0, len(SUMS)))
        self._rooms = Rooms(self.rank.processes.device)

    def _start(self, settings: PartSettings, n_ranks: int, place: Place | None) -> None:
        store, settings = None, _with_threads(settings)
        if place is not None:
            store = ranks.store_of(place)
            self._followers.accept(place, store)
        elif n_ranks > 1:
            place, store = self._followers.start(n_ranks)
        begin = self._command(lambda number, _: messages.Begin(number, settings))
        with self._together():
            local_rank = 0 if place is None else place.local_rank
            device = ranks.device_of(settings.torch.device, local_rank)
            size = 1 if place is None else place.size
            self._groups.append(ProcessGroup(0, size, device, store))
            self._rank = Rank(settings, self._groups[0])
        self._answers(begin)
        logger.info("trainer: %d ranks are there (%s)", self.rank.processes.size, settings.backend)

    @property
    def rank(self) -> Rank:
        if self._rank is None:
            raise RuntimeError("the ranks of this trainer are not there")
        return self._rank

    @property
    def optimizer_steps(self) -> int:
        return self.rank.stepper.optimizer_steps

    # ---------------------------------------------------------------- training
    def refuses(self, payload: Payload) -> str:
        return self.rank.part.limits.refuses(payload)

    def step(self, batch: TrainBatch) -> dict[str, float]:
        """As TorchBackend.step. Raises BadStep, then no rank has changed a bit, and RankLost."""
        started = time.perf_counter()
        plan = plan_step(batch, self.settings)
        self.rank.part.limits.check(batch)
        shares = split(plan, self.rank.ranks.size)
        share_of = [shares[int(which)] for which in self.rank.ranks.shares[:, 0]]
        taking = self._command(lambda number, rank: messages.Take(number, share_of[rank].plan))
        own, bad = None, None
        with self._together():
            try:
                own = self.rank.stepper.take(share_of[0].plan)
            except BadStep as error:
                bad = error
        answers = self._answers(taking)
        self._agree_on(bad, answers)
        if bad is not None:
            raise bad
        assert own is not None
        measured = self._gathered(own, answers, shares, share_of[0])
        self.trajectory_sums = sums_of(plan.flat, measured)
        return metrics_of(measured, self.trajectory_sums) | {"seconds": time.perf_counter() - started}

    def _gathered(
        self, own: Measured, answers: list[Answer], shares: list[Share], of_zero: Share
    ) -> Measured:
        """The measures of the whole batch: numbers are the same on all ranks, arrays are of each rank's tokens."""
        n_tokens = sum(len(share.tokens) for share in shares)
        of_ranks = [messages.arrays_of(own, len(of_zero.tokens)), *(answer.arrays for answer in answers)]
        whole: dict[str, NDArray[Any]] = {}
        for share, speaker in zip(shares, self.rank.ranks.speakers, strict=True):
            for name, values in of_ranks[speaker].items():
                into = whole.setdefault(name, np.zeros(n_tokens, values.dtype))
                into[share.tokens] = values
        return own._replace(**whole)

    def _agree_on(self, bad: BadStep | None, answers: list[Answer]) -> None:
        """A step is bad on all ranks or on none: they judge by the same sums."""
        for rank, answer in enumerate(answers, 1):
            if (answer.error == "bad_step") != (bad is not None):
                raise RankLost(
                    f"rank {rank} and rank 0 do not agree whether the step was bad ({answer.reason or 'no'} and "
                    f"{bad.reason if bad else 'no'})"
                )

    # ---------------------------------------------------------------- weights and state
    def weights(self) -> Mapping[str, Any]:
        """All weights by their Hugging Face names, whole, in main memory; a snapshot that no step changes."""
        giving = self._command(lambda number, _: messages.Weights(number))
        with self._together():
            part = self.rank.part
            taken = self._rooms.gather(part.layout, part.weights())
        self._answers(giving)
        return taken

    def snapshot(self) -> Callable[[Path], None]:
        """As TrainerBackend.snapshot: the copies are taken now, on all ranks; files are written by all, later."""
        copying = self._command(lambda number, _: messages.Snapshot(number))
        with self._together():
            write_own = self.rank.snapshot()
        self._answers(copying)
        steps, made_with = self.optimizer_steps, self.rank.made_with()

        def write(folder: Path) -> None:
            writing = self._command(lambda number, _: messages.Write(number, copying, str(folder)))
            failure: OSError | CheckpointError | None = None
            with self._together():
                try:
                    write_own(folder)
                except (OSError, CheckpointError) as error:  # the others answer all the same
                    failure = error
            answers = self._answers(writing)
            if failure is not None:
                raise failure
            if errors := [answer.detail for answer in answers if answer.error]:
                raise CheckpointError(f"{folder}: {'; '.join(errors)}")
            write_counters(folder, steps, made_with)

        return write

    def load(self, folder: Path, *, fresh_optimizer: bool = False) -> None:
        """As TrainerBackend.load, from any number of ranks."""
        steps, made_with = read_counters(folder, fresh_optimizer=fresh_optimizer)
        loading = self._command(
            lambda number, _: messages.Load(number, str(folder.absolute()), fresh_optimizer, steps)
        )
        failure: CheckpointError | None = None
        with self._together():
            try:
                self.rank.load(folder, fresh_optimizer=fresh_optimizer, optimizer_steps=steps)
            except CheckpointError as error:
                failure = error
        answers = self._answers(loading)
        if failure is not None:
            raise failure
        if errors := [answer.detail for answer in answers if answer.error]:
            raise RankLost(f"a checkpoint could be loaded on rank 0, and not on another: {errors[0]}")
        warn_of_other_machine(made_with, self.rank.made_with())

    def close(self) -> None:
        """End the followers. Twice is harmless."""
        self._closing()

    # ---------------------------------------------------------------- commands
    def _command(self, command_of: Callable[[int, int], Command]) -> int:
        """Send (number, rank) → command to every follower; returns the number."""
        if self._broken:
            raise RuntimeError(
                f"this trainer ended in the middle of something ({self._broken}): gradients of it may still be there. "
                "Make it again, from a checkpoint; a daemon is started again by itself"
            )
        number = self._followers.number()
        self._followers.send(lambda rank: command_of(number, rank))
        return number

    def _answers(self, number: int) -> list[Answer]:
        return self._followers.answers(number)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """What all ranks do at a time. A failure of ours that comes of the loss of another is told as that."""
        try:
            yield
        except (BadStep, CheckpointError, MillstreamError):
            raise
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"[:300]
            if isinstance(error, Exception) and (lost := self._followers.lost(_NOTICE)):
                raise RankLost(lost) from error
            raise


def _close(followers: Followers, groups: list[ProcessGroup]) -> None:
    followers.close()
    for group in groups:
        if not followers.lost():  # a group that has lost a rank may wait for it when it is taken down
            group.close()
    followers.join()


def _with_threads(settings: PartSettings) -> PartSettings:
    """All ranks compute with as many threads as rank 0 does: bits may depend on it."""
    if settings.torch.threads is not None or torch.device(settings.torch.device).type != "cpu":
        return settings
    own = msgspec.structs.replace(settings.torch, threads=torch.get_num_threads())
    return msgspec.structs.replace(settings, torch=own)
