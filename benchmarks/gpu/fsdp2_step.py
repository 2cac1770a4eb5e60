"""The training step of the fsdp2 trainer on one GPU (world size 1, NCCL), beside the same step written plainly.

    attention  packed attention (the variable-length kernel in torch) beside rows that are padded: log-probs, gradients
    lean       log-probs, entropies and gradient of a step's logits: Triton's kernels beside torch's, and one copy
    equal      loss and gradient norm of the same batch: fsdp2 and torch trainers, in bf16; the same steps twice: the
               same bits
    step       tokens/s, share of the peak FLOP/s, memory: the product's step (`TrainerBackend.step`, fsdp2, packed) in
               turns with two plain steps, with deterministic kernels (the product's default) and without:
                 autocast  float32 weights, torch.autocast(bfloat16), fused AdamW: what most would write
                 bfloat16  bfloat16 weights for computing, float32 ones and float32 gradients beside them
               Rows are of equal length, so that a plain batch [8, 1024] has no padding and does the same work.
    mixed      rows of mixed lengths: packed beside padded micro-batches
    export     all weights to main memory (`TrainerBackend.weights`) beside a pinned copy of as many bytes
    save       the copy that a checkpoint takes at once, and its files
    where      kernels of a step by the time that they take

Weights are random, of Qwen3-0.6B's shape (0.6 B parameters, tied head). Each line is a JSON object, on stdout and in
$OUT/fsdp2_step.jsonl. Ends within --limit seconds: what there is no time for is left out, and said.

    PYTHONPATH=. python benchmarks/gpu/fsdp2_step.py [--only step export …] [--device cpu --small]
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM  # noqa: E402
from transformers.utils import logging as transformers_logging  # noqa: E402

from benchmarks.gpu.timing import once  # noqa: E402
from engine.algorithms import packing  # noqa: E402
from engine.algorithms.logprobs import flatten, micro_batches, packed_micro_batches, token_logprobs  # noqa: E402
from engine.interfaces import TrainBatch, TrainSample  # noqa: E402
from engine.trainer.parts import PartSettings  # noqa: E402
from engine.trainer.ranked_backend import RankedBackend  # noqa: E402
from engine.trainer.torch_backend import TorchBackend  # noqa: E402
from engine.trainer.torch_settings import TorchSettings  # noqa: E402
from engine.weights.tensors import digest  # noqa: E402
from streams.trajectory import Payload  # noqa: E402

Row = dict[str, Any]
FOREACH: Any = torch  # it has them, and does not list them
PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense bf16 FLOP/s, by the vendor's data sheets


class Size(NamedTuple):
    hidden: int
    inner: int
    layers: int
    heads: int
    key_heads: int
    head_dim: int
    vocab: int
    length: int  # tokens of a row
    prompt: int  # of these not trained
    rows: int  # of a micro-batch
    micros: int  # of a step


LARGE = Size(1024, 3072, 28, 16, 8, 128, 151_936, 1024, 128, 8, 4)
SMALL = Size(64, 192, 2, 4, 2, 16, 500, 64, 8, 4, 2)


class Bench:
    def __init__(self, device: str, folder: Path, *, small: bool) -> None:
        self.device, self.size = torch.device(device), SMALL if small else LARGE
        self.folder = folder / "model"
        self.repeats = 3 if small else 5
        size = self.size
        config = Qwen3Config(
            vocab_size=size.vocab,
            hidden_size=size.hidden,
            intermediate_size=size.inner,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.key_heads,
            head_dim=size.head_dim,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
        )
        torch.manual_seed(0)
        with torch.device(self.device):
            model: Any = Qwen3ForCausalLM(config)
        model.to(torch.bfloat16).save_pretrained(self.folder)
        self.n_parameters = sum(each.numel() for each in model.parameters())

    # ---------------------------------------------------------------- work
    @property
    def capacity(self) -> int:
        return self.size.rows * self.size.length

    def batch(self, lengths: list[int], seed: int = 1) -> TrainBatch:
        """One sample of each length; behaviour log-probs are about those of a random model."""
        rng = np.random.default_rng(seed)
        samples = []
        for index, length in enumerate(lengths):
            count = max(1, length - self.size.prompt)
            payload = Payload(
                rng.integers(4, self.size.vocab, length - count).astype(np.int32),
                rng.integers(4, self.size.vocab, count).astype(np.int32),
                (-math.log(self.size.vocab) + rng.normal(0, 0.1, count)).astype(np.float32),
                np.ones(count, bool),
                [(1, 0, count)],
            )
            samples.append(TrainSample(f"0-{index}/0/0", payload, payload.loss_mask, float(rng.normal())))
        return TrainBatch(1, 0, seed, samples)

    def even_batch(self) -> TrainBatch:
        # a row is fed up to its last trained token's predecessor, so one token more makes it `length` long
        return self.batch([self.size.length + 1] * (self.size.rows * self.size.micros))

    def settings(self, **changes: Any) -> TorchSettings:
        base: dict[str, Any] = {
            "lr": 1e-6,
            "dtype": "bfloat16",
            "device": str(self.device),
            "micro_batch_tokens": self.capacity,
            "packing": True,
        }
        return TorchSettings(**(base | changes))

    @contextmanager
    def fsdp2(self, options: dict[str, Any] | None = None, **changes: Any) -> Iterator[RankedBackend]:
        part = PartSettings(
            backend="fsdp2", model=str(self.folder), torch=self.settings(**changes), options=options or {}
        )
        backend = RankedBackend(part)
        try:
            yield backend
        finally:
            backend.close()
            del backend
            self.tidy()

    # ---------------------------------------------------------------- measuring
    def wait(self) -> None:
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize()

    def tidy(self) -> None:
        torch.use_deterministic_algorithms(False)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def seconds(self, work: Callable[[], Any], repeats: int = 0) -> float:
        """Median, after one that does not count."""
        work()
        return statistics.median(self.once(work) for _ in range(repeats or self.repeats))

    def once(self, work: Callable[[], Any]) -> float:
        return once(work, self.wait)

    def timed_step(self, step: Callable[[], Any]) -> Row:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        row = self.rates(self.seconds(step))
        if self.device.type == "cuda":
            row["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
        return row

    def rates(self, seconds: float) -> Row:
        tokens = self.capacity * self.size.micros
        row: Row = {"step_s": round(seconds, 4), "tokens_per_s": round(tokens / seconds)}
        if self.device.type == "cuda":
            peak = next((rate for name, rate in PEAK.items() if name in torch.cuda.get_device_name(0)), None)
            if peak is not None:
                row["mfu"] = round(self.flops() / seconds / peak, 4)
        return row

    def flops(self) -> float:
        """Of one step, forward and backward, as it is usually counted: 6 for each weight that a token meets, the head
        for trained tokens alone, and causal attention; nothing for what is computed again."""
        size = self.size
        tokens = self.capacity * size.micros
        head = size.vocab * size.hidden
        trained = size.rows * size.micros * (size.length + 1 - size.prompt)
        attention = 6 * size.layers * size.heads * size.head_dim * size.length * tokens
        return 6.0 * ((self.n_parameters - head) * tokens + head * trained) + attention


# ---------------------------------------------------------------- right?
def attention(bench: Bench) -> Iterator[Row]:
    device = bench.device
    model: Any = AutoModelForCausalLM.from_pretrained(bench.folder, dtype=torch.bfloat16)
    model = model.to(device).eval()
    rng = np.random.default_rng(3)
    low, high = bench.size.prompt + 2, bench.size.length
    flat = flatten(bench.batch(rng.integers(low, high, 2 * bench.size.rows).tolist()).samples)
    rows, found = np.arange(len(flat.fed)), []
    for is_packed in (False, True):
        if is_packed:
            packing.use_in(model)
            micros = packed_micro_batches(flat, rows, bench.capacity, device)
        else:
            micros = list(micro_batches(flat, rows, bench.capacity, device))
        logprobs = torch.empty(len(flat.targets), device=device)
        model.zero_grad(set_to_none=True)
        for micro in micros:
            now = token_logprobs(model, micro)
            logprobs[torch.from_numpy(micro.tokens).to(device)] = now.logprobs.detach()
            now.logprobs.sum().div(len(flat.targets)).backward()
        norm = torch.nn.utils.get_total_norm([each.grad for each in model.parameters()])
        found.append((logprobs, float(norm), sum(micro.ids.numel() for micro in micros)))
    padded, packed = found
    yield {
        "max_logprob_difference": round((padded[0] - packed[0]).abs().max().item(), 5),
        "mean_logprob_difference": round((padded[0] - packed[0]).abs().mean().item(), 6),
        "grad_norm": [round(padded[1], 5), round(packed[1], 5)],
        "tokens_fed": [padded[2], packed[2]],
        "half_precision_varlen": device.type == "cuda",
        "ok": abs(padded[1] - packed[1]) <= 2e-2 * padded[1],
    }
    del model
    bench.tidy()


def lean(bench: Bench) -> Iterator[Row]:
    """Half-precision logits [8192, vocabulary]: forward and backward; the floor is one copy of them each way."""
    from engine.algorithms.lean import LeanLogprobs, lean_logprobs

    rows, device = (8192 if bench.device.type == "cuda" else 64), bench.device
    logits = (torch.randn(rows, bench.size.vocab, device=device) * 4).bfloat16()
    targets = torch.randint(0, bench.size.vocab, (rows,), device=device)
    weights, found = torch.randn(rows, device=device), {}
    for name, function in (("triton", lean_logprobs), ("torch", LeanLogprobs.apply)):
        own, taken = logits.clone().requires_grad_(), []
        for _ in range(6):
            own.grad = None
            bench.wait()
            began = time.perf_counter()
            logprobs, entropy = function(own, targets, 1.0)
            (logprobs * weights).sum().backward()
            bench.wait()
            taken.append(time.perf_counter() - began)
        assert own.grad is not None
        found[name] = logprobs.detach(), entropy, own.grad, statistics.median(taken[1:])
    bench.wait()
    began = time.perf_counter()
    for _ in range(2):
        logits.clone()
    bench.wait()
    floor, (triton, plain) = time.perf_counter() - began, (found["triton"], found["torch"])
    apart = (triton[2].float() - plain[2].float()).abs() / plain[2].float().abs().clamp(min=1e-6)
    yield {
        "rows": rows,
        "triton_ms": round(1e3 * triton[3], 2),
        "torch_ms": round(1e3 * plain[3], 2),
        "two_copies_ms": round(1e3 * floor, 2),
        "logprobs_differ": float((triton[0] - plain[0]).abs().max()),
        "entropies_differ": float((triton[1] - plain[1]).abs().max()),
        "gradients_differ": float(apart.max()),
        "ok": bool(apart.max() <= 2**-7 and (triton[0] - plain[0]).abs().max() < 1e-4),
    }


def equal(bench: Bench) -> Iterator[Row]:
    batch = bench.even_batch()
    torch_step = TorchBackend(bench.folder, bench.settings()).step(batch)
    bench.tidy()
    with bench.fsdp2() as backend:
        ours = backend.step(batch)
    worst = 0.0
    for name in ("loss", "grad_norm", "entropy"):
        difference = abs(ours[name] - torch_step[name]) / max(abs(torch_step[name]), 1e-9)
        worst = max(worst, difference if name != "loss" else 0.0)
        yield {name: ours[name], "torch": torch_step[name], "relative_difference": float(f"{difference:.3g}")}
    held = []
    for _ in range(2):  # replay asks for the same bits
        with bench.fsdp2() as backend:
            for _ in range(2):
                backend.step(batch)
            held.append(digest(backend.weights()))
    yield {"same_bits_again": held[0] == held[1], "ok": held[0] == held[1]}
    loss = abs(ours["loss"] - torch_step["loss"]) / max(abs(torch_step["loss"]), 1e-9)
    yield {"ok": max(worst, loss) <= 2e-2, "bar": 2e-2}


# ---------------------------------------------------------------- fast?
def step(bench: Bench) -> Iterator[Row]:
    batch = bench.even_batch()
    for is_deterministic in (True, False):
        yield from _beside_plain(bench, batch, is_deterministic=is_deterministic)
    with bench.fsdp2({"activation_checkpointing": True}) as backend:
        row = bench.timed_step(lambda: backend.step(batch))
    yield {"step": "product, recomputed activations", "deterministic": True, **row}


def _beside_plain(bench: Bench, batch: TrainBatch, *, is_deterministic: bool) -> Iterator[Row]:
    """The product and both plain steps in turns, so that what else the host does meets them alike."""
    taken: dict[str, list[float]] = {}
    rows: dict[str, Row] = {}
    with bench.fsdp2(deterministic=is_deterministic) as backend:
        plains = {name: Plain(bench, in_bfloat16=name == "bfloat16") for name in ("autocast", "bfloat16")}
        steps: dict[str, Callable[[TrainBatch], Any]] = {"product": backend.step}
        steps |= {f"plain {name}": plain.step for name, plain in plains.items()}
        for number in range(bench.repeats + 2):
            for name, take in steps.items():
                if bench.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                seconds = bench.once(lambda take=take: take(batch))
                if number == 1 and bench.device.type == "cuda":  # beside what it holds between steps
                    more = torch.cuda.max_memory_allocated() - before
                    rows[name] = {"more_in_a_step_gb": round(more / 1e9, 2)}
                if number > 1:
                    taken.setdefault(name, []).append(seconds)
        del plains, steps, take
    best = min(statistics.median(each) for name, each in taken.items() if name != "product")
    for name, seconds in taken.items():
        yield {
            "step": name,
            "deterministic": is_deterministic,
            **bench.rates(statistics.median(seconds)),
            "least_s": round(min(seconds), 4),
            "most_s": round(max(seconds), 4),
            **rows.get(name, {}),
        }
    ratio = best / statistics.median(taken["product"])
    yield {
        "of_the_better_plain_step": round(ratio, 4),
        "deterministic": is_deterministic,
        "ok": ratio >= 0.95,
        "bar": 0.95,
    }


class Plain:
    """The same step in plain PyTorch: no sharding, no packing, no telemetry. PPO-clip, AdamW, clipping of the norm."""

    def __init__(self, bench: Bench, *, in_bfloat16: bool) -> None:
        self.bench, self.in_bfloat16 = bench, in_bfloat16
        dtype = torch.bfloat16 if in_bfloat16 else torch.float32
        model: Any = AutoModelForCausalLM.from_pretrained(bench.folder, dtype=dtype)
        self.model = model.to(bench.device).eval()
        self.computing = list(self.model.parameters())
        self.masters = self.computing
        if in_bfloat16:
            self.masters = [each.detach().float() for each in self.computing]
            self.gradients = [torch.zeros_like(each) for each in self.masters]
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def step(self, batch: TrainBatch) -> float:
        size, device = self.bench.size, self.bench.device
        n_tokens = sum(int(sample.loss_mask.sum()) for sample in batch.samples)
        total = torch.zeros((), device=device)
        for at in range(0, len(batch.samples), size.rows):
            samples = batch.samples[at : at + size.rows]
            loss = self._loss(samples, n_tokens)
            loss.backward()
            total += loss.detach()
            if self.in_bfloat16:
                FOREACH._foreach_add_(self.gradients, [each.grad for each in self.computing])
                self.model.zero_grad(set_to_none=True)
        if self.in_bfloat16:
            for master, gradient in zip(self.masters, self.gradients, strict=True):
                master.grad = gradient
        norm = torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        result = float(total)
        if not math.isfinite(result) or not math.isfinite(float(norm)):
            raise ValueError("not finite")
        self.optimizer.step()
        if self.in_bfloat16:
            FOREACH._foreach_zero_(self.gradients)
            with torch.no_grad():
                FOREACH._foreach_copy_(self.computing, self.masters)
        else:
            self.optimizer.zero_grad(set_to_none=True)
        return result

    def _loss(self, samples: list[TrainSample], n_tokens: int) -> torch.Tensor:
        size, device = self.bench.size, self.bench.device
        ids = torch.from_numpy(
            np.stack(
                [np.concatenate([each.payload.prompt_ids, each.payload.response_ids]) for each in samples]
            )
        ).to(device, torch.int64)
        behaviour = torch.from_numpy(np.stack([each.payload.logprobs for each in samples])).to(device)
        advantages = torch.tensor([each.advantage for each in samples], device=device)[:, None]
        count = behaviour.shape[1]
        with torch.autocast(device.type, torch.bfloat16, enabled=not self.in_bfloat16):
            logits = self.model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=count).logits
        logp = torch.log_softmax(logits.float(), -1)
        logprobs = logp.gather(-1, ids[:, -count:, None])[..., 0]
        ratio = (logprobs - behaviour).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        del size
        return -gain.sum() / n_tokens


def mixed(bench: Bench) -> Iterator[Row]:
    """Response lengths as they come in practice: lognormal, a few long ones."""
    rng = np.random.default_rng(11)
    low, high = bench.size.prompt + 2, 2 * bench.size.length
    lengths = np.clip(
        rng.lognormal(math.log(bench.size.length / 3), 0.8, 2 * bench.size.rows * bench.size.micros),
        low,
        high,
    )
    batch = bench.batch(lengths.astype(int).tolist())
    fed, rates = int(flatten(batch.samples).fed.sum()), {}
    for is_packed in (False, True):
        with bench.fsdp2(packing=is_packed) as backend:
            shown: list[dict[str, float]] = []
            seconds = bench.seconds(
                lambda backend=backend, shown=shown: shown.append(backend.step(batch)), repeats=3
            )
        rates[is_packed] = fed / seconds
        yield {
            "packed": is_packed,
            "step_s": round(seconds, 4),
            "tokens_per_s": round(fed / seconds),
            "padding": round(1 - fed / shown[-1]["n_padded_tokens"], 4),
            "rows": len(batch.samples),
        }
    yield {"packed_beside_padded": round(rates[True] / rates[False], 3)}


# ---------------------------------------------------------------- out of the trainer
def export(bench: Bench) -> Iterator[Row]:
    with bench.fsdp2() as backend:
        held: list[Any] = []

        def take() -> None:
            held[:] = [backend.weights()]

        take()
        is_cuda = bench.device.type == "cuda"
        before = torch.cuda.memory_allocated() if is_cuda else 0
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
        seconds = bench.seconds(take, repeats=2 * bench.repeats)
        nbytes = 2 * bench.n_parameters
        yield {
            "weights_s": round(seconds, 4),
            "gb_per_s": round(nbytes / seconds / 1e9, 2),
            "gb": round(nbytes / 1e9, 3),
            "rooms": backend._rooms.made,
            "device_extra_gb": round((torch.cuda.max_memory_allocated() - before) / 1e9, 3) if is_cuda else 0,
        }
        held.clear()
    there = torch.empty(nbytes, dtype=torch.uint8, device=bench.device)
    here = torch.empty(nbytes, dtype=torch.uint8, pin_memory=bench.device.type == "cuda")
    copy = bench.seconds(lambda: here.copy_(there, non_blocking=True))
    yield {"pinned_copy_gb_per_s": round(nbytes / copy / 1e9, 2)}
    yield {"of_the_copy": round(copy / seconds, 4), "ok": copy / seconds >= 0.6, "bar": 0.6}


def where(bench: Bench) -> Iterator[Row]:
    """Kernels by the time that they take, of one step each, and where this process waits for the device."""
    batch = bench.even_batch()
    with bench.fsdp2() as backend:
        yield {"step": "product", "kernels_ms": _kernels(bench, lambda: backend.step(batch))}
        if bench.device.type == "cuda":
            yield {"step": "product", "waits": _waits(lambda: backend.step(batch))}
    for name in ("autocast", "bfloat16"):
        plain_step = Plain(bench, in_bfloat16=name == "bfloat16").step
        yield {"step": f"plain {name}", "kernels_ms": _kernels(bench, lambda take=plain_step: take(batch))}
        del plain_step
        bench.tidy()


def _kernels(bench: Bench, step: Callable[[], Any]) -> dict[str, float]:
    step()
    with torch.profiler.profile() as profile:
        step()
        bench.wait()
    on_device = bench.device.type != "cpu"

    def ms(event: Any) -> float:
        return (event.self_device_time_total if on_device else event.self_cpu_time_total) / 1e3

    found = [each for each in profile.key_averages() if not on_device or "CUDA" in str(each.device_type)]
    top = sorted(found, key=ms, reverse=True)[:14]
    return {f"{each.key[:60]} ×{each.count}": round(ms(each), 2) for each in top} | {
        "all": round(sum(map(ms, found)), 2)
    }


def _waits(step: Callable[[], Any]) -> dict[str, int]:
    """Lines that make the CPU wait for the device, and how often they do so in a step."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return dict(Counter(f"{'/'.join(Path(each.filename).parts[-2:])}:{each.lineno}" for each in caught))


def save(bench: Bench) -> Iterator[Row]:
    with bench.fsdp2() as backend, tempfile.TemporaryDirectory() as name:
        backend.step(bench.batch([bench.size.length] * 2))
        began = time.perf_counter()
        write = backend.snapshot()
        copied = time.perf_counter() - began
        began = time.perf_counter()
        write(Path(name))
        yield {
            "blocked_s": round(copied, 3),
            "written_s": round(time.perf_counter() - began, 3),
            "gb": round(
                sum(each.stat().st_size for each in Path(name).rglob("*") if each.is_file()) / 1e9, 3
            ),
        }


# ---------------------------------------------------------------- all
def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts: dict[str, Callable[[Bench], Iterator[Row]]] = {
        "attention": attention, "lean": lean, "equal": equal, "step": step, "export": export, "mixed": mixed,
        "save": save, "where": where,
    }  # fmt: skip
    parser.add_argument("--only", nargs="+", choices=list(parts), default=list(parts))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--limit", type=float, default=235.0, help="seconds in all")
    args = parser.parse_args()
    transformers_logging.disable_progress_bar()
    began, failed = time.monotonic(), 0
    out = Path(os.environ["OUT"]) / "fsdp2_step.jsonl" if os.environ.get("OUT") else None
    is_judged = args.device != "cpu" and not args.small  # bars of speed mean nothing elsewhere

    def say(row: Row) -> None:
        line = json.dumps({**row, "at_s": round(time.monotonic() - began, 1)})
        print(line, flush=True)
        if out is not None:
            with open(out, "a", encoding="utf-8") as file:
                file.write(line + "\n")

    name = torch.cuda.get_device_name(0) if args.device.startswith("cuda") else "cpu"
    say({"what": "machine", "torch": torch.__version__, "device": name, "load": os.getloadavg()[0]})
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args.device, Path(folder), small=args.small)
        say(
            {
                "what": "model",
                "parameters": bench.n_parameters,
                "tokens_of_a_step": bench.capacity * bench.size.micros,
            }
        )
        for part in args.only:
            left = args.limit - (time.monotonic() - began)
            if left < 15:
                say({"part": part, "left_out": f"only {left:.0f} s were left"})
                continue
            try:
                for row in parts[part](bench):
                    say({"part": part, **row})
                    failed |= row.get("ok") is False and (is_judged or part in ("attention", "equal"))
            except Exception as error:
                failed = 1
                traceback.print_exc(file=sys.stderr)
                say({"part": part, "FAILED": f"{type(error).__name__}: {str(error)[:1500]}"})
                bench.tidy()
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
