"""What the client promises, on the double and on a real server alike."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from engine.interfaces import Sampling
from engine.rollout.sglang.client import SGLangClient, new_rid
from engine.rollout.sglang.errors import BadAnswer, BadRequest, Refused, TimedOut
from engine.rollout.sglang.spans import label
from tests.support.sglang import CONTEXT, VOCAB, make_model
from tests.support.sglang_double import Double

PROMPT = [5, 6, 7]
MINUTE = timedelta(seconds=60)
LONG = Sampling(max_tokens=900)
SHORT = Sampling(max_tokens=8)


class Served(NamedTuple):
    url: str
    models: tuple[Path, Path]
    double: Double | None  # None: it is real


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return make_model(folder / "model-0", 0), make_model(folder / "model-1", 1)


@pytest.fixture(params=["double", "sglang"])
def served(request: pytest.FixtureRequest, models: tuple[Path, Path]) -> Iterator[Served]:
    if request.param == "sglang":
        real = request.getfixturevalue("sglang")
        yield Served(real.url, real.models, None)
        assert real.server.exited is None, real.server.cause()
        return
    with Double(models[0]) as double:
        yield Served(double.url, models, double)


@asynccontextmanager
async def connected(served: Served, **options: Any) -> AsyncIterator[SGLangClient]:
    """A client of a server that holds version (1, 3), and is left as tests must leave it."""
    client = SGLangClient(served.url, **options)
    try:
        await client.update_from_disk(str(served.models[0]), label(1, 3), flush=True)
        yield client
    finally:
        try:
            await client.resume()
            await client.abort_all()
        finally:
            await client.close()


def run(served: Served, scene: Callable[[SGLangClient], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        async with connected(served, **options) as client:
            return await asyncio.wait_for(scene(client), 110)

    return asyncio.run(main())


async def some_tokens(served: Served) -> None:
    """Until a request that has just been made has surely some: one made after it has got all of its own."""
    if served.double:
        await asyncio.sleep(0.05)
        return
    other = SGLangClient(served.url)
    await other.generate(new_rid(), PROMPT, SHORT, deadline=MINUTE)
    await other.close()


async def idle(client: SGLangClient) -> None:
    """Nothing runs on the server any more: else it refuses to flush."""
    end = time.monotonic() + 30
    while True:
        try:
            await client.flush_cache()
            return
        except Refused:
            assert time.monotonic() < end, "a request still runs on the server"
            await asyncio.sleep(0.1)


# ---------------------------------------------------------------- what it is
def test_the_server_tells_its_release_and_the_sizes_that_bound_a_request(served: Served) -> None:
    info = run(served, lambda client: client.server_info())
    assert info.version >= (0, 5, 21)
    assert (info.vocab_size, info.context_length, info.tp_size, info.dp_size) == (VOCAB, CONTEXT, 1, 1)
    assert info.model_path == str(served.models[0])


def test_ready_and_alive_are_told_apart_while_it_is_paused(served: Served) -> None:
    async def scene(client: SGLangClient) -> list[bool]:
        seen = [await client.is_ready(), await client.is_alive()]
        await client.pause("retract")
        seen += [await client.is_ready(), await client.is_alive()]
        await client.resume()
        return [*seen, await client.is_ready(), await client.is_alive()]

    assert run(served, scene) == [True, True, False, True, True, True]


def test_a_server_has_no_workers(served: Served) -> None:
    assert run(served, lambda client: client.workers()) is None


# ---------------------------------------------------------------- generation
@pytest.mark.parametrize("stream", [False, True])
def test_ids_logprobs_and_versions_of_a_response_belong_together(served: Served, stream: bool) -> None:
    async def scene(client: SGLangClient) -> Any:
        return await client.generate(new_rid(), PROMPT, SHORT, deadline=MINUTE, stream=stream)

    done = run(served, scene)
    assert done.ids.dtype == np.int32 and done.logprobs.dtype == np.float32
    assert len(done.ids) == len(done.logprobs) == 8
    assert ((done.ids >= 0) & (done.ids < VOCAB)).all() and (done.logprobs < 0).all()
    assert done.versions == [(1, 3, 8)]
    assert (done.finish_reason, done.partial) == ("length", False)
    if served.double:
        assert done.ids.tolist() == served.double.expected(PROMPT, 8)


def test_a_stop_id_ends_the_response_and_is_its_last_token(served: Served) -> None:
    async def scene(client: SGLangClient) -> Any:
        greedy = Sampling(max_tokens=12, temperature=0.0)
        whole = await client.generate(new_rid(), PROMPT, greedy, deadline=MINUTE)
        ids = whole.ids.tolist()
        at = next(each for each in range(3, 12) if ids[each] not in ids[:each])
        cut = await client.generate(new_rid(), PROMPT, greedy._replace(stop_ids=(ids[at],)), deadline=MINUTE)
        return ids[: at + 1], cut

    wanted, cut = run(served, scene)
    assert cut.ids.tolist() == wanted
    assert (cut.finish_reason, cut.partial, cut.versions) == ("stop", False, [(1, 3, len(wanted))])


def test_responses_of_calls_at_the_same_time_are_not_mixed_up(served: Served) -> None:
    prompts = [[each + 1, 2 * each + 3] for each in range(16)]
    greedy = Sampling(max_tokens=6, temperature=0.0)

    async def scene(client: SGLangClient) -> Any:
        calls = [client.generate(new_rid(), prompt, greedy, deadline=MINUTE) for prompt in prompts]
        together = await asyncio.gather(*calls)
        alone = [await client.generate(new_rid(), each, greedy, deadline=MINUTE) for each in prompts[:3]]
        return [done.ids.tolist() for done in together], [done.ids.tolist() for done in alone]

    together, alone = run(served, scene)
    assert together[:3] == alone
    if served.double:
        assert together == [served.double.expected(prompt, 6) for prompt in prompts]


@pytest.mark.parametrize(
    ("ids", "sampling", "reason"),
    [
        ([5, VOCAB], SHORT, "bad_token_id"),
        ([5, -1], SHORT, "bad_token_id"),
        ([[5, 6], [7, 8]], SHORT, "bad_token_id"),
        ([5.0, 6.0], SHORT, "bad_token_id"),
        ([], SHORT, "bad_request"),
        (PROMPT, SHORT._replace(stop_ids=(VOCAB,)), "bad_token_id"),
        (PROMPT, SHORT._replace(max_tokens=0), "bad_request"),
        (PROMPT, SHORT._replace(temperature=float("nan")), "bad_request"),
        (PROMPT, SHORT._replace(max_tokens=CONTEXT - 2), "too_long"),
    ],
)
def test_what_would_harm_the_server_is_never_sent(
    served: Served, ids: Any, sampling: Sampling, reason: str
) -> None:
    async def scene(client: SGLangClient) -> bool:
        with pytest.raises(BadRequest) as caught:
            await client.generate(new_rid(), ids, sampling, deadline=MINUTE)
        assert caught.value.reason == reason
        return await client.is_ready()

    assert run(served, scene)
    assert served.double is None or not served.double.calls("/generate")


def test_a_request_that_fills_the_context_to_the_last_token_is_cut_short_and_says_length(
    served: Served,
) -> None:
    async def scene(client: SGLangClient) -> Any:
        return await client.generate(new_rid(), [7] * (CONTEXT - 12), Sampling(12), deadline=MINUTE)

    done = run(served, scene)
    assert (len(done.ids), done.finish_reason, done.partial) == (10, "length", False)


def test_a_prompt_that_leaves_no_room_is_refused(served: Served) -> None:
    async def scene(client: SGLangClient) -> None:
        with pytest.raises(Refused, match="exceeds") as caught:
            await client.generate(new_rid(), [7] * (CONTEXT - 4), Sampling(4), deadline=MINUTE)
        assert caught.value.status == 400

    run(served, scene)


@pytest.mark.parametrize("rid", ["ab-1", "", "A" * 32, "0" * 31])
def test_a_request_id_that_could_be_the_beginning_of_another_is_not_sent(served: Served, rid: str) -> None:
    async def scene(client: SGLangClient) -> None:
        with pytest.raises(BadRequest, match="32 hexadecimal digits"):
            await client.generate(rid, PROMPT, SHORT, deadline=MINUTE)

    run(served, scene)


def test_an_id_that_is_in_use_is_refused_by_the_client_and_by_the_server(served: Served) -> None:
    async def scene(client: SGLangClient) -> None:
        other, rid = SGLangClient(served.url), new_rid()
        first = asyncio.ensure_future(client.generate(rid, PROMPT, LONG, deadline=MINUTE))
        await some_tokens(served)
        with pytest.raises(BadRequest, match="in use"):
            await client.generate(rid, PROMPT, SHORT, deadline=MINUTE)
        with pytest.raises(Refused, match="Duplicate") as caught:
            await other.generate(rid, PROMPT, SHORT, deadline=MINUTE)
        assert caught.value.status == 400
        await client.abort(rid)
        await first
        await other.close()

    run(served, scene)


def test_tokens_under_a_label_that_is_not_ours_are_refused(served: Served) -> None:
    async def scene(client: SGLangClient) -> None:
        await client.update_from_disk(str(served.models[0]), "default", flush=True)
        with pytest.raises(BadAnswer, match="'default'") as caught:
            await client.generate(new_rid(), PROMPT, SHORT, deadline=MINUTE)
        assert caught.value.reason == "unknown_version"
        assert caught.value.field == "meta_info.weight_versions[0].version"

    run(served, scene)


# ---------------------------------------------------------------- ends before its end
@pytest.mark.parametrize("stream", [False, True])
def test_an_aborted_request_gives_what_it_has(served: Served, stream: bool) -> None:
    async def scene(client: SGLangClient) -> Any:
        rid = new_rid()
        call = asyncio.ensure_future(client.generate(rid, PROMPT, LONG, deadline=MINUTE, stream=stream))
        await some_tokens(served)
        await client.abort(rid)
        done = await call
        await idle(client)
        return done

    done = run(served, scene)
    assert 0 < len(done.ids) < 900 and len(done.ids) == len(done.logprobs)
    assert (done.finish_reason, done.partial) == ("aborted", True)
    assert done.versions == [(1, 3, len(done.ids))]


def test_an_abort_of_a_request_that_nobody_knows_is_harmless(served: Served) -> None:
    run(served, lambda client: client.abort(new_rid()))


def test_a_request_is_aborted_at_its_deadline_and_what_it_had_is_told(served: Served) -> None:
    async def scene(client: SGLangClient) -> Any:
        await client.server_info()
        deadline = timedelta(seconds=0.1 if served.double else 1.5)
        began = time.monotonic()
        with pytest.raises(TimedOut) as caught:
            await client.generate(new_rid(), PROMPT, LONG, deadline=deadline)
        assert time.monotonic() - began < 10
        await idle(client)
        return caught.value.partial

    partial = run(served, scene)
    assert partial is not None and 0 < len(partial.ids) < 900
    assert partial.finish_reason == "aborted" and partial.versions == [(1, 3, len(partial.ids))]


def test_a_cancelled_call_ends_at_once_and_its_request_soon(served: Served) -> None:
    async def scene(client: SGLangClient) -> None:
        call = asyncio.ensure_future(client.generate(new_rid(), PROMPT, LONG, deadline=MINUTE))
        await some_tokens(served)
        began = time.monotonic()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert time.monotonic() - began < 1
        await idle(client)

    run(served, scene)
    if served.double:
        assert [each.finish["type"] for each in served.double.finished if each.finish] == ["abort"]


# ---------------------------------------------------------------- pauses
def test_a_request_that_lives_through_an_update_tells_which_weights_made_which_token(served: Served) -> None:
    count = 120 if served.double else 900

    async def scene(client: SGLangClient) -> Any:
        call = asyncio.ensure_future(client.generate(new_rid(), PROMPT, Sampling(count), deadline=MINUTE))
        await some_tokens(served)
        await client.pause("retract")
        await client.update_from_disk(str(served.models[1]), label(1, 4), flush=True)
        await client.resume()
        return await call, await client.label()

    done, carried = run(served, scene)
    assert carried == "e1-v4"
    assert [run[:2] for run in done.versions] == [(1, 3), (1, 4)]
    assert sum(run[2] for run in done.versions) == len(done.ids) == len(done.logprobs) == count
    if served.double:
        before = done.versions[0][2]
        old, new = (served.double.expected(PROMPT, count, label(1, each)) for each in (3, 4))
        assert done.ids.tolist() == old[:before] + new[before:]


def test_abort_mode_ends_what_runs_and_nothing_is_left(served: Served) -> None:
    async def scene(client: SGLangClient) -> Any:
        calls = [
            asyncio.ensure_future(client.generate(new_rid(), PROMPT, LONG, deadline=MINUTE)) for _ in range(3)
        ]
        await some_tokens(served)
        await client.pause("abort")
        done = await asyncio.gather(*calls)
        await client.resume()
        return done

    for done in run(served, scene):
        assert done.partial and done.versions == ([(1, 3, len(done.ids))] if len(done.ids) else [])


def test_nothing_is_sent_during_a_pause_and_all_of_it_after(served: Served) -> None:
    async def scene(client: SGLangClient) -> Any:
        await client.server_info()
        await client.pause("retract")
        call = asyncio.ensure_future(client.generate(new_rid(), PROMPT, SHORT, deadline=MINUTE))
        with pytest.raises(TimedOut, match="was paused until the deadline"):
            await client.generate(new_rid(), PROMPT, SHORT, deadline=timedelta(seconds=0.2))
        assert served.double is None or not served.double.live
        await client.update_from_disk(str(served.models[1]), label(1, 4), flush=True)
        assert not call.done()
        await client.resume()
        return await call

    assert run(served, scene).versions == [(1, 4, 8)]


def test_a_call_that_waits_for_the_end_of_a_pause_can_be_aborted(served: Served) -> None:
    async def scene(client: SGLangClient) -> Any:
        await client.server_info()
        await client.pause("retract")
        rid = new_rid()
        call = asyncio.ensure_future(client.generate(rid, PROMPT, SHORT, deadline=MINUTE))
        await asyncio.sleep(0.05)
        await client.abort(rid)
        return await asyncio.wait_for(call, 5)

    done = run(served, scene)
    assert (len(done.ids), done.versions, done.finish_reason, done.partial) == (0, [], "aborted", True)


def test_what_another_client_sends_during_a_pause_is_held_and_its_abort_forgotten(served: Served) -> None:
    """Why `pause` closes a gate here. If this fails on a new release, the gate may go."""

    async def scene(client: SGLangClient) -> Any:
        other, rid = SGLangClient(served.url), new_rid()
        await other.server_info()
        await client.pause("retract")
        call = asyncio.ensure_future(other.generate(rid, PROMPT, SHORT, deadline=MINUTE))
        await asyncio.sleep(0.5)
        await other.abort(rid)
        await asyncio.sleep(0.5)
        assert not call.done()
        await client.resume()
        done = await call
        await other.close()
        return done

    done = run(served, scene)
    assert (done.finish_reason, len(done.ids)) == ("length", 8)


@pytest.mark.parametrize("stream", [False, True])
def test_a_retracted_request_that_is_aborted_tells_all_its_tokens_only_if_it_streams(
    served: Served, stream: bool
) -> None:
    async def scene(client: SGLangClient) -> Any:
        rid = new_rid()
        call = asyncio.ensure_future(client.generate(rid, PROMPT, LONG, deadline=MINUTE, stream=stream))
        await some_tokens(served)
        await client.pause("retract")
        await client.abort(rid)
        return await call

    done = run(served, scene)
    assert done.partial and (len(done.ids) > 0 if stream else len(done.ids) % 50 == 0)
    assert sum(run[2] for run in done.versions) == len(done.ids)


# ---------------------------------------------------------------- weights
def test_checksums_agree_exactly_when_the_weights_do(served: Served) -> None:
    async def scene(client: SGLangClient) -> list[str]:
        sums = [await client.checksum()]
        for version, model in enumerate((1, 0), start=4):
            await client.update_from_disk(str(served.models[model]), label(1, version), flush=True)
            sums.append(await client.checksum())
        return sums

    first, second, third = run(served, scene)
    assert first == third != second
    assert len(first) == 64


def test_a_folder_that_cannot_be_read_is_refused_and_changes_nothing(served: Served, tmp_path: Path) -> None:
    async def scene(client: SGLangClient) -> Any:
        before = await client.checksum()
        with pytest.raises(Refused) as caught:
            await client.update_from_disk(str(tmp_path / "none"), label(1, 4), flush=True)
        return caught.value.status, before == await client.checksum(), await client.label()

    assert run(served, scene) == (400, True, "e1-v3")


def test_sessions_are_opened_and_closed_once(served: Served) -> None:
    async def scene(client: SGLangClient) -> None:
        with pytest.raises(Refused, match="no weight-update session is open"):
            await client.end_update()
        await client.begin_update()
        with pytest.raises(Refused, match="already open"):
            await client.begin_update()
        await client.end_update()

    run(served, scene)


def test_an_update_outside_a_session_or_a_group_is_refused(served: Served) -> None:
    bucket: Any = (["lm_head.weight"], ["float32"], [[VOCAB, 64]], "g-none")

    async def scene(client: SGLangClient) -> Any:
        before = await client.checksum()
        with pytest.raises(Refused, match="must run between"):
            await client.update_from_distributed(*bucket, label=label(1, 4), flush=True)
        await client.begin_update()
        try:
            with pytest.raises(Refused, match="Failed to receive weights"):
                await client.update_from_distributed(*bucket, label=label(1, 4), flush=True)
        finally:
            await client.end_update()
        with pytest.raises(Refused, match="does not exist"):
            await client.destroy_group("g-none")
        return before == await client.checksum(), await client.label()

    assert run(served, scene) == (True, "e1-v3")


def test_a_flush_is_refused_while_a_request_runs(served: Served) -> None:
    async def scene(client: SGLangClient) -> None:
        rid = new_rid()
        call = asyncio.ensure_future(client.generate(rid, PROMPT, LONG, deadline=MINUTE))
        await some_tokens(served)
        with pytest.raises(Refused):
            await client.flush_cache()
        await client.abort(rid)
        await call
        await idle(client)

    run(served, scene)


def test_memory_is_released_and_taken_again(served: Served) -> None:
    async def scene(client: SGLangClient) -> Any:
        await client.release_memory(["kv_cache"])
        await client.resume_memory(["kv_cache"])
        return await client.generate(new_rid(), PROMPT, SHORT, deadline=MINUTE)

    assert len(run(served, scene).ids) == 8
