"""`millstream broker` as its users meet it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from streams.broker.node import Node
from tests.support.kafka import require_kafka

ROOT = Path(__file__).parents[2]
DEADLINE_S = 90.0


def broker(*args: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    # Without a Kafka client, as the core install has none.
    program = "import sys; sys.modules['kafka'] = None; from engine.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", program, "broker", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd=ROOT,
        env={**os.environ, **environ},
        check=False,
    )


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    require_kafka()
    folder = tmp_path / "data"
    yield folder
    Node(folder).kill()


@pytest.mark.slow
def test_a_broker_is_started_found_stopped_and_started_again_also_after_a_kill(data: Path) -> None:
    first = broker("start", "--data", data, "--port", "0")
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"{Node(data).url}\n"
    assert "started (pid " in first.stderr and f"millstream broker stop --data {data}" in first.stderr

    running = broker("status", "--data", data)
    assert (running.returncode, running.stderr) == (0, "")
    assert running.stdout.startswith(f"{Node(data).url} runs (pid {Node(data).pid})")

    again = broker("start", "--data", data)
    assert (again.returncode, again.stdout) == (0, first.stdout)
    assert "it runs already" in again.stderr

    stopped = broker("stop", "--data", data)
    assert stopped.returncode == 0 and "has ended" in stopped.stderr
    assert broker("status", "--data", data).returncode == 1
    repeated = broker("stop", "--data", data)
    assert repeated.returncode == 0 and "does not run" in repeated.stderr

    assert broker("start", "--data", data).stdout == first.stdout  # the folder remembers its port

    Node(data).kill()
    status = broker("status", "--data", data)
    assert (status.returncode, status.stdout) == (1, f"no broker runs on {data}\n")
    again = broker("start", "--data", data)
    assert (again.returncode, again.stdout) == (0, first.stdout), again.stderr


@pytest.mark.parametrize("port", ["-1", "65536", "ninety"])
def test_a_port_that_is_none_is_wrong_usage(port: str) -> None:
    refused = broker("start", f"--port={port}")
    assert refused.returncode == 2
    assert f"{port!r} is not a port from 0 to 65535" in refused.stderr


def test_wrong_folders_and_missing_tools_exit_with_2_and_failures_with_1(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    nothing = str(tmp_path / "nothing")
    foreign = broker("status", "--data", tmp_path)
    assert foreign.returncode == 2 and "holds other things (mine)" in foreign.stderr
    no_java = broker("start", "--data", tmp_path / "new", PATH=nothing, JAVA_HOME=nothing)
    assert no_java.returncode == 2 and "Kafka needs Java 17 or newer" in no_java.stderr
    assert not (tmp_path / "new").exists()


def test_without_a_way_to_fetch_kafka_it_says_so(tmp_path: Path) -> None:
    require_kafka()
    cache = tmp_path / "cache"
    cache.write_text("a file, where a folder is needed")
    failed = broker("start", "--data", tmp_path / "new", MILLSTREAM_CACHE=str(cache / "kafka"))
    assert failed.returncode == 1 and "set MILLSTREAM_CACHE" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_the_variables_of_the_broker_and_its_tests_are_no_mistyped_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.config import load_config

    file = tmp_path / "my.toml"
    file.write_text(
        f"""
[run]
name = "first"
dir = "{tmp_path}/run"
[data]
path = "{tmp_path}/prompts.jsonl"
[reward]
function = "exact"
[rollout]
backend = "scripted"
[trainer]
backend = "scalar"
"""
    )
    before = load_config(file)
    for name in ("MILLSTREAM_CACHE", "MILLSTREAM_TEST_KAFKA", "MILLSTREAM_REQUIRE_KAFKA"):
        monkeypatch.setenv(name, "1")
    assert load_config(file) == before
