"""Advantages of a whole batch by each estimator: hand-computed numbers, missing rewards, flat and small groups."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers.advantages import ESTIMATORS, Group, of_cut
from streams.events import BatchCut, CutGroup, CutMember


def group(*rewards, n_tokens=None):
    return Group(rewards, n_tokens or [1] * len(rewards))


def values(name, *groups):
    return [each.tolist() for each in ESTIMATORS[name](groups)]


TWO = (group(1.0, 0.0, 0.0, 1.0), group(3.0, 0.0))
BY_HAND = {
    "grpo": [[1, -1, -1, 1], [1, -1]],
    "gspo": [[1, -1, -1, 1], [1, -1]],
    "dr_grpo": [[0.5, -0.5, -0.5, 0.5], [1.5, -1.5]],
    "rloo": [[2 / 3, -2 / 3, -2 / 3, 2 / 3], [3, -3]],
    # mean 5/6; mean square 11/6, variance 11/6 − 25/36 = 41/36
    "reinforce_plus_plus": [
        [each / math.sqrt(41) for each in row] for row in ([1, -5, -5, 1], [13, -5])
    ],
    # variance (4 · 1/4 + 2 · 9/4) / 6 = 11/12
    "reinforce_plus_plus_baseline": [
        [each / math.sqrt(11 / 12) for each in row] for row in ([0.5, -0.5, -0.5, 0.5], [1.5, -1.5])
    ],
    "ppo": [[1, 0, 0, 1], [3, 0]],
}  # fmt: skip


@pytest.mark.parametrize("name", ESTIMATORS)
def test_two_groups_of_different_sizes_by_hand(name):
    for found, expected in zip(ESTIMATORS[name](TWO), BY_HAND[name], strict=True):
        assert found.dtype == np.float32
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_missing_reward_counts_for_nobody_and_gets_nothing(name):
    without = ESTIMATORS[name]([group(1.0, 0.0, 0.0), group(3.0, 0.0)])
    for missing in (None, math.nan):
        found = ESTIMATORS[name]([group(1.0, missing, 0.0, 0.0), group(3.0, 0.0)])
        assert found[0].tolist() == [without[0][0], 0.0, *without[0][1:]]
        assert found[1].tolist() == without[1].tolist()


@pytest.mark.parametrize("name", sorted(ESTIMATORS.keys() - {"ppo"}))
def test_rewards_that_are_equal_up_to_rounding_teach_nothing(name):
    assert values(name, group(0.1 + 0.2, 0.3), group(0.3, 0.3, 0.3)) == [[0, 0], [0, 0, 0]]


@pytest.mark.parametrize("name", sorted(ESTIMATORS.keys() - {"reinforce_plus_plus", "ppo"}))
def test_a_flat_group_and_a_group_of_one_teach_nothing_beside_one_that_does(name):
    found = values(name, group(0.1 + 0.2, 0.3), group(5.0), group(1.0, -1.0))
    assert found[:2] == [[0, 0], [0]]
    assert found[2][0] > 0 > found[2][1]


def test_a_batch_of_single_samples_has_a_baseline_with_reinforce_plus_plus_alone():
    found = ESTIMATORS["reinforce_plus_plus"]([group(1.0), group(0.0), group(0.5)])
    spread = math.sqrt(1 / 6)
    assert [each[0] for each in found] == pytest.approx([0.5 / spread, -0.5 / spread, 0], rel=1e-6)


def test_a_reward_counts_as_often_in_the_batch_as_its_sample_has_trained_tokens():
    # tokens 1 1 1 0: mean 3/4, variance 3/16
    found = values("reinforce_plus_plus", group(1.0, n_tokens=[3]), group(0.0, n_tokens=[1]))
    assert [each[0] for each in found] == pytest.approx([0.25 / math.sqrt(3 / 16), -0.75 / math.sqrt(3 / 16)])
    # centred ±1 of one token each and ±½ of 9 and 7: mean square (1 + 1 + 16 · ¼) / 18 = 1/3
    found = values("reinforce_plus_plus_baseline", group(2.0, 0.0), group(1.0, 0.0, n_tokens=[9, 7]))
    assert found == [pytest.approx([3**0.5, -(3**0.5)]), pytest.approx([0.5 * 3**0.5, -0.5 * 3**0.5])]


def test_a_sample_without_a_trained_token_is_in_its_groups_mean_and_not_in_the_batchs_spread():
    found = values(
        "reinforce_plus_plus_baseline", group(1.0, 0.0, n_tokens=[2, 0]), group(4.0, 0.0, n_tokens=[0, 0])
    )
    assert found == [[1, -1], [4, -4]]
    assert values("dr_grpo", group(1.0, 0.0, n_tokens=[2, 0])) == [[0.5, -0.5]]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_nothing_in_nothing_out(name):
    assert ESTIMATORS[name]([]) == []
    assert values(name, group(), group(None)) == [[], [0]]
    assert values(name, group(1.0, n_tokens=[0])) == [[1.0 if name == "ppo" else 0.0]]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_infinite_reward_is_refused(name):
    with pytest.raises(ValueError, match="finite"):
        ESTIMATORS[name]([group(1.0, math.inf)])


@pytest.mark.parametrize("name", sorted(ESTIMATORS.keys() - {"ppo", "dr_grpo", "rloo"}))
def test_rewards_too_large_for_squares_still_have_their_advantages(name):
    assert values(name, group(1e300, -1e300)) == [pytest.approx([1, -1])]


@pytest.mark.parametrize("name", ESTIMATORS)
@given(
    st.lists(st.lists(st.none() | st.floats(-100, 100), min_size=1, max_size=5), max_size=6),
    st.randoms(use_true_random=False),
)
def test_the_order_of_groups_does_not_matter(name, rewards, random):
    groups = [group(*each) for each in rewards]
    order = list(range(len(groups)))
    random.shuffle(order)
    there = ESTIMATORS[name](groups)
    shuffled = ESTIMATORS[name]([groups[place] for place in order])
    for place, found in zip(order, shuffled, strict=True):
        assert np.isfinite(found).all()
        assert found == pytest.approx(there[place], rel=1e-4, abs=1e-4)


def test_a_ledger_record_alone_gives_the_advantages_of_its_step():
    def member(index, reward, n_tokens):
        return CutMember(f"0-0/{index}/0", index, reward, 0, n_tokens)

    cut = BatchCut(
        epoch=1, version=0, frontier=2, step=1, positions=[2], limit=0, on_stale="drop", seed=1,
        ledger_read_to=1, cut_ms=0,
        groups=[CutGroup("0-0", 0, 0, 0, [member(0, 1.0, 3)]), CutGroup("0-1", 1, 0, 1, [member(0, 0.0, 1)])],
    )  # fmt: skip
    found = of_cut(cut, "reinforce_plus_plus")
    assert [each.tolist() for each in found] == values(
        "reinforce_plus_plus", group(1.0, n_tokens=[3]), group(0.0, n_tokens=[1])
    )
