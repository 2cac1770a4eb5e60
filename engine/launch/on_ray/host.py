"""The actor of one bundle: it starts the bundle's daemons as child processes, and says how they are.

    begin ──► `millstream serve …` with the node's environment, the driver's variables and the mask of its GPUs
    look  ──► which run, which have ended and how          terminate, kill, words ──► of one of them

A daemon is a process of its own, so that what ends it, what it said last and what it leaves are told just as on one
machine (engine/launch/daemon.py). It dies with this actor, and this actor dies with its node's Ray. When no supervisor
has looked for `unattended_s`, everything here is ended and the reservation given back.

Every method returns at once. All are called on one thread, the main one: the kernel's death signal is bound to it.
"""

from __future__ import annotations

import logging
import os
import platform
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engine.cli import version
from engine.devices import visible
from engine.launch import environment
from engine.launch.daemon import Process
from streams.errors import ConfigError

logger = logging.getLogger(__name__)

_WATCH_S = 1.0
_SHARED_S = 5.0  # for a file that another node wrote to be seen here
_REMOVE_AFTER_S = 5.0  # the hosts of a job end at about the same time; the reservation goes last


class About(NamedTuple):
    """What a host is, and what it sees."""

    job: str
    node: str  # Ray's id of it
    hostname: str
    ip: str
    machine: str  # equal for what shares one kernel
    python: str
    version: str  # of Millstream
    devices: tuple[str, ...]
    problem: str  # why its devices cannot be used
    sees_run_dir: bool
    pid: int


class Begun(NamedTuple):
    pid: int
    age_s: float  # above 0: it was running already
    problem: str = ""


class Predecessor(NamedTuple):
    """A daemon whose host was lost. On this machine it may live for some seconds more."""

    machine: str
    pid: int


class Seen(NamedTuple):
    pid: int
    code: int | None
    how: str


class Host:
    """`ray.remote(Host)` under a placement group's bundle. Nothing in it is state of the run."""

    def __init__(
        self, job: str, bundle: int, kind: str, group: str, *, unattended_s: float, grace_s: float
    ) -> None:
        self._job, self._bundle, self._kind, self._group = job, bundle, kind, group
        self._unattended_s, self._grace_s = unattended_s, grace_s
        self._processes: dict[str, Process] = {}
        self._looked = time.monotonic()
        self._is_ending = False
        self._problem = ""
        self._devices: list[str] = []
        try:
            self._devices = _assigned(kind)
        except ConfigError as error:
            self._problem = str(error)
        threading.Thread(target=self._watch, name="unattended", daemon=True).start()

    # ---------------------------------------------------------------- asked by the supervisor
    def about(self, shared: str, content: str) -> About:
        """`shared`: a file that the driver has just written into the run directory, with this content; "": none."""
        import ray

        self._looked = time.monotonic()
        context: Any = ray.get_runtime_context()
        return About(
            job="" if self._is_ending else self._job,
            node=context.get_node_id(),
            hostname=socket.gethostname(),
            ip=ray.util.get_node_ip_address(),
            machine=_machine(),
            python=platform.python_version(),
            version=version(),
            devices=tuple(self._devices),
            problem=self._problem,
            sees_run_dir=not shared or _sees(Path(shared), content),
            pid=os.getpid(),
        )

    def attended_s(self) -> float:
        """Seconds since a supervisor last looked. To ask for it is no look."""
        return time.monotonic() - self._looked

    def bundle(self) -> int:
        """The index of its bundle in the plan."""
        return self._bundle

    def begin(
        self,
        name: str,
        arguments: Sequence[str],
        given: Mapping[str, str],
        devices: slice,
        log_file: str,
        predecessor: Predecessor | None = None,
    ) -> Begun:
        """Start `python <arguments> --with-parent <this process>`, unless it runs already.

        `predecessor`: whose place it takes. Where that one can be reached it is killed first, so that it does not go
        on beside this one.
        """
        if self._is_ending:
            return Begun(0, 0.0, "its host is ending, since no supervisor had looked for it; run it again")
        self._looked = time.monotonic()
        running = self._processes.get(name)
        if running is not None and running.exit_code() is None:
            return Begun(running.pid, max(time.monotonic() - running.started, 1e-3))
        problem = self._problem or self._find_problem(name, devices, Path(log_file).parent.parent)
        if problem:
            return Begun(0, 0.0, problem)
        if predecessor is not None and predecessor.machine == _machine():
            _kill(predecessor.pid, arguments)
        env = environment.on_node(os.environ, given)
        if self._kind != "cpu":
            env |= visible.variables_for(self._kind, self._devices[devices])
        command = [sys.executable, *arguments, "--with-parent", str(os.getpid())]
        self._processes[name] = process = Process(command, Path(log_file), env)
        return Begun(process.pid, 0.0)

    def _find_problem(self, name: str, devices: slice, run_dir: Path) -> str:
        if not run_dir.is_dir():
            return (
                f'run.dir = "{run_dir}" is not there on {socket.gethostname()}: it must be a folder that all nodes '
                "share under the same path"
            )
        if self._kind != "cpu" and devices.stop > len(self._devices):
            return (
                f"{name} needs {devices.stop} GPUs of its bundle, and its host was given {len(self._devices)}"
            )
        return ""

    def look(self) -> dict[str, Seen]:
        self._looked = time.monotonic()
        found: dict[str, Seen] = {}
        for name, process in list(self._processes.items()):
            code = process.exit_code()
            found[name] = Seen(process.pid, code, "" if code is None else process.how_it_ended())
        return found

    def words(self, name: str) -> str:
        process = self._processes.get(name)
        return "" if process is None else process.last_words()

    def terminate(self, name: str) -> None:
        if name in self._processes:
            self._processes[name].terminate()

    def kill(self, name: str) -> None:
        if name in self._processes:
            self._processes[name].kill()

    def meeting_point(self) -> tuple[str, int]:
        """Where the ranks of a trainer meet, if its first rank is here: (address, a port that was free just now)."""
        import ray

        address = ray.util.get_node_ip_address()
        with socket.create_server((address, 0)) as listener:
            return address, listener.getsockname()[1]

    # ---------------------------------------------------------------- without a supervisor
    def _watch(self) -> None:
        """On a thread of its own: the main one serves calls, and there are none any more."""
        while time.monotonic() - self._looked < self._unattended_s:
            time.sleep(_WATCH_S)
        self._is_ending = True  # for good: who comes now is told so, and starts hosts of its own
        logger.warning("no supervisor has looked for %.0f s: ending what runs here", self._unattended_s)
        try:
            processes = list(self._processes.values())
            for process in processes:
                process.terminate()
            deadline = time.monotonic() + self._grace_s
            while time.monotonic() < deadline and any(each.exit_code() is None for each in processes):
                time.sleep(0.1)
            for process in processes:
                if process.exit_code() is None:
                    process.kill()
            time.sleep(_REMOVE_AFTER_S)
            _give_back_if_last(self._group, self._grace_s + 2 * _REMOVE_AFTER_S)
        finally:
            os._exit(0)


def _assigned(kind: str) -> list[str]:
    """The ids of the devices that Ray has given to this actor. Raises ConfigError."""
    import ray

    if kind == "cpu":
        return []
    ids = [str(each) for each in ray.get_gpu_ids()]
    return visible.ids_on_node(kind, ids, os.environ)


def _kill(pid: int, arguments: Sequence[str]) -> None:
    """A daemon that was started with these arguments, and what it has started; another process is left alone."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
        if words[1 : 1 + len(arguments)] == list(arguments):
            os.killpg(pid, signal.SIGKILL)
    except OSError:  # it has ended
        pass


def _give_back_if_last(group: str, limit_s: float) -> None:
    """Remove the reservation once no other host of it is left. One that stays is of a run that goes on.

    Of several that end at a time the first by name does it, so that not each leaves it to another.
    """
    import ray

    context: Any = ray.get_runtime_context()
    own, deadline = context.get_actor_name(), time.monotonic() + limit_s
    while True:
        listed: list[Any] = ray.util.list_named_actors(all_namespaces=True)
        names = [each["name"] for each in listed]
        others = [name for name in names if name.startswith(f"{group}/") and name != own]
        if not others:
            break
        if min(others) < own or time.monotonic() > deadline:
            return
        time.sleep(0.2)
    try:
        ray.util.remove_placement_group(ray.util.get_placement_group(group))
    except ValueError:  # another host has done it
        pass


def _machine() -> str:
    """What is the same for all processes under one kernel, in whatever containers they are."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def _sees(file: Path, content: str) -> bool:
    deadline = time.monotonic() + _SHARED_S
    while time.monotonic() < deadline:
        try:
            if file.read_text(encoding="utf-8") == content:
                return True
        except OSError:
            pass
        time.sleep(0.1)
    return False
