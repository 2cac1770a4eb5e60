"""Weights on one GPU: deltas found on it, the way to main memory, and `ipc` between two processes that share it.

    copy      bandwidth of a copy on the device, and of pinned and plain copies to main memory
    export    a version's snapshot on the device and its copy in main memory, as the trainer makes them, beside those
    delta     what a delta holds, found on the device by torch and by Triton's kernels, in turns with the floor: a copy
              of the weights there, which moves as many bytes as old and new have; the same bytes as the processor's
    buckets   Owner and Reader back to back in two processes: what the copies and the words between them cost
    update    versions through the real Sender, log and receiver, verified by digest; engine killed in a bucket; memory
    one_gpu   NCCL with both ranks on this one GPU is refused at once, with a sentence
    disk      publish and load through the store beside a bare write + fsync and read, in the temporary folder
    demo      a run with weights.transport = "ipc", trainer and engine on this GPU

Weights are random, of the shapes of Qwen3-0.6B in bf16 (1.19 GB; the head is tied). Each line is a JSON object, on
stdout and in $OUT/weights_ipc.jsonl. Ends within --limit seconds: what there is no time for is left out, and said.

    PYTHONPATH=. python benchmarks/gpu/weights_ipc.py [--only copy delta …] [--device cpu --small]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks.gpu.timing import once  # noqa: E402
from benchmarks.weights_fleet import CONTEXT, Holder, Trainer  # noqa: E402
from engine.rollout.loading import Loader  # noqa: E402
from engine.weights import broadcasts, bucketing, collective, delta_device, delta_words, shared  # noqa: E402
from engine.weights import store as storing  # noqa: E402
from engine.weights import tensors as files  # noqa: E402
from engine.weights.delta_writer import State, state_of, write_delta  # noqa: E402
from engine.weights.snapshots import DeviceSnapshot, raw_tensors  # noqa: E402
from engine.weights.store import WeightStore  # noqa: E402
from streams.events import EngineFailed, TensorInfo  # noqa: E402

MIB = 1 << 20
Row = dict[str, Any]


class Bench:
    """What the parts share."""

    def __init__(self, device: str, *, small: bool, folder: Path) -> None:
        self.device, self.small, self.folder = device, small, folder
        self.on_gpu = device.startswith("cuda")
        self.rounds = 5 if small else 20
        self.copy_s = 0.0  # of all weights, on the device
        self.pinned_s = 0.0  # to main memory

    def weights(self, seed: int = 0) -> dict[str, Any]:
        torch.manual_seed(seed)
        made = {
            name: torch.randn(shape, device=self.device, dtype=torch.float32).mul_(0.02).bfloat16()
            for name, shape in shapes(self.small).items()
        }
        return {**made, "lm_head.weight": made["model.embed_tokens.weight"]}

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def time(self, work: Callable[[], Any], rounds: int = 0, warm: int = 2) -> float:
        """Median seconds, to the end of the device's work."""
        taken = [self.once(work) for _ in range(warm + (rounds or self.rounds))]
        return statistics.median(taken[warm:])

    def once(self, work: Callable[[], Any]) -> float:
        return once(work, self.wait)

    def snapshot(self, tensors: dict[str, Any]) -> Any:
        return DeviceSnapshot(tensors) if self.on_gpu else bucketing.side_by_side(tensors)


def shapes(small: bool) -> dict[str, tuple[int, ...]]:
    hidden, inner, layers, heads, vocabulary = (
        (256, 512, 4, 4, 8192) if small else (1024, 3072, 28, 16, 151_936)
    )
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        for name, shape in (
            ("input_layernorm", (hidden,)),
            ("self_attn.q_proj", (heads * 128, hidden)),
            ("self_attn.k_proj", (8 * 128, hidden)),
            ("self_attn.v_proj", (8 * 128, hidden)),
            ("self_attn.o_proj", (hidden, heads * 128)),
            ("self_attn.q_norm", (128,)),
            ("self_attn.k_norm", (128,)),
            ("mlp.gate_proj", (inner, hidden)),
            ("mlp.up_proj", (inner, hidden)),
            ("mlp.down_proj", (hidden, inner)),
            ("post_attention_layernorm", (hidden,)),
        ):
            found[f"model.layers.{layer}.{name}.weight"] = shape
    return found | {"model.norm.weight": (hidden,)}


def distinct(tensors: Any) -> dict[int, Any]:
    return {tensor.data_ptr(): tensor for tensor in tensors.values()}


def size(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in distinct(tensors).values())


def move(tensors: Any, share: float, seed: int) -> None:
    """One unit in the last place of so many elements, in place."""
    device = next(iter(tensors.values())).device
    generator = torch.Generator(device=device).manual_seed(seed)
    for tensor in distinct(tensors).values():
        flat = tensor.view(-1).view(torch.int16)
        flat.add_((torch.rand(flat.shape, device=device, generator=generator) < share).to(torch.int16))


# ---------------------------------------------------------------- parts
def copy(bench: Bench) -> Iterator[Row]:
    n = size(bench.weights())
    source = torch.randint(0, 255, (n,), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    bench.copy_s = bench.time(lambda: target.copy_(source))
    yield {
        "what": "copy on the device",
        "gb": n / 1e9,
        "ms": 1e3 * bench.copy_s,
        "gb_s_read_and_written": 2 * n / 1e9 / bench.copy_s,
    }
    if not bench.on_gpu:
        return
    pinned, plain = torch.empty(n, dtype=torch.uint8, pin_memory=True), torch.empty(n, dtype=torch.uint8)
    bench.pinned_s = bench.time(lambda: pinned.copy_(source, non_blocking=True))
    plain_s = bench.time(lambda: plain.copy_(source), rounds=3)
    yield {
        "what": "copy to main memory",
        "pinned_gb_s": n / 1e9 / bench.pinned_s,
        "plain_gb_s": n / 1e9 / plain_s,
    }


def export(bench: Bench) -> Iterator[Row]:
    if not bench.on_gpu:
        yield {"what": "export", "skipped": "needs a GPU"}
        return
    tensors = bench.weights()
    gb = size(tensors) / 1e9
    asked = []
    for _ in range(5):
        bench.wait()
        began = time.perf_counter()
        made = DeviceSnapshot(tensors)
        asked.append(time.perf_counter() - began)  # what the training loop waits for
        bench.wait()
        del made
    takes_s = bench.time(lambda: DeviceSnapshot(tensors))
    taken, same = [], True
    for number in range(7):
        snapshot = DeviceSnapshot(tensors)
        bench.wait()
        began = time.perf_counter()
        host = snapshot.host()
        if number >= 2:
            taken.append(time.perf_counter() - began)
        if number == 6:
            same = files.digest_raw(host) == files.digest(files.snapshot(tensors))
        del snapshot, host
    host_s = statistics.median(taken)
    old_s = bench.time(lambda: files.snapshot(tensors), rounds=3, warm=1)
    yield {
        "what": "export",
        "loop_waits_ms": 1e3 * statistics.median(asked),
        "snapshot_ms": 1e3 * takes_s,
        "snapshot_of_copy": bench.copy_s / takes_s if bench.copy_s else None,
        "to_host_ms": 1e3 * host_s,
        "to_host_gb_s": gb / host_s,
        "of_pinned_copy": bench.pinned_s / host_s if bench.pinned_s else None,
        "bar": 0.6,
        "before_ms": 1e3 * old_s,  # tensor by tensor to plain memory, the loop waiting
        "digest_equal": same,
    }


def delta(bench: Bench) -> Iterator[Row]:
    tensors = bench.weights()
    base = _state(bench, tensors)
    for share in (0.02, 0.03, 0.04):
        move(tensors, share, seed=int(100 * share))
        state = _state(bench, tensors)
        yield from _one_delta(bench, base, state)
        base = state


def _state(bench: Bench, tensors: Any) -> State:
    snapshot = bench.snapshot(tensors)
    return state_of(snapshot)._replace(on_device=snapshot)


def _one_delta(bench: Bench, base: State, state: State) -> Iterator[Row]:
    names = list(files.split_tied(state.contents)[0])
    old, new = base.on_device or {}, state.on_device or {}
    n_bytes = size(new)
    source = torch.randint(0, 255, (n_bytes,), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)

    def search() -> int:
        return sum(each.values.shape[1] for each in delta_device.find(old, new, names, 1 << 22))

    plain, right = [each._replace(on_device=None) for each in (base, state)], io.BytesIO()
    cpu_s = bench.time(lambda: _write(right, *plain), rounds=2, warm=1)
    chosen, at_once = delta_words.kernels_on, delta_device.PASS
    for way in ("torch", "triton", "triton, 2^30 elements at once"):
        began = time.perf_counter()
        if way == "torch":
            delta_words.kernels_on = lambda *_: delta_words.OF_TORCH  # pyright: ignore
        elif chosen(new[names[0]].device, torch.int16) is delta_words.OF_TORCH:  # it says why
            yield {"what": "delta by triton", "skipped": "its kernels do not run here"}
            return
        compiled_s = time.perf_counter() - began
        delta_device.PASS = 1 << 30 if "2^30" in way else at_once
        try:
            file = io.BytesIO()
            whole_s = bench.time(lambda file=file: _write(file, base, state), rounds=3, warm=1)
            rounds: list[tuple[float, float, float]] = []
            for _ in range(3 + bench.rounds):
                floor_s = bench.once(lambda: target.copy_(source))
                with _result_left_there():
                    found_s = bench.once(search)
                rounds.append((floor_s, found_s, bench.once(search)))
            floor_s, found_s, with_host_s = map(statistics.median, zip(*rounds[3:], strict=True))
            yield {
                "what": f"delta by {way}",
                "changed": search() / (n_bytes / 2),
                "mb": len(file.getvalue()) / 1e6,
                "times_smaller": n_bytes / len(file.getvalue()),
                "floor_ms": 1e3 * floor_s,
                "found_ms": 1e3 * found_s,
                "found_over_floor": found_s / floor_s,
                "found_and_on_host_ms": 1e3 * with_host_s,
                "found_and_on_host_over_floor": with_host_s / floor_s,
                "bar": 4.0,
                "whole_file_ms": 1e3 * whole_s,
                "processor_alone_ms": 1e3 * cpu_s,
                "same_bytes": file.getvalue() == right.getvalue(),
                "first_time_s": compiled_s,
                "kernels_ms": _kernels(bench, search),
            }
        finally:
            delta_words.kernels_on, delta_device.PASS = chosen, at_once


@contextlib.contextmanager
def _result_left_there() -> Iterator[None]:
    """What was found is not copied to main memory."""
    host = delta_device.on_host
    delta_device.on_host = lambda tensor: np.empty(tuple(tensor.shape), np.uint8)
    try:
        yield
    finally:
        delta_device.on_host = host


def _kernels(bench: Bench, work: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of the kernels and copies that take longest, and of all together."""
    if not bench.on_gpu:
        return {}
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            work()
            bench.wait()
        taken = {each.key[:60]: each.self_device_time_total / 1e3 for each in profiler.key_averages()}
    except Exception as error:  # a profiler is no part of what is measured
        return {f"no profile: {type(error).__name__}: {error}"[:200]: 0.0}
    longest = sorted(taken.items(), key=lambda each: -each[1])[:8]
    return {**{name: round(ms, 4) for name, ms in longest}, "all": round(sum(taken.values(), 0.0), 4)}


def _write(file: io.BytesIO, base: State, new: State) -> None:
    file.seek(0)
    file.truncate()
    write_delta(file, base, new, epoch=1, version=2, base_version=1)


SENDS = 8


def reading_process(infos: list[Any], device: str, line: Any) -> None:
    while (asked := line.recv()) is not None:
        port, bucket = asked
        group = collective.join(
            "127.0.0.1", port, 1, 2, "bench", "ipc", timedelta(seconds=120), device=device
        )
        buckets = bucketing.plan(infos, bucket)
        memory = bucketing.memory_for(buckets, device)
        received: dict[str, Any] = {}
        for _ in range(SENDS):
            received = broadcasts.receive_all(group, buckets, memory, time.monotonic() + 60)
        line.send(files.digest(bucketing.with_tied(infos, received)))
        group.close()


def buckets(bench: Bench) -> Iterator[Row]:
    snapshot = bench.snapshot(bench.weights())
    raws = raw_tensors(snapshot)
    infos, right = infos_of(raws), files.digest_raw(raws)
    sent = snapshot if bench.on_gpu else raws
    gb = size(snapshot) / 1e9
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=reading_process, args=(infos, bench.device, theirs), daemon=True)
    process.start()
    try:
        for mib in (16, 64, 256, 1024):
            taken, digest = _sends(bench, ours, sent, infos, mib * MIB)
            s = statistics.median(taken[2:])
            yield {
                "what": f"buckets of {mib} MiB",
                "ms": 1e3 * s,
                "gb_s": gb / s,
                "of_two_copies": 2 * bench.copy_s / s if bench.copy_s else None,
                "first_ms": 1e3 * taken[0],
                "digest_equal": digest == right,
            }
        ours.send(None)
        process.join(10)
    finally:
        process.kill()


def _sends(bench: Bench, line: Any, sent: Any, infos: list[Any], bucket: int) -> tuple[list[float], str]:
    timeout = timedelta(seconds=120)
    listener = collective.Listener("127.0.0.1", 0, 2, timeout)
    line.send((listener.port, bucket))
    group = collective.join(
        "127.0.0.1", 0, 0, 2, "bench", "ipc", timeout, listener=listener, device=bench.device
    )
    try:
        plan, room = bucketing.plan(infos, bucket), bucketing.Buffers(bench.device)
        taken = [
            broadcasts.send_all(group, sent, plan, room, time.monotonic() + 60).seconds for _ in range(SENDS)
        ]
        if not line.poll(60):
            raise TimeoutError("the reader did not answer")
        return taken, line.recv()
    finally:
        group.close()
        listener.close()


def infos_of(raws: Any) -> list[TensorInfo]:
    _, tied = files.split_tied(raws)
    return [
        TensorInfo(name, list(each.shape), each.dtype, each.data.nbytes, tied.get(name, ""))
        for name, each in raws.items()
    ]


def killed_in_a_bucket(name: str, device: str) -> Any:
    """A Holder whose process dies in the second bucket of what it receives second."""
    engine, start, count = Holder(name, device), shared.Reader.start, iter(range(1 << 30))

    def broken(self: Any, tensor: Any, *limits: Any) -> Any:
        if next(count) == 5:
            os.kill(os.getpid(), 9)
        return start(self, tensor, *limits)

    shared.Reader.start = broken  # pyright: ignore[reportAttributeAccessIssue]
    return engine


def update(bench: Bench) -> Iterator[Row]:
    tensors = bench.weights()
    gb = size(tensors) / 1e9
    with Trainer(bench.folder / "update") as trainer:
        trainer.publish(bench.snapshot(tensors))
        trainer.start(0, Holder, device=bench.device)
        free = _free(bench)
        for mib in (64, 256):
            trainer.new_sender("ipc", mib * MIB, device=bench.device)
            trainer.whole(0, deadline_s=240)
            taken, loads = [], []
            for number in range(6):
                move(tensors, 0.03, number)
                trainer.publish(bench.snapshot(tensors))
                s, ready = trainer.sent(), trainer.ready(0)
                if ready.transport != "ipc":
                    raise RuntimeError(f"a version came by {ready.transport}")
                if number:
                    taken.append(s)
                    loads.append(ready.load_s)
            s = statistics.median(taken)
            yield {
                "what": f"update by ipc, buckets of {mib} MiB",
                "sender_ms": 1e3 * s,
                "gb_s": gb / s,
                "of_two_copies": 2 * bench.copy_s / s if bench.copy_s else None,
                "engine_ready_s": statistics.median(loads),
                "digest": "equal, or it would not be ready",
            }
        trainer.no_sender()
        trainer.processes.pop(0).kill()
        if bench.on_gpu:
            time.sleep(2)
            yield {"what": "device memory after", "mb_less_free": (free - _free(bench)) / 1e6}
        trainer.start(1, killed_in_a_bucket, device=bench.device)
        mib = 1 if bench.small else 256
        trainer.new_sender("ipc", mib * MIB, device=bench.device)
        trainer.whole(1, deadline_s=240)
        process = trainer.processes.pop(1)
        for _ in range(2):
            trainer.publish(bench.snapshot(tensors))
            began = time.monotonic()
            assert trainer.sender is not None
            trainer.sender.wait(timedelta(seconds=30))
            sent = trainer.sender.sent
            if sent is not None and sent.error:
                break
        process.join(10)
        assert sent is not None
        yield {
            "what": "engine killed in a bucket",
            "sender_free_s": time.monotonic() - began,
            "error": sent.error[:200],
            "lost": sent.lost,
            "exit": process.exitcode,
        }


def _free(bench: Bench) -> int:
    if not bench.on_gpu:
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def same_gpu(bench: Bench) -> Iterator[Row]:
    if not bench.on_gpu:
        yield {"what": "NCCL on one GPU", "skipped": "needs a GPU"}
        return
    tensors = {"w": torch.ones(1024, 1024, device=bench.device)}
    with Trainer(bench.folder / "same") as trainer:
        trainer.publish(bench.snapshot(tensors))
        trainer.start(0, Holder, device=bench.device)
        trainer.new_sender("nccl", 64 * MIB, device=bench.device, deadline_s=20)
        trainer.whole(0, deadline_s=240)
        event = trainer.publish(bench.snapshot(tensors))
        began = time.monotonic()
        assert trainer.sender is not None
        trainer.sender.wait(timedelta(seconds=40))
        sent = trainer.sender.sent
        ready = trainer.ready(0)
        failures = [each.detail for each in trainer._events if isinstance(each, EngineFailed)]
        yield {
            "what": "NCCL on one GPU",
            "sender_free_s": time.monotonic() - began,
            "error": sent.error[:300] if sent is not None else "nothing was tried",
            "engine_said": [each[:200] for each in failures],
            "version_came_by": ready.transport,
            "group": event.uris.get("distributed", ""),
        }


def disk(bench: Bench) -> Iterator[Row]:
    """benchmarks/weights.py's, of these weights, on this machine's disk and cores."""
    tensors = files.snapshot({name: tensor.cpu() for name, tensor in bench.weights().items()})
    n, path = size(tensors), bench.folder / "bare"
    content, room = np.random.default_rng(0).integers(0, 255, n, np.uint8), np.empty(n, np.uint8)
    store = WeightStore(bench.folder / "weights", keep=1)

    def write() -> None:
        with open(path, "wb") as file:
            file.write(content.data)
            file.flush()
            os.fsync(file.fileno())

    def read() -> None:
        with open(path, "rb", buffering=0) as file:
            at = 0
            while at < n:
                at += file.readinto(room[at:].data) or n

    large, version = storing._LARGE, 0
    for way, limit in (("written while digested", large), ("one after the other", 1 << 62)):
        storing._LARGE = limit
        taken: list[tuple[float, ...]] = []
        for _ in range(4):
            version += 1
            times = [_seconds(write), _seconds(read)]
            path.unlink()
            began = time.perf_counter()
            event = store.publish(tensors, epoch=0, version=version, step=version)
            times.append(time.perf_counter() - began)
            at = store.path(0, version)
            times.append(_seconds(lambda event=event, at=at: Loader("torch").load(event, at)))
            at.unlink()
            taken.append((*times, _seconds(lambda: files.digest(tensors))))
        w, r, p, ld, d = (statistics.median(each) for each in zip(*taken[1:], strict=True))
        yield {
            "what": f"disk, {way}", "gb": n / 1e9, "write_s": w, "read_s": r, "publish_s": p, "load_s": ld,
            "digest_s": d, "of_bare": (w + r) / (p + ld), "publish_of_write": w / p, "bar": 0.8,
        }  # fmt: skip
    storing._LARGE = large


def _seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def demo(bench: Bench, limit_s: float) -> Iterator[Row]:
    run = bench.folder / "demo"
    settings = (f"model.device={bench.device}", 'weights.transport="ipc"')
    words = [sys.executable, "-m", "engine.cli"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(each for each in (str(ROOT), os.environ.get("PYTHONPATH", "")) if each),
    }
    began = time.monotonic()
    ended = subprocess.run(
        [
            *(*words, "demo", "--plain", "--dir", str(run), "--max-steps", "10" if bench.small else "40"),
            *(word for setting in settings for word in ("--set", setting)),
        ],
        capture_output=True, text=True, timeout=limit_s, check=False, env=environment, cwd=ROOT,
    )  # fmt: skip
    took = time.monotonic() - began
    if ended.returncode:
        logs = "\n".join(
            path.read_text("utf-8", "replace")[-800:] for path in sorted((run / "logs").glob("*.log"))
        )
        raise RuntimeError(f"exit {ended.returncode}: {ended.stderr[-800:]} {logs}")
    audit = subprocess.run(
        [*words, "verify", str(run)], capture_output=True, text=True, timeout=60, check=False, env=environment,
        cwd=ROOT,
    )  # fmt: skip
    yield {"what": "demo by ipc", "seconds": took, "verify": audit.returncode, "versions_by": _ways(run)}


def _ways(run: Path) -> dict[str, int]:
    from engine.config import load_config
    from engine.roles import topics_of
    from streams import codec
    from streams.events import EngineReady
    from streams.log import read_all
    from streams.open import open_log

    config = load_config(run, environ={})
    log, ways = open_log(config.log.url), {}
    for record in read_all(log, topics_of(config).name("fleet"), 0, 0):
        decoded = codec.decode(record)
        if isinstance(decoded, codec.Known) and isinstance(decoded.event, EngineReady):
            ways[decoded.event.transport] = ways.get(decoded.event.transport, 0) + 1
    log.close()
    return ways


# ---------------------------------------------------------------- all
def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts: dict[str, Callable[[Bench], Iterator[Row]]] = {
        "copy": copy, "export": export, "delta": delta, "buckets": buckets, "update": update,
        "one_gpu": same_gpu, "disk": disk,
    }  # fmt: skip
    parser.add_argument("--only", nargs="+", choices=[*parts, "demo"], default=[*parts, "demo"])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--limit", type=float, default=235.0, help="seconds in all")
    args = parser.parse_args()
    began, failed = time.monotonic(), 0
    out = Path(os.environ.get("OUT", "")) / "weights_ipc.jsonl" if os.environ.get("OUT") else None

    def say(row: Row) -> None:
        line = json.dumps({**row, "at_s": round(time.monotonic() - began, 1)})
        print(line, flush=True)
        if out is not None:
            with open(out, "a", encoding="utf-8") as file:
                file.write(line + "\n")

    name = torch.cuda.get_device_name(0) if args.device.startswith("cuda") else "cpu"
    say({"what": "machine", "torch": torch.__version__, "device": name, "load": os.getloadavg()[0]})
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args.device, small=args.small, folder=Path(folder))
        for part in args.only:
            left = args.limit - (time.monotonic() - began)
            if left < 15:
                say({"part": part, "left_out": f"only {left:.0f} s were left"})
                continue
            try:
                rows = demo(bench, left - 10) if part == "demo" else parts[part](bench)
                for row in rows:
                    say({"part": part, **row})
            except Exception as error:
                failed = 1
                traceback.print_exc(file=sys.stderr)
                say({"part": part, "FAILED": f"{type(error).__name__}: {str(error)[:1500]}"})
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
