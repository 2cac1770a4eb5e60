"""Records that a stage cannot read any more, removed by retention or damaged: it stops and says which, or goes on.

    position to read from ──► below the log's start? ──► stop (default): RecordsLost · continue: from the start, counted
                          └─► damaged there?         ──► likewise · continue: a dead letter, from the next readable one

The guarantee "a gap in the log is never passed over in silence, and nobody begins at the end" lives here: every stage
asks `position` when it recovers, and reads its inputs through `read`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Set
from typing import Literal

from streams import codec
from streams.errors import CorruptRecord, OffsetOutOfRange, RecordsLost
from streams.events import DeadLetter
from streams.log import Batch, EventLog
from streams.topics import beside

logger = logging.getLogger(__name__)

OnLost = Literal["stop", "continue"]

DAMAGED = "damaged"  # the reason of the dead letter; it holds no bytes, for none can be believed


class Losses:
    """One stage's. `count` is what its metric `lost` shows: records that it went on without.

    >>> losses = Losses("collector-0", "continue")
    >>> losses.position("run.rewards", 0, wanted=30, start=50), losses.count
    (50, 20)
    """

    def __init__(self, who: str, on_lost: OnLost = "stop") -> None:
        self.who, self.on_lost = who, on_lost
        self.count = 0
        self._damaged: dict[tuple[str, int], set[int]] = {}  # counted already: a scan may come by again

    def position(
        self,
        topic: str,
        partition: int,
        *,
        wanted: int,
        start: int,
        done: Set[int] = frozenset(),
        why: str = "",
    ) -> int:
        """Where to read on: `wanted`, or the log's `start` when what lies between is gone.

        `done` are offsets of the gap that need no reading. Raises RecordsLost, unless the stage is to continue.
        """
        if wanted >= start:
            return wanted
        lost = start - wanted - sum(wanted <= offset < start for offset in done)
        if lost:
            self.found(topic, partition, wanted, start, lost, why)
        return start

    def found(self, topic: str, partition: int, begin: int, end: int, lost: int, why: str = "") -> None:
        what = (
            f"{self.who}: {lost} events of {topic}/{partition} are lost (offsets {begin} to {end - 1}): retention "
            f"removed them while they were needed{why and '; '}{why}"
        )
        if self.on_lost == "stop":
            raise RecordsLost(
                f'{what}. It stops so that this is seen. To go on without them: log.on_lost = "continue"; to lose no '
                f"more: raise log.retention_s and log.retention_bytes, and retention.ms and retention.bytes of {topic}",
                *(topic, partition, begin, end, lost),
            )
        self.count += lost
        logger.warning('%s; it goes on at %d (log.on_lost = "continue")', what, end)

    def read(
        self, log: EventLog, topic: str, partition: int, position: int, *, max_records: int = 500
    ) -> Batch:
        """`log.read` for a stage's input: retention that overtook a living stage is a loss too, and so is damage."""
        while True:  # retention may move again before the next try
            try:
                return log.read(topic, partition, position, max_records=max_records)
            except OffsetOutOfRange as outside:
                if position >= outside.start:
                    raise  # beyond the end: the log has lost its newest records, and no place is right
                position = self.position(topic, partition, wanted=position, start=outside.start)
            except CorruptRecord as error:
                position = self.damaged(log, error)

    def damaged(self, log: EventLog, error: CorruptRecord) -> int:
        """Where reading goes on after damaged records: they are counted, and named in `dead`, once.

        Raises RecordsLost, unless the stage is to continue; `error` itself if the log knows no place to go on.
        """
        topic, partition, begin, end = error.topic, error.partition, error.offset, error.next_offset
        if end <= begin:
            raise error
        known = self._damaged.setdefault((topic, partition), set())
        fresh = set(range(begin, end)) - known
        if not fresh:
            return end
        what = f"{self.who}: {len(fresh)} events of {topic}/{partition} are damaged (offsets {begin} to {end - 1})"
        if self.on_lost == "stop":
            raise RecordsLost(
                f"{what}: {error}. It stops so that this is seen. To go on without them: "
                'log.on_lost = "continue"; each is then named in the dead letters',
                *(topic, partition, begin, end, len(fresh)),
            ) from error
        letter = DeadLetter(
            topic=topic,
            partition=partition,
            offset=begin,
            raw=b"",
            stage=self.who,
            reason=DAMAGED,
            detail=f"offsets {begin} to {end - 1}: {error}"[:2000],
            at_ms=time.time_ns() // 1_000_000,
        )
        log.append(beside(topic, "dead"), 0, [codec.encode(letter, producer=self.who)])
        known |= fresh
        self.count += len(fresh)
        logger.error('%s; it goes on at %d (log.on_lost = "continue")', what, end)
        return end
