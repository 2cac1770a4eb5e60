"""Appends that were sent and are not yet acknowledged: nothing is forgotten, nothing advances past them.

A full disk or an absent broker is not a failure of a sample (DESIGN §1.7): the append is kept and sent again, the
stage stops taking input meanwhile, and the log line says what it waits for. Errors that a retry cannot mend
(a record over the limit, a closed log) are raised to the stage.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta

from streams.errors import LogFull, LogUnavailable
from streams.log import EventLog, NewRecord

logger = logging.getLogger(__name__)

OnAck = Callable[[int], None]  # gets the offset of the first record


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
                self._send_again(error, records, on_ack)
                break
            self._sent.popleft()
            self._stuck_since = None
            taken += 1
            if on_ack is not None:
                on_ack(offset)
        return taken

    def _send_again(self, error: Exception, records: Sequence[NewRecord], on_ack: OnAck | None) -> None:
        now = time.monotonic()
        if self._stuck_since is None or now - self._stuck_since > 10:
            logger.error(
                "%s/%d: cannot append (%s); %d appends wait, trying again every %.1f s",
                self.topic,
                self.partition,
                error,
                len(self._sent),
                self.retry_s,
            )
        self._stuck_since = self._stuck_since or now
        time.sleep(self.retry_s)  # the stage has nothing better to do: the log refuses all its output
        self._sent[0] = (self.log.submit(self.topic, self.partition, records), records, on_ack)

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
            except (LogFull, LogUnavailable, TimeoutError):
                pass  # poll() judges it
            self.poll()
