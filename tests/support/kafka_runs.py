"""Runs on a real broker, daemon by daemon: what tests of faults need besides tests/faults/harness.py.

    run_on(folder, address, prefix) ──► Config, its topics made
    Daemons(config).start("reward") ──► Daemon: `millstream serve`, as a user starts it
    put_all, put_groups ──► what other stages would have written              eventually(lambda: …, "what is awaited")

Nobody supervises a `Daemon`: one that is killed stays away until the test starts it again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from engine.commands import rundir
from engine.config import Config
from engine.launch.local import THREAD_VARIABLES
from engine.roles import open_run_log, topics_of
from streams import codec
from streams.events import Event, Metrics
from streams.log import EventLog, read_all
from streams.topics import ALL_TOPICS, DATA_TOPICS, KEPT_TOPICS, Topics
from tests.faults import harness
from tests.support.events import completed as completed_group
from tests.support.events import events, finished, task

ROOT = Path(__file__).parents[2]
SOON_S = 60.0  # of a wait without a bound of its own: far more than anything here takes on a quiet machine
KAFKA = {"session_timeout_s": 6.0, "delivery_timeout_s": 10.0, "request_timeout_s": 3.0, "ingest": "thread"}

_T = TypeVar("_T")


# -- a run


def run_on(
    folder: Path,
    address: str,
    prefix: str,
    made: Sequence[str] = ALL_TOPICS,
    **changes: dict[str, Any],
) -> Config:
    """A run of one partition and one daemon of each role, in its directory `folder/run`, with these topics made."""
    sections: dict[str, dict[str, Any]] = {
        **changes,
        "log": {"partitions": 1, "kafka": KAFKA, **changes.get("log", {})},
        "rollout": {"replicas": 1, **changes.get("rollout", {})},
        "reward": {"replicas": 1, **changes.get("reward", {})},
    }
    folder.mkdir(parents=True, exist_ok=True)
    config = harness.configuration(folder, f"kafka://{address}/{prefix}", **sections)
    rundir.adopt(config)
    topics = topics_of(config)
    with open_run_log(config) as log:
        for word in made:
            log.create_topic(topics.name(word), topics.count(word), kept=word in KEPT_TOPICS)
    return config


def scoring(calls: Path, **options: Any) -> dict[str, Any]:
    """The section [reward] for tests.support.scoring, whose calls are written down in the file `calls`."""
    return {
        "function": "tests.support.scoring:reward",
        "workers": 1,
        "options": {"calls": str(calls), **options},
    }


def calls_in(file: Path) -> list[str]:
    """Uids in the order in which they were scored."""
    return file.read_text("utf-8").splitlines() if file.exists() else []


# -- daemons


class Daemon:
    """One `millstream serve`. Its output goes to a file; `text()` is what it has said so far."""

    def __init__(self, name: str, command: Sequence[str], out: Path) -> None:
        self.name, self.out = name, out
        environ = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1"), "PYTHONPATH": str(ROOT)}
        with out.open("wb") as file:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environ
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def text(self) -> str:
        return self.out.read_text("utf-8", "replace")

    def is_running(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """As a crash does: SIGKILL."""
        self.process.kill()
        self.process.wait(SOON_S)

    def suspend(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def terminate(self) -> None:
        self.process.terminate()

    def exit_code(self, timeout_s: float = SOON_S) -> int:
        """Wait for its end."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end within {timeout_s} s:\n{self.text()}") from None

    def cpu_s(self) -> float:
        """Seconds of processor time that it has used, its threads together."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Daemons(contextlib.AbstractContextManager["Daemons"]):
    """Starts daemons of one run; none of them outlives it."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.started: list[Daemon] = []

    def start(self, role: str, replica: str = "0/1", *options: str, script: str = "") -> Daemon:
        """`millstream serve ROLE --replica …`; with `script`, that Python text runs first, in the same process."""
        name = f"{role}-{replica.partition('/')[0]}"
        arguments = ["serve", role, self.config.run.dir, "--replica", replica, *options]
        command = [sys.executable, "-m", "engine.cli", *arguments]
        if script:
            main = f"{script}\nimport sys\nfrom engine.cli import main\nsys.exit(main({arguments!r}))\n"
            command = [sys.executable, "-c", main]
        daemon = Daemon(name, command, Path(self.config.run.dir) / f"{name}.{len(self.started)}.out")
        self.started.append(daemon)
        return daemon

    def __exit__(self, *_: object) -> None:
        for daemon in self.started:
            if daemon.is_running():
                daemon.kill()  # also one that is stopped by SIGSTOP


class Hold:
    """Stops a daemon at one place of its code, as a busy machine could, until it is released.

    It waits before the `method` ("package.module:Class.method"), or behind it if `after`, the first time that `when`
    holds: Python over the method's arguments, as in "self.step == 3". Start the daemon with `script`.
    """

    def __init__(self, folder: Path, method: str, when: str, *, after: bool = False) -> None:
        self._reached, self._released = folder / "hold.reached", folder / "hold.released"
        module, _, place = method.partition(":")
        owner, _, name = place.partition(".")
        self.script = f"""
import inspect, time
from pathlib import Path
from {module} import {owner}

original, reached, released = {place}, Path({str(self._reached)!r}), Path({str(self._released)!r})

def hold(arguments):
    if eval({when!r}, {{}}, arguments) and not reached.exists():
        reached.touch()
        while not released.exists():
            time.sleep(0.01)

def held(*given, **named):
    arguments = inspect.signature(original).bind(*given, **named).arguments
    if {after}:
        result = original(*given, **named)
        hold(arguments)
        return result
    hold(arguments)
    return original(*given, **named)

{owner}.{name} = held
"""

    def is_reached(self) -> bool:
        return self._reached.exists()

    def release(self) -> None:
        self._released.touch()


def millstream(*arguments: str, timeout_s: float = SOON_S) -> subprocess.CompletedProcess[str]:
    """A command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "engine.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


# -- what lies in the log


def put_all(log: EventLog, topics: Topics, word: str, found: Sequence[Event], partition: int = 0) -> int:
    """All of them in one append; returns the offset of the first."""
    records = [codec.encode(event, producer="test") for event in found]
    return log.append(topics.name(word), partition, records)


def put_groups(
    log: EventLog, topics: Topics, first: int, count: int, n_samples: int = 4, *, completed: bool = False
) -> None:
    """Tasks and finished samples of groups `first`, `first` + 1, … in partition 0, where the offsets of the tasks are
    their seqs; also their outcomes, if they are `completed`. Their answers are right, and their tokens of version 0,
    made in the first epoch of an orderly run. A rollout daemon that runs beside this may write samples in between."""
    seqs = range(first, first + count)
    put_all(log, topics, "tasks", [task(seq, n_samples) for seq in seqs])
    samples = [finished(seq, index, seq, n_samples=n_samples) for seq in seqs for index in range(n_samples)]
    at = put_all(log, topics, "trajectories", samples)
    if completed:
        outcomes = [
            completed_group(seq, n_samples=n_samples, offsets=list(range(here, here + n_samples)))
            for seq, here in zip(seqs, range(at, at + len(samples), n_samples), strict=True)
        ]
        put_all(log, topics, "groups", outcomes)


def partitions_of_groups(log: EventLog, topics: Topics) -> dict[str, set[int]]:
    """Group id → every partition in which some event names it."""
    found: dict[str, set[int]] = {}
    for word in DATA_TOPICS:
        for partition, event in everywhere(log, topics, word):
            found.setdefault(event.group_id, set()).add(partition)
    return found


def everywhere(log: EventLog, topics: Topics, word: str) -> Iterator[tuple[int, Any]]:
    """(partition, event) of all known events of a topic."""
    for partition in range(topics.count(word)):
        for event in events(log, topics, word, partition):
            yield partition, event


def newest_metrics(log: EventLog, topics: Topics, source: str) -> dict[str, float]:
    """What that daemon said last; nothing before its first word."""
    said = [e for e in events(log, topics, "metrics") if isinstance(e, Metrics) and e.source == source]
    return said[-1].values if said else {}


def ends(log: EventLog, topics: Topics, words: Sequence[str]) -> dict[tuple[str, int], int]:
    return {(word, p): log.end(topics.name(word), p) for word in words for p in range(topics.count(word))}


def written_by(
    log: EventLog, topics: Topics, word: str, since: Mapping[tuple[str, int], int]
) -> set[tuple[str, int]]:
    """(daemon, partition) of every record that has come since those `ends`."""
    return {
        ((record.header("by") or b"").decode(), partition)
        for partition in range(topics.count(word))
        for record in read_all(log, topics.name(word), partition, since[word, partition])
    }


# -- waiting


def eventually(claim: Callable[[], _T], what: str, *daemons: Daemon, timeout_s: float = SOON_S) -> _T:
    """The first true answer. None of the `daemons` may end while it is waited for."""
    deadline = time.monotonic() + timeout_s
    while not (answer := claim()):
        ended = [daemon.name for daemon in daemons if not daemon.is_running()]
        if ended or time.monotonic() >= deadline:
            why = f"{', '.join(ended)} ended before" if ended else f"not within {timeout_s:g} s"
            said = "".join(f"\n{daemon.name}:\n{daemon.text()[-4000:]}" for daemon in daemons)
            raise AssertionError(f"{why}: {what}{said}")
        time.sleep(0.02)
    return answer
