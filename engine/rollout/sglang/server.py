"""An SGLang server of this daemon's own: started, waited for, ended.

    start ──► its log fills ──► /ready ──► serving ──► stop: SIGTERM, grace, SIGKILL to the whole group
                  │ died: Died, with the last lines of the log as the cause

    daemon ═ pipe ═ keeper ─► launch_server ─► scheduler, detokenizer, …      one session, one process group

When the daemon dies, by whatever signal, the pipe closes and the keeper ends the group.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import IO

from engine import devices
from engine.launch.daemon import describe_exit
from engine.rollout.sglang.client import SGLangClient
from engine.rollout.sglang.errors import Died, TimedOut
from streams.errors import ConfigError

_SHIM = Path(__file__).with_name("cpu_shim")
_KEEPER = Path(__file__).with_name("keeper.py")
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.2, 1.0
_POLL_S = 0.05
_TAIL_BYTES, _TAIL_LINES, _TRACE_LINES = 64 << 10, 15, 40
_TRACEBACK = "Traceback (most recent call last)"


class Server:
    """A running server process, or one on its way there. It never outlives this process.

        server = Server(model, python=python, log_file=run_dir / "logs" / "sglang-0.log", device="cpu")
        await server.ready(timedelta(minutes=5))    # then server.url
        await server.stop(timedelta(seconds=10))

    `port` 0 takes a free one. `args` are handed to launch_server as they are; `env` is added to this process's own.
    `threads`: of its CPU computations. Raises ConfigError when `python` cannot be run.
    """

    def __init__(
        self,
        model: Path | str,
        *,
        python: Path | str,
        log_file: Path,
        device: str,
        host: str = "127.0.0.1",
        port: int = 0,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        threads: int | None = None,
    ) -> None:
        self.host, self.port = host, port or free_port(host)
        self.log_file = log_file
        self.command = command(model, python=python, device=device, host=host, port=self.port, args=args)
        environ = environment(model, device=device, env=env or {}, threads=threads)
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("ab") as out:
            shown = " ".join(without_keys(self.command))
            out.write(f"=== {time.strftime('%Y-%m-%dT%H:%M:%S%z')}: {shown}\n".encode())
            self._log_start = out.tell()
            out.flush()
            self._process = self._start(environ, out)
        self.pid = self._process.pid  # of the group's leader

    def _start(self, environ: Mapping[str, str], out: IO[bytes]) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                [sys.executable, "-I", str(_KEEPER), *self.command],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=dict(environ),
                start_new_session=True,  # Ctrl-C in the terminal reaches the daemon alone
            )
        except OSError as error:
            raise ConfigError(f"the keeper of an SGLang server cannot be started: {error}") from error

    @property
    def url(self) -> str:
        return f"http://{'[' + self.host + ']' if ':' in self.host else self.host}:{self.port}"

    @property
    def exited(self) -> int | None:
        """None while it runs; then its exit code, or minus the number of the signal that ended it."""
        if self._process.returncode is None and self._has_ended():
            self._end_group()  # before the leader is reaped, so that the group's number is still its own
            self._process.wait()
        return self._process.returncode

    def cause(self) -> str:
        """Why it is gone, as far as it told: how it ended, and what it wrote last."""
        code = self.exited
        how = "runs" if code is None else f"ended with {describe_exit(code)}"
        return f"the SGLang server {how}; {self.log_file} ends with:\n{last_words(self.log_file, self._log_start)}"

    async def ready(self, deadline: timedelta) -> None:
        """Wait until it serves. Raises Died, or TimedOut; the process runs on after that one."""
        end, pause = time.monotonic() + deadline.total_seconds(), _FIRST_LOOK_S
        client = SGLangClient(self.url, connect_timeout=timedelta(0))
        try:
            while True:
                if self.exited is not None:
                    raise Died(self.cause())
                if await client.is_ready():
                    return
                if time.monotonic() + pause > end:
                    raise TimedOut(f"not ready within {deadline.total_seconds():g} s: {self.cause()}")
                await asyncio.sleep(pause)
                pause = min(_LONGEST_LOOK_S, 1.5 * pause)
        finally:
            await client.close()

    async def stop(self, grace: timedelta) -> None:
        """End it: in good order within `grace`, else at once. Harmless on one that has ended."""
        end = time.monotonic() + grace.total_seconds()
        if self.exited is None and grace:
            self._process.terminate()
        while self.exited is None and time.monotonic() < end:
            await asyncio.sleep(_POLL_S)
        self.kill()

    def kill(self) -> None:
        """End all of it now."""
        if self.exited is None:
            self._end_group()
            self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _has_ended(self) -> bool:
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            return self._process.poll() is not None
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _end_group(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # macOS answers EPERM for a group of zombies
            pass


def command(
    model: Path | str, *, python: Path | str, device: str, host: str, port: int, args: Sequence[str]
) -> list[str]:
    """The command line of launch_server. Raises ConfigError when there is no such interpreter."""
    if not os.access(python, os.X_OK):
        raise ConfigError(
            f"rollout.sglang.python: {python} cannot be run; needed the interpreter of an environment with sglang "
            f"(`make sglang` builds one for a CPU)"
        )
    place = ("--model-path", str(model), "--host", host, "--port", str(port))
    needed = devices.named(device).sglang_args  # later arguments win, so `args` may say otherwise
    return [str(python), "-m", "sglang.launch_server", *place, *needed, *args]


def environment(
    model: Path | str, *, device: str, env: Mapping[str, str], threads: int | None
) -> dict[str, str]:
    """Its variables: this process's own, and what SGLang must be told."""
    environ = {
        **os.environ,
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # else a paused server counts as dead
    }
    if Path(model).is_dir():
        environ["HF_HUB_OFFLINE"] = "1"  # nothing has to be asked for
    if threads is not None:
        environ["OMP_NUM_THREADS"] = str(threads)
    if device == "cpu":
        environ |= {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(_SHIM)}
    return {**environ, **env}


def without_keys(line: Sequence[str]) -> list[str]:
    """A command line as it may be shown: what follows --api-key and its like is left out."""
    shown: list[str] = []
    for before, each in zip(("", *line), line, strict=False):
        if before.startswith("--") and before.endswith("-key"):
            each = "…"
        elif each.startswith("--") and "-key=" in each:
            each = each.partition("=")[0] + "=…"
        shown.append(each)
    return shown


def free_port(host: str) -> int:
    """A port that nobody listens on now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def last_words(log_file: Path, start: int = 0) -> str:
    """What the log says after `start`: from its last traceback on if there is one, else its last lines."""
    try:
        with log_file.open("rb") as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError as error:
        return f"(unreadable: {error})"
    traces = [at for at, line in enumerate(lines) if _TRACEBACK in line]
    if not traces:
        return "\n".join(lines[-_TAIL_LINES:])
    return "\n".join(lines[traces[-1] :][-_TRACE_LINES:])
