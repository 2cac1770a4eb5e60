"""Writing through confluent-kafka (librdkafka), which takes a fraction of kafka-python's time in this interpreter.

librdkafka decides by itself where a batch ends, so the records of one call could lie apart, with another process's
between them. Calls of several records therefore go through kafka-python, whose batches this side controls
(python_producer.py); calls of one record, the bulk of the bytes, through librdkafka. A lane never has both kinds
on their way at once, so the order is kept.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from confluent_kafka import (  # pyright: ignore[reportMissingImports]
    KafkaError,
    KafkaException,
)
from confluent_kafka import Producer as RdProducer  # pyright: ignore[reportMissingImports]

from streams.errors import LogError, LogUnavailable
from streams.kafka.clients import Producer
from streams.kafka.errors import (
    LEADER_NOT_AVAILABLE,
    UNKNOWN_TOPIC,
    LoginRefused,
    code_of,
    from_client,
    unreachable,
)
from streams.kafka.lanes import Lanes
from streams.kafka.link import Append, Done, Link
from streams.kafka.options import confluent_producer_options
from streams.kafka.python_producer import python_producer
from streams.kafka.settings import KafkaSettings
from streams.log import TopicPartition

logger = logging.getLogger(__name__)

_IN_FLIGHT = 5  # requests of one connection that may wait for their answer
_SINGLE, _WHOLE = 0, 1  # kinds of appends: through librdkafka, through kafka-python
_POLL_S = 0.1
_ANSWER_S = 3.0
_LEARN_S = 1.0
_PUSH_S = 0.05
_QUIET = logging.getLogger(f"{__name__}.librdkafka")  # its own words: shown from level INFO on


def confluent_producer(settings: KafkaSettings, *, control: bool) -> Producer:
    return Lanes(
        settings,
        lambda: ConfluentLink(settings, control=control),
        window=(_IN_FLIGHT + 1) * settings.batch_bytes,
        name="control" if control else "bulk",
    )


class ConfluentLink(Link):
    """A confluent_kafka.Producer, a thread that takes its reports, and a kafka-python producer once it is needed.
    Making one waits for a broker, for some seconds at most."""

    def __init__(self, settings: KafkaSettings, *, control: bool) -> None:
        """Raises LogUnavailable when no broker answers, LogError when it does not let us in."""
        self._settings, self._control = settings, control
        self._broken: LogError | None = None
        self._known: set[TopicPartition] = set()
        self._whole: Lanes | None = None
        self._closed = False
        options = confluent_producer_options(settings, control=control)
        try:
            self._producer = RdProducer({**options, "error_cb": self._heard}, logger=_QUIET)
        except (KafkaException, ValueError, TypeError) as error:
            raise from_client(error, settings, "making a confluent-kafka producer") from error
        self._poller = threading.Thread(target=self._poll, name="kafka-confluent-poll", daemon=True)
        self._poller.start()
        try:
            self._await_answer()
        except BaseException:
            self.close(0.0)
            raise

    def _await_answer(self) -> None:
        deadline = time.monotonic() + _ANSWER_S
        while time.monotonic() < deadline:
            try:
                if self._producer.cluster_id(0.25):
                    self._broken = None
                    return
            except KafkaException as error:
                logger.debug("confluent-kafka: %s", error)
            if isinstance(self._broken, LoginRefused):
                raise self._broken
        raise LogUnavailable(unreachable(self._settings))

    def _poll(self) -> None:
        while not self._closed:
            try:
                self._producer.poll(_POLL_S)
            except Exception:
                logger.exception("a report of confluent-kafka")

    def _heard(self, error: KafkaError) -> None:
        """An error that is not of one append; most mend themselves."""
        mapped = from_client(error, self._settings, "connecting to Kafka")  # pyright: ignore[reportArgumentType]
        if error.fatal() or isinstance(mapped, LoginRefused):
            self._broken = mapped
        logger.debug("confluent-kafka: %s", error)

    def knows(self, place: TopicPartition) -> bool:
        return place in self._known

    def learn(self, place: TopicPartition) -> bool:
        """Left to itself, librdkafka would go on believing for a minute that a topic which it did not find does not
        exist."""
        topic = self._settings.full(place.topic)
        try:
            found = self._producer.list_topics(topic, timeout=_LEARN_S).topics[topic]
        except KafkaException as error:
            if isinstance(self._broken, LoginRefused):
                raise self._broken from error
            raise LogUnavailable(unreachable(self._settings)) from error
        if found.error is not None and code_of(found.error) not in (UNKNOWN_TOPIC, LEADER_NOT_AVAILABLE):
            doing = f"looking up {place.topic}/{place.partition}"
            raise from_client(found.error, self._settings, doing)
        if place.partition in found.partitions:
            self._known.add(place)
        return place in self._known

    def kind(self, append: Append, before: int | None) -> int:
        """A single record may follow calls of several, so that a mixture of both does not come to a stop at each."""
        return _WHOLE if append.count > 1 or before == _WHOLE else _SINGLE

    def hand(self, append: Append, kind: int, done: Done) -> Callable[[], None]:
        if kind == _WHOLE:
            return self._hand_whole(append, done)
        value, headers, timestamp_ms = append.records[0]

        def report(error: Any, message: Any) -> None:  # on the thread that polls
            if error is not None:
                self._known.discard(append.place)  # whatever it was: a look is cheap
                done(-1, from_client(error, self._settings, str(append), size=append.size))
            elif message.offset() is None or message.offset() < 0:
                done(-1, LogUnavailable(f"{append}: the broker took it before, and no longer knows where"))
            else:
                done(message.offset(), None)

        options: dict[str, Any] = {} if timestamp_ms is None else {"timestamp": timestamp_ms}
        try:
            self._producer.produce(
                self._settings.full(append.place.topic),
                value,
                partition=append.place.partition,
                headers=list(headers),
                on_delivery=report,
                **options,
            )
        except (KafkaException, BufferError, ValueError, TypeError) as error:
            raise from_client(error, self._settings, str(append), size=append.size) from error
        return _nothing

    def _hand_whole(self, append: Append, done: Done) -> Callable[[], None]:
        if self._whole is None:
            self._whole = python_producer(self._settings, control=self._control, linger=False)

        def sent(offset: int, error: Exception | None) -> None:
            done(offset, error)  # pyright: ignore[reportArgumentType]  (always a LogError)

        # As long as librdkafka itself goes on after the owner was told.
        deadline = append.deadline + self._settings.delivery_timeout.total_seconds()
        return self._whole.queue(*append.place, append.records, sent, deadline)

    def push(self) -> None:
        # librdkafka passes its linger over only while a flush is under way: one of no length is over before its
        # threads have looked. Ends as soon as nothing is queued.
        self._producer.flush(_PUSH_S)

    def is_spoiled_by(self, error: LogError) -> bool:
        return self._broken is not None

    def broken(self) -> LogError | None:
        return self._broken

    def close(self, timeout_s: float) -> None:
        if self._whole is not None:
            self._whole.close(0.0)
        self._producer.purge(blocking=False)
        self._producer.flush(timeout_s)
        self._closed = True
        self._poller.join(timeout_s + 2 * _POLL_S)


def _nothing() -> None:
    pass
