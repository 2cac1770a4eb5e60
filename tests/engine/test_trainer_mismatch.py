"""The mismatch watch: which samples compare, and which windows quarantine."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from consumers.staleness import Lineage
from consumers.telemetry import SUMS
from engine.algorithms.logprobs import flatten
from engine.interfaces import TrainBatch, TrainSample
from engine.trainer.dealing import deal
from engine.trainer.mismatch import (
    LEAST_SAMPLES,
    WINDOW,
    MismatchWatch,
    as_columns,
    compared_makers,
    from_columns,
    recall,
)
from engine.trainer.plan import minibatches
from streams.events import Metrics, StepMeasured
from streams.trajectory import Payload
from tests.support.events import put, run_log

A, B = ("rollout-0", "a1"), ("rollout-1", "b1")
N_TOKENS, SUM_ABS, MAX_ABS = (
    SUMS.index(name) for name in ("n_tokens", "sum_abs_log_ratio", "max_abs_log_ratio")
)


def rows(*means: float, tokens: float = 10, largest: float = 0.0) -> np.ndarray:
    """One row a sample, by its mean |lr|."""
    table = np.zeros((len(means), len(SUMS)))
    table[:, N_TOKENS], table[:, SUM_ABS], table[:, MAX_ABS] = tokens, np.array(means) * tokens, largest
    return table


def sample(*runs: tuple[int, int, int], mask: list[int] | None = None, maker=A) -> TrainSample:
    count = sum(n_tokens for _, _, n_tokens in runs)
    trained = np.array([1] * count if mask is None else mask, bool)
    payload = Payload(
        np.array([1], np.int32), np.arange(count, dtype=np.int32), np.zeros(count, np.float32), trained, list(runs),
        *maker,
    )  # fmt: skip
    return TrainSample("uid", payload, trained, 1.0)


def lineage(*published: tuple[int, int], fork: tuple[int, int] | None = None) -> Lineage:
    found = Lineage()
    for epoch, version in published:
        found.published(epoch, version, fork[1] if fork is not None and fork[0] == epoch else -1)
    return found


def compared(samples, versions: Lineage, *, version: int = 5, count: int = 1, seed: int = 7):
    return compared_makers(TrainBatch(1, version, seed, list(samples)), versions, count)


# ---------------------------------------------------------------- which samples compare
def test_only_samples_whose_trained_tokens_are_all_of_the_steps_own_version_compare():
    known = lineage((1, 4), (1, 5))
    fresh, old, mixed = sample((1, 5, 3)), sample((1, 4, 3)), sample((1, 4, 1), (1, 5, 2))
    masked = sample((1, 4, 1), (1, 5, 2), mask=[0, 1, 1])  # its old token is not trained
    untrained = sample((1, 5, 3), mask=[0, 0, 0])
    assert compared([fresh, old, mixed, masked, untrained], known) == [A, None, None, A, None]


def test_a_version_of_an_abandoned_future_does_not_compare_although_it_counts_as_fresh():
    """Epoch 9 forked after version 5: e1-v6 counts as 5, and is other weights; e1-v5 is the same weights."""
    known = lineage((1, 5), (1, 6), (9, 5), fork=(9, 5))
    assert known.effective(1, 6) == 5
    assert compared([sample((1, 6, 2)), sample((1, 5, 2)), sample((9, 5, 2))], known) == [None, A, A]
    assert compared([sample((1, 5, 2))], lineage((9, 5))) == [None], "nobody published it"


def test_with_several_optimizer_steps_the_samples_of_the_first_one_alone_compare():
    known = lineage((1, 5))
    found = compared(
        [sample((1, 5, 2), maker=(f"e{place}", "")) for place in range(10)], known, count=3, seed=4
    )
    assert [place for place, maker in enumerate(found) if maker] == deal(10, 3, 4)[0].tolist()
    assert sum(maker is not None for maker in found) == 4


@pytest.mark.parametrize("count", [1, 3, 4])
def test_the_samples_are_dealt_to_optimizer_steps_as_the_backend_deals_them(count: int):
    batch = [sample((1, 5, 2)) for _ in range(10)]
    for seed in range(5):
        theirs = minibatches(flatten(batch), count, seed)
        assert [part.tolist() for part in deal(10, count, seed)] == [part.tolist() for part in theirs]


def test_who_was_compared_survives_the_log():
    makers = [B, None, A, A, None]
    engines, places = as_columns(makers)
    event = StepMeasured(
        step=1, epoch=1, version=0, names=[], n_samples=5, sums=b"", engines=engines, compared=places
    )
    assert engines == [A, B] and from_columns(event) == makers
    of_schema_1_1 = StepMeasured(step=1, epoch=1, version=0, names=[], n_samples=2, sums=b"")
    assert from_columns(of_schema_1_1) == [None, None]


# ---------------------------------------------------------------- which windows quarantine
def test_mean_and_largest_difference_of_each_engine_are_metrics_of_the_step():
    watch = MismatchWatch(None)
    table = np.concatenate([rows(0.1, largest=0.5), rows(0.4, tokens=30, largest=2.0), rows(0.2), rows(9.0)])
    found = watch.add(1, [A, A, B, None], table)
    assert found == pytest.approx(
        {"mismatch/rollout-0": 0.325, "mismatch_max/rollout-0": 2.0, "mismatch/rollout-1": 0.2,
         "mismatch_max/rollout-1": 0.0}
    )  # fmt: skip
    assert watch.add(1, [None], rows(1.0)) == {}
    assert watch.add(1, [A, B], np.zeros((0, len(SUMS)))) == {}, "a backend without log-probs"
    assert watch.over() == []


def test_a_constant_offset_is_over_the_limit_once_there_are_enough_samples():
    watch = MismatchWatch(0.1)
    for count in range(1, LEAST_SAMPLES):
        watch.add(1, [A], rows(0.3))
        assert watch.over() == [], f"after {count} samples"
    watch.add(1, [A, B], rows(0.3, 0.05))
    [found] = watch.over()
    assert (found.maker, found.n_samples, found.n_tokens) == (A, LEAST_SAMPLES, 10 * LEAST_SAMPLES)
    assert found.mean == pytest.approx(0.3)
    record = found.record(epoch=3, step=8, at_ms=1)
    assert (record.engine, record.incarnation, record.limit, record.step) == ("rollout-0", "a1", 0.1, 8)


def test_a_difference_at_the_limit_or_below_quarantines_nobody():
    watch = MismatchWatch(0.25)
    watch.add(1, [A] * WINDOW, rows(*[0.25] * WINDOW))
    assert watch.over() == []


@pytest.mark.parametrize("odd", [1, 4])
def test_odd_samples_never_quarantine_however_odd_they_are(odd: int):
    watch = MismatchWatch(0.1)
    watch.add(1, [A] * 16, rows(*[0.01] * (16 - odd), *[1000.0] * odd))
    assert watch.over() == []


def test_an_odd_sample_of_very_many_tokens_does_not_outweigh_the_others():
    watch = MismatchWatch(0.1)
    watch.add(1, [A] * 16, np.concatenate([rows(*[0.01] * 15), rows(5.0, tokens=100_000)]))
    assert watch.over() == []


def test_a_fault_of_half_of_the_samples_is_found():
    watch = MismatchWatch(0.1)
    watch.add(1, [A] * WINDOW, rows(*[0.01, 1.0] * (WINDOW // 2)))
    assert [found.maker for found in watch.over()] == [A]


def test_what_an_engine_did_long_ago_is_forgotten():
    watch = MismatchWatch(0.1)
    watch.add(1, [A] * 40, rows(*[1.0] * 40))
    watch.add(1, [A] * WINDOW, rows(*[0.01] * WINDOW))
    assert watch.over() == []


def test_very_short_samples_are_judged_when_the_window_is_full():
    watch = MismatchWatch(0.1)
    watch.add(1, [A] * (WINDOW - 1), rows(*[0.5] * (WINDOW - 1), tokens=1))
    assert watch.over() == []
    watch.add(1, [A], rows(0.5, tokens=1))
    assert [found.n_tokens for found in watch.over()] == [WINDOW]


def test_each_incarnation_is_judged_by_its_own_samples():
    watch = MismatchWatch(0.1)
    again = (A[0], "a2")
    watch.add(1, [A] * 16 + [again] * 16, np.concatenate([rows(*[0.5] * 16), rows(*[0.01] * 16)]))
    assert [found.maker for found in watch.over()] == [A]
    watch.forget(A)
    assert watch.over() == []


# ---------------------------------------------------------------- after a restart
def measured(step: int, *means: float, epoch: int = 1, maker=A, names=SUMS) -> StepMeasured:
    table = rows(*means)[:, : len(names)]
    engines, places = as_columns([maker] * len(means))
    return StepMeasured(
        step=step, epoch=epoch, version=step - 1, names=list(names), n_samples=len(means),
        sums=table.astype("<f8").tobytes(), engines=engines, compared=places,
    )  # fmt: skip


def test_a_restarted_trainer_takes_the_evidence_of_the_newest_valid_steps_from_the_log():
    log, topics = run_log()
    for step in range(1, 5):
        put(log, topics, "metrics", measured(step, *[0.5] * 4))
        put(log, topics, "metrics", Metrics(source="feeder", values={}))
    put(log, topics, "metrics", measured(4, *[9.0] * 40, epoch=0, maker=B))  # of a step that is void
    watch = MismatchWatch(0.1)
    recall(log, topics, [(1, step) for step in range(1, 5)], watch)
    assert [(found.maker, found.n_samples) for found in watch.over()] == [(A, 16)]


def test_evidence_of_an_older_schema_or_of_no_step_at_all_is_no_evidence():
    log, topics = run_log()
    watch = MismatchWatch(0.1)
    recall(log, topics, [], watch)
    old = msgspec.structs.replace(measured(1, *[0.5] * 16, names=SUMS[:-1]), engines=[], compared=b"")
    put(log, topics, "metrics", old)
    recall(log, topics, [(1, 1)], watch)
    assert watch.over() == []
