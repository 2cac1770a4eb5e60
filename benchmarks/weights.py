"""Sending weights to engines, each way beside the bare operation in the same run.

    python benchmarks/weights.py [--only transfer disk delta stall] [--small] [--folder DIR] [--json]
                                 [--sglang PYTHON --sglang-args ...]

    transfer  one version through the real Sender to an engine's process, over Gloo and by ipc, beside a bare
              broadcast of the same bytes by torch.distributed (and beside one copy in memory)
    disk      publish through the store and load with its digest, beside a bare write + fsync and a bare read
    delta     AdamW steps of a small transformer (float32 weights, published in bfloat16) at three learning rates:
              what changed, and making and applying the delta beside writing and reading the full file
    stall     an engine that generates all the while: how long it stands still for an update, by transport and pause
              mode. `engine` is what it says itself, `outside` the longest time without a round of decoding, and `idle`
              the same while nothing is updated. With --sglang also servers of that environment

Rounds of the two sides of a ratio are taken in turn. On a busy machine trust the ratios; `load` is printed with them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks.weights_fleet import CONTEXT, Holder, Trainer  # noqa: E402
from engine.rollout.loading import Loader  # noqa: E402
from engine.weights import tensors as files  # noqa: E402
from engine.weights.delta import changed_in, open_delta  # noqa: E402
from engine.weights.delta_writer import DeltaPolicy, state_of, write_delta  # noqa: E402
from engine.weights.store import WeightStore  # noqa: E402

MIB = 1 << 20
MODES = ("retract", "in_place", "abort")
Row = dict[str, Any]


def median(values: list[float]) -> float:
    return statistics.median(values)


def seconds(work: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    began = clock()
    work()
    return clock() - began


def some_weights(nbytes: int, n_tensors: int = 64) -> dict[str, torch.Tensor]:
    """bfloat16 of random bits, side by side, as a snapshot is."""
    generator = torch.Generator().manual_seed(0)
    room = torch.empty(nbytes // 2, dtype=torch.int16).random_(generator=generator).view(torch.bfloat16)
    each = len(room) // n_tensors
    return {
        f"w{place:02d}": room[place * each : (place + 1) * each].view(-1, 1024) for place in range(n_tensors)
    }


def bytes_of(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """All of them, uint8."""
    storage: Any = tensors["w00"].untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


# ---------------------------------------------------------------- transfer
def bare_peer(port: int, nbytes: int, commands: Any) -> None:
    import torch.distributed as dist

    _meet(port, 1)
    buffer = torch.zeros(nbytes, dtype=torch.uint8)
    while commands.recv():
        dist.broadcast(buffer, 0)
    dist.destroy_process_group()


def _meet(port: int, rank: int) -> None:
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=300))


class Bare:
    """A plain group of torch.distributed of two processes, and nothing else."""

    def __init__(self, nbytes: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = int(free.getsockname()[1])
        self._commands, theirs = CONTEXT.Pipe()
        self._peer = CONTEXT.Process(target=bare_peer, args=(port, nbytes, theirs), daemon=True)
        self._peer.start()
        _meet(port, 0)

    def broadcast(self, buffer: torch.Tensor) -> float:
        import torch.distributed as dist

        self._commands.send(True)
        began = time.perf_counter()
        dist.broadcast(buffer, 0)
        return time.perf_counter() - began

    def close(self) -> None:
        import torch.distributed as dist

        self._commands.send(False)
        dist.destroy_process_group()
        self._peer.join(10)
        self._peer.kill()


def transfer(folder: Path, args: argparse.Namespace) -> Iterator[Row]:
    nbytes = 64 * MIB if args.small else 1 << 30
    tensors = some_weights(nbytes)
    whole = bytes_of(tensors)
    copy, bare = torch.empty(nbytes, dtype=torch.uint8), Bare(nbytes)
    with Trainer(folder / "transfer") as trainer:
        first = trainer.publish(tensors)
        trainer.start(0, Holder)
        for backend, bucket in (("gloo", 64 * MIB), ("gloo", 16 * MIB), ("ipc", 64 * MIB), ("ipc", 16 * MIB)):
            trainer.new_sender(backend, bucket)
            trainer.whole(0)
            rounds: dict[str, list[float]] = {"bare": [], "ours": [], "copy": [], "load": []}
            for number in range(2 + args.rounds):
                b, c = bare.broadcast(whole), seconds(lambda: copy.copy_(whole))
                trainer.publish(tensors, like=first)
                s, ready = trainer.sent(), trainer.ready(0)
                if ready.transport == "disk":
                    raise RuntimeError("a version came by its file")
                if number >= 2:  # connections, buffers and fresh pages of the first two
                    for name, value in (("bare", b), ("copy", c), ("ours", s), ("load", ready.load_s)):
                        rounds[name].append(value)
            ours, raw = median(rounds["ours"]), median(rounds["bare"])
            yield {
                "what": f"{backend}, buckets of {bucket // MIB} MiB",
                "mib": nbytes // MIB,
                "ours_s": ours,
                "bare_broadcast_s": raw,
                "of_bare_broadcast": median(
                    [b / o for b, o in zip(rounds["bare"], rounds["ours"], strict=True)]
                ),
                "of_one_copy": median(rounds["copy"]) / ours,
                "ready_s": median(rounds["load"]),  # with the digest
            }
    bare.close()


# ---------------------------------------------------------------- disk
def disk(folder: Path, args: argparse.Namespace) -> Iterator[Row]:
    nbytes = 64 * MIB if args.small else 1 << 30
    tensors = some_weights(nbytes)
    content = bytes_of(tensors).numpy()
    store, room = WeightStore(folder / "weights", keep=1), np.empty(nbytes, np.uint8)
    taken: dict[str, list[float]] = {name: [] for name in ("publish", "write", "load", "read", "digest")}
    for version in range(1 + args.rounds):
        bare = folder / "weights" / "bare"

        def write(bare: Path = bare) -> None:
            with open(bare, "wb") as file:
                file.write(content.data)
                file.flush()
                os.fsync(file.fileno())

        def read(bare: Path = bare) -> None:
            with open(bare, "rb", buffering=0) as file:
                at = 0
                while at < nbytes:
                    at += file.readinto(room[at:].data) or nbytes

        content[:8] = version
        # each side is alone in the page cache: on a small machine the second file would wait for its room
        times = {"write": seconds(write), "read": seconds(read)}
        bare.unlink()
        began = time.perf_counter()
        event = store.publish(tensors, epoch=0, version=version, step=version)
        times["publish"] = time.perf_counter() - began
        path = store.path(0, version)
        times["load"] = seconds(lambda event=event, path=path: Loader("torch").load(event, path))
        path.unlink()
        times["digest"] = seconds(lambda: files.digest(tensors))
        if version:
            for name, value in times.items():
                taken[name].append(value)
    found = {name: median(values) for name, values in taken.items()}
    yield {
        "what": "the store",
        "mib": nbytes // MIB,
        **{f"{name}_s": value for name, value in found.items()},
        "publish_of_write": found["write"] / found["publish"],
        "load_of_read": found["read"] / found["load"],
        "both": median(
            [
                (w + r) / (p + ld)
                for w, r, p, ld in zip(
                    *(taken[each] for each in ("write", "read", "publish", "load")), strict=True
                )
            ]
        ),
    }


# ---------------------------------------------------------------- delta
def small_model(args: argparse.Namespace) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden, layers, vocabulary = (128, 2, 2048) if args.small else (512, 8, 16_384)
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            num_key_value_heads=max(1, hidden // 128),
            head_dim=64,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
        )
    )


def published(model: Any) -> dict[str, torch.Tensor]:
    """In bfloat16, side by side; what is tied stays tied."""
    made: dict[int, torch.Tensor] = {}
    state = model.state_dict()
    for tensor in state.values():
        made.setdefault(tensor.data_ptr(), tensor.to(torch.bfloat16))
    return files.snapshot({name: made[tensor.data_ptr()] for name, tensor in state.items()})


def delta(folder: Path, args: argparse.Namespace) -> Iterator[Row]:
    for lr in (1e-6, 1e-5, 1e-4):
        model = small_model(args).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
        generator, found = torch.Generator().manual_seed(1), []
        base = state_of(published(model))
        for step in range(args.rounds + 3):
            ids = torch.randint(0, model.config.vocab_size, (4, 64), generator=generator)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            new = state_of(published(model))
            if step >= 3:
                found.append(_one_delta(folder, base, new))
            base = new
        row = {key: median([each[key] for each in found]) for key in found[0]}
        is_delta = row["changed"] <= DeltaPolicy().most_changed and row["size"] <= DeltaPolicy().most_bytes
        yield {"what": f"lr {lr:g}", "published_as": "delta" if is_delta else "full", **row}


def _one_delta(folder: Path, base: Any, new: Any) -> dict[str, float]:
    path, full = folder / "delta", folder / "full"

    def encode() -> None:
        with open(path, "wb") as file:
            write_delta(file, base, new, epoch=1, version=2, base_version=1)

    def write() -> None:
        with open(full, "wb") as file:
            files.write_file(file, new.contents, {})

    stored, _ = files.split_tied(base.contents)
    held = {name: tensor.data.copy() for name, tensor in stored.items()}

    def apply() -> None:
        opened = open_delta(path)
        opened.overwrite({name: held[name] for name in changed_in(opened)})

    def read() -> None:
        for name, tensor in files.read_raw(full).items():
            if name in held:
                held[name][:] = tensor.data

    times = {}
    for name, work in (("encode", encode), ("write", write), ("apply", apply), ("read", read)):
        times[name] = seconds(work, time.process_time)
        if name == "apply":
            for each in stored:
                assert np.array_equal(held[each], new.contents[each].data), each
    head = open_delta(path).head
    elements = sum(tensor.data.nbytes // files.item_bytes(tensor.dtype) for tensor in stored.values())
    full_bytes = head.full_bytes
    return {
        "changed": head.n_changed / elements,
        "full_mb": full_bytes / 1e6,
        "size": path.stat().st_size / full_bytes,
        "times_smaller": full_bytes / path.stat().st_size,
        "encode_ms": 1e3 * times["encode"],
        "write_full_ms": 1e3 * times["write"],
        "apply_ms": 1e3 * times["apply"],
        "read_full_ms": 1e3 * times["read"],
    }


# ---------------------------------------------------------------- stall
def torch_engine(name: str, *, model: str, mode: str) -> Any:
    from engine.rollout.batched import BatchedEngine

    return BatchedEngine(Path(model), name=name, pause_mode=mode, threads=1)  # pyright: ignore[reportArgumentType]


def sglang_server(name: str, *, model: str, mode: str, run: str, python: str, args: list[str]) -> Any:
    from engine.config import build_config
    from engine.rollout.sglang.starting import sglang_engine

    table = {
        "run": {"dir": run},
        "data": {"path": "none"},
        "reward": {"function": "exact"},
        "model": {"path": model},
        "weights": {"transport": "distributed"},
        "rollout": {
            "backend": "sglang",
            "pause_generation_mode": mode,
            "sglang": {"python": python, "args": args},
        },
    }
    return sglang_engine(build_config(table), name=name, replica=0)


def stall(folder: Path, args: argparse.Namespace) -> Iterator[Row]:
    from engine.tasks import GUESS, tiny

    model, path = small_model(args), folder / "model"
    model.save_pretrained(path)
    tiny.build_tokenizer(GUESS).save_pretrained(path)
    tensors = files.snapshot(dict(model.state_dict()))
    for mode in MODES:
        yield from _stalls(
            folder, args, "torch", mode, tensors, torch_engine, {"model": str(path), "mode": mode}
        )
    if args.sglang:
        for mode in ("retract", "abort"):
            options = {
                "model": str(path),
                "mode": mode,
                "run": str(folder / "servers"),
                "python": args.sglang,
                "args": args.sglang_args,
            }
            yield from _stalls(folder, args, "sglang", mode, tensors, sglang_server, options)


def _stalls(
    folder: Path,
    args: argparse.Namespace,
    kind: str,
    mode: str,
    tensors: dict[str, torch.Tensor],
    make: Any,
    options: dict[str, Any],
) -> Iterator[Row]:
    with Trainer(folder / f"{kind}-{mode}", keep=50) as trainer:
        full, deltas = trainer.store, WeightStore(trainer.store.folder, keep=50, deltas=DeltaPolicy())
        trainer.publish(tensors)
        trainer.start(0, make, asks=16, **options)
        trainer.ready(0, deadline_s=300)
        time.sleep(2)
        trainer.gauges(0)
        time.sleep(2)
        idle = max(each["longest_gap_s"] for each in trainer.gauges(0))
        transports = ("disk", "disk, delta", "distributed", "ipc")
        for transport in transports[: 3 if kind == "sglang" else 4]:
            trainer.store = deltas if "delta" in transport else full
            trainer.no_sender()
            if not transport.startswith("disk"):
                trainer.new_sender("gloo" if transport == "distributed" else "ipc", 64 * MIB)
                trainer.whole(0)
            own, outside, load = [], [], []
            for number in range(1 + args.rounds):
                _move(tensors)
                event = trainer.publish(tensors)
                ready = trainer.ready(0)
                if ready.transport != transport.partition(",")[0]:
                    raise RuntimeError(f"version {event.version} came by {ready.transport}")
                time.sleep(1.0)  # for the gauges to tell of it
                gaps = [each["longest_gap_s"] for each in trainer.gauges(0)]
                if number:
                    own.append(ready.stall_s)
                    outside.append(max(gaps, default=0.0))
                    load.append(ready.load_s)
            yield {
                "what": f"{kind} engine, {mode}, {transport}",
                "engine_ms": 1e3 * median(own),
                "engine_max_ms": 1e3 * max(own),
                "outside_ms": 1e3 * median(outside),
                "idle_ms": 1e3 * idle,
                "update_s": median(load),
                "mb": sum(each.nbytes for each in tensors.values()) / 1e6,
            }


def _move(tensors: dict[str, torch.Tensor]) -> None:
    """A hundredth of the elements, as a small step does; in place, so what is tied stays tied."""
    for tensor in {each.data_ptr(): each for each in tensors.values()}.values():
        tensor.view(-1)[::100] *= 1.001


# ---------------------------------------------------------------- all
def shown(row: Row) -> str:
    words = [f"{row['what']:42s}"]
    for name, value in row.items():
        if isinstance(value, float):
            words.append(f"{name} {value:.4g}")
        elif name not in ("what", "part"):
            words.append(f"{name} {value}")
    return "  ".join(words)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = {"transfer": transfer, "disk": disk, "delta": delta, "stall": stall}
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--small", action="store_true", help="64 MiB and a tiny model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the files go (default: a temporary folder)")
    parser.add_argument(
        "--sglang", default="", metavar="PYTHON", help="an environment with SGLang, for `stall`"
    )
    parser.add_argument("--sglang-args", nargs="*", default=[], help="of its servers")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    failed = 0
    for part in args.only:
        folder = Path(tempfile.mkdtemp(dir=args.folder))
        try:
            for row in parts[part](folder, args):
                load = os.getloadavg()[0]
                row = {"part": part, **row, "load": load}
                print(json.dumps(row) if args.json else f"{part:8s} {shown(row)}", flush=True)
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            print(f"{part:8s} FAILED: {type(error).__name__}: {error}", flush=True)
            failed = 1
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
