"""Writing a configuration as TOML, without the secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from engine.config_fields import has_mark
from engine.config_secrets import REDACTED, is_reference, looks_secret
from engine.settings import Config, Section
from streams.errors import ConfigError


def dump_toml(config: Config) -> str:
    """The effective configuration as TOML, which `load_config` reads back to an equal Config.

    A secret that is no reference (`env:NAME`, `file:/path`) is written as a word that `load_config` refuses, so that
    this word can never be taken for the secret itself.
    """
    lines = ["# Effective configuration: every setting with the value in force."]
    for name in Config.__struct_fields__:
        lines += _section_lines(getattr(config, name), name)
    return "\n".join(lines) + "\n"


def _section_lines(section: Section, name: str) -> Iterator[str]:
    yield from ("", f"[{name}]")
    tables: list[tuple[str, Any]] = []  # after the plain values: TOML has no way back from a table
    for field in msgspec.structs.fields(section):
        value = getattr(section, field.name)
        if isinstance(value, (dict, Section)):
            tables.append((f"{name}.{field.name}", value))
        elif value is None:
            yield f"# {field.name} is unset"
        else:
            yield f"{field.name} = {_value(_redacted(field.name, value, has_mark(field, 'secret')))}"
    for table, value in tables:
        if isinstance(value, Section):
            yield from _section_lines(value, table)
        elif value:
            yield from ("", f"[{table}]")
            yield from (f"{_key(key)} = {_value(_redacted(key, inner))}" for key, inner in value.items())


def show(value: Any) -> str:
    """A value for a message: short, and without the login of a URL."""
    text = re.sub(r"//[^/@\s\"]*@", f"//{REDACTED}@", _value(_redacted("", value)))
    return text if len(text) <= 100 else text[:97] + "..."


def _redacted(name: str, value: Any, is_secret: bool = False) -> Any:
    if isinstance(value, dict):
        return {key: _redacted(key, inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redacted(name, inner, is_secret) for inner in value]
    if (is_secret or looks_secret(name)) and isinstance(value, str) and not is_reference(value):
        return REDACTED
    return value


def _value(value: Any) -> str:
    """One TOML value; tables are written inline."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, (int, float)):
        return repr(value)  # inf and nan too are spelled alike in both languages
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_value(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_key(key)} = {_value(inner)}' for key, inner in value.items())}}}"
    if hasattr(value, "isoformat"):
        return value.isoformat()
    raise ConfigError(f"a {type(value).__name__} cannot be written as TOML: {value!r}")


def _string(text: str) -> str:
    return '"' + re.sub(r'["\\\x00-\x1f\x7f]', lambda found: f"\\u{ord(found[0]):04x}", text) + '"'


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _string(key)
