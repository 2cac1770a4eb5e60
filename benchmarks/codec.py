"""How many bytes a token costs in the log, and how fast trajectories are written and opened.

Data: token ids of a 32,000-entry BPE trained on the Python standard library's source, lengths lognormal (median
1,800 and 8,000 response tokens), log-probs shaped like an LLM's (55 % of tokens nearly certain). Beside every figure
the same bytes go through bare zstandard level 1, in the same run, round by round; the ratio is what to read on a
shared machine.

    python benchmarks/codec.py [--samples 64] [--rounds 9] [--json]
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import statistics
import time
from pathlib import Path

import msgspec
import numpy as np
import zstandard

from streams import codec, trajectory
from streams.codec import Known
from streams.columns import LogprobFormat
from streams.events import TrajectoryFinished
from streams.log import Record
from streams.trajectory import SampleData


@functools.cache
def token_ids(vocab: int = 32_000, megabytes: int = 6) -> np.ndarray:
    """Ids of a byte-level BPE over stdlib source text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    texts, size = [], 0
    for path in sorted(Path(os.__file__).parent.rglob("*.py")):
        if "site-packages" in path.parts or size > megabytes << 20:
            continue
        texts.append(path.read_text("utf-8", "ignore"))
        size += len(texts[-1])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    return np.concatenate([np.array(each.ids, np.int32) for each in tokenizer.encode_batch(texts)])


def llm_logprobs(rng: np.random.Generator, count: int) -> np.ndarray:
    """Half the tokens almost certain, a fifth truly open; float32 with full mantissas."""
    kind = rng.random(count)
    sure = np.exp(rng.uniform(np.log(1e-8), np.log(1e-2), count))
    open_ = np.where(
        kind < 0.8, np.exp(rng.uniform(np.log(1e-2), np.log(0.3), count)), rng.uniform(0.2, 0.8, count)
    )
    miss = np.where(kind < 0.55, sure, open_)
    tail = np.log(miss) + np.log(rng.beta(1.5, 2.0, count) + 1e-9)
    return np.where(rng.random(count) >= miss, np.log1p(-miss), tail).astype(np.float32)


def samples(count: int, vocab: int, median: int) -> list[SampleData]:
    rng = np.random.default_rng(0)
    ids = token_ids()
    if vocab > 32_000:  # the same frequency ranks, spread over a larger vocabulary
        ids = (ids.astype(np.int64) * vocab // 32_000).astype(np.int32)
    made = []
    for index in range(count):
        length = int(np.clip(rng.lognormal(math.log(median), 0.8), 256, 8 * median))
        prompt = int(rng.integers(100, 700))
        at = int(rng.integers(0, len(ids) - length - prompt))
        mask = np.ones(length, bool)
        for _ in range(int(rng.integers(0, 4))):  # tool output
            start = int(rng.integers(0, length))
            mask[start : start + int(rng.integers(20, 200))] = False
        half = length // 2
        made.append(
            SampleData(
                uid=f"0-{index}/0/0",
                group_id=f"0-{index}",
                seq=index,
                index=0,
                attempt=0,
                n_samples=8,
                task_offset=index,
                prompt_ids=ids[at : at + prompt],
                response_ids=ids[at + prompt : at + prompt + length],
                logprobs=llm_logprobs(rng, length),
                loss_mask=mask,
                versions=[(1, index, half), (1, index + 1, length - half)],
                finish_reason="stop",
                metadata={"source": "stdlib"},
                engine="rollout-0",
            )
        )
    return made


def timed(function, items) -> float:
    """Seconds of this process. Results are dropped one by one, as in a stream: keeping them would time page faults."""
    began = time.process_time()
    for item in items:
        function(item)
    return time.process_time() - began


def measure(name: str, data: list[SampleData], form: LogprobFormat, rounds: int) -> dict:
    n_tokens = sum(len(each.response_ids) for each in data)

    def write(sample: SampleData):
        return codec.encode(trajectory.pack(sample, logprob_format=form), producer="bench")

    def open_(record: Record):
        known = codec.decode(record)
        assert isinstance(known, Known) and isinstance(known.event, TrajectoryFinished)
        return trajectory.open_payload(known.event)

    plain = [msgspec.msgpack.encode(trajectory.pack(each, logprob_format=form)) for each in data]
    records = [Record("t", 0, 0, 0, made.headers, made.value) for made in map(write, data)]
    compress = zstandard.ZstdCompressor(level=1).compress
    decompress = zstandard.ZstdDecompressor().decompress
    packed = [compress(value) for value in plain]
    times: dict[str, list[float]] = {"write": [], "zstd": [], "open": [], "unzstd": []}
    repeat = max(1, 400_000 // n_tokens)
    for _ in range(rounds):  # side by side, so that a slow moment of the machine hits both
        times["write"].append(timed(write, data * repeat))
        times["zstd"].append(timed(compress, plain * repeat))
        times["open"].append(timed(open_, records * repeat))
        times["unzstd"].append(timed(decompress, packed * repeat))
    for record, sample in zip(records, data, strict=True):
        payload = open_(record)
        assert np.array_equal(payload.response_ids, sample.response_ids)
        error = np.abs(payload.logprobs - np.where(sample.loss_mask, sample.logprobs, 0)).max()
        assert error <= (0.0 if form == "float32" else 5e-4), error
    ratio = lambda ours, bare: statistics.median(b / o for o, b in zip(times[ours], times[bare], strict=True))  # noqa: E731
    speed = lambda key: n_tokens * repeat / statistics.median(times[key]) / 1e6  # noqa: E731
    return {
        "data": name,
        "logprobs": form,
        "bytes_per_token": sum(len(record.value) for record in records) / n_tokens,
        "encode_mtok_s": speed("write"),
        "zstd1_mtok_s": speed("zstd"),
        "encode_vs_zstd": ratio("write", "zstd"),
        "decode_mtok_s": speed("open"),
        "unzstd_mtok_s": speed("unzstd"),
        "decode_vs_zstd": ratio("open", "unzstd"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    for name, vocab, median in (
        ("32k, 1,800 tokens", 32_000, 1800),
        ("32k, 8,000 tokens", 32_000, 8000),
        ("152k, 8,000 tokens", 151_936, 8000),
    ):
        data = samples(args.samples, vocab, median)
        rows += [measure(name, data, "float32", args.rounds), measure(name, data, "fixed1024", args.rounds)]
    if args.json:
        print(json.dumps(rows))
        return
    print(
        f"{'vocab, median':18s} {'log-probs':10s} {'B/token':>8s} {'encode':>8s} {'zstd-1':>8s} {'ratio':>6s}",
        end="",
    )
    print(f" {'decode':>8s} {'unzstd':>8s} {'ratio':>6s}   (Mtok/s of one core)")
    for row in rows:
        print(
            f"{row['data']:18s} {row['logprobs']:10s} {row['bytes_per_token']:8.2f} {row['encode_mtok_s']:8.1f} "
            f"{row['zstd1_mtok_s']:8.1f} {row['encode_vs_zstd']:6.2f} {row['decode_mtok_s']:8.1f} "
            f"{row['unzstd_mtok_s']:8.1f} {row['decode_vs_zstd']:6.2f}"
        )


if __name__ == "__main__":
    main()
