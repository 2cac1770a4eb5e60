"""Which engine held which version, and when, from `fleet`."""

from __future__ import annotations

from collections.abc import Iterable

from replay.fleet import SERVES_NO_LONGER, is_same
from replay.lives.facts import Attempt, Holder
from replay.lives.run import RunFacts
from replay.records import Entry, entries
from streams.events import EngineFailed, EngineJoined, EngineLeft, EngineReady, EngineUpdating

_OF_SAMPLES = "bad_samples"  # the one EngineFailed that says nothing of what the engine holds or takes


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
    incarnations: dict[str, str] = {}
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
                    transport=ready.transport,
                    checksum=ready.checksum,
                    incarnation=ready.incarnation,
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
            before, incarnations[event.engine] = incarnations.get(event.engine, ""), event.incarnation
            if not is_same(event, before):
                end(event.engine, at_ms, "started anew, without having left")
        elif isinstance(event, EngineFailed) and event.reason in SERVES_NO_LONGER:
            why = "quarantined" if event.reason == "quarantined" else "failed"
            end(event.engine, at_ms, f"{why}: {event.detail}")
    for engine in list(open_since):
        end(engine, None, "")
    return sorted(found, key=lambda each: (each.from_ms, each.engine))


def attempts_on(fleet: Iterable[Entry], version: int, epoch: int | None) -> list[Attempt]:
    """Each time an engine began to take it and did not come to hold it that way, by time.

    One that is under way, or whose engine was killed in the middle, has no outcome.
    """
    under_way: dict[str, tuple[int, EngineUpdating]] = {}
    incarnations: dict[str, str] = {}
    found: list[Attempt] = []

    def end(engine: str, at_ms: int | None, outcome: str) -> None:
        if engine in under_way:
            from_ms, began = under_way.pop(engine)
            found.append(
                Attempt(
                    engine=engine,
                    epoch=began.epoch,
                    transport=began.transport,
                    from_ms=from_ms,
                    until_ms=at_ms,
                    outcome=outcome,
                )
            )

    for entry in fleet:
        event = entry.event
        at_ms = getattr(event, "at_ms", 0) or entry.timestamp_ms
        if isinstance(event, EngineUpdating):
            end(event.engine, at_ms, f"went on to e{event.epoch}-v{event.version} by {event.transport}")
            if event.version == version and epoch in (None, event.epoch):
                under_way[event.engine] = (at_ms, event)
        elif isinstance(event, EngineReady):
            began = under_way.get(event.engine)
            if began is not None and (began[1].epoch, began[1].version) == (event.epoch, event.version):
                del under_way[event.engine]
            end(event.engine, at_ms, f"took e{event.epoch}-v{event.version} instead")
        elif isinstance(event, EngineFailed) and event.reason != _OF_SAMPLES:
            end(event.engine, at_ms, f"failed: {event.reason}: {event.detail}")
        elif isinstance(event, EngineLeft):
            end(event.engine, at_ms, "left")
        elif isinstance(event, EngineJoined):
            before, incarnations[event.engine] = incarnations.get(event.engine, ""), event.incarnation
            if not is_same(event, before):
                end(event.engine, at_ms, "started anew, without having left")
    for engine in list(under_way):
        end(engine, None, "")
    return sorted(found, key=lambda each: (each.from_ms, each.engine))
