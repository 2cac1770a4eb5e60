"""The supervisor: when a daemon is started again, what ends a run, and with which cause. It starts none by itself.

    start ──► start all ──► poll, many times a second ───────────► trainer ended with 0 and the run has finished
                             │ a daemon died                           └─► the others end by themselves ──► 0
                             ├─ within max_restarts: start it again after a pause that doubles
                             ├─ fenced (3): another trainer has the run; end all, name it ──────────────► 3
                             └─ over it: end all, name the FIRST cause ─────────────────────────────────► 1
    SIGTERM, SIGINT: end all (SIGTERM, grace, SIGKILL) ─────────────────────────────────────────────────► 130

How a daemon becomes a process is for its `Place` to know: this machine (engine/launch/local.py) or a Ray cluster
(engine/launch/on_ray). Nothing about the run is kept here: the daemons rebuild all of it from the log.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple, Protocol

from engine.config import Config
from engine.launch import failures
from engine.launch.daemon import DaemonSpec
from streams.errors import ConfigError, LogUnavailable

logger = logging.getLogger(__name__)

POLL = timedelta(milliseconds=100)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0  # before a restart; doubles with each one in the window
SETTLED_S = 30.0  # a daemon that has run this long since its last failure has got over it
LOOK_S = 5.0  # for one look into a log that may not answer; the daemons are not looked after meanwhile
FINISH_S = 30.0  # what the others have to end by themselves after the trainer
WRONG_CONFIG = 2  # exit code of a daemon that no restart can help
LOCK_S = 0.5  # `millstream why` holds the lock for an instant
JOB_FILE = "ray.job"  # in the run directory, while daemons of the run may be on a Ray cluster
FENCED = 3  # exit code of a trainer whose run another trainer has taken over
_TWO_TRAINERS = (
    "a run has one trainer: this supervisor has ended its daemons and leaves the run to the other one. End that one "
    "(and its supervisor) before going on from here"
)


class Outcome(NamedTuple):
    """How the run ended: its exit code, and the first cause if it failed."""

    code: int
    cause: str = ""


class Running(Protocol):
    """A daemon that was started, wherever. This is all that the supervisor asks of it; no answer waits."""

    started: float  # monotonic

    @property
    def pid(self) -> int: ...  # 0 while it is not known yet

    def exit_code(self) -> int | None:
        """None while it runs; then its exit code, or minus the number of the signal that ended it. Always the same
        from then on."""
        ...

    def how_it_ended(self) -> str:
        """In words, once it has: `exit code 1`, `killed by SIGKILL`."""
        ...

    def last_words(self) -> str: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class Place(Protocol):
    """Where daemons run. This is all that the supervisor asks of it."""

    def prepare(self, stop: Callable[[], bool]) -> bool:
        """Make sure that every daemon will find room, before any is started; False: `stop()` came first."""
        ...

    def start(self, spec: DaemonSpec) -> Running: ...

    def close(self) -> None:
        """Give up what was taken, once every daemon has ended."""
        ...


class Failure(NamedTuple):
    at: float  # monotonic
    name: str
    code: int
    how: str
    last_words: str

    def sentence(self, *, with_reason: bool = False) -> str:
        reason = self.last_words.rpartition("\n")[2] if with_reason and self.code > 0 else ""
        return f"{self.name} ended: {self.how}{', ' if reason else ''}{reason}"


class _Daemon:
    """A place in the run that some process fills: the one now running, or the next one."""

    def __init__(self, spec: DaemonSpec) -> None:
        self.spec = spec
        self.running: Running | None = None
        self.start_at = 0.0  # monotonic; when the next process may start
        self.restarts: list[float] = []  # within the window
        self.early_ends = 0
        self.done = False


class Supervisor:
    """Starts and supervises the daemons of one run directory, at a place.

    >>> supervisor = LocalLauncher(config, daemons_of(config))         # doctest: +SKIP
    >>> outcome = supervisor.run(stop=lambda: False)                   # doctest: +SKIP

    or, to do something else meanwhile: `start()`, `poll()` until it gives an Outcome, `close()` always.

    Args:
        prepare: called before the first daemon starts, with the stop flag; default: makes the run's topics on Kafka.
        finished: whether the log says that the run has finished; default: looked up in the ledger.
    """

    def __init__(
        self,
        config: Config,
        daemons: Sequence[DaemonSpec],
        place: Place,
        *,
        prepare: Callable[[Callable[[], bool]], None] | None = None,
        finished: Callable[[], bool] | None = None,
    ) -> None:
        self.run_dir = Path(config.run.dir)
        self._limits = config.supervisor
        self._place = place
        self._prepare = prepare or partial(_make_topics, config)
        self._finished = finished or (lambda: finished_at(config, stop=self._stop) is not None)
        self._stop: Callable[[], bool] = lambda: False
        self._daemons = [_Daemon(spec) for spec in daemons]
        self._failures: list[Failure] = []
        self._trainer_ended: float | None = None
        self._run_finished = False
        self._lock: IO[str] | None = None

    # ------------------------------------------------------------------ life
    def run(self, stop: Callable[[], bool]) -> Outcome:
        """Supervise until the end, or until `stop()`; nothing is left running either way."""
        try:
            if not self.start(stop):
                return Outcome(130, "interrupted")
            while True:
                outcome = self.poll()
                if outcome is not None:
                    return outcome
                if stop():
                    return Outcome(130, "interrupted")
                time.sleep(POLL.total_seconds())
        finally:
            self.close()

    def start(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Take the run directory and start every daemon. Raises ConfigError while another supervisor has it.

        False when `stop()` came while the log, or room for the daemons, was waited for; then nothing was started.
        """
        self._stop = stop
        self._take_lock()
        try:
            self._prepare(stop)
        except LogUnavailable:
            if not stop():
                raise
            return False
        if not self._place.prepare(stop):
            return False
        for daemon in self._daemons:
            self._start(daemon)
        return True

    def poll(self) -> Outcome | None:
        """Look after every daemon once. An Outcome once the run is over; call `close()` then."""
        for daemon in self._daemons:
            outcome = self._look_after(daemon)
            if outcome is not None:
                return outcome
        if self._trainer_ended is None:
            return None
        running = [daemon.spec.name for daemon in self._daemons if daemon.running is not None]
        if running and time.monotonic() - self._trainer_ended < FINISH_S:
            return None
        if running:
            logger.warning(
                "%s did not end by themselves %.0f s after the trainer", ", ".join(running), FINISH_S
            )
        return Outcome(0)

    def close(self) -> None:
        """End what still runs: SIGTERM, the grace time, then SIGKILL. Twice is harmless."""
        running = {each.spec.name: each.running for each in self._daemons if each.running is not None}
        for each in running.values():
            each.terminate()
        deadline = time.monotonic() + self._limits.stop_grace_s
        while any(each.exit_code() is None for each in running.values()) and time.monotonic() < deadline:
            time.sleep(0.02)
        for name, each in running.items():
            if each.exit_code() is None:
                which = f"process {each.pid} ({name})" if each.pid else name
                logger.warning(
                    "%s is killed: SIGTERM had no effect within %.0f s", which, self._limits.stop_grace_s
                )
                each.kill()
        for daemon in self._daemons:
            daemon.running = None
        if self._lock is not None:  # without it, another supervisor has the daemons
            self._place.close()
            self._lock.close()
            self._lock = None

    def processes(self) -> dict[str, int]:
        """Name → process id of what runs now."""
        found = {each.spec.name: each.running.pid for each in self._daemons if each.running is not None}
        return {name: pid for name, pid in found.items() if pid}

    # ------------------------------------------------------------------ one daemon
    def _start(self, daemon: _Daemon) -> None:
        daemon.running = self._place.start(daemon.spec)

    def _look_after(self, daemon: _Daemon) -> Outcome | None:
        now = time.monotonic()
        running = daemon.running
        if running is None:
            if not daemon.done and self._trainer_ended is None and now >= daemon.start_at:
                self._start(daemon)
            return None
        code = running.exit_code()
        if code is None:
            return None
        daemon.running = None
        if code == 0 and self._has_finished():
            daemon.done = True
            logger.info("%s has finished", daemon.spec.name)
            if daemon.spec.role == "trainer":
                self._trainer_ended = now
            return None
        if code == 0:
            self._ended_early(daemon, now)
            return None
        if self._trainer_ended is not None:
            daemon.done = True  # the run is whole; how a helper of it went down changes nothing
            logger.warning(
                "%s ended (%s) after the run had finished", daemon.spec.name, running.how_it_ended()
            )
            return None
        if code == FENCED and self._has_finished():
            daemon.done, self._trainer_ended = True, now
            logger.warning("%s: another trainer has finished the run", daemon.spec.name)
            return None
        failure = Failure(now, daemon.spec.name, code, running.how_it_ended(), running.last_words())
        return self._failed(daemon, failure)

    def _has_finished(self) -> bool:
        """Asked only when a daemon has ended: it reads the ledger. Once true, true for ever."""
        self._run_finished = self._run_finished or self._finished()
        return self._run_finished

    def _ended_early(self, daemon: _Daemon, now: float) -> None:
        """It ended well but too soon (someone sent it SIGTERM): a place of the run must not stay empty."""
        pause = min(FIRST_PAUSE_S * 2**daemon.early_ends, LONGEST_PAUSE_S)
        daemon.early_ends += 1
        daemon.start_at = now + pause
        logger.warning(
            "%s ended before the run has finished; starting it again in %.1f s", daemon.spec.name, pause
        )

    def _failed(self, daemon: _Daemon, failure: Failure) -> Outcome | None:
        self._failures = [*self._open_failures(failure.at), failure]
        failures.record(self.run_dir, failure, self._failures)
        window = failure.at - self._limits.window_s
        daemon.restarts = [at for at in daemon.restarts if at > window]
        if failure.code == WRONG_CONFIG:
            return Outcome(WRONG_CONFIG, self._cause([failure]))
        if failure.code == FENCED:  # starting it again would take the run back, and so on in turns
            return Outcome(FENCED, f"{self._cause([failure])}\n{_TWO_TRAINERS}")
        if len(daemon.restarts) >= self._limits.max_restarts:
            return Outcome(1, self._cause(self._failures))
        pause = min(FIRST_PAUSE_S * 2 ** len(daemon.restarts), LONGEST_PAUSE_S)
        daemon.restarts.append(failure.at)
        daemon.start_at = failure.at + pause
        logger.warning(
            "%s; starting it again in %.1f s, restart %d of at most %d in %.0f s (%s)",
            failure.sentence(with_reason=True),
            pause,
            len(daemon.restarts),
            self._limits.max_restarts,
            self._limits.window_s,
            self.run_dir / "logs" / f"{failure.name}.log",
        )
        return None

    def _open_failures(self, now: float) -> list[Failure]:
        """Failures of the window, less those that their daemon has got over since."""
        settled = {
            daemon.spec.name
            for daemon in self._daemons
            if daemon.running is not None and now - daemon.running.started > SETTLED_S
        }
        return [
            failure
            for failure in self._failures
            if failure.at > now - self._limits.window_s and failure.name not in settled
        ]

    def _cause(self, failures: Sequence[Failure]) -> str:
        """The first failure that nobody got over; the later ones, which may be its symptoms, in one line each."""
        first, later = failures[0], failures[1:]
        lines = [f"{first.sentence()}: {self.run_dir / 'logs' / f'{first.name}.log'}", first.last_words]
        if later:
            counts = Counter(failure.sentence() for failure in later)
            lines.append("after it: " + "; ".join(f"{each} ({times}×)" for each, times in counts.items()))
        return "\n".join(line for line in lines if line)

    # ------------------------------------------------------------------ surroundings
    def _take_lock(self) -> None:
        """One supervisor per run directory: two would start every daemon twice and fence each other's trainer."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        lock = (self.run_dir / "supervisor.lock").open("a+", encoding="utf-8")
        deadline = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() < deadline:
                    time.sleep(0.05)
                    continue
                lock.seek(0)
                holder = lock.read().strip() or "unknown"
                lock.close()
                raise ConfigError(f"{self.run_dir} is already being run by process {holder}") from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        self._lock = lock


def _make_topics(config: Config, stop: Callable[[], bool]) -> None:
    """On the embedded log each daemon does it; on Kafka it is an act of its own, which daemons only check."""
    if config.log.url.startswith("kafka:"):
        from engine.roles import create_topics

        create_topics(config, stop)


def finished_at(config: Config, *, stop: Callable[[], bool] = lambda: False) -> int | None:
    """The last step of a run whose ledger has a valid RunFinished; None while it goes on or has not begun, and where
    the log does not answer, which is said."""
    from consumers.ledger import Ledger
    from engine.commands import common

    if not common.has_log(config):
        return None
    give_up = time.monotonic() + LOOK_S
    reading = common.open_for_reading(config, interrupted=lambda: stop() or time.monotonic() > give_up)
    with reading as log:
        try:
            if not log.partitions(common.topics_of(config).name("ledger")):
                return None
            ledger = Ledger(log, common.topics_of(config))
            ledger.catch_up()
        except LogUnavailable as error:
            logger.warning("whether the run has finished cannot be told, so it counts as going on: %s", error)
            return None
        return None if ledger.finished is None else ledger.finished.step
