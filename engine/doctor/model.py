"""Is the model whole, and do trainer and rollout read texts alike? Tokenizer and chat template, compared in effect:
the same folder can be read in two ways by two releases of transformers."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from engine.doctor.foreign import ForeignFailed, argument, run_script, sglang_python
from engine.doctor.result import Request, Result, failed, passed, skipped, warned
from engine.doctor.sglang import ask, model_config

_PARTS = ("vocabulary", "special tokens", "encoding", "decoding", "chat template", "rendered chat")


def no_model(request: Request) -> str:
    if request.config.model.path:
        return ""
    return "model.path is empty" if request.has_config else "no configuration"


def whole(request: Request) -> Result:
    """config.json, weights as its index says, tokenizer."""
    folder = Path(request.config.model.path)
    config = model_config(str(folder))
    if not config:
        return failed(f"{folder}: no readable config.json", "model.path must be a local Hugging Face folder")
    index = folder / "model.safetensors.index.json"
    try:
        named = (
            set(json.loads(index.read_text("utf-8"))["weight_map"].values())
            if index.exists()
            else {"model.safetensors"}
        )
    except (OSError, ValueError, KeyError) as error:
        return failed(f"{index}: {error}", "download the model again")
    absent = sorted(name for name in named if not (folder / name).is_file())
    if absent:
        return failed(
            f"{folder}: without {', '.join(absent[:4])} ({len(absent)} of {len(named)})",
            "download them again",
        )
    if not any(
        (folder / name).is_file()
        for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
    ):
        return failed(f"{folder}: no tokenizer", "copy the tokenizer's files there")
    size = sum((folder / name).stat().st_size for name in named)
    names = ", ".join(config.get("architectures") or ["an architecture that it does not name"])
    return passed(f"{folder}: {names}, {len(named)} files of weights, {size / 2**20:.1f} MiB")


def tokenizers(request: Request) -> Result:
    """Of the trainer, of the engines, and of the teacher if there is one."""
    config = request.config
    sides: dict[str, tuple[str, str, str]] = {"trainer": (sys.executable, config.model.path, "")}
    if config.rollout.backend == "sglang":
        try:
            sides["rollout"] = _engine_side(request)
        except (OSError, ValueError, KeyError) as error:
            return failed(
                f"{config.rollout.sglang.url}: {error}", "start the server, or leave rollout.sglang.url empty"
            )
    if config.teacher.path:
        sides["teacher"] = (sys.executable, config.teacher.path, "")
    if len(sides) == 1 and not config.data.apply_chat_template:
        return skipped("trainer and rollout are one environment and one folder")
    with ThreadPoolExecutor() as pool:
        asked = {name: pool.submit(_read_by, *side) for name, side in sides.items()}
    said: dict[str, dict[str, Any]] = {}
    for name, answer in asked.items():
        try:
            said[name] = answer.result()
        except ForeignFailed as error:
            return failed(f"{name}: {error}", f"the tokenizer of {sides[name][1]} must load there")
    return judge(request, said)


def _read_by(python: str, folder: str, template: str) -> dict[str, Any]:
    return run_script(python, "tokenizer_facts", [folder, *([template] if template else [])])


def judge(request: Request, said: dict[str, dict[str, Any]]) -> Result:
    first = next(iter(said))
    ours = said[first]
    different = [
        f"{part} of {name} ({their.get(part)}) is not that of {first} ({ours.get(part)})"
        for name, their in said.items()
        for part in _PARTS
        if their.get(part) != ours.get(part) and not (name == "teacher" and "chat" in part)
    ]
    if different:
        shown = ", ".join(f"{name}: transformers {their['transformers']}" for name, their in said.items())
        return failed(
            f"{'; '.join(different[:4])} ({shown})",
            "give both sides one folder and one release of transformers; --tokenizer-path and --chat-template in "
            "rollout.sglang.args change the engines' side alone",
        )
    if request.config.data.apply_chat_template and ours["chat template"] == "none":
        return failed(
            "data.apply_chat_template is on, and the tokenizer has no chat template",
            "take a model with one, put chat_template.jinja into model.path, or turn the setting off",
        )
    if str(ours.get("rendered chat", "")).find("Error") >= 0:
        return warned(
            f"the chat template: {ours['rendered chat']}", "check that it takes the roles of your prompts"
        )
    return passed(
        f"{' and '.join(said)} read, write and render alike ({ours['size']} tokens, {ours['class']})"
    )


def _engine_side(request: Request) -> tuple[str, str, str]:
    """(interpreter, tokenizer's folder, template file). Raises OSError, ValueError, KeyError for a given server."""
    settings = request.config.rollout.sglang
    python = sglang_python(request)
    folder = (
        argument(settings.args, "--tokenizer-path")
        or argument(settings.args, "--model-path")
        or request.config.model.path
    )
    template = argument(settings.args, "--chat-template")
    if settings.url:
        info = json.loads(ask(request, settings.url.replace("{replica}", "0"), "/server_info"))
        return (
            sys.executable,
            info.get("tokenizer_path") or info["model_path"],
            info.get("chat_template") or "",
        )
    return str(python), folder, template if template and Path(template).is_file() else ""
