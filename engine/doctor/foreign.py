"""Running a script of ours by another interpreter, such as that of SGLang's environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.doctor.result import Request
from engine.rollout.sglang.server import environment

_SCRIPTS = Path(__file__).with_name("scripts")


class ForeignFailed(Exception):
    """The script did not say what it should; the message ends with its last line."""


def run_script(
    python: Path | str,
    script: str,
    arguments: Sequence[str] = (),
    *,
    device: str = "",
    deadline_s: float = 150.0,
) -> dict[str, Any]:
    """The object that it prints. `device` "cpu": with what our servers on a CPU are given. Raises ForeignFailed."""
    environ = environment("", device=device, env={}, threads=None) if device else dict(os.environ)
    if not device:
        environ.pop("PYTHONPATH", None)  # ours is no business of another interpreter
    environ["HF_HUB_OFFLINE"] = "1"
    try:
        done = subprocess.run(
            [str(python), str(_SCRIPTS / f"{script}.py"), *arguments],
            capture_output=True,
            timeout=deadline_s,
            env=environ,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ForeignFailed(f"{python}: {script} did not end within {deadline_s:g} s") from None
    except OSError as error:
        raise ForeignFailed(f"{python} cannot be run: {error.strerror}") from None
    _, mark, answer = done.stdout.rpartition(b"\0")
    if done.returncode or not mark:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise ForeignFailed(f"{python}: {lines[-1] if lines else f'ended with {done.returncode}'}")
    return json.loads(answer)


def sglang_python(request: Request) -> Path | None:
    """The interpreter with SGLang: of the configuration, else MILLSTREAM_SGLANG_PYTHON, else ./.venv-sglang."""
    rollout = request.config.rollout
    if rollout.backend == "sglang":
        return Path(rollout.sglang.python or sys.executable)
    for candidate in (os.environ.get("MILLSTREAM_SGLANG_PYTHON", ""), ".venv-sglang/bin/python"):
        if candidate and os.access(candidate, os.X_OK):
            return Path(candidate).absolute()
    return None


def argument(args: Sequence[str], name: str) -> str:
    """The value of `--name value` or `--name=value`, the last one given; "" when there is none."""
    value = ""
    for at, each in enumerate(args):
        if each == name and at + 1 < len(args):
            value = args[at + 1]
        elif each.startswith(name + "="):
            value = each.partition("=")[2]
    return value
