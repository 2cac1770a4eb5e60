"""The event model against cases that can be worked out on paper, and rules that hold for any durations."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.ages.crowding import Crowding
from replay.ages.durations import Durations, GroupTimes
from replay.ages.sweep import Prediction, outcome
from replay.ages.whatif import Model, ModelStep, Setting
from streams.errors import ConfigError

BATCH, SAMPLES = 2, 2
SLOW_S = 5.0  # from here on a group is of the slowest quarter


def durations(
    generation_s: list[float],
    *,
    train_s: float = 1.0,
    collect_s: float = 0.0,
    publish_s: float = 0.0,
    sync_s: float = 0.0,
    turn_s: float = 0.0,
    stall_s: float = 0.0,
    slots: int = 64,
    crowding: Crowding | None = None,
    refused: frozenset[int] = frozenset(),
) -> Durations:
    """Group k of the record takes generation_s[k]."""
    groups = [
        GroupTimes((seconds,) * SAMPLES, 10, 0.0, collect_s, seconds >= SLOW_S, place in refused)
        for place, seconds in enumerate(generation_s)
    ]
    return Durations(
        groups=groups,
        train_s=[train_s],
        turn_s=[turn_s],
        wake_s=[turn_s],
        publish_s=[publish_s],
        feed_s=[0.0],
        sync_s=[sync_s],
        collects_in_order=False,
        waves_keep_order=False,
        stall_s=stall_s,
        crowding=crowding or Crowding(),
        engines=1,
        slots=slots,
        batch=BATCH,
        partitions=1,
    )


def setting(limit: int, **changes) -> Setting:
    return Setting(**{"limit": limit, "engines": 1, "slots": 64, "batch": BATCH, **changes})


# steps come in bursts of limit + 1, so what is counted is a multiple of every such number
WHOLE = 61


def steps_of(times: Durations, asked: Setting, n_steps: int = WHOLE) -> list[ModelStep]:
    fills = 2 * (asked.limit + 2)
    return Model(times, asked).run(fills + n_steps)[fills:]


def result(times: Durations, asked: Setting, n_steps: int = WHOLE) -> Prediction:
    return outcome(asked, steps_of(times, asked, n_steps))


def test_synchronous_training_takes_the_sum_of_its_parts():
    times = durations([3.0], train_s=1.0, collect_s=0.25, publish_s=0.25, sync_s=0.5, turn_s=0.125)
    found = result(times, setting(0))
    assert found.steps_per_s == pytest.approx(1 / (3 + 1 + 0.25 + 0.25 + 0.5 + 0.125))
    assert found.wait_share == pytest.approx(4 / 5.125)
    assert (found.mean_staleness, found.max_staleness, found.waste) == (0, 0, 0)


def test_a_saturated_trainer_makes_a_step_in_the_time_of_a_step():
    found = result(durations([3.0], train_s=1.0), setting(8))
    assert found.steps_per_s == pytest.approx(1.0)
    assert found.wait_share == 0
    assert found.max_staleness == 8


def test_between_the_two_limit_and_length_decide_together():
    """3 s of generation: with limit k, k + 1 batches are under way at a time, so (k + 1) steps in 3 + 1 s."""
    for limit in (0, 1, 2):
        assert result(durations([3.0]), setting(limit)).steps_per_s == pytest.approx((limit + 1) / 4)
    assert result(durations([3.0]), setting(3)).steps_per_s == pytest.approx(1.0)


def test_slots_bound_the_throughput_of_an_engine():
    """4 samples a step on 2 slots of 3 s each: 6 s a step, whatever the limit; a second engine halves it."""
    times = durations([3.0], slots=2)
    assert result(times, setting(6, slots=2)).steps_per_s == pytest.approx(1 / 6, rel=0.03)
    assert result(times, setting(6, slots=2, engines=2)).steps_per_s == pytest.approx(1 / 3, rel=0.03)


def test_samples_that_share_an_engine_slow_each_other_down():
    """Slope 0.25: with all 4 samples of a step in flight each takes twice its own time."""
    found = result(durations([3.0], crowding=Crowding(per_sample=0.25)), setting(0))
    assert found.steps_per_s == pytest.approx(1 / (6 + 1))


def test_training_and_generation_slow_each_other_down_while_both_run():
    both = Crowding(beside_training=1.0, beside_generation=1.0)
    assert result(durations([3.0], crowding=both), setting(0)).steps_per_s == pytest.approx(1 / 4)
    # saturated, something is always in flight: a step of 1 s takes 2
    assert result(durations([3.0], crowding=both), setting(9)).steps_per_s == pytest.approx(1 / 2)


def test_an_engine_that_takes_weights_stands_still():
    """Limit 1, 3 s of generation, 1 s of training: two batches in turn, each meets the other's version once."""
    quiet = result(durations([3.0]), setting(1)).steps_per_s
    stalled = result(durations([3.0], stall_s=0.5), setting(1)).steps_per_s
    assert quiet == pytest.approx(2 / 4)
    assert 2 / 5.01 <= stalled < quiet


def test_what_is_too_old_at_the_cut_is_dropped_and_counted():
    """One group in four takes 20 s and the others 1 s: at limit 1 the slow one is always too old."""
    times = durations([1.0, 1.0, 1.0, 20.0])
    steps = steps_of(times, setting(1), 60)
    found = outcome(setting(1), steps)
    assert found.max_staleness <= 1
    assert sum(step.n_stale for step in steps) > 0
    assert found.waste == pytest.approx(0.25, abs=0.06)
    assert found.slow_ratio < 0.1
    roomy = result(times, setting(40), 60)
    assert (roomy.waste, roomy.slow_ratio) == (0, 1)


def test_where_waves_keep_their_order_a_slow_group_holds_up_later_ones_more_often_than_it_is_dropped():
    """As a hiccup of a whole engine does. One group in four takes 20 s and the others 1 s."""
    times = durations([1.0, 1.0, 1.0, 20.0])
    free, kept = result(times, setting(1), 60), result(times._replace(waves_keep_order=True), setting(1), 60)
    assert kept.waste < free.waste
    assert kept.slow_ratio > free.slow_ratio
    assert kept.steps_per_s < free.steps_per_s


def test_masking_keeps_the_newer_tokens_of_an_old_group():
    times = durations([1.0, 1.0, 1.0, 6.0])
    dropped, masked = result(times, setting(1), 80), result(times, setting(1, on_stale="mask"), 80)
    assert 0 < masked.waste < dropped.waste
    assert masked.max_staleness <= 1


def test_groups_that_the_collector_refuses_make_room_for_others():
    """Half of the groups are filtered out: a step needs 4 generated groups for its 2, in two turns at limit 0."""
    times = durations([3.0, 3.0], refused=frozenset({1}))
    steps = Model(times, setting(0)).run(30)
    assert all(len(step.staleness) == BATCH for step in steps)
    found = outcome(setting(0), steps)
    assert found.waste == 0
    assert 1 / 16 < found.steps_per_s < 1 / 7


def test_versions_published_every_other_step_count_as_two():
    found = result(durations([3.0], sync_s=0.5), setting(1, steps_per_version=2))
    assert found.max_staleness == 1
    assert found.mean_staleness == pytest.approx(0.5)
    assert found.steps_per_s == pytest.approx(2 / (3 + 0.5 + 1 + 1))


def test_a_limit_that_cannot_hold_with_the_interval_is_refused():
    with pytest.raises(ConfigError, match=r"update_weights_interval = 4 the limit must be at least 3"):
        Model(durations([1.0]), setting(2, steps_per_version=4))


def test_fewer_open_groups_than_a_step_needs_are_said_to_stop_it():
    with pytest.raises(ConfigError, match=r"fewer groups may be open \(1\) than a step needs \(2\)"):
        Model(durations([1.0]), setting(2, max_open_groups=1)).run(5)


def test_engines_that_are_not_paced_never_wait_and_throw_away_what_is_too_old():
    """Generation twice as fast as training: half of it goes."""
    times = durations([2.0], train_s=2.0, slots=8)
    free = result(times, setting(0, slots=8, pace=False), 60)
    assert free.in_flight == pytest.approx(8)
    assert free.waste > 0.4
    assert result(times, setting(0, slots=8), 60).waste == 0


def test_the_same_seed_gives_the_same_steps():
    times = durations([1.0, 2.5, 0.5, 4.0])
    assert Model(times, setting(2), seed=3).run(30) == Model(times, setting(2), seed=3).run(30)


_SECONDS = st.floats(min_value=0.05, max_value=5.0)


@given(generation=_SECONDS, train=_SECONDS, sync=st.floats(0, 1), limit=st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_a_larger_limit_never_slows_a_steady_run(generation: float, train: float, sync: float, limit: int):
    times = durations([generation], train_s=train, sync_s=sync)
    smaller, larger = result(times, setting(limit)), result(times, setting(limit + 1))
    assert larger.steps_per_s >= smaller.steps_per_s * (1 - 1e-6)
    assert larger.wait_share <= smaller.wait_share + 1e-6
    assert larger.steps_per_s <= 1 / train + 1e-6


@given(
    generation=st.lists(_SECONDS, min_size=1, max_size=12),
    train=_SECONDS,
    limit=st.integers(0, 4),
    slots=st.integers(1, 12),
    on_stale=st.sampled_from(["drop", "mask"]),
    pace=st.booleans(),
    in_order=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_no_group_is_ever_trained_beyond_the_limit(
    generation: list[float], train: float, limit: int, slots: int, on_stale: str, pace: bool, in_order: bool
):
    times = durations(generation, train_s=train)._replace(collects_in_order=in_order)
    steps = Model(times, setting(limit, slots=slots, on_stale=on_stale, pace=pace)).run(15)
    assert all(0 <= age <= limit for step in steps for age in step.staleness)
    assert all(step.n_stale_tokens >= 0 and step.n_tokens > 0 for step in steps)
    assert [step.at_s for step in steps] == sorted(step.at_s for step in steps)
