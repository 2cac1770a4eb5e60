"""The rollout daemon's writing side: one thread between the event loop and the log.

    loop: put(lane, offset, event) ─► queue ─► thread: progress, encode, submit ─► acknowledged ─► input finished
                                                 ▲                                     │
                                                 └── LogFull, LogUnavailable: again ◄──┘

Appends are pipelined; an input is finished only when every output of it is acknowledged (DESIGN §4.1), and progress
is computed when an event is encoded, also the second time. A full log is no failure of a sample: nothing is dropped,
the worker starts nothing new while `stuck`, and the log line says so.

The guarantee "no sample carries a version that its engine had not acknowledged" ends here: what was put after a gate
(an EngineReady) is sent only once the gate is in the log, whatever becomes of this process in between.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NamedTuple

from consumers.runner import CUT_RAW_BYTES, Inputs, cut_letter, slim, with_progress
from streams import codec
from streams.errors import LogFull, LogUnavailable, RecordTooLarge
from streams.events import DeadLetter, Event, Metrics, Progress, RolloutFailed, TrajectoryFinished
from streams.log import EventLog, NewRecord, TopicPartition
from streams.topics import Topics

logger = logging.getLogger(__name__)

_MOST_PER_APPEND = 256
_SAY_AGAIN_S = 10.0


class Lane:
    """One partition of tasks: which inputs are started, which are finished. Safe from several threads."""

    def __init__(self, partition: int, position: int, reached: int = 0) -> None:
        self.partition = partition
        self.is_lost = False  # another member has this partition now
        self._inputs = Inputs(position, reached)
        self._left: dict[int, int] = {}  # task offset → samples without an acknowledged output
        self._lock = threading.Lock()

    def started(self, offset: int, n_samples: int) -> None:
        with self._lock:
            self._inputs.started(offset)
            if n_samples:
                self._left[offset] = n_samples
            else:
                self._inputs.finished(offset)

    def advance(self, position: int) -> None:
        with self._lock:
            self._inputs.advance(position)

    def sample_done(self, offset: int) -> None:
        with self._lock:
            self._left[offset] -= 1
            if not self._left[offset]:
                del self._left[offset]
                self._inputs.finished(offset)

    def progress(self) -> Progress:
        with self._lock:
            return {"tasks": self._inputs.progress()}


class _Append:
    """One event on its way. With a lane it is the output of the task at `offset`."""

    __slots__ = ("after", "event", "is_gate", "lane", "offset", "partition", "topic")

    def __init__(
        self,
        topic: str,
        partition: int,
        event: Event,
        lane: Lane | None,
        offset: int,
        after: _Append | None,
        *,
        is_gate: bool = False,
    ) -> None:
        self.topic, self.partition, self.event = topic, partition, event
        self.lane, self.offset, self.after = lane, offset, after
        self.is_gate = is_gate


class _Sent(NamedTuple):
    future: Future[int]
    appends: list[_Append]


class Publisher:
    """Lifecycle: construct, `start`, `put` and `tell`, `flush`, `close`."""

    def __init__(
        self, log: EventLog, topics: Topics, producer: str, *, retry: timedelta = timedelta(seconds=0.5)
    ) -> None:
        self.log, self.topics, self.producer = log, topics, producer
        self.error: BaseException | None = None  # nothing can be published any more
        self.published = 0  # events acknowledged
        self._retry_s = retry.total_seconds()
        self._queue: queue.SimpleQueue[_Append | _Sent | None] = queue.SimpleQueue()
        self._waiting: list[_Append] = []  # refused for now
        self._gate: _Append | None = None  # on its way …
        self._behind: list[_Append] = []  # … and what was put after it
        self._again_at = 0.0
        self._stuck_since: float | None = None
        self._said_at = 0.0
        self._open = 0  # put and not acknowledged
        self._open_of: Counter[int] = Counter()  # of them, outcomes of each partition
        self._idle = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"{producer} publisher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # -- from the event loop
    @property
    def backlog(self) -> int:
        """Events that were put and are not acknowledged."""
        return self._open

    def is_settled(self, partition: int) -> bool:
        """Every outcome of that partition that was put is in the log: what its lane is rebuilt from is all there."""
        return not self._open_of[partition]

    @property
    def stuck(self) -> bool:
        """The log refuses for now."""
        return self._stuck_since is not None

    def put(self, lane: Lane, offset: int, event: Event, letter: DeadLetter | None = None) -> None:
        """One sample's outcome, for `trajectories`. A `letter` goes to `dead` first, and is durable before it."""
        topic = self.topics.name("trajectories")
        outcome = _Append(topic, lane.partition, event, lane, offset, None)
        with self._idle:
            self._open_of[lane.partition] += 1
        if letter is not None:
            outcome = _Append(self.topics.name("dead"), 0, letter, None, -1, outcome)
        self._put(outcome)

    def tell(self, word: str, event: Event, *, is_gate: bool = False) -> None:
        """An event for a topic of one partition (fleet, metrics). Nothing that is put later overtakes a gate."""
        self._put(_Append(self.topics.name(word), 0, event, None, -1, None, is_gate=is_gate))

    def flush(self, timeout: timedelta) -> bool:
        """Wait until everything is acknowledged; False when the time is over."""
        with self._idle:
            return self._idle.wait_for(
                lambda: self._open == 0 or self.error is not None, timeout.total_seconds()
            )

    def close(self, timeout: timedelta = timedelta(seconds=2)) -> None:
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout.total_seconds())

    def _put(self, append: _Append) -> None:
        with self._idle:
            self._open += 1
        self._queue.put(append)

    # -- the thread
    def _run(self) -> None:
        try:
            while self._round():
                pass
        except BaseException as error:  # handed to the worker, which ends with it
            logger.exception("%s: publishing has ended", self.producer)
            self.error = error
            with self._idle:
                self._idle.notify_all()

    def _round(self) -> bool:
        fresh: list[_Append] = []
        item = self._next()
        while item is not _NOTHING:
            if item is None:
                return False
            if isinstance(item, _Sent):
                self._judge(item.future, item.appends)
            else:
                fresh.append(item)
            if len(fresh) >= _MOST_PER_APPEND:
                break
            item = self._queue.get_nowait() if not self._queue.empty() else _NOTHING
        if self._gate is not None:
            self._behind += fresh
            fresh = []
        if self._waiting and time.monotonic() >= self._again_at:
            fresh, self._waiting = self._waiting + fresh, []
        if fresh and self._waiting:
            self._waiting += fresh  # nothing overtakes what is refused
        else:
            self._send_all(fresh)
        return True

    def _next(self) -> Any:
        timeout = max(0.0, self._again_at - time.monotonic()) if self._waiting else None
        try:
            return self._queue.get(timeout=timeout)
        except queue.Empty:
            return _NOTHING

    def _send_all(self, appends: list[_Append]) -> None:
        """Up to the first gate; the rest follows when that is acknowledged."""
        gate = next((place for place, append in enumerate(appends) if append.is_gate), None)
        if gate is not None:
            self._gate = appends[gate]
            self._behind = appends[gate + 1 :] + self._behind
            appends = appends[: gate + 1]
        places: dict[TopicPartition, list[_Append]] = {}
        for append in appends:
            places.setdefault(TopicPartition(append.topic, append.partition), []).append(append)
        for place, group in places.items():
            self._send(place, group)

    def _send(self, place: TopicPartition, appends: list[_Append]) -> None:
        lane = appends[0].lane
        progress = lane.progress() if lane is not None else None
        shared = progress and slim(progress)  # the lists go on the last one alone
        records = [self._encoded(append, shared) for append in appends[:-1]]
        records.append(self._encoded(appends[-1], progress))
        future = self.log.submit(place.topic, place.partition, records)
        future.add_done_callback(lambda done: self._queue.put(_Sent(done, appends)))

    def _encoded(self, append: _Append, progress: Progress | None) -> NewRecord:
        try:
            event = append.event if progress is None else with_progress(append.event, progress)
            return codec.encode(event, producer=self.producer)
        except RecordTooLarge as error:
            append.event = _smaller(append.event, error)
            return self._encoded(append, progress)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            if not isinstance(append.event, TrajectoryFinished):
                raise
            # metadata that a generate function made of types which have no form in the log
            logger.error("%s: %s cannot be encoded: %s", self.producer, append.event.uid, error)
            append.event = failed_from(append.event, "unencodable", f"{type(error).__name__}: {error}")
            return self._encoded(append, progress)

    def _judge(self, future: Future[int], appends: list[_Append]) -> None:
        try:
            future.result()
        except (LogFull, LogUnavailable) as error:
            self._send_later(appends, error)
        except RecordTooLarge as error:
            self._too_large(appends, error)
        else:
            self._acknowledged(appends)

    def _acknowledged(self, appends: list[_Append]) -> None:
        if self._stuck_since is not None:
            logger.info(
                "%s: the log takes appends again after %.1f s",
                self.producer,
                time.monotonic() - self._stuck_since,
            )
            self._stuck_since = None
        for append in appends:
            if append.lane is not None:
                append.lane.sample_done(append.offset)
            if append.after is not None:
                self._put(append.after)
            if append is self._gate:
                self._open_gate()
        with self._idle:
            self._open_of.subtract(append.partition for append in appends if append.lane is not None)
            self._open -= len(appends)
            self.published += len(appends)
            if not self._open:
                self._idle.notify_all()

    def _open_gate(self) -> None:
        behind, self._gate, self._behind = self._behind, None, []
        if self._waiting:
            self._waiting += behind
        else:
            self._send_all(behind)

    def _send_later(self, appends: list[_Append], error: Exception) -> None:
        now = time.monotonic()
        self._waiting += appends
        self._again_at = now + self._retry_s
        if self._stuck_since is None:
            self._stuck_since = now
        if now - self._said_at >= _SAY_AGAIN_S:
            self._said_at = now
            logger.error(
                "%s: cannot append (%s); %d events wait and no sample is started, trying again every %.1f s",
                self.producer,
                error,
                self._open,
                self._retry_s,
            )

    def _too_large(self, appends: list[_Append], error: RecordTooLarge) -> None:
        """One record of the append is over the log's limit: find it, and give its sample a typed failure."""
        if len(appends) > 1:
            for append in appends:
                self._send(TopicPartition(append.topic, append.partition), [append])
            return
        append = appends[0]
        logger.error("%s: %s", self.producer, error)
        if isinstance(append.event, Metrics):
            self._acknowledged(appends)
            return
        append.event = _smaller(append.event, error)
        self._send(TopicPartition(append.topic, append.partition), [append])


_NOTHING: Any = object()


def _smaller(event: Event, error: RecordTooLarge) -> Event:
    """What is written instead of an event that no setting of the log lets pass. Raises the error where nothing is."""
    if isinstance(event, TrajectoryFinished):
        return failed_from(event, "record_too_large", str(error))
    if isinstance(event, DeadLetter) and len(event.raw) > CUT_RAW_BYTES:
        return cut_letter(event)
    raise error


def failed_from(event: TrajectoryFinished, reason: str, detail: str) -> RolloutFailed:
    return RolloutFailed(
        uid=event.uid,
        group_id=event.group_id,
        seq=event.seq,
        index=event.index,
        attempt=event.attempt,
        n_samples=event.n_samples,
        task_offset=event.task_offset,
        reason=reason,
        detail=detail,
        engine=event.engine,
    )
