"""Groups and samples: what became of each, with the right numbers, on the story of tests/support/lives.py."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from consumers.advantages import ESTIMATORS
from consumers.dataset import BadRow
from consumers.ledger import Ledger
from engine.interfaces import Inputs
from engine.trainer.payloads import Payloads, train_batch
from replay.ledger import read_run
from replay.lives.facts import GroupLife, SampleLife
from replay.lives.ids import NotFound
from replay.lives.tell import life
from streams import codec
from streams.errors import ConfigError, SchemaTooNew
from streams.events import EpochStarted
from streams.log import EventLog, NewRecord
from streams.memory import MemoryLog
from streams.topics import Topics
from tests.support.lives import FIRST, SECOND, START, Story, ms, story
from tests.support.world import World


@pytest.fixture(scope="module")
def told() -> Story:
    """Read only: tests that change it make their own."""
    return story()


def sample(it: Story, uid: str, words=None) -> SampleLife:
    found = life(it.log, it.topics, "sample", uid, words)
    assert isinstance(found, SampleLife)
    return found


def group(it: Story, group_id: str) -> GroupLife:
    found = life(it.log, it.topics, "group", group_id)
    assert isinstance(found, GroupLife)
    return found


def looks(found: SampleLife) -> list[tuple[int, int, str, str, str]]:
    return [(s.begin, s.end, s.by, s.use, f"e{s.epoch}-v{s.version}") for s in found.spans]


# ---------------------------------------------------------------- trained
def test_a_trained_sample_has_its_step_advantage_reward_ages_and_measures(told: Story):
    found = sample(told, "0-0/0/0")
    verdict = found.verdict
    assert (verdict.outcome, verdict.step, verdict.epoch, verdict.version) == ("trained", 1, FIRST, 0)
    assert verdict.sentence == (
        "Trained by step 1: version 0 → 1, 4 tokens with advantage +1; its oldest trained token was 0 versions old, "
        "the limit 1."
    )
    assert (found.group_mean, found.group_std, found.advantage) == (0.5, 0.5, 1.0)
    assert sample(told, "0-0/1/0").advantage == -1.0
    assert found.reward is not None
    assert (found.reward.value, found.reward.components) == (1.0, {"format": 1.0, "answer": 0.0})
    assert found.ages is not None
    assert (found.ages.in_flight_s, found.ages.in_queue_s, found.ages.generating_s) == (3.0, 2.0, 2.0)
    assert (found.ages.in_flight_versions, found.ages.in_queue_versions) == (0, 0)
    assert (found.engine, found.finish_reason, found.n_trained_tokens) == ("rollout-0", "stop", 4)
    assert found.measured is not None
    assert (found.measured.sums["sum_log_ratio"], found.measured.sums["n_clipped"]) == (2.0, 3.0)
    assert found.measured.gauges["clip_fraction"] == 0.75
    other = sample(told, "0-0/1/0").measured
    assert other is not None
    assert other.sums["n_clipped"] == 0.0, "the second row is the second sample's"


def test_the_timeline_is_in_time_order_and_names_each_record(told: Story):
    moments = [(m.at_ms - START, m.what, m.place) for m in sample(told, "0-0/0/0").timeline]
    assert moments == [
        (0, "dispatched", "tasks/0:0"),
        (1000, "generation started", "trajectories/0:0"),
        (3000, "generation finished", "trajectories/0:0"),
        (3500, "reward assigned", "rewards/0:0"),
        (4000, "group completed", "groups/0:0"),
        (5000, "cut into step 1", "ledger/0:3"),
        (6000, "weights published", "ledger/0:4"),
    ]


def test_tokens_of_policy_and_environment_and_of_each_version_are_told_apart(told: Story):
    found = sample(told, "0-2/0/0", words=lambda ids: ",".join(f"<{each}>" for each in ids))
    assert looks(found) == [
        (0, 2, "policy", "trained", "e1-v0"),
        (2, 3, "environment", "masked", "e1-v1"),
        (3, 5, "policy", "trained", "e1-v1"),
    ]
    assert [span.text for span in found.spans] == ["<10>,<11>", "<12>", "<13>,<14>"]
    assert [span.mean_logprob for span in found.spans] == [-1.0, None, -0.5]
    assert (found.prompt_text, found.prompt_ids) == ("<1>,<2>", [1, 2])
    assert found.ages is not None
    assert (found.ages.in_flight_versions, found.ages.in_queue_versions) == (1, 0)
    assert found.verdict.staleness == 1


def test_without_a_tokenizer_the_tokens_are_ids(told: Story):
    found = sample(told, "0-0/0/0")
    assert (found.spans[0].ids, found.spans[0].text) == ([10, 11], None)
    assert found.prompt_text is None


def test_tokens_over_the_limit_are_shown_as_too_old_when_the_limit_masks(told: Story):
    found = sample(told, "0-5/0/0")
    assert looks(found) == [
        (0, 2, "policy", "too_old", "e1-v1"),
        (2, 3, "environment", "masked", f"e{SECOND}-v2"),
        (3, 5, "policy", "trained", f"e{SECOND}-v2"),
    ]
    assert (found.n_trained_tokens, found.verdict.staleness) == (2, 1)
    assert found.ages is not None
    assert (found.ages.in_flight_versions, found.ages.in_queue_versions) == (1, 0), (
        "of the tokens that trained"
    )


# ---------------------------------------------------------------- dropped
def test_a_group_that_waited_too_long_is_explained_with_its_numbers_and_the_setting(told: Story):
    found = sample(told, "0-1/1/0")
    verdict = found.verdict
    assert (verdict.outcome, verdict.reason, verdict.staleness, verdict.limit) == ("dropped", "stale", 2, 1)
    assert verdict.sentence == (
        "Dropped with its whole group by the trainer as stale: its oldest trainable token was 2 versions behind the "
        "trainer, which was at version 2, 1 over the limit of 1. This sample was as old as that."
    )
    assert verdict.setting.startswith("staleness.max_weight_staleness")
    assert found.ages is not None
    assert (found.ages.in_flight_s, found.ages.in_queue_s) == (2.9, 9.0)
    assert (found.ages.in_flight_versions, found.ages.in_queue_versions) == (0, 2)
    assert {span.use for span in found.spans if span.by == "policy"} == {"trainable"}
    assert (found.n_trained_tokens, found.measured) == (None, None)


def test_an_incomplete_group_shows_every_attempt_at_its_failed_member(told: Story):
    found = group(told, "0-3")
    assert found.verdict.sentence == "Dropped by the collector: reward_timeout."
    assert (found.verdict.setting, found.verdict.detail) == ("reward.timeout_s", "members [1] failed")
    assert [(each.stage, each.uid, each.reason) for each in found.failures] == [
        ("rollout", "0-3/1/0", "generate_error"),
        ("collector", "0-3/1/0", "generate_error"),
        ("reward", "0-3/1/1", "reward_timeout"),
    ]
    assert [(each.attempt, each.indices) for each in found.dispatches] == [(0, []), (1, [1])]
    assert [(each.uid, each.state) for each in found.members] == [
        ("0-3/0/0", "scored"),
        ("0-3/1/1", "failed: reward_timeout"),
    ]


def test_each_attempt_of_a_member_has_a_life_of_its_own(told: Story):
    first, second = sample(told, "0-3/1/0"), sample(told, "0-3/1/1")
    assert [each.reason for each in first.failures] == ["generate_error", "generate_error"]
    assert [each.reason for each in second.failures] == ["reward_timeout"]
    assert (first.other_attempts, second.other_attempts) == (["0-3/1/1"], ["0-3/1/0"])
    assert "This sample failed (generate_error) in rollout." in first.verdict.sentence
    assert second.reward is None
    assert first.spans == [], "a failed rollout has no payload"
    assert second.dispatch is not None
    assert second.dispatch.place == "tasks/0:4"
    assert sample(told, "0-3/1") == second, "without an attempt: the newest, where none has a reward"


# ---------------------------------------------------------------- copies and void records
def test_copies_and_the_dead_letter_of_a_conflicting_one_are_shown(told: Story):
    found = sample(told, "0-4/0/0")
    assert [(copy.place, copy.is_same) for copy in found.copies] == [
        ("trajectories/0:11", True),
        ("trajectories/0:12", False),
    ]
    assert [(letter.reason, letter.record) for letter in found.letters] == [
        ("conflict", "run.trajectories/0:12")
    ]
    assert found.response == "seven", "the first one stays"
    assert sample(told, "0-4/1/0").copies == []


def test_the_cut_of_a_fenced_epoch_is_void_and_the_valid_one_decides(told: Story):
    found = sample(told, "0-4/1/0")
    assert [(cut.step, cut.epoch, cut.since_epoch, cut.place) for cut in found.void_cuts] == [
        (3, FIRST, SECOND, "ledger/0:11")
    ]
    assert (found.verdict.epoch, found.verdict.place, found.verdict.outcome) == (
        SECOND,
        "ledger/0:13",
        "trained",
    )
    assert [moment.is_void for moment in found.timeline if moment.what == "cut into step 3"] == [True, False]


def test_a_group_that_only_a_fenced_epoch_cut_is_open():
    it = Story()
    it.write("ledger", 0, EpochStarted(producer="a", started_ms=ms(0)))
    it.write("ledger", 0, EpochStarted(producer="b", started_ms=ms(0)))
    it.whole(0, 1, 2, [[(0, 0, 5)]] * 2, [1.0, 0.0])
    it.cut(1, 0, 4, [0, 0], rewards=[1.0, 0.0], epoch=0)
    found = group(it, "0-0")
    assert (found.verdict.outcome, len(found.void_cuts)) == ("open", 1)
    assert "It was cut by step 1 of epoch 0, but a newer epoch was in charge" in found.verdict.sentence


# ---------------------------------------------------------------- open groups
def test_an_open_group_says_where_it_is_and_what_it_waits_for(told: Story):
    found = group(told, "0-6")
    assert found.verdict.outcome == "open"
    assert found.waits_for == (
        "0 of 2 members have a reward. Member 0 is generated and waiting for the reward stage. Member 1 is not there "
        "yet. It waits for an engine."
    )
    assert [each.state for each in found.members] == ["generated", "dispatched"]


def test_a_complete_group_waits_in_the_trainers_queue(told: Story):
    assert "in the trainer's queue, for a batch of 1 group." in group(told, "0-7").waits_for


def test_a_task_for_a_version_that_is_not_published_waits_for_it():
    it = story()
    it.task(8, 34, min_version=6)
    assert "Engines start it from version 6 on; the newest published is 4." in group(it, "0-8").waits_for


# ---------------------------------------------------------------- a group side by side
def test_a_group_shows_its_members_with_the_advantages_that_the_trainer_forms(told: Story):
    found = group(told, "0-2")
    assert (found.reward_mean, found.reward_std, found.is_flat) == (2.0, 1.0, False)
    assert [(m.uid, m.reward, m.advantage, m.staleness) for m in found.members] == [
        ("0-2/0/0", 3.0, 1.0, 1),
        ("0-2/1/0", 1.0, -1.0, 0),
    ]
    assert group(told, "0-1").is_flat


# ---------------------------------------------------------------- what is not there
@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("group", "0-99", r"no group '0-99' in run run; nearest: 0-7, 0-6, 0-5 \(8 are known"),
        ("sample", "0-0/7/0", "no sample '0-0/7/0'; group 0-0 has 0-0/0/0, 0-0/1/0"),
        ("step", "9", "no step 9: run run has steps 1 to 4"),
        ("version", "40", "no version 40: run run has published versions 0 to 4"),
        ("version", "e7-v2", "version 2 exists as e1-v2, e10-v2"),
    ],
)
def test_an_id_that_the_run_does_not_have_is_answered_with_what_it_has(
    told: Story, kind: str, text: str, words: str
):
    with pytest.raises(NotFound, match=words):
        life(told.log, told.topics, kind, text)


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("group", "0-3/1/0", "did you mean `show … sample 0-3/1/0`"),
        ("sample", "0-3", "as in 0-3/1/0.*did you mean `show … group 0-3`"),
        ("step", "last", "a step is a number"),
        ("step", "v7", "did you mean `show … version v7`"),
        ("version", "0-3", "did you mean `show … group 0-3`"),
    ],
)
def test_a_malformed_id_is_answered_with_the_form_and_a_guess(told: Story, kind: str, text: str, words: str):
    with pytest.raises(ConfigError, match=words):
        life(told.log, told.topics, kind, text)


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("group", "0-0", "run run has dispatched none yet"),
        ("sample", "0-0/0/0", "run run has dispatched none yet"),
        ("step", "1", "run run has cut no batch yet"),
        ("version", "0", "run run has published none yet"),
    ],
)
def test_a_run_that_has_only_begun_says_so(kind: str, text: str, words: str):
    log, topics = MemoryLog(), Topics("run", 1)
    with pytest.raises(NotFound, match=words):
        life(log, topics, kind, text)
    topics.create(log)
    with pytest.raises(NotFound, match=words):
        life(log, topics, kind, text)


def test_a_group_that_was_dispatched_before_the_trainer_began_waits_for_it():
    it = Story()
    it.task(0, 1)
    assert group(it, "0-0").waits_for.endswith(
        "No engine may start it: the trainer has not published a version yet."
    )


def test_a_ledger_of_a_newer_schema_is_refused_by_name():
    it = story()
    it.log.append("run.ledger", 0, [NewRecord(b"?", (("schema", b"2.0"), ("type", b"batch_cut")))])
    with pytest.raises(SchemaTooNew, match=r"run.ledger/0:17 may decide.*update millstream"):
        group(it, "0-0")


def test_a_trajectory_of_a_newer_schema_costs_its_tokens_alone():
    it = story()
    uid, at = b"0-8/0/0", it.log.end("run.trajectories", 0)
    it.task(8, 34)
    headers = (("schema", b"2.0"), ("type", b"trajectory_finished"), ("id", uid))
    it.log.append("run.trajectories", 0, [NewRecord(b"?", headers, ms(35))])
    found = sample(it, uid.decode())
    assert found.spans == []
    assert any(f"trajectories/0:{at} cannot be read: SchemaTooNew" in note for note in found.notes)


def test_a_payload_that_retention_removed_is_said_to_be_gone():
    it = story()
    it.log.truncate_before("run.trajectories", 0, 5)
    found = sample(it, "0-0/0/0")
    assert found.spans == []
    assert (
        "its payload at trajectories/0:0 is gone: retention has removed it, so its tokens cannot be shown"
        in found.notes
    )
    assert (found.verdict.step, found.advantage) == (1, 1.0), "the ledger still knows"


def test_a_group_of_which_only_the_ledger_is_left_still_has_its_outcome():
    it = story()
    for word in ("tasks", "trajectories", "rewards", "groups"):
        topic = it.topics.name(word)
        it.log.truncate_before(topic, 0, it.log.end(topic, 0))
    dropped, trained = group(it, "0-1"), group(it, "0-0")
    assert (dropped.verdict.reason, dropped.partition) == ("stale", None)
    assert trained.verdict.step == 1
    assert [each.advantage for each in trained.members] == [1.0, -1.0]


# ---------------------------------------------------------------- real stages
@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
def test_what_is_shown_as_trained_is_what_the_trainer_trained(tmp_path: Path, estimator: str):
    """Masks and advantages of every sample, against the code of the live step."""
    world = World(tmp_path, rows=4, steps=4, limit=1, on_stale="mask")
    try:
        world.run(random.Random(1))
        ledger, seen = Ledger(world.log, world.topics), 0
        ledger.catch_up()
        payloads = Payloads(world.log, world.topics)
        for cut in read_run(world.log, world.topics).cuts:
            for each in train_batch(cut.event, payloads, ledger.lineage, Inputs(estimator)).samples:
                found = life(world.log, world.topics, "sample", each.uid, estimator=estimator)
                assert isinstance(found, SampleLife)
                mask = np.concatenate([[s.use == "trained"] * (s.end - s.begin) for s in found.spans])
                assert (mask == each.loss_mask).all()
                assert found.advantage == (None if estimator == "ppo" else each.advantage)
                assert found.verdict.step == cut.event.step
                seen += 1
        assert seen == 16
    finally:
        world.close()


def test_a_lost_member_of_real_stages_is_explained(tmp_path: Path):
    world = World(tmp_path, rows=4, data_epochs=1, patience=20, loses=lambda uid: uid.startswith("0-0/1/"))
    try:
        world.run(random.Random(2))
        found = life(world.log, world.topics, "group", "0-0")
        assert isinstance(found, GroupLife)
        assert found.verdict.reason == "member_missing"
        assert found.verdict.setting == "collector.member_deadline_s, collector.max_redispatch"
        assert [each.attempt for each in found.dispatches] == [0, 1]
    finally:
        world.close()


def test_a_row_that_cannot_be_used_is_explained(tmp_path: Path):
    world = World(tmp_path, rows=4, data_epochs=1)
    world.rows.rows[2] = BadRow("missing_prompt", "row 2: needs a key 'prompt'")
    try:
        world.run(random.Random(3))
        found = life(world.log, world.topics, "group", "0-2")
        assert isinstance(found, GroupLife)
        assert found.verdict.reason == "task_skipped"
        assert "missing_prompt: row 2: needs a key 'prompt'" in found.verdict.detail
    finally:
        world.close()


# ---------------------------------------------------------------- logs and efficiency
def test_a_life_is_the_same_on_kafka(kafka: str, prefix: str):
    from streams.kafka.log import KafkaLog

    expected = story(run=f"{prefix}lives")
    with KafkaLog((kafka,), "") as log:
        it = story(log, run=f"{prefix}lives")
        for kind, text in (("sample", "0-4/0/0"), ("group", "0-3"), ("step", "1"), ("version", "2")):
            assert msgspec.json.encode(life(it.log, it.topics, kind, text)) == msgspec.json.encode(
                life(expected.log, expected.topics, kind, text)
            )


def test_nothing_but_what_belongs_to_a_sample_is_decoded(told: Story, monkeypatch: pytest.MonkeyPatch):
    opened: list[str] = []
    decode = codec.decode

    def counting(record, **options):
        if record.topic == "run.trajectories":
            opened.append(dict(record.headers)["id"].decode())
        return decode(record, **options)

    monkeypatch.setattr(codec, "decode", counting)
    sample(told, "0-2/0/0")
    assert opened == ["0-2/0/0"]


def test_showing_leaves_no_trace_in_the_log(told: Story):
    def ends(log: EventLog) -> dict[str, int]:
        return {topic: log.end(topic, 0) for topic in log.topics()}

    before = ends(told.log)
    sample(told, "0-0/0/0")
    group(told, "0-3")
    assert (ends(told.log), told.log.groups()) == (before, [])
