"""Versions by broadcast to SGLang engines, on doubles in real Gloo groups, with the real daemon and the real sender.

After each failure: what a server says it holds is one version whole, it serves under the label of that one, nothing of
the update is left on it (no pause, no session, no group that is over), and the next version goes by broadcast again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from engine.interfaces import EngineError, Sampling, WeightsId
from engine.rollout.loading import FATAL
from engine.rollout.sglang import engine as engine_module
from engine.rollout.sglang import groups as groups_module
from engine.rollout.sglang import updates as updates_module
from engine.rollout.sglang.engine import SGLangEngine
from engine.rollout.sglang.server import free_port
from engine.weights import bucketing, collective
from streams.events import EngineJoined, EngineReady, TransferGroupFormed
from tests.engine.sglang.engine_support import PROMPT, SHORT, run, some_tokens
from tests.support.sglang_double import Double, tensor_bytes
from tests.support.sglang_fleet import BUCKET_BYTES, Fleet, eventually
from tests.support.sglang_versions import Versions

pytestmark = pytest.mark.timeout(120)
LONG = Sampling(max_tokens=900)


@pytest.fixture
def fleet(model: Path, tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path, model)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def second(model: Path) -> Iterator[Double]:
    with Double(model, step_s=0.002) as double:
        yield double


def holds(double: Double, path: Path, version: int) -> None:
    """All of this version and nothing else, and nothing of an update is left."""
    assert double.contents == tensor_bytes(path), "a mixture, or another version"
    assert double.label.endswith(f"-v{version}") and double.shown_label == double.label
    assert double.paused is None and not double.session_is_open and not double.is_blocked


def file_of(fleet: Fleet, version: int) -> Path:
    return fleet.folder / f"weights/e{fleet.trainer.epoch}-v{version}.safetensors"


def test_versions_come_bucket_by_bucket_with_label_and_flush_on_the_last_alone(
    fleet: Fleet, double: Double
) -> None:
    fleet.publish(1)
    engine = fleet.start(0, double.url)
    fleet.whole(0)
    formed = fleet.publish(2).uris["distributed"]
    assert fleet.ways(1, 0) == ["disk"] and fleet.ways(2, 0) == ["distributed"]
    bodies = double.calls("/update_weights_from_distributed")
    buckets = bucketing.plan(
        fleet.trainer.store.publish(fleet.weights[0, 2], epoch=0, version=2, step=2).tensors, BUCKET_BYTES
    )
    assert [body["names"] for body in bodies] == [[info.name for info in bucket] for bucket in buckets]
    assert len(bodies) > 3
    assert [body.get("weight_version") for body in bodies] == [None] * (len(bodies) - 1) + ["e0-v2"]
    assert [body["flush_cache"] for body in bodies] == [False] * (len(bodies) - 1) + [True]
    assert {body["load_format"] for body in bodies} == {"flattened_bucket"}
    order = [
        path
        for path, _ in double.requests
        if path not in ("/model_info", "/ready", "/workers", "/server_info")
    ]
    at = order.index("/begin_weight_update")
    assert order[at - 1] == "/pause_generation"
    assert order[at + 1 + len(bodies) :] == ["/end_weight_update", "/weights_checker", "/continue_generation"]
    (init,) = double.calls("/init_weights_update_group")
    assert (init["rank_offset"], init["world_size"], init["backend"], init["group_name"]) == (
        1,
        2,
        "gloo",
        formed,
    )
    holds(double, file_of(fleet, 2), 2)
    held = engine.held
    assert held == WeightsId(0, 2, fleet.ready(0, 2).digest)
    assert fleet.ready(0, 2).checksum == double.checksum and fleet.ready(0, 2).stall_s > 0
    fleet.publish(3)
    assert fleet.ways(3, 0) == ["distributed"] and len(double.calls("/init_weights_update_group")) == 1


def test_two_servers_of_which_one_has_two_ranks_take_a_version_in_one_group(
    fleet: Fleet, double: Double, model: Path
) -> None:
    """Of a server that is joined by URL the number of ranks is known, and told, once it is ready."""
    with Double(model, tp_size=2) as other:
        fleet.publish(1)
        fleet.start(0, other.url)
        fleet.start(1, double.url)
        fleet.whole(0, 1)
        fleet.publish(2)
        assert fleet.ways(2, 0, 1) == ["distributed"] * 2
        (formed,) = fleet.events(TransferGroupFormed)
        assert (formed.world_size, formed.members) == (4, [("rollout-0", 1, 2), ("rollout-1", 3, 1)])
        joined = [(each.engine, each.n_ranks) for each in fleet.events(EngineJoined)]
        assert [n_ranks for engine, n_ranks in joined if engine == "rollout-0"] == [1, 2]
        assert [n_ranks for engine, n_ranks in joined if engine == "rollout-1"] == [1]
        for each in (double, other):
            holds(each, file_of(fleet, 2), 2)


def test_requests_in_flight_keep_their_tokens_and_tell_each_version(fleet: Fleet, double: Double) -> None:
    fleet.publish(1)
    engine = fleet.start(0, double.url)
    fleet.whole(0)
    call = fleet.call(0, engine.generate(PROMPT, LONG, request_id="r"))
    for version in (2, 3):
        asyncio.run(some_tokens(double, 20 * version))
        fleet.publish(version)
        fleet.ready(0, version)
    done = call.result(30)
    assert [(epoch, version) for epoch, version, _ in done.versions] == [(0, 1), (0, 2), (0, 3)]
    assert sum(count for *_, count in done.versions) == len(done.ids) == 900


# ---------------------------------------------------------------- failures
def half_a_bucket(double: Double) -> None:
    double.fail("/update_weights_from_distributed", "partial")


def a_refused_bucket(double: Double) -> None:
    double.fail("/update_weights_from_distributed", "status", status=400, text="no memory for it")


def a_refused_end(double: Double) -> None:
    double.fail("/end_weight_update", "status", status=500)


def a_broken_connection(double: Double) -> None:
    double.fail("/update_weights_from_distributed", "drop")


def a_refused_begin(double: Double) -> None:
    double.fail("/begin_weight_update", "status", times=2)


def no_checksum(double: Double) -> None:
    double.fail("/weights_checker", "status", status=500)


@pytest.mark.parametrize(
    "break_it",
    [
        half_a_bucket,
        a_refused_bucket,
        a_broken_connection,
        a_refused_begin,
        a_refused_end,
        no_checksum,
    ],
)
def test_o28_an_engine_that_a_broadcast_failed_on_serves_its_old_version_then_takes_the_new_one_from_disk(
    fleet: Fleet, double: Double, second: Double, break_it: Callable[[Double], None]
) -> None:
    fleet.publish(1)
    engine = fleet.start(0, double.url)
    fleet.start(1, second.url)
    fleet.whole(0, 1)
    fleet.publish(2)
    assert fleet.ways(2, 0, 1) == ["distributed"] * 2
    call = fleet.call(0, engine.generate(PROMPT, LONG, request_id="r"))
    asyncio.run(some_tokens(double, 10))
    double.requests.clear()
    break_it(double)
    began = time.monotonic()
    fleet.publish(3)
    assert time.monotonic() - began < fleet.deadline_s + 5, "the sender was held up"
    assert fleet.ready(0, 3).transport == "disk"
    fleet.ready(1, 3)
    loads = [body["weight_version"] for body in double.calls("/update_weights_from_disk")]
    assert loads == ["e0-v2", "e0-v3"], "first back to what it held, then the new one"
    assert double.calls("/end_weight_update") or break_it is a_refused_begin
    holds(double, file_of(fleet, 3), 3)
    holds(second, file_of(fleet, 3), 3)
    done = call.result(30)
    assert [version for _, version, _ in done.versions] == [2, 3] and len(done.ids) == 900
    fleet.whole(0, 1)
    fleet.publish(4)  # small buckets go out even to who has left: then it is this one that finds that out
    fleet.ready(0, 4)
    fleet.ready(1, 4)
    fleet.whole(0, 1)
    fleet.publish(5)
    assert fleet.ways(5, 0, 1) == ["distributed"] * 2
    assert len(double.groups) == 1, "groups that are over are destroyed"
    is_same = break_it in (a_refused_end, no_checksum)  # every bucket came, so the group is as good as before
    assert len(fleet.events(TransferGroupFormed)) == (1 if is_same else 2)


def test_a_server_that_loads_something_else_is_found_out_by_its_parameters(
    fleet: Fleet, double: Double
) -> None:
    """All answers are 200, and the label is right: one tensor was passed over."""
    fleet.publish(1)
    fleet.start(0, double.url)
    fleet.whole(0)
    old = double.contents["model.norm.weight"]

    def forget(answer: Any) -> None:
        double.contents["model.norm.weight"] = old

    double.fail("/end_weight_update", "change", change=forget)
    fleet.publish(2)
    assert fleet.ready(0, 2).transport == "disk"
    (failed,) = fleet.failures(0)
    assert failed.reason == "weights_mismatch"
    assert "1 parameters of the server are not those published: model.norm.weight" in failed.detail
    holds(double, file_of(fleet, 2), 2)
    fleet.publish(3)
    assert fleet.ways(3, 0) == ["distributed"] and len(fleet.events(TransferGroupFormed)) == 1


def test_a_trainer_killed_in_the_middle_of_a_broadcast_leaves_servers_whole_for_the_next(
    fleet: Fleet, double: Double, second: Double
) -> None:
    fleet.publish(1)
    fleet.start(0, double.url)
    fleet.start(1, second.url)
    fleet.whole(0, 1)
    epoch = fleet.killed_trainer(2)
    for replica, server in enumerate((double, second)):
        assert fleet.ready(replica, 2, epoch).transport == "distributed"
        assert fleet.ready(replica, 3, epoch).transport == "disk"
        holds(server, fleet.folder / f"weights/e{epoch}-v3.safetensors", 3)
    fleet.new_trainer()
    fleet.whole(0, 1)
    fleet.publish(4)
    assert fleet.ways(4, 0, 1) == ["distributed"] * 2


def test_a_server_that_dies_in_the_middle_of_a_broadcast_takes_no_other_with_it(
    fleet: Fleet, double: Double, second: Double
) -> None:
    fleet.publish(1)
    fleet.start(0, double.url)
    dying = fleet.start(1, second.url)
    fleet.whole(0, 1)
    fleet.publish(2)
    assert fleet.ways(2, 0, 1) == ["distributed"] * 2
    take, calls = dying._client.update_from_distributed, iter(range(99))

    async def and_die(*given: Any, **options: Any) -> None:
        if next(calls) == 2:
            for rank in next(iter(second.groups.values())) or ():
                rank.close()  # as the kernel closes its connections
            second.stop()
        await take(*given, **options)

    dying._client.update_from_distributed = and_die  # pyright: ignore[reportAttributeAccessIssue]
    began = time.monotonic()
    fleet.publish(3)
    assert time.monotonic() - began < fleet.deadline_s + 5
    sent = fleet.trainer.sender.sent
    assert sent is not None and sent.error
    fleet.ready(0, 3)
    holds(double, file_of(fleet, 3), 3)
    assert fleet.codes[1].result(30) == 1, "its daemon ends, and is started anew with a server"
    fleet.whole(0)
    fleet.publish(4)
    assert fleet.ways(4, 0) == ["distributed"]


def test_a_group_without_a_listener_is_never_tried_on_the_server(
    double: Double, versions: Versions, tmp_path: Path
) -> None:
    """Its scheduler would block for half an hour."""
    formed = _formed(free_port("127.0.0.1"))

    async def scene(engine: SGLangEngine) -> None:
        first = versions.publish(1)
        await engine.update(first.event, first.path)
        with pytest.raises(EngineError, match="nobody listens at") as error:
            await engine.join_group(formed, 1)
        assert error.value.reason == "transfer_failed"
        assert double.calls("/init_weights_update_group") == []
        with pytest.raises(EngineError, match="is not joined"):
            await engine.receive(first.event, formed.group, BUCKET_BYTES)
        await engine.leave_group(formed.group)
        assert (await engine.generate(PROMPT, SHORT, request_id="r")).versions == [(1, 1, 8)]

    run(double, tmp_path, scene)


def test_a_group_that_is_left_while_the_server_joins_it_is_destroyed_when_it_hears_again(
    double: Double, versions: Versions, tmp_path: Path
) -> None:
    listener = collective.Listener("127.0.0.1", 0, 2, timedelta(seconds=20))
    formed = _formed(listener.port)

    async def scene(engine: SGLangEngine) -> None:
        first, second = versions.publish(1), versions.publish(2)
        await engine.update(first.event, first.path)
        joining = asyncio.ensure_future(engine.join_group(formed, 1))
        await until(lambda: double.is_blocked)
        joining.cancel()
        await engine.leave_group(formed.group)
        update = asyncio.ensure_future(engine.update(second.event, second.path))
        await asyncio.sleep(0.2)
        assert not double.calls("/pause_generation")[1:], "an update waits until the server hears"
        loop = asyncio.get_running_loop()
        group = await loop.run_in_executor(None, lead, listener, formed)
        await asyncio.wait_for(update, 20)
        assert engine.held is not None and engine.held.version == 2
        await until(lambda: not double.groups)
        group.close()

    run(double, tmp_path, scene)
    listener.close()


def test_a_receive_whose_group_is_left_ends_soon_and_nobody_is_served_before_the_server_hears_again(
    double: Double, versions: Versions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer is frozen: it neither sends nor closes."""
    monkeypatch.setattr(engine_module, "_LEFT_S", 0.2)
    monkeypatch.setattr(groups_module, "_LEAVE_S", 0.1)
    listener = collective.Listener("127.0.0.1", 0, 2, timedelta(seconds=20))
    formed = _formed(listener.port)

    async def scene(engine: SGLangEngine) -> None:
        first, second = versions.publish(1), versions.publish(2)
        await engine.update(first.event, first.path)
        loop = asyncio.get_running_loop()
        leading = loop.run_in_executor(None, lead, listener, formed)
        await engine.join_group(formed, 1)
        group = await leading
        receiving = asyncio.ensure_future(engine.receive(second.event, formed.group, BUCKET_BYTES))
        await until(lambda: double.is_blocked)
        began = time.monotonic()
        await engine.leave_group(formed.group)
        with pytest.raises(EngineError, match="still waits for the trainer") as error:
            await receiving
        assert error.value.reason == "transfer_failed" and time.monotonic() - began < 5
        assert engine.held is None
        with pytest.raises(EngineError, match="holds no weights yet"):
            await engine.generate(PROMPT, SHORT, request_id="r")
        group.close()  # the trainer goes on, and is told that it has ended
        await engine.update(second.event, second.path)
        assert engine.held == WeightsId(1, 2, second.event.digest)
        holds(double, second.path, 2)
        assert (await engine.generate(PROMPT, SHORT, request_id="r")).versions == [(1, 2, 8)]
        await until(lambda: not double.groups)

    run(double, tmp_path, scene)
    listener.close()


def test_a_server_that_is_stuck_in_a_broadcast_is_given_up_some_seconds_after_the_deadline(
    double: Double, versions: Versions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "SPARE_S", 0.2)
    monkeypatch.setattr(updates_module, "_END_S", 0.2)
    listener = collective.Listener("127.0.0.1", 0, 2, timedelta(seconds=20))
    formed = _formed(listener.port, deadline_s=1.0)

    async def scene(engine: SGLangEngine) -> None:
        first, second = versions.publish(1), versions.publish(2)
        await engine.update(first.event, first.path)
        leading = asyncio.get_running_loop().run_in_executor(None, lead, listener, formed)
        await engine.join_group(formed, 1)
        group = await leading
        running = asyncio.ensure_future(engine.generate(PROMPT, LONG, request_id="r"))
        await some_tokens(double)
        with pytest.raises(EngineError, match="is stuck in a broadcast of group g-test") as error:
            await engine.receive(second.event, formed.group, BUCKET_BYTES)
        assert error.value.reason in FATAL and engine.held is None
        with pytest.raises(EngineError):
            await running
        group.close()

    run(double, tmp_path, scene)
    listener.close()


def test_a_session_that_a_killed_daemon_left_open_is_closed_first(fleet: Fleet, double: Double) -> None:
    fleet.publish(1)
    fleet.start(0, double.url)
    fleet.whole(0)
    double.session_is_open = True
    fleet.publish(2)
    assert fleet.ways(2, 0) == ["distributed"]
    holds(double, file_of(fleet, 2), 2)


def test_a_version_whose_file_is_damaged_is_not_received(fleet: Fleet, double: Double) -> None:
    """There would be no way back to it, and no proof of it."""
    fleet.publish(1)
    engine = fleet.start(0, double.url)
    fleet.whole(0)
    fleet.publish(2)
    assert fleet.ways(2, 0) == ["distributed"]
    store, publish = fleet.trainer.store, fleet.trainer.store.publish

    def damaged(*given: Any, **options: Any) -> Any:
        event = publish(*given, **options)
        with (fleet.folder / event.uris["disk"]).open("r+b") as file:
            file.seek(-5, 2)
            file.write(b"\0\0\0\0\0")
        return event

    store.publish = damaged  # pyright: ignore[reportAttributeAccessIssue]
    fleet.publish(3)
    (failed, *_) = eventually(lambda: fleet.failures(0), "the engine to say so")
    assert failed.reason == "transfer_failed" and "has digest" in failed.detail
    assert engine.held is not None and engine.held.version == 2
    assert "e0-v3" not in [
        body.get("weight_version") for body in double.calls("/update_weights_from_distributed")
    ]
    store.publish = publish  # pyright: ignore[reportAttributeAccessIssue]
    fleet.whole(0)
    fleet.publish(4)
    fleet.ready(0, 4)
    holds(double, file_of(fleet, 4), 4)
    assert not [each for each in fleet.events(EngineReady) if each.version == 3]


def test_a_server_with_pipeline_stages_is_in_no_group(fleet: Fleet, double: Double) -> None:
    double.info["pp_size"] = 2
    fleet.publish(1)
    engine = fleet.start(0, double.url)
    fleet.ready(0, 1)
    assert engine.n_ranks == 0 and fleet.trainer.candidates() == []
    assert "distributed" not in fleet.publish(2).uris
    assert fleet.ways(2, 0) == ["disk"]


# ---------------------------------------------------------------- a group by hand
def _formed(port: int, *, deadline_s: float = 20.0) -> TransferGroupFormed:
    return TransferGroupFormed(
        epoch=1,
        group="g-test",
        backend="gloo",
        address="127.0.0.1",
        port=port,
        world_size=2,
        members=[("rollout-0", 1, 1)],
        bucket_bytes=BUCKET_BYTES,
        deadline_s=deadline_s,
    )


def lead(listener: collective.Listener, formed: TransferGroupFormed) -> Any:
    """Rank 0, once the others are there."""
    timeout = timedelta(seconds=formed.deadline_s)
    return collective.join(
        formed.address, formed.port, 0, 2, formed.group, "gloo", timeout, listener=listener
    )


async def until(condition: Callable[[], Any]) -> None:
    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(wait(), 20)
