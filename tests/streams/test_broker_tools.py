"""What a broker needs before it can start: Java, Maven, whole jars, a port; and the question that tells it is ready."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from streams.broker import maven, probe
from streams.broker.errors import BrokerFailed, ToolMissing
from streams.broker.folders import cache_dir, default_data_dir, locked
from streams.broker.java import find_java
from streams.broker.node import DEFAULT_HEAP
from streams.broker.ports import HOST, free_ports, is_free, who_listens
from streams.broker.properties import CLIENT, CONTROLLER, SMALL_AND_QUICK, Listener, server_properties
from tests.support.kafka import require_kafka


def program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def java_that_says(path: Path, version: str) -> Path:
    return program(path, f"echo '    java.specification.version = {version}' >&2")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with an empty PATH (its only folder is returned), an empty cache and no JAVA_HOME."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("MILLSTREAM_CACHE", str(tmp_path / "cache"))
    return folder


def test_without_java_it_says_how_to_get_one(bare: Path) -> None:
    with pytest.raises(
        ToolMissing, match=r"Java 17 or newer; there is none on PATH.*apt-get install openjdk-17"
    ):
        find_java()


def test_every_java_that_will_not_do_is_named_with_its_version(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = java_that_says(tmp_path / "old" / "bin" / "java", "1.8")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "old"))
    on_path = java_that_says(bare / "java", "11")
    with pytest.raises(ToolMissing) as missing:
        find_java()
    assert f"{old} (from JAVA_HOME) is Java 8; {on_path} (from PATH) is Java 11" in str(missing.value)
    program(bare / "java", "exit 3")
    with pytest.raises(ToolMissing, match=r"java \(from PATH\) does not run"):
        find_java()


def test_java_home_is_preferred_and_path_is_used_when_it_will_not_do(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_home = java_that_says(tmp_path / "home" / "bin" / "java", "21")
    on_path = java_that_says(bare / "java", "17")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    assert find_java()[:2] == (at_home, 21)
    java_that_says(at_home, "11")
    assert find_java()[:2] == (on_path, 17)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    assert find_java()[:2] == (on_path, 17)


def test_without_maven_and_jars_it_says_what_would_help(bare: Path) -> None:
    with pytest.raises(ToolMissing, match=r"kafka-4\.3\.1 is not there, and Maven.*apt-get install maven"):
        maven.kafka_jars()


def test_a_failed_download_shows_the_last_lines_of_maven_and_leaves_nothing(
    bare: Path, tmp_path: Path
) -> None:
    program(
        bare / "mvn", "echo [INFO] Scanning; echo '[ERROR] Could not transfer artifact: no route'; exit 1"
    )
    with pytest.raises(BrokerFailed, match=r"exit code 1.*its last lines:\n(.*\n)*.*artifact: no route"):
        maven.kafka_jars()
    assert [file.name for file in (tmp_path / "cache").iterdir()] == [".kafka-4.3.1.lock"]


def test_maven_that_fetches_too_little_is_not_taken_for_a_success(bare: Path) -> None:
    program(bare / "mvn", "exit 0")
    with pytest.raises(BrokerFailed, match=r"without kafka_2\.13-4\.3\.1\.jar"):
        maven.kafka_jars()
    assert not maven.kafka_dir().exists()


def test_jars_in_the_cache_are_used_without_maven_and_a_torn_cache_is_not(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jars = " ".join(f'"$out/{name}"' for name in maven.NEEDED)
    program(
        bare / "mvn",
        "for a; do case $a in -DoutputDirectory=*) out=${a#*=};; esac; done\n"
        f'PATH=/usr/bin:/bin; mkdir -p "$out"; for jar in {jars}; do echo whole >"$jar"; done',
    )
    fetched = maven.kafka_jars()
    assert sorted(jar.name for jar in fetched) == sorted(maven.NEEDED)
    (bare / "mvn").rename(bare / "mvn-away")
    assert maven.kafka_jars() == fetched
    fetched[0].write_text("wh")  # as a full disk leaves it
    with pytest.raises(ToolMissing, match=r"kafka-4\.3\.1 is damaged"):
        maven.kafka_jars()
    (bare / "mvn-away").rename(bare / "mvn")
    assert maven.kafka_jars() == fetched
    assert fetched[0].read_text() == "whole\n"
    fetched[1].unlink()
    assert maven.kafka_jars() == fetched
    assert fetched[1].read_text() == "whole\n"


@pytest.mark.slow  # Maven fetches 100 MB, and Java makes an archive of them
def test_the_real_jars_are_fetched_anew_when_one_is_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_kafka()
    if shutil.which("mvn") is None:
        pytest.skip("the jars are cached, but there is no Maven to fetch them anew")
    names = [jar.name for jar in maven.kafka_jars()]
    monkeypatch.setenv("MILLSTREAM_CACHE", str(tmp_path))
    folder = maven.kafka_dir()
    folder.mkdir()
    (folder / maven.LIST).write_text(f"5 {maven.NEEDED[0]}\n")
    (folder / maven.NEEDED[0]).write_text("torn")
    assert [jar.name for jar in maven.kafka_jars()] == names
    assert [file.name for file in tmp_path.iterdir() if file.name != f".{folder.name}.lock"] == [folder.name]


def test_a_cache_that_cannot_be_written_names_the_variable_that_helps(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MILLSTREAM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(BrokerFailed, match="set MILLSTREAM_CACHE"):
        maven.kafka_jars()


def test_cache_and_data_follow_the_variables_that_people_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somebody")
    for name in ("MILLSTREAM_CACHE", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_dir() == Path("/somebody/.cache/millstream")
    assert default_data_dir() == Path("/somebody/.local/state/millstream/broker")
    monkeypatch.setenv("XDG_CACHE_HOME", "/fast")
    monkeypatch.setenv("XDG_STATE_HOME", "not/absolute")
    assert cache_dir() == Path("/fast/millstream")
    assert default_data_dir() == Path("/somebody/.local/state/millstream/broker")
    monkeypatch.setenv("MILLSTREAM_CACHE", "~/jars")
    assert cache_dir() == Path("/somebody/jars")


def test_a_lock_that_is_held_says_who_must_end_first(tmp_path: Path) -> None:
    lock, short = tmp_path / "lock", timedelta(milliseconds=100)
    held_too_long = pytest.raises(BrokerFailed, match=r"has been baking for 0 s \(it holds .*lock\)")
    with locked(lock, short, "baking"), held_too_long, locked(lock, short, "baking"):
        pass
    with locked(lock, short, "baking"):
        pass


def test_free_ports_differ_and_are_none_that_an_outgoing_connection_may_get() -> None:
    first_of_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert all(is_free(port) for port in ports)
    if first_of_outgoing > 12_000:
        assert max(ports) < first_of_outgoing


def test_the_holder_of_a_port_is_found() -> None:
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        assert not is_free(port)
        assert (who_listens(port) or "").startswith(f"pid {os.getpid()} (")
    assert is_free(port)
    assert who_listens(port) is None


@contextmanager
def answering(answer: bytes | None) -> Iterator[int]:
    """A port where `answer` comes back for whatever is sent; None: silence."""
    with socket.create_server((HOST, 0)) as server:
        server.settimeout(10)

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                if answer is not None:
                    connection.sendall(answer)
                else:
                    connection.recv(1000)  # until the other side gives up

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            thread.join(10)


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", ValueError, "claims a length"),
        (b"\0\0\0\x06\0\0\0\x63\0\0", ValueError, "answered request 99"),
        (b"\0\0\0\x06\0\0\0\x12\0\0", ValueError, "too short"),
        (b"\0\0\0\x0a\0\0\0\x12\0\x23\0\0\0\0", ValueError, "error 35"),
        (b"\0\0", OSError, "closed before"),
        (b"", OSError, "closed before|reset"),
        (None, OSError, "timed out"),
    ],
)
def test_what_is_not_kafka_is_not_taken_for_it(
    answer: bytes | None, error: type[Exception], says: str
) -> None:
    with answering(answer) as port, pytest.raises(error, match=says):
        probe.ask(port, timeout_s=0.5)


def test_settings_say_each_listener_its_own_and_the_caller_has_the_last_word() -> None:
    tls = Listener("TLS", "SSL", {"ssl.keystore.key": "first line\nsecond\\line é"})
    ports = {CLIENT: 1, CONTROLLER: 2, "TLS": 3}
    text = server_properties(Path("/data/kafka"), ports, [tls], {"num.io.threads": 9})
    settings = dict(line.split("=", 1) for line in text.splitlines())
    assert settings["listeners"] == "PLAINTEXT://127.0.0.1:1,CONTROLLER://127.0.0.1:2,TLS://127.0.0.1:3"
    assert settings["advertised.listeners"] == "PLAINTEXT://127.0.0.1:1,TLS://127.0.0.1:3"
    assert settings["listener.security.protocol.map"] == "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,TLS:SSL"
    assert settings["listener.name.tls.ssl.keystore.key"] == r"first line\nsecond\\line \u00e9"
    assert settings["num.io.threads"] == "9"
    assert settings["auto.create.topics.enable"] == "false"
    assert settings["group.min.session.timeout.ms"] == "1000"
    assert text.count("num.io.threads=") == 1


def test_the_real_java_is_found_where_the_broker_can_run() -> None:
    require_kafka()
    java = find_java()
    assert java.version >= 17
    said = subprocess.run(
        [java.program, "-version"], capture_output=True, text=True, timeout=30, check=True
    ).stderr
    assert java.build.rpartition(" ")[2] in said


def test_the_container_has_the_version_and_the_settings_of_our_own_broker() -> None:
    text = (Path(__file__).parents[2] / "compose.yaml").read_text(encoding="utf-8")
    given = dict(re.findall(r'^ {6}KAFKA_(\w+): "(.*)"$', text, re.MULTILINE))
    ours = {key.upper().replace(".", "_"): str(value) for key, value in SMALL_AND_QUICK.items()}
    assert {key: given.get(key) for key in ours} == ours
    assert given["HEAP_OPTS"] == DEFAULT_HEAP
    assert f"image: apache/kafka:{maven.KAFKA_VERSION}\n" in text
