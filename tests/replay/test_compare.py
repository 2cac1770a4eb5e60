"""Recorded steps beside steps made again: bit for bit, by name."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from consumers.telemetry import SUMS
from replay.compare import MadeAgain, RecordedStep, differences, published_digests, recorded_steps
from streams.events import BatchCut, EpochStarted, Metrics, StepMeasured, StepSkipped, WeightsPublished
from streams.log import Record
from tests.support.events import EPOCH, put, run_log
from tests.support.recorded import cut

TABLE = np.arange(2 * len(SUMS), dtype=np.float64).reshape(2, len(SUMS))
CUT = cut(5, [1], [0])  # of samples 0-1/0/0 and 0-1/1/0


def recorded(**changes) -> RecordedStep:
    return RecordedStep(
        **{"cut": CUT, "digest": "d" * 64, "metrics": {"loss": 0.5}, "sums": TABLE.copy(), **changes}
    )


def redone(**changes) -> MadeAgain:
    return MadeAgain(
        **{
            "cut": CUT, "version": 5, "digest": "d" * 64, "metrics": {"loss": 0.5}, "sums": TABLE.copy(),
            **changes,
        }
    )  # fmt: skip


def test_equal_bits_are_no_difference():
    assert differences(recorded(), redone()) == []


@pytest.mark.parametrize(
    ("then", "now", "same"),
    [
        (0.1 + 0.2, 0.3, False),  # one bit
        (0.0, -0.0, False),
        (math.nan, math.nan, True),
        (1.0, 1, True),  # a whole number may have been written as one
    ],
)
def test_metrics_are_compared_bit_for_bit(then, now, same):
    found = differences(recorded(metrics={"loss": then}), redone(metrics={"loss": now}))
    assert (found == []) is same


def test_a_difference_has_both_values_with_every_digit():
    (found,) = differences(recorded(metrics={"loss": 0.1 + 0.2}), redone(metrics={"loss": 0.3}))
    assert (found.step, found.name, found.recorded, found.redone) == (5, "loss", "0.30000000000000004", "0.3")
    assert found.sentence() == "step 5: loss was 0.30000000000000004, made again it is 0.3"


def test_what_depends_on_a_clock_or_was_not_recorded_is_passed_over():
    then = {"loss": 0.5, "seconds": 1.0, "busy": 0.5, "gone": 1.0}
    now = {"loss": 0.5, "seconds": 2.0, "busy": 0.7, "new": 3.0}
    assert differences(recorded(metrics=then), redone(metrics=now)) == []
    assert differences(recorded(metrics=None, digest="", sums=None), redone(metrics={"loss": 9.0})) == []


def test_the_first_sample_whose_sums_differ_is_named():
    table = TABLE.copy()
    table[1, SUMS.index("sum_ratio")] += 1
    (found,) = differences(recorded(), redone(sums=table))
    assert found.name == "samples"
    was = float(TABLE[1, SUMS.index("sum_ratio")])
    assert found.text == f"sample 0-1/1/0: sum_ratio was {was!r}, made again it is {was + 1!r}"


def test_metrics_come_before_the_weights_that_they_lead_to():
    found = differences(recorded(), redone(metrics={"loss": 0.6}, digest="e" * 64, sums=TABLE + 1))
    assert [each.name for each in found] == ["loss", "samples", "weights"]
    assert "sample 0-1/0/0 and 1 more: n_tokens was 0.0, made again it is 1.0" in found[1].text
    assert "version 5 had digest dddddddddddd…, made again they have eeeeeeeeeeee…" in found[2].text


def test_a_step_skipped_on_one_side_only_is_one_difference():
    (found,) = differences(recorded(skipped="nonfinite_loss"), redone(metrics={"loss": 9.0}))
    assert (found.name, found.recorded, found.redone) == ("skipped", "skipped (nonfinite_loss)", "taken")


# ---------------------------------------------------------------- from the log
def history(*events):
    return [(Record("run.ledger", 0, offset, 0, (), b""), event) for offset, event in enumerate(events)]


def published(version: int, digest: str, *, epoch: int = EPOCH, forked_at: int = -1) -> WeightsPublished:
    return WeightsPublished(
        epoch=epoch, version=version, step=version, digest=digest, uris={}, forked_at=forked_at
    )


def test_a_version_published_again_after_a_recovery_counts_once():
    again = published(2, "b", epoch=9, forked_at=2)
    events = history(published(1, "a"), published(2, "b"), again, published(3, "c", epoch=9))
    assert published_digests(events) == {1: "a", 2: "b", 3: "c"}


def test_versions_above_a_fork_are_nobodys_ancestors():
    events = history(
        published(1, "a"), published(2, "b"), published(3, "c"), published(3, "other", epoch=9, forked_at=1)
    )
    assert published_digests(events) == {1: "a", 3: "other"}


def measured(step: int, *, epoch: int = EPOCH, version: int | None = None, loss: float = 0.5) -> StepMeasured:
    return StepMeasured(
        step=step,
        epoch=epoch,
        version=step - 1 if version is None else version,
        names=list(SUMS),
        n_samples=2,
        sums=TABLE.tobytes(),
        values={"loss": loss},
    )


def test_a_step_is_what_its_own_epoch_measured():
    log, topics = run_log()
    first = msgspec.structs.replace(cut(1, [0], [0]), epoch=EPOCH)
    second = msgspec.structs.replace(cut(2, [1], [0]), epoch=9)
    put(log, topics, "metrics", measured(1, loss=0.25))
    put(log, topics, "metrics", measured(2, epoch=EPOCH, loss=99.0))  # of a cut that is void
    put(log, topics, "metrics", measured(2, epoch=9, loss=0.75))
    put(log, topics, "metrics", measured(2, epoch=EPOCH, loss=98.0))
    found = recorded_steps(log, topics, history(first, second), 1, 2)
    losses = {step: each.metrics["loss"] for step, each in found.items() if each.metrics is not None}
    assert losses == {1: 0.25, 2: 0.75}
    assert found[1].sums is not None and found[1].sums.tolist() == TABLE.tolist()


def test_without_its_own_measurement_a_step_has_the_trainers_metrics_unless_two_trainers_wrote_them():
    log, topics = run_log()
    put(log, topics, "metrics", Metrics(source="trainer", step=1, values={"loss": 0.25}))
    for loss in (0.5, 0.75):
        put(log, topics, "metrics", Metrics(source="trainer", step=2, values={"loss": loss}))
    put(log, topics, "metrics", Metrics(source="eval", step=3, values={"loss": 9.0}))
    cuts = history(cut(1, [0], [0]), cut(2, [1], [0]), cut(3, [2], [0]))
    found = recorded_steps(log, topics, cuts, 1, 3)
    assert {step: each.metrics for step, each in found.items()} == {1: {"loss": 0.25}, 2: None, 3: None}
    assert all(each.sums is None for each in found.values())


def test_a_column_that_an_older_writer_did_not_know_is_not_compared():
    log, topics = run_log()
    old = msgspec.structs.replace(measured(1), names=list(SUMS[:-1]), sums=TABLE[:, :-1].tobytes())
    put(log, topics, "metrics", old)
    then = recorded_steps(log, topics, history(cut(1, [0], [0])), 1, 1)[1].sums
    assert then is not None and then[:, :-1].tolist() == TABLE[:, :-1].tolist()
    assert differences(recorded(sums=then), redone(sums=TABLE)) == []
    moved = TABLE.copy()
    moved[0, 0] = 0.5
    (found,) = differences(recorded(sums=then), redone(sums=moved))
    assert found.text == "sample 0-1/0/0: n_tokens was 0.0, made again it is 0.5"


def test_columns_of_another_writer_are_not_taken_for_ours():
    log, topics = run_log()
    put(log, topics, "metrics", msgspec.structs.replace(measured(1), names=["n_tokens", "something_else"]))
    found = recorded_steps(log, topics, history(cut(1, [0], [0])), 1, 1)
    assert found[1].sums is None and found[1].metrics == {"loss": 0.5}


def test_only_the_steps_asked_for_and_a_skipped_one_has_no_weights():
    log, topics = run_log()
    events = history(
        EpochStarted(producer="t", started_ms=0),
        *(cut(step, [step], [0]) for step in range(1, 5)),
        StepSkipped(epoch=EPOCH, step=3, version=2, reason="nonfinite_loss"),
        published(2, "b"),
        published(3, "c"),
    )
    found = recorded_steps(log, topics, events, 2, 3)
    assert {step: (each.digest, each.skipped) for step, each in found.items()} == {
        2: ("b", ""), 3: ("", "nonfinite_loss"),
    }  # fmt: skip
    assert isinstance(found[2].cut, BatchCut) and found[2].uids == ["0-2/0/0", "0-2/1/0"]
