"""The reading seam on librdkafka (confluent-kafka). Used by one thread; the library fetches on threads of its own.

What is held against the library's habits (2.16):
  - Pausing throws away what was fetched of a partition and not yet handed out, so it is fetched twice: the queue is
    kept short.
  - A topic that is new to it is fetched from up to a second later, unless it is asked about the topic first.
  - `consume(n, timeout)` waits out its time for all n: one message is waited for, the rest is taken as it is there.
  - Errors of a partition come as messages. After "out of range" and after a damaged batch it would go on by itself,
    beyond what was lost: the partition is let go of before anything else is handed out of it.
  - `position` goes on past transaction markers and aborted records; nothing is said of that otherwise.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from confluent_kafka import Consumer as Client
from confluent_kafka import KafkaError, KafkaException, Message
from confluent_kafka import TopicPartition as KafkaPlace

from streams.errors import CorruptRecord, LogError, OffsetOutOfRange
from streams.kafka.clients import EARLIEST, LATEST, Consumer, Fetched
from streams.kafka.errors import from_client
from streams.kafka.options import confluent_consumer_options
from streams.kafka.settings import KafkaSettings
from streams.log import Record, TopicPartition

_QUEUED_KBYTES = 8 << 10  # over all partitions: fetched ahead of poll()
_MESSAGES = 20_000  # of one poll
_LEARN_S = 0.5
_said = logging.getLogger(f"{__name__}.librdkafka")  # its own words, as far as they are wanted

_RANGE = {KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._LOG_TRUNCATION}
_DAMAGE = {KafkaError._BAD_MSG, KafkaError.INVALID_MSG, KafkaError._BAD_COMPRESSION}
_HOPELESS = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError._AUTHENTICATION,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError._FATAL,
}


class ConfluentConsumer(Consumer):
    """Made without a connection; those come by themselves. Raises LogError for what waiting will not mend."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._positions: dict[TopicPartition, int] = {}  # next offsets, as this object's caller knows them
        self._paused: set[TopicPartition] = set()
        self._known: set[str] = set()  # topics
        self._errors: list[LogError] = []  # to be raised by the next polls
        options = confluent_consumer_options(settings)
        options["queued.max.messages.kbytes"] = min(_QUEUED_KBYTES, options["queued.max.messages.kbytes"])
        options["error_cb"] = self._noticed
        try:
            self._client = Client(options, logger=_said)
        except KafkaException as error:
            raise from_client(error, settings, "making a consumer") from error

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        """A place that was not wanted before, or was elsewhere, is not paused."""
        moved = [place for place, position in positions.items() if self._positions.get(place) != position]
        gone = [p for p in self._positions if p not in positions] + [p for p in moved if p in self._positions]
        if gone:
            self._client.incremental_unassign([self._there(place) for place in gone])
        if moved:
            self._learn({place.topic for place in moved})
            self._client.incremental_assign([self._there(place, positions[place]) for place in moved])
        self._paused = {place for place in self._paused if place in positions}.difference(moved)
        self._positions = dict(positions)
        self._errors = [error for error in self._errors if _place_of(error) not in moved]

    def pause(self, places: Sequence[TopicPartition]) -> None:
        known = [place for place in places if place in self._positions]
        self._client.pause([self._there(place) for place in known])
        self._paused.update(known)

    def resume(self, places: Sequence[TopicPartition]) -> None:
        known = [place for place in places if place in self._positions]
        self._client.resume([self._there(place) for place in known])
        self._paused.difference_update(known)

    def poll(self, timeout_s: float) -> list[Fetched]:
        if self._errors:
            raise self._errors.pop(0)
        first = self._client.poll(timeout_s)
        messages = [] if first is None else [first, *self._client.consume(_MESSAGES, timeout=0)]
        fetched = self._fetched(messages)
        if not fetched and self._errors:
            raise self._errors.pop(0)
        return fetched

    def offsets(
        self, places: Sequence[TopicPartition], at: Literal[-2, -1] | int, timeout_s: float
    ) -> dict[TopicPartition, int]:
        wanted = at if at in (EARLIEST, LATEST) else max(0, at)
        found = self._ask(places, wanted, timeout_s)
        late = [place for place, offset in found.items() if offset < 0]  # nothing is stamped so late
        return found | self._ask(late, LATEST, timeout_s) if late else found

    def close(self) -> None:
        self._client.close()

    def _learn(self, topics: set[str]) -> None:
        """The leaders of a topic that is new to the client are looked for by a timer, within a second: ask now."""
        deadline = time.monotonic() + _LEARN_S
        for topic in topics - self._known:
            name = self._settings.full(topic)
            while topic not in self._known and (left := deadline - time.monotonic()) > 0:
                try:
                    if self._client.list_topics(name, timeout=left).topics[name].error is None:
                        self._known.add(topic)
                    else:  # the broker has not heard of it yet
                        time.sleep(0.02)
                except KafkaException:  # the timer finds it when a broker is there
                    return

    def _there(self, place: TopicPartition, offset: int | None = None) -> KafkaPlace:
        name = self._settings.full(place.topic)
        return (
            KafkaPlace(name, place.partition) if offset is None else KafkaPlace(name, place.partition, offset)
        )

    def _here(self, topic: str, partition: int) -> TopicPartition:
        return TopicPartition(self._settings.bare(topic) or topic, partition)

    def _fetched(self, messages: Sequence[Message]) -> list[Fetched]:
        records: dict[TopicPartition, list[Record]] = {}
        for message in messages:
            error = message.error()
            if error is not None:
                self._complain(message, error)
                continue
            place = self._here(message.topic() or "", message.partition() or 0)
            if place in self._positions:
                records.setdefault(place, []).append(_record(place, message))
        return [*self._reached(records)]

    def _reached(self, records: Mapping[TopicPartition, list[Record]]) -> list[Fetched]:
        """Positions also move without records; they are looked at when nothing else has come."""
        asked = list(records) or [place for place in self._positions if place not in self._paused]
        asked = [place for place in asked if place in self._positions]
        fetched = [
            Fetched(place, came, came[-1].offset + 1, -1)
            for place, came in records.items()
            if place not in self._positions  # an error came after them
        ]
        for there in self._client.position([self._there(place) for place in asked]) if asked else ():
            place = self._here(there.topic, there.partition)
            came = records.get(place, [])
            known = came[-1].offset + 1 if came else self._positions[place]
            position = max(known, there.offset)  # negative while nothing has come
            if came or position > known:
                self._positions[place] = position
                fetched.append(Fetched(place, came, position, self._high(there)))
        return fetched

    def _high(self, there: KafkaPlace) -> int:
        known = self._client.get_watermark_offsets(KafkaPlace(there.topic, there.partition), cached=True)
        return known[1] if known else -1

    def _complain(self, message: Message, error: KafkaError) -> None:
        """Keep the error of a partition, and let go of that; what mends itself is passed over."""
        code = error.code()
        topic, partition = message.topic(), message.partition()
        if topic is None or partition is None or partition < 0:
            self._noticed(error)
            return
        place = self._here(topic, partition)
        position = self._positions.get(place)
        if position is None:
            return
        if code in _RANGE:
            self._errors.append(OffsetOutOfRange(*place, position, -1, -1))
        elif code in _DAMAGE:
            self._errors.append(CorruptRecord(*place, message.offset() or 0, -1, error.str()))
        elif code in _HOPELESS:
            self._errors.append(self._explained(error, f"reading {place.topic}/{place.partition}"))
        else:
            return
        self.assign({other: at for other, at in self._positions.items() if other != place})

    def _ask(self, places: Sequence[TopicPartition], at: int, timeout_s: float) -> dict[TopicPartition, int]:
        doing = (
            f"asking for offsets of {', '.join(f'{topic}/{partition}' for topic, partition in places[:8])}"
        )
        try:
            found = self._client.offsets_for_times(
                [self._there(place, at) for place in places], timeout=timeout_s
            )
        except KafkaException as failure:
            self._client.poll(0)  # so that _noticed hears of a refused login
            raise (
                self._errors.pop(0) if self._errors else from_client(failure, self._settings, doing)
            ) from failure
        for there in found:
            if there.error is not None:
                raise self._explained(there.error, doing)
        return {self._here(there.topic, there.partition): there.offset for there in found}

    def _explained(self, error: KafkaError, doing: str) -> LogError:
        return from_client(KafkaException(error), self._settings, doing)

    def _noticed(self, error: KafkaError) -> None:
        """Called within poll() and consume(): errors that are no partition's."""
        if error.code() in _HOPELESS:
            self._errors.append(self._explained(error, "reading"))


def _record(place: TopicPartition, message: Message) -> Record:
    topic, partition = place
    headers: Any = message.headers()
    return Record(
        topic,
        partition,
        message.offset() or 0,
        message.timestamp()[1],
        tuple((name, content or b"") for name, content in headers) if headers else (),
        message.value() or b"",
    )


def _place_of(error: LogError) -> TopicPartition | None:
    is_of_one = isinstance(error, (OffsetOutOfRange, CorruptRecord))
    return TopicPartition(error.topic, error.partition) if is_of_one else None
