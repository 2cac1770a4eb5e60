"""An engine without a model: fixed answers, exact log-probs, and faults on demand. For tests and dry runs.

    answer(prompt_ids, sampling, rng, weights) ──► (ids, log-probs), one token every `token_s`

What it says depends on the request id, the seed and the weights it holds, and on nothing else.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.interfaces import Completion, EngineError, Sampling, WeightsId
from engine.rollout.loading import ENGINE_CLOSED, NO_WEIGHTS, DiskOnly, Loader, PauseMode, weights_id
from engine.rollout.text import ByteTokenizer, TokenText, WordTokenizer
from streams.columns import VersionRun, merge_runs
from streams.errors import ConfigError
from streams.events import WeightsPublished

Weights = Mapping[str, Any]
Answer = Callable[[Sequence[int], Sampling, random.Random, Weights], "tuple[list[int], list[float]]"]
Fault = Callable[[str, Completion], Completion]  # (request id, completion) → what comes instead, or raises

FAULTS = ("nan", "infinite", "positive", "short_logprobs", "short_versions", "error")


class ScriptedEngine(DiskOnly):
    """Serves `answer` once its first weights are whole.

    `token_s` is the time of one token; 0 answers at once. `fault` bends completions (see `fault_of`).
    """

    device = "cpu"

    def __init__(
        self,
        answer: Answer,
        *,
        name: str = "scripted-0",
        tokenizer: Any = None,
        seed: int = 0,
        token_s: float = 0.0,
        update_s: float = 0.0,
        pause_mode: PauseMode = "retract",
        fault: Fault | None = None,
    ) -> None:
        self.name, self.tokenizer = name, tokenizer or ByteTokenizer()
        self._answer, self._seed, self._fault = answer, seed, fault
        self._token_s, self._update_s, self._pause_mode = token_s, update_s, pause_mode
        self._held: WeightsId | None = None
        self._loader = Loader("numpy")
        self._weights: Weights = {}
        self._closed = False
        self._running: set[str] = set()
        self._aborted: set[str] = set()
        self._stats = {"tokens": 0.0, "requests": 0.0, "busy_s": 0.0}

    @property
    def held(self) -> WeightsId | None:
        return self._held

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Completion:
        self._check_open()
        if self._held is None:
            raise EngineError(NO_WEIGHTS, f"{self.name} holds no weights yet")
        started = time.monotonic()
        rng = random.Random(f"{self._seed}/{request_id}")
        ids, logprobs = self._answer(prompt_ids, sampling, rng, self._weights)
        ids, logprobs = ids[: sampling.max_tokens], logprobs[: sampling.max_tokens]
        runs: list[VersionRun] = []
        self._running.add(request_id)
        try:
            for _ in ids:
                await asyncio.sleep(self._token_s)
                self._check_open()
                if request_id in self._aborted:
                    break
                runs.append((self._held.epoch, self._held.version, 1))
                self._stats["tokens"] += 1
        finally:
            self._running.discard(request_id)
            self._stats["busy_s"] += time.monotonic() - started
        done = len(runs)
        if request_id in self._aborted:
            self._aborted.discard(request_id)
            reason = "aborted"
        else:
            ended = len(ids) < sampling.max_tokens or ids[-1] in sampling.stop_ids
            reason = "stop" if ended else "length"
        self._stats["requests"] += 1
        completion = Completion(
            np.array(ids[:done], np.int32), np.array(logprobs[:done], np.float32), merge_runs(runs), reason
        )
        return self._fault(request_id, completion) if self._fault else completion

    async def update(self, published: WeightsPublished, path: Path) -> float:
        self._check_open()
        loop = asyncio.get_running_loop()
        weights = await loop.run_in_executor(None, self._loader.load, published, path)
        started = time.monotonic()
        if self._update_s:
            await asyncio.sleep(self._update_s)
        if self._pause_mode == "abort":
            self._aborted |= self._running
        self._weights, self._held = weights, weights_id(published)
        return time.monotonic() - started

    async def abort(self, request_id: str) -> None:
        if request_id in self._running:
            self._aborted.add(request_id)

    async def close(self) -> None:
        self._closed = True

    def stats(self) -> dict[str, float]:
        return dict(self._stats)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError(ENGINE_CLOSED, f"{self.name} was closed")


# ---------------------------------------------------------------- answers
def from_table(
    answers: Mapping[str, str | Sequence[str]], default: str, tokenizer: Any, logprob: float = math.log(0.5)
) -> Answer:
    """Prompt text → answer text, or one of several answers by chance. Every token has the same log-prob."""
    text = TokenText(tokenizer)

    def answer(
        prompt_ids: Sequence[int], sampling: Sampling, rng: random.Random, weights: Weights
    ) -> tuple[list[int], list[float]]:
        said = answers.get(text.text(prompt_ids), default)
        ids = text.reply_ids(said if isinstance(said, str) else rng.choice(list(said)))
        if sampling.stop_ids and len(ids) < sampling.max_tokens:
            ids.append(sampling.stop_ids[0])
        return ids, [logprob] * len(ids)

    return answer


def coin(heads: Sequence[int], tails: Sequence[int]) -> Answer:
    """`heads` with probability sigmoid(w), w the first number of the weights, else `tails`: log-probs are exact.

    The whole log-prob lies on the first token; the others follow with certainty.
    """

    def answer(
        prompt_ids: Sequence[int], sampling: Sampling, rng: random.Random, weights: Weights
    ) -> tuple[list[int], list[float]]:
        w = next((float(np.ravel(value)[0]) for value in weights.values()), 0.0)
        shows_heads = rng.random() < 1 / (1 + math.exp(-w))
        ids = list(heads if shows_heads else tails)
        first = -math.log1p(math.exp(-w if shows_heads else w))
        return ids, [first] + [0.0] * (len(ids) - 1)

    return answer


def bisecting(tokenizer: Any) -> Answer:
    """Plays the demo's number game well: the middle of what is still possible."""
    text = TokenText(tokenizer)

    def answer(
        prompt_ids: Sequence[int], sampling: Sampling, rng: random.Random, weights: Weights
    ) -> tuple[list[int], list[float]]:
        words = text.text(prompt_ids).split()[1:]
        low, high = 0, 15
        for said, reply in zip(words[0::2], words[1::2], strict=False):
            if reply == "LOW":
                low = max(low, int(said) + 1)
            elif reply == "HIGH":
                high = min(high, int(said) - 1)
        return text.reply_ids(str((low + high) // 2)), [math.log(0.9)]

    return answer


# ---------------------------------------------------------------- faults
def fault_of(kind: str, *, share: float = 1.0, match: str = "") -> Fault:
    """A fault for a share of the requests, chosen by their id, or for those whose id holds `match`.

    Kinds: nan, infinite, positive, short_logprobs, short_versions, error (raises).
    """
    if kind not in FAULTS:
        raise ConfigError(f"rollout.options.fault = {kind!r}: known are {', '.join(FAULTS)}")

    def fault(request_id: str, completion: Completion) -> Completion:
        if match not in request_id or zlib.crc32(request_id.encode()) / 2**32 >= share:
            return completion
        logprobs = completion.logprobs.copy()
        if kind == "error":
            raise RuntimeError(f"fault injected into {request_id}")
        if kind == "short_versions":
            return completion._replace(versions=[])
        if kind == "short_logprobs":
            return completion._replace(logprobs=logprobs[:-1])
        logprobs[len(logprobs) // 2 :] = {"nan": math.nan, "infinite": -math.inf, "positive": 0.5}[kind]
        return completion._replace(logprobs=logprobs)

    return fault


def scripted_engine(
    options: Mapping[str, Any], *, name: str, seed: int, pause_mode: PauseMode = "retract"
) -> ScriptedEngine:
    """From `rollout.options`; all of them are optional.

    words        list of words: the vocabulary (default: one token a byte)
    answers      table prompt → answer or list of answers;  default: the answer to other prompts ("ok")
    policy       "coin" (heads, tails: two texts) or "bisect", instead of a table
    token_s      seconds of one token;  update_s: seconds of a weight update
    fault        one of nan, infinite, positive, short_logprobs, short_versions, error
    fault_share  share of requests that have it (1);  fault_match: only request ids that hold this text
    """
    tokenizer = WordTokenizer(options["words"]) if "words" in options else ByteTokenizer()
    text = TokenText(tokenizer)
    policy = options.get("policy", "table")
    if policy == "coin":
        heads, tails = str(options.get("heads", "yes")), str(options.get("tails", "no"))
        answer = coin(text.reply_ids(heads), text.reply_ids(tails))
    elif policy == "bisect":
        answer = bisecting(tokenizer)
    elif policy == "table":
        answer = from_table(options.get("answers", {}), str(options.get("default", "ok")), tokenizer)
    else:
        raise ConfigError(f"rollout.options.policy = {policy!r}: known are table, coin, bisect")
    fault = None
    if options.get("fault"):
        fault = fault_of(
            str(options["fault"]),
            share=float(options.get("fault_share", 1.0)),
            match=str(options.get("fault_match", "")),
        )
    return ScriptedEngine(
        answer,
        name=name,
        tokenizer=tokenizer,
        seed=seed,
        token_s=float(options.get("token_s", 0.0)),
        update_s=float(options.get("update_s", 0.0)),
        pause_mode=pause_mode,
        fault=fault,
    )
