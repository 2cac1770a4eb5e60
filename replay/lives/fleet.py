"""Which engine held which version, and when, from `fleet`."""

from __future__ import annotations

from collections.abc import Iterable

from replay.lives.facts import Holder
from replay.lives.run import RunFacts
from replay.records import Entry, entries
from streams.events import EngineFailed, EngineJoined, EngineLeft, EngineReady

SERVES_NO_LONGER = (
    "engine"  # reason of the one EngineFailed that ends an engine; after others it holds what it held
)


def fleet_entries(run: RunFacts) -> list[Entry]:
    return list(entries(run.log, run.topics.name("fleet"), 0))


def ready_with(
    fleet: Iterable[Entry], version: int, epoch: int | None = None
) -> list[tuple[Entry, EngineReady]]:
    """When engines said that they hold it."""
    return [
        (entry, entry.event)
        for entry in fleet
        if isinstance(entry.event, EngineReady)
        and entry.event.version == version
        and epoch in (None, entry.event.epoch)
    ]


def holders_of(
    fleet: Iterable[Entry], version: int, epoch: int | None, published: dict[int, set[str]]
) -> list[Holder]:
    """Each time an engine held it: from its EngineReady to whatever it said next that ends that.

    `published`: epoch → digests that were published for this version.
    """
    open_since: dict[str, tuple[int, EngineReady]] = {}
    found: list[Holder] = []

    def end(engine: str, at_ms: int | None, why: str) -> None:
        if engine in open_since:
            since, ready = open_since.pop(engine)
            known = ready.digest in published.get(ready.epoch, set())
            found.append(
                Holder(
                    engine=engine,
                    epoch=ready.epoch,
                    from_ms=since,
                    until_ms=at_ms,
                    ended_by=why,
                    digest=ready.digest,
                    is_published_digest=known,
                    load_s=ready.load_s,
                    stall_s=ready.stall_s,
                )
            )

    for entry in fleet:
        event = entry.event
        at_ms = getattr(event, "at_ms", 0) or entry.timestamp_ms
        if isinstance(event, EngineReady):
            end(event.engine, at_ms, f"took e{event.epoch}-v{event.version}")
            if event.version == version and epoch in (None, event.epoch):
                open_since[event.engine] = (at_ms, event)
        elif isinstance(event, EngineLeft):
            end(event.engine, at_ms, "left")
        elif isinstance(event, EngineJoined):
            end(event.engine, at_ms, "started anew, without having left")
        elif isinstance(event, EngineFailed) and event.reason == SERVES_NO_LONGER:
            end(event.engine, at_ms, f"failed: {event.detail}")
    for engine in list(open_since):
        end(engine, None, "")
    return sorted(found, key=lambda each: (each.from_ms, each.engine))
