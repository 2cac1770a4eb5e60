"""The seam between the lanes of appends (lanes.py) and one connected client (python_producer.py,
confluent_producer.py): the few questions that the lanes ask. This is the whole surface.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Sequence

from streams.errors import LogError, LogUnavailable
from streams.kafka.clients import Sent
from streams.log import NewRecord, TopicPartition


class Append:
    """One call of `send`. `size`: bytes that it takes in a batch, at most."""

    __slots__ = ("count", "deadline", "place", "records", "sent", "since", "size", "told")

    def __init__(
        self, place: TopicPartition, records: Sequence[NewRecord], size: int, sent: Sent, deadline: float
    ) -> None:
        self.place, self.records, self.size, self.sent, self.deadline = place, records, size, sent, deadline
        self.count = len(records)
        self.since = time.monotonic()
        self.told = False  # its owner knows how it ended

    def __str__(self) -> str:
        noun = "record" if self.count == 1 else "records"
        return f"appending {self.count} {noun} to {self.place.topic}/{self.place.partition}"


Done = Callable[[int, LogError | None], None]  # (offset of the first record, None) or (-1, error)


class NotYet(LogUnavailable):
    """A link no longer knows where an append belongs, and took nothing of it: it waits until that was looked up."""


class Link(abc.ABC):
    """One connected client, used until it fails. No method but `learn` and `close` waits for the network."""

    @abc.abstractmethod
    def knows(self, place: TopicPartition) -> bool:
        """Whether an append to it can be handed over."""

    @abc.abstractmethod
    def learn(self, place: TopicPartition) -> bool:
        """Look the topic up, for about a second. False: the broker says that there is no such place. Raises
        LogUnavailable when none answers, LogError."""

    @abc.abstractmethod
    def hand(self, append: Append, kind: int, done: Done) -> Callable[[], None]:
        """Queue it in the client, after everything handed over before. `done` is called once, from any thread, but
        by this one only in or after the returned function, which is called without locks. Raises LogError, NotYet."""

    def kind(self, append: Append, before: int | None) -> int:
        """Appends of two kinds are never in the client at once, in one lane. `before`: the kind of what is in it."""
        return 0

    @abc.abstractmethod
    def push(self) -> None:
        """Send what lingers in the client."""

    @abc.abstractmethod
    def is_spoiled_by(self, error: LogError) -> bool:
        """Whether this client must not be used after such an error of an append."""

    @abc.abstractmethod
    def broken(self) -> LogError | None:
        """Why it will never work again, though no append has failed yet."""

    @abc.abstractmethod
    def close(self, timeout_s: float) -> None:
        """Give up what it still has, without waiting for any broker. Not every `done` need be called."""


def batch_bytes(records: Sequence[NewRecord]) -> int:
    """Bytes that these records take in a batch, at most (its header is not in it)."""
    size = 0
    for value, headers, _ in records:
        size += 40 + len(value)
        for name, content in headers:
            size += 12 + 4 * len(name) + len(content)
    return size
