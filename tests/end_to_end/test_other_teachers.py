"""Whole runs of real processes that learn from something else than a reward: a teacher, given responses, a critic.

Each is small: a fresh tiny model, a few steps, then the audit and the replay of its log.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engine.commands import rundir
from engine.config import Config, build_config
from engine.launch.local import LocalLauncher, daemons_of
from engine.roles import open_run_log, topics_of
from engine.tasks import get_task, tiny
from streams.events import BatchCut, StepMeasured, TeacherScored, TrajectoryFinished
from tests.support.events import events

DEADLINE_S = 900.0
TASK = get_task("reverse")


def model(folder: Path, seed: int) -> Path:
    tiny.save(folder, tiny.build_model(TASK, seed), tiny.build_tokenizer(TASK))
    return folder


def configuration(folder: Path, steps: int = 4, **sections: dict[str, Any]) -> Config:
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in TASK.rows(n=64)), encoding="utf-8")
    table: dict[str, dict[str, Any]] = {
        "run": {"name": "taught", "dir": str(folder / "run"), "steps": steps},
        "log": {"partitions": 2},
        "data": {"path": str(rows)},
        "model": {"path": str(model(folder / "model", 0))},
        "rollout": {"n_samples_per_prompt": 2, "rollout_max_response_len": 8},
        "reward": {"function": "exact", "workers": 0},
        "collector": {"member_deadline_s": 600.0},
        "trainer": {"rollout_batch_size": 8, "lr": 3e-3},
        "checkpoint": {"every": 2},
    }
    for name, values in sections.items():
        table.setdefault(name, {}).update(values)
    return build_config(table)


def run(config: Config, kill: str = "") -> None:
    """To the end; `kill`: a daemon that is killed once, as soon as a version has been published."""
    rundir.adopt(config)
    launcher, killed = LocalLauncher(config, daemons_of(config)), not kill
    try:
        began = time.monotonic()
        launcher.start()
        while (outcome := launcher.poll()) is None:
            assert time.monotonic() - began < DEADLINE_S, f"not ended; logs in {config.run.dir}/logs"
            pid = launcher.processes().get(kill)
            if not killed and pid and any((Path(config.run.dir) / "weights").glob("e*-v1.safetensors")):
                os.kill(pid, signal.SIGKILL)
                killed = True
            time.sleep(0.05)
    finally:
        launcher.close()
    assert outcome.code == 0, outcome.cause
    assert killed


def millstream(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "engine.cli", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def checked(config: Config, tmp_path: Path) -> dict[str, list[Any]]:
    """Audit and replay find nothing; the events of its topics."""
    audit = millstream("verify", config.run.dir)
    assert audit.returncode == 0, audit.stdout[-3000:]
    replayed = millstream("replay", config.run.dir, "--out", str(tmp_path / "replay"))
    assert replayed.returncode == 0, replayed.stdout[-3000:] + replayed.stderr[-3000:]
    topics = topics_of(config)
    with open_run_log(config, readonly=True) as log:
        return {
            word: [
                event
                for partition in range(topics.count(word))
                for event in events(log, topics, word, partition)
            ]
            for word in ("trajectories", "rewards", "ledger", "metrics")
        }


def of(kind: type, found: list[Any]) -> list[Any]:
    return [each for each in found if isinstance(each, kind)]


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_a_student_is_trained_on_the_scores_of_a_teacher_that_is_killed_on_the_way(tmp_path):
    teacher = {"path": str(model(tmp_path / "teacher", 1))}
    config = configuration(tmp_path, trainer={"loss": "opd"}, teacher=teacher)
    run(config, kill="teacher-0")
    found = checked(config, tmp_path)
    scored = of(TeacherScored, found["rewards"])
    assert len(scored) == len({each.uid for each in scored})
    members = [m for cut in of(BatchCut, found["ledger"]) for g in cut.groups for m in g.members]
    assert len(members) == 4 * 8 * 2 and all(member.teacher_offset >= 0 for member in members)
    assert {member.uid for member in members} <= {each.uid for each in scored}


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_given_responses_are_learnt_and_their_run_replays(tmp_path):
    config = configuration(
        tmp_path,
        steps=12,
        rollout={"generate": "given", "n_samples_per_prompt": 1},
        trainer={"loss": "sft", "behaviour_policy": "ignored", "rollout_batch_size": 16},
    )
    run(config)
    found = checked(config, tmp_path)
    samples = of(TrajectoryFinished, found["trajectories"])
    assert {each.finish_reason for each in samples} == {"given"}
    assert all(each.response == each.label for each in samples)
    losses = [each.values["loss"] for each in of(StepMeasured, found["metrics"])]
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_a_run_with_a_critic_recovers_and_replays_to_the_same_weights(tmp_path):
    estimator = {"advantage_estimator": "ppo", "gamma": 0.99, "lambd": 0.95, "num_critic_only_steps": 1}
    config = configuration(tmp_path, trainer=estimator)
    run(config, kill="trainer-0")
    found = checked(config, tmp_path)
    measured = of(StepMeasured, found["metrics"])
    assert all("explained_variance" in each.values for each in measured)
