"""What may enter the log as a sample (case O12), and what comes back out."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from streams import codec, trajectory
from streams.errors import CodecError, InvalidEvent
from streams.events import TrajectoryFinished
from streams.log import Record
from streams.trajectory import SampleData
from tests.support.events import decoded


def sample(**changes) -> SampleData:
    fields = {
        "uid": "0-7/1/0",
        "group_id": "0-7",
        "seq": 7,
        "index": 1,
        "attempt": 0,
        "n_samples": 4,
        "task_offset": 3,
        "prompt_ids": [5, 6],
        "response_ids": [11, 12, 13],
        "logprobs": [-0.5, -0.6, -0.7],
        "loss_mask": [1, 1, 1],
        "versions": [(1, 3, 3)],
        "finish_reason": "stop",
    }
    return SampleData(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "reason", "says"),
    [
        ({"logprobs": [-0.5, math.nan, -0.7]}, "nonfinite_logprob", "index 1"),
        ({"logprobs": [-0.5, None, -0.7]}, "missing_logprob", "index 1"),
        ({"logprobs": [-0.5, -math.inf, -0.7]}, "nonfinite_logprob", "index 1"),
        ({"logprobs": np.array([-0.5, -0.1, np.inf])}, "nonfinite_logprob", "index 2"),
        ({"logprobs": [-0.5, -0.7]}, "length_mismatch", "2≠3"),
        ({"logprobs": [-0.5, 0.4, -0.7]}, "positive_logprob", "index 1"),
        ({"loss_mask": [1, 1]}, "length_mismatch", "2≠3"),
        ({"loss_mask": [1, 2, 1]}, "bad_mask", "other than 0 and 1"),
        ({"versions": [(1, 3, 2)]}, "length_mismatch", "2≠3"),
        ({"versions": [(1, "default", 3)]}, "unknown_version", "default"),
        ({"versions": [(1, None, 3)]}, "unknown_version", "None"),
        ({"versions": [(1, -1, 3)]}, "unknown_version", "-1"),
        ({"response_ids": []}, "no_tokens", "response"),
        ({"prompt_ids": []}, "no_tokens", "prompt"),
        ({"response_ids": [1, -2, 3]}, "bad_token_id", "response"),
        ({"response_ids": [1.5, 2.0, 3.0]}, "bad_token_id", "integers"),
    ],
)
def test_values_that_must_not_be_trained_on_are_refused_by_name(changes, reason, says):
    with pytest.raises(InvalidEvent) as refused:
        trajectory.pack(sample(**changes))
    assert refused.value.reason == reason
    assert refused.value.uid == "0-7/1/0"
    assert says in str(refused.value)


def test_a_masked_position_needs_no_logprob_and_stores_zero():
    event = trajectory.pack(sample(logprobs=np.array([-0.5, np.nan, -0.7]), loss_mask=[1, 0, 1]))
    assert trajectory.open_payload(event).logprobs.tolist() == [-0.5, 0.0, np.float32(-0.7)]


@pytest.mark.parametrize("form", ["float32", "fixed1024"])
@pytest.mark.parametrize("mask", [[0, 0, 0], [1, 0, 1], [0, 1, 1], [0, 1, 0], [1, 1, 0]])
def test_only_the_logprobs_of_sampled_tokens_are_stored(mask, form):
    event = trajectory.pack(sample(logprobs=[-0.5, -0.25, -0.125], loss_mask=mask), logprob_format=form)
    assert len(event.logprobs) == sum(mask) * (4 if form == "float32" else 2) + 1
    expected = np.array([-0.5, -0.25, -0.125]) * mask
    assert np.array_equal(trajectory.open_payload(event).logprobs, expected)


def test_the_index_of_a_refused_logprob_counts_within_the_response():
    bad = sample(logprobs=[0.0, -0.6, math.nan], loss_mask=[0, 1, 1])
    with pytest.raises(InvalidEvent, match="index 2"):
        trajectory.pack(bad)


def test_zeros_are_stored_with_the_sign_bit_and_rounding_above_zero_becomes_zero():
    event = trajectory.pack(sample(logprobs=[0.0, 5e-5, -0.5]))
    stored = trajectory.open_payload(event).logprobs
    assert stored.tolist() == [0.0, 0.0, -0.5]
    assert np.signbit(stored).all()


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        ([-0.5, math.nan, -0.7], "nonfinite_logprob"),
        ([-0.5, -math.nan, -0.7], "nonfinite_logprob"),
        ([-0.5, -math.inf, -0.7], "nonfinite_logprob"),
        ([-0.5, math.inf, -0.7], "nonfinite_logprob"),
        ([-0.5, 0.4, -0.7], "positive_logprob"),
        ([-0.5, -0.7], "length_mismatch"),
    ],
)
def test_stored_logprobs_are_checked_again_when_they_are_opened(stored, reason):
    event = msgspec.structs.replace(
        trajectory.pack(sample()), logprobs=np.array(stored, "<f4").tobytes() + b"\0"
    )
    with pytest.raises(InvalidEvent, match=reason):
        trajectory.open_payload(event)


def test_zeros_without_the_sign_bit_open_as_well():
    event = msgspec.structs.replace(trajectory.pack(sample()), logprobs=bytes(12) + b"\0")
    assert trajectory.open_payload(event).logprobs.tolist() == [0.0, 0.0, 0.0]


def test_a_sample_comes_back_as_it_went_in():
    made = codec.encode(trajectory.pack(sample()), producer="test")
    payload = trajectory.open_payload(decoded(Record("t", 0, 0, 0, made.headers, made.value)))
    assert payload.prompt_ids.tolist() == [5, 6]
    assert payload.response_ids.tolist() == [11, 12, 13]
    assert np.array_equal(payload.logprobs, np.array([-0.5, -0.6, -0.7], np.float32))
    assert payload.loss_mask.tolist() == [True, True, True]
    assert payload.versions == [(1, 3, 3)]


def test_a_record_whose_columns_disagree_is_refused_when_it_is_opened():
    event = trajectory.pack(sample())
    longer = msgspec.structs.replace(event, n_response_tokens=4)
    with pytest.raises(InvalidEvent, match="length_mismatch"):
        trajectory.open_payload(longer)
    damaged = msgspec.structs.replace(event, logprobs=event.logprobs[:-1])
    with pytest.raises(CodecError):
        trajectory.open_payload(damaged)


def test_json_turns_nan_into_null_and_the_typed_reader_refuses_it():
    """Why payloads never travel as JSON lists: NaN would come back as nothing."""
    assert msgspec.json.encode(math.nan) == b"null"
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b"[null]", type=list[float])
    assert math.isnan(msgspec.msgpack.decode(msgspec.msgpack.encode(math.nan)))


def test_the_fixed_point_column_stays_within_its_error():
    logprobs = -np.linspace(0, 20, 400, dtype=np.float32)
    event = trajectory.pack(
        sample(
            response_ids=np.arange(400), logprobs=logprobs, loss_mask=np.ones(400), versions=[(1, 3, 400)]
        ),
        logprob_format="fixed1024",
    )
    assert isinstance(event, TrajectoryFinished)
    assert np.abs(trajectory.open_payload(event).logprobs - logprobs).max() <= 5e-4
