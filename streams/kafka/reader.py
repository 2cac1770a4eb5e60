"""The reading side of the Kafka log.

    read ─┬─► a feed's window (microseconds) ◄── Follower of control topics · Follower of bulk topics
          ├─► a cached chunk, or a fetched one ◄── Seeker
          └─► nothing, if the end is there      ◄── Ends
    wait ───► sleeps until a feed or an end has gone beyond one of its positions

Guarantees, all of them made here:
  - What was acknowledged to this process, or what end() has said, is there for the next read: below it, a read brings
    a record or passes over transaction markers, or raises; it is never empty on the spot.
  - A read at the position where its partition's feed stands asks no broker.
  - No call waits longer than `timeout` for the brokers; LogUnavailable says for what.
The end is that of what is committed: while another program holds a transaction open in a partition, what comes after
its first record is not there yet, also when it is our own.

Nobody says that he reads a partition in order: a wait() on it, or a read that goes on where the last one ended, does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from datetime import timedelta

from streams.errors import CorruptRecord, LogClosed, OffsetOutOfRange
from streams.kafka.clients import EARLIEST, LATEST
from streams.kafka.ends import Ends
from streams.kafka.feed import Feed
from streams.kafka.follower import Follower
from streams.kafka.patience import LOOK_S, Patience
from streams.kafka.seeker import Seeker
from streams.kafka.settings import KafkaSettings
from streams.log import Batch, TopicPartition

_FEED_COMES_S = (
    0.05  # what is known to be there should have come to a feed that waits for it; then it is fetched
)
_VERIFY_S = 0.3  # what does not come for so long: is it still there?
_CLOSE_S = 2.0


class Reader:
    """Lifecycle: make (connects to nothing) → read, wait, … → close. Threads and connections come when needed."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._ends = Ends(settings, self._changed, self._shrunk)
        self._seeker = Seeker(settings)
        nearby = replace(
            settings, ingest="thread"
        )  # some events a second: a process would only make them later
        self._control = Follower(nearby, "control", self._ends, self._lock, self._changed)
        self._bulk = Follower(settings, "bulk", self._ends, self._lock, self._changed)
        self._channels: dict[str, Follower] = {}  # topic → which of the two
        self._last: dict[TopicPartition, int] = {}  # where the last read of each partition ended
        self._closed = False

    # -- offsets

    def start(self, topic: str, partition: int) -> int:
        place = TopicPartition(topic, partition)
        return self._start(place, Patience(self._settings))

    def end(self, topic: str, partition: int) -> int:
        """Asked of the broker after this call, once for all who ask at the same time."""
        return self._end(TopicPartition(topic, partition), Patience(self._settings))

    def recent_end(self, topic: str, partition: int) -> int:
        place = TopicPartition(topic, partition)
        with self._lock:
            self._check_open()
            end = self._ends.recent(place)
        self._ends.watch(place)
        return self.end(topic, partition) if end is None else end

    def offset_at(self, topic: str, partition: int, timestamp_ms: int) -> int:
        """A time before 1970 counts as 1970."""
        ask = self._ends.ask(TopicPartition(topic, partition), max(0, timestamp_ms))
        return Patience(self._settings).result(ask, f"{topic}/{partition}: the offset at {timestamp_ms} ms")

    def acked(self, place: TopicPartition, offset: int, count: int) -> None:
        """Own records were acknowledged: every read and wait from now on knows of them. Called from any thread."""
        with self._lock:
            self._ends.raise_to(place, offset + count)
            self._changed.notify_all()

    def truncated(self, place: TopicPartition, start: int) -> None:
        """Records below `start` are gone: none of them is handed out from memory."""
        self._seeker.forget(place, lambda chunk: chunk.begin < start)
        with self._lock:
            feed = self._channel(place.topic).feed(place)
            if feed is not None and feed.begin < start:
                self._channel(place.topic).drop(place)

    def _start(self, place: TopicPartition, patience: Patience) -> int:
        start = patience.result(
            self._ends.ask(place, EARLIEST), f"{place.topic}/{place.partition}: its start"
        )
        self.truncated(place, start)
        return start

    def _end(self, place: TopicPartition, patience: Patience, what: str = "its end") -> int:
        """`what` the call is about, for the error."""
        return patience.result(self._ends.ask(place, LATEST), f"{place.topic}/{place.partition}: {what}")

    def _shrunk(self, place: TopicPartition, end: int) -> None:
        """The lock is held."""
        self._seeker.forget(place, lambda chunk: chunk.next_position > end)
        channel = self._channel(place.topic)
        feed = channel.feed(place)
        if feed is not None and feed.next_position > end:
            channel.drop(place)

    # -- reading

    def read(self, topic: str, partition: int, position: int, max_records: int, max_bytes: int) -> Batch:
        place = TopicPartition(topic, partition)
        with self._lock:
            self._check_open()
            channel = self._channels.get(topic) or self._channel(topic)
            feed = channel.feed(place)
            batch = None
            if feed is not None:
                batch = channel.take(feed, position, max_records, max_bytes)
                stands_there = position == feed.next_position
                if batch is None and stands_there and self._ends.nothing_at(place, position, feed.since):
                    batch = Batch([], position)
            if batch is not None:
                self._last[place] = batch.next_position
                return batch
            in_order = self._last.get(place) == position
        batch, ahead = self._read(place, position, max_records, max_bytes)
        with self._lock:
            self._last[place] = batch.next_position
            if in_order and not self._closed:
                channel.follow(place, ahead)
        return batch

    def _read(
        self, place: TopicPartition, position: int, max_records: int, max_bytes: int
    ) -> tuple[Batch, int]:
        """Not from a feed, if that does not bring it soon. Also returns where what is at hand ends."""
        patience = Patience(self._settings)
        what = f"records from {position} on"
        awaited_feed = False
        while True:
            chunk = self._seeker.cached(place, position)
            if chunk is not None:
                return chunk.read(position, max_records, max_bytes), chunk.next_position
            with self._lock:
                end = self._ends.known(place)
            if end is None or position >= end or position < 0:
                end = self._end(place, patience, what)
                if position == end:
                    return Batch([], position), position
                if not 0 <= position < end:
                    self._refuse(place, position, end, patience)
            if not awaited_feed:
                awaited_feed = True
                batch = self._from_feed(place, position, max_records, max_bytes)
                if batch is not None:
                    return batch, batch.next_position
            batch = self._seek(place, position, max_records, max_bytes, patience)
            if batch is not None:
                return batch

    def _refuse(self, place: TopicPartition, position: int, end: int, patience: Patience) -> None:
        """Raise OffsetOutOfRange, unless the range has moved meanwhile."""
        start = self._start(place, patience)
        if not start <= position <= end:
            raise OffsetOutOfRange(*place, position, start, end)
        patience.check(None, f"{place.topic}/{place.partition}: records from {position} on")
        time.sleep(0.01)

    def _from_feed(
        self, place: TopicPartition, position: int, max_records: int, max_bytes: int
    ) -> Batch | None:
        """What a feed is just about to bring."""
        deadline = time.monotonic() + _FEED_COMES_S
        with self._lock:
            channel = self._channel(place.topic)
            while True:
                self._check_open()
                feed = channel.feed(place)
                if feed is None or feed.stopped or feed.paused or not feed.live:
                    return None
                batch = channel.take(feed, position, max_records, max_bytes)
                left = deadline - time.monotonic()
                if batch is not None or position != feed.next_position or left <= 0:
                    return batch
                self._changed.wait(left)

    def _seek(
        self, place: TopicPartition, position: int, max_records: int, max_bytes: int, patience: Patience
    ) -> tuple[Batch, int] | None:
        """From the seeker; None when everything should be looked at anew."""
        what = f"records from {position} on"
        future = self._seeker.fetch(place, position)
        verify_at = time.monotonic() + _VERIFY_S
        while True:
            try:
                chunk = patience.soon(future, LOOK_S)
                return chunk.read(position, max_records, max_bytes), chunk.next_position
            except FutureTimeout:
                patience.check(future, f"{place.topic}/{place.partition}: {what}")
            except OffsetOutOfRange:
                self._refuse(place, position, self._end(place, patience, what), patience)
                return None
            except CorruptRecord as error:
                if error.offset > position:  # nothing lies before it that a reader sees
                    return Batch([], error.offset), error.offset
                raise CorruptRecord(
                    *place,
                    position,
                    self._after_damage(place, position, patience),
                    "its batch fails its checksum",
                ) from error
            if time.monotonic() >= verify_at:
                if self._end(place, patience, what) <= position:
                    future.cancel()
                    return None
                verify_at = time.monotonic() + _VERIFY_S

    def _after_damage(self, place: TopicPartition, damaged: int, patience: Patience) -> int:
        """Where reading can go on: found by trying, since a damaged batch cannot be believed about its own length."""

        def is_whole(position: int) -> bool:
            future = self._seeker.fetch(place, position)
            try:
                patience.result(
                    future, f"{place.topic}/{place.partition}: records after the damaged {damaged}"
                )
            except CorruptRecord as error:
                return error.offset > damaged
            return True

        end = self._end(place, patience)
        bad, step = damaged, 1
        while (good := min(bad + step, end)) < end and not is_whole(good):
            bad, step = good, 2 * step
        while good - bad > 1:
            middle = (bad + good) // 2
            if is_whole(middle):
                good = middle
            else:
                bad = middle
        return good

    # -- waiting

    def wait(self, positions: Mapping[TopicPartition, int], timeout: timedelta) -> bool:
        """False also when the process is to stop. A position that is out of range, or that a damaged record stands at,
        counts as there: the read says so."""
        deadline = time.monotonic() + timeout.total_seconds()
        feeds: dict[TopicPartition, Feed] = {}
        with self._lock:
            self._check_open()
            for place, position in positions.items():
                feeds[place] = self._channel(place.topic).follow(place, position)
                feeds[place].waiters += 1
            try:
                while True:
                    self._check_open()
                    if any(self._is_there(place, positions[place], feed) for place, feed in feeds.items()):
                        return True
                    for place, feed in feeds.items():
                        if feed.next_position < positions[place]:
                            self._channel(place.topic).follow(place, positions[place])
                    left = deadline - time.monotonic()
                    if left <= 0 or self._settings.interrupted():
                        return False
                    self._changed.wait(min(left, LOOK_S))
            finally:
                for feed in feeds.values():
                    feed.waiters -= 1
                    feed.used_at = time.monotonic()

    def _is_there(self, place: TopicPartition, position: int, feed: Feed) -> bool:
        end = self._ends.known(place)
        if end is not None and end > position:
            return True
        return feed.gone or (feed.stopped and feed.next_position == position)

    # -- life

    def close(self) -> None:
        """Every call in another thread raises LogClosed. Twice is harmless."""
        with self._lock:
            self._closed = True
            self._control.close()
            self._bulk.close()
            self._changed.notify_all()
        self._seeker.close()
        self._ends.close()
        until = time.monotonic() + _CLOSE_S
        for part in (self._control, self._bulk, self._seeker, self._ends):
            part.join(max(0.0, until - time.monotonic()))

    def _channel(self, topic: str) -> Follower:
        channel = self._channels.get(topic)
        if channel is None:
            channel = self._control if self._settings.is_control(topic) else self._bulk
            self._channels[topic] = channel
        return channel

    def _check_open(self) -> None:
        if self._closed:
            raise LogClosed("the log was closed; open it again to go on")
