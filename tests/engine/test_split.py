"""Shares of a step: every row on one rank, balanced, and each share what a batch of its samples alone would be."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.algorithms.logprobs import PER_SAMPLE, PER_TOKEN, FlatBatch, flatten
from engine.trainer.plan import plan_step
from engine.trainer.split import split, take_rows
from engine.trainer.torch_settings import TorchSettings
from tests.engine.trainer_support import batch_of


def test_every_field_of_a_flat_batch_is_known_to_the_split():
    """A field that is added there must say whether it is one of samples or of tokens."""
    known = {*PER_SAMPLE, *PER_TOKEN, "ids", "row_starts", "token_starts", "sample"}
    assert known == set(FlatBatch._fields)


def test_rows_taken_are_the_flat_batch_of_those_samples():
    samples = batch_of(20, seed=2).samples
    rows = np.array([1, 4, 5, 13, 19])
    taken, tokens = take_rows(flatten(samples), rows)
    alone = flatten([samples[row] for row in rows])
    for name in FlatBatch._fields:
        ours, theirs = getattr(taken, name), getattr(alone, name)
        assert (ours is None) is (theirs is None), name
        if ours is not None and theirs is not None:
            assert np.array_equal(ours, theirs), name
    assert np.array_equal(flatten(samples).targets[tokens], alone.targets)


@settings(deadline=None)
@given(
    seed=st.integers(0, 1000),
    n=st.integers(1, 25),
    size=st.integers(1, 5),
    steps=st.sampled_from([1, 2, 4]),
)
def test_shares_hold_every_row_once_and_the_numbers_of_the_whole(seed: int, n: int, size: int, steps: int):
    batch = batch_of(n, seed=seed)
    if not any(sample.loss_mask.any() for sample in batch.samples):
        return
    plan = plan_step(batch, TorchSettings(num_steps_per_rollout=steps))
    shares = split(plan, size)
    tokens = np.concatenate([share.tokens for share in shares])
    assert sorted(tokens.tolist()) == list(range(len(plan.flat.targets)))
    for place, part in enumerate(plan.parts):
        of_ranks = [share.plan.parts[place] for share in shares]
        assert all((each.n_tokens, each.divisor) == (part.n_tokens, part.divisor) for each in of_ranks)
        fed = [
            int(share.plan.flat.fed[each.rows].sum()) for share, each in zip(shares, of_ranks, strict=True)
        ]
        assert sum(fed) == plan.flat.fed[part.rows].sum()
        # longest first, to the least loaded: no two ranks are further apart than one row
        assert max(fed) - min(fed) <= plan.flat.fed[part.rows].max(initial=0)
    again = split(plan_step(batch, TorchSettings(num_steps_per_rollout=steps)), size)
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(shares, again, strict=True))


def test_one_rank_gets_the_plan_as_it_is():
    plan = plan_step(batch_of(5), TorchSettings())
    (share,) = split(plan, 1)
    assert share.plan is plan
    assert share.tokens.tolist() == list(range(len(plan.flat.targets)))


def test_a_weight_of_tokens_goes_with_them():
    plan = plan_step(batch_of(12, seed=1), TorchSettings(loss_aggregation="sample"))
    assert plan.flat.weights is not None
    for share in split(plan, 3):
        assert share.plan.flat.weights is not None
        assert share.plan.flat.weights == pytest.approx(plan.flat.weights[share.tokens])
