"""Two sides of a step: figures over the same samples, worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from consumers.telemetry import trajectory_sums
from replay.versus import Compared, Taken, averages, compare, end_of, far_from, learnt, measures
from tests.support.recorded import cut

CUT = cut(3, [1, 2], [0])  # two groups with rewards 0 and 1: advantages −1, 1, −1, 1


def sums(*log_ratios: list[float]) -> np.ndarray:
    """The sums of samples with these log-ratios."""
    flat = np.array([each for sample in log_ratios for each in sample])
    sample = np.array([place for place, each in enumerate(log_ratios) for _ in each], dtype=np.int64)
    return trajectory_sums(flat, sample, len(log_ratios))


def test_learnt_is_the_advantage_weighted_log_ratio_of_a_token():
    table = sums([-0.1, -0.1], [0.3], [0.2], [0.1, 0.3])
    advantages = np.array([-1.0, 1.0, -1.0, 1.0])
    # (−1)(−0.2) + 0.3 − 0.2 + 0.4 over 6 tokens
    assert learnt(table, advantages) == pytest.approx(0.7 / 6)
    assert math.isnan(learnt(np.zeros((2, 10)), np.zeros(2)))


def test_gauges_of_a_count_only_the_samples_that_b_trained_on():
    table = sums([0.5], [0.5], [0.1], [0.2])
    a = Taken(CUT, {"loss": 2.0, "grad_norm": 3.0}, table)
    only_second = cut(3, [2], [0])
    b = Taken(only_second, {"loss": 1.0, "grad_norm": 1.5}, sums([0.1], [0.4]))
    found = compare(a, b)
    assert found.step == 3
    assert (found.a["loss"], found.a["grad_norm"], found.b["loss"]) == (2.0, 3.0, 1.0)
    assert found.a["mean_abs_log_ratio"] == pytest.approx(0.15)
    assert found.b["mean_abs_log_ratio"] == pytest.approx(0.25)
    assert found.a["learnt"] == pytest.approx((0.2 - 0.1) / 2)
    assert found.b["learnt"] == pytest.approx((0.4 - 0.1) / 2)
    assert math.isnan(found.a["entropy"]), "not recorded"


def test_a_side_that_skipped_the_step_has_no_figures():
    found = measures(Taken(CUT, {}, np.zeros((0, 10))), {"0-1/0/0"})
    assert all(math.isnan(value) for value in found.values())


def test_a_backend_without_log_probs_has_its_metrics_alone():
    found = measures(Taken(CUT, {"loss": 0.5}, np.zeros((0, 10))), {"0-1/0/0"})
    assert found["loss"] == 0.5 and math.isnan(found["learnt"])


def step(number: int, a: float, b: float) -> Compared:
    empty = dict.fromkeys(
        ("loss", "entropy", "mean_abs_log_ratio", "kl_k3", "clip_fraction", "learnt"), math.nan
    )
    return Compared(
        number, empty | {"grad_norm": a, "ess_token": 1.0}, empty | {"grad_norm": b, "ess_token": b / 10}
    )


def test_means_are_over_the_last_quarter_of_the_steps_that_both_took():
    steps = [step(number, float(number), 2.0 * number) for number in range(1, 9)]
    steps.append(step(9, 9.0, math.nan))
    assert [each.step for each in end_of(steps)] == [7, 8]
    assert averages(end_of(steps))["grad_norm"] == (7.5, 15.0, 7.5)
    assert "loss" not in averages(steps)
    assert end_of(steps[-1:]) == []


def test_b_has_left_the_data_once_its_effective_sample_size_is_below_one_half():
    assert far_from([step(1, 1, 9.0), step(2, 1, 5.0), step(3, 1, 4.9), step(4, 1, 9.0)]) == 3
    assert far_from([step(1, 1, 5.0)]) is None
