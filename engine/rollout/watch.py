"""Keeping an engine at the newest valid published version.

    ledger.published ≠ engine.held ─► locate ─► engine.update ─► fleet: ready(version, digest, load_s, stall_s)
                                          │
                                          └► cannot be had: a newer one? take that ─ else fleet: failed(reason), again

The newest valid version is the one that consumers/ledger.py folds: records of an older epoch are void. A version that
was removed by retention meanwhile is passed over; one whose digest differs is never served, and tried again until a
newer one comes. What the engine holds stays in service all the while.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import timedelta

from consumers.ledger import Ledger
from consumers.runner import Clock, now_ms
from engine.interfaces import EngineError, RolloutEngine
from engine.rollout.loading import FATAL, Locate, weights_id
from streams.events import EngineFailed, EngineReady, Event, WeightsPublished

logger = logging.getLogger(__name__)

UPDATE_DEADLINE = timedelta(seconds=300)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0  # between two attempts at a version that cannot be had

Tell = Callable[[Event], None]


class WeightsWatch:
    """Call `keep_current` whenever the ledger has moved, on the event loop; `close` ends an update that runs.

    `updated` is called after each update, `tell` with every fleet event.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        ledger: Ledger,
        *,
        name: str,
        locate: Locate,
        tell: Tell,
        updated: Callable[[], None],
        clock: Clock = now_ms,
    ) -> None:
        self.engine, self.ledger, self.name = engine, ledger, name
        self.fatal: BaseException | None = None  # the engine can serve no longer
        self.updates = 0
        self.load_s = self.stall_s = 0.0  # of the last update
        self.stood_still_s = 0.0  # of all
        self._locate, self._tell, self._updated, self._clock = locate, tell, updated, clock
        self._update: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def effective_version(self) -> int:
        """The version of the present epoch that the held weights are as old as; −1: none, or unknown to the ledger.

        Weights of an abandoned epoch count as its fork point (DESIGN §7).
        """
        held = self.engine.held
        version = None if held is None else self.ledger.lineage.effective(held.epoch, held.version)
        return -1 if version is None else version

    def keep_current(self) -> None:
        published = self.ledger.published
        if published is None or self._closed or (self._update is not None and not self._update.done()):
            return
        if self.engine.held != weights_id(published):
            self._update = asyncio.ensure_future(self._follow())

    def close(self) -> None:
        self._closed = True
        if self._update is not None:
            self._update.cancel()

    def tell_failed(self, reason: str, detail: str) -> None:
        logger.error("%s: engine %s: %s: %s", self.name, self.engine.name, reason, detail)
        at_ms = self._clock()
        self._tell(EngineFailed(engine=self.engine.name, reason=reason, detail=detail[:2000], at_ms=at_ms))

    async def _follow(self) -> None:
        """Take the newest version, and again, until none is newer."""
        pause_s, told = _FIRST_PAUSE_S, None
        while True:
            published = self.ledger.published
            if published is None or self.engine.held == weights_id(published):
                return
            began = time.monotonic()
            try:
                self.stall_s = await self._take(published)
            except EngineError as error:
                if error.reason in FATAL:
                    self.fatal = error
                    return
                newest = self.ledger.published
                if newest is not None and newest is not published:
                    logger.info("%s: version %d cannot be had (%s), takes version %d", self.name, published.version,
                                error.detail, newest.version)  # fmt: skip
                    continue
                if told != (told := (error.reason, published.epoch, published.version)):
                    self.tell_failed(error.reason, error.detail)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            except Exception as error:  # a fault of the engine itself: what it holds now is not known
                logger.exception("%s: the update to version %d failed", self.name, published.version)
                self.fatal = error
                return
            else:
                pause_s = _FIRST_PAUSE_S
                self._tell_ready(published, time.monotonic() - began)

    async def _take(self, published: WeightsPublished) -> float:
        try:
            update = self.engine.update(published, self._locate(published))
            return await asyncio.wait_for(update, UPDATE_DEADLINE.total_seconds())
        except asyncio.TimeoutError:
            detail = f"version {published.version} was not taken within {UPDATE_DEADLINE.total_seconds():g} s"
            raise EngineError("weights_timeout", detail) from None

    def _tell_ready(self, published: WeightsPublished, load_s: float) -> None:
        self.load_s = load_s
        self.stood_still_s += self.stall_s
        self.updates += 1
        self._tell(
            EngineReady(
                engine=self.engine.name,
                epoch=published.epoch,
                version=published.version,
                digest=published.digest,
                load_s=load_s,
                stall_s=self.stall_s,
                at_ms=self._clock(),
            )
        )
        self._updated()
