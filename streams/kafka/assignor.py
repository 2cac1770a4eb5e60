"""Who of a group's members gets which partitions: our own rule in Kafka's cooperative protocol.

    a member joins or goes ──► the broker asks all members to join again ──► one of them, the leader, runs `divide`
        ──► each gets what nobody else still has ──► who must give something up does, and joins once more
        ──► the leader runs `divide` again: now what was given up goes to where it belongs

Members that have to give nothing up keep working throughout. `divide` is the guarantee that no partition is ever
given to two: it hands out only what no other member says it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
from kafka.cluster import ClusterMetadata
from kafka.coordinator.assignors.abstract import (
    AbstractPartitionAssignor,
    RebalanceProtocol,  # pyright: ignore[reportAttributeAccessIssue]
)
from kafka.protocol.consumer.metadata import ConsumerProtocolAssignment, ConsumerProtocolSubscription

from streams.kafka.holder import Holder
from streams.log import share


class Claim(msgspec.Struct, frozen=True):
    """What one member says when it joins: who it is, and what it has at that moment."""

    holder: Holder
    held: tuple[int, ...] = ()
    generation: int = -1  # of the group, in which it was given that


class Given(msgspec.Struct, frozen=True):
    """What the leader says to one member, beside its partitions."""

    to: Holder  # for whom it was reckoned: a member that replaces a dead one gets what that one had
    final: bool = True  # False: more will come, once others have given it up
    owed: tuple[int, ...] = ()  # what it must give up, joining again thereafter
    refused_by: Holder | None = (
        None  # it gets nothing: this one splits the topic otherwise, or has the same share
    )


class Part(NamedTuple):
    """What `divide` gives to one member: now, and in the end."""

    now: frozenset[int]
    wanted: frozenset[int]
    refused_by: str | None = None  # member


def divide(claims: dict[str, Claim]) -> dict[str, Part]:
    """Shares of one topic for its members, by member id.

    Share i of n goes to the member with replica i. Partitions of absent replicas go to elastic members, evenly, and
    stay where they are as far as that allows; without elastic members they are nobody's.
    """
    if not claims:
        return {}
    partitions = max(claim.holder.partitions for claim in claims.values())
    held = _held(claims)
    ruling, refused = _rule(claims, held)
    replicas = claims[next(iter(ruling.values()))].holder.replicas
    wanted = {member: set(share(partitions, replica, replicas)) for replica, member in ruling.items()}
    absent = [
        p
        for replica in range(replicas)
        if replica not in ruling
        for p in share(partitions, replica, replicas)
    ]
    elastic = [member for _, member in sorted(ruling.items()) if claims[member].holder.elastic]
    _share_out(sorted(absent), wanted, elastic, held)
    owners = {partition: member for member, has in held.items() for partition in has}
    parts = {member: Part(frozenset(), frozenset(), by) for member, by in refused.items()}
    for member, whole in wanted.items():
        now = {partition for partition in whole if owners.get(partition, member) == member}
        parts[member] = Part(frozenset(now), frozenset(whole))
    return parts


def _held(claims: dict[str, Claim]) -> dict[str, frozenset[int]]:
    """What each has. Where two claim the same, one has not yet heard that it lost it: the later gift counts."""
    held: dict[str, frozenset[int]] = {}
    taken: set[int] = set()
    for member in sorted(claims, key=lambda member: (-claims[member].generation, member)):
        held[member] = frozenset(claims[member].held) - taken
        taken |= held[member]
    return held


def _rule(claims: dict[str, Claim], held: dict[str, frozenset[int]]) -> tuple[dict[int, str], dict[str, str]]:
    """(replica → member, member refused → member in its way): who works already goes first, then who came first."""
    order = sorted(claims, key=lambda member: (not held[member], claims[member].holder.since_ms, member))
    first = order[0]
    replicas = claims[first].holder.replicas
    ruling: dict[int, str] = {}
    refused: dict[str, str] = {}
    for member in order:
        holder = claims[member].holder
        if holder.replicas != replicas:
            refused[member] = first
        elif holder.replica in ruling:
            refused[member] = ruling[holder.replica]
        else:
            ruling[holder.replica] = member
    return ruling, refused


def _share_out(
    absent: list[int], wanted: dict[str, set[int]], elastic: list[str], held: dict[str, frozenset[int]]
) -> None:
    """Add the partitions of absent replicas to the elastic members' `wanted`, moving as few as may be."""
    if not elastic:
        return
    extra: dict[str, list[int]] = {member: [] for member in elastic}
    free: list[int] = []
    for partition in absent:
        owner = next((member for member in elastic if partition in held[member]), None)
        (extra[owner] if owner else free).append(partition)

    def load(member: str) -> int:
        return len(wanted[member]) + len(extra[member])

    for partition in free:
        extra[min(elastic, key=load)].append(partition)
    while givers := [member for member in elastic if extra[member]]:
        least, most = min(elastic, key=load), max(givers, key=load)
        if load(most) - load(least) <= 1:
            break
        extra[least].append(extra[most].pop())
    for member, more in extra.items():
        wanted[member].update(more)


class ShareAssignor(AbstractPartitionAssignor):
    """One member's end of the protocol. `claim` is asked for at each join, `given` told of each assignment; both on
    the client's own thread, so they must not wait."""

    name = "millstream-shares"  # pyright: ignore[reportAssignmentType]

    def __init__(
        self,
        claim: Callable[[], Claim],
        given: Callable[[frozenset[int], Given, int], None],  # (partitions, what the leader says, generation)
    ) -> None:
        self._claim = claim
        self._given = given

    def supported_protocols(self) -> list[RebalanceProtocol]:
        return [RebalanceProtocol.COOPERATIVE]

    def metadata(self, topics: Iterable[str]) -> ConsumerProtocolSubscription:
        claim = self._claim()
        place = ConsumerProtocolSubscription.TopicPartition  # also in Kafka's own words, for its tools
        owned = [place(topic=claim.holder.topic, partitions=list(claim.held))]
        return ConsumerProtocolSubscription(
            version=1, topics=sorted(topics), user_data=msgspec.json.encode(claim), owned_partitions=owned
        )

    def assign(
        self, cluster: ClusterMetadata, members: Sequence[Any]
    ) -> dict[str, ConsumerProtocolAssignment]:
        topics: dict[str, dict[str, Claim]] = {}
        for member in members:
            claim = claim_of(member.metadata.user_data)
            if claim is None:
                continue  # it gets nothing, and nobody else suffers
            topics.setdefault(claim.holder.topic, {})[member.member_id] = claim
        answers: dict[str, ConsumerProtocolAssignment] = {}
        for topic, claims in topics.items():
            for member_id, part in divide(claims).items():
                claim = claims[member_id]
                given = Given(
                    to=claim.holder,
                    final=part.now == part.wanted,
                    owed=tuple(sorted(set(claim.held) - part.now)),
                    refused_by=claims[part.refused_by].holder if part.refused_by else None,
                )
                answers[member_id] = ConsumerProtocolAssignment(
                    1, [(topic, sorted(part.now))], msgspec.json.encode(given)
                )
        return answers

    def on_assignment(self, assignment: Any, generation: int) -> None:
        if not assignment.user_data:  # the leader went away in the middle: the group starts over by itself
            return
        given = msgspec.json.decode(assignment.user_data, type=Given)
        self._given(frozenset(partition for _, partition in assignment.partitions()), given, generation)


def claim_of(user_data: str | bytes) -> Claim | None:
    """What a member of a group says of itself; None when it is not one of ours."""
    try:
        return msgspec.json.decode(user_data, type=Claim)
    except (msgspec.MsgspecError, TypeError):
        return None
