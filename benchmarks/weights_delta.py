"""What a delta saves, and what making and applying it costs beside a full copy and beside zstandard of the whole.

Weights: tensors of the shapes of a small Qwen3 (bfloat16, about 190 MB), normal with a deviation of 0.02. A given share
of the elements, at random places, moves by one unit in the last place, as 88 to 90 % of the changed weights do at a
learning rate of 1e-6 (which changes 1.0 to 3.6 % of them a step). Everything goes to and from one folder (the page
cache), round by round in the same run. Times are those of the processor, over all threads: GB/s of one core, which a
busy machine does not distort much; the ratios are what to read. Digests are left out of encode and apply, and shown by
themselves: a full version needs them as well.

    python benchmarks/weights_delta.py [--changed 0.01 0.03 0.2] [--rounds 3] [--folder DIR] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from engine.weights import tensors as files
from engine.weights.delta import changed_in, open_delta
from engine.weights.delta_writer import State, write_delta
from engine.weights.tensors import RawTensor

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS, VOCABULARY = 512, 16, 8, 64, 1536, 16, 65_536


def shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        for name, shape in (
            ("input_layernorm", (HIDDEN,)),
            ("self_attn.q_proj", (HEADS * HEAD_DIM, HIDDEN)),
            ("self_attn.k_proj", (KV_HEADS * HEAD_DIM, HIDDEN)),
            ("self_attn.v_proj", (KV_HEADS * HEAD_DIM, HIDDEN)),
            ("self_attn.o_proj", (HIDDEN, HEADS * HEAD_DIM)),
            ("mlp.gate_proj", (INNER, HIDDEN)),
            ("mlp.up_proj", (INNER, HIDDEN)),
            ("mlp.down_proj", (HIDDEN, INNER)),
        ):
            found[f"model.layers.{layer}.{name}.weight"] = shape
    return found | {"model.norm.weight": (HIDDEN,)}


def random_weights(rng: np.random.Generator) -> dict[str, RawTensor]:
    """bfloat16 is the upper half of a float32."""
    return {
        name: RawTensor(
            "BF16",
            shape,
            (rng.standard_normal(shape, np.float32).ravel() * np.float32(0.02))
            .view("<u2")[1::2]
            .copy()
            .view(np.uint8),
        )
        for name, shape in shapes().items()
    }


def changed(weights: dict[str, RawTensor], share: float, rng: np.random.Generator) -> dict[str, RawTensor]:
    moved = {}
    for name, tensor in weights.items():
        bits = tensor.data.view("<u2").copy()
        places = rng.random(len(bits), np.float32) < share
        bits[places] += rng.choice(np.array([1, -1], np.int16), int(places.sum())).view(np.uint16)
        moved[name] = tensor._replace(data=bits.view(np.uint8))
    return moved


def state_of(contents: dict[str, RawTensor]) -> State:
    digests = files.content_digests(contents)
    return State(contents, digests, files.digest_of_parts(contents, digests))


def seconds(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


class Bench:
    def __init__(self, folder: Path, share: float, base: State, rng: np.random.Generator) -> None:
        self.base, self.new = base, state_of(changed(dict(base.contents), share, rng))
        self.delta, self.full, self.packed = (folder / name for name in ("delta", "full", "zstd"))
        self.held = {name: tensor.data.copy() for name, tensor in base.contents.items()}
        self.nbytes = sum(tensor.data.nbytes for tensor in base.contents.values())
        self.share = share

    def encode(self) -> None:
        with open(self.delta, "wb") as file:
            write_delta(file, self.base, self.new, epoch=1, version=2, base_version=1)

    def apply(self) -> None:
        delta = open_delta(self.delta)
        delta.overwrite({name: self.held[name] for name in changed_in(delta)})

    def write_full(self) -> None:
        with open(self.full, "wb") as file:
            files.write_file(file, self.new.contents, {})

    def read_full(self) -> None:
        for name, tensor in files.read_raw(self.full).items():
            self.held[name][:] = tensor.data

    def write_packed(self) -> None:
        packer = zstandard.ZstdCompressor(level=1)
        with open(self.packed, "wb") as file:
            for tensor in self.new.contents.values():
                frame = packer.compress(tensor.data.data)
                file.write(len(frame).to_bytes(8, "little") + frame)

    def read_packed(self) -> None:
        unpacker = zstandard.ZstdDecompressor()
        with open(self.packed, "rb") as file:
            for name in self.new.contents:
                frame = file.read(int.from_bytes(file.read(8), "little"))
                self.held[name][:] = np.frombuffer(unpacker.decompress(frame), np.uint8)

    def digest(self) -> None:
        files.digest_raw(self.new.contents)

    def run(self, rounds: int) -> dict[str, float]:
        steps = ("encode", "apply", "write_full", "read_full", "write_packed", "read_packed", "digest")
        taken: dict[str, list[float]] = {step: [] for step in steps}
        for _ in range(rounds):
            for step in steps:
                if step == "apply":
                    for name, tensor in self.base.contents.items():
                        self.held[name][:] = tensor.data
                taken[step].append(seconds(getattr(self, step)))
                if step == "apply":
                    for name, tensor in self.new.contents.items():
                        assert np.array_equal(self.held[name], tensor.data), name
        median = {step: statistics.median(times) for step, times in taken.items()}
        sizes = {name: path.stat().st_size for name, path in (("delta", self.delta), ("packed", self.packed))}
        ratio = {f"{a}_vs_{b}": median[b] / median[a] for a, b in RATIOS}
        return {
            "changed": self.share,
            "full_mb": self.nbytes / 1e6,
            "delta_mb": sizes["delta"] / 1e6,
            "packed_mb": sizes["packed"] / 1e6,
            "times_smaller_than_full": self.nbytes / sizes["delta"],
            "times_smaller_than_packed": sizes["packed"] / sizes["delta"],
            "bytes_per_change": sizes["delta"] / max(1, open_delta(self.delta).head.n_changed),
            **{f"{step}_gb_s": self.nbytes / 1e9 / median[step] for step in steps},
            **ratio,
        }


RATIOS = (
    ("encode", "write_full"),
    ("encode", "write_packed"),
    ("encode", "digest"),
    ("apply", "read_full"),
    ("apply", "read_packed"),
    ("apply", "digest"),
)


def show(row: dict[str, float]) -> str:
    """Four lines. Ratios of speed: 2.00 is twice as fast as the other."""
    return "\n".join(
        (
            f"{row['changed']:.0%} of the elements changed",
            f"  size    {row['delta_mb']:7.2f} MB of {row['full_mb']:.0f}   {row['times_smaller_than_full']:6.2f} × "
            f"smaller than full, {row['times_smaller_than_packed']:.2f} × than zstd -1 ({row['packed_mb']:.0f} MB); "
            f"{row['bytes_per_change']:.2f} bytes a change",
            f"  encode  {row['encode_gb_s']:7.2f} GB/s   speed against writing full {row['encode_vs_write_full']:.2f}, "
            f"zstd -1 {row['encode_vs_write_packed']:.2f}, sha256 {row['encode_vs_digest']:.2f}",
            f"  apply   {row['apply_gb_s']:7.2f} GB/s   speed against reading full {row['apply_vs_read_full']:.2f}, "
            f"zstd {row['apply_vs_read_packed']:.2f}, sha256 {row['apply_vs_digest']:.2f}",
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--changed", type=float, nargs="+", default=[0.01, 0.03, 0.2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the files go (default: a temporary folder)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    base = state_of(random_weights(rng))
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        rows = [Bench(Path(folder), share, base, rng).run(args.rounds) for share in args.changed]
    print(json.dumps(rows) if args.json else "\n".join(map(show, rows)))


if __name__ == "__main__":
    main()
