"""The double against SGLang's own types, and against a real server: without this its answers would prove nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import msgspec
import pytest

from engine.interfaces import Sampling
from engine.rollout.sglang.api import GenerateRequest, generate_request
from engine.rollout.sglang.client import SGLangClient, new_rid
from engine.rollout.sglang.spans import label
from tests.support.sglang import RealServer, api_types, make_model, require_sglang
from tests.support.sglang_double import SAMPLING_KEYS, Double

PROMPT = [5, 6, 7]


@pytest.fixture
def double() -> Iterator[Double]:
    with Double(vocab_size=512) as double:
        double.label = double.shown_label = label(1, 3)
        yield double


@pytest.fixture(scope="module")
def types() -> ModuleType:
    require_sglang()
    found = api_types()
    assert found is not None, "the environment's SGLang has no sglang/api/v1/api_types.py"
    return found


def a_request(*, stream: bool = False, sampling: Sampling | None = None) -> GenerateRequest:
    sampling = sampling or Sampling(max_tokens=6, temperature=0.7, stop_ids=(3,))
    return generate_request(new_rid(), PROMPT, sampling, vocab_size=512, max_length=None, stream=stream)


async def post(url: str, body: Any, *, timeout_s: float = 30) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session,
        session.post(url, json=body) as response,
    ):
        return response.status, await response.text()


def ask(url: str, body: Any) -> tuple[int, Any]:
    status, text = asyncio.run(post(url, body))
    return status, json.loads(text) if text.startswith(("{", "[")) else text


def parts(text: str) -> list[Any]:
    events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    assert events[-1] == "[DONE]"
    return [json.loads(each) for each in events[:-1]]


# ---------------------------------------------------------------- SGLang's own types
def test_what_we_send_is_what_sglang_decodes(types: ModuleType) -> None:
    sent = a_request(stream=True)
    decoded = types.GenerateRequest.from_json_value(msgspec.to_builtins(sent))
    for name in GenerateRequest.__struct_fields__:
        if name != "sampling_params":
            assert getattr(decoded, name) == getattr(sent, name), name
    for name in type(sent.sampling_params).__struct_fields__:
        assert getattr(decoded.sampling_params, name) == getattr(sent.sampling_params, name), name


def test_what_the_double_knows_of_sampling_is_what_sglang_knows(types: ModuleType) -> None:
    assert set(types.SamplingParams.__struct_fields__) >= SAMPLING_KEYS


@pytest.mark.parametrize("ending", ["length", "stop", "abort"])
def test_what_the_double_answers_is_what_sglang_decodes(
    types: ModuleType, double: Double, ending: str
) -> None:
    stop = double.expected(PROMPT, 4)[-1] if ending == "stop" else 3
    most = 6 if ending == "length" else 900
    sent = a_request(sampling=Sampling(max_tokens=most, stop_ids=(stop,)))

    async def scene() -> str:
        call = asyncio.ensure_future(post(f"{double.url}/generate", msgspec.to_builtins(sent)))
        if ending == "abort":
            while not any(each.ids for each in double.live.values()):
                await asyncio.sleep(0.01)
            await post(f"{double.url}/abort_request", {"rid": sent.rid})
        return (await call)[1]

    came = types.GenerateResponse.from_json_value(json.loads(asyncio.run(scene())))
    meta = came.meta_info
    assert meta.id == sent.rid and meta.completion_tokens == len(came.output_ids)
    assert [each.token_id for each in meta.output_token_logprobs] == list(came.output_ids)
    assert meta.weight_versions[-1].end == len(came.output_ids)
    assert type(meta.finish_reason).__name__ == f"Finish{ending.capitalize()}"


def test_each_part_of_the_doubles_streams_is_what_sglang_decodes(types: ModuleType, double: Double) -> None:
    status, text = asyncio.run(post(f"{double.url}/generate", msgspec.to_builtins(a_request(stream=True))))
    assert status == 200
    for part in parts(text):
        types.GenerateResponse.from_json_value(part)


# ---------------------------------------------------------------- a real server
def test_the_double_invents_no_key_that_the_server_lacks(sglang: RealServer, tmp_path: Path) -> None:
    paths = ("server_info", "model_info")
    with Double(make_model(tmp_path / "model", 0)) as double:
        urls = (double.url, sglang.url)

        async def get(url: str) -> Any:
            async with aiohttp.ClientSession() as session, session.get(url) as response:
                return await response.json()

        for path in paths:
            ours, theirs = (asyncio.run(get(f"{url}/{path}")) for url in urls)
            assert not set(ours) - set(theirs), path
        body = msgspec.to_builtins(a_request())
        ours, theirs = (ask(f"{url}/generate", body)[1] for url in urls)
        assert not set(ours) - set(theirs)
        assert not set(ours["meta_info"]) - set(theirs["meta_info"])
        ours, theirs = (ask(f"{url}/weights_checker", {"action": "checksum"})[1] for url in urls)
        assert not set(ours) - set(theirs)


REFUSED = [
    ("generate", {"rid": "a" * 32, "input_ids": []}),
    ("generate", {"rid": "a" * 32, "input_ids": [1], "sampling_params": {"max_newtokens": 3}}),
    ("generate", {"rid": "a" * 32, "input_ids": [1], "sampling_params": {"max_new_tokens": 5000}}),
    ("pause_generation", {"mode": "quickly"}),
    ("end_weight_update", {}),
    ("destroy_weights_update_group", {"group_name": "none"}),
    ("update_weights_from_distributed", {"names": [], "dtypes": [], "shapes": []}),
    ("update_weights_from_disk", {"model_path": "/none", "weight_version": "e0-v1"}),
]
TAKEN = [
    (
        "generate",
        {
            "rid": "a" * 32,
            "input_ids": [1],
            "return_logprobs": True,
            "sampling_params": {"max_new_tokens": 1},
        },
    ),
    ("generate", {"rid": "a" * 32, "input_ids": [1], "sampling_params": {"max_new_tokens": 1, "n": 2}}),
    ("abort_request", {"rid": "nobody"}),
    ("abort_request", {"rid": ""}),
    ("continue_generation", {}),
    ("flush_cache", {}),
    ("release_memory_occupation", {"tags": ["kv_cache"]}),
    ("resume_memory_occupation", {"tags": ["kv_cache"]}),
]


@pytest.mark.parametrize(("path", "body"), REFUSED + TAKEN)
def test_the_double_refuses_what_the_server_refuses_and_takes_what_it_takes(
    sglang: RealServer, double: Double, path: str, body: Any
) -> None:
    wanted = 400 if (path, body) in REFUSED else 200
    theirs, ours = ask(f"{sglang.url}/{path}", body), ask(f"{double.url}/{path}", body)
    assert (theirs[0], ours[0]) == (wanted, wanted), (theirs, ours)
    assert type(theirs[1]) is type(ours[1])
    if path == "generate" and wanted == 200 and body["sampling_params"].get("n") == 2:
        ids = [each["meta_info"]["id"] for answers in (theirs[1], ours[1]) for each in answers]
        assert len(set(ids)) == 4 and "a" * 32 not in ids  # one's own id is passed over


def test_an_abort_ends_every_request_that_begins_like_it(sglang: RealServer, double: Double) -> None:
    double.step_s = 0.005

    async def scene(url: str) -> list[str]:
        sampling = {"max_new_tokens": 900, "ignore_eos": True}
        calls = [
            asyncio.ensure_future(
                post(
                    f"{url}/generate",
                    {"rid": rid, "input_ids": [1, 2], "sampling_params": sampling},
                    timeout_s=90,
                )
            )
            for rid in ("ab-1", "ab-12")
        ]
        await asyncio.sleep(1.0)
        await post(f"{url}/abort_request", {"rid": "ab-1"})
        return [json.loads((await call)[1])["meta_info"]["finish_reason"]["type"] for call in calls]

    for url in (sglang.url, double.url):
        assert asyncio.run(scene(url)) == ["abort", "abort"]


# ---------------------------------------------------------------- what a real server would not survive, or not soon
def test_who_hangs_up_leaves_the_request_running_for_a_while(double: Double) -> None:
    double.disconnect_s, double.step_s = 0.5, 0.01

    async def scene() -> None:
        body = msgspec.to_builtins(a_request(sampling=Sampling(max_tokens=900)))
        with pytest.raises(asyncio.TimeoutError):
            await post(f"{double.url}/generate", body, timeout_s=0.2)
        assert double.live
        for _ in range(100):
            await asyncio.sleep(0.05)
            if not double.live:
                return

    asyncio.run(scene())
    assert [each.finish["type"] for each in double.finished if each.finish] == ["abort"]


def test_an_update_without_a_pause_waits_for_what_runs(double: Double, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", 0)

    async def scene() -> Any:
        client = SGLangClient(double.url, vocab_size=512)
        call = asyncio.ensure_future(
            client.generate(new_rid(), PROMPT, Sampling(50), deadline=timedelta(seconds=30))
        )
        while not double.live:
            await asyncio.sleep(0.01)
        await client.update_from_disk(str(model), label(1, 4), flush=True)
        is_done = call.done() or not double.live
        done = await call
        await client.close()
        return is_done, done.versions

    assert asyncio.run(scene()) == (True, [(1, 3, 50)])
