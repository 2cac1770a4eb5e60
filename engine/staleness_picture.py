"""The picture of a sweep: what each limit would do, and beside it how the recorded run learnt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import nan

from engine.picture import Panel
from replay.ages.durations import Recorded
from replay.ages.history import History
from replay.ages.measure import Report
from replay.ages.sweep import Prediction, Sweep

_SMOOTH = 10  # steps of the running mean


def panels(history: History, report: Report, sweep: Sweep) -> list[Panel]:
    """Throughput, wait, age and waste against the limit; drift by age; reward and age by step."""
    return [
        _against(sweep, "throughput", "steps/s", {"": (lambda each: each.steps_per_s)}),
        _against(
            sweep, "trainer without enough groups", "share of the time", {"": lambda each: each.wait_share}
        ),
        _against(
            sweep,
            "age of what trains",
            "versions",
            {"mean": lambda each: each.mean_staleness, "max": lambda each: each.max_staleness},
        ),
        _against(
            sweep,
            "waste, and who is trained",
            "share of the tokens; of a fair share",
            {
                "tokens wasted": lambda each: each.waste,
                "fair share of the slowest": lambda each: each.slow_ratio,
            },
        ),
        _drift(report),
        _learning(history),
    ]


_Read = Callable[["Prediction | Recorded"], float]


def _against(sweep: Sweep, title: str, label: str, readings: dict[str, _Read]) -> Panel:
    """Predictions as lines, what really happened as points."""
    limits = [float(each.limit) for each in sweep.predictions]
    curves = []
    for name, read in readings.items():
        curves.append((f"{name} predicted".strip(), limits, [read(each) for each in sweep.predictions]))
    for name, read in readings.items():
        curves.append((f"{name} real".strip(), [float(sweep.recorded.limit)], [read(sweep.recorded)]))
    marks: list[tuple[float, str]] = [(float(sweep.knee), "knee")]
    if sweep.advice.limit == sweep.knee:
        marks = [(float(sweep.knee), "knee, recommended")]
    else:
        marks.append((float(sweep.advice.limit), "recommended"))
    return Panel(title, "limit", label, curves, marks)


def _drift(report: Report) -> Panel:
    ages = [float(each.staleness) for each in report.gauges]
    moved = [each.values.get("mean_abs_log_ratio", nan) for each in report.gauges]
    clipped = [each.values.get("clip_fraction", nan) for each in report.gauges]
    curves = [("mean |log ratio|, nat/token", ages, moved), ("clipped share", ages, clipped)]
    return Panel("how far the policy had moved", "staleness of the sample", "", curves)


def _learning(history: History) -> Panel:
    steps = [float(step.cut.step) for step in history.steps]
    rewards = _running([step.reward for step in history.steps])
    ages = []
    for step in history.steps:
        each = [m.staleness for group in step.cut.groups for m in group.members if m.staleness >= 0]
        ages.append(sum(each) / max(1, len(each)))
    curves = [("reward", steps, rewards), ("mean staleness", steps, _running(ages))]
    return Panel(f"the recorded run, means of {_SMOOTH} steps", "step", "", curves)


def _running(values: Sequence[float]) -> list[float]:
    """Mean of each value and those just before it."""
    return [
        sum(values[max(0, place - _SMOOTH + 1) : place + 1]) / min(place + 1, _SMOOTH)
        for place in range(len(values))
    ]
