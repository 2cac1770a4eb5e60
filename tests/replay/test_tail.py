"""Tail: where it starts, when it stops, what it picks, and that it leaves no trace."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

import msgspec
import pytest

from replay.picks import Meets, NamesGroup, NamesSample
from replay.records import Entry
from replay.tail import Start, Tail, newest_ms, parse_start
from replay.where import parse_where
from streams import codec
from streams.errors import ConfigError
from streams.events import DeadLetter, Metrics
from streams.log import EventLog, NewRecord, Record
from streams.memory import MemoryLog, MemoryStore
from tests.support.recorded import recorded

DEADLINE_S = 10.0


def log_with(*timestamps: list[int]) -> tuple[EventLog, str]:
    """A topic with one partition per list; one small event at each timestamp."""
    log = MemoryLog()
    log.create_topic("run.metrics", len(timestamps))
    for partition, moments in enumerate(timestamps):
        for moment in moments:
            event = Metrics(source="feeder", values={"at": float(moment)}, at_ms=moment)
            log.append(
                "run.metrics", partition, [codec.encode(event, producer="feeder", timestamp_ms=moment)]
            )
    return log, "run.metrics"


def offsets(entries: Iterable[tuple[int, Entry]]) -> list[tuple[int, int]]:
    return [(partition, entry.offset) for partition, entry in entries]


def tail(log: EventLog, topic: str, where: str, **options) -> list[tuple[int, int]]:
    partitions = options.pop("partitions", range(log.topics()[topic]))
    return offsets(Tail(log, topic, partitions, parse_start(where), until_end=True, **options))


# ---------------------------------------------------------------- where it starts
@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("beginning", Start("beginning")),
        ("earliest", Start("beginning")),
        ("end", Start("end")),
        ("latest", Start("end")),
        ("0", Start("offset", 0)),
        ("17", Start("offset", 17)),
        ("-5", Start("last", 5)),
        ("@1793527200000", Start("time", 1793527200000)),
        ("@2026-11-01T10:00:00Z", Start("time", 1793527200000)),
        ("@2026-11-01T18:00:00.250+08:00", Start("time", 1793527200250)),
        ("@2026-11-01T10:00:00.5Z", Start("time", 1793527200500)),
        ("@2026-11-01T10:00:00.123456789Z", Start("time", 1793527200123)),
    ],
)
def test_starting_places(text: str, start: Start):
    assert parse_start(text) == start


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("@1793527200", "-o @1793527200: seconds or milliseconds? write milliseconds"),
        ("@2026-11-01T10:00:00", "in which time zone"),
        ("@yesterday", "not a time"),
        ("+5", "must be beginning, end"),
        ("first", "must be beginning, end"),
        ("", "must be beginning, end"),
    ],
)
def test_unclear_starting_places_are_refused_by_name(text: str, complaint: str):
    with pytest.raises(ConfigError, match="-o") as refusal:
        parse_start(text)
    assert complaint in str(refusal.value)


def test_it_starts_where_it_is_told_to():
    log, topic = log_with([1000, 2000, 3000, 4000])
    assert tail(log, topic, "beginning") == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert tail(log, topic, "2") == [(0, 2), (0, 3)]
    assert tail(log, topic, "-1") == [(0, 3)]
    assert tail(log, topic, "-99") == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert tail(log, topic, "end") == []


def test_a_time_starts_at_the_first_record_that_is_not_older():
    log, topic = log_with([1793527200000, 1793527201000, 1793527202000])
    assert tail(log, topic, "@1793527200001") == [(0, 1), (0, 2)]
    assert tail(log, topic, "@2026-11-01T10:00:02Z") == [(0, 2)]


def test_the_last_n_are_those_of_each_partition():
    log, topic = log_with([1000, 3000], [2000, 4000])
    assert tail(log, topic, "-1") == [(0, 1), (1, 1)]


def test_several_partitions_come_merged_by_time():
    log, topic = log_with([1000, 4000, 5000], [2000, 3000], [])
    assert tail(log, topic, "beginning") == [(0, 0), (1, 0), (1, 1), (0, 1), (0, 2)]
    assert tail(log, topic, "beginning", partitions=[1]) == [(1, 0), (1, 1)]


def test_what_retention_removed_is_counted_and_the_rest_shown():
    log, topic = log_with([1000, 2000, 3000])
    log.truncate_before(topic, 0, 2)
    shown = Tail(log, topic, [0], parse_start("0"), until_end=True)
    assert offsets(shown) == [(0, 2)]
    assert shown.lost == 2


def test_an_offset_beyond_the_end_of_every_partition_is_refused_with_the_ends():
    log, topic = log_with([1000, 2000], [3000])
    with pytest.raises(ConfigError) as refusal:
        tail(log, topic, "3")
    assert (
        "-o 3: beyond the end of run.metrics, whose next offset is 2 in partition 0, 1 in partition 1"
        in str(refusal.value)
    )
    assert tail(log, topic, "2") == [], "the end itself is a place where something may come"
    assert tail(log, topic, "1") == [(0, 1)], "partition 1 has not come so far"


@pytest.mark.parametrize("is_bounded", [True, False])
def test_an_offset_that_a_partition_has_not_reached_is_waited_for(is_bounded: bool):
    log, topic = log_with([1000, 2000, 3000], [1500])
    shown = Tail(log, topic, [0, 1], parse_start("2"), until_end=is_bounded, count=None if is_bounded else 2)
    found = iter(shown)
    assert offsets([next(found)]) == [(0, 2)]
    append(log, topic, 1, 4000, 5000, 6000)
    assert offsets(found) == ([] if is_bounded else [(1, 2)])


def test_a_time_after_the_end_shows_nothing_or_waits_for_the_first_record_that_is_not_older():
    log, topic = log_with([1793527200000])
    where = "@2026-11-01T10:00:10Z"
    assert tail(log, topic, where) == []
    found = iter(Tail(log, topic, [0], parse_start(where), count=2, on_wait=grow(log, topic)))
    assert offsets(found) == [(0, 2), (0, 3)], "1 is still too old; once reached, order is the log's"


def grow(log: EventLog, topic: str):
    """One more second's record at each wait, from five seconds before the time on; then one out of order."""
    moments = iter([1793527205000, 1793527210000, 1793527201000])

    def on_wait() -> None:
        append(log, topic, 0, next(moments))

    return on_wait


def append(log: EventLog, topic: str, partition: int, *moments: int) -> None:
    for moment in moments:
        event = Metrics(source="feeder", values={}, at_ms=moment)
        log.append(topic, partition, [codec.encode(event, producer="feeder", timestamp_ms=moment)])


def test_the_newest_timestamp_is_that_of_the_last_records():
    log, topic = log_with([1000, 4000], [5000, 2000], [])
    assert newest_ms(log, topic, [0, 1]) == 4000
    assert newest_ms(log, topic, [2]) is None


# ---------------------------------------------------------------- when it stops
def test_a_count_stops_it():
    log, topic = log_with([1000, 2000], [1500])
    assert tail(log, topic, "beginning", count=2) == [(0, 0), (1, 0)]


def test_the_end_is_the_one_at_the_start_of_reading():
    log, topic = log_with([1000, 2000])
    shown = Tail(log, topic, [0], parse_start("beginning"), until_end=True)
    log.append(topic, 0, [NewRecord(b"late")])
    assert offsets(shown) == [(0, 0), (0, 1)]


def test_without_an_end_it_waits_for_more():
    store = MemoryStore()
    log = MemoryLog(store)
    log.create_topic("run.metrics", 1)

    def write_later() -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not shown and time.monotonic() < deadline:
            time.sleep(0.01)
        with MemoryLog(store) as writer:
            writer.append("run.metrics", 0, [NewRecord(b"second")])

    shown: list[tuple[int, int]] = []
    log.append("run.metrics", 0, [NewRecord(b"first")])
    writer = threading.Thread(target=write_later)
    writer.start()
    for partition, entry in Tail(log, "run.metrics", [0], parse_start("beginning"), count=2):
        shown.append((partition, entry.offset))
    writer.join(DEADLINE_S)
    assert shown == [(0, 0), (0, 1)]


def test_it_leaves_no_trace_in_the_log():
    log, topics = recorded()
    for word in ("tasks", "trajectories", "groups", "ledger"):
        assert tail(log, topics.name(word), "beginning")
    assert log.groups() == []
    for partition in range(2):  # nobody holds a share: a member can still join
        log.join("rollout", topics.name("tasks"), replica=partition, replicas=2).close()


# ---------------------------------------------------------------- what it picks
def test_it_picks_what_names_a_group():
    log, topics = recorded()
    assert tail(log, topics.name("tasks"), "beginning", picks=[NamesGroup("0-3")]) == [(1, 1)]
    assert tail(log, topics.name("trajectories"), "beginning", picks=[NamesGroup("0-3")]) == [(1, 2), (1, 3)]
    assert tail(log, topics.name("ledger"), "beginning", picks=[NamesGroup("0-3")]) == [(0, 5)]
    assert tail(log, topics.name("ledger"), "beginning", picks=[NamesGroup("0-4")]) == [(0, 5)], (
        "a drop is named there too"
    )


def test_it_picks_what_names_a_sample():
    log, topics = recorded()
    assert tail(log, topics.name("trajectories"), "beginning", picks=[NamesSample("0-3/1/0")]) == [(1, 3)]
    assert tail(log, topics.name("groups"), "beginning", picks=[NamesSample("0-3/1/0")]) == [(1, 1)]
    assert tail(log, topics.name("ledger"), "beginning", picks=[NamesSample("0-3/1/0")]) == [(0, 5)]


def test_a_count_counts_what_is_shown():
    log, topics = recorded()
    assert tail(log, topics.name("trajectories"), "beginning", picks=[NamesGroup("0-3")], count=1) == [(1, 2)]


def test_every_pick_must_agree():
    log, topics = recorded()
    both = [NamesGroup("0-3"), NamesSample("0-3/1/0"), Meets(parse_where("offset > 2 and index == 1"))]
    assert tail(log, topics.name("trajectories"), "beginning", picks=both) == [(1, 3)]
    assert tail(log, topics.name("trajectories"), "beginning", picks=[*both, NamesGroup("0-1")]) == []


def test_a_dead_letter_names_what_its_record_carried():
    log = MemoryLog()
    log.create_topic("run.dead", 1)
    letter = DeadLetter(
        topic="run.rewards",
        partition=0,
        offset=1,
        raw=b"",
        raw_headers=[("id", b"0-3/1/0")],
        stage="s",
        reason="r",
    )
    log.append("run.dead", 0, [codec.encode(letter, producer="test")])
    for pick in (NamesGroup("0-3"), NamesSample("0-3/1/0")):
        assert tail(log, "run.dead", "beginning", picks=[pick]) == [(0, 0)]
    assert tail(log, "run.dead", "beginning", picks=[NamesSample("0-3/0/0")]) == []


def test_an_id_that_the_header_cuts_short_is_looked_for_in_the_event():
    long_id = "group-" + "x" * 130
    log, topics = recorded(lambda event: renamed(event, long_id))
    assert tail(log, topics.name("tasks"), "beginning", picks=[NamesGroup(long_id)]) == [(1, 1)]
    assert tail(log, topics.name("tasks"), "beginning", picks=[NamesGroup(long_id[:120])]) == []


def renamed(event, group_id: str):
    named = getattr(event, "group_id", "") == "0-3"
    return msgspec.structs.replace(event, group_id=group_id) if named else event


# ---------------------------------------------------------------- what is decoded
class Counted:
    """Stands for `entry_of` and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.offsets: list[int] = []
        monkeypatch.setattr("replay.tail.entry_of", self)

    def __call__(self, record: Record) -> Entry:
        self.offsets.append(record.offset)
        return Entry(record.offset, record.timestamp_ms, None, "", record)


def test_only_what_is_shown_is_decoded(monkeypatch: pytest.MonkeyPatch):
    log, topics = recorded()
    counted, topic = Counted(monkeypatch), topics.name("trajectories")
    tail(log, topic, "beginning", opens=False)
    assert counted.offsets == [], "a format that shows places alone"
    tail(log, topic, "beginning", picks=[Meets(parse_where("offset == 2 and partition == 1"))])
    assert counted.offsets == [2]
    counted.offsets.clear()
    tail(log, topic, "beginning", picks=[NamesSample("0-3/1/0")], opens=False)
    assert counted.offsets == [2, 3], "the samples of its group: their headers say so"


def test_a_sealed_entry_that_a_condition_needs_is_opened():
    log, topics = recorded()
    topic, picks = topics.name("trajectories"), [Meets(parse_where("7 in response_ids and index == 0"))]
    found = list(Tail(log, topic, [1], parse_start("beginning"), until_end=True, picks=picks, opens=False))
    assert [entry.offset for _, entry in found] == [0, 2, 4]


def test_a_record_that_cannot_be_read_is_an_entry_and_stops_nothing():
    log, topic = log_with([1000])
    log.append(topic, 0, [NewRecord(b"\xc1ga")])
    log.append(topic, 0, [codec.encode(Metrics(source="x", values={}), producer="x")])
    shown = list(Tail(log, topic, [0], parse_start("beginning"), until_end=True))
    assert [(entry.offset, bool(entry.problem)) for _, entry in shown] == [(0, False), (1, True), (2, False)]


def test_memory_holds_one_read_of_each_partition():
    log, topic = log_with([1000 + each for each in range(3000)], [1000 + each for each in range(3000)])
    shown = Tail(log, topic, [0, 1], parse_start("beginning"), until_end=True)
    most = 0
    for _ in shown:
        most = max(most, sum(len(waiting) for waiting in shown._waiting.values()))
    assert shown.shown == 6000 and most <= 1000
