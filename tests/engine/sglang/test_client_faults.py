"""What the client does about answers and failures that a real server does not produce on demand."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from engine.interfaces import Sampling
from engine.rollout.sglang import client as client_module
from engine.rollout.sglang.client import SGLangClient, new_rid
from engine.rollout.sglang.errors import (
    BadAnswer,
    BadRequest,
    Refused,
    SGLangError,
    TimedOut,
    Unreachable,
    Unsupported,
)
from engine.rollout.sglang.server import free_port
from engine.rollout.sglang.spans import label
from streams.errors import ConfigError
from tests.support.sglang_double import Double

PROMPT = [5, 6, 7]
SECONDS_5 = timedelta(seconds=5)
SHORT, LONG = Sampling(max_tokens=8), Sampling(max_tokens=900)


@pytest.fixture
def double() -> Iterator[Double]:
    """A server that holds version (1, 3)."""
    with Double(vocab_size=512) as double:
        double.label = double.shown_label = label(1, 3)
        yield double


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_GRACE_S", 0.4)
    monkeypatch.setattr(client_module, "_AGAIN_S", 0.1)


def run(url: str, scene: Callable[[SGLangClient], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        client = SGLangClient(url, **{"vocab_size": 512, **options})
        try:
            return await asyncio.wait_for(scene(client), 60)
        finally:
            await client.close()

    return asyncio.run(main())


def generating(
    *, stream: bool = False, sampling: Sampling = SHORT
) -> Callable[[SGLangClient], Awaitable[Any]]:
    return lambda client: client.generate(new_rid(), PROMPT, sampling, deadline=SECONDS_5, stream=stream)


# ---------------------------------------------------------------- answers that must not be used
def entry(index: int, value: Any) -> Callable[[Any], None]:
    def change(answer: Any) -> None:
        answer["meta_info"]["output_token_logprobs"][index][0] = value

    return change


def meta(**values: Any) -> Callable[[Any], None]:
    return lambda answer: answer["meta_info"].update(values)


def spans(*bounds: tuple[int, int], version: str = "e1-v3") -> Callable[[Any], None]:
    return meta(weight_versions=[{"version": version, "start": start, "end": end} for start, end in bounds])


def another_id(answer: Any) -> None:
    answer["output_ids"][2] += 1


def beyond_the_vocabulary(answer: Any) -> None:
    answer["output_ids"][2] = answer["meta_info"]["output_token_logprobs"][2][1] = 512


def no_tokens(answer: Any) -> None:
    answer["output_ids"] = answer["meta_info"]["output_token_logprobs"] = []
    answer["meta_info"] |= {"completion_tokens": 0, "weight_versions": []}


ENTRIES = "meta_info.output_token_logprobs"
VERSIONS = "meta_info.weight_versions"


@pytest.mark.parametrize(
    ("change", "reason", "field", "words"),
    [
        (entry(1, None), "missing_logprob", f"{ENTRIES}[1]", "at index 1"),  # NaN, as JSON has it
        (entry(1, float("nan")), "bad_answer", "answer", ""),  # a server that writes NaN into JSON
        (entry(3, 0.7), "positive_logprob", f"{ENTRIES}[3]", "0.7 at index 3"),
        (entry(0, -1e999), "bad_answer", "answer", ""),
        (entry(0, "-0.5"), "bad_answer", f"{ENTRIES}[0][0]", "str"),
        (
            lambda answer: answer["meta_info"]["output_token_logprobs"].pop(),
            "length_mismatch",
            ENTRIES,
            "7≠8",
        ),
        (
            lambda answer: answer["output_ids"].pop(),
            "length_mismatch",
            "meta_info.completion_tokens",
            "got 8",
        ),
        (meta(output_token_logprobs=[]), "length_mismatch", ENTRIES, "0≠8"),
        (another_id, "length_mismatch", f"{ENTRIES}[2]", "but the output id"),
        (beyond_the_vocabulary, "bad_token_id", "output_ids[2]", "512"),
        (no_tokens, "length_mismatch", "output_ids", "got 0"),
        (meta(prompt_tokens=4), "length_mismatch", "meta_info.prompt_tokens", "needed 3, got 4"),
        (meta(id="other"), "bad_answer", "meta_info.id", "'other'"),
        (meta(finish_reason=None), "bad_answer", "meta_info.finish_reason", "not the last"),
        (meta(finish_reason={"type": "beam"}), "bad_answer", "meta_info.finish_reason.type", "'beam'"),
        (
            meta(finish_reason={"type": "stop", "matched": "NaN happened"}),
            "bad_answer",
            "meta_info.finish_reason.matched",
            "'NaN happened'",
        ),
        (
            meta(finish_reason={"type": "stop", "matched": 3}),
            "bad_answer",
            "meta_info.finish_reason.matched",
            "last output id",
        ),
        (spans((0, 3), (4, 8)), "length_mismatch", f"{VERSIONS}[1]", "begins at 3, got [4, 8)"),
        (spans((0, 5), (4, 8)), "length_mismatch", f"{VERSIONS}[1]", "begins at 5"),
        (spans((1, 8)), "length_mismatch", f"{VERSIONS}[0]", "begins at 0"),
        (spans((0, 3), (3, 3), (3, 8)), "length_mismatch", f"{VERSIONS}[1]", "[3, 3)"),
        (spans((0, 7)), "length_mismatch", VERSIONS, "end at 7"),
        (spans(), "length_mismatch", VERSIONS, "end at 0"),
        (spans((0, 8), version="default"), "unknown_version", f"{VERSIONS}[0].version", "'default'"),
        (spans((0, 8), version="e1-v03"), "unknown_version", f"{VERSIONS}[0].version", "'e1-v03'"),
        (spans((0, 8), version="e-1-v3"), "unknown_version", f"{VERSIONS}[0].version", "'e-1-v3'"),
        (meta(weight_versions=None), "unknown_version", VERSIONS, "does not tell"),
        (lambda answer: answer.pop("meta_info"), "bad_answer", "answer", "meta_info"),
    ],
)
def test_an_answer_that_breaks_the_contract_is_refused_with_its_place(
    double: Double, change: Callable[[Any], None], reason: str, field: str, words: str
) -> None:
    double.fail("/generate", "change", change=change)
    with pytest.raises(BadAnswer) as caught:
        run(double.url, generating())
    assert (caught.value.reason, caught.value.field) == (reason, field)
    assert words in str(caught.value)
    assert len(double.calls("/generate")) == 1  # a broken sample is not made again in secret


def test_a_logprob_a_hair_above_zero_is_rounding(double: Double) -> None:
    double.fail("/generate", "change", change=entry(1, 1e-6))
    assert run(double.url, generating()).logprobs[1] == 0


def test_neighbouring_spans_of_one_version_are_one_run(double: Double) -> None:
    double.fail("/generate", "change", change=spans((0, 3), (3, 8)))
    assert run(double.url, generating()).versions == [(1, 3, 8)]


# ---------------------------------------------------------------- calls that are not answered
def test_a_call_that_is_never_answered_ends_soon_after_its_deadline(double: Double) -> None:
    double.fail("/generate", "hang")

    async def scene(client: SGLangClient) -> float:
        await client.server_info()
        began = time.monotonic()
        with pytest.raises(TimedOut) as caught:
            await client.generate(new_rid(), PROMPT, SHORT, deadline=timedelta(seconds=0.2))
        assert caught.value.partial is None and caught.value.reason == "engine_timeout"
        return time.monotonic() - began

    assert run(double.url, scene) < 2
    sent, aborts = double.calls("/generate"), double.calls("/abort_request")
    assert len(sent) == 1 and {each["rid"] for each in aborts} == {sent[0]["rid"]}


def test_a_request_that_ends_by_itself_at_its_deadline_is_no_failure(double: Double) -> None:
    double.step_s, double.ignores_aborts = 0.02, True  # as when the end and the abort cross

    async def scene(client: SGLangClient) -> Any:
        await client.server_info()
        call = client.generate(new_rid(), PROMPT, Sampling(20), deadline=timedelta(seconds=0.2))
        return await call

    done = run(double.url, scene)
    assert (len(done.ids), done.finish_reason, done.partial) == (20, "length", False)


def test_a_server_that_answers_nothing_at_all_ends_a_call_as_well(
    double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.rollout.sglang.control._ABORT_S", 0.3)
    double.fail("/generate", "hang")
    double.fail("/abort_request", "hang", times=9)

    async def scene(client: SGLangClient) -> float:
        await client.server_info()
        began = time.monotonic()
        with pytest.raises(TimedOut):
            await client.generate(new_rid(), PROMPT, SHORT, deadline=timedelta(seconds=0.2))
        return time.monotonic() - began

    assert run(double.url, scene) < 2


def test_a_control_call_that_is_never_answered_times_out(double: Double) -> None:
    double.fail("/pause_generation", "hang")
    with pytest.raises(TimedOut, match=r"/pause_generation: no whole answer within 0\.3 s"):
        run(double.url, lambda client: client.pause("retract"), control_timeout=timedelta(seconds=0.3))


# ---------------------------------------------------------------- connections that break
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_connection_broke_is_aborted_before_it_is_made_again(
    double: Double, stream: bool
) -> None:
    double.step_s = 0.02
    double.fail("/generate", "drop")
    done = run(double.url, generating(stream=stream, sampling=Sampling(30)))
    assert done.ids.tolist() == double.expected(PROMPT, 30)
    first, second = double.calls("/generate")
    assert first["rid"] != second["rid"] and first["input_ids"] == second["input_ids"]
    assert {each["rid"] for each in double.calls("/abort_request")} == {first["rid"]}
    paths = [path for path, _ in double.requests if path in ("/generate", "/abort_request")]
    assert paths == ["/generate", "/abort_request", "/generate"]
    ends = {each.rid: each.finish["type"] for each in double.finished if each.finish}
    assert ends == {first["rid"]: "abort", second["rid"]: "length"}


def test_a_request_is_not_made_again_when_the_abort_of_the_first_was_not_heard(double: Double) -> None:
    double.fail("/generate", "drop")
    double.fail("/abort_request", "status", times=9, status=500)
    with pytest.raises(Unreachable) as caught:
        run(double.url, generating(sampling=LONG))
    assert caught.value.was_sent
    assert len(double.calls("/generate")) == 1


def test_a_request_is_made_again_once(double: Double) -> None:
    double.fail("/generate", "drop", times=9)
    with pytest.raises(Unreachable, match="the connection broke"):
        run(double.url, generating(sampling=LONG))
    assert len(double.calls("/generate")) == 2


def test_an_abort_by_the_callers_id_reaches_the_request_that_replaced_it(double: Double) -> None:
    double.step_s = 0.01
    double.fail("/generate", "drop")

    async def scene(client: SGLangClient) -> Any:
        rid = new_rid()
        call = asyncio.ensure_future(client.generate(rid, PROMPT, LONG, deadline=SECONDS_5))
        while len(double.calls("/generate")) < 2 or not any(each.ids for each in double.live.values()):
            await asyncio.sleep(0.02)
        await client.abort(rid)
        return await call

    assert run(double.url, scene).finish_reason == "aborted"
    assert not double.live


def test_a_server_that_does_not_listen_yet_is_tried_again_and_gets_one_request() -> None:
    port = free_port("127.0.0.1")
    double = Double(vocab_size=512, port=port)
    double.label = double.shown_label = label(1, 3)
    late = threading.Timer(0.4, double.start)

    async def scene(client: SGLangClient) -> Any:
        return await generating()(client)

    async def main() -> Any:
        client = SGLangClient(f"http://127.0.0.1:{port}", vocab_size=512)
        with Double(vocab_size=512) as other:  # the sizes are known already, as after a restart
            known = SGLangClient(other.url, vocab_size=512)
            client._info = await known.server_info()
            await known.close()
        late.start()
        try:
            return await asyncio.wait_for(scene(client), 30)
        finally:
            await client.close()

    try:
        done = asyncio.run(main())
    finally:
        late.join(10)
        double.stop()
    assert done.ids.tolist() == double.expected(PROMPT, 8)
    assert len(double.calls("/generate")) == 1


def test_where_nothing_listens_the_error_says_that_nothing_was_sent() -> None:
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    began = time.monotonic()
    with pytest.raises(Unreachable, match="nothing answers there") as caught:
        run(url, generating(), connect_timeout=timedelta(seconds=0.3))
    assert not caught.value.was_sent and caught.value.reason == "engine_unreachable"
    assert time.monotonic() - began < 5
    assert run(url, lambda client: client.is_alive()) is False
    assert run(url, lambda client: client.is_ready()) is False


def test_a_stream_that_ends_early_is_a_broken_connection(double: Double) -> None:
    double.fail("/generate", "change", times=100, change=meta(finish_reason=None))
    with pytest.raises(Unreachable, match="the stream ended before its request did"):
        run(double.url, generating(stream=True))
    assert len(double.calls("/generate")) == 2


# ---------------------------------------------------------------- refusals
def test_a_refusal_carries_the_servers_words_and_is_not_tried_again(double: Double) -> None:
    double.fail("/generate", "status", status=503, text="the queue is full")
    with pytest.raises(Refused, match="the queue is full") as caught:
        run(double.url, generating())
    assert (caught.value.status, caught.value.reason) == (503, "engine_refused")
    assert len(double.calls("/generate")) == 1


def test_an_update_that_says_200_without_success_is_refused(double: Double) -> None:
    def unsuccessful(answer: Any) -> None:
        answer["success"] = False

    double.fail("/begin_weight_update", "change", change=unsuccessful)
    with pytest.raises(Refused):
        run(double.url, lambda client: client.begin_update())


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("0.5.10.post1", "does not tell which weights"),
        ("0.5.18", "does not tell which weights"),
        ("0.5.19", "without a session"),
        ("0.5.20", "without a session"),
        ("0.4.99", "does not tell which weights"),
    ],
)
def test_a_release_that_is_too_old_is_refused_with_a_reason(version: str, words: str) -> None:
    with Double(version=version) as double, pytest.raises(Unsupported, match=words) as caught:
        run(double.url, generating())
    assert "Needed 0.5.21 or newer" in str(caught.value)
    assert not double.calls("/generate")


@pytest.mark.parametrize("version", ["0.5.21", "0.5.23.post1", "0.6.0rc1", "1.0.0"])
def test_newer_releases_are_taken(version: str) -> None:
    with Double(version=version) as double:
        info = run(double.url, lambda client: client.server_info())
    assert ".".join(map(str, info.version)) == version.partition("rc")[0].partition(".post")[0]


@pytest.mark.parametrize("version", [None, "dev", 5])
def test_an_answer_that_names_no_release_is_refused(double: Double, version: Any) -> None:
    double.fail("/server_info", "change", change=lambda answer: answer.update(version=version))
    with pytest.raises(BadAnswer, match=r"server_info\.version"):
        run(double.url, lambda client: client.server_info())


def test_without_a_known_vocabulary_nothing_is_sent(double: Double) -> None:
    with pytest.raises(Unsupported, match="the vocabulary"):
        run(double.url, generating(), vocab_size=None)
    assert not double.calls("/generate")


@pytest.mark.parametrize("url", ["127.0.0.1:1", "ftp://host", "http://", "http://me:secret@host:1"])
def test_an_address_of_another_form_is_a_configuration_error(url: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.sglang\.url") as caught:
        SGLangClient(url)
    assert "secret" not in str(caught.value)


# ---------------------------------------------------------------- what is sent
def test_a_request_says_everything_that_shapes_the_distribution_and_no_stop_text(double: Double) -> None:
    sampling = Sampling(max_tokens=8, temperature=0.7, stop_ids=(3, 4))
    run(double.url, generating(sampling=sampling))
    (body,) = double.calls("/generate")
    params = body.pop("sampling_params")
    assert len(body.pop("rid")) == 32
    assert body == {"input_ids": PROMPT, "return_logprob": True, "logprob_start_len": -1, "stream": False}
    neutral = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "n": 1}
    assert params.items() >= {**neutral, "frequency_penalty": 0.0, "presence_penalty": 0.0}.items()
    assert (params["temperature"], params["max_new_tokens"]) == (0.7, 8)
    assert (params["stop_token_ids"], params["ignore_eos"]) == ([3, 4], False)
    assert "stop" not in params


def test_without_stop_ids_only_the_length_ends_a_request(double: Double) -> None:
    run(double.url, generating())
    assert double.calls("/generate")[0]["sampling_params"]["ignore_eos"] is True


def test_control_calls_carry_the_admin_key_and_the_others_the_plain_one() -> None:
    with Double(api_key="plain", admin_key="admin") as double:
        double.label = double.shown_label = label(1, 3)

        async def scene(client: SGLangClient) -> None:
            await client.generate(new_rid(), PROMPT, SHORT, deadline=SECONDS_5)
            await client.pause("retract")
            await client.resume()

        run(double.url, scene, api_key="plain", admin_key="admin")
        with pytest.raises(Refused) as caught:
            run(double.url, scene, api_key="plain")
        assert caught.value.status == 401
        with pytest.raises(Refused):
            run(double.url, scene)


# ---------------------------------------------------------------- routers
def test_a_router_generates_and_is_refused_for_control(double: Double) -> None:
    with Double(vocab_size=512, workers=[double.url]) as router:
        router.label = router.shown_label = label(1, 3)

        async def scene(client: SGLangClient) -> Any:
            done = await client.generate(new_rid(), PROMPT, SHORT, deadline=SECONDS_5)
            assert await client.workers() == [double.url]
            for call in (
                client.pause("retract"),
                client.resume(),
                client.begin_update(),
                client.flush_cache(),
                client.abort_all(),
                client.checksum(),
                client.update_from_disk("/x", label(1, 4), flush=True),
            ):
                with pytest.raises(Unsupported, match="is a router"):
                    await call
            await client.abort(new_rid())
            return done

        assert run(router.url, scene).ids.tolist() == router.expected(PROMPT, 8)
    assert double.calls("/abort_request")  # which cannot hurt a worker that does not know the id
    control = {path for path, _ in router.requests} - {"/generate", "/workers", "/server_info"}
    assert not control


# ---------------------------------------------------------------- streams
def test_a_stream_of_new_tokens_alone_is_put_together() -> None:
    with Double(vocab_size=512, is_incremental=True, step_s=0.005) as double:
        double.label = double.shown_label = label(1, 3)
        done = run(double.url, generating(stream=True, sampling=Sampling(40)))
        assert done.ids.tolist() == double.expected(PROMPT, 40)
        assert done.versions == [(1, 3, 40)]


def test_a_stream_that_an_abort_cuts_to_its_last_token_keeps_the_others() -> None:
    with Double(vocab_size=512, is_incremental=True, step_s=0.005) as double:
        double.label = double.shown_label = label(1, 3)

        async def scene(client: SGLangClient) -> Any:
            rid = new_rid()
            call = asyncio.ensure_future(client.generate(rid, PROMPT, LONG, deadline=SECONDS_5, stream=True))
            while not any(len(each.ids) > 5 for each in double.live.values()):
                await asyncio.sleep(0.01)
            await client.pause("retract")
            await asyncio.sleep(0.05)
            await client.abort(rid)
            return await call

        done = run(double.url, scene)
        assert len(done.ids) > 5
        assert done.ids.tolist() == double.expected(PROMPT, len(done.ids))


def test_an_error_in_the_middle_of_a_stream_is_a_refusal(double: Double) -> None:
    def to_error(part: Any) -> None:
        part.clear()
        part["error"] = {"message": "out of memory", "code": 503, "type": "server_error"}

    double.fail("/generate", "change", change=to_error)
    with pytest.raises(Refused, match="out of memory") as caught:
        run(double.url, generating(stream=True))
    assert caught.value.status == 503


# ---------------------------------------------------------------- weights
def test_a_bucket_that_fails_half_way_is_refused_and_the_checksum_is_of_neither_version(
    double: Double,
) -> None:
    double.groups["g1"] = None
    names = list(double.shapes)
    shapes = [double.shapes[name][1] for name in names]

    async def scene(client: SGLangClient) -> list[str]:
        sums = [await client.checksum()]
        await client.begin_update()
        double.fail("/update_weights_from_distributed", "partial")
        bucket: Any = (names, ["float32"] * 3, shapes, "g1")
        with pytest.raises(Refused):
            await client.update_from_distributed(*bucket, label=label(1, 4), flush=True)
        sums.append(await client.checksum())
        await client.update_from_distributed(*bucket, label=label(1, 4), flush=True)
        await client.end_update()
        return [*sums, await client.checksum()]

    assert len(set(run(double.url, scene))) == 3
    (first, _) = double.calls("/update_weights_from_distributed")
    assert (first["load_format"], first["weight_version"]) == ("flattened_bucket", "e1-v4")


def test_a_name_that_the_model_lacks_is_a_success_that_only_the_checksum_denies(double: Double) -> None:
    double.groups["g1"] = None

    async def scene(client: SGLangClient) -> Any:
        before = await client.checksum()
        await client.begin_update()
        await client.update_from_distributed(
            ["model.typo"], ["float32"], [[3]], "g1", label=label(1, 4), flush=True
        )
        await client.end_update()
        return before == await client.checksum(), await client.label()

    assert run(double.url, scene) == (True, "e1-v4")


def test_buckets_before_the_last_carry_no_label(double: Double) -> None:
    double.groups["g1"] = None

    async def scene(client: SGLangClient) -> str:
        await client.begin_update()
        await client.update_from_distributed(
            ["head.weight"], ["float32"], [[2]], "g1", label=None, flush=False
        )
        await client.end_update()
        return await client.label()

    assert run(double.url, scene) == "e1-v3"
    (body,) = double.calls("/update_weights_from_distributed")
    assert "weight_version" not in body and body["flush_cache"] is False


def test_joining_a_group_that_nobody_masters_times_out_here_and_blocks_the_server(double: Double) -> None:
    async def scene(client: SGLangClient) -> None:
        port, double.group_timeout_s = free_port("127.0.0.1"), 0.5
        with pytest.raises(TimedOut):
            await client.init_group("127.0.0.1", port, 1, 2, "g1", "gloo", deadline=timedelta(seconds=0.3))
        with pytest.raises(TimedOut):
            await client.checksum(deadline=timedelta(seconds=0.3))
        assert await client.is_alive()
        master = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", port)
        await client.checksum()
        master.close()

    run(double.url, scene)


def test_a_refused_flush_leaves_an_old_label_on_new_weights(double: Double) -> None:
    """Why "in_place" is never flushed: the answer says no, the weights are new."""
    double.step_s = 0.005

    async def scene(client: SGLangClient) -> Any:
        call = asyncio.ensure_future(client.generate(new_rid(), PROMPT, Sampling(60), deadline=SECONDS_5))
        while not any(len(each.ids) > 3 for each in double.live.values()):
            await asyncio.sleep(0.01)
        await client.pause("in_place")
        await client.begin_update()
        double.groups["g1"] = None
        with pytest.raises(Refused, match="the cache was not flushed"):
            await client.update_from_distributed(
                ["head.weight"], ["float32"], [[2]], "g1", label=label(1, 4), flush=True
            )
        await client.end_update()
        await client.resume()
        return await client.label(), (await call).versions

    carried, versions = run(double.url, scene)
    assert carried == "e1-v3" and [run[:2] for run in versions] == [(1, 3), (1, 4)]


# ---------------------------------------------------------------- ends
def test_closing_aborts_what_runs_and_says_so(double: Double) -> None:
    async def scene(client: SGLangClient) -> None:
        calls = [
            asyncio.ensure_future(client.generate(new_rid(), PROMPT, LONG, deadline=SECONDS_5))
            for _ in range(3)
        ]
        while len(double.live) < 3:
            await asyncio.sleep(0.01)
        await client.close()
        for done in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(done, SGLangError) and done.reason == "engine_closed"
        with pytest.raises(SGLangError, match="was closed"):
            await client.generate(new_rid(), PROMPT, SHORT, deadline=SECONDS_5)

    run(double.url, scene)
    assert not double.live


def test_closing_frees_a_call_that_waits_for_the_end_of_a_pause(double: Double) -> None:
    async def scene(client: SGLangClient) -> None:
        await client.server_info()
        await client.pause("retract")
        call = asyncio.ensure_future(client.generate(new_rid(), PROMPT, SHORT, deadline=SECONDS_5))
        await asyncio.sleep(0.05)
        await client.close()
        with pytest.raises(SGLangError, match="was closed"):
            await call

    run(double.url, scene)
    assert not double.calls("/generate")


def test_an_id_that_would_crash_the_server_does_crash_the_double(double: Double) -> None:
    """Else the tests above would prove nothing."""

    async def scene(client: SGLangClient) -> None:
        with pytest.raises(BadRequest):
            await client.generate(new_rid(), [512], SHORT, deadline=SECONDS_5)
        assert not double.has_crashed
        wider = SGLangClient(double.url, vocab_size=1024, connect_timeout=timedelta(seconds=0.2))
        with pytest.raises(Unreachable):
            await wider.generate(new_rid(), [512], SHORT, deadline=SECONDS_5)
        await wider.close()

    run(double.url, scene)
    assert double.has_crashed
