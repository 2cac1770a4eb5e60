"""Writing through kafka-python.

What lanes.py hands over goes into the client's accumulator, of which the client sends one batch per partition at a
time. Three habits of the client are dealt with here:
  - Its sender may cut a batch between two records of one call. While a call's records are added, this side holds the
    lock that the sender needs for that (`_reentrant`), so one call lands in one batch, contiguous for every writer.
    A batch has room for all that lanes.py hands over at once, so no call is cut by its size either.
  - An error that is not of the connection leaves it in a fatal state, in which it fails every append, of every
    partition, with that error: any failure of an append makes the whole client be replaced.
  - `close(timeout)` raises, and closes nothing, while something is undelivered.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from kafka import KafkaProducer
from kafka.errors import KafkaError, KafkaTimeoutError
from kafka.structs import TopicPartition as Place

from streams.errors import LogError, LogUnavailable
from streams.kafka.connect import connect
from streams.kafka.errors import from_client, unreachable
from streams.kafka.lanes import Lanes
from streams.kafka.link import Append, Done, Link, NotYet
from streams.kafka.options import python_producer_options
from streams.kafka.settings import KafkaSettings
from streams.kafka.topic_settings import largest_batch
from streams.log import TopicPartition

logger = logging.getLogger(__name__)

_REAP_S = 120.0


def python_producer(settings: KafkaSettings, *, control: bool, linger: bool = True) -> Lanes:
    return Lanes(
        settings,
        lambda: PythonLink(settings, control=control),
        window=min(2 * settings.batch_bytes, largest_batch(settings) - 1024),
        linger_s=0.0 if control or not linger else settings.linger.total_seconds(),
        name="control" if control else "bulk",
    )


class PythonLink(Link):
    """A KafkaProducer. Making one waits for a broker, for some seconds at most."""

    def __init__(self, settings: KafkaSettings, *, control: bool) -> None:
        """Raises LogUnavailable when no broker answers, LogError when it does not let us in."""
        self._settings = settings
        try:
            options = python_producer_options(settings, control=control)
            self._producer, network = connect(KafkaProducer, options)
        except KafkaTimeoutError:
            raise LogUnavailable(unreachable(settings)) from None
        except (KafkaError, OSError, LogError) as error:
            raise from_client(error, settings, "connecting to Kafka") from error
        self._network = network
        self._cluster = network.cluster
        self._locks: dict[TopicPartition, Any] = {}

    def knows(self, place: TopicPartition) -> bool:
        partitions = self._cluster.partitions_for_topic(self._settings.full(place.topic))
        return partitions is not None and place.partition in partitions

    def learn(self, place: TopicPartition) -> bool:
        try:
            self._producer.partitions_for(self._settings.full(place.topic))  # has it followed from now on
        except KafkaTimeoutError:
            pass  # absent topic or absent broker
        except Exception as error:
            doing = f"looking up {place.topic}/{place.partition}"
            raise from_client(error, self._settings, doing) from error
        if self.knows(place):
            return True
        if not self._answers():
            raise LogUnavailable(unreachable(self._settings))
        return self.knows(place)

    def _answers(self, timeout_s: float = 1.0) -> bool:
        """Whether a broker answers a question for its metadata."""
        asked = self._cluster.request_update()
        deadline = time.monotonic() + timeout_s
        while not asked.is_done and time.monotonic() < deadline:
            time.sleep(0.01)
        # An answer that the topic does not exist is an answer, too.
        return asked.is_done and (not asked.failed() or getattr(asked.exception, "errno", None) is not None)

    def hand(self, append: Append, kind: int, done: Done) -> Callable[[], None]:
        if not self.knows(
            append.place
        ):  # `send` would wait for it, and with it everybody who holds this lock
            raise NotYet(f"{append}: the client lost sight of the topic")
        topic, partition = self._settings.full(append.place.topic), append.place.partition
        if append.place not in self._locks:
            self._locks[append.place] = _reentrant(self._producer, topic, partition)
        futures: list[Any] = []
        try:
            with self._locks[append.place] or nullcontext():
                for value, headers, timestamp_ms in append.records:
                    futures.append(
                        self._producer.send(
                            topic,
                            value,
                            headers=list(headers),
                            partition=partition,
                            timestamp_ms=timestamp_ms,
                        )
                    )
        except Exception as error:
            raise from_client(error, self._settings, str(append), size=append.size) from error
        last, count = futures[-1], append.count

        def acknowledged(metadata: Any) -> None:
            first = metadata.offset if count == 1 else futures[0].value.offset
            if first < 0:
                done(-1, LogUnavailable(f"{append}: the broker took it before, and no longer knows where"))
                return
            if metadata.offset - first != count - 1:
                logger.warning("%s: more than a batch takes, so it is not contiguous", append)
            done(first, None)

        def failed(error: BaseException) -> None:
            done(-1, self._error(append, futures, error))

        def listen() -> None:
            # The last record of a batch is told last; and no batch is acknowledged after one that failed.
            last.add_callback(acknowledged)
            last.add_errback(failed)

        return listen

    def _error(self, append: Append, futures: list[Any], error: BaseException) -> LogError:
        if (
            type(error) is KafkaError
        ):  # "another record of the batch", "invalid transition": one that says nothing
            told = [future.exception for future in futures if future.exception is not None]
            error = next((each for each in told if type(each) is not KafkaError), error)
        if type(error) is KafkaError:
            return LogUnavailable(f"{append}: not appended, through no fault of its own ({error})")
        return from_client(error, self._settings, str(append), size=append.size)

    def push(self) -> None:
        pass  # nothing lingers in it

    def is_spoiled_by(self, error: LogError) -> bool:
        return True

    def broken(self) -> LogError | None:
        refused = self._network.refused
        return None if refused is None else from_client(refused, self._settings, "connecting to Kafka")

    def close(self, timeout_s: float) -> None:
        sender = getattr(self._producer, "_sender", None)
        if sender is None:
            _close(self._producer)
            return
        sender.force_close()  # the only way to have undelivered records failed at once
        sender.join(timeout_s)
        if not sender.is_alive():
            _close(self._producer)
            return

        def reap() -> None:
            sender.join(_REAP_S)
            _close(self._producer)

        threading.Thread(target=reap, name="kafka-producer-end", daemon=True).start()


def _close(producer: KafkaProducer) -> None:
    try:
        producer.close(timeout=0)
    except KafkaError as error:
        logger.debug("closing a KafkaProducer: %s", error)


def _reentrant(producer: KafkaProducer, topic: str, partition: int) -> Any:
    """The lock that the client's sender takes to cut a batch of that partition, made one that `send` can take again
    while we hold it. None where this version of the client has no such lock.

    A private detail of kafka-python, used here and nowhere else: RecordAccumulator._tp_locks holds a plain lock per
    partition, made when it is first needed; the key None has the lock under which entries are added.
    """
    locks = getattr(getattr(producer, "_accumulator", None), "_tp_locks", None)
    if not isinstance(locks, dict) or None not in locks:
        return None
    place = Place(topic, partition)
    with locks[None]:
        lock = locks.setdefault(place, threading.RLock())
    return lock if isinstance(lock, type(threading.RLock())) else None
