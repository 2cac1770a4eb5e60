"""`millstream replay`: what was recorded comes out again, what differs is named, the old run stays as it is."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

from consumers.staleness import Lineage
from consumers.telemetry import SUMS
from engine.cli import main
from engine.interfaces import BadStep
from engine.trainer.payloads import Payloads, train_batch
from engine.trainer.scalar_backend import ScalarBackend
from engine.weights.store import digest
from streams import columns
from streams.events import (
    BatchCut,
    CheckpointSaved,
    EpochStarted,
    GroupCompleted,
    StepMeasured,
    TrajectoryFinished,
    WeightsPublished,
)
from tests.support.rundirs import RunDir, contents, copy_run


@pytest.fixture
def five_steps(tmp_path: Path):
    """Steps 1 to 5, checkpoints of steps 2 and 4."""
    with RunDir(tmp_path / "run") as run:
        run.steps(5)
        yield run


@pytest.fixture(autouse=True)
def no_picture(request, monkeypatch):
    """Drawing takes most of the time; tests that ask for `pictured` do it."""
    if "pictured" not in request.fixturenames:
        monkeypatch.setattr("engine.picture.lines", lambda path, panels, title: path.write_bytes(b"png"))


@pytest.fixture(autouse=True)
def no_handlers(monkeypatch):
    """A handler on a test's captured stderr would outlive it."""
    monkeypatch.setattr("engine.commands.common.setup_logging", lambda level: None)


@pytest.fixture
def pictured():
    """Asks for a real picture."""


def replay(path: Path, out: Path, *more: str) -> tuple[int, dict]:
    """(exit code, replay.json)."""
    code = main(["replay", str(path), "--out", str(out), *more])
    return code, json.loads((out / "replay.json").read_text())


# ---------------------------------------------------------------- as recorded
def test_every_step_comes_out_with_its_recorded_weights_and_metrics(five_steps, tmp_path, capsys):
    code, report = replay(five_steps.path, tmp_path / "out")
    published = {
        event.version: event.digest
        for _, event in five_steps.history()
        if isinstance(event, WeightsPublished)
    }
    assert code == 0 and report["equal"] is True and report["first_difference"] is None
    assert [(step["step"], step["version"], step["digest"]) for step in report["steps"]] == [
        (version, version, published[version]) for version in range(1, 6)
    ]
    assert report["origin"] == {
        "checkpoint": None, "step": 0, "version": 0, "recorded_digest": published[0], "digest": published[0],
    }  # fmt: skip
    for step in report["steps"]:
        assert step["recorded_metrics"]["loss"] == step["metrics"]["loss"] != 0
    said = capsys.readouterr().out
    assert "steps 1 to 5, made again from the initial weights (model.path)" in said
    assert "compared by digest after 5 of 5 steps" in said
    assert "3 figures compared bit for bit in 5 of 5 steps" in said, (
        "loss, grad_norm, n_tokens: seconds has a clock"
    )
    assert said.endswith("equal: the replay gives what was recorded\n")


def test_it_begins_at_the_nearest_checkpoint_and_checks_the_steps_between(five_steps, tmp_path, capsys):
    code, report = replay(five_steps.path, tmp_path / "out", "--from", "4", "--to", "5")
    assert code == 0
    assert report["origin"]["checkpoint"] == f"e{five_steps.epoch}-s00000002"
    assert [step["step"] for step in report["steps"]] == [3, 4, 5]
    assert (
        f"steps 4 to 5, made again from checkpoint e{five_steps.epoch}-s00000002 (step 2, version 2)"
        in capsys.readouterr().out
    )


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_it(five_steps, tmp_path):
    (five_steps.path / "checkpoints" / f"e{five_steps.epoch}-s00000004" / "state" / "scalar.json").write_text(
        "{}"
    )
    code, report = replay(five_steps.path, tmp_path / "out", "--from", "5")
    assert (code, report["origin"]["step"]) == (0, 2)


def test_a_checkpoint_that_no_valid_record_names_is_not_used(five_steps, tmp_path):
    checkpoints = five_steps.path / "checkpoints"
    shutil.rmtree(checkpoints / f"e{five_steps.epoch}-s00000002")
    shutil.copytree(checkpoints / f"e{five_steps.epoch}-s00000004", checkpoints / "e9-s00000004")
    shutil.rmtree(checkpoints / f"e{five_steps.epoch}-s00000004")
    code, report = replay(five_steps.path, tmp_path / "out", "--from", "5")
    assert (code, report["origin"]["checkpoint"]) == (0, None)


def test_without_measurements_the_trainers_metrics_are_compared(five_steps, tmp_path):
    copy_run(five_steps, tmp_path / "old", lambda event: None if isinstance(event, StepMeasured) else event)
    code, report = replay(tmp_path / "old", tmp_path / "out")
    assert code == 0
    assert all("reward_mean" in step["recorded_metrics"] for step in report["steps"]), (
        "Metrics, not StepMeasured"
    )


# ---------------------------------------------------------------- differences
def with_other_logprob(uid: str):
    """The first trained token of one sample a sixteenth of a nat more likely."""

    def alter(event):
        if not isinstance(event, TrajectoryFinished) or event.uid != uid:
            return event
        changed = columns.decode_logprobs(event.logprobs).copy()
        changed[0] += 0.0625
        return msgspec.structs.replace(event, logprobs=columns.encode_logprobs(changed))

    return alter


def test_one_changed_log_prob_is_found_in_its_step_by_name(five_steps, tmp_path, capsys):
    copy_run(five_steps, tmp_path / "changed", with_other_logprob("0-5/1/0"))  # group 5 trains in step 3
    code, report = replay(tmp_path / "changed", tmp_path / "out")
    assert code == 1 and report["equal"] is False
    first = report["first_difference"]
    assert (first["step"], first["name"]) == (3, "loss")
    assert first["recorded"] == repr(report["steps"][2]["recorded_metrics"]["loss"])
    assert first["redone"] == repr(report["steps"][2]["metrics"]["loss"])
    assert [step["equal"] for step in report["steps"]] == [True, True, False, False, False]
    assert [each["name"] for each in report["steps"][2]["differences"]] == ["loss", "grad_norm", "weights"]
    said = capsys.readouterr().out
    assert (
        f"DIFFERS first at step 3: loss was {first['recorded']}, made again it is {first['redone']}" in said
    )
    assert "also at step 3: the weights of version 3 had digest" in said
    assert "3 of 5 steps differ" in said


def test_other_weights_to_begin_with_are_the_first_difference(five_steps, tmp_path):
    def alter(event):
        is_first = isinstance(event, WeightsPublished) and event.version == 0
        return msgspec.structs.replace(event, digest="0" * 64) if is_first else event

    copy_run(five_steps, tmp_path / "changed", alter)
    code, report = replay(tmp_path / "changed", tmp_path / "out")
    assert code == 1
    assert (report["first_difference"]["step"], report["first_difference"]["name"]) == (0, "weights")


def test_a_step_that_cannot_be_taken_here_and_was_taken_there_differs(five_steps, tmp_path, monkeypatch):
    step = ScalarBackend.step

    def breaks(self, batch):
        if batch.step == 4:
            raise BadStep("nonfinite_loss", "planted")
        return step(self, batch)

    monkeypatch.setattr(ScalarBackend, "step", breaks)
    code, report = replay(five_steps.path, tmp_path / "out")
    first = report["first_difference"]
    assert code == 1
    assert (first["step"], first["name"], first["recorded"], first["redone"]) == (
        4, "skipped", "taken", "skipped (nonfinite_loss)",
    )  # fmt: skip


def test_payloads_that_retention_removed_end_in_a_sentence(five_steps, tmp_path, capsys):
    copy_run(
        five_steps,
        tmp_path / "changed",
        lambda event: None if isinstance(event, TrajectoryFinished) else event,
    )
    assert main(["replay", str(tmp_path / "changed"), "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert "step 1 cannot be made again from the log: 0-0/0/0: small.trajectories/0:0 does not exist" in said
    assert "log.retention_s" in said


# ---------------------------------------------------------------- odd histories
def test_void_records_of_a_fenced_epoch_are_left_out(tmp_path):
    with RunDir(tmp_path / "run") as run:
        run.steps(2)
        fenced = run.take_over()
        old = next(event for _, event in run.history() if isinstance(event, BatchCut))
        zombie = msgspec.structs.replace(old, step=3, version=2)
        run.put("ledger", zombie)  # its epoch is over
        run.put("ledger", WeightsPublished(epoch=old.epoch, version=3, step=3, digest="f" * 64, uris={}))
        run.put("metrics", StepMeasured(
            step=3, epoch=old.epoch, version=2, names=list(SUMS), n_samples=0, sums=b"", values={"loss": 99.0},
        ))  # fmt: skip
        run.steps(2)
        code, report = replay(run.path, tmp_path / "out")
        held = digest(run.trainer.backend.weights())
        fenced.close()
        assert run.trainer.ledger.void_records == 2
    assert code == 0
    assert [step["step"] for step in report["steps"]] == [1, 2, 3, 4]
    assert report["steps"][-1]["digest"] == held
    assert report["steps"][2]["recorded_metrics"]["loss"] != 99.0


def test_versions_that_a_fork_abandoned_are_not_compared(tmp_path):
    """Epoch 1 publishes versions 1 to 3; the next one recovers to other weights from version 2 on."""
    with RunDir(tmp_path / "run", checkpoint={"every": 100}) as run:
        run.steps(3)

        def alter(event):
            if isinstance(event, WeightsPublished) and event.version >= 2:
                return msgspec.structs.replace(event, digest=f"{event.version}" * 64)
            return event

        copy_run(run, tmp_path / "forked", alter)
    with RunDir.reopen(tmp_path / "forked") as forked:
        forked.settle()
        assert forked.trainer.ledger.published is not None
        assert (forked.trainer.ledger.published.version, forked.trainer.ledger.published.forked_at) == (3, 1)
        code, report = replay(forked.path, tmp_path / "out")
    assert code == 0
    assert [bool(step["recorded_digest"]) for step in report["steps"]] == [True, False, True]
    assert report["steps"][2]["recorded_digest"] == report["steps"][2]["digest"]


def test_a_skipped_step_stays_skipped(tmp_path, capsys):
    with RunDir(tmp_path / "run") as run:
        run.steps(1)
        step = run.trainer.backend.step

        def breaks(batch):
            raise BadStep("nonfinite_loss", "planted")

        run.trainer.backend.step = breaks  # pyright: ignore[reportAttributeAccessIssue]
        run.steps(1)
        run.trainer.backend.step = step  # pyright: ignore[reportAttributeAccessIssue]
        run.steps(1)
        code, report = replay(run.path, tmp_path / "out")
        assert "skipped  1 of 3 steps, as in the run" in capsys.readouterr().out
    assert code == 0
    assert [(step["version"], step["skipped"]) for step in report["steps"]] == [
        (1, None), (1, "nonfinite_loss"), (2, None),
    ]  # fmt: skip
    assert report["steps"][1]["digest"] == report["steps"][0]["digest"], "it changed nothing"


def test_masked_tokens_are_masked_again(tmp_path):
    with RunDir(tmp_path / "run", staleness={"max_weight_staleness": 1, "on_stale": "mask"}) as run:
        run.steps(2)
        run.steps(1, versions=[(0, 3), (2, 2)])  # three tokens are two versions old
        tokens = [
            member.n_trainable_tokens
            for _, event in run.history()
            if isinstance(event, BatchCut) and event.step == 3
            for group in event.groups
            for member in group.members
        ]
        code, report = replay(run.path, tmp_path / "out")
    assert tokens == [2, 2, 2, 2]
    assert code == 0
    assert report["steps"][2]["metrics"]["n_tokens"] == 8


def test_versions_that_were_not_published_are_not_compared(tmp_path):
    with RunDir(tmp_path / "run", weights={"update_weights_interval": 2}) as run:
        for _ in range(4):
            run.steps(1, versions=[(run.trainer.version // 2 * 2, 4)])
        code, report = replay(run.path, tmp_path / "out")
    assert code == 0
    assert [bool(step["recorded_digest"]) for step in report["steps"]] == [False, True, False, True]


# ---------------------------------------------------------------- where it writes
def test_the_run_stays_as_it_is_byte_for_byte(five_steps, tmp_path):
    five_steps.trainer.close()
    five_steps.log.close()
    before = contents(five_steps.path)
    replay(five_steps.path, tmp_path / "one")
    replay(five_steps.path, tmp_path / "two", "--set", "trainer.lr=0.2", "--from", "4")
    assert contents(five_steps.path) == before
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == ["replay.json", "replay.png"]


@pytest.mark.parametrize("inside", ["", "weights", "new/folder"])
def test_the_runs_own_folder_is_refused(five_steps, inside, capsys):
    before = contents(five_steps.path)
    assert main(["replay", str(five_steps.path), "--out", str(five_steps.path / inside)]) == 2
    assert "which is the run's own; nothing is written there" in capsys.readouterr().err
    assert contents(five_steps.path) == before


def test_a_link_into_the_run_is_refused_too(five_steps, tmp_path, capsys):
    os.symlink(five_steps.path, tmp_path / "link")
    assert main(["replay", str(five_steps.path), "--out", str(tmp_path / "link" / "new")]) == 2
    assert "which is the run's own" in capsys.readouterr().err


def test_a_folder_with_anything_in_it_is_refused(five_steps, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    assert main(["replay", str(five_steps.path), "--out", str(tmp_path / "out")]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_without_out_it_makes_a_folder_under_runs_and_prints_json(five_steps, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["replay", str(five_steps.path), "--json"]) == 0
    (made,) = (tmp_path / "runs").iterdir()
    assert made.name.startswith("replay-small-2")
    assert json.loads(capsys.readouterr().out) == json.loads((made / "replay.json").read_text())


# ---------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("more", "code", "sentence"),
    [
        (["--to", "9"], 2, "--to 9: the ledger holds steps 1 to 5"),
        (["--from", "6"], 2, "--from 6: must be at most the last step, 5"),
        (["--from", "4", "--to", "3"], 2, "--from 4: must be at most the last step, 3"),
        (["--set", "trainer.los=tis"], 2, "trainer.los: unknown key (--set). Did you mean `trainer.loss`?"),
        (
            ["--set", "rollout.rollout_temperature=0.5"],
            2,
            "--set rollout.rollout_temperature: the samples are in",
        ),
        (
            ["--set", "log.retention_s=5"],
            2,
            "--set log.retention_s: a replay reads the run where CONFIG says",
        ),
        (
            ["--set", "trainer.loss=tis"],
            2,
            '--set trainer.loss: trainer.backend = "scalar" does not look at it',
        ),
        (["--set", "trainer.rollout_batch_size=4"], 2, "--set trainer.rollout_batch_size: it has no effect"),
        (["--set", "run.steps=4"], 2, '--set run.steps: with trainer.lr_schedule = "constant"'),
        (["--save"], 2, '--save: trainer.backend = "scalar" has no Hugging Face folder'),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(five_steps, tmp_path, more, code, sentence, capsys):
    assert main(["replay", str(five_steps.path), "--out", str(tmp_path / "out"), *more]) == code
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_without_a_step_is_refused(tmp_path, capsys):
    with RunDir(tmp_path / "run") as run:
        assert main(["replay", str(run.path), "--out", str(tmp_path / "out")]) == 2
    assert "run small has no step yet: there is nothing to replay" in capsys.readouterr().err


def test_a_configuration_that_was_edited_since_is_refused(five_steps, tmp_path, capsys):
    text = (five_steps.path / "config.toml").read_text().replace("lr = 0.1", "lr = 0.3")
    (five_steps.path / "config.toml").write_text(text)
    assert main(["replay", str(five_steps.path), "--out", str(tmp_path / "out")]) == 2
    assert "its ledger was begun by run 'small' with the fingerprint" in capsys.readouterr().err


# ---------------------------------------------------------------- with other settings
def test_another_learning_rate_is_compared_on_identical_data(five_steps, tmp_path, capsys, pictured):
    code, report = replay(five_steps.path, tmp_path / "out", "--set", "trainer.lr=0.2")
    assert code == 0
    assert report["kind"] == "a/b"
    assert report["changes"] == [{"key": "trainer.lr", "recorded": 0.1, "now": 0.2}]
    # the scalar trainer's gradient does not depend on its weight: equal in all steps, and twice as far in the end
    assert all(step["a"]["loss"] == step["b"]["loss"] for step in report["steps"])
    w = float(five_steps.trainer.backend.weights()["w"][0])
    assert report["digest_of_b"] == digest({"w": np.array([2 * w])})
    said = capsys.readouterr().out
    assert "B: the same data with trainer.lr = 0.2 instead of 0.1" in said
    assert "The reward that B would have had is not known" in said
    assert (tmp_path / "out" / "replay.png").stat().st_size > 10_000


def test_a_change_binds_from_the_first_step_asked_for(five_steps, tmp_path):
    """--from 4: step 3 is made as recorded from the checkpoint of step 2, and B begins with what it left."""
    _, report = replay(five_steps.path, tmp_path / "out", "--set", "trainer.lr=0.2", "--from", "4")
    assert [step["step"] for step in report["steps"]] == [4, 5]
    expected, payloads = ScalarBackend(lr=0.1), Payloads(five_steps.log, five_steps.topics)
    for _, event in five_steps.history():
        if isinstance(event, BatchCut):
            if event.step == 4:
                expected.snapshot()(tmp_path)
                expected = ScalarBackend(lr=0.2)
                expected.load(tmp_path)
            expected.step(train_batch(event, payloads, Lineage()))
    assert report["digest_of_b"] == digest(expected.weights())
    assert not (tmp_path / "out" / ".start").exists(), "the state in between is gone"


def test_a_setting_that_is_set_to_what_it_was_changes_nothing(five_steps, tmp_path):
    code, report = replay(five_steps.path, tmp_path / "out", "--set", "trainer.lr=0.1")
    assert (code, report["kind"], report["equal"]) == (0, "comparison", True)


def test_a_stricter_limit_leaves_out_what_it_would_have_dropped(tmp_path, capsys):
    with RunDir(tmp_path / "run") as run:
        run.steps(2)
        run.group(versions=[(1, 4)])  # step 3: staleness 1 and 0
        run.group(versions=[(2, 4)])
        run.settle()
        run.steps(1, versions=[(1, 4)])  # step 4: staleness 2, twice
        run.steps(1)
        code, report = replay(
            run.path, tmp_path / "out", "--set", "staleness.max_weight_staleness=0", "--from", "3"
        )
    assert code == 0
    assert report["rule"] == {
        "groups_left_out": 3, "steps_without_groups": [4], "more_tokens_masked": 0, "steps_with_a_looser_limit": 0,
    }  # fmt: skip
    assert report["skipped_by_b"] == {"4": "left_out"}
    assert [step["b"]["grad_norm"] is None for step in report["steps"]] == [False, True, False]
    said = capsys.readouterr().out
    assert (
        "leaves out 3 groups that the run trained on, in 2 of 3 steps; 1 step without any group left" in said
    )


def test_a_looser_limit_says_that_nothing_comes_back(five_steps, tmp_path, capsys):
    code, report = replay(five_steps.path, tmp_path / "out", "--set", "staleness.max_weight_staleness=7")
    assert code == 0
    assert report["rule"]["steps_with_a_looser_limit"] == 5
    assert report["digest_of_b"] == digest(five_steps.trainer.backend.weights()), "so B is A"
    assert "what the run dropped as stale is in no batch and does not come back" in capsys.readouterr().out


def test_dropping_instead_of_masking_leaves_out_groups_with_a_stale_token(tmp_path):
    with RunDir(tmp_path / "run", staleness={"max_weight_staleness": 1, "on_stale": "mask"}) as run:
        run.steps(2)
        run.group(versions=[(0, 3), (2, 2)])
        run.group(versions=[(2, 5)])
        run.settle()
        _, dropping = replay(run.path, tmp_path / "drop", "--set", "staleness.on_stale=drop")
        _, stricter = replay(run.path, tmp_path / "strict", "--set", "staleness.max_weight_staleness=0")
        _, looser = replay(run.path, tmp_path / "loose", "--set", "staleness.max_weight_staleness=2")
    assert dropping["rule"]["groups_left_out"] == 1
    assert (stricter["rule"]["groups_left_out"], stricter["rule"]["more_tokens_masked"]) == (0, 0)
    assert looser["rule"]["more_tokens_masked"] == -6, "three tokens of two samples train again"


def test_a_limit_that_needs_groups_which_are_gone_says_so(five_steps, tmp_path, capsys):
    copy_run(
        five_steps, tmp_path / "changed", lambda event: None if isinstance(event, GroupCompleted) else event
    )
    args = ["replay", str(tmp_path / "changed"), "--out", str(tmp_path / "out")]
    assert main([*args, "--set", "staleness.max_weight_staleness=0"]) == 1
    assert "group 0-0 (small.groups/0:0) cannot be judged again" in capsys.readouterr().err


def test_the_checkpoint_records_of_the_run_are_all_valid(five_steps):
    """What the tests above stand on."""
    saved = [event.step for _, event in five_steps.history() if isinstance(event, CheckpointSaved)]
    epochs = [event for _, event in five_steps.history() if isinstance(event, EpochStarted)]
    assert (saved, len(epochs)) == ([2, 4], 1)
