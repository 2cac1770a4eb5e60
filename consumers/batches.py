"""Cutting batches: which groups make the next step, and which are dropped, decided at one moment.

    groups p ──► Buffer (per partition, in order) ──► drop what is stale, closed or broken NOW ──► oldest G groups

Invariant 5 lives here: staleness is judged when the batch is cut, against the version that will train on it, not
when a group arrived. What is dropped while no batch can be cut is reported at once (GroupsDropped), so that the
feeder can replace it; otherwise feeder and trainer would wait for each other.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from consumers.ledger import Frontier
from consumers.staleness import DROP, Judgement, Lineage, judge
from streams.events import CutGroup, CutMember, Drop, GroupCompleted, GroupDropped


class Rule(NamedTuple):
    """The staleness rule in force at a cut."""

    trainer_version: int
    limit: int
    on_stale: str
    lineage: Lineage


class Cut(NamedTuple):
    groups: list[CutGroup]
    positions: list[int]


class _Entry:
    __slots__ = ("event", "offset", "outcome")

    def __init__(self, offset: int, event: GroupCompleted) -> None:
        self.offset, self.event = offset, event
        self.outcome = False  # closed while it waited here (dropped)


class Buffer:
    """Completed groups that wait for a step, in the order of their partitions.

    `positions[p]` is the next offset of `groups` p to read after everything that has its outcome; records behind
    it that are still waiting keep it back, so a restart reads them again.
    """

    def __init__(self, partitions: int, frontier: Frontier, positions: list[int] | None = None) -> None:
        self._waiting: list[deque[_Entry]] = [deque() for _ in range(partitions)]
        self._read_to = list(positions or [0] * partitions)
        self.frontier = frontier
        self.drops: list[Drop] = []  # not yet written to the ledger
        self.duplicates = 0  # likewise
        self._offered: set[int] = set()  # seqs that wait here

    @property
    def read_to(self) -> list[int]:
        return self._read_to

    def advance(self, partition: int, position: int) -> None:
        self._read_to[partition] = position

    def offer(self, partition: int, offset: int, event: GroupCompleted | GroupDropped) -> None:
        """Take one outcome of the collector. The first mention of a group id wins, a later one is a duplicate."""
        if event.seq in self.frontier or event.seq in self._offered:
            self.duplicates += 1
        elif isinstance(event, GroupDropped):
            self.drop(event.group_id, event.seq, event.reason, detail=event.detail)
        else:
            self._offered.add(event.seq)
            self._waiting[partition].append(_Entry(offset, event))
        self._read_to[partition] = max(self._read_to[partition], offset + 1)

    def drop(self, group_id: str, seq: int, reason: str, *, staleness: int = -1, detail: str = "") -> None:
        self.frontier.close(seq)
        self._offered.discard(seq)
        self.drops.append(Drop(group_id, seq, reason, staleness, detail[:200]))

    def __len__(self) -> int:
        return len(self._offered)

    def waiting(self) -> list[tuple[int, int, GroupCompleted]]:
        """(partition, offset, event) of every waiting group, oldest dispatch first."""
        entries = [
            (entry.event.seq, partition, entry.offset, entry.event)
            for partition, queue in enumerate(self._waiting)
            for entry in queue
            if not entry.outcome
        ]
        entries.sort(key=lambda item: item[0])
        return [item[1:] for item in entries]

    def sweep(self, rule: Rule) -> None:
        """Drop every waiting group that the rule refuses now."""
        for partition, queue in enumerate(self._waiting):
            for entry in queue:
                if entry.outcome:
                    continue
                refusal = refused(entry.event, rule)
                if refusal is not None:
                    self.drop(
                        entry.event.group_id, entry.event.seq, refusal.reason, staleness=refusal.staleness
                    )
                    entry.outcome = True
            self._trim(partition)

    def refuse(self, seq: int, reason: str, detail: str) -> None:
        """Drop one waiting group by name (its payload cannot be used)."""
        for queue in self._waiting:
            for entry in queue:
                if entry.event.seq == seq and not entry.outcome:
                    self.drop(entry.event.group_id, seq, reason, detail=detail)
                    entry.outcome = True

    def cut(self, size: int, rule: Rule) -> Cut:
        """Take the `size` oldest waiting groups (call `sweep` with the same rule just before)."""
        chosen = self.waiting()[:size]
        groups = [cut_group(partition, offset, event, rule) for partition, offset, event in chosen]
        taken = {event.seq for _, _, event in chosen}
        for seq in taken:
            self.frontier.close(seq)
            self._offered.discard(seq)
        for partition, queue in enumerate(self._waiting):
            for entry in queue:
                entry.outcome = entry.outcome or entry.event.seq in taken
            self._trim(partition)
        return Cut(groups, self.positions())

    def positions(self) -> list[int]:
        return [
            queue[0].offset if queue else self._read_to[partition]
            for partition, queue in enumerate(self._waiting)
        ]

    def take_drops(self) -> tuple[list[Drop], int]:
        """Drops and the number of duplicates since the last ledger record; the caller writes them down."""
        drops, duplicates = self.drops, self.duplicates
        self.drops, self.duplicates = [], 0
        return drops, duplicates

    def _trim(self, partition: int) -> None:
        queue = self._waiting[partition]
        while queue and queue[0].outcome:
            queue.popleft()


def refused(event: GroupCompleted, rule: Rule) -> Judgement | None:
    """Why the rule refuses this group now, or None.

    Dropping, one refused member refuses its group. Masking, a group goes only when no member has a token left; a
    member without one stays, so that its reward still counts in the group's mean.
    """
    judgements = [
        judge(
            member.trainable_versions,
            trainer_version=rule.trainer_version,
            limit=rule.limit,
            lineage=rule.lineage,
            on_stale=rule.on_stale,
        )
        for member in event.members
    ]
    refusals = [each for each in judgements if not each.accepted]
    if not refusals:
        return None
    worst = max(refusals, key=lambda each: (each.reason != "stale", each.staleness))
    if rule.on_stale == DROP or worst.reason != "stale" or len(refusals) == len(judgements):
        return worst
    return None


def cut_group(partition: int, offset: int, event: GroupCompleted, rule: Rule) -> CutGroup:
    members = []
    for member in event.members:
        verdict = judge(
            member.trainable_versions,
            trainer_version=rule.trainer_version,
            limit=rule.limit,
            lineage=rule.lineage,
            on_stale=rule.on_stale,
        )
        staleness = verdict.staleness if verdict.accepted else -1
        members.append(
            CutMember(
                member.uid,
                member.trajectory_offset,
                member.reward,
                staleness,
                verdict.n_trainable,
                member.teacher_offset,
            )
        )
    return CutGroup(event.group_id, event.seq, partition, offset, members)
