"""Group commit: one thread turns everything that is queued for a partition into one write and one fdatasync.

    submit ──► queue per partition ──► committer: for each partition in turn, commit(all that is queued)
                                                  │
               the next group gathers while ◄─────┘ this one waits for the disk

There is no linger: an append to an idle log is written at once, and groups grow only as the disk is slower
than the writers. Bytes in flight are bounded; beyond that `submit` blocks, with a deadline.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from streams.embedded.segment import Prepared
from streams.errors import LogClosed, LogUnavailable
from streams.log import TopicPartition

logger = logging.getLogger(__name__)

_GROUP_BYTES = 8 << 20  # of one write


class Append:
    """One queued call. `size` is its bytes on disk."""

    __slots__ = ("future", "prepared", "size")

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.size = prepared.size
        self.future: Future[int] = Future()
        self.future.set_running_or_notify_cancel()  # cancel() could not be kept: it may be on disk already


Commit = Callable[[TopicPartition, Sequence[Append]], None]


class Committer:
    """Owns the thread. `commit` must resolve the future of every append that it is given."""

    def __init__(self, commit: Commit, *, bytes_in_flight: int, one_by_one: bool, timeout_s: float) -> None:
        self._commit = commit
        self._budget = bytes_in_flight
        self._one_by_one = one_by_one
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._queue: dict[TopicPartition, list[Append]] = {}
        self._in_flight = 0
        self._closing = False
        self._thread: threading.Thread | None = None

    def submit(self, place: TopicPartition, append: Append) -> None:
        """Queue it. Raises LogUnavailable when the budget stays spent, LogClosed after close()."""
        with self._changed:
            if self._in_flight and self._in_flight + append.size > self._budget:
                self._await_room(place, append.size)
            if self._closing:
                raise LogClosed("this log was closed; open it again to go on")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="log-committer", daemon=True)
                self._thread.start()
            self._in_flight += append.size
            self._queue.setdefault(place, []).append(append)
            self._changed.notify_all()

    def _await_room(self, place: TopicPartition, size: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not self._closing and self._in_flight and self._in_flight + size > self._budget:
            if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                raise LogUnavailable(
                    f"{place.topic}/{place.partition}: no room for {size} bytes for {self._timeout_s:g} s; "
                    f"{self._in_flight} of {self._budget} bytes in flight wait for the disk"
                )

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    if self._closing:
                        return
                    self._changed.wait()
                queue, self._queue = self._queue, {}
            for place, appends in queue.items():
                for group in self._groups(appends):
                    self._commit_group(place, group)

    def _commit_group(self, place: TopicPartition, group: Sequence[Append]) -> None:
        try:
            self._commit(place, group)
        except BaseException as error:  # a caller must never wait for a future that nobody will resolve
            logger.exception("%s/%d: commit failed", *place)
            for append in group:
                if not append.future.done():
                    append.future.set_exception(error)
        with self._changed:
            self._in_flight -= sum(append.size for append in group)
            self._changed.notify_all()

    def _groups(self, appends: list[Append]) -> list[list[Append]]:
        if self._one_by_one:
            return [[append] for append in appends]
        groups: list[list[Append]] = [[]]
        size = 0
        for append in appends:
            if size and size + append.size > _GROUP_BYTES:
                groups.append([])
                size = 0
            groups[-1].append(append)
            size += append.size
        return groups

    def close(self, timeout_s: float) -> bool:
        """Commit what is queued; what waits longer than the deadline fails with LogUnavailable.

        True when the thread has ended.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is None:
            return True
        thread.join(timeout_s)
        if thread.is_alive():
            with self._changed:
                queue, self._queue = self._queue, {}
            error = LogUnavailable(f"the log was closed, and its disk did not answer for {timeout_s:g} s")
            for appends in queue.values():
                for append in appends:
                    append.future.set_exception(error)
        return not thread.is_alive()
