"""Generate functions written for Miles or Slime, run as they are.

    async def generate(args, sample, sampling_params) -> Sample

`sample` and `args` have the field names of both projects (consumers/rewards/adapter.py). Their functions reach an
engine over HTTP; here the engine is in this process, and `args` carries it:

    output = await args.millstream_generate(input_ids, sampling_params)    a dict shaped like SGLang's /generate reply:
        output["text"], output["output_ids"]
        output["meta_info"]["output_token_logprobs"]   [(log-prob, token id, None), …]
        output["meta_info"]["finish_reason"]           {"type": "stop" | "length" | "abort"}
        output["meta_info"]["weight_version"]          "7": of the request's oldest token
    args.millstream_tokenizer                          the engine's tokenizer

So `output = await post(url, {"input_ids": ids, "sampling_params": params})` becomes one line; the rest stays. A
function may also fill the sample by itself, from whatever made it, as long as it sets `rollout_log_probs`.

Versions: tokens that came from `millstream_generate` carry exactly the runs that the engine stamped, found again in
the response by their ids. Of a function that used another source only `weight_versions` is known: then every token
counts as the oldest one named, or, with none named, as the weights held when it began.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consumers.rewards.adapter import make_args, read_back, sample_from_task
from engine.interfaces import Completion, Sampling
from engine.rollout.generate import Aborted, Generate, GenerateContext
from streams.columns import VersionRun, merge_runs
from streams.errors import InvalidEvent
from streams.events import TaskDispatched
from streams.trajectory import SampleData


def adapt(
    function: Any, *, options: Mapping[str, Any] | None = None, config: Mapping[str, Any] | None = None
) -> Generate:
    """A native generate function around a Miles or Slime one. `config` (nested tables) and `options` make `args`."""
    base = make_args(config, options)

    async def generate(context: GenerateContext, task: TaskDispatched, index: int) -> SampleData:
        calls = _Calls(context)
        args = type(base)(**vars(base))
        args.millstream_generate, args.millstream_tokenizer = calls.generate, context.tokenizer
        held = context.engine.held
        result = function(args, sample_from_task(task, index), _sampling_params(context.sampling))
        result = await result if inspect.isawaitable(result) else result
        try:
            done = read_back(result)
        except InvalidEvent as error:
            if error.reason == "aborted" and calls.saw_abort:
                raise Aborted(context.request_id) from None
            raise
        runs = calls.runs_over(done.response_ids)
        if runs is None:
            epoch, version = (held.epoch, held.version) if held is not None else (-1, -1)
            runs = [(epoch, version if done.version is None else done.version, len(done.response_ids))]
        metadata = {**task.metadata, **done.metadata}
        if done.reward is not None:
            metadata["generate_reward"] = done.reward  # for a reward function that wants it
        return SampleData(
            uid=f"{task.group_id}/{index}/{task.attempt}",
            group_id=task.group_id,
            seq=task.seq,
            index=index,
            attempt=task.attempt,
            n_samples=task.n_samples,
            task_offset=context.task_offset,
            prompt_ids=done.prompt_ids,
            response_ids=done.response_ids,
            logprobs=done.logprobs,
            loss_mask=done.loss_mask,
            versions=runs,
            finish_reason=done.finish_reason,
            response=done.response,
            prompt=task.prompt,
            label=task.label,
            metadata=metadata,
            turns=_turns(done.loss_mask),
            temperature=context.sampling.temperature,
            engine=context.engine.name,
            started_ms=context.started_ms,
            finished_ms=context.clock(),
        )

    return generate


class _Calls:
    """The engine as one sample's function sees it, and what it answered."""

    def __init__(self, context: GenerateContext) -> None:
        self._context = context
        self._completions: list[Completion] = []
        self.saw_abort = False

    async def generate(
        self, input_ids: Sequence[int], sampling_params: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        context = self._context
        ids = [int(each) for each in input_ids]
        try:
            done = await context.complete(ids, _sampling(context.sampling, sampling_params or {}))
        except Aborted:
            self.saw_abort = True
            return _reply(context, ids, None)
        self._completions.append(done)
        return _reply(context, ids, done)

    def runs_over(self, response_ids: NDArray[np.integer]) -> list[VersionRun] | None:
        """Version runs over a response that is made of the completions, in order, with other tokens in between.

        Tokens in between carry the run before them (those before the first completion, its first run). None when
        there was no call, or when a completion cannot be found: then the caller falls back on what is known.
        """
        if not self._completions:
            return None
        ids = response_ids.tolist()
        runs: list[VersionRun] = []
        at = 0
        for done in self._completions:
            wanted = done.ids.tolist()
            start = _find(ids, wanted, at)
            if start is None:
                return self._oldest(len(ids))
            before = runs[-1] if runs else done.versions[0]
            runs.append((before[0], before[1], start - at))
            runs += done.versions
            at = start + len(wanted)
        runs.append((runs[-1][0], runs[-1][1], len(ids) - at))
        return merge_runs(runs)

    def _oldest(self, n_tokens: int) -> list[VersionRun]:
        """One run of the oldest weights that had a part in it: never fresher than the truth."""
        epoch, version, _ = min(run for done in self._completions for run in done.versions)
        return [(epoch, version, n_tokens)]


def _find(ids: list[int], wanted: list[int], start: int) -> int | None:
    for at in range(start, len(ids) - len(wanted) + 1):
        if ids[at : at + len(wanted)] == wanted:
            return at
    return None


def _reply(context: GenerateContext, input_ids: list[int], done: Completion | None) -> dict[str, Any]:
    ids = [] if done is None else done.ids.tolist()
    logprobs = [] if done is None else done.logprobs.tolist()
    reason = "abort" if done is None else done.finish_reason
    meta = {
        "id": context.request_id,
        "prompt_tokens": len(input_ids),
        "completion_tokens": len(ids),
        "cached_tokens": 0,
        "finish_reason": {"type": reason},
        "output_token_logprobs": [
            (logprob, token, None) for logprob, token in zip(logprobs, ids, strict=True)
        ],
        "weight_version": str(min(run[1] for run in done.versions)) if done is not None else "",
    }
    return {"text": context.text.text(ids) if ids else "", "output_ids": ids, "meta_info": meta}


def _sampling_params(sampling: Sampling) -> dict[str, Any]:
    """As their rollout loops build it. What would change the sampled distribution is off."""
    return {
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": sampling.max_tokens,
        "stop": None,
        "stop_token_ids": list(sampling.stop_ids),
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


def _sampling(default: Sampling, params: Mapping[str, Any]) -> Sampling:
    """Raises InvalidEvent for what cannot be trained on: another temperature, nucleus or top-k sampling."""
    temperature = float(params.get("temperature", default.temperature))
    top_p, top_k = params.get("top_p", 1.0), params.get("top_k", -1)
    if temperature != default.temperature or top_p not in (None, 1, 1.0) or top_k not in (None, -1, 0):
        raise InvalidEvent(
            "generate_error",
            f"sampling_params temperature {temperature}, top_p {top_p}, top_k {top_k}: only the run's temperature "
            f"{default.temperature}, top_p 1 and top_k -1 give the log-probs that are trained on",
        )
    if params.get("stop"):
        raise InvalidEvent(
            "generate_error", 'sampling_params "stop": stop texts are not served, use stop_token_ids'
        )
    return Sampling(
        max_tokens=int(params.get("max_new_tokens") or default.max_tokens),
        temperature=temperature,
        stop_ids=tuple(params.get("stop_token_ids") or default.stop_ids),
    )


def _turns(mask: NDArray[np.bool_]) -> list[tuple[int, int, str]]:
    edges = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(mask)]
    return [
        (start, end, "policy" if mask[start] else "environment") for start, end in itertools.pairwise(edges)
    ]
