"""Removing claims files that no record refers to any more. The rule, and why it is safe: streams/claims.py.

    old files ──► read what is new of the partition ──► lock ──► read the rest ──► remove what nothing refers to
                  (long, without the lock)              (nobody has an append on its way)

Reading a partition is the price; it is paid only when there are old files, and only for what was not read before: this
process remembers which record is the newest to refer to a file. In the background it is paid slowly.
"""

from __future__ import annotations

import logging
import threading
import time
from datetime import timedelta

from streams.claim_files import ClaimFolder, claim_of, parse
from streams.errors import ClaimLost, CorruptRecord, LogError, OffsetOutOfRange
from streams.log import EventLog, TopicPartition

logger = logging.getLogger(__name__)

GRACE = timedelta(hours=1)
_LOOK_EVERY_S = 600.0
_IDLE_SHARE = 4.0  # in the background, rest so many times as long as a read took
_CLOSE_S = 2.0


class _References:
    """The newest record that refers to each file of a partition, over all records below `position`."""

    def __init__(self, position: int) -> None:
        self.position = position
        self.newest: dict[str, int] = {}  # name of the file → offset


class Sweeper:
    """Sweeps on demand, and in the background of a process that writes: `look` after each append with files."""

    def __init__(self, log: EventLog, files: ClaimFolder, grace: timedelta) -> None:
        self._log, self._files, self._grace = log, files, grace
        self._one = threading.Lock()  # one sweep at a time
        self._known: dict[TopicPartition, _References] = {}
        self._opened_at = time.monotonic()
        self._looked_at: dict[TopicPartition, float] = {}
        self._swept_from: dict[TopicPartition, int] = {}  # start of the partition at the last sweep
        self._failed_at: dict[
            TopicPartition, float
        ] = {}  # appends that may have left a file without a record
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def failed(self, place: TopicPartition) -> None:
        """An append with files has failed: there is something to remove once the grace is over."""
        self._failed_at[place] = time.monotonic()

    def look(self, place: TopicPartition) -> None:
        """Start a sweep in the background if the last one is long ago. Never waits."""
        now = time.monotonic()
        if now - self._looked_at.get(place, self._opened_at) < _LOOK_EVERY_S or self._closing.is_set():
            return
        if self._thread is not None and self._thread.is_alive():
            return
        self._looked_at[place] = now
        self._thread = threading.Thread(
            target=self._in_background, args=(place,), name="claims-sweeper", daemon=True
        )
        self._thread.start()

    def _in_background(self, place: TopicPartition) -> None:
        try:
            start = self._log.start(*place)
            failed_at = self._failed_at.get(place)
            left_over = failed_at is not None and time.monotonic() - failed_at > self._grace.total_seconds()
            if start > self._swept_from.get(place, 0) or left_over:
                self.sweep(place, gently=True)
                if left_over and self._failed_at.get(place) == failed_at:
                    del self._failed_at[place]
        except LogError as error:  # an outage: the next look tries again
            logger.info("%s/%d: claims files not swept: %s", *place, error)

    def sweep(self, place: TopicPartition, *, gently: bool = False) -> int:
        """Remove what is not wanted any more; returns how many files. Errors of the log and of the disk end it."""
        with self._one:
            try:
                return self._sweep(place, gently)
            except (LogError, OSError) as error:
                if not self._closing.is_set():
                    logger.warning("%s/%d: claims files not swept: %s", *place, error)
                return 0

    def _sweep(self, place: TopicPartition, gently: bool) -> int:
        start = self._log.start(*place)
        if self._files.old(place, self._grace):
            known = self._known_of(place, start)
            if not self._catch_up(place, known, gently) or not self._unwanted(place, known):
                return 0
            with self._files.alone(place) as alone:
                if not alone:
                    return 0
                self._log.settle(*place)  # a killed writer's last append may still be to come
                if not self._catch_up(place, known, False):
                    return 0
                unwanted = self._unwanted(place, known)
                removed = self._files.remove(place, unwanted)
            for name in unwanted:
                known.newest.pop(name, None)
            logger.info("%s/%d: removed %d claims files that no record refers to", *place, removed)
            self._swept_from[place] = start
            return removed
        return 0

    def _unwanted(self, place: TopicPartition, known: _References) -> list[str]:
        start = self._log.start(*place)
        return [
            name for name in self._files.old(place, self._grace) if known.newest.get(name, start - 1) < start
        ]

    def _known_of(self, place: TopicPartition, start: int) -> _References:
        known = self._known.get(place)
        if known is None or known.position > self._log.end(*place):  # another partition of the same name
            known = self._known[place] = _References(start)
        return known

    def _catch_up(self, place: TopicPartition, known: _References, gently: bool) -> bool:
        """Read on to the end as it is now. False when a record cannot be read: what it refers to is unknown."""
        end = self._log.end(*place)
        known.position = max(known.position, self._log.start(*place))
        while known.position < end:
            if self._closing.is_set():
                return False
            began = time.monotonic()
            try:
                batch = self._log.read(*place, known.position)
            except OffsetOutOfRange as gone:
                if known.position >= gone.start:
                    raise
                known.position = gone.start
                continue
            except CorruptRecord as damage:
                logger.warning("%s/%d: claims files not swept: %s", *place, damage)
                return False
            for record in batch.records:
                header = claim_of(record.headers)
                if header is not None:
                    self._note(place, known, header, record.offset)
            if batch.next_position <= known.position:
                return False
            known.position = batch.next_position
            if gently:
                self._closing.wait(_IDLE_SHARE * (time.monotonic() - began))
        return True

    @staticmethod
    def _note(place: TopicPartition, known: _References, header: bytes, offset: int) -> None:
        try:
            folder, _, name = parse(header).path.rpartition("/")
        except ClaimLost:
            return
        if folder == f"{place.topic}/{place.partition}":
            known.newest[name] = offset

    def close(self) -> None:
        """Ends a sweep soon. Twice is harmless."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)
