"""The process behind a data folder: found by its pid file, and believed only if its command line names the folder.

A pid file outlives a killed broker, and the system gives its pid to others; nothing here ever signals a process
that does not carry the mark of its folder.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

POLL_S = 0.02
UNDECIDED_S = 5.0  # longer than a large process takes to give its memory back

# The shell leaves at once, so the broker is nobody's child: it outlives the command that started it, and its end
# needs no one to take note of it. The pid file is written by the shell, also when this process dies in between.
_LAUNCH = '"$@" >>"$BROKER_LOG" 2>&1 </dev/null & echo $! >"$BROKER_PID"'


def mark(data: Path) -> str:
    """An argument that the broker of this folder carries, and no other process."""
    return f"-Dmillstream.broker={data}"


def launch(
    command: Sequence[str | Path], data: Path, pid_file: Path, log: Path, env: Mapping[str, str]
) -> None:
    """Start `command`, which holds `mark(data)`, in a session of its own. Raises OSError."""
    subprocess.run(
        ["/bin/sh", "-c", _LAUNCH, "sh", *map(str, command)],
        env={**env, "BROKER_LOG": str(log), "BROKER_PID": str(pid_file)},
        cwd=data,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C in this terminal is not meant for it
        check=True,
        timeout=30,
    )


def pid_of(data: Path, pid_file: Path) -> int | None:
    """The running process of this folder; None when there is none, whatever the pid file says."""
    try:
        pid = int(pid_file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return pid if _carries(pid, mark(data)) else None


def end(data: Path, pid_file: Path, number: signal.Signals, timeout_s: float) -> bool:
    """Send a signal that ends the process and wait for it; False when it is still there after `timeout_s`."""
    pid = pid_of(data, pid_file)
    if pid is None:
        return True
    send(pid, number)
    send(pid, signal.SIGCONT)  # a process that is stopped would obey only after it
    deadline = time.monotonic() + timeout_s
    while pid_of(data, pid_file) == pid:
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it has just ended


def _carries(pid: int, argument: str) -> bool:
    """Does the process live, and has it this argument?

    The command line is empty for a moment while a program is being replaced by another, and while a process ends:
    its memory goes before its files and ports do. So an empty one is looked at until it is known which it was.
    """
    process = Path(f"/proc/{pid}")
    deadline = time.monotonic() + UNDECIDED_S
    while time.monotonic() < deadline:
        try:
            arguments = (process / "cmdline").read_bytes().split(b"\0")
            if arguments != [b""]:
                return os.fsencode(argument) in arguments
            if _has_ended(process):
                return False
        except OSError:
            return False
        time.sleep(0.002)
    return False  # a thread of the kernel


def _has_ended(process: Path) -> bool:
    """It has, when nothing is left but its exit code: no thread that could still hold a port. Raises OSError."""
    state = (process / "stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")[2][0]
    return state in "ZX" and len(os.listdir(process / "task")) <= 1
