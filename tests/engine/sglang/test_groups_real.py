"""Versions by broadcast to real SGLang servers: from one trainer to two, with requests in flight, and when it fails.

Two servers: that of the session, and one of this file, which is exact in every pause mode. The engines that use them
are the real daemons', on threads here, so a step of an update can be made to fail.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from engine.interfaces import Completion, Sampling
from engine.rollout.sglang.server import Server
from streams.events import TransferGroupFormed
from tests.support.sglang import START, RealServer, require_sglang, start_server
from tests.support.sglang_fleet import Fleet
from tests.support.sglang_logprobs import TEMPERATURE, TOLERANCE, differences, worst_difference

pytestmark = [pytest.mark.timeout(1500), pytest.mark.slow]  # a second server, and minutes of generation
EXACT = ("--disable-overlap-schedule", "--disable-radix-cache")
LONG = Sampling(max_tokens=900, temperature=TEMPERATURE)  # longer than an update, on a fast machine too
SHORT = Sampling(max_tokens=24, temperature=TEMPERATURE)
PROMPTS = [[5 + n, 17, 3 * n + 9, 40] for n in range(4)]
DEADLINE_S = 300


@pytest.fixture(scope="module")
def other(sglang_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    require_sglang()
    folder = tmp_path_factory.mktemp("other")
    server = start_server(sglang_server.models[0], folder / "sglang.log", args=EXACT)
    try:
        asyncio.run(server.ready(START))
        yield server
    finally:
        server.kill()


@pytest.fixture
def fleet(sglang: RealServer, tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path, sglang.models[0], deadline_s=60)
    try:
        yield made
    finally:
        made.close()


def generate(fleet: Fleet, replica: int, prompt: list[int], sampling: Sampling = LONG) -> Future[Completion]:
    engine = fleet.engines[replica]
    return fleet.call(
        replica, engine.generate(prompt, sampling, request_id=f"r{prompt[0]}-{time.monotonic()}")
    )


def is_exact(fleet: Fleet, prompt: list[int], done: Completion) -> bool:
    return worst_difference(fleet.model, fleet.weights, prompt, done) < TOLERANCE


def versions_of(done: Completion) -> list[int]:
    return [version for _, version, _ in done.versions]


def test_one_trainer_feeds_two_servers_while_they_generate_and_every_log_prob_is_of_the_version_it_names(
    fleet: Fleet, sglang: RealServer, other: Server
) -> None:
    """Mode retract, which is the default."""
    fleet.publish(1)
    for replica, url in enumerate((sglang.url, other.url)):
        fleet.start(replica, url)
    fleet.whole(0, 1)
    running = [(prompt, generate(fleet, replica, prompt)) for prompt in PROMPTS for replica in (0, 1)]
    for last in range(2, 8):
        fleet.publish(last)
        assert fleet.ways(last, 0, 1) == ["distributed"] * 2
        first, second = (fleet.ready(replica, last) for replica in (0, 1))
        assert first.checksum == second.checksum != "" and first.digest == second.digest
        time.sleep(0.5)
    assert len(fleet.events(TransferGroupFormed)) == 1 and not fleet.failures(0) and not fleet.failures(1)
    spanning = 0
    for prompt, call in running:
        done = call.result(DEADLINE_S)
        assert done.finish_reason == "length" and len(done.ids) == LONG.max_tokens
        assert versions_of(done) == sorted(set(versions_of(done)))
        spanning += len(done.versions) > 1
        assert is_exact(fleet, prompt, done)
    assert spanning, "no request ran through an update"


def test_a_bucket_of_a_wrong_shape_leaves_the_old_version_on_that_server_and_the_new_one_comes_from_disk(
    fleet: Fleet, sglang: RealServer, other: Server
) -> None:
    """SGLang has loaded a part of it by then, and says so with a 400."""
    fleet.publish(1)
    engine = fleet.start(0, sglang.url)
    fleet.start(1, other.url)
    fleet.whole(0, 1)
    take, given = engine._client.update_from_distributed, iter(range(99))

    async def wrong(names: Any, dtypes: Any, shapes: Any, group: str, **options: Any) -> None:
        if next(given) == 2:
            shapes = [list(reversed(shape)) for shape in shapes]
        await take(names, dtypes, shapes, group, **options)

    engine._client.update_from_distributed = wrong  # pyright: ignore[reportAttributeAccessIssue]
    call = generate(fleet, 0, PROMPTS[0])
    fleet.publish(2)
    assert fleet.ready(0, 2).transport == "disk"
    failed = fleet.failures(0)
    assert failed[0].reason == "transfer_failed" and "partially updated" in failed[0].detail
    assert fleet.ready(1, 2).checksum == fleet.ready(0, 2).checksum
    done = call.result(DEADLINE_S)
    assert is_exact(fleet, PROMPTS[0], done)
    engine._client.update_from_distributed = take
    fleet.whole(0, 1)
    for version in (3, 4):  # the first of them may still find that the group is broken
        fleet.publish(version)
        ways = fleet.ways(version, 0, 1)
    assert ways == ["distributed"] * 2


def test_a_trainer_killed_in_the_middle_of_a_broadcast_leaves_both_servers_whole(
    fleet: Fleet, sglang: RealServer, other: Server
) -> None:
    fleet.publish(1)
    for replica, url in enumerate((sglang.url, other.url)):
        fleet.start(replica, url)
    fleet.whole(0, 1)
    epoch = fleet.killed_trainer(2)
    versions = fleet.trainer.versions
    fleet.weights |= {(epoch, version): versions.tensors(version) for version in (2, 3)}
    ready = [fleet.ready(replica, 3, epoch) for replica in (0, 1)]
    assert [each.transport for each in ready] == ["disk", "disk"] and ready[0].checksum == ready[1].checksum
    for replica in (0, 1):
        done = generate(fleet, replica, PROMPTS[0], SHORT).result(DEADLINE_S)
        assert versions_of(done) == [3] and is_exact(fleet, PROMPTS[0], done)
    fleet.new_trainer()
    fleet.whole(0, 1)
    fleet.publish(4)
    assert fleet.ways(4, 0, 1) == ["distributed"] * 2


def test_mode_abort_ends_what_runs_with_the_tokens_it_has(fleet: Fleet, other: Server) -> None:
    fleet.publish(1)
    fleet.start(0, other.url, pause_mode="abort")
    fleet.whole(0)
    call = generate(fleet, 0, PROMPTS[0])
    generate(fleet, 0, PROMPTS[0], SHORT).result(DEADLINE_S)  # sent last: the others have tokens by now
    fleet.publish(2)
    assert fleet.ways(2, 0) == ["distributed"]
    done = call.result(DEADLINE_S)
    assert done.finish_reason == "aborted" and len(done.ids) < LONG.max_tokens and versions_of(done) == [1]
    assert is_exact(fleet, PROMPTS[0], done)
    after = generate(fleet, 0, PROMPTS[0], SHORT).result(DEADLINE_S)
    assert versions_of(after) == [2] and is_exact(fleet, PROMPTS[0], after)


def test_mode_in_place_is_exact_up_to_the_update_and_for_what_begins_after_it(
    fleet: Fleet, other: Server
) -> None:
    """Tokens after it in the same request read keys and values of the old weights: of neither version alone."""
    fleet.publish(1)
    fleet.start(0, other.url, pause_mode="in_place")
    fleet.whole(0)
    running = [(prompt, generate(fleet, 0, prompt)) for prompt in PROMPTS]
    generate(fleet, 0, PROMPTS[0], SHORT).result(DEADLINE_S)  # sent last: the others have tokens by now
    fleet.publish(2)
    assert fleet.ways(2, 0) == ["distributed"]
    after = generate(fleet, 0, PROMPTS[0], SHORT).result(DEADLINE_S)
    assert versions_of(after) == [2] and is_exact(fleet, PROMPTS[0], after)
    epoch, boundaries = fleet.trainer.epoch, 0
    for prompt, call in running:
        done = call.result(DEADLINE_S)
        assert len(done.ids) == LONG.max_tokens and done.finish_reason == "length"
        if versions_of(done) == [1, 2]:
            boundaries += 1
            end = done.versions[0][2]
            old = differences(fleet.model, fleet.weights[epoch, 1], prompt, done)
            assert old[:end].max() < TOLERANCE, "a token before the boundary is not of the old weights"
            assert old[end] > TOLERANCE, "the first token after it is still of the old weights"
    assert boundaries, "no request ran through the update"


def test_mode_in_place_is_refused_on_a_server_that_would_mislabel_tokens(
    fleet: Fleet, sglang: RealServer
) -> None:
    fleet.publish(1)
    fleet.start(0, sglang.url, pause_mode="in_place")
    assert fleet.codes[0].result(60) == 1
    (failed,) = fleet.failures(0)
    assert failed.reason == "engine" and "--disable-overlap-schedule" in failed.detail


def test_a_server_killed_in_the_middle_of_a_broadcast_leaves_the_other_whole_and_the_sender_free(
    fleet: Fleet, sglang: RealServer, other: Server
) -> None:
    """The last one here: it costs a server."""
    fleet.publish(1)
    fleet.start(0, sglang.url)
    dying = fleet.start(1, other.url)
    fleet.whole(0, 1)
    fleet.publish(2)
    assert fleet.ways(2, 0, 1) == ["distributed"] * 2
    take, calls = dying._client.update_from_distributed, iter(range(99))

    async def and_die(*given: Any, **options: Any) -> None:
        if next(calls) == 2:
            other.kill()
        await take(*given, **options)

    dying._client.update_from_distributed = and_die  # pyright: ignore[reportAttributeAccessIssue]
    began = time.monotonic()
    fleet.publish(3, wait_s=fleet.deadline_s + 30)
    assert time.monotonic() - began < fleet.deadline_s + 30
    sent = fleet.trainer.sender.sent
    assert sent is not None and sent.error
    fleet.ready(0, 3)
    assert fleet.codes[1].result(60) == 1, "its daemon ends; a supervisor starts both anew"
    done = generate(fleet, 0, PROMPTS[0], SHORT).result(DEADLINE_S)
    assert versions_of(done) == [3] and is_exact(fleet, PROMPTS[0], done)
    fleet.whole(0)
    fleet.publish(4)
    assert fleet.ways(4, 0) == ["distributed"]
