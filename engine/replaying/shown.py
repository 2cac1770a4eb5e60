"""What both reports of a replay share: where it began, on what, and the curves of its picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from engine.picture import Panel
from engine.replaying.steps import Origin
from replay.versus import MEASURES, Compared


class Machines(NamedTuple):
    then: Mapping[str, Any]  # torch, device and threads of the run; {}: not known
    here: Mapping[str, Any]


def panels(
    steps: Sequence[Compared],
    sides: tuple[str, str],
    names: Sequence[str] | Mapping[str, str],
    marks: Sequence[tuple[float, str]] = (),
) -> list[Panel]:
    """One pair of axes for each figure that any step has."""
    xs = [step.step for step in steps]
    found = []
    for name in names:
        if any(has(step, name) for step in steps):
            ys = (
                [step.a.get(name, math.nan) for step in steps],
                [step.b.get(name, math.nan) for step in steps],
            )
            curves = [(side, xs, values) for side, values in zip(sides, ys, strict=True)]
            found.append(Panel(MEASURES[name], "step", MEASURES[name], curves, marks))
    return found


def origin_words(origin: Origin) -> str:
    if origin.checkpoint is None:
        return "the initial weights (model.path)"
    return f"checkpoint {origin.checkpoint.path.name} (step {origin.step}, version {origin.version})"


def origin_dict(origin: Origin) -> dict[str, Any]:
    return {
        "checkpoint": None if origin.checkpoint is None else origin.checkpoint.path.name,
        "step": origin.step,
        "version": origin.version,
        "recorded_digest": origin.published or None,
    }


def number(value: float, digits: int = 4) -> str:
    """ "-" for what was not measured."""
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def encode(report: Mapping[str, Any]) -> str:
    return msgspec.json.format(msgspec.json.encode(report), indent=1).decode() + "\n"


def has(step: Compared, name: str) -> bool:
    return any(not math.isnan(side.get(name, math.nan)) for side in (step.a, step.b))
