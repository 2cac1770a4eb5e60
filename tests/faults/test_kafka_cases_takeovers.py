"""Who takes over from whom, on a real broker: trainers (case O09), replicas that die and come, stages killed between
an append and its commit."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("kafka")

from engine.roles import open_run_log, topics_of
from replay.ledger import read_run
from replay.verify import verify
from streams.events import DataEnded, EngineReady
from streams.log import EventLog
from streams.topics import Topics
from tests.faults import harness
from tests.support.events import events, put
from tests.support.kafka_runs import (
    Daemons,
    Hold,
    ends,
    eventually,
    newest_metrics,
    partitions_of_groups,
    put_groups,
    run_on,
    written_by,
)

# -- O09: order fences zombies


@pytest.mark.parametrize(
    ("method", "when", "after", "void"),
    [
        ("_write_weights", "version == 8", True, "WeightsPublished"),
        ("_cut", "self.step == 7", False, "BatchCut"),
    ],
    ids=["before it announced version 8", "before it cut step 8"],
)
def test_a_trainer_that_wakes_after_a_takeover_writes_to_no_effect_and_exits(
    kafka: str, prefix: str, tmp_path: Path, method: str, when: str, after: bool, void: str
) -> None:
    """Case O09: A is stopped with 7 published, B takes over and publishes 8 and 9, then A goes on and writes."""
    config = run_on(
        tmp_path,
        kafka,
        prefix,
        rollout={"n_samples_per_prompt": 2},
        trainer={"rollout_batch_size": 1},
        staleness={"max_weight_staleness": 30},
    )
    topics = topics_of(config)
    hold = Hold(tmp_path, f"engine.trainer.loop:Trainer.{method}", when, after=after)
    with open_run_log(config) as log, Daemons(config) as daemons:
        put_groups(log, topics, 0, 8, n_samples=2, completed=True)
        engine, first = daemons.start("rollout"), daemons.start("trainer", script=hold.script)
        eventually(hold.is_reached, "A to come to its place", first, engine)
        eventually(lambda: read_run(log, topics).version == 7, "version 7 of A", first, engine)
        first.suspend()
        assert [event.version for event in read_run(log, topics).versions] == list(range(8))

        second = daemons.start("trainer")
        put_groups(log, topics, 8, 1, n_samples=2, completed=True)
        eventually(lambda: read_run(log, topics).version == 9, "version 9 of B", second, engine)
        hold.release()
        first.resume()
        assert first.exit_code() == 3, "fenced"
        assert "has taken over run" in first.text()

        view = read_run(log, topics)
        (a, _), (b, _) = view.epochs
        assert [type(entry.event).__name__ for entry in view.void] == [void]
        assert getattr(view.void[0].event, "epoch", None) == a
        newest = {event.version: event.epoch for event in view.versions}
        assert [newest[version] for version in (7, 8, 9)] == [a if after else b, b, b]
        assert view.versions[-1].version == 9
        eventually(lambda: _held(log, topics)[-1:] == [(b, 9)], "the engine to hold 9 of B", second, engine)
        time.sleep(1)  # in which it would follow A
        held = _held(log, topics)
        assert held == sorted(held) and held[-1] == (b, 9), "no engine goes back"

        put(log, topics, "ledger", DataEnded(count=9))
        assert [daemon.exit_code() for daemon in (second, engine)] == [0, 0]
        report = verify(log, topics)
        assert report.holds, report.as_table()
        assert [cut.event.step for cut in read_run(log, topics).cuts] == list(range(1, 10))


def _held(log: EventLog, topics: Topics) -> list[tuple[int, int]]:
    """(epoch, version) of every version that the engine said it holds."""
    return [(e.epoch, e.version) for e in events(log, topics, "fleet") if isinstance(e, EngineReady)]


# -- replicas share partitions, and take them over


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_engines_and_reward_workers_share_the_partitions_when_one_is_killed_and_when_one_is_added(
    kafka: str, prefix: str, tmp_path: Path
) -> None:
    """Nobody starts the killed ones again, so that their partitions must go to those who are left."""
    config = harness.configuration(tmp_path, f"kafka://{kafka}/{prefix}")
    harness.begin(config)
    topics = topics_of(config)
    with open_run_log(config, readonly=True) as log, Daemons(config) as daemons:
        one = {role: daemons.start(role) for role in ("feeder", "collector", "trainer")}
        pairs = {(role, i): daemons.start(role, f"{i}/2") for role in STAGES for i in range(2)}

        def until_shared(shares: dict[int, set[int]], what: str) -> float:
            """Until each of these replicas, of both stages, has written what is new in each of its partitions."""
            since, began = ends(log, topics, list(STAGES.values())), time.monotonic()
            for role, word in STAGES.items():
                wanted = {(f"{role}-{i}", p) for i, partitions in shares.items() for p in partitions}
                eventually(
                    lambda w=word, n=wanted: n <= written_by(log, topics, w, since),
                    f"{role}: {what}",
                    *one.values(),
                )
            return time.monotonic() - began

        until_shared({0: {0, 2}, 1: {1, 3}}, "both to share the partitions")
        for role in STAGES:
            pairs[role, 1].kill()
        took_s = until_shared({0: {0, 1, 2, 3}}, "the one that is left to take all")
        assert took_s < 30, "a session of 6 s, and the time that a busy machine takes"
        for role in STAGES:
            pairs[role, 1] = daemons.start(role, "1/2")
        until_shared({0: {0, 2}, 1: {1, 3}}, "the one that was added to have its share")
        since = ends(log, topics, list(STAGES.values()))
        time.sleep(1)
        for role, word in STAGES.items():
            shares = {(f"{role}-{partition % 2}", partition) for partition in range(4)}
            assert written_by(log, topics, word, since) <= shares, "and the other has let go of it"
        one["trainer"].terminate()
        assert one["trainer"].exit_code() == 0
        steps = read_run(log, topics).step + 2
        one["trainer"] = daemons.start("trainer", "0/1", "--set", f"run.steps={steps}")
        for daemon in (*one.values(), *pairs.values()):
            assert daemon.exit_code() == 0, daemon.text()
        report = verify(log, topics)
        assert report.holds, report.as_table()
        assert read_run(log, topics).finished is not None
        assert all(len(found) == 1 for found in partitions_of_groups(log, topics).values())


STAGES = {"rollout": "trajectories", "reward": "rewards"}  # role → what it writes


def test_what_a_member_writes_after_its_partition_went_to_another_is_passed_over_and_counted(
    kafka: str, prefix: str, tmp_path: Path
) -> None:
    """It is stopped with verdicts in its hand, for longer than its session; then it goes on where it was."""
    config = run_on(tmp_path, kafka, prefix, log={"partitions": 2}, reward={"replicas": 2, "workers": 1})
    topics = topics_of(config)
    hold = Hold(tmp_path, "consumers.reward:RewardStage._send", "verdicts")
    with open_run_log(config) as log, Daemons(config) as daemons:
        put_groups(log, topics, 0, 1)
        collector, first = daemons.start("collector"), daemons.start("reward", "0/2", script=hold.script)
        eventually(hold.is_reached, "its first verdict", first)
        first.suspend()
        second = daemons.start("reward", "1/2")
        eventually(lambda: log.end(topics.name("rewards"), 0) == 4, "the other's verdicts", second, collector)
        hold.release()
        first.resume()
        eventually(lambda: log.end(topics.name("rewards"), 0) > 4, "what it had in its hand", first)
        put_groups(log, topics, 1, 1)
        eventually(lambda: log.end(topics.name("groups"), 0) == 2, "both groups", collector, first, second)
        count = Counter(event.uid for event in events(log, topics, "rewards"))
        assert set(count) == {f"0-{seq}/{index}/0" for seq in range(2) for index in range(4)}
        late = sum(count.values()) - 8
        assert 1 <= late <= 4
        eventually(
            lambda: newest_metrics(log, topics, "collector-0").get("duplicates_total") == late,
            "the count of the late ones",
            collector,
        )
        groups = events(log, topics, "groups")
    assert [[member.uid for member in group.members] for group in groups] == [
        [f"0-{seq}/{index}/0" for index in range(4)] for seq in range(2)
    ]


# -- a stage dies between an append and its commit

APPENDS = {
    "collector": "group_completed",
    "rollout": "trajectory_finished",
    "feeder": "task_dispatched",
    "reward": "reward_assigned",
    "trainer": "batch_cut",
}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_stage_killed_right_after_an_append_loses_nothing_and_trains_nothing_twice(
    kafka: str, prefix: str, tmp_path: Path
) -> None:
    """Its hint is written once a second, so it dies before the commit of what it has just appended. One daemon of each
    role, so that nobody else goes on in its place."""
    replicas = {"replicas": 1}
    config = harness.configuration(tmp_path, f"kafka://{kafka}/{prefix}", rollout=replicas, reward=replicas)
    harness.begin(config)
    with open_run_log(config, readonly=True) as log, Daemons(config) as daemons:
        running = {role: daemons.start(role) for role in APPENDS}
        for role, kind in APPENDS.items():
            harness.await_event(config, log, kind, f"before {role} is killed")
            running[role].kill()
            steps = read_run(log, topics_of(config)).step + 5
            options = ("--set", f"run.steps={steps}") if role == "trainer" else ()
            running[role] = daemons.start(role, "0/1", *options)
        for daemon in running.values():
            assert daemon.exit_code() == 0, daemon.text()
    result = harness.summary(config, [], seed=0, seconds=0)
    assert result.problems == [], "lost, trained twice, or not what its replay gives"
    assert (result.steps, result.epochs) == (steps, 2)
