"""The staleness report against runs whose ages, shares and costs are worked out by hand."""

from __future__ import annotations

import json

import msgspec
import pytest

from replay.ages.history import read_history
from replay.ages.measure import Report, measure
from replay.ages.text import report_text
from streams.events import Drop
from streams.log import NewRecord
from tests.support.ages import AgedRun, Made


def report_of(run: AgedRun) -> Report:
    return measure(read_history(run.log, run.topics))


def three_steps() -> AgedRun:
    """Limit 1, batches of one group. Seconds: group 1 waits in queue, group 2 grows old in flight and is dropped."""
    run = AgedRun(batch=1)
    run.published(0, 1, held_s=1)
    run.group(0, 1, [Made(1, 2), Made(1, 3)], 3)
    run.group(1, 1, [Made(1, 2), Made(2, 3, n_tokens=20)], 4)
    run.group(2, 1, [Made(2, 9), Made(2, 3)], 9, row=7)
    run.cut(1, {0: [0, 0]}, 4, ended_s=5, moved=0.1)
    run.published(1, 6)
    run.cut(2, {1: [1, 1]}, 7, ended_s=8, moved=0.1)
    run.published(2, 8)
    run.dropped(2, [Drop("0-2", 2, "stale", 2)], 10)
    run.group(3, 8, [Made(8, 10, 2), Made(8, 11, 2)], 12)
    run.group(4, 8, [Made(8, 10, 2)], None)  # its second sample never ended
    run.cut(3, {3: [0, 0]}, 13, ended_s=14, moved=0.1)
    run.published(3, 14)
    return run


def test_the_age_of_what_trained_is_split_into_flight_and_queue():
    trained = report_of(three_steps()).trained
    assert trained.staleness == {0: 4, 1: 2}
    assert trained.mean == pytest.approx(1 / 3)
    # group 1 ended in version 0 and was cut in version 1: all its age came in the queue
    assert trained.in_queue_versions == pytest.approx(1 / 3)
    assert trained.in_flight_versions == pytest.approx(0)
    assert trained.in_flight_s is not None and trained.in_queue_s is not None
    # in flight 1, 2, 1, 2, 2, 3 s; in queue 2, 1, 5, 4, 3, 2 s
    assert trained.in_flight_s.mean == pytest.approx(11 / 6)
    assert trained.in_queue_s.mean == pytest.approx(17 / 6)
    assert trained.in_queue_s.most == pytest.approx(5)


def test_the_age_of_what_was_dropped_says_that_it_was_too_long_in_flight():
    dropped = report_of(three_steps()).dropped
    assert dropped.staleness == {2: 2}
    # one sample ended at 9 s, in version 2; the other at 3 s, in version 0
    assert dropped.in_flight_versions == pytest.approx(1.0)
    assert dropped.in_queue_versions == pytest.approx(1.0)
    assert dropped.in_queue_s is not None and dropped.in_queue_s.most == pytest.approx(7)


def test_nothing_counts_as_in_flight_before_an_engine_has_weights():
    run = AgedRun(batch=1)
    run.group(0, 0, [Made(60, 61), Made(60, 62)], 62)
    run.published(0, 50, held_s=59)
    run.cut(1, {0: [0, 0]}, 63, ended_s=64)
    trained = report_of(run).trained
    assert trained.waiting_s is not None and trained.waiting_s.most == pytest.approx(1)
    assert trained.in_flight_s is not None and trained.in_flight_s.most == pytest.approx(3)


def test_tokens_are_accounted_for_by_what_became_of_their_group():
    waste = report_of(three_steps()).waste
    assert (waste.generated, waste.trained, waste.open) == (100, 70, 10)
    assert waste.dropped == {"stale": 20}
    assert waste.share == pytest.approx(20 / 90)


def test_masked_tokens_of_a_trained_group_are_waste():
    run = AgedRun(batch=1)
    run.published(0, 0, held_s=0)
    run.group(0, 0, [Made(0, 1, n_tokens=30), Made(0, 1, n_tokens=10)], 1)
    run._tokens[0] = [5, 10]  # 25 of 30 tokens were masked at the cut
    run.cut(1, {0: [1, 0]}, 2, ended_s=3, on_stale="mask")
    waste = report_of(run).waste
    assert (waste.trained, waste.not_trained, waste.share) == (15, 25, pytest.approx(25 / 40))


def test_the_trainers_time_is_split_into_steps_waiting_and_the_rest():
    times = report_of(three_steps()).times
    assert times is not None
    # cuts at 4, 7, 13 s; steps of 1 s each; group 3 was there at 12 s, 4 s after step 2 had ended
    assert times.steps_per_s == pytest.approx(2 / 9)
    assert times.training == pytest.approx(2 / 9)
    assert times.waiting == pytest.approx(4 / 9)
    assert times.overhead == pytest.approx(3 / 9)
    assert times.engine_busy is None


def test_samples_in_flight_are_averaged_over_the_time_of_the_steps():
    times = report_of(three_steps()).times
    # from 4 to 13 s: 5 s of group 2, 2 + 3 s of group 3, 2 s of group 4
    assert times is not None and times.in_flight == pytest.approx(12 / 9)


def test_length_classes_show_who_is_dropped():
    run = AgedRun(batch=1)
    run.published(0, 0, held_s=0)
    for seq in range(8):  # of 1 to 8 s; the two longest are dropped
        run.group(seq, 0, [Made(0, seq + 1, n_tokens=5), Made(0, 1, n_tokens=5)], seq + 1)
    for seq in range(6):
        run.cut(seq + 1, {seq: [0, 0]}, 10 + seq, ended_s=10.5 + seq)
    run.dropped(6, [Drop(f"0-{seq}", seq, "stale", 6) for seq in (6, 7)], 17)
    report = report_of(run)
    assert [each.name for each in report.by_seconds] == [
        "shortest quarter",
        "second quarter",
        "third quarter",
        "longest quarter",
    ]
    assert [each.up_to for each in report.by_seconds] == [2, 4, 6, 8]
    assert [each.share_trained for each in report.by_seconds] == [1, 1, 1, 0]
    assert [each.share_of_trained for each in report.by_seconds] == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    assert report.by_seconds[3].outcomes == {"stale": 2}
    assert [(each.name, each.groups) for each in report.by_tokens] == [("all", 8)]
    assert "leans to the short: 0% of the longest train, 100% of the shortest" in report_text(report)


def test_groups_left_over_at_the_end_neither_waste_nor_bias():
    run = AgedRun(batch=1)
    run.published(0, 0, held_s=0)
    for seq in range(4):
        run.group(seq, 0, [Made(0, 1 + seq), Made(0, 1)], 2)
    for seq in range(3):
        run.cut(seq + 1, {seq: [0, 0]}, 3 + seq, ended_s=3.5 + seq)
    run.dropped(3, [Drop("0-3", 3, "surplus")], 9)
    report = report_of(run)
    assert report.waste.share == 0
    assert report.waste.dropped == {"surplus": 20}
    assert [each.share_trained for each in report.by_seconds] == [1, 1, 1, 0]
    assert report.dropped.samples == 0


def test_a_slow_prompt_that_is_always_dropped_is_starved_and_its_class_never_trains():
    """O17: eight prompts, seven of one step and one of three, limit 1; the slow one is redone again and again."""
    run = AgedRun(batch=4)
    run.published(0, 0, held_s=0)
    seq, step = 0, 0
    for data_pass in range(4):
        quick = list(range(seq, seq + 7))
        slow = seq + 7
        begin = 10.0 * data_pass
        for each in quick:
            run.group(
                each,
                begin,
                [Made(begin, begin + 1, step), Made(begin, begin + 1, step)],
                begin + 1,
                row=each - seq,
            )
        run.group(slow, begin, [Made(begin, begin + 3, step, 90)] * 2, begin + 3, row=7)
        for part in (quick[:4], quick[4:]):
            step += 1
            run.cut(
                step, {each: [0, 0] for each in part}, begin + step % 2 + 1, ended_s=begin + step % 2 + 1.5
            )
            run.published(step, begin + 2.5)
        run.dropped(step, [Drop(f"0-{slow}", slow, "stale", 2)], begin + 4)
        seq += 8
    report = report_of(run)
    (starved,) = report.rows
    assert (starved.row, starved.stale, starved.trained, starved.is_starved) == (7, 4, 0, True)
    assert starved.generation_s == pytest.approx(3)
    assert starved.groups == ["0-15", "0-23", "0-31"]
    shares = {each.up_to: each.share_trained for each in report.by_seconds}
    assert shares == {1.0: 1.0, 3.0: 0.0}
    tokens = {each.up_to: each.share_of_trained for each in report.by_tokens}
    assert tokens == {10.0: 1.0, 90.0: 0.0}


def test_a_row_is_starved_again_when_it_is_dropped_three_times_after_it_trained():
    run = AgedRun(batch=1)
    run.published(0, 0, held_s=0)
    for seq in range(4):
        run.group(seq, seq, [Made(seq, seq + 0.5)] * 2, seq + 0.6, row=0)
    run.cut(1, {0: [0, 0]}, 1, ended_s=1.1)
    run.dropped(1, [Drop("0-1", 1, "stale", 1), Drop("0-2", 2, "stale", 1)], 3)
    assert report_of(run).rows == []  # dropped, but it had trained before
    run.dropped(1, [Drop("0-3", 3, "stale", 1)], 4)
    (row,) = report_of(run).rows
    assert (row.stale, row.trained, row.is_starved) == (3, 1, True)


def test_the_slope_of_the_reward_comes_with_its_error():
    run = AgedRun(batch=1)
    run.published(0, 0, held_s=0)
    for seq in range(3):
        run.group(seq, 0, [Made(0, 1)] * 2, 1)
    for step, reward in ((1, 0.0), (2, 0.2), (3, 0.1)):
        run.cut(step, {step - 1: [step - 1] * 2}, step + 1, ended_s=step + 1.5, limit=3, reward=reward)
    learning = report_of(run).learning
    assert learning.reward == pytest.approx(0.1)
    assert learning.reward_slope.per_step == pytest.approx(0.05)
    assert learning.reward_slope.error == pytest.approx(0.0866, abs=1e-4)  # sqrt(0.015 / 1 / 2)
    assert learning.mean_staleness == pytest.approx(1.0)


def test_a_report_of_one_step_has_no_rates_and_says_what_it_knows():
    run = AgedRun(batch=1)
    run.published(0, 0, held_s=0)
    run.group(0, 0, [Made(0, 1)] * 2, 1)
    run.cut(1, {0: [0, 0]}, 2)
    report = report_of(run)
    assert report.times is None and report.gauges == [] and report.drift is None
    assert report.unmeasured == [1]
    text = report_text(report)
    assert "no step of this run has been measured" in text and "1 step, version 0" in text


def test_a_limit_that_was_changed_is_shown_with_its_steps():
    run = AgedRun(batch=1)
    run.published(0, 0, held_s=0)
    for seq in range(3):
        run.group(seq, 0, [Made(0, 1)] * 2, 1)
    for step, limit in ((1, 2), (2, 2), (3, 4)):
        run.cut(step, {step - 1: [step - 1] * 2}, step + 1, ended_s=step + 1.5, limit=limit)
    report = report_of(run)
    assert report.limits == [(1, 2), (3, 4)]
    assert "limit 4 (2 from step 1, 4 from step 3)" in report_text(report)


def test_the_json_holds_every_number_by_name():
    raw = json.loads(msgspec.json.encode(report_of(three_steps())))
    assert raw["trained"]["staleness"] == {"0": 4, "1": 2}
    assert raw["gauges"][1]["values"]["mean_abs_log_ratio"] == pytest.approx(0.1)
    assert raw["drift"]["per_version"] == pytest.approx(0.1)
    assert raw["learning"]["reward_slope"]["per_step"] == pytest.approx(0.0)


def test_records_that_cannot_be_read_are_counted_and_the_rest_is_reported():
    run = three_steps()
    run.log.append(run.topics.name("rewards"), 0, [NewRecord(b"\xc1 not an event")])
    run.log.append(run.topics.name("ledger"), 0, [NewRecord(b"\xc1 neither")])
    report = report_of(run)
    assert (report.unreadable, report.trained.samples) == (2, 6)
    assert "2 records cannot be read and are left out" in report_text(report)


def test_what_retention_removed_is_said():
    run = three_steps()
    run.log.truncate_before(run.topics.name("rewards"), 0, 2)
    report = report_of(run)
    assert report.removed == 2
    assert report.trained.samples == 4  # group 0 is gone, and its tokens count neither as made nor as trained
    assert (report.waste.generated, report.waste.trained) == (80, 50)
    assert "retention has removed 2 records" in report_text(report)
