"""(f) Can `weights.transport` work on this hardware and network?"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import socket
import sys
import time
from pathlib import Path

from engine.doctor.embedded import existing, model_bytes, scratch, write_synced
from engine.doctor.result import Request, Result, failed, passed, skipped, warned
from engine.weights.bucketing import BUCKET_BYTES

_BUCKET = 16 << 20
_FITS = {"cuda": ("auto", "nccl", "gloo"), "musa": ("auto", "mccl", "gloo"), "cpu": ("auto", "gloo")}
_DISK = 'use weights.transport = "disk", which every hardware and network allows'


def probe(request: Request) -> Result:
    transport = request.config.weights.transport
    if transport == "distributed":
        return _distributed(request)
    if transport == "ipc":
        return _ipc(request)
    return _disk(request)


def _disk(request: Request) -> Result:
    """One bucket through a file, and room for two versions of the model."""
    folder = Path(request.config.run.dir) / "weights"
    content = os.urandom(_BUCKET)
    try:
        with scratch(folder) as place:
            began = time.monotonic()
            write_synced(place / "bucket", content)
            took = time.monotonic() - began
            if hashlib.sha256((place / "bucket").read_bytes()).digest() != hashlib.sha256(content).digest():
                return failed(f"{folder}: a bucket came back with other bytes", "take another file system")
    except OSError as error:
        return failed(
            f"weights would go to {folder}: {error.strerror} ({error.filename})",
            "name a folder that you may write to",
        )
    model = model_bytes(request.config)
    disk = os.statvfs(existing(folder))
    free = disk.f_bavail * disk.f_frsize
    if free < 2 * model:
        return failed(
            f"{folder}: {free >> 20} MiB are free, two versions of the model are {2 * model >> 20} MiB",
            "make room, move run.dir, or publish less at a time (weights.keep, weights.kind = delta)",
        )
    return passed(
        f"disk: {_BUCKET >> 20} MiB written and synced at {_BUCKET / took / 1e6:.0f} MB/s, read back the same"
    )


def _distributed(request: Request) -> Result:
    weights, device = request.config.weights, request.device
    if weights.backend not in _FITS[device]:
        return failed(
            f'weights.backend = "{weights.backend}" with model.device = "{device}"',
            f"set it to auto; or {_DISK}",
        )
    address = weights.master_address or socket.gethostname()
    try:
        numeric = socket.gethostbyname(address)
    except OSError as error:
        return failed(
            f"weights.master_address = {address!r}: {error}", "name an address of the trainer's node"
        )
    if ipaddress.ip_address(numeric).is_loopback and request.has_other_nodes:
        return failed(
            f"the trainer would listen at {numeric} ({address}), which no other node reaches",
            "set weights.master_address to the trainer's address on the training network",
        )
    try:
        with socket.create_server((numeric, weights.master_port)) as server:
            server.settimeout(5)
            with socket.create_connection(server.getsockname(), timeout=5):
                server.accept()[0].close()
    except OSError as error:
        return failed(
            f"cannot listen at {numeric}:{weights.master_port}: {error.strerror or error}",
            "another process has that port, or the address is another node's: run this on the trainer's node, set "
            "weights.master_port = 0",
        )
    what = f"the trainer can listen at {numeric}:{weights.master_port or 'any port'}"
    return passed(f"distributed: {what}; the library is probed by `collectives`, other nodes' way by `ports`")


def _ipc(request: Request) -> Result:
    if not sys.platform.startswith("linux"):
        return failed(f"ipc needs Linux (memfd), this is {sys.platform}", _DISK)
    if request.device == "musa":
        return failed("ipc shares memory by CUDA's driver, which MUSA has not", _DISK)
    if request.address and request.n_devices == 0:
        return warned(
            "ipc: trainer and engines must be on one host, which Ray decides",
            "place them together, or: " + _DISK,
        )
    try:
        descriptor = os.memfd_create("millstream-doctor", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, 2 * (request.config.weights.bucket_bytes or BUCKET_BYTES))
        os.close(descriptor)
    except OSError as error:
        return failed(
            f"ipc: no shared memory of two buckets: {error.strerror}",
            "lower weights.bucket_bytes; or " + _DISK,
        )
    if request.device == "cpu":
        return passed("ipc: shared memory of two buckets can be had")
    return _device_memory(request)


def _device_memory(request: Request) -> Result:
    """Of the device itself nothing is tried here: the first update of a run does."""
    if request.accelerator != "cuda":
        return skipped("no accelerator (cpu)")
    return warned(
        "ipc: main memory can be shared; the device's own was not tried",
        "the first update of a run tells; each engine that cannot read it takes versions from disk, and says so",
    )
