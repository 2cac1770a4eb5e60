"""The event catalogue, docs/events.md, made from the structs so that it cannot be out of date.

python -m streams.catalogue docs/events.md
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any, get_args

import msgspec

from streams import events
from streams.events import tag_of

# topic → (who writes it, the union of its events)
TOPICS: dict[str, tuple[str, Any]] = {
    "tasks": ("feeder", events.TaskEvent),
    "trajectories": ("rollout", events.TrajectoryEvent),
    "rewards": ("reward and other enrichers", events.RewardEvent),
    "groups": ("collector", events.GroupEvent),
    "ledger": ("trainer; feeder: `data_ended`; command line: limits and pauses", events.LedgerEvent),
    "fleet": ("rollout; trainer: `transfer_group_*`", events.FleetEvent),
    "metrics": ("all; trainer: `step_measured`, `samples_probed`", events.MetricsEvent),
    "dead": ("all", events.DeadLetter),
}
PARTS = (
    events.InputProgress,
    events.Member,
    events.CutGroup,
    events.CutMember,
    events.Drop,
    events.TensorInfo,
)

HEAD = f"""# Event catalogue

Made from `streams/events.py` by `python -m streams.catalogue docs/events.md`; do not edit by hand.
Schema {events.SCHEMA_MAJOR}.{events.SCHEMA_MINOR}. Events are MessagePack maps by field name, with the tag word in
`type`; values of {512} bytes and more are one zstandard frame (header `enc: zstd`), after which the last bytes of the
map may follow uncompressed (header `raw`: how many, in decimal). Headers of every record: `schema`, `type`, `by`
(producer), `id` (uid or group id), `enc`, `raw`. A record over the log's limit has no value there, and a last header
`claim`, "size folder-id path": its value is the file `path` of the run's `claims` folder, named by its SHA-256.

How it may change: a new field has a default (minor); a reader passes over types and fields that it does not know,
and counts them; anything else raises the major, which older readers refuse, and comes with an upcast in
`streams/codec.py`. A field or word is never used again for another meaning.
"""


def render() -> str:
    """The whole page."""
    parts = [HEAD]
    for topic, (writer, union) in TOPICS.items():
        partitions = (
            "P partitions" if topic in ("tasks", "trajectories", "rewards", "groups") else "one partition"
        )
        parts.append(f"## {topic}\n\n{partitions}; written by: {writer}\n")
        for kind in get_args(union) or (union,):
            parts.append(_section(f"### `{tag_of(kind)}` ({kind.__name__})", kind))
    parts.append("## Parts of events\n")
    parts.extend(_section(f"### {kind.__name__}", kind) for kind in PARTS)
    return "\n".join(parts)


def _section(title: str, kind: type[msgspec.Struct]) -> str:
    lines = [title, ""]
    text = inspect.cleandoc(kind.__doc__ or "")
    inherited = any(kind.__doc__ == base.__doc__ for base in kind.__mro__[1:])
    if text and not inherited:
        lines += [text, ""]
    lines += ["| field | type | default |", "|---|---|---|"]
    for field in msgspec.structs.fields(kind):
        lines.append(f"| `{field.name}` | {_type_name(field.type)} | {_default(field)} |")
    return "\n".join(lines) + "\n"


def _type_name(kind: Any) -> str:
    text = msgspec.inspect.type_info(kind)
    return _name(text).replace("|", "\\|")


def _name(info: Any) -> str:
    word = type(info).__name__.removesuffix("Type").lower()
    if isinstance(info, msgspec.inspect.IntType):
        return "int ≥ 0" if info.ge == 0 else "int"
    if isinstance(info, msgspec.inspect.ListType):
        return f"list of {_name(info.item_type)}"
    if isinstance(info, msgspec.inspect.DictType):
        return f"map {_name(info.key_type)} → {_name(info.value_type)}"
    if isinstance(info, msgspec.inspect.TupleType):
        return "(" + ", ".join(_name(each) for each in info.item_types) + ")"
    if isinstance(info, msgspec.inspect.StructType):
        return info.cls.__name__
    return word


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    if field.default is not msgspec.NODEFAULT:
        return f"`{field.default!r}`"
    return f"`{field.default_factory()!r}`" if field.default_factory is not msgspec.NODEFAULT else ""


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m streams.catalogue FILE")
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
