"""A real SGLang for tests: one server for the whole session, on a CPU, with a tiny model of its own.

    sglang           RealServer: its URL, two model folders that differ in their weights alone, its process
    sglang_python    the interpreter of the environment it runs in

The environment is that of MILLSTREAM_SGLANG_PYTHON, else .venv-sglang (`make sglang`); without one these tests are
skipped with the reason, and with MILLSTREAM_REQUIRE_SGLANG=1 they fail with it. A server takes half a minute to start
on a quiet machine, so `prepare_for` starts it when the tests are collected. Whoever uses it leaves it as it was: not
paused, no session, no group. Its weights and label may be any.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from engine.rollout.sglang.environment import interpreter, is_built
from engine.rollout.sglang.server import Server

NEEDING = {"sglang", "sglang_server"}
ROOT = Path(__file__).parents[2]
START = timedelta(seconds=900)
TIMEOUT_S = 1200  # of a test that may have to wait for the start
VOCAB, CONTEXT, EOS = 512, 1024, 2

_HIDDEN, _HEADS, _KV_HEADS, _HEAD, _LAYERS, _INNER = 64, 4, 2, 16, 2, 128


class RealServer(NamedTuple):
    url: str
    models: tuple[Path, Path]  # it was started with the first
    server: Server


def find_python() -> Path | None:
    given = os.environ.get("MILLSTREAM_SGLANG_PYTHON")
    if given:
        return Path(given)
    folder = ROOT / ".venv-sglang"
    return interpreter(folder) if is_built(folder) else None


def why_not() -> str | None:
    """Why there is no SGLang here; None when there is one."""
    python = find_python()
    if python is None:
        return "there is no SGLang environment: `make sglang` builds .venv-sglang, or set MILLSTREAM_SGLANG_PYTHON"
    if not os.access(python, os.X_OK):
        return f"MILLSTREAM_SGLANG_PYTHON: {python} cannot be run"
    if importlib.util.find_spec("aiohttp") is None:
        return "aiohttp is not installed (pip install 'millstream[sglang]')"
    return None


def require_sglang() -> Path:
    """The interpreter; skips or fails the test where there is none."""
    reason = why_not()
    if reason is None:
        python = find_python()
        assert python is not None
        return python
    if os.environ.get("MILLSTREAM_REQUIRE_SGLANG") == "1":
        pytest.fail(f"MILLSTREAM_REQUIRE_SGLANG=1, but {reason}", pytrace=False)
    pytest.skip(reason)


def prepare_for(items: list[pytest.Item]) -> None:
    """Start the server now, if a test needs it, and give such tests the time that a start may take."""
    needing = [item for item in items if NEEDING & _asked(item)]
    for item in needing:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
    if needing and why_not() is None and "PYTEST_XDIST_WORKER" not in os.environ:
        _shared()  # (each worker collects every test; the one that runs these starts it when it comes to the first)


def _asked(item: pytest.Item) -> set[str]:
    """Its fixtures, and its parameters, which may name one."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    return {*getattr(item, "fixturenames", ()), *(each for each in params.values() if isinstance(each, str))}


class _Shared:
    """The session's server. Made once however many conftest files know the fixture."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="millstream-sglang-"))
        self.models = (self.folder / "model-0", self.folder / "model-1")
        for seed, folder in enumerate(self.models):
            make_model(folder, seed)
        self.server = start_server(self.models[0], self.folder / "sglang.log")
        self.is_ready = self.is_resting = False
        atexit.register(self.end)  # when the session ends before a test has asked for it

    def ready(self) -> RealServer:
        if self.is_resting:
            self._signal(signal.SIGCONT)
            self.is_resting = False
        if not self.is_ready:
            asyncio.run(self.server.ready(START))
            self.is_ready = True
        return RealServer(self.server.url, self.models, self.server)

    def rest(self) -> None:
        """Stop it until it is asked for again: an idle server takes a third of a core."""
        if self.is_ready and not self.is_resting:
            self._signal(signal.SIGSTOP)
            self.is_resting = True

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.server.pid, number)

    def end(self) -> None:
        self.server.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


@cache
def _shared() -> _Shared:
    return _Shared()


def rest_before(item: pytest.Item | None) -> None:
    """Let the server rest unless the next test needs it. Called after every test."""
    if _shared.cache_info().currsize and (item is None or not NEEDING & _asked(item)):
        _shared().rest()


def start_server(model: Path, log_file: Path, *, port: int = 0, args: Sequence[str] = ()) -> Server:
    """A real server on this machine's CPU; it ends with this process at the latest."""
    return Server(
        model,
        python=require_sglang(),
        log_file=log_file,
        device="cpu",
        port=port,
        args=("--enable-metrics", *args),
        threads=1,
    )


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    return require_sglang()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    rest_before(nextitem)


@pytest.fixture(scope="session")
def sglang_server() -> Iterator[_Shared]:
    require_sglang()
    shared = _shared()
    try:
        yield shared
    finally:
        shared.end()
        _shared.cache_clear()


@pytest.fixture
def sglang(sglang_server: _Shared) -> RealServer:
    """Running and ready."""
    return sglang_server.ready()


# ---------------------------------------------------------------- its own types
def api_types() -> ModuleType | None:
    """SGLang's request and response types, loaded alone (they need msgspec only); None without an environment."""
    python = find_python()
    found = (
        sorted(python.parents[1].glob("lib/python3*/site-packages/sglang/api/v1/api_types.py"))
        if python
        else []
    )
    if not found:
        return None
    name = "sglang_api_types"
    spec = importlib.util.spec_from_file_location(name, found[0])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where its annotations are looked up
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------- a model
def make_model(folder: Path, seed: int) -> Path:
    """A Qwen3 of two small layers with logits that are not flat, and a tokenizer of words t0 … t511."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_weights(seed), folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "float32",
        "vocab_size": VOCAB,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "max_position_embeddings": CONTEXT,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "pad_token_id": 0,
    }
    words = {f"t{each}": each for each in range(VOCAB)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "t0"},
    }
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "t1",
        "eos_token": f"t{EOS}",
        "pad_token": "t0",
    }
    for name, value in (
        ("config.json", config),
        ("generation_config.json", {"eos_token_id": EOS}),
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", names),
    ):
        (folder / name).write_text(json.dumps(value), encoding="utf-8")
    return folder


def _weights(seed: int) -> dict[str, NDArray[np.float32]]:
    draw = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return (0.1 * draw.standard_normal((rows, columns))).astype(np.float32)

    def ones(size: int) -> NDArray[np.float32]:
        return np.ones(size, np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(VOCAB, _HIDDEN),
        "lm_head.weight": matrix(VOCAB, _HIDDEN),
        "model.norm.weight": ones(_HIDDEN),
    }
    for layer in range(_LAYERS):
        weights |= {
            f"model.layers.{layer}.{name}": value
            for name, value in {
                "input_layernorm.weight": ones(_HIDDEN),
                "post_attention_layernorm.weight": ones(_HIDDEN),
                "self_attn.q_norm.weight": ones(_HEAD),
                "self_attn.k_norm.weight": ones(_HEAD),
                "self_attn.q_proj.weight": matrix(_HEADS * _HEAD, _HIDDEN),
                "self_attn.k_proj.weight": matrix(_KV_HEADS * _HEAD, _HIDDEN),
                "self_attn.v_proj.weight": matrix(_KV_HEADS * _HEAD, _HIDDEN),
                "self_attn.o_proj.weight": matrix(_HIDDEN, _HEADS * _HEAD),
                "mlp.gate_proj.weight": matrix(_INNER, _HIDDEN),
                "mlp.up_proj.weight": matrix(_INNER, _HIDDEN),
                "mlp.down_proj.weight": matrix(_HIDDEN, _INNER),
            }.items()
        }
    return weights
