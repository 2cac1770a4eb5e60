"""The order of imports that Moore Threads' patch of Megatron needs. No MUSA hardware: the modules are made up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from engine.trainer.megatron.bootstrap import prepare
from streams.errors import ConfigError

PATCH = """
import sys, torch
assert not any(name.partition(".")[0] == "megatron" for name in sys.modules), "megatron came first"
{apply}
    print("patched by {name}")
    torch.cuda.current_device = lambda: 0
{call}
"""


def world(folder: Path, patch: str = "", *, applied: str = "") -> dict[str, str]:
    """A megatron that says when it is imported, and perhaps a patch; returns the environment of a process there."""
    for name in ("megatron/core/models/gpt", "megatron/core/optimizer"):
        (folder / "site" / name).mkdir(parents=True)
    modules = (
        "megatron",
        "megatron/core",
        "megatron/core/models",
        "megatron/core/models/gpt",
        "megatron/core/optimizer",
    )
    for name in modules:
        (folder / "site" / name / "__init__.py").write_text(f"print('import {name}')\n", "utf-8")
    (folder / "site/megatron/core/models/gpt/gpt_layer_specs.py").write_text("", "utf-8")
    environ = os.environ | {"PYTHONPATH": f"{folder / 'site'}{os.pathsep}{os.getcwd()}"}
    for variable in ("MUSA_PATCH_PATH", "MUSA_TITAN_PATH"):
        environ.pop(variable, None)
    if patch:
        (folder / "vendor").mkdir()
        apply, call = (f"def {applied}():", "") if applied else ("if True:", "")
        text = PATCH.format(name=patch, apply=apply, call=call)
        (folder / "vendor" / f"{patch}.py").write_text(text, "utf-8")
        environ["MUSA_TITAN_PATH" if patch == "musa_titan" else "MUSA_PATCH_PATH"] = str(folder / "vendor")
    return environ


def prepared(environ: dict[str, str], device: str, before: str = "") -> subprocess.CompletedProcess[str]:
    code = f"{before}\nfrom engine.trainer.megatron.bootstrap import prepare\nprepare({device!r})\nprint('ready')"
    return subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=110, check=False
    )


@pytest.mark.parametrize(("patch", "applied"), [("musa_patch", ""), ("musa_titan", "apply_rl_patch")])
def test_the_vendors_patch_comes_before_the_first_import_of_megatron(
    tmp_path: Path, patch: str, applied: str
) -> None:
    ended = prepared(world(tmp_path, patch, applied=applied), "musa:0")
    lines = ended.stdout.splitlines()
    assert ended.returncode == 0, ended.stderr
    assert lines[0] == f"patched by {patch}" and lines[1] == "import megatron" and lines[-1] == "ready"


def test_a_patch_that_comes_too_late_is_refused(tmp_path: Path) -> None:
    ended = prepared(world(tmp_path, "musa_patch"), "musa", before="import megatron.core")
    assert ended.returncode == 1 and "must be imported before megatron" in ended.stderr


def test_without_an_accelerator_it_is_said_what_is_missing(tmp_path: Path) -> None:
    ended = prepared(world(tmp_path), "cpu")
    assert ended.returncode == 1 and "megatron-core runs on CUDA devices" in ended.stderr


def test_on_musa_without_the_patch_both_of_its_places_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ConfigError, match=r"set MUSA_TITAN_PATH .* or MUSA_PATCH_PATH"):
        prepare("musa", {})
    with pytest.raises(ConfigError, match="no such folder"):
        prepare("musa", {"MUSA_PATCH_PATH": str(tmp_path / "nothing")})
    with pytest.raises(ConfigError, match="musa_titan cannot be imported"):
        prepare("musa", {"MUSA_TITAN_PATH": str(tmp_path)})
