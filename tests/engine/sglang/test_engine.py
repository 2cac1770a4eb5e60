"""The SGLang engine on the double: what it serves, and what it does with a server at an update."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.interfaces import EngineError, WeightsId
from engine.rollout.loading import FATAL, on_disk
from engine.rollout.sglang import guard
from engine.rollout.sglang.engine import SGLangEngine
from engine.weights.store import DeltaPolicy
from tests.engine.sglang.engine_support import (
    DEADLINE_S,
    LONG,
    PROMPT,
    SHORT,
    control,
    engine_of,
    generate,
    run,
    some_tokens,
)
from tests.support.sglang import CONTEXT
from tests.support.sglang_double import Double
from tests.support.sglang_versions import Versions


async def give_up(engine: SGLangEngine, double: Double, version: Any) -> None:
    """Ask for an update, leave while the server is paused, and wait until it is over all the same."""
    double._unblocked.clear()  # the scheduler stands still
    update = asyncio.ensure_future(engine.update(version.event, version.path))
    while double.paused is None:
        await asyncio.sleep(0.001)
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update
    double._loop.call_soon_threadsafe(double._unblocked.set)
    assert engine._update is not None
    await asyncio.wait({engine._update}, timeout=DEADLINE_S)


def test_a_server_serves_nobody_before_it_was_given_a_published_version(
    double: Double, versions: Versions, tmp_path: Path
) -> None:
    """Case O26: it boots with base weights and the label "default"."""

    async def scene(engine: SGLangEngine) -> None:
        assert engine.held is None and engine.checksum() == ""
        with pytest.raises(EngineError, match="holds no weights yet") as error:
            await engine.generate(PROMPT, SHORT, request_id="r")
        assert error.value.reason == "no_weights"
        assert double.calls("/generate") == []
        version = versions.publish(3)
        await engine.update(version.event, version.path)
        assert engine.held == WeightsId(1, 3, version.event.digest)
        assert engine.checksum() == double.checksum
        done = await engine.generate(PROMPT, SHORT, request_id="r")
        assert done.ids.tolist() == double.expected(PROMPT, 8, "e1-v3")
        assert done.versions == [(1, 3, 8)] and done.finish_reason == "length"
        assert engine.stats()["tokens"] == 8 and engine.stats()["requests"] == 1

    run(double, tmp_path, scene)


def test_an_update_pauses_loads_asks_for_the_checksum_and_goes_on_in_this_order(
    double: Double, versions: Versions, tmp_path: Path
) -> None:
    async def scene(engine: SGLangEngine) -> None:
        first, second = versions.publish(1), versions.publish(2)
        await engine.update(first.event, first.path)
        double.requests.clear()
        stall_s = await engine.update(second.event, second.path)
        assert control(double) == ["pause", "update", "weights", "continue"]
        (body,) = double.calls("/update_weights_from_disk")
        assert (body["weight_version"], body["flush_cache"]) == ("e1-v2", True)
        assert double.calls("/pause_generation") == [{"mode": "retract"}]
        assert double.paused is None
        assert 0 < stall_s < DEADLINE_S and engine.stats()["stall_s"] > stall_s
        folder = Path(body["model_path"])
        assert (folder / "model.safetensors").samefile(second.path), "no copy of the weights is made"
        assert {"config.json", "tokenizer.json", "model.safetensors"} <= {
            each.name for each in folder.iterdir()
        }
        assert list(folder.parent.iterdir()) == [folder], "the folder of the version before is gone"

    run(double, tmp_path, scene)
    assert not list((tmp_path / "served").iterdir()), "closing leaves no folder behind"


def test_a_request_that_runs_through_an_update_keeps_its_tokens_and_tells_both_versions(
    double: Double, versions: Versions, tmp_path: Path
) -> None:
    async def scene(engine: SGLangEngine) -> None:
        first, second = versions.publish(1), versions.publish(2)
        await engine.update(first.event, first.path)
        task = generate(engine, LONG)
        await some_tokens(double)
        await engine.update(second.event, second.path)
        done = await task
        assert [(epoch, version) for epoch, version, _ in done.versions] == [(1, 1), (1, 2)]
        assert sum(count for _, _, count in done.versions) == len(done.ids) == len(done.logprobs) == 300

    run(double, tmp_path, scene)


def test_in_mode_abort_running_requests_end_as_aborted(
    double: Double, versions: Versions, tmp_path: Path
) -> None:
    async def scene(engine: SGLangEngine) -> None:
        first, second = versions.publish(1), versions.publish(2)
        await engine.update(first.event, first.path)
        task = generate(engine, LONG)
        await some_tokens(double)
        await engine.update(second.event, second.path)
        done = await task
        assert done.finish_reason == "aborted" and len(done.ids) < 300
        assert done.versions == [(1, 1, len(done.ids))]
        assert double.calls("/pause_generation")[-1] == {"mode": "abort"}

    run(double, tmp_path, scene, pause_mode="abort")


def test_mode_in_place_needs_a_server_that_is_exact_in_it(
    double: Double, versions: Versions, tmp_path: Path
) -> None:
    async def refused(engine: SGLangEngine) -> None:
        version = versions.publish(1)
        with pytest.raises(
            EngineError, match="--disable-overlap-schedule and --disable-radix-cache"
        ) as error:
            await engine.update(version.event, version.path)
        assert error.value.reason in FATAL and engine.held is None

    run(double, tmp_path, refused, pause_mode="in_place")
    flags = {"disable_overlap_schedule": True, "disable_radix_cache": True}
    double.fail("/server_info", "change", times=99, change=lambda info: info.update(flags))

    async def taken(engine: SGLangEngine) -> None:
        version = versions.publish(1)
        await engine.update(version.event, version.path)
        assert double.calls("/update_weights_from_disk")[-1]["flush_cache"] is False

    run(double, tmp_path, taken, pause_mode="in_place")


def test_data_parallel_servers_are_refused(model: Path, versions: Versions, tmp_path: Path) -> None:
    async def scene(engine: SGLangEngine) -> None:
        version = versions.publish(1)
        with pytest.raises(EngineError, match="2 data-parallel ranks") as error:
            await engine.update(version.event, version.path)
        assert error.value.reason in FATAL

    with Double(model, dp_size=2) as double:
        run(double, tmp_path, scene)


def test_a_version_published_as_a_delta_reaches_the_server_whole(
    double: Double, model: Path, tmp_path: Path
) -> None:
    versions = Versions(model, tmp_path, deltas=DeltaPolicy(full_every=10))
    moved = versions.tensors(0)
    moved["model.norm.weight"] = moved["model.norm.weight"].copy()
    moved["model.norm.weight"][3] = 7.0

    async def scene(engine: SGLangEngine) -> None:
        first, second = versions.publish(0), versions.publish(1, moved)
        assert second.event.kind == "delta"
        await engine.update(first.event, first.path)
        before = dict(double.contents)
        await engine.update(second.event, second.path)
        assert {name for name in before if before[name] != double.contents[name]} == {"model.norm.weight"}
        assert engine.held == WeightsId(1, 1, second.event.digest)

    run(double, tmp_path, scene)


def test_a_server_that_a_killed_daemon_left_paused_goes_on(
    double: Double, versions: Versions, tmp_path: Path
) -> None:
    double.paused = "retract"

    async def scene(engine: SGLangEngine) -> None:
        version = versions.publish(1)
        await engine.update(version.event, version.path)
        assert (await engine.generate(PROMPT, SHORT, request_id="s")).versions == [(1, 1, 8)]

    run(double, tmp_path, scene)


def test_an_abort_ends_one_request_also_when_it_comes_during_an_update(
    double: Double, versions: Versions, tmp_path: Path
) -> None:
    async def scene(engine: SGLangEngine) -> None:
        version = versions.publish(1)
        await engine.update(version.event, version.path)
        one, other = generate(engine, LONG, request_id="a"), generate(engine, LONG, request_id="ab")
        await some_tokens(double)
        second = versions.publish(2)
        update = asyncio.ensure_future(engine.update(second.event, second.path))
        while double.paused is None and not update.done():
            await asyncio.sleep(0.001)
        await engine.abort("a")
        assert (await one).finish_reason == "aborted"
        assert (await other).finish_reason == "length"
        await update
        await engine.abort("unknown")  # harmless

    run(double, tmp_path, scene)


def test_closing_fails_what_runs_and_leaves_a_server_of_others_running(
    double: Double, versions: Versions, tmp_path: Path
) -> None:
    async def main() -> None:
        async with engine_of(double, tmp_path) as engine:
            version = versions.publish(1)
            await engine.update(version.event, version.path)
            task = generate(engine, LONG)
            await some_tokens(double)
        with pytest.raises(EngineError) as error:
            await task
        assert error.value.reason == "engine_closed"
        with pytest.raises(EngineError, match="was closed"):
            await engine.generate(PROMPT, SHORT, request_id="s")
        for _ in range(500):
            if not double.live:
                break
            await asyncio.sleep(0.01)
        assert not double.live, "its request was aborted"

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
    assert double.paused is None and not double.has_crashed


def test_closing_in_the_middle_of_an_update_leaves_the_server_going_on(
    double: Double, versions: Versions, tmp_path: Path
) -> None:
    async def main() -> None:
        async with engine_of(double, tmp_path) as engine:
            first, second = versions.publish(1), versions.publish(2)
            await engine.update(first.event, first.path)
            double.fail("/weights_checker", "hang")
            update = asyncio.ensure_future(engine.update(second.event, second.path))
            while double.calls("/update_weights_from_disk")[-1]["weight_version"] != "e1-v2":
                await asyncio.sleep(0.001)
            assert double.paused == "retract"
        with pytest.raises((EngineError, asyncio.CancelledError)):
            await update
        assert engine.held is None

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
    assert double.paused is None


def test_a_request_gets_no_more_tokens_than_there_is_room_for(
    double: Double, versions: Versions, tmp_path: Path
) -> None:
    async def scene(engine: SGLangEngine) -> None:
        version = versions.publish(1)
        await engine.update(version.event, version.path)
        done = await engine.generate([5] * (CONTEXT - 10), LONG, request_id="r")
        assert len(done.ids) == 8 and done.finish_reason == "length"  # SGLang keeps two for itself
        with pytest.raises(EngineError) as error:
            await engine.generate([5] * CONTEXT, LONG, request_id="r")
        assert error.value.reason == "prompt_too_long"

    run(double, tmp_path, scene)


def test_a_version_whose_caller_gave_up_is_served_only_once_it_was_asked_for_again(
    double: Double, versions: Versions, tmp_path: Path
) -> None:
    """Else samples would carry a version that the daemon had never announced."""

    async def scene(engine: SGLangEngine) -> None:
        first, second = versions.publish(1), versions.publish(2)
        await engine.update(first.event, first.path)
        double._unblocked.clear()  # the scheduler stands still
        update = asyncio.ensure_future(engine.update(second.event, second.path))
        while double.paused is None:
            await asyncio.sleep(0.001)
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        assert engine.held is None
        double._loop.call_soon_threadsafe(double._unblocked.set)
        while double.paused is not None:
            await asyncio.sleep(0.001)
        assert engine.held is None
        with pytest.raises(EngineError, match="no_weights"):
            await engine.generate(PROMPT, SHORT, request_id="r")
        await engine.update(second.event, second.path)
        assert engine.held == WeightsId(1, 2, second.event.digest)
        labels = [body["weight_version"] for body in double.calls("/update_weights_from_disk")]
        assert labels == ["e1-v1", "e1-v2"], "it was loaded once"

    run(double, tmp_path, scene)


def test_a_given_up_update_that_fails_leaves_the_old_version_serving_and_its_running_samples_whole(
    double: Double, versions: Versions, tmp_path: Path
) -> None:
    """The old version was told: what runs on it counts, also when a newer one is asked for afterwards."""

    async def scene(engine: SGLangEngine) -> None:
        first, second, third = (versions.publish(version) for version in (1, 2, 3))
        await engine.update(first.event, first.path)
        task = generate(engine, LONG)
        await some_tokens(double)
        double.fail("/update_weights_from_disk", "status", status=400, text="Failed to get weights iterator")
        await give_up(engine, double, second)
        assert engine.held == WeightsId(1, 1, first.event.digest)
        assert (await engine.generate(PROMPT, SHORT, request_id="s")).versions == [(1, 1, 8)]
        await engine.update(third.event, third.path)
        done = await task
        assert {each[1] for each in done.versions} <= {1, 3} and done.versions[0][1] == 1

    run(double, tmp_path, scene)


def test_a_version_that_nobody_was_told_of_is_nothing_to_go_back_to(
    double: Double, versions: Versions, tmp_path: Path
) -> None:
    async def scene(engine: SGLangEngine) -> None:
        first, second, third = (versions.publish(version) for version in (1, 2, 3))
        await engine.update(first.event, first.path)
        await give_up(engine, double, second)
        double.fail("/update_weights_from_disk", "status", status=400, text="Failed to get weights iterator")
        with pytest.raises(EngineError, match="Failed to get weights iterator"):
            await engine.update(third.event, third.path)
        assert engine.held is None
        with pytest.raises(EngineError, match="no_weights"):
            await engine.generate(PROMPT, SHORT, request_id="r")
        await engine.update(third.event, third.path)
        assert (await engine.generate(PROMPT, SHORT, request_id="s")).versions == [(1, 3, 8)]

    run(double, tmp_path, scene)


def test_a_version_that_came_before_its_broadcast_is_served_only_once_it_was_asked_for(
    double: Double, versions: Versions, tmp_path: Path
) -> None:
    """Else it would serve a version of which no EngineReady was told."""

    async def scene(engine: SGLangEngine) -> None:
        first, second = versions.publish(1), versions.publish(2)
        await engine.update(first.event, first.path)
        await give_up(engine, double, second)
        with pytest.raises(EngineError, match="version 2 came before, and not by g1") as error:
            await engine.receive(second.event, "g1", 1 << 20)
        assert error.value.reason == "transfer_failed" and engine.held is None
        await engine.update(second.event, second.path)
        assert engine.held == WeightsId(1, 2, second.event.digest)
        assert len(double.calls("/update_weights_from_disk")) == 2, "it was loaded once"

    run(double, tmp_path, scene)


def test_tokens_of_a_version_that_nobody_was_told_of_do_not_count(
    double: Double, versions: Versions, tmp_path: Path
) -> None:
    """Its caller gave up, and asks for a newer one: the running request has tokens of both and of the one between."""

    async def scene(engine: SGLangEngine) -> None:
        first, second, third = (versions.publish(version) for version in (1, 2, 3))
        await engine.update(first.event, first.path)
        task = generate(engine, LONG)
        await some_tokens(double)
        double._unblocked.clear()
        update = asyncio.ensure_future(engine.update(second.event, second.path))
        while double.paused is None:
            await asyncio.sleep(0.001)
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        double._loop.call_soon_threadsafe(double._unblocked.set)
        while double.paused is not None:
            await asyncio.sleep(0.001)
        before = len(next(iter(double.live.values())).ids)
        await some_tokens(double, before + 5)
        await engine.update(third.event, third.path)
        with pytest.raises(EngineError, match="'e1-v2' was never given to this server") as error:
            await task
        assert error.value.reason == "unknown_version"
        assert (await generate(engine)).versions == [(1, 3, 8)]

    run(double, tmp_path, scene)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ([], "needs --disable-overlap-schedule and --disable-radix-cache"),
        (["--disable-radix-cache", "--tp-size", "2"], "needs --disable-overlap-schedule:"),
        (["--disable_overlap_schedule", "--disable-radix-cache"], ""),
    ],
)
def test_in_place_is_exact_only_without_overlap_and_without_the_prefix_cache(
    args: list[str], reason: str
) -> None:
    found = guard.in_place_is_exact(args)
    assert found.startswith(reason) and bool(found) == bool(reason)


def test_a_model_without_safetensors_is_refused_with_the_reason(double: Double, tmp_path: Path) -> None:
    from streams.errors import ConfigError

    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text(json.dumps({"vocab_size": 7}))
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors"):
        SGLangEngine(tmp_path / "empty", url=double.url, folder=tmp_path / "served", locate=on_disk(tmp_path))


# ---------------------------------------------------------------- versions that are not taken
def unpublished(versions: Versions, version: int, change: Callable[[dict[str, Any]], None]) -> Any:
    tensors: dict[str, Any] = versions.tensors(version)
    change(tensors)
    return versions.publish(version, tensors)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.update(extra=np.ones(2, np.float32)), "unknown: extra"),
        (lambda tensors: tensors.pop("lm_head.weight"), "missing: lm_head.weight"),
        (
            lambda tensors: tensors.update({"model.norm.weight": np.ones(7, np.float32)}),
            r"wrong shape: model.norm.weight \[7\]≠\[64\]",
        ),
    ],
)
def test_weights_that_do_not_fit_the_model_never_reach_the_server(
    double: Double,
    versions: Versions,
    tmp_path: Path,
    change: Callable[[dict[str, Any]], None],
    words: str,
) -> None:
    """SGLang passes over an unknown name and reports success."""

    async def scene(engine: SGLangEngine) -> None:
        first = versions.publish(1)
        await engine.update(first.event, first.path)
        double.requests.clear()
        bad = unpublished(versions, 2, change)
        with pytest.raises(EngineError, match=words) as error:
            await engine.update(bad.event, bad.path)
        assert error.value.reason == "weights_mismatch"
        assert control(double) == [] and engine.held == WeightsId(1, 1, first.event.digest)
        (folder,) = (tmp_path / "served").iterdir()
        assert folder.name.startswith("e1-v1."), "nothing is left of the bad one"

    run(double, tmp_path, scene)


def test_a_file_that_is_missing_or_holds_other_weights_never_reaches_the_server(
    double: Double, versions: Versions, tmp_path: Path
) -> None:
    async def scene(engine: SGLangEngine) -> None:
        first, second, third = (versions.publish(each) for each in (1, 2, 3))
        await engine.update(first.event, first.path)
        double.requests.clear()
        for published, path, reason in (
            (second.event, tmp_path / "weights" / "e1-v9.safetensors", "weights_unreadable"),
            (second.event, third.path, "weights_mismatch"),
            (msgspec.structs.replace(second.event, kind="lora"), second.path, "weights_unreadable"),
        ):
            with pytest.raises(EngineError) as error:
                await engine.update(published, path)
            assert error.value.reason == reason
        assert control(double) == [] and engine.held == WeightsId(1, 1, first.event.digest)

    run(double, tmp_path, scene)
