"""The demo on two real SGLang servers, mode retract, over files and over broadcasts: it learns, nothing is aborted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

from engine.config import Config, load_config
from engine.roles import open_run_log, topics_of
from streams.events import EngineReady, Event, Metrics, RolloutFailed, TrajectoryFinished, WeightsPublished
from streams.trajectory import Payload, open_payload
from tests.support.events import events
from tests.support.sglang import require_sglang

ENGINES = ("rollout-0", "rollout-1")
LEARNED = 0.93  # held-out reward; it begins at 0.64, and the torch engine comes to 0.98


class Record(NamedTuple):
    config: Config
    ready: list[EngineReady]
    published: list[WeightsPublished]
    samples: list[Payload]
    failed: list[Event]
    metrics: list[Metrics]


def millstream(*args: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "engine.cli", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def record_of(folder: Path) -> Record:
    config = load_config(folder)
    topics = topics_of(config)
    with open_run_log(config, readonly=True) as log:
        fleet, ledger, metrics = (events(log, topics, word) for word in ("fleet", "ledger", "metrics"))
        made = [
            each
            for partition in range(config.log.partitions)
            for each in events(log, topics, "trajectories", partition)
        ]
    return Record(
        config,
        [each for each in fleet if isinstance(each, EngineReady)],
        [each for each in ledger if isinstance(each, WeightsPublished)],
        [open_payload(each) for each in made if isinstance(each, TrajectoryFinished)],
        [each for each in made if isinstance(each, RolloutFailed)],
        [each for each in metrics if isinstance(each, Metrics)],
    )


@pytest.mark.slow
@pytest.mark.timeout(4500)
@pytest.mark.parametrize("transport", ["disk", "distributed"])
def test_a_run_on_two_real_servers_learns_and_every_token_is_of_a_version_that_its_engine_held(
    tmp_path: Path, transport: str
) -> None:
    python, folder = require_sglang(), tmp_path / "demo"
    options = ["--engine", "sglang", "--sglang-python", str(python), "--set", "rollout.replicas=2"]
    options += ["--set", f'weights.transport="{transport}"']
    ended = millstream("demo", "--plain", "--dir", str(folder), *options, timeout_s=4000)
    assert ended.returncode == 0, ended.stderr[-3000:]
    check(folder, transport)


def check(folder: Path, transport: str) -> None:
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    assert summary["last_reward"] >= LEARNED > summary["first_reward"]
    audit = millstream("verify", str(folder), timeout_s=300)
    assert audit.returncode == 0, audit.stdout[-3000:]

    run = record_of(folder)
    assert summary["steps"] == run.config.run.steps
    assert not run.failed
    held = {(each.epoch, each.version) for each in run.ready}
    wanted = (
        summary["steps"] * run.config.trainer.rollout_batch_size * run.config.rollout.n_samples_per_prompt
    )
    assert len(run.samples) >= wanted
    for sample in run.samples:
        assert sum(count for *_, count in sample.versions) == len(sample.response_ids)
        assert {(epoch, version) for epoch, version, _ in sample.versions} <= held
    assert any(len(sample.versions) > 1 for sample in run.samples), "no sample ran through an update"
    for engine in ENGINES:
        assert max(each.values["aborted_total"] for each in run.metrics if each.source == engine) == 0
        mine = [each for each in run.ready if each.engine == engine]
        assert len(mine) > summary["steps"] / 2
        # the first version is always a file's, and so is one that comes while another is on its way
        assert any(each.transport == "distributed" for each in mine) == (transport == "distributed")
    broadcast = [each for each in run.published if "distributed" in each.uris]
    assert bool(broadcast) == (transport == "distributed")
    checksums = defaultdict(set)
    for each in run.ready:
        checksums[each.epoch, each.version].add(each.checksum)
    assert all(len(seen) == 1 and "" not in seen for seen in checksums.values()), "servers that differ"
