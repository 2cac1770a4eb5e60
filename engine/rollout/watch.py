"""Keeping an engine at the newest valid published version.

    ledger.published ≠ engine.held ─► locate ─► engine.update ─► fleet: ready(version, digest, load_s, stall_s)
                                          │                                ▲
                                          │                    engine.receive ◄── every version of a group it is in
                                          └► cannot be had: a newer one? take that ─ else fleet: failed(reason), again

The newest valid version is the one that consumers/ledger.py folds: records of an older epoch are void. A version that
was removed by retention meanwhile is passed over; one whose digest differs is never served, and tried again until a
newer one comes. What the engine holds stays in service all the while.

What a transfer group brings comes first, in its order; after a failure of the group the engine is out of it, and the
file is the way. A version that may still come by broadcast is not read from its file meanwhile (`act`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from consumers.ledger import Ledger
from consumers.runner import Clock, now_ms
from engine.interfaces import EngineError, RolloutEngine
from engine.rollout.loading import FATAL, TRANSFER_FAILED, WEIGHTS_MISMATCH, Locate, weights_id
from engine.rollout.receiving import Action, Join, Leave, Receive, sent_by
from streams.events import (
    EngineFailed,
    EngineReady,
    EngineUpdating,
    Event,
    TransferGroupFormed,
    WeightsPublished,
)

logger = logging.getLogger(__name__)

UPDATE_DEADLINE = timedelta(seconds=300)
GRACE_S = 5.0  # an engine keeps a group's deadline by itself; after this much more it is not waited for
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0  # between two attempts at a version that cannot be had

Tell = Callable[[Event], None]


class _Membership(NamedTuple):
    formed: TransferGroupFormed
    joining: asyncio.Future[None]
    is_over: asyncio.Event


class WeightsWatch:
    """Call `keep_current` whenever the ledger has moved, on the event loop; `close` ends an update that runs.

    `updated` is called after each update, `tell` with every fleet event. `first_deadline`: of the first update, in
    which a server may have to start; of the others it is UPDATE_DEADLINE.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        ledger: Ledger,
        *,
        name: str,
        incarnation: str = "",
        locate: Locate,
        tell: Tell,
        updated: Callable[[], None],
        first_deadline: timedelta = UPDATE_DEADLINE,
        clock: Clock = now_ms,
    ) -> None:
        self.engine, self.ledger, self.name, self.incarnation = engine, ledger, name, incarnation
        self.fatal: BaseException | None = None  # the engine can serve no longer
        self.updates = 0
        self.load_s = self.stall_s = 0.0  # of the last update
        self.stood_still_s = 0.0  # of all
        self._locate, self._tell, self._updated, self._clock = locate, tell, updated, clock
        self._first_deadline = max(first_deadline, UPDATE_DEADLINE)
        self._update: asyncio.Task[None] | None = None
        self._groups: dict[str, _Membership] = {}  # that it is in, or is joining
        self._to_do: deque[Receive | Leave] = deque()
        self._matched: WeightsPublished | None = None  # the newest version of which it is known who sends it
        self._told_updating: tuple[object, str] | None = None
        self._told_ready: set[tuple[int, int]] = set()  # (epoch, version)
        self._closed = False

    @property
    def effective_version(self) -> int:
        """The version of the present epoch that the held weights are as old as; −1: none, or unknown to the ledger.

        Weights of an abandoned epoch count as its fork point (DESIGN §7).
        """
        held = self.engine.held
        version = None if held is None else self.ledger.lineage.effective(held.epoch, held.version)
        return -1 if version is None else version

    @property
    def is_updating(self) -> bool:
        return self._update is not None and not self._update.done()

    def has_told(self, versions: Any) -> bool:
        """An EngineReady was told of every one of these version runs; what is no version run says nothing."""
        try:
            return {(epoch, version) for epoch, version, _ in versions} <= self._told_ready
        except (TypeError, ValueError):
            return True

    def told(self) -> str:
        """The newest versions of which an EngineReady was told."""
        newest = sorted(self._told_ready)[-3:]
        return ", ".join(f"e{epoch}-v{version}" for epoch, version in newest) or "none"

    def keep_current(self) -> None:
        if self._closed or self.is_updating:
            return
        if self._to_do or self._wanted() is not None:
            self._update = asyncio.ensure_future(self._follow())

    def act(self, actions: Sequence[Action], published: WeightsPublished | None) -> None:
        """What the log says about broadcasts, in its order, up to the record of `published`."""
        for action in actions:
            if isinstance(action, Join):
                joining = asyncio.ensure_future(self.engine.join_group(action.formed, action.first_rank))
                joining.add_done_callback(self._joined)
                self._groups[action.formed.group] = _Membership(action.formed, joining, asyncio.Event())
                continue
            self._to_do.append(action)
            if isinstance(action, Leave) and action.is_over and action.group in self._groups:
                self._groups[action.group].is_over.set()
        self._matched = published
        self.keep_current()

    def close(self) -> None:
        self._closed = True
        if self._update is not None:
            self._update.cancel()
        for membership in self._groups.values():
            membership.joining.cancel()

    def _wanted(self) -> WeightsPublished | None:
        """The version to take from its file; None: none, or it may still come by broadcast.

        The intake's thread reads the ledger: on its way to the end it passes versions whose files may be gone.
        """
        published = self.ledger.published if self.ledger.has_caught_up else None
        if published is None or self.engine.held == weights_id(published):
            return None
        if self.engine.n_ranks and sent_by(published)[1] and published is not self._matched:
            return None  # `act` is about to say
        return published

    def _joined(self, joining: asyncio.Future[None]) -> None:
        if not joining.cancelled() and (error := joining.exception()) is not None:
            logger.warning("%s: engine %s: %s", self.name, self.engine.name, error)

    def tell_failed(self, reason: str, detail: str) -> None:
        logger.error("%s: engine %s: %s: %s", self.name, self.engine.name, reason, detail)
        at_ms = self._clock()
        self._tell(EngineFailed(engine=self.engine.name, reason=reason, detail=detail[:2000], at_ms=at_ms))

    async def _follow(self) -> None:
        """Take what groups bring, then the newest version, and again, until none is newer."""
        pause_s, told = _FIRST_PAUSE_S, None
        while self.fatal is None:
            if self._to_do:
                await self._next_of_group(self._to_do.popleft())
                continue
            published = self._wanted()
            if published is None:
                return
            began = time.monotonic()
            try:
                self._tell_updating(published, "disk")
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
                await self._pause(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            except Exception as error:  # a fault of the engine itself: what it holds now is not known
                logger.exception("%s: the update to version %d failed", self.name, published.version)
                self.fatal = error
                return
            else:
                pause_s = _FIRST_PAUSE_S
                self._tell_ready(published, time.monotonic() - began, "disk")

    async def _pause(self, seconds: float) -> None:
        """Not longer than until a group has something for the engine: others wait for it there."""
        end = time.monotonic() + seconds
        while not self._to_do and (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(left, _FIRST_PAUSE_S))

    # -- groups
    async def _next_of_group(self, action: Receive | Leave) -> None:
        membership = self._groups.get(action.group)
        if membership is None:
            return  # it had failed
        if isinstance(action, Leave):
            await self._leave(action.group)
            return
        published, began = action.published, time.monotonic()
        self._tell_updating(published, action.transport)
        try:
            self.stall_s = await self._receive(published, membership)
        except EngineError as error:
            if error.reason in FATAL:
                self.fatal = error
                return
            self.tell_failed(error.reason, error.detail)
            if error.reason != WEIGHTS_MISMATCH:
                await self._leave(action.group)
        except Exception as error:
            logger.exception("%s: version %d could not be received", self.name, published.version)
            self.fatal = error
        else:
            self._tell_ready(published, time.monotonic() - began, action.transport)

    async def _receive(self, published: WeightsPublished, membership: _Membership) -> float:
        """Ends early, with an error, when the trainer has given the group up."""
        formed = membership.formed
        over = asyncio.ensure_future(membership.is_over.wait())
        try:
            if await self._ended_first(membership.joining, over, formed):
                membership.joining.result()
                receiving = asyncio.ensure_future(
                    self.engine.receive(published, formed.group, formed.bucket_bytes)
                )
                if await self._ended_first(receiving, over, formed) or await self._told_to_end(
                    receiving, formed
                ):
                    return receiving.result()
        finally:
            over.cancel()
        why = "the trainer has given it up" if membership.is_over.is_set() else "it took too long"
        detail = f"version {published.version} did not come by group {formed.group}: {why}"
        raise EngineError(TRANSFER_FAILED, detail)

    async def _ended_first(
        self, wanted: asyncio.Future[Any], over: asyncio.Future[Any], formed: TransferGroupFormed
    ) -> bool:
        limit_s = formed.deadline_s + GRACE_S
        try:
            await asyncio.wait({wanted, over}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            wanted.cancel()
            raise
        return wanted.done()

    async def _told_to_end(self, receiving: asyncio.Future[float], formed: TransferGroupFormed) -> bool:
        """The engine itself ends a receive of a group that it leaves: what came whole may be in service already."""
        await self.engine.leave_group(formed.group)
        await asyncio.wait({receiving}, timeout=GRACE_S)
        if not receiving.done():
            receiving.cancel()
        return receiving.done()

    async def _leave(self, group: str) -> None:
        self._groups.pop(group).joining.cancel()
        try:
            await self.engine.leave_group(group)
        except EngineError as error:
            logger.warning("%s: engine %s left group %s badly: %s", self.name, self.engine.name, group, error)

    async def _take(self, published: WeightsPublished) -> float:
        limit_s = (UPDATE_DEADLINE if self.updates else self._first_deadline).total_seconds()
        try:
            update = self.engine.update(published, self._locate(published))
            return await asyncio.wait_for(update, limit_s)
        except asyncio.TimeoutError:
            detail = f"version {published.version} was not taken within {limit_s:g} s"
            raise EngineError("weights_timeout", detail) from None

    def _tell_updating(self, published: WeightsPublished, transport: str) -> None:
        """Once for each version and way, however often it is tried."""
        told = (weights_id(published), transport)
        if told == self._told_updating:
            return
        self._told_updating, held = told, self.engine.held
        self._tell(
            EngineUpdating(
                engine=self.engine.name,
                epoch=published.epoch,
                version=published.version,
                from_epoch=-1 if held is None else held.epoch,
                from_version=-1 if held is None else held.version,
                transport=transport,
                at_ms=self._clock(),
            )
        )

    def _tell_ready(self, published: WeightsPublished, load_s: float, transport: str) -> None:
        self.load_s = load_s
        self.stood_still_s += self.stall_s
        self.updates += 1
        self._told_ready.add((published.epoch, published.version))
        self._tell(
            EngineReady(
                engine=self.engine.name,
                epoch=published.epoch,
                version=published.version,
                digest=published.digest,
                load_s=load_s,
                stall_s=self.stall_s,
                transport=transport,
                checksum=self.engine.checksum(),
                incarnation=self.incarnation,
                at_ms=self._clock(),
            )
        )
        self._updated()
