"""The reward stage on a log: poison records (O05), hanging scorers (O20), twins, restarts."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path

import pytest

from consumers.reward import RewardStage
from consumers.rewards.pool import Scored, ScoringPool
from consumers.rewards.types import RewardInput
from streams.errors import LogFull
from streams.events import (
    DeadLetter,
    EpochStarted,
    Paused,
    Resumed,
    RewardAssigned,
    RolloutFailed,
    RunFinished,
    ScoringFailed,
)
from streams.log import NewRecord
from streams.topics import Topics
from tests.support.events import events, finished, member_fields, put, run_log
from tests.support.shares import LateLog, SharedStore


@pytest.fixture
def pool():
    made = ScoringPool("exact", {}, workers=0, timeout=timedelta(seconds=5), group=False)
    yield made
    made.close()


def stage_on(log, topics, pool, **changes) -> RewardStage:
    made = RewardStage(log, topics, pool, **changes)
    made.start()
    return made


def settle(stage: RewardStage, within_s: float = 20) -> None:
    """Until nothing moves and nothing is in flight."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not stage.round() and not any(lane.in_flight for lane in stage._lanes.values()):
            return
        time.sleep(0.001)
    raise AssertionError("the reward stage never comes to rest")


def test_each_trajectory_gets_its_verdict_by_reference(pool):
    log, topics = run_log()
    put(log, topics, "trajectories", finished(0, 0, 0, response="7"))
    put(log, topics, "trajectories", finished(0, 1, 0, response="8"))
    settle(stage_on(log, topics, pool))
    verdicts = events(log, topics, "rewards")
    assert [(v.uid, v.reward, v.trajectory_offset) for v in verdicts] == [
        ("0-0/0/0", 1.0, 0),
        ("0-0/1/0", 0.0, 1),
    ]
    assert verdicts[0].trainable_versions == [(1, 0, 3)]


def test_a_poison_record_stops_nobody_and_is_kept_whole(pool):
    log, topics = run_log()
    for offset in range(10):
        if offset == 4:
            log.append(topics.name("trajectories"), 0, [NewRecord(bytes.fromhex("c16761"))])
        else:
            put(log, topics, "trajectories", finished(offset, 0, offset))
    stage = stage_on(log, topics, pool)
    settle(stage)
    assert len(events(log, topics, "rewards")) == 9
    assert stage._lanes[0].inputs.progress().low_water == 10
    (letter,) = events(log, topics, "dead")
    assert isinstance(letter, DeadLetter)
    assert (letter.topic, letter.partition, letter.offset) == (topics.name("trajectories"), 0, 4)
    assert letter.raw == bytes.fromhex("c16761") and letter.stage == "reward-0" and letter.detail


def test_a_poison_record_whose_dead_letter_cannot_be_written_is_not_passed_over(pool, monkeypatch):
    log, topics = run_log()
    for offset in range(4):
        put(log, topics, "trajectories", finished(offset, 0, offset))
    log.append(topics.name("trajectories"), 0, [NewRecord(bytes.fromhex("c16761"))])
    stage = stage_on(log, topics, pool)
    submit = log.submit

    def full(topic, partition, records):
        if topic == topics.name("dead"):
            raise LogFull("no room")
        return submit(topic, partition, records)

    monkeypatch.setattr(log, "submit", full)
    with pytest.raises(LogFull):
        settle(stage)
    assert stage._lanes[0].position <= 4
    monkeypatch.undo()
    stage.close()
    settle(stage_on(log, topics, pool))
    assert len(events(log, topics, "dead")) == 1


def test_a_failed_rollout_passes_on_as_a_failure_and_not_as_zero(pool):
    log, topics = run_log()
    put(log, topics, "trajectories", RolloutFailed(**member_fields(0, 2, 0), reason="nonfinite_logprob"))
    settle(stage_on(log, topics, pool))
    (verdict,) = events(log, topics, "rewards")
    assert isinstance(verdict, ScoringFailed)
    assert (verdict.stage, verdict.reason, verdict.index) == ("rollout", "nonfinite_logprob", 2)


def test_a_twin_is_counted_and_another_body_of_the_same_uid_is_a_conflict(pool):
    log, topics = run_log()
    put(log, topics, "trajectories", finished(0, 0, 0, response="7"))
    put(log, topics, "trajectories", finished(0, 0, 0, response="7"))
    put(log, topics, "trajectories", finished(0, 0, 0, response="other"))
    stage = stage_on(log, topics, pool)
    settle(stage)
    assert [v.reward for v in events(log, topics, "rewards")] == [1.0]
    assert (stage.counts["duplicates_total"], stage.counts["conflicts_total"]) == (2, 1)
    assert [letter.reason for letter in events(log, topics, "dead")] == ["conflict"]


def test_a_restarted_stage_scores_only_what_has_no_verdict(pool):
    log, topics = run_log()
    for offset in range(5):
        put(log, topics, "trajectories", finished(offset, 0, offset))
    first = stage_on(log, topics, pool)
    settle(first)
    first.close()
    for offset in range(5, 8):
        put(log, topics, "trajectories", finished(offset, 0, offset))
    second = stage_on(log, topics, pool)
    settle(second)
    uids = [verdict.uid for verdict in events(log, topics, "rewards")]
    assert sorted(uids) == sorted({f"0-{seq}/0/0" for seq in range(8)})
    assert second.counts["scored_total"] <= 4


HANGING = """
import re
def reward(sample):
    if sample.response == "evil":
        return float(bool(re.match(r"(a+)+$", "a" * 40 + "b")))
    if sample.response == "raises":
        raise ValueError("scorer broke")
    if sample.response == "none":
        return None
    if sample.response == "nan":
        return float("nan")
    return 1.0
"""


def test_a_scorer_that_never_returns_costs_its_own_sample_and_nothing_else(tmp_path, monkeypatch):
    (tmp_path / "hanging_scorer.py").write_text(HANGING)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path) + os.pathsep + os.environ.get("PYTHONPATH", ""))
    log, topics = run_log()
    for offset in range(16):
        put(log, topics, "trajectories", finished(offset, 0, offset, response="evil" if offset == 4 else "7"))
    pool = ScoringPool("hanging_scorer:reward", {}, workers=2, timeout=timedelta(seconds=2), group=False)
    try:
        stage = stage_on(log, topics, pool)
        settle(stage, within_s=60)
        workers = wait_until_idle(within_s=5)
    finally:
        pool.close()
    verdicts = events(log, topics, "rewards")
    failures = [v for v in verdicts if isinstance(v, ScoringFailed)]
    assert [(v.uid, v.reason) for v in failures] == [("0-4/0/0", "reward_timeout")]
    assert sum(isinstance(v, RewardAssigned) for v in verdicts) == 15
    assert stage._lanes[0].inputs.progress().low_water == 16
    assert all(state != "R" for state in workers.values()), f"a busy child is left: {workers}"


@pytest.mark.parametrize(
    ("response", "reason"),
    [("raises", "reward_error"), ("none", "reward_missing"), ("nan", "reward_nonfinite")],
)
def test_a_scorer_that_raises_or_gives_nothing_is_a_typed_failure(tmp_path, monkeypatch, response, reason):
    (tmp_path / "broken_scorer.py").write_text(HANGING)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path) + os.pathsep + os.environ.get("PYTHONPATH", ""))
    log, topics = run_log()
    put(log, topics, "trajectories", finished(0, 0, 0, response=response))
    put(log, topics, "trajectories", finished(1, 0, 1))
    pool = ScoringPool("broken_scorer:reward", {}, workers=1, timeout=timedelta(seconds=30), group=False)
    try:
        settle(stage_on(log, topics, pool), within_s=60)
    finally:
        pool.close()
    verdicts = {v.uid: v for v in events(log, topics, "rewards")}
    assert verdicts["0-0/0/0"].reason == reason
    assert verdicts["0-1/0/0"].reward == 1.0


def wait_until_idle(within_s: float) -> dict[int, str]:
    """Children once none is busy (a worker that replaces a killed one works while it starts), or as they are."""
    deadline = time.monotonic() + within_s
    while "R" in children().values() and time.monotonic() < deadline:
        time.sleep(0.05)
    return children()


def children() -> dict[int, str]:
    """State letter of each process that this one started ("R" runs)."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[1]) == os.getpid():
                found[int(entry.name)] = fields[0]
    return found


def test_the_members_of_a_group_are_scored_together_when_the_reward_is_of_groups(tmp_path, monkeypatch):
    (tmp_path / "group_scorer.py").write_text(
        "def reward(samples):\n    return [float(index == 0) for index, _ in enumerate(samples)]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path) + os.pathsep + os.environ.get("PYTHONPATH", ""))
    log, topics = run_log()
    for index in (2, 0, 1):
        put(log, topics, "trajectories", finished(0, index, 0, n_samples=3))
    pool = ScoringPool("group_scorer:reward", {}, workers=1, timeout=timedelta(seconds=30), group=True)
    try:
        settle(stage_on(log, topics, pool, group=True), within_s=60)
    finally:
        pool.close()
    assert [(v.index, v.reward) for v in events(log, topics, "rewards")] == [(0, 1.0), (1, 0.0), (2, 0.0)]


def test_the_stage_ends_with_the_run(pool):
    log, topics = run_log()
    put(log, topics, "ledger", EpochStarted(producer="t", started_ms=0))
    finish = RunFinished(epoch=0, step=1, version=1, reason="steps_reached", finished_ms=0)
    put(log, topics, "ledger", finish)
    assert RewardStage(log, topics, pool).run(lambda: False) == 0


def test_the_end_that_a_fenced_trainer_wrote_late_ends_nothing(pool):
    log, topics = run_log()
    for started_ms in range(2):
        put(log, topics, "ledger", EpochStarted(producer="t", started_ms=started_ms))
    put(log, topics, "ledger", RunFinished(epoch=0, step=1, version=1, reason="steps_reached", finished_ms=0))
    stage = stage_on(log, topics, pool)
    settle(stage)
    assert stage.ledger.finished is None
    put(log, topics, "trajectories", finished(0, 0, 0, response="7"))
    settle(stage)
    assert len(events(log, topics, "rewards")) == 1


class GroupPool:
    """Scores whole groups at once, in this process."""

    def submit(self, inputs):
        future = Future()
        future.set_result([Scored(float(each.index), {}, 0.0) for each in inputs])
        return future


def test_held_members_of_many_groups_do_not_keep_out_the_one_that_is_missing():
    log, topics = run_log()
    for index in range(3):  # the first members of all groups come before the last of any
        for seq in range(4):
            put(log, topics, "trajectories", finished(seq, index, seq, n_samples=3))
    stage = stage_on(log, topics, GroupPool(), group=True, max_in_flight=4)
    settle(stage)
    assert len(events(log, topics, "rewards")) == 12
    assert stage._lanes[0].inputs.progress().low_water == 12


def test_a_member_that_is_asked_for_again_while_it_is_held_leaves_nothing_unfinished():
    log, topics = run_log()
    put(log, topics, "trajectories", finished(0, 0, 0, n_samples=2))
    put(log, topics, "trajectories", finished(0, 0, 0, n_samples=2, attempt=1))
    put(log, topics, "trajectories", finished(0, 1, 0, n_samples=2, attempt=1))
    stage = stage_on(log, topics, GroupPool(), group=True)
    settle(stage)
    assert [verdict.uid for verdict in events(log, topics, "rewards")] == ["0-0/0/1", "0-0/1/1"]
    assert stage._lanes[0].inputs.progress().low_water == 3
    assert stage.counts["duplicates_total"] == 1


def test_the_deadline_of_a_held_group_stands_still_while_the_run_is_paused():
    now = [0.0]
    log, topics = run_log()
    stage = stage_on(
        log,
        topics,
        GroupPool(),
        group=True,
        group_deadline=timedelta(seconds=5),
        monotonic=lambda: now[0],
    )

    def seconds(count: int) -> None:
        for _ in range(count):
            now[0] += 1
            stage.round()

    put(log, topics, "trajectories", finished(0, 0, 0, n_samples=2))
    seconds(3)
    put(log, topics, "ledger", Paused(by="test"))
    seconds(100)
    assert not events(log, topics, "rewards")
    put(log, topics, "ledger", Resumed(by="test"))
    seconds(10)
    (verdict,) = events(log, topics, "rewards")
    assert isinstance(verdict, ScoringFailed) and verdict.reason == "group_incomplete"


class SlowPool:
    """Scores when the test says so; notes what it was asked and told to forget."""

    def __init__(self) -> None:
        self.asked: list[tuple[Future, list]] = []
        self.forgotten: list[Future] = []

    def submit(self, inputs):
        future: Future = Future()
        self.asked.append((future, list(inputs)))
        return future

    def forget(self, futures) -> None:
        self.forgotten += futures

    def score(self, number: int) -> None:
        future, inputs = self.asked[number]
        future.set_result([Scored(1.0, {}, 0.0) for _ in inputs])


def test_a_partition_that_goes_and_comes_back_during_a_long_call_is_scored_once(caplog):
    store = SharedStore()
    log, topics = LateLog(store), Topics("run", 2)
    topics.create(log)
    pool = SlowPool()
    stage = RewardStage(log, topics, pool, replicas=2)  # type: ignore[arg-type]
    stage.start()
    put(log, topics, "trajectories", finished(0, 0, 0, n_samples=1), partition=1)
    stage.round()
    assert [inputs[0].uid for _, inputs in pool.asked] == ["0-0/0/0"]
    with caplog.at_level("INFO"):
        other = log.join(
            topics.group("reward"), topics.name("trajectories"), replica=1, replicas=2, elastic=True
        )
        stage.round()
    assert sorted(stage._lanes) == [0] and pool.forgotten == [pool.asked[0][0]]
    assert "partitions none came, [1] went to another; has [0] now" in caplog.text
    other.close()  # it never came to write anything
    stage.round()
    assert sorted(stage._lanes) == [0, 1] and len(pool.asked) == 2, "its new owner asks again"
    pool.score(0)  # too late: nobody waits for it
    stage.round()
    assert events(log, topics, "rewards", 1) == []
    pool.score(1)
    settle(stage)
    assert [event.uid for event in events(log, topics, "rewards", 1)] == ["0-0/0/0"]


def test_what_nobody_waits_for_any_longer_is_not_scored():
    pool = ScoringPool(f"{__name__}:never", {}, workers=1, timeout=timedelta(seconds=60), group=False)
    try:
        running = pool.submit([_sample("running")])
        eventually_in_hand(pool)
        queued = pool.submit([_sample("queued")])
        wanted = pool.submit([_sample("wanted")])
        pool.forget([queued])
        assert [call.uids for call in pool._queue] == [["wanted"]]
        assert not running.done() and not wanted.done()
    finally:
        pool.close()


def _sample(uid: str) -> RewardInput:
    return RewardInput(
        uid=uid,
        group_id="g",
        index=0,
        prompt="",
        response="",
        response_ids=None,
        label=None,
        metadata={},
        finish_reason="stop",
        response_length=0,
    )


def never(sample) -> float:
    time.sleep(60)
    return 0.0


def eventually_in_hand(pool: ScoringPool) -> None:
    deadline = time.monotonic() + 20
    while not pool.in_hand():
        assert time.monotonic() < deadline
        time.sleep(0.01)
