"""The torch engines and the torch trainer on one CUDA device: are they right, are they deterministic, how fast?

One call of a few minutes; prints a short table last. Needs torch with CUDA, transformers, msgspec, zstandard.

    PYTHONPATH=. python benchmarks/gpu/cuda_smoke.py [--large] [--demo]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine.interfaces import Sampling, TrainBatch, TrainSample
from engine.tasks import GUESS, tiny
from engine.trainer.torch_backend import TorchBackend
from engine.trainer.torch_settings import TorchSettings
from engine.weights.store import WeightStore, digest
from streams.trajectory import Payload

ROWS: list[tuple[str, str, str]] = []


def qwen3(folder: Path, *, hidden: int, layers: int, heads: int, vocab: int) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=hidden // heads if hidden < 1024 else 128,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tiny.build_tokenizer(GUESS).save_pretrained(folder)
    return folder


def batch(samples: int, length: int, vocab: int, seed: int) -> TrainBatch:
    rng = np.random.default_rng(seed)
    made = []
    for index in range(samples):
        count = int(rng.integers(length // 2, length))
        payload = Payload(
            rng.integers(4, vocab, 8).astype(np.int32),
            rng.integers(4, vocab, count).astype(np.int32),
            -rng.random(count).astype(np.float32),
            np.ones(count, bool),
            [(1, 0, count)],
        )
        made.append(TrainSample(f"0-{index}/0/0", payload, payload.loss_mask, float(rng.normal())))
    return TrainBatch(1, 0, seed, made)


def trainer_digests(folder: Path, device: str, **settings: Any) -> list[str]:
    backend = TorchBackend(folder, TorchSettings(lr=1e-3, device=device, **settings))
    digests = []
    for step in range(3):
        backend.step(batch(32, 48, 23, step))
        digests.append(digest(backend.weights()))
    return digests


def trainer_is_deterministic(folder: Path) -> str:
    first, second = trainer_digests(folder, "cuda"), trainer_digests(folder, "cuda")
    assert first == second, f"digests differ: {first} {second}"
    return "3 steps twice: equal digests"


def trainer_agrees_with_the_cpu(folder: Path) -> str:
    weights = {}
    for device in ("cpu", "cuda"):
        backend = TorchBackend(folder, TorchSettings(lr=1e-3, adam_eps=1e-3, device=device))
        backend.step(batch(32, 48, 23, 0))
        weights[device] = {name: value.detach().cpu().double() for name, value in backend.weights().items()}
    worst = max(float((weights["cpu"][n] - weights["cuda"][n]).abs().max()) for n in weights["cpu"])
    assert worst < 1e-4, worst
    return f"largest weight difference after one step {worst:.1e}"


def engine_is_right(folder: Path, kind: str) -> str:
    """Log-probs against a plain forward under the same weights; a weight update in between; speed."""
    return asyncio.run(_engine(folder, kind, "float32", requests=128, new_tokens=32, check=True))


def engine_is_fast(folder: Path, kind: str) -> str:
    return asyncio.run(_engine(folder, kind, "bfloat16", requests=256, new_tokens=256, check=False))


async def _engine(folder: Path, kind: str, dtype: str, *, requests: int, new_tokens: int, check: bool) -> str:
    from engine.rollout.batched import BatchedEngine
    from engine.rollout.continuous import ContinuousEngine

    common: dict[str, Any] = {"dtype": dtype, "device": "cuda", "attn_implementation": "sdpa", "seed": 5}
    if kind == "continuous":
        engine: Any = ContinuousEngine(folder, temperature=1.0, max_concurrency=requests, **common)
    else:
        engine = BatchedEngine(folder, **common)
    model: Any = Qwen3ForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model = model.to("cuda").eval()
    with tempfile.TemporaryDirectory() as name:
        store = WeightStore(Path(name) / "weights", keep=4)
        try:
            published = store.publish(dict(model.state_dict()), epoch=1, version=0, step=0)
            stall = await engine.update(published, store.path(1, 0))
            vocab = model.config.vocab_size
            prompts = [
                [1, *np.random.default_rng(i).integers(4, vocab, 15).tolist()] for i in range(requests)
            ]
            torch.cuda.synchronize()
            began = time.perf_counter()
            completions = await asyncio.gather(
                *(
                    engine.generate(ids, Sampling(new_tokens), request_id=f"r{index}")
                    for index, ids in enumerate(prompts)
                )
            )
            seconds = time.perf_counter() - began
        finally:
            await engine.close()
    tokens = sum(len(each.ids) for each in completions)
    assert tokens == requests * new_tokens, (tokens, requests * new_tokens)
    text = f"{tokens / seconds:,.0f} tokens/s, update stall {stall:.3f} s"
    if check:
        worst = 0.0
        with torch.no_grad():
            for ids, each in zip(prompts[:32], completions[:32], strict=True):
                row = torch.tensor([ids + each.ids.tolist()], device="cuda")
                logprobs = model(row).logits.float().log_softmax(-1)[0, len(ids) - 1 : -1]
                taken = logprobs.gather(1, row[0, len(ids) :, None])[:, 0].cpu().numpy()
                worst = max(worst, float(np.abs(taken - each.logprobs).max()))
        assert worst < 5e-5, worst
        text += f", largest log-prob difference {worst:.1e}"
    return text


def large_trainer(folder: Path, vocab: int) -> str:
    backend = TorchBackend(
        folder, TorchSettings(lr=1e-6, device="cuda", dtype="bfloat16", micro_batch_tokens=16_384)
    )
    one = batch(64, 1024, vocab, 1)
    backend.step(one)
    torch.cuda.synchronize()
    began = time.perf_counter()
    backend.step(one)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    tokens = sum(len(each.payload.response_ids) + 8 for each in one.samples)
    return f"{tokens / seconds:,.0f} tokens/s, {torch.cuda.max_memory_allocated() / 1e9:.1f} GB"


def demo(folder: Path) -> str:
    run = folder / "demo"
    began = time.perf_counter()
    command = [sys.executable, "-m", "engine.cli", "demo", "--plain", "--dir", str(run), "--max-steps", "100"]
    ended = subprocess.run(
        [*command, "--set", "model.device=cuda"], capture_output=True, text=True, timeout=280, check=False
    )
    assert ended.returncode == 0, ended.stderr[-1500:]
    audit = subprocess.run(
        [sys.executable, "-m", "engine.cli", "verify", str(run)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert audit.returncode == 0, audit.stdout[-1500:]
    summary = json.loads((run / "summary.json").read_text("utf-8"))
    return (
        f"reward {summary['first_reward']:.2f} to {summary['last_reward']:.2f}, verify clean, "
        f"{time.perf_counter() - began:.0f} s with start-up"
    )


def check(name: str, function: Callable[[], str]) -> None:
    try:
        ROWS.append((name, "ok", function()))
    except Exception as error:
        traceback.print_exc()
        ROWS.append((name, "FAILED", f"{type(error).__name__}: {str(error)[:160]}"))
    print(*ROWS[-1], sep=" | ", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--large", action="store_true", help="also a Qwen3 0.6B shape with random weights, in bf16"
    )
    parser.add_argument(
        "--demo", action="store_true", help="also 100 steps of the demo with model.device=cuda"
    )
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    print(torch.__version__, torch.cuda.get_device_name(0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small = qwen3(folder / "small", hidden=64, layers=2, heads=4, vocab=23)
        check("trainer, same bits twice", lambda: trainer_is_deterministic(small))
        check("trainer, against the CPU", lambda: trainer_agrees_with_the_cpu(small))
        check("engine batched, fp32", lambda: engine_is_right(small, "batched"))
        check("engine continuous, fp32", lambda: engine_is_right(small, "continuous"))
        if args.demo:
            check("demo, 100 steps", lambda: demo(folder))
        if args.large:
            vocab = 151_936
            large = qwen3(folder / "large", hidden=1024, layers=28, heads=16, vocab=vocab)
            check("engine batched, 0.6B bf16", lambda: engine_is_fast(large, "batched"))
            check("engine continuous, 0.6B bf16", lambda: engine_is_fast(large, "continuous"))
            check("trainer, 0.6B bf16", lambda: large_trainer(large, vocab))
    print(f"\n{'check':32s} {'':8s} figure")
    for row in ROWS:
        print(f"{row[0]:32s} {row[1]:8s} {row[2]}")
    return int(any(row[1] != "ok" for row in ROWS))


if __name__ == "__main__":
    raise SystemExit(main())
