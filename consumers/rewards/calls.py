"""What was submitted and is not settled yet: one submit() and its calls of the function, and the errors that may
end them instead of an outcome. The pool and its slots share these; workers see none of it.
"""

from __future__ import annotations

from concurrent.futures import Future, InvalidStateError
from typing import Any

import msgspec

from consumers.rewards.types import Outcome, RewardInput
from streams.errors import MillstreamError


class PoolError(MillstreamError):
    """The pool cannot score; the message says why."""


class PoolClosed(PoolError):
    """close() came before the outcome. It is no outcome: the sample may be submitted to another pool."""


class Batch:
    """One submit(): its future and the outcomes so far."""

    def __init__(self, size: int) -> None:
        self.future: Future[list[Outcome]] = Future()
        self.future.set_running_or_notify_cancel()  # cancel() would lose the outcomes of the others
        self.outcomes: list[Any] = [None] * size
        self.left = size


class Call:
    """One call of the function: a sample, or a group's samples. `places` are theirs in the batch."""

    def __init__(
        self, number: int, batch: Batch, places: list[int], inputs: list[RewardInput], raw: bytes
    ) -> None:
        self.number, self.batch, self.places, self.raw = number, batch, places, msgspec.Raw(raw)
        self.uids = [each.uid for each in inputs]
        self.strikes = 0  # workers lost while it was in hand
        self.is_done = False
        self.since = 0.0  # monotonic time at which it was sent


def settle(future: Future[Any], value: Any) -> None:
    """Give a future its result or exception, once: close() and a slot may come to it at the same time."""
    try:
        if isinstance(value, BaseException):
            future.set_exception(value)
        else:
            future.set_result(value)
    except InvalidStateError:
        pass  # the other was first
