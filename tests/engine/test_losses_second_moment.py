"""M2PO's mask: right against a plain sort, and the same however the tokens lie on ranks."""

import math
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.algorithms.second_moment import least_masked, outliers, squares_of_harmful

WAIT_S = 30.0


def plain(squares: np.ndarray, limit: float) -> float:
    """Sort; take the largest (with its equals) away while the mean of the rest is over the limit."""
    left = sorted(float(each) for each in squares if each >= 0)
    least = math.inf
    while left and math.fsum(left) > limit * len(left):
        least = left[-1]
        left = [each for each in left if each < least]
    return least


def on_ranks(parts: Sequence[np.ndarray], limit: float) -> list[float]:
    """`least_masked` on as many threads, which add up by rank as a collective would."""
    barrier = threading.Barrier(len(parts))
    slots: list[list[float]] = [[] for _ in parts]
    found: list[float] = [math.nan] * len(parts)

    def sums_of(rank: int) -> Callable[[Sequence[float]], list[float]]:
        def total(values: Sequence[float]) -> list[float]:
            slots[rank] = list(values)
            barrier.wait(WAIT_S)
            result = [math.fsum(column) for column in zip(*slots, strict=True)]
            barrier.wait(WAIT_S)
            return result

        return total

    def run(rank: int) -> None:
        found[rank] = least_masked(parts[rank], limit, sums_of(rank))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    return found


def test_the_largest_are_masked_until_the_mean_of_the_others_is_at_the_limit():
    squares = np.array([0.25, -1, 0.01, 0.09, 0.04], np.float32)
    assert least_masked(squares, 0.1) == math.inf  # the mean of all four is 0.0975
    assert least_masked(squares, 0.05) == 0.25
    assert least_masked(squares, 0.03) == np.float32(0.09)
    assert least_masked(squares, 0.001) == np.float32(0.01)  # even the smallest alone is over it
    assert least_masked(np.zeros(0, np.float32), 0.1) == math.inf


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(0, 4, width=32), max_size=40),
    st.floats(1e-3, 1.0),
    st.integers(1, 4),
)
def test_any_tokens_on_any_ranks_give_the_mask_of_a_plain_sort(values: list[float], limit: float, ranks: int):
    squares = np.array(values, np.float32)
    total = float(squares.astype(np.float64).sum())
    want = plain(squares, limit)
    parts = [squares[rank::ranks] for rank in range(ranks)]
    found = on_ranks(parts, limit) if ranks > 1 else [least_masked(squares, limit)]
    if abs(total - limit * len(squares)) > 1e-9:  # on the edge itself rounding may say either
        assert found == [want] * ranks


def test_equal_squares_are_masked_together():
    assert least_masked(np.array([0.5, 0.5, 0.5, 0.1], np.float32), 0.3) == 0.5


def test_what_is_not_a_number_stays_in_the_loss_and_infinity_goes():
    squares = np.array([math.nan, math.inf, 0.01], np.float32)
    assert least_masked(squares, 0.1) == math.inf
    log_ratios = torch.tensor([math.nan, math.inf, 0.1])
    assert outliers(log_ratios, torch.ones(3), 0.1).tolist() == [False, True, False]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_only_moves_that_the_update_would_carry_on_count(advantage: float):
    log_ratios = torch.tensor([0.5, -0.5, 0.0])
    squares = squares_of_harmful(log_ratios, torch.full((3,), advantage)).tolist()
    assert squares == ([0.25, -1.0, -1.0] if advantage > 0 else [-1.0, 0.25, -1.0])
    assert squares_of_harmful(log_ratios, torch.zeros(3)).tolist() == [-1.0] * 3
