"""What another limit would have done: the daemons' own rules, on durations that were measured, without the daemons.

    feeder    dispatches while open groups < (limit + 1) × G; a group used by a cut is open until its version is
              published; min_version as the feeder computes it
    engines   so many slots each, oldest group first; a sample needs an engine that holds its min_version
    collector a group is there some time after its last sample
    trainer   drops what is stale (or masks it), cuts the oldest G groups, trains, makes version + 1

Time jumps from event to event (replay/ages/slots.py has the engines).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import NamedTuple

from replay.ages.durations import Durations
from replay.ages.slots import DROP, Draws, Engine, Group
from streams.errors import ConfigError

_BLOCK = 8  # batches of groups that are drawn together: their lives overlapped, and one outage is not to count twice
_MOST_EVENTS = 5_000_000  # a model that makes no step any more is a fault, not a wait


class Setting(NamedTuple):
    """What is asked about."""

    limit: int
    engines: int
    slots: int  # of one engine
    batch: int  # groups of a step
    steps_per_version: int = 1  # steps from one published version to the next
    max_open_groups: int | None = None
    pace: bool = True  # False: engines never wait, and what is too old is thrown away
    on_stale: str = DROP

    @property
    def capacity(self) -> int:
        """Groups that may be open."""
        allowed = (self.limit + 1) * self.batch
        return allowed if self.max_open_groups is None else min(allowed, self.max_open_groups)


class ModelStep(NamedTuple):
    """One modelled step."""

    at_s: float  # of its cut
    wait_s: float  # that it waited for its last group
    staleness: list[int]  # of each group: of its oldest token that trains
    n_tokens: float  # trained
    n_stale_tokens: float  # thrown away as stale since the step before
    n_slow: int  # of its groups, those of the slowest quarter
    n_stale: int  # groups thrown away as stale since the step before
    n_slow_stale: int  # of these, those of the slowest quarter
    in_flight_s: float  # integral of samples in flight since the start


class Model:
    """`Model(durations, setting, seed).run(steps)`; deterministic by its seed.

    Group number k is drawn by k alone, so that two limits are asked about the same groups.
    """

    def __init__(self, durations: Durations, setting: Setting, *, seed: int = 0) -> None:
        if setting.limit < setting.steps_per_version - 1:
            raise ConfigError(
                f"limit {setting.limit}: with weights.update_weights_interval = {setting.steps_per_version} the "
                f"limit must be at least {setting.steps_per_version - 1}, or nothing could ever train"
            )
        self.durations, self.setting = durations, setting
        self._draws = Draws(durations, _BLOCK * setting.batch, seed)
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._engines = [Engine(self, setting.slots) for _ in range(setting.engines)]
        # the ledger
        self._next_seq = self._closed = 0
        self._published = 0
        self._untrained: list[tuple[int, int]] = []  # (version that was trained from, groups)
        self._is_feeding = False
        self._under_way: dict[int, int] = {}  # version for which they were dispatched → groups not finished
        self._overtaking: list[Group] = []  # finished before groups of an earlier version
        self._collected_s = 0.0  # when the newest group is there
        # the trainer
        self.version = 0
        self._buffer: list[Group] = []  # by seq
        self._is_busy = self.is_training = False
        self._ended_s = 0.0
        self._train_left = self._train_since = 0.0
        self._train_mark = 0
        self._unwritten = 0  # drops that no record holds yet
        self._stale: list[Group] = []  # thrown away since the last cut
        self.steps: list[ModelStep] = []

    def run(self, n_steps: int) -> list[ModelStep]:
        """Raises ConfigError when the model makes no more steps, as with fewer open groups than a step needs."""
        self._feed()
        for _ in range(_MOST_EVENTS):
            if len(self.steps) >= n_steps:
                return self.steps
            if not self._events:
                break
            self._now, _, act = heapq.heappop(self._events)
            act()
        raise ConfigError(
            f"limit {self.setting.limit}: the model makes no step after {len(self.steps)}: either every group is "
            f"dropped, or fewer groups may be open ({self.setting.capacity}) than a step needs ({self.setting.batch})"
        )

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._order), act))

    @property
    def now(self) -> float:
        return self._now

    # -- feeder
    def _feed_soon(self) -> None:
        if not self._is_feeding:
            self._is_feeding = True
            self.after(self._draws.one("feed_s") if self.setting.pace else 0.0, self._feed)

    def _feed(self) -> None:
        self._is_feeding = False
        while self._has_room():
            group = Group(self._next_seq, self._draws.group(self._next_seq))
            self._next_seq += 1
            group.min_version = self._min_version(self._open - 1)
            group.wave = self._published
            self._under_way[group.wave] = self._under_way.get(group.wave, 0) + 1
            engine = min(self._engines, key=lambda each: each.load)
            engine.load += 1
            group.engine = engine
            self.after(group.times.pickup_s, lambda engine=engine, group=group: engine.take(group))

    @property
    def _open(self) -> int:
        return self._next_seq - self._closed + sum(groups for _, groups in self._untrained)

    def _has_room(self) -> bool:
        if self.setting.pace:
            return self._open < self.setting.capacity
        size = len(self.durations.groups[0].work_s)
        return sum(each.load for each in self._engines) * size < 2 * self.setting.slots * self.setting.engines

    def _min_version(self, ahead: int) -> int:
        if not self.setting.pace:
            return 0
        return max(0, self._published + ahead // self.setting.batch - self.setting.limit)

    def close(self, groups: int) -> None:
        self._closed += groups
        self._feed_soon()

    # -- collector
    def finished(self, group: Group) -> None:
        """Its last sample has ended."""
        assert group.engine is not None
        group.engine.load -= 1
        if not self.setting.pace:
            self._feed_soon()
        self._under_way[group.wave] -= 1
        if not self.durations.waves_keep_order:
            self._collect(group)
            return
        self._overtaking.append(group)
        first = min((wave for wave, count in self._under_way.items() if count), default=self._published)
        self._under_way = {wave: count for wave, count in self._under_way.items() if wave >= first}
        ready = [each for each in self._overtaking if each.wave <= first]
        self._overtaking = [each for each in self._overtaking if each.wave > first]
        for each in ready:
            self._collect(each)

    def _collect(self, group: Group) -> None:
        ready_s = self._now + group.times.collect_s
        if self.durations.collects_in_order:
            ready_s = self._collected_s = max(ready_s, self._collected_s)
        self.after(ready_s - self._now, lambda: self._ready(group))

    # -- trainer
    def _ready(self, group: Group) -> None:
        group.ready_s = self._now
        if group.times.is_refused:
            self._unwritten += 1
        else:
            self._buffer.append(group)
        self._look("wake_s")

    def _look(self, delay: str) -> None:
        """Drop what is stale; begin a batch if there is enough, else write the drops down."""
        if self._is_busy:
            return
        self._sweep()
        if len(self._buffer) >= self.setting.batch:
            self._is_busy = True
            chosen = self._oldest()
            self.after(self._draws.one(delay), lambda: self._cut(chosen))
        elif self._unwritten:
            self._write_drops()

    def _write_drops(self) -> None:
        dropped, self._unwritten = self._unwritten, 0
        if dropped:
            self.close(dropped)

    def _sweep(self) -> None:
        floor = self.version - self.setting.limit
        kept = []
        for group in self._buffer:
            if group.is_stale(floor, self.setting.on_stale):
                self._unwritten += 1
                self._stale.append(group)
            else:
                kept.append(group)
        self._buffer = kept

    def _oldest(self) -> list[Group]:
        """The groups of the next batch; what comes while it is got ready is for a later one."""
        batch = self.setting.batch
        by_age = sorted(self._buffer, key=lambda group: group.seq)
        self._buffer = by_age[batch:]
        return by_age[:batch]

    def _cut(self, chosen: list[Group]) -> None:
        floor = self.version - self.setting.limit
        masked = sum(group.stale_tokens(floor) for group in chosen)
        ready_s = max(group.ready_s for group in chosen)
        self.steps.append(
            ModelStep(
                at_s=self._now,
                wait_s=max(0.0, ready_s - self._ended_s),
                staleness=[self.version - max(floor, group.version) for group in chosen],
                n_tokens=sum(group.times.n_tokens for group in chosen) - masked,
                n_stale_tokens=sum(group.times.n_tokens for group in self._stale) + masked,
                n_slow=sum(group.times.is_slow for group in chosen),
                n_stale=len(self._stale),
                n_slow_stale=sum(group.times.is_slow for group in self._stale),
                in_flight_s=sum(engine.in_flight_s() for engine in self._engines),
            )
        )
        self._stale = []
        self._untrained.append((self.version, len(chosen)))
        self.close(len(chosen))
        self._write_drops()
        self._train_left = self._draws.one("train_s")
        self._set_training(True)

    def _set_training(self, is_training: bool) -> None:
        for engine in self._engines:
            engine.settle()
        self.is_training = is_training
        for engine in self._engines:
            engine.plan()
        self._train_since = self._now
        self._plan_training()

    def crowd(self) -> None:
        """Engines have begun or ended to generate: a step under way goes slower or faster from here."""
        if self.is_training:
            self._train_left -= (self._now - self._train_since) / self._train_slower
            self._train_since = self._now
            self._plan_training()

    def _plan_training(self) -> None:
        self._train_mark += 1
        if not self.is_training:
            return
        busy = sum(each.running > 0 for each in self._engines) > 0
        self._train_slower = 1 + self.durations.crowding.beside_generation * busy
        mark = self._train_mark
        self.after(max(0.0, self._train_left) * self._train_slower, lambda: self._trained(mark))

    def _trained(self, mark: int) -> None:
        if mark != self._train_mark:
            return
        self._set_training(False)
        self.version += 1
        self._ended_s = self._now
        if self.version % self.setting.steps_per_version == 0:
            version = self.version
            self.after(self._draws.one("publish_s"), lambda: self._publish(version))
        self._is_busy = False
        self._look("turn_s")

    def _publish(self, version: int) -> None:
        self._published = max(self._published, version)
        self._untrained = [cut for cut in self._untrained if cut[0] >= version]
        for engine in self._engines:
            self.after(self._draws.one("sync_s"), lambda engine=engine: engine.update(version))
        self._feed_soon()
