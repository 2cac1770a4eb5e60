"""Generate functions: how one member of a task becomes a sample.

    async def generate(context: GenerateContext, task: TaskDispatched, index: int) -> SampleData

Built in: `single_turn` (one call of the engine), `multi_turn` (a loop with an environment), `given` (the dataset's own
responses, for supervised training), and `guess` (the demo's game). One's own is named "module:function"; a function
written for Miles or Slime, `async def f(args, sample, sampling_params)`, runs through engine/rollout/foreign.py.

A function may be called again for the same member, with another `request_id`, after `Aborted` (the weights changed
in pause mode "abort") or a restart. What it raises becomes the member's RolloutFailed, never a reward of 0.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from consumers.rewards.load import resolve
from consumers.runner import Clock, now_ms
from engine.interfaces import Completion, RolloutEngine, Sampling
from engine.rollout.episode import Episode
from engine.rollout.given import given
from engine.rollout.text import TokenText
from engine.tasks import guess as game
from streams.errors import ConfigError, InvalidEvent
from streams.events import TaskDispatched
from streams.trajectory import SampleData


class Aborted(Exception):
    """The engine ended the request because of a weight update: the worker takes the member from the start."""


class GenerateContext:
    """What a generate function is given for one sample."""

    __slots__ = (
        "_calls",
        "_rng",
        "clock",
        "engine",
        "options",
        "request_id",
        "sampling",
        "seed",
        "started_ms",
        "task_offset",
        "text",
    )

    def __init__(
        self,
        *,
        engine: RolloutEngine,
        text: TokenText,
        sampling: Sampling,
        request_id: str,
        task_offset: int = 0,
        options: Mapping[str, Any] | None = None,
        seed: int = 0,
        clock: Clock = now_ms,
    ) -> None:
        self.engine, self.text, self.sampling = engine, text, sampling
        self.request_id, self.task_offset = request_id, task_offset
        self.options: Mapping[str, Any] = options or {}
        self.seed, self.clock = seed, clock
        self.started_ms = clock()
        self._calls = 0
        self._rng: random.Random | None = None

    @property
    def tokenizer(self) -> Any:
        return self.text.tokenizer

    @property
    def rng(self) -> random.Random:
        """Random numbers that depend on the run's seed and this sample alone."""
        if self._rng is None:
            self._rng = random.Random(f"{self.seed}/{self.request_id}")
        return self._rng

    async def complete(self, prompt_ids: Sequence[int], sampling: Sampling | None = None) -> Completion:
        """One call of the engine. Raises Aborted, EngineError."""
        self._calls += 1
        completion = await self.engine.generate(
            prompt_ids, sampling or self.sampling, request_id=f"{self.request_id}.{self._calls}"
        )
        if completion.finish_reason == "aborted":
            raise Aborted(self.request_id)
        return completion

    def finish(
        self,
        episode: Episode,
        task: TaskDispatched,
        index: int,
        *,
        finish_reason: str,
        response: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> SampleData:
        """The sample of an episode. `response` is decoded from its ids unless it is given."""
        return episode.to_sample_data(
            task,
            index,
            task_offset=self.task_offset,
            finish_reason=finish_reason,
            response=self.text.text(episode.ids) if response is None else response,
            temperature=self.sampling.temperature,
            engine=self.engine.name,
            started_ms=self.started_ms,
            finished_ms=self.clock(),
            metadata=metadata,
        )


Generate = Callable[[GenerateContext, TaskDispatched, int], Awaitable[SampleData]]


# ---------------------------------------------------------------- one turn
async def single_turn(context: GenerateContext, task: TaskDispatched, index: int) -> SampleData:
    """Prompt in, response out. Ends with "stop" or "length"."""
    episode = Episode(context.text.prompt_ids(task.prompt))
    completion = await context.complete(episode.context)
    episode.append_policy(completion)
    return context.finish(episode, task, index, finish_reason=completion.finish_reason)


# ---------------------------------------------------------------- many turns
class NextPrompt(NamedTuple):
    """An environment's reply as the whole prompt of the next turn, for those that render the history themselves."""

    ids: Sequence[int]


Reply = str | Sequence[int] | NextPrompt


class Environment(Protocol):
    """The other side of a conversation: a tool, a game, a simulated user. One object per sample."""

    def reset(self, task: TaskDispatched) -> Any:
        """Start. May be async; a text or ids that it returns are appended to the prompt."""
        ...

    async def step(self, text: str, ids: Sequence[int]) -> tuple[Reply, bool]:
        """Answer to one turn of the policy: its text and ids in, (reply, whether it is over) out.

        A text is tokenized once, here; ids are taken as they are. Raising fails the sample.
        """
        ...


async def multi_turn(context: GenerateContext, task: TaskDispatched, index: int) -> SampleData:
    """Policy and environment in turn, until the environment ends it ("environment"), or turns or tokens run out.

    Options: `environment` "module:factory", called as factory(context, task, index), required; `max_turns` (16);
    `max_total_tokens`, of the response with the environment's part (unset: no bound beyond the model's);
    `on_mismatch` "refuse" or "split", for a NextPrompt that does not continue the episode.
    """
    options = context.options
    environment = environment_factory(options)(context, task, index)
    max_turns, budget = int(options.get("max_turns", 16)), options.get("max_total_tokens")
    on_mismatch = options.get("on_mismatch", "refuse")
    episode = Episode(context.text.prompt_ids(task.prompt))
    opening = environment.reset(task)
    if inspect.isawaitable(opening):
        opening = await opening
    if opening is not None:
        _append_reply(context, episode, opening, on_mismatch)
    finish_reason = "length"
    for _ in range(max_turns):
        sampling = context.sampling
        if budget is not None:
            left = int(budget) - len(episode)
            if left <= 0:
                break
            sampling = sampling._replace(max_tokens=min(sampling.max_tokens, left))
        completion = await context.complete(episode.context, sampling)
        episode.append_policy(completion)
        if completion.finish_reason == "length" and sampling.max_tokens < context.sampling.max_tokens:
            break  # the budget ended the turn, not the policy: there is nothing to answer
        ids = completion.ids.tolist()
        reply, is_over = await environment.step(context.text.text(ids), ids)
        if reply is not None:
            _append_reply(context, episode, reply, on_mismatch)
        if is_over:
            finish_reason = "environment"
            break
    return context.finish(episode, task, index, finish_reason=finish_reason)


def _append_reply(context: GenerateContext, episode: Episode, reply: Reply, on_mismatch: Any) -> None:
    if isinstance(reply, NextPrompt):
        episode.continue_with(reply.ids, on_mismatch=on_mismatch)
    elif isinstance(reply, str):
        episode.append_environment(context.text.reply_ids(reply))
    else:
        episode.append_environment([int(each) for each in reply])


def environment_factory(options: Mapping[str, Any]) -> Callable[..., Environment]:
    """The factory that the option `environment` names. Raises ConfigError."""
    path = options.get("environment")
    if not isinstance(path, str):
        raise ConfigError('rollout.options.environment: multi_turn needs it, as in "my_package.tools:make"')
    return resolve(path, "rollout.options.environment", {})


# ---------------------------------------------------------------- the demo's game
async def guess(context: GenerateContext, task: TaskDispatched, index: int) -> SampleData:
    """The number game of engine/tasks/guess.py: one token a turn, answered by LOW, HIGH, HIT or "?".

    Options: `slow_tools_sigma` (0: off) makes every tool call sleep for a lognormal time with that σ and the median
    `slow_tools_median_s` (0.1 s): the long tail of latencies that asynchrony meets in practice.
    """
    text, label = context.text, task.label
    sigma = float(context.options.get("slow_tools_sigma", 0.0))
    one_token = context.sampling._replace(max_tokens=1, stop_ids=())
    episode = Episode(text.prompt_ids(task.prompt))
    words: list[str] = []
    for turn in range(1, game.TURNS + 1):
        completion = await context.complete(episode.context, one_token)
        episode.append_policy(completion)
        word = text.text(completion.ids.tolist())
        words.append(word)
        if sigma > 0:
            median_s = float(context.options.get("slow_tools_median_s", 0.1))
            await asyncio.sleep(median_s * math.exp(sigma * context.rng.gauss(0.0, 1.0)))
        if game.is_over(label, turn, word):
            break
        reply = game.environment_reply(label, word)
        words.append(reply)
        episode.append_environment(text.reply_ids(reply))
    return context.finish(episode, task, index, finish_reason="environment", response=" ".join(words))


# ---------------------------------------------------------------- by name
BUILT_INS: dict[str, Generate] = {
    "single_turn": single_turn,
    "multi_turn": multi_turn,
    "guess": guess,
    "given": given,
}


def load_generate(
    path: str, options: Mapping[str, Any] | None = None, config: Mapping[str, Any] | None = None
) -> Generate:
    """The generate function of a configuration, whatever its form. `config` (nested tables) is for foreign `args`.

    Raises ConfigError naming what was needed and what came.
    """
    function = BUILT_INS[path] if path in BUILT_INS else resolve(path, "rollout.generate", BUILT_INS)
    if function is multi_turn:
        environment_factory(options or {})
    names = list(inspect.signature(function).parameters)
    if names[:1] == ["args"]:
        from engine.rollout.foreign import adapt

        return adapt(function, options=options, config=config)
    if len(names) != 3:
        raise ConfigError(
            f"rollout.generate = {path!r}: needed (context, task, index), or (args, sample, sampling_params) for a "
            f"Miles or Slime function; it takes ({', '.join(names)})"
        )
    return function


def failure_reason(error: BaseException) -> tuple[str, str]:
    """(reason, detail) of a RolloutFailed for what a generate function raised."""
    if isinstance(error, InvalidEvent):
        return error.reason, error.detail
    return "generate_error", f"{type(error).__name__}: {error}"[:2000]
