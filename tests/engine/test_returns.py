"""Rewards of tokens, discounted returns and GAE over trained tokens, by hand-computed numbers."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.algorithms.returns import discounted_returns, gae, kl_terms, normalized, token_rewards

STARTS = np.array([0, 3, 3, 5])  # samples of 3, 0 and 2 trained tokens
OF_SAMPLES = np.array([1.0, 1.0, 1.0, -2.0, -2.0])  # the sample's reward, for each of its tokens


def test_a_reward_comes_with_the_last_trained_token_of_its_sample():
    assert token_rewards(OF_SAMPLES, STARTS).tolist() == [0, 0, 1, 0, -2]


def test_the_penalty_is_taken_from_every_token():
    penalties = np.array([0.5, 0.25, -0.5, 1.0, 0.0], np.float32)
    found = token_rewards(OF_SAMPLES, STARTS, penalties)
    assert found.tolist() == [-0.5, -0.25, 1.5, -1.0, -2.0]


def test_returns_are_discounted_by_trained_tokens_and_stay_within_their_sample():
    rewards = np.array([1.0, 2.0, 4.0, 0.0, 8.0])
    assert discounted_returns(rewards, STARTS, 0.5).tolist() == [3, 4, 4, 4, 8]
    assert discounted_returns(rewards, STARTS, 1.0).tolist() == [7, 6, 4, 8, 8]
    assert discounted_returns(rewards, STARTS, 0.0).tolist() == rewards.tolist()


def test_gae_of_two_samples_worked_out_by_hand():
    rewards, values = np.array([0.0, 0.0, 1.0, 0.0, -2.0]), np.array([0.5, 0.25, 0.75, 1.0, 0.0])
    found = gae(rewards, values, STARTS, gamma=0.5, lambd=0.5)
    # sample 0: δ = (0 + .5·.25 − .5, 0 + .5·.75 − .25, 1 − .75) = (−.375, .125, .25)
    # A = (−.375 + .25·.1875, .125 + .25·.25, .25);  sample 2: δ = (0 + 0 − 1, −2 − 0), A = (−1 − .5, −2)
    assert found.advantages.tolist() == [-0.328125, 0.1875, 0.25, -1.5, -2.0]
    assert found.returns.tolist() == [0.171875, 0.4375, 1.0, -0.5, -2.0]


def test_with_lambda_one_a_return_is_the_discounted_return_whatever_the_critic_says():
    rewards = np.array([1.0, 2.0, 4.0, 0.0, 8.0])
    found = gae(rewards, np.array([3.0, -1.0, 0.5, 9.0, 2.0]), STARTS, gamma=0.5, lambd=1.0)
    assert found.returns == pytest.approx(discounted_returns(rewards, STARTS, 0.5))


def test_with_lambda_zero_an_advantage_is_one_step_of_surprise():
    values = np.array([3.0, -1.0, 0.5, 9.0, 2.0])
    found = gae(np.zeros(5), values, STARTS, gamma=1.0, lambd=0.0)
    assert found.advantages.tolist() == [-4.0, 1.5, -0.5, -7.0, -2.0]


@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=6), st.floats(0, 1), st.floats(0, 1), st.integers(0, 99)
)
def test_gae_is_the_plain_double_sum_of_its_definition(lengths, gamma, lambd, seed):
    starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=starts[-1]), rng.normal(size=starts[-1])
    found = gae(rewards, values, starts, gamma=gamma, lambd=lambd).advantages
    for begin, end in itertools.pairwise(starts):
        later = [*values[begin + 1 : end], 0.0]
        deltas = [rewards[begin + t] + gamma * later[t] - values[begin + t] for t in range(end - begin)]
        for t in range(end - begin):
            plain = sum((gamma * lambd) ** k * delta for k, delta in enumerate(deltas[t:]))
            assert found[begin + t] == pytest.approx(plain, abs=1e-9)


def test_normalised_values_of_two_ranks_are_those_of_one():
    values = np.array([1.0, 2.0, 4.0, 9.0])
    whole = normalized(values)
    assert whole.mean() == pytest.approx(0) and whole.std() == pytest.approx(1)
    halves, said = [values[:1], values[1:]], []

    def sums(own):  # what Ranks.sum answers: every rank's numbers, added
        said.append(own)
        if len(own) == 2:
            return [4.0, 16.0]
        return [float(((values - 4.0) ** 2).sum())]

    assert normalized(halves[1], sums) == pytest.approx(whole[1:])
    assert said == [[3.0, 15.0], [pytest.approx(29.0)]]


@pytest.mark.parametrize("values", [[0.1 + 0.2, 0.3, 0.3], [5.0], [], [1e9, 1e9]])
def test_values_without_a_spread_are_normalised_to_zero(values):
    assert normalized(np.array(values)).tolist() == [0.0] * len(values)


def test_estimators_of_the_kl_by_hand():
    lr = np.array([np.log(2.0), -np.log(4.0), 0.0])
    assert kl_terms(lr, "k1") == pytest.approx([0.6931472, -1.3862944, 0])
    assert kl_terms(lr, "k2") == pytest.approx([0.2402265, 0.9609060, 0])
    assert kl_terms(lr, "k3") == pytest.approx([0.5 - 1 + 0.6931472, 4 - 1 - 1.3862944, 0])
    assert kl_terms(np.array([-20.0]), "low_var_kl").tolist() == [10.0]
