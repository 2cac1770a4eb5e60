"""(c) Does the Megatron patch fit the Megatron that is installed? And does our own trainer find the names it uses?"""

from __future__ import annotations

import importlib
import os
import sys
from importlib import metadata
from pathlib import Path

from engine.doctor.result import SIMULATED, Request, Result, failed, passed, warned
from engine.doctor.symbols import Use, made_for, missing, uses

VARIABLES = {
    "MUSA_TITAN_PATH": "musa_titan",
    "MUSA_PATCH_PATH": "musa_patch",
}  # variable → the module to import
_OURS = Path(__file__).parents[1] / "trainer" / "megatron"
_VERSION_FILES = ("VERSION", "version.txt", "version.py", "_version.py", "pyproject.toml", "setup.py", ".git")


def not_asked(request: Request) -> str:
    """Why this is skipped; ""."""
    if request.config.trainer.backend == "megatron" or patch_folder():
        return ""
    return (
        f'trainer.backend = "{request.config.trainer.backend}"' if request.has_config else "no configuration"
    )


def patch_folder() -> tuple[str, Path] | None:
    """(variable, folder) of the patch; None when none is named."""
    for variable in VARIABLES:
        if folder := os.environ.get(variable):
            return variable, Path(folder)
    return None


def probe(request: Request) -> Result:
    try:
        version = metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        return failed(
            "megatron-core is not installed", "pip install 'millstream[megatron]', or trainer.backend = fsdp2"
        )
    patch = patch_folder()
    if patch is None:
        if request.device == "musa":
            return failed(
                f"megatron-core {version} on MUSA without a patch: neither {' nor '.join(VARIABLES)} is set",
                "set one to the checked-out patch, or take trainer.backend = fsdp2",
            )
        lacking = missing(uses(_OURS))
        if lacking:
            return failed(
                f"megatron-core {version} lacks what this trainer uses: {_listed(lacking)}",
                "install megatron-core >= 0.16, < 0.20",
            )
        return passed(f"megatron-core {version} has all names that this trainer uses; no patch is named")
    return _patched(request, version, *patch)


def _patched(request: Request, version: str, variable: str, folder: Path) -> Result:
    if not folder.is_dir():
        return failed(f"{variable} = {folder}: no such folder", "set it to the checked-out patch")
    said = f"{variable} = {folder}, megatron-core {version}"
    has_hardware = request.accelerator == "musa"
    if has_hardware:
        sys.path.insert(0, str(folder))
        try:
            importlib.import_module(VARIABLES[variable])
        except Exception as error:  # a patch may raise anything
            return failed(
                f"{said}: importing {VARIABLES[variable]}: {type(error).__name__}: {error}", _remedy([])
            )
    try:
        used = uses(folder)
    except SyntaxError as error:
        return failed(
            f"{said}: {error.filename}:{error.lineno} cannot be parsed", "check the patch out again"
        )
    lacking = missing(used)
    if lacking:
        return failed(
            f"{said} lacks {len({use.symbol for use, _ in lacking})} names: {_listed(lacking)}",
            _remedy(lacking),
        )
    count = f"{len({use.symbol for use in used})} names of the patch are there"
    if not used:
        return failed(
            f"{said}: nothing in it imports megatron", "that is no patch of Megatron: check the folder"
        )
    if not any((folder / name).exists() for name in _VERSION_FILES):
        return warned(
            f"{said}: {count}; it has no version of its own",
            "note its commit: nothing here can tell it later",
        )
    if not has_hardware:
        return warned(
            f"{said}: {count}; it was not imported ({SIMULATED})",
            "run this again on a node with the accelerator",
        )
    return passed(f"{said}: {count}, and it was imported")


def _listed(lacking: list[tuple[Use, str]]) -> str:
    shown = [f"{use.symbol} ({use.where}: {why})" for use, why in lacking[:4]]
    return ", ".join(shown) + (f" and {len(lacking) - 4} more" if len(lacking) > 4 else "")


def _remedy(lacking: list[tuple[Use, str]]) -> str:
    told = made_for(lacking)
    release = f"by its names the patch was made for {told}; " if told else ""
    return f"{release}check out the Megatron that the patch was made for, or take trainer.backend = fsdp2"
