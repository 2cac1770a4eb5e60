"""Importance weights and masks, by numbers that can be checked by hand."""

import math

import numpy as np
import pytest
import torch

from engine.algorithms.corrections import importance, off_policy, vetoed
from engine.algorithms.losses import LOSSES, LossSettings, TokenInputs, token_loss
from engine.algorithms.proximal import interpolated
from engine.algorithms.ratios import Sequences

# ratios 2, 1/2, 4 in one sequence (product 4, geometric mean 4^(1/3)) and 1/8 in another
RATIOS = torch.tensor([2.0, 0.5, 4.0, 0.125], dtype=torch.float64)
SEQUENCES = Sequences(torch.tensor([0, 0, 0, 1]), 2)
BEHAVIOUR = torch.full((4,), -3.0, dtype=torch.float64)
TARGET = BEHAVIOUR + RATIOS.log()


def weights(**settings):
    found = importance(TARGET, BEHAVIOUR, SEQUENCES, **settings)
    return found.weight.tolist(), found.is_capped.tolist(), found.is_masked.tolist()


def test_truncated_token_weights_are_cut_at_both_bounds():
    assert weights(high=3.0) == (pytest.approx([2, 0.5, 3, 0.125]), [False, False, True, False], [False] * 4)
    weight, capped, masked = weights(high=3.0, low=0.25)
    assert (weight, capped, masked) == (
        pytest.approx([2, 0.5, 3, 0.25]),
        [False, False, True, True],
        [False] * 4,
    )


def test_icepop_masks_tokens_outside_of_the_band_and_leaves_the_others_their_weight():
    outside = [False, False, True, True]
    assert weights(mode="mask", high=3.0, low=0.25) == (pytest.approx([2, 0.5, 0, 0]), outside, outside)


def test_a_sequence_weight_is_the_product_and_that_of_every_token():
    assert weights(level="sequence", high=10.0)[0] == pytest.approx([4, 4, 4, 0.125])
    assert weights(level="sequence", high=3.0)[0] == pytest.approx([3, 3, 3, 0.125])
    assert weights(level="sequence", mode="mask", high=3.0)[2] == [True, True, True, False]


def test_a_geometric_weight_is_the_drift_per_token_whatever_the_length():
    mean = 4 ** (1 / 3)
    assert weights(level="geometric", high=10.0)[0] == pytest.approx([mean] * 3 + [0.125])
    assert weights(level="geometric", mode="mask", high=1.5, low=0.5) == (
        [0.0] * 4,
        [True] * 4,
        [True] * 4,
    )


def test_weights_carry_no_gradient_and_do_not_overflow():
    target = torch.tensor([500.0, 500.0], requires_grad=True)
    found = importance(
        target, torch.zeros(2), Sequences(torch.tensor([0, 0]), 1), level="sequence", high=1e30
    )
    assert not found.weight.requires_grad and found.weight.tolist() == pytest.approx([math.exp(20)] * 2)


def test_a_weight_that_is_not_a_number_is_not_masked_away():
    """It must reach the loss, which makes the step a bad one."""
    broken = torch.tensor([math.nan, 0.0])
    found = importance(broken, torch.zeros(2), Sequences(torch.tensor([0, 1]), 2), mode="mask", high=2.0)
    assert math.isnan(found.weight[0]) and found.is_masked.tolist() == [False, False]


def test_one_impossible_token_vetoes_its_whole_sequence():
    assert vetoed(TARGET, BEHAVIOUR, SEQUENCES, 0.2).tolist() == [False, False, False, True]
    assert vetoed(TARGET, BEHAVIOUR, SEQUENCES, 0.6).tolist() == [True, True, True, True]
    assert not vetoed(TARGET, BEHAVIOUR, SEQUENCES, 0.1).any()


def test_opsm_masks_bad_sequences_that_the_policy_has_left():
    # mean of log μ − log π: −log(4)/3 in the first sequence, log 8 in the second
    bad = torch.full((4,), -1.0)
    assert off_policy(TARGET, BEHAVIOUR, bad, SEQUENCES, 1.0).tolist() == [False, False, False, True]
    assert not off_policy(TARGET, BEHAVIOUR, -bad, SEQUENCES, 1.0).any()  # good ones are never masked
    assert not off_policy(TARGET, BEHAVIOUR, bad, SEQUENCES, 2.1).any()  # log 8 = 2.08
    assert off_policy(TARGET, BEHAVIOUR, bad, SEQUENCES, -1.0).all()


def inputs(advantage: float) -> TokenInputs:
    advantages = torch.full((4,), advantage, dtype=torch.float64)
    return TokenInputs(TARGET.clone().requires_grad_(), BEHAVIOUR, TARGET, advantages, SEQUENCES)


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in ("opd", "sft")])
def test_rejected_sequences_have_no_loss_and_no_gradient_under_any_loss(name: str):
    given = inputs(-1.0)
    result = token_loss(name, given, LossSettings(tis_veto=0.2, eps_clip=0.9, m2_threshold=99))
    plain = LOSSES[name](given, LossSettings(eps_clip=0.9, m2_threshold=99))
    (gradient,) = torch.autograd.grad(result.loss.sum(), given.logprobs, retain_graph=True)
    (without,) = torch.autograd.grad(plain.loss.sum(), given.logprobs)
    assert result.loss[3] == 0.0 == gradient[3] and without[3] != 0.0
    assert gradient[:3].tolist() == without[:3].tolist()
    assert result.is_masked.tolist()[3] and result.is_clipped.tolist()[3]


def test_the_loss_of_decoupled_ppo_is_weighted_at_the_level_that_is_asked_for():
    given = inputs(1.0)  # p = π, so u = 1 and the loss is −w
    settings = LossSettings(tis_level="sequence", tis_clip=3.5, tis_clip_low=0.5, tis_mode="truncate")
    assert token_loss("decoupled_ppo", given, settings).loss.tolist() == pytest.approx(
        [-3.5, -3.5, -3.5, -0.5]
    )
    opsm = LossSettings(opsm_delta=1.0, tis_clip=9.0)
    assert token_loss("decoupled_ppo", inputs(-1.0), opsm).loss.tolist() == pytest.approx([2, 0.5, 4, 0])


def test_an_interpolated_proximal_policy_lies_one_version_behind_the_current_one():
    now = torch.tensor([-1.0] * 5, requires_grad=True)
    behaviour = torch.tensor([-3.0] * 5)
    ages = torch.tensor([0, 1, 2, 4, 8], dtype=torch.int32)
    between = interpolated(now, behaviour, ages)
    assert not between.requires_grad
    assert between.tolist() == [-3.0, -3.0, -2.0, -1.5, -1.25]


def test_sequences_sum_their_own_tokens():
    values = torch.arange(6.0)
    sequences = Sequences(torch.tensor([0, 0, 1, 2, 2, 2]), 3)
    assert sequences.total(values).tolist() == [1, 1, 2, 12, 12, 12]
    assert sequences.mean(values).tolist() == [0.5, 0.5, 2, 4, 4, 4]
    assert sequences.any(values == 3).tolist() == [False, False, False, True, True, True]
    rng = np.random.default_rng(0)
    of_token = torch.from_numpy(np.sort(rng.integers(0, 50, 400)))
    weights = torch.from_numpy(rng.normal(size=400)).requires_grad_()
    (gradient,) = torch.autograd.grad((Sequences(of_token, 50).mean(weights) ** 2).sum(), weights)
    means = np.array([weights.detach().numpy()[of_token.numpy() == each].mean() for each in of_token.numpy()])
    assert gradient.tolist() == pytest.approx((2 * means).tolist())
