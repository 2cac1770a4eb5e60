"""The rollout daemon with a scripted engine: what ends in which event, and what survives."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.interfaces import Sampling, WeightsId
from engine.rollout.generate import Aborted, single_turn
from engine.rollout.scripted import ScriptedEngine, fault_of, from_table, scripted_engine
from engine.rollout.text import ByteTokenizer
from engine.rollout.worker import RolloutWorker
from streams.errors import LogFull
from streams.events import (
    DeadLetter,
    EngineFailed,
    EngineJoined,
    EngineLeft,
    EngineReady,
    EngineUpdating,
    EpochStarted,
    Metrics,
    Paused,
    Resumed,
    RolloutFailed,
    TrajectoryFinished,
)
from streams.log import NewRecord
from streams.memory import MemoryLog, MemoryStore
from streams.trajectory import open_payload
from tests.engine.rollout_support import OnThread, Run, eventually, make_worker


def engine(**fields: Any) -> ScriptedEngine:
    return ScriptedEngine(from_table({}, "ok", ByteTokenizer()), **fields)


def version_of(worker: RolloutWorker) -> int:
    return worker.engine.held.version if worker.engine.held is not None else -1


def finished(run: Run) -> list[TrajectoryFinished]:
    return run.of("trajectories", TrajectoryFinished)


def failed(run: Run) -> list[RolloutFailed]:
    return run.of("trajectories", RolloutFailed)


def test_every_member_of_a_task_becomes_one_trajectory_on_the_partition_of_its_task(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.publish(0)
    run.dispatch("a", n_samples=3, partition=1, label="L", metadata={"k": 1})
    with OnThread(make_worker(run, engine())):
        eventually(lambda: len(finished(run)) == 3, "three trajectories")
    events = run.of("trajectories", TrajectoryFinished, partition=1)
    assert sorted(event.uid for event in events) == ["0-0/0/0", "0-0/1/0", "0-0/2/0"]
    event = events[0]
    payload = open_payload(event)
    assert payload.prompt_ids.tolist() == [ord("a")]
    assert payload.response_ids.tolist() == list(b"ok")
    assert payload.logprobs.tolist() == pytest.approx([math.log(0.5)] * 2)
    assert payload.loss_mask.tolist() == [True, True]
    assert event.versions == [(run.epoch, 0, 2)]
    assert (event.response, event.label, event.metadata, event.finish_reason) == ("ok", "L", {"k": 1}, "stop")
    assert event.turns == [(0, 2, "policy")]
    last = max(events, key=lambda each: each.progress["tasks"].read_to)
    assert last.progress["tasks"].read_to == 1


def test_nothing_is_served_before_the_first_version_is_whole(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.dispatch()
    worker = make_worker(run, engine())
    with OnThread(worker):
        eventually(lambda: worker._waiting, "the task was read")
        assert not run.events("trajectories")
        run.publish(0)
        eventually(lambda: len(finished(run)) == 2, "trajectories after the first version")
    fleet = run.events("fleet")
    assert [type(event) for event in fleet] == [EngineJoined, EngineUpdating, EngineReady, EngineLeft]
    held = worker.engine.held
    assert held is not None and (fleet[2].version, fleet[2].digest) == (0, held.digest)


def test_a_task_waits_for_its_min_version(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.publish(1)
    run.dispatch("new", min_version=2)
    run.dispatch("old", min_version=1)
    with OnThread(make_worker(run, engine())):
        eventually(lambda: len(finished(run)) == 2, "the task that needs version 1")
        assert {event.prompt for event in finished(run)} == {"old"}
        run.publish(2)
        eventually(lambda: len(finished(run)) == 4, "the task that needs version 2")
    assert {event.versions[0][1] for event in finished(run) if event.prompt == "new"} == {2}


def test_a_version_of_an_abandoned_epoch_counts_as_its_fork_point(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.publish(5)
    worker = make_worker(run, engine())
    with OnThread(worker):
        eventually(lambda: worker.engine.held, "version 5 is held")
        run.epoch = run.write("ledger", EpochStarted(producer="next", started_ms=2))
        event = run.store.publish({"w": np.array([3.0])}, epoch=run.epoch, version=3, step=3)
        (run.folder / event.uris["disk"]).rename(run.folder / "hidden")
        run.write("ledger", msgspec.structs.replace(event, forked_at=3))
        eventually(lambda: run.of("fleet", EngineFailed), "the new epoch's file is not there yet")
        run.dispatch("new", min_version=4)
        run.dispatch("old", min_version=3)
        eventually(lambda: len(finished(run)) == 2, "what version 3 may serve")
        assert {each.prompt for each in finished(run)} == {"old"}
    assert version_of(worker) == 5


@pytest.mark.parametrize(
    ("kind", "reason", "detail"),
    [
        ("nan", "nonfinite_logprob", "log-prob nan at index 1"),
        ("infinite", "nonfinite_logprob", "log-prob -inf at index 1"),
        ("positive", "positive_logprob", "log-prob 0.5 at index 1"),
        ("short_logprobs", "length_mismatch", "log-probs 1≠2 response tokens"),
        ("short_versions", "length_mismatch", "version runs cover 0≠2 response tokens"),
        ("error", "generate_error", "RuntimeError: fault injected into 0-0/1/0.1"),
    ],
)
def test_a_broken_sample_is_a_typed_failure_and_never_a_zero(
    tmp_path: Path, kind: str, reason: str, detail: str
) -> None:
    run = Run(tmp_path)
    run.publish(0)
    run.dispatch(n_samples=2)
    with OnThread(make_worker(run, engine(fault=fault_of(kind, match="/1/")))):
        eventually(lambda: len(run.events("trajectories")) == 2, "both outcomes")
    assert [event.uid for event in finished(run)] == ["0-0/0/0"]
    [failure] = failed(run)
    assert (failure.uid, failure.reason, failure.detail) == ("0-0/1/0", reason, detail)
    letters = run.of("dead", DeadLetter)
    if kind == "error":
        assert not letters
    else:
        [letter] = letters
        raw = msgspec.msgpack.decode(letter.raw)
        assert (letter.stage, letter.reason, raw["uid"]) == ("rollout-0", reason, "0-0/1/0")
        if kind == "nan":
            assert math.isnan(raw["logprobs"][1]) and raw["logprobs"][0] == pytest.approx(math.log(0.5))


def test_whatever_user_code_returns_ends_in_one_typed_failure(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.publish(0)

    async def odd(context: Any, task: Any, index: int) -> Any:
        sample = await single_turn(context, task, index)
        if index == 0:
            return None
        if index == 1:
            sample.uid = "another"
        if index == 2:
            sample.logprobs = ["a", "b"]
        if index == 3:
            sample.metadata = {"model": object()}  # has no form in the log
        if index == 4:
            sample.response_ids = {"ids": object()}
        return sample

    with OnThread(make_worker(run, engine(), odd)):
        run.dispatch(n_samples=6)
        eventually(lambda: len(run.events("trajectories")) == 6, "six outcomes")
    assert [event.index for event in finished(run)] == [5]
    reasons = {event.index: event.reason for event in failed(run)}
    assert reasons == {
        0: "bad_sample", 1: "bad_sample", 2: "missing_logprob", 3: "unencodable", 4: "bad_token_id"
    }  # fmt: skip
    assert len(run.of("dead", DeadLetter)) == 4


def test_a_record_over_the_logs_limit_fails_its_own_sample_only(tmp_path: Path) -> None:
    run = Run(tmp_path, log=MemoryLog(max_record_bytes=4096))
    run.publish(0)

    async def sized(context: Any, task: Any, index: int) -> Any:
        sample = await single_turn(context, task, index)
        if index == 1:
            sample.response = "".join(map(chr, np.random.default_rng(0).integers(32, 50_000, 4096)))
        return sample

    with OnThread(make_worker(run, engine(), sized)):
        run.dispatch(n_samples=4)
        eventually(lambda: len(run.events("trajectories")) == 4, "four outcomes")
    [failure] = failed(run)
    assert (failure.index, failure.reason) == (1, "record_too_large")


def test_three_refusals_among_the_last_ten_samples_flag_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    run.publish(0)
    made = engine(fault=fault_of("nan", match="0-0/"))
    worker = make_worker(run, made, max_concurrency=1)
    with OnThread(worker):
        run.dispatch(n_samples=2)
        run.dispatch(n_samples=9)
        eventually(lambda: len(run.events("trajectories")) == 11, "two refused, nine good")
        assert not run.of("fleet", EngineFailed)
        made._fault = fault_of("nan")
        run.dispatch(n_samples=2)
        eventually(lambda: len(failed(run)) == 4, "two more refused")
        assert not run.of("fleet", EngineFailed), "the first two lie further back than ten samples"
        run.dispatch(n_samples=1)
        [event] = eventually(lambda: run.of("fleet", EngineFailed), "the engine is flagged")
    assert event.reason == "bad_samples"
    assert event.detail == (
        "3 of the last 10 samples were refused, the last one for nonfinite_logprob: log-prob nan at index 1"
    )
    assert "engine scripted-0: bad_samples" in caplog.text


def test_a_sample_over_its_deadline_fails_and_its_place_is_free_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.publish(0)

    async def slow(context: Any, task: Any, index: int) -> Any:
        if task.prompt == "slow":
            await asyncio.sleep(3600)
        return await single_turn(context, task, index)

    worker = make_worker(run, engine(), slow, max_concurrency=1, task_deadline=timedelta(seconds=0.3))
    with OnThread(worker):
        run.dispatch("slow", n_samples=1)
        run.dispatch("quick", n_samples=1)
        eventually(lambda: len(run.events("trajectories")) == 2, "both outcomes")
    [failure] = failed(run)
    assert (failure.uid, failure.reason) == ("0-0/0/0", "task_deadline")
    assert [event.prompt for event in finished(run)] == ["quick"]


def test_a_restarted_worker_goes_on_where_its_output_ends(tmp_path: Path) -> None:
    run = Run(tmp_path, partitions=1)
    run.publish(0)
    calls: list[str] = []

    async def counted(context: Any, task: Any, index: int) -> Any:
        calls.append(f"{task.group_id}/{index}")
        if task.seq == 0 and index == 1 and len(calls) < 8:
            await asyncio.sleep(3600)  # this one is in flight when the first worker ends
        return await single_turn(context, task, index)

    for _ in range(3):
        run.dispatch(n_samples=2)
    with OnThread(make_worker(run, engine(), counted)):
        eventually(lambda: len(finished(run)) == 5, "all but the slow one")
    assert sorted(calls) == ["0-0/0", "0-0/1", "0-1/0", "0-1/1", "0-2/0", "0-2/1"]
    calls += ["", ""]
    run.dispatch(n_samples=2)
    with OnThread(make_worker(run, engine(), counted)):
        eventually(lambda: len(finished(run)) == 8, "the slow one and the new task")
    assert sorted(calls[8:]) == ["0-0/1", "0-3/0", "0-3/1"]
    uids = [event.uid for event in finished(run)]
    assert len(uids) == len(set(uids)) == 8
    assert finished(run)[-1].progress["tasks"].read_to == 4


def test_a_redispatch_names_its_attempt_and_the_first_dispatch(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.publish(0)
    first = run.dispatch(n_samples=4)
    run.seq = 0
    run.dispatch(n_samples=4, attempt=1, indices=[3], first_offset=first)
    with OnThread(make_worker(run, engine())):
        eventually(lambda: len(finished(run)) == 5, "four members and one again")
    [again] = [event for event in finished(run) if event.attempt == 1]
    assert (again.uid, again.index, again.task_offset) == ("0-0/3/1", 3, first)


def test_a_second_dispatch_of_the_same_member_is_counted_and_passed_over(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.publish(0)
    run.dispatch(n_samples=2)
    run.seq = 0
    run.dispatch(n_samples=2)
    worker = make_worker(run, engine())
    with OnThread(worker):
        eventually(lambda: worker.intake.duplicates == 2, "two duplicates")
        eventually(lambda: len(finished(run)) == 2, "two trajectories")
        run.seq = 1
        run.dispatch(n_samples=1)
        eventually(lambda: len(finished(run)) == 3, "the next task")
    assert sorted(event.uid for event in finished(run)) == ["0-0/0/0", "0-0/1/0", "0-1/0/0"]


def test_a_pause_starts_nothing_until_the_run_is_resumed(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.publish(0)
    run.write("ledger", Paused(by="test"))
    worker = make_worker(run, engine())
    with OnThread(worker):
        eventually(lambda: worker.intake.ledger.paused, "the pause was read")
        run.dispatch()
        eventually(lambda: worker._waiting, "the task was read")
        assert not worker._running and not run.events("trajectories")
        run.write("ledger", Resumed(by="test"))
        eventually(lambda: len(finished(run)) == 2, "trajectories after the pause")


def test_the_end_of_the_run_ends_the_worker_with_0(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.publish(0)
    with OnThread(make_worker(run, engine(token_s=100.0))) as running:
        run.dispatch()
        eventually(lambda: running.worker._running, "samples run")
        run.finish()
        began = time.monotonic()
        assert running.join() == 0
        assert time.monotonic() - began < 2.0
    assert isinstance(run.events("fleet")[-1], EngineLeft)


def test_a_stop_ends_the_worker_within_two_seconds_and_abandons_what_runs(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.publish(0)
    with OnThread(make_worker(run, engine(token_s=100.0))) as running:
        run.dispatch()
        eventually(lambda: running.worker._running, "samples run")
        began = time.monotonic()
        running.stop.set()
        assert running.join() == 0
        assert time.monotonic() - began < 2.0
    assert not run.events("trajectories")


def test_weights_with_another_digest_are_never_served(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.publish(0)
    event = run.store.publish({"w": np.array([1.0])}, epoch=run.epoch, version=1, step=1)
    worker = make_worker(run, engine())
    with OnThread(worker):
        eventually(lambda: worker.engine.held, "version 0")
        run.write("ledger", msgspec.structs.replace(event, digest="0" * 64))
        [failure] = eventually(lambda: run.of("fleet", EngineFailed), "the failure is told")
        assert failure.reason == "weights_mismatch"
        assert version_of(worker) == 0
        run.dispatch()
        eventually(lambda: len(finished(run)) == 2, "served with version 0")
        run.publish(2)
        eventually(lambda: version_of(worker) == 2, "the next version heals it")
    assert {each.versions[0][1] for each in finished(run)} == {0}
    assert [each.version for each in run.of("fleet", EngineReady)] == [0, 2]


def test_a_version_that_retention_removed_is_passed_over_for_the_newest(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for version in range(4):
        event = run.publish(version)
        if version < 3:
            (run.folder / event.uris["disk"]).unlink()
    run.dispatch()
    with OnThread(make_worker(run, engine())):
        eventually(lambda: len(finished(run)) == 2, "served with version 3")
    assert [each.version for each in run.of("fleet", EngineReady)] == [3]


def test_tokens_of_a_sample_that_spans_an_update_carry_their_own_versions(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.publish(5)
    slow = ScriptedEngine(from_table({}, "x" * 40, ByteTokenizer()), token_s=0.02)
    with OnThread(make_worker(run, slow, sampling=Sampling(max_tokens=40))):
        run.dispatch(n_samples=1)
        eventually(lambda: slow.stats()["tokens"] >= 3, "some tokens are there")
        run.publish(7)
        [event] = eventually(lambda: finished(run), "the sample")
    assert [run_[1] for run_ in event.versions] == [5, 7]
    assert sum(run_[2] for run_ in event.versions) == 40


def test_abort_mode_takes_the_sample_from_the_start_and_counts_no_redispatch(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.publish(0)
    worker = make_worker(
        run, ScriptedEngine(from_table({}, "x" * 16, ByteTokenizer()), token_s=0.02, pause_mode="abort")
    )
    with OnThread(worker):
        run.dispatch(n_samples=1)
        eventually(lambda: worker._running, "the sample runs")
        run.publish(1)
        [event] = eventually(lambda: finished(run), "the sample")
    assert (event.uid, event.attempt, event.versions) == ("0-0/0/0", 0, [(run.epoch, 1, 16)])
    assert worker.aborted == 1
    assert not failed(run)


def test_a_function_that_says_aborted_is_called_again_with_another_request_id(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.publish(0)
    seen: list[str] = []

    async def once(context: Any, task: Any, index: int) -> Any:
        seen.append(context.request_id)
        if len(seen) == 1:
            raise Aborted
        return await single_turn(context, task, index)

    with OnThread(make_worker(run, engine(), once)):
        run.dispatch(n_samples=1)
        eventually(lambda: finished(run), "the sample")
    assert seen == ["0-0/0/0", "0-0/0/0#1"]


class FullLog(MemoryLog):
    """A log whose trajectories have no room while `is_full`."""

    is_full = False
    refused = 0

    def submit(self, topic: str, partition: int, records: Sequence[NewRecord]) -> Future[int]:
        if self.is_full and topic.endswith("trajectories"):
            self.refused += 1
            future: Future[int] = Future()
            future.set_exception(LogFull("no room"))
            return future
        return super().submit(topic, partition, records)


def test_a_full_log_pauses_the_worker_and_loses_nothing(tmp_path: Path) -> None:
    log = FullLog(MemoryStore())
    run = Run(tmp_path, log=log)
    run.publish(0)
    log.is_full = True
    worker = make_worker(run, engine(), max_concurrency=2)
    with OnThread(worker):
        for _ in range(20):
            run.dispatch(n_samples=2)
        eventually(lambda: log.refused >= 2, "appends are refused and tried again")
        assert worker.publisher.stuck
        started = worker.outcomes.samples
        assert started < 40, "nothing new is started while the log is full"
        log.is_full = False
        eventually(lambda: len(finished(run)) == 40, "every sample once there is room")
    uids = [event.uid for event in finished(run)]
    assert len(uids) == len(set(uids)) == 40
    assert run.of("trajectories", TrajectoryFinished, 0)[-1].progress["tasks"].low_water > 0


def test_metrics_come_each_second_and_name_what_is_counted(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.publish(3)
    run.dispatch(n_samples=4)
    with OnThread(make_worker(run, engine())):
        event = eventually(
            lambda: [each for each in run.of("metrics", Metrics) if each.values["samples_total"] == 4],
            "a metrics event after the samples",
        )[0]
    assert event.source == "rollout-0"
    assert (event.values["tokens_total"], event.values["requests_total"], event.values["version"]) == (
        8,
        4,
        3,
    )
    assert {"in_flight", "busy"} <= event.values.keys()


def test_two_replicas_share_the_partitions_and_do_no_task_twice(tmp_path: Path) -> None:
    run = Run(tmp_path, partitions=4)
    run.publish(0)
    for number in range(16):
        run.dispatch(n_samples=2, partition=number % 4)
    other = Run.__new__(Run)
    other.__dict__ |= run.__dict__ | {"log": MemoryLog(run.log._store)}  # pyright: ignore
    with (
        OnThread(make_worker(run, engine(name="a"), replica=0, replicas=2)),
        OnThread(make_worker(other, engine(name="b"), replica=1, replicas=2)),
    ):
        eventually(lambda: len(finished(run)) == 32, "all samples")
    assert len({event.uid for event in finished(run)}) == 32
    assert {event.engine for event in run.of("trajectories", TrajectoryFinished, 1)} == {"b"}
    assert {event.engine for event in run.of("trajectories", TrajectoryFinished, 2)} == {"a"}


def test_the_scripted_engine_says_the_same_for_the_same_request_and_seed() -> None:
    options = {"policy": "coin", "heads": "y", "tails": "n"}

    async def play(seed: int) -> list[int]:
        made = scripted_engine(options, name="e", seed=seed)
        made._weights = {"w": np.array([0.3])}
        made._held = WeightsId(0, 0, "")
        done = [await made.generate([1], Sampling(1), request_id=f"r{i}") for i in range(200)]
        share = sum(each.ids[0] == ord("y") for each in done) / 200
        assert abs(share - 1 / (1 + math.exp(-0.3))) < 0.1
        for each in done:
            p = 1 / (1 + math.exp(-0.3))
            assert each.logprobs[0] == pytest.approx(math.log(p if each.ids[0] == ord("y") else 1 - p))
        return [int(each.ids[0]) for each in done]

    assert asyncio.run(play(1)) == asyncio.run(play(1)) != asyncio.run(play(2))
