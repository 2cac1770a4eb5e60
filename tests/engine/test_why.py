"""`millstream why` names the first daemon that failed, on real runs whose daemons were made to fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.commands import rundir
from engine.commands.why import as_text
from engine.config import Config
from engine.launch import failures
from engine.launch.daemon import START_MARK
from engine.launch.local import LocalLauncher, daemons_of
from engine.launch.supervisor import Failure
from engine.why import events, logs
from engine.why.story import tell
from tests.faults import harness

ROOT = Path(__file__).parents[2]
DEADLINE_S = 90.0

# Usable while the run is checked and its functions are looked at; a fault once a file says so.
REWARD = """
from pathlib import Path
HERE = Path(__file__).parent

def weights():
    return {}["judge"]

if (HERE / "broken").exists():
    weights()

def reward(sample):
    return 1.0
"""


def configuration(folder: Path, **sections: dict) -> Config:
    return harness.configuration(folder, f"file://{folder}/run/log", **sections)


def finish(launcher: LocalLauncher, until: float) -> int:
    while (outcome := launcher.poll()) is None:
        assert time.monotonic() < until, f"no outcome within {DEADLINE_S} s"
        time.sleep(0.05)
    return outcome.code


def test_a_reward_that_raises_at_import_is_named_with_the_line_that_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "judging.py").write_text(REWARD)
    (tmp_path / "broken").touch()
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    config = configuration(tmp_path, reward={"function": "judging:reward"})
    rundir.adopt(config)
    launcher = LocalLauncher(config, daemons_of(config))
    try:
        assert launcher.start()
        assert finish(launcher, time.monotonic() + DEADLINE_S) == 2
    finally:
        launcher.close()
    story = tell(config)
    assert story.first is not None
    assert story.first.daemon.startswith("reward-")
    assert story.first.how == "exit code 2"
    assert "importing judging failed: KeyError: 'judge'" in story.first.reason
    assert story.hint == "its whole traceback: python -c 'import judging'"
    assert story.state.startswith("stopped") and story.order == "the supervisor's record"
    assert "first: reward-" in as_text(story)


def test_a_trainer_that_was_killed_is_first_and_what_followed_is_listed_behind_it(tmp_path: Path) -> None:
    config = configuration(tmp_path, supervisor={"max_restarts": 1, "window_s": 600.0})
    rundir.adopt(config)
    launcher = LocalLauncher(config, daemons_of(config))
    until, killed, outcome = time.monotonic() + DEADLINE_S, set[int](), None
    try:
        assert launcher.start()
        while outcome is None:
            assert time.monotonic() < until, f"no outcome within {DEADLINE_S} s"
            pid = launcher.processes().get("trainer-0")
            has_log = (Path(config.run.dir) / "log" / "format.json").exists()
            if pid is not None and pid not in killed and has_log:
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)
            outcome = launcher.poll()
            time.sleep(0.02)
    finally:
        launcher.close()
    assert outcome.code == 1 and len(killed) == 2
    command = [sys.executable, "-m", "engine.cli", "why", config.run.dir, "--json"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environ)
    told = json.loads(done.stdout)
    assert (told["first"]["daemon"], told["first"]["how"]) == ("trainer-0", "killed by SIGKILL")
    assert [each["how"] for each in told["followed"]] == ["killed by SIGKILL"]
    assert "dmesg" in told["hint"]
    assert told["state"].startswith("stopped")


def test_a_run_without_a_failure_says_so_and_a_run_that_is_not_there_is_refused(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    rundir.adopt(config)
    story = tell(config)
    assert story.first is None
    assert "no daemon has failed" in as_text(story)
    command = [sys.executable, "-m", "engine.cli", "why", str(tmp_path / "nothing")]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run(command, capture_output=True, timeout=60, check=False, env=environ).returncode == 2


# -- which one is first

TRACE = """Traceback (most recent call last):
  File "inner.py", line 3, in load
    return table[key]
KeyError: 'judge'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "outer.py", line 9, in start
    raise RuntimeError("no judge") from error
RuntimeError: no judge"""


def write_log(folder: Path, daemon: str, *bodies: str) -> None:
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    with (folder / "logs" / f"{daemon}.log").open("a") as file:
        for body in bodies:
            file.write(f"{START_MARK} 2026-11-30T05:00:00+0000: millstream serve\n{body}\n")


def fail(config: Config, daemon: str, words: str, *, code: int = 1, unsettled: list[str]) -> None:
    folder = Path(config.run.dir)
    write_log(folder, daemon, words)
    failure = Failure(0.0, daemon, code, "", words)
    failures.record(folder, failure, [Failure(0.0, name, 1, "", "") for name in unsettled])


def test_a_failure_that_a_restart_got_over_is_not_blamed_for_a_later_one(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    rundir.adopt(config)
    fail(config, "rollout-0", "old trouble", unsettled=["rollout-0"])
    fail(config, "reward-0", TRACE, unsettled=["reward-0"])
    fail(config, "trainer-0", "ValueError: nothing to train on", unsettled=["reward-0", "trainer-0"])
    story = tell(config)
    assert story.first is not None and story.first.daemon == "reward-0"
    assert story.first.reason == "RuntimeError: no judge"
    assert [each.daemon for each in story.followed] == ["trainer-0"]
    assert story.got_over == 1
    assert story.may_be_first == ["trainer-0"], "within 0.2 s their order cannot be told"


def test_the_traceback_is_that_of_the_failed_process_with_all_its_causes(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    rundir.adopt(config)
    fail(config, "reward-0", f"2026-11-30 05:00:01,000 I reward: ready\n{TRACE}", unsettled=["reward-0"])
    write_log(Path(config.run.dir), "reward-0", "2026-11-30 05:00:09,000 I reward: the next one is well")
    story = tell(config)
    assert story.first is not None
    assert story.first.lines == TRACE.splitlines()


def test_failures_of_an_earlier_supervision_are_not_told(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    rundir.adopt(config)
    fail(config, "rollout-0", "long ago", unsettled=["rollout-0"])
    record = Path(config.run.dir) / failures.FILE
    record.write_text(record.read_text().replace(f'"supervisor":{os.getpid()}', '"supervisor":1'))
    fail(config, "trainer-0", TRACE, unsettled=["trainer-0"])
    story = tell(config)
    assert story.first is not None and story.first.daemon == "trainer-0"
    assert (story.followed, story.got_over) == ([], 0)


def test_without_a_record_the_times_in_the_logs_tell_the_order(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    rundir.adopt(config)
    folder = Path(config.run.dir)
    write_log(folder, "collector-0", f"2026-11-30 05:00:09,500 I collector: reads\n{TRACE}")
    write_log(folder, "trainer-0", "2026-11-30 05:00:04,250 I trainer: step 3\nmillstream: the disk is full")
    story = tell(config)
    assert story.first is not None and story.first.daemon == "trainer-0"
    assert story.first.reason == "millstream: the disk is full"
    assert [each.daemon for each in story.followed] == ["collector-0"]
    assert story.followed[0].at - story.first.at == pytest.approx(5.25)


def test_a_record_that_was_torn_by_a_kill_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    rundir.adopt(config)
    fail(config, "trainer-0", TRACE, unsettled=["trainer-0"])
    with (Path(config.run.dir) / failures.FILE).open("a") as file:
        file.write('{"at":1796017582.1,"daemon":"rew')
    assert [each.daemon for each in failures.read(Path(config.run.dir))] == ["trainer-0"]


def test_a_record_that_cannot_be_written_costs_the_supervisor_nothing(tmp_path: Path) -> None:
    (tmp_path / failures.FILE).mkdir()
    failures.record(tmp_path, Failure(0.0, "trainer-0", 1, "", "words"), [])


def test_a_traceback_ends_where_the_log_goes_on() -> None:
    lines = [*TRACE.splitlines(), "2026-11-30 05:00:09,000 I reward: goes on", "and on"]
    assert logs.traceback_in(lines) == TRACE.splitlines()
    two = [
        "Traceback (most recent call last):",
        "  File x",
        "OSError: first",
        "2026-11-30 05:00:09,000 W x",
        *TRACE.splitlines(),
    ]
    assert logs.traceback_in(two) == TRACE.splitlines()
    assert logs.reason(two) == "RuntimeError: no judge"


def test_how_a_daemon_ended_is_told_in_the_words_of_its_supervisor_and_of_its_rank(tmp_path: Path) -> None:
    """On a cluster its own log may be that of another rank, or end before the node was lost."""
    config = configuration(tmp_path)
    rundir.adopt(config)
    folder = Path(config.run.dir)
    write_log(folder, "trainer-0", "rank 0: a healthy line")
    words = "Traceback (most recent call last):\nRuntimeError: of rank 3"
    failure = Failure(0.0, "trainer-0", 1, "rank 3: exit code 1", words)
    failures.record(folder, failure, [failure])
    story = tell(config)
    assert story.first is not None and story.first.how == "rank 3: exit code 1"
    assert story.first.lines == words.splitlines()


def test_failures_that_a_finished_run_got_over_are_counted_and_not_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration(tmp_path)
    rundir.adopt(config)
    fail(config, "rollout-0", "", code=-9, unsettled=["rollout-0"])
    monkeypatch.setattr(events, "look", lambda config: events.Said(has_begun=True, finished="data_ended"))
    story = tell(config)
    assert story.first is None and story.got_over == 1
    assert "1 failure of daemons, all got over" in as_text(story)
