"""How a call waits for another thread's answer: with a deadline, looking up every 100 ms whether it should stop."""

from __future__ import annotations

import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TypeVar

from streams.errors import LogUnavailable
from streams.kafka.errors import unreachable
from streams.kafka.settings import KafkaSettings

LOOK_S = 0.1  # how often `interrupted` is asked

_T = TypeVar("_T")


class Answer(Future[_T]):
    """What a thread is asked for, and what kept it from answering so far."""

    why = ""


class Patience:
    """The deadline of one call."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._timeout_s = settings.timeout.total_seconds()
        self._deadline = time.monotonic() + self._timeout_s

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._deadline

    def result(self, future: Future[_T], what: str) -> _T:
        """Raises LogUnavailable saying that `what` did not come, and whatever the future holds. Gives the future up."""
        while True:
            try:
                return self.soon(future, LOOK_S)
            except FutureTimeout:
                self.check(future, what)

    def soon(self, future: Future[_T], timeout_s: float) -> _T:
        """The result if it comes within that time and the deadline. Raises concurrent.futures.TimeoutError."""
        return future.result(max(0.0, min(timeout_s, self._deadline - time.monotonic())))

    def check(self, future: Future[_T] | None, what: str) -> None:
        """Raise LogUnavailable when the time is over or the process is to stop; `future` is given up then."""
        interrupted = self._settings.interrupted()
        if not (interrupted or self.is_over):
            return
        if future is not None:
            future.cancel()
        servers = ", ".join(self._settings.servers)
        if interrupted:
            raise LogUnavailable(f"{what}: the wait for {servers} was interrupted")
        why = "; ".join(filter(None, [unreachable(self._settings), getattr(future, "why", "")]))
        raise LogUnavailable(f"{what}: not from {servers} within {self._timeout_s:g} s ({why})")
