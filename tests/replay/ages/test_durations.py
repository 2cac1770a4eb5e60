"""What the model is fed with, measured from runs whose durations are known."""

from __future__ import annotations

import numpy as np
import pytest

from replay.ages.crowding import Load
from replay.ages.durations import LEAST_STEPS, measure_durations
from replay.ages.history import read_history
from replay.ages.sweep import sweep
from replay.ages.whatif import Setting
from streams.errors import MillstreamError
from streams.events import Drop, Paused, Resumed
from tests.support.ages import AgedRun, Made, synchronous


def measured(run: AgedRun, **options):
    return measure_durations(read_history(run.log, run.topics), **options)


def a_synchronous_run(steps: int = 20) -> AgedRun:
    """Cycle 3 + 0.5 + 1 + 0.25 + 0.25 = 5 s."""
    return synchronous(steps, generation_s=3, collect_s=0.5, train_s=1, publish_s=0.25, sync_s=0.25)


def test_every_duration_of_a_run_is_found_in_its_log():
    times, recorded = measured(a_synchronous_run())
    assert {round(work, 9) for group in times.groups for work in group.work_s} == {3.0}
    assert {group.collect_s for group in times.groups} == {0.5}
    assert {group.pickup_s for group in times.groups} == {0.0}  # it waited for its version, not for a slot
    for pool, seconds in (
        (times.train_s, 1.0),
        (times.wake_s, 0.0),
        (times.publish_s, 0.25),
        (times.feed_s, 0.0),
        (times.sync_s, 0.25),
    ):
        assert {round(each, 9) for each in pool} == {seconds}
    assert (times.engines, times.slots, times.batch) == (1, 4, 2)
    assert recorded.steps_per_s == pytest.approx(1 / 5)
    assert recorded.wait_share == pytest.approx(4 / 5)
    assert (recorded.mean_staleness, recorded.max_staleness, recorded.waste) == (0, 0, 0)


def test_the_model_gives_back_the_run_that_it_was_measured_from():
    times, recorded = measured(a_synchronous_run())
    asked = Setting(limit=0, engines=1, slots=times.slots, batch=times.batch)
    found = sweep(times, recorded, [0, 8], asked)
    assert found.error == pytest.approx(0.0, abs=1e-6)
    at_0, at_8 = found.at(0), found.at(8)
    assert at_0 is not None and at_0.steps_per_s == pytest.approx(1 / 5)
    # 4 samples of 3 s on 4 slots: beyond that an engine cannot go, and with two engines the trainer is the limit
    assert at_8 is not None and at_8.steps_per_s == pytest.approx(1 / 3, rel=0.02)
    two = sweep(times, recorded, [8], asked._replace(engines=2))
    assert two.error is None
    at_8 = two.at(8)
    assert at_8 is not None and at_8.steps_per_s == pytest.approx(2 / 3, rel=0.02)


@pytest.mark.parametrize("steps", [0, 1, LEAST_STEPS - 1])
def test_too_few_steps_for_a_model_are_refused_with_their_number(steps: int):
    run = a_synchronous_run(steps)
    with pytest.raises(
        MillstreamError, match=rf"at least {LEAST_STEPS} measured steps .* there are (none|{steps} )"
    ):
        measured(run)


def test_only_steps_at_the_newest_limit_count():
    run = a_synchronous_run(10)
    run.group(100, 50, [Made(50, 51, 10)] * 2, 52)
    run.cut(11, {100: [0, 0]}, 53, ended_s=54, limit=1)
    with pytest.raises(MillstreamError, match="there are 1 at limit 1"):
        measured(run)


def test_a_pause_is_not_taken_for_a_slow_step():
    run = AgedRun()
    run.published(0, 0, held_s=0)
    for step in range(1, 21):
        begin = 2.0 * step + (100 if step > 12 else 0)
        for seq in (2 * step - 2, 2 * step - 1):
            run.group(seq, begin, [Made(begin, begin + 0.5, step - 1)] * 2, begin + 0.5)
        if step == 13:
            run.write("ledger", Paused(by="me"), 26)
            run.write("ledger", Resumed(by="me"), 125)
        run.cut(step, {2 * step - 2: [0, 0], 2 * step - 1: [0, 0]}, begin + 1, ended_s=begin + 1.5, limit=0)
        run.published(step, begin + 1.6)
    _, recorded = measured(run)
    assert recorded.steps_per_s == pytest.approx(1 / 2)


def test_groups_that_a_filter_dropped_are_generated_by_the_model_too():
    run = a_synchronous_run(10)
    for seq in range(100, 110):
        run.group(seq, 20, [Made(20, 24)] * 2, 24.5, refused="zero_variance")
    run.dropped(5, [Drop(f"0-{seq}", seq, "zero_variance") for seq in range(100, 110)], 27)
    times, recorded = measured(run)
    assert sum(group.is_refused for group in times.groups) == 10
    assert recorded.waste == 0  # of what the limit made waste


def test_stale_groups_count_as_waste_and_as_slow():
    run = AgedRun()
    run.published(0, 0, held_s=0)
    for step in range(1, 21):
        begin = 2.0 * step
        for seq in (3 * step - 3, 3 * step - 2):
            run.group(seq, begin, [Made(begin, begin + 0.5, step - 1)] * 2, begin + 0.5)
        run.group(3 * step - 1, begin, [Made(begin, begin + 1.8, step - 1)] * 2, begin + 1.9)
        drops = [Drop(f"0-{3 * step - 4}", 3 * step - 4, "stale", 1)] if step > 1 else []
        ages = {3 * step - 3: [0, 0], 3 * step - 2: [0, 0]}
        run.cut(step, ages, begin + 1, ended_s=begin + 1.2, limit=0, drops=drops)
        run.published(step, begin + 1.3, held_s=begin + 1.4)
    times, recorded = measured(run)
    assert recorded.waste == pytest.approx(1 / 3, abs=0.02)
    assert recorded.slow_ratio == 0
    assert 0.25 <= sum(group.is_slow for group in times.groups) / len(times.groups) <= 0.4


def waves(late: float) -> AgedRun:
    """A wave of two groups every second, each of 1.5 s, so waves overlap; the second of a wave ends `late` s later."""
    run = AgedRun()
    run.published(0, 0, held_s=0)
    for step in range(1, 31):
        begin, end = float(step), step + 1.5
        for seq, more in ((2 * step - 2, 0.0), (2 * step - 1, late)):
            made = [Made(begin, end + more, step - 1)] * 2
            run.group(seq, begin, made, end + more + 0.1, min_version=step - 1)
        run.cut(step, {2 * step - 2: [0, 0], 2 * step - 1: [0, 0]}, end + 0.2, ended_s=end + 0.3)
        run.published(step, step + 0.99)
    return run


@pytest.mark.parametrize(("late", "keeps_order"), [(0.2, True), (3.0, False)])
def test_it_is_noticed_whether_groups_overtake_those_of_an_earlier_version(late: float, keeps_order: bool):
    times, _ = measured(waves(late))
    assert times.waves_keep_order is keeps_order
    firsts = [group.is_first for group in times.groups]
    assert firsts == [place % 2 == 0 for place in range(len(firsts))]


def test_overtaking_is_unknown_where_no_two_versions_were_under_way_at_a_time():
    times, _ = measured(a_synchronous_run())
    assert times.waves_keep_order is False


def test_a_load_is_integrated_exactly():
    load = Load([0, 1000, 1000], [4000, 2000, 3000])
    begins, ends = np.array([0.0, 1.0, 3.5]), np.array([4.0, 2.0, 5.5])
    assert load.most == 3
    assert load.mean(begins, ends).tolist() == pytest.approx([(4 + 1 + 2) / 4, 3.0, 0.25])
    assert load.share(begins, ends).tolist() == pytest.approx([1.0, 1.0, 0.25])


def test_generation_that_slows_with_what_is_in_flight_is_noticed():
    """Waves of 2 and of 6 groups; a sample takes 1 s × (1 + 0.5 × samples in flight / 4)."""
    run = AgedRun(n_samples=1)
    run.published(0, 0, held_s=0)
    seq, now = 0, 0.0
    for step in range(1, 41):
        wave = 2 if step % 2 else 6
        takes = 1 + 0.125 * wave
        for each in range(seq, seq + wave):
            run.group(each, now, [Made(now, now + takes, step - 1)], now + takes)
        ages = {each: [0] for each in (seq, seq + 1)}
        drops = [Drop(f"0-{each}", each, "zero_variance") for each in range(seq + 2, seq + wave)]
        run.cut(step, ages, now + takes, ended_s=now + takes + 1, limit=0, drops=drops)
        run.published(step, now + takes + 1, held_s=now + takes + 1)
        seq, now = seq + wave, now + takes + 1
    times, _ = measured(run)
    assert times.crowding.per_sample == pytest.approx(0.125, rel=0.35)
    assert times.crowding.beside_generation == 0  # nothing was ever generated beside a step
