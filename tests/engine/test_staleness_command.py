"""`millstream staleness` as its users meet it: reports, sweeps, and what is refused in a sentence that helps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine import cli
from engine.commands import rundir, staleness
from engine.config import Config, build_config, fingerprint
from engine.roles import open_run_log, topics_of
from engine.settings import TrainerConfig
from streams import codec
from streams.errors import ConfigError
from streams.events import EpochStarted
from tests.support.ages import AgedRun, Made, synchronous


def config_of(folder: Path, **changes: dict[str, Any]) -> Config:
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "q", "label": "a"}) + "\n")
    table: dict[str, dict[str, Any]] = {
        "run": {"name": "run", "dir": str(folder / "run")},
        "log": {"partitions": 1},
        "data": {"path": str(rows)},
        "rollout": {"backend": "scripted", "n_samples_per_prompt": 2},
        "reward": {"function": "exact"},
        "trainer": {"backend": "scalar", "rollout_batch_size": 2},
    }
    for section, values in changes.items():
        table.setdefault(section, {}).update(values)
    return build_config(table)


@pytest.fixture
def finished(tmp_path: Path) -> str:
    """A run of 20 steps of 5 s each at limit 0; returns its directory."""
    return made(tmp_path, 20)


def made(folder: Path, steps: int, **changes: dict[str, Any]) -> str:
    config = config_of(folder, **changes)
    rundir.adopt(config)
    with open_run_log(config) as log:
        synchronous(steps, generation_s=3, collect_s=0.5, train_s=1, publish_s=0.25, sync_s=0.25, log=log)
    return config.run.dir


def test_the_report_is_a_table(finished: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["staleness", finished]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("run run · 20 steps, version 20 · limit 0, on_stale drop\n")
    assert "samples trained by staleness: 0: 100%" in shown
    assert "trainer: 0.200 steps/s; in a step 20% of the time, waiting for groups 80%" in shown
    assert "what if" not in shown


def test_a_sweep_as_json_holds_predictions_and_advice(finished: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["staleness", finished, "--sweep", "8,0", "--json"]) == 0
    raw = json.loads(capsys.readouterr().out)
    assert [each["limit"] for each in raw["sweep"]["predictions"]] == [0, 8]
    assert raw["sweep"]["predictions"][0]["steps_per_s"] == pytest.approx(0.2)
    assert raw["sweep"]["error"] == pytest.approx(0.0, abs=1e-6)
    assert raw["sweep"]["advice"]["limit"] == 8
    assert raw["report"]["times"]["waiting"] == pytest.approx(0.8)


def test_without_a_sweep_the_json_says_null(finished: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["staleness", finished, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sweep"] is None


def test_engines_and_pace_change_what_is_asked(finished: str, capsys: pytest.CaptureFixture[str]):
    asked = ["staleness", finished, "--sweep", "2", "--engines", "3", "--pace", "off"]
    assert cli.main(asked) == 0
    assert "what if the limit were … (3 engines, not paced: engines never wait)" in capsys.readouterr().out


def test_a_page_holds_picture_and_tables(finished: str, tmp_path: Path):
    page = tmp_path / "limits.html"
    assert cli.main(["staleness", finished, "--sweep", "0,1", "--picture", str(page)]) == 0
    text = page.read_text()
    assert text.count("<svg") == 1 and "recommended: " in text


def test_reading_leaves_the_log_as_it_was(finished: str):
    before = {path: path.read_bytes() for path in sorted(Path(finished, "log").rglob("*")) if path.is_file()}
    cli.main(["staleness", finished, "--sweep", "0"])
    after = {path: path.read_bytes() for path in sorted(Path(finished, "log").rglob("*")) if path.is_file()}
    segments = [path for path in before if path.suffix not in (".db", ".db-wal", ".db-shm")]
    assert segments and all(before[path] == after[path] for path in segments)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--sweep", "0,x,2"], "--sweep 0,x,2: 'x' is no limit; give whole numbers"),
        (["--sweep", "0,,2"], "'' is no limit"),
        (["--sweep", "-1"], "'-1' is no limit"),
        (["--sweep", "1.5"], "'1.5' is no limit"),
        (["--sweep", "9999"], "9999 is over 64"),
        (["--engines", "2"], "--engines belongs to a sweep: add --sweep"),
        (["--picture", "a.png"], "--picture belongs to a sweep"),
        (["--sweep", "1", "--picture", "a.gif"], "must end in .png"),
        (["--sweep", "1", "--picture", "no/such/a.png"], "there is no folder no/such"),
        (["--from-step", "3"], "add --set K"),
        (["--set", "3", "--sweep", "1"], "leave --sweep out"),
        (["--set", "3", "--json"], "leave --json out"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_is_read(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
):
    assert cli.main(["staleness", "/nowhere", *arguments]) == cli.WRONG_USAGE
    assert says in capsys.readouterr().err


def test_set_takes_a_number_and_no_setting(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["staleness", "/nowhere", "--set", "trainer.lr=1"])
    assert "'trainer.lr=1' is not a whole number" in capsys.readouterr().err


def test_set_changes_the_live_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = config_of(tmp_path)
    rundir.adopt(config)
    with open_run_log(config) as log:
        AgedRun(fingerprint=fingerprint(config), log=log)
    assert cli.main(["staleness", config.run.dir, "--set", "3", "--from-step", "7"]) == 0
    assert "will be 3 from step 7 on" in capsys.readouterr().out


def test_a_run_that_was_never_started_is_said_to_be_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = config_of(tmp_path)
    rundir.adopt(config)
    assert cli.main(["staleness", config.run.dir]) == cli.WRONG_USAGE
    assert "this run has not been started" in capsys.readouterr().err


def test_an_empty_log_is_said_to_be_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = config_of(tmp_path)
    rundir.adopt(config)
    open_run_log(config).close()
    assert cli.main(["staleness", config.run.dir]) == cli.FAILED
    assert "the log is empty: no trainer has begun this run yet" in capsys.readouterr().err


def test_before_the_first_step_it_says_how_far_the_run_has_come(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = config_of(tmp_path)
    rundir.adopt(config)
    with open_run_log(config) as log:
        run = AgedRun(log=log)
        run.group(0, 1, [Made(1, 2)] * 2, 3)
        run.group(1, 1, [Made(1, 2)], None)
    assert cli.main(["staleness", config.run.dir, "--sweep", "0"]) == cli.FAILED
    said = capsys.readouterr().err
    assert "has made no step yet: 2 groups are dispatched and 1 are complete, a step needs 2" in said


def test_one_step_is_enough_for_a_report_and_too_few_for_a_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run_dir = made(tmp_path, 1)
    assert cli.main(["staleness", run_dir]) == 0
    assert capsys.readouterr().out.startswith("run run · 1 step, version 1")
    assert cli.main(["staleness", run_dir, "--sweep", "0,1"]) == cli.FAILED
    assert "a what-if needs at least 8 measured steps" in capsys.readouterr().err


def test_a_limit_below_the_update_interval_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run_dir = made(tmp_path, 20, weights={"update_weights_interval": 3})
    assert cli.main(["staleness", run_dir, "--sweep", "1,4"]) == cli.WRONG_USAGE
    assert "update_weights_interval = 3 a limit below 2 could never train" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("trainer", "budget"),
    [
        (TrainerConfig(), 0.25),
        (TrainerConfig(loss="tis"), 0.06),
        (TrainerConfig(loss="decoupled_ppo"), 0.06),
        (TrainerConfig(use_rollout_logprobs=False), 0.0),
        (TrainerConfig(use_rollout_logprobs=False, use_tis=True), 0.06),
    ],
)
def test_the_drift_budget_goes_by_the_loss(trainer: TrainerConfig, budget: float):
    assert staleness.drift_budget(trainer).nats_per_token == budget


def test_limits_are_read_once_each_in_order():
    assert staleness.parse_limits("4, 0,1,4") == [0, 1, 4]
    with pytest.raises(ConfigError):
        staleness.parse_limits("")


def test_a_ledger_of_a_newer_schema_is_said_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = config_of(tmp_path)
    rundir.adopt(config)
    with open_run_log(config) as log:
        topics_of(config).create(log)
        record = codec.encode(EpochStarted(producer="trainer", started_ms=1), producer="test")
        newer = [(name, b"2.0" if name == "schema" else value) for name, value in record.headers]
        log.append(topics_of(config).name("ledger"), 0, [record._replace(headers=newer)])
    assert cli.main(["staleness", config.run.dir]) == cli.FAILED
    said = capsys.readouterr().err
    assert "no step can be read; ledger record 0: SchemaTooNew" in said
