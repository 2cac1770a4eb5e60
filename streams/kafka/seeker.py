"""Reads from anywhere: a thread with a consumer of its own that fetches a chunk for whoever asks, and a small cache.

    fetch(place, position) ──► jobs ──► assign · poll ──► chunk ──► futures, cache ──► cached(place, position)

Readers by reference mostly go up with gaps, and readers that walk back do so in windows: most of what they want next
lies in a chunk that is there already.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

from streams.errors import CorruptRecord, LogClosed, LogError, LogUnavailable, OffsetOutOfRange
from streams.kafka.clients import Consumer, Fetched, new_consumer
from streams.kafka.feed import RECORD_OVERHEAD, cut, record_bytes
from streams.kafka.patience import Answer
from streams.kafka.settings import KafkaSettings
from streams.log import Batch, Record, TopicPartition

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20  # of one fetch, unless its first batch is larger
_CACHED_BYTES = 16 << 20
_MAX_WAIT = timedelta(
    milliseconds=10
)  # only what should be there is asked for, and the next job waits behind it
_POLL_S = 0.05
_TRIES = 8  # polls for one job before the others at its place have their turn
_PAUSE_S = 0.1
_REBUILD_S = 15.0  # of jobs without any answer: the connection is made anew
_NEVER = float("-inf")

_offset = attrgetter("offset")


class Chunk(NamedTuple):
    """All of a partition in [begin, next_position) that a reader can see."""

    begin: int
    next_position: int
    records: list[Record]
    totals: list[int]  # bytes of the records up to and with each

    @property
    def memory(self) -> int:
        return (self.totals[-1] if self.totals else 0) + len(self.records) * RECORD_OVERHEAD

    def read(self, position: int, max_records: int, max_bytes: int) -> Batch:
        first = bisect_left(self.records, position, key=_offset)
        if first == len(self.records):
            return Batch([], self.next_position)
        stop = cut(self.records, self.totals, first, max_records, max_bytes)
        taken = self.records[first:stop]
        return Batch(taken, self.next_position if stop == len(self.records) else taken[-1].offset + 1)


@dataclass
class _Job:
    place: TopicPartition
    position: int
    future: Answer[Chunk]
    tries: int = 0


class Seeker:
    """Futures fail with OffsetOutOfRange, CorruptRecord (its offset: where the damaged batch begins), LogError."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = replace(settings, prefetch_bytes=2 * CHUNK_BYTES, fetch_max_wait=_MAX_WAIT)
        self._asked = threading.Condition()
        self._jobs: list[_Job] = []
        self._cache: OrderedDict[tuple[TopicPartition, int], Chunk] = OrderedDict()  # oldest use first
        self._begins: dict[TopicPartition, list[int]] = {}  # begins of the cached chunks, sorted
        self._cached_bytes = 0
        self._at: dict[TopicPartition, int] = {}  # what the consumer reads, and its next offset
        self._consumer: Consumer | None = None
        self._answered_at = _NEVER
        self._thread: threading.Thread | None = None
        self._closed = False

    def cached(self, place: TopicPartition, position: int) -> Chunk | None:
        with self._asked:
            begins = self._begins.get(place)
            if not begins:
                return None
            at = bisect_left(begins, position + 1) - 1
            if at < 0:
                return None
            chunk = self._cache[place, begins[at]]
            if position >= chunk.next_position:
                return None
            self._cache.move_to_end((place, chunk.begin))
            return chunk

    def fetch(self, place: TopicPartition, position: int) -> Answer[Chunk]:
        """A chunk with `position` in it. Cancel the future to give it up."""
        future: Answer[Chunk] = Answer()
        with self._asked:
            if self._closed:
                raise _closed()
            self._jobs.append(_Job(place, position, future))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="millstream-kafka-seeker", daemon=True)
                self._thread.start()
            self._asked.notify_all()
        return future

    def forget(self, place: TopicPartition, is_gone: Callable[[Chunk], bool]) -> None:
        """Drop the cached chunks of which `is_gone` is true."""
        with self._asked:
            for begin in list(self._begins.get(place, ())):
                if is_gone(self._cache[place, begin]):
                    self._drop(place, begin)

    def close(self) -> None:
        """The thread ends soon; what was asked fails with LogClosed."""
        with self._asked:
            self._closed = True
            self._asked.notify_all()

    def join(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    # -- the thread

    def _run(self) -> None:
        try:
            while (jobs := self._next()) is not None:
                self._serve(jobs)
        finally:
            with self._asked:
                self._closed = True
                left, self._jobs = self._jobs, []
            for job in left:
                _fail(job, _closed())
            self._drop_consumer()

    def _next(self) -> dict[TopicPartition, _Job] | None:
        """The first job of each place, waiting for one; None when closed."""
        with self._asked:
            while not self._closed:
                self._jobs = [job for job in self._jobs if not job.future.cancelled()]
                if self._jobs:
                    if not self._at:
                        self._answered_at = time.monotonic()  # the silence so far was ours
                    jobs: dict[TopicPartition, _Job] = {}
                    for job in self._jobs:
                        jobs.setdefault(job.place, job)
                    return jobs
                if self._at:
                    break  # nobody wants anything: nothing is to be fetched ahead
                self._asked.wait()
            return None if self._closed else {}

    def _serve(self, jobs: dict[TopicPartition, _Job]) -> None:
        try:
            if self._consumer is None:
                self._consumer = new_consumer(self._settings)
                self._answered_at = time.monotonic()
            self._assign(self._consumer, {place: job.position for place, job in jobs.items()})
            if not jobs:
                return
            fetched = self._consumer.poll(_POLL_S)
        except (OffsetOutOfRange, CorruptRecord) as error:
            self._answered_at = time.monotonic()
            place = TopicPartition(error.topic, error.partition)
            self._at.pop(place, None)
            if place in jobs:
                self._finish(jobs[place], error)
        except LogUnavailable as error:
            for job in jobs.values():
                job.future.why = str(error)
            self._rebuild_if_silent()
            time.sleep(_PAUSE_S)
        except Exception as error:
            self._drop_consumer()
            reason = error if isinstance(error, LogError) else LogError(f"reading failed: {error!r}")
            for job in jobs.values():
                self._finish(job, reason)
        else:
            self._take(fetched, jobs)

    def _assign(self, consumer: Consumer, positions: dict[TopicPartition, int]) -> None:
        """A place that the consumer reads on from is not interrupted."""
        if positions != self._at:
            consumer.assign(positions)
            self._at = positions

    def _take(self, fetched: list[Fetched], jobs: dict[TopicPartition, _Job]) -> None:
        if not fetched:
            self._rebuild_if_silent()
            self._let_others_in(jobs)
            return
        self._answered_at = time.monotonic()
        for place, records, next_position, _ in fetched:
            begin = self._at.get(place)
            if begin is None or next_position <= begin:
                continue
            self._at[place] = next_position
            chunk = Chunk(begin, next_position, records, list(accumulate(map(record_bytes, records))))
            with self._asked:
                self._keep(place, chunk)
                done = [
                    job for job in self._jobs if job.place == place and begin <= job.position < next_position
                ]
                self._jobs = [job for job in self._jobs if job not in done]
            for job in done:
                if job.future.set_running_or_notify_cancel():
                    job.future.set_result(chunk)

    def _let_others_in(self, jobs: dict[TopicPartition, _Job]) -> None:
        """A job that gets nothing may wait for something that does not come: other positions of its place are next."""
        for job in jobs.values():
            job.tries += 1
            if job.tries % _TRIES == 0:
                with self._asked:
                    self._jobs = [other for other in self._jobs if other is not job] + [job]

    def _finish(self, job: _Job, error: LogError) -> None:
        with self._asked:
            self._jobs = [other for other in self._jobs if other is not job]
        _fail(job, error)

    def _rebuild_if_silent(self) -> None:
        if time.monotonic() - self._answered_at > _REBUILD_S:
            self._drop_consumer()

    def _drop_consumer(self) -> None:
        consumer, self._consumer = self._consumer, None
        self._at = {}
        if consumer is not None:
            try:
                consumer.close()
            except Exception as error:
                logger.debug("closing a consumer: %r", error)

    # -- the cache (its lock is held)

    def _keep(self, place: TopicPartition, chunk: Chunk) -> None:
        if (place, chunk.begin) in self._cache:
            self._drop(place, chunk.begin)
        self._cache[place, chunk.begin] = chunk
        begins = self._begins.setdefault(place, [])
        begins.insert(bisect_left(begins, chunk.begin), chunk.begin)
        self._cached_bytes += chunk.memory
        while self._cached_bytes > _CACHED_BYTES and len(self._cache) > 1:
            self._drop(*next(iter(self._cache)))

    def _drop(self, place: TopicPartition, begin: int) -> None:
        self._cached_bytes -= self._cache.pop((place, begin)).memory
        self._begins[place].remove(begin)


def _fail(job: _Job, error: LogError) -> None:
    if job.future.set_running_or_notify_cancel():
        job.future.set_exception(error)


def _closed() -> LogClosed:
    return LogClosed("the log was closed; open it again to go on")
