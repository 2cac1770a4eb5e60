"""A log in memory whose shares move between live members, as Kafka's do, when a test says so.

    members join ──► Shares (of one group) ◄── move(), close() of a member
    members ask partitions(): theirs now, less those that were another's since they last asked

Every member has a handle of its own, whose appends become durable only when the test lets them: so what a member sent
before it lost a partition can land after its new owner has begun.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

from streams.errors import LogError
from streams.log import Membership, NewRecord, share
from streams.memory import MemoryLog, MemoryStore


class Shares:
    """Who has which partition of one group's topic."""

    def __init__(self, partitions: int) -> None:
        self.partitions = partitions
        self.members: list[MovingMembership] = []
        self.owner: dict[int, MovingMembership] = {}
        self.moves = 0
        self.lock = threading.RLock()

    def give(self, partition: int, member: MovingMembership) -> None:
        before = self.owner.get(partition)
        if before is member:
            return
        if before is not None:
            before.lost.add(partition)
            self.moves += 1
        self.owner[partition] = member

    def joined(self, member: MovingMembership) -> None:
        with self.lock:
            self.members.append(member)
            for partition in range(self.partitions):
                if partition not in self.owner or partition in share(
                    self.partitions, member.replica, member.replicas
                ):
                    self.give(partition, member)

    def left(self, member: MovingMembership) -> None:
        with self.lock:
            self.members.remove(member)
            for partition, owner in list(self.owner.items()):
                if owner is member and self.members:
                    self.give(partition, self.members[0])
                elif owner is member:
                    del self.owner[partition]

    def move(self, choose: random.Random) -> None:
        """One partition to some member, perhaps to the one that has it."""
        with self.lock:
            if self.members:
                self.give(choose.randrange(self.partitions), choose.choice(self.members))


class MovingMembership(Membership):
    def __init__(self, shares: Shares, replica: int, replicas: int) -> None:
        self.replica, self.replicas = replica, replicas
        self.lost: set[int] = set()  # since the last answer
        self._shares, self._answer, self._generation = shares, frozenset(), 0
        self._is_open = True
        shares.joined(self)

    def partitions(self) -> frozenset[int]:
        with self._shares.lock:
            mine = {partition for partition, owner in self._shares.owner.items() if owner is self}
            answer = frozenset(mine - self.lost)
            self.lost.clear()
            if answer != self._answer:
                self._answer, self._generation = answer, self._generation + 1
            return answer

    @property
    def generation(self) -> int:
        return self._generation

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._shares.left(self)


class SharedStore(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.groups: dict[str, Shares] = {}


class LateLog(MemoryLog):
    """One member's handle. With `late`, an append is durable only once `deliver` came to it."""

    moves_shares = True

    def __init__(self, store: SharedStore, *, late: bool = False) -> None:
        super().__init__(store)
        self.shared, self.late = store, late
        self.queue: deque[tuple[Future[int], str, int, Sequence[NewRecord]]] = deque()

    def submit(self, topic: str, partition: int, records: Sequence[NewRecord]) -> Future[int]:
        if not self.late:
            return super().submit(topic, partition, records)
        future: Future[int] = Future()
        self.queue.append((future, topic, partition, records))
        return future

    def deliver(self, most: int) -> None:
        for _ in range(min(most, len(self.queue))):
            future, topic, partition, records = self.queue.popleft()
            try:
                future.set_result(self._append(topic, partition, records))
            except LogError as error:
                future.set_exception(error)

    def append(self, topic, partition, records, timeout=None) -> int:  # type: ignore[override]
        future = self.submit(topic, partition, records)
        self.deliver(len(self.queue))  # what was sent before it comes before it
        return future.result(0)

    def join(self, group, topic, *, replica, replicas, member="", elastic=False) -> MovingMembership:  # type: ignore[override]
        assert elastic, f"{group}: only an elastic member is given the shares of others"
        shares = self.shared.groups.setdefault(group, Shares(self.topics()[topic]))
        return MovingMembership(shares, replica, replicas)
