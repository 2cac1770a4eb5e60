"""What a reward function is given, and what scoring a sample ends in.

    reward(sample: RewardInput) -> float | {"reward": float, "<component>": float, …} | None

A function is pure: the same sample gives the same reward. It may be called again (after a kill, or when a slow
sample held up its neighbours). None means "no verdict" and becomes `reward_missing`, never 0.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, Optional

import msgspec
import numpy as np

REWARD_TIMEOUT, REWARD_ERROR, REWARD_MISSING = "reward_timeout", "reward_error", "reward_missing"
REWARD_NONFINITE, WORKER_DIED = "reward_nonfinite", "worker_died"


class RewardInput(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One finished sample. L response tokens."""

    uid: str
    group_id: str
    index: int
    prompt: Any = ""  # str, or a list of chat messages: as in the task
    response: str = ""
    response_ids: Optional[np.ndarray] = None  # noqa: UP045  int32 [L]
    label: Any = None
    metadata: dict[str, Any] = {}
    finish_reason: str = ""
    response_length: int = 0  # tokens


class Scored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    reward: float  # finite
    components: dict[str, float] = {}  # finite
    seconds: float = 0.0  # of the call; for a group's call, of the whole group


class NotScored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """No verdict. `reason` is one of the words above, `detail` a sentence for people."""

    reason: str
    detail: str = ""


Outcome = Scored | NotScored
RewardFunction = Callable[..., Any]


def option(sample: RewardInput, name: str, given: Any) -> Any:
    """The value of a built-in's option: the sample's metadata first, then what the call was given."""
    return sample.metadata.get(name, given)


def encode_hook(value: Any) -> Any:
    """msgspec enc_hook: numpy values as plain ones (arrays as int32 bytes)."""
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value, dtype="<i4").tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a value of type {type(value).__name__} cannot be sent to a scoring worker")


def decode_hook(kind: type, value: Any) -> Any:
    """msgspec dec_hook, the other way round."""
    if kind is np.ndarray:
        return np.frombuffer(value, "<i4")
    raise TypeError(f"cannot decode a {kind}")


def judge(result: Any, seconds: float, reward_key: str = "reward") -> Outcome:
    """Turn what a reward function returned into an outcome.

    Components that are no finite numbers are left out: a NaN would poison logged means, a text is no metric.
    """
    if result is None:
        return NotScored(REWARD_MISSING, "the function returned None")
    if not isinstance(result, Mapping):
        return _scored(result, {}, seconds, "the function returned")
    if reward_key not in result:
        keys = ", ".join(sorted(map(str, result))) or "none"
        return NotScored(
            REWARD_MISSING,
            f"the returned dict has no {reward_key!r} (keys: {keys}); set the option reward_key to the right one",
        )
    value = result[reward_key]
    if value is None:
        return NotScored(REWARD_MISSING, f"the returned dict has None at {reward_key!r}")
    components = {
        str(name): number
        for name, each in result.items()
        if name != reward_key and (number := _number(each)) is not None and math.isfinite(number)
    }
    return _scored(value, components, seconds, f"the returned dict has at {reward_key!r}")


def _scored(value: Any, components: dict[str, float], seconds: float, where: str) -> Outcome:
    number = _number(value)
    if number is None:
        return NotScored(
            REWARD_ERROR,
            f"{where} {type(value).__name__} {str(value)[:80]!r}; a number, a dict or None was needed",
        )
    if not math.isfinite(number):
        return NotScored(REWARD_NONFINITE, f"{where} {number}; a finite number was needed")
    return Scored(number, components, seconds)


def _number(value: Any) -> float | None:
    """As a float: int, float, bool, numpy and Fraction scalars, one-element arrays and tensors; else None."""
    if isinstance(value, (str, bytes, complex)):
        return None
    if not isinstance(value, numbers.Number):
        if getattr(value, "size", None) == 1 or callable(getattr(value, "item", None)):
            try:
                value = value.item()
            except Exception:  # a tensor of several elements; any library's own error type
                return None
        if not isinstance(value, numbers.Number) or isinstance(value, complex):
            return None
    try:
        return float(value)  # pyright: ignore[reportArgumentType]
    except OverflowError:  # an int beyond float's range
        return math.inf
    except (TypeError, ValueError):
        return None
