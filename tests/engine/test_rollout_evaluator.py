"""The evaluator with a scripted engine: which versions it measures, and what it says of those it cannot."""

from __future__ import annotations

from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from consumers.dataset import BadRow, JsonLines, Row
from consumers.rewards.pool import ScoringPool
from consumers.rewards.types import NotScored, Outcome, RewardInput, Scored
from engine.evaluator import Evaluator
from engine.interfaces import Sampling
from engine.rollout.generate import single_turn
from engine.rollout.loading import on_disk
from engine.rollout.scripted import ScriptedEngine, coin
from streams.events import EpochStarted, Metrics
from tests.engine.rollout_support import OnThread, Run, eventually

EPISODES = 400


class Heads:
    """Scores 1 for "y", 0 for "n", and has no verdict for the rows that ask for none."""

    def submit(self, inputs: list[RewardInput]) -> Future[list[Outcome]]:
        future: Future[list[Outcome]] = Future()
        future.set_result(
            [
                NotScored("reward_error") if each.label == "none" else Scored(float(each.response == "y"))
                for each in inputs
            ]
        )
        return future


class Rows:
    """All rows of a JSONL file."""

    def __init__(self, path: Path) -> None:
        lines = JsonLines(path)
        self.rows = [lines.row(index) for index in range(len(lines))]
        lines._file.close()

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, index: int) -> Row | BadRow:
        return self.rows[index]


def make(run: Run, rows: str = '{"prompt": "toss"}\n', **fields: Any) -> Evaluator:
    path = run.folder / "held_out.jsonl"
    path.write_text(rows)
    settings: dict[str, Any] = {"episodes": EPISODES, "every": 4, "final": 2, "scoring": Heads(), **fields}
    return Evaluator(
        run.log, run.topics, ScriptedEngine(coin(b"y", b"n")), single_turn, Rows(path),
        locate=on_disk(run.folder), pins=run.folder / "pins", sampling=Sampling(1), **settings,
    )  # fmt: skip


def evaluations(run: Run) -> dict[int, dict[str, float]]:
    return {event.step: event.values for event in run.of("metrics", Metrics) if event.source == "eval"}


def publish(run: Run, version: int, w: float) -> Path:
    event = run.publish(version, {"w": np.array([w])})
    return run.folder / event.uris["disk"]


def test_every_kth_and_the_last_versions_are_measured_on_held_out_rows(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with OnThread(make(run)) as running:
        publish(run, 0, 0.0)
        eventually(lambda: 0 in evaluations(run), "version 0")
        for version in range(1, 8):
            publish(run, version, version / 2)
        eventually(lambda: 4 in evaluations(run), "version 4")
        assert set(evaluations(run)) == {0, 4}
        run.finish()
        assert running.join() == 0
    measured = evaluations(run)
    assert set(measured) == {0, 4, 6, 7}
    for version, values in measured.items():
        share = 1 / (1 + np.exp(-version / 2))
        assert abs(values["reward"] - share) < 4 * 0.5 / np.sqrt(EPISODES)
        assert (values["episodes"], values["failed"]) == (EPISODES, 0)
    assert not list((tmp_path / "pins").iterdir())


def test_with_known_total_steps_the_last_versions_do_not_wait_for_the_end(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with OnThread(make(run, total_steps=3)):
        for version in range(4):
            publish(run, version, 0.0)
        eventually(lambda: set(evaluations(run)) == {0, 2, 3}, "the versions that are due")


def test_a_due_version_survives_its_removal_by_retention(tmp_path: Path) -> None:
    run = Run(tmp_path)
    evaluator = make(run, every=1, final=0)
    paths = [publish(run, version, 0.0) for version in range(3)]
    evaluator.pins.mkdir()
    evaluator._read_ledger()
    for path in paths:
        path.unlink()
    run.finish()
    with OnThread(evaluator) as running:
        assert running.join() == 0
    assert {version: values["episodes"] for version, values in evaluations(run).items()} == {
        0: EPISODES, 1: EPISODES, 2: EPISODES,
    }  # fmt: skip


def test_a_version_whose_file_is_gone_is_reported_as_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    publish(run, 0, 0.0).unlink()
    publish(run, 4, 0.0).write_bytes(b"torn")
    run.finish()
    with OnThread(make(run, final=0)) as running:
        assert running.join() == 0
    assert evaluations(run) == {
        0: {"episodes": 0.0, "weights_missing": 1.0},
        4: {"episodes": 0.0, "weights_missing": 1.0},
    }
    assert "version 0 cannot be evaluated: its file was removed by retention" in caplog.text
    assert "version 4 cannot be evaluated: weights_unreadable" in caplog.text


def test_episodes_without_a_verdict_are_counted_and_are_no_part_of_the_mean(tmp_path: Path) -> None:
    run = Run(tmp_path)
    publish(run, 0, 50.0)
    run.finish()
    rows = '{"prompt": "toss"}\n{"prompt": "toss", "label": "none"}\nbroken\n{"prompt": "toss"}\n'
    with OnThread(make(run, rows, episodes=40)) as running:
        assert running.join() == 0
    values = evaluations(run)[0]
    assert (values["reward"], values["episodes"], values["failed"]) == (1.0, 20.0, 20.0)


def test_a_version_that_a_new_epoch_made_again_with_equal_weights_is_not_measured_twice(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)
    with OnThread(make(run)) as running:
        publish(run, 0, 0.0)
        publish(run, 4, 1.0)
        eventually(lambda: set(evaluations(run)) == {0, 4}, "both")
        run.epoch = run.write("ledger", EpochStarted(producer="next", started_ms=2))
        publish(run, 0, 0.0)
        publish(run, 4, 2.0)
        run.finish()
        assert running.join() == 0
    steps = [event.step for event in run.of("metrics", Metrics)]
    assert steps == [0, 4, 4]


def test_a_stop_ends_an_evaluation_that_runs(tmp_path: Path) -> None:
    run = Run(tmp_path)
    evaluator = make(run)
    evaluator.engine._token_s = 100.0  # pyright: ignore[reportAttributeAccessIssue]
    publish(run, 0, 0.0)
    with OnThread(evaluator) as running:
        eventually(lambda: evaluator.engine.held, "the evaluation runs")
        running.stop.set()
        assert running.join() == 0
    assert not evaluations(run)


def test_a_real_scoring_pool_scores_the_episodes(tmp_path: Path) -> None:
    run = Run(tmp_path)
    publish(run, 0, 50.0)
    run.finish()
    with ScoringPool("exact", {}, workers=0, timeout=timedelta(seconds=5)) as pool:
        rows = '{"prompt": "toss", "label": "y"}\n{"prompt": "toss", "label": "n"}\n'
        with OnThread(make(run, rows, scoring=pool, episodes=10)) as running:
            assert running.join() == 0
    assert evaluations(run)[0]["reward"] == 0.5
