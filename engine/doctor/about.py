"""What a page about a machine must name: hardware, image, versions, patches, variables. Nothing here imports torch."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from engine.doctor.result import without_login

PACKAGES = (
    *("millstream", "torch", "torch_musa", "torchada", "megatron-core", "transformer-engine", "transformers"),
    *("tokenizers", "safetensors", "numpy", "msgspec", "zstandard", "kafka-python", "confluent-kafka", "ray"),
    *("sglang", "torch_memory_saver", "mooncake-transfer-engine", "mthreads-ml-py"),
)
# What must not be told, and what tells how an accelerator or a network was set up.
_NEVER = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|JSON|RUNTIME_ENV", re.IGNORECASE)
_TELLING = re.compile(
    r"^(CUDA_|NVIDIA_|MUSA_|MTHREADS_|NCCL_|MCCL_|TORCH_MCCL_|GLOO_|TP_SOCKET|MC_|SGLANG_|RAY_|OMP_NUM|"
    r"PYTORCH_\w*ALLOC|TORCHADA_|MASTER_|HF_HUB_OFFLINE)"
)
_IMAGE_NAMES = ("MILLSTREAM_IMAGE", "IMAGE_NAME", "CONTAINER_IMAGE", "NVIDIA_PRODUCT_NAME")
_TOOL_S = 10.0


def about(command: Sequence[str], environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S%z"),
        "host": socket.gethostname(),
        "command": " ".join(_without_values(command)),
        "hardware": hardware(),
        "image": image(environ),
        "versions": versions(),
        "patches": patches(environ),
        "variables": {
            name: value
            for name, value in sorted(environ.items())
            if _TELLING.match(name) and not _NEVER.search(name)
        },
    }


def _without_values(command: Sequence[str]) -> list[str]:
    """What --set sets is told by its key alone: the value may be a secret."""
    found, is_setting = [], False
    for word in command:
        key, sign, _ = word.partition("=")
        is_one_word = key == "--set" and bool(sign)
        if is_setting:
            found.append(f"{key}=…")
        elif is_one_word:
            found.append(f"--set={word.removeprefix('--set=').partition('=')[0]}=…")
        else:
            found.append(without_login(word))
        is_setting = word == "--set"
    return found


def hardware() -> dict[str, str]:
    found = {
        "processor": _processor(),
        "cores": f"{os.cpu_count()} ({len(os.sched_getaffinity(0))} usable)"
        if hasattr(os, "sched_getaffinity")
        else str(os.cpu_count()),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
        "accelerators": "; ".join(accelerators()) or "none",
    }
    return found


def accelerators() -> list[str]:
    """As the vendor's own tool lists them; [] without a tool, or where it finds none."""
    query = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    nvidia = _tool("nvidia-smi", *query)
    if nvidia:
        return nvidia.splitlines()
    listed = _tool("mthreads-gmi", "-q")
    return [
        line.partition(":")[2].strip()
        for line in listed.splitlines()
        if line.strip().startswith("Product Name")
    ]


def may_have_accelerator() -> bool:
    """False where no device file, tool or plugin of an accelerator is to be seen: then torch need not be asked."""
    if any(shutil.which(tool) for tool in ("nvidia-smi", "mthreads-gmi")):
        return True
    if any(
        next(Path("/dev").glob(name), None)
        for name in ("nvidia[0-9]*", "dxg", "nvhost*", "mtgpu*", "mthreads*")
    ):
        return True
    return importlib.util.find_spec("torch_musa") is not None


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "system": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def image(environ: Mapping[str, str]) -> dict[str, str]:
    found = {"python environment": sys.prefix, "os": _os_name()}
    if any(Path(mark).exists() for mark in ("/.dockerenv", "/run/.containerenv")):
        found["container"] = "yes; name its image in MILLSTREAM_IMAGE, from inside it cannot be told"
    found |= {name: environ[name] for name in _IMAGE_NAMES if environ.get(name)}
    return found


def patches(environ: Mapping[str, str]) -> dict[str, str]:
    """Folders of patches, with the commit where git knows it."""
    found = {}
    for name in ("MUSA_TITAN_PATH", "MUSA_PATCH_PATH"):
        if folder := environ.get(name):
            commit = _tool("git", "-C", folder, "describe", "--always", "--dirty", "--tags")
            found[name] = f"{folder} ({commit or 'no git commit'})"
    return found


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        return platform.processor() or platform.machine()
    named = re.search(r"model name\s*:\s*(.+)", text)
    return named[1] if named else platform.machine()


def _os_name() -> str:
    try:
        text = Path("/etc/os-release").read_text("utf-8", "replace")
    except OSError:
        return platform.system()
    named = re.search(r'^PRETTY_NAME="?([^"\n]+)', text, re.MULTILINE)
    return named[1] if named else platform.system()


def _tool(name: str, *arguments: str) -> str:
    """Its output; "" where it is missing, fails, or hangs."""
    path = shutil.which(name)
    if path is None:
        return ""
    try:
        done = subprocess.run(
            [path, *arguments], capture_output=True, text=True, timeout=_TOOL_S, check=False
        )
    except (subprocess.TimeoutExpired, OSError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
