"""Steps and versions: members, drops, measures, holders and what a version generated, on the story of support/lives."""

from __future__ import annotations

import pytest

from replay.lives.facts import GroupLife, SampleLife, StepLife, VersionLife
from replay.lives.ids import NotFound, nearest
from replay.lives.reasons import REASONS, explain
from replay.lives.tell import life
from streams.errors import CorruptRecord
from streams.events import LimitChanged, StepMeasured, StepSkipped
from tests.support.lives import FIRST, SECOND, START, Story, ms, story


@pytest.fixture(scope="module")
def told() -> Story:
    """Read only: tests that change it make their own."""
    return story()


def step(it: Story, number: int) -> StepLife:
    found = life(it.log, it.topics, "step", str(number))
    assert isinstance(found, StepLife)
    return found


def version(it: Story, text: str) -> VersionLife:
    found = life(it.log, it.topics, "version", text)
    assert isinstance(found, VersionLife)
    return found


# ---------------------------------------------------------------- steps
def test_a_step_has_its_members_limit_seed_positions_and_the_version_it_made(told: Story):
    found = step(told, 1)
    assert found.sentence == "Made version 1 from version 0 (1 group, 2 samples, 8 tokens)."
    assert (found.outcome, found.limit, found.on_stale, found.seed) == ("trained", 1, "drop", 101)
    assert (found.version_made, found.digest_made, found.positions) == (1, "digest of 1", [1])
    (group,) = found.groups
    assert (group.group_id, group.rewards, group.mean, group.std, group.staleness) == (
        *("0-0", [1.0, 0.0], 0.5, 0.5, [0, 0]),
    )
    assert (group.in_flight_s, group.in_queue_s, group.place) == (3.0, 2.0, "groups/0:0")


def test_a_step_has_the_metrics_and_the_gauges_of_each_staleness(told: Story):
    found = step(told, 1)
    assert found.values == {"loss": 0.25, "grad_norm": 2.0, "wait_s": 4.5}
    (bucket,) = found.buckets
    assert (bucket.staleness, bucket.n_samples, bucket.n_tokens, bucket.reward_mean) == (0, 2, 8, 0.5)
    assert bucket.gauges["clip_fraction"] == 3 / 8
    assert bucket.gauges["mean_abs_log_ratio"] == pytest.approx(2.4 / 8)
    assert found.gauges == bucket.gauges


def test_samples_of_another_age_are_measured_apart(told: Story):
    found = step(told, 4)
    assert [(each.staleness, each.n_samples, each.n_tokens, each.reward_mean) for each in found.buckets] == [
        (0, 1, 4, 0.0),
        (1, 1, 2, 1.0),
    ]


def test_drops_since_the_cut_before_belong_to_the_step(told: Story):
    assert [(each.group_id, each.reason, each.staleness) for each in step(told, 3).drops] == [
        ("0-1", "stale", 2),
        ("0-3", "reward_timeout", None),
    ]
    assert step(told, 4).drops == []


def test_a_step_that_was_cut_twice_shows_the_valid_cut_and_names_the_void_one(told: Story):
    found = step(told, 3)
    assert (found.epoch, found.place) == (SECOND, "ledger/0:13")
    assert [(each.epoch, each.since_epoch) for each in found.void_cuts] == [(FIRST, SECOND)]
    assert found.version_made == 3


def test_a_step_that_only_a_fenced_epoch_cut_is_void(told: Story):
    it = story()
    it.cut(9, 7, 40, [0, 0], rewards=[1.0, 0.0], epoch=FIRST)
    found = step(it, 9)
    assert (found.outcome, found.version_made) == ("void", None)
    assert found.sentence.startswith(f"Void: epoch {FIRST} cut it after epoch {SECOND} had begun")


def test_a_skipped_step_says_why_and_makes_no_version():
    it = story()
    it.cut(5, 7, 40, [0, 0], rewards=[1.0, 0.0], epoch=SECOND)
    assert step(it, 5).outcome == "under way"
    it.write(
        "ledger", 41, StepSkipped(epoch=SECOND, step=5, version=4, reason="nonfinite_loss", detail="loss nan")
    )
    found = step(it, 5)
    assert (found.outcome, found.skipped_reason, found.version_made) == ("skipped", "nonfinite_loss", None)
    assert "were put back" in found.skipped_meaning
    assert [each.what for each in found.timeline] == ["cut", "skipped"]
    group = life(it.log, it.topics, "group", "0-7")
    assert isinstance(group, GroupLife)
    assert (
        group.verdict.sentence == "Taken by step 5, which was skipped (nonfinite_loss): nothing was trained."
    )
    assert group.verdict.setting.startswith("trainer.max_bad_steps")


def test_a_limit_that_was_changed_is_traced_to_its_record():
    it = story()
    at = it.write("ledger", 39, LimitChanged(limit=3, from_step=5, by="ada", at_ms=ms(39)))
    it.cut(5, 7, 40, [0, 0], rewards=[1.0, 0.0], epoch=SECOND, limit=3, ledger_read_to=at + 1)
    assert step(it, 5).limit_set_by == f"ledger/0:{at} by ada, from step 5 on"
    assert step(it, 4).limit_set_by == ""


def test_measures_that_do_not_fit_the_cut_are_said_not_to():
    it = story()
    wrong = StepMeasured(
        step=2, epoch=FIRST, version=1, names=["n_tokens"], n_samples=2, sums=bytes(16), at_ms=ms(11)
    )
    it.write("metrics", 11, wrong)
    found = step(it, 2)
    assert found.gauges == {}
    assert any("2 rows of 1 sums in 16 bytes; the cut has 2 members" in note for note in found.notes)


def test_group_records_that_are_gone_cost_the_ages_alone():
    it = story()
    it.log.truncate_before("run.groups", 0, 2)
    found = step(it, 1)
    assert (found.groups[0].in_flight_s, found.groups[0].mean) == (None, 0.5)
    assert any("1 of its group records are gone" in note for note in found.notes)


# ---------------------------------------------------------------- versions
def test_a_version_says_which_step_made_it_and_how_it_was_published(told: Story):
    found = version(told, "2")
    assert (found.made_by_step, found.trained_by_step, found.checkpoint) == (2, 3, "checkpoints/e1-s00000002")
    first, again = found.publications
    assert (first.epoch, first.weights, first.base_version, first.base_digest) == (
        FIRST,
        "delta",
        1,
        "digest of 1",
    )
    assert (again.epoch, again.weights, again.base_version, again.forked_at) == (SECOND, "full", None, 2)
    assert (first.nbytes, first.digest, first.is_void) == (2048, "digest of 2", False)


def test_epoch_and_number_narrow_it_to_one_publication(told: Story):
    assert [each.epoch for each in version(told, f"e{FIRST}-v2").publications] == [FIRST]
    assert version(told, "v2").publications == version(told, "2").publications


def test_a_version_says_who_held_it_and_until_when(told: Story):
    (first,) = version(told, "0").holders
    assert (first.engine, first.from_ms - START, first.ended_by) == ("rollout-0", 250, "took e1-v1")
    assert first.until_ms == ms(6.5)
    assert first.is_published_digest
    (last,) = version(told, "3").holders
    assert (last.until_ms, last.ended_by) == (ms(33), "left")


def test_a_version_says_what_it_generated_and_what_became_of_that(told: Story):
    (found,) = version(told, "0").generated
    assert (found.n_samples, found.n_tokens, found.n_pure) == (5, 4 * 4 + 2, 4)
    assert found.reward_mean == (1 + 0 + 1 + 1 + 3) / 5
    assert found.outcomes == {"dropped: stale": 2, "trained": 3}


def test_a_version_that_was_never_published_by_itself_is_known_by_its_step():
    it = story()
    it.cut(5, 7, 40, [0, 0], rewards=[1.0, 0.0], epoch=SECOND)
    it.published(6, 42, SECOND)
    found = version(it, "5")
    assert (found.publications, found.made_by_step) == ([], 5)
    assert "never published by itself (weights.update_weights_interval)" in found.sentence
    assert "Version 5 was not published by itself" in step(it, 5).sentence


# ---------------------------------------------------------------- reasons, ids, damage
def test_every_reason_that_the_code_knows_is_explained():
    from replay.checks_versions import EXPLAINED

    known = {
        *(
            "stale",
            "future",
            "unknown_version",
            "no_trainable_tokens",
            "surplus",
            "bad_payload",
            "lost",
            "incomplete",
        ),
        *("member_missing", "zero_variance", "reward_below_range", "reward_above_range", "task_skipped"),
        *(
            "reward_timeout",
            "reward_error",
            "reward_missing",
            "reward_nonfinite",
            "worker_died",
            "task_deadline",
        ),
    }
    assert known | EXPLAINED <= set(REASONS)
    assert "none of Millstream's own" in explain("too_boring").meaning


def test_the_nearest_ids_are_those_of_the_same_data_epoch():
    assert nearest("1-5", ["0-5", "1-9", "1-4", "2-5"], 2) == ["1-4", "1-9"]


def test_a_damaged_stretch_is_said_to_have_been_passed_over(monkeypatch: pytest.MonkeyPatch):
    it = story()
    read = it.log.read

    def damaged(topic, partition, position, **options):
        if topic == "run.trajectories" and position == 0:
            raise CorruptRecord(topic, partition, 0, 2, "checksum")
        return read(topic, partition, position, **options)

    monkeypatch.setattr(it.log, "read", damaged)
    found = life(it.log, it.topics, "sample", "0-2/0/0")
    assert isinstance(found, SampleLife)
    assert any("records 0 to 1 are damaged and may belong here" in note for note in found.notes)
    assert found.verdict.step == 2


def test_an_id_that_may_lie_in_damaged_records_is_answered_with_the_damage(monkeypatch: pytest.MonkeyPatch):
    it = story()
    read = it.log.read

    def damaged(topic, partition, position, **options):
        if topic == "run.ledger" and position == 0:
            raise CorruptRecord(topic, partition, position, it.log.end(topic, partition), "checksum")
        return read(topic, partition, position, **options)

    monkeypatch.setattr(it.log, "read", damaged)
    with pytest.raises(
        NotFound, match=r"cut no batch yet; the ledger cannot be read whole.*record 0 is damaged"
    ):
        life(it.log, it.topics, "step", "4")
