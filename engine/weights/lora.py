"""Low-rank adapters as weights: what a version of kind "lora" holds, and the whole model that it stands for.

    published:  base_model.model.<layer>.lora_A.weight [r, in], …lora_B.weight [out, r]   (names as PEFT saves them)
    engine:     W = W_base + scaling · B·A   for each adapted layer; every other tensor is the base's own

LoRA: Hu et al. 2021, arXiv 2106.09685, section 4.1. The digest of such a version is its adapter's, and the record
names the digest of the base that it belongs to: so what an engine merges is exact to the bit on both sides. The sum
itself is taken in float32 on each machine, and rounded to the served type.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from engine.weights import tensors as files
from engine.weights.durable import write_durably
from engine.weights.tensors import WeightsError
from streams.events import WeightsPublished

KIND = "lora"
PREFIX = "base_model.model."
A, B = ".lora_A.weight", ".lora_B.weight"


class Adapted(NamedTuple):
    """What the record of every version of a run says beside the adapter itself."""

    base_digest: str
    scaling: float  # alpha / rank


class Base:
    """The weights that adapters belong to: all *.safetensors of a model folder. Read once, when first needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def tensors(self) -> dict[str, Any]:
        """torch tensors by name, which must not be changed. Raises WeightsError.

        Copies: mapped from a file they lie unaligned, and some kernels then round otherwise.
        """
        found: dict[str, Any] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            mapped = files.to_framework(files.read_raw(path), "torch")
            found |= {name: tensor.clone() for name, tensor in mapped.items()}
        if not found:
            raise WeightsError(
                f"{self.folder} has no *.safetensors file; an adapter needs its base model there"
            )
        return found

    @cached_property
    def digest(self) -> str:
        return files.digest(self.tensors)

    def merged(self, published: WeightsPublished, adapter: Mapping[str, Any]) -> dict[str, Any]:
        """The whole model: new float32 tensors for adapted layers, the base's own for the others.

        `adapter`: verified torch tensors of that version. Raises WeightsError when the base is another one, or the
        adapter does not fit it.
        """
        if self.digest != published.base_digest:
            raise WeightsError(
                f"version {published.version} is an adapter of a base with digest {published.base_digest[:16]}; that "
                f"in {self.folder} has {self.digest[:16]}: model.path must hold the same weights on every machine"
            )
        whole = dict(self.tensors)
        for layer in layers(adapter):
            name, down, up = f"{layer}.weight", adapter[PREFIX + layer + A], adapter[PREFIX + layer + B]
            held = whole.get(name)
            if held is None or tuple(held.shape) != (up.shape[0], down.shape[1]):
                has = "no such tensor" if held is None else f"{list(held.shape)}"
                raise WeightsError(
                    f"version {published.version} adapts {name} as [{up.shape[0]}, {down.shape[1]}]; "
                    f"{self.folder} has {has}"
                )
            whole[name] = held.float() + published.scaling * (up.float() @ down.float())
        return whole

    def write_merged(self, published: WeightsPublished, adapter: Path, out: Path) -> None:
        """Make `out` the whole model's file, in the types of the base, from an adapter's file that was verified."""
        whole = self.merged(published, files.to_framework(files.read_raw(adapter), "torch"))
        weights = {name: files.raw(each.to(self.tensors[name].dtype)) for name, each in whole.items()}
        notes = {"format": "pt", "epoch": str(published.epoch), "version": str(published.version)}
        notes["digest"] = files.digest_raw(weights)
        write_durably(out, lambda file: files.write_file(file, weights, notes))


def layers(adapter: Mapping[str, Any]) -> list[str]:
    """Names of the adapted layers, as in "model.layers.0.self_attn.q_proj". Raises WeightsError for anything else."""
    found = [name[len(PREFIX) : -len(A)] for name in adapter if name.startswith(PREFIX) and name.endswith(A)]
    wanted = {PREFIX + layer + suffix for layer in found for suffix in (A, B)}
    if odd := sorted(wanted ^ set(adapter)):
        raise WeightsError(f"not an adapter as PEFT saves one: {', '.join(odd[:4])} ({len(odd)} in all)")
    return found
