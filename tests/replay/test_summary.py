"""The summary is computed from the log alone, and every number in it is checked against a run written by hand."""

from __future__ import annotations

import msgspec
import pytest

from replay.progress import RunProgress
from replay.summary import summarize
from streams import codec
from streams.events import BatchCut, Event, Metrics, RunFinished, TaskDispatched, WeightsPublished
from streams.log import TopicPartition
from streams.memory import MemoryLog
from streams.topics import Topics
from tests.support.recorded import recorded


def metrics(log, topics: Topics, source: str, at_ms: int, step: int = -1, **values: float) -> None:
    event = Metrics(source=source, step=step, at_ms=at_ms, values=values)
    log.append(topics.name("metrics"), 0, [codec.encode(event, producer=source, timestamp_ms=at_ms)])


def measured_run():
    """The recorded run, with dispatches from second 2 on, three steps, four evaluations and one engine."""

    def timed(event: Event) -> Event:
        if isinstance(event, TaskDispatched):
            return msgspec.structs.replace(event, dispatched_ms=2000 + 100 * event.seq)
        if isinstance(event, WeightsPublished):
            return msgspec.structs.replace(event, published_ms=1500 + 1500 * event.version)
        return event

    log, topics = recorded(timed)
    for step, reward in ((1, 0.25), (2, 0.5), (3, 0.75)):
        metrics(
            log, topics, "trainer", 1000 * step, step, reward_mean=reward, step_s=0.75, wait_s=0.25, busy=0.75
        )
    for version, reward, at_ms in ((0, 0.4, 2500), (1, 0.7, 4000), (2, 0.85, 6500), (3, 0.9, 8000)):
        metrics(log, topics, "eval", at_ms, version, reward=reward, episodes=64)
    metrics(log, topics, "rollout-0", 1500, tokens_total=100, busy=0.5, version=0)
    metrics(log, topics, "rollout-0", 2500, tokens_total=300, busy=1.0, version=1)
    metrics(log, topics, "rollout-0", 2900, tokens_total=50, busy=0.6, version=2)  # it was started again
    metrics(log, topics, "rollout-0", 8500, tokens_total=50, busy=0.0, version=3)  # after the last cut
    return log, topics


def test_the_numbers_are_those_of_the_log():
    assert summarize(*measured_run()) == {
        "run": "run",
        "finished": "data_ended",
        "first_reward": 0.4,
        "last_reward": pytest.approx((0.4 + 0.7 + 0.85 + 0.9) / 4, abs=1e-4),
        "first_training_reward": 0.25,
        "last_training_reward": 0.5,
        "steps": 3,
        "steps_skipped": 0,
        "version": 3,
        "wall_s": 8.0,
        "seconds_to_0.8": 3.0,  # version 2 was made 3 s after version 0
        "tokens_generated": 350,
        "tokens_trained": 40,
        "tokens_per_s": 43.8,
        "groups_trained": 5,
        "groups_dropped": {"zero_variance": 1},
        "max_staleness_trained": 1,
        "duplicates_trained": 0,
        "trainer_busy": 0.75,
        "engine_busy": 0.7,
        "trainer_epochs": 1,
    }


def test_the_last_reward_is_that_of_the_last_20_steps():
    log, topics = recorded(lambda event: None if isinstance(event, RunFinished) else event)
    cut = BatchCut(
        epoch=1,
        version=29,
        step=30,
        groups=[],
        positions=[3, 3],
        frontier=6,
        limit=1,
        on_stale="drop",
        seed=0,
        ledger_read_to=3,
        cut_ms=1,
    )
    log.append(topics.name("ledger"), 0, [codec.encode(cut, producer="test")])
    for version in (0, 9, 10, 11, 30):
        metrics(log, topics, "eval", version, version, reward=version / 100)
    assert summarize(log, topics)["last_reward"] == 0.205  # of versions 11 and 30


def test_a_sample_that_was_trained_twice_is_counted():
    def twice(event: Event) -> Event:
        if isinstance(event, BatchCut) and event.step == 3:
            return msgspec.structs.replace(event, groups=[*event.groups, *event.groups])
        return event

    assert summarize(*recorded(twice))["duplicates_trained"] == 2


def test_a_run_that_has_not_begun_has_an_empty_summary():
    log, topics = MemoryLog(), Topics("run", 1)
    topics.create(log)
    summary = summarize(log, topics)
    assert summary["steps"] == 0
    assert summary["first_reward"] is summary["last_reward"] is summary["tokens_per_s"] is None
    assert summary["seconds_to_0.8"] is None


def test_a_reward_that_was_never_reached_has_no_time():
    log, topics = recorded()
    metrics(log, topics, "eval", 5000, 1, reward=0.79)
    assert summarize(log, topics)["seconds_to_0.8"] is None


def test_queues_are_what_lies_before_each_stage():
    log, topics = recorded()
    progress = RunProgress(log, topics)
    assert progress.queues() == {"rollout": 6, "reward": 12, "collector": 0, "trainer": 6}
    log.commit_hint("run.rollout", {TopicPartition("run.tasks", 0): 3, TopicPartition("run.tasks", 1): 1})
    log.commit_hint("run.trainer", {TopicPartition("run.groups", 0): 3, TopicPartition("run.groups", 1): 3})
    assert progress.queues() == {"rollout": 2, "reward": 12, "collector": 0, "trainer": 0}


def test_following_adds_only_what_is_new():
    log, topics = measured_run()
    progress = RunProgress(log, topics)
    progress.catch_up()
    progress.catch_up()
    assert [each.step for each in progress.steps] == [1, 2, 3]
    assert progress.tokens_generated == 350
    metrics(log, topics, "trainer", 9000, 4, reward_mean=1.0)
    progress.catch_up()
    assert [each.step for each in progress.steps] == [1, 2, 3, 4]
