"""Probes for tests of the runner: each does what a probe must not do."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from engine.doctor.result import Request, Result, passed


def hangs(request: Request) -> Result:
    """With a child, which must not outlive it. Its process id goes into run.dir/child."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    folder = Path(request.config.run.dir)
    (folder / "child").write_text(str(child.pid))
    print("waiting for a library that never answers", file=sys.stderr, flush=True)
    time.sleep(600)
    return passed("never")


def dies(request: Request) -> Result:
    print("symbol lookup error: undefined symbol: musaMalloc", file=sys.stderr, flush=True)
    os.abort()


def raises(request: Request) -> Result:
    raise ImportError("libmccl.so.2: cannot open\nshared object file")


def is_noisy(request: Request) -> Result:
    print("banner of a library")
    return passed("two\nlines")


def finds_cuda(request: Request) -> Result:
    return passed("found", accelerator="cuda", n_devices=2, capability=(9, 0))


def tells(request: Request) -> Result:
    return passed(f"{request.accelerator} {request.n_devices} {request.capability}")
