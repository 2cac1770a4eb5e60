"""The seam between the log and a client library: two small interfaces, and the one place that chooses.

A `Producer` and a `Consumer` are used by one thread each (the log sees to that); both speak of the log's own topic
names (`KafkaSettings.full` and `bare` are applied inside). This is the whole surface: groups and administration
always go through kafka-python (streams/kafka/groups.py, admin.py), since librdkafka's Python binding has no
custom assignors.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from streams.kafka.settings import KafkaSettings
from streams.log import NewRecord, Record, TopicPartition

Sent = Callable[[int, Exception | None], None]  # (offset of the first record, None) or (-1, what went wrong)

EARLIEST, LATEST = -2, -1


class Producer(abc.ABC):
    """Idempotent, acks=all, in order per partition. No memory bound of its own: streams/kafka/writer.py has it."""

    @abc.abstractmethod
    def send(
        self, topic: str, partition: int, records: Sequence[NewRecord], sent: Sent, deadline: float
    ) -> None:
        """Queue one append, never blocking for the network. `sent` is called once, from any thread, when all of
        its records are acknowledged or one of them has failed for good (a LogError of ours); with LogUnavailable
        once `deadline` (of time.monotonic) has passed."""

    @abc.abstractmethod
    def flush(self, timeout_s: float) -> None:
        """Send what lingers and wait until nothing is queued, or the time is over (then it just returns)."""

    @abc.abstractmethod
    def settle(self, place: TopicPartition, timeout_s: float) -> bool:
        """Wait until no append to this place whose owner was told LogUnavailable can still land. False: it may."""

    @abc.abstractmethod
    def close(self, timeout_s: float) -> None:
        """As flush; then whatever is left has failed, and every `sent` has been called. Twice is harmless."""


class Fetched(NamedTuple):
    """What one poll brought of one partition. `records` may be empty when only markers were passed over."""

    place: TopicPartition
    records: list[Record]
    next_position: int
    high_watermark: int  # end of the partition as the broker said it, open transactions included; -1: unknown


class Consumer(abc.ABC):
    """Reads partitions from given positions; read_committed, no group, no commits, no resets of its own."""

    @abc.abstractmethod
    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        """Read exactly these partitions from now on; one whose position is where it was keeps what was fetched."""

    @abc.abstractmethod
    def pause(self, places: Sequence[TopicPartition]) -> None:
        """Fetch no more of them until resume()."""

    @abc.abstractmethod
    def resume(self, places: Sequence[TopicPartition]) -> None: ...

    @abc.abstractmethod
    def poll(self, timeout_s: float) -> list[Fetched]:
        """What has come; waits for at most `timeout_s` for the first of it.

        Raises OffsetOutOfRange (with start = end = -1: the caller asks for them) and CorruptRecord for a partition;
        the others are not harmed. An absent broker is no error: nothing comes.
        """

    @abc.abstractmethod
    def offsets(
        self, places: Sequence[TopicPartition], at: Literal[-2, -1] | int, timeout_s: float
    ) -> dict[TopicPartition, int]:
        """EARLIEST: first kept offset; LATEST: end (of what is committed); else of the first record stamped ≥ `at`
        milliseconds, the end where there is none. Raises UnknownTopic, LogUnavailable."""

    @abc.abstractmethod
    def close(self) -> None:
        """Twice is harmless."""


def new_producer(settings: KafkaSettings, *, control: bool) -> Producer:
    """A producer of the chosen client; a control one never lingers. Raises LogError naming a missing extra."""
    if settings.client == "confluent":
        from streams.kafka.confluent_producer import confluent_producer

        return confluent_producer(settings, control=control)
    from streams.kafka.python_producer import python_producer

    return python_producer(settings, control=control)


def new_consumer(settings: KafkaSettings) -> Consumer:
    """A consumer of the chosen client, in this process or (`ingest = "process"`) in a child of it."""
    if settings.ingest == "process":
        from streams.kafka.process_consumer import ProcessConsumer

        return ProcessConsumer(settings)
    if settings.client == "confluent":
        from streams.kafka.confluent_consumer import ConfluentConsumer

        return ConfluentConsumer(settings)
    from streams.kafka.python_consumer import PythonConsumer

    return PythonConsumer(settings)
