"""One supervised process: start it, see it end, end it, read the last lines that it wrote."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_TAIL_BYTES = 64 << 10
_TAIL_LINES = 40
START_MARK = "=== millstream started process"  # the first line of each incarnation in its log


class DaemonSpec(NamedTuple):
    """Which daemon: share `replica` of `replicas` of a role."""

    role: str
    replica: int = 0
    replicas: int = 1

    @property
    def name(self) -> str:
        return f"{self.role}-{self.replica}"


class Process:
    """A running daemon, leader of its own process group, stdout and stderr appended to `log_file`.

    running ──► `exit_code()` is not None ──► ended (its group is swept, nothing of it is left)
    """

    def __init__(self, command: Sequence[str], log_file: Path, env: Mapping[str, str]) -> None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("ab") as out:
            out.write(f"{START_MARK} {time.strftime('%Y-%m-%dT%H:%M:%S%z')}: {' '.join(command)}\n".encode())
            out.flush()
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,  # Ctrl-C in the terminal reaches the supervisor alone
            )
        self.pid = self._popen.pid
        self.log_file = log_file
        self.started = time.monotonic()

    def exit_code(self) -> int | None:
        """None while it runs; then its exit code, or minus the number of the signal that ended it."""
        if self._popen.returncode is None and self._has_ended():
            self._signal_group(
                signal.SIGKILL
            )  # before it is reaped, so that the group's number is still its own
            self._popen.wait()
        return self._popen.returncode

    def how_it_ended(self) -> str:
        return describe_exit(self._popen.returncode or 0)

    def last_words(self) -> str:
        return last_words(self.log_file)

    def terminate(self) -> None:
        """Ask the leader alone; what it started is for it to end in good order."""
        if self._popen.returncode is None:
            self._popen.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the whole group at once and wait until the leader is gone."""
        if self._popen.returncode is None:
            self._signal_group(signal.SIGKILL)
            self._popen.wait()

    def _has_ended(self) -> bool:
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            return self._popen.poll() is not None
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _signal_group(self, number: int) -> None:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):  # macOS answers EPERM for a group of zombies
            pass


def describe_exit(code: int) -> str:
    """`exit code 1`, or `killed by SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def last_words(log_file: Path) -> str:
    """What the newest incarnation wrote last: from its last traceback on if there is one, else its last lines."""
    try:
        with log_file.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    for at in range(len(lines) - 1, -1, -1):
        if lines[at].startswith(START_MARK):
            lines = lines[at + 1 :]
            break
    tracebacks = [at for at, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if not tracebacks:
        return "\n".join(lines[-10:])
    lines = lines[tracebacks[-1] :]
    if len(lines) > _TAIL_LINES:  # a traceback says most in its first line and its last ones
        lines = [lines[0], "  …", *lines[-_TAIL_LINES + 2 :]]
    return "\n".join(lines)
