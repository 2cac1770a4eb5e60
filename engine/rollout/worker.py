"""The rollout daemon: one engine, its tasks, and the newest weights.

    intake ──members──► waiting (oldest group first) ──► running: generate() ──► pack ──► publisher ──► trajectories
       │                     ▲ starts while: the engine holds ≥ min_version, running < max_concurrency,
       └──ledger──► weights ─┘               not paused, the log takes appends
                      └► engine.update(newest) ──► fleet: ready(version, digest) or failed(reason)

    waits for: a task, a version that is new enough, a sample to end, an append to be acknowledged.

Each sample ends in exactly one event: TrajectoryFinished, or RolloutFailed with a typed reason (never a reward of 0).
What is running when the daemon stops has no event: it is generated again by whoever owns the partition next. All
state is rebuilt from the log (engine/rollout/intake.py).
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np

from consumers.runner import Clock, Patience, Stop, now_ms
from engine.interfaces import EngineError, RolloutEngine, Sampling, WeightsId
from engine.rollout.generate import Aborted, Generate, GenerateContext, failure_reason
from engine.rollout.intake import Intake, Member
from engine.rollout.loading import FATAL, Locate, weights_id
from engine.rollout.publisher import Publisher
from engine.rollout.text import TokenText
from streams.columns import LogprobFormat
from streams.errors import InvalidEvent
from streams.events import (
    DeadLetter,
    EngineFailed,
    EngineJoined,
    EngineLeft,
    EngineReady,
    Metrics,
    RolloutFailed,
)
from streams.log import EventLog
from streams.topics import Topics
from streams.trajectory import SampleData, pack

logger = logging.getLogger(__name__)

TICK_S = 0.05
BAD_SAMPLES, OF_LAST = 3, 10  # this many refusals among an engine's last samples flag it
STOP_S = 1.0  # running samples get this long when the daemon is asked to stop
FLUSH_S = 0.7  # then what has ended gets this long to be acknowledged
UPDATE_DEADLINE = timedelta(seconds=300)


class _Running:
    """A sample in flight."""

    __slots__ = ("is_overdue", "member", "since", "stood_still_s", "task")

    def __init__(self, member: Member, since: float, stood_still_s: float) -> None:
        self.member, self.since, self.stood_still_s = member, since, stood_still_s
        self.is_overdue = False
        self.task: asyncio.Task[None] | None = None


class RolloutWorker:
    """`RolloutWorker(log, topics, engine, generate, locate=on_disk(run_dir), …).run(stop)`; one run per object.

    Returns 0 when the run is finished or `stop()` is true, 1 when the engine can serve no longer.
    """

    def __init__(
        self,
        log: EventLog,
        topics: Topics,
        engine: RolloutEngine,
        generate: Generate,
        *,
        locate: Locate,
        sampling: Sampling,
        options: Mapping[str, Any] | None = None,
        replica: int = 0,
        replicas: int = 1,
        max_concurrency: int = 64,
        task_deadline: timedelta = timedelta(seconds=600),
        logprob_format: LogprobFormat = "float32",
        apply_chat_template: bool = False,
        seed: int = 0,
        clock: Clock = now_ms,
    ) -> None:
        self.log, self.topics, self.engine, self.generate = log, topics, engine, generate
        self.locate, self.sampling, self.options = locate, sampling, dict(options or {})
        self.replica, self.max_concurrency = replica, max_concurrency
        self.task_deadline_s = task_deadline.total_seconds()
        self.logprob_format: LogprobFormat = logprob_format
        self.seed, self.clock = seed, clock
        self.name = f"rollout-{replica}"
        self.text = TokenText(engine.tokenizer, apply_chat_template=apply_chat_template)
        self.counts = dict.fromkeys(
            ("samples_total", "failed_total", "refused_total", "aborted_total", "overdue_total", "updates_total"), 0
        )
        self.publisher = Publisher(log, topics, self.name)
        self.intake = Intake(
            log,
            topics,
            name=self.name,
            replica=replica,
            replicas=replicas,
            deliver=self._deliver,
            room=lambda: self._room,
            clock=clock,
        )
        self._room = 2 * max_concurrency
        self._waiting: list[Member] = []  # heap
        self._too_new: list[Member] = []  # ask for a version that the engine does not hold yet
        self._running: dict[str, _Running] = {}
        self._recent: deque[bool] = deque(maxlen=OF_LAST)  # was it refused?
        self._update: asyncio.Task[None] | None = None
        self._stood_still_s = 0.0  # sum over updates and pauses; deadlines do not run meanwhile
        self._stall_s = self._load_s = 0.0  # of the last update
        self._fatal: BaseException | None = None
        self._is_stopping = False
        self._wake: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._patience = Patience(self.name)
        self._looked_s = self._reported_s = time.monotonic()
        self._busy_s = 0.0
        self._progress_mark: tuple[int, ...] = ()

    # -- life
    def run(self, stop: Stop) -> int:
        return asyncio.run(self._main(stop))

    async def _main(self, stop: Stop) -> int:
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        code = 0
        try:
            self.publisher.start()
            self.intake.start()
            self.publisher.tell(
                "fleet",
                EngineJoined(
                    engine=self.engine.name, replica=self.replica, host=socket.gethostname(), pid=os.getpid(),
                    at_ms=self.clock(),
                ),
            )  # fmt: skip
            while not stop() and self.intake.ledger.finished is None and self._fatal is None:
                self._raise_errors()
                self._look_after()
                await self._tick()
            if self._fatal is not None:
                logger.error("%s: ends, its engine serves no longer: %s", self.name, self._fatal)
                self._tell_failed("engine", str(self._fatal))
                code = 1
            elif self.intake.ledger.finished is not None:
                logger.info("%s: the run is finished", self.name)
        finally:
            await self._shut_down()
        return code

    async def _tick(self) -> None:
        assert self._loop is not None and self._wake is not None
        timer = self._loop.call_later(TICK_S, self._wake.set)
        await self._wake.wait()
        timer.cancel()
        self._wake.clear()

    def _look_after(self) -> None:
        now = time.monotonic()
        if self.intake.ledger.paused:
            self._stood_still_s += now - self._looked_s  # deadlines do not run while the run is paused
        self._looked_s = now
        self._keep_current()
        self._fail_overdue()
        self._pump()
        self._report()
        mark = (self.publisher.published, self.counts["updates_total"], len(self._running))
        if mark != self._progress_mark or (self._idle_is_fine() and not self._waiting):
            self._progress_mark = mark
            self._patience.reset()
        self._patience.waiting(self._waits_for)

    def _idle_is_fine(self) -> bool:
        return self.engine.held is not None and not self._too_new and not self._running

    def _waits_for(self) -> str:
        ledger = self.intake.ledger
        if self.publisher.stuck:
            return f"the log to take appends ({self.publisher.backlog} events wait)"
        if ledger.published is None:
            return "the first weights to be published"
        if self.engine.held is None:
            return f"version {ledger.published.version} to be loaded"
        if ledger.paused:
            return "the run to be resumed"
        if self._running:
            oldest = min(self._running.values(), key=lambda each: each.since)
            seconds = time.monotonic() - oldest.since
            return f"{len(self._running)} samples, of which {oldest.member.uid} has run for {seconds:.0f} s"
        wanted = min((each.task.min_version for each in self._too_new), default=0)
        return f"version {wanted}, asked for by {len(self._too_new)} samples; holds {self.engine.held.version}"

    def _raise_errors(self) -> None:
        for error in (self.intake.error, self.publisher.error):
            if error is not None:
                raise error

    async def _shut_down(self) -> None:
        """Within 2 s: what runs may end, then it is abandoned (another owner generates it again)."""
        self._is_stopping = True
        self.intake.close()
        if self._update is not None:
            self._update.cancel()
        running = [each.task for each in self._running.values() if each.task is not None]
        if running:
            wants_them = self._fatal is None and self.intake.ledger.finished is None
            _, left = await asyncio.wait(running, timeout=STOP_S if wants_them else 0)
            for task in left:
                task.cancel()
            if left:
                logger.info("%s: abandons %d running samples", self.name, len(left))
                await asyncio.wait(left, timeout=0.2)
        await self.engine.close()
        self.publisher.tell("fleet", EngineLeft(engine=self.engine.name, at_ms=self.clock()))
        if not self.publisher.flush(timedelta(seconds=FLUSH_S)):
            logger.warning("%s: %d events were not acknowledged; their samples will be generated again", self.name,
                           self.publisher.backlog)
        self.publisher.close(timedelta(seconds=0.2))

    # -- news from the intake thread
    def _deliver(self, members: list[Member]) -> None:
        if self._loop is None or self._loop.is_closed():
            return
        # counted here, on the intake's thread, so that it does not read on before the loop has woken
        self._room -= len(members)
        self._loop.call_soon_threadsafe(self._take_in, members)

    def _take_in(self, members: list[Member]) -> None:
        for member in members:
            heapq.heappush(self._waiting, member)
        self._update_room()
        self._keep_current()
        self._pump()
        if self._wake is not None and self.intake.ledger.finished is not None:
            self._wake.set()

    def _update_room(self) -> None:
        self._room = 2 * self.max_concurrency - len(self._waiting) - len(self._too_new)

    # -- starting samples
    def _pump(self) -> None:
        """Start what may be started, oldest group first."""
        if self._is_stopping or self._fatal is not None or not self._waiting:
            return
        ledger, held = self.intake.ledger, self.engine.held
        if held is None or ledger.paused or ledger.finished is not None:
            return
        room = self.max_concurrency - len(self._running)
        if room <= 0 or self.publisher.stuck or self.publisher.backlog > 4 * self.max_concurrency:
            return
        version = self._effective_version(held)
        while room > 0 and self._waiting:
            member = heapq.heappop(self._waiting)
            if member.lane.is_lost:
                continue
            if ledger.is_closed(member.seq):  # dropped while it waited: nobody would read its sample
                member.lane.sample_done(member.offset)
                continue
            if member.task.min_version > version:
                self._too_new.append(member)
                continue
            self._start(member)
            room -= 1
        self._update_room()

    def _effective_version(self, held: WeightsId) -> int:
        """The version of the present epoch that the held weights are as old as; −1 if the ledger knows them not."""
        version = self.intake.ledger.lineage.effective(held.epoch, held.version)
        return -1 if version is None else version

    def _start(self, member: Member) -> None:
        running = _Running(member, time.monotonic(), self._stood_still_s)
        self._running[member.uid] = running
        running.task = asyncio.ensure_future(self._sample(running))

    async def _sample(self, running: _Running) -> None:
        """Generate one member and publish its outcome."""
        member = running.member
        try:
            sample = await self._generate(member)
        except asyncio.CancelledError:
            if not running.is_overdue:
                raise
            self.counts["overdue_total"] += 1
            self._fail(member, "task_deadline", f"not finished within {self.task_deadline_s:g} s")
        except EngineError as error:
            if error.reason in FATAL:
                self._fatal = self._fatal or error
            else:
                self._fail(member, error.reason, error.detail)
        except Exception as error:
            reason, detail = failure_reason(error)
            if reason == "generate_error":
                logger.warning("%s: generating %s failed", self.name, member.uid, exc_info=error)
            self._fail(member, reason, detail)
        else:
            self._publish(member, sample)
        finally:
            self._running.pop(member.uid, None)
            self._pump()

    async def _generate(self, member: Member) -> SampleData:
        attempt = 0
        while True:
            context = GenerateContext(
                engine=self.engine,
                text=self.text,
                sampling=self.sampling,
                request_id=f"{member.uid}#{attempt}" if attempt else member.uid,
                task_offset=member.task_offset,
                options=self.options,
                seed=self.seed,
                clock=self.clock,
            )
            try:
                return await self.generate(context, member.task, member.index)
            except Aborted:  # the weights changed: again from the start, and no re-dispatch is counted
                self.counts["aborted_total"] += 1
                attempt += 1

    # -- ending samples
    def _publish(self, member: Member, sample: SampleData) -> None:
        try:
            if sample.uid != member.uid:
                raise InvalidEvent("wrong_uid", f"the generate function returned a sample of {sample.uid!r}")
            event = pack(sample, logprob_format=self.logprob_format)
        except InvalidEvent as error:
            self._refuse(member, sample, error)
            return
        self._recent.append(False)
        self.counts["samples_total"] += 1
        self.publisher.put(member.lane, member.offset, event)

    def _refuse(self, member: Member, sample: SampleData, error: InvalidEvent) -> None:
        """Values that must never be trained on: kept whole in `dead`, and its group learns of the failure."""
        letter = DeadLetter(
            topic=self.topics.name("trajectories"),
            partition=member.lane.partition,
            offset=-1,  # it never came to have one
            raw=encode_raw(sample),
            stage=self.name,
            reason=error.reason,
            detail=str(error)[:2000],
            at_ms=self.clock(),
        )
        logger.error("%s: refused %s from engine %s: %s: %s", self.name, member.uid, self.engine.name, error.reason,
                     error.detail)
        self.counts["refused_total"] += 1
        self._fail(member, error.reason, error.detail, letter)
        self._recent.append(True)
        if sum(self._recent) >= BAD_SAMPLES:
            refused, seen = sum(self._recent), len(self._recent)
            self._recent.clear()
            self._tell_failed("bad_samples", f"{refused} of the last {seen} samples were refused, the last one for "
                              f"{error.reason}: {error.detail}")

    def _fail(self, member: Member, reason: str, detail: str, letter: DeadLetter | None = None) -> None:
        self.counts["failed_total"] += 1
        event = RolloutFailed(
            uid=member.uid,
            group_id=member.task.group_id,
            seq=member.seq,
            index=member.index,
            attempt=member.task.attempt,
            n_samples=member.task.n_samples,
            task_offset=member.task_offset,
            reason=reason,
            detail=detail[:2000],
            engine=self.engine.name,
        )
        self.publisher.put(member.lane, member.offset, event, letter)

    def _fail_overdue(self) -> None:
        now = time.monotonic()
        for running in list(self._running.values()):
            stood_still_s = self._stood_still_s - running.stood_still_s
            if now - running.since - stood_still_s > self.task_deadline_s and not running.is_overdue:
                running.is_overdue = True
                logger.warning("%s: %s did not finish within %g s", self.name, running.member.uid,
                               self.task_deadline_s)
                if running.task is not None:
                    running.task.cancel()
            elif running.member.lane.is_lost and running.task is not None:
                running.task.cancel()

    # -- weights
    def _keep_current(self) -> None:
        published = self.intake.ledger.published
        if published is None or self._is_stopping or (self._update is not None and not self._update.done()):
            return
        if self.engine.held != weights_id(published):
            self._update = asyncio.ensure_future(self._update_weights())

    async def _update_weights(self) -> None:
        """Take the newest version, and again, until none is newer. A version that cannot be had is tried again."""
        pause_s, failed_for = 0.1, ("", -1, -1)
        while True:
            published = self.intake.ledger.published
            if published is None or self.engine.held == weights_id(published):
                return
            began = time.monotonic()
            try:
                stall_s = await asyncio.wait_for(
                    self.engine.update(published, self.locate(published)), UPDATE_DEADLINE.total_seconds()
                )
            except (EngineError, asyncio.TimeoutError) as error:
                reason = error.reason if isinstance(error, EngineError) else "weights_timeout"
                detail = error.detail if isinstance(error, EngineError) else f"{UPDATE_DEADLINE} passed"
                if reason in FATAL:
                    self._fatal = self._fatal or error
                    return
                newest = self.intake.ledger.published
                if newest is not None and newest is not published:
                    logger.info("%s: version %d is gone (%s), takes version %d", self.name, published.version,
                                detail, newest.version)
                    continue
                if failed_for != (failed_for := (reason, published.epoch, published.version)):
                    self._tell_failed(reason, detail)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 5.0)
                continue
            except Exception as error:  # a fault of the engine itself; what it holds now is not known
                logger.exception("%s: update to version %d failed", self.name, published.version)
                self._fatal = self._fatal or error
                return
            self._updated(published.epoch, published.version, published.digest, time.monotonic() - began, stall_s)
            pause_s = 0.1

    def _updated(self, epoch: int, version: int, digest: str, load_s: float, stall_s: float) -> None:
        self._load_s, self._stall_s = load_s, stall_s
        self._stood_still_s += stall_s
        self.counts["updates_total"] += 1
        self.publisher.tell(
            "fleet",
            EngineReady(
                engine=self.engine.name, epoch=epoch, version=version, digest=digest, load_s=load_s,
                stall_s=stall_s, at_ms=self.clock(),
            ),
        )  # fmt: skip
        for member in self._too_new:
            heapq.heappush(self._waiting, member)
        self._too_new.clear()
        self._pump()

    def _tell_failed(self, reason: str, detail: str) -> None:
        logger.error("%s: engine %s: %s: %s", self.name, self.engine.name, reason, detail)
        self.publisher.tell(
            "fleet",
            EngineFailed(engine=self.engine.name, reason=reason, detail=detail[:2000], at_ms=self.clock()),
        )

    # -- metrics
    def _report(self) -> None:
        now = time.monotonic()
        passed = now - self._reported_s
        if passed < 1.0:
            return
        stats = self.engine.stats()
        busy_s = stats.get("busy_s", 0.0)
        held = self.engine.held
        values = {
            "tokens_total": stats.get("tokens", 0.0),
            "requests_total": stats.get("requests", 0.0),
            "busy": min(1.0, (busy_s - self._busy_s) / passed),
            "in_flight": float(len(self._running)),
            "waiting": float(len(self._waiting) + len(self._too_new)),
            "unacknowledged": float(self.publisher.backlog),
            "version": float(held.version if held is not None else -1),
            "load_s": self._load_s,
            "stall_s": self._stall_s,
            "duplicates_total": float(self.intake.duplicates),
            "unknown_types": float(self.intake.reader.unknown_types),
            "dead_letters": float(self.intake.reader.dead_letters + self.counts["refused_total"]),
            **{name: float(count) for name, count in self.counts.items()},
        }
        self._reported_s, self._busy_s = now, busy_s
        if self.publisher.stuck:
            return  # a gauge is not worth a place in the queue of a full log
        self.publisher.tell("metrics", Metrics(source=self.name, values=values, at_ms=self.clock()))
        self.log.commit_hint("rollout", self.intake.positions())


def encode_raw(sample: SampleData) -> bytes:
    """Everything of a refused sample as MessagePack; arrays as lists, NaN kept, what has no form as its repr."""
    return msgspec.msgpack.encode(sample, enc_hook=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    tolist = getattr(value, "tolist", None)
    return tolist() if callable(tolist) else repr(value)
