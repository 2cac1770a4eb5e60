"""The server process: its command line, its end, and that it never outlives its daemon."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from engine.rollout.sglang.errors import Died, TimedOut
from engine.rollout.sglang.server import (
    Server,
    command,
    environment,
    free_port,
    last_words,
    without_keys,
)
from streams.errors import ConfigError
from tests.support.sglang import RealServer

SECONDS_20 = timedelta(seconds=20)

# Takes launch_server's place: `FAKE` says how it behaves. It has a child, as the real one does, and prints its pid.
FAKE = """#!{python}
import http.server, os, signal, subprocess, sys, time
mode = os.environ.get("FAKE", "")
port = int(sys.argv[sys.argv.index("--port") + 1])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
if mode == "dies":
    print("loading weights", flush=True)
    print("[now] Scheduler hit an exception: Traceback (most recent call last):", flush=True)
    print('  File "x.py", line 1, in load', flush=True)
    print("RuntimeError: there is no such model", flush=True)
    sys.exit(3)
if mode == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "slow":
    time.sleep(600)
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: (print("goodbye", flush=True), child.kill(), sys.exit(0)))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An "interpreter" that is the fake server whatever it is told to run."""
    path = tmp_path / "python"
    path.write_text(FAKE.format(python=sys.executable), encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def started(python: Path, tmp_path: Path) -> Iterator[list[Server]]:
    servers: list[Server] = []
    yield servers
    for server in servers:
        server.kill()


def start(started: list[Server], python: Path, behaviour: str = "") -> Server:
    log_file = python.parent / "logs" / f"sglang-{len(started)}.log"
    server = Server("m", python=python, log_file=log_file, device="cpu", env={"FAKE": behaviour}, threads=1)
    started.append(server)
    return server


def child_of(server: Server) -> int:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        for line in server.log_file.read_text("utf-8").splitlines():
            if line.startswith("child "):
                return int(line.split()[1])
        time.sleep(0.02)
    raise AssertionError("the fake has not started")


def gone(pid: int, within_s: float = 20) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


# ---------------------------------------------------------------- command line
def test_on_a_cpu_the_flags_that_it_needs_come_before_those_of_the_user() -> None:
    line = command(
        "/m", python=sys.executable, device="cpu", host="127.0.0.1", port=7, args=["--dtype", "bfloat16"]
    )
    assert line[:3] == [sys.executable, "-m", "sglang.launch_server"]
    assert line[line.index("--model-path") + 1] == "/m" and line[line.index("--port") + 1] == "7"
    assert line[line.index("--device") + 1] == "cpu"
    assert [line[at + 1] for at, each in enumerate(line) if each == "--dtype"] == ["float32", "bfloat16"]


def test_on_another_device_nothing_is_added_to_what_the_user_says() -> None:
    line = command("/m", python=sys.executable, device="cuda", host="::1", port=7, args=["--tp-size", "2"])
    assert line[3:] == ["--model-path", "/m", "--host", "::1", "--port", "7", "--tp-size", "2"]


def test_variables_tell_it_not_to_generate_for_its_health_and_where_the_shims_are(tmp_path: Path) -> None:
    cpu = environment(tmp_path, device="cpu", env={"X": "1"}, threads=3)
    assert cpu["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"
    assert (cpu["SGLANG_USE_CPU_ENGINE"], cpu["OMP_NUM_THREADS"], cpu["X"]) == ("1", "3", "1")
    assert (Path(cpu["PYTHONPATH"]) / "sgl_kernel" / "__init__.py").is_file()
    assert cpu["HF_HUB_OFFLINE"] == "1"
    cuda = environment("org/name", device="cuda", env={}, threads=None)
    assert "SGLANG_USE_CPU_ENGINE" not in cuda
    assert cuda.get("HF_HUB_OFFLINE") == os.environ.get("HF_HUB_OFFLINE")


def test_the_users_variables_win(tmp_path: Path) -> None:
    own = {"OMP_NUM_THREADS": "8", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "1"}
    assert environment(tmp_path, device="cpu", env=own, threads=1).items() >= own.items()


def test_an_interpreter_that_is_not_there_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.sglang\.python.*make sglang"):
        Server("m", python=tmp_path / "none", log_file=tmp_path / "log", device="cpu")


def test_keys_on_the_command_line_are_not_shown() -> None:
    line = ["python", "--api-key", "secret", "--admin-api-key=secret", "--key-bits", "8"]
    assert without_keys(line) == ["python", "--api-key", "…", "--admin-api-key=…", "--key-bits", "8"]


def test_a_free_port_can_be_listened_on_at_once() -> None:
    port = free_port("127.0.0.1")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))


# ---------------------------------------------------------------- life
def test_it_becomes_ready_on_a_port_of_its_own_and_ends_in_good_order(
    started: list[Server], python: Path
) -> None:
    first, second = start(started, python), start(started, python)
    assert first.port != second.port

    async def scene() -> None:
        await first.ready(SECONDS_20)
        assert first.exited is None
        await first.stop(SECONDS_20)

    child = child_of(first)
    asyncio.run(scene())
    assert first.exited == 0
    assert "goodbye" in first.log_file.read_text("utf-8")
    assert gone(child)


def test_one_that_does_not_listen_to_sigterm_is_killed_with_all_it_started(
    started: list[Server], python: Path
) -> None:
    server = start(started, python, "stubborn")
    child = child_of(server)

    async def scene() -> float:
        await server.ready(SECONDS_20)
        began = time.monotonic()
        await server.stop(timedelta(seconds=0.3))
        return time.monotonic() - began

    assert asyncio.run(scene()) < 10
    assert server.exited == -signal.SIGKILL
    assert gone(child)
    asyncio.run(server.stop(timedelta(seconds=5)))  # harmless


def test_one_that_dies_at_its_start_tells_its_last_words(started: list[Server], python: Path) -> None:
    server = start(started, python, "dies")
    with pytest.raises(Died) as caught:
        asyncio.run(server.ready(SECONDS_20))
    assert caught.value.reason == "engine_died"
    assert "ended with exit code 3" in str(caught.value)
    assert "RuntimeError: there is no such model" in str(caught.value)
    assert "loading weights" not in str(caught.value)  # the cause, not the whole log
    assert server.exited == 3
    assert gone(child_of(server))


def test_a_signal_that_ended_it_is_told_as_that(started: list[Server], python: Path) -> None:
    server = start(started, python, "killed")
    with pytest.raises(Died, match="killed by SIGKILL"):
        asyncio.run(server.ready(SECONDS_20))
    assert server.exited == -signal.SIGKILL


def test_one_that_is_not_ready_in_time_says_so_and_runs_on(started: list[Server], python: Path) -> None:
    server = start(started, python, "slow")
    child_of(server)
    with pytest.raises(TimedOut, match=r"not ready within 0\.5 s: the SGLang server runs"):
        asyncio.run(server.ready(timedelta(seconds=0.5)))
    assert server.exited is None


DAEMON = """
import sys, time
from pathlib import Path
from engine.rollout.sglang.server import Server
server = Server("m", python=sys.argv[1], log_file=Path(sys.argv[2]), device="cpu", env={"FAKE": "stubborn"})
print(server.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_it_does_not_outlive_its_daemon_however_that_ended(
    python: Path, tmp_path: Path, how: signal.Signals
) -> None:
    log_file = tmp_path / "sglang.log"
    root = Path(__file__).parents[3]
    daemon = subprocess.Popen(
        [sys.executable, "-c", DAEMON, str(python), str(log_file)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(root)},
        text=True,
    )
    assert daemon.stdout is not None
    keeper = int(daemon.stdout.readline())
    deadline = time.monotonic() + 20
    while "child " not in (log_file.read_text("utf-8") if log_file.exists() else ""):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    child = int(log_file.read_text("utf-8").split("child ")[1].split()[0])
    assert not gone(keeper, within_s=0.1)
    daemon.send_signal(how)
    daemon.wait(20)
    daemon.stdout.close()
    assert gone(keeper) and gone(child)


def test_last_words_are_of_the_last_start_alone(tmp_path: Path) -> None:
    log_file = tmp_path / "log"
    log_file.write_text(
        "Traceback (most recent call last)\nValueError: of the first start\n", encoding="utf-8"
    )
    start = log_file.stat().st_size
    assert last_words(log_file, start) == ""
    with log_file.open("a", encoding="utf-8") as out:
        out.write("\n".join(f"line {each}" for each in range(100)))
    assert last_words(log_file, start).splitlines() == [f"line {each}" for each in range(85, 100)]
    assert "unreadable" in last_words(tmp_path / "none")


def test_a_real_server_serves_and_writes_its_log(sglang: RealServer) -> None:
    assert sglang.server.exited is None
    assert "The server is fired up" in sglang.server.log_file.read_text("utf-8")
