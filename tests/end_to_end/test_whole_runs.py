"""Whole runs: real processes, the embedded log, `millstream verify` at the end.

Scripted answers and the trainer of one number, so that a run takes seconds; everything between them is the real
thing. Faults come while it runs: kill -9, broken records, scorers that fail in every way, an engine that answers NaN.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.commands import rundir
from engine.commands.limit import change_limit
from engine.config import Config, build_config
from engine.launch.local import LocalLauncher, Outcome, daemons_of
from engine.roles import open_run_log, topics_of
from engine.weights.store import read
from replay.ledger import RunView, read_run
from replay.verify import verify
from streams.events import DeadLetter, GroupDropped, TaskSkipped
from streams.log import NewRecord
from tests.support.events import events

DEADLINE_S = 100.0


def configuration(folder: Path, **changes: dict[str, Any]) -> Config:
    rows = folder / "rows.jsonl"
    if not rows.exists():
        rows.write_text("".join(json.dumps({"prompt": f"q{i}", "label": "yes"}) + "\n" for i in range(40)))
    table: dict[str, dict[str, Any]] = {
        "run": {"name": "whole", "dir": str(folder / "run"), "steps": 40},
        "log": {"partitions": 2},
        "data": {"path": str(rows)},
        "rollout": {
            "backend": "scripted",
            "n_samples_per_prompt": 4,
            "max_concurrency": 32,
            "rollout_max_response_len": 16,
            "options": {"policy": "coin", "heads": "yes", "tails": "no"},
        },
        "reward": {"function": "exact"},
        "trainer": {"backend": "scalar", "rollout_batch_size": 4},
        "checkpoint": {"every": 10},
        "supervisor": {"max_restarts": 20},
    }
    for section, values in changes.items():
        table.setdefault(section, {}).update(values)
    return build_config(table)


def run(
    config: Config, during: Callable[[LocalLauncher, float], None] = lambda launcher, elapsed: None
) -> Outcome:
    """Run to the end, calling `during` several times a second."""
    rundir.adopt(config)
    launcher = LocalLauncher(config, daemons_of(config))
    began = time.monotonic()
    try:
        launcher.start()
        while (outcome := launcher.poll()) is None:
            elapsed = time.monotonic() - began
            assert elapsed < DEADLINE_S, f"the run has not ended; logs in {config.run.dir}/logs"
            during(launcher, elapsed)
            time.sleep(0.05)
        return outcome
    finally:
        launcher.close()


def audited(config: Config) -> RunView:
    """The run's ledger, after an audit that must find nothing."""
    with open_run_log(config, readonly=True) as log:
        report = verify(log, topics_of(config))
        assert report.holds, report.as_table()
        return read_run(log, topics_of(config))


def drop_reasons(view: RunView) -> Counter[str]:
    return Counter(each.drop.reason for each in view.drops)


def newest_version(config: Config) -> int:
    """Of the weight files that lie there now; -1 without any."""
    names = (
        path.stem.rsplit("-v", 1) for path in (Path(config.run.dir) / "weights").glob("e*-v*.safetensors")
    )
    return max((int(version) for _, version in names), default=-1)


def test_every_daemon_can_be_killed_and_the_run_ends_as_if_nothing_had_happened(tmp_path):
    config = configuration(tmp_path, run={"steps": 120})
    # daemon → the version at which it dies
    victims = {"rollout-0": 10, "trainer-0": 25, "collector-0": 40, "reward-0": 55, "feeder-0": 70}
    killed: list[str] = []

    def kill(launcher: LocalLauncher, elapsed: float) -> None:
        version, pids = newest_version(config), launcher.processes()
        for name, due in victims.items():
            if name not in killed and version >= due and name in pids:
                os.kill(pids[name], signal.SIGKILL)
                killed.append(name)
                return

    outcome = run(config, kill)
    assert outcome.code == 0, outcome.cause
    assert killed == list(victims)
    view = audited(config)
    assert view.finished is not None and view.finished.step == 120
    assert len(view.epochs) == 2  # the kill of the trainer was a take-over


SCORERS = """
import time
def reward(sample):
    place = int(sample.group_id.split("-")[1])
    if place == 3 and sample.index == 0:
        raise ValueError("no verdict")
    if place == 5 and sample.index == 1:
        return None
    if place == 7 and sample.index == 2:
        return float("nan")
    if place == 9 and sample.index == 3:
        time.sleep(3600)
    return float(sample.response == sample.label)
"""


def test_scorers_that_fail_in_every_way_cost_their_own_groups_and_are_never_zero(tmp_path, monkeypatch):
    (tmp_path / "failing_scorers.py").write_text(SCORERS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = configuration(
        tmp_path,
        run={"steps": None},
        data={"epochs": 1},
        reward={"function": "failing_scorers:reward", "timeout_s": 1.0, "workers": 2},
    )
    assert run(config).code == 0
    view = audited(config)
    reasons = drop_reasons(view)
    expected = {"reward_error": 1, "reward_missing": 1, "reward_nonfinite": 1, "reward_timeout": 1}
    assert {reason: reasons[reason] for reason in expected} == expected
    assert len(view.groups_trained()) + sum(reasons.values()) == 40


def test_an_engine_that_answers_nan_fails_its_samples_by_name(tmp_path):
    config = configuration(
        tmp_path,
        run={"steps": None},
        data={"epochs": 1},
        rollout={
            "options": {
                "policy": "coin",
                "heads": "yes",
                "tails": "no",
                "fault": "nan",
                "fault_match": "0-11/",
            }
        },
    )
    assert run(config).code == 0
    view = audited(config)
    assert drop_reasons(view)["nonfinite_logprob"] == 1
    with open_run_log(config, readonly=True) as log:
        letters = events(log, topics_of(config), "dead")
    assert {letter.reason for letter in letters} == {"nonfinite_logprob"}
    assert len(letters) == 8  # four members, each tried twice


def test_bad_rows_are_skipped_by_name_and_the_rest_is_trained(tmp_path):
    rows = [json.dumps({"prompt": f"q{i}", "label": "yes"}) for i in range(10)]
    rows[4], rows[6] = json.dumps({"question": "no prompt"}), '{"prompt": "cut off'
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    config = configuration(tmp_path, run={"steps": None}, data={"epochs": 1})
    assert run(config).code == 0
    view = audited(config)
    assert drop_reasons(view)["task_skipped"] == 2
    with open_run_log(config, readonly=True) as log:
        topics = topics_of(config)
        skipped = [e for p in (0, 1) for e in events(log, topics, "tasks", p) if isinstance(e, TaskSkipped)]
        dropped = [e for p in (0, 1) for e in events(log, topics, "groups", p) if isinstance(e, GroupDropped)]
    assert Counter(event.reason for event in skipped) == {"missing_prompt": 1, "bad_json": 1}
    assert sum("missing_prompt" in event.detail for event in dropped) == 1


def test_broken_records_in_every_topic_stop_nobody(tmp_path):
    config = configuration(tmp_path, run={"steps": 30})
    state = {"written": False}

    def break_in(launcher: LocalLauncher, elapsed: float) -> None:
        if state["written"] or not (Path(config.run.dir) / "weights").is_dir():
            return
        state["written"] = True
        topics = topics_of(config)
        with open_run_log(config) as log:
            for word in ("tasks", "trajectories", "rewards", "groups", "ledger", "fleet", "metrics"):
                log.append(topics.name(word), 0, [NewRecord(bytes.fromhex("c16761"))])

    outcome = run(config, break_in)
    assert outcome.code == 0, outcome.cause
    with open_run_log(config, readonly=True) as log:
        topics = topics_of(config)
        view = read_run(log, topics)
        letters = [each for each in events(log, topics, "dead") if isinstance(each, DeadLetter)]
    assert view.finished is not None and view.finished.step == 30
    refused = {topics.word(letter.topic) for letter in letters if letter.raw == bytes.fromhex("c16761")}
    assert {"tasks", "trajectories", "rewards", "groups"} <= refused
    assert len(view.problems) == 1  # the one in the ledger: void for everyone, and the audit shows it


def test_two_engines_share_the_partitions(tmp_path):
    config = configuration(tmp_path, rollout={"replicas": 2}, log={"partitions": 4})
    assert run(config).code == 0
    audited(config)
    newest = sorted((Path(config.run.dir) / "weights").glob("*.safetensors"))[-1]
    assert read(newest, "numpy")["w"].shape == (1,)


@pytest.mark.parametrize("on_stale", ["drop", "mask"])
def test_a_synchronous_run_trains_only_what_its_own_version_made(tmp_path, on_stale):
    config = configuration(tmp_path, staleness={"max_weight_staleness": 0, "on_stale": on_stale})
    assert run(config).code == 0
    view = audited(config)
    ages = {member.staleness for _, group in view.groups_trained() for member in group.members}
    assert ages == {0}
    assert drop_reasons(view)["stale"] == 0


def test_the_limit_of_a_live_run_is_changed_at_the_step_asked_for_and_at_once(tmp_path):
    """Said from outside while five daemons work; each cut carries the limit in force, and nothing else is disturbed."""
    config = configuration(tmp_path, run={"steps": 260})
    asked: list[int] = []  # from which step on; the newest version when the second change was written

    def change(launcher: LocalLauncher, elapsed: float) -> None:
        version = newest_version(config)
        if not asked and version >= 10:
            asked.append(version + 150)  # on a busy machine 80 steps had passed before this was written
            assert "from step" in change_limit(config, 5, asked[0])
        elif len(asked) == 1 and version >= asked[0] + 10:
            asked.append(version)
            assert "(it was 5)" in change_limit(config, 0)

    outcome = run(config, change)
    assert outcome.code == 0, outcome.cause
    cuts = [cut.event for cut in audited(config).cuts]
    rising = next(cut.step for cut in cuts if cut.limit == 5)
    falling = next(cut.step for cut in cuts if cut.limit == 0)
    assert rising == asked[0] and falling > asked[1]
    expected = [2] * (rising - 1) + [5] * (falling - rising) + [0] * (261 - falling)
    assert [cut.limit for cut in cuts] == expected
    ages = [
        max(member.staleness for group in cut.groups for member in group.members)
        for cut in cuts
        if cut.limit == 5
    ]
    assert max(ages) > 2, "generation ran further ahead under the higher limit"
