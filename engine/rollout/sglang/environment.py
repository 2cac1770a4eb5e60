"""A Python environment with a real SGLang that serves small models on a CPU: for tests, trials and laptops.

    python -m engine.rollout.sglang.environment .venv-sglang      (or: make sglang)

SGLang's own requirements name CUDA parts that a CPU cannot use, so its wheel is installed without them and what it
imports on a CPU is listed here. Versions are pinned together: they were seen to work together. On a GPU, install
SGLang as its own documentation says, and name that interpreter in `rollout.sglang.python`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

SGLANG = "0.5.23"

# In this order, each list by one call. The second without what its packages require.
_BASE = (
    "torch==2.13.0",
    "numpy",
    "transformers==5.19.0",
    "tokenizers==0.23.2",
    "safetensors",
    "triton",
)
_ALONE = (f"sglang=={SGLANG}", "xgrammar==0.2.7", "apache-tvm-ffi==0.1.11", "compressed-tensors==0.18.0")
_IMPORTED = (
    "aiohttp",
    "distro",
    "dill",
    "einops",
    "fastapi",
    "gguf",
    "interegular",
    "ipython",
    "loguru",
    "mistral_common",
    "msgspec",
    "openai==2.8.0",
    "orjson",
    "packaging",
    "partial_json_parser",
    "pillow",
    "prometheus-client",
    "psutil",
    "pybase64",
    "pydantic",
    "python-multipart",
    "pyzmq",
    "regex",
    "requests",
    "scipy",
    "sentencepiece==0.2.1",
    "setproctitle",
    "soundfile==0.13.1",
    "tiktoken",
    "tqdm",
    "uvicorn>=0.51",
    "uvloop",
    "watchfiles",
    "zstandard",
)
_ROUTER = ("sglang-router==0.3.2",)
_STAMP = ".millstream-sglang"
_INSTALL_S = 1800  # for one list; a slow mirror takes minutes for torch


def interpreter(folder: Path) -> Path:
    return folder / "bin" / "python"


def is_built(folder: Path) -> bool:
    """Whether this folder holds the environment as it is pinned here."""
    stamp = folder / _STAMP
    return stamp.is_file() and stamp.read_text("utf-8").strip() == _pins() and interpreter(folder).exists()


def build(folder: Path) -> Path:
    """Make the environment, or find it made; returns its interpreter. Packages come from where pip is set up to look.

    Raises subprocess.CalledProcessError when an installation fails; what was installed stays for the next call.
    """
    if is_built(folder):
        return interpreter(folder)
    if not interpreter(folder).exists():
        venv.create(folder, with_pip=True)
    _install(folder, _BASE)
    _install(folder, _ALONE, "--no-deps")
    _install(folder, _IMPORTED)
    _install(folder, _ROUTER, "--no-deps")
    (folder / _STAMP).write_text(_pins() + "\n", encoding="utf-8")
    return interpreter(folder)


def _pins() -> str:
    return hashlib.sha256("\n".join((*_BASE, *_ALONE, *_IMPORTED, *_ROUTER)).encode()).hexdigest()[:16]


def _install(folder: Path, packages: Sequence[str], *options: str) -> None:
    """With uv, which takes a tenth of the time; with pip where there is none, or it cannot reach what pip does."""
    environ = dict(os.environ)
    if index := environ.get("PIP_INDEX_URL"):
        environ.setdefault("UV_DEFAULT_INDEX", index)
    if index := environ.get("PIP_EXTRA_INDEX_URL"):
        environ.setdefault("UV_INDEX", index)
    beside = Path(sys.executable).parent / "uv"
    uv = str(beside) if beside.exists() else shutil.which("uv")
    python = str(interpreter(folder))
    commands = [[python, "-m", "pip", "install", *options, *packages]]
    if uv is not None:
        commands.insert(
            0, [uv, "pip", "install", "--compile-bytecode", "--python", python, *options, *packages]
        )
    for attempt, command in enumerate(commands, start=1):
        done = subprocess.run(command, env=environ, timeout=_INSTALL_S, check=attempt == len(commands))
        if done.returncode == 0:
            return


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(__doc__)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    print(build(Path(arguments[0])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
