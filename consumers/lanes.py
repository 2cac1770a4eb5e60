"""A stage's lanes: one for each partition that is its own now, rebuilt from the log whenever that changes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol, TypeVar

from consumers.outbox import Outbox, flush_all
from streams.log import EventLog, Membership

logger = logging.getLogger(__name__)

_LAST = timedelta(seconds=0.6)  # for what was sent when a stage ends: the whole daemon has two seconds


class Lane(Protocol):
    """What a stage keeps of one partition: at least its way out."""

    outbox: Outbox


_Lane = TypeVar("_Lane", bound=Lane)


class Lanes(dict[int, _Lane]):
    """Partition → lane. `join`, then `rebalance` in every round, then `close`.

    `make(partition)` builds a lane from the stage's own output (consumers/runner.recover); a lane that goes to
    another member is abandoned as it is, since its new owner does the same. What it had sent may still come to be
    durable, and is then passed over by its identity. `abandoned` is told of it.
    """

    def __init__(
        self, make: Callable[[int], _Lane], abandoned: Callable[[_Lane], object] = lambda lane: None
    ) -> None:
        super().__init__()
        self._make, self._abandoned = make, abandoned
        self.membership: Membership | None = None
        self._generation: int | None = None
        self._member = ""

    def join(
        self, log: EventLog, group: str, topic: str, *, replica: int, replicas: int, member: str = ""
    ) -> None:
        """Take share `replica` of `replicas` of the topic's partitions, and those of absent replicas where the log
        can tell that they are absent. Raises ShareHeld."""
        self.membership = log.join(
            group, topic, replica=replica, replicas=replicas, member=member, elastic=True
        )
        self._member = member

    def rebalance(self) -> None:
        """Have lanes for exactly the partitions that are ours now."""
        assert self.membership is not None, "join() comes first"
        partitions = self.membership.partitions()
        if self.membership.generation == self._generation:
            return
        first, self._generation = self._generation is None, self.membership.generation
        lost, gained = set(self) - partitions, partitions - set(self)
        for partition in lost:
            self._abandoned(self.pop(partition))
        for partition in sorted(gained):
            self[partition] = self._make(partition)
        if not first:
            logger.info(
                "%s: partitions %s came, %s went to another; has %s now",
                self._member,
                sorted(gained) or "none",
                sorted(lost) or "none",
                sorted(self),
            )

    @property
    def is_sending(self) -> bool:
        """Some append is not acknowledged yet."""
        return any(len(lane.outbox) for lane in self.values())

    def close(self) -> int:
        """Wait a moment for what was sent, then give the share back. Returns how many events are not delivered."""
        undelivered = flush_all([lane.outbox for lane in self.values()], _LAST)
        if self.membership is not None:
            self.membership.close()
        return undelivered
