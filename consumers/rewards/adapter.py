"""Functions written for Miles or Slime: their `Sample`, their `args`, and the way there and back.

    reward     f(args, sample) -> float | dict               sample_from_input(input)
               f(args, samples) -> list                      (one group)
    generate   f(args, sample, sampling_params) -> Sample    sample_from_task(task, index) … read_back(sample)
    filter     f(args, samples, **kw) -> DynamicFilterOutput consumers/filters.py

They run unchanged as long as they use `sample` and `args` by their attributes. Field names are those of both
projects; a field that Millstream does not carry keeps its default and says so in DIFFERENCES below.

DIFFERENCES
    tokens               in a reward function: the response's ids alone; prompt ids are not sent to scoring
    response, tokens     in a filter: empty; the collector reads references, never payloads
    reward_spec, custom_rm_path, generate_function_path     are not followed; the configuration names the functions
    list[Sample]         of one episode: refused, since a task has one trajectory per member (read_back)
    weight_versions      one per call, not per token: with several, every token counts as the oldest
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from consumers.rewards.types import RewardInput
from streams.errors import InvalidEvent
from streams.events import TaskDispatched


class SampleStatus(enum.Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class SpeculationCounts:
    """Counters of speculative decoding."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0


@dataclass
class PrefixCacheCounts:
    cached_tokens: int = 0
    total_prompt_tokens: int = 0


@dataclass
class Sample:
    """A sample by the field names of Miles and Slime. P prompt tokens, L = response_length."""

    # as nested names, the way their code spells them: Sample.Status.COMPLETED
    Status: ClassVar = SampleStatus
    SpecInfo: ClassVar = SpeculationCounts
    PrefixCacheInfo: ClassVar = PrefixCacheCounts

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""  # str, or a list of chat messages
    tokens: list[int] = field(default_factory=list)  # [P + L]
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0  # tokens
    label: Any = None
    reward: Any = None  # float, dict, or None
    loss_mask: list[int] | None = None  # 0/1 [L]; None: all 1
    weight_versions: list[str] = field(default_factory=list)  # one per call of the engine
    rollout_log_probs: list[float] | None = None  # [L]
    rollout_routed_experts: Any = None
    remove_sample: bool = False  # True: counts in its group's statistics, trains nothing
    teacher_log_probs: list[float] | None = None
    status: SampleStatus = SampleStatus.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    reward_spec: Any = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    routing_key: str | None = None
    adapter: Any = None
    non_generation_time: float = 0.0  # s
    spec_info: SpeculationCounts = field(default_factory=SpeculationCounts)
    prefix_cache_info: PrefixCacheCounts = field(default_factory=PrefixCacheCounts)

    def get_reward_value(self, args: Any) -> Any:
        """The number, also where the reward is a dict and `args.reward_key` names its entry."""
        key = getattr(args, "reward_key", None)
        return self.reward[key] if key and isinstance(self.reward, Mapping) else self.reward

    @property
    def effective_response_length(self) -> int:
        """Trainable tokens."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    @property
    def oldest_weight_version(self) -> int | None:
        return min(map(int, self.weight_versions), default=None)


class Args(SimpleNamespace):
    """What their functions get as `args`. An absent name raises AttributeError, so getattr defaults still work."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"args.{name}: Millstream's configuration has no such setting; add it to the options of the function, or "
            f"read it with getattr(args, {name!r}, default)"
        )


def make_args(config: Mapping[str, Any] | None = None, options: Mapping[str, Any] | None = None) -> Args:
    """`args` from a configuration (nested tables) and the function's own options.

    Every setting is there by its last name (`args.n_samples_per_prompt`); where two tables share a name, neither
    is, since either would be wrong for somebody. Tables are there by theirs (`args.rollout["replicas"]`). Options
    come last and win. `reward_key` and `custom_rm_path` are always there, None if unset, as their code expects.
    """
    flat: dict[str, Any] = {}
    shared: set[str] = set()

    def walk(table: Mapping[str, Any]) -> None:
        for name, value in table.items():
            if isinstance(value, Mapping) and name != "options":
                walk(value)
            elif name in flat:
                shared.add(name)
            else:
                flat[name] = value

    walk(config or {})
    for name in shared:
        del flat[name]
    tables = {name: value for name, value in (config or {}).items() if isinstance(value, Mapping)}
    return Args(**{"reward_key": None, "custom_rm_path": None} | tables | flat | dict(options or {}))


def sample_from_input(sample: RewardInput) -> Sample:
    """A finished sample for their reward functions."""
    ids = [] if sample.response_ids is None else sample.response_ids.tolist()
    return Sample(
        group_index=_row_of(sample.group_id),
        index=sample.index,
        prompt=sample.prompt,
        tokens=ids,
        response=sample.response,
        response_length=sample.response_length,
        label=sample.label,
        metadata=dict(sample.metadata),
        status=SampleStatus.TRUNCATED if sample.finish_reason == "length" else SampleStatus.COMPLETED,
    )


def sample_from_task(task: TaskDispatched, index: int) -> Sample:
    """A pending sample for their generate functions: member `index` of the task."""
    return Sample(
        group_index=task.seq,
        index=task.seq * task.n_samples + index,
        prompt=task.prompt,
        label=task.label,
        metadata=dict(task.metadata),
    )


class ReadBack(NamedTuple):
    """What a generate function made, checked. P prompt tokens, L response tokens."""

    prompt_ids: NDArray[np.int64]  # [P]
    response_ids: NDArray[np.int64]  # [L]
    logprobs: NDArray[np.float32]  # [L], 0 where the mask is 0
    loss_mask: NDArray[np.bool_]  # [L]
    version: int | None  # the oldest one named; None: none named, the caller knows which weights it held
    finish_reason: str  # "stop" or "length"
    response: str
    metadata: dict[str, Any]
    reward: Any  # what the function set itself, else None


def read_back(result: Any) -> ReadBack:
    """Take over the result of a generate function; also of another project's Sample class, by attribute.

    Raises InvalidEvent with reason `several_samples`, `no_sample`, `aborted`, `generate_error`, `no_tokens`,
    `length_mismatch`, `missing_logprob` or `unknown_version`: the reason for RolloutFailed. Values (finite
    log-probs, ids in range) are checked by streams.trajectory.pack.
    """
    sample = _only(result)
    status = str(getattr(sample.status, "value", sample.status))
    if status in ("aborted", "failed"):
        raise InvalidEvent(
            "aborted" if status == "aborted" else "generate_error", f"the sample's status is {status}"
        )
    if status not in ("completed", "truncated"):
        raise InvalidEvent(
            "generate_error",
            f"the sample came back with status {status!r}; completed or truncated was needed",
        )
    length, tokens = int(sample.response_length), np.asarray(sample.tokens, dtype=np.int64).reshape(-1)
    if length <= 0:
        raise InvalidEvent("no_tokens", f"response_length is {length}")
    if len(tokens) <= length:
        raise InvalidEvent(
            "length_mismatch",
            f"tokens holds {len(tokens)} ids, response_length is {length}; prompt and response ids were needed",
        )
    mask = np.ones(length, bool) if sample.loss_mask is None else np.asarray(sample.loss_mask).astype(bool)
    if mask.shape != (length,):
        raise InvalidEvent("length_mismatch", f"loss_mask {mask.size}≠{length} response tokens")
    if sample.rollout_log_probs is None:
        raise InvalidEvent(
            "missing_logprob",
            "rollout_log_probs is None; the engine's log-prob of each response token was needed",
        )
    logprobs = np.asarray(sample.rollout_log_probs, dtype=np.float32)
    if logprobs.shape != (length,):
        raise InvalidEvent("length_mismatch", f"rollout_log_probs {logprobs.size}≠{length} response tokens")
    if getattr(sample, "remove_sample", False):
        mask = np.zeros(length, bool)
    return ReadBack(
        prompt_ids=tokens[:-length],
        response_ids=tokens[-length:],
        logprobs=np.where(mask, logprobs, np.float32(0)),
        loss_mask=mask,
        version=_oldest(sample.weight_versions),
        finish_reason="length" if status == "truncated" else "stop",
        response=sample.response,
        metadata=dict(sample.metadata or {}),
        reward=sample.reward,
    )


def _only(result: Any) -> Any:
    if isinstance(result, (list, tuple)):
        if len(result) != 1:
            raise InvalidEvent(
                "several_samples",
                f"the generate function returned {len(result)} samples for one member of a group; Millstream takes "
                "one. Join the turns of an episode to one sample (loss_mask 0 on what the environment said)",
            )
        result = result[0]
    missing = [
        name
        for name in ("tokens", "response_length", "status", "rollout_log_probs")
        if not hasattr(result, name)
    ]
    if missing:
        raise InvalidEvent(
            "no_sample",
            f"the generate function returned {type(result).__name__} without {', '.join(missing)}",
        )
    return result


def _oldest(versions: Any) -> int | None:
    """One version per call says nothing about single tokens: the oldest is never fresher than the truth."""
    try:
        numbers = [int(version) for version in versions or ()]
    except (TypeError, ValueError):
        numbers = [-1]
    if any(number < 0 for number in numbers):
        raise InvalidEvent("unknown_version", f"weight_versions {versions!r}: whole numbers ≥ 0 were needed")
    return min(numbers, default=None)


def _row_of(group_id: str) -> int | None:
    row = group_id.rpartition("-")[2]
    return int(row) if row.isdecimal() else None
