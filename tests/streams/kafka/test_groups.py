"""Shares and hints on a real broker: who holds what when members come, go, die, sleep and when the broker does."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaAdminClient, KafkaConsumer

from streams.broker.node import Node
from streams.errors import LogError, LogUnavailable, ShareHeld, UnknownTopic
from streams.kafka.admin import Admin
from streams.kafka.connect import connect
from streams.kafka.groups import Groups
from streams.kafka.membership import KafkaMembership
from streams.kafka.settings import KafkaSettings
from streams.log import TopicPartition

ROOT = Path(__file__).resolve().parents[3]
SOON_S = 20.0
SESSION_S = 1.5


class Process:
    """What one process of a run has: its Admin and its Groups."""

    def __init__(self, server: str, prefix: str, **settings: Any) -> None:
        settings = {"session_timeout": timedelta(seconds=SESSION_S), **settings}
        self.settings = KafkaSettings(servers=(server,), prefix=prefix, **settings)
        self.admin = Admin(self.settings)
        self.groups = Groups(self.settings, self.admin)

    def join(
        self,
        replica: int,
        replicas: int,
        *,
        topic: str = "t",
        group: str = "g",
        member: str = "",
        elastic: bool = False,
    ) -> KafkaMembership:
        return self.groups.join(group, topic, replica, replicas, member, elastic)

    def close(self) -> None:
        self.groups.close()
        self.admin.close()


@pytest.fixture
def process(kafka: str, prefix: str) -> Iterator[Callable[..., Process]]:
    """`process(**settings)` → a Process on the shared broker, under this test's prefix; topic "t" has 6 partitions."""
    opened: list[Process] = []

    def make(**settings: Any) -> Process:
        opened.append(Process(kafka, prefix, **settings))
        return opened[-1]

    make().admin.create_topic("t", 6, False)
    yield make
    for each in opened:
        each.close()


def eventually(claim: Callable[[], bool], what: str, timeout_s: float = SOON_S) -> float:
    """Seconds until it held."""
    started = time.monotonic()
    while not claim():
        assert time.monotonic() < started + timeout_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.005)
    return time.monotonic() - started


MEMBER = """
import json, sys, time
from datetime import timedelta
from streams.kafka.admin import Admin
from streams.kafka.groups import Groups
from streams.kafka.settings import KafkaSettings

a = json.loads(sys.argv[1])
session = timedelta(seconds=a["session_s"])
settings = KafkaSettings(servers=(a["server"],), prefix=a["prefix"], session_timeout=session)
admin = Admin(settings)
groups = Groups(settings, admin)
membership = groups.join("g", "t", a["replica"], a["replicas"], a["member"], a["elastic"])
said = None
while True:
    now = [sorted(membership.partitions()), membership.generation, membership.joins]
    if now != said:
        print(json.dumps(now), flush=True)
        said = now
    time.sleep(0.01)
"""


class Child:
    """A member in a process of its own, that says what it has whenever that changes."""

    def __init__(
        self,
        server: str,
        prefix: str,
        replica: int,
        replicas: int,
        *,
        member: str = "",
        elastic: bool = False,
        session_s: float = SESSION_S,
    ) -> None:
        said = {
            "server": server,
            "prefix": prefix,
            "replica": replica,
            "replicas": replicas,
            "member": member,
            "elastic": elastic,
            "session_s": session_s,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", MEMBER, json.dumps(said)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self.lines: list[tuple[frozenset[int], int, int]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            partitions, generation, joins = json.loads(line)
            self.lines.append((frozenset(partitions), generation, joins))

    @property
    def has(self) -> frozenset[int]:
        return self.lines[-1][0] if self.lines else frozenset()

    @property
    def generation(self) -> int:
        return self.lines[-1][1]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self._reader.join(10)
        assert self.process.stdout
        self.process.stdout.close()


@pytest.fixture
def child(kafka: str, prefix: str) -> Iterator[Callable[..., Child]]:
    """`child(replica, replicas, **options)` → a Child on the shared broker, or on `server`."""
    children: list[Child] = []

    def make(replica: int, replicas: int, server: str = kafka, **options: Any) -> Child:
        children.append(Child(server, prefix, replica, replicas, **options))
        return children[-1]

    yield make
    for each in children:
        if each.process.returncode is None:
            each.kill()


def all_have(members: list[Child], *shares: set[int]) -> Callable[[], bool]:
    return lambda: [member.has for member in members] == [frozenset(share) for share in shares]


# -- shares


def test_the_shares_of_a_group_are_disjoint_and_whole_as_soon_as_its_members_have_joined(
    process: Callable[..., Process],
) -> None:
    one, other = process(), process()
    members = [(one if i % 2 else other).join(i, 3) for i in range(3)]
    assert [member.partitions() for member in members] == [{0, 3}, {1, 4}, {2, 5}]
    assert [member.generation for member in members] == [1, 1, 1]
    time.sleep(0.5)
    assert [member.partitions() for member in members] == [{0, 3}, {1, 4}, {2, 5}]
    assert [member.generation for member in members] == [1, 1, 1], "nobody had to stop when others came"


def test_a_lone_member_joins_once_however_slow_its_stage_is(process: Callable[..., Process]) -> None:
    """Liveness hangs on the process, not on the work: 20 events of 400 ms outlast the session several times."""
    member = process(session_timeout=timedelta(seconds=1)).join(0, 1, elastic=True)
    for _ in range(8):
        assert member.partitions() == set(range(6))
        time.sleep(0.4)
    assert (member.generation, member.joins) == (1, 1)


def test_absent_shares_are_nobodys_unless_a_member_is_elastic(process: Callable[..., Process]) -> None:
    one = process(session_timeout=timedelta(seconds=15))
    plain = one.join(0, 3)
    elastic = one.join(1, 3, elastic=True)
    assert (plain.partitions(), elastic.partitions()) == ({0, 3}, {1, 2, 4, 5})
    plain.close()
    seconds = eventually(
        lambda: elastic.partitions() == set(range(6)), "a clean leave frees the share at once"
    )
    assert seconds < 8


def test_an_elastic_member_gives_back_what_a_returning_replica_owns_and_forgets_nothing_else(
    process: Callable[..., Process],
) -> None:
    one, other = process(), process()
    first = one.join(0, 2, elastic=True)
    assert first.partitions() == set(range(6))
    back = other.join(1, 2, elastic=True)
    assert (first.partitions(), back.partitions()) == ({0, 2, 4}, {1, 3, 5})
    assert (first.generation, back.generation) == (2, 1)


def test_members_that_come_and_go_at_random_never_share_a_partition_and_end_with_all_of_them(
    process: Callable[..., Process],
) -> None:
    chance = random.Random(5)
    stations = [process() for _ in range(3)]
    members: dict[int, KafkaMembership] = {}
    overlaps: list[Any] = []
    ended = threading.Event()

    def watch() -> None:
        """What two members reported, each before and after the other's answer, they had at the same moment."""
        while not ended.is_set():
            now = dict(members)
            before = {i: (member.partitions(), member.generation) for i, member in now.items()}
            after = {i: (member.partitions(), member.generation) for i, member in now.items()}
            steady = {i: has for i, (has, generation) in before.items() if after[i] == (has, generation)}
            for i in steady:
                for j in steady:
                    if (
                        i < j
                        and steady[i] & steady[j]
                        and members.get(i) is now[i]
                        and members.get(j) is now[j]
                    ):
                        overlaps.append((i, j, steady[i], steady[j]))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for _ in range(9):
            i = chance.randrange(3)
            if i in members:
                members.pop(i).close()
            else:
                members[i] = stations[i].join(i, 3, elastic=True)
            time.sleep(chance.random() * 0.3)
        for i in range(3):
            if i not in members:
                members[i] = stations[i].join(i, 3, elastic=True)
        eventually(
            lambda: [members[i].partitions() for i in range(3)] == [{0, 3}, {1, 4}, {2, 5}],
            "each has its share",
        )
    finally:
        ended.set()
        watcher.join(10)
    assert overlaps == []


def test_several_topics_of_one_group_are_shared_apart(process: Callable[..., Process]) -> None:
    one = process()
    one.admin.create_topic("t.0", 2, False)
    assert one.join(0, 1, topic="t.0").partitions() == {0, 1}
    assert one.join(0, 2).partitions() == {0, 2, 4}
    assert one.join(1, 2, group="h").partitions() == {1, 3, 5}


def test_joining_needs_a_known_topic_and_a_replica_within_the_count(process: Callable[..., Process]) -> None:
    one = process()
    with pytest.raises(UnknownTopic, match="nope"):
        one.join(0, 1, topic="nope")
    with pytest.raises(ValueError, match=r"\[0, 2\), got 2"):
        one.join(2, 2)


# -- who is in the way


def test_a_second_holder_is_refused_at_once_and_told_who_has_the_share(
    process: Callable[..., Process],
) -> None:
    one, other = process(), process()
    held = one.join(0, 2, member="rollout-0")
    for each in (one, other):
        started = time.monotonic()
        with pytest.raises(
            ShareHeld, match=rf"share 0/2 was asked.* {os.getpid()} on .*rollout-0.*holds share 0/2"
        ):
            each.join(0, 2)
        assert time.monotonic() - started < 5
    assert held.partitions() == {0, 2, 4}
    assert other.join(1, 2).partitions() == {1, 3, 5}
    assert (held.partitions(), held.generation) == ({0, 2, 4}, 1)
    held.close()
    held.close()
    assert other.join(0, 2).partitions() == {0, 2, 4}


def test_a_member_that_splits_the_topic_otherwise_is_refused(process: Callable[..., Process]) -> None:
    one = process()
    held = one.join(0, 2)
    with pytest.raises(ShareHeld, match=r"1/3.*0/2"):
        one.join(1, 3)
    held.close()
    assert one.join(1, 3).partitions() == {1, 4}


@pytest.mark.parametrize("same", [True, False], ids=["the same share", "another split"])
def test_of_those_who_come_at_the_same_moment_one_is_let_in(
    process: Callable[..., Process], same: bool
) -> None:
    stations = [process() for _ in range(3)]
    outcomes: list[Any] = [None] * 3
    start = threading.Barrier(3)

    def join(i: int) -> None:
        start.wait(SOON_S)
        try:
            outcomes[i] = stations[i].join(0, 1 if same else i + 1, member=f"m{i}")
        except LogError as error:
            outcomes[i] = error

    threads = [threading.Thread(target=join, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    joined = [outcome for outcome in outcomes if isinstance(outcome, KafkaMembership)]
    refused = [outcome for outcome in outcomes if isinstance(outcome, ShareHeld)]
    assert (len(joined), len(refused)) == (1, 2), outcomes
    expected = set(range(0, 6, joined[0].me.replicas))
    eventually(lambda: joined[0].partitions() == expected, "who was let in has the share")
    assert all("holds share" in str(error) for error in refused)


def test_a_holder_on_another_machine_is_waited_for_until_its_session_would_be_over(
    process: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = process(), process()
    held = one.join(0, 1, member="far")
    monkeypatch.setattr("streams.kafka.holder._machine", lambda: "another machine")
    started = time.monotonic()
    with pytest.raises(ShareHeld, match="far"):
        other.join(0, 1)
    assert SESSION_S < time.monotonic() - started < SESSION_S + 8
    threading.Timer(0.7, held.close).start()
    assert other.join(0, 1).partitions() == set(range(6))


def test_a_group_that_foreign_consumers_use_is_refused_naming_the_way_out(
    process: Callable[..., Process], kafka: str, prefix: str
) -> None:
    stranger = KafkaConsumer(
        f"{prefix}t", bootstrap_servers=kafka, group_id=f"{prefix}g", enable_auto_commit=False
    )
    joined = threading.Event()

    def poll() -> None:
        while not joined.is_set():
            stranger.poll(timeout_ms=100)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        eventually(lambda: bool(stranger.assignment()), "the stranger is in the group")
        with pytest.raises(LogError, match="in use by other consumers"):
            process().join(0, 1)
    finally:
        joined.set()
        thread.join(10)
        stranger.close()


def test_a_session_timeout_that_the_broker_does_not_allow_is_named(process: Callable[..., Process]) -> None:
    with pytest.raises(LogError, match=r"log\.kafka\.session_timeout"):
        process(session_timeout=timedelta(seconds=0.5)).join(0, 1)


# -- members that die, sleep and are stuck


def test_the_share_of_a_killed_elastic_member_moves_within_its_session_and_back_when_it_returns(
    process: Callable[..., Process], child: Callable[..., Child]
) -> None:
    process()
    members = [child(i, 3, elastic=True) for i in range(3)]
    eventually(all_have(members, {0, 3}, {1, 4}, {2, 5}), "all have joined")
    members[1].kill()
    rest = [members[0], members[2]]
    seconds = eventually(lambda: rest[0].has | rest[1].has == set(range(6)), "the others took over")
    assert seconds < SESSION_S + 6
    assert sorted(len(member.has) for member in rest) == [3, 3]
    members[1] = child(1, 3, elastic=True)
    eventually(all_have(members, {0, 3}, {1, 4}, {2, 5}), "it has its share again")


def test_a_restart_within_the_session_is_not_noticed_by_the_others(
    process: Callable[..., Process], child: Callable[..., Child]
) -> None:
    process()
    members = [child(i, 3, elastic=True, session_s=10, member=f"r{i}") for i in range(3)]
    eventually(all_have(members, {0, 3}, {1, 4}, {2, 5}), "all have joined")
    time.sleep(0.5)
    before = [members[0].lines[-1], members[2].lines[-1]]
    members[1].kill()
    members[1] = child(1, 3, elastic=True, session_s=10, member="r1 again")
    eventually(all_have(members, {0, 3}, {1, 4}, {2, 5}), "it is back")
    time.sleep(1)
    assert [members[0].lines[-1], members[2].lines[-1]] == before, (
        "neither partitions, generation nor joins changed"
    )
    with pytest.raises(ShareHeld, match=f"{members[1].process.pid} on .*r1 again"):
        process().join(1, 3)


def test_a_member_that_slept_past_its_session_has_nothing_until_it_has_joined_again(
    process: Callable[..., Process], child: Callable[..., Child]
) -> None:
    process()
    members = [child(i, 2, elastic=True) for i in range(2)]
    eventually(all_have(members, {0, 2, 4}, {1, 3, 5}), "both have joined")
    sleeper, other = members
    sleeper.process.send_signal(signal.SIGSTOP)
    eventually(lambda: other.has == set(range(6)), "the other took over")
    said = len(sleeper.lines)
    sleeper.process.send_signal(signal.SIGCONT)
    eventually(all_have(members, {0, 2, 4}, {1, 3, 5}), "it has its share again")
    assert sleeper.lines[said][0] == frozenset(), "the first that it says after waking"


def test_a_member_whose_place_was_taken_while_it_slept_stays_out_until_the_newcomer_is_gone(
    process: Callable[..., Process], child: Callable[..., Child]
) -> None:
    process()
    sleeper = child(0, 1, elastic=True, member="old")
    eventually(lambda: sleeper.has == set(range(6)), "it has joined")
    sleeper.process.send_signal(signal.SIGSTOP)
    time.sleep(SESSION_S + 0.5)
    newcomer = child(0, 1, elastic=True, member="new")
    eventually(lambda: newcomer.has == set(range(6)), "the newcomer was let in")
    sleeper.process.send_signal(signal.SIGCONT)
    eventually(lambda: sleeper.has == frozenset(), "the old one has nothing")
    time.sleep(1)
    assert (sleeper.has, newcomer.has, newcomer.generation) == (frozenset(), set(range(6)), 1)
    newcomer.kill()
    eventually(lambda: sleeper.has == set(range(6)), "the old one is back")


def test_a_stuck_stage_loses_its_share_and_gets_it_back_when_it_asks_again(
    process: Callable[..., Process], caplog: pytest.LogCaptureFixture
) -> None:
    other = process().join(1, 2, elastic=True)
    stuck = process(max_silence=timedelta(seconds=1)).join(0, 2, elastic=True)
    assert stuck.partitions() == {0, 2, 4}
    eventually(lambda: other.partitions() == set(range(6)), "a stage that does not ask is taken for stuck")
    assert "raise log.kafka.max_silence_s if its work takes so long" in caplog.text
    assert stuck.partitions() == frozenset()
    eventually(lambda: stuck.partitions() == {0, 2, 4}, "it asks again")
    assert other.partitions() == {1, 3, 5}


def assigned(kafka: str, group: str) -> list[int]:
    """Numbers of partitions that the members of the group have, as Kafka's own tools see it."""
    client: Any = KafkaAdminClient(bootstrap_servers=kafka)
    described = client.describe_groups([group])[group]
    client.close()
    given = [member["member_assignment"] for member in described["members"]]
    return [sum(len(topic["partitions"]) for topic in each["assigned_partitions"]) for each in given if each]


def test_what_was_lost_and_came_back_between_two_answers_is_missing_from_one(
    process: Callable[..., Process], kafka: str, prefix: str
) -> None:
    member = process().join(0, 2, elastic=True)
    assert member.partitions() == set(range(6))
    visitor = process().join(1, 2, elastic=True)
    assert visitor.partitions() == {1, 3, 5}
    visitor.close()
    eventually(
        lambda: assigned(kafka, f"{prefix}g") == [6],
        "all is its own again, without a question of the stage's",
    )
    time.sleep(0.3)
    assert (member.generation, member.partitions(), member.partitions()) == (1, {0, 2, 4}, set(range(6)))
    assert member.generation == 3


# -- the broker


def test_a_member_outlives_the_brokers_restart_and_knows_nothing_while_it_is_away_too_long(
    own_kafka: Node, prefix: str, child: Callable[..., Child]
) -> None:
    server = own_kafka.address
    one = Process(server, prefix)
    one.admin.create_topic("t", 6, False)
    patient = [child(i, 2, server, elastic=True, session_s=30) for i in range(2)]
    eventually(all_have(patient, {0, 2, 4}, {1, 3, 5}), "both have joined")
    time.sleep(0.5)
    before = [member.lines[-1][:2] for member in patient]
    own_kafka.kill()
    own_kafka.start()
    hasty = one.join(0, 1, group="h")
    assert hasty.partitions() == set(range(6))
    one.groups.commit_hint("h", {TopicPartition("t", 3): 7})
    own_kafka.kill()
    assert hasty.partitions() == set(range(6)), "an outage shorter than the session changes nothing"
    seconds = eventually(lambda: hasty.partitions() == frozenset(), "its session is over by its own clock")
    assert seconds < SESSION_S + 1
    own_kafka.start()
    seconds = eventually(lambda: hasty.partitions() == set(range(6)), "it is back by itself")
    assert seconds < 10
    assert hasty.generation == 3
    assert one.groups.hints("h") == {TopicPartition("t", 3): 7}
    assert [member.lines[-1][:2] for member in patient] == before, "their sessions outlasted both restarts"
    own_kafka.kill()
    started = time.monotonic()
    for position in range(1000):
        one.groups.commit_hint("h", {TopicPartition("t", 0): position})
        one.groups.commit_hint("memberless", {TopicPartition("t", 0): position})
    assert time.monotonic() - started < 1, "hints do not wait for a broker"
    started = time.monotonic()
    one.close()
    assert time.monotonic() - started < 4, "nor does closing"


def test_joining_without_a_broker_is_reported_when_the_time_is_over(prefix: str) -> None:
    one = Process("127.0.0.1:1", prefix, timeout=timedelta(seconds=0.5))
    with pytest.raises(LogUnavailable, match=r"no Kafka broker at 127\.0\.0\.1:1"):
        one.join(0, 1)
    one.close()


def test_waiting_for_a_share_ends_soon_after_an_interrupt(
    process: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted = threading.Event()
    one = process(session_timeout=timedelta(seconds=20))
    held = one.join(0, 1, member="far")
    monkeypatch.setattr("streams.kafka.holder._machine", lambda: "another machine")
    threading.Timer(0.5, interrupted.set).start()
    started = time.monotonic()
    with pytest.raises(LogUnavailable, match=r"interrupted while waiting for a sign that process .*far"):
        process(interrupted=interrupted.is_set).join(0, 1)
    assert time.monotonic() - started < 6
    held.close()


def test_giving_a_share_back_is_quick(process: Callable[..., Process]) -> None:
    one = process()
    members = [one.join(i, 3) for i in range(3)]
    started = time.monotonic()
    members[0].close()
    assert time.monotonic() - started < 2  # a tenth of a second on a quiet machine
    started = time.monotonic()
    one.close()
    assert time.monotonic() - started < 3


def test_a_member_asks_for_no_topic_to_be_made(process: Callable[..., Process], kafka: str) -> None:
    consumer, network = connect(KafkaConsumer, {"bootstrap_servers": kafka})
    cluster: Any = network.cluster
    assert cluster.metadata_request().allow_auto_topic_creation is False
    consumer.close()


# -- hints


def test_hints_are_remembered_and_shown_at_once_and_later_by_others(
    process: Callable[..., Process], kafka: str, prefix: str
) -> None:
    one = process()
    one.admin.create_topic("u", 1, False)
    assert (one.groups.groups(), one.groups.hints("g")) == ([], {})
    one.groups.commit_hint("g", {TopicPartition("t", 0): 5, TopicPartition("u", 0): 0})
    one.groups.commit_hint("g", {TopicPartition("t", 0): 3, TopicPartition("t", 2): 1 << 40})
    one.groups.commit_hint("other", {TopicPartition("t", 1): 1})
    expected = {TopicPartition("t", 0): 3, TopicPartition("t", 2): 1 << 40, TopicPartition("u", 0): 0}
    assert one.groups.hints("g") == expected
    assert one.groups.groups() == ["g", "other"]
    one.close()
    later = process()
    assert later.groups.hints("g") == expected
    assert later.groups.hints("other") == {TopicPartition("t", 1): 1}
    assert later.groups.hints("unknown") == {}
    assert later.groups.groups() == ["g", "other"]
    client: Any = KafkaAdminClient(bootstrap_servers=kafka)
    assert len(client.list_group_offsets(f"{prefix}g")[f"{prefix}g"]) == 3, "Kafka's own tools see them"
    client.close()


def test_hints_of_a_group_with_members_go_through_its_member_and_survive_its_close(
    process: Callable[..., Process],
) -> None:
    one, other, reader = process(), process(), process()
    stays = other.join(1, 2)
    member = one.join(0, 2)
    one.groups.commit_hint("g", {TopicPartition("t", 0): 5})
    eventually(lambda: reader.groups.hints("g") == {TopicPartition("t", 0): 5}, "it is written", 5)
    one.groups.commit_hint("g", {TopicPartition("t", 0): 6, TopicPartition("t", 2): 1})
    member.close()
    eventually(
        lambda: reader.groups.hints("g") == {TopicPartition("t", 0): 6, TopicPartition("t", 2): 1},
        "the last ones, too",
        5,
    )
    assert stays.partitions() == {1, 3, 5}


def test_a_hint_that_the_group_refuses_harms_nobody(process: Callable[..., Process]) -> None:
    process().join(0, 1)
    outsider = process()
    outsider.groups.commit_hint("g", {TopicPartition("t", 0): 5})
    eventually(lambda: outsider.groups.hints("g") == {}, "given up", 5)
    assert outsider.groups.groups() == []
