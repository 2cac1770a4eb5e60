"""What the metrics topic is told of a step: its figures, the sums of its samples, and how old they were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from consumers.telemetry import SUMS
from engine.trainer.mismatch import Maker, as_columns
from engine.trainer.probe import Probed
from streams.events import BatchCut, Event, Metrics, StepMeasured


def step_events(
    cut: BatchCut,
    metrics: Mapping[str, float],
    sums: NDArray[np.float64],
    makers: Sequence[Maker | None],
    probed: Probed | None,
    *,
    gauges: Mapping[str, float],
    at_ms: int,
) -> list[Event]:
    """StepMeasured, which every figure can be recomputed from, Metrics, and what was probed beside the step.

    `sums`: [n_samples, len(SUMS)]; `makers`: of each of those samples, None where nothing compares. `gauges`: of the
    trainer itself.
    """
    engines, compared = as_columns(makers[: len(sums)])
    measured = StepMeasured(
        step=cut.step,
        epoch=cut.epoch,
        version=cut.version,
        names=list(SUMS),
        n_samples=len(sums),
        sums=sums.astype("<f8").tobytes(),
        values=dict(metrics),
        engines=engines,
        compared=compared,
        at_ms=at_ms,
    )
    values = {**metrics, **gauges, **_of_members(cut)}
    told: list[Event] = [measured, Metrics(source="trainer", step=cut.step, values=values, at_ms=at_ms)]
    if probed is not None:
        told.append(probed.record(epoch=cut.epoch, step=cut.step, names=SUMS, at_ms=at_ms))
    return told


def _of_members(cut: BatchCut) -> dict[str, float]:
    members = [member for group in cut.groups for member in group.members]
    ages = [member.staleness for member in members if member.staleness >= 0]
    values = {
        "reward_mean": sum(member.reward for member in members) / len(members),
        "tokens": float(sum(member.n_trainable_tokens for member in members)),
        "staleness_mean": sum(ages) / max(1, len(ages)),
        "staleness_max": float(max(ages, default=0)),
    }
    for age in sorted(set(ages)):
        values[f"staleness/{age}"] = float(ages.count(age))
    return values
