"""Tail: where it starts, when it stops, what it shows, and that it leaves no trace."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

import msgspec
import pytest

from replay import render
from replay.records import Entry
from replay.tail import Start, Tail, parse_start
from streams import codec
from streams.errors import ConfigError
from streams.events import SCHEMA_MAJOR, SCHEMA_MINOR, DeadLetter, Metrics, tag_of
from streams.log import EventLog, NewRecord
from streams.memory import MemoryLog, MemoryStore
from streams.topics import Topics
from tests.support import recorded as run
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
    assert tail(log, topics.name("tasks"), "beginning", group_id="0-3") == [(1, 1)]
    assert tail(log, topics.name("trajectories"), "beginning", group_id="0-3") == [(1, 2), (1, 3)]
    assert tail(log, topics.name("ledger"), "beginning", group_id="0-3") == [(0, 5)]
    assert tail(log, topics.name("ledger"), "beginning", group_id="0-4") == [(0, 5)], (
        "a drop is named there too"
    )


def test_it_picks_what_names_a_sample():
    log, topics = recorded()
    assert tail(log, topics.name("trajectories"), "beginning", uid="0-3/1/0") == [(1, 3)]
    assert tail(log, topics.name("groups"), "beginning", uid="0-3/1/0") == [(1, 1)]
    assert tail(log, topics.name("ledger"), "beginning", uid="0-3/1/0") == [(0, 5)]


def test_a_count_counts_what_is_shown():
    log, topics = recorded()
    assert tail(log, topics.name("trajectories"), "beginning", group_id="0-3", count=1) == [(1, 2)]


# ---------------------------------------------------------------- how it looks
def entries_of(word: str, log: EventLog, topics: Topics) -> list[tuple[int, Entry]]:
    topic = topics.name(word)
    return list(Tail(log, topic, range(log.topics()[topic]), parse_start("beginning"), until_end=True))


def line_of(event) -> str:
    log = MemoryLog()
    log.create_topic("t", 1)
    log.append("t", 0, [codec.encode(event, producer="test", timestamp_ms=1793527200250)])
    (partition, entry), *_ = Tail(log, "t", [0], parse_start("beginning"), until_end=True)
    return render.line("t", partition, entry)


def test_a_line_names_time_place_type_and_what_is_not_a_default():
    assert line_of(run.task(3)) == (
        "2026-11-01T10:00:00.250Z t/0:0 task_dispatched group_id=0-3 seq=3 data_epoch=0 row=3 "
        "n_samples=2 prompt=p next_seq=4"
    )


def test_a_trajectory_is_one_short_line_with_its_columns_opened():
    line = line_of(run.finished(3, 1))
    assert "uid=0-3/1/0" in line
    assert "response_ids=[3,4,5,6,…5]" in line
    assert "versions=e1v1×5" in line
    assert len(line) < 400


def test_a_cut_says_how_many_and_how_old():
    line = line_of(run.cut(2, [2, 3], [3, 2]))
    assert (
        "step=2 version=1 epoch=1 limit=1 groups=[0-2,0-3] samples=4 tokens=16 reward=0.5 staleness=0..1"
        in line
    )


def test_every_event_type_of_a_run_has_a_line_and_a_json_object():
    log, topics = recorded()
    for word in ("tasks", "trajectories", "groups", "ledger"):
        for partition, entry in entries_of(word, log, topics):
            assert entry.event is not None
            assert tag_of(entry.event) in render.line(word, partition, entry)
            shown = msgspec.json.decode(render.as_json(topics.name(word), partition, entry))
            assert (shown["type"], shown["partition"], shown["offset"]) == (
                tag_of(entry.event),
                partition,
                entry.offset,
            )


def test_an_unknown_type_is_shown_verbatim():
    log = MemoryLog()
    log.create_topic("t", 1)
    log.append(
        "t", 0, [NewRecord(msgspec.msgpack.encode({"type": "lease", "holder": "engine-0", "until": 17}))]
    )
    ((partition, entry),) = Tail(log, "t", [0], parse_start("beginning"), until_end=True)
    assert '?lease {"type": "lease", "holder": "engine-0", "until": 17}' in render.line("t", partition, entry)
    assert msgspec.json.decode(render.as_json("t", partition, entry))["event"]["holder"] == "engine-0"


def test_a_record_that_cannot_be_read_is_shown_verbatim_and_stops_nothing():
    log, topic = log_with([1000])
    log.append(topic, 0, [NewRecord(b"\xc1ga\x1b[2J")])
    log.append(topic, 0, [codec.encode(Metrics(source="x", values={}), producer="x")])
    shown = list(Tail(log, topic, [0], parse_start("beginning"), until_end=True))
    assert [entry.offset for _, entry in shown] == [0, 1, 2]
    line = render.line("metrics", 0, shown[1][1])
    assert r"raw=b'\xc1ga\x1b[2J'" in line
    assert "\x1b" not in line, "nothing that a terminal acts on"
    assert "wRdh" not in line
    assert msgspec.json.decode(render.as_json(topic, 0, shown[1][1]))["raw"] == "wWdhG1sySg=="


def test_a_dead_letter_shows_the_refused_bytes_and_headers():
    letter = DeadLetter(
        topic="run.tasks",
        partition=1,
        offset=4,
        raw=b"\xc1ga",
        raw_headers=[("id", b"0-3")],
        stage="rollout",
        reason="undecodable",
        detail="not MessagePack",
    )
    line = line_of(letter)
    assert "at=run.tasks/1:4 stage=rollout reason=undecodable" in line
    assert 'detail="not MessagePack"' in line
    assert r"raw=b'\xc1ga'" in line


def test_control_characters_in_a_text_are_escaped():
    line = line_of(msgspec.structs.replace(run.task(0), prompt="a\x1b[2J\nb"))
    assert "\x1b" not in line
    assert "\n" not in line


def test_the_format_string_is_kcats():
    log, topics = recorded()
    show = render.formatter(r"%t %p %o %k %T %S %%\t%h\n")
    partition, entry = entries_of("tasks", log, topics)[0]
    assert entry.record is not None
    size = len(entry.record.value)
    assert show("run.tasks", partition, entry) == (
        f"run.tasks 0 0 0-0 {entry.timestamp_ms} {size} %\t"
        f"schema={SCHEMA_MAJOR}.{SCHEMA_MINOR},type=task_dispatched,by=test,id=0-0\n"
    )
    event = msgspec.json.decode(render.formatter("%s")("run.tasks", partition, entry))
    assert (event["group_id"], event["seq"]) == ("0-0", 0)


@pytest.mark.parametrize("template", ["%z", "%", "\\", "\\q"])
def test_an_unknown_format_sign_is_refused(template: str):
    with pytest.raises(ConfigError, match="is unknown; known are"):
        render.formatter(template)
