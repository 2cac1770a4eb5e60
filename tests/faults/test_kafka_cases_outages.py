"""Brokers that come late, go away and come back, and topics that are not there (cases O03, O07)."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("kafka")

from engine.roles import create_topics, open_run_log, topics_of
from replay.ledger import read_run
from replay.verify import verify
from streams.broker.node import Node
from streams.errors import UnknownTopic
from streams.events import DataEnded, Metrics, RewardAssigned
from streams.log import EventLog, NewRecord
from streams.topics import ALL_TOPICS, Topics
from tests.faults import harness
from tests.support.events import events, finished, put
from tests.support.kafka import QUICK
from tests.support.kafka_runs import (
    KAFKA,
    Daemons,
    Hold,
    calls_in,
    eventually,
    millstream,
    newest_metrics,
    partitions_of_groups,
    put_all,
    put_groups,
    run_on,
    scoring,
)


@pytest.fixture(scope="module")
def node(kafka_folder: Path) -> Iterator[Node]:
    """A broker that these tests kill, stop and start."""
    node = Node(kafka_folder / "outages", port=0, java_options=QUICK)
    yield node
    node.kill()


@pytest.fixture
def broker(node: Node) -> Node:
    node.start()
    return node


# -- O03: what is not in the log is not said to be


def test_a_daemon_that_must_end_without_its_broker_fails_and_says_how_much_is_undelivered(
    broker: Node, prefix: str, tmp_path: Path
) -> None:
    """Case O03: verdicts are made and sent while the broker hangs, then dies. If it is back in time they are all there;
    if the daemon must end before, it says how many are not, and the next one makes them again. (An outage can cost the
    stage its partition, which it rebuilds; so a verdict may lie there twice, of which readers pass one over.)"""
    calls, gate = tmp_path / "calls", tmp_path / "gate"
    kafka = {**KAFKA, "delivery_timeout_s": 5.0}
    config = run_on(
        tmp_path, broker.address, prefix, log={"kafka": kafka}, reward=scoring(calls, gate=str(gate))
    )
    topics = topics_of(config)
    with open_run_log(config) as log, Daemons(config) as daemons:
        reward = daemons.start("reward")

        def score_ten_without_a_broker(first: int) -> None:
            uids = [f"0-{seq}/0/0" for seq in range(first, first + 10)]
            samples = [finished(seq, 0, seq, n_samples=1) for seq in range(first, first + 10)]
            put_all(log, topics, "trajectories", samples)
            eventually(lambda: uids[0] in calls_in(calls), "the first call", reward)
            broker.pause()
            gate.touch()
            eventually(lambda: set(uids) <= set(calls_in(calls)), "ten calls", reward)
            time.sleep(0.5)  # in which the stage takes them in, and sends them
            broker.kill()

        def verdicts() -> set[str]:
            return {e.uid for e in events(log, topics, "rewards") if isinstance(e, RewardAssigned)}

        score_ten_without_a_broker(0)
        broker.start()
        eventually(lambda: len(verdicts()) == 10, "ten verdicts", reward, timeout_s=30)

        gate.unlink()
        score_ten_without_a_broker(10)
        asked = time.monotonic()
        reward.terminate()
        assert reward.exit_code(8) == 1
        assert time.monotonic() - asked < 8
        assert f"10 of {topics.name('rewards')}/0" in reward.text(), "undelivered"

        broker.start()
        assert verdicts() == {f"0-{seq}/0/0" for seq in range(10)}
        reward = daemons.start("reward")
        eventually(lambda: len(verdicts()) == 20, "the other ten", reward)
        reward.terminate()
        assert reward.exit_code() == 0
        assert log.end(topics.name("rewards"), 0) <= 40


# -- O07: late is not missing, and missing is not late


class Door:
    """An address in front of a broker: it counts who comes, and turns everybody away until it is opened."""

    def __init__(self, address: str) -> None:
        host, _, port = address.partition(":")
        self._broker = (host, int(port))
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.attempts = 0  # before it was opened
        self.is_open = False
        threading.Thread(target=self._run, name="door", daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _run(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            if not self.is_open:
                self.attempts += 1
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.close()  # by a reset
                continue
            broker = socket.create_connection(self._broker)
            for source, to in ((client, broker), (broker, client)):
                threading.Thread(target=_pump, args=(source, to), daemon=True).start()


def _pump(source: socket.socket, to: socket.socket) -> None:
    with contextlib.suppress(OSError), source:
        while data := source.recv(65536):
            to.sendall(data)
        to.shutdown(socket.SHUT_WR)


def test_daemons_wait_for_a_late_broker_with_few_attempts_and_little_work_and_then_run(
    broker: Node, prefix: str, tmp_path: Path
) -> None:
    """Case O07a: the broker is there 6 s after the daemons."""
    config = run_on(tmp_path, broker.address, prefix)
    broker.stop()
    topics = topics_of(config)
    doors = {role: Door(broker.address) for role in ("reward", "trainer")}
    with Daemons(config) as daemons, contextlib.ExitStack() as stack:
        for door in doors.values():
            stack.callback(door.close)
        began = time.monotonic()
        started = {
            role: daemons.start(role, "0/1", "--set", f"log.url=kafka://{door.address}/{prefix}")
            for role, door in doors.items()
        }
        for role, door in doors.items():
            eventually(lambda d=door: d.attempts, f"the first attempt of {role}", started[role], timeout_s=30)
        used, since = {role: daemon.cpu_s() for role, daemon in started.items()}, time.monotonic()
        broker.start()
        time.sleep(max(0.0, began + 6 - time.monotonic()))
        waited = time.monotonic() - since
        busy = {role: (daemon.cpu_s() - used[role]) / waited for role, daemon in started.items()}
        for door in doors.values():
            door.is_open = True
        with open_run_log(config) as log:
            said = {
                "reward": lambda: newest_metrics(log, topics, "reward-0"),
                "trainer": lambda: events(log, topics, "ledger"),
            }
            for role, daemon in started.items():
                eventually(said[role], f"{role} to run", daemon, timeout_s=10)
        assert all(door.attempts <= 20 for door in doors.values())
        assert all(share < 0.5 for share in busy.values()), "of a core, while they waited"
        for daemon in started.values():
            daemon.terminate()
            assert daemon.exit_code() == 0


def test_a_topic_that_is_not_there_is_named_at_once(kafka: str, prefix: str, tmp_path: Path) -> None:
    """Case O07b: no waiting for what nobody will make."""
    config = run_on(
        tmp_path, kafka, prefix, made=["tasks", "trajectories", "groups", "ledger", "fleet", "metrics"]
    )
    began = time.monotonic()
    assert millstream("config", config.run.dir).returncode == 0
    start_s = time.monotonic() - began  # of a Python on this machine now
    for role in ("reward", "trainer"):
        began = time.monotonic()
        done = millstream("serve", role, config.run.dir)
        assert time.monotonic() - began - start_s < 5
        assert done.returncode == 2, done.stderr
        assert f"{config.run.name}.rewards, {config.run.name}.dead" in done.stderr
        assert "millstream topics" in done.stderr and "--create" in done.stderr
    began = time.monotonic()
    done = millstream("tail", config.run.dir, "rewards", "-e")
    assert time.monotonic() - began - start_s < 5
    assert done.returncode == 2 and "no topic 'rewards' in this run" in done.stderr


def test_a_broker_that_makes_topics_by_itself_is_never_brought_to(
    make_kafka: Callable[..., Node], prefix: str, tmp_path: Path
) -> None:
    """Case O07c: asking for a topic would make one, of one partition."""
    node = make_kafka(properties={"auto.create.topics.enable": "true", "num.partitions": 1})
    node.start()
    config = run_on(tmp_path, node.address, prefix, log={"partitions": 4}, made=[])
    for role in ("feeder", "rollout", "collector"):
        done = millstream("serve", role, config.run.dir)
        assert done.returncode == 2 and f"{config.run.name}.tasks" in done.stderr
    for command in (
        ("tail", config.run.dir, "ledger", "-e"),
        ("topics", config.run.dir),
        ("verify", config.run.dir),
    ):
        millstream(*command)
    with open_run_log(config) as log:
        assert log.topics() == {}
        for call in (log.start, log.end):
            with pytest.raises(UnknownTopic):
                call(topics_of(config).name("tasks"), 0)
        with pytest.raises(UnknownTopic):
            log.append(topics_of(config).name("tasks"), 0, [NewRecord(b"x")])
        assert log.topics() == {}
        create_topics(config)
        assert log.topics() == {topics_of(config).name(w): topics_of(config).count(w) for w in ALL_TOPICS}


# -- a broker that dies in mid-run


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_broker_killed_in_mid_run_costs_nothing_and_every_daemon_comes_back_by_itself_within_10_s(
    broker: Node, prefix: str, tmp_path: Path
) -> None:
    url = f"kafka://{broker.address}/{prefix}"
    config = harness.configuration(tmp_path, url, run={"steps": 30}, reward={"replicas": 1})
    topics = topics_of(config)
    harness.begin(config)
    with harness.supervised(config) as launcher, open_run_log(config, readonly=True) as log:
        for kind in ("batch_cut", "batch_cut", "checkpoint_saved"):
            harness.await_event(config, log, kind, "before the kill")
        pids = {name: launcher.pid(name) for name in launcher.names()}
        assert len(pids) == 6, "two of them engines"
        broker.kill()
        time.sleep(1)
        broker.start()
        answered_ms = time.time_ns() // 1_000_000
        back = eventually(
            lambda: _back(log, topics, answered_ms, len(pids)), "all daemons to be at work again"
        )
        late = {name: at_ms - answered_ms for name, at_ms in back.items() if at_ms - answered_ms > 10_000}
        assert not late, "milliseconds after the broker answered"
        assert {name: launcher.pid(name) for name in launcher.names()} == pids, "nobody was started again"
        eventually(lambda: launcher.ended, "the end of the run", timeout_s=120)
        assert all(len(found) == 1 for found in partitions_of_groups(log, topics).values())
    result = harness.summary(config, [], seed=0, seconds=0)
    assert result.problems == [], "lost, trained twice, or not what its replay gives"
    assert (result.steps, result.epochs) == (30, 1)


def _back(log: EventLog, topics: Topics, since_ms: int, count: int) -> dict[str, int]:
    """Daemon → when it first said how it is since then; nothing until all have."""
    first: dict[str, int] = {}
    for event in events(log, topics, "metrics"):
        if isinstance(event, Metrics) and event.at_ms >= since_ms:
            first.setdefault(event.source, event.at_ms)
    return first if len(first) == count else {}


def test_a_lone_trainer_whose_append_times_out_goes_on_as_the_one_it_was(
    broker: Node, prefix: str, tmp_path: Path
) -> None:
    """Case O09, the false alarm: here it is the append of a step that the broker keeps waiting, longer than its limit.
    Nobody has taken over, so nobody is fenced; and the append, which lands late, lands once."""
    kafka = {**KAFKA, "request_timeout_s": 1.0, "delivery_timeout_s": 1.5}
    config = run_on(
        tmp_path,
        broker.address,
        prefix,
        log={"kafka": kafka},
        rollout={"n_samples_per_prompt": 2},
        trainer={"rollout_batch_size": 1},
        staleness={"max_weight_staleness": 30},
    )
    topics = topics_of(config)
    hold = Hold(tmp_path, "engine.trainer.loop:Trainer._cut", "self.step == 3")
    with open_run_log(config) as log, Daemons(config) as daemons:
        put_groups(log, topics, 0, 6, n_samples=2, completed=True)
        trainer = daemons.start("trainer", script=hold.script)
        eventually(hold.is_reached, "the trainer to come to step 4", trainer)
        broker.pause()
        try:
            hold.release()
            eventually(
                lambda: "to take an append" in trainer.text(), "the append to time out", trainer, timeout_s=30
            )
        finally:
            broker.resume()
        put(log, topics, "ledger", DataEnded(count=6))
        assert trainer.exit_code() == 0
        report = verify(log, topics)
        assert report.holds, report.as_table()
        view = read_run(log, topics)
    assert len(view.epochs) == 1 and not view.void
    assert [cut.event.step for cut in view.cuts] == [1, 2, 3, 4, 5, 6]
    assert [event.version for event in view.versions] == [0, 1, 2, 3, 4, 5, 6]
