"""Whatever goes into a column comes back out of it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from streams import columns
from streams.errors import CodecError

ids = st.sampled_from([255, 65_535, 65_536, 200_000, 262_143, 262_144, 2**31 - 1]).flatmap(
    lambda top: st.lists(st.integers(0, top), max_size=300)
)


@given(ids)
@settings(max_examples=300, deadline=None)
def test_token_ids_come_back(values):
    assert columns.decode_ids(columns.encode_ids(values)).tolist() == values


@given(arrays.arrays(np.float32, st.integers(0, 300), elements=st.floats(-1e4, 0, width=32)))
@settings(max_examples=200, deadline=None)
def test_logprobs_come_back_to_the_bit(values):
    assert columns.decode_logprobs(columns.encode_logprobs(values)).tobytes() == values.tobytes()


@given(arrays.arrays(np.float32, st.integers(0, 300), elements=st.floats(-63.5, 0, width=32)))
@settings(max_examples=200, deadline=None)
def test_fixed_point_logprobs_come_back_within_half_a_step(values):
    back = columns.decode_logprobs(columns.encode_logprobs(values, "fixed1024"))
    assert len(back) == len(values)
    if len(values):
        assert np.abs(back - values).max() <= 0.5 / 1024 + 1e-6
        assert (back <= 0).all()


@given(st.lists(st.booleans(), max_size=400))
@settings(max_examples=200, deadline=None)
def test_masks_come_back(values):
    assert columns.decode_mask(columns.encode_mask(values)).tolist() == values


@given(st.lists(st.booleans(), max_size=400))
@settings(max_examples=200, deadline=None)
def test_values_that_a_mask_keeps_come_back_to_their_places(flags):
    mask = np.array(flags, bool)
    runs = columns.mask_runs(mask)
    values = -np.arange(1, len(mask) + 1, dtype=np.float32)
    kept = columns.keep(values, runs)
    assert np.array_equal(kept, values[mask])
    assert np.array_equal(columns.spread(kept, runs), np.where(mask, values, 0))
    assert np.array_equal(columns.runs_to_mask(runs), mask)


@given(arrays.arrays(np.uint32, st.integers(0, 20)))
@settings(max_examples=500, deadline=None)
def test_the_one_pass_check_passes_exactly_finite_values_with_the_sign_bit(bits):
    values = bits.view(np.float32)
    assert columns.all_negative(values) == bool((np.isfinite(values) & np.signbit(values)).all())


@given(st.binary(max_size=60))
@settings(max_examples=500, deadline=None)
def test_damaged_columns_are_codec_errors_and_nothing_else(column):
    for decode in (columns.decode_ids, columns.decode_logprobs, columns.decode_mask):
        try:
            decode(column)
        except CodecError:
            pass


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 5)), max_size=12), st.data())
@settings(max_examples=200, deadline=None)
def test_trainable_runs_count_exactly_the_trainable_tokens(runs, data):
    total = sum(run[2] for run in runs)
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=total, max_size=total)), bool)
    kept = columns.trainable_runs(runs, mask)
    assert sum(run[2] for run in kept) == mask.sum()
    per_token = [run[:2] for run in runs for _ in range(run[2])]
    expected = [pair for pair, trains in zip(per_token, mask, strict=True) if trains]
    assert [run[:2] for run in kept for _ in range(run[2])] == expected
    assert all(left[:2] != right[:2] for left, right in itertools.pairwise(kept))


def test_negative_and_fractional_ids_are_refused():
    for bad in ([-1], [2**31], [0.5]):
        with pytest.raises(CodecError):
            columns.encode_ids(np.array(bad))
