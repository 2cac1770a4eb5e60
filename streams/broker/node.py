"""One Kafka node and its data folder.

    start()   folder ours? ─► jars, Java ─► ports ─► format (once) ─► launch ─► wait until it answers
    stop()    SIGTERM ─► wait ─► SIGKILL
    kill(), pause(), resume()   what tests do to it

All that is known lies in the folder, so any process can stop what another has started.
"""

from __future__ import annotations

import base64
import logging
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from streams.broker import probe, process, state
from streams.broker.archive import archive_options
from streams.broker.errors import BrokerFailed, PortTaken
from streams.broker.folders import default_data_dir, locked
from streams.broker.java import Java, find_java
from streams.broker.maven import KAFKA_VERSION, kafka_jars
from streams.broker.ports import HOST, free_ports, is_free, why_not
from streams.broker.properties import CLIENT, CONTROLLER, Listener, server_properties
from streams.errors import ConfigError

DEFAULT_PORT = 9092
START_TIMEOUT = timedelta(seconds=60)
STOP_TIMEOUT = timedelta(seconds=20)
KILL_TIMEOUT_S = 10.0
PROBE_TIMEOUT_S = 2.0
LINES_SHOWN = 15
TRIES = 3  # when a port that we had chosen was taken by somebody in the meantime

DEFAULT_HEAP = "-Xms128m -Xmx512m"  # KAFKA_HEAP_OPTS, which Kafka's own scripts know too, replaces it
JVM = (
    "-XX:+UseSerialGC",  # half of a small heap is no place for G1, to which every buffer here is humongous
    "-XX:-UsePerfData",
    "-XX:+ExitOnOutOfMemoryError",
    "-Djava.awt.headless=true",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd HH:mm:ss.SSS",
)

logger = logging.getLogger(__name__)


class Status(NamedTuple):
    """`pid` is None when there is no process; one that does not answer is starting, stopped or stuck."""

    pid: int | None
    address: str | None
    answers: bool


class Node:
    """A handle on the broker of one folder; making one touches nothing.

    >>> node = Node(Path("/tmp/broker"), port=0)             # doctest: +SKIP
    >>> node.start()                                         # doctest: +SKIP
    True
    >>> node.url                                             # doctest: +SKIP
    'kafka://127.0.0.1:20117'
    >>> node.kill(); node.start(); node.stop()               # doctest: +SKIP

    `port`: None for the one that the folder had last, 9092 at first; 0 for the one it had last, any free one at first.
    `listeners`: further ports for clients, chosen free and kept like `port`; see `address_of`.
    `properties`: further lines of server.properties; they win over ours.
    `scram_users`: name → password of users that exist from the first start on.
    `java_options`: further options of the virtual machine.
    """

    def __init__(
        self,
        data: Path | None = None,
        *,
        port: int | None = None,
        listeners: Sequence[Listener] = (),
        properties: Mapping[str, object] | None = None,
        scram_users: Mapping[str, str] | None = None,
        java_options: Sequence[str] = (),
    ) -> None:
        self.data = (data or default_data_dir()).expanduser().resolve()
        self.log = self.data / "broker.log"
        self._pid_file = self.data / "broker.pid"
        self._wanted_port = port
        self._listeners = tuple(listeners)
        self._properties = dict(properties or {})
        self._scram_users = dict(scram_users or {})
        self._java_options = tuple(java_options)

    @property
    def pid(self) -> int | None:
        return process.pid_of(self.data, self._pid_file)

    @property
    def address(self) -> str:
        """`host:port` for clients without encryption and login. Raises BrokerFailed before the first start."""
        return self.address_of(CLIENT)

    @property
    def url(self) -> str:
        return f"kafka://{self.address}"

    def address_of(self, listener: str) -> str:
        """`host:port` of one of the listeners. Raises BrokerFailed before the first start with it."""
        known = state.load(self.data)
        if known is None or listener not in known.ports:
            raise BrokerFailed(
                f"the broker at {self.data} has not been started with a listener {listener} yet"
            )
        return f"{HOST}:{known.ports[listener]}"

    def status(self) -> Status:
        """Raises ConfigError for a folder of something else."""
        known = state.load(self.data)
        if known is None:
            return Status(None, None, False)
        pid = self.pid
        return Status(pid, f"{HOST}:{known.ports[CLIENT]}", pid is not None and self._answers(known) is None)

    def start(self, timeout: timedelta = START_TIMEOUT) -> bool:
        """Start it and wait until it takes part in its cluster; False when it ran already.

        Raises ConfigError for a folder or port that cannot be used (ToolMissing without Java or Maven), BrokerFailed
        when it did not come up, with the end of its log.
        """
        state.load(self.data)  # a folder of something else is refused before anything is written to it
        state.make_folder(self.data)
        deadline = time.monotonic() + timeout.total_seconds()
        with self._locked("starting or stopping the broker of that folder"):
            known = state.load(self.data)
            if known is not None and self.pid is not None:
                self._check_running_port(known)
                self._wait(known, deadline)
                return False
            java, jars = find_java(), kafka_jars()
            deadline = time.monotonic() + timeout.total_seconds()  # a download has a deadline of its own
            self._start(known, java, jars, deadline)
            return True

    def stop(self, timeout: timedelta = STOP_TIMEOUT) -> bool:
        """End it and wait for its end; False when it did not run. Raises BrokerFailed when it cannot be ended."""
        if state.load(self.data) is None:
            return False
        with self._locked("starting or stopping the broker of that folder"):
            pid = self.pid
            if pid is None:
                self._pid_file.unlink(missing_ok=True)
                return False
            if not process.end(self.data, self._pid_file, signal.SIGTERM, timeout.total_seconds()):
                logger.warning(
                    "the broker (pid %d) did not end within %s s: killed", pid, timeout.total_seconds()
                )
                self._kill()
            self._pid_file.unlink(missing_ok=True)
            return True

    def kill(self) -> None:
        """End it as a crash would (SIGKILL), and wait until it is gone. Does nothing when it does not run."""
        self._kill()

    def pause(self) -> None:
        """Let it hang (SIGSTOP): connections stay open and nothing is answered. Raises BrokerFailed if it is gone."""
        process.send(self._running(), signal.SIGSTOP)

    def resume(self) -> None:
        """After `pause`. Raises BrokerFailed when it does not run."""
        process.send(self._running(), signal.SIGCONT)

    def _start(self, known: state.State | None, java: Java, jars: Sequence[Path], deadline: float) -> None:
        for left in reversed(range(TRIES)):
            ports, fresh = self._choose_ports(known)
            now = state.State(KAFKA_VERSION, known.cluster_id if known else _new_id(), ports)
            if known is not None:
                state.check(self.data, known, KAFKA_VERSION)
            state.save(self.data, now)
            try:
                self._launch(now, java, jars, deadline)
                return
            except PortTaken:
                known = now
                if not left or not fresh:
                    raise
                for name in fresh:
                    del known.ports[name]  # choose another one

    def _choose_ports(self, known: state.State | None) -> tuple[dict[str, int], set[str]]:
        """Ports of all listeners, and the names of those that were chosen now and may be chosen anew."""
        had = known.ports if known else {}
        ports: dict[str, int] = {}
        for name in (CLIENT, *(listener.name for listener in self._listeners)):
            if name == CLIENT and self._wanted_port:
                ports[name] = self._wanted_port
            elif name in had:
                ports[name] = had[name]
            elif name == CLIENT and self._wanted_port is None:
                ports[name] = DEFAULT_PORT
        for name, port in list(ports.items()):
            obstacle = why_not(port)
            if obstacle is None:
                continue
            if name == CLIENT and self._wanted_port == 0:
                del ports[name]
                continue
            raise ConfigError(
                f"port {port} {obstacle}; free it, or choose another one (--port N; --port 0 takes any that is free)"
            )
        # Clients never see the controller's port, so it need not stay the same.
        if CONTROLLER in had and had[CONTROLLER] not in ports.values() and is_free(had[CONTROLLER]):
            ports[CONTROLLER] = had[CONTROLLER]
        missing = [
            name
            for name in (CLIENT, CONTROLLER, *(each.name for each in self._listeners))
            if name not in ports
        ]
        return ports | dict(zip(missing, _other_ports(len(missing), set(ports.values())), strict=True)), set(
            missing
        )

    def _launch(self, now: state.State, java: Java, jars: Sequence[Path], deadline: float) -> None:
        properties = self.data / "server.properties"
        scratch = self.data / "tmp"
        shutil.rmtree(scratch, ignore_errors=True)  # a killed process leaves what it had unpacked
        scratch.mkdir(exist_ok=True)
        options = [*JVM, f"-Djava.io.tmpdir={scratch}", *archive_options(java)]
        base = [java.program, *options, *self._java_options, "-cp", ":".join(map(str, jars))]
        if not (self.data / "kafka").exists():
            self._format(base, now, deadline)
        properties.write_text(self._settings(now, self.data / "kafka"), encoding="ascii")
        if self.log.exists():
            self.log.replace(self.log.with_name("broker.log.1"))
        heap = os.environ.get("KAFKA_HEAP_OPTS", DEFAULT_HEAP).split()
        marked = [base[0], process.mark(self.data), *heap, *base[1:]]
        try:
            process.launch(
                [*marked, "kafka.Kafka", properties], self.data, self._pid_file, self.log, os.environ
            )
            self._wait(now, deadline)
        except BaseException:
            self._kill()  # also after a Ctrl-C: half a start is none
            raise

    def _format(self, base: Sequence[str | Path], now: state.State, deadline: float) -> None:
        """Make Kafka's data beside its place; what a crash leaves of it is removed by the next start."""
        draft = self.data / "kafka.new"
        shutil.rmtree(draft, ignore_errors=True)
        properties = self.data / "format.properties"
        properties.write_text(self._settings(now, draft), encoding="ascii")
        command = [*base, "kafka.tools.StorageTool", "format", "-t", now.cluster_id, "-c", properties]
        for name, password in self._scram_users.items():
            for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512"):
                command += ["--add-scram", f"{mechanism}=[name={name},password={password}]"]
        try:
            done = subprocess.run(
                [str(part) for part in command],
                cwd=self.data,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=max(1.0, deadline - time.monotonic()),
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise BrokerFailed(f"formatting {draft} did not end in time") from None
        if done.returncode:
            raise BrokerFailed(f"formatting {draft} failed:\n{_indented(done.stdout)}")
        draft.rename(self.data / "kafka")
        properties.unlink()

    def _settings(self, now: state.State, log_dir: Path) -> str:
        return server_properties(log_dir, now.ports, self._listeners, self._properties)

    def _wait(self, now: state.State, deadline: float) -> None:
        """Until it answers as a member of its cluster. Raises BrokerFailed when it has ended, or time is up."""
        while True:
            pid = self.pid
            why_not = self._answers(now)
            if why_not is None:
                return
            if pid is None:
                raise self._died(now)
            if time.monotonic() > deadline:
                raise BrokerFailed(
                    f"the broker (pid {pid}) does not answer at {HOST}:{now.ports[CLIENT]} in time: {why_not}; "
                    f"{self._end_of_log()}"
                )
            time.sleep(0.05)

    def _answers(self, now: state.State) -> str | None:
        """None when our broker answers, and is ready; else what is wrong."""
        port = now.ports[CLIENT]
        try:
            answer = probe.ask(port, PROBE_TIMEOUT_S)
        except (OSError, ValueError) as error:
            return str(error) or type(error).__name__
        if answer.cluster_id != now.cluster_id:
            return f"cluster {answer.cluster_id} answers, not {now.cluster_id}"
        if f"{HOST}:{port}" not in answer.brokers:
            return "it has not joined its cluster yet"
        return None

    def _died(self, now: state.State) -> BrokerFailed:
        taken = [f"port {port} ({name}) {why}" for name, port in now.ports.items() if (why := why_not(port))]
        if taken and "Address already in use" in self._last_lines(200):
            return PortTaken(f"the broker could not start: {'; '.join(taken)}")
        return BrokerFailed(f"the broker ended while it was starting; {self._end_of_log()}")

    def _end_of_log(self) -> str:
        return f"the end of {self.log}:\n{_indented(self._last_lines(LINES_SHOWN))}"

    def _last_lines(self, count: int) -> str:
        try:
            return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-count:])
        except OSError as error:
            return f"({error.strerror})"

    def _check_running_port(self, known: state.State) -> None:
        if self._wanted_port and self._wanted_port != known.ports[CLIENT]:
            raise ConfigError(
                f"the broker of {self.data} runs on port {known.ports[CLIENT]}, not {self._wanted_port}: "
                "stop it first, or name another folder for a second one (--data DIR)"
            )

    def _running(self) -> int:
        pid = self.pid
        if pid is None:
            raise BrokerFailed(f"the broker of {self.data} does not run")
        return pid

    def _kill(self) -> None:
        pid = self.pid
        if not process.end(self.data, self._pid_file, signal.SIGKILL, KILL_TIMEOUT_S):
            raise BrokerFailed(f"the broker (pid {pid}) is still there {KILL_TIMEOUT_S:g} s after SIGKILL")

    def _locked(self, doing: str) -> AbstractContextManager[None]:
        return locked(self.data / state.LOCK, START_TIMEOUT + STOP_TIMEOUT, doing)


def _new_id() -> str:
    """A cluster id as Kafka makes them: 16 random bytes in base64 for URLs."""
    while True:
        made = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        if not made.startswith("-"):  # which would be taken for an option
            return made


def _other_ports(count: int, taken: set[int]) -> list[int]:
    return [port for port in free_ports(count + len(taken)) if port not in taken][:count] if count else []


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines()[-LINES_SHOWN:])
