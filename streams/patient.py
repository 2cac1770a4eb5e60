"""A log for daemons: an outage is waited for, out loud, instead of ending who meets it.

    call ──► log ──LogUnavailable──► say so at once, and after 10, 20, 40 … s ──► pause ──► the same call again
                                          └── stop() ──► LogUnavailable: the daemon ends
    append ──► sent ──stop()──► still a moment for its acknowledgement ──► LogUnavailable; `close` looks again

Start-up order follows from it: a daemon that is started before its broker begins when the broker is there. What is
submitted is not tried again here, since those who submit keep what they sent (consumers/outbox.py and the rollout's
publisher); `append` is, and that is the guarantee that this module holds: an append whose acknowledgement was lost in
the outage is looked for in the log before it is written again, so that no record of the ledger is there twice.

Example:
    >>> from streams.memory import MemoryLog
    >>> log = PatientLog(MemoryLog(), stop=lambda: False)
    >>> log.create_topic("demo", 1)
    >>> log.append("demo", 0, [NewRecord(b"hello")])
    0
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from typing import TypeVar

from streams.errors import LogClosed, LogUnavailable
from streams.log import DEFAULT_TIMEOUT, Batch, EventLog, Membership, NewRecord, Record, TopicPartition

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 1.0  # between two attempts: at most a dozen in 10 s
_GLANCE_S = 0.05  # how soon a pause, or a wait for an acknowledgement, sees that it is to end
_GRACE_S = 0.7  # after stop(), in all, for what was sent: a daemon has 2 s, and closing takes most of them
_SAY_AGAIN_S, _SAY_AT_LEAST_EVERY_S = 10.0, 60.0
_CLOCKS_MS = 60_000  # by which the log's clock may be behind this process's

_T = TypeVar("_T")


class PatientLog(EventLog):
    """Wraps a log; `stop` is what its daemon is asked to end by, `who` names the daemon in the log lines.

    Lifecycle: as the log's own. When `stop()` is true no call waits any longer, but appends a moment for their
    acknowledgement: it raises LogUnavailable, and `close` then raises it too if something is not acknowledged by then,
    with the number of records. Those of `expendable` topics (gauges) are not worth an error.
    """

    def __init__(
        self,
        log: EventLog,
        stop: Callable[[], bool],
        *,
        who: str = "log",
        expendable: Collection[str] = (),
    ) -> None:
        self._log, self._stop, self._who, self._expendable = log, stop, who, expendable
        self.moves_shares = log.moves_shares
        self._outage = _Outage(who)
        self._grace_ends: float | None = None  # by time.monotonic, once stop() was seen
        # Appends that were not acknowledged when stop() came: their attempts, and how many records they are.
        self._given_up: list[tuple[list[Future[int]], int]] = []

    # -- topics

    def create_topic(self, topic: str, partitions: int, *, kept: bool = False) -> None:
        self._patiently(
            f"topic {topic} to be made", lambda: self._log.create_topic(topic, partitions, kept=kept)
        )

    def check_topic(self, topic: str, partitions: int, *, kept: bool = False) -> None:
        self._patiently(
            f"topic {topic} to be checked", lambda: self._log.check_topic(topic, partitions, kept=kept)
        )

    def topics(self) -> dict[str, int]:
        return self._patiently("the list of topics", self._log.topics)

    def partitions(self, topic: str) -> int:
        return self._patiently(f"the partitions of {topic}", lambda: self._log.partitions(topic))

    # -- writing

    def submit(self, topic: str, partition: int, records: Sequence[NewRecord]) -> Future[int]:
        return self._log.submit(topic, partition, records)

    def append(
        self,
        topic: str,
        partition: int,
        records: Sequence[NewRecord],
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> int:
        """As EventLog.append, but until it is done or stop() is true, however long that takes.

        A failed append can still have landed: the client gave up on an acknowledgement that the broker had sent. It is
        looked for first, among what was written since, and by its bytes, so a fact must not be written down twice
        alike by two callers (each of ours holds an id, a step or a time).
        """
        attempts: list[Future[int]] = []
        try:
            return self._append(TopicPartition(topic, partition), records, attempts)
        except LogUnavailable:
            self._given_up.append((attempts, len(records)))
            raise

    def _append(
        self, place: TopicPartition, records: Sequence[NewRecord], attempts: list[Future[int]]
    ) -> int:
        began_ms = time.time_ns() // 1_000_000
        waiting = _Waiting(self._outage, f"{place.topic}/{place.partition} to take an append")
        offset: int | None = None
        while offset is None:
            try:
                attempts.append(self._log.submit(*place, records))
                offset = self._acknowledged(place, records, attempts[-1], waiting)
            except LogUnavailable as error:
                if self._stop():
                    raise
                waiting.failed(error)
                self._pause(waiting.pause_s)
                self.settle(*place)  # what failed could otherwise land after it was looked for
                offset = self._landed(place, records, began_ms)
                if offset is not None:
                    logger.info("%s: the append to %s/%d had landed after all", self._who, *place)
        waiting.over()
        return offset

    def _acknowledged(
        self, place: TopicPartition, records: Sequence[NewRecord], future: Future[int], waiting: _Waiting
    ) -> int:
        """The log has a deadline of its own for what was submitted; only stop() cuts it short, after a grace."""
        while True:
            try:
                return future.result(_GLANCE_S)
            except FutureTimeout:
                if future.done():  # just now, or with this very error
                    return future.result()
                if self._stop() and self._grace_is_over():
                    raise LogUnavailable(
                        f"{place.topic}/{place.partition}: {len(records)} records are not acknowledged and this "
                        "process is to end; they may still be appended"
                    ) from None
                waiting.still()

    def _grace_is_over(self) -> bool:
        """A healthy log needs a moment, too; one moment for all appends, or a daemon with many would not end."""
        now = time.monotonic()
        if self._grace_ends is None:
            self._grace_ends = now + _GRACE_S
        return now >= self._grace_ends

    def _landed(self, place: TopicPartition, records: Sequence[NewRecord], began_ms: int) -> int | None:
        """Offset of exactly these records, if they were appended since `began_ms`."""
        wanted = [(record.value, tuple(record.headers)) for record in records]
        position = self.offset_at(*place, began_ms - _CLOCKS_MS)
        end = self.end(*place)
        seen: list[Record] = []
        while position < end:
            batch = self.read(*place, position)
            for record in batch.records:
                seen = [*seen, record][-len(wanted) :]
                if [(each.value, each.headers) for each in seen] == wanted:
                    return seen[0].offset
            if batch.next_position <= position:
                break
            position = batch.next_position
        return None

    def flush(self, timeout: timedelta = DEFAULT_TIMEOUT) -> dict[TopicPartition, int]:
        return self._log.flush(timeout)

    # -- reading

    def start(self, topic: str, partition: int) -> int:
        return self._patiently(f"the start of {topic}/{partition}", lambda: self._log.start(topic, partition))

    def end(self, topic: str, partition: int) -> int:
        return self._patiently(f"the end of {topic}/{partition}", lambda: self._log.end(topic, partition))

    def recent_end(self, topic: str, partition: int) -> int:
        return self._patiently(
            f"the end of {topic}/{partition}", lambda: self._log.recent_end(topic, partition)
        )

    def read(
        self,
        topic: str,
        partition: int,
        position: int,
        *,
        max_records: int = 500,
        max_bytes: int = 8 << 20,
    ) -> Batch:
        return self._patiently(
            f"{topic}/{partition} to be read from {position} on",
            lambda: self._log.read(topic, partition, position, max_records=max_records, max_bytes=max_bytes),
        )

    def wait(self, positions: Mapping[TopicPartition, int], timeout: timedelta) -> bool:
        return self._patiently("news of the log", lambda: self._log.wait(positions, timeout))

    def settle(self, topic: str, partition: int) -> None:
        self._patiently(f"{topic}/{partition} to settle", lambda: self._log.settle(topic, partition))

    def offset_at(self, topic: str, partition: int, timestamp_ms: int) -> int:
        return self._patiently(
            f"an offset of {topic}/{partition}", lambda: self._log.offset_at(topic, partition, timestamp_ms)
        )

    # -- groups

    def join(
        self,
        group: str,
        topic: str,
        *,
        replica: int,
        replicas: int,
        member: str = "",
        elastic: bool = False,
    ) -> Membership:
        return self._patiently(
            f"share {replica}/{replicas} of group {group}",
            lambda: self._log.join(
                group, topic, replica=replica, replicas=replicas, member=member, elastic=elastic
            ),
        )

    def commit_hint(self, group: str, positions: Mapping[TopicPartition, int]) -> None:
        """For display alone, so one that an outage swallows is not made up for."""
        try:
            self._log.commit_hint(group, positions)
        except LogUnavailable as error:
            logger.debug("%s: hints of group %s are not kept: %s", self._who, group, error)

    def hints(self, group: str) -> dict[TopicPartition, int]:
        return self._patiently(f"the hints of group {group}", lambda: self._log.hints(group))

    def groups(self, beginning: str = "") -> list[str]:
        return self._patiently("the list of groups", lambda: self._log.groups(beginning))

    # -- retention and life

    def truncate_before(self, topic: str, partition: int, offset: int) -> int:
        return self._patiently(
            f"{topic}/{partition} to be shortened",
            lambda: self._log.truncate_before(topic, partition, offset),
        )

    def close(self) -> None:
        try:
            left = self._log.flush(timedelta(0))
        except LogClosed:
            left = {}
        try:
            self._log.close()
        except LogUnavailable as error:
            if self._lost() or not left or any(place.topic not in self._expendable for place in left):
                raise
            logger.warning("%s: %s", self._who, error)
        finally:
            lost, self._given_up = self._lost(), []
        if lost:
            raise LogUnavailable(
                f"{self._who}: stopped with {lost} records undelivered: they were not acknowledged by the time the log "
                "was closed, and nothing of them may be relied on"
            )

    def _lost(self) -> int:
        """Records of those given up that have not been acknowledged since."""
        return sum(count for attempts, count in self._given_up if not any(map(_has_landed, attempts)))

    def __exit__(self, kind: object, *_: object) -> None:
        """What ended the daemon is the cause; what could not be delivered because of it is only said."""
        try:
            self.close()
        except LogUnavailable as error:
            if kind is None:
                raise
            logger.error("%s", error)

    # -- patience

    def _patiently(self, what: str, call: Callable[[], _T]) -> _T:
        waiting = _Waiting(self._outage, what)
        while True:
            try:
                result = call()
            except LogUnavailable as error:
                if self._stop():
                    raise
                waiting.failed(error)
            else:
                waiting.over()
                return result
            self._pause(waiting.pause_s)

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._stop() and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _GLANCE_S))


def _has_landed(attempt: Future[int]) -> bool:
    return attempt.done() and not attempt.cancelled() and attempt.exception() is None


class _Waiting:
    """One call that has failed, or lasts: how long it has, and what is said of it."""

    def __init__(self, outage: _Outage, what: str) -> None:
        self._outage, self._what = outage, what
        self._began = time.monotonic()
        self._failed = False
        self.pause_s = _FIRST_PAUSE_S / 2

    def failed(self, error: LogUnavailable) -> None:
        self._failed = True
        self.pause_s = min(2 * self.pause_s, _LONGEST_PAUSE_S)
        self._outage.say(self._began, self._what, str(error))

    def still(self) -> None:
        if self._failed or time.monotonic() - self._began > _SAY_AGAIN_S:
            self._failed = True
            self._outage.say(self._began, self._what, "it is not acknowledged")

    def over(self) -> None:
        if self._failed:
            self._outage.over()


class _Outage:
    """What the threads of a daemon say of one outage between them: once at once, then at growing intervals."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._lock = threading.Lock()
        self._since = self._again_at = self._interval_s = 0.0
        self._is_on = False

    def say(self, began: float, what: str, reason: str) -> None:
        now = time.monotonic()
        with self._lock:
            if not self._is_on:
                self._is_on, self._since, self._interval_s = True, began, _SAY_AGAIN_S
                self._again_at = now + _SAY_AGAIN_S
                logger.warning("%s: waits for %s: %s", self._who, what, reason)
            elif now >= self._again_at:
                self._interval_s = min(2 * self._interval_s, _SAY_AT_LEAST_EVERY_S)
                self._again_at = now + self._interval_s
                logger.warning("%s: has waited %.0f s for %s: %s", self._who, now - self._since, what, reason)

    def over(self) -> None:
        with self._lock:
            if self._is_on:
                self._is_on = False
                logger.info(
                    "%s: the log answers again after %.1f s", self._who, time.monotonic() - self._since
                )
