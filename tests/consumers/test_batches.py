"""Cutting: judged at the cut (case O16), first mention wins, positions keep what still waits."""

from __future__ import annotations

from consumers.batches import Buffer, Rule
from consumers.ledger import Frontier
from consumers.staleness import Lineage
from streams.events import GroupDropped
from tests.support.events import EPOCH, completed


def lineage(top: int = 20) -> Lineage:
    made = Lineage()
    for version in range(top):
        made.published(EPOCH, version)
    return made


def rule(version: int, limit: int, on_stale: str = "drop") -> Rule:
    return Rule(version, limit, on_stale, lineage())


def buffer(partitions: int = 1) -> Buffer:
    return Buffer(partitions, Frontier())


def test_groups_that_were_fresh_on_arrival_are_dropped_when_they_are_stale_at_the_cut():
    waiting = buffer()
    for seq in range(3):
        waiting.offer(0, seq, completed(seq, version=3))
    waiting.sweep(rule(version=4, limit=1))
    assert len(waiting) == 3  # staleness 1 of 1 allowed
    waiting.sweep(rule(version=5, limit=1))
    waiting.offer(0, 3, completed(3, version=5))
    waiting.sweep(rule(version=5, limit=1))
    drops, _ = waiting.take_drops()
    assert [(drop.group_id, drop.reason, drop.staleness) for drop in drops] == [
        ("0-0", "stale", 2),
        ("0-1", "stale", 2),
        ("0-2", "stale", 2),
    ]
    assert len(waiting) == 1  # no batch of 4 can be cut
    cut = waiting.cut(1, rule(version=5, limit=1))
    assert [member.staleness for group in cut.groups for member in group.members] == [0, 0]


def test_the_oldest_groups_over_all_partitions_are_taken_first():
    waiting = buffer(2)
    waiting.offer(1, 0, completed(1))
    waiting.offer(0, 0, completed(2))
    waiting.offer(0, 1, completed(0))
    cut = waiting.cut(2, rule(0, 2))
    assert [group.seq for group in cut.groups] == [0, 1]
    assert [group.partition for group in cut.groups] == [0, 1]
    assert cut.positions == [0, 1]  # partition 0 still holds group 2 at offset 0


def test_a_second_outcome_of_a_group_is_a_duplicate_and_not_an_outcome():
    waiting = buffer(2)
    waiting.offer(0, 0, completed(0))
    waiting.offer(0, 1, completed(0))
    waiting.offer(1, 0, GroupDropped(group_id="0-0", seq=0, task_offset=0, reason="incomplete"))
    cut = waiting.cut(1, rule(0, 2))
    waiting.offer(1, 1, completed(0))
    assert [group.seq for group in cut.groups] == [0]
    assert waiting.take_drops() == ([], 3)
    assert len(waiting) == 0 and waiting.positions() == [2, 2]


def test_the_collectors_drops_are_listed_and_close_their_groups():
    waiting = buffer()
    waiting.offer(0, 0, GroupDropped(group_id="0-0", seq=0, task_offset=0, reason="zero_variance"))
    drops, _ = waiting.take_drops()
    assert [(drop.seq, drop.reason) for drop in drops] == [(0, "zero_variance")]
    assert 0 in waiting.frontier and waiting.frontier.low == 1


def test_masking_keeps_a_group_as_long_as_one_member_has_a_fresh_token():
    waiting = buffer()
    mixed = completed(0, version=5)
    mixed.members[0].trainable_versions[:] = [(EPOCH, 1, 2)]
    waiting.offer(0, 0, mixed)
    masked = rule(version=5, limit=1, on_stale="mask")
    waiting.sweep(masked)
    cut = waiting.cut(1, masked)
    assert [(m.staleness, m.n_trainable_tokens) for m in cut.groups[0].members] == [(-1, 0), (0, 3)]


def test_one_stale_member_drops_its_group_when_dropping():
    waiting = buffer()
    mixed = completed(0, version=5)
    mixed.members[0].trainable_versions[:] = [(EPOCH, 1, 2)]
    waiting.offer(0, 0, mixed)
    waiting.sweep(rule(version=5, limit=1))
    assert [drop.reason for drop in waiting.take_drops()[0]] == ["stale"]


def test_an_unknown_or_future_version_is_never_masked_into_acceptance():
    for version, reason in ((6, "future"), (99, "unknown_version")):
        waiting = buffer()
        waiting.offer(0, 0, completed(0, version=version))
        waiting.sweep(rule(version=5, limit=10, on_stale="mask"))
        assert [drop.reason for drop in waiting.take_drops()[0]] == [reason]


def test_a_restart_reads_again_exactly_what_has_no_outcome():
    waiting = buffer()
    for seq in range(4):
        waiting.offer(0, seq, completed(seq))
    cut = waiting.cut(2, rule(0, 2))
    assert cut.positions == [2]
    again = Buffer(1, Frontier(waiting.frontier.low, waiting.frontier.above), cut.positions)
    for seq in range(2, 4):
        again.offer(0, seq, completed(seq))
    assert [event.seq for _, _, event in again.waiting()] == [2, 3]
