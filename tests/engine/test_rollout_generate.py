"""Generate functions on a scripted engine: turns, tools, the demo's game, and functions written for other projects."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.interfaces import Completion, Sampling, WeightsId
from engine.rollout import generate as functions
from engine.rollout.episode import PrefixMismatch
from engine.rollout.foreign import adapt
from engine.rollout.generate import Aborted, GenerateContext, NextPrompt, load_generate
from engine.rollout.scripted import ScriptedEngine, bisecting, from_table, scripted_engine
from engine.rollout.text import ByteTokenizer, TokenText, WordTokenizer, stop_ids
from engine.tasks import GUESS, guess
from streams.errors import ConfigError, InvalidEvent
from streams.events import RolloutFailed, TaskDispatched, TrajectoryFinished
from streams.trajectory import SampleData, open_payload, pack
from tests.engine.rollout_support import OnThread, Run, eventually, make_worker


def task(prompt: Any = "say", label: Any = None, **fields: Any) -> TaskDispatched:
    return TaskDispatched(
        group_id="0-0", seq=0, data_epoch=0, row=0, n_samples=2, prompt=prompt, label=label, **fields
    )


def make_context(engine: ScriptedEngine, sampling: Sampling | None = None, **fields: Any) -> GenerateContext:
    engine._held = engine._held or WeightsId(2, 7, "d")
    return GenerateContext(
        engine=engine,
        text=TokenText(engine.tokenizer),
        sampling=sampling or Sampling(16),
        request_id="r",
        **fields,
    )


def saying(*answers: str, **fields: Any) -> ScriptedEngine:
    """An engine that gives these answers, one a call."""
    left = list(answers)

    def answer(ids: Sequence[int], sampling: Sampling, rng: random.Random, weights: Any) -> Any:
        said = list(left.pop(0).encode())
        return said, [-0.25] * len(said)

    return ScriptedEngine(answer, **fields)


class Scripted:
    """An environment with fixed replies that remembers what it was told."""

    def __init__(self, *replies: Any, opening: Any = None) -> None:
        self.replies, self.opening, self.told = list(replies), opening, []

    def reset(self, task: TaskDispatched) -> Any:
        return self.opening

    async def step(self, text: str, ids: Sequence[int]) -> tuple[Any, bool]:
        self.told.append(text)
        reply = self.replies.pop(0)
        return reply, not self.replies


def converse(
    monkeypatch: pytest.MonkeyPatch, environment: Scripted, engine: ScriptedEngine, **options: Any
) -> SampleData:
    monkeypatch.setattr(functions, "environment_factory", lambda options: lambda *_: environment)
    sampling = options.pop("sampling", None)
    return asyncio.run(functions.multi_turn(make_context(engine, sampling, options=options), task(), 1))


def test_a_conversation_keeps_the_engines_ids_and_masks_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = Scripted("!", [50, 51], None)
    sample = converse(monkeypatch, environment, saying("ab", "cd", "e"))
    payload = open_payload(pack(sample))
    assert payload.prompt_ids.tolist() == list(b"say")
    assert payload.response_ids.tolist() == [*b"ab!cd", 50, 51, *b"e"]
    assert payload.loss_mask.tolist() == [True, True, False, True, True, False, False, True]
    assert payload.logprobs.tolist() == [-0.25, -0.25, 0, -0.25, -0.25, 0, 0, -0.25]
    assert payload.versions == [(2, 7, 8)]
    assert (sample.finish_reason, sample.response) == ("environment", "ab!cd23e")
    assert environment.told == ["ab", "cd", "e"]
    assert sample.turns == [
        (0, 2, "policy"), (2, 3, "environment"), (3, 5, "policy"), (5, 7, "environment"), (7, 8, "policy")
    ]  # fmt: skip


def test_a_conversation_ends_when_its_turns_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = converse(monkeypatch, Scripted("1", "2", "3"), saying("a", "b", "c"), max_turns=2)
    assert (sample.response, sample.finish_reason) == ("a1b2", "length")


def test_a_conversation_ends_when_its_tokens_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = Scripted("!!", "?")
    sample = converse(
        monkeypatch, environment, saying("abc", "defgh"), max_total_tokens=7, sampling=Sampling(4)
    )
    assert (sample.response, sample.finish_reason) == ("abc!!de", "length")
    assert environment.told == ["abc"], "a turn that the budget cut is not answered"


def test_an_opening_of_the_environment_belongs_to_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = converse(monkeypatch, Scripted(None, opening=" hi"), saying("a"))
    assert bytes(sample.prompt_ids.tolist()) == b"say hi"
    assert sample.response == "a"


def test_an_environment_that_renders_the_history_anew_is_held_to_the_engines_ids(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = NextPrompt([*b"sayab", *b"+"])
    assert converse(monkeypatch, Scripted(kept, None), saying("ab", "c")).response == "ab+c"
    changed = NextPrompt([*b"sayAB", *b"+"])
    with pytest.raises(PrefixMismatch, match="prefix_mismatch at 3"):
        converse(monkeypatch, Scripted(changed, None), saying("ab", "c"))
    split = converse(monkeypatch, Scripted(changed, None), saying("ab", "c"), on_mismatch="split")
    assert (bytes(split.prompt_ids.tolist()), split.response, split.metadata) == (
        b"sayAB+", "c", {"prefix_splits": 1},
    )  # fmt: skip


def test_a_prefix_mismatch_is_a_typed_failure_of_its_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    run.publish(0)
    monkeypatch.setattr(
        functions, "environment_factory", lambda options: lambda *_: Scripted(NextPrompt([1, 2]), None)
    )
    engine = ScriptedEngine(from_table({}, "ab", ByteTokenizer()))
    with OnThread(make_worker(run, engine, functions.multi_turn)):
        run.dispatch(n_samples=1)
        [failure] = eventually(lambda: run.of("trajectories", RolloutFailed), "the failure")
    assert failure.reason == "prefix_mismatch" and "prefix_mismatch at 0" in failure.detail


# ---------------------------------------------------------------- the demo's game
def play_guess(engine: ScriptedEngine, secret: int, **fields: Any) -> SampleData:
    return asyncio.run(functions.guess(make_context(engine, **fields), task(guess.PROMPT, str(secret)), 0))


@pytest.mark.parametrize("secret", range(16))
def test_bisection_hits_every_secret(secret: int) -> None:
    tokenizer = WordTokenizer(GUESS.words)
    sample = play_guess(ScriptedEngine(bisecting(tokenizer), tokenizer=tokenizer), secret)
    assert guess.score(str(secret), sample.response) == 1.0
    words = sample.response.split()
    assert words[-1] == str(secret) and len(sample.response_ids) == len(words)
    assert sample.loss_mask.tolist() == [place % 2 == 0 for place in range(len(words))]
    assert tokenizer.decode(sample.response_ids.tolist()) == sample.response
    pack(sample)


def test_the_game_ends_after_five_guesses() -> None:
    tokenizer = WordTokenizer(GUESS.words)
    engine = ScriptedEngine(from_table({}, "3", tokenizer), tokenizer=tokenizer)
    sample = play_guess(engine, 9)
    assert sample.response == "3 LOW 3 LOW 3 LOW 3 LOW 3"
    assert len(sample.response_ids) == GUESS.recommended.rollout_max_response_len - 1
    assert guess.score("9", sample.response) == 0.0


def test_slow_tools_take_a_lognormal_time_that_the_seed_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(functions.asyncio, "sleep", sleep)
    tokenizer = WordTokenizer(GUESS.words)
    for seed in range(300):
        engine = ScriptedEngine(from_table({}, "3", tokenizer), tokenizer=tokenizer)
        play_guess(engine, 9, seed=seed, options={"slow_tools_sigma": 0.8, "slow_tools_median_s": 0.5})
    tools = [seconds for seconds in slept if seconds > 0]
    assert len(tools) == 5 * 300
    assert np.median(tools) == pytest.approx(0.5, rel=0.1)
    assert np.std(np.log(tools)) == pytest.approx(0.8, rel=0.1)


# ---------------------------------------------------------------- functions of Miles and Slime
async def single_call(args: Any, sample: Any, sampling_params: Any) -> Any:
    """Written as theirs are, but for the line that reaches the engine."""
    ids = args.millstream_tokenizer.encode(sample.prompt)
    output = await args.millstream_generate(ids, sampling_params)
    meta = output["meta_info"]
    if meta["finish_reason"]["type"] == "abort":
        sample.status = sample.Status.ABORTED
        return sample
    new = [item[1] for item in meta["output_token_logprobs"]]
    sample.tokens = ids + new
    sample.response_length = len(new)
    sample.response = output["text"]
    sample.rollout_log_probs = [item[0] for item in meta["output_token_logprobs"]]
    sample.weight_versions.append(meta["weight_version"])
    sample.status = {"stop": sample.Status.COMPLETED, "length": sample.Status.TRUNCATED}[
        meta["finish_reason"]["type"]
    ]
    return sample


async def with_a_tool(args: Any, sample: Any, sampling_params: Any) -> Any:
    """Two calls with a tool's answer between them, which is masked."""
    tokens = args.millstream_tokenizer.encode(sample.prompt)
    prompt_length = len(tokens)
    mask, logprobs = [], []
    for turn in range(2):
        output = await args.millstream_generate(tokens, sampling_params)
        items = output["meta_info"]["output_token_logprobs"]
        tokens = tokens + [item[1] for item in items]
        mask += [1] * len(items)
        logprobs += [item[0] for item in items]
        if turn == 0:
            tool = args.millstream_tokenizer.encode(args.tool_says)
            tokens, mask, logprobs = tokens + tool, mask + [0] * len(tool), logprobs + [0.0] * len(tool)
    sample.tokens, sample.loss_mask, sample.rollout_log_probs = tokens, mask, logprobs
    sample.response_length = len(tokens) - prompt_length
    sample.status = type(sample).Status.COMPLETED
    sample.metadata["turns"] = 2
    return sample


async def fills_it_itself(args: Any, sample: Any, sampling_params: Any) -> Any:
    sample.tokens, sample.response_length = [1, 2, 3, 4], 2
    sample.rollout_log_probs, sample.response = [-0.5, -1.0], "from elsewhere"
    sample.weight_versions = ["6", "5"]
    sample.status = sample.Status.TRUNCATED
    return sample


def run_foreign(function: Any, engine: ScriptedEngine, **options: Any) -> SampleData:
    async def scene() -> SampleData:
        return await adapt(function, options=options)(make_context(engine, task_offset=4), task(label="L"), 1)

    return asyncio.run(scene())


def test_a_foreign_function_with_one_call_becomes_a_sample() -> None:
    sample = run_foreign(single_call, saying("hello"))
    payload = open_payload(pack(sample))
    assert (payload.prompt_ids.tolist(), payload.response_ids.tolist()) == (list(b"say"), list(b"hello"))
    assert payload.logprobs.tolist() == [-0.25] * 5
    assert payload.versions == [(2, 7, 5)]
    assert (sample.uid, sample.task_offset, sample.label) == ("0-0/1/0", 4, "L")
    assert (sample.response, sample.finish_reason) == ("hello", "stop")


def test_a_foreign_function_with_a_tool_keeps_the_versions_of_each_call() -> None:
    engine = saying("ab", "cd")
    versions = iter([(2, 7), (2, 9)])
    plain = engine.generate

    async def generate(prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Completion:
        done = await plain(prompt_ids, sampling, request_id=request_id)
        return done._replace(versions=[(*next(versions), len(done.ids))])

    engine.generate = generate  # pyright: ignore[reportAttributeAccessIssue]
    sample = run_foreign(with_a_tool, engine, tool_says="###")
    payload = open_payload(pack(sample))
    assert bytes(payload.response_ids.tolist()) == b"ab###cd"
    assert payload.loss_mask.tolist() == [True] * 2 + [False] * 3 + [True] * 2
    assert payload.versions == [(2, 7, 5), (2, 9, 2)]
    assert sample.turns == [(0, 2, "policy"), (2, 5, "environment"), (5, 7, "policy")]
    assert sample.metadata == {"turns": 2}


def test_a_foreign_function_that_fills_the_sample_itself_counts_as_its_oldest_version() -> None:
    sample = run_foreign(fills_it_itself, saying())
    assert (sample.versions, sample.finish_reason, sample.response) == (
        [(2, 5, 2)],
        "length",
        "from elsewhere",
    )
    assert open_payload(pack(sample)).prompt_ids.tolist() == [1, 2]


def test_a_foreign_function_whose_call_was_aborted_is_taken_from_the_start() -> None:
    engine = saying("hello", token_s=0.01)

    async def scene() -> None:
        context = make_context(engine)
        running = asyncio.ensure_future(adapt(single_call)(context, task(), 0))
        while not engine._running:
            await asyncio.sleep(0)
        await engine.abort("r.1")
        with pytest.raises(Aborted):
            await running

    asyncio.run(scene())


def test_a_foreign_function_that_fails_says_so_by_its_reason() -> None:
    async def without_logprobs(args: Any, sample: Any, sampling_params: Any) -> Any:
        done = await single_call(args, sample, sampling_params)
        done.rollout_log_probs = None
        return done

    async def gave_up(args: Any, sample: Any, sampling_params: Any) -> Any:
        sample.status = sample.Status.FAILED
        return sample

    async def other_sampling(args: Any, sample: Any, sampling_params: Any) -> Any:
        return await single_call(args, sample, {**sampling_params, "top_p": 0.9})

    for function, reason in ((without_logprobs, "missing_logprob"), (gave_up, "generate_error"),
                             (other_sampling, "generate_error")):  # fmt: skip
        with pytest.raises(InvalidEvent) as refusal:
            run_foreign(function, saying("hello"))
        assert refusal.value.reason == reason


def test_a_foreign_function_runs_in_the_worker(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.publish(3)
    run.dispatch("hi", n_samples=2)
    engine = ScriptedEngine(from_table({}, "ok", ByteTokenizer()))
    with OnThread(make_worker(run, engine, load_generate(f"{__name__}:single_call"))):
        eventually(lambda: len(run.of("trajectories", TrajectoryFinished)) == 2, "both samples")
    assert {event.response for event in run.events("trajectories")} == {"ok"}


# ---------------------------------------------------------------- by name
async def two_arguments(context: Any, task: Any) -> Any: ...


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("single_trun", "did you mean 'single_turn'"),
        ("no.such.module:f", "no module no"),
        (f"{__name__}:two_arguments", r"needed \(context, task, index\).*it takes \(context, task\)"),
        ("multi_turn", "rollout.options.environment: multi_turn needs it"),
    ],
)
def test_a_generate_function_that_cannot_be_used_is_refused_by_name(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_generate(path)


def test_the_built_ins_have_names_and_the_games_has_a_path() -> None:
    assert load_generate("single_turn") is functions.single_turn
    assert load_generate("engine.rollout.generate:guess") is functions.guess


# ---------------------------------------------------------------- text
def test_prompts_are_rendered_by_the_template_and_replies_get_no_special_tokens() -> None:
    class Chatty:
        all_special_ids = (1,)

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return ([1] if add_special_tokens else []) + list(text.encode())

        def decode(self, ids: Sequence[int]) -> str:
            return bytes(ids).decode()

        def apply_chat_template(self, messages: Any, *, add_generation_prompt: bool, tokenize: bool) -> str:
            assert add_generation_prompt and not tokenize
            return "".join(f"<{each['role']}>{each['content']}" for each in messages) + "<assistant>"

    text = TokenText(Chatty())
    assert text.prompt_ids("hi") == [1, *b"hi"]
    assert text.reply_ids("hi") == list(b"hi")
    messages = [{"role": "user", "content": "hi"}]
    assert text.prompt_ids(messages) == list(b"<user>hi<assistant>")
    assert TokenText(Chatty(), apply_chat_template=True).prompt_ids("hi") == list(b"<user>hi<assistant>")
    first = text.prompt_ids("hi")
    first.append(5)
    assert text.prompt_ids("hi") == [1, *b"hi"], "what is remembered is not handed out to be changed"


def test_stop_ids_come_from_the_tokenizer_and_the_models_own_configuration(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [256, 9]}')
    assert stop_ids(ByteTokenizer(), tmp_path) == (256, 9)
    assert stop_ids(ByteTokenizer()) == (256,)
    assert stop_ids(object()) == ()


# ---------------------------------------------------------------- the scripted engine
def test_a_scripted_engine_is_built_from_options() -> None:
    engine = scripted_engine({"answers": {"2+2": "4"}, "default": "no"}, name="s", seed=0)
    engine._held = WeightsId(0, 0, "")

    async def ask(prompt: str, most: int = 8) -> tuple[str, str]:
        done = await engine.generate(list(prompt.encode()), Sampling(most), request_id=prompt)
        return engine.tokenizer.decode(done.ids.tolist()), done.finish_reason

    assert asyncio.run(ask("2+2")) == ("4", "stop")
    assert asyncio.run(ask("3+3")) == ("no", "stop")
    assert asyncio.run(ask("3+3", 1)) == ("n", "length")
    with pytest.raises(ConfigError, match="known are table, coin, bisect"):
        scripted_engine({"policy": "cion"}, name="s", seed=0)
    with pytest.raises(ConfigError, match=r"rollout\.options\.fault"):
        scripted_engine({"fault": "nann"}, name="s", seed=0)


def test_no_module_but_the_torch_engines_imports_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys; import engine.rollout.worker, engine.rollout.scripted, engine.rollout.generate, "
        "engine.rollout.foreign, engine.evaluator; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'tokenizers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
