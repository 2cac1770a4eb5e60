"""What a rollout daemon does about an engine that is not to be trusted, and what it says of what it holds."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from engine.interfaces import Completion, EngineError, Sampling
from engine.rollout.generate import single_turn
from engine.rollout.outcomes import BAD_ANSWERS
from engine.rollout.publisher import Lane, Publisher
from engine.rollout.scripted import ScriptedEngine, from_table
from engine.rollout.sglang.errors import BadAnswer, BadRequest
from engine.rollout.text import ByteTokenizer
from streams.errors import InvalidEvent, LogFull
from streams.events import (
    EngineFailed,
    EngineJoined,
    EngineLeft,
    EngineQuarantined,
    EngineReady,
    EpochStarted,
    Metrics,
    RolloutFailed,
    TrajectoryFinished,
)
from streams.log import NewRecord
from streams.memory import MemoryLog
from tests.engine.rollout_support import DEADLINE_S, OnThread, Run, eventually, make_worker
from tests.support.events import finished


def engine(**fields: Any) -> ScriptedEngine:
    return ScriptedEngine(from_table({}, "ok", ByteTokenizer()), **fields)


def raising(error: BaseException, times: int = 10**9):
    """A fault of a scripted engine: the first `times` requests raise it."""
    left = [times]

    def fault(request_id: str, completion: Completion) -> Completion:
        left[0] -= 1
        if left[0] >= 0:
            raise error
        return completion

    return fault


def counted(run: Run) -> dict[str, float]:
    found = run.of("metrics", Metrics)
    return found[-1].values if found else {}


def quarantine(run: Run, incarnation: str, **changes: Any) -> EngineQuarantined:
    fields: dict[str, Any] = {
        "epoch": run.epoch, "engine": "scripted-0", "incarnation": incarnation, "step": 7, "mismatch": 0.5,
        "limit": 0.1, "n_samples": 16, "n_tokens": 400,
    }  # fmt: skip
    return EngineQuarantined(**{**fields, **changes})


# ---------------------------------------------------------------- quarantine
def test_a_quarantined_engine_says_why_and_ends_so_that_its_supervisor_starts_it_anew(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.publish(0)
    held = engine(token_s=3600.0)  # what it generates never ends: nobody waits for it either
    daemon = OnThread(make_worker(run, held, incarnation="a1"))
    with daemon:
        run.dispatch()
        eventually(lambda: held._running, "a sample is running")
        run.write("ledger", quarantine(run, "a1"))
        assert daemon.join() == 1 and daemon.error is None
    fleet = run.events("fleet")
    assert [type(event) for event in fleet[-2:]] == [EngineFailed, EngineLeft]
    assert fleet[-2].reason == "quarantined"
    assert fleet[-2].detail == (
        "its log-probs are 0.5 nat per token from the trainer's under the same weights, over "
        "rollout.max_logprob_mismatch = 0.1 (step 7, 16 samples)"
    )
    assert not run.events("trajectories")


def test_the_next_incarnation_of_a_quarantined_engine_serves(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.publish(0)
    run.write("ledger", quarantine(run, "a1"))
    run.dispatch()
    with OnThread(make_worker(run, engine())) as daemon:
        eventually(lambda: len(run.of("trajectories", TrajectoryFinished)) == 2, "both samples")
        assert daemon.thread.is_alive()
    [joined] = run.of("fleet", EngineJoined)
    assert joined.incarnation not in ("", "a1")
    made = {event.incarnation for event in run.of("trajectories", TrajectoryFinished)}
    assert made == {joined.incarnation} == {event.incarnation for event in run.of("fleet", EngineReady)}


def test_a_quarantine_of_a_fenced_trainer_ends_no_engine(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.publish(0)
    run.write("ledger", EpochStarted(producer="next", started_ms=2))
    run.write("ledger", quarantine(run, "a1"))  # of the epoch before
    run.dispatch()
    with OnThread(make_worker(run, engine(), incarnation="a1")):
        eventually(lambda: len(run.of("trajectories", TrajectoryFinished)) == 2, "both samples")
    assert not run.of("fleet", EngineFailed)


# ---------------------------------------------------------------- bad answers (O12)
@pytest.mark.parametrize("reason", sorted(BAD_ANSWERS))
def test_answers_that_are_refused_before_there_is_a_sample_flag_the_engine_too(
    tmp_path: Path, reason: str
) -> None:
    run = Run(tmp_path)
    run.publish(0)
    made = engine(fault=raising(BadAnswer(reason, "meta_info", "not usable"), 3))
    with OnThread(make_worker(run, made, max_concurrency=1)):
        run.dispatch(n_samples=4)
        [event] = eventually(lambda: run.of("fleet", EngineFailed), "the engine is flagged")
        eventually(lambda: run.of("trajectories", TrajectoryFinished), "and it goes on")
    assert event.reason == "bad_samples"
    last = f"the last one for {reason}: meta_info: not usable"
    assert event.detail == f"3 of the last 3 samples were refused, {last}"
    assert [each.reason for each in run.of("trajectories", RolloutFailed)] == [reason] * 3


def test_bad_answers_and_refused_samples_are_counted_together(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.publish(0)

    async def odd(context: Any, task: Any, index: int) -> Any:
        if index == 0:
            raise InvalidEvent("length_mismatch", "seen by a generate function")
        if index == 1:
            raise EngineError("nonfinite_logprob", "seen by an engine's client")
        sample = await single_turn(context, task, index)
        sample.logprobs = [0.5, 0.5]
        return sample

    with OnThread(make_worker(run, engine(), odd, max_concurrency=1)):
        run.dispatch(n_samples=2)
        eventually(lambda: len(run.of("trajectories", RolloutFailed)) == 2, "two failures")
        assert not run.of("fleet", EngineFailed)
        run.dispatch(n_samples=3, indices=[2])
        eventually(lambda: run.of("fleet", EngineFailed), "the third flags it")
        eventually(lambda: counted(run).get("bad_answers_total") == 2, "the metrics say it")
    values = counted(run)
    assert (values["refused_total"], values["failed_total"], values["dead_letters"]) == (1, 3, 1)


@pytest.mark.parametrize(
    "error",
    [
        BadRequest("bad_token_id", "prompt id 99999 at index 0: the vocabulary has 50"),  # never sent
        EngineError("engine_timeout", "no answer"),
        EngineError("bad_request", "too long"),
        RuntimeError("a bug of the generate function"),
    ],
    ids=["request refused", "timeout", "bad request", "bug"],
)
def test_failures_that_are_no_answer_flag_no_engine(tmp_path: Path, error: Exception) -> None:
    run = Run(tmp_path)
    run.publish(0)
    with OnThread(make_worker(run, engine(fault=raising(error)), max_concurrency=1)):
        run.dispatch(n_samples=5)
        eventually(lambda: len(run.of("trajectories", RolloutFailed)) == 5, "five failures")
    assert not run.of("fleet", EngineFailed)


# ---------------------------------------------------------------- acknowledged before it is seen
class SlowFleet(MemoryLog):
    """Holds back every EngineReady until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[tuple[Any, ...]] = []
        self.is_open = threading.Event()
        self.refusals = 0

    def submit(self, topic: str, partition: int, records: list[NewRecord], *rest: Any) -> Future[int]:
        is_ready = any(dict(record.headers).get("type") == b"engine_ready" for record in records)
        if self.refusals and is_ready:
            self.refusals -= 1
            refused: Future[int] = Future()
            refused.set_exception(LogFull("no room"))
            return refused
        if self.is_open.is_set() or not is_ready:
            return super().submit(topic, partition, records, *rest)
        later: Future[int] = Future()
        self.held.append((later, topic, partition, records))
        return later

    def let_go(self) -> None:
        self.is_open.set()
        for later, topic, partition, records in self.held:
            later.set_result(self.append(topic, partition, records))


def test_no_sample_is_sent_before_the_log_has_the_engines_word_for_its_version(tmp_path: Path) -> None:
    log = SlowFleet()
    run = Run(tmp_path, log=log)
    run.publish(0)
    run.dispatch()
    worker = make_worker(run, engine())
    with OnThread(worker):
        eventually(lambda: worker.outcomes.samples == 2, "both samples have ended")
        assert log.held and not run.events("trajectories")
        log.let_go()
        eventually(lambda: len(run.events("trajectories")) == 2, "they follow")
    assert run.of("fleet", EngineReady)


def test_what_waits_behind_a_refused_gate_is_sent_once_and_in_order(tmp_path: Path) -> None:
    log = SlowFleet()
    log.is_open.set()
    log.refusals = 2
    run = Run(tmp_path, log=log)
    publisher, lane = Publisher(log, run.topics, "rollout-0"), Lane(0, 0)
    publisher.start()
    lane.started(0, 3)
    ready = EngineReady(engine="e", epoch=run.epoch, version=0, digest="d")
    publisher.put(lane, 0, finished(0, 0, 0))
    publisher.tell("fleet", ready, is_gate=True)
    publisher.put(lane, 0, finished(0, 1, 0))
    publisher.tell("fleet", ready, is_gate=True)
    publisher.put(lane, 0, finished(0, 2, 0))
    eventually(lambda: publisher.backlog == 0, "all is acknowledged")
    publisher.close()
    assert [event.index for event in run.events("trajectories")] == [0, 1, 2]
    assert len(run.of("fleet", EngineReady)) == 2


class Overlapping(ScriptedEngine):
    """Serves the new version a while before `update` returns, as a server does whose answers overtake its own word."""

    async def update(self, published: Any, path: Path) -> float:
        stall_s = await super().update(published, path)
        if published.version > 0:
            await asyncio.sleep(0)
            self.is_ahead.set()
            await asyncio.wait_for(self.may_return.wait(), DEADLINE_S)
        return stall_s

    async def generate(self, prompt_ids: Any, sampling: Sampling, *, request_id: str) -> Completion:
        if not hasattr(self, "is_ahead"):
            self.is_ahead, self.may_return = asyncio.Event(), asyncio.Event()
        return await super().generate(prompt_ids, sampling, request_id=request_id)


def test_a_sample_with_tokens_of_a_version_that_is_just_being_taken_waits_until_the_engine_has_said_so(
    tmp_path,
):
    run = Run(tmp_path)
    run.publish(0)
    made = Overlapping(from_table({}, "ok", ByteTokenizer()))
    worker = make_worker(run, made)
    with OnThread(worker):
        run.dispatch("first")
        eventually(lambda: len(run.events("trajectories")) == 2, "version 0 serves")
        run.publish(1)
        eventually(made.is_ahead.is_set, "version 1 serves already")
        run.dispatch("second")
        eventually(lambda: len(worker._held_back) == 2, "two samples of version 1 have ended")
        assert len(run.events("trajectories")) == 2
        assert worker._loop is not None
        worker._loop.call_soon_threadsafe(made.may_return.set)
        eventually(lambda: len(run.events("trajectories")) == 4, "they follow")
    assert [event.version for event in run.of("fleet", EngineReady)] == [0, 1]
    assert {
        each.versions[0][1] for each in run.of("trajectories", TrajectoryFinished) if each.prompt == "second"
    } == {1}


class Secretive(ScriptedEngine):
    """Labels its tokens with a version that its daemon was never told of."""

    async def generate(self, prompt_ids: Any, sampling: Sampling, *, request_id: str) -> Completion:
        done = await super().generate(prompt_ids, sampling, request_id=request_id)
        return done._replace(versions=[(0, 7, len(done.ids))])


def test_a_sample_of_a_version_that_was_never_told_is_a_failure_and_no_sample(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.publish(0)
    worker = make_worker(run, Secretive(from_table({}, "ok", ByteTokenizer())))
    with OnThread(worker):
        run.dispatch("first")
        eventually(lambda: len(run.of("trajectories", RolloutFailed)) == 2, "both members have an outcome")
    assert not run.of("trajectories", TrajectoryFinished)
    [failure, _] = run.of("trajectories", RolloutFailed)
    assert failure.reason == "no_weights" and "never told to be held: e0-v0" in failure.detail


def test_a_daemon_that_ends_in_an_update_publishes_nothing_of_a_version_it_never_told(tmp_path: Path) -> None:
    """As at the end of a run, whose last version engines are still taking."""
    run = Run(tmp_path)
    run.publish(0)
    made = Overlapping(from_table({}, "ok", ByteTokenizer()))
    worker = make_worker(run, made)
    with OnThread(worker):
        run.dispatch("first")
        eventually(lambda: len(run.events("trajectories")) == 2, "version 0 serves")
        run.publish(1)
        eventually(made.is_ahead.is_set, "version 1 serves already")
        run.dispatch("second")
        eventually(lambda: len(worker._held_back) == 2, "two samples of version 1 have ended")
        assert worker._loop is not None
        worker._loop.call_soon_threadsafe(worker.watch.close)
        worker._loop.call_soon_threadsafe(setattr, worker, "_is_stopping", True)
        eventually(lambda: not worker.watch.is_updating, "the update is cut off")
        worker._loop.call_soon_threadsafe(worker._release)
    assert [event.version for event in run.of("fleet", EngineReady)] == [0]
    assert len(run.events("trajectories")) == 2
