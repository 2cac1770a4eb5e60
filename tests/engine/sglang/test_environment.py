"""The environment with a real SGLang: built once, in order, by whichever installer works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.rollout.sglang import environment
from engine.rollout.sglang.api import OLDEST

SHIM = Path(environment.__file__).with_name("cpu_shim")


class Commands:
    """Stands for subprocess.run: what was run, and which of it fails."""

    def __init__(self) -> None:
        self.run: list[list[str]] = []
        self.failing: str | None = None  # a word of the commands that fail

    def __call__(self, command: Sequence[str], *, check: bool, **options: Any) -> Any:
        assert options["timeout"] > 0
        self.run.append(list(command))
        failed = self.failing is not None and self.failing in command
        if failed and check:
            raise subprocess.CalledProcessError(1, command)
        return subprocess.CompletedProcess(command, int(failed))


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    commands = Commands()
    monkeypatch.setattr(environment.subprocess, "run", commands)
    monkeypatch.setattr(environment.shutil, "which", lambda name: "/bin/uv")
    monkeypatch.setattr(environment.sys, "executable", "/nowhere/python")
    return commands


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With an interpreter, so that none is made."""
    python = environment.interpreter(tmp_path / "env")
    python.parent.mkdir(parents=True)
    python.write_text("", encoding="utf-8")
    return tmp_path / "env"


def packages(command: Sequence[str]) -> list[str]:
    after = command.index("install") + 1
    return [each for each in command[after:] if "--" not in each and "/" not in each]


def test_it_is_built_once(commands: Commands, folder: Path) -> None:
    assert not environment.is_built(folder)
    assert environment.build(folder) == environment.interpreter(folder)
    assert environment.is_built(folder)
    count = len(commands.run)
    environment.build(folder)
    assert len(commands.run) == count > 0


def test_sglang_is_installed_alone_and_after_what_it_imports(commands: Commands, folder: Path) -> None:
    environment.build(folder)
    pinned = f"sglang=={environment.SGLANG}"
    at = next(index for index, command in enumerate(commands.run) if pinned in command)
    assert "--no-deps" in commands.run[at]
    assert "torch==2.13.0" in packages(commands.run[0]) and at > 0
    assert all(environment.interpreter(folder).as_posix() in " ".join(command) for command in commands.run)


def test_the_pinned_release_is_one_that_can_be_driven() -> None:
    assert tuple(map(int, environment.SGLANG.split("."))) >= OLDEST


def test_where_uv_fails_pip_installs_the_same(commands: Commands, folder: Path) -> None:
    commands.failing = "/bin/uv"
    environment.build(folder)
    by_uv = [packages(command) for command in commands.run if command[0] == "/bin/uv"]
    by_pip = [packages(command) for command in commands.run if command[1:3] == ["-m", "pip"]]
    assert by_uv == by_pip and by_pip


def test_one_that_fails_half_way_does_not_count_as_built(commands: Commands, folder: Path) -> None:
    commands.failing = f"sglang=={environment.SGLANG}"
    with pytest.raises(subprocess.CalledProcessError):
        environment.build(folder)
    assert not environment.is_built(folder)
    commands.failing = None
    environment.build(folder)
    assert environment.is_built(folder)


def test_one_with_other_pins_is_built_anew(
    commands: Commands, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment.build(folder)
    monkeypatch.setattr(environment, "_ALONE", ("sglang==0.5.99",))
    assert not environment.is_built(folder)


def test_packages_come_from_where_pip_looks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, commands: Commands
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.invalid/simple")
    monkeypatch.delenv("UV_DEFAULT_INDEX", raising=False)
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(
        environment.subprocess,
        "run",
        lambda command, *, env, **options: seen.append(env) or subprocess.CompletedProcess(command, 0),
    )
    environment.build(folder)
    assert {each["UV_DEFAULT_INDEX"] for each in seen} == {"https://index.invalid/simple"}
    assert "UV_DEFAULT_INDEX" not in os.environ


def test_without_one_folder_it_tells_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert environment.main([]) == 2
    assert environment.main(["--help"]) == 0
    assert "make sglang" in capsys.readouterr().out


# ---------------------------------------------------------------- the shims
def test_the_shims_import_and_refuse_to_compute() -> None:
    script = """
import json
import sgl_kernel, torchvision
from torchvision.transforms import InterpolationMode
from torchvision.ops import nms
from sgl_kernel import copy_all_layer_kv_cache_cpu as kernel
said = []
for use in (lambda: kernel(1), lambda: nms(2)):
    try:
        use()
    except NotImplementedError as error:
        said.append(str(error))
print(json.dumps([InterpolationMode.BICUBIC, *said]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(SHIM)},
        capture_output=True,
        timeout=60,
        check=True,
    )
    mode, kernel, picture = json.loads(done.stdout)
    assert mode == "BICUBIC"
    assert "no kernel for this CPU" in kernel and "torchvision is not in this environment" in picture


def test_the_environment_holds_the_pinned_release(sglang_python: Path) -> None:
    script = "from importlib.metadata import version; print(version('sglang'))"
    done = subprocess.run(
        [sglang_python, "-c", script], capture_output=True, timeout=60, check=True, text=True
    )
    assert done.stdout.strip() == environment.SGLANG
