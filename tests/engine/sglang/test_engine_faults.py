"""The SGLang engine when updates fail and servers die: never a mixture, never a token under the wrong label."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from engine.interfaces import EngineError, WeightsId
from engine.rollout.loading import FATAL, on_disk
from engine.rollout.sglang import engine as engine_module
from engine.rollout.sglang.engine import SGLangEngine
from engine.rollout.sglang.errors import TimedOut
from engine.rollout.sglang.server import Server
from tests.engine.sglang.engine_support import (
    DEADLINE_S,
    LONG,
    PROMPT,
    SHORT,
    control,
    generate,
    run,
    some_tokens,
)
from tests.support.sglang_double import Double
from tests.support.sglang_versions import Versions


class Process:
    """A double in the place of a server process that the engine started."""

    def __init__(self, double: Double) -> None:
        self.double, self.url, self.code = double, double.url, None
        self.was_killed = False

    async def ready(self, deadline: timedelta) -> None: ...

    @property
    def exited(self) -> int | None:
        return 1 if self.double.has_crashed or not self.double._thread.is_alive() else None

    def cause(self) -> str:
        return "the SGLang server ended with exit code 1; its log ends with:\nIndexError: out of range"

    def kill(self) -> None:
        self.was_killed = True
        self.double.stop()


def engine_on(process: Process, folder: Path, **options: Any) -> SGLangEngine:
    assert process.double.model is not None
    server = cast(Server, process)
    return SGLangEngine(
        process.double.model, server=server, folder=folder / "served", locate=on_disk(folder), **options
    )


def answers(double: Double, path: str, change: Callable[[Any], None], times: int = 1) -> None:
    double.fail(path, "change", times=times, change=change)


def on_a_gpu(double: Double) -> None:
    """The hashes of its parameters cannot be worked out here, so that checksums are all there is."""
    double.info["device"] = "cuda"


def mixed(double: Double) -> None:
    """The next load takes some of the tensors, and fails."""

    def change(answer: Any) -> None:
        double.contents["model.norm.weight"] = b"of neither version"
        answer.update(success=False, message="Failed to update weights: a fault on demand.")

    answers(double, "/update_weights_from_disk", change)


def refused(double: Double) -> None:
    double.fail("/update_weights_from_disk", "status", status=400, text="Failed to get weights iterator")


def label_not_bumped(double: Double) -> None:
    answers(double, "/model_info", lambda info: info.update(weight_version="e1-v1"))


def checksum_unchanged(double: Double) -> None:
    old = double.checksum
    answers(double, "/weights_checker", lambda answer: answer.update(per_engine_checksum=old))


def one_tensor_passed_over(double: Double) -> None:
    """With a 200, the right label, and a checksum that was never seen before."""
    old = double.contents["model.norm.weight"]

    def change(answer: Any) -> None:
        double.contents["model.norm.weight"] = old

    answers(double, "/update_weights_from_disk", change)


def checksum_fails(double: Double) -> None:
    double.fail("/weights_checker", "status", status=500)


def load_hangs(double: Double) -> None:
    double.fail("/update_weights_from_disk", "hang")


@pytest.mark.parametrize(
    "break_it",
    [
        refused,
        mixed,
        label_not_bumped,
        checksum_unchanged,
        one_tensor_passed_over,
        checksum_fails,
        load_hangs,
    ],
)
def test_after_a_failed_load_the_old_version_is_loaded_and_serves_again(
    double: Double, versions: Versions, tmp_path: Path, break_it: Callable[[Double], None]
) -> None:
    """Case O28, for an engine: no mixed weights under a clean label."""
    if break_it is checksum_unchanged:
        on_a_gpu(double)

    async def scene(engine: SGLangEngine) -> None:
        first, second = versions.publish(1), versions.publish(2)
        await engine.update(first.event, first.path)
        checksum = double.checksum
        task = generate(engine, LONG)
        await some_tokens(double)
        double.requests.clear()
        break_it(double)
        with pytest.raises(EngineError) as error:
            await engine.update(second.event, second.path)
        assert error.value.reason not in FATAL
        assert engine.held == WeightsId(1, 1, first.event.digest)
        assert double.checksum == checksum and double.label == double.shown_label == "e1-v1"
        assert double.paused is None
        made = control(double)
        assert (made[0], made[-1]) == ("pause", "continue") and made.count("continue") == 1
        labels = [body["weight_version"] for body in double.calls("/update_weights_from_disk")]
        assert labels == ["e1-v2", "e1-v1"]
        assert (await task).versions == [(1, 1, 300)]
        await engine.update(second.event, second.path)  # and it can be had after all
        assert (await engine.generate(PROMPT, SHORT, request_id="s")).versions == [(1, 2, 8)]

    run(double, tmp_path, scene, request_timeout=timedelta(seconds=2 if break_it is load_hangs else 60))


def test_an_unchanged_checksum_is_taken_from_a_server_that_rounds_and_said(
    double: Double, versions: Versions, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At a tiny learning rate two versions in float32 may be one in bfloat16."""
    on_a_gpu(double)
    double.info["dtype"] = "bfloat16"

    async def scene(engine: SGLangEngine) -> None:
        first, second = versions.publish(1), versions.publish(2)
        await engine.update(first.event, first.path)
        checksum_unchanged(double)
        with caplog.at_level(logging.WARNING):
            await engine.update(second.event, second.path)
        assert engine.held == WeightsId(1, 2, second.event.digest)
        assert "bfloat16, which may round both to the same" in caplog.text

    run(double, tmp_path, scene)


def test_equal_weights_must_have_an_equal_checksum(
    double: Double, versions: Versions, tmp_path: Path
) -> None:
    on_a_gpu(double)

    async def scene(engine: SGLangEngine) -> None:
        first = versions.publish(1)
        again = versions.publish(2, first.tensors)
        await engine.update(first.event, first.path)
        answers(double, "/weights_checker", lambda answer: answer.update(per_engine_checksum="0" * 64))
        with pytest.raises(EngineError, match="for the same weights") as error:
            await engine.update(again.event, again.path)
        assert error.value.reason == "weights_mismatch"
        assert engine.held == WeightsId(1, 1, first.event.digest)

    run(double, tmp_path, scene)


def test_a_first_load_that_fails_leaves_the_engine_serving_nobody_until_one_succeeds(
    double: Double, versions: Versions, tmp_path: Path
) -> None:
    async def scene(engine: SGLangEngine) -> None:
        first = versions.publish(1)
        mixed(double)
        with pytest.raises(EngineError) as error:
            await engine.update(first.event, first.path)
        assert error.value.reason not in FATAL and engine.held is None
        with pytest.raises(EngineError, match="no_weights"):
            await engine.generate(PROMPT, SHORT, request_id="r")
        assert double.paused is None
        await engine.update(first.event, first.path)
        assert engine.held == WeightsId(1, 1, first.event.digest)

    run(double, tmp_path, scene)


def test_an_engine_that_cannot_go_back_is_lost_and_its_running_requests_do_not_count(
    double: Double, versions: Versions, tmp_path: Path
) -> None:
    async def scene(engine: SGLangEngine) -> None:
        first, second = versions.publish(1), versions.publish(2)
        await engine.update(first.event, first.path)
        task = generate(engine, LONG)
        await some_tokens(double)
        double.requests.clear()
        mixed(double)
        refused(double)
        with pytest.raises(EngineError, match="could not go back to version 1") as error:
            await engine.update(second.event, second.path)
        assert error.value.reason in FATAL
        assert engine.held is None and engine.checksum() == ""
        assert control(double)[-1] == "continue" and double.paused is None
        for call in (task, generate(engine, request_id="s")):
            with pytest.raises(EngineError, match="unknown weights") as error:
                await call
            assert error.value.reason in FATAL

    run(double, tmp_path, scene)


def test_a_pause_that_fails_changes_nothing_and_the_server_goes_on(
    double: Double, versions: Versions, tmp_path: Path
) -> None:
    async def scene(engine: SGLangEngine) -> None:
        first, second = versions.publish(1), versions.publish(2)
        await engine.update(first.event, first.path)
        double.requests.clear()
        double.fail("/pause_generation", "status", status=500)
        with pytest.raises(EngineError, match="pause_generation"):
            await engine.update(second.event, second.path)
        assert control(double) == ["pause", "continue"]
        assert engine.held == WeightsId(1, 1, first.event.digest)

    run(double, tmp_path, scene)


def test_a_server_that_does_not_go_on_is_dead_to_its_engine(
    double: Double, versions: Versions, tmp_path: Path
) -> None:
    async def scene(engine: SGLangEngine) -> None:
        first = versions.publish(1)
        await engine.update(first.event, first.path)
        double.fail("/continue_generation", "status", status=500)
        second = versions.publish(2)
        with pytest.raises(EngineError, match="does not go on") as error:
            await engine.update(second.event, second.path)
        assert error.value.reason in FATAL and engine.held is None
        double.paused = None

    run(double, tmp_path, scene)


# ---------------------------------------------------------------- servers that die
def in_process(
    double: Double, folder: Path, scene: Callable[[SGLangEngine, Process], Awaitable[None]]
) -> None:
    async def main() -> None:
        process = Process(double)
        engine = engine_on(process, folder)
        try:
            await asyncio.wait_for(scene(engine, process), DEADLINE_S)
        finally:
            await engine.close()
        assert process.was_killed, "its own server ends with the engine"

    asyncio.run(main())


def test_a_server_that_dies_fails_its_requests_with_its_last_words(
    double: Double, versions: Versions, tmp_path: Path
) -> None:
    async def scene(engine: SGLangEngine, process: Process) -> None:
        first = versions.publish(1)
        await engine.update(first.event, first.path)
        task = generate(engine, LONG)
        await some_tokens(double)
        double.stop()
        for call in (task, generate(engine, request_id="s")):
            with pytest.raises(EngineError, match="IndexError: out of range") as error:
                await call
            assert error.value.reason in FATAL
        assert engine.held is None

    in_process(double, tmp_path, scene)


def test_a_server_that_dies_in_the_middle_of_an_update_is_dead_with_its_last_words(
    double: Double, versions: Versions, tmp_path: Path
) -> None:
    async def scene(engine: SGLangEngine, process: Process) -> None:
        first, second = versions.publish(1), versions.publish(2)
        await engine.update(first.event, first.path)
        load_hangs(double)
        update = asyncio.ensure_future(engine.update(second.event, second.path))
        while len(double.calls("/update_weights_from_disk")) < 2:
            await asyncio.sleep(0.002)
        double.stop()
        with pytest.raises(EngineError, match="IndexError: out of range") as error:
            await update
        assert error.value.reason in FATAL and engine.held is None

    in_process(double, tmp_path, scene)


def test_a_server_that_dies_while_nobody_asks_it_anything_is_noticed(
    double: Double, versions: Versions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_LOOK_S", 0.02)

    async def scene(engine: SGLangEngine, process: Process) -> None:
        first = versions.publish(1)
        await engine.update(first.event, first.path)
        double.stop()
        while engine.held is not None:
            await asyncio.sleep(0.01)

    in_process(double, tmp_path, scene)


def test_a_server_that_never_gets_ready_is_dead(double: Double, versions: Versions, tmp_path: Path) -> None:
    async def scene(engine: SGLangEngine, process: Process) -> None:
        async def ready(deadline: timedelta) -> None:
            assert timedelta(seconds=500) < deadline <= timedelta(seconds=600)
            raise TimedOut("not ready within 600 s")

        process.ready = ready
        first = versions.publish(1)
        with pytest.raises(EngineError, match="not ready within") as error:
            await engine.update(first.event, first.path)
        assert error.value.reason in FATAL

    in_process(double, tmp_path, scene)


def test_a_server_that_stops_answering_is_dead_after_a_while(
    double: Double, versions: Versions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen machine closes no connection."""
    monkeypatch.setattr(engine_module, "_LOOK_S", 0.02)
    monkeypatch.setattr(engine_module, "_SILENCE_S", 0.2)

    async def scene(engine: SGLangEngine) -> None:
        first = versions.publish(1)
        await engine.update(first.event, first.path)
        task = generate(engine, LONG)
        await some_tokens(double)
        double.fail("/model_info", "status", times=999, status=500)
        with pytest.raises(EngineError, match=r"no answer for 0\.2 s") as error:
            await task
        assert error.value.reason in FATAL

    run(double, tmp_path, scene)


def test_a_server_that_somebody_else_starts_anew_is_dead_until_it_is_given_a_version(
    double: Double, versions: Versions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case O26: it answers with base weights, as "default"."""
    monkeypatch.setattr(engine_module, "_LOOK_S", 0.05)

    async def scene(engine: SGLangEngine) -> None:
        first = versions.publish(1)
        await engine.update(first.event, first.path)
        double.label = double.shown_label = "default"
        while engine.held is not None:
            await asyncio.sleep(0.01)
        with pytest.raises(EngineError, match="holds 'default', and was given 'e1-v1'") as error:
            await engine.generate(PROMPT, SHORT, request_id="r")
        assert error.value.reason in FATAL

    run(double, tmp_path, scene)


def test_tokens_of_weights_that_somebody_else_gave_the_server_are_refused(
    double: Double, versions: Versions, tmp_path: Path
) -> None:
    async def scene(engine: SGLangEngine) -> None:
        first = versions.publish(1)
        await engine.update(first.event, first.path)
        double.label = "e1-v7"
        with pytest.raises(EngineError, match="was never given to this server") as error:
            await engine.generate(PROMPT, SHORT, request_id="r")
        assert error.value.reason == "unknown_version"

    run(double, tmp_path, scene)


def test_a_broken_answer_fails_one_request_and_no_other(
    double: Double, versions: Versions, tmp_path: Path
) -> None:
    async def scene(engine: SGLangEngine) -> None:
        first = versions.publish(1)
        await engine.update(first.event, first.path)
        answers(double, "/generate", lambda answer: answer["output_ids"].pop())
        with pytest.raises(EngineError) as error:
            await engine.generate(PROMPT, SHORT, request_id="r")
        assert error.value.reason == "length_mismatch"
        assert len((await engine.generate(PROMPT, SHORT, request_id="r")).ids) == 8

    run(double, tmp_path, scene)


def test_a_router_is_refused_as_the_server_of_an_engine_and_its_workers_are_named(
    double: Double, versions: Versions, tmp_path: Path
) -> None:
    with Double(double.model, workers=[double.url]) as router:

        async def scene(engine: SGLangEngine) -> None:
            first = versions.publish(1)
            with pytest.raises(
                EngineError, match=f"is a router.* a worker of its own .it has {double.url}"
            ) as error:
                await engine.update(first.event, first.path)
            assert error.value.reason in FATAL

        run(router, tmp_path, scene)
    assert not double.requests
