"""Records that retention removed before a stage had read them: it stops and says which, or goes on and counts them.

    position to read from ──► below the log's start? ──► stop (default): RecordsLost · continue: from the start, counted

The guarantee "a gap in the log is never passed over in silence, and nobody begins at the end" lives here: every stage
asks `position` when it recovers, and reads its inputs through `read`.
"""

from __future__ import annotations

import logging
from collections.abc import Set
from typing import Literal

from streams.errors import OffsetOutOfRange, RecordsLost
from streams.log import Batch, EventLog

logger = logging.getLogger(__name__)

OnLost = Literal["stop", "continue"]


class Losses:
    """One stage's. `count` is what its metric `lost` shows: records that it went on without.

    >>> losses = Losses("collector-0", "continue")
    >>> losses.position("run.rewards", 0, wanted=30, start=50), losses.count
    (50, 20)
    """

    def __init__(self, who: str, on_lost: OnLost = "stop") -> None:
        self.who, self.on_lost = who, on_lost
        self.count = 0

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
        """`log.read` for a stage's input: retention that overtook a living stage is a loss too."""
        try:
            return log.read(topic, partition, position, max_records=max_records)
        except OffsetOutOfRange as outside:
            if position >= outside.start:
                raise  # beyond the end: the log has lost its newest records, and no place is right
            position = self.position(topic, partition, wanted=position, start=outside.start)
        return log.read(topic, partition, position, max_records=max_records)
