"""Looking at the structs of engine.settings: which settings there are, and what is marked on them.

A setting's full key is its path in the file, as in `trainer.lr` or `log.kafka.client`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar, get_args

import msgspec

from engine.settings import Config, Section

S = TypeVar("S", bound=Section)


class Leaf(NamedTuple):
    """One setting (a free-form options table is one)."""

    key: str
    field: msgspec.structs.FieldInfo


def leaves(struct: type[Section] = Config, prefix: str = "") -> Iterator[Leaf]:
    """Every setting, in the order of declaration."""
    for field in msgspec.structs.fields(struct):
        section = section_of(field.type)
        if section is None:
            yield Leaf(prefix + field.name, field)
        else:
            yield from leaves(section, f"{prefix}{field.name}.")


def marked(mark: str) -> Iterator[Leaf]:
    """The settings with that mark of `engine.settings.doc`."""
    return (leaf for leaf in leaves() if has_mark(leaf.field, mark))


def has_mark(field: msgspec.structs.FieldInfo, mark: str) -> bool:
    return bool((meta(field).extra or {}).get(mark))


def meta(field: msgspec.structs.FieldInfo) -> msgspec.Meta:
    """What `engine.settings.doc` made of the field: description, bounds, marks."""
    return field.type.__metadata__[0]


def bare_type(field: msgspec.structs.FieldInfo) -> Any:
    """Its type without the description."""
    return get_args(field.type)[0]


def section_of(annotation: Any) -> type[Section] | None:
    """The table's struct that an annotation stands for; None for a setting."""
    inner = get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation
    return inner if isinstance(inner, type) and issubclass(inner, Section) else None


def choices(field: msgspec.structs.FieldInfo) -> list[str]:
    """The words that it accepts, if it accepts only certain words."""
    return [word for word in get_args(bare_type(field)) if isinstance(word, str)]


def get(section: Section, key: str) -> Any:
    """The value at a full key."""
    value: Any = section
    for part in key.split("."):
        value = getattr(value, part)
    return value


def replaced(section: S, key: str, value: Any) -> S:
    """A copy with another value at a full key."""
    name, _, rest = key.partition(".")
    inner = replaced(getattr(section, name), rest, value) if rest else value
    return msgspec.structs.replace(section, **{name: inner})
