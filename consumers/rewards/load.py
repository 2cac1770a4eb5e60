"""From a name in the configuration to a function that can be called, checked before the first sample.

    "numeric" | "module:function" ──► resolve ──► check the signature ──► Scorer ──► call_sync ──► outcomes

    native         reward(sample, **options)         one RewardInput, or a list of a group's with `group = true`
    Miles, Slime   f(args, sample), f(args, samples) recognised by the first parameter's name, `args`

Every refusal is a ConfigError that says what was needed, what came and how to mend it.
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import importlib
import inspect
import os
import re
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from consumers import rewards
from consumers.rewards.adapter import make_args, sample_from_input
from consumers.rewards.types import REWARD_ERROR, REWARD_TIMEOUT, NotScored, Outcome, RewardInput, judge
from streams.errors import ConfigError

_HERE = os.path.dirname(__file__)
_ONE, _MANY = ("sample", "input"), ("samples", "inputs")


class Scorer(NamedTuple):
    """A reward function ready to be called with one RewardInput, or with a list if `is_group`."""

    name: str
    call: Callable[[Any], Any]  # returns the result, or an awaitable of it
    is_async: bool
    is_group: bool
    is_built_in: bool
    reward_key: str  # which entry of a returned dict is the reward


def load_reward(
    path: str,
    options: Mapping[str, Any] | None = None,
    *,
    group: bool = False,
    config: Mapping[str, Any] | None = None,
) -> Scorer:
    """Resolve a reward.

    `options` are keyword arguments of a native function, and attributes of `args` for a Miles or Slime one. The
    option `reward_key` is not handed on: it names the entry of a returned dict that is the reward.
    """
    given = dict(options or {})
    reward_key = given.pop("reward_key", None) or "reward"
    is_built_in = path in rewards.BUILT_INS
    function = rewards.BUILT_INS[path] if is_built_in else resolve(path, "reward.function", rewards.BUILT_INS)
    names = _positional(function, path)
    if names[:1] == ["args"]:
        _check_count(path, names, ("args", "samples" if group else "sample"))
        args = make_args(config, {**given, "reward_key": reward_key if reward_key != "reward" else None})
        call = _miles_group(function, args) if group else _miles_one(function, args)
    else:
        _check_count(path, names, ("samples" if group else "sample",))
        _check_options(path, function, given)
        call = _native(function, given)
    if is_built_in and group:
        raise ConfigError(f"reward.group = true: the built-in {path!r} scores one sample; remove it")
    _check_plural(path, names[-1], group)
    return Scorer(path, call, is_async(function), group, is_built_in, reward_key)


def resolve(path: str, key: str, built_ins: Mapping[str, Any]) -> Any:
    """The callable behind `module:function`. `key` is the setting that names it, for the message."""
    known = ", ".join(built_ins)
    module_name, colon, attribute = path.partition(":")
    if not colon:
        near = difflib.get_close_matches(path, built_ins, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        if "." in path and not near:
            hint = f"; did you mean {':'.join(path.rsplit('.', 1))!r}?"
        raise ConfigError(f"{key} = {path!r}: needed module:function or a built-in ({known}){hint}")
    if not module_name or not attribute:
        raise ConfigError(
            f"{key} = {path!r}: both sides of the colon are needed, as in my_package.rewards:score"
        )
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(missing + "."):
            raise ConfigError(
                f"{key} = {path!r}: module {module_name} needs {missing}, which is not installed"
            ) from error
        raise ConfigError(
            f"{key} = {path!r}: no module {missing}; install its package, or put its folder on PYTHONPATH"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"{key} = {path!r}: importing {module_name} failed: {type(error).__name__}: {error}"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [name for name, value in vars(found).items() if _is_own(value, module_name, name)]
            near = difflib.get_close_matches(part, public, 1) or public[:8]
            has = f"; it has {', '.join(near)}" if near else "; it has no public function"
            raise ConfigError(f"{key} = {path!r}: {module_name} has no {part!r}{has}")
        found = getattr(found, part)
    if inspect.isclass(found):
        raise ConfigError(f"{key} = {path!r}: is a class; name a function, or an instance with __call__")
    if not callable(found):
        raise ConfigError(f"{key} = {path!r}: is a {type(found).__name__}, not callable; name a function")
    return found


def _is_own(value: Any, module_name: str, name: str) -> bool:
    return callable(value) and not name.startswith("_") and getattr(value, "__module__", "") == module_name


def is_async(function: Any) -> bool:
    """True for `async def`, also behind functools.partial or __call__."""
    while isinstance(function, functools.partial):
        function = function.func
    called = getattr(type(function), "__call__", None)  # noqa: B004  of an instance
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


def _positional(function: Any, path: str) -> list[str]:
    """Names of the parameters that a positional call must fill."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"reward.function = {path!r}: its signature cannot be read ({error}); wrap it"
        ) from error
    needed = [
        each.name
        for each in parameters
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) and each.default is each.empty
    ]
    if not needed and any(each.kind == each.VAR_POSITIONAL for each in parameters):
        raise ConfigError(
            f"reward.function = {path!r}: takes *args only, so its form cannot be told; name the parameters: "
            "(sample), or (args, sample) for a Miles or Slime function"
        )
    return needed


def _check_count(path: str, names: Sequence[str], wanted: Sequence[str]) -> None:
    if len(names) == len(wanted):
        return
    came = f"({', '.join(names)})"
    if wanted[0] != "args" and len(names) == 2:
        mend = f"; for a Miles or Slime function call the first one args: (args, {wanted[0]})"
    else:
        mend = "; give the others defaults and set them in reward.options" if len(names) > len(wanted) else ""
    raise ConfigError(
        f"reward.function = {path!r}: needed positional parameters ({', '.join(wanted)}), it takes {came}{mend}"
    )


def _check_options(path: str, function: Any, options: Mapping[str, Any]) -> None:
    parameters = list(inspect.signature(function).parameters.values())
    if any(each.kind == each.VAR_KEYWORD for each in parameters):
        return
    known = [
        each.name for each in parameters if each.default is not each.empty or each.kind == each.KEYWORD_ONLY
    ]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join([*known, 'reward_key'])}"
            raise ConfigError(f"reward.options.{name}: {path} takes no such option; {hint}")
    for each in parameters:
        if each.kind == each.KEYWORD_ONLY and each.default is each.empty and each.name not in options:
            raise ConfigError(f"reward.options.{each.name}: missing; {path} needs it")


def _check_plural(path: str, name: str, group: bool) -> None:
    """The contract's own names tell a per-sample function from a per-group one."""
    if group and re.fullmatch("|".join(_ONE), name):
        raise ConfigError(
            f"reward.group = true, but {path} takes one {name}; set reward.group = false, or take a list `{name}s`"
        )
    if not group and re.fullmatch("|".join(_MANY), name):
        raise ConfigError(f"reward.group = false, but {path} takes a list `{name}`; set reward.group = true")


def _native(function: Any, options: dict[str, Any]) -> Callable[[Any], Any]:
    return lambda given: function(given, **options)


def _miles_one(function: Any, args: Any) -> Callable[[Any], Any]:
    def call(sample: RewardInput) -> Any:
        return function(args, sample_from_input(sample))

    return call


def _miles_group(function: Any, args: Any) -> Callable[[Any], Any]:
    def call(samples: Sequence[RewardInput]) -> Any:
        return function(args, [sample_from_input(each) for each in samples])

    return call


# ---------------------------------------------------------------- calling it
def call_sync(scorer: Scorer, inputs: list[RewardInput], timeout_s: float | None = None) -> list[Outcome]:
    begun = time.perf_counter()
    try:
        result = scorer.call(inputs if scorer.is_group else inputs[0])
        if asyncio.iscoroutine(result):  # a plain function that returns another's coroutine
            result = asyncio.run(result)
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        return [NotScored(REWARD_ERROR, describe(error))] * len(inputs)
    seconds = time.perf_counter() - begun
    if timeout_s is not None and seconds > timeout_s:
        return [NotScored(REWARD_TIMEOUT, f"took {seconds:.3g} s, over {timeout_s:g} s")] * len(inputs)
    return outcomes_of(scorer, inputs, result, seconds)


def outcomes_of(scorer: Scorer, inputs: list[RewardInput], result: Any, seconds: float) -> list[Outcome]:
    if not scorer.is_group:
        return [judge(result, seconds, scorer.reward_key)]
    if isinstance(result, (str, bytes, Mapping)) or not hasattr(result, "__len__"):
        detail = (
            f"the function returned {type(result).__name__} for a group; a list of {len(inputs)} was needed"
        )
        return [NotScored(REWARD_ERROR, detail)] * len(inputs)
    if len(result) != len(inputs):
        # none of them can be trusted: which sample the missing one belongs to is not known
        detail = f"the function returned {len(result)} rewards for a group of {len(inputs)}"
        return [NotScored(REWARD_ERROR, detail)] * len(inputs)
    return [judge(each, seconds, scorer.reward_key) for each in result]


def describe(error: BaseException) -> str:
    """Type, message and place of an exception in user code, in at most 2000 characters."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if os.path.dirname(frame.filename) != _HERE
    ]
    at = f" (line {frames[-1].lineno} of {frames[-1].filename}, {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {str(error)[:1500]}{at}"[:2000]
