"""Off-policy gauges by age, and what a smaller limit would have left."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from replay.ages import gauges
from replay.ages.history import read_history
from tests.support.ages import AgedRun, Made


def rows_of(run: AgedRun) -> tuple[gauges.Rows, list[int]]:
    history = read_history(run.log, run.topics)
    return gauges.trained_rows(history.steps, history.measured)


def aged(moved: Sequence[float | None], ages: list[list[int]], *, on_stale: str = "drop") -> AgedRun:
    """One group a step; step k moves `moved[k]` nat a token a version and trains samples of `ages[k]`."""
    run = AgedRun(batch=1)
    run.published(0, 0, held_s=0)
    for step, (each, staleness) in enumerate(zip(moved, ages, strict=True), 1):
        run.group(step - 1, 0, [Made(0, 1)] * 2, 1)
        run.cut(step, {step - 1: staleness}, step, ended_s=step + 0.5, limit=4, moved=each, on_stale=on_stale)
    return run


def test_each_age_has_its_own_gauges():
    rows, missing = rows_of(aged([0.1, 0.1], [[0, 1], [2, 1]]))
    assert missing == []
    found = {each.staleness: each for each in gauges.by_staleness(rows)}
    assert {age: (each.samples, each.tokens) for age, each in found.items()} == {
        0: (1, 10),
        1: (2, 20),
        2: (1, 10),
    }
    assert found[0].values["mean_abs_log_ratio"] == 0
    assert found[1].values["mean_abs_log_ratio"] == pytest.approx(0.1)
    assert found[2].values["ratio_outside"] == 1.0  # exp(0.2) > 1.2


def test_a_step_without_a_measurement_is_left_out_by_name():
    rows, missing = rows_of(aged([0.1, None, 0.1], [[0, 1], [1, 1], [2, 1]]))
    assert missing == [2]
    assert rows.step.tolist() == [1, 1, 3, 3]


def test_a_sample_that_was_masked_whole_is_no_row():
    rows, _ = rows_of(aged([0.1], [[-1, 3]], on_stale="mask"))
    assert rows.staleness.tolist() == [3]


def test_dropping_a_smaller_limit_loses_whole_groups():
    rows, _ = rows_of(aged([0.1] * 4, [[0, 0], [0, 1], [2, 2], [3, 0]]))
    found = gauges.if_smaller(rows, 4, "drop")
    assert [each.limit for each in found] == [0, 1, 2, 3]
    assert [each.groups_share for each in found] == [0.25, 0.5, 0.75, 1.0]
    assert found[1].tokens_share == 0.5
    assert found[1].values["mean_abs_log_ratio"] == pytest.approx(0.1 / 4)


def test_masking_a_smaller_limit_loses_samples():
    rows, _ = rows_of(aged([0.1] * 2, [[0, 1], [3, 0]], on_stale="mask"))
    (at_0, at_1, at_2) = gauges.if_smaller(rows, 3, "mask")
    assert (at_0.groups_share, at_0.tokens_share) == (1.0, 0.5)
    assert (at_1.tokens_share, at_2.tokens_share) == (0.75, 0.75)


def test_the_drift_is_that_of_the_steps_in_which_it_was_largest():
    """A policy that has stalled moves little: its quiet steps must not make a larger limit look safe."""
    moved = [0.02] * 60 + [0.10] * 40 + [0.01] * 100
    found = gauges.drift(rows_of(aged(moved, [[1, 2]] * 200))[0])
    assert found is not None
    assert found.per_version == pytest.approx(0.1)
    assert (found.first_step, found.last_step) == (61, 100)
    assert found.whole_run == pytest.approx((60 * 0.02 + 40 * 0.1 + 100 * 0.01) / 200)


def test_the_drift_does_not_count_the_mismatch_between_engine_and_trainer():
    run = aged([0.1], [[0, 2]])
    rows, _ = rows_of(run)
    rows.sums[:, 2] += 0.03 * rows.sums[:, 0]  # 0.03 nat a token at every age
    found = gauges.drift(rows)
    assert found is not None and found.per_version == pytest.approx(0.1)


def test_there_is_no_drift_where_nothing_old_was_trained():
    assert gauges.drift(rows_of(aged([0.1], [[0, 0]]))[0]) is None
    assert gauges.drift(rows_of(aged([None], [[1, 1]]))[0]) is None
