"""The demo on a real SGLang server that the rollout daemon starts: token in, token out, versions over disk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.config import load_config
from engine.roles import open_run_log, topics_of
from streams.events import EngineReady, Metrics, RolloutFailed, TrajectoryFinished
from streams.trajectory import open_payload
from tests.support.events import events
from tests.support.sglang import require_sglang

STEPS = 3


def millstream(*args: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "engine.cli", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_run_on_a_real_server_trains_on_tokens_of_versions_that_its_engine_held(tmp_path: Path) -> None:
    python, folder = require_sglang(), tmp_path / "demo"
    options = ("--engine", "sglang", "--sglang-python", str(python), "--max-steps", str(STEPS))
    ended = millstream("demo", "--plain", "--dir", str(folder), *options, timeout_s=1200)
    assert ended.returncode == 0, ended.stderr[-3000:]
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    assert summary["steps"] == STEPS
    audit = millstream("verify", str(folder), timeout_s=120)
    assert audit.returncode == 0, audit.stdout[-3000:]

    config = load_config(folder)
    topics = topics_of(config)
    with open_run_log(config, readonly=True) as log:
        fleet = events(log, topics, "fleet")
        ready = {(each.epoch, each.version) for each in fleet if isinstance(each, EngineReady)}
        assert all(each.checksum for each in fleet if isinstance(each, EngineReady))
        made = [
            each
            for partition in range(config.log.partitions)
            for each in events(log, topics, "trajectories", partition)
        ]
        metrics = events(log, topics, "metrics")
    assert not [each for each in made if isinstance(each, RolloutFailed)]
    samples = [open_payload(each) for each in made if isinstance(each, TrajectoryFinished)]
    assert len(samples) >= STEPS * config.trainer.rollout_batch_size * config.rollout.n_samples_per_prompt
    for sample in samples:
        assert sum(count for *_, count in sample.versions) == len(sample.response_ids)
        assert {(epoch, version) for epoch, version, _ in sample.versions} <= ready
    aborted = [
        each.values["aborted_total"]
        for each in metrics
        if isinstance(each, Metrics) and each.source == "rollout-0"
    ]
    assert max(aborted) == 0
