"""What the SGLang of this interpreter has: versions, model architectures, attention backends, endpoints.

    python sglang_facts.py [musa]

Read from its source, since importing it takes many seconds and may end the process; with `musa`, is_musa() is called.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import platform
import re
import sys
from importlib import metadata
from pathlib import Path

PACKAGES = (
    *(
        "sglang",
        "torch",
        "transformers",
        "tokenizers",
        "flashinfer-python",
        "sgl-kernel",
        "sglang-kernel",
        "triton",
    ),
    *("torchada", "torch_musa", "mooncake-transfer-engine", "torch_memory_saver"),
)
MODULES = (
    "flash_attn_interface",
    "flashinfer",
    "sgl_kernel",
    "triton",
    "torch_memory_saver",
    "mooncake",
    "torchada",
)


def architectures(root: Path) -> list[str]:
    """Every `EntryClass` of sglang/srt/models."""
    found: set[str] = set()
    for file in (root / "srt" / "models").glob("*.py"):
        for node in ast.parse(file.read_text("utf-8")).body:
            if isinstance(node, ast.Assign) and any(_is(target, "EntryClass") for target in node.targets):
                found |= {each.id for each in ast.walk(node.value) if isinstance(each, ast.Name)}
    return sorted(found)


def attention_backends(root: Path) -> list[str]:
    """The words of ATTENTION_BACKEND_CHOICES, wherever it is written as a list."""
    for file in sorted((root / "srt").rglob("*.py")):
        text = file.read_text("utf-8", "replace")
        if not re.search(r"^ATTENTION_BACKEND_CHOICES\s*(:[^=]+)?=", text, re.MULTILINE):
            continue
        for node in ast.parse(text).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            value = getattr(node, "value", None)
            if value is not None and any(_is(target, "ATTENTION_BACKEND_CHOICES") for target in targets):
                words = [each for each in ast.walk(value) if isinstance(each, ast.Constant)]
                return [each.value for each in words if isinstance(each.value, str)]
    return []


def endpoints(root: Path) -> list[str]:
    found: set[str] = set()
    for file in (root / "srt" / "entrypoints").rglob("*.py"):
        found |= set(re.findall(r'^@\w+\.\w+\(\s*"(/\w+)"', file.read_text("utf-8", "replace"), re.MULTILINE))
    return sorted(found)


def _is(node: object, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def is_musa() -> str:
    """ "True" or "False" as SGLang says, or the error."""
    try:
        import torchada  # noqa: F401  # pyright: ignore[reportMissingImports]
        from sglang.srt.utils import is_musa as asked  # pyright: ignore[reportMissingImports]

        return str(bool(asked()))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main(arguments: list[str]) -> None:
    facts: dict[str, object] = {"versions": versions()}
    spec = importlib.util.find_spec("sglang")
    if spec is not None and spec.submodule_search_locations:
        root = Path(next(iter(spec.submodule_search_locations)))
        facts["architectures"] = architectures(root)
        facts["attention_backends"] = attention_backends(root)
        facts["endpoints"] = endpoints(root)
    facts["modules"] = [name for name in MODULES if importlib.util.find_spec(name) is not None]
    if "musa" in arguments:
        facts["is_musa"] = is_musa()
    print("\0" + json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1:])
