"""The batched engine on tiny models: exact log-probs, true versions, whole weights."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from engine.interfaces import Completion, EngineError, Sampling  # noqa: E402
from engine.rollout import generate  # noqa: E402
from engine.rollout.batched import BatchedEngine  # noqa: E402
from engine.rollout.torch_model import sample, uniforms  # noqa: E402
from engine.tasks import GUESS, tiny  # noqa: E402
from engine.weights.store import WeightStore  # noqa: E402
from streams.errors import ConfigError  # noqa: E402
from streams.events import TrajectoryFinished, WeightsPublished  # noqa: E402
from streams.trajectory import open_payload  # noqa: E402
from tests.engine.rollout_support import OnThread, Run, eventually, make_worker  # noqa: E402

VOCABULARY = 48
TOLERANCE = 5e-6
DEADLINE_S = 60.0


def gpt2(seed: int) -> Any:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=96,
            n_embd=32,
            n_layer=2,
            n_head=4,
            initializer_range=0.3,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    ).eval()


def qwen3(seed: int) -> Any:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=96,
            initializer_range=0.3,
            tie_word_embeddings=True,
        )
    ).eval()


MODELS: dict[str, Callable[[int], Any]] = {"gpt2": gpt2, "qwen3": qwen3}


class Folder:
    """A model folder and the weights that a trainer published for it."""

    def __init__(self, folder: Path, build: Callable[[int], Any]) -> None:
        self.path, self.build = folder / "model", build
        build(0).save_pretrained(self.path)
        tiny.build_tokenizer(GUESS).save_pretrained(self.path)
        self.store = WeightStore(folder / "weights", keep=100)

    def publish(self, version: int, model: Any = None) -> tuple[WeightsPublished, Path]:
        model = model or self.build(version)
        tensors = dict(model.named_parameters())
        event = self.store.publish(tensors, epoch=3, version=version, step=version)
        return event, self.store.path(3, version)


@pytest.fixture(params=sorted(MODELS))
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Folder:
    return Folder(tmp_path, MODELS[request.param])


def play(engine: BatchedEngine, scene: Callable[[], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        try:
            return await asyncio.wait_for(scene(), DEADLINE_S)
        finally:
            await engine.close()

    return asyncio.run(main())


def cacheless(model: Any, prompt: list[int], ids: list[int], temperature: float = 1.0) -> np.ndarray:
    """Log-probs of ids after prompt by one plain forward of that sequence alone."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids]), use_cache=False).logits[0].float() / temperature
    rows = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return rows.gather(1, torch.tensor(ids)[:, None])[:, 0].numpy()


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, rng.integers(1, 20)).tolist() for _ in range(count)]


def assert_exact(model: Any, prompt: list[int], done: Completion, temperature: float = 1.0) -> None:
    wanted = cacheless(model, prompt, done.ids.tolist(), temperature)
    assert np.abs(done.logprobs - wanted).max() < TOLERANCE
    assert sum(run[2] for run in done.versions) == len(done.ids) == len(done.logprobs)


@pytest.mark.parametrize("max_tokens", [1, 24])
def test_logprobs_equal_a_forward_without_cache(folder: Folder, max_tokens: int) -> None:
    engine = BatchedEngine(folder.path, threads=1)

    async def scene() -> list[Completion]:
        await engine.update(*folder.publish(1))
        return await asyncio.gather(
            *(
                engine.generate(ids, Sampling(max_tokens), request_id=f"r{i}")
                for i, ids in enumerate(prompts(40))
            )
        )

    model = folder.build(1)
    done = play(engine, scene)
    for ids, each in zip(prompts(40), done, strict=True):
        assert_exact(model, ids, each)
        assert (len(each.ids), each.finish_reason, each.versions) == (
            max_tokens,
            "length",
            [(3, 1, max_tokens)],
        )
    assert engine.stats()["tokens"] == 40 * max_tokens


def test_each_request_has_its_own_temperature_length_and_stop_ids(folder: Folder) -> None:
    engine = BatchedEngine(folder.path, threads=1)
    wishes = [Sampling(5 + i, [0.7, 1.0, 1.6][i % 3], tuple(range(i % 5))) for i in range(30)]

    async def scene() -> list[Completion]:
        await engine.update(*folder.publish(1))
        return await asyncio.gather(
            *(
                engine.generate(ids, wish, request_id=f"r{i}")
                for i, (ids, wish) in enumerate(zip(prompts(30), wishes, strict=True))
            )
        )

    model = folder.build(1)
    stopped = 0
    for ids, wish, each in zip(prompts(30), wishes, play(engine, scene), strict=True):
        assert_exact(model, ids, each, wish.temperature)
        said = each.ids.tolist()
        assert not set(said[:-1]) & set(wish.stop_ids)
        if each.finish_reason == "stop":
            assert said[-1] in wish.stop_ids
            stopped += 1
        else:
            assert len(said) == wish.max_tokens and said[-1] not in wish.stop_ids
    assert stopped > 3


def test_requests_join_while_others_run_and_what_they_say_does_not_depend_on_it(folder: Folder) -> None:
    engine = BatchedEngine(folder.path, threads=1, seed=7)
    asked = prompts(24, seed=5)

    async def scene() -> tuple[list[Completion], list[Completion]]:
        await engine.update(*folder.publish(1))

        async def late(i: int) -> Completion:
            for _ in range(i % 7):
                before = engine.stats()["rounds"]
                while engine.stats()["running"] and engine.stats()["rounds"] < before + 2:
                    await asyncio.sleep(0)
            return await engine.generate(asked[i], Sampling(4 + i), request_id=f"r{i}")

        together = await asyncio.gather(*(late(i) for i in range(24)))
        alone = [await engine.generate(asked[i], Sampling(4 + i), request_id=f"r{i}") for i in range(24)]
        return together, alone

    together, alone = play(engine, scene)
    model = folder.build(1)
    for i in range(24):
        assert_exact(model, asked[i], together[i])
        assert together[i].ids.tolist() == alone[i].ids.tolist()


def test_retract_goes_on_under_the_new_weights_with_a_recomputed_cache(folder: Folder) -> None:
    engine = BatchedEngine(folder.path, threads=1, pause_mode="retract")
    asked = prompts(8, seed=2)
    done = play(engine, lambda: spanning(engine, folder, asked))
    old, new = folder.build(1), folder.build(2)
    for ids, each in zip(asked, done, strict=True):
        assert [run[:2] for run in each.versions] == [(3, 1), (3, 2)]
        split = each.versions[0][2]
        assert split + each.versions[1][2] == 64
        said = each.ids.tolist()
        assert np.abs(each.logprobs[:split] - cacheless(old, ids, said)[:split]).max() < TOLERANCE
        assert np.abs(each.logprobs[split:] - cacheless(new, ids, said)[split:]).max() < TOLERANCE


async def spanning(engine: BatchedEngine, folder: Folder, asked: list[list[int]]) -> list[Completion]:
    """Requests that are running when version 2 comes."""
    await engine.update(*folder.publish(1))
    version2 = folder.publish(2)
    running = [
        asyncio.ensure_future(engine.generate(ids, Sampling(64), request_id=f"r{i}"))
        for i, ids in enumerate(asked)
    ]
    while engine.stats()["tokens"] < 4 * len(asked):
        await asyncio.sleep(0)
    stall_s = await engine.update(*version2)
    assert 0 < stall_s < 10
    return await asyncio.gather(*running)


def test_in_place_keeps_the_cache_and_stamps_both_versions(folder: Folder) -> None:
    engine = BatchedEngine(folder.path, threads=1, pause_mode="in_place")
    asked = prompts(4, seed=2)
    done = play(engine, lambda: spanning(engine, folder, asked))
    old, new = folder.build(1), folder.build(2)
    for ids, each in zip(asked, done, strict=True):
        assert [run[:2] for run in each.versions] == [(3, 1), (3, 2)]
        split = each.versions[0][2]
        said = each.ids.tolist()
        assert np.abs(each.logprobs[:split] - cacheless(old, ids, said)[:split]).max() < TOLERANCE
        # the prefix was computed under version 1, so a forward of version 2 alone says something else
        assert np.abs(each.logprobs[split:] - cacheless(new, ids, said)[split:]).max() > 1e-3


def test_abort_mode_ends_what_runs_with_its_tokens_so_far(folder: Folder) -> None:
    engine = BatchedEngine(folder.path, threads=1, pause_mode="abort")
    asked = prompts(4, seed=2)
    done = play(engine, lambda: spanning(engine, folder, asked))
    model = folder.build(1)
    for ids, each in zip(asked, done, strict=True):
        assert each.finish_reason == "aborted" and 0 < len(each.ids) < 64
        assert [run[:2] for run in each.versions] == [(3, 1)]
        assert_exact(model, ids, each)


def test_wrong_weights_are_refused_and_the_old_ones_stay_whole(folder: Folder) -> None:
    engine = BatchedEngine(folder.path, threads=1)

    async def scene() -> Completion:
        good = folder.publish(1)
        await engine.update(*good)
        event, path = folder.publish(2)
        with pytest.raises(EngineError, match=r"weights_mismatch: .* was published as 0000"):
            await engine.update(msgspec.structs.replace(event, digest="0" * 64), path)
        with pytest.raises(EngineError, match="weights_unreadable"):
            await engine.update(event, path.with_name("absent.safetensors"))
        torn = path.with_name("torn.safetensors")
        torn.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(EngineError, match="weights_unreadable"):
            await engine.update(event, torn)
        partial = dict(folder.build(2).named_parameters())
        removed = sorted(partial)[-1]
        del partial[removed]
        event = folder.store.publish(partial, epoch=3, version=4, step=4)
        with pytest.raises(EngineError, match="the model also needs"):
            await engine.update(event, folder.store.path(3, 4))
        assert engine.held is not None and engine.held.version == 1 and engine.held.digest == good[0].digest
        return await engine.generate([1, 2, 3], Sampling(8), request_id="r")

    assert_exact(folder.build(1), [1, 2, 3], play(engine, scene))


def test_weights_that_name_both_ends_of_a_tie_are_taken(folder: Folder) -> None:
    engine = BatchedEngine(folder.path, threads=1)

    async def scene() -> Completion:
        event = folder.store.publish(folder.build(1).state_dict(), epoch=3, version=1, step=1)
        await engine.update(event, folder.store.path(3, 1))
        return await engine.generate([1, 2, 3], Sampling(8), request_id="r")

    assert_exact(folder.build(1), [1, 2, 3], play(engine, scene))


def test_requests_that_cannot_be_served_say_why_and_harm_no_other(tmp_path: Path) -> None:
    folder = Folder(tmp_path, gpt2)
    engine = BatchedEngine(folder.path, threads=1)

    async def scene() -> None:
        with pytest.raises(EngineError, match="no_weights"):
            await engine.generate([1], Sampling(1), request_id="early")
        await engine.update(*folder.publish(1))
        good = asyncio.ensure_future(engine.generate([1], Sampling(30), request_id="good"))
        for ids, reason in (
            ([], "bad_request"),
            ([VOCABULARY], "bad_request"),
            ([1] * 96, "prompt_too_long"),
        ):
            with pytest.raises(EngineError, match=reason):
                await engine.generate(ids, Sampling(4), request_id=reason)
        assert len((await good).ids) == 30
        clipped = await engine.generate([1] * 90, Sampling(30), request_id="clipped")
        assert (len(clipped.ids), clipped.finish_reason) == (6, "length")

    play(engine, scene)


def test_an_abort_and_a_cancelled_caller_free_their_rows(tmp_path: Path) -> None:
    folder = Folder(tmp_path, gpt2)
    engine = BatchedEngine(folder.path, threads=1)

    async def scene() -> None:
        await engine.update(*folder.publish(1))
        first, second, third = (
            asyncio.ensure_future(engine.generate([1, i], Sampling(90), request_id=f"r{i}")) for i in range(3)
        )
        while engine.stats()["running"] < 3:
            await asyncio.sleep(0)
        await engine.abort("r0")
        second.cancel()
        aborted = await first
        assert aborted.finish_reason == "aborted"
        with pytest.raises(asyncio.CancelledError):
            await second
        assert len((await third).ids) == 90
        assert engine.stats()["running"] == 0

    play(engine, scene)


def test_closing_fails_what_waits_and_what_comes_later(tmp_path: Path) -> None:
    folder = Folder(tmp_path, gpt2)
    engine = BatchedEngine(folder.path, threads=1)

    async def scene() -> None:
        await engine.update(*folder.publish(1))
        running = asyncio.ensure_future(engine.generate([1], Sampling(90), request_id="r"))
        while not engine.stats()["running"]:
            await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineError, match="engine_closed"):
            await running
        with pytest.raises(EngineError, match="engine_closed"):
            await engine.generate([1], Sampling(1), request_id="late")

    play(engine, scene)


def test_an_error_of_the_model_fails_every_request_and_is_said(tmp_path: Path) -> None:
    folder = Folder(tmp_path, gpt2)
    engine = BatchedEngine(folder.path, threads=1)

    async def scene() -> None:
        await engine.update(*folder.publish(1))

        def broken(*_: Any, **__: Any) -> Any:
            raise RuntimeError("out of memory")

        engine._model.forward = broken
        done = await asyncio.gather(
            *(engine.generate([1], Sampling(4), request_id=f"r{i}") for i in range(4)), return_exceptions=True
        )
        assert {str(each) for each in done} == {"engine_died: RuntimeError: out of memory"}

    play(engine, scene)


def test_a_model_with_sliding_windows_is_refused_by_name(tmp_path: Path) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    MistralForCausalLM(
        MistralConfig(
            vocab_size=24,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            sliding_window=8,
            max_position_embeddings=64,
        )
    ).save_pretrained(tmp_path)
    tiny.build_tokenizer(GUESS).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r'set rollout.decode = "continuous"'):
        BatchedEngine(tmp_path)


def test_sampling_follows_the_distribution_and_never_takes_an_impossible_token() -> None:
    logits = torch.tensor([[0.0, -1.0, float("-inf"), 1.0]]).expand(200_000, 4)
    ones = np.ones(200_000, np.float32)
    keys = np.arange(200_000, dtype=np.uint64)
    drawn = sample(logits, ones, uniforms(keys, np.zeros(200_000, np.int64)))
    shares = np.bincount(drawn.ids, minlength=4) / 200_000
    wanted = torch.softmax(logits[0], -1).numpy()
    assert shares[2] == 0
    assert np.abs(shares - wanted).max() < 4 * 0.5 / np.sqrt(200_000)
    greedy = sample(logits[:3], np.array([0.0, 1.0, 0.0], np.float32), np.full(3, 0.01, np.float32))
    assert greedy.ids.tolist() == [3, 0, 3]
    assert greedy.logprobs[0] == 0.0


def test_uniforms_depend_on_key_and_count_alone_and_fill_the_unit_interval() -> None:
    keys = np.arange(50_000, dtype=np.uint64)
    first = uniforms(keys, np.zeros(50_000, np.int64))
    assert (uniforms(keys[::-1].copy(), np.zeros(50_000, np.int64))[::-1] == first).all()
    second = uniforms(keys, np.ones(50_000, np.int64))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.02
    assert first.min() >= 0 and first.max() < 1
    assert np.abs(np.histogram(first, 20, (0, 1))[0] / 2500 - 1).max() < 0.1


def test_the_worker_plays_the_demos_game_through_a_weight_update(tmp_path: Path) -> None:
    run = Run(tmp_path, partitions=3)
    model = tiny.build_model(GUESS, 0)
    tiny.save(tmp_path / "model", model, tiny.build_tokenizer(GUESS))
    run.publish(0, dict(model.named_parameters()))
    engine = BatchedEngine(tmp_path / "model", threads=1)
    worker = make_worker(run, engine, generate.guess, max_concurrency=32)
    with OnThread(worker):
        for number in range(48):
            run.dispatch("guess", n_samples=4, partition=number % 3, label=str(number % 16))
            if number == 24:
                run.publish(1, dict(tiny.build_model(GUESS, 1).named_parameters()))
        eventually(lambda: len(run.of("trajectories", TrajectoryFinished)) == 192, "every sample")
        eventually(lambda: engine.held is not None and engine.held.version == 1, "version 1")
        for number in range(4):
            run.dispatch("guess", n_samples=4, partition=0, label=str(number), min_version=1)
        eventually(lambda: len(run.of("trajectories", TrajectoryFinished)) == 208, "every sample")
    models = {0: model, 1: tiny.build_model(GUESS, 1)}
    events = run.of("trajectories", TrajectoryFinished)
    assert len({event.uid for event in events}) == 208
    for event in events:
        payload = open_payload(event)
        ids = payload.response_ids.tolist()
        assert engine.tokenizer.decode(ids) == event.response
        assert payload.loss_mask.tolist() == [place % 2 == 0 for place in range(len(ids))]
        at = 0
        for _, version, n_tokens in payload.versions:
            wanted = cacheless(models[version], payload.prompt_ids.tolist(), ids)[at : at + n_tokens]
            span = payload.loss_mask[at : at + n_tokens]
            assert np.abs(payload.logprobs[at : at + n_tokens] - wanted)[span].max(initial=0) < TOLERANCE
            at += n_tokens
    assert {event.versions[0][1] for event in events[-4:]} == {1}
