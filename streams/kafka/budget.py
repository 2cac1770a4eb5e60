"""How many bytes may be on their way at once. The clients have no such limit: one queued 1 GB in two seconds against
a stopped broker."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from streams.errors import LogClosed, LogUnavailable

logger = logging.getLogger(__name__)

_LOOK_S = 0.1  # how often `interrupted` is asked
_SAY_S = 10.0  # a wait of that length is worth a line in the log


class Budget:
    """First come, first served: a large claim is not passed by small ones for ever.

    A claim larger than the whole budget is let in alone. Once spent, the budget stays closed until a quarter of it is
    free again: waking a thread for each record that is acknowledged costs more than sending it.
    """

    def __init__(self, total: int, interrupted: Callable[[], bool]) -> None:
        self._total, self._interrupted = total, interrupted
        self._changed = threading.Condition()
        self._used = 0
        self._is_open = True
        self._line: deque[object] = deque()
        self._closed = False

    @property
    def used(self) -> int:
        """Bytes claimed and not released."""
        return self._used

    def claim(self, size: int, deadline: float, doing: str) -> None:
        """Wait for room, until `deadline` (of time.monotonic). Raises LogUnavailable saying what was waited for,
        LogClosed after close()."""
        with self._changed:
            if self._closed or self._line or not self._fits(size):
                self._wait(size, deadline, doing)
            self._used += size

    def overdraw(self, size: int) -> None:
        """Claim without waiting: for the thread on whose work the release of others depends."""
        with self._changed:
            self._used += size

    def release(self, size: int) -> None:
        with self._changed:
            self._used -= size
            if not self._is_open and self._used <= self._total - self._total // 4:
                self._is_open = True
                self._changed.notify_all()
            elif self._line and not self._used:
                self._changed.notify_all()

    def close(self) -> None:
        """Everybody who waits, and whoever comes, gets LogClosed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _fits(self, size: int) -> bool:
        if not self._used or (self._is_open and self._used + size <= self._total):
            return True
        self._is_open = False
        return False

    def _wait(self, size: int, deadline: float, doing: str) -> None:
        me, since, said = object(), time.monotonic(), False
        self._line.append(me)
        try:
            while not self._closed and not (self._line[0] is me and self._fits(size)):
                now = time.monotonic()
                if self._interrupted():
                    raise LogUnavailable(f"{doing}: {self._obstacle(size)}; the wait was interrupted")
                if now >= deadline:
                    raise LogUnavailable(
                        f"{doing}: {self._obstacle(size)} for {now - since:.1f} s; nothing was sent"
                    )
                if not said and now - since >= _SAY_S:
                    said = True
                    logger.warning("%s: %s for %.0f s", doing, self._obstacle(size), now - since)
                self._changed.wait(min(_LOOK_S, deadline - now))
            if self._closed:
                raise LogClosed(f"{doing}: the log was closed; open it again to go on")
        finally:
            self._line.remove(me)
            self._changed.notify_all()

    def _obstacle(self, size: int) -> str:
        return (
            f"no room for {size} bytes, since {self._used} of {self._total} (log.kafka.bytes_in_flight) wait to be "
            "acknowledged by Kafka"
        )
