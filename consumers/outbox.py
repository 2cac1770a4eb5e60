"""Appends that were sent and are not yet acknowledged: nothing is forgotten, nothing advances past them.

A full disk or an absent broker is not a failure of a sample (DESIGN §1.7): the append is kept and sent again, the
stage stops taking input meanwhile, and the log line says what it waits for. Errors that a retry cannot mend
(a record over the limit, a closed log) are raised to the stage.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta

from consumers.runner import Stop
from streams.errors import LogError, LogFull, LogUnavailable
from streams.log import EventLog, NewRecord

logger = logging.getLogger(__name__)

OnAck = Callable[[int], None]  # gets the offset of the first record

_NAP_S = 0.05  # of a stage that polls a log which refuses
_SAY_AGAIN_S = 10.0


class Outbox:
    """Pipelined appends to one partition, acknowledged in the order in which they were sent.

    >>> from streams.memory import MemoryLog
    >>> log = MemoryLog(); log.create_topic("t", 1)
    >>> outbox, acked = Outbox(log, "t", 0), []
    >>> outbox.send([NewRecord(b"a")], acked.append)
    >>> outbox.flush(timedelta(seconds=1)); acked
    [0]
    """

    def __init__(self, log: EventLog, topic: str, partition: int, *, retry_s: float = 0.5) -> None:
        self.log, self.topic, self.partition, self.retry_s = log, topic, partition, retry_s
        self._sent: deque[tuple[Future[int], Sequence[NewRecord], OnAck | None]] = deque()
        self._stuck_since: float | None = None
        self._said_at = self._again_at = 0.0

    def __len__(self) -> int:
        """Appends that are not yet acknowledged."""
        return len(self._sent)

    @property
    def stuck(self) -> bool:
        """The log refuses for now; the stage should take no more input."""
        return self._stuck_since is not None

    def send(self, records: Sequence[NewRecord], on_ack: OnAck | None = None) -> None:
        if records:
            self._sent.append((self.log.submit(self.topic, self.partition, records), records, on_ack))

    def poll(self) -> int:
        """Take in what was acknowledged, without waiting; returns how many appends were."""
        taken = 0
        while self._sent and self._sent[0][0].done():
            future, records, on_ack = self._sent[0]
            try:
                offset = future.result()
            except (LogFull, LogUnavailable) as error:
                self._refused(error, records, on_ack)
                break
            self._sent.popleft()
            if self._stuck_since is not None:
                self._stuck_since = None
                self._send_refused()
            taken += 1
            if on_ack is not None:
                on_ack(offset)
        return taken

    def _refused(self, error: Exception, records: Sequence[NewRecord], on_ack: OnAck | None) -> None:
        """The oldest append is tried again every `retry_s`; what was sent after it waits until it is taken."""
        now = time.monotonic()
        if self._stuck_since is None:
            self._stuck_since, self._again_at = now, now + self.retry_s
        if not self._said_at or now - self._said_at > _SAY_AGAIN_S:
            self._said_at = now
            logger.error(
                "%s/%d: cannot append (%s); %d appends wait, trying again every %.1f s",
                self.topic,
                self.partition,
                error,
                len(self._sent),
                self.retry_s,
            )
        if now >= self._again_at:
            self._again_at = now + self.retry_s
            self._sent[0] = (self.log.submit(self.topic, self.partition, records), records, on_ack)
        else:  # the stage has nothing better to do, but it must see soon that it is asked to stop
            time.sleep(_NAP_S)

    def _send_refused(self) -> None:
        """There is room again: everything that was refused meanwhile goes out at once, in its order."""
        for _ in range(len(self._sent)):
            future, records, on_ack = self._sent.popleft()
            if future.done() and isinstance(future.exception(), (LogFull, LogUnavailable)):
                future = self.log.submit(self.topic, self.partition, records)
            self._sent.append((future, records, on_ack))

    @property
    def unacknowledged(self) -> int:
        """Records of those appends, less what was acknowledged since the last poll()."""
        return sum(
            len(records)
            for future, records, _ in self._sent
            if not future.done() or future.exception() is not None
        )

    def flush(self, timeout: timedelta) -> None:
        """Wait until everything is acknowledged. Raises LogUnavailable saying what is not."""
        deadline = time.monotonic() + timeout.total_seconds()
        while self._sent:
            left = deadline - time.monotonic()
            if left <= 0:
                raise LogUnavailable(
                    f"{self.topic}/{self.partition}: {len(self._sent)} appends not acknowledged within "
                    f"{timeout.total_seconds():.0f} s"
                )
            try:
                self._sent[0][0].result(left)
            except (LogFull, LogUnavailable, FutureTimeout):
                pass  # poll() judges it
            self.poll()


def flush_all(outboxes: Iterable[Outbox], timeout: timedelta) -> int:
    """For a stage that ends: wait for all of them, no longer than `timeout` together.

    Returns the number of records that are not acknowledged by then. They are no loss, since they are made again from
    the same inputs, but nobody may take them for delivered.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    undelivered = 0
    for outbox in outboxes:
        try:
            outbox.flush(timedelta(seconds=max(0.0, deadline - time.monotonic())))
        except LogError as error:
            logger.warning("%s; their inputs will be read again", error)
            undelivered += outbox.unacknowledged
    return undelivered


def settled(future: Future[int], what: str, *, stop: Stop, timeout: timedelta) -> int:
    """The result of an append that was submitted. Raises what it holds, and LogUnavailable when the time is over or
    the stage is asked to stop first."""
    began, said = time.monotonic(), False
    while True:
        try:
            return future.result(_NAP_S)
        except FutureTimeout:
            if future.done():  # just now, or with this very error
                return future.result()
        waited = time.monotonic() - began
        if stop() or waited >= timeout.total_seconds():
            raise LogUnavailable(f"{what} is not acknowledged after {waited:.0f} s; it may still be appended")
        if waited > _SAY_AGAIN_S and not said:
            said = True
            logger.warning("%s is not acknowledged after %.0f s", what, waited)


def append_patiently(
    log: EventLog, topic: str, partition: int, records: Sequence[NewRecord], *, who: str, stop: Stop
) -> int:
    """Append durably; a log that has no room or does not answer is waited for, and the log line says so.

    Raises LogFull or LogUnavailable only when the stage is asked to stop meanwhile.
    """
    said_at = 0.0
    while True:
        try:
            return log.append(topic, partition, records)
        except (LogFull, LogUnavailable) as error:
            if stop():
                raise
            if not said_at or time.monotonic() - said_at > _SAY_AGAIN_S:
                said_at = time.monotonic()
                logger.error("%s: paused, %s/%d cannot be written: %s", who, topic, partition, error)
            time.sleep(0.5)
