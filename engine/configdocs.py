"""The configuration reference, made from the structs: `python -m engine.configdocs docs/configuration.md`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from engine.config_fields import bare_type, has_mark, meta, section_of
from engine.config_toml import show
from engine.settings import Config, Section

HEAD = """\
# Configuration reference

<!-- Made from engine/settings.py by `make docs`; change it there. -->

One TOML file; every command takes it, or a run directory in its place. An environment variable
`MILLSTREAM__<section>__<key>` wins over the file, and `--set <section>.<key>=<value>` over both (`none` unsets).
`millstream config CONFIG` prints what is then in force. Unknown keys and variables are refused.

Relative paths are taken from the working directory. A secret is written as `env:NAME` or `file:/path`; it is read from
that environment variable or file when it is needed, and never written anywhere.

Settings marked • say what the data of a run is and make up its fingerprint: a run directory is refused to a
configuration that has another value for one of them. All others may change when a run is continued.
"""


def reference() -> str:
    """The whole page."""
    parts = [HEAD]
    for field in msgspec.structs.fields(Config):
        section = section_of(field.type)
        assert section is not None, f"{field.name} is not a table"
        parts += _tables(section, field.name)
    return "\n".join(parts)


def _tables(section: type[Section], name: str) -> list[str]:
    """The table of one section, then those of the sections in it."""
    lines = [f"## `[{name}]`", "", (section.__doc__ or "").strip(), ""]
    lines += ["| setting | type | unit | default | meaning |", "|---|---|---|---|---|"]
    inner: list[str] = []
    for field in msgspec.structs.fields(section):
        deeper = section_of(field.type)
        if deeper is None:
            lines.append(_row(field))
        else:
            inner += _tables(deeper, f"{name}.{field.name}")
    return [*lines, "", *inner]


def _row(field: msgspec.structs.FieldInfo) -> str:
    default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    shown = "unset" if default is None else f"`{show(default)}`"
    mark = " •" if has_mark(field, "run_data") else ""
    unit = (meta(field).extra or {}).get("unit", "")
    return f"| `{field.name}`{mark} | {_type(field)} | {unit} | {shown} | {meta(field).description} |"


def _type(field: msgspec.structs.FieldInfo) -> str:
    bare = bare_type(field)
    if get_origin(bare) is Literal:
        return " ".join(f"`{word}`" for word in get_args(bare))
    names = {bool: "true or false", str: "text", int: "integer", float: "number"}
    core = _core(bare)
    name = names.get(core, "list of texts" if get_origin(core) is tuple else "table")
    bounds = [f"{sign} {value}" for sign, value in _bounds(field, bare)]
    return " ".join([name, *([", ".join(bounds)] if bounds else [])])


def _core(annotation: Any) -> Any:
    """The type inside unions with None and annotations."""
    while True:
        if hasattr(annotation, "__metadata__"):
            annotation = get_args(annotation)[0]
        elif type(None) in get_args(annotation):
            annotation = next(part for part in get_args(annotation) if part is not type(None))
        else:
            return annotation


def _bounds(field: msgspec.structs.FieldInfo, bare: Any) -> list[tuple[str, Any]]:
    """Bounds of the field itself, or of the type inside its union with None."""
    metas = [meta(field)] + [m for part in get_args(bare) for m in getattr(part, "__metadata__", ())]
    signs = (("≥", "ge"), (">", "gt"), ("≤", "le"), ("<", "lt"))
    return [
        (sign, getattr(m, name)) for m in metas for sign, name in signs if getattr(m, name, None) is not None
    ]


def main(argv: list[str]) -> None:
    """Print the page, or write it to the one argument."""
    if argv:
        Path(argv[0]).write_text(reference(), encoding="utf-8")
    else:
        print(reference(), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
