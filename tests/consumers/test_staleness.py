"""The one rule for "too old" (cases O14, O15; DESIGN §7)."""

from __future__ import annotations

import math

import numpy as np
import pytest

from consumers.staleness import Lineage, fresh_mask, judge, token_ages

EPOCH = 1


def lineage(*versions: int, epoch: int = EPOCH) -> Lineage:
    made = Lineage()
    for version in versions:
        made.published(epoch, version)
    return made


@pytest.mark.parametrize(
    ("version", "reason", "staleness"),
    [(8, "", 2), (9, "", 1), (10, "", 0), (7, "stale", 3), (11, "future", -1)],
)
def test_a_version_trains_exactly_when_its_age_is_between_zero_and_the_limit(version, reason, staleness):
    known = lineage(*range(12))
    verdict = judge([(EPOCH, version, 5)], trainer_version=10, limit=2, lineage=known)
    assert (verdict.reason, verdict.staleness) == (reason, staleness)


@pytest.mark.parametrize("version", [None, "default", "", -1, True, 3.0, 99])
def test_a_version_that_is_missing_malformed_or_never_published_is_unknown(version):
    verdict = judge([(EPOCH, version, 5)], trainer_version=10, limit=2, lineage=lineage(*range(12)))
    assert verdict.reason == "unknown_version"
    assert verdict.n_trainable == 0


def test_an_epoch_that_never_published_is_unknown():
    assert judge([(7, 10, 5)], trainer_version=10, limit=2, lineage=lineage(10)).reason == "unknown_version"


def test_limit_zero_takes_the_trainers_own_version_only():
    known = lineage(9, 10, 11)
    verdicts = [
        judge([(EPOCH, version, 5)], trainer_version=10, limit=0, lineage=known).reason
        for version in (9, 10, 11)
    ]
    assert verdicts == ["stale", "", "future"]


RUNS = [(EPOCH, 5, 120), (EPOCH, 7, 300), (EPOCH, 8, 40)]


def test_a_sample_over_several_versions_is_as_old_as_its_oldest_token():
    verdict = judge(RUNS, trainer_version=8, limit=2, lineage=lineage(5, 7, 8))
    assert (verdict.reason, verdict.staleness, verdict.n_stale) == ("stale", 3, 120)
    assert (verdict.min_lag, verdict.max_lag) == (0, 3)
    assert math.isclose(verdict.mean_lag, 660 / 460)


def test_masking_drops_the_stale_tokens_and_trains_the_rest():
    known = lineage(5, 7, 8)
    verdict = judge(RUNS, trainer_version=8, limit=2, lineage=known, on_stale="mask")
    assert (verdict.reason, verdict.staleness, verdict.n_stale, verdict.n_trainable) == ("", 1, 120, 340)
    mask = fresh_mask(np.ones(460, bool), RUNS, trainer_version=8, limit=2, lineage=known)
    assert mask.sum() == 340 and not mask[:120].any() and mask[120:].all()


def test_masking_refuses_a_sample_that_is_stale_throughout():
    verdict = judge([(EPOCH, 1, 9)], trainer_version=8, limit=2, lineage=lineage(1), on_stale="mask")
    assert verdict.reason == "stale"


def test_the_loss_mask_stays_masked_when_the_token_is_fresh():
    loss_mask = np.array([True, False, True])
    mask = fresh_mask(loss_mask, [(EPOCH, 8, 3)], trainer_version=8, limit=0, lineage=lineage(8))
    assert mask.tolist() == [True, False, True]


def test_a_version_of_an_abandoned_future_is_as_old_as_its_fork_point():
    known = lineage(*range(14), epoch=1)
    known.published(20, 13, forked_at=12)  # epoch 20 resumed from 12 and made another 13
    assert known.effective(1, 13) == 12
    assert known.effective(1, 11) == 11
    assert known.effective(20, 13) == 13
    verdict = judge([(1, 13, 4)], trainer_version=14, limit=1, lineage=known)
    assert (verdict.reason, verdict.staleness) == ("stale", 2)


def test_a_version_that_was_made_again_with_equal_digests_keeps_its_number():
    known = lineage(*range(14), epoch=1)
    known.published(20, 13, forked_at=13)
    assert known.effective(1, 13) == 13


def test_a_sample_without_trainable_tokens_is_refused_by_name():
    assert judge([], trainer_version=3, limit=2, lineage=lineage(3)).reason == "no_trainable_tokens"


def test_the_age_of_each_token_counts_a_fork_as_its_origin_and_an_unknown_version_as_none():
    lineage = Lineage()
    for version in range(4):
        lineage.published(1, version)
    lineage.published(9, 2, forked_at=2)  # epoch 9 resumed from version 2: (1, 3) is an abandoned future
    lineage.published(9, 3)
    ages = token_ages([(1, 0, 2), (1, 3, 1), (9, 3, 1), (9, 7, 2)], 3, lineage)
    assert ages.tolist() == [3, 3, 1, 0, -1, -1]
    assert ages.dtype.name == "int32" and token_ages([], 3, lineage).tolist() == []
