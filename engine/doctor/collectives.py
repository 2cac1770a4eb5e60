"""(d) The collective library of this device: is it there, and do two ranks agree? On MUSA, `nccl` must not be meant."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from engine.doctor.accelerator import is_stand_in
from engine.doctor.result import SIMULATED, Request, Result, failed, passed, skipped, warned
from engine.doctor.two_ranks import RanksFailed, together

_BYTES = 64 << 20  # of the broadcast that is timed
_SLOW = 1e9  # bytes a second, between two devices
_DEADLINE_S = 100.0
GROUPS = {"cuda": "nccl", "musa": "cpu:gloo,musa:mccl"}
_MUSA = (
    "import torchada (or name mccl) before init_process_group; the weights' group is 'cpu:gloo,musa:mccl'; "
    "rename NCCL_* to MCCL_*"
)
# Names that MCCL reads under its own prefix alone.
_NCCL_ONLY = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_DEBUG", "NCCL_BUFFSIZE")


class Library(NamedTuple):
    """What torch says of the library of `kind`."""

    kind: str
    is_registered: bool
    version: str
    error: str = ""  # of loading it
    is_simulated: bool = False


def probe(request: Request) -> Result:
    kind = request.device
    library = look(kind)
    problem = judge(library, request.config.weights.backend, os.environ)
    if problem is not None:
        return problem
    said = f"{GROUPS[kind]}, {kind} library {library.version}"
    if request.n_devices < 2:
        return warned(
            f"{said}; one device here, so no collective was tried",
            "run this on a node with two devices or more",
        )
    try:
        ranks = together(GROUPS[kind], kind, _BYTES, _DEADLINE_S)
    except RanksFailed as error:
        return failed(
            f"{said}: {error}",
            _MUSA if kind == "musa" else "NCCL_DEBUG=INFO says where; check its interfaces",
        )
    return judge_ranks(ranks, said, _SLOW)


def look(kind: str) -> Library:
    import torch
    import torch.distributed as dist

    if kind == "cuda":
        is_there = dist.is_available() and dist.is_nccl_available()
        return Library(kind, is_there, _nccl_version(torch) if is_there else "")
    is_simulated = is_stand_in(torch)
    musa: Any = getattr(torch, "musa", None)
    try:
        ctypes.CDLL(os.environ.get("SGLANG_NCCL_SO_PATH") or "libmccl.so.2")
        error = ""
    except OSError as problem:
        error = str(problem)
    version = ".".join(map(str, musa.mccl.version())) if hasattr(musa, "mccl") else ""
    return Library(kind, "mccl" in dist.Backend.backend_list, version, error, is_simulated)


def _nccl_version(torch: Any) -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))


def judge(library: Library, asked: str, environ: Mapping[str, str]) -> Result | None:
    """What is wrong before two ranks meet; None when nothing is."""
    if library.is_simulated:
        return skipped(SIMULATED)
    if library.kind == "musa" and asked == "nccl":
        return failed('weights.backend = "nccl" on MUSA', 'set weights.backend to "auto" or "mccl"')
    if library.kind == "cuda" and asked == "mccl":
        return failed('weights.backend = "mccl" on CUDA', 'set weights.backend to "auto" or "nccl"')
    name = "mccl" if library.kind == "musa" else "nccl"
    if not library.is_registered:
        return failed(
            f"torch.distributed has no backend {name}",
            _MUSA if name == "mccl" else "install a torch with NCCL",
        )
    if library.error:
        return failed(f"the library of mccl: {library.error}", _MUSA)
    alone = [each for each in _NCCL_ONLY if each in environ and "M" + each[1:] not in environ]
    if library.kind == "musa" and alone:
        return warned(f"{', '.join(alone)} set, which MCCL does not read", _MUSA)
    return None


def judge_ranks(ranks: list[dict[str, Any]], said: str, slow: float = 0.0) -> Result:
    if not all(each["is_sum_right"] for each in ranks):
        return failed(
            f"{said}: an all_reduce gave {[each['sum'] for each in ranks]}, needed 3.0",
            "the library is broken",
        )
    if len({each["digest"] for each in ranks}) != 1:
        return failed(
            f"{said}: a broadcast gave other bytes than were sent", "the library or a link is broken"
        )
    rate = _BYTES / max(1e-9, max(each["seconds"] for each in ranks))
    text = f"{said}: sums right, {_BYTES >> 20} MiB broadcast bit for bit at {rate / 1e9:.2f} GB/s"
    if rate < slow:
        return warned(
            text, "slow for two devices: look at the topology (nvidia-smi topo -m, mthreads-gmi topo -m)"
        )
    return passed(text, bytes_a_second=rate)


def broadcast(request: Request) -> Result:
    """--deep: two processes of this machine over Gloo, on the CPU; what a laptop can try of a broadcast."""
    try:
        ranks = together("gloo", "cpu", _BYTES, _DEADLINE_S)
    except RanksFailed as error:
        return failed(
            str(error),
            "Gloo binds what the hostname resolves to: see node-address, or set GLOO_SOCKET_IFNAME",
        )
    return judge_ranks(ranks, "gloo, two processes on the CPU")


def no_accelerator(request: Request) -> str:
    """Why a probe of the device is skipped; ""."""
    if no_torch(request):
        return no_torch(request)
    if request.accelerator in ("", "cpu"):
        if request.has_config and request.config.model.device.startswith("musa"):
            return "no usable MUSA device: see the probe accelerator"
        return "no accelerator (cpu)"
    if request.device == "cpu":
        return 'model.device = "cpu"'
    return ""


def no_torch(request: Request) -> str:
    import importlib.util

    if importlib.util.find_spec("torch") is not None:
        return ""
    return "torch is not installed here (pip install 'millstream[train]')"


def not_deep(request: Request) -> str:
    return no_torch(request) or ("" if request.deep else "with --deep (two processes)")
