"""Scoring in worker processes that can be killed: user code gets a deadline that holds.

    submit(inputs) ──► queue ──► slot thread ── pipe, up to 64 samples ──► worker process: calls the function
          │                          │  ◄── one report per finished sample ──      │ marks on the board whose turn it is
          ▼                          │
    Future[list[Outcome]]            └── waits for: a report, room for more, the deadline of a sample
                                         deadline passed → SIGKILL to the worker and all it started, a new worker;
                                         the sample is `reward_timeout`, the others of its message go back first

One slot is one thread and one worker at a time. A sync function scores one sample after another. An async
function has many samples in flight, each with its own deadline in the worker's loop; only if the loop itself is
blocked is the worker killed. In both the board, a page shared with the worker, says whose code runs now, so a hang
is blamed on the right sample. One that loses its worker without a deadline (crash, out of memory, kill -9 from
outside) runs once more, alone, before it is `worker_died`. The function may thus be called twice for a sample; the
first outcome counts.

This is the guarantee that a failure is never a reward: whatever goes wrong here ends in NotScored.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import faulthandler
import json
import logging
import mmap
import os
import queue
import secrets
import selectors
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from typing import Any

import msgspec

from consumers.rewards.code_tests import MARK, kill_group
from consumers.rewards.load import Scorer, call_sync, describe, load_reward, outcomes_of
from consumers.rewards.types import (
    REWARD_ERROR,
    REWARD_TIMEOUT,
    WORKER_DIED,
    NotScored,
    Outcome,
    RewardInput,
    Scored,
    decode_hook,
    encode_hook,
)
from streams.errors import ConfigError, MillstreamError

logger = logging.getLogger(__name__)

_MOST_PER_MESSAGE = 64
_MESSAGE_S = 0.02  # messages to a sync worker are sized to take about this long
_PATIENCE_S = 0.2  # a sample that takes longer gives those behind it back to the queue
_START_S = 120.0  # for a worker to import the function's module
_CLOSE_S = 5.0
_NOBODY = -1
# The board: int64 call whose code runs, int64 last revoked message, and from 4096 on the worker's last stack.
_TURN, _REVOKED, _TRACE_AT = slice(0, 8), slice(8, 16), 4096

_OUR_FRAMES = (__file__, load_reward.__code__.co_filename, "/asyncio/", "<string>")

_encoder = msgspec.msgpack.Encoder(enc_hook=encode_hook)


class PoolError(MillstreamError):
    """The pool cannot score; the message says why."""


class PoolClosed(PoolError):
    """close() came before the outcome. It is no outcome: the sample may be submitted to another pool."""


class _Setup(msgspec.Struct, array_like=True):
    """First message to a worker."""

    path: str
    options: dict[str, Any]
    config: dict[str, Any]
    group: bool
    timeout_s: float


class _Report(msgspec.Struct, array_like=True):
    """Worker to slot. `call` ≥ 0: outcomes of that call. `call` −1: how the start went."""

    call: int
    outcomes: list[Scored | NotScored] = []
    is_async: bool = False
    error: str = ""


class _Batch:
    """One submit(): its future and the outcomes so far."""

    def __init__(self, size: int) -> None:
        self.future: Future[list[Outcome]] = Future()
        self.future.set_running_or_notify_cancel()  # cancel() would lose the outcomes of the others
        self.outcomes: list[Any] = [None] * size
        self.left = size


class _Call:
    """One call of the function: a sample, or a group's samples. `places` are theirs in the batch."""

    def __init__(
        self, number: int, batch: _Batch, places: list[int], inputs: list[RewardInput], raw: bytes
    ) -> None:
        self.number, self.batch, self.places, self.raw = number, batch, places, msgspec.Raw(raw)
        self.uids = [each.uid for each in inputs]
        self.strikes = 0  # workers lost while it was in hand
        self.is_done = False
        self.since = 0.0  # monotonic time at which it was sent


class ScoringPool:
    """Scores samples with a user's function, each within `timeout`.

    >>> sample = RewardInput(uid="0-0/0/0", group_id="0-0", index=0, response="It is 4.", label="4")
    >>> with ScoringPool("numeric", {}, workers=2, timeout=timedelta(seconds=5)) as pool:
    ...     [outcome] = pool.submit([sample]).result()
    >>> outcome.reward
    1.0

    `workers` processes; `group`: the function is called once for all samples of a group, which must come in one
    submit(). `concurrency`: samples that an async function may have in flight in one worker. `config`: tables for
    the `args` of a Miles or Slime function. `workers=0` is the inline mode: a sync function is called in the
    caller's thread. That saves the processes and gives up the guarantee: a call that hangs hangs the caller, a
    crash takes the daemon along, and a late result is found late only after it came. For tiny rules of one's own.

    Raises ConfigError when the function cannot be loaded, PoolError when no worker can be started. Threads of the
    caller do no harm; the queue has no bound, the caller has one. Workers end with the pool's process, whatever
    ends it. The function's stdout goes to stderr.
    """

    def __init__(
        self,
        function_path: str,
        options: Mapping[str, Any] | None = None,
        *,
        workers: int,
        timeout: timedelta,
        group: bool = False,
        concurrency: int = 64,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.timeout_s = timeout.total_seconds()
        if workers < 0 or concurrency < 1 or self.timeout_s <= 0:
            raise ConfigError(
                f"reward: workers = {workers}, concurrency = {concurrency}, timeout = {self.timeout_s:g} s; needed at "
                "least 0, at least 1 and more than 0"
            )
        self.group, self.concurrency = group, concurrency
        self.workers_lost = 0  # killed at a deadline, or died
        self._lock = threading.Lock()
        self._queue: deque[_Call] = deque()
        self._calls = 0
        self._seconds = _MESSAGE_S  # moving average of one call
        self._closing = False
        self._broken: PoolError | None = None
        self._inline: Scorer | None = None
        self._slots: list[_Slot] = []
        if workers == 0:
            self._inline = load_reward(function_path, options, group=group, config=config)
            if self._inline.is_async:
                raise ConfigError(
                    f"reward.workers = 0: {function_path} is async and needs a worker; set at least 1"
                )
            return
        setup = _Setup(function_path, dict(options or {}), dict(config or {}), group, self.timeout_s)
        try:
            frame = _encoder.encode(setup)
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"reward.options: must be plain values ({error})") from error
        self._started: Future[None] = Future()
        self._slots = [_Slot(self, frame) for _ in range(workers)]
        for slot in self._slots:
            slot.thread.start()
        try:
            self._wait_for_start(function_path)
        except BaseException:
            self.close()
            raise

    def _wait_for_start(self, function_path: str) -> None:
        for waited in range(0, int(_START_S + _CLOSE_S), 10):
            if waited:
                logger.warning("scoring pool: a worker has been importing %s for %d s", function_path, waited)
            try:
                return self._started.result(10)
            except FutureTimeout:
                if self._started.done():
                    raise
        raise PoolError(f"{function_path}: no scoring worker was ready within {_START_S:g} s")

    def submit(self, inputs: Sequence[RewardInput]) -> Future[list[Outcome]]:
        """Queue samples; the future gives one outcome for each, in their order. Raises PoolClosed."""
        if self._closing:
            raise self._broken or PoolClosed("submit() after close()")
        batch = _Batch(len(inputs))
        if not inputs:
            batch.future.set_result([])
            return batch.future
        if self._inline is not None:
            for places in self._parts(inputs):
                self._place(
                    batch, places, call_sync(self._inline, [inputs[each] for each in places], self.timeout_s)
                )
            return batch.future
        calls, refused = [], []
        for places in self._parts(inputs):
            members = [inputs[each] for each in places]
            try:
                raw = _encoder.encode(members)
            except Exception as error:  # the sample's own values: they fail this sample, not its neighbours
                refused.append((places, f"the sample cannot be sent to a worker: {error}"))
            else:
                calls.append(_Call(0, batch, places, members, raw))
        with self._lock:
            if self._closing:
                raise self._broken or PoolClosed("submit() after close()")
            for call in calls:
                self._calls += 1
                call.number = self._calls
            self._queue.extend(calls)
        for places, detail in refused:
            self._place(batch, places, [NotScored(REWARD_ERROR, detail)] * len(places))
        self._wake()
        return batch.future

    def in_hand(self) -> list[tuple[str, float]]:
        """(uid, seconds so far) of every sample that a worker has in hand, the longest first: what is waited for."""
        now = time.monotonic()
        calls = [call for slot in self._slots for call in list(slot.running.values())]
        return sorted(
            ((uid, now - call.since) for call in calls for uid in call.uids), key=lambda pair: -pair[1]
        )

    def close(self) -> None:
        """End the workers at once, within 5 s. Futures without an outcome raise PoolClosed."""
        with self._lock:
            self._closing = True
        for slot in self._slots:
            slot.kill()
        self._wake()
        end = time.monotonic() + _CLOSE_S
        for slot in self._slots:
            slot.thread.join(max(0.0, end - time.monotonic()))
            if slot.thread.is_alive():
                logger.error("scoring pool: a slot did not end within %g s", _CLOSE_S)
        self._settle_all(PoolClosed("the scoring pool was closed before the outcome"))

    def __enter__(self) -> ScoringPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ what the slots use
    def _parts(self, inputs: Sequence[RewardInput]) -> list[list[int]]:
        """Places of the samples of each call."""
        if not self.group:
            return [[place] for place in range(len(inputs))]
        groups: dict[str, list[int]] = {}
        for place, each in enumerate(inputs):
            groups.setdefault(each.group_id, []).append(place)
        return list(groups.values())

    def _take(self, slot: _Slot) -> list[_Call]:
        """The next calls for a slot: as many as it may have now."""
        with self._lock:
            running = len(slot.running)
            room = -(-len(self._queue) // len(self._slots))  # a fair share
            if slot.is_async:
                room = min(room, self.concurrency - running)
            else:
                quick = max(1, int(_MESSAGE_S / max(self._seconds, 1e-9)))
                room = 0 if running else min(room, quick, _MOST_PER_MESSAGE)
            if any(call.strikes for call in slot.running.values()):
                room = 0  # one that lost its worker runs alone
            taken: list[_Call] = []
            while self._queue and len(taken) < room:
                if self._queue[0].is_done:
                    self._queue.popleft()
                elif not self._queue[0].strikes:
                    taken.append(self._queue.popleft())
                elif running or taken:
                    break
                else:
                    return [self._queue.popleft()]
            return taken

    def _give_back(self, calls: Iterable[_Call]) -> None:
        with self._lock:
            self._queue.extendleft(reversed([call for call in calls if not call.is_done]))
        self._wake()

    def _break(self, error: PoolError) -> None:
        """End the pool for good. Its futures raise the error; that is no outcome of any sample."""
        self._broken = self._broken or error
        self._closing = True
        for slot in self._slots:
            slot.kill()
        self._wake()
        self._settle_all(error)
        _settle(self._started, error)

    def _settle_all(self, error: PoolError) -> None:
        with self._lock:
            waiting = [*self._queue, *(call for slot in self._slots for call in list(slot.running.values()))]
            self._queue.clear()
        for call in waiting:
            _settle(call.batch.future, error)

    def _fail_waiting(self, detail: str) -> None:
        with self._lock:
            waiting = list(self._queue)
            self._queue.clear()
        for call in waiting:
            self._finish(call, [NotScored(WORKER_DIED, detail)] * len(call.places))

    def _finish(self, call: _Call, outcomes: Sequence[Outcome]) -> None:
        with self._lock:
            if call.is_done:
                return
            call.is_done = True
            for outcome in outcomes[:1]:
                if isinstance(outcome, Scored):
                    self._seconds += 0.2 * (outcome.seconds - self._seconds)
        self._place(call.batch, call.places, outcomes)

    def _place(self, batch: _Batch, places: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        with self._lock:
            for place, outcome in zip(places, outcomes, strict=True):
                batch.outcomes[place] = outcome
            batch.left -= len(places)
            is_complete = batch.left == 0
        if is_complete:
            _settle(batch.future, batch.outcomes)

    def _wake(self) -> None:
        for slot in self._slots:
            slot.wake()


def _settle(future: Future[Any], value: Any) -> None:
    """Give a future its result or exception, once: close() and a slot may come to it at the same time."""
    try:
        if isinstance(value, BaseException):
            future.set_exception(value)
        else:
            future.set_result(value)
    except InvalidStateError:
        pass  # the other was first


class _Slot:
    """One thread that keeps one worker going. All methods but wake() and kill() run in that thread.

    The thread lives as long as the pool, which matters: Linux ends a child with the *thread* that started it.
    """

    def __init__(self, pool: ScoringPool, setup: bytes) -> None:
        self.pool, self.setup = pool, setup
        self.thread = threading.Thread(target=self._run, name="scoring-slot", daemon=True)
        self.running: dict[int, _Call] = {}  # in the order in which they were sent
        self.is_async = False
        self.worker: _Worker | None = None
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
            while not self.pool._closing:
                if self.worker is None:
                    self._start()
                else:
                    self._turn(self.worker)
        except BaseException as error:  # a fault of ours: nobody may wait for this slot
            logger.exception("scoring pool: a slot failed")
            self.pool._break(PoolError(f"the scoring pool failed: {error!r}"))
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
            self.worker = worker = _Worker(self.setup)
        except OSError as failure:  # no memory, no process or descriptor left
            error = PoolError(f"a scoring worker could not be started: {failure}")
        else:
            report = self._first_report(worker)
            if report is not None and not report.error:
                self.is_async, self._starts_failed = report.is_async, 0
                _settle(self.pool._started, None)
                return
            code = self._drop_worker()
            if report is not None:
                error = ConfigError(report.error)
            else:
                error = PoolError(
                    f"a scoring worker {_ended(code)} before it was ready (its stderr may say why)"
                )
        if self.pool._closing:
            return
        if not self.pool._started.done():
            _settle(self.pool._started, error)
            return
        self._starts_failed += 1
        logger.error("scoring pool: no worker could be started: %s", error)
        if self._starts_failed >= 3:
            self.pool._fail_waiting(f"no scoring worker could be started: {error}")
        end = time.monotonic() + min(10.0, 0.1 * 2**self._starts_failed)
        while not self.pool._closing and (left := end - time.monotonic()) > 0:
            self._wait_for_wake(left)

    def _first_report(self, worker: _Worker) -> _Report | None:
        end = time.monotonic() + _START_S
        while not self.pool._closing and (left := end - time.monotonic()) > 0:
            worker.wait(self._wake_read, left)
            self._drain_wakes()
            try:
                reports = worker.reports()
            except EOFError:
                return None
            if reports:
                return reports[0]
        return None

    def _turn(self, worker: _Worker) -> None:
        calls = self.pool._take(self)
        if calls:
            now = time.monotonic()
            for call in calls:
                call.since = now
                self.running[call.number] = call
            self.since = now
            self._messages += 1
            frame = _encoder.encode((self._messages, [(call.number, call.raw) for call in calls]))
            if not worker.send(frame, self.pool.timeout_s):
                self._lost(worker)
                return
        worker.wait(self._wake_read, self._seconds_to_next())
        self._drain_wakes()
        if not self._take_reports(worker):
            self._lost(worker)
        elif self.running:
            self._check_deadlines(worker)

    def _take_reports(self, worker: _Worker) -> bool:
        """Finish what the worker reports. False: the worker has ended."""
        try:
            reports = worker.reports()
        except EOFError:
            return False
        for report in reports:
            call = self.running.pop(report.call, None)
            if call is not None:
                self.pool._finish(call, report.outcomes)
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

    def _check_deadlines(self, worker: _Worker) -> None:
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
        elif self.is_async and turn == _NOBODY:
            self._end_at_deadline(worker, late)  # the loop is free, so they swallowed their cancellation
        else:
            self._lost(worker)  # what runs is left over from another call, or nothing runs: blame nobody yet

    def _give_back_the_rest(self, worker: _Worker) -> None:
        """Let other workers have what waits behind a slow sample. If this worker starts the next one before it
        sees that, that one is scored twice, to the same end."""
        worker.revoke(self._messages)
        head, *rest = self.running.values()
        self.running = {head.number: head}
        self.pool._give_back(rest)

    def _end_at_deadline(self, worker: _Worker, guilty: Sequence[_Call]) -> None:
        where = worker.stack()
        self._drop_worker()
        self.pool.workers_lost += 1
        detail = f"no reward within {self.pool.timeout_s:g} s{where}"
        for call in guilty:
            if self.running.pop(call.number, None) is not None:  # else it reported just before the kill
                logger.warning("scoring pool: %s: %s", ", ".join(call.uids), detail)
                self.pool._finish(call, [NotScored(REWARD_TIMEOUT, detail)] * len(call.places))
        self.pool._give_back(self._taken_off())

    def _lost(self, worker: _Worker) -> None:
        """The worker ended by itself, or does not listen. Who had it in hand gets one more try, alone."""
        turn = worker.turn()
        code = self._drop_worker()
        calls = self._taken_off()
        if not self.pool._closing:  # else close() killed it
            self.pool.workers_lost += 1
            suspects = [call for call in calls if call.number == turn]
            if not suspects:
                suspects = calls if self.is_async else calls[:1]
            ended = f"the worker {_ended(code)}"
            logger.warning("scoring pool: %s; in hand: %s", ended, [call.uids for call in suspects])
            for call in suspects:
                call.strikes += 1
                if call.strikes > 1:
                    self.pool._finish(call, [NotScored(WORKER_DIED, f"{ended}, twice")] * len(call.places))
        self.pool._give_back(calls)

    def _taken_off(self) -> list[_Call]:
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


class _Worker:
    """A worker process seen from its slot: two pipes and the board."""

    def __init__(self, setup: bytes) -> None:
        self.mark = secrets.token_hex(16)
        self._board = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the worker
        self._board.truncate(_TRACE_AT)
        os.pwrite(self._board.fileno(), struct.pack("<qq", _NOBODY, 0), 0)
        child_in, self._to = os.pipe()
        self._from, child_out = os.pipe()
        self._buffer = bytearray()
        self._lock = threading.Lock()
        self._code: int | None = None
        fds = [child_in, child_out, self._board.fileno()]
        try:
            # no preexec_fn, so the parent's threads do no harm
            self.process = subprocess.Popen(
                [sys.executable, "-c", _CHILD, json.dumps(sys.path), *map(str, [*fds, os.getpid()])],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what user code prints must not reach the pipes
                pass_fds=fds,
                env={**os.environ, MARK: self.mark},
                start_new_session=True,
            )
        except BaseException:
            os.close(self._to)
            os.close(self._from)
            self._board.close()
            raise
        finally:
            os.close(child_in)
            os.close(child_out)
        os.set_blocking(self._to, False)
        os.set_blocking(self._from, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._from, selectors.EVENT_READ)
        self.send(setup, _START_S)

    def send(self, frame: bytes, timeout_s: float) -> bool:
        """Write one frame. False: the worker has ended, or does not read."""
        data = memoryview(struct.pack("<I", len(frame)) + frame)
        end = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as room:
            room.register(self._to, selectors.EVENT_WRITE)
            while data:
                left = end - time.monotonic()
                if left <= 0 or not room.select(left):
                    return False
                try:
                    data = data[os.write(self._to, data) :]
                except BlockingIOError:
                    continue
                except BrokenPipeError:
                    return False
        return True

    def wait(self, also: int | None, seconds: float | None) -> None:
        """Until the worker has written or ended, `also` is readable, or the time is over."""
        if also is not None and also not in self._selector.get_map():
            self._selector.register(also, selectors.EVENT_READ)
        self._selector.select(seconds)

    def reports(self) -> list[_Report]:
        """Whole reports that have come. Raises EOFError when there is none and the worker has ended."""
        has_ended = False
        while True:
            try:
                chunk = os.read(self._from, 1 << 18)
            except BlockingIOError:
                break
            if not chunk:
                has_ended = True
                break
            self._buffer += chunk
            if len(chunk) < 1 << 16:
                break
        found, at = [], 0
        while len(self._buffer) - at >= 4:
            (size,) = struct.unpack_from("<I", self._buffer, at)
            if len(self._buffer) - at - 4 < size:
                break
            try:
                found.append(_reports.decode(self._buffer[at + 4 : at + 4 + size]))
            except msgspec.DecodeError:
                raise EOFError from None  # user code wrote to our pipe: nothing from this worker counts any more
            at += 4 + size
        del self._buffer[:at]
        if has_ended and not found:
            raise EOFError
        return found

    def turn(self) -> int:
        """The call whose code runs now, or −1."""
        return struct.unpack("<q", os.pread(self._board.fileno(), 8, 0))[0]

    def revoke(self, message: int) -> None:
        """What the worker has not begun of this message and those before it, it will pass over."""
        os.pwrite(self._board.fileno(), struct.pack("<q", message), _REVOKED.start)

    def stack(self) -> str:
        """Where the worker's main thread is, innermost first, for people; empty if it does not say."""
        try:
            os.kill(self.process.pid, signal.SIGUSR1)  # faulthandler answers from C, also while a regex runs
        except ProcessLookupError:
            return ""
        end = time.monotonic() + 0.2
        text = before = b""
        while time.monotonic() < end and not (text and text == before):
            time.sleep(0.01)
            text, before = os.pread(self._board.fileno(), 4096, _TRACE_AT), text
        lines = [
            line.strip() for line in text.decode("utf-8", "replace").splitlines() if line.startswith("  File")
        ]
        frames = [line.replace('File "', "").replace('", line ', ":") for line in lines]
        theirs = [frame for frame in frames if not any(each in frame for each in _OUR_FRAMES)]
        return f"; it was in {' ← '.join(theirs[:4])}" if theirs else ""

    def kill(self) -> int:
        """End the worker and everything it started; its exit code. May be called again, and from any thread."""
        with self._lock:
            if self._code is None:
                kill_group(self.process.pid, self.mark)
                self._code = self.process.wait()
            return self._code

    def close(self) -> None:
        """Give the descriptors back. In the slot's thread only, after kill(): another may still use them."""
        self._selector.close()
        os.close(self._to)
        os.close(self._from)
        self._board.close()


_reports = msgspec.msgpack.Decoder(_Report)


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


# ---------------------------------------------------------------- in the worker process
_CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from consumers.rewards.pool import serve
serve(*map(int, sys.argv[2:]))
"""


_Calls = list[tuple[int, list[RewardInput]]]


def serve(fd_in: int, fd_out: int, fd_board: int, parent: int) -> None:
    """Main function of a worker process."""
    _die_with(parent)
    os.lseek(fd_board, _TRACE_AT, os.SEEK_SET)
    faulthandler.register(signal.SIGUSR1, file=fd_board, all_threads=False)
    read_setup = msgspec.msgpack.Decoder(_Setup)
    read_calls = msgspec.msgpack.Decoder(tuple[int, _Calls], dec_hook=decode_hook)
    setup = read_setup.decode(_read_frame(fd_in))
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(fd_in, inbox), daemon=True).start()
    board = mmap.mmap(fd_board, _TRACE_AT)
    sys.argv = [setup.path]

    def report(what: _Report) -> None:
        data = memoryview(_pack_report(what))
        while data:
            data = data[os.write(fd_out, data) :]

    try:
        scorer = load_reward(setup.path, setup.options, group=setup.group, config=setup.config)
    except BaseException as error:  # SystemExit on import included
        text = str(error) if isinstance(error, ConfigError) else describe(error)
        report(_Report(-1, error=text or type(error).__name__))
        return
    report(_Report(-1, is_async=scorer.is_async))
    if scorer.is_async:
        asyncio.run(
            _serve_async(scorer, lambda: read_calls.decode(inbox.get())[1], report, board, setup.timeout_s)
        )
    while True:
        message, calls = read_calls.decode(inbox.get())
        for number, inputs in calls:
            if struct.unpack("<q", board[_REVOKED])[0] >= message:
                break
            board[_TURN] = struct.pack("<q", number)
            outcomes = call_sync(scorer, inputs)
            board[_TURN] = struct.pack("<q", _NOBODY)
            report(_Report(number, outcomes))


_turn: contextvars.ContextVar[int] = contextvars.ContextVar("turn", default=_NOBODY)


async def _serve_async(
    scorer: Scorer,
    next_calls: Callable[[], _Calls],
    report: Callable[[_Report], None],
    board: mmap.mmap,
    timeout_s: float,
) -> None:
    loop = asyncio.get_running_loop()

    def make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **given: Any) -> asyncio.Task[Any]:
        return asyncio.Task(_on_board(coroutine, _turn.get(), board), loop=loop, **given)

    async def run(number: int, inputs: list[RewardInput]) -> None:
        begun = time.perf_counter()
        try:
            result = await asyncio.wait_for(scorer.call(inputs if scorer.is_group else inputs[0]), timeout_s)
            outcomes = outcomes_of(scorer, inputs, result, time.perf_counter() - begun)
        except BaseException as error:
            if isinstance(error, asyncio.TimeoutError) and time.perf_counter() - begun >= timeout_s:
                outcomes: list[Outcome] = [
                    NotScored(REWARD_TIMEOUT, f"no reward within {timeout_s:g} s")
                ] * len(inputs)
            else:
                outcomes = [NotScored(REWARD_ERROR, describe(error))] * len(inputs)
        report(_Report(number, outcomes))

    loop.set_task_factory(make_task)  # pyright: ignore[reportArgumentType]
    tasks: set[asyncio.Task[None]] = set()
    with ThreadPoolExecutor(1) as reader:  # one of its own: user code may fill the loop's
        while True:
            for number, inputs in await loop.run_in_executor(reader, next_calls):
                _turn.set(number)
                task = asyncio.create_task(run(number, inputs))
                tasks.add(task)  # the loop holds tasks weakly
                task.add_done_callback(tasks.discard)
                _turn.set(_NOBODY)


async def _on_board(coroutine: Any, number: int, board: mmap.mmap) -> Any:
    return await _steps(coroutine, struct.pack("<q", number), board)


@types.coroutine
def _steps(coroutine: Any, mine: bytes, board: mmap.mmap) -> Any:
    """Drive a coroutine; while one of its steps runs, the board shows whose it is."""
    nobody = struct.pack("<q", _NOBODY)
    value, error = None, None
    while True:
        board[_TURN] = mine
        try:
            waits_for = coroutine.send(value) if error is None else coroutine.throw(error)
        except StopIteration as end:
            return end.value
        finally:
            board[_TURN] = nobody
        value, error = None, None
        try:
            value = yield waits_for
        except BaseException as thrown:
            error = thrown


def _receive(fd: int, inbox: queue.SimpleQueue[bytes]) -> None:
    """Read frames until the other side is gone, then end this worker and all it started."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # the main thread's stack is wanted
    while True:
        inbox.put(_read_frame(fd))


def _read_frame(fd: int) -> bytes:
    (size,) = struct.unpack("<I", _read_exactly(fd, 4))
    return _read_exactly(fd, size)


def _read_exactly(fd: int, size: int) -> bytes:
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            kill_group(os.getpid(), os.environ.get(MARK, "no mark"))
            os._exit(1)  # not reached: the group is ours
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _pack_report(what: _Report) -> bytes:
    body = _encoder.encode(what)
    return struct.pack("<I", len(body)) + body


def _die_with(parent: int) -> None:
    """Have the kernel end this process with its parent, also while user code holds the interpreter."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)  # it was gone before that
