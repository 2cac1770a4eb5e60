"""JSON format: the response is one valid JSON value, with the required keys and types."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from consumers.rewards.types import RewardInput, option

_FENCE = re.compile(r"```[a-zA-Z]*[ \t]*\r?\n(.*?)```", re.DOTALL)
_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


def reward(sample: RewardInput, *, required: Mapping[str, str] | Sequence[str] = ()) -> dict[str, float]:
    """1.0 iff the response is valid JSON and has all that is `required`, else 0.0.

    The response is the JSON text itself, or holds it in a fenced block (the last one counts). `required`: a list of
    keys, or key → type name (string, number, integer, boolean, array, object, null, any). Components: `valid_json`,
    and `keys`, the share of required keys that are right.
    """
    wanted = option(sample, "required", required)
    wanted = dict(wanted) if isinstance(wanted, Mapping) else dict.fromkeys(wanted, "any")
    for key, kind in wanted.items():
        if kind != "any" and kind not in _TYPES:
            raise ValueError(f"required.{key} = {kind!r}: expected any, {', '.join(_TYPES)}")
    fenced = _FENCE.findall(sample.response)
    try:
        value = json.loads(
            fenced[-1] if fenced else sample.response, parse_constant=_refuse, parse_int=_whole
        )
    except (ValueError, RecursionError):  # the answer's fault: a verdict, not a failure of scoring
        return {"reward": 0.0, "valid_json": 0.0, "keys": 0.0}
    right = sum(
        isinstance(value, dict) and key in value and _is(value[key], kind) for key, kind in wanted.items()
    )
    share = right / len(wanted) if wanted else 1.0
    return {"reward": float(right == len(wanted)), "valid_json": 1.0, "keys": share}


def _is(value: Any, kind: str) -> bool:
    if kind == "any":
        return True
    if isinstance(value, bool):  # Python's bool is an int, JSON's is not a number
        return kind == "boolean"
    return isinstance(value, _TYPES[kind])


def _whole(digits: str) -> int:
    # only the type of a number matters here, and int() of a very long one is slow or refused
    return int(digits) if len(digits) < 100 else 0


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")
