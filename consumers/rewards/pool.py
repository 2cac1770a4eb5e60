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

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from typing import Any

from consumers.rewards.calls import Batch, Call, PoolClosed, PoolError, settle
from consumers.rewards.load import Scorer, call_sync, load_reward
from consumers.rewards.slot import Slot
from consumers.rewards.types import REWARD_ERROR, WORKER_DIED, NotScored, Outcome, RewardInput, Scored
from consumers.rewards.wire import START_S, Setup, encoder
from streams.errors import ConfigError

logger = logging.getLogger(__name__)

_MOST_PER_MESSAGE = 64
_MESSAGE_S = 0.02  # messages to a sync worker are sized to take about this long
_CLOSE_S = 5.0


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
        self._queue: deque[Call] = deque()
        self._calls = 0
        self._seconds = _MESSAGE_S  # moving average of one call
        self.closing = False
        self._broken: PoolError | None = None
        self._inline: Scorer | None = None
        self._slots: list[Slot] = []
        if workers == 0:
            self._inline = load_reward(function_path, options, group=group, config=config)
            if self._inline.is_async:
                raise ConfigError(
                    f"reward.workers = 0: {function_path} is async and needs a worker; set at least 1"
                )
            return
        setup = Setup(function_path, dict(options or {}), dict(config or {}), group, self.timeout_s)
        try:
            frame = encoder.encode(setup)
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"reward.options: must be plain values ({error})") from error
        self.started: Future[None] = Future()
        self._slots = [Slot(self, frame) for _ in range(workers)]
        for slot in self._slots:
            slot.thread.start()
        try:
            self._wait_for_start(function_path)
        except BaseException:
            self.close()
            raise

    def _wait_for_start(self, function_path: str) -> None:
        for waited in range(0, int(START_S + _CLOSE_S), 10):
            if waited:
                logger.warning("scoring pool: a worker has been importing %s for %d s", function_path, waited)
            try:
                return self.started.result(10)
            except FutureTimeout:
                if self.started.done():
                    raise
        raise PoolError(f"{function_path}: no scoring worker was ready within {START_S:g} s")

    def submit(self, inputs: Sequence[RewardInput]) -> Future[list[Outcome]]:
        """Queue samples; the future gives one outcome for each, in their order. Raises PoolClosed."""
        if self.closing:
            raise self._broken or PoolClosed("submit() after close()")
        batch = Batch(len(inputs))
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
                raw = encoder.encode(members)
            except Exception as error:  # the sample's own values: they fail this sample, not its neighbours
                refused.append((places, f"the sample cannot be sent to a worker: {error}"))
            else:
                calls.append(Call(0, batch, places, members, raw))
        with self._lock:
            if self.closing:
                raise self._broken or PoolClosed("submit() after close()")
            for call in calls:
                self._calls += 1
                call.number = self._calls
            self._queue.extend(calls)
        for places, detail in refused:
            self._place(batch, places, [NotScored(REWARD_ERROR, detail)] * len(places))
        self._wake()
        return batch.future

    def forget(self, futures: Iterable[Future[list[Outcome]]]) -> None:
        """Nobody waits for these any longer: what of them is still queued is not scored, what is in hand may end."""
        unwanted = {id(future) for future in futures}
        with self._lock:
            self._queue = deque(call for call in self._queue if id(call.batch.future) not in unwanted)

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
            self.closing = True
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

    def take(self, slot: Slot) -> list[Call]:
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
            taken: list[Call] = []
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

    def give_back(self, calls: Iterable[Call]) -> None:
        with self._lock:
            self._queue.extendleft(reversed([call for call in calls if not call.is_done]))
        self._wake()

    def break_with(self, error: PoolError) -> None:
        """End the pool for good. Its futures raise the error; that is no outcome of any sample."""
        self._broken = self._broken or error
        self.closing = True
        for slot in self._slots:
            slot.kill()
        self._wake()
        self._settle_all(error)
        settle(self.started, error)

    def _settle_all(self, error: PoolError) -> None:
        with self._lock:
            waiting = [*self._queue, *(call for slot in self._slots for call in list(slot.running.values()))]
            self._queue.clear()
        for call in waiting:
            settle(call.batch.future, error)

    def fail_waiting(self, detail: str) -> None:
        with self._lock:
            waiting = list(self._queue)
            self._queue.clear()
        for call in waiting:
            self.finish(call, [NotScored(WORKER_DIED, detail)] * len(call.places))

    def finish(self, call: Call, outcomes: Sequence[Outcome]) -> None:
        with self._lock:
            if call.is_done:
                return
            call.is_done = True
            for outcome in outcomes[:1]:
                if isinstance(outcome, Scored):
                    self._seconds += 0.2 * (outcome.seconds - self._seconds)
        self._place(call.batch, call.places, outcomes)

    def _place(self, batch: Batch, places: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        with self._lock:
            for place, outcome in zip(places, outcomes, strict=True):
                batch.outcomes[place] = outcome
            batch.left -= len(places)
            is_complete = batch.left == 0
        if is_complete:
            settle(batch.future, batch.outcomes)

    def _wake(self) -> None:
        for slot in self._slots:
            slot.wake()
