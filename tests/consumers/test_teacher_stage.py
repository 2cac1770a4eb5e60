"""The teacher stage on a log: scores by reference, refusals, twins, restarts beside the reward stage."""

from __future__ import annotations

from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np
import pytest

from consumers.enrichers.teacher import Refused, TeacherStage
from consumers.reward import RewardStage
from consumers.rewards.pool import ScoringPool
from streams import columns
from streams.events import (
    EpochStarted,
    RewardAssigned,
    RolloutFailed,
    RunFinished,
    TeacherFailed,
    TeacherScored,
)
from streams.trajectory import payload_digest
from tests.support.events import events, finished, member_fields, put, run_log
from tests.support.world import AtOnce


class Listener:
    """A teacher whose log-prob of a token is −id / 8; it remembers how many samples it was given in each call."""

    name = "listener"

    def __init__(self, *, refuses=()):
        self.refuses, self.calls = dict(refuses), []

    def score(self, payloads):
        self.calls.append(len(payloads))
        found = [(-payload.response_ids[payload.loss_mask] / 8).astype(np.float32) for payload in payloads]
        return [self.refuses.get(place, scores) for place, scores in enumerate(found)]


def stage_on(log, topics, teacher, **changes) -> TeacherStage:
    made = TeacherStage(log, topics, teacher, executor=AtOnce(), **changes)
    made.start()
    return made


def settle(stage) -> None:
    for _ in range(30):
        if not stage.round():
            return
    raise AssertionError("the stage never comes to rest")


def opinions(log, topics, partition=0) -> list[Any]:
    return [
        e for e in events(log, topics, "rewards", partition) if isinstance(e, (TeacherScored, TeacherFailed))
    ]


def test_each_sample_is_scored_token_by_token_and_by_reference():
    log, topics = run_log()
    samples = [finished(0, index, 0) for index in range(3)]
    for sample in samples:
        put(log, topics, "trajectories", sample)
    teacher = Listener()
    settle(stage_on(log, topics, teacher))
    found = opinions(log, topics)
    assert [(each.uid, each.trajectory_offset) for each in found] == [(f"0-0/{i}/0", i) for i in range(3)]
    assert columns.decode_logprobs(found[0].logprobs).tolist() == [-0.375, -0.5, -0.625]
    assert [each.payload_digest for each in found] == [payload_digest(each) for each in samples]
    assert found[0].teacher == "listener" and teacher.calls == [3]
    assert found[-1].progress["trajectories"].read_to == 3


def test_a_sample_that_failed_in_rollout_is_passed_over():
    log, topics = run_log()
    put(log, topics, "trajectories", RolloutFailed(**member_fields(0, 0, 0), reason="generate_error"))
    put(log, topics, "trajectories", finished(0, 1, 0))
    stage = stage_on(log, topics, Listener())
    settle(stage)
    assert [each.uid for each in opinions(log, topics)] == ["0-0/1/0"]
    assert stage._lanes[0].inputs.progress().low_water == 2


def test_a_twin_is_counted_and_scored_once():
    log, topics = run_log()
    for _ in range(2):
        put(log, topics, "trajectories", finished(0, 0, 0))
    stage = stage_on(log, topics, Listener())
    settle(stage)
    assert len(opinions(log, topics)) == 1 and stage.counts["duplicates_total"] == 1


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Refused("too_long", "9 tokens, the model takes 8"), "too_long"),
        (np.array([-0.1, np.nan, -0.1], np.float32), "bad_logprob"),
        (np.array([-0.1, -np.inf, -0.1], np.float32), "bad_logprob"),
        (np.array([-0.1, 0.5, -0.1], np.float32), "bad_logprob"),
        (np.array([-0.1, -0.1], np.float32), "length_mismatch"),
    ],
)
def test_what_cannot_be_scored_fails_by_name_and_is_never_a_zero(answer, reason):
    log, topics = run_log()
    for index in range(2):
        put(log, topics, "trajectories", finished(0, index, 0))
    settle(stage_on(log, topics, Listener(refuses={1: answer})))
    scored, failed = opinions(log, topics)
    assert isinstance(scored, TeacherScored) and isinstance(failed, TeacherFailed)
    assert (failed.uid, failed.reason) == ("0-0/1/0", reason)


def test_a_damaged_payload_fails_by_name():
    log, topics = run_log()
    put(log, topics, "trajectories", msgspec.structs.replace(finished(0, 0, 0), loss_mask=b"\0"))
    settle(stage_on(log, topics, Listener()))
    (failed,) = opinions(log, topics)
    assert isinstance(failed, TeacherFailed) and failed.reason == "bad_payload"


def test_rounding_above_zero_is_zero():
    log, topics = run_log()
    put(log, topics, "trajectories", finished(0, 0, 0))
    settle(stage_on(log, topics, Listener(refuses={0: np.array([1e-6, -0.5, 0.0], np.float32)})))
    (scored,) = opinions(log, topics)
    assert columns.decode_logprobs(scored.logprobs).tolist() == [0, -0.5, 0]


def test_large_bundles_are_given_to_the_model_in_parts():
    log, topics = run_log()
    for seq in range(150):
        put(log, topics, "trajectories", finished(seq, 0, seq))
    teacher = Listener()
    settle(stage_on(log, topics, teacher))
    assert sum(teacher.calls) == 150 and max(teacher.calls) <= 64


def test_what_the_model_raises_ends_the_stage():
    class Lost(Listener):
        def score(self, payloads):
            raise RuntimeError("the device is lost")

    log, topics = run_log()
    put(log, topics, "trajectories", finished(0, 0, 0))
    with pytest.raises(RuntimeError, match="device is lost"):
        settle(stage_on(log, topics, Lost()))
    assert opinions(log, topics) == []


# ---------------------------------------------------------------- two writers of one topic
def rewards_on(log, topics):
    pool = ScoringPool("exact", {}, workers=0, timeout=timedelta(seconds=5), group=False)
    stage = RewardStage(log, topics, pool)
    stage.start()
    return stage, pool


def test_each_of_two_stages_finds_its_own_place_in_their_topic():
    """The teacher is far ahead when both are killed: the reward stage must not take the teacher's place for its own."""
    log, topics = run_log()
    for seq in range(6):
        put(log, topics, "trajectories", finished(seq, 0, seq))
        if seq == 1:
            stage, pool = rewards_on(log, topics)
            settle(stage)
            stage.close()
            pool.close()
    first = stage_on(log, topics, Listener())
    settle(first)
    first.close()
    stage, pool = rewards_on(log, topics)
    settle(stage)
    again = stage_on(log, topics, teacher := Listener())
    settle(again)
    found = events(log, topics, "rewards")
    assert [e.uid for e in found if isinstance(e, RewardAssigned)] == [f"0-{seq}/0/0" for seq in range(6)]
    assert [e.uid for e in found if isinstance(e, TeacherScored)] == [f"0-{seq}/0/0" for seq in range(6)]
    assert teacher.calls == [], "nothing is scored twice"
    pool.close()


def test_what_was_under_way_when_it_was_killed_is_scored_again_and_the_rest_is_not():
    log, topics = run_log()
    for seq in range(4):
        put(log, topics, "trajectories", finished(seq, 0, seq))

    class Never(AtOnce):
        """Answers the first bundle alone."""

        def submit(self, fn, /, *args, **kwargs):
            return Future()

    killed = stage_on(log, topics, Listener(), max_in_flight=2)
    assert killed.round()  # two are read and scored, and what came of them is not sent yet
    killed._thread = Never()
    killed.round()
    killed.round()
    assert killed._lanes.membership is not None
    killed._lanes.membership.close()
    assert [each.uid for each in opinions(log, topics)] == ["0-0/0/0", "0-1/0/0"]
    settle(stage_on(log, topics, teacher := Listener()))
    assert [each.uid for each in opinions(log, topics)] == [f"0-{seq}/0/0" for seq in range(4)]
    assert sum(teacher.calls) == 2


def test_it_ends_with_the_run():
    log, topics = run_log()
    put(log, topics, "trajectories", finished(0, 0, 0))
    put(log, topics, "ledger", EpochStarted(producer="t", started_ms=0))
    put(log, topics, "ledger", RunFinished(epoch=0, step=1, version=1, reason="data_ended", finished_ms=0))
    assert TeacherStage(log, topics, Listener()).run(lambda: False) == 0
    assert len(opinions(log, topics)) == 1
