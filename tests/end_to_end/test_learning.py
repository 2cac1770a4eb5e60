"""The demo as a user starts it: a model visibly learns, and the audit of its log finds nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def millstream(*args: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "engine.cli", *args],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("task", "steps", "limit", "least"),
    [("guess", 200, 2, 0.95), ("guess", 200, 0, 0.95), ("reverse", 100, 2, 0.9)],
)
def test_the_demo_learns_and_its_log_holds_what_it_promises(tmp_path: Path, task, steps, limit, least):
    folder = tmp_path / "demo"
    options = ("--plain", "--dir", str(folder), "--task", task, "--max-steps", str(steps))
    ended = millstream("demo", *options, "--max-weight-staleness", str(limit), timeout_s=800)
    assert ended.returncode == 0, ended.stderr[-3000:]
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    assert summary["steps"] == steps
    assert summary["first_reward"] < 0.8
    assert summary["last_reward"] >= least
    assert summary["max_staleness_trained"] <= limit
    assert summary["duplicates_trained"] == 0
    assert (folder / "curve.png").stat().st_size > 1000
    audit = millstream("verify", str(folder), timeout_s=120)
    assert audit.returncode == 0, audit.stdout[-3000:]
