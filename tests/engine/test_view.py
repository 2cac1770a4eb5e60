"""What the live view shows, drawn from a run written by hand."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from engine import report, view
from engine.commands import common
from engine.config import build_config
from engine.config_fields import replaced
from engine.settings import Config
from replay.progress import RunProgress
from streams import codec
from streams.errors import LogUnavailable
from streams.events import Metrics
from streams.memory import MemoryLog
from streams.open import open_log
from streams.topics import Topics
from tests.support.recorded import PARTITIONS, recorded


def config_of(tmp_path: Path, **run) -> Config:
    return build_config(
        {
            "run": {"name": "run", "dir": str(tmp_path / "run"), **run},
            "log": {"partitions": PARTITIONS},
            "data": {"path": "prompts.jsonl"},
            "reward": {"function": "exact"},
            "rollout": {"backend": "scripted"},
            "trainer": {"backend": "scalar"},
        }
    )


def followed(log, topics: Topics) -> RunProgress:
    for step, reward in ((1, 0.25), (2, 0.5), (3, 0.75)):
        put(log, topics, Metrics(source="trainer", step=step, values={"reward_mean": reward, "busy": 0.5}))
        put(log, topics, Metrics(source="eval", step=step, values={"reward": reward + 0.1}))
    put(
        log, topics, Metrics(source="rollout-0", values={"tokens_total": 800.0, "busy": 0.25, "version": 3.0})
    )
    put(log, topics, Metrics(source="feeder", values={"open_groups": 7.0}))
    progress = RunProgress(log, topics)
    progress.catch_up()
    return progress


def put(log, topics: Topics, event: Metrics) -> None:
    log.append(topics.name("metrics"), 0, [codec.encode(event, producer=event.source)])


def test_a_line_says_where_the_run_is(tmp_path: Path):
    line = view.status_line(followed(*recorded()), config_of(tmp_path, steps=9))
    assert line == (
        "step 3/9, version 3, reward 0.500, held-out 0.850, staleness 0..1, 100 tokens/s, "
        "waiting rollout:6 reward:12 collector:0 trainer:6, dropped zero_variance:1, busy trainer 50% engine 25%"
    )


def test_the_panel_shows_reward_speed_staleness_and_queues(tmp_path: Path):
    console = Console(file=io.StringIO(), width=120)
    console.print(view.panel(followed(*recorded()), config_of(tmp_path), "a run"))
    text = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    for expected in (
        "a run · step 3 · version 3 · 0:08",
        "held-out reward 0.850 (first 0.350)",
        "training reward 0.750",
        "staleness (limit 1)",
        "for rollout",
        "open groups",
        "dropped zero_variance",
        "v3",
    ):
        assert expected in text


def test_a_run_without_a_step_has_a_panel_too(tmp_path: Path):
    log, topics = MemoryLog(), Topics("run", PARTITIONS)
    topics.create(log)
    progress = RunProgress(log, topics)
    console = Console(file=io.StringIO(), width=100)
    console.print(view.panel(progress, config_of(tmp_path), "a run"))
    assert "no step yet" in console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert view.status_line(progress, config_of(tmp_path)).startswith("step 0, version -1, 0 tokens/s")


def test_a_plot_scales_from_0_to_1():
    assert view.plot([0.0, 0.5, 1.0], 3, 2) == ["  █", " ██"]
    assert view.plot([0.25], 5, 1) == ["▂"]
    assert view.sparkline([0.0, 1.0], 2) == " █"


def test_a_plot_of_many_values_has_their_means():
    assert view.plot([0.0, 1.0, 1.0, 1.0], 2, 1) == ["▄█"]
    assert len(view.plot([0.5] * 1000, 60, 3)[0]) == 60


def test_rewards_above_1_and_below_0_stay_inside_the_plot():
    assert view.plot([-1.0, 5.0, 10.0], 3, 1) == [" ▄█"]


def test_the_report_is_written_from_the_log(tmp_path: Path):
    pytest.importorskip("matplotlib")
    config = config_of(tmp_path)
    memory, topics = recorded()
    followed(memory, topics)
    (tmp_path / "run").mkdir()
    with open_log(config.log.url) as log:
        topics.create(log)
        for topic, partitions in memory.topics().items():
            for partition in range(partitions):
                for record in memory.read(topic, partition, 0).records:
                    log.append(topic, partition, [codec.NewRecord(record.value, record.headers)])
    text = report.write_report(config, "a run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["last_reward"], summary["duplicates_trained"]) == (3, 0.6, 0)
    assert (tmp_path / "run" / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "last_reward" in text and "zero_variance 1" in text
    assert f"millstream verify {tmp_path / 'run'}" in text


def test_the_view_stands_still_while_the_log_does_not_answer_and_goes_on_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    class Flaky(MemoryLog):
        is_down = True

        def _check_open(self) -> None:
            super()._check_open()
            if self.is_down:
                raise LogUnavailable("no broker answers")

    memory, topics = recorded()
    log = Flaky(memory._store)  # type: ignore[attr-defined]
    monkeypatch.setattr(common, "open_for_reading", lambda config, interrupted: log)
    config = replaced(config_of(tmp_path), "log.url", "kafka://127.0.0.1:1")
    shown = view._Plain(config)
    with caplog.at_level("INFO"):
        for _ in range(3):
            shown._due = 0.0
            shown.update(done=False)
        assert (
            caplog.text.count(
                "the log does not answer within 5 s, so the view stands still: no broker answers"
            )
            == 1
        )
        assert shown._due > time.monotonic() + 5, "and it is not asked again at once"
        log.is_down = False
        shown._due = 0.0
        shown.update(done=False)
    assert "step 3, version 3" in caplog.text
    assert topics.run == "run"


def test_a_log_that_does_not_answer_costs_the_report_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def absent(config):
        raise LogUnavailable("no broker answers")

    monkeypatch.setattr(common, "open_for_reading", absent)
    assert "no summary, for the log does not answer" in report.write_report(config_of(tmp_path), "a run")


def test_a_run_that_never_began_has_no_report(tmp_path: Path):
    assert "this run has not been started" in report.write_report(config_of(tmp_path), "a run")


def test_a_run_that_drops_all_that_it_makes_is_warned_of_with_where_to_look(tmp_path: Path):
    config = config_of(tmp_path)
    progress = followed(*recorded())
    assert view.fruitless(progress, config) == ""  # it has made steps
    progress.view.cuts.clear()
    dropped = progress.view.drops[0]
    worst = dropped._replace(drop=msgspec.structs.replace(dropped.drop, reason="reward_error"))
    progress.view.drops[:] = [worst] * (view.FRUITLESS_BATCHES * config.trainer.rollout_batch_size)
    assert view.fruitless(progress, config) == (
        "no batch of 32 groups has come together, and 128 groups were dropped, 128 of them for reward_error; "
        f"why: millstream tail {config.run.dir} rewards -o -3 -e"
    )
    progress.view.drops.pop()
    assert view.fruitless(progress, config) == ""


def test_the_next_commands_are_called_as_this_program_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / ".venv" / "bin" / "millstream"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setattr("sys.argv", [str(program), "demo"])
    assert report.called_as() == ".venv/bin/millstream"
    monkeypatch.setenv("PATH", str(program.parent))
    assert report.called_as() == "millstream"
    monkeypatch.setattr("sys.argv", ["-c"])
    assert report.called_as() == "millstream"
