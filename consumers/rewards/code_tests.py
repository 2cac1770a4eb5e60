"""Code tests: run the answer's Python code against tests, in a process that is thrown away.

    reward ──► sandbox: `python -I`, own session and process group, rlimits (CPU, memory, file size, processes),
               empty folder as cwd, almost no environment, no stdin, capped output
           ──► deadline, or the end ──► SIGKILL to its process group and to whatever left the group

A test that fails, hangs or dies is the answer's fault and counts as not passed; a sandbox that cannot be started
is not, and raises. What this does not give: it shares kernel, network and readable files with the daemon. Answers
of a policy are not hostile by intent; against those that are, run the reward daemon in a container.
"""

from __future__ import annotations

import os
import re
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from consumers.rewards.types import RewardInput, option

MARK = "MILLSTREAM_KILL_MARK"  # environment variable by which a process that left its group is found again
_FENCE = re.compile(r"```[ \t]*([A-Za-z0-9_+-]*)[^\n]*\n(.*?)```", re.DOTALL)
_OUTPUT_CAP = 1 << 20  # bytes read from a test's stdout or from the sandbox's reports


class Limits(NamedTuple):
    timeout_s: float = 6.0  # for all tests of one answer
    cpu_s: int = 10  # CPU seconds of one process
    memory_mb: int = 1024  # address space of one process
    file_mb: int = 16  # largest file
    processes: int = 0  # processes and threads that the user may have; not enforced by the kernel for root


def reward(
    sample: RewardInput,
    *,
    tests: Sequence[Any] = (),
    partial_credit: bool = False,
    setup: str = "",
    timeout_s: float = Limits().timeout_s,
    memory_mb: int = Limits().memory_mb,
) -> dict[str, float]:
    """Share of tests passed (`partial_credit`), or 1.0 iff all are.

    The code is the last fenced block of the response, or all of it. `tests` (metadata, else option, else the label)
    is a list of statements such as "assert add(1, 2) == 3", run after the code in one process, or of tables
    {"stdin": text, "stdout": text}: the code is run as a program once for each and its output compared, blanks at
    line ends and at the end apart. `setup` is code that runs before the answer's. All tests of an answer have
    `timeout_s` together; keep the pool's timeout above it. Components: `tests`, `tests_passed`.

    Raises ValueError without usable tests, OSError when no sandbox can be started.
    """
    wanted = option(sample, "tests", tests) or sample.label
    if isinstance(wanted, str):
        wanted = [wanted]
    if not isinstance(wanted, (list, tuple)) or not wanted or not all(map(_is_test, wanted)):
        raise ValueError(
            f"{sample.uid}: the code_tests reward needs metadata.tests: a list of statements or of tables with stdin "
            f"and stdout, got {str(wanted)[:80]!r}"
        )
    limits = Limits(
        timeout_s=option(sample, "timeout_s", timeout_s), memory_mb=option(sample, "memory_mb", memory_mb)
    )
    code = option(sample, "setup", setup) + "\n" + code_of(sample.response)
    end = time.monotonic() + limits.timeout_s
    statements = [test for test in wanted if isinstance(test, str)]
    passed = _run_statements(code, statements, limits, end) if statements else 0
    passed += sum(_run_program(code, test, limits, end) for test in wanted if not isinstance(test, str))
    share = passed / len(wanted)
    value = share if option(sample, "partial_credit", partial_credit) else float(passed == len(wanted))
    return {"reward": value, "tests": float(len(wanted)), "tests_passed": float(passed)}


def code_of(response: str) -> str:
    """The last fenced block that is Python or says nothing of its language; without one, the whole response."""
    blocks = [
        body
        for language, body in _FENCE.findall(response)
        if language.lower() in ("", "py", "python", "python3")
    ]
    return blocks[-1] if blocks else response


def _is_test(test: Any) -> bool:
    return isinstance(test, str) or (isinstance(test, dict) and isinstance(test.get("stdout"), str))


def _run_statements(code: str, statements: list[str], limits: Limits, end: float) -> int:
    """All statements in one process, each caught by itself; a hang or an exit fails it and those after it."""
    # The answer's code runs in the same process and could write reports too, so each carries a word that it is
    # not told. Good against an early exit or stray output, not against code that searches memory for it.
    word = secrets.token_hex(16)
    job = {"code": code, "tests": statements, "word": word, "limits": limits._asdict()}
    output = _run(job, end, stdin=b"", reports=True)
    lines = output.decode("ascii", "replace").split("\n")
    return sum(f"{word} {number}" in lines for number in range(len(statements)))


def _run_program(code: str, test: dict[str, Any], limits: Limits, end: float) -> bool:
    if time.monotonic() >= end:
        return False
    job = {"code": code, "tests": None, "word": "", "limits": limits._asdict()}
    output = _run(job, end, stdin=str(test.get("stdin", "")).encode(), reports=False)
    return _lines(output.decode("utf-8", "replace")) == _lines(test["stdout"])


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _run(job: dict[str, Any], end: float, *, stdin: bytes, reports: bool) -> bytes:
    """Run one sandbox to its end or the deadline; its reports, or its stdout, up to the cap."""
    with (
        tempfile.TemporaryDirectory(prefix="millstream-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as job_file,
        tempfile.TemporaryFile() as stdin_file,
    ):
        job_file.write(msgspec.json.encode(job))
        stdin_file.write(stdin)
        job_file.seek(0)
        stdin_file.seek(0)
        out_read, out_write = os.pipe()
        mark = f"{os.environ.get(MARK, '')} {secrets.token_hex(8)}"
        try:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-c",
                    _SANDBOX,
                    str(job_file.fileno()),
                    str(out_write if reports else 1),
                ],
                cwd=folder,
                env=_environment(folder, mark),
                stdin=stdin_file if stdin else subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if reports else out_write,
                stderr=subprocess.DEVNULL,
                pass_fds=[job_file.fileno(), out_write] if reports else [job_file.fileno()],
                start_new_session=True,
            )
        except BaseException:
            os.close(out_read)
            raise
        finally:
            os.close(out_write)
        try:
            return _read_capped(out_read, process.pid, end)
        finally:
            os.close(out_read)
            kill_group(process.pid, mark)
            process.wait()


def _environment(folder: str, mark: str) -> dict[str, str]:
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "HOME": folder,
        "TMPDIR": folder,
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        MARK: mark,
    }


def _read_capped(fd: int, pid: int, end: float) -> bytes:
    """Read until the other side closes, the process has ended, the deadline, or the cap."""
    chunks, size = [], 0
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while size <= _OUTPUT_CAP and (left := end - time.monotonic()) > 0:
            has_ended = _has_ended(pid)  # asked before the read, so that nothing it wrote is missed
            if not selector.select(0 if has_ended else min(left, 0.1)):
                if has_ended:
                    break  # what it left running holds the pipe open
                continue
            chunk = os.read(fd, 1 << 16)
            if not chunk:
                break
            chunks.append(chunk)
            size += len(chunk)
    return b"".join(chunks)[:_OUTPUT_CAP]


def _has_ended(pid: int) -> bool:
    """Without collecting it: its number must stay taken until its group is killed."""
    if not hasattr(os, "waitid"):
        return False  # macOS before Python 3.13: the pipe or the deadline ends the reading
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def kill_group(pid: int, mark: str) -> None:
    """SIGKILL the process group of `pid`, then every process whose start environment holds the mark.

    The second half finds what left the group (setsid, double fork). It needs /proc; elsewhere only the group dies.
    """
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # gone already
    needle = mark.encode()
    if not needle.strip():
        raise ValueError("an empty mark would match every process")
    for _ in range(10):  # a process may fork between the look and the kill: look again until none is found
        found = [each for each in _pids() if each != os.getpid() and _environ_holds(each, needle)]
        if not found:
            return
        for each in found:
            try:
                os.kill(each, signal.SIGKILL)
            except ProcessLookupError:
                pass  # gone already


def _pids() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def _environ_holds(pid: int, needle: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as environ:
            return needle in environ.read()  # empty for a zombie
    except OSError:
        return False  # gone, or another user's


# Runs inside the sandbox. It takes the job from the first descriptor and closes it, bounds itself, then runs the
# answer. Only what the limits do not touch is imported before them.
_SANDBOX = r"""
import ctypes, json, os, resource, sys, types


def bounded(limits):
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    for name, value in (
        ("RLIMIT_CPU", limits["cpu_s"]),
        ("RLIMIT_AS", limits["memory_mb"] << 20),
        ("RLIMIT_FSIZE", limits["file_mb"] << 20),
        ("RLIMIT_NPROC", limits["processes"]),
        ("RLIMIT_CORE", 0),
    ):
        try:
            resource.setrlimit(getattr(resource, name), (value, value))
        except (AttributeError, ValueError, OSError):
            pass  # this system has no such limit, or a lower one


def main(job_fd, out):
    with os.fdopen(job_fd, "rb") as file:
        job = json.load(file)
    bounded(job["limits"])
    word, tests, report = job["word"], job["tests"], os.write
    module = types.ModuleType("answer" if tests is not None else "__main__")
    sys.modules[module.__name__] = module
    exec(compile(job["code"], "answer.py", "exec"), module.__dict__)
    for number, test in enumerate(tests or ()):
        try:
            exec(compile(test, "test.py", "exec"), module.__dict__)
        except Exception:
            continue
        report(out, f"{word} {number}\n".encode())


job_fd, out = map(int, sys.argv[1:])
sys.argv = ["answer.py"]
main(job_fd, out)
"""
