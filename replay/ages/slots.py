"""The parts that the event model is put together from: groups, engines that samples share, and draws from the record.

Samples on one engine share it: with n in flight each goes at 1 / (1 + slope × n) of the speed that it has alone, so
an engine keeps a clock of work done, on which every sample has a fixed end.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Protocol

from replay.ages.durations import Durations, GroupTimes

DROP, MASK = "drop", "mask"


class Clock(Protocol):
    """What an engine asks of the model."""

    durations: Durations
    is_training: bool

    @property
    def now(self) -> float:
        """Seconds since the start."""
        ...

    def after(self, seconds: float, act: Callable[[], None]) -> None: ...

    def finished(self, group: Group) -> None:
        """The last sample of a group has ended."""
        ...

    def crowd(self) -> None:
        """An engine has begun to generate, or has nothing left."""
        ...


class Group:
    __slots__ = ("engine", "left", "min_version", "newest", "ready_s", "seq", "times", "version", "wave")

    def __init__(self, seq: int, times: GroupTimes) -> None:
        self.seq, self.times = seq, times
        self.left = len(times.work_s)
        self.engine: Engine | None = None
        self.min_version = 0
        self.wave = 0  # the version that was published when it was dispatched
        self.version = 1 << 60  # of its oldest token
        self.newest = -1  # that a sample of it ended with
        self.ready_s = 0.0

    def is_stale(self, floor: int, on_stale: str) -> bool:
        """Dropping, one old token is enough; masking, a group goes only when nothing newer is in it."""
        return (self.version if on_stale == DROP else self.newest) < floor

    def stale_tokens(self, floor: int) -> float:
        """Tokens below the floor, as if its versions had made equally many each."""
        if self.version >= floor:
            return 0.0
        return self.times.n_tokens * (floor - self.version) / (self.newest - self.version + 1)


class Engine:
    """Samples that share one engine. `work` is its clock: seconds of work that each sample in flight has had."""

    def __init__(self, model: Clock, slots: int) -> None:
        self._model, self._slots = model, slots
        self.held = 0
        self.load = 0  # groups given to it that are not finished
        self.running = 0
        self._work = self._since = 0.0
        self._stands_until = 0.0
        self._waiting: list[tuple[int, int, Group, float]] = []  # heap (seq, member, …)
        self._too_new: list[tuple[int, int, Group, float]] = []
        self._ends: list[tuple[float, int, Group]] = []  # heap, on the clock of work
        self._order = itertools.count()
        self._mark = 0
        self._in_flight_s = 0.0

    def take(self, group: Group) -> None:
        for place, work_s in enumerate(group.times.work_s):
            heapq.heappush(self._waiting, (group.seq, place, group, work_s))
        self._start()

    def update(self, version: int) -> None:
        if version <= self.held:
            return
        self.settle()
        self.held = version
        self._stands_until = self._model.now + self._model.durations.stall_s
        for each in self._too_new:
            heapq.heappush(self._waiting, each)
        self._too_new = []
        self._start()
        self.plan()

    def in_flight_s(self) -> float:
        """Integral of the samples in flight up to now."""
        return self._in_flight_s + self.running * (self._model.now - self._since)

    def settle(self) -> None:
        """Bring the clock of work up to now, at the speed so far."""
        now = self._model.now
        worked = max(0.0, now - max(self._since, min(self._stands_until, now)))
        self._in_flight_s += self.running * (now - self._since)
        self._work += worked * self._speed()
        self._since = now

    def _speed(self) -> float:
        crowding = self._model.durations.crowding
        slower = 1 + crowding.per_sample * self.running
        return 1 / (slower * (1 + crowding.beside_training * self._model.is_training))

    def _start(self) -> None:
        self.settle()
        before = self.running
        while self._waiting and self.running < self._slots:
            member = heapq.heappop(self._waiting)
            group = member[2]
            if group.min_version > self.held:
                self._too_new.append(member)
                continue
            group.version = min(group.version, self.held)
            self.running += 1
            heapq.heappush(self._ends, (self._work + member[3], next(self._order), group))
        if self.running != before:
            self.plan()
            if not before:
                self._model.crowd()

    def plan(self) -> None:
        """Put the next end of a sample among the model's events; the one put before counts no longer."""
        self._mark += 1
        if self._ends:
            mark = self._mark
            stands_s = max(0.0, self._stands_until - self._model.now)
            seconds = max(0.0, self._ends[0][0] - self._work) / self._speed()
            self._model.after(stands_s + seconds, lambda: self._end(mark))

    def _end(self, mark: int) -> None:
        if mark != self._mark:
            return
        self.settle()
        self._work = max(self._work, self._ends[0][0])  # whatever rounding left
        while self._ends and self._ends[0][0] <= self._work:
            _, _, group = heapq.heappop(self._ends)
            self.running -= 1
            group.left -= 1
            group.newest = max(group.newest, self.held)
            if not group.left:
                self._model.finished(group)
        self._start()
        self.plan()
        if not self.running:
            self._model.crowd()


class Draws:
    """Recorded durations, drawn again: groups in blocks of consecutive ones that begin as a batch did, the rest one
    by one."""

    def __init__(self, durations: Durations, block: int, seed: int) -> None:
        self._durations, self._block, self._seed = durations, block, seed
        self._random: dict[str, random.Random] = {}
        self._firsts = [place for place, group in enumerate(durations.groups) if group.is_first] or [0]
        self._begins: list[int] = []
        self._blocks = random.Random(f"{seed}/groups")

    def one(self, pool: str) -> float:
        values: Sequence[float] = getattr(self._durations, pool)
        source = self._random.setdefault(pool, random.Random(f"{self._seed}/{pool}"))
        return values[source.randrange(len(values))]

    def group(self, seq: int) -> GroupTimes:
        block, place = divmod(seq, self._block)
        while len(self._begins) <= block:
            self._begins.append(self._blocks.choice(self._firsts))
        groups = self._durations.groups
        return groups[(self._begins[block] + place) % len(groups)]
