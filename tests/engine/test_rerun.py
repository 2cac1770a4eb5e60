"""Steps made again from the ledger: where they begin and end, and what is left out."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import msgspec
import pytest

from engine.trainer.rerun import LEFT_OUT, nearest_checkpoint, rerun
from engine.weights.store import digest
from streams.events import CheckpointSaved, WeightsPublished
from tests.support.rundirs import RunDir


@pytest.fixture
def run(tmp_path: Path):
    """Steps 1 to 5, checkpoints of steps 2 and 4."""
    with RunDir(tmp_path / "run") as made:
        made.steps(5)
        yield made


def published(run: RunDir) -> dict[int, str]:
    return {event.version: event.digest for _, event in run.history() if isinstance(event, WeightsPublished)}


def saved(run: RunDir) -> list[CheckpointSaved]:
    return [event for _, event in run.history() if isinstance(event, CheckpointSaved)]


def test_after_each_step_the_backend_holds_its_weights(run):
    backend, expected = run.backend(), published(run)
    seen = []
    for redone in rerun(run.log, run.topics, backend, run.history(), after=None):
        assert digest(backend.weights()) == expected[redone.version]
        assert redone.metrics["n_tokens"] == 16 and not redone.skipped
        seen.append((redone.cut.step, redone.version))
    assert seen == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5)]


def test_a_checkpoint_is_loaded_at_once_and_its_steps_are_not_made_again(run):
    backend = run.backend()
    found = nearest_checkpoint(saved(run), run.path / "checkpoints", 3)
    assert found is not None and found.step == 2
    steps = rerun(run.log, run.topics, backend, run.history(), after=found, until_step=4)
    assert digest(backend.weights()) == published(run)[2], "before the first step is asked for"
    assert [redone.cut.step for redone in steps] == [3, 4]
    assert digest(backend.weights()) == published(run)[4]


def test_a_step_that_is_left_out_changes_nothing(run):
    backend = run.backend()
    made = rerun(
        run.log, run.topics, backend, run.history(), after=None, until_step=2,
        change=lambda cut: None if cut.step == 2 else cut,
    )  # fmt: skip
    assert [(redone.cut.step, redone.version, redone.skipped) for redone in made] == [
        (1, 1, ""),
        (2, 1, LEFT_OUT),
    ]
    assert digest(backend.weights()) == published(run)[1]


def test_a_changed_cut_is_what_is_trained_on(run):
    made = rerun(
        run.log, run.topics, run.backend(), run.history(), after=None, until_step=1,
        change=lambda cut: msgspec.structs.replace(cut, groups=cut.groups[:1]),
    )  # fmt: skip
    (redone,) = made
    assert len(redone.cut.groups) == 1 and redone.metrics["n_tokens"] == 8


@pytest.mark.parametrize(("step", "found"), [(None, 4), (4, 4), (3, 2), (1, None), (0, None)])
def test_the_nearest_checkpoint_is_not_after_the_step(run, step, found):
    nearest = nearest_checkpoint(saved(run), run.path / "checkpoints", step)
    assert (nearest and nearest.step) == found


def test_a_pruned_checkpoint_costs_no_warning_and_a_damaged_one_does(run, caplog):
    checkpoints = run.path / "checkpoints"
    shutil.rmtree(checkpoints / f"e{run.epoch}-s00000004")
    caplog.set_level(logging.INFO)
    assert nearest_checkpoint(saved(run), checkpoints) is not None
    (checkpoints / f"e{run.epoch}-s00000002" / "state" / "scalar.json").unlink()
    assert nearest_checkpoint(saved(run), checkpoints) is None
    said = [
        (record.levelname, record.getMessage()) for record in caplog.records if record.name.endswith("rerun")
    ]
    assert [level for level, _ in said] == ["INFO", "INFO", "WARNING"]
    assert said[-1][1].endswith("of step 2 passed over: state/scalar.json is missing")
