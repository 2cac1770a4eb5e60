"""Which names of Megatron does a patch use, and are they there? Read from the patch's source, without running it."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Names that came or went with a release tell for which one a patch was written (read from the released wheels).
_TELLTALE = {
    "ModelCommProcessGroups": "megatron-core 0.12.3 to 0.14.0",
    "GradFinalizeProcessGroups": "megatron-core 0.14.0 alone",
    "topk_routing_with_score_function": "megatron-core >= 0.14.0",
    "ProcessGroupCollection": "megatron-core >= 0.15",
}


class Use(NamedTuple):
    """`from module import name` (`name` "": the module itself), and where."""

    module: str
    name: str
    where: str  # file:line

    @property
    def symbol(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


def uses(folder: Path, package: str = "megatron") -> list[Use]:
    """Every import of `package` in the Python files below; one that a `try` with an `except ImportError` guards is
    optional, and left out. A file that cannot be parsed raises SyntaxError."""
    files = [folder] if folder.is_file() else sorted(folder.rglob("*.py"))
    found = []
    for file in files:
        tree = ast.parse(file.read_text("utf-8", "replace"), str(file))
        guarded = {id(node) for each in _optional(tree) for node in ast.walk(each)}
        for node in ast.walk(tree):
            if id(node) in guarded:
                continue
            where = f"{file.name}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.ImportFrom) and not node.level and _of(node.module or "", package):
                found += [
                    Use(node.module or "", "" if each.name == "*" else each.name, where)
                    for each in node.names
                ]
            elif isinstance(node, ast.Import):
                found += [Use(each.name, "", where) for each in node.names if _of(each.name, package)]
    return found


def missing(found: list[Use]) -> list[tuple[Use, str]]:
    """Those that this environment lacks, with why. Imports the modules that they name."""
    lacking, answers = [], {}
    for use in found:
        key = (use.module, use.name)
        if key not in answers:
            answers[key] = _lacks(use)
        if answers[key]:
            lacking.append((use, answers[key]))
    return lacking


def made_for(lacking: list[tuple[Use, str]]) -> str:
    """For which release these names speak; "" when they tell nothing."""
    told = {_TELLTALE[use.name] for use, _ in lacking if use.name in _TELLTALE}
    return ", ".join(sorted(told))


def _lacks(use: Use) -> str:
    try:
        module = importlib.import_module(use.module)
    except Exception as error:  # a module may raise anything while it is imported
        return f"{type(error).__name__}: {error}"
    if not use.name or hasattr(module, use.name):
        return ""
    try:
        importlib.import_module(f"{use.module}.{use.name}")
    except Exception:
        return "no such name"
    return ""


def _optional(tree: ast.AST) -> Iterator[ast.stmt]:
    """Statements in the body of a `try` that passes over a failed import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) and any(_passes_over(handler) for handler in node.handlers):
            yield from node.body


def _passes_over(handler: ast.ExceptHandler) -> bool:
    names = (
        {each.id for each in ast.walk(handler.type) if isinstance(each, ast.Name)}
        if handler.type
        else {"Exception"}
    )
    return bool(names & {"ImportError", "ModuleNotFoundError", "Exception", "AttributeError"})


def _of(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")
