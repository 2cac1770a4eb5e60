"""Several limits asked about side by side, the record beside them, and which limit to take.

    recommended = min(smallest limit with trainer wait < 5 %, budget // drift per version)

Where no limit brings the wait below 5 % (too few engines), the knee stands in for the first: beyond it a larger
limit gains nothing and ages everything. The budget is a number of nats a token by the kind of loss: what one sample
may have moved away from the policy that made it before learning suffers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, pstdev

import msgspec

from replay.ages.durations import Crowding, Durations, Recorded
from replay.ages.whatif import Model, ModelStep, Setting

ENOUGH_WAIT = 0.05  # of the time: a trainer that waits less is as good as never waiting
KNEE_SHARE = 0.95  # of the best throughput of the sweep
_FULL = 0.9  # of the slots, on average
_REPEATS = 3
_MOST_SAMPLES = 20_000  # modelled for one limit and repeat, about half a second
_STEPS = (30, 100)  # of one repeat, least and most


class Prediction(msgspec.Struct, frozen=True):
    """What one limit would have done. `wait_share` is of the time, `waste` of the tokens."""

    limit: int
    steps_per_s: float
    spread: float  # standard deviation of steps_per_s over repeats
    wait_share: float
    mean_staleness: float
    max_staleness: int
    waste: float
    slow_ratio: (
        float  # of the slowest quarter: its share of the trained groups by its share of all; 1 is fair
    )
    in_flight: float  # samples, mean


class Budget(msgspec.Struct, frozen=True):
    """How far the policy may have moved from the one that sampled, by the loss in use."""

    nats_per_token: float
    why: str


class Advice(msgspec.Struct, frozen=True):
    limit: int
    why: str


class Sweep(msgspec.Struct, frozen=True):
    """Predictions by limit, ascending; `knee` and `advice` are read off them."""

    predictions: list[Prediction]
    knee: int
    advice: Advice
    recorded: Recorded
    error: float | None  # of the predicted steps/s at the recorded limit, relative to the real one
    pace: bool
    engines: int
    slots: int
    saturated: list[int]  # limits at which every slot is in use most of the time
    crowding: Crowding
    not_modelled: list[str]

    def at(self, limit: int) -> Prediction | None:
        return next((each for each in self.predictions if each.limit == limit), None)


def sweep(
    durations: Durations,
    recorded: Recorded,
    limits: Sequence[int],
    setting: Setting,
    *,
    budget: Budget | None = None,
    drift: float | None = None,
) -> Sweep:
    """Predict every limit of `limits`, the recorded one, and the one that is advised.

    Args:
        setting: the recorded limit with what is asked about beside it (engines, pace).
        drift: nats a token by which the policy moves from one version to the next; None: unknown.
    """
    found = {limit: predict(durations, setting._replace(limit=limit)) for limit in {*limits, recorded.limit}}
    knee = find_knee([found[limit] for limit in sorted(limits)])
    advice = advise([found[limit] for limit in sorted(found)], knee, budget, drift)
    least = setting.steps_per_version - 1
    if advice.limit < least:
        advice = Advice(least, f"{advice.why}; weights.update_weights_interval allows no limit below {least}")
    if advice.limit not in found:
        found[advice.limit] = predict(durations, setting._replace(limit=advice.limit))
    is_as_recorded = setting.pace and setting.engines == durations.engines
    real = recorded.steps_per_s
    error = found[recorded.limit].steps_per_s / real - 1 if is_as_recorded and real > 0 else None
    ascending = [found[limit] for limit in sorted(found)]
    return Sweep(
        predictions=ascending,
        knee=knee,
        advice=advice,
        recorded=recorded,
        error=error,
        pace=setting.pace,
        engines=setting.engines,
        slots=setting.slots,
        saturated=[
            each.limit for each in ascending if each.in_flight > _FULL * setting.slots * setting.engines
        ],
        crowding=durations.crowding,
        not_modelled=not_modelled(durations, setting),
    )


def not_modelled(durations: Durations, setting: Setting) -> list[str]:
    """What the predictions leave out, for the reader to judge them by."""
    crowding = durations.crowding
    left_out = [
        "the policy learns otherwise under another limit: its answers may become longer or shorter",
        "failures, restarts, pauses and re-dispatches; prefix caches",
        "a hiccup that holds up everything at once: it is drawn as if it hit some groups alone, so waste, and what the "
        "slowest lose, come out some percent too large",
    ]
    if not any((crowding.per_sample, crowding.beside_training, crowding.beside_generation)):
        left_out.append(
            "daemons that share cores: the record shows no slowing of one beside the other, so none is assumed; a "
            "limit that overlaps much more, or much less, than the recorded one is predicted too fast, or too slow"
        )
    if setting.engines != durations.engines:
        left_out.append("a log, scorer, collector and feeder that serve another number of engines")
    if setting.engines > durations.partitions:
        left_out.append(
            f"that engines share the partitions: this run has {durations.partitions}, for as many engines at most"
        )
    return left_out


def predict(durations: Durations, setting: Setting) -> Prediction:
    """One limit, as the mean over a few repeats of the model."""
    per_step = setting.batch * max(1, len(durations.groups[0].work_s))
    n_steps = max(_STEPS[0], min(_STEPS[1], _MOST_SAMPLES // per_step))
    fills = 2 * (setting.limit + 1) + 4  # steps until the pipeline has its steady shape
    runs = [
        outcome(setting, Model(durations, setting, seed=seed).run(fills + n_steps)[fills:])
        for seed in range(_REPEATS)
    ]
    speeds = [each.steps_per_s for each in runs]
    return Prediction(
        limit=setting.limit,
        steps_per_s=fmean(speeds),
        spread=pstdev(speeds),
        wait_share=fmean(each.wait_share for each in runs),
        mean_staleness=fmean(each.mean_staleness for each in runs),
        max_staleness=max(each.max_staleness for each in runs),
        waste=fmean(each.waste for each in runs),
        slow_ratio=fmean(each.slow_ratio for each in runs),
        in_flight=fmean(each.in_flight for each in runs),
    )


def outcome(setting: Setting, steps: Sequence[ModelStep]) -> Prediction:
    """What modelled steps add up to, from the first cut to the last."""
    took_s = max(1e-9, steps[-1].at_s - steps[0].at_s)
    later = steps[1:]
    ages = [age for step in later for age in step.staleness]
    n_slow, n_stale = sum(step.n_slow for step in later), sum(step.n_stale for step in later)
    slow_share = (n_slow + sum(step.n_slow_stale for step in later)) / (len(ages) + n_stale)
    used, stale = sum(step.n_tokens for step in later), sum(step.n_stale_tokens for step in later)
    return Prediction(
        limit=setting.limit,
        steps_per_s=len(later) / took_s,
        spread=0.0,
        wait_share=sum(step.wait_s for step in later) / took_s,
        mean_staleness=fmean(ages),
        max_staleness=max(ages),
        waste=stale / max(1e-9, used + stale),
        slow_ratio=n_slow / len(ages) / slow_share if slow_share else 1.0,
        in_flight=(steps[-1].in_flight_s - steps[0].in_flight_s) / took_s,
    )


def find_knee(predictions: Sequence[Prediction]) -> int:
    """The smallest limit whose throughput is close to the best of the sweep."""
    best = max(each.steps_per_s for each in predictions)
    return min(each.limit for each in predictions if each.steps_per_s >= KNEE_SHARE * best)


def advise(
    predictions: Sequence[Prediction], knee: int, budget: Budget | None, drift: float | None
) -> Advice:
    """The smallest limit that keeps the trainer busy, capped by what the loss can bear."""
    busy = [each.limit for each in predictions if each.wait_share < ENOUGH_WAIT]
    if busy:
        wanted = Advice(min(busy), f"the smallest with trainer wait below {ENOUGH_WAIT:.0%}")
    else:
        least = min(each.wait_share for each in predictions)
        wanted = Advice(
            knee,
            f"the knee: no limit brings the trainer's wait below {ENOUGH_WAIT:.0%} (at best {least:.0%}), for the "
            "engines are too slow or too few",
        )
    if budget is None:
        return wanted
    if budget.nats_per_token <= 0:
        return Advice(0, f"nothing older is safe: {budget.why}")
    if drift is None:
        unknown = (
            "nothing older than its version was trained, so how far the policy drifts in one is not known"
        )
        return Advice(wanted.limit, f"{wanted.why}; not capped by drift: {unknown}")
    bears = math.floor(budget.nats_per_token / drift) if drift > 0 else wanted.limit
    says = f"{drift:.3f} nat/token a version against a budget of {budget.nats_per_token:g} ({budget.why})"
    if bears < wanted.limit:
        return Advice(bears, f"capped by drift: {says}; by throughput alone it would be {wanted.limit}")
    return Advice(wanted.limit, f"{wanted.why}; the drift allows {bears}: {says}")
