"""One thread of the pool and the worker process it keeps going: what the worker has in hand, since when, and whose
fault it is when a deadline passes or the worker is lost. Which calls come next is the pool's to say.
"""

from __future__ import annotations

import logging
import os
import selectors
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from consumers.rewards.calls import Call, PoolError, settle
from consumers.rewards.process import Worker, how_it_ended
from consumers.rewards.types import REWARD_TIMEOUT, WORKER_DIED, NotScored
from consumers.rewards.wire import NOBODY, START_S, Report, encoder
from streams.errors import ConfigError, MillstreamError

if TYPE_CHECKING:
    from consumers.rewards.pool import ScoringPool

logger = logging.getLogger(__name__)

_PATIENCE_S = 0.2  # a sample that takes longer gives those behind it back to the queue


class Slot:
    """One thread that keeps one worker going. All methods but wake() and kill() run in that thread.

    The thread lives as long as the pool, which matters: Linux ends a child with the *thread* that started it.
    """

    def __init__(self, pool: ScoringPool, setup: bytes) -> None:
        self.pool, self.setup = pool, setup
        self.thread = threading.Thread(target=self._run, name="scoring-slot", daemon=True)
        self.running: dict[int, Call] = {}  # in the order in which they were sent
        self.is_async = False
        self.worker: Worker | None = None
        self.since = 0.0  # sync: when the call in hand began, at the latest
        self._starts_failed = 0
        self._messages = 0
        self._wake_lock = threading.Lock()
        self._is_open = True
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    def wake(self) -> None:
        with self._wake_lock:
            if self._is_open:
                try:
                    os.write(self._wake_write, b"\0")
                except BlockingIOError:
                    pass  # full: it will wake anyway

    def kill(self) -> None:
        worker = self.worker
        if worker is not None:
            worker.kill()

    def _run(self) -> None:
        try:
            while not self.pool.closing:
                if self.worker is None:
                    self._start()
                else:
                    self._turn(self.worker)
        except BaseException as error:  # a fault of ours: nobody may wait for this slot
            logger.exception("scoring pool: a slot failed")
            self.pool.break_with(PoolError(f"the scoring pool failed: {error!r}"))
        finally:
            self._drop_worker()
            with self._wake_lock:
                self._is_open = False
                os.close(self._wake_read)
                os.close(self._wake_write)

    def _drop_worker(self) -> int:
        """Kill the worker, take what it still reported, give its descriptors back; its exit code."""
        worker, self.worker = self.worker, None
        if worker is None:
            return 0
        code = worker.kill()
        self._take_reports(worker)
        worker.close()
        return code

    def _start(self) -> None:
        error: MillstreamError
        try:
            self.worker = worker = Worker(self.setup)
        except OSError as failure:  # no memory, no process or descriptor left
            error = PoolError(f"a scoring worker could not be started: {failure}")
        else:
            report = self._first_report(worker)
            if report is not None and not report.error:
                self.is_async, self._starts_failed = report.is_async, 0
                settle(self.pool.started, None)
                return
            code = self._drop_worker()
            if report is not None:
                error = ConfigError(report.error)
            else:
                error = PoolError(
                    f"a scoring worker {how_it_ended(code)} before it was ready (its stderr may say why)"
                )
        if self.pool.closing:
            return
        if not self.pool.started.done():
            settle(self.pool.started, error)
            return
        self._starts_failed += 1
        logger.error("scoring pool: no worker could be started: %s", error)
        if self._starts_failed >= 3:
            self.pool.fail_waiting(f"no scoring worker could be started: {error}")
        end = time.monotonic() + min(10.0, 0.1 * 2**self._starts_failed)
        while not self.pool.closing and (left := end - time.monotonic()) > 0:
            self._wait_for_wake(left)

    def _first_report(self, worker: Worker) -> Report | None:
        end = time.monotonic() + START_S
        while not self.pool.closing and (left := end - time.monotonic()) > 0:
            worker.wait(self._wake_read, left)
            self._drain_wakes()
            try:
                reports = worker.reports()
            except EOFError:
                return None
            if reports:
                return reports[0]
        return None

    def _turn(self, worker: Worker) -> None:
        calls = self.pool.take(self)
        if calls:
            now = time.monotonic()
            for call in calls:
                call.since = now
                self.running[call.number] = call
            self.since = now
            self._messages += 1
            frame = encoder.encode((self._messages, [(call.number, call.raw) for call in calls]))
            if not worker.send(frame, self.pool.timeout_s):
                self._lost(worker)
                return
        worker.wait(self._wake_read, self._seconds_to_next())
        self._drain_wakes()
        if not self._take_reports(worker):
            self._lost(worker)
        elif self.running:
            self._check_deadlines(worker)

    def _take_reports(self, worker: Worker) -> bool:
        """Finish what the worker reports. False: the worker has ended."""
        try:
            reports = worker.reports()
        except EOFError:
            return False
        for report in reports:
            call = self.running.pop(report.call, None)
            if call is not None:
                self.pool.finish(call, report.outcomes)
            self.since = time.monotonic()
        return True

    def _seconds_to_next(self) -> float | None:
        if not self.running:
            return None
        if self.is_async:
            end = min(call.since for call in self.running.values()) + self.pool.timeout_s + self._grace
        elif len(self.running) > 1:
            end = self.since + min(_PATIENCE_S, self.pool.timeout_s)
        else:
            end = self.since + self.pool.timeout_s
        return max(0.0, end - time.monotonic())

    @property
    def _grace(self) -> float:
        """What an async worker's own loop gets to end a call that is over its deadline."""
        return min(1.0, max(0.1, self.pool.timeout_s / 4))

    def _check_deadlines(self, worker: Worker) -> None:
        now = time.monotonic()
        if self.is_async:
            late = [
                call
                for call in self.running.values()
                if now - call.since >= self.pool.timeout_s + self._grace
            ]
        else:
            late = list(self.running.values())[:1] if now - self.since >= self.pool.timeout_s else []
            if not late and len(self.running) > 1 and now - self.since >= _PATIENCE_S:
                self._give_back_the_rest(worker)
        if not late:
            return
        turn = worker.turn()
        holder = self.running.get(turn)
        if holder in late:
            self._end_at_deadline(worker, [holder])
        elif holder is not None:  # the loop is blocked by one that still has time
            worker.wait(None, max(0.0, holder.since + self.pool.timeout_s + self._grace - now))
        elif self.is_async and turn == NOBODY:
            self._end_at_deadline(worker, late)  # the loop is free, so they swallowed their cancellation
        else:
            self._lost(worker)  # what runs is left over from another call, or nothing runs: blame nobody yet

    def _give_back_the_rest(self, worker: Worker) -> None:
        """Let other workers have what waits behind a slow sample. If this worker starts the next one before it
        sees that, that one is scored twice, to the same end. One that has not begun the first either, since it got no
        time, still scores that one."""
        head, *rest = self.running.values()
        worker.revoke(self._messages, head.number)
        self.running = {head.number: head}
        self.pool.give_back(rest)

    def _end_at_deadline(self, worker: Worker, guilty: Sequence[Call]) -> None:
        where = worker.stack()
        self._drop_worker()
        self.pool.workers_lost += 1
        detail = f"no reward within {self.pool.timeout_s:g} s{where}"
        for call in guilty:
            if self.running.pop(call.number, None) is not None:  # else it reported just before the kill
                logger.warning("scoring pool: %s: %s", ", ".join(call.uids), detail)
                self.pool.finish(call, [NotScored(REWARD_TIMEOUT, detail)] * len(call.places))
        self.pool.give_back(self._taken_off())

    def _lost(self, worker: Worker) -> None:
        """The worker ended by itself, or does not listen. Who had it in hand gets one more try, alone."""
        turn = worker.turn()
        code = self._drop_worker()
        calls = self._taken_off()
        if not self.pool.closing:  # else close() killed it
            self.pool.workers_lost += 1
            suspects = [call for call in calls if call.number == turn]
            if not suspects:
                suspects = calls if self.is_async else calls[:1]
            ended = f"the worker {how_it_ended(code)}"
            logger.warning("scoring pool: %s; in hand: %s", ended, [call.uids for call in suspects])
            for call in suspects:
                call.strikes += 1
                if call.strikes > 1:
                    self.pool.finish(call, [NotScored(WORKER_DIED, f"{ended}, twice")] * len(call.places))
        self.pool.give_back(calls)

    def _taken_off(self) -> list[Call]:
        calls = list(self.running.values())
        self.running = {}
        return calls

    def _wait_for_wake(self, seconds: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ)
            selector.select(seconds)
        self._drain_wakes()

    def _drain_wakes(self) -> None:
        try:
            while len(os.read(self._wake_read, 4096)) == 4096:
                pass
        except BlockingIOError:
            pass  # empty
