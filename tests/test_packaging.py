"""What is promised about the packages: no torch outside what needs it, typed, extras that can be had."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).parents[1]
PACKAGES = ("streams", "consumers", "replay", "engine")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
OPTIONAL = {"kafka", "confluent_kafka", "ray"}  # third parties of the extras that the log and tools may use

IMPORT_ALL = """
import importlib, json, pkgutil, sys
heavy = ("torch", "transformers", "tokenizers", "matplotlib", "jax", "tensorflow")
imported, absent = [], []
def take(name):
    try:
        importlib.import_module(name)
        imported.append(name)
    except ModuleNotFoundError as error:
        absent.append([name, (error.name or "").partition(".")[0]])
for package in ("streams", "consumers", "replay"):
    take(package)
    for module in pkgutil.walk_packages(sys.modules[package].__path__, package + "."):
        take(module.name)
for name in sys.argv[1:]:
    take(name)
print(json.dumps({"imported": imported, "absent": absent, "heavy": [name for name in heavy if name in sys.modules]}))
"""


def imports(*names: str) -> dict[str, list]:
    """What a fresh process says after importing all of streams, consumers and replay, and then `names`."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *names],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_everything_but_engine_imports_without_torch() -> None:
    said = imports()
    assert said["heavy"] == []
    assert {"streams", "consumers", "replay", "streams.errors", "streams.log"} <= set(said["imported"])
    assert {third_party for _, third_party in said["absent"]} <= OPTIONAL


def test_the_command_line_and_the_configuration_import_without_torch() -> None:
    names = ["engine.config", "engine.configdocs", "engine.interfaces", "engine.cli"]
    present = [name for name in names if (ROOT / f"{name.replace('.', '/')}.py").is_file()]
    said = imports(*present)
    assert said["heavy"] == []
    assert set(present) <= set(said["imported"]), said["absent"]


def test_the_console_script_is_a_function_that_is_there() -> None:
    assert PROJECT["project"]["scripts"] == {"millstream": "engine.cli:main"}
    script = "import engine.cli; print(callable(engine.cli.main))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "True"


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_is_shipped_and_typed(package: str) -> None:
    assert (ROOT / package / "__init__.py").is_file()
    assert (ROOT / package / "py.typed").is_file()
    assert package in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


def test_the_core_needs_no_torch_and_no_extra_asks_for_torch_musa() -> None:
    core = {requirement.split(">")[0] for requirement in PROJECT["project"]["dependencies"]}
    assert core == {"msgspec", "numpy", "rich", "safetensors", "tomli", "zstandard"}
    extras = PROJECT["project"]["optional-dependencies"]
    assert set(extras) == {
        "kafka", "kafka-fast", "train", "lora", "ray", "sglang", "megatron", "musa", "dashboard", "export", "dev"
    }  # fmt: skip
    # No index has it: it comes with the vendor's image, and naming it makes the extra impossible to install.
    assert not [
        name for names in extras.values() for name in names if name.replace("-", "_").startswith("torch_musa")
    ]


def test_no_file_of_the_project_names_a_place_on_one_machine() -> None:
    tracked = [ROOT / name for name in ("pyproject.toml", "Makefile", ".ci/run")]
    tracked += [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    for file in tracked:
        text = file.read_text(encoding="utf-8")
        for place in ("/home/", "/root/", "/work/", "/Users/"):
            assert place not in text, f"{file.relative_to(ROOT)} has {place}"
