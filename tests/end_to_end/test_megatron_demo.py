"""The demo with a megatron trainer of two ranks, as a user starts it; only the CUDA device is made up."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_demo_learns_with_a_model_cut_over_two_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    paths = [str(ROOT / "tests/support/megatron_site"), str(ROOT)]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    settings = (
        "trainer.backend=megatron",
        "trainer.n_ranks=2",
        "trainer.megatron.tensor_model_parallel_size=2",
    )
    options = ("--plain", "--dir", str(folder), "--task", "guess", "--max-steps", "100")
    sets = [word for setting in settings for word in ("--set", setting)]
    ended = subprocess.run(
        [sys.executable, "-m", "engine.cli", "demo", *options, *sets],
        env=environ,
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    assert summary["steps"] == 100 and summary["first_reward"] < 0.8
    assert summary["last_reward"] >= 0.85
    audit = subprocess.run(
        [sys.executable, "-m", "engine.cli", "verify", str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert audit.returncode == 0, audit.stdout[-3000:]
