"""The rule by which a group's members share a topic: no broker needed."""

from __future__ import annotations

import itertools
from collections.abc import Collection

from hypothesis import given
from hypothesis import strategies as st

from streams.kafka.assignor import Claim, Part, divide
from streams.kafka.holder import Holder
from streams.log import share


def claim(
    replica: int,
    replicas: int,
    held: Collection[int] = (),
    *,
    partitions: int = 6,
    elastic: bool = False,
    generation: int = 1,
    since_ms: int = 0,
) -> Claim:
    holder = Holder(
        f"nonce-{replica}", "t", partitions, replica, replicas, elastic=elastic, since_ms=since_ms or replica
    )
    return Claim(holder, tuple(held), generation if held else -1)


def after(claims: dict[str, Claim], parts: dict[str, Part], generation: int) -> dict[str, Claim]:
    """What the members say when they join the next time."""
    return {
        name: Claim(claim.holder, tuple(sorted(parts[name].now)), generation)
        for name, claim in claims.items()
    }


def settled(claims: dict[str, Claim]) -> dict[str, frozenset[int]]:
    """Divide until nothing moves any more; checks every round on the way."""
    for generation in range(2, 6):
        parts = divide(claims)
        check(claims, parts)
        if all(part.now == part.wanted for part in parts.values()) and all(
            set(claims[name].held) <= part.now for name, part in parts.items()
        ):
            return {name: part.now for name, part in parts.items()}
        claims = after(claims, parts, generation)
    raise AssertionError(f"still moving after 4 rounds: {parts}")


def check(claims: dict[str, Claim], parts: dict[str, Part]) -> None:
    """What must hold in every round: nothing given twice, nothing given that another still has."""
    for one, other in itertools.combinations(parts, 2):
        assert not parts[one].now & parts[other].now
        assert not parts[one].wanted & parts[other].wanted
    for name, part in parts.items():
        assert part.now <= part.wanted
        for other, theirs in claims.items():
            if other != name and theirs.generation >= claims[name].generation:
                assert not (part.now - set(claims[name].held)) & set(theirs.held)


def test_each_replica_gets_its_own_share_and_absent_shares_are_nobodys() -> None:
    parts = divide({"a": claim(0, 3), "c": claim(2, 3)})
    assert parts == {
        "a": Part(frozenset({0, 3}), frozenset({0, 3})),
        "c": Part(frozenset({2, 5}), frozenset({2, 5})),
    }


def test_an_elastic_member_alone_gets_everything() -> None:
    assert divide({"b": claim(1, 3, elastic=True)})["b"].now == set(range(6))


def test_only_elastic_members_take_absent_shares() -> None:
    parts = divide({"a": claim(0, 3), "b": claim(1, 3, elastic=True)})
    assert (parts["a"].now, parts["b"].now) == ({0, 3}, {1, 2, 4, 5})


def test_a_returning_replica_gets_its_share_only_when_it_was_given_up() -> None:
    claims = {"a": claim(0, 2, range(6), elastic=True), "b": claim(1, 2, elastic=True)}
    first = divide(claims)
    assert (first["a"].now, first["b"].now) == ({0, 2, 4}, frozenset())
    assert first["b"].wanted == {1, 3, 5}
    second = divide(after(claims, first, 2))
    assert (second["a"].now, second["b"].now) == ({0, 2, 4}, {1, 3, 5})


def test_absent_shares_stay_where_they_are_when_another_replica_goes() -> None:
    members = {name: claim(i, 4, partitions=8, elastic=True) for i, name in enumerate("abc")}
    three = settled(members)
    two = settled(after({name: members[name] for name in "ab"}, divide_as(three), 9))
    assert three["a"] <= two["a"]
    assert three["b"] <= two["b"]
    assert sorted(map(len, two.values())) == [4, 4]


def divide_as(shares: dict[str, frozenset[int]]) -> dict[str, Part]:
    return {name: Part(has, has) for name, has in shares.items()}


def test_who_works_already_rules_how_a_topic_is_split() -> None:
    parts = divide({"new": claim(1, 3, since_ms=1), "old": claim(0, 2, {0, 2, 4}, since_ms=5)})
    assert parts["new"] == Part(frozenset(), frozenset(), refused_by="old")
    assert parts["old"].now == {0, 2, 4}


def test_of_two_newcomers_that_split_a_topic_otherwise_the_first_rules() -> None:
    parts = divide({"x": claim(1, 3, since_ms=7), "y": claim(0, 2, since_ms=5)})
    assert (parts["x"].refused_by, parts["y"].refused_by) == ("y", None)


def test_a_share_that_two_members_claim_goes_to_the_one_that_has_it() -> None:
    parts = divide({"x": claim(0, 2, since_ms=1), "y": claim(0, 2, {0, 2, 4}, since_ms=9)})
    assert (parts["x"].refused_by, parts["y"].now) == ("y", {0, 2, 4})


def test_of_two_who_say_they_have_a_partition_the_later_gift_counts() -> None:
    stale = claim(1, 2, {0, 1, 3, 5}, elastic=True, generation=3)
    parts = divide({"a": claim(0, 2, {0, 2, 4}, elastic=True, generation=4), "stale": stale})
    assert (parts["a"].now, parts["stale"].now) == ({0, 2, 4}, {1, 3, 5})


def test_a_group_without_members_is_divided_among_nobody() -> None:
    assert divide({}) == {}


@given(
    partitions=st.integers(1, 12),
    replicas=st.integers(1, 6),
    data=st.data(),
)
def test_members_that_come_and_go_end_with_everything_shared_evenly(
    partitions: int, replicas: int, data: st.DataObject
) -> None:
    """From whatever each holds by then: own shares are always with their replica, the rest evenly with the others."""
    everyone = {
        str(i): claim(i, replicas, partitions=partitions, elastic=True, since_ms=1 + i)
        for i in range(replicas)
    }
    has: dict[str, frozenset[int]] = {name: frozenset() for name in everyone}
    for generation in range(3):
        present = data.draw(st.sets(st.sampled_from(sorted(everyone)), min_size=1))
        claims = {
            name: Claim(everyone[name].holder, tuple(sorted(has[name])), generation if has[name] else -1)
            for name in present
        }
        shares = settled(claims)
        assert sorted(itertools.chain(*shares.values())) == list(range(partitions))
        own = {name: share(partitions, int(name), replicas) for name in present}
        assert all(own[name] <= shares[name] for name in present)
        extra = {name: len(shares[name]) - len(own[name]) for name in present}
        for giver in (name for name in present if extra[name]):
            assert len(shares[giver]) <= 1 + min(len(has) for has in shares.values())
        has = {name: shares.get(name, frozenset()) for name in everyone}
