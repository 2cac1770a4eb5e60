"""The audit finds what it promises to find: each test plants one violation in a run that is otherwise right."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from replay.verify import Report, verify
from streams import codec, trajectory
from streams.events import (
    BatchCut,
    CheckpointSaved,
    CutGroup,
    DataEnded,
    DeadLetter,
    Drop,
    EngineQuarantined,
    EngineReady,
    EpochStarted,
    Event,
    GroupCompleted,
    GroupsDropped,
    LedgerEvent,
    LimitChanged,
    RunFinished,
    StepSkipped,
    TrajectoryFinished,
    WeightsPublished,
)
from streams.log import NewRecord
from tests.support import recorded as run
from tests.support.recorded import recorded
from tests.support.world import World

replace = msgspec.structs.replace


def violations(report: Report) -> dict[str, list[list[str]]]:
    """Check → the ids of its violations; checks that hold are left out."""
    return {
        check.name: [each.ids for each in check.violations] for check in report.checks if check.violations
    }


def texts(report: Report) -> list[str]:
    return [violation.text for check in report.checks for violation in check.violations]


def audit(alter: run.Alter = lambda event: event, **files) -> Report:
    return verify(*recorded(alter), **files)


def in_step(step: int, change):
    """Alter the cut of one step."""
    return lambda event: change(event) if isinstance(event, BatchCut) and event.step == step else event


def with_member(cut: BatchCut, at: int, **changes) -> BatchCut:
    """The cut with the first member of its group number `at` changed."""
    groups = list(cut.groups)
    members = list(groups[at].members)
    members[0] = replace(members[0], **changes)
    groups[at] = replace(groups[at], members=members)
    return replace(cut, groups=groups)


def with_group(cut: BatchCut, at: int, **changes) -> BatchCut:
    groups = list(cut.groups)
    groups[at] = replace(groups[at], **changes)
    return replace(cut, groups=groups)


def append(log, topics, word: str, event: Event) -> None:
    log.append(topics.name(word), 0, [codec.encode(event, producer="test")])


# ---------------------------------------------------------------- what holds
def test_a_right_run_holds_and_everything_was_examined():
    report = audit()
    assert report.holds
    assert texts(report) == []
    examined = {check.name: check.examined for check in report.checks}
    assert examined["every ledger record can be read"] == 11
    assert examined["each group has at most one outcome"] == 6
    assert examined["each group of a finished run has an outcome"] == 6
    assert examined["no group is trained twice"] == 5
    assert examined["no sample is trained twice"] == 10
    assert examined["no trained token is older than the limit"] == 10
    assert examined["references name what was trained"] == 10
    assert report.notes["groups dropped: zero_variance"] == 1
    assert report.notes["groups open"] == 0


@pytest.mark.parametrize("crash_rate", [0.0, 0.05])
def test_a_run_of_the_real_stages_holds_also_under_crashes(tmp_path: Path, crash_rate: float):
    world = World(tmp_path, rows=6, data_epochs=2, batch=2, doubles=lambda uid: uid.endswith("/1/0"))
    world.run(random.Random(5), crash_rate=crash_rate)
    report = verify(world.log, world.topics)
    assert texts(report) == []
    assert report.notes["steps"] == 6
    examined = {check.name: check.examined for check in report.checks}
    assert examined["each group of a finished run has an outcome"] == 12
    assert examined["no trained token is older than the limit"] == 2 * report.notes["groups trained"] > 0


def test_records_of_a_fenced_trainer_are_void_and_counted():
    log, topics = recorded()
    epoch = log.append(
        topics.name("ledger"), 0, [codec.encode(EpochStarted(producer="b", started_ms=1), producer="b")]
    )
    append(log, topics, "ledger", run.cut(4, [0], [3, 3], frontier=6))  # the zombie trains group 0 again
    report = verify(log, topics)
    assert report.holds, texts(report)
    assert report.notes["void ledger records"] == 1
    append(log, topics, "ledger", run.cut(4, [0], [3, 3], frontier=6, epoch=epoch))
    assert "no group is trained twice" in violations(verify(log, topics))


def test_explained_dead_letters_and_unknown_types_are_counted_and_not_judged():
    log, topics = recorded()
    log.append(topics.name("tasks"), 0, [NewRecord(b"\xc1")])
    append(
        log,
        topics,
        "dead",
        DeadLetter(
            topic="run.tasks", partition=0, offset=3, raw=b"\xc1", stage="reward", reason="undecodable"
        ),
    )
    log.append(topics.name("ledger"), 0, [NewRecord(msgspec.msgpack.encode({"type": "lease", "epoch": 1}))])
    report = verify(log, topics)
    assert report.holds
    assert report.notes["dead letters"] == 1
    assert report.notes["  dead: reward: undecodable"] == 1
    assert report.notes["records of unknown type lease"] == 1


def test_samples_that_retention_removed_are_counted_and_not_judged():
    log, topics = recorded()
    log.truncate_before(topics.name("trajectories"), 0, 2)
    log.truncate_before(topics.name("groups"), 0, 1)
    report = verify(log, topics)
    assert report.holds, texts(report)
    assert report.notes["samples no longer kept"] == 2


def test_an_unfinished_run_may_have_open_groups():
    report = audit(
        lambda event: None if isinstance(event, RunFinished) or getattr(event, "step", 0) == 3 else event
    )
    assert report.holds, texts(report)
    assert report.notes["groups open"] == 1


# ---------------------------------------------------------------- outcomes
def test_a_group_with_two_outcomes_is_found():
    drops = [Drop("0-4", 4, "zero_variance"), Drop("0-0", 0, "incomplete")]
    report = audit(in_step(2, lambda cut: replace(cut, drops=drops)))
    assert violations(report) == {"each group has at most one outcome": [["0-0"]]}
    assert texts(report) == ["0-0: has 2 outcomes: used by step 1, dropped as incomplete at ledger:5"]


def test_a_group_without_an_outcome_is_found_once_the_run_has_finished():
    report = audit(in_step(2, lambda cut: replace(cut, drops=[])))
    found = violations(report)
    assert found["each group of a finished run has an outcome"] == [["0-4"]]
    assert found["positions pass over no group"] == [["step 2"]]
    assert "the frontier is the set of closed groups" in found


def test_a_seq_that_was_never_dispatched_is_found():
    report = audit(lambda event: replace(event, count=8) if isinstance(event, DataEnded) else event)
    assert violations(report) == {"each group of a finished run has an outcome": [["seq 6"], ["seq 7"]]}


def test_an_outcome_of_a_group_that_was_never_dispatched_is_found():
    drops = [Drop("0-4", 4, "zero_variance"), Drop("0-99", 99, "incomplete")]
    report = audit(in_step(2, lambda cut: replace(cut, drops=drops, closed_above=[(99, 100)])))
    assert violations(report)["each group has at most one outcome"] == [["0-99"]]


def test_a_group_under_two_numbers_is_found():
    log, topics = recorded()
    append(log, topics, "tasks", replace(run.task(0), seq=6))
    assert violations(verify(log, topics))["each group is dispatched under one number, to one partition"] == [
        ["0-0"]
    ]


def test_a_copy_of_a_dispatch_is_counted_and_not_judged():
    log, topics = recorded()
    append(log, topics, "tasks", run.task(0))
    report = verify(log, topics)
    assert report.holds
    assert report.notes["copies of dispatches"] == 1


def test_a_group_trained_twice_is_found():
    report = audit(in_step(3, lambda cut: replace(cut, groups=[*cut.groups, run.cut_group(3, 2)])))
    found = violations(report)
    assert found["no group is trained twice"] == [["0-3"]]
    assert found["no sample is trained twice"] == [["0-3/0/0"], ["0-3/1/0"]]
    assert "0-3/0/0: trained in steps 2, 3" in texts(report)


def test_a_sample_trained_twice_is_found():
    twice = CutGroup("0-5", 5, 1, 2, [*run.cut_group(5, 2).members, run.cut_group(5, 2).members[0]])
    report = audit(in_step(3, lambda cut: replace(cut, groups=[twice])))
    assert violations(report) == {"no sample is trained twice": [["0-5/0/0"]]}


# ---------------------------------------------------------------- staleness
def test_a_token_over_the_limit_is_found_in_the_payload_whatever_the_record_says():
    def old(event: Event) -> Event:
        if isinstance(event, TrajectoryFinished) and event.uid == "0-5/0/0":
            return replace(event, versions=[(1, 0, 1), (1, 2, 4)])
        return event

    report = audit(old)
    assert violations(report) == {
        "no trained token is older than the limit": [["0-5/0/0", "0-5"]],
        "recorded staleness is that of the payload": [["0-5/0/0", "0-5"]],
    }
    assert "0-5/0/0: trained in step 3 at staleness 2, over the limit 1" in texts(report)


def test_old_tokens_that_are_not_trainable_do_no_harm():
    def old(event: Event) -> Event:
        if isinstance(event, TrajectoryFinished) and event.uid == "0-5/0/0":
            return replace(
                event, versions=[(1, 2, 2), (1, 0, 1), (1, 2, 2)]
            )  # the middle token is masked out
        return event

    assert audit(old).holds


@pytest.mark.parametrize("version", [3, 7])  # 3 exists, but not yet when step 3 is cut
def test_a_version_that_was_not_published_before_the_cut_is_found(version: int):
    def change(event: Event) -> Event:
        if isinstance(event, TrajectoryFinished) and event.uid == "0-5/0/0":
            return replace(event, versions=[(1, version, 5)])
        return event

    report = audit(change)
    assert violations(report)["no trained token is older than the limit"] == [["0-5/0/0", "0-5"]]
    assert "0-5/0/0: trained in step 3 though unknown_version" in texts(report)


def test_a_version_above_the_trainers_own_is_found():
    report = audit(in_step(3, lambda cut: replace(cut, version=1)))
    assert "0-5/0/0: trained in step 3 though future" in texts(report)


def test_a_wrong_recorded_staleness_is_found():
    report = audit(in_step(2, lambda cut: with_member(cut, 0, staleness=0)))
    assert violations(report) == {"recorded staleness is that of the payload": [["0-2/0/0", "0-2"]]}
    assert texts(report) == ["0-2/0/0: step 2 records staleness 0 over 4 tokens, its payload says 1 over 4"]


def test_masked_tokens_must_be_left_out_of_the_count():
    def mask(tokens: int):
        def alter(event: Event) -> Event:
            if isinstance(event, TrajectoryFinished) and event.uid == "0-5/0/0":
                return replace(event, versions=[(1, 0, 2), (1, 2, 3)])  # two stale trainable tokens of four
            if isinstance(event, BatchCut) and event.step == 3:
                return with_member(replace(event, on_stale="mask"), 0, n_trainable_tokens=tokens)
            return event

        return alter

    assert audit(mask(2)).holds
    assert violations(audit(mask(4))) == {"recorded staleness is that of the payload": [["0-5/0/0", "0-5"]]}


def test_a_limit_that_was_not_in_force_is_found():
    report = audit(in_step(2, lambda cut: replace(cut, limit=5)))
    assert violations(report) == {"each cut keeps the limit in force": [["step 2"]]}


def with_changes(*changes: tuple[int, LimitChanged], **limits: tuple[int, int]) -> Report:
    """The run with a change of the limit before the record at each place, and the cuts of the steps named as
    `step_3=(limit, read_to)`."""
    log, topics = recorded(lambda event: None if isinstance(event, LedgerEvent) else event)
    events = run.ledger()
    for place, change in changes:
        events.insert(place, change)
    for event in events:
        if isinstance(event, BatchCut) and f"step_{event.step}" in limits:
            limit, read_to = limits[f"step_{event.step}"]
            event = replace(event, limit=limit, ledger_read_to=read_to)
        append(log, topics, "ledger", event)
    return verify(log, topics)


LIMIT_CHECK = "each cut keeps the limit in force"


def test_a_change_of_the_limit_binds_from_the_first_cut_that_had_read_it():
    change = (6, LimitChanged(limit=3, by="cli"))
    assert with_changes(change, step_3=(3, 9)).holds
    assert with_changes(change, step_3=(1, 6)).holds
    assert violations(with_changes(change, step_3=(1, 9))) == {LIMIT_CHECK: [["step 3"]]}
    assert violations(with_changes(change, step_3=(3, 6))) == {LIMIT_CHECK: [["step 3"]]}


def test_a_change_of_the_limit_that_binds_before_or_after_its_step_is_found():
    change = (3, LimitChanged(limit=3, from_step=3, by="cli"))
    assert with_changes(change, step_1=(1, 4), step_2=(1, 6), step_3=(3, 9)).holds
    early = with_changes(change, step_1=(1, 4), step_2=(3, 6), step_3=(3, 9))
    assert violations(early) == {LIMIT_CHECK: [["step 2"]]}
    assert "step 2: was cut at limit 3, 1 was in force" in texts(early)
    never = with_changes(change, step_1=(1, 4), step_2=(1, 6), step_3=(1, 9))
    assert violations(never) == {LIMIT_CHECK: [["step 3"]]}


def test_a_change_of_the_limit_that_binds_although_it_was_replaced_while_it_waited_is_found():
    changes = (3, LimitChanged(limit=3, from_step=2)), (4, LimitChanged(limit=2, from_step=3))
    assert with_changes(*changes, step_1=(1, 5), step_2=(1, 7), step_3=(2, 10)).holds
    replaced = with_changes(*changes, step_1=(1, 5), step_2=(3, 7), step_3=(2, 10))
    assert violations(replaced) == {LIMIT_CHECK: [["step 2"]]}
    begun = (3, changes[0][1]), (6, changes[1][1])  # the first had begun, for step 2, when the second came
    assert with_changes(*begun, step_1=(1, 4), step_2=(3, 6), step_3=(2, 10)).holds


def test_the_limit_that_an_epoch_began_with_holds_from_its_first_cut():
    def began_with(limit: int) -> Report:
        return audit(lambda event: replace(event, limit=limit) if isinstance(event, EpochStarted) else event)

    assert began_with(run.LIMIT).holds
    assert violations(began_with(2)) == {LIMIT_CHECK: [["step 1"], ["step 2"], ["step 3"]]}


# ---------------------------------------------------------------- references
def test_a_reference_to_another_sample_is_found():
    report = audit(in_step(2, lambda cut: with_member(cut, 0, trajectory_offset=0)))
    found = violations(report)
    assert set(found) == {"references name what was trained"}
    assert texts(report)[0] == "0-2/0/0: step 2: trajectories/0:0 holds 0-0/0/0 of group 0-0"


def test_a_reference_to_nothing_is_found():
    report = audit(in_step(2, lambda cut: with_member(cut, 0, trajectory_offset=999)))
    assert "0-2/0/0: step 2: trajectories/0:999: run.trajectories/0 ends at 6" in texts(report)


def test_references_outside_the_log_are_found():
    report = audit(in_step(2, lambda cut: with_group(cut, 0, partition=9)))
    assert "0-2/0/0: step 2: trajectories/9:2: run.trajectories/9 ends at 0" in texts(report)
    assert "0-2/0/0: step 2: groups/9:1 is no GroupCompleted" in texts(report)
    report = audit(in_step(2, lambda cut: with_member(cut, 0, trajectory_offset=-1)))
    assert set(violations(report)) == {"references name what was trained"}


def test_a_group_record_of_another_group_is_found():
    report = audit(in_step(2, lambda cut: with_group(cut, 0, group_offset=0)))
    assert "0-2/0/0: step 2: groups/0:0 is about group 0-0" in texts(report)


def test_a_reward_that_is_not_the_groups_is_found():
    report = audit(in_step(2, lambda cut: with_member(cut, 0, reward=0.75)))
    assert violations(report) == {"references name what was trained": [["0-2/0/0", "0-2"]]}


def test_a_payload_that_does_not_open_is_found():
    def broken(event: Event) -> Event:
        if isinstance(event, TrajectoryFinished) and event.uid == "0-2/0/0":
            return replace(event, loss_mask=event.loss_mask[:-2])
        return event

    assert set(violations(audit(broken))) == {"references name what was trained"}


# ---------------------------------------------------------------- order
def test_a_missing_step_is_found():
    report = audit(in_step(2, lambda cut: None))
    assert violations(report)["steps and versions follow each other"] == [["step 3"], ["step 3"]]
    assert "step 3: follows step 1" in texts(report)


def test_a_step_from_a_version_that_was_not_the_newest_is_found():
    report = audit(in_step(2, lambda cut: replace(cut, version=0)))
    assert "step 2: starts from version 0, 1 was the newest" in texts(report)


def test_a_skipped_step_makes_no_version():
    def skip(event: Event) -> Event:
        if isinstance(event, WeightsPublished) and event.version == 1:
            return StepSkipped(epoch=1, step=1, version=0, reason="nonfinite_loss")
        return event

    report = audit(skip)
    assert "step 2: starts from version 1, 0 was the newest" in texts(report)


def test_one_version_under_two_digests_is_found():
    log, topics = recorded()
    append(log, topics, "ledger", replace(run.published(3), digest="another"))
    assert violations(verify(log, topics)) == {"steps and versions follow each other": [["version e1-v3"]]}


def test_a_frontier_that_hides_an_open_group_is_found():
    report = audit(in_step(1, lambda cut: replace(cut, frontier=4)))
    assert violations(report)["the frontier is the set of closed groups"][0] == ["ledger:3"]


def test_positions_that_go_back_are_found():
    report = audit(in_step(3, lambda cut: replace(cut, positions=[2, 3])))
    assert violations(report) == {"positions pass over no group": [["step 3"]]}
    assert texts(report) == ["step 3: groups/0 went back from 3 to 2"]


def test_positions_beyond_a_waiting_group_are_found():
    report = audit(in_step(1, lambda cut: replace(cut, positions=[2, 1])))
    assert texts(report) == ["step 1: groups/0:1 (seq 2) was passed over without an outcome"]


def test_drops_outside_a_batch_close_their_groups_too():
    log, topics = recorded(
        lambda event: (
            replace(event, drops=[], frontier=4) if isinstance(event, BatchCut) and event.step == 2 else event
        )
    )
    assert not verify(log, topics).holds
    events = run.ledger()
    events[5] = run.cut(2, [2, 3], [2, 2])
    events.insert(6, GroupsDropped(epoch=1, version=2, drops=[Drop("0-4", 4, "zero_variance")], frontier=5))
    log, topics = recorded(lambda event: None if event in run.ledger() else event)
    for event in events:
        append(log, topics, "ledger", event)
    assert texts(verify(log, topics)) == []


def test_a_ledger_record_that_cannot_be_read_is_a_violation():
    log, topics = recorded()
    log.append(topics.name("ledger"), 0, [NewRecord(b"\xc1ga")])
    assert violations(verify(log, topics)) == {"every ledger record can be read": [["ledger:11"]]}


# ---------------------------------------------------------------- files
def test_a_weights_file_with_other_contents_is_found_and_a_missing_one_passed_over():
    held = {1: "digest of 1", 2: "something else"}
    report = audit(weights_digest=lambda event: held.get(event.version))
    assert violations(report) == {"weights files hold what was published": [["version e1-v2"]]}
    assert report.checks[-1].examined == 2


def test_a_damaged_checkpoint_is_found():
    def refuse(event: CheckpointSaved) -> str:
        raise ValueError("model.safetensors is missing")

    log, topics = recorded()
    saved = CheckpointSaved(
        epoch=1, version=3, step=3, path="checkpoints/e1-s3", digest="d", ledger_position=11
    )
    append(log, topics, "ledger", saved)
    report = verify(log, topics, checkpoint_digest=refuse)
    assert texts(report) == ["checkpoint checkpoints/e1-s3: cannot be read: model.safetensors is missing"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"step": 7}, "is of step 7, which was never cut"),
        ({"version": 2}, "has version 2, step 3 made 3"),
        ({"ledger_position": 8}, "would replay step 3, which it holds (ledger position 8)"),
        ({"step": 2, "version": 2}, "would not replay step 3 (ledger position 11)"),
    ],
)
def test_a_checkpoint_that_does_not_follow_the_ledger_is_found(changes: dict[str, int], text: str):
    log, topics = recorded()
    saved = CheckpointSaved(epoch=1, version=3, step=3, path="checkpoints/c", digest="d", ledger_position=11)
    append(log, topics, "ledger", saved)
    assert verify(log, topics).holds
    append(log, topics, "ledger", replace(saved, **changes))
    assert texts(verify(log, topics)) == [f"checkpoint checkpoints/c: {text}"]


# ---------------------------------------------------------------- versions and engines
def test_a_version_below_one_that_was_published_is_found():
    log, topics = recorded()
    append(log, topics, "ledger", run.published(1))
    assert violations(verify(log, topics)) == {"versions and epochs never go back": [["e1-v1"]]}


def test_a_new_epoch_may_publish_the_newest_version_again():
    log, topics = recorded(lambda event: None if isinstance(event, RunFinished) else event)
    append(log, topics, "ledger", EpochStarted(producer="trainer-2", started_ms=9500))
    epoch = log.end(topics.name("ledger"), 0) - 1
    append(log, topics, "ledger", replace(run.published(3), epoch=epoch, forked_at=3))
    assert "versions and epochs never go back" not in violations(verify(log, topics))


def test_an_engine_that_held_other_weights_than_were_published_is_found():
    report = audit(
        lambda event: replace(event, digest="other") if event == run.ready(1) else event,
    )
    check = "every served version was acknowledged with the published digest"
    assert violations(report) == {check: [["0-3/0/0"], ["0-3/1/0"]]}
    assert texts(report)[0] == "0-3/0/0: rollout-0 held other as e1-v1, published was digest of 1"


def test_an_engine_that_never_said_what_it_holds_is_found():
    report = audit(lambda event: None if event == run.ready(2) else event)
    assert texts(report)[0] == "0-5/0/0: rollout-0 generated with e1-v2 and never said that it holds it"


ACKNOWLEDGED = "no sample carries a version that was not acknowledged"


def by_incarnation(of_seq, ready_of=lambda version: "a1"):
    """The run as a writer of schema 1.2 leaves it: `of_seq` says whose process made the samples of a group."""

    def alter(event: Event) -> Event:
        if isinstance(event, TrajectoryFinished):
            return replace(event, incarnation=of_seq(event.seq))
        return (
            replace(event, incarnation=ready_of(event.version)) if isinstance(event, EngineReady) else event
        )

    return alter


def test_a_run_whose_every_process_acknowledged_what_it_served_holds():
    report = audit(by_incarnation(lambda seq: "a1"))
    assert report.holds
    (check,) = (each for each in report.checks if each.name == ACKNOWLEDGED)
    assert check.examined == 3  # one process, three versions


def test_a_restarted_engine_that_served_what_only_its_former_process_had_acknowledged_is_found():
    report = audit(by_incarnation(lambda seq: "a2" if seq == 3 else "a1"))
    assert violations(report) == {ACKNOWLEDGED: [["0-3/0/0"]]}
    assert texts(report) == [
        "0-3/0/0: rollout-0 (incarnation a2) had not acknowledged e1-v1, with which it generated"
    ]


def test_a_sample_that_was_never_trained_is_examined_too():
    assert violations(audit(by_incarnation(lambda seq: "a2" if seq == 4 else "a1"))) == {
        ACKNOWLEDGED: [["0-4/0/0"]]
    }


def test_an_untrained_sample_of_a_version_that_nobody_published_is_the_trainers_to_refuse():
    alter = by_incarnation(lambda seq: "a1")

    def unknown(event: Event) -> Event:
        if isinstance(event, TrajectoryFinished) and event.seq == 4:
            return replace(alter(event), versions=[(run.EPOCH, 77, 5)])
        return alter(event)

    assert audit(unknown).holds


def test_runs_of_older_writers_raise_no_alarm_about_processes():
    assert ACKNOWLEDGED not in violations(audit(by_incarnation(lambda seq: "", lambda version: "")))
    assert audit(by_incarnation(lambda seq: "", lambda version: "a1")).holds


def quarantined_before(kind: type[Event], incarnation: str, epoch: int = run.EPOCH):
    """A quarantine in the place of the one ledger record of this type."""
    alter = by_incarnation(
        lambda seq: "a1" if seq < 5 else "a2", lambda version: "a2" if version == 2 else "a1"
    )
    record = EngineQuarantined(
        epoch=epoch, engine="rollout-0", incarnation=incarnation, step=2, mismatch=0.5, limit=0.1, n_samples=16,
        n_tokens=400,
    )  # fmt: skip
    return lambda event: record if isinstance(event, kind) else alter(event)


def test_a_sample_of_a_quarantined_engine_that_was_trained_is_found():
    report = audit(quarantined_before(DataEnded, "a2"))  # between the steps 2 and 3
    assert violations(report) == {
        "nothing of a quarantined engine is trained": [["0-5/0/0", "0-5"], ["0-5/1/0", "0-5"]]
    }
    assert texts(report)[0] == "0-5/0/0: trained in step 3 though rollout-0 was quarantined before"


def test_what_was_trained_before_the_quarantine_or_after_a_new_start_stays_right():
    assert audit(quarantined_before(DataEnded, "a1")).holds
    assert audit(quarantined_before(RunFinished, "a2")).holds
    assert audit(quarantined_before(DataEnded, "a2", epoch=0)).holds, "a void record"


def test_a_payload_of_another_length_than_was_scored_is_found():
    def longer(event: Event) -> Event:
        if not isinstance(event, GroupCompleted) or event.seq != 0:
            return event
        members = [event.members[0], replace(event.members[1], n_response_tokens=6)]
        return replace(event, members=members)

    report = audit(longer)
    assert violations(report) == {"references name what was trained": [["0-0/1/0", "0-0"]]}
    assert "has 5 response tokens, 6 were scored" in texts(report)[0]


def test_a_payload_other_than_the_one_that_was_scored_is_found():
    right = trajectory.payload_digest(run.finished(0, 0))

    def scored(event: Event, digest: str = right) -> Event:
        if not isinstance(event, GroupCompleted) or event.seq != 0:
            return event
        return replace(event, members=[replace(event.members[0], payload_digest=digest), event.members[1]])

    assert audit(scored).holds
    report = audit(lambda event: scored(event, "0" * 32))
    assert violations(report) == {"references name what was trained": [["0-0/0/0", "0-0"]]}
    assert f"holds another payload ({right[:12]}) than was scored (000000000000)" in texts(report)[0]


# ---------------------------------------------------------------- dead letters
def test_a_dead_letter_for_no_known_reason_is_found():
    log, topics = recorded()
    letter = DeadLetter(topic="run.tasks", partition=0, offset=-1, raw=b"x", stage="reward", reason="a whim")
    append(log, topics, "dead", letter)
    assert violations(verify(log, topics)) == {"dead letters are explained": [["dead:0"]]}


def test_a_dead_letter_that_does_not_hold_the_record_it_names_is_found():
    log, topics = recorded()
    letter = DeadLetter(
        topic="run.tasks", partition=0, offset=1, raw=b"x", stage="reward", reason="undecodable"
    )
    append(log, topics, "dead", letter)
    assert texts(verify(log, topics)) == ["dead:0: does not hold what lies at run.tasks/0:1"]


def test_a_dead_letter_of_damaged_records_holds_nothing_and_is_explained():
    log, topics = recorded()
    letter = DeadLetter(topic="run.tasks", partition=0, offset=1, raw=b"", stage="reward", reason="damaged")
    append(log, topics, "dead", letter)
    assert violations(verify(log, topics)) == {}


# ---------------------------------------------------------------- output
def test_the_table_names_the_ids_and_json_holds_them_all():
    report = audit(in_step(2, lambda cut: replace(cut, limit=5)))
    table = report.as_table()
    assert table.splitlines()[0].split() == ["CHECK", "EXAMINED", "VIOLATIONS"]
    assert (
        "VIOLATED: each cut keeps the limit in force\n  step 2: was cut at limit 5, 1 was in force\n" in table
    )
    found = msgspec.json.decode(report.as_json())
    assert found["holds"] is False
    assert [each["violations"] for each in found["checks"] if each["violations"]] == [
        [{"ids": ["step 2"], "text": "step 2: was cut at limit 5, 1 was in force"}]
    ]


def test_an_empty_log_holds():
    log, topics = recorded(lambda event: None)
    assert verify(log, topics).holds
