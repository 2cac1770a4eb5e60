"""The local launcher: one process per daemon on this machine, under the supervisor (engine/launch/supervisor.py).

Each daemon leads its own process group, logs to <run.dir>/logs/<role>-<i>.log, and dies with this supervisor, also
when that is killed.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from engine.config import Config, without_overrides
from engine.launch.daemon import DaemonSpec, Process
from engine.launch.supervisor import JOB_FILE, Outcome, Supervisor, finished_at
from streams.errors import ConfigError

__all__ = [
    "THREAD_VARIABLES",
    "LocalLauncher",
    "Outcome",
    "daemons_of",
    "finished_at",
    "has_evaluator",
    "thread_settings",
]

logger = logging.getLogger(__name__)

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class LocalLauncher(Supervisor):
    """The daemons of one run directory, as processes of this machine.

    >>> launcher = LocalLauncher(config, daemons_of(config))           # doctest: +SKIP
    >>> outcome = launcher.run(stop=lambda: False)                     # doctest: +SKIP

    Args:
        command: argument vector for a daemon; default: `millstream serve` of this Python on the run directory.
        prepare: as the supervisor's; default, for daemons of ours: makes the run's topics on Kafka.
        finished: as the supervisor's.
        threads: OMP_NUM_THREADS and its like in the daemons, where the environment does not set them. Tiny models
            are fastest with 1.
    """

    def __init__(
        self,
        config: Config,
        daemons: Sequence[DaemonSpec],
        *,
        command: Callable[[DaemonSpec], Sequence[str]] | None = None,
        prepare: Callable[[Callable[[], bool]], None] | None = None,
        finished: Callable[[], bool] | None = None,
        threads: int = 1,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        environ = os.environ if environ is None else environ
        env = thread_settings(threads) | without_overrides(environ)  # what the user has set himself stays
        place = _ThisMachine(Path(config.run.dir), command, env)
        super().__init__(
            config,
            daemons,
            place,
            prepare=prepare or (None if command is None else lambda stop: None),
            finished=finished,
        )


class _ThisMachine:
    """Room enough for any number of processes (engine/launch/supervisor.py, Place)."""

    def __init__(
        self,
        run_dir: Path,
        command: Callable[[DaemonSpec], Sequence[str]] | None,
        env: Mapping[str, str],
    ) -> None:
        self._run_dir, self._env = run_dir, env
        self._command = command or self._serve

    def prepare(self, stop: Callable[[], bool]) -> bool:
        """Raises ConfigError while daemons of the run may be on a cluster, whose supervisor was lost."""
        mark = self._run_dir / JOB_FILE
        if mark.exists():
            raise ConfigError(
                f"{mark}: daemons of this run may go on on a Ray cluster, which the run would have twice then. Go on "
                f"there (millstream run {self._run_dir} --launcher ray), or, if that cluster is gone or nobody has "
                "looked after them for placement.unattended_s, remove that file"
            )
        return True

    def start(self, spec: DaemonSpec) -> Process:
        process = Process(self._command(spec), self._run_dir / "logs" / f"{spec.name}.log", self._env)
        logger.info("%s started as process %d", spec.name, process.pid)
        return process

    def close(self) -> None:
        pass

    def _serve(self, spec: DaemonSpec) -> list[str]:
        return [
            *(sys.executable, "-m", "engine.cli", "serve", spec.role, str(self._run_dir)),
            *("--replica", f"{spec.replica}/{spec.replicas}", "--with-parent", str(os.getpid())),
        ]


def daemons_of(config: Config) -> list[DaemonSpec]:
    """Every daemon that a run of this configuration needs, in the order of the data path."""
    daemons = [DaemonSpec("feeder")]
    for role, replicas in (("rollout", config.rollout.replicas), ("reward", config.reward.replicas)):
        daemons += [DaemonSpec(role, replica, replicas) for replica in range(replicas)]
    if config.teacher.path:
        replicas = config.teacher.replicas
        daemons += [DaemonSpec("teacher", replica, replicas) for replica in range(replicas)]
    daemons += [DaemonSpec("collector"), DaemonSpec("trainer")]
    if has_evaluator(config):
        daemons.append(DaemonSpec("evaluator"))
    return daemons


def has_evaluator(config: Config) -> bool:
    """Whether held-out prompts were given."""
    return bool(config.eval.path)


def thread_settings(threads: int) -> dict[str, str]:
    """What every daemon's environment starts from."""
    env = {name: str(threads) for name in THREAD_VARIABLES}
    return env | {"TOKENIZERS_PARALLELISM": "false", "PYTHONFAULTHANDLER": "1"}
