"""(e) torch_memory_saver: does giving memory back work on this device, beside graph capture? SGLang sleeps by it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

from engine.doctor.foreign import sglang_python
from engine.doctor.result import Request, Result, failed, passed, skipped, warned

_REMEDY = {
    "musa": "upstream torch_memory_saver has no MUSA backend: place trainer and engines on devices of their own, never "
    "--enable-memory-saver; or use a vendor's build",
    "cuda": "pip install torch_memory_saver for this CUDA; without it leave --enable-memory-saver out",
}
_SYMBOLS = (b"musaMalloc", b"muMemMap")
_FLAG = "--enable-memory-saver"

# Lives in a process of its own, which the library must be preloaded into.
TRIAL = """
import json, torch
from torch_memory_saver import torch_memory_saver as saver
saver.hook_mode = "torch"
MIB = 1 << 20
def free():
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]
with saver.region(tag="kept", enable_cpu_backup=True):
    kept = torch.arange(64 * MIB, dtype=torch.int32, device="cuda")
torch.cuda.synchronize()
expected = kept.sum().item()
held = free()
saver.pause("kept")
freed = free() - held
saver.resume("kept")
same = kept.sum().item() == expected
x = torch.ones(1024, device="cuda")
y = torch.zeros(1024, device="cuda")
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    y.copy_(x * 2)
torch.cuda.current_stream().wait_stream(side)
with torch.cuda.graph(graph):
    y.copy_(x * 2)
x.fill_(3.0)
saver.pause("kept"); saver.resume("kept")
graph.replay()
torch.cuda.synchronize()
print(chr(0) + json.dumps({"freed": freed, "size": 256 * MIB, "same": same, "graph": bool((y == 6.0).all())}))
"""


def probe(request: Request) -> Result:
    is_wanted = _FLAG in request.config.rollout.sglang.args
    spec = importlib.util.find_spec("torch_memory_saver")
    libraries = _libraries(spec)
    return judge(request, is_wanted, libraries, _trial if request.device == "cuda" else None)


def judge(request: Request, is_wanted: bool, libraries: list[Path] | None, trial: Any) -> Result:
    """`libraries`: of the installed package; None when it is not installed."""
    verdict = failed if is_wanted else warned
    kind = request.device
    if libraries is None:
        if not is_wanted:
            return skipped("torch_memory_saver is not installed, and nothing asks for it")
        where = sglang_python(request)
        if where is not None and str(where) != sys.executable:
            return warned(
                f"{_FLAG} is asked for; whether {where} has torch_memory_saver was not tried",
                f"run this there: {where} -m pip show torch_memory_saver",
            )
        return failed(f"{_FLAG} is asked for, and torch_memory_saver is not installed", _REMEDY[kind])
    if kind == "musa":
        if not any(symbol in file.read_bytes() for file in libraries for symbol in _SYMBOLS):
            return verdict(
                f"torch_memory_saver has {len(libraries)} libraries and no MUSA symbol in them", _REMEDY[kind]
            )
        return warned(
            "a build with MUSA symbols; whether it works was not tried here", "try it with a run of one step"
        )
    try:
        said = trial()
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        return verdict(f"torch_memory_saver: {error}", _REMEDY[kind])
    if said["freed"] < 0.9 * said["size"] or not said["same"] or not said["graph"]:
        return verdict(
            f"pause freed {said['freed'] >> 20} of {said['size'] >> 20} MiB, content "
            f"{'kept' if said['same'] else 'lost'}, graph replay {'right' if said['graph'] else 'wrong'}",
            _REMEDY[kind],
        )
    return passed(
        f"pause freed {said['freed'] >> 20} MiB, resume brought them back, a captured graph replays right"
    )


def _libraries(spec: Any) -> list[Path] | None:
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    return sorted({*package.rglob("*.so"), *package.parent.glob("torch_memory_saver*.so")})


def _trial() -> dict[str, Any]:
    import json

    done = subprocess.run([sys.executable, "-c", TRIAL], capture_output=True, timeout=90, check=False)
    _, mark, answer = done.stdout.rpartition(b"\0")
    if done.returncode or not mark:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise ValueError(lines[-1] if lines else f"ended with {done.returncode}")
    return json.loads(answer)
