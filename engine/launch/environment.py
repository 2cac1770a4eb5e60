"""What of the driver's environment a daemon on another node is given: this list, and nothing else.

    the node's own environment (as it was when Ray was started there)
      ◄─ thread settings ◄─ the driver's variables of this list ◄─ masks of devices, ranks

The driver's shell may hold anything, secrets included, and what it exports never reaches other nodes by itself. So
what goes there is named here. A secret goes only if the configuration refers to it (`env:NAME`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from engine.config_reader import SETTING_PREFIX
from engine.settings import Config

NAMES = frozenset(
    {
        "PYTHONPATH",
        "PYTHONHASHSEED",
        "PYTHONWARNINGS",
        "PYTHONFAULTHANDLER",
        "MKL_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "RAYON_NUM_THREADS",
        "TP_SOCKET_IFNAME",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_LAUNCH_BLOCKING",
        "CUBLAS_WORKSPACE_CONFIG",
    }
)
PREFIXES = (
    "GLOO_",
    "HF_",
    "MCCL_",
    "MILLSTREAM_",
    "MUSA_",
    "NCCL_",
    "OMP_",
    "PYTORCH_",
    "SGLANG_",
    "SGL_",
    "TOKENIZERS_",
    "TORCHADA_",
    "TORCH_",
    "TRANSFORMERS_",
    "TRITON_",
)
# Set by whoever places a process, or a token, which goes only where the configuration asks for it.
NEVER = frozenset({"MUSA_VISIBLE_DEVICES", "MILLSTREAM_GIVEN_DEVICES", "HF_TOKEN"})
# A secret goes only where the configuration asks for it.
_SECRET = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$")
# Names of hardware: they differ from host to host, so where a node has a value of its own, that one counts.
OF_A_NODE = re.compile(r"(_IB_HCA|_IB_GID_INDEX|_SOCKET_IFNAME)$")
# What Ray sets in its own workers; a daemon under one is no worker of Ray.
_OF_RAY = re.compile(r"RAY_|OMP_NUM_THREADS$|LOCAL_RANK$|RANK$|WORLD_SIZE$|MASTER_(ADDR|PORT)$|TORCHELASTIC_")


def passed(environ: Mapping[str, str], config: Config) -> dict[str, str]:
    """Of the driver's environment, what daemons are given wherever they run."""
    asked = set(_referred_to(msgspec.to_builtins(config)))
    return {
        name: value
        for name, value in environ.items()
        if name in asked
        or (
            (name in NAMES or name.startswith(PREFIXES))
            and name not in NEVER
            and not _SECRET.search(name)
            and not name.startswith(SETTING_PREFIX)
        )
    }


def on_node(node: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """A daemon's environment: the node's own, with what the driver gave over it."""
    own = {
        name: value
        for name, value in node.items()
        if not _OF_RAY.match(name) and not name.startswith(SETTING_PREFIX)
    }
    kept = {name: own[name] for name in given if OF_A_NODE.search(name) and name in own}
    return own | dict(given) | kept


def _referred_to(value: Any) -> Iterator[str]:
    """The NAME of every `env:NAME` in it."""
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _referred_to(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _referred_to(inner)
    elif isinstance(value, str) and value.startswith("env:"):
        yield value.removeprefix("env:")
