"""Appends on their way to Kafka: a lane for each partition, in order, every append with a deadline.

    send ──► waiting ──────────────► handed to the client ──────► acknowledged
               │ deadline              │ deadline
               ▼                       ▼
           never sent: nothing     its owner hears LogUnavailable, and the client goes on trying for as long again:
           of it is visible        it may still land, but what comes after it in the lane never overtakes it

Both clients sit behind this, so that both behave alike:
  - An absent broker, a topic not looked up yet and a client that must be made anew never block a caller: the append
    waits in its lane, and a worker thread, which lives as long as there is such work, does what blocks.
  - Little is handed over at once (`window`). What an outage catches is therefore mostly unsent, and fails cleanly.
  - A client that failed in a way that could break the order of what follows is thrown away and replaced (`Link`).
  - A thread of its own (alarm.py) tells every append's owner in time, whatever the client is doing.

`sent` is called on whatever thread found out; none of the locks here is held then. What its owner reads is in
verdicts.py.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from streams.errors import LogError, LogUnavailable, RecordTooLarge
from streams.kafka import verdicts
from streams.kafka.alarm import Alarm
from streams.kafka.clients import Producer, Sent
from streams.kafka.errors import LoginRefused, Refused
from streams.kafka.lane import Lane, overview
from streams.kafka.link import Append, Done, Link, NotYet, batch_bytes
from streams.kafka.settings import KafkaSettings
from streams.log import NewRecord, TopicPartition

logger = logging.getLogger(__name__)

_LOOK_S = 1.0  # how often appends that wait are looked after
_SAY_S = 10.0  # a wait of that length is worth a line in the log, and again after as long
_NAP_S = 0.2  # between two tries to reach a broker
_SETTLE_S = 1.0  # for a failed client to say what became of everything that it was given
_CLOSE_S = 1.0  # for a client to end
_UNKNOWN_S = 2.0  # a new topic takes a moment to be known to every broker
_LOGIN_S = 2.5  # a broker that is starting may refuse a login that it will take later
_WEDGED_S = 5.0  # after which a client that should long have given an append up is given up itself
_AT_THE_END = "when the log was closed"
_ALONE = 64  # appends that go one by one after the broker had refused several together


class Lanes(Producer):
    """Lifecycle: made (connects to nothing) → send, send, … → close. Safe to use from several threads.

    `window`: bytes of one lane that may be in the client at once; a larger append goes alone.
    `linger_s`: how long the first append of an idle lane waits for others, unless `gather` bytes are there.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        connect: Callable[[], Link],
        *,
        window: int,
        linger_s: float = 0.0,
        name: str = "bulk",
    ) -> None:
        self._settings = settings
        self._connect = connect
        self._window = window
        self._linger_s = linger_s
        self._gather = settings.batch_bytes
        self._name = name
        self._timeout_s = settings.delivery_timeout.total_seconds()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # something ended, or the producer was closed
        self._alarm = Alarm(self._lock, self._look_after, name=f"kafka-{name}-clock")
        self._lanes: dict[TopicPartition, Lane] = {}
        self._link: Link | None = None
        self._spoiled: Link | None = None  # to be replaced by the worker
        self._culprit: TopicPartition | None = None  # where the spoiled one failed first
        self._generation = 0  # of links: what an earlier one says is no longer heard
        self._live = 0  # appends whose owner was not told yet
        self._unsaid: deque[tuple[Append, int, LogError | None]] = deque()
        self._unknown: set[TopicPartition] = set()
        self._missing_since: dict[TopicPartition, float] = {}  # the worker's
        self._why = ""  # the brokers cannot be reached
        self._refused_since = 0.0
        self._flushing = 0
        self._worker: threading.Thread | None = None
        self._look_at = 0.0
        self._said_at = 0.0
        self._closed = False

    # -- the interface

    def send(
        self, topic: str, partition: int, records: Sequence[NewRecord], sent: Sent, deadline: float
    ) -> None:
        self.queue(topic, partition, records, sent, deadline)()

    def queue(
        self, topic: str, partition: int, records: Sequence[NewRecord], sent: Sent, deadline: float
    ) -> Callable[[], None]:
        """As `send`, in two steps, for a caller that has to queue under a lock of its own: nobody is told anything
        before the returned function is called, which must be soon and without that lock."""
        append = Append(TopicPartition(topic, partition), records, batch_bytes(records), sent, deadline)
        starts: list[Callable[[], None]] = []
        with self._lock:
            if self._closed:
                self._live += 1
                self._end(append, -1, verdicts.closed(append))
            else:
                self._live += 1
                lane = self._lanes.get(append.place)
                if lane is None:
                    lane = self._lanes[append.place] = Lane(append.place)
                lane.add(append)
                self._hand_over(lane, starts)
                self._look_at = min(self._look_at, append.deadline)
                self._alarm.wake_at(min(append.deadline, append.since + _LOOK_S))
        return partial(self._go_on, starts)

    def flush(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        starts: list[Callable[[], None]] = []
        with self._lock:
            self._flushing += 1
            for lane in self._lanes.values():
                self._hand_over(lane, starts)
            link = self._link
        self._go_on(starts)
        if link is not None:
            link.push()
        with self._lock:
            self._changed.wait_for(
                lambda: not self._live or self._closed, max(0.0, deadline - time.monotonic())
            )
            self._flushing -= 1

    def settle(self, place: TopicPartition, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while self._may_land_late(place):
                left = deadline - time.monotonic()
                if left <= 0 or self._settings.interrupted():
                    return False
                self._changed.wait(min(left, _NAP_S))
        return True

    def _may_land_late(self, place: TopicPartition) -> bool:
        lane = self._lanes.get(place)
        return lane is not None and any(append.told for append in lane.handed)

    def close(self, timeout_s: float) -> None:
        if not self._closed:
            self.flush(timeout_s)
        with self._lock:
            self._closed = True
            self._generation += 1
            links = [link for link in (self._link, self._spoiled) if link is not None]
            self._link = self._spoiled = None
            for lane in self._lanes.values():
                for append in lane.handed:
                    self._end(append, -1, self._not_acknowledged(append, _AT_THE_END))
                for append in lane.waiting:
                    self._end(append, -1, self._not_sent(append, _AT_THE_END))
            self._lanes.clear()
            self._changed.notify_all()
            self._alarm.stop()
        self._go_on([])
        for link in links:
            link.close(_CLOSE_S)

    # -- handing over; all with the lock held

    def _hand_over(self, lane: Lane, starts: list[Callable[[], None]]) -> None:
        """Give the client what it may have of this lane."""
        if not lane.waiting:
            return
        link = self._link
        if link is None or not link.knows(lane.place):
            self._unknown.add(lane.place)
            self._ensure_worker()
            return
        now = time.monotonic()
        while lane.waiting and self._may_go(lane, lane.waiting[0], link, now):
            append = lane.take()
            if append.deadline <= now:
                self._end(append, -1, self._not_sent(append, verdicts.within(self._settings)))
                continue
            lane.kind = link.kind(append, lane.kind if lane.handed else None)
            lane.alone -= lane.alone > 0
            lane.hand(append)
            try:
                starts.append(link.hand(append, lane.kind, self._listener(lane, append)))
            except NotYet:
                lane.put_back(append)
                self._unknown.add(lane.place)
                self._ensure_worker()
                return
            except LogError as error:
                lane.leave(append)
                self._end(append, -1, error)
                if link.is_spoiled_by(error):
                    self._spoil(lane.place, error)
                    return
            append.records = ()  # the client has its own copy
        if lane.waiting and not lane.handed:
            self._alarm.wake_at(lane.waiting[0].since + self._linger_s)

    def _may_go(self, lane: Lane, append: Append, link: Link, now: float) -> bool:
        if lane.handed:
            return (
                not lane.alone
                and lane.handed_bytes + append.size <= self._window
                and link.kind(append, lane.kind) == lane.kind
            )
        return (
            not self._linger_s
            or self._flushing > 0
            or lane.waiting_bytes >= self._gather
            or now - append.since >= self._linger_s
        )

    def _listener(self, lane: Lane, append: Append) -> Done:
        generation = self._generation

        def done(offset: int, error: LogError | None) -> None:
            starts: list[Callable[[], None]] = []
            with self._lock:
                if generation != self._generation or append not in lane.handed:
                    return
                lane.leave(append)
                if error is not None:
                    error = self._judged(lane, append, error)
                self._end(append, offset, error)
                if not lane.handed:
                    lane.refused_together = False
                self._hand_over(lane, starts)
                if self._spoiled is not None:
                    self._changed.notify_all()
            self._go_on(starts)

        return done

    def _judged(self, lane: Lane, append: Append, error: LogError) -> LogError:
        """What the owner of a failed append is told. Only the one who is at fault may hear that it is refused:
        others, whom the client fails along with it, try again."""
        culprit = self._culprit
        if self._link is not None and self._link.is_spoiled_by(error):
            self._spoil(lane.place, error)
        if culprit is not None and culprit != lane.place:
            return verdicts.failed_with(append, culprit)
        if isinstance(error, (Refused, RecordTooLarge)):
            lane.refused_together = lane.refused_together or bool(lane.handed)
            if lane.refused_together:
                lane.alone = _ALONE
                return verdicts.refused_together(append, error)
        return error

    def _end(self, append: Append, offset: int, error: LogError | None) -> None:
        """Its owner is to be told, once, by `_go_on`."""
        if append.told:
            if error is None:
                logger.info("%s: done at last, offset %d, after LogUnavailable", append, offset)
            return
        append.told = True
        append.records = ()
        self._unsaid.append((append, offset, error))
        self._live -= 1
        if not self._live:
            self._changed.notify_all()

    def _go_on(self, starts: Sequence[Callable[[], None]]) -> None:
        """What must be done without the lock."""
        for start in starts:
            start()
        while True:
            try:
                append, offset, error = self._unsaid.popleft()
            except IndexError:
                return
            try:
                append.sent(offset, error)
            except Exception:
                logger.exception("%s: what was to be told its owner", append)

    # -- the worker: everything that waits for the network

    def _ensure_worker(self) -> None:
        if self._worker is None and not self._closed:
            self._worker = threading.Thread(
                target=self._work, name=f"kafka-{self._name}-connect", daemon=True
            )
            self._worker.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                waiting = any(lane.waiting for lane in self._lanes.values())
                if self._closed or (self._spoiled is None and not (waiting and self._unknown)):
                    self._unknown.clear()
                    self._worker = None
                    return
                link, unknown = self._link, sorted(self._unknown)
            try:
                if self._spoiled is not None:
                    self._replace()
                elif link is None:
                    self._reconnect()
                else:
                    self._learn(link, unknown)
            except Exception:
                logger.exception("connecting to %s", ", ".join(self._settings.servers))
                self._nap()

    def _replace(self) -> None:
        with self._lock:
            self._changed.wait_for(
                lambda: self._closed or not any(lane.handed for lane in self._lanes.values()), _SETTLE_S
            )
            link, self._spoiled, self._culprit = self._spoiled, None, None
            self._generation += 1
            for lane in self._lanes.values():
                for append in lane.handed:
                    self._end(
                        append, -1, self._not_acknowledged(append, "by a client that had to be made anew")
                    )
                lane.forget_handed()
                if lane.waiting:
                    self._unknown.add(lane.place)
        self._go_on([])
        if link is not None:
            link.close(_CLOSE_S)

    def _reconnect(self) -> None:
        began = time.monotonic()
        try:
            link = self._connect()
        except LogUnavailable as error:
            self._why = str(error)
            self._nap()
            return
        except LoginRefused as error:
            self._refused_since = self._refused_since or began
            self._why = str(error)
            if time.monotonic() - self._refused_since >= min(_LOGIN_S, self._timeout_s / 2):
                self._fail_waiting(error)
            else:
                self._nap()
            return
        except LogError as error:
            self._fail_waiting(error)
            return
        starts: list[Callable[[], None]] = []
        with self._lock:
            closed = self._closed
            if not closed:
                self._why, self._refused_since = "", 0.0
                self._link = link
                self._hand_over_all(starts)
        self._go_on(starts)
        if closed:
            link.close(_CLOSE_S)

    def _learn(self, link: Link, places: Sequence[TopicPartition]) -> None:
        for place in places:
            try:
                if link.knows(place) or link.learn(place):
                    self._missing_since.pop(place, None)
                    continue
                now = time.monotonic()
                if now - self._missing_since.setdefault(place, now) >= _UNKNOWN_S:
                    del self._missing_since[place]
                    self._fail_waiting(verdicts.unknown_topic(place, self._settings), place)
            except LogUnavailable as error:
                self._why = str(error)
                self._nap()
                break
            except LogError as error:
                self._fail_waiting(error, place)
        if self._missing_since:
            self._nap()
        starts: list[Callable[[], None]] = []
        with self._lock:
            self._hand_over_all(starts)
        self._go_on(starts)

    def _hand_over_all(self, starts: list[Callable[[], None]]) -> None:
        self._unknown.clear()  # what is still not known comes back
        for lane in self._lanes.values():
            self._hand_over(lane, starts)

    def _fail_waiting(self, error: LogError, place: TopicPartition | None = None) -> None:
        """Nothing of them was sent."""
        with self._lock:
            for lane in self._lanes.values():
                if place is None or place == lane.place:
                    for append in lane.waiting:
                        self._end(append, -1, error)
                    lane.keep_waiting()
        self._go_on([])

    def _nap(self) -> None:
        with self._lock:
            self._changed.wait_for(lambda: self._closed, _NAP_S)

    def _spoil(self, place: TopicPartition | None, error: LogError) -> None:
        if self._link is None:
            return
        logger.warning("the Kafka client of %s topics is made anew: %s", self._name, error)
        self._spoiled, self._link, self._culprit = self._link, None, place
        self._ensure_worker()

    # -- on the alarm's thread

    def _look_after(self) -> None:
        """End what has had its time, and hand over what has lingered."""
        starts: list[Callable[[], None]] = []
        with self._lock:
            self._alarm.sleep_until(self._look(time.monotonic()) if self._live else float("inf"))
            if self._linger_s and self._link is not None:
                for lane in self._lanes.values():
                    self._hand_over(lane, starts)
        self._go_on(starts)

    def _look(self, now: float) -> float:
        """Returns when to look again."""
        if now < self._look_at:
            return self._look_at
        seen = overview(self._lanes.values(), now, 2 * self._timeout_s + _WEDGED_S)
        when = verdicts.within(self._settings)
        for append, is_handed in seen.expired:
            verdict = self._not_acknowledged if is_handed else self._not_sent
            self._end(append, -1, verdict(append, when))
        for place in {append.place for append, is_handed in seen.expired if not is_handed}:
            lane = self._lanes[place]
            lane.keep_waiting([append for append in lane.waiting if not append.told])
        broken = self._link.broken() if self._link is not None else None
        if broken is None and seen.wedged is not None:
            broken = LogUnavailable(f"{seen.wedged}: the client neither sends it nor gives it up")
        if broken is not None:
            self._spoil(None, broken)
        if seen.oldest is not None:
            self._say_who_waits(now, now - seen.oldest.since)
        self._look_at = min(now + _LOOK_S, seen.next_deadline)
        return self._look_at

    def _say_who_waits(self, now: float, longest_s: float) -> None:
        if longest_s >= _SAY_S <= now - self._said_at:
            self._said_at = now
            logger.warning(
                "%d appends wait for Kafka, one for %.0f s: %s",
                self._live,
                longest_s,
                self._why or f"{', '.join(self._settings.servers)} did not acknowledge them yet",
            )

    def _not_sent(self, append: Append, when: str) -> LogError:
        return verdicts.not_sent(append, self._settings, when, self._why)

    def _not_acknowledged(self, append: Append, when: str) -> LogError:
        return verdicts.not_acknowledged(append, self._settings, when)
