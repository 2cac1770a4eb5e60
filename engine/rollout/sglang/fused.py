"""What SGLang's weight checker must say of a published file: the proof that a server holds these very bytes.

    published file: q_proj, k_proj, v_proj, … ─► as the model lays them out: qkv_proj, … ─► sha256 of each ─┐
    server: /weights_checker ─► one hash for each of its parameters ────────────────────────────────────────┴► equal?

SGLang hashes parameters in main memory with sha256 and shows its first 8 bytes; those on a device have a hash of its
own kind, which is not computed here. A parameter that a server keeps in another form (packed for its processor, say)
shows another hash already after the first load, which is from a file; from then on it is left out, and said.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.rollout.sglang.api import ServerInfo
from engine.weights.tensors import RawTensor

logger = logging.getLogger(__name__)

_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_PART_OF = {part: whole for whole, parts in _FUSED.items() for part in parts}
_PADDED = ("embed_tokens.weight", "lm_head.weight")  # with rows of zeros
_ROWS = 64  # they are padded to a multiple of it
_HEX = 16
_SOME = 3  # names in a message
_WORDS = {"float32": "F32", "float": "F32", "bfloat16": "BF16", "float16": "F16", "half": "F16"}


class Verdict(NamedTuple):
    differing: list[str]  # parameters that are not what was published
    is_whole: bool  # every parameter of the server was compared


class Proof:
    """Compares one server's parameters with published files, from its first load from a file on.

    `is_possible`: whether this server's hashes can be computed here at all.
    """

    def __init__(self, info: ServerInfo | None = None) -> None:
        raw = info.raw if info is not None else {}
        self.is_possible = (
            info is not None
            and raw.get("device") == "cpu"
            and info.tp_size == 1
            and not raw.get("quantization")
        )
        dtype = raw.get("dtype")
        self._dtype = _WORDS.get(dtype, "") if isinstance(dtype, str) else ""
        self._comparable: frozenset[str] | None = None  # None: nothing was loaded yet

    def expected(self, tensors: Mapping[str, RawTensor]) -> dict[str, str]:
        """Parameter of the server → its hash, once it holds these. Reads every byte; {} if that is of no use."""
        if not self.is_possible or self._comparable == frozenset():
            return {}
        return expected_hashes(tensors, self._dtype)

    def compare(self, expected: Mapping[str, str], shown: Mapping[str, str]) -> Verdict:
        """`shown`: of the server, after a load. The first call finds out what can be compared."""
        if not expected or not shown:
            return Verdict([], False)
        equal = {name for name, value in shown.items() if expected.get(name) == value}
        if self._comparable is None:
            self._comparable = frozenset(equal)
            _say(sorted(set(shown) - equal), len(shown))
        return Verdict(sorted(self._comparable - equal), equal == set(shown))


def _say(others: Sequence[str], total: int) -> None:
    if others:
        some = ", ".join(others[:_SOME]) + (", …" if len(others) > _SOME else "")
        logger.warning(
            "%d of the server's %d parameters are not laid out as published (%s): they are compared by checksums alone",
            len(others),
            total,
            some,
        )


def expected_hashes(tensors: Mapping[str, RawTensor], dtype: str) -> dict[str, str]:
    """Of dense models of the Llama and Qwen kind on one rank. `dtype`: word of the server's; "": as published."""
    work = {name: [tensors[part] for part in parts] for name, parts in _parts(tensors).items()}

    def one(item: tuple[str, list[RawTensor]]) -> str:
        return _hash(*item, dtype)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(work, pool.map(one, work.items()), strict=True))


def _parts(names: Mapping[str, object]) -> dict[str, list[str]]:
    """Parameter of the server → published tensors that it is made of, in order."""
    made: dict[str, list[str]] = {}
    for name in names:
        above, _, leaf = name.rpartition(".")
        module, _, last = above.rpartition(".")
        whole = _PART_OF.get(last)
        if whole is None:
            made[name] = [name]
        elif last == _FUSED[whole][0]:
            parts = [f"{module}.{part}.{leaf}" for part in _FUSED[whole]]
            if all(part in names for part in parts):
                made[f"{module}.{whole}.{leaf}"] = parts
    return made


def _hash(name: str, parts: Sequence[RawTensor], dtype: str) -> str:
    found = hashlib.sha256()
    for part in parts:
        data = _converted(part, dtype)
        found.update(data.data)
        rows = part.shape[0] if part.shape else 0
        if rows and name.endswith(_PADDED):
            found.update(bytes(-rows % _ROWS * (data.nbytes // rows)))
    return found.hexdigest()[:_HEX]


def _converted(tensor: RawTensor, dtype: str) -> NDArray[np.uint8]:
    """Bytes of the tensor after a copy into a parameter of this type."""
    convert = _CONVERSIONS.get((tensor.dtype, dtype))
    return tensor.data if convert is None else convert(tensor.data).view(np.uint8)


def _to_bf16(data: NDArray[np.uint8]) -> NDArray[np.uint16]:
    """To nearest, ties to even."""
    bits = data.view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


_CONVERSIONS: dict[tuple[str, str], Callable[[NDArray[np.uint8]], NDArray[np.generic]]] = {
    ("BF16", "F32"): lambda data: data.view(np.uint16).astype(np.uint32) << 16,
    ("F32", "BF16"): _to_bf16,
    ("F16", "F32"): lambda data: data.view(np.float16).astype(np.float32),
    ("F32", "F16"): lambda data: data.view(np.float32).astype(np.float16),
}
