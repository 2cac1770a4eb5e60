"""A stage's lanes: one for each partition that is its own now, rebuilt from the log whenever that changes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Protocol, TypeVar

from consumers.outbox import Outbox, flush_all
from streams.log import EventLog, Membership


class Lane(Protocol):
    """What a stage keeps of one partition: at least its way out."""

    outbox: Outbox


_Lane = TypeVar("_Lane", bound=Lane)


class Lanes(dict[int, _Lane]):
    """Partition → lane. `join`, then `rebalance` in every round, then `close`.

    `make(partition)` builds a lane from the stage's own output (consumers/runner.recover); a lane that goes to
    another member is dropped as it is, since its new owner does the same.
    """

    def __init__(self, make: Callable[[int], _Lane]) -> None:
        super().__init__()
        self._make = make
        self.membership: Membership | None = None
        self._generation: int | None = None

    def join(self, log: EventLog, group: str, topic: str, *, replica: int, replicas: int) -> None:
        """Take share `replica` of `replicas` of the topic's partitions. Raises ShareHeld."""
        self.membership = log.join(group, topic, replica=replica, replicas=replicas)

    def rebalance(self) -> None:
        """Have lanes for exactly the partitions that are ours now."""
        assert self.membership is not None, "join() comes first"
        partitions = self.membership.partitions()
        if self.membership.generation == self._generation:
            return
        self._generation = self.membership.generation
        for partition in set(self) - partitions:
            del self[partition]
        for partition in sorted(partitions - set(self)):
            self[partition] = self._make(partition)

    @property
    def is_sending(self) -> bool:
        """Some append is not acknowledged yet."""
        return any(len(lane.outbox) for lane in self.values())

    def close(self) -> None:
        """Wait a moment for what was sent, then give the share back."""
        flush_all([lane.outbox for lane in self.values()], timedelta(seconds=1))
        if self.membership is not None:
            self.membership.close()
