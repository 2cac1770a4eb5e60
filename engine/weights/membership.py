"""The trainer's view of the fleet: which engines may be members of the next transfer group.

    EngineJoined (n_ranks > 0) ─► EngineReady ─► candidate, while its daemon gives signs of life in `metrics`
    EngineLeft, EngineFailed of its end ─► gone     a transfer lost it ─► candidate again at its next sign of life
    lost several times in a row ─► left out, until it joins anew (it takes its versions from disk)

Signs of life count from when they are read, so no two clocks are compared: `catch_up` must be called often.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from datetime import timedelta
from typing import NamedTuple

from streams import codec
from streams.codec import Known
from streams.errors import CodecError, CorruptRecord, OffsetOutOfRange
from streams.events import EngineFailed, EngineJoined, EngineLeft, EngineReady, Event
from streams.log import Batch, EventLog
from streams.topics import Topics

logger = logging.getLogger(__name__)

FRESH = timedelta(seconds=5)  # a daemon gives a sign about once a second
MOST_FAILURES = 3  # in a row; then the engine is left out until it joins anew
ENDED = ("engine", "quarantined")  # reasons of an EngineFailed after which an engine serves nothing
NOT_AS_PUBLISHED = "weights_mismatch"


class Candidate(NamedTuple):
    engine: str
    n_ranks: int
    host: str
    device: str
    incarnation: int  # of the engine: another number after it joined anew


class _Engine:
    def __init__(self, joined: EngineJoined, incarnation: int) -> None:
        self.candidate = Candidate(joined.engine, joined.n_ranks, joined.host, joined.device, incarnation)
        self.daemon = f"rollout-{joined.replica}"
        self.is_ready = False
        self.failures = 0
        self.heard_after = 0.0  # by time.monotonic: an earlier sign of life does not count


class Members:
    """Follows `fleet` from its beginning and `metrics` from now on. Call it from one thread at a time."""

    def __init__(
        self, log: EventLog, topics: Topics, *, fresh: timedelta = FRESH, most_failures: int = MOST_FAILURES
    ) -> None:
        self._log, self._fleet, self._metrics = log, topics.name("fleet"), topics.name("metrics")
        self._fresh_s, self._most_failures = fresh.total_seconds(), most_failures
        self._engines: dict[str, _Engine] = {}
        self._heard: dict[str, float] = {}  # daemon → when a sign of life was last read
        self._fleet_position = 0
        self._metrics_position = log.end(self._metrics, 0)
        self._joined = 0

    def catch_up(self) -> None:
        """Fold all there is. Raises LogUnavailable."""
        self._fleet_position = self._follow(self._fleet, self._fleet_position, decode=True)
        self._metrics_position = self._follow(self._metrics, self._metrics_position, decode=False)

    def candidates(self) -> list[Candidate]:
        """Engines that a group may count on, by name."""
        now = time.monotonic()
        return [
            each.candidate
            for _, each in sorted(self._engines.items())
            if each.candidate.n_ranks
            and each.is_ready
            and each.failures < self._most_failures
            and self._is_alive(each, now)
        ]

    def lost(self, engines: Collection[str]) -> None:
        """A transfer lost these: they must give a new sign of life, and too many losses in a row leave them out."""
        for name in engines:
            if name in self._engines:
                self._engines[name].heard_after = time.monotonic()
                self._count_failure(name)

    def took_part(self, engines: Collection[str]) -> None:
        """A broadcast to these came to its end."""
        for name in engines:
            if name in self._engines:
                self._engines[name].failures = 0

    def silent_since(self, engines: Collection[str], moment: float) -> list[str]:
        """Those without a sign of life that was read after `moment` (time.monotonic), or that are gone."""
        return [
            name
            for name in engines
            if name not in self._engines or self._heard.get(self._engines[name].daemon, 0.0) <= moment
        ]

    def gone(self, candidates: Collection[Candidate]) -> list[str]:
        """Those of whom there is no fresh sign of life, or who left or joined anew."""
        now = time.monotonic()
        return [
            each.engine
            for each in candidates
            if (engine := self._engines.get(each.engine)) is None
            or engine.candidate.incarnation != each.incarnation
            or now - self._heard.get(engine.daemon, float("-inf")) > self._fresh_s
        ]

    def _is_alive(self, engine: _Engine, now: float) -> bool:
        heard = self._heard.get(engine.daemon, float("-inf"))
        return now - heard <= self._fresh_s and heard > engine.heard_after

    def _count_failure(self, name: str) -> None:
        engine = self._engines[name]
        engine.failures += 1
        if engine.failures == self._most_failures:
            logger.warning(
                "trainer: engine %s was lost by %d transfers in a row; it is left out of groups until it joins anew, "
                "and takes its versions from disk", name, engine.failures,
            )  # fmt: skip

    # -- reading
    def _follow(self, topic: str, position: int, *, decode: bool) -> int:
        while True:
            batch = self._read(topic, position)
            for record in batch.records:
                if decode:
                    try:
                        decoded = codec.decode(record)
                    except CodecError:
                        continue  # the audit shows it
                    if isinstance(decoded, Known):
                        self._apply(decoded.event)
                else:
                    self._heard[(record.header("by") or b"").decode()] = time.monotonic()
            if batch.next_position <= position:
                return position
            position = batch.next_position

    def _read(self, topic: str, position: int) -> Batch:
        try:
            return self._log.read(topic, 0, position)
        except OffsetOutOfRange as gone:  # pruned: what an engine said long ago it says again when it joins
            return Batch([], max(position, gone.start))
        except CorruptRecord as damage:
            return Batch([], damage.next_offset)

    def _apply(self, event: Event) -> None:
        if isinstance(event, EngineJoined):
            self._joined += 1
            self._engines[event.engine] = _Engine(event, self._joined)
        elif isinstance(event, EngineLeft):
            self._engines.pop(event.engine, None)
        elif isinstance(event, EngineReady) and event.engine in self._engines:
            self._engines[event.engine].is_ready = True
        elif isinstance(event, EngineFailed) and event.engine in self._engines:
            if event.reason in ENDED:
                del self._engines[event.engine]
            elif event.reason == NOT_AS_PUBLISHED:
                self._count_failure(event.engine)
