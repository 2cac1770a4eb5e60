"""Advantages of a group, by the numbers of cases O18 and O19."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers.advantages import group_advantages, is_flat


def digits(values, n=4):
    return [f"{value:.{n}f}" for value in values]


def test_an_aborted_member_is_left_out_of_mean_and_std():
    got = group_advantages([1, 0, None, 0])
    assert f"{got.mean:.4f} {got.std:.4f}" == "0.3333 0.4714"
    assert digits(got.values[got.members]) == ["1.4142", "-0.7071", "-0.7071"]
    assert got.members.tolist() == [True, True, False, True]
    assert got.values[2] == 0


def test_eps_leaves_the_printed_digits_of_a_group_with_spread_alone():
    assert digits(group_advantages([1, 0, None, 0], eps=1e-4).values, 6) == [
        "1.414214", "-0.707107", "0.000000", "-0.707107",
    ]  # fmt: skip


def test_a_missing_reward_does_not_poison_its_neighbours():
    first = group_advantages([1, None, 0, 1], divide_by_std=False)
    assert f"{first.mean:.4f}" == "0.6667"
    assert digits(first.values[first.members]) == ["0.3333", "-0.6667", "0.3333"]
    second = group_advantages([0, 1, 1, 0])
    assert second.values.tolist() == [-1, 1, 1, -1]
    assert second.values.dtype == np.float32


@pytest.mark.parametrize(
    "rewards",
    [[0.1] * 8, [1e9] * 3, [0.1 + 0.2, 0.3], [1.0, None], [None, None], [], [0.0, 0.0], [1e300] * 3],
)
def test_a_group_without_spread_is_flat_and_all_zero(rewards):
    got = group_advantages(rewards)
    assert got.is_flat and is_flat(rewards)
    assert got.values.tolist() == [0.0] * len(rewards)


def test_a_tiny_but_real_spread_is_not_flat():
    assert group_advantages([0.0, 1e-4]).values.tolist() == [-1, 1]
    assert not is_flat([0.0, 1e-5])


def test_rewards_too_large_for_squares_still_have_their_advantages():
    assert group_advantages([1e300, -1e300]).values.tolist() == [1, -1]
    with pytest.raises(ValueError, match="does not fit in float32"):
        group_advantages([1e300, -1e300], divide_by_std=False)


def test_an_infinite_reward_is_refused():
    with pytest.raises(ValueError, match="finite"):
        group_advantages([1.0, math.inf])


@given(st.lists(st.none() | st.floats(-1e6, 1e6), max_size=16))
def test_advantages_are_finite_centred_and_of_unit_spread(rewards):
    got = group_advantages(rewards)
    values = got.values[got.members].astype(float)
    assert np.isfinite(got.values).all()
    assert not got.values[~got.members].any()
    if not got.is_flat:
        assert abs(values.mean()) < 1e-4
        assert values.std() <= 1 + 1e-4
