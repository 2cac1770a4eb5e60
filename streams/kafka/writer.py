"""The writing side of the Kafka log: a budget of bytes, futures, and a report of what is undelivered.

    submit ─► refuse what cannot be stored ─► budget ─► producer of control topics ─┬─► lanes ─► Kafka
                                                    └─► producer of bulk topics ────┘
    Kafka's acknowledgement ─► budget released ─► `acked` ─► the future

Control topics have a producer, and so connections, of their own: they never wait behind bulk.
Deadlines, order and the replacing of failed clients are in streams/kafka/lanes.py.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from datetime import timedelta

from streams.checks import check_records
from streams.errors import LogClosed, LogError, LogUnavailable, RecordTooLarge
from streams.kafka.budget import Budget
from streams.kafka.clients import Producer, new_producer
from streams.kafka.link import batch_bytes
from streams.kafka.options import require
from streams.kafka.settings import KafkaSettings
from streams.kafka.topic_settings import largest_batch
from streams.log import NewRecord, TopicPartition

logger = logging.getLogger(__name__)

Acked = Callable[[TopicPartition, int, int], None]  # (place, offset of the first record, number of records)

_LOOK_S = 0.1  # how often `interrupted` is asked
_SAY_S = 1.0  # between two lines about failed appends
_HEADER = 128  # bytes of a batch that are no record's
_CONTROL_SHARE = 8  # control topics have an eighth of the budget, beside it
_INTERRUPTED_S = 0.5  # for what is on its way when a process that is to stop closes its log


class _Append:
    """One accepted call. It is in `Writer._pending` until its owner knows how it ended."""

    __slots__ = ("count", "future", "is_control", "is_delivered", "place", "size")

    def __init__(self, place: TopicPartition, count: int, size: int, is_control: bool) -> None:
        self.place, self.count, self.size, self.is_control = place, count, size, is_control
        self.is_delivered = False
        self.future: Future[int] = Future()
        self.future.set_running_or_notify_cancel()  # cancel() could not be kept: it may be appended already


class Writer:
    """Lifecycle: made (connects to nothing) → submit, flush, … → close. Safe to use from several threads.

    One writer's appends to a partition keep the order in which they were submitted.
    """

    def __init__(self, settings: KafkaSettings, acked: Acked) -> None:
        """`acked` is called before the future resolves, from any thread. Raises LogError for a missing library."""
        require(settings)
        self._settings, self._acked = settings, acked
        self._timeout_s = settings.delivery_timeout.total_seconds()
        bulk, control = settings.bytes_in_flight, settings.bytes_in_flight // _CONTROL_SHARE
        # Of their own, so that a record of a control topic never waits for bulk to be acknowledged.
        self._budgets = {
            False: Budget(bulk, settings.interrupted),
            True: Budget(control, settings.interrupted),
        }
        self._changed = threading.Condition()
        self._pending: dict[_Append, None] = {}
        self._producers: dict[
            bool, Producer
        ] = {}  # control topics, bulk topics; each made at its first append
        self._watchers = 0  # threads that wait for something to end
        self._closed = False
        self._said_at = 0.0
        self._unsaid: Counter[TopicPartition] = Counter()
        self._resolving = threading.local()

    @property
    def bytes_in_flight(self) -> int:
        """Bytes that were submitted and neither acknowledged nor given up."""
        return sum(budget.used for budget in self._budgets.values())

    def submit(self, topic: str, partition: int, records: Sequence[NewRecord]) -> Future[int]:
        """See EventLog.submit; the topic and partition were checked by the caller.

        Raises TypeError and ValueError for values that no log takes; everything else is in the future.
        """
        deadline = time.monotonic() + self._timeout_s
        place = TopicPartition(topic, partition)
        try:
            check_records(records, self._settings.max_record_bytes)
            _check_timestamps(records)
            append = _Append(place, len(records), self._size(records), self._settings.is_control(topic))
            self._claim(append, deadline)
        except LogError as error:
            return _failed(error)
        with self._changed:
            closed = self._closed
            if not closed:
                self._pending[append] = None
                producer = self._producer(append.is_control)
        if closed:
            self._budgets[append.is_control].release(append.size)
            return _failed(LogClosed("this log was closed; open it again to go on"))
        producer.send(
            topic, partition, records, lambda offset, error: self._end(append, offset, error), deadline
        )
        return append.future

    def flush(self, timeout: timedelta) -> dict[TopicPartition, int]:
        """See EventLog.flush. Ends early when the process is interrupted."""
        with self._changed:
            waited_for = list(self._pending)
        self._wait(waited_for, time.monotonic() + timeout.total_seconds(), 0.0)
        return _by_place(append for append in waited_for if not append.future.done())

    def settle(self, topic: str, partition: int) -> None:
        """As EventLog.settle: a client gives up what it was told to forget after a delivery timeout more."""
        place = TopicPartition(topic, partition)
        timeout_s = 2 * self._timeout_s
        for producer in list(self._producers.values()):
            if not producer.settle(place, timeout_s):
                raise LogUnavailable(
                    f"{topic}/{partition}: an append that was not acknowledged in time may still land; "
                    f"{', '.join(self._settings.servers)} did not say within {timeout_s:.0f} s"
                )

    def close(self, timeout: timedelta) -> dict[TopicPartition, int]:
        """Wait for what is on its way; what is not delivered by then, or fails while this waits, has failed with
        LogUnavailable and is returned: records by partition. Never waits much longer than `timeout`, and only a moment
        when the process is interrupted."""
        with self._changed:
            self._closed = True
            waited_for = list(self._pending)
        for budget in self._budgets.values():
            budget.close()
        deadline = time.monotonic() + timeout.total_seconds()
        self._wait(waited_for, deadline, _INTERRUPTED_S)
        for producer in list(self._producers.values()):
            producer.close(0.0)
        servers = ", ".join(self._settings.servers)
        for append in waited_for:
            if not append.future.done():  # the producer was to see to it
                why = f"the log was closed before {servers} acknowledged it; it may still be appended"
                self._end(append, -1, LogUnavailable(f"{append.place.topic}/{append.place.partition}: {why}"))
        return _by_place(append for append in waited_for if not append.is_delivered)

    # -- inside

    def _size(self, records: Sequence[NewRecord]) -> int:
        size = batch_bytes(records)
        limit = largest_batch(self._settings) - _HEADER
        if size > limit:
            for index, record in enumerate(records):
                if batch_bytes([record]) > limit:
                    raise RecordTooLarge(
                        f"record {index} of the append takes {batch_bytes([record])} bytes with its "
                        f"{len(record.headers)} headers; the topics of this log take {limit} at once "
                        f"(log.max_record_bytes = {self._settings.max_record_bytes})"
                    )
        return size

    def _claim(self, append: _Append, deadline: float) -> None:
        budget = self._budgets[append.is_control]
        if getattr(self._resolving, "now", False):
            # A callback of a future submits: this thread takes the acknowledgements that would make room.
            budget.overdraw(append.size)
            return
        doing = f"appending {append.count} records to {append.place.topic}/{append.place.partition}"
        budget.claim(append.size, deadline, doing)

    def _producer(self, control: bool) -> Producer:
        producer = self._producers.get(control)
        if producer is None:
            producer = self._producers[control] = new_producer(self._settings, control=control)
        return producer

    def _end(self, append: _Append, offset: int, error: Exception | None) -> None:
        with self._changed:
            if append not in self._pending:
                return
            del self._pending[append]
        self._budgets[append.is_control].release(append.size)
        self._resolving.now = True
        try:
            if error is None:
                append.is_delivered = True
                try:
                    self._acked(append.place, offset, append.count)
                finally:
                    append.future.set_result(offset)
            else:
                self._say(append, error)
                append.future.set_exception(error)
        finally:
            self._resolving.now = False
            if self._watchers:
                with self._changed:
                    self._changed.notify_all()

    def _say(self, append: _Append, error: Exception) -> None:
        """No failure goes by in silence, whether or not somebody reads the future."""
        with self._changed:
            self._unsaid[append.place] += append.count
            now = time.monotonic()
            if now - self._said_at < _SAY_S:
                return
            self._said_at, unsaid = now, self._unsaid
            self._unsaid = Counter()
        places = ", ".join(f"{count} of {t}/{p}" for (t, p), count in sorted(unsaid.items()))
        logger.error("%d records were not delivered (%s): %s", sum(unsaid.values()), places, error)

    def _wait(self, appends: Sequence[_Append], deadline: float, interrupted_s: float) -> None:
        """Until all of them have ended, or the time is over: `interrupted_s` after an interruption at the latest."""
        is_interrupted = False
        for producer in list(self._producers.values()):
            producer.flush(0.0)  # what lingers goes out
        with self._changed:
            self._watchers += 1
            try:
                for append in appends:
                    while not append.future.done():
                        now = time.monotonic()
                        if not is_interrupted and self._settings.interrupted():
                            is_interrupted, deadline = True, min(deadline, now + interrupted_s)
                        left = deadline - now
                        if left <= 0:
                            return
                        self._changed.wait(min(left, _LOOK_S))
            finally:
                self._watchers -= 1


def _check_timestamps(records: Sequence[NewRecord]) -> None:
    for index, record in enumerate(records):
        if record.timestamp_ms is not None and record.timestamp_ms < 0:
            raise ValueError(
                f"record {index} of the append: timestamp_ms is {record.timestamp_ms}; Kafka has no time before 1970"
            )


def _by_place(appends: Iterable[_Append]) -> dict[TopicPartition, int]:
    counts: Counter[TopicPartition] = Counter()
    for append in appends:
        counts[append.place] += append.count
    return dict(counts)


def _failed(error: LogError) -> Future[int]:
    future: Future[int] = Future()
    future.set_exception(error)
    return future
