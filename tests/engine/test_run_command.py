"""`millstream run` with every real daemon, the scripted engine and the scalar trainer: no torch, a few seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.commands import common
from engine.config import load_config
from replay.ledger import read_run

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    rows = [json.dumps({"prompt": f"question {row}", "label": str(row % 3)}) for row in range(20)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    file = tmp_path / "my.toml"
    file.write_text(
        f"""
[run]
name = "loop"
dir = "{tmp_path}/run"
steps = 40
[log]
partitions = 2
[data]
path = "{tmp_path}/prompts.jsonl"
[reward]
function = "exact"
[rollout]
backend = "scripted"
n_samples_per_prompt = 4
[trainer]
backend = "scalar"
rollout_batch_size = 4
lr = 0.1
"""
    )
    return file


def start(*args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "engine.cli", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    return process.returncode, out, err


def millstream(*args: str) -> tuple[int, str, str]:
    return finish(start(*args))


def wait_for_step(config_file: Path, step: int) -> None:
    config = load_config(config_file)
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if common.has_log(config):
            with common.open_for_reading(config) as log:
                if read_run(log, common.topics_of(config)).step >= step:
                    return
        time.sleep(0.05)
    raise AssertionError(f"step {step} was not reached within {DEADLINE_S} s")


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def daemons(stderr: str) -> list[int]:
    return [int(line.rpartition(" ")[2]) for line in stderr.splitlines() if " started as process " in line]


def test_a_run_goes_to_its_end_and_holds_what_it_promises(config_file: Path, tmp_path: Path):
    code, out, err = millstream("run", str(config_file))
    assert code == 0, err
    assert "SUMMARY" in out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["groups_trained"], summary["duplicates_trained"]) == (40, 160, 0)
    assert summary["finished"] == "steps_reached"
    assert summary["max_staleness_trained"] <= 2
    assert not any(is_running(pid) for pid in daemons(err))
    code, out, err = millstream("verify", str(tmp_path / "run"))
    assert code == 0, out + err
    code, _, err = millstream("run", str(tmp_path / "run"))
    assert code == 0, err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 40, (
        "it was finished already"
    )


def test_an_interrupted_run_ends_its_daemons_and_goes_on_later(config_file: Path, tmp_path: Path):
    process = start("run", str(config_file), "--set", "run.steps=4000")
    wait_for_step(config_file, 3)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 130, err
    assert "Traceback" not in err
    assert len(daemons(err)) == 5
    assert not any(is_running(pid) for pid in daemons(err))
    reached = json.loads((tmp_path / "run" / "summary.json").read_text())["steps"]
    assert reached >= 3
    assert f"millstream run {tmp_path / 'run'}" in err, "it says how to go on"
    code, out, err = millstream("run", str(tmp_path / "run"), "--set", f"run.steps={reached + 20}")
    assert code == 0, err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == reached + 20
    code, out, err = millstream("verify", str(tmp_path / "run"))
    assert code == 0, out + err
