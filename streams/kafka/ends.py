"""Where partitions begin and end: what this process knows, and the thread that asks the brokers.

    ask(place, at) ──► queue ──► one request for all that came while the last one was on its way ──► futures
    watch(place)   ──► asked again twice a second while somebody wants to know

The thread has a consumer, and so a connection, of its own: on a follower's, a question would wait until the broker
has answered the long fetch before it.

What is known of an end is at least what was acknowledged to this process and at least what it has read. It falls
when an answer that was asked for after that says less: the partition was truncated or made anew, or somebody holds
a transaction open.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from streams.errors import LogClosed, LogError, LogUnavailable, UnknownTopic
from streams.kafka.clients import LATEST, Consumer, new_consumer
from streams.kafka.patience import Answer
from streams.kafka.settings import KafkaSettings
from streams.log import TopicPartition

logger = logging.getLogger(__name__)

RECENT_S = 1.0  # how old an end may be that recent() gives
_REFRESH_S = 0.5
_WATCHED_S = 5.0  # after the last watch()
_TRY_S = 1.0  # of one request to the brokers
_PAUSE_S = 0.1  # after one that failed
_NEW_S = 3.0  # a topic may be unknown to a broker for so long after it was made
_REBUILD_S = 15.0  # without any answer the connection is made anew: all addresses may have changed
_NEVER = float("-inf")


@dataclass
class _Ask:
    place: TopicPartition
    at: int
    future: Answer[int] | None  # None: nobody waits for it
    alone: bool = False  # it failed together with others, of which one may be at fault
    since: float = field(default_factory=time.monotonic)


@dataclass
class _End:
    offset: int  # the least that the end can be
    changes: int = (
        0  # how often something was acknowledged or read: what was asked for before that is outdated
    )
    asked_at: float = _NEVER  # when the last answered question was sent
    answer: int | None = None  # to it


class Ends:
    """`changed` is notified, and its lock held, when an end becomes known; `shrunk` is called before for one that fell.

    Methods under "what is known" are called with that lock held.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        changed: threading.Condition,
        shrunk: Callable[[TopicPartition, int], None],
    ) -> None:
        self._settings = replace(settings, ingest="thread")  # a few bytes a second: not worth a process
        self._changed = changed
        self._shrunk = shrunk
        self._ends: dict[TopicPartition, _End] = {}  # guarded by `changed`
        self._asked = threading.Condition()  # may be taken while `changed` is held, never the other way round
        self._asks: list[_Ask] = []
        self._watched: dict[TopicPartition, float] = {}  # place → until when
        self._refreshed_at = _NEVER
        self._consumer: Consumer | None = None
        self._failing_since: float | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    # -- what is known

    def known(self, place: TopicPartition) -> int | None:
        """The end was not below it a moment ago; None while nothing was ever said of it."""
        end = self._ends.get(place)
        return None if end is None else end.offset

    def nothing_at(self, place: TopicPartition, position: int, since: float) -> bool:
        """The broker said after `since` that the end is at `position` at most, and nothing said otherwise."""
        end = self._ends.get(place)
        return end is not None and end.offset <= position and end.asked_at >= since

    def answered(self, place: TopicPartition) -> int | None:
        """The end as the broker said it last, however long ago."""
        end = self._ends.get(place)
        return None if end is None else end.answer

    def recent(self, place: TopicPartition) -> int | None:
        """What the end was a moment ago; None when nobody knows."""
        end = self._ends.get(place)
        return None if end is None or time.monotonic() - end.asked_at > RECENT_S else end.offset

    def raise_to(self, place: TopicPartition, offset: int) -> None:
        """A record below `offset` was acknowledged or read."""
        end = self._ends.get(place)
        if end is None:
            self._ends[place] = _End(offset, 1)
        elif offset > end.offset:
            end.offset, end.changes = offset, end.changes + 1

    # -- questions

    def ask(self, place: TopicPartition, at: int) -> Answer[int]:
        """An offset as Consumer.offsets gives it. It is asked for after this call, so the answer is never old."""
        future: Answer[int] = Answer()
        self._put(_Ask(place, at, future))
        return future

    def refresh(self, place: TopicPartition) -> None:
        """Ask for the end, for nobody in particular."""
        self._put(_Ask(place, LATEST, None))

    def watch(self, place: TopicPartition) -> None:
        """Keep `recent` fresh for some seconds."""
        with self._asked:
            self._watched[place] = time.monotonic() + _WATCHED_S
            self._start()

    def close(self) -> None:
        """The thread ends soon; what was asked fails with LogClosed."""
        with self._asked:
            self._closed = True
            self._asked.notify_all()

    def join(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _put(self, ask: _Ask) -> None:
        with self._asked:
            if self._closed:
                raise _closed()
            self._asks.append(ask)
            self._start()
            self._asked.notify_all()

    def _start(self) -> None:
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="millstream-kafka-ends", daemon=True)
            self._thread.start()

    # -- the thread

    def _run(self) -> None:
        try:
            while (asks := self._next()) is not None:
                for group in _groups(asks):
                    self._serve(group)
        finally:
            with self._asked:
                self._closed = True
                left, self._asks = self._asks, []
            _fail(left, _closed())
            self._drop_consumer()

    def _next(self) -> list[_Ask] | None:
        """Everything asked for, waiting for it; None when closed."""
        with self._asked:
            while not self._closed:
                now = time.monotonic()
                self._watched = {place: until for place, until in self._watched.items() if until > now}
                due = self._refreshed_at + _REFRESH_S - now if self._watched else None
                if due is not None and due <= 0:
                    self._refreshed_at = now
                    self._asks += [_Ask(place, LATEST, None) for place in self._watched]
                if self._asks:
                    asks, self._asks = self._asks, []
                    return [ask for ask in asks if ask.future is None or not ask.future.cancelled()]
                self._asked.wait(due)
        return None

    def _serve(self, asks: list[_Ask]) -> None:
        """Ask for one offset of each place."""
        places = list(dict.fromkeys(ask.place for ask in asks))
        with self._changed:
            before = {place: end.changes for place in places if (end := self._ends.get(place))}
        sent_at = time.monotonic()
        try:
            if self._consumer is None:
                self._consumer = new_consumer(self._settings)
            offsets = self._consumer.offsets(places, asks[0].at, _TRY_S)
        except LogUnavailable as error:
            self._again(asks, error)
        except UnknownTopic as error:  # by a broker that has not heard of it yet, perhaps
            old = [ask for ask in asks if time.monotonic() - ask.since > _NEW_S]
            _fail(old, error)
            self._again([ask for ask in asks if ask not in old], error)
        except Exception as error:
            self._drop_consumer()
            _fail(asks, error if isinstance(error, LogError) else LogError(f"asking for offsets: {error!r}"))
        else:
            self._failing_since = None
            if asks[0].at == LATEST:
                self._learn(offsets, before, sent_at)
            for ask in asks:
                if ask.future is not None and ask.future.set_running_or_notify_cancel():
                    ask.future.set_result(offsets[ask.place])

    def _learn(
        self, offsets: dict[TopicPartition, int], before: dict[TopicPartition, int], sent_at: float
    ) -> None:
        with self._changed:
            for place, offset in offsets.items():
                end = self._ends.setdefault(place, _End(offset))
                end.asked_at, end.answer = sent_at, offset
                if offset > end.offset:
                    end.offset = offset
                elif offset < end.offset and end.changes == before.get(place, 0):
                    end.offset = offset
                    self._shrunk(place, offset)
            self._changed.notify_all()

    def _again(self, asks: list[_Ask], why: LogError) -> None:
        """Nobody answered: who waits gives his question up by himself, at his own deadline."""
        logger.debug("offsets: %s", why)
        with self._asked:
            for ask in asks:
                if ask.future is not None:
                    ask.future.why = str(why)
                    self._asks.append(replace(ask, alone=ask.alone or len(asks) > 1))
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        if now - self._failing_since > _REBUILD_S:
            self._failing_since = None
            self._drop_consumer()
        time.sleep(_PAUSE_S)

    def _drop_consumer(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            try:
                consumer.close()
            except Exception as error:
                logger.debug("closing a consumer: %r", error)


def _groups(asks: Sequence[_Ask]) -> list[list[_Ask]]:
    """What can be asked in one request each."""
    groups: dict[object, list[_Ask]] = {}
    for ask in asks:
        groups.setdefault((ask.at, ask.place) if ask.alone else ask.at, []).append(ask)
    return list(groups.values())


def _fail(asks: Sequence[_Ask], error: LogError) -> None:
    for ask in asks:
        if ask.future is not None and ask.future.set_running_or_notify_cancel():
            ask.future.set_exception(error)


def _closed() -> LogClosed:
    return LogClosed("the log was closed; open it again to go on")
