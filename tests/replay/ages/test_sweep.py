"""Which limit is recommended, and why."""

from __future__ import annotations

import pytest

from replay.ages.crowding import Crowding
from replay.ages.durations import measure_durations
from replay.ages.history import read_history
from replay.ages.sweep import Budget, Prediction, Sweep, advise, find_knee, sweep
from replay.ages.text import sweep_text
from replay.ages.whatif import Setting
from tests.support.ages import synchronous

CLIPPED = Budget(0.25, "clipped")


def predicted(limit: int, steps_per_s: float, wait_share: float) -> Prediction:
    return Prediction(limit, steps_per_s, 0.0, wait_share, float(limit), limit, 0.0, 1.0, 1.0)


CURVE = [predicted(0, 0.2, 0.8), predicted(1, 0.5, 0.5), predicted(2, 0.9, 0.1), predicted(4, 1.0, 0.01)]


def test_the_knee_is_the_smallest_limit_near_the_best_throughput():
    assert find_knee(CURVE) == 4
    assert find_knee([*CURVE[:2], predicted(2, 0.96, 0.06), CURVE[3]]) == 2


def test_without_drift_the_smallest_limit_that_keeps_the_trainer_busy_is_taken():
    assert advise(CURVE, 4, None, None).limit == 4
    assert advise(CURVE, 4, CLIPPED, 0.05).limit == 4


def test_the_drift_budget_caps_it():
    advice = advise(CURVE, 4, CLIPPED, 0.077)
    assert advice.limit == 3
    assert "capped by drift: 0.077" in advice.why and "by throughput alone it would be 4" in advice.why


def test_a_loss_that_ignores_the_behaviour_policy_bears_no_age():
    assert advise(CURVE, 4, Budget(0.0, "it does not look at it"), 0.001).limit == 0


def test_an_unknown_drift_is_said():
    advice = advise(CURVE, 4, CLIPPED, None)
    assert advice.limit == 4 and "not capped by drift" in advice.why


def test_where_the_engines_are_too_slow_the_knee_stands_in():
    slow = [predicted(0, 0.1, 0.9), predicted(1, 0.19, 0.8), predicted(2, 0.2, 0.7)]
    advice = advise(slow, 1, CLIPPED, 0.01)
    assert advice.limit == 1 and "too slow or too few" in advice.why


def swept(limits: list[int], **changes) -> Sweep:
    run = synchronous(20, generation_s=3, collect_s=0.5, train_s=1, publish_s=0.25, sync_s=0.25)
    times, recorded = measure_durations(read_history(run.log, run.topics))
    asked = Setting(limit=0, engines=1, slots=64, batch=2)
    return sweep(times._replace(crowding=Crowding()), recorded, limits, asked._replace(**changes))


def test_the_recorded_and_the_advised_limit_are_among_the_predictions():
    found = swept([1, 8])
    assert [each.limit for each in found.predictions] == [0, 1, 8]
    assert found.error == pytest.approx(0.0, abs=1e-6)
    assert (found.knee, found.advice.limit) == (8, 8)


def test_a_limit_that_the_update_interval_forbids_is_not_advised():
    budget = Budget(0.0, "it does not look at it")
    run = synchronous(20, generation_s=3, collect_s=0.5, train_s=1, publish_s=0.25, sync_s=0.25, limit=2)
    times, recorded = measure_durations(read_history(run.log, run.topics))
    asked = Setting(limit=2, engines=1, slots=64, batch=2, steps_per_version=3)
    found = sweep(times, recorded, [2, 4], asked, budget=budget)
    assert found.advice.limit == 2 and "no limit below 2" in found.advice.why


def test_the_table_shows_the_prediction_beside_what_happened():
    text = sweep_text(swept([0, 8]))
    assert "error at limit 0: +0.0% steps/s" in text
    assert "0.200" in text.splitlines()[2]  # predicted at 0
    (real,) = [line for line in text.splitlines() if line.startswith("real")]
    assert "0.200" in real and "at limit 0, steps 3-20" in real
    assert "recommended: 8" in text and "not modelled: daemons that share cores" in text


def test_another_number_of_engines_is_said_to_be_no_test_of_the_model():
    text = sweep_text(swept([0], engines=3))
    assert "3 engines" in text and "error at limit 0: not known" in text
    assert "for as many engines at most" in text
