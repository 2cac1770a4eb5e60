"""A server of SGLang and its daemon live and die together: kill -9 of either leaves no process behind, and the run's
supervisor starts both anew."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from engine.roles import open_run_log, topics_of
from engine.tasks import get_task, tiny
from replay.verify import verify
from tests.faults.fleet_harness import Watcher, configuration, watching
from tests.faults.harness import Supervised, begin, supervised
from tests.support.sglang import require_sglang

START_S = 900.0  # of a server, on a machine that does other things too
END_S = 120.0


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_killed_server_ends_its_daemon_and_a_killed_daemon_its_server_and_both_start_anew(
    tmp_path: Path,
) -> None:
    python, task = require_sglang(), get_task("guess")
    tiny.save(tmp_path / "model", tiny.build_model(task, 1, "qwen3"), tiny.build_tokenizer(task))
    config = configuration(
        tmp_path,
        transport="disk",
        log={"partitions": 2},
        rollout={"backend": "sglang", "replicas": 1, "sglang": {"python": str(python)}},
    )
    begin(config)
    with supervised(config) as launcher, watching(config) as watcher:
        daemon, server = whole(launcher, watcher)
        os.kill(
            server[0], signal.SIGKILL
        )  # the server itself; its scheduler and detokenizer are children of it
        gone([daemon, *server])
        reborn, server_of_reborn = whole(launcher, watcher)
        assert reborn != daemon and not set(server) & set(server_of_reborn)
        os.kill(reborn, signal.SIGKILL)
        gone([reborn, *server_of_reborn])
        assert whole(launcher, watcher)[0] != reborn
    left = [pid for pid in everybody() if config.run.dir.encode() in command_line(pid)]
    assert left == []
    with open_run_log(config, readonly=True) as log:
        report = verify(log, topics_of(config))
    assert [violation.text for check in report.checks for violation in check.violations] == []


def whole(launcher: Supervised, watcher: Watcher) -> tuple[int, list[int]]:
    """The daemon and its server's processes, once the engine is ready and two more steps were made with it."""
    within(START_S, lambda: launcher.pid("rollout-0") is not None, "a daemon")
    within(START_S, lambda: watcher.pid("rollout-0") == launcher.pid("rollout-0"), "the engine to be ready")
    steps = watcher.count("batch_cut")
    within(START_S, lambda: watcher.count("batch_cut") > steps + 1, "steps with it")
    daemon = launcher.pid("rollout-0")
    assert daemon is not None
    server = descendants(daemon)
    assert len(server) >= 3, server  # server, scheduler, detokenizer
    return daemon, server


def gone(pids: list[int]) -> None:
    within(END_S, lambda: not [pid for pid in pids if is_running(pid)], f"{pids} to be gone")


def within(seconds: float, holds: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.1)


def descendants(pid: int) -> list[int]:
    """Children first, then their children."""
    found, parents = [], [pid]
    while parents:
        parents = [each for each in everybody() if parent_of(each) in parents]
        found += parents
    return found


def everybody() -> list[int]:
    return [int(each.name) for each in Path("/proc").glob("[0-9]*")]


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ["X", "0"]


def parent_of(pid: int) -> int:
    return int(_stat(pid)[1])


def is_running(pid: int) -> bool:
    return _stat(pid)[0] not in "ZX"


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
