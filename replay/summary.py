"""What a run came to, in a dozen numbers, computed from its log alone (`summary.json`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from replay.progress import Evaluation, RunProgress
from streams.events import WeightsPublished
from streams.log import EventLog
from streams.topics import Topics

LAST_STEPS = 20  # over which last rewards are averaged
GOOD_REWARD = 0.8


def summarize(log: EventLog, topics: Topics) -> dict[str, Any]:
    """The summary of a run, finished or not. Rewards are None where nothing was evaluated."""
    progress = RunProgress(log, topics)
    progress.catch_up()
    return summary_of(progress)


def summary_of(progress: RunProgress) -> dict[str, Any]:
    view = progress.view
    trained = view.groups_trained()
    uids = Counter(member.uid for _, group in trained for member in group.members)
    ages = [member.staleness for _, group in trained for member in group.members if member.staleness >= 0]
    held_out = progress.evaluations
    training = {
        each.step: each.values["reward_mean"] for each in progress.steps if "reward_mean" in each.values
    }
    training_s = progress.training_s
    tokens = max(int(progress.tokens_generated), progress.tokens_scored())
    return {
        "run": view.run.run if view.run is not None else None,
        "finished": view.finished.reason if view.finished is not None else None,
        "first_reward": held_out[0].reward if held_out else None,
        "last_reward": _mean([each.reward for each in held_out if each.version > view.step - LAST_STEPS]),
        "first_training_reward": next(iter(training.values()), None),
        "last_training_reward": _mean(
            [reward for step, reward in training.items() if step > view.step - LAST_STEPS]
        ),
        "steps": len(view.cuts),
        "steps_skipped": len(view.skipped),
        "version": view.version,
        "wall_s": round(_wall_s(progress), 3),
        f"seconds_to_{GOOD_REWARD}": _seconds_to(GOOD_REWARD, held_out, view.versions),
        "tokens_generated": tokens,
        "tokens_trained": progress.tokens_trained,
        "tokens_per_s": round(tokens / training_s, 1) if training_s else None,
        "groups_trained": len(trained),
        "groups_dropped": dict(sorted(Counter(each.drop.reason for each in view.drops).items())),
        "max_staleness_trained": max(ages, default=None),
        "duplicates_trained": sum(times > 1 for times in uids.values()),
        "trainer_busy": _trainer_busy(progress),
        "engine_busy": _engine_busy(progress),
        "trainer_epochs": len(view.epochs),
    }


def _wall_s(progress: RunProgress) -> float:
    """From the first dispatch, or the trainer's beginning if that came first, to the end."""
    started = progress.view.run
    begins = [progress.first_dispatch_ms(), started.started_ms if started is not None else None]
    began = min((each for each in begins if each is not None), default=progress.ended_ms)
    return max(0, progress.ended_ms - began) / 1000


def _seconds_to(
    reward: float, evaluations: Sequence[Evaluation], versions: Sequence[WeightsPublished]
) -> float | None:
    """Age of the first version whose held-out reward was as high, counted from the run's first version.

    When a version was made matters, not when the evaluator came to it; and nothing can be generated before the
    first one, so the time in which the daemons load does not count.
    """
    made = {version.version: version.published_ms for version in reversed(versions)}
    reached = [each.version for each in evaluations if each.reward >= reward and each.version in made]
    if not reached or not versions:
        return None
    return (made[min(reached)] - versions[0].published_ms) / 1000


def _trainer_busy(progress: RunProgress) -> float | None:
    """Share of the time between steps that the trainer spent in steps."""
    took = sum(each.values.get("step_s", 0.0) for each in progress.steps)
    waited = sum(each.values.get("wait_s", 0.0) for each in progress.steps)
    return round(took / (took + waited), 4) if took + waited > 0 else None


def _engine_busy(progress: RunProgress) -> float | None:
    """Mean share of busy time of all engines while there were steps to be made."""
    cuts = progress.view.cuts
    until = cuts[-1].event.cut_ms if cuts else 0
    return _mean(
        [busy for engine in progress.engines.values() for at_ms, busy in engine.busy if at_ms <= until]
    )


def _mean(values: Sequence[float]) -> float | None:
    return round(fmean(values), 4) if values else None
