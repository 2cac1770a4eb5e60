"""The sharded trainers on two GPUs of one host, over NCCL, beside one rank.

    equal     loss and gradient norm of the same batch on one rank and on two (bf16)
    step      tokens/s and peak memory of rank 0, on one rank and on two
    save      a checkpoint of two ranks, loaded by one: the same weights, and the next step's loss

Model, batches and measuring are those of fsdp2_step.py. One JSON object a line.

    NCCL_NVLS_ENABLE=0 PYTHONPATH=. python benchmarks/gpu/two_ranks.py [--only fsdp2 …] [--device cpu --small]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu.fsdp2_step import Bench, Row  # noqa: E402
from engine.trainer.parts import PartSettings  # noqa: E402
from engine.trainer.ranked_backend import RankedBackend  # noqa: E402
from engine.weights.store import digest  # noqa: E402

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp2": ("fsdp2", {}),
    "megatron-dp": ("megatron", {}),
    "megatron-tp": ("megatron", {"tensor_model_parallel_size": 2}),
}


@contextmanager
def ranks(bench: Bench, backend: str, options: dict[str, Any], count: int) -> Iterator[RankedBackend]:
    device = str(bench.device).partition(":")[0]
    # each rank takes the device of its own number
    settings = bench.settings(device=device)
    made = RankedBackend(
        PartSettings(backend=backend, model=str(bench.folder), torch=settings, options=options), count
    )
    try:
        yield made
    finally:
        made.close()
        bench.tidy()


def measure(bench: Bench, name: str) -> Iterator[Row]:
    backend, options = CASES[name]
    batch, found = bench.even_batch(), {}
    for count in (1, 2):
        with ranks(bench, backend, options if count == 2 else {}, count) as trainer:
            metrics = trainer.step(batch)
            row = bench.timed_step(lambda trainer=trainer: trainer.step(batch))
            found[count] = metrics
            yield {"ranks": count, "loss": metrics["loss"], "grad_norm": metrics["grad_norm"], **row}
            if count == 2:
                saved, weights = bench.folder.parent / f"saved-{name}", digest(dict(trainer.weights()))
                saved.mkdir()
                began = time.perf_counter()
                write = trainer.snapshot()
                blocked = time.perf_counter() - began
                write(saved)
                yield {
                    "saved_on": 2,
                    "blocked_s": round(blocked, 3),
                    "s": round(time.perf_counter() - began, 3),
                }
                following = trainer.step(batch)
    for what in ("loss", "grad_norm"):
        one, two = found[1][what], found[2][what]
        yield {"what": what, "relative_difference": abs(one - two) / max(abs(one), 1e-9), "bar": 2e-2}
    with ranks(bench, backend, {}, 1) as trainer:
        trainer.load(saved)
        same = digest(dict(trainer.weights())) == weights
        again = trainer.step(batch)
    yield {
        "loaded_on": 1,
        "same_weights": same,
        "next_loss": [following["loss"], again["loss"]],
        "next_grad_norm": [following["grad_norm"], again["grad_norm"]],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    began, failed = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args.device, Path(folder), small=args.small)
        for name in args.only:
            try:
                for row in measure(bench, name):
                    at_s = round(time.monotonic() - began, 1)
                    print(json.dumps({"case": name, **row, "at_s": at_s}), flush=True)
            except Exception as error:
                traceback.print_exc()
                print(json.dumps({"case": name, "FAILED": f"{type(error).__name__}: {error}"}), flush=True)
                failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
