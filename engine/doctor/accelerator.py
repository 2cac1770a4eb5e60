"""(a) Is the accelerator there, and does it compute? A small bfloat16 matrix product whose value is known."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import metadata
from typing import Any, NamedTuple

from engine.doctor.about import accelerators, may_have_accelerator
from engine.doctor.result import SIMULATED, Request, Result, failed, passed, skipped, warned

MASKS = {"cuda": "CUDA_VISIBLE_DEVICES", "musa": "MUSA_VISIBLE_DEVICES"}
_SIZE = 256  # of the product of ones: each element of it is 256, exactly, also in bfloat16
_REMEDY = {
    "cuda": "install a torch build for this driver's CUDA (nvidia-smi names it); start the container with --gpus all",
    "musa": "take an image with torch_musa, or install torch and torch_musa from the vendor's index with --no-deps; "
    "start the container with MTHREADS_VISIBLE_DEVICES; check the driver and libmtml.so.2",
}


class Seen(NamedTuple):
    """What torch says."""

    torch: str
    kind: str  # cpu, cuda, musa
    is_available: bool = False
    count: int = 0
    name: str = ""
    capability: tuple[int, int] | None = None
    value: float = 0.0  # of the product
    plugin: str = ""  # version of torch_musa
    is_simulated: bool = False
    listed: int = 0  # by the vendor's tool


def probe(request: Request) -> Result:
    asked = request.config.model.device if request.has_config else ""
    if asked in ("", "cpu") and not may_have_accelerator():
        return judge(Seen(_version("torch"), "cpu"), asked, os.environ)
    return judge(look(asked.partition(":")[0]), asked, os.environ)


def look(asked: str) -> Seen:
    import torch

    kind = asked if asked in MASKS else _kind(torch)
    listed = len(accelerators())
    if kind == "cpu":
        return Seen(torch.__version__, "cpu", listed=listed)
    module = getattr(torch, kind, None)
    is_simulated = kind == "musa" and module is not None and is_stand_in(torch)
    if module is None or not module.is_available():
        return Seen(torch.__version__, kind, is_simulated=is_simulated, listed=listed)
    if is_simulated:
        return Seen(torch.__version__, kind, True, is_simulated=True)
    ones = torch.ones(_SIZE, _SIZE, device=kind, dtype=torch.bfloat16)
    return Seen(
        torch.__version__,
        kind,
        True,
        module.device_count(),
        module.get_device_name(0),
        tuple(module.get_device_capability(0)),
        float((ones @ ones)[-1, -1].float()),
        plugin=_version("torch_musa") if kind == "musa" else "",
        listed=listed,
    )


def is_stand_in(torch: Any) -> bool:
    """Whether what goes by the name of musa is none of the vendor's: a plug-in of another, or that of our tests."""
    version = getattr(torch.version, "musa", None)
    return not version or "fake" in str(version)


def judge(seen: Seen, asked: str, environ: Mapping[str, str]) -> Result:
    facts = {"accelerator": seen.kind, "n_devices": seen.count, "capability": seen.capability}
    if seen.is_simulated:
        return skipped(SIMULATED, **{**facts, "accelerator": "cpu", "n_devices": 0})
    if seen.kind == "cpu":
        return _no_accelerator(seen, facts)
    mask = MASKS[seen.kind]
    masked = f", {mask}={environ[mask]!r}" if mask in environ else ""
    if not seen.is_available:
        remedy = f"{mask} may hide it: {_REMEDY[seen.kind]}" if masked else _REMEDY[seen.kind]
        return failed(
            f'model.device = "{asked}", but torch {seen.torch} finds no {seen.kind} device{masked}'
            + (f"; the vendor's tool lists {seen.listed}" if seen.listed else ""),
            remedy,
            **{**facts, "accelerator": "cpu"},
        )
    said = f"{seen.count} × {seen.name}, capability {_dotted(seen.capability)}, torch {seen.torch}{masked}"
    shown = [each for each in environ.get(mask, "").split(",") if each.strip()]
    if masked and len(shown) != seen.count:
        return failed(
            f"{mask} names {len(shown)} devices, torch sees {seen.count}: {said}",
            f"set {mask} to ids that exist on this node; a wrong one shows later, as an unknown error in .to(device)",
            **facts,
        )
    index = int(asked.partition(":")[2] or 0)
    if index >= seen.count:
        return failed(
            f'model.device = "{asked}", but there are {seen.count} devices, numbered from 0: {said}',
            f'set model.device to "{seen.kind}:0"' + (f" … {seen.count - 1}" if seen.count > 1 else ""),
            **facts,
        )
    if seen.value != _SIZE:
        return failed(
            f"a bfloat16 product of ones gave {seen.value:g} instead of {_SIZE}: {said}",
            "the device or its libraries compute wrongly: run the vendor's own diagnosis, take another device",
            **facts,
        )
    if seen.plugin and _base(seen.plugin) != _base(seen.torch):
        return warned(
            f"torch {seen.torch} with torch_musa {seen.plugin}: {said}",
            "install the torch that this torch_musa was built for",
            **facts,
        )
    if seen.listed and not masked and seen.listed != seen.count:
        return warned(
            f"the vendor's tool lists {seen.listed} devices: {said}",
            "a driver, container or cgroup hides some of them",
            **facts,
        )
    return passed(f"bfloat16 product right; {said}", **facts)


def _no_accelerator(seen: Seen, facts: dict[str, Any]) -> Result:
    if seen.listed:
        return warned(
            f"the vendor's tool lists {seen.listed} devices, but torch {seen.torch} uses none",
            "install a torch build for them, or stay on the CPU knowingly",
            **facts,
        )
    return skipped(f"no accelerator (cpu); torch {seen.torch}", **facts)


def _kind(torch: Any) -> str:
    """musa first: beside torchada, torch.cuda answers for it."""
    for kind in ("musa", "cuda"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            return kind
    return "cpu"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _base(version: str) -> str:
    return ".".join(version.partition("+")[0].split(".")[:3])


def _dotted(capability: tuple[int, int] | None) -> str:
    return "unknown" if capability is None else f"{capability[0]}.{capability[1]}"
