"""(b) Does this SGLang have the model's architecture, and can its attention backend run on this device?

`server` (--deep) starts a real one: on the model's own shape, two layers of it, or on a tiny model of ours.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from engine.config import secret
from engine.doctor.foreign import ForeignFailed, argument, run_script, sglang_python
from engine.doctor.result import Request, Result, failed, passed, warned

OLDEST = (0, 5, 21)  # engine/rollout/sglang/api.py refuses older ones
_WEIGHT_ENDPOINTS = ("/update_weights_from_disk", "/pause_generation", "/continue_generation")
_START_S = 600.0  # at most, also where rollout.sglang.start_timeout_s allows more
# backend → (module that it needs, least and highest capability)
_CUDA_ATTENTION = {
    "fa3": ("sgl_kernel", (8, 0), (9, 9)),
    "fa4": ("", (9, 0), (12, 9)),
    "flashinfer": ("flashinfer", (7, 5), (99, 0)),
    "triton": ("triton", (7, 0), (99, 0)),
    "trtllm_mla": ("flashinfer", (10, 0), (10, 9)),
    "trtllm_mha": ("flashinfer", (9, 0), (10, 9)),
    "cutlass_mla": ("sgl_kernel", (10, 0), (10, 9)),
}
_MUSA_ATTENTION = {"fa3": ("flash_attn_interface", (3, 1), (99, 0)), "triton": ("triton", (0, 0), (99, 0))}
_MUSA = (
    "install torchada and mate or flash_attn_3 from the vendor's index; below MP31 take --attention-backend triton; a "
    "supported model, or a newer image"
)


def not_sglang(request: Request) -> str:
    """Why this is skipped; ""."""
    if request.config.rollout.backend == "sglang":
        return ""
    if not request.deep:
        return (
            f'rollout.backend = "{request.config.rollout.backend}"'
            if request.has_config
            else "no configuration"
        )
    return "" if sglang_python(request) else "no environment with SGLang (make sglang builds one for a CPU)"


def not_deep(request: Request) -> str:
    if not request.deep:
        return "with --deep (starts a server)"
    if request.config.rollout.sglang.url:
        return "rollout.sglang.url names a server that runs already"
    return "" if sglang_python(request) else "no environment with SGLang (make sglang builds one for a CPU)"


def probe(request: Request) -> Result:
    settings = request.config.rollout.sglang
    if settings.url:
        return _given(request, settings.url.replace("{replica}", "0"))
    python = sglang_python(request)
    assert python is not None  # `not_sglang` has asked
    on_musa = ["musa"] if request.device == "musa" else []
    try:
        facts = run_script(python, "sglang_facts", on_musa)
    except ForeignFailed as error:
        return failed(
            str(error), "rollout.sglang.python must be the interpreter of an environment with sglang"
        )
    return judge(request, facts)


def judge(request: Request, facts: Mapping[str, Any]) -> Result:
    settings, versions = request.config.rollout.sglang, facts["versions"]
    if "architectures" not in facts:
        return failed(
            f"no sglang in this environment (Python {versions['python']})",
            "rollout.sglang.python = an interpreter that has it; `make sglang` builds one for a CPU",
        )
    said = f"sglang {versions.get('sglang', '?')}, torch {versions.get('torch', '?')}"
    if _number(versions.get("sglang", "")) < OLDEST:
        return failed(f"{said}: too old", f"install sglang >= {'.'.join(map(str, OLDEST))}")
    if facts.get("is_musa", "True") != "True":
        return failed(f"{said}: is_musa() is {facts['is_musa']}", _MUSA)
    wrong = _architecture(request, facts) or _flags(request, settings.args)
    if wrong:
        return failed(f"{said}: {wrong[0]}", wrong[1])
    backend = argument(settings.args, "--attention-backend")
    problem = attention(backend, request, facts)
    if problem:
        return failed(
            f"{said}: {problem}", _MUSA if request.device == "musa" else "choose another --attention-backend"
        )
    missing = [each for each in _WEIGHT_ENDPOINTS if each not in facts["endpoints"]]
    if missing:
        return warned(
            f"{said}: no endpoint {', '.join(missing)}", "weights cannot be updated in flight: a newer sglang"
        )
    if "/begin_weight_update" not in facts["endpoints"]:
        return warned(
            f"{said}: no /begin_weight_update",
            "a 404 is tolerated; a broadcast is not one act for its requests",
        )
    shown = backend or ("torch_native" if request.device == "cpu" else "chosen by sglang")
    return passed(f"{said}; {_shown(request)}attention {shown}", versions=versions)


def attention(backend: str, request: Request, facts: Mapping[str, Any]) -> str:
    """Why this backend cannot run here; "" when it can, or nothing is known against it."""
    if not backend:
        return ""
    choices = facts["attention_backends"]
    if choices and backend not in choices:
        return f"--attention-backend {backend}: this sglang has {', '.join(choices)}"
    table = {"cuda": _CUDA_ATTENTION, "musa": _MUSA_ATTENTION}.get(request.device)
    if table is None:
        return ""
    if backend not in table:
        return (
            f"--attention-backend {backend}: on MUSA only {', '.join(table)}"
            if request.device == "musa"
            else ""
        )
    module, least, most = table[backend]
    if request.capability is not None and not least <= tuple(request.capability) <= most:
        have = ".".join(map(str, request.capability))
        return (
            f"--attention-backend {backend} needs capability {least[0]}.{least[1]} or more, there is {have}"
        )
    if module and module not in facts["modules"]:
        return f"--attention-backend {backend} needs the module {module}, which this environment lacks"
    return ""


def _architecture(request: Request, facts: Mapping[str, Any]) -> tuple[str, str] | None:
    config = model_config(request.config.model.path)
    known = set(facts["architectures"])
    for name in config.get("architectures") or []:
        if name not in known:
            return f"no architecture {name} among its {len(known)}", "a model that it has, or a newer sglang"
    if request.device == "musa" and (config.get("quantization_config") or {}).get("quant_method") == "awq":
        return "the model is quantised by AWQ, which SGLang on MUSA refuses", "take the model without AWQ"
    return None


def _flags(request: Request, args: Sequence[str]) -> tuple[str, str] | None:
    if request.device != "musa":
        return None
    if any("prefill-context-parallel" in each or "prefill-cp" in each for each in args):
        return "context parallelism of the prefill, which SGLang on MUSA refuses", "take that argument out"
    return None


def _shown(request: Request) -> str:
    names = model_config(request.config.model.path).get("architectures") or []
    return f"it has {', '.join(names)}; " if names else ""


def model_config(path: str) -> dict[str, Any]:
    """The model's config.json; {} where there is none."""
    try:
        return json.loads((Path(path) / "config.json").read_text("utf-8")) if path else {}
    except (OSError, ValueError):
        return {}


def ask(request: Request, url: str, path: str) -> bytes:
    """What a server that was given answers, with the key that the configuration has for it. Raises OSError."""
    key = request.config.rollout.sglang.api_key
    headers = {"Authorization": f"Bearer {secret(key, 'rollout.sglang.api_key')}"} if key else {}
    with urllib.request.urlopen(urllib.request.Request(url + path, headers=headers), timeout=10) as answer:
        return answer.read()


def _given(request: Request, url: str) -> Result:
    """A server that runs already: an open port is not a healthy server."""
    try:
        ask(request, url, "/health")
        info = json.loads(ask(request, url, "/server_info"))
    except urllib.error.HTTPError as error:
        return failed(
            f"{url} answers {error.code} {error.reason}",
            "401: rollout.sglang.api_key is missing or another; 503: it has no worker yet, or they died; see its log",
        )
    except (OSError, ValueError) as error:
        return failed(f"{url}: {error}", "start the server, or leave rollout.sglang.url empty")
    if _number(str(info.get("version", ""))) < OLDEST:
        return failed(f"{url}: sglang {info.get('version')}", f"needs sglang >= {'.'.join(map(str, OLDEST))}")
    return passed(f"{url}: healthy, sglang {info.get('version')}, model {info.get('model_path')}")


def server(request: Request) -> Result:
    """Start, generate 4 tokens, stop."""
    python = sglang_python(request)
    assert python is not None
    with tempfile.TemporaryDirectory(prefix="millstream-doctor-") as folder:
        model, what = _small_model(request, Path(folder))
        return asyncio.run(_served(request, python, model, what, Path(folder) / "sglang.log"))


async def _served(request: Request, python: Path, model: Path, what: str, log_file: Path) -> Result:
    from engine.rollout.sglang.errors import Died, TimedOut
    from engine.rollout.sglang.server import Server

    settings = request.config.rollout.sglang
    device, began = request.device, time.monotonic()
    running = Server(
        model,
        python=python,
        log_file=log_file,
        device=device,
        args=("--load-format", "dummy", *settings.args),
        env=settings.env,
        threads=1 if device == "cpu" else None,  # a small model: more of them would only wait for one another
    )
    try:
        await running.ready(timedelta(seconds=min(_START_S, settings.start_timeout_s)))
        start_s = time.monotonic() - began
        body = {
            "input_ids": [3, 4, 5],
            "sampling_params": {"max_new_tokens": 4, "temperature": 1.0, "ignore_eos": True},
        }
        answer = await asyncio.to_thread(_post, f"{running.url}/generate", body)
        count = answer["meta_info"]["completion_tokens"]
    except (Died, TimedOut) as error:
        return failed(
            _ends(str(error)), "the server's own last words say why; its whole log is gone with the trial"
        )
    except (OSError, KeyError, ValueError) as error:
        return failed(
            f"a started server did not generate: {error}",
            "see SGLang's log in a run: <run.dir>/logs/sglang-0.log",
        )
    finally:
        await running.stop(timedelta(seconds=10))
    if count != 4:
        return failed(f"4 tokens were asked for, {count} came ({what})", "the server generates wrongly")
    return passed(
        f"a server on {device} was ready after {start_s:.0f} s and generated 4 tokens ({what})",
        start_s=start_s,
    )


def _ends(text: str) -> str:
    """The beginning, which says what it is, and the end, where a traceback has its reason."""
    return text if len(text) < 700 else f"{text[:200]} … {text[-400:]}"


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=120) as answer:
        return json.loads(answer.read())


def _small_model(request: Request, folder: Path) -> tuple[Path, str]:
    """Two layers of the model's own shape, or a tiny one of ours; random weights either way."""
    path, place = request.config.model.path, folder / "model"
    config = model_config(path)
    if config:
        shutil.copytree(
            path, place, ignore=shutil.ignore_patterns("*.safetensors*", "*.bin*", "*.gguf", ".*")
        )
        text = config.get("text_config")
        inner = text if isinstance(text, dict) else config
        inner["num_hidden_layers"] = min(2, int(inner.get("num_hidden_layers", 2)))
        if isinstance(inner.get("layer_types"), list):
            inner["layer_types"] = inner["layer_types"][: inner["num_hidden_layers"]]
        (place / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return place, f"two layers of {path}, random weights"
    from engine.tasks import get_task
    from engine.tasks.tiny import build_model, build_tokenizer, save

    task = get_task("reverse")
    save(place, build_model(task, seed=0, architecture="qwen3"), build_tokenizer(task))
    return place, "a tiny Qwen3 of ours"


def _number(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.partition("+")[0].split(".")[:3]:
        digits = "".join(c for c in part if c.isdecimal())
        numbers.append(int(digits) if digits else 0)
    return tuple(numbers)
