"""The report and the sweep as tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from replay.ages.history import STALE, USED
from replay.ages.measure import Ages, LengthClass, Report, Spread
from replay.ages.sweep import ENOUGH_WAIT, Prediction, Sweep
from replay.topics import columns

_ROWS_SHOWN = 10


def report_text(report: Report) -> str:
    parts = [
        _head(report),
        _gaps(report),
        _ages(report),
        _outcomes(report),
        _classes("generation of the slowest sample, s", report.by_seconds),
        _classes("longest response, tokens", report.by_tokens),
        _rows(report),
        _costs(report),
        _gauges(report),
        _learning(report),
        _smaller(report),
    ]
    return "\n".join(part for part in parts if part)


def _head(report: Report) -> str:
    steps = f"{report.steps} step{'s' if report.steps != 1 else ''}"
    rule = f"limit {_limits(report)}, on_stale {report.on_stale}"
    return f"run {report.run} · {steps}, version {report.version} · {rule}\n"


def _limits(report: Report) -> str:
    if len(report.limits) == 1:
        return str(report.limit)
    changes = ", ".join(f"{limit} from step {step}" for step, limit in report.limits)
    return f"{report.limit} ({changes})"


def _gaps(report: Report) -> str:
    lines = []
    if report.unreadable:
        lines.append(
            f"{report.unreadable} records cannot be read and are left out: millstream tail shows them\n"
        )
    if report.removed:
        lines.append(f"retention has removed {report.removed} records: what follows is of the rest\n")
    return "".join(lines)


def _ages(report: Report) -> str:
    table: list[tuple[str, ...]] = [("AGE WHEN THE GROUP ENDED", "TRAINED", "DROPPED AS STALE")]
    rows = {
        "samples": lambda ages: str(ages.samples),
        "staleness: mean / most, versions": lambda ages: f"{ages.mean:.2f} / {ages.most}",
        "  of it in flight": lambda ages: f"{ages.in_flight_versions:.2f}",
        "  of it in queue": lambda ages: f"{ages.in_queue_versions:.2f}",
        "in flight: p50 / p95 / most, s": lambda ages: _spread(ages.in_flight_s),
        "  of it waiting for slot or version": lambda ages: _spread(ages.waiting_s),
        "in queue: p50 / p95 / most, s": lambda ages: _spread(ages.in_queue_s),
    }
    for name, show in rows.items():
        table.append((name, show(report.trained), show(report.dropped) if report.dropped.samples else "-"))
    shares = ", ".join(f"{age}: {share:.0%}" for age, share in _shares(report.trained))
    return f"{columns(table)}samples trained by staleness: {shares or 'none'}\n"


def _shares(ages: Ages) -> list[tuple[int, float]]:
    return [(age, count / ages.samples) for age, count in ages.staleness.items()]


def _spread(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.p50:.2f} / {spread.p95:.2f} / {spread.most:.2f}"


def _outcomes(report: Report) -> str:
    total = max(1, sum(report.outcomes.values()))
    shown = ", ".join(f"{name} {count} ({count / total:.1%})" for name, count in report.outcomes.items())
    return f"groups: {shown}\n"


def _classes(measure: str, classes: Sequence[LengthClass]) -> str:
    if len(classes) < 2:
        return f"groups by {measure}: all alike\n" if classes else ""
    table: list[tuple[str, ...]] = [
        ("GROUPS", "UP TO", "COUNT", "USED", "STALE", "OTHER", "TRAINED", "OF TRAINED", "OF ALL")
    ]
    for each in classes:
        used, stale = each.outcomes.get(USED, 0), each.outcomes.get(STALE, 0)
        shares = (each.share_trained, each.share_of_trained, each.share_of_all)
        counts = (each.groups, used, stale, each.groups - used - stale)
        table.append(
            (each.name, f"{each.up_to:.3g}", *map(str, counts), *(f"{share:.1%}" for share in shares))
        )
    longest, shortest = classes[-1].share_trained, classes[0].share_trained
    bias = ""
    if longest < shortest - 0.05:
        bias = f"what trains leans to the short: {longest:.0%} of the longest train, {shortest:.0%} of the shortest\n"
    return f"by {measure}\n{columns(table)}{bias}"


def _rows(report: Report) -> str:
    if not report.rows:
        return "rows dropped as stale whenever they were tried: none\n"
    table: list[tuple[str, ...]] = [
        ("ROW", "STALE IN A ROW", "TRAINED BEFORE", "STARVED", "SLOWEST SAMPLE, S", "GROUPS")
    ]
    for each in report.rows[:_ROWS_SHOWN]:
        starved, seconds = "yes" if each.is_starved else "", f"{each.generation_s:.2f}"
        table.append(
            (str(each.row), str(each.stale), str(each.trained), starved, seconds, " ".join(each.groups))
        )
    more = len(report.rows) - _ROWS_SHOWN
    return f"rows dropped as stale whenever they were tried\n{columns(table)}" + (
        f"and {more} more (--json has them all)\n" if more > 0 else ""
    )


def _costs(report: Report) -> str:
    waste = report.waste
    by_reason = ", ".join(f"{reason} {count}" for reason, count in waste.dropped.items() if count)
    lines = [
        f"tokens: {waste.generated} generated, {waste.trained} trained, waste {waste.share:.1%}"
        + (f" ({by_reason})" if by_reason else "")
    ]
    times = report.times
    if times is not None:
        lines.append(
            f"trainer: {times.steps_per_s:.3f} steps/s; in a step {times.training:.0%} of the time, waiting for "
            f"groups {times.waiting:.0%}, between the two {times.overhead:.0%}"
        )
        idle = "" if times.engine_idle is None else f"engines: idle {times.engine_idle:.0%} of the time, "
        lines.append(f"{idle or 'engines: '}{times.in_flight:.0f} samples in flight on average")
    return "\n".join(lines) + "\n"


# gauge of consumers/telemetry.py → its head
_GAUGES = {
    "mean_abs_log_ratio": "MEAN |LR|",
    "max_abs_log_ratio": "MAX |LR|",
    "kl_k3": "KL K3",
    "ess_token": "ESS TOKEN",
    "ess_sequence": "ESS SEQUENCE",
    "ratio_outside": "OUTSIDE .8-1.2",
    "clip_fraction": "CLIPPED",
    "masked_fraction": "MASKED",
}


def _values(values: dict[str, float]) -> list[str]:
    return [f"{values[name]:.4f}" if name in values else "-" for name in _GAUGES]


def _gauges(report: Report) -> str:
    if not report.gauges:
        return "off-policy gauges: no step of this run has been measured (StepMeasured in topic metrics)\n"
    table: list[tuple[str, ...]] = [("STALENESS", "SAMPLES", "TOKENS", *_GAUGES.values())]
    for each in report.gauges:
        table.append((str(each.staleness), str(each.samples), str(each.tokens), *_values(each.values)))
    lines = [columns(table)]
    if report.mismatch:
        lines.append(
            f"mismatch of engine and trainer: {report.mismatch['mean_abs_log_ratio']:.2g} nat/token\n"
        )
    else:
        lines.append("mismatch of engine and trainer: not known, no sample of staleness 0 was trained\n")
    if report.drift is not None:
        drift = report.drift
        lines.append(
            f"drift: {drift.per_version:.3f} nat/token a version in steps {drift.first_step}-{drift.last_step}, "
            f"where it was largest; {drift.whole_run:.3f} over all\n"
        )
    if report.unmeasured:
        lines.append(f"steps without a measurement: {len(report.unmeasured)}\n")
    return "".join(lines)


def _learning(report: Report) -> str:
    learning = report.learning
    error = "" if learning.reward_slope.error is None else f" ± {learning.reward_slope.error:.5f}"
    return (
        f"beside them, the last {learning.steps} steps: reward {learning.reward:.3f}, slope "
        f"{learning.reward_slope.per_step:+.5f}{error} a step, mean staleness {learning.mean_staleness:.2f} "
        "(ESS, KL and clipping look better when learning stalls)\n"
    )


def _smaller(report: Report) -> str:
    if not report.if_smaller:
        return ""
    table: list[tuple[str, ...]] = [("OF WHAT TRAINED", "GROUPS", "TOKENS", *_GAUGES.values())]
    for each in report.if_smaller:
        shares = (f"{each.groups_share:.1%}", f"{each.tokens_share:.1%}")
        table.append((f"within limit {each.limit}", *shares, *_values(each.values)))
    return columns(table)


# ---------------------------------------------------------------- the sweep
def sweep_text(sweep: Sweep) -> str:
    recorded = sweep.recorded
    table: list[tuple[str, ...]] = [
        ("LIMIT", "STEPS/S", "±", "WAIT", "MEAN AGE", "MAX AGE", "WASTE", "SLOWEST QUARTER", "IN FLIGHT", "")
    ]
    for each in sweep.predictions:
        table.append((*_prediction(each), _marks(each, sweep)))
    table.append(
        (
            "real",
            f"{recorded.steps_per_s:.3f}",
            "",
            f"{recorded.wait_share:.1%}",
            f"{recorded.mean_staleness:.2f}",
            str(recorded.max_staleness),
            f"{recorded.waste:.1%}",
            f"{recorded.slow_ratio:.0%}",
            f"{recorded.in_flight:.0f}",
            f"at limit {recorded.limit}, steps {recorded.first_step}-{recorded.last_step}",
        )
    )
    pace = "paced" if sweep.pace else "not paced: engines never wait"
    lines = [
        f"what if the limit were … ({sweep.engines} engine{'s' if sweep.engines != 1 else ''}, {pace})",
        columns(table).rstrip("\n"),
        f"wait: of the time, the trainer without enough groups (good: below {ENOUGH_WAIT:.0%}); slowest quarter: how "
        "much of its fair share of the trained groups it has",
        f"error at limit {recorded.limit}: "
        + (
            f"{sweep.error:+.1%} steps/s" if sweep.error is not None else "not known, nothing was recorded so"
        ),
        _saturated(sweep),
        f"knee: {sweep.knee}",
        f"recommended: {sweep.advice.limit}: {sweep.advice.why}",
        _crowding(sweep),
        *(f"not modelled: {each}" for each in sweep.not_modelled),
    ]
    return "\n".join(line for line in lines if line) + "\n"


def _prediction(each: Prediction) -> tuple[str, ...]:
    return (
        str(each.limit),
        f"{each.steps_per_s:.3f}",
        f"{each.spread:.3f}",
        f"{each.wait_share:.1%}",
        f"{each.mean_staleness:.2f}",
        str(each.max_staleness),
        f"{each.waste:.1%}",
        f"{each.slow_ratio:.0%}",
        f"{each.in_flight:.0f}",
    )


def _marks(each: Prediction, sweep: Sweep) -> str:
    marks = {"recorded": sweep.recorded.limit, "knee": sweep.knee, "recommended": sweep.advice.limit}
    return ", ".join(name for name, limit in marks.items() if limit == each.limit)


def _saturated(sweep: Sweep) -> str:
    if not sweep.saturated:
        return ""
    return (
        f"at limit {', '.join(map(str, sweep.saturated))} all {sweep.slots} slots of an engine are in use most of the "
        "time: more of them (rollout.max_concurrency) or more engines would be faster"
    )


def _crowding(sweep: Sweep) -> str:
    crowding = sweep.crowding
    found = {
        "generation slower by {:.2%} for each sample in flight on its engine": crowding.per_sample,
        "generation slower by {:.0%} beside training": crowding.beside_training,
        "training slower by {:.0%} beside generation": crowding.beside_generation,
    }
    shown = [text.format(slope) for text, slope in found.items() if slope > 0]
    return f"measured and modelled: {'; '.join(shown)}" if shown else ""
