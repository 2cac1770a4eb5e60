"""The supervisor over real processes: each daemon is a small script that does what its test tells it to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.config import Config, build_config
from engine.config_fields import replaced
from engine.launch.daemon import DaemonSpec, last_words
from engine.launch.local import LocalLauncher, Outcome, daemons_of, finished_at
from streams.errors import ConfigError, LogUnavailable
from streams.memory import MemoryLog

DEADLINE_S = 20.0

# `daemon.py NAME BEHAVIOUR FOLDER PARENT`: touches NAME.up.<pid>, then behaves.
DAEMON = """
import os, pathlib, signal, subprocess, sys, time
name, behaviour, folder, parent = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]), int(sys.argv[4])
sys.path.insert(0, {root!r})
from engine.launch.child import die_with_parent

def ended(*_):
    (folder / f"{{name}}.stopped").touch()
    sys.exit(0)

def wait_for(file):
    while not (folder / file).exists():
        time.sleep(0.01)

signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour == "stubborn" else ended)
if parent:
    die_with_parent(parent)
first = not list(folder.glob(f"{{name}}.up.*"))
if behaviour == "parent":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (folder / "grandchild").write_text(str(child.pid))
(folder / f"{{name}}.up.{{os.getpid()}}").write_text(os.environ.get("OMP_NUM_THREADS", ""))
if behaviour == "crash" or (behaviour == "crash once" and first):
    raise RuntimeError(f"{{name}} has no data")
if behaviour == "crash after rollout":
    wait_for("rollout-0.crashed")
    raise RuntimeError("nothing to train on")
if behaviour == "crash and say so":
    (folder / f"{{name}}.crashed").touch()
    raise RuntimeError("out of memory")
if behaviour == "wrong config":
    print("model.path: no such folder", file=sys.stderr)
    sys.exit(2)
if behaviour == "fenced":
    while not list(folder.glob("feeder-0.up.*")):  # on a busy machine the other may not have begun
        time.sleep(0.01)
    print("millstream: epoch 7 (trainer-4711-ab on host-b) has taken over run x", file=sys.stderr)
    sys.exit(3)
if behaviour == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if behaviour == "leave once" and first:
    sys.exit(0)
if behaviour == "finish":
    (folder / "finished").touch()
    sys.exit(0)
if behaviour == "finish, started twice" and not first:
    (folder / "finished").touch()
    sys.exit(0)
if behaviour == "finish, started twice":
    sys.exit(0)
wait_for("finished")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = str(Path(__file__).parents[2])
    (tmp_path / "daemon.py").write_text(DAEMON.format(root=root))
    return tmp_path


def config_of(folder: Path, **supervisor: float) -> Config:
    return build_config(
        {
            "run": {"dir": str(folder / "run")},
            "data": {"path": "prompts.jsonl"},
            "reward": {"function": "exact"},
            "rollout": {"backend": "scripted"},
            "trainer": {"backend": "scalar"},
            "supervisor": supervisor,
        }
    )


def launcher_of(
    folder: Path,
    behaviours: dict[str, str],
    *,
    parent: int = 0,
    prepare: Callable[[Callable[[], bool]], None] | None = None,
    **supervisor: float,
) -> LocalLauncher:
    def command(spec: DaemonSpec) -> list[str]:
        script = str(folder / "daemon.py")
        return [sys.executable, script, spec.name, behaviours[spec.role], str(folder), str(parent)]

    return LocalLauncher(
        config_of(folder, **supervisor),
        [DaemonSpec(role) for role in behaviours],
        command=command,
        prepare=prepare,
        finished=(folder / "finished").exists,
    )


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {what}"
        time.sleep(0.01)


def run(launcher: LocalLauncher, stop: Callable[[], object] = lambda: False) -> Outcome:
    deadline = time.monotonic() + DEADLINE_S
    outcome = launcher.run(lambda: bool(stop()) or time.monotonic() > deadline)
    assert time.monotonic() < deadline, "the run did not end by itself"
    return outcome


def starts(folder: Path, role: str) -> int:
    return len(list(folder.glob(f"{role}-0.up.*")))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return not is_zombie(pid)


def is_zombie(pid: int) -> bool:
    """Ended, but its parent has not looked yet: an orphan waits for init."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return False


def test_the_run_ends_with_0_when_the_trainer_and_then_the_others_have_ended(folder: Path):
    launcher = launcher_of(folder, {"feeder": "work", "reward": "work", "trainer": "finish"})
    assert run(launcher) == Outcome(0)
    assert starts(folder, "feeder") == starts(folder, "reward") == starts(folder, "trainer") == 1
    assert not list(folder.glob("*.stopped")), "they ended by themselves, not by SIGTERM"


def test_a_daemon_that_dies_is_started_again_and_its_log_goes_on(folder: Path):
    launcher = launcher_of(folder, {"reward": "crash once", "trainer": "work"})
    launcher.start()
    try:
        until(lambda: launcher.poll() is None and starts(folder, "reward") == 2, "the second start")
        (folder / "finished").touch()
        until(lambda: launcher.poll() == Outcome(0), "the end of the run")
    finally:
        launcher.close()
    log = (folder / "run" / "logs" / "reward-0.log").read_text()
    assert log.count("=== millstream started process") == 2
    assert "RuntimeError: reward-0 has no data" in log


def test_a_daemon_that_keeps_dying_fails_the_run_with_its_cause(folder: Path):
    launcher = launcher_of(folder, {"feeder": "crash", "trainer": "work"}, max_restarts=1)
    outcome = run(launcher)
    assert outcome.code == 1
    first, second, *_, last, after = outcome.cause.splitlines()
    assert first == f"feeder-0 ended: exit code 1: {folder / 'run' / 'logs' / 'feeder-0.log'}"
    assert second == "Traceback (most recent call last):"
    assert last == "RuntimeError: feeder-0 has no data"
    assert after == "after it: feeder-0 ended: exit code 1 (1×)"
    assert starts(folder, "feeder") == 2
    assert (folder / "trainer-0.stopped").exists()
    assert launcher.processes() == {}


def test_the_first_cause_is_named_and_not_the_last_symptom(folder: Path):
    behaviours = {"rollout": "crash and say so", "trainer": "crash after rollout"}
    outcome = run(launcher_of(folder, behaviours, max_restarts=1))
    assert outcome.code == 1
    assert outcome.cause.startswith("rollout-0 ended: exit code 1")
    assert "RuntimeError: out of memory" in outcome.cause
    assert "RuntimeError: nothing to train on" not in outcome.cause
    assert "trainer-0 ended: exit code 1" in outcome.cause.splitlines()[-1]


def test_a_signal_is_named(folder: Path):
    outcome = run(launcher_of(folder, {"rollout": "killed", "trainer": "work"}, max_restarts=0))
    assert outcome.code == 1
    assert outcome.cause.startswith("rollout-0 ended: killed by SIGKILL")


def test_a_wrong_configuration_is_not_tried_again(folder: Path):
    outcome = run(launcher_of(folder, {"rollout": "wrong config", "trainer": "work"}, max_restarts=5))
    assert outcome.code == 2
    assert outcome.cause.endswith("model.path: no such folder")
    assert starts(folder, "rollout") == 1


def test_a_trainer_that_was_fenced_is_not_started_again_and_the_other_one_is_named(folder: Path):
    outcome = run(launcher_of(folder, {"feeder": "work", "trainer": "fenced"}, max_restarts=5))
    assert outcome.code == 3
    assert "trainer-4711-ab on host-b" in outcome.cause and "a run has one trainer" in outcome.cause
    assert starts(folder, "trainer") == 1
    assert (folder / "feeder-0.stopped").exists(), "the other supervisor's daemons do the work now"


def test_a_trainer_that_was_fenced_from_a_run_that_is_finished_does_not_fail_it(folder: Path):
    (folder / "finished").touch()
    assert run(launcher_of(folder, {"feeder": "work", "trainer": "fenced"})) == Outcome(0)


def test_nothing_is_started_before_the_topics_are_there(folder: Path):
    asked: list[bool] = []

    def prepare(stop: Callable[[], bool]) -> None:
        asked.append(stop())
        raise LogUnavailable("no broker answers")

    launcher = launcher_of(folder, {"trainer": "work"}, prepare=prepare)
    assert launcher.run(lambda: True) == Outcome(130, "interrupted")
    assert asked == [True] and not list(folder.glob("*.up.*"))
    with pytest.raises(LogUnavailable):
        launcher_of(folder, {"trainer": "work"}, prepare=prepare).run(lambda: False)


def test_a_log_that_does_not_answer_says_nothing_of_the_end_of_a_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    class Absent(MemoryLog):
        def partitions(self, topic: str) -> int:
            raise LogUnavailable("no broker answers")

    monkeypatch.setattr("engine.roles.open_log", lambda url, **settings: Absent())
    config = replaced(config_of(folder), "log.url", "kafka://127.0.0.1:1")
    assert finished_at(config) is None
    assert "counts as going on: no broker answers" in caplog.text


def test_a_daemon_that_leaves_early_without_an_error_is_started_again(folder: Path):
    launcher = launcher_of(folder, {"reward": "leave once", "trainer": "work"}, max_restarts=0)
    launcher.start()
    try:
        until(lambda: launcher.poll() is None and starts(folder, "reward") == 2, "the second start")
    finally:
        launcher.close()


def test_a_trainer_that_leaves_an_unfinished_run_does_not_end_it(folder: Path):
    launcher = launcher_of(folder, {"feeder": "work", "trainer": "finish, started twice"}, max_restarts=0)
    assert run(launcher) == Outcome(0)
    assert starts(folder, "trainer") == 2


def test_stop_ends_every_daemon_and_gives_130(folder: Path):
    launcher = launcher_of(folder, {"feeder": "work", "rollout": "work", "trainer": "work"})
    outcome = run(launcher, stop=lambda: len(list(folder.glob("*.up.*"))) == 3)
    assert outcome.code == 130
    assert sorted(path.name for path in folder.glob("*.stopped")) == [
        "feeder-0.stopped",
        "rollout-0.stopped",
        "trainer-0.stopped",
    ]


def test_what_ignores_sigterm_is_killed_after_the_grace_time(folder: Path):
    launcher = launcher_of(folder, {"rollout": "stubborn", "trainer": "work"}, stop_grace_s=0.3)
    launcher.start()
    until(lambda: starts(folder, "rollout") == 1, "the daemon")
    pid = launcher.processes()["rollout-0"]
    began = time.monotonic()
    launcher.close()
    assert not alive(pid)
    assert 0.3 <= time.monotonic() - began < 5


def test_what_a_daemon_has_started_is_swept_with_it(folder: Path):
    launcher = launcher_of(folder, {"reward": "parent", "trainer": "work"})
    launcher.start()
    until(lambda: starts(folder, "reward") == 1, "the daemon")
    launcher.close()
    grandchild = int((folder / "grandchild").read_text())
    until(lambda: not alive(grandchild), "the grandchild to be gone")


def test_daemons_die_with_a_killed_supervisor(folder: Path):
    supervisor = folder / "supervisor.py"
    supervisor.write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import pathlib, test_local_launcher as t\n"
        f"launcher = t.launcher_of(pathlib.Path({str(folder)!r}), {{'feeder': 'work', 'trainer': 'work'}},"
        " parent=os.getpid())\n"
        "launcher.run(lambda: False)\n"
    )
    process = subprocess.Popen([sys.executable, str(supervisor)])
    try:
        until(lambda: starts(folder, "feeder") and starts(folder, "trainer"), "both daemons")
        pids = [int(path.suffix[1:]) for path in folder.glob("*.up.*")]
        assert all(alive(pid) for pid in pids)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE_S)
    until(lambda: not any(alive(pid) for pid in pids), "the daemons to be gone")


def test_a_second_supervisor_of_a_run_directory_is_refused(folder: Path):
    launcher = launcher_of(folder, {"trainer": "work"})
    launcher.start()
    try:
        with pytest.raises(ConfigError, match=f"is already being run by process {os.getpid()}"):
            launcher_of(folder, {"trainer": "work"}).start()
    finally:
        launcher.close()
    again = launcher_of(folder, {"trainer": "finish"})
    assert run(again) == Outcome(0)


def test_daemons_get_one_thread_unless_the_environment_says_otherwise(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert run(launcher_of(folder, {"trainer": "finish"})) == Outcome(0)
    assert [path.read_text() for path in folder.glob("trainer-0.up.*")] == ["1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert run(launcher_of(folder, {"reward": "work", "trainer": "finish"})) == Outcome(0)
    assert [path.read_text() for path in folder.glob("reward-0.up.*")] == ["3"]


def test_the_last_words_are_those_of_the_newest_incarnation(tmp_path: Path):
    log = tmp_path / "x.log"
    log.write_text("=== millstream started process 1\nTraceback (most recent call last):\nold\n")
    with log.open("a") as file:
        file.write("=== millstream started process 2\nnew\n")
    assert last_words(log) == "new"


def test_a_run_has_one_daemon_of_each_role_and_the_asked_replicas(tmp_path: Path):
    config = build_config(
        {
            "run": {"dir": str(tmp_path)},
            "data": {"path": "prompts.jsonl"},
            "reward": {"function": "exact", "replicas": 3},
            "rollout": {"backend": "scripted", "replicas": 2},
            "trainer": {"backend": "scalar"},
        }
    )
    names = [f"{spec.name}/{spec.replicas}" for spec in daemons_of(config)]
    assert names == [
        "feeder-0/1",
        *("rollout-0/2", "rollout-1/2"),
        *("reward-0/3", "reward-1/3", "reward-2/3"),
        *("collector-0/1", "trainer-0/1"),
    ]
