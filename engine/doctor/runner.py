"""Runs probes: each in a process of its own, ended at its deadline; lanes at once, what is in one lane in order.

device   accelerator first: what it finds, the others of its lane are told
log, network, model   disturb neither it nor one another
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import NamedTuple

import msgspec

from engine.doctor.result import Request, Result, failed, skipped
from engine.launch.daemon import describe_exit

_QUIET = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


class Probe(NamedTuple):
    """One thing that is tried."""

    name: str
    title: str  # for people
    lane: str
    place: str  # module:function
    deadline_s: float
    unless: Callable[[Request], str] = lambda request: (
        ""
    )  # why it is skipped, without a process; "": it is not
    point: str = ""  # a to g: its place in the checklist of an accelerator


class Finding(NamedTuple):
    probe: Probe
    result: Result
    seconds: float


def run(
    probes: Sequence[Probe], request: Request, *, told: Callable[[Finding], object] = lambda finding: None
) -> list[Finding]:
    """Every finding, in the order of `probes`; `told` hears of each as it comes, from any thread.

    Takes as long as the slowest lane at most: the sum of its deadlines.
    """
    lanes: dict[str, list[Probe]] = {}
    for probe in probes:
        lanes.setdefault(probe.lane, []).append(probe)
    running = _Running()
    try:
        with ThreadPoolExecutor(max_workers=max(1, len(lanes))) as pool:
            futures = [pool.submit(_lane, lane, request, running, told) for lane in lanes.values()]
            try:
                found = [finding for future in futures for finding in future.result()]
            except BaseException:
                running.end_all()  # Ctrl-C: the lanes end with what they wait for
                raise
    finally:
        running.end_all()
    order = {probe.name: at for at, probe in enumerate(probes)}
    return sorted(found, key=lambda finding: order[finding.probe.name])


def _lane(
    probes: Sequence[Probe], request: Request, running: _Running, told: Callable[[Finding], object]
) -> list[Finding]:
    findings = []
    for probe in probes:
        began = time.monotonic()
        why_not = probe.unless(request)
        result = skipped(why_not) if why_not else _tried(probe, request, running)
        finding = Finding(probe, result, time.monotonic() - began)
        findings.append(finding)
        told(finding)
        if "accelerator" in result.facts:
            named = {key: result.facts.get(key) for key in ("accelerator", "capability", "n_devices")}
            request = msgspec.structs.replace(request, **msgspec.convert(named, _Found).given())
    return findings


class _Found(msgspec.Struct):
    accelerator: str
    capability: tuple[int, int] | None = None
    n_devices: int | None = 0

    def given(self) -> dict:
        return {
            "accelerator": self.accelerator,
            "capability": self.capability,
            "n_devices": self.n_devices or 0,
        }


class _Running:
    """The processes that run now."""

    def __init__(self) -> None:
        self._lock, self._processes, self._ended = Lock(), set[subprocess.Popen[bytes]](), False

    def start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._ended:
                raise KeyboardInterrupt
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**_QUIET, **os.environ},
                start_new_session=True,
            )
            self._processes.add(process)
            return process

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """With all that it has started."""
        with self._lock:
            self._processes.discard(process)
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass

    def end_all(self) -> None:
        with self._lock:
            self._ended, left = True, list(self._processes)
        for process in left:
            self.end(process)


def _tried(probe: Probe, request: Request, running: _Running) -> Result:
    command = [sys.executable, "-m", "engine.doctor.child", probe.place, str(os.getpid())]
    process = running.start(command)
    try:
        out, err = process.communicate(msgspec.json.encode(request), timeout=probe.deadline_s)
    except subprocess.TimeoutExpired:
        running.end(process)
        _, err = process.communicate()
        return failed(
            f"{probe.name} did not end within {probe.deadline_s:g} s and was killed{_last(err)}",
            "what it tries hangs here, and would hang in a daemon; the last line that it wrote says where",
        )
    finally:
        running.end(process)
    noise, mark, answer = out.rpartition(b"\0")
    if not mark:
        return failed(
            f"{probe.name} died: {describe_exit(process.returncode)}{_last(err or noise)}",
            "what it tries ends the process here, and would end a daemon",
        )
    return msgspec.json.decode(answer, type=Result)


def _last(output: bytes) -> str:
    """`: the last line`, if anything was written."""
    lines = [line.strip() for line in output.decode("utf-8", "replace").splitlines() if line.strip()]
    return f": {lines[-1][:300]}" if lines else ""
