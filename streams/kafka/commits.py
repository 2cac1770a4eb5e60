"""Offsets that a member commits for its group: queued by any thread, sent and answered on the member's own."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from typing import Any

from kafka.structs import OffsetAndMetadata
from kafka.structs import TopicPartition as Place

Offsets = Mapping[Place, OffsetAndMetadata]
Committed = Callable[[Offsets, Exception | None], None]

_Consumer = Any  # a KafkaConsumer; the stubs that pyright brings are of an older one


class Commits:
    """`committed` of each is called once: with None, or with what went wrong."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queued: list[tuple[Offsets, Committed]] = []
        self._sent: dict[int, tuple[Offsets, Committed]] = {}
        self._numbers = itertools.count()

    def add(self, offsets: Offsets, committed: Committed) -> None:
        with self._lock:
            self._queued.append((offsets, committed))

    @property
    def are_unanswered(self) -> bool:
        return bool(self._sent)

    def send(self, consumer: _Consumer) -> None:
        """Without waiting; the answers come in the consumer's next polls."""
        with self._lock:
            queued, self._queued = self._queued, []
        numbered = {next(self._numbers): commit for commit in queued}
        self._sent.update(numbered)
        for number, (offsets, _) in numbered.items():
            consumer.commit_async(dict(offsets), self._answer_to(number))

    def finish(self, consumer: _Consumer, timeout_s: float) -> None:
        """Commit all that has no answer yet, and wait for it, for that time each."""
        with self._lock:
            left, self._queued = [*self._sent.values(), *self._queued], []
        self._sent = {}
        for offsets, committed in left:
            try:
                consumer.commit(dict(offsets), timeout_ms=int(timeout_s * 1000))
            except Exception as error:
                committed(offsets, error)
            else:
                committed(offsets, None)

    def _answer_to(self, number: int) -> Callable[[Any, Any], None]:
        def answer(_: Any, outcome: Any) -> None:
            commit = self._sent.pop(number, None)
            if commit is not None:
                offsets, committed = commit
                committed(offsets, outcome if isinstance(outcome, Exception) else None)

        return answer
