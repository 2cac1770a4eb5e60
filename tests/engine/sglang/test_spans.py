"""Labels and spans of weight versions."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.rollout.sglang.errors import BadAnswer
from engine.rollout.sglang.spans import Span, label, parse_label, version_runs

numbers = st.integers(0, 2**62)


@given(numbers, numbers)
def test_a_label_tells_its_epoch_and_version_again(epoch: int, version: int) -> None:
    assert parse_label(label(epoch, version)) == (epoch, version)


@pytest.mark.parametrize(
    "text", ["default", "", "7", "e1", "v3", "e1-v", "e01-v3", "e1-v3 ", "E1-v3", "e1-v3\n"]
)
def test_every_other_text_is_not_ours(text: str) -> None:
    assert parse_label(text) is None


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 50)), min_size=1, max_size=8))
def test_spans_without_gaps_give_runs_that_add_up(parts: list[tuple[int, int, int]]) -> None:
    spans, at = [], 0
    for epoch, version, count in parts:
        spans.append(Span(label(epoch, version), at, at + count))
        at += count
    runs = version_runs(spans, at)
    each = [(epoch, version) for epoch, version, count in runs for _ in range(count)]
    assert each == [(epoch, version) for epoch, version, count in parts for _ in range(count)]
    assert all(one[:2] != two[:2] for one, two in itertools.pairwise(runs))


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=5),
    st.integers(0, 4),
    st.sampled_from(["start", "end"]),
    st.sampled_from([-1, 1]),
)
def test_a_bound_that_is_moved_by_one_is_refused(counts: list[int], which: int, bound: str, by: int) -> None:
    spans, at = [], 0
    for version, count in enumerate(counts):
        spans.append(Span(label(0, version), at, at + count))
        at += count
    which %= len(spans)
    moved = spans[which]._replace(**{bound: getattr(spans[which], bound) + by})
    spans[which] = moved
    with pytest.raises(BadAnswer) as caught:
        version_runs(spans, at)
    assert caught.value.reason == "length_mismatch"


def test_an_answer_without_tokens_has_no_runs() -> None:
    assert version_runs([Span("default", 0, 0)], 0) == []
    assert version_runs([], 0) == []
