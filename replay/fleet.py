"""The engines of a run as they are now: state, the version that each acknowledged, and how long ago it was heard of.

fleet   EngineJoined ─► joining ─ EngineUpdating ─► loading │ updating ─ EngineReady ─► ready ─ EngineLeft ─► left
        EngineFailed: it goes on with what it holds; holding nothing, or serving no longer: failed
ledger  EngineQuarantined ─► quarantined, until the engine joins anew
metrics the daemon's last sign of life: one that is killed says nothing any more. Reads only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import msgspec

from consumers.losses import Losses
from consumers.runner import records_backwards
from replay.lives.phrases import plain, stamp
from replay.records import TopicReader, entries, entry_of, sealed
from replay.topics import columns
from streams.errors import UnknownTopic
from streams.events import (
    EngineFailed,
    EngineJoined,
    EngineLeft,
    EngineQuarantined,
    EngineReady,
    EngineUpdating,
    EpochStarted,
    Event,
    tag_of,
)
from streams.log import EventLog
from streams.topics import Topics

QUARANTINED = "quarantined"
SERVES_NO_LONGER = frozenset({"engine", QUARANTINED})  # reasons of the EngineFailed that end an engine
_WANTED = {tag_of(EpochStarted).encode(), tag_of(EngineQuarantined).encode()}
_MOST_METRICS = 5000  # looked through, from the newest on, for signs of life


class EngineRow(msgspec.Struct, kw_only=True):
    """One engine, by its newest incarnation. Filled while `fleet` is read."""

    engine: str
    state: str  # "joining", "loading", "ready", "updating", "failed", "quarantined", "left"
    epoch: int = -1  # of the version that it holds, as it said itself; -1: none
    version: int = -1
    digest: str = ""
    transport: str = ""  # by which it came; "": not said
    taking: str = ""  # the version under way, as "e1-v8 by disk"
    device: str = ""
    n_ranks: int = 0
    replica: int = -1
    host: str = ""
    pid: int = 0
    incarnation: str = ""
    since_ms: int = 0  # of the state
    heard_ms: int = 0  # its daemon's newest sign of life in `metrics`; 0: none is kept
    why: str = ""  # of the state; of an engine that goes on: its last trouble


def fleet_rows(log: EventLog, topics: Topics) -> list[EngineRow]:
    """Every engine that the log knows of, by name."""
    timed = [
        (entry.event, entry.timestamp_ms)
        for entry in entries(log, topics.name("fleet"), 0)
        if entry.event is not None
    ]
    rows = fold(timed, _quarantines(log, topics))
    heard = _last_signs(log, topics, {f"rollout-{row.replica}" for row in rows if row.replica >= 0})
    for row in rows:
        row.heard_ms = heard.get(f"rollout-{row.replica}", 0)
    return rows


def fold(
    events: Iterable[tuple[Event, int]], quarantines: Sequence[EngineQuarantined] = ()
) -> list[EngineRow]:
    """`events` are those of `fleet` in order, each with the time of its record (ms)."""
    rows: dict[str, EngineRow] = {}
    for event, recorded_ms in events:
        engine = getattr(event, "engine", None)
        if engine is None:
            continue
        row = rows.get(engine)
        if row is None or (isinstance(event, EngineJoined) and not is_same(event, row.incarnation)):
            row = rows[engine] = EngineRow(engine=engine, state="joining")
        _apply(row, event, getattr(event, "at_ms", 0) or recorded_ms)
    for record in quarantines:
        row = rows.get(record.engine)
        if row is not None and row.incarnation == record.incarnation:
            row.state, row.since_ms, row.taking = QUARANTINED, record.at_ms or row.since_ms, ""
            row.why = (
                f"mean difference of log-probs {record.mismatch:.4g} nat per token, over {record.limit:g}, "
                f"at step {record.step}"
            )
    return [rows[engine] for engine in sorted(rows)]


def is_same(joined: EngineJoined, incarnation: str) -> bool:
    """It is no new process: it says more of itself than it knew at first."""
    return bool(incarnation) and joined.incarnation == incarnation


def _apply(row: EngineRow, event: Event, at_ms: int) -> None:
    if isinstance(event, EngineJoined):
        row.replica, row.host, row.pid = event.replica, event.host, event.pid
        row.n_ranks, row.device, row.incarnation = event.n_ranks, event.device, event.incarnation
        row.since_ms = row.since_ms or at_ms
    elif isinstance(event, EngineUpdating):
        row.state, row.since_ms = "loading" if event.from_version < 0 else "updating", at_ms
        row.taking = f"e{event.epoch}-v{event.version} by {event.transport}"
    elif isinstance(event, EngineReady):
        row.state, row.since_ms, row.taking, row.why = "ready", at_ms, "", ""
        row.epoch, row.version, row.digest = event.epoch, event.version, event.digest
        row.transport = event.transport
    elif isinstance(event, EngineFailed):
        row.why = f"{event.reason}: {event.detail}"
        if event.reason == QUARANTINED:
            row.state, row.since_ms, row.taking = QUARANTINED, at_ms, ""
        elif event.reason in SERVES_NO_LONGER or row.version < 0:
            row.state, row.since_ms, row.taking = "failed", at_ms, ""
    elif isinstance(event, EngineLeft) and row.state not in ("failed", QUARANTINED):
        row.state, row.since_ms, row.taking = "left", at_ms, ""


def _quarantines(log: EventLog, topics: Topics) -> list[EngineQuarantined]:
    """The valid ones. Of all other ledger records no more than the type is looked at."""
    epoch, found = -1, []
    for entry in TopicReader(log, topics.name("ledger"), 0, decode=sealed).catch_up():
        if entry.record is None or entry.record.header("type") not in _WANTED:
            continue
        event = entry_of(entry.record).event
        if isinstance(event, EpochStarted):
            epoch = entry.offset
        elif isinstance(event, EngineQuarantined) and event.epoch == epoch:
            found.append(event)
    return found


def _last_signs(log: EventLog, topics: Topics, daemons: Collection[str]) -> dict[str, int]:
    """Daemon → time of its newest record in `metrics` (ms)."""
    found: dict[str, int] = {}
    losses = Losses("signs of life", "continue")
    try:
        for count, record in enumerate(records_backwards(log, topics.name("metrics"), 0, losses)):
            if count >= _MOST_METRICS or len(found) == len(daemons):
                break
            daemon = (record.header("by") or b"").decode("utf-8", "replace")
            if daemon in daemons:
                found.setdefault(daemon, record.timestamp_ms)
    except UnknownTopic:
        pass
    return found


def as_json(rows: Sequence[EngineRow]) -> str:
    """One JSON object a line."""
    return "".join(msgspec.json.encode(row).decode() + "\n" for row in rows)


def as_table(rows: Sequence[EngineRow]) -> str:
    """A table, and below it why an engine is in trouble; "" without engines."""
    if not rows:
        return ""
    table = [("ENGINE", "STATE", "VERSION", "DIGEST", "TRANSPORT", "DEVICE", "SINCE", "HEARD", "TAKES")]
    table += [
        (
            row.engine,
            row.state,
            f"e{row.epoch}-v{row.version}" if row.version >= 0 else "-",
            row.digest[:12] or "-",
            row.transport or "-",
            row.device or "-",
            stamp(row.since_ms),
            stamp(row.heard_ms),
            row.taking or "-",
        )
        for row in rows
    ]
    return columns(table) + "".join(f"  {plain(row.engine)}: {plain(row.why)}\n" for row in rows if row.why)
