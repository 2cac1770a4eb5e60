"""Groups of a run with a teacher: complete with reward and scores, dropped by name without, also after restarts."""

from __future__ import annotations

from datetime import timedelta

import pytest

from consumers.collector import Collector
from streams import columns
from streams.events import GroupCompleted, GroupDropped, MembersMissing, TeacherFailed, TeacherScored
from tests.support.events import events, failed, member_fields, put, rewarded, run_log, task


def scored(seq: int, index: int, task_offset: int, **changes) -> TeacherScored:
    return TeacherScored(
        **member_fields(seq, index, task_offset, **changes),
        trajectory_offset=seq * 10 + index,
        logprobs=columns.encode_logprobs([-0.5, -0.5, -0.5]),
    )


def unscored(seq: int, index: int, task_offset: int, **changes) -> TeacherFailed:
    return TeacherFailed(
        **member_fields(seq, index, task_offset, **changes),
        reason="too_long",
        trajectory_offset=seq * 10 + index,
    )


class Bench:
    def __init__(self, **changes) -> None:
        self.now = 0.0
        self.log, self.topics = run_log()
        self.changes = {"with_teacher": True, "max_redispatch": 0, **changes}
        self.start()

    def start(self) -> None:
        self.stage = Collector(
            self.log,
            self.topics,
            member_deadline=timedelta(seconds=5),
            monotonic=lambda: self.now,
            **self.changes,
        )
        self.stage.start()

    def restart(self) -> None:
        self.stage.close()
        self.start()

    def put(self, *found) -> list[int]:
        return [put(self.log, self.topics, "rewards", event) for event in found]

    def task(self, **changes) -> None:
        put(self.log, self.topics, "tasks", task(0, 2, **changes))

    def settle(self) -> list:
        for _ in range(20):
            if not self.stage.round():
                return events(self.log, self.topics, "groups")
        raise AssertionError("the collector never comes to rest")

    def wait(self, seconds: int) -> list:
        for _ in range(seconds):
            self.now += 1
            self.stage.round()
        return self.settle()


def member(kind, index, **changes):
    args = (0, index, 0, 1.0) if kind is rewarded else (0, index, 0)
    return kind(*args, n_samples=2, **changes)


def test_a_group_is_complete_when_the_last_reward_and_the_last_scores_have_come():
    bench = Bench()
    bench.task()
    bench.put(member(rewarded, 0), member(rewarded, 1), member(scored, 1))
    assert bench.settle() == []
    (last,) = bench.put(member(scored, 0))
    (group,) = bench.settle()
    assert isinstance(group, GroupCompleted)
    assert [each.teacher_offset for each in group.members] == [last, 2]


def test_scores_may_come_before_the_reward():
    bench = Bench()
    bench.task()
    bench.put(member(scored, 0), member(scored, 1), member(rewarded, 1), member(rewarded, 0))
    (group,) = bench.settle()
    assert [each.teacher_offset for each in group.members] == [0, 1]


def test_scores_of_another_attempt_do_not_count_for_a_member():
    bench = Bench(max_redispatch=1)
    bench.task()
    bench.put(member(rewarded, 0), member(scored, 0), member(scored, 1), member(rewarded, 1, attempt=1))
    assert bench.settle() == [], "member 1 is attempt 1, of which the teacher has said nothing"
    (last,) = bench.put(member(scored, 1, attempt=1))
    (group,) = bench.settle()
    assert group.members[1].uid == "0-0/1/1" and group.members[1].teacher_offset == last


def test_a_second_opinion_is_a_copy():
    bench = Bench()
    bench.task()
    bench.put(
        member(scored, 0), member(scored, 0), member(rewarded, 0), member(rewarded, 1), member(scored, 1)
    )
    (group,) = bench.settle()
    assert group.members[0].teacher_offset == 0
    assert bench.stage.counts["duplicates_total"] == 1


def test_a_sample_that_cannot_be_scored_ends_its_group_by_name_whatever_came_first():
    for order in ((rewarded, unscored), (unscored, rewarded)):
        bench = Bench()
        bench.task()
        bench.put(member(rewarded, 1), member(scored, 1), *(member(kind, 0) for kind in order))
        (group,) = bench.settle()
        assert isinstance(group, GroupDropped)
        assert group.reason == "teacher_too_long"


def test_a_sample_that_cannot_be_scored_is_asked_for_again_while_attempts_are_left():
    bench = Bench(max_redispatch=1)
    bench.task()
    bench.put(member(rewarded, 0), member(unscored, 0), member(rewarded, 1), member(scored, 1))
    (missing,) = bench.settle()
    assert isinstance(missing, MembersMissing)
    assert (missing.indices, missing.attempt, missing.reason) == ([0], 1, "teacher_too_long")
    bench.put(member(rewarded, 0, attempt=1), member(scored, 0, attempt=1))
    group = bench.settle()[-1]
    assert isinstance(group, GroupCompleted)
    assert [each.uid for each in group.members] == ["0-0/0/1", "0-0/1/0"]


def test_with_a_smallest_group_size_the_others_train_without_it():
    bench = Bench(min_group_size=1)
    bench.task()
    bench.put(member(rewarded, 0), member(unscored, 0), member(rewarded, 1), member(scored, 1))
    (group,) = bench.settle()
    assert isinstance(group, GroupCompleted)
    assert [each.uid for each in group.members] == ["0-0/1/0"]


def test_scores_that_never_come_are_missed_at_the_deadline_and_named():
    bench = Bench()
    bench.task()
    bench.put(member(rewarded, 0), member(scored, 0), member(rewarded, 1))
    assert bench.wait(3) == []
    (group,) = bench.wait(5)
    assert isinstance(group, GroupDropped) and group.reason == "teacher_missing"


@pytest.mark.parametrize("restarts", [False, True])
def test_a_new_attempt_takes_the_place_of_one_whose_scores_never_came(restarts):
    bench = Bench(max_redispatch=1)
    bench.task()
    bench.put(member(rewarded, 0), member(scored, 0), member(rewarded, 1))
    (missing,) = bench.wait(8)
    assert (missing.indices, missing.attempt, missing.reason) == ([1], 1, "teacher_missing")
    bench.put(member(rewarded, 1, attempt=1))
    if restarts:
        bench.settle()
        bench.restart()
    (last,) = bench.put(member(scored, 1, attempt=1))
    group = bench.settle()[-1]
    assert isinstance(group, GroupCompleted)
    assert (group.members[1].uid, group.members[1].teacher_offset) == ("0-0/1/1", last)


def test_the_first_attempt_still_counts_when_its_scores_come_late():
    bench = Bench(max_redispatch=1)
    bench.task()
    bench.put(member(rewarded, 0), member(scored, 0), member(rewarded, 1))
    bench.wait(8)
    (late,) = bench.put(member(scored, 1))
    group = bench.settle()[-1]
    assert isinstance(group, GroupCompleted)
    assert (group.members[1].uid, group.members[1].teacher_offset) == ("0-0/1/0", late)


def test_the_deadline_stands_still_while_the_teacher_gives_no_sign_of_life():
    bench = Bench(owner_alive=lambda partition: False)
    bench.task()
    bench.put(member(rewarded, 0), member(scored, 0), member(rewarded, 1))
    assert bench.wait(30) == []


def test_a_restarted_collector_has_not_forgotten_what_the_teacher_said():
    bench = Bench()
    bench.task()
    bench.put(member(scored, 0), member(rewarded, 0), member(scored, 1))
    bench.settle()
    bench.restart()
    bench.put(member(rewarded, 1))
    (group,) = bench.settle()
    assert [each.teacher_offset for each in group.members] == [0, 2]


def test_without_a_teacher_in_the_run_its_events_are_passed_over():
    bench = Bench(with_teacher=False)
    bench.task()
    bench.put(member(scored, 0), member(rewarded, 0), member(unscored, 1), member(rewarded, 1))
    (group,) = bench.settle()
    assert isinstance(group, GroupCompleted)
    assert [each.teacher_offset for each in group.members] == [-1, -1]


def test_a_failure_of_the_reward_still_ends_the_group():
    bench = Bench()
    bench.task()
    bench.put(member(scored, 0), failed(0, 0, 0, "scorer_error", n_samples=2))
    (group,) = bench.settle()
    assert group.reason == "scorer_error"
