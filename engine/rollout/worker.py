"""The rollout daemon: one engine, its tasks, and the newest weights.

    intake ──members──► waiting (oldest group first) ──► running: generate() ──► outcomes ──► publisher ──► trajectories
       │                     ▲ starts while: the engine holds ≥ min_version, running < max_concurrency,
       └──ledger──► watch ───┘               not paused, the log takes appends
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
import secrets
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from consumers.losses import OnLost
from consumers.runner import Clock, Patience, Stop, exit_code, now_ms
from engine.interfaces import EngineError, RolloutEngine, Sampling
from engine.rollout.generate import Aborted, Generate, GenerateContext, failure_reason
from engine.rollout.intake import Intake, Member
from engine.rollout.loading import FATAL, NO_WEIGHTS, QUARANTINED, Locate
from engine.rollout.outcomes import Outcomes
from engine.rollout.publisher import Publisher
from engine.rollout.receiving import Action, Transfers
from engine.rollout.text import TokenText
from engine.rollout.watch import UPDATE_DEADLINE, WeightsWatch
from streams.columns import LogprobFormat
from streams.events import (
    EngineJoined,
    EngineLeft,
    EngineQuarantined,
    EngineReady,
    Event,
    Metrics,
    WeightsPublished,
)
from streams.log import EventLog
from streams.topics import Topics
from streams.trajectory import SampleData

logger = logging.getLogger(__name__)

TICK_S = 0.05
STOP_S = 0.8  # running samples get this long when the daemon is asked to stop
FLUSH_S = 0.6  # then what has ended gets this long to be acknowledged


class _Running:
    """A sample in flight."""

    __slots__ = ("is_overdue", "member", "since", "stood_still_s", "task")

    def __init__(self, member: Member, since: float, stood_still_s: float) -> None:
        self.member, self.since, self.stood_still_s = member, since, stood_still_s
        self.is_overdue = False
        self.task: asyncio.Task[None] | None = None


class RolloutWorker:
    """`RolloutWorker(log, topics, engine, generate, locate=on_disk(run_dir), …).run(stop)`; one run per object.

    Returns 0 when the run is finished or `stop()` is true, 1 when the engine can serve no longer, or when samples that
    had ended could not be delivered before it stopped.
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
        on_lost: OnLost = "stop",
        first_update: timedelta = UPDATE_DEADLINE,
        clock: Clock = now_ms,
        incarnation: str = "",
    ) -> None:
        """`incarnation` names this process in all that it makes; "": a name of its own, unique over the run's life.

        `first_update`: how long the first version may take, the start of the engine's server included.
        """
        self.log, self.topics, self.engine, self.generate = log, topics, engine, generate
        self.incarnation = incarnation or secrets.token_hex(4)
        self.sampling, self.options, self.seed, self.clock = sampling, dict(options or {}), seed, clock
        self.replica, self.max_concurrency = replica, max_concurrency
        self.task_deadline_s = task_deadline.total_seconds()
        self.name = f"rollout-{replica}"
        self.text = TokenText(engine.tokenizer, apply_chat_template=apply_chat_template)
        self.aborted = self.overdue = 0
        self.publisher = Publisher(log, topics, self.name)
        self.intake = Intake(
            log,
            topics,
            name=self.name,
            replica=replica,
            replicas=replicas,
            deliver=self._deliver,
            room=lambda: self._room,
            is_settled=self.publisher.is_settled,
            transfers=Transfers(log, topics, engine.name) if engine.n_ranks else None,
            act=self._act,
            on_lost=on_lost,
            clock=clock,
        )
        self.watch = WeightsWatch(
            engine,
            self.intake.ledger,
            name=self.name,
            incarnation=self.incarnation,
            locate=locate,
            tell=self._tell_fleet,
            updated=self._updated,
            first_deadline=first_update,
            clock=clock,
        )
        self.outcomes = Outcomes(
            self.publisher,
            name=self.name,
            engine_name=engine.name,
            incarnation=self.incarnation,
            flag=self.watch.tell_failed,
            logprob_format=logprob_format,
            clock=clock,
        )
        self._told_ranks = engine.n_ranks
        self._room = 2 * max_concurrency  # samples that the intake may bring
        self._waiting: list[Member] = []  # heap
        self._too_new: list[Member] = []  # ask for a version that the engine does not hold yet
        self._running: dict[str, _Running] = {}
        self._held_back: list[
            tuple[Member, SampleData]
        ] = []  # of a version of which no EngineReady was told yet
        self._paused_s = 0.0
        self._is_stopping = False
        self._wake: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._patience = Patience(self.name)
        self._progress_mark: tuple[int, ...] = ()
        self._looked_s = self._reported_s = time.monotonic()
        self._busy_s = 0.0

    # -- life
    def run(self, stop: Stop) -> int:
        return asyncio.run(self._main(stop))

    async def _main(self, stop: Stop) -> int:
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        undelivered = 0
        try:
            code = await self._serve(stop)
        finally:
            undelivered = await self._shut_down()
        is_over = code or self.intake.ledger.finished is not None
        return code if is_over else exit_code(self.name, undelivered)

    async def _serve(self, stop: Stop) -> int:
        self.publisher.start()
        self.intake.start()
        self.publisher.tell("fleet", self._joined())
        while not stop() and self.intake.ledger.finished is None and self.watch.fatal is None:
            self._raise_errors()
            if (quarantine := self._quarantine()) is not None:
                self.watch.tell_failed(QUARANTINED, _why(quarantine))
                return 1
            self._look_after()
            await self._tick()
        if self.watch.fatal is not None:
            self.watch.tell_failed("engine", f"serves no longer: {self.watch.fatal}")
            return 1
        if self.intake.ledger.finished is not None:
            logger.info("%s: the run is finished", self.name)
        return 0

    def _tell_fleet(self, event: Event) -> None:
        if (
            self.engine.n_ranks != self._told_ranks
        ):  # of a server that runs already they are known once it is ready
            self._told_ranks = self.engine.n_ranks
            self.publisher.tell("fleet", self._joined())
        self.publisher.tell("fleet", event, is_gate=isinstance(event, EngineReady))

    def _quarantine(self) -> EngineQuarantined | None:
        """The trainer trusts this incarnation no longer. What it makes is dropped: its supervisor starts it anew."""
        quarantined = list(self.intake.ledger.quarantined.items())  # the intake's thread adds to it
        return next(
            (event for (_, incarnation), event in quarantined if incarnation == self.incarnation), None
        )

    def _joined(self) -> EngineJoined:
        host, pid = socket.gethostname(), os.getpid()
        return EngineJoined(
            engine=self.engine.name,
            replica=self.replica,
            host=host,
            pid=pid,
            n_ranks=self.engine.n_ranks,
            device=self.engine.device,
            incarnation=self.incarnation,
            at_ms=self.clock(),
        )

    def _raise_errors(self) -> None:
        for error in (self.intake.error, self.publisher.error):
            if error is not None:
                raise error

    async def _tick(self) -> None:
        assert self._loop is not None and self._wake is not None
        timer = self._loop.call_later(TICK_S, self._wake.set)
        await self._wake.wait()
        timer.cancel()
        self._wake.clear()

    def _look_after(self) -> None:
        now = time.monotonic()
        if self.intake.ledger.paused:
            self._paused_s += now - self._looked_s
        self._looked_s = now
        self.watch.keep_current()
        self._release()
        self._end_overdue(now)
        self._pump()
        self._report(now)
        self._say_what_it_waits_for()

    async def _shut_down(self) -> int:
        """Within 2 s: what runs may end, then it is abandoned (the partition's next owner generates it again).

        Returns how many events are not delivered.
        """
        self._is_stopping = True
        self.intake.close()
        self.watch.close()
        running = [each.task for each in self._running.values() if each.task is not None]
        if running:
            is_trusted = self.watch.fatal is None and self._quarantine() is None
            wants_them = is_trusted and self.intake.ledger.finished is None
            _, left = await asyncio.wait(running, timeout=STOP_S if wants_them else 0)
            for task in left:
                task.cancel()
            if left:
                logger.info("%s: abandons %d running samples", self.name, len(left))
                await asyncio.wait(left, timeout=0.2)
        await self.engine.close()
        self.publisher.tell("fleet", EngineLeft(engine=self.engine.name, at_ms=self.clock()))
        is_flushed = self.publisher.flush(timedelta(seconds=FLUSH_S))
        undelivered = 0 if is_flushed and self.publisher.error is None else self.publisher.backlog
        self.publisher.close(timedelta(seconds=0.2))
        return undelivered

    # -- news of the intake's thread
    def _deliver(self, members: list[Member]) -> None:
        if self._loop is None or self._loop.is_closed():
            return
        # counted here, on the intake's thread, so that it does not read on before the loop has woken
        self._room -= len(members)
        self._loop.call_soon_threadsafe(self._take_in, members)

    def _act(self, actions: list[Action], published: WeightsPublished | None) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.watch.act, actions, published)

    def _take_in(self, members: list[Member]) -> None:
        for member in members:
            heapq.heappush(self._waiting, member)
        if not members:  # news: partitions may have gone to another
            self._waiting = [each for each in self._waiting if not each.lane.is_lost]
            heapq.heapify(self._waiting)
            self._too_new = [each for each in self._too_new if not each.lane.is_lost]
        self._update_room()
        self.watch.keep_current()
        self._pump()
        if self._wake is not None and self.intake.ledger.finished is not None:
            self._wake.set()

    def _update_room(self) -> None:
        self._room = 2 * self.max_concurrency - len(self._waiting) - len(self._too_new)

    def _updated(self) -> None:
        """The engine holds another version."""
        for member in self._too_new:
            heapq.heappush(self._waiting, member)
        self._too_new.clear()
        self._release()
        self._pump()

    # -- samples
    def _pump(self) -> None:
        """Start what may be started, oldest group first."""
        ledger = self.intake.ledger
        room = self.max_concurrency - len(self._running)
        if not self._waiting or room <= 0 or self._is_stopping or self.watch.fatal is not None:
            return
        if ledger.paused or ledger.finished is not None or self.engine.held is None:
            return
        if self.publisher.stuck or self.publisher.backlog > 4 * self.max_concurrency:
            return
        version = self.watch.effective_version
        not_yet: list[Member] = []
        while room > 0 and self._waiting:
            member = heapq.heappop(self._waiting)
            if member.lane.is_lost:
                continue
            if member.uid in self._running:  # from before its partition went to another, and came back
                not_yet.append(member)
            elif ledger.is_closed(member.seq):  # dropped while it waited: nobody would read its sample
                member.lane.sample_done(member.offset)
            elif member.task.min_version > version:
                self._too_new.append(member)
            else:
                running = _Running(member, time.monotonic(), self._stood_still_s)
                self._running[member.uid] = running
                running.task = asyncio.ensure_future(self._sample(running))
                room -= 1
        for member in not_yet:
            heapq.heappush(self._waiting, member)
        self._update_room()

    async def _sample(self, running: _Running) -> None:
        """Generate one member and publish its outcome."""
        member = running.member
        try:
            sample = await self._generate(member)
        except asyncio.CancelledError:
            if not running.is_overdue:
                raise
            self.overdue += 1
            self.outcomes.fail(member, "task_deadline", f"not finished within {self.task_deadline_s:g} s")
        except EngineError as error:
            if error.reason in FATAL:
                self.watch.fatal = self.watch.fatal or error
            else:
                self.outcomes.not_made(member, error.reason, error.detail, is_of_request=error.is_of_request)
        except Exception as error:
            reason, detail = failure_reason(error)
            if reason == "generate_error":
                logger.warning("%s: generating %s failed", self.name, member.uid, exc_info=error)
            self.outcomes.not_made(member, reason, detail)
        else:
            self._held_back.append((member, sample))
            self._release()
        finally:
            self._running.pop(member.uid, None)
            self._pump()

    def _release(self) -> None:
        """Publish what has ended: the guarantee that no sample names a version which this daemon never told of.

        While an update runs, a sample may have tokens of a version that the engine takes over in this very moment: it
        waits until that is told. An update that is cut off at the end is never told: then the sample is abandoned with
        those that run."""
        held, self._held_back = self._held_back, []
        for member, sample in held:
            if member.lane.is_lost:  # it is its partition's new owner who makes this sample
                continue
            versions = getattr(sample, "versions", ())
            if self.watch.has_told(versions):
                self.outcomes.publish(member, sample)
            elif self.watch.is_updating or self._is_stopping:
                self._held_back.append((member, sample))
            else:
                detail = f"it names versions {versions}, of which one was never told to be held: {self.watch.told()}"
                self.outcomes.not_made(member, NO_WEIGHTS, detail)

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
                self.aborted += 1
                attempt += 1
                await asyncio.sleep(0)  # a function that aborts without waiting must not hold the loop

    @property
    def _stood_still_s(self) -> float:
        """Seconds in which no sample could get on: updates and pauses. Deadlines do not run meanwhile."""
        return self.watch.stood_still_s + self._paused_s

    def _end_overdue(self, now: float) -> None:
        for running in list(self._running.values()):
            if running.task is None or running.is_overdue:
                continue
            if running.member.lane.is_lost:
                running.task.cancel()
            elif now - running.since - (self._stood_still_s - running.stood_still_s) > self.task_deadline_s:
                running.is_overdue = True
                logger.warning("%s: %s did not finish within %g s", self.name, running.member.uid,
                               self.task_deadline_s)  # fmt: skip
                running.task.cancel()

    # -- what is said
    def _say_what_it_waits_for(self) -> None:
        mark = (self.publisher.published, self.watch.updates, len(self._running))
        is_idle = not (self._waiting or self._too_new or self._running or self.engine.held is None)
        if mark != self._progress_mark or is_idle:
            self._progress_mark = mark
            self._patience.reset()
        self._patience.waiting(self._waits_for)

    def _waits_for(self) -> str:
        ledger, held = self.intake.ledger, self.engine.held
        if self.publisher.stuck:
            return f"the log to take appends ({self.publisher.backlog} events wait)"
        if ledger.published is None:
            return "the first weights to be published"
        if held is None:
            return f"version {ledger.published.version} to be loaded"
        if ledger.paused:
            return "the run to be resumed"
        if self._running:
            oldest = min(self._running.values(), key=lambda each: each.since)
            seconds = time.monotonic() - oldest.since
            return f"{len(self._running)} samples, of which {oldest.member.uid} has run for {seconds:.0f} s"
        wanted = min((each.task.min_version for each in self._too_new), default=0)
        return f"version {wanted}, asked for by {len(self._too_new)} samples; it holds version {held.version}"

    def _report(self, now: float) -> None:
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
            "version": held.version if held is not None else -1,
            "in_flight": len(self._running),
            "waiting": len(self._waiting) + len(self._too_new),
            "unacknowledged": self.publisher.backlog,
            "samples_total": self.outcomes.samples,
            "failed_total": self.outcomes.failed,
            "refused_total": self.outcomes.refused,
            "bad_answers_total": self.outcomes.bad_answers,
            "aborted_total": self.aborted,
            "overdue_total": self.overdue,
            "updates_total": self.watch.updates,
            "load_s": self.watch.load_s,
            "stall_s": self.watch.stall_s,
            "duplicates_total": self.intake.duplicates,
            "unknown_types": self.intake.reader.unknown_types,
            "dead_letters": self.intake.reader.dead_letters + self.outcomes.refused,
            "lost": self.intake.losses.count,
        }
        self._reported_s, self._busy_s = now, busy_s
        if self.publisher.stuck:
            return  # a gauge is not worth a place in the queue of a full log
        numbers = {name: float(value) for name, value in values.items()}
        self.publisher.tell("metrics", Metrics(source=self.name, values=numbers, at_ms=self.clock()))
        self.log.commit_hint(self.topics.group("rollout"), self.intake.positions())


def _why(event: EngineQuarantined) -> str:
    return (
        f"its log-probs are {event.mismatch:.4g} nat per token from the trainer's under the same weights, over "
        f"rollout.max_logprob_mismatch = {event.limit:g} (step {event.step}, {event.n_samples} samples)"
    )
