"""Who holds what: the engines as the log tells of them, and each one's tries at a version."""

from __future__ import annotations

import json

import pytest

from replay.fleet import EngineRow, as_json, as_table, fleet_rows, fold
from replay.lives.fleet import attempts_on, holders_of
from replay.records import entries
from streams import codec
from streams.events import (
    EngineFailed,
    EngineJoined,
    EngineLeft,
    EngineQuarantined,
    EngineReady,
    EngineUpdating,
    EpochStarted,
    Event,
    Metrics,
    TransferGroupFormed,
)
from streams.log import EventLog
from streams.memory import MemoryLog
from streams.topics import Topics
from tests.support.events import put, run_log

E = "rollout-0"


def joined(incarnation: str = "a1", at_ms: int = 1, **changes) -> EngineJoined:
    fields = {"engine": E, "replica": 0, "host": "h", "pid": 7, "device": "cuda", "n_ranks": 2}
    return EngineJoined(**{**fields, "incarnation": incarnation, "at_ms": at_ms, **changes})


def updating(version: int, at_ms: int = 2, transport: str = "disk", held: int = -1) -> EngineUpdating:
    return EngineUpdating(
        engine=E, epoch=1, version=version, from_version=held, transport=transport, at_ms=at_ms
    )


def ready(version: int, at_ms: int = 3, transport: str = "disk", digest: str = "d", **changes) -> EngineReady:
    return EngineReady(
        engine=E, epoch=1, version=version, digest=digest, transport=transport, at_ms=at_ms, **changes
    )


def failed(reason: str, detail: str = "why", at_ms: int = 4) -> EngineFailed:
    return EngineFailed(engine=E, reason=reason, detail=detail, at_ms=at_ms)


def left(at_ms: int = 5) -> EngineLeft:
    return EngineLeft(engine=E, at_ms=at_ms)


def quarantined(incarnation: str = "a1", epoch: int = 1) -> EngineQuarantined:
    return EngineQuarantined(
        epoch=epoch, engine=E, incarnation=incarnation, step=8, mismatch=0.5, limit=0.1, n_samples=16,
        n_tokens=400, at_ms=9,
    )  # fmt: skip


def row(*events: Event, quarantines=()) -> EngineRow:
    [found] = fold([(event, 0) for event in events], quarantines)
    return found


# ---------------------------------------------------------------- states
@pytest.mark.parametrize(
    ("told", "state", "held", "since_ms"),
    [
        ([joined()], "joining", -1, 1),
        ([joined(), updating(0)], "loading", -1, 2),
        ([joined(), updating(0), ready(0)], "ready", 0, 3),
        ([joined(), ready(0), updating(1, 6, held=0)], "updating", 0, 6),
        ([joined(), ready(0), updating(1, 6, held=0), ready(1, 7)], "ready", 1, 7),
        ([joined(), updating(0), failed("weights_unreadable")], "failed", -1, 4),
        ([joined(), ready(0), failed("engine")], "failed", 0, 4),
        ([joined(), ready(0), failed("engine"), left()], "failed", 0, 4),
        ([joined(), ready(0), failed("quarantined"), left()], "quarantined", 0, 4),
        ([joined(), ready(0), left()], "left", 0, 5),
        ([joined(), ready(0), left(), joined("a2", 8)], "joining", -1, 8),
    ],
)
def test_each_event_of_fleet_leads_to_its_state(told, state, held, since_ms):
    found = row(*told)
    assert (found.state, found.version, found.since_ms) == (state, held, since_ms)


def test_an_engine_that_goes_on_with_what_it_holds_says_its_trouble():
    found = row(
        joined(), ready(4), updating(5, held=4), failed("transfer_failed", "bucket 2"), failed("bad_samples")
    )
    assert (found.state, found.version, found.why) == ("updating", 4, "bad_samples: why")
    assert found.taking == "e1-v5 by disk"
    assert row(joined(), ready(4), failed("transfer_failed"), ready(5)).why == ""


def test_a_row_says_what_is_held_by_which_way_on_which_device():
    found = row(
        joined(), updating(3, transport="distributed"), ready(3, transport="distributed", digest="abc")
    )
    assert (found.epoch, found.version, found.digest, found.transport) == (1, 3, "abc", "distributed")
    assert (found.device, found.n_ranks, found.host, found.pid, found.incarnation) == (
        "cuda",
        2,
        "h",
        7,
        "a1",
    )


def test_a_process_that_says_more_of_itself_has_not_started_anew():
    found = row(joined(n_ranks=0), ready(3), joined(n_ranks=4, at_ms=6))
    assert (found.state, found.version, found.n_ranks) == ("ready", 3, 4)
    assert row(joined(""), ready(3), joined("", 6)).state == "joining", "nobody says that it is the same"


def test_a_quarantine_is_the_state_of_its_own_incarnation_alone():
    found = row(joined(), ready(3), quarantines=[quarantined()])
    assert (found.state, found.since_ms, found.version) == ("quarantined", 9, 3)
    assert found.why == "mean difference of log-probs 0.5 nat per token, over 0.1, at step 8"
    again = row(joined(), ready(3), left(), joined("a2"), ready(3), quarantines=[quarantined()])
    assert (again.state, again.why) == ("ready", "")


# ---------------------------------------------------------------- from the log
def fleet_log(*events: Event) -> tuple[EventLog, Topics]:
    log, topics = run_log()
    for event in events:
        put(log, topics, "fleet", event)
    return log, topics


def test_void_quarantines_do_not_count_and_a_sign_of_life_is_the_daemons_newest_record():
    log, topics = fleet_log(joined(), ready(3))
    first = put(log, topics, "ledger", EpochStarted(producer="a", started_ms=1))
    second = put(log, topics, "ledger", EpochStarted(producer="b", started_ms=2))
    put(log, topics, "ledger", quarantined(epoch=first))
    [found] = fleet_rows(log, topics)
    assert (found.state, found.heard_ms) == ("ready", 0)
    put(log, topics, "ledger", quarantined(epoch=second))
    for daemon in (E, "trainer"):
        sign = codec.encode(Metrics(source=daemon, values={}), producer=daemon)
        log.append(topics.name("metrics"), 0, [sign])
    [found] = fleet_rows(log, topics)
    newest = next(each for each in entries(log, topics.name("metrics"), 0))
    assert (found.state, found.heard_ms) == ("quarantined", newest.timestamp_ms)


def test_events_of_transfers_are_no_engines_and_an_empty_fleet_shows_nothing():
    formed = TransferGroupFormed(
        epoch=1, group="g", backend="gloo", address="h", port=1, world_size=2, members=[(E, 1, 1)],
        bucket_bytes=1, deadline_s=1,
    )  # fmt: skip
    log, topics = fleet_log(formed)
    assert fleet_rows(log, topics) == [] and as_table([]) == as_json([]) == ""
    other, nothing = MemoryLog(), Topics("none", 1)
    assert fleet_rows(other, nothing) == [], "a run whose topics are not there yet"


def test_the_table_has_one_line_an_engine_and_says_below_what_is_wrong():
    text = as_table(
        [row(joined(), ready(3, digest="d" * 64)), row(joined(), failed("engine", "gone\x1b[2J"))]
    )
    lines = text.splitlines()
    assert lines[0].split() == [
        "ENGINE", "STATE", "VERSION", "DIGEST", "TRANSPORT", "DEVICE", "SINCE", "HEARD", "TAKES"
    ]  # fmt: skip
    assert lines[1].split() == [
        E,
        "ready",
        "e1-v3",
        "d" * 12,
        "disk",
        "cuda",
        "1970-01-01T00:00:00.003Z",
        "-",
        "-",
    ]
    assert lines[3] == "  rollout-0: engine: gone\\x1b[2J"
    assert json.loads(as_json([row(joined(), ready(3))]))["state"] == "ready"


# ---------------------------------------------------------------- the life of a version
def fleet_of(*events: Event):
    log, topics = fleet_log(*events)
    return list(entries(log, topics.name("fleet"), 0))


def test_a_version_was_held_until_the_engine_was_quarantined_and_says_by_which_way_it_came():
    fleet = fleet_of(
        joined(), ready(3, transport="ipc", incarnation="a1", checksum="c"), failed("quarantined"), left()
    )
    [held] = holders_of(fleet, 3, 1, {1: {"d"}})
    assert (held.transport, held.checksum, held.incarnation) == ("ipc", "c", "a1")
    assert (held.until_ms, held.ended_by) == (4, "quarantined: why")


def test_a_process_that_says_more_of_itself_holds_what_it_held():
    [held] = holders_of(fleet_of(joined(), ready(3), joined(n_ranks=4, at_ms=6)), 3, None, {})
    assert held.until_ms is None


@pytest.mark.parametrize(
    ("told", "outcomes"),
    [
        ([updating(3), ready(3)], []),
        ([updating(3, transport="distributed"), failed("transfer_failed"), updating(3, 6), ready(3, 7)],
         [("distributed", "failed: transfer_failed: why")]),
        ([updating(3, transport="distributed"), updating(4, 6)], [("distributed", "went on to e1-v4 by disk")]),
        ([updating(3), ready(4)], [("disk", "took e1-v4 instead")]),
        ([updating(3), left()], [("disk", "left")]),
        ([updating(3), joined("a2")], [("disk", "started anew, without having left")]),
        ([updating(3), joined("a1"), ready(3)], []),
        ([updating(3), failed("bad_samples"), ready(3)], []),
        ([updating(3)], [("disk", "")]),
    ],
)  # fmt: skip
def test_what_an_engine_began_and_did_not_come_to_hold_is_told_with_its_end(told, outcomes):
    found = attempts_on(fleet_of(joined(), *told), 3, 1)
    assert [(each.transport, each.outcome) for each in found] == outcomes
