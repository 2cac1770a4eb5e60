"""A thread that reads ahead: one consumer, and a feed for each partition that somebody follows.

    follow(place, position) ──► feeds ──► assign · pause · poll (the broker holds the fetch) ──► feeds ──► take()
                                  ▲                                                                │
                                  └─── a feed that is full is paused; read, it is resumed ◄────────┘

What is read ahead is bounded by `prefetch_bytes` over all feeds. Nobody starves by that: a feed that has nothing, and
that a wait() hangs on, is fetched whatever the others hold.

An absent broker is no error here. The consumer sees to reconnecting; one that fails, or that brings nothing of what
is known to be there, is made anew and goes on where the feeds are.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import NamedTuple

from streams.errors import CorruptRecord, LogError, OffsetOutOfRange
from streams.kafka.clients import Consumer, Fetched, new_consumer
from streams.kafka.ends import Ends
from streams.kafka.feed import Feed
from streams.kafka.settings import KafkaSettings
from streams.log import Batch, TopicPartition

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_UNUSED_S = 30.0  # a feed that nobody asks for is let go
_CHECK_S = 5.0  # a feed to which nothing comes for so long: is there really nothing?
_CATCH_UP_S = 0.5  # a feed that readers have overtaken goes to where they are after so long, at the latest
_LEAST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0  # between a consumer that failed and the next
_KEPT_PART = 8  # of a feed's share, this part is kept of what has been read


class _Plan(NamedTuple):
    positions: dict[TopicPartition, int]
    full: set[TopicPartition]


class Follower:
    """`changed` is notified when anything has come. All methods are called with its lock, `lock`, held."""

    def __init__(
        self,
        settings: KafkaSettings,
        name: str,
        ends: Ends,
        lock: threading.Lock,
        changed: threading.Condition,
    ) -> None:
        self._settings = settings
        self._name = name
        self._ends = ends
        self._lock = lock
        self._changed = changed
        self._wake = threading.Condition(lock)
        self._feeds: dict[TopicPartition, Feed] = {}
        self._consumer: Consumer | None = None
        self._at: dict[TopicPartition, int] = {}  # what the consumer reads, and its next offset
        self._paused: set[TopicPartition] = set()
        self._is_stuck = False
        self._thread: threading.Thread | None = None
        self._closed = False

    def feed(self, place: TopicPartition) -> Feed | None:
        return self._feeds.get(place)

    def follow(self, place: TopicPartition, position: int) -> Feed:
        """Read ahead from there; a feed that has that in its window stays as it is, one that is further on, too.

        One that lies behind is given the chance to catch up by itself: moving it costs the fetch that is on its way.
        """
        now = time.monotonic()
        feed = self._feeds.get(place)
        if feed is None:
            feed = self._feeds[place] = Feed(position, now)
        elif position > feed.next_position and (feed.stopped or feed.is_left_behind(now, _CATCH_UP_S)):
            feed.jump(position, now)
        else:
            feed.used_at = now
            if position <= feed.next_position:
                feed.overtaken_at = None
            return feed
        feed.used_at = now
        self._ends.refresh(place)
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(
                target=self._run, name=f"millstream-kafka-{self._name}", daemon=True
            )
            self._thread.start()
        self._wake.notify()
        return feed

    def take(self, feed: Feed, position: int, max_records: int, max_bytes: int) -> Batch | None:
        """As Feed.take."""
        batch = feed.take(position, max_records, max_bytes)
        feed.used_at = time.monotonic()
        if batch is not None:
            feed.forget_read(self._share() // _KEPT_PART)
            if feed.paused and feed.ahead_bytes <= self._share() // 2:
                self._wake.notify()
        return batch

    def drop(self, place: TopicPartition) -> None:
        """Its position is none (any more): the next read asks the broker what is."""
        feed = self._feeds.pop(place, None)
        if feed is not None:
            feed.gone = True
            self._changed.notify_all()
            self._wake.notify()

    def close(self) -> None:
        """The thread ends soon."""
        self._closed = True
        self._wake.notify()

    def join(self, timeout_s: float) -> None:
        """Without the lock."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    # -- what to fetch

    def _share(self) -> int:
        return self._settings.prefetch_bytes // max(1, len(self._feeds))

    def _plan(self) -> _Plan | None:
        """Waits until there is something to fetch. None when closed."""
        while not self._closed:
            now = time.monotonic()
            self._drop_unused(now)
            live = {place: feed for place, feed in self._feeds.items() if not feed.stopped}
            self._check(live, now)
            full = self._full(live, now)
            if len(full) < len(live) or (self._at and not live):
                return _Plan({place: feed.next_position for place, feed in live.items()}, full)
            self._wake.wait(_CHECK_S if live else None)
        return None

    def _full(self, live: dict[TopicPartition, Feed], now: float) -> set[TopicPartition]:
        ahead = {place: feed.ahead_bytes for place, feed in live.items()}
        share = self._share()
        spent = sum(ahead.values()) >= self._settings.prefetch_bytes
        full: set[TopicPartition] = set()
        for place, feed in live.items():
            limit = share // 2 if feed.paused else share
            hungry = feed.waiters and not ahead[place]
            was, feed.paused = feed.paused, (spent or ahead[place] > limit) and not hungry
            if feed.paused:
                full.add(place)
            elif was:
                feed.came_at = now  # that nothing came so far was our doing
        return full

    def _drop_unused(self, now: float) -> None:
        for place in [p for p, f in self._feeds.items() if not f.waiters and now - f.used_at > _UNUSED_S]:
            del self._feeds[place]

    def _check(self, live: dict[TopicPartition, Feed], now: float) -> None:
        """Ask for the ends of silent feeds; a consumer that does not bring what there is has to go."""
        for place, feed in live.items():
            if feed.paused or now - feed.came_at < _CHECK_S:
                continue
            if (self._ends.answered(place) or 0) <= feed.next_position:
                feed.missed_since = None
            elif feed.missed_since is None:
                feed.missed_since = now
            elif now - feed.missed_since > _CHECK_S and feed.live:
                feed.missed_since = None
                self._is_stuck = True
                logger.warning(
                    "%s/%d: nothing came for %.0f s, although there is more from %d on; connecting anew",
                    *place,
                    now - feed.came_at,
                    feed.next_position,
                )
            if now - feed.checked_at > _CHECK_S:
                feed.checked_at = now
                self._ends.refresh(place)

    # -- the thread

    def _run(self) -> None:
        pause = _LEAST_PAUSE_S
        while True:
            with self._lock:
                plan = self._plan()
            if plan is None:
                break
            try:
                fetched = self._fetch(plan)
                pause = _LEAST_PAUSE_S
            except (OffsetOutOfRange, CorruptRecord) as error:
                with self._lock:
                    self._lose(error)
            except Exception as error:
                logger.log(
                    logging.DEBUG if pause < _LONGEST_PAUSE_S else logging.WARNING,
                    "reading ahead of %s topics failed, trying again: %s",
                    self._name,
                    error,
                    exc_info=not isinstance(error, LogError),
                )
                self._drop_consumer()
                with self._lock:
                    if not self._closed:
                        self._wake.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            else:
                with self._lock:
                    self._deliver(fetched)
        self._drop_consumer()

    def _fetch(self, plan: _Plan) -> list[Fetched]:
        if self._is_stuck:
            self._is_stuck = False
            self._drop_consumer()
        if self._consumer is None:
            self._consumer = new_consumer(self._settings)
        if plan.positions != self._at:
            moved = {place for place, at in plan.positions.items() if self._at.get(place) != at}
            self._consumer.assign(plan.positions)
            self._paused = self._paused.intersection(plan.positions).difference(moved)
            self._at = dict(plan.positions)
        if pausing := plan.full - self._paused:
            self._consumer.pause(list(pausing))
        if resuming := self._paused - plan.full:
            self._consumer.resume(list(resuming))
        self._paused = set(plan.full)
        return self._consumer.poll(_POLL_S) if plan.positions else []

    def _deliver(self, fetched: list[Fetched]) -> None:
        now = time.monotonic()
        for place, records, next_position, _ in fetched:
            begin = self._at.get(place)
            if begin is None or next_position <= begin:
                continue
            self._at[place] = next_position
            feed = self._feeds.get(place)
            if feed is not None and feed.next_position == begin:  # else it has jumped meanwhile
                feed.extend(records, next_position, now)
                self._ends.raise_to(place, next_position)
        for place in self._at:
            if place in self._feeds:
                self._feeds[place].live = True
        if fetched:
            self._changed.notify_all()

    def _lose(self, error: OffsetOutOfRange | CorruptRecord) -> None:
        """The consumer has let go of that place."""
        place = TopicPartition(error.topic, error.partition)
        begin = self._at.pop(place, None)
        feed = self._feeds.get(place)
        if feed is None or feed.next_position != begin:
            return
        if isinstance(error, OffsetOutOfRange):
            self.drop(place)
        else:
            feed.stopped = True
            self._changed.notify_all()

    def _drop_consumer(self) -> None:
        """The feeds stay as they are; the next consumer goes on where they end."""
        consumer, self._consumer = self._consumer, None
        with self._lock:
            self._at, self._paused = {}, set()
            for feed in self._feeds.values():
                feed.live = False
        if consumer is not None:
            try:
                consumer.close()
            except Exception as error:
                logger.debug("closing a consumer: %r", error)
