"""Dynamic filters: is a completed group worth training on?

    members (with rewards, by reference) ──► filter, filter, … ──► Verdict(keep, reason)

A filter sees what the collector has: rewards, components and lengths, never texts or tokens. The collector asks
them in order; the first that says no gives the reason with which the group is dropped. Filters are pure, so a
restarted collector comes to the same verdict. They run in the collector, without a deadline: what they do must be
small, and an error of theirs ends the daemon with their own traceback.

A filter written for Miles or Slime, `f(args, samples, **kw) -> DynamicFilterOutput(keep, reason)` or a bool, is
recognised by its first parameter's name and given samples without text (consumers/rewards/adapter.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from consumers.advantages import is_flat
from consumers.rewards.adapter import Sample, SampleStatus, make_args
from consumers.rewards.load import is_async, resolve
from streams.errors import ConfigError
from streams.events import Member


class Verdict(NamedTuple):
    keep: bool
    reason: str = ""  # why not, one word: the reason of GroupDropped


Filter = Callable[[Sequence[Member]], Verdict]
KEEP = Verdict(True)


def zero_variance(members: Sequence[Member]) -> Verdict:
    """Drops a group whose rewards are all the same: its advantages are all 0."""
    return Verdict(False, "zero_variance") if is_flat([each.reward for each in members]) else KEEP


def reward_range(
    members: Sequence[Member], *, low: float | None = None, high: float | None = None
) -> Verdict:
    """Drops a group whose mean reward lies outside [low, high]: too hard or too easy."""
    if low is None and high is None:
        raise ConfigError("filter reward_range: needs low or high, or both")
    mean = sum(each.reward for each in members) / len(members) if members else 0.0
    if low is not None and mean < low:
        return Verdict(False, "reward_below_range")
    if high is not None and mean > high:
        return Verdict(False, "reward_above_range")
    return KEEP


BUILT_INS: dict[str, Callable[..., Any]] = {"zero_variance": zero_variance, "reward_range": reward_range}


def load_filter(
    path: str, options: Mapping[str, Any] | None = None, *, config: Mapping[str, Any] | None = None
) -> Filter:
    """A built-in filter, or a function `f(members) -> Verdict | bool`, or one for Miles or Slime."""
    function = BUILT_INS[path] if path in BUILT_INS else resolve(path, "collector.filters", BUILT_INS)
    if is_async(function):
        raise ConfigError(f"collector.filters: {path} is async; a plain function is needed")
    given = dict(options or {})
    names = [
        name for name, each in inspect.signature(function).parameters.items() if each.default is each.empty
    ]
    if names[:1] == ["args"]:
        args = make_args(config, given)
        return lambda members: _verdict(path, function(args, [_sample(each) for each in members]))
    try:
        inspect.signature(function).bind([], **given)
    except TypeError as error:
        raise ConfigError(
            f"collector.filters: {path} cannot be called as f(members{', **options' if given else ''}): {error}"
        ) from None
    if function is reward_range:
        reward_range([], **given)  # its bounds are missing now or never
    return lambda members: _verdict(path, function(members, **given))


def _verdict(path: str, result: Any) -> Verdict:
    """A Verdict, a bool, or anything with `keep` and `reason`."""
    keep, reason = getattr(result, "keep", result), getattr(result, "reason", None)
    if (
        not isinstance(keep, bool) and getattr(keep, "shape", None) != ()
    ):  # their filters often return a 0-d tensor
        raise TypeError(
            f"filter {path} returned {type(result).__name__}; needed Verdict(keep, reason), DynamicFilterOutput or bool"
        )
    return KEEP if bool(keep) else Verdict(False, str(reason or path.rpartition(":")[2]))


def _sample(member: Member) -> Sample:
    """What a Miles or Slime filter is given: reward, lengths and components, no text."""
    group_id = member.uid.partition("/")[0]
    return Sample(
        group_index=int(row) if (row := group_id.rpartition("-")[2]).isdecimal() else None,
        index=member.index,
        reward=member.reward,
        response_length=member.n_response_tokens,
        weight_versions=[str(version) for _, version, _ in member.trainable_versions],
        metadata={"uid": member.uid, "components": dict(member.components)},
        status=SampleStatus.COMPLETED,
    )
