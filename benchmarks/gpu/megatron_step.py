"""The megatron trainer on one CUDA device: is it the torch trainer's step, are its weights Hugging Face's, how fast?

    model folder made here ─► MegatronPart (NCCL, world size 1, bf16) ─► log-probs, steps, weights, checkpoints
                          └─► TorchBackend, Hugging Face's forward: what it is compared with

One call of about three minutes; prints one JSON object a line, and a short table last. Needs torch with CUDA,
megatron-core, transformers, msgspec, zstandard. No network.

    PYTHONPATH=. python benchmarks/gpu/megatron_step.py [--only small large] [--samples 64] [--length 1024]
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine.algorithms.logprobs import flatten, micro_batches, token_logprobs
from engine.interfaces import TrainBatch, TrainSample
from engine.trainer.parts import PartSettings
from engine.trainer.plan import plan_step
from engine.trainer.rank import Rank
from engine.trainer.ranks import ProcessGroup
from engine.trainer.torch_backend import TorchBackend
from engine.trainer.torch_settings import TorchSettings
from engine.weights.store import digest
from streams.trajectory import Payload

ROWS: list[dict[str, Any]] = []
VOCABULARY = 151_936
DENSE_BF16_FLOPS = 989e12  # of an H100 or H200, by its data sheet


def qwen3(folder: Path, *, hidden: int, layers: int, heads: int, vocab: int, dtype: torch.dtype) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=128 if hidden >= 1024 else hidden // heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    with torch.device("cuda"):
        model: Any = Qwen3ForCausalLM(config)
        model = model.to(dtype)
    model.save_pretrained(folder)
    return folder


def batch(samples: int, length: int, vocab: int, seed: int, *, equal: bool = False) -> TrainBatch:
    """`equal`: each sample has `length` tokens, else half of it or more."""
    rng = np.random.default_rng(seed)
    made = []
    for index in range(samples):
        count = length - 8 if equal else int(rng.integers(length // 2, length))
        payload = Payload(
            rng.integers(4, vocab, 8).astype(np.int32),
            rng.integers(4, vocab, count).astype(np.int32),
            np.zeros(count, np.float32),
            np.ones(count, bool),
            [(1, 0, count)],
        )
        made.append(TrainSample(f"0-{index}/0/0", payload, payload.loss_mask, float(rng.normal() + 0.5)))
    return TrainBatch(1, 0, seed, made)


def recorded(batch: TrainBatch, logprobs: np.ndarray) -> TrainBatch:
    """The same batch with these as its behaviour log-probs: ratios are near 1, as they are in a run."""
    samples, at = [], 0
    for sample in batch.samples:
        count = len(sample.payload.response_ids)
        payload = sample.payload._replace(logprobs=logprobs[at : at + count].astype(np.float32))
        samples.append(sample._replace(payload=payload))
        at += count
    return batch._replace(samples=samples)


@torch.no_grad()
def hugging_face_logprobs(folder: Path, batch: TrainBatch, dtype: torch.dtype, tokens: int) -> np.ndarray:
    """A plain forward of the model in this type."""
    model: Any = Qwen3ForCausalLM.from_pretrained(folder, dtype=dtype)
    model = model.to("cuda").eval()
    flat = flatten(batch.samples)
    result = np.zeros(len(flat.targets), np.float32)
    for micro in micro_batches(flat, np.arange(len(flat.fed)), tokens, torch.device("cuda:0")):
        result[micro.tokens] = token_logprobs(model, micro).logprobs.cpu().numpy()
    return result


def megatron_logprobs(rank: Rank, batch: TrainBatch) -> np.ndarray:
    flat = flatten(batch.samples)
    result = np.zeros(len(flat.targets), np.float32)
    policy = rank.part.policy
    for micro, logprobs in policy.score(policy.micro_batches(flat, np.arange(len(flat.fed)))):
        result[micro.tokens] = logprobs.cpu().numpy()
    return result


def megatron(processes: ProcessGroup, folder: Path, **settings: Any) -> Rank:
    of_torch = TorchSettings(device="cuda:0", **settings)
    return Rank(PartSettings(backend="megatron", model=str(folder), torch=of_torch, options={}), processes)


def weights_of(rank: Rank) -> dict[str, torch.Tensor]:
    came = {name: tensor.cpu() for name, tensor in rank.part.weights()}
    of_meta = {id(rank.part.layout[name]): name for name in came}
    assert len(of_meta) == len(came)
    return came


def files_of(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def relative(ours: float, theirs: float) -> float:
    return abs(ours - theirs) / abs(theirs)


# ---------------------------------------------------------------- a small model in float32
def small_is_exact(processes: ProcessGroup, folder: Path) -> dict[str, Any]:
    """Log-probs, a step and its weights against Hugging Face and the torch trainer; the same bits twice."""
    one = batch(32, 48, 23, 0)
    rank = megatron(processes, folder, lr=1e-3, adam_eps=1e-3)
    theirs = hugging_face_logprobs(folder, one, torch.float32, 8192)
    ours = megatron_logprobs(rank, one)
    one = recorded(one, theirs)
    measured = rank.stepper.take(plan_step(one, rank.stepper.settings))
    torch_backend = TorchBackend(folder, TorchSettings(lr=1e-3, adam_eps=1e-3, device="cuda:0"))
    metrics = torch_backend.step(one)
    after = {name: tensor.cpu() for name, tensor in torch_backend.weights().items()}
    mine = weights_of(rank)
    worst = max(float((mine[name] - after[name]).abs().max()) for name in mine)
    again = megatron(processes, folder, lr=1e-3, adam_eps=1e-3)
    again.stepper.take(plan_step(one, again.stepper.settings))
    found = {
        "largest_logprob_difference": float(np.abs(ours - theirs).max()),
        "loss_relative": relative(measured.loss, metrics["loss"]),
        "grad_norm_relative": relative(measured.grad_norm, metrics["grad_norm"]),
        "largest_weight_difference": worst,
        "same_bits_twice": digest(weights_of(again)) == digest(mine),
    }
    assert found["largest_logprob_difference"] < 1e-4 and worst < 1e-4, found
    assert found["loss_relative"] < 1e-4 and found["grad_norm_relative"] < 1e-4, found
    assert found["same_bits_twice"], found
    return found


def small_checkpoint(processes: ProcessGroup, folder: Path) -> dict[str, Any]:
    """Saved after a step, loaded into another part: the next step gives the same bits."""
    first, second = batch(32, 48, 23, 1), batch(32, 48, 23, 2)
    with tempfile.TemporaryDirectory() as name:
        rank = megatron(processes, folder, lr=1e-3, dtype="bfloat16")
        rank.stepper.take(plan_step(first, rank.stepper.settings))
        rank.snapshot()(Path(name))
        other = megatron(processes, folder, lr=1e-3, dtype="bfloat16")
        other.load(Path(name), fresh_optimizer=False, optimizer_steps=1)
        at_load = digest(weights_of(other)) == digest(weights_of(rank))
        for each in (rank, other):
            each.stepper.take(plan_step(second, each.stepper.settings))
        after = digest(weights_of(other)) == digest(weights_of(rank))
    assert at_load and after, (at_load, after)
    return {"weights_bit_equal": at_load, "next_step_bit_equal": after}


# ---------------------------------------------------------------- 0.6B in bfloat16
class Large:
    """What the parts of the large model share: its folder, a batch, and what the torch trainer made of it."""

    def __init__(self, processes: ProcessGroup, folder: Path, samples: int, length: int) -> None:
        self.processes, self.folder = processes, folder
        self.few = batch(8, 512, VOCABULARY, 1)
        self.many = batch(samples, length, VOCABULARY, 2, equal=True)
        self.settings: dict[str, Any] = {"lr": 1e-6, "dtype": "bfloat16", "micro_batch_tokens": 16_384}
        self.behaviour = np.zeros(0, np.float32)
        self.theirs: dict[str, float] = {}
        self.rank: Any = None

    def hugging_face(self) -> dict[str, Any]:
        self.behaviour = hugging_face_logprobs(self.folder, self.few, torch.bfloat16, 16_384)
        self.few = recorded(self.few, self.behaviour)
        return {"mean_logprob": float(self.behaviour.mean())}

    def torch_trainer(self) -> dict[str, Any]:
        torch.cuda.reset_peak_memory_stats()
        backend = TorchBackend(self.folder, TorchSettings(device="cuda:0", **self.settings))
        self.theirs = backend.step(self.few)
        return {
            "loss": self.theirs["loss"],
            "grad_norm": self.theirs["grad_norm"],
            **timed(lambda: backend.step(self.many), self.many, self.folder),
        }

    def builds(self) -> dict[str, Any]:
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        self.rank = megatron(self.processes, self.folder, **self.settings)
        torch.cuda.synchronize()
        return {"seconds": time.perf_counter() - began, **memory()}

    def weights_round_trip(self) -> dict[str, Any]:
        before = files_of(self.folder, torch.bfloat16)
        out = weights_of(self.rank)
        different = [name for name in out if not torch.equal(out[name], before[name])]
        assert not different and len(out) >= len(before) - 1, different[:4]
        nbytes = sum(tensor.nbytes for tensor in out.values())
        room = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
        times = []
        for _ in range(3):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _, tensor in self.rank.part.weights():
                flat = tensor.contiguous().view(-1).view(torch.uint8)
                room[: flat.numel()].copy_(flat, non_blocking=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        bare = bare_copy(nbytes)
        return {
            "bit_equal": True,
            "tensors": len(out),
            "gib": nbytes / 2**30,
            "export_gib_per_s": nbytes / 2**30 / min(times),
            "bare_copy_gib_per_s": nbytes / 2**30 / bare,
            "share_of_bare_copy": bare / min(times),
        }

    def logprobs(self) -> dict[str, Any]:
        ours = megatron_logprobs(self.rank, self.few)
        difference = np.abs(ours - self.behaviour)
        found = {
            "tokens": len(ours),
            "mean_difference": float(difference.mean()),
            "largest_difference": float(difference.max()),
        }
        assert found["mean_difference"] < 0.02 and found["largest_difference"] < 0.5, found
        return found

    def step_against_torch(self) -> dict[str, Any]:
        measured = self.rank.stepper.take(plan_step(self.few, self.rank.stepper.settings))
        found = {
            "loss": measured.loss,
            "grad_norm": measured.grad_norm,
            "loss_relative": relative(measured.loss, self.theirs["loss"]),
            "grad_norm_relative": relative(measured.grad_norm, self.theirs["grad_norm"]),
        }
        assert found["loss_relative"] <= 2e-2 and found["grad_norm_relative"] <= 2e-2, found
        return found

    def throughput(self) -> dict[str, Any]:
        torch.cuda.reset_peak_memory_stats()

        def step() -> None:
            self.rank.stepper.take(plan_step(self.many, self.rank.stepper.settings))

        return timed(step, self.many, self.folder)


def timed(step: Callable[[], Any], of: TrainBatch, folder: Path) -> dict[str, Any]:
    """The second and third step."""
    step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / 2
    lengths = [len(each.payload.prompt_ids) + len(each.payload.response_ids) for each in of.samples]
    return {
        "tokens_per_s": sum(lengths) / seconds,
        "model_flops_utilisation": flops(folder, lengths) / seconds / DENSE_BF16_FLOPS,
        "step_seconds": seconds,
        "step_tokens": sum(lengths),
        **memory(),
    }


def flops(folder: Path, lengths: list[int]) -> float:
    """Of a step: 6 for each weight in a product and token, and causal attention's 6 · L · heads · head_dim · T²."""
    config: Any = Qwen3Config.from_pretrained(folder)
    heads = config.num_attention_heads * config.head_dim
    groups = config.num_key_value_heads * config.head_dim
    layer = config.hidden_size * (2 * heads + 2 * groups + 3 * config.intermediate_size)
    weights = config.num_hidden_layers * layer + config.vocab_size * config.hidden_size
    attention = 6 * config.num_hidden_layers * heads * sum(length**2 for length in lengths)
    return 6.0 * weights * sum(lengths) + attention


def memory() -> dict[str, float]:
    return {"peak_gb": torch.cuda.max_memory_allocated() / 1e9}


def bare_copy(nbytes: int) -> float:
    """Seconds of one copy of as many bytes to pinned memory, in pieces of 1 GiB."""
    piece = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    room = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    times = []
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for at in range(0, nbytes, 1 << 30):
            count = min(1 << 30, nbytes - at)
            room[:count].copy_(piece[:count], non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times)


# ---------------------------------------------------------------- the parts in turn
def check(name: str, function: Callable[[], dict[str, Any]]) -> None:
    began = time.perf_counter()
    try:
        row: dict[str, Any] = {"part": name, "ok": True, **function()}
    except Exception as error:
        traceback.print_exc()
        row = {"part": name, "ok": False, "error": f"{type(error).__name__}: {str(error)[:300]}"}
    row["part_seconds"] = round(time.perf_counter() - began, 2)
    ROWS.append(row)
    print(json.dumps(row), flush=True)
    gc.collect()
    torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=["small", "large"], default=["small", "large"])
    parser.add_argument("--samples", type=int, default=64, help="of the timed step")
    parser.add_argument("--length", type=int, default=1024, help="tokens of each of them")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    from importlib.metadata import version

    names = {
        "torch": torch.__version__,
        "megatron": version("megatron-core"),
        "device": torch.cuda.get_device_name(0),
    }
    print(json.dumps(names), flush=True)
    processes = ProcessGroup(0, 1, torch.device("cuda:0"), None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "small" in args.only:
            shape: dict[str, Any] = {"hidden": 64, "layers": 2, "heads": 4, "vocab": 23}
            small = qwen3(folder / "small", **shape, dtype=torch.float32)
            check("small, float32: exact", lambda: small_is_exact(processes, small))
            check("small: checkpoint", lambda: small_checkpoint(processes, small))
        if "large" in args.only:
            shape = {"hidden": 1024, "layers": 28, "heads": 16, "vocab": VOCABULARY}
            made = qwen3(folder / "large", **shape, dtype=torch.bfloat16)
            large = Large(processes, made, args.samples, args.length)
            check("0.6B: Hugging Face's log-probs", large.hugging_face)
            check("0.6B: torch trainer", large.torch_trainer)
            check("0.6B: builds and loads", large.builds)
            check("0.6B: weights round trip", large.weights_round_trip)
            check("0.6B: log-probs against Hugging Face", large.logprobs)
            check("0.6B: step against the torch trainer", large.step_against_torch)
            check("0.6B: throughput", large.throughput)
    print(f"\n{'part':40s} {'':7s} figures")
    for row in ROWS:
        rest = {k: v for k, v in row.items() if k not in ("part", "ok")}
        print(f"{row['part']:40s} {'ok' if row['ok'] else 'FAILED':7s} {figures(rest)}")
    return int(any(not row["ok"] for row in ROWS))


def figures(row: dict[str, Any]) -> str:
    def text(value: Any) -> str:
        if not isinstance(value, float):
            return str(value)
        return f"{value:,.0f}" if math.isfinite(value) and abs(value) >= 1000 else f"{value:.3g}"

    return ", ".join(f"{name} {text(value)}" for name, value in row.items())


if __name__ == "__main__":
    raise SystemExit(main())
