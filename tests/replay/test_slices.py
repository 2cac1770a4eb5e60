"""Slices: what a piece of a log holds, that it comes back byte for byte at its old offsets, and what is refused."""

from __future__ import annotations

import random
import shutil
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest

from replay.ledger import read_run
from replay.records import entries
from replay.slices import select
from replay.slices.filler import LEFT_OUT, is_left_out
from replay.slices.format import Manifest, SliceError, SliceReader, SliceWriter
from replay.slices.record import write_slice
from replay.slices.restore import restore
from replay.slices.select import Stretch, Stretches
from replay.verify import verify
from streams.embedded.begun import create_topic_at
from streams.embedded.log import EmbeddedLog
from streams.errors import ConfigError, OffsetOutOfRange
from streams.events import BatchCut, DeadLetter, Event
from streams.log import EventLog, NewRecord, Record, read_all
from streams.memory import MemoryLog
from streams.open import open_log
from streams.topics import ALL_TOPICS, Topics
from tests.support import recorded as run
from tests.support.events import put
from tests.support.world import World


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    """A finished run of the real stages with lost and doubled samples, 13 steps."""
    world = World(
        tmp_path_factory.mktemp("world"),
        rows=16,
        loses=lambda uid: uid == "0-3/1/0",
        doubles=lambda uid: uid.startswith("1-2"),
    )
    try:
        world.run(random.Random(4))
    finally:
        world.close()
    return world


def made(path: Path, log: EventLog, topics: Topics, stretches: Stretches, **options: Any) -> Path:
    write_slice(
        path,
        log,
        topics,
        stretches,
        **{"source": "memory", "chosen": "…", "config": "", "fingerprint": "f", "made_ms": 1, **options},
    )
    return path


def opened(path: Path, run_dir: Path) -> EventLog:
    run_dir.mkdir()
    with SliceReader(path) as reader:
        restore(path, reader, run_dir)
    return EmbeddedLog(run_dir / "log", readonly=True)


def records(log: EventLog, topics: Topics) -> dict[tuple[str, int], list[Record]]:
    return {
        (word, partition): list(
            read_all(log, topics.name(word), partition, log.start(topics.name(word), partition))
        )
        for word in ALL_TOPICS
        for partition in range(topics.count(word))
    }


# ---------------------------------------------------------------- round trips
def test_a_whole_run_comes_back_byte_for_byte(tmp_path, world):
    path = made(tmp_path / "s", world.log, world.topics, select.everything(world.log, world.topics))
    with opened(path, tmp_path / "run") as log:
        assert records(log, world.topics) == records(world.log, world.topics)
        assert log.topics() == world.log.topics()
        assert verify(log, world.topics).holds


def test_a_partition_that_retention_cut_keeps_its_offsets(tmp_path):
    log, topics = run.recorded()
    log.truncate_before("run.trajectories", 1, 3)
    path = made(tmp_path / "s", log, topics, select.everything(log, topics))
    with opened(path, tmp_path / "run") as imported:
        assert imported.start("run.trajectories", 1) == 3
        assert records(imported, topics) == records(log, topics)


def test_what_is_no_event_and_has_no_headers_is_kept_too(tmp_path):
    log, topics = run.recorded()
    strange = NewRecord(bytes(range(256)), (("x", b"\xff\x00"), ("x", b"again")), -5)
    log.append("run.dead", 0, [strange, NewRecord(b"")])
    path = made(tmp_path / "s", log, topics, select.everything(log, topics))
    with opened(path, tmp_path / "run") as imported:
        found = records(imported, topics)["dead", 0]
        assert (found[0].value, found[0].headers, found[0].timestamp_ms) == strange
        assert found[1].value == b""


def test_a_record_over_the_limit_of_the_log_goes_to_a_claims_file(tmp_path):
    log, topics = MemoryLog(max_record_bytes=64 << 20), Topics("run", 1)
    topics.create(log)
    value = random.Random(1).randbytes(9 << 20)
    log.append("run.trajectories", 0, [NewRecord(value, (("type", b"x"),), 5)])
    path = made(tmp_path / "s", log, topics, select.everything(log, topics))
    opened(path, tmp_path / "run").close()
    url = (tmp_path / "run" / "log").as_uri()
    with open_log(url, claims=tmp_path / "run" / "claims", readonly=True) as imported:
        (record,) = imported.read("run.trajectories", 0, 0).records
    assert (record.value, record.timestamp_ms) == (value, 5)


def test_an_imported_log_can_be_written_to(tmp_path):
    create_topic_at(tmp_path / "log", "run.tasks", [7, 0])
    with EmbeddedLog(tmp_path / "log") as log:
        assert (log.start("run.tasks", 0), log.end("run.tasks", 0)) == (7, 7)
        assert log.append("run.tasks", 0, [NewRecord(b"a"), NewRecord(b"b")]) == 7
        assert log.append("run.tasks", 1, [NewRecord(b"c")]) == 0
        with pytest.raises(OffsetOutOfRange, match="7 records were removed by retention"):
            log.read("run.tasks", 0, 0)
    with EmbeddedLog(tmp_path / "log", readonly=True) as log:
        assert [record.offset for record in log.read("run.tasks", 0, 7).records] == [7, 8]


def test_files_come_along(tmp_path):
    log, topics = run.recorded()
    large = tmp_path / "weights"
    large.write_bytes(random.Random(2).randbytes(9 << 20))
    empty = tmp_path / "empty"
    empty.touch()
    files = {"model/w.safetensors": large, "model/deep/empty": empty}
    path = made(tmp_path / "s", log, topics, select.everything(log, topics), files=files)
    opened(path, tmp_path / "run").close()
    assert (tmp_path / "run/model/w.safetensors").read_bytes() == large.read_bytes()
    assert (tmp_path / "run/model/deep/empty").read_bytes() == b""


# ---------------------------------------------------------------- some steps
@pytest.mark.parametrize(("first", "last"), [(1, 3), (4, 6), (9, None), (None, 2), (5, 5)])
def test_a_slice_of_some_steps_is_a_run_that_an_audit_accepts(tmp_path, world, first, last):
    topics = world.topics
    stretches = select.of_steps(world.log, topics, first, last)
    with opened(made(tmp_path / "s", world.log, topics, stretches), tmp_path / "run") as log:
        report = verify(log, topics)
        assert report.holds, report.as_table()
        view, whole = read_run(log, topics), read_run(world.log, topics)
        end = last or whole.step
        assert view.step in (end, end + 1), "the next cut may come before this step's weights are published"
        wanted = [cut for cut in view.cuts if (first or 1) <= cut.event.step <= end]
        assert len(wanted) == end - (first or 1) + 1
        for cut in wanted:
            for group in cut.event.groups:
                for member in group.members:
                    found = log.read(topics.name("trajectories"), group.partition, member.trajectory_offset)
                    assert found.records[0].header("id") == member.uid.encode()
        assert any(each.step == end for each in view.versions), "with the weights that the last step made"
        assert report.notes.get(f"records of unknown type {LEFT_OUT}", 0) == 0


def test_what_an_earlier_step_took_out_of_turn_is_not_beyond_the_end(tmp_path):
    first, second = (run.cut(1, [0, 1], [1, 1]), run.cut(2, [2, 3], [3, 2]))

    def out_of_turn(event: Event) -> Event:
        if isinstance(event, BatchCut) and event.step in (1, 2):
            groups = (
                [first.groups[0], second.groups[1]]
                if event.step == 1
                else [second.groups[0], first.groups[1]]
            )
            return msgspec.structs.replace(event, groups=groups)
        return event

    log, topics = run.recorded(out_of_turn)
    stretches = select.of_steps(log, topics, 2, 2)
    assert stretches["trajectories", 1].end == 4 and stretches["groups", 1].end == 2


def test_steps_that_there_are_not_are_refused(world):
    with pytest.raises(ConfigError, match=r"--from-step 99: the run has steps 1 to "):
        select.of_steps(world.log, world.topics, 99, None)
    empty, topics = MemoryLog(), Topics("run", 1)
    topics.create(empty)
    with pytest.raises(ConfigError, match="the run has no steps yet"):
        select.of_steps(empty, topics, 1, 2)


def test_a_letter_about_a_record_beyond_the_slice_stays_at_home(tmp_path):
    log, topics = run.recorded()
    for offset in (1, 5):
        letter = DeadLetter(
            topic="run.trajectories",
            partition=0,
            offset=offset,
            raw=log.read("run.trajectories", 0, offset).records[0].value,
            stage="reward",
            reason="conflict",
        )
        put(log, topics, "dead", letter)
    stretches = select.of_steps(log, topics, 1, 1)
    with opened(made(tmp_path / "s", log, topics, stretches), tmp_path / "run") as imported:
        assert [record.offset for record in records(imported, topics)["dead", 0]] == [0]
        assert verify(imported, topics).holds


# ---------------------------------------------------------------- some groups
def group_of(event: Event | None) -> str | None:
    return getattr(event, "group_id", None)


def test_a_slice_of_some_groups_holds_no_other_group_s_records(tmp_path, world):
    topics = world.topics
    stretches = select.of_groups(world.log, topics, ["0-5", "0-6"])
    with opened(made(tmp_path / "s", world.log, topics, stretches), tmp_path / "run") as log:
        for word in ("tasks", "trajectories", "rewards", "groups"):
            for partition in range(topics.partitions):
                there = list(entries(log, topics.name(word), partition))
                whole = {e.offset: e for e in entries(world.log, topics.name(word), partition)}
                kept = {entry.offset: entry for entry in there if not is_left_out(entry)}
                assert {group_of(entry.event) for entry in kept.values()} <= {"0-5", "0-6"}
                wanted = {o for o, entry in whole.items() if group_of(entry.event) in ("0-5", "0-6")}
                assert set(kept) == wanted
                assert all(kept[offset].record == whole[offset].record for offset in kept)
        report = verify(log, topics)
        assert report.holds, report.as_table()
        assert read_run(log, topics).step < read_run(world.log, topics).step, (
            "the ledger ends with the groups"
        )


def test_groups_that_are_still_open_take_the_whole_ledger_along(tmp_path):
    log, topics = run.recorded(
        lambda event: None if isinstance(event, BatchCut) and event.step == 3 else event
    )
    stretches = select.of_groups(log, topics, ["0-5"])
    assert stretches["ledger", 0] == Stretch(0, log.end("run.ledger", 0))
    assert stretches["tasks", 1] == Stretch(2, 3, frozenset([2]))
    assert stretches["tasks", 0] == Stretch(3, 3)


def test_a_group_that_there_is_not_is_refused_with_its_nearest_name(world):
    with pytest.raises(ConfigError, match=r"--groups 0-33: the run has no such group; did you mean 0-3\?"):
        select.of_groups(world.log, world.topics, ["0-3", "0-33"])


def test_a_slice_of_one_topic_keeps_the_offsets_of_the_others(tmp_path):
    log, topics = run.recorded()
    stretches = select.of_topics(select.everything(log, topics), ["tasks"])
    with opened(made(tmp_path / "s", log, topics, stretches), tmp_path / "run") as imported:
        assert (imported.start("run.groups", 1), imported.end("run.groups", 1)) == (3, 3)
        assert len(records(imported, topics)["tasks", 0]) == 3
        assert verify(imported, topics).holds


# ---------------------------------------------------------------- what is refused
@pytest.fixture
def small(tmp_path) -> Path:
    log, topics = run.recorded()
    return made(tmp_path / "small.mslice", log, topics, select.everything(log, topics))


def test_a_slice_that_was_cut_short_anywhere_is_refused_by_name(tmp_path, small):
    content = small.read_bytes()
    for size in {0, 3, 8, 11, 12, 13, 24, 25, 200, len(content) // 2, len(content) - 30, len(content) - 1}:
        short = tmp_path / "short.mslice"
        short.write_bytes(content[:size])
        with pytest.raises(SliceError, match=r"short\.mslice.*(truncated|no slice)"):
            opened(short, tmp_path / "run")
        shutil.rmtree(tmp_path / "run", ignore_errors=True)


def test_a_changed_byte_anywhere_is_refused_by_name(tmp_path, small):
    content, draw = bytearray(small.read_bytes()), random.Random(5)
    for place in [*range(30), *draw.sample(range(30, len(content)), 60)]:
        damaged = tmp_path / "damaged.mslice"
        changed = content.copy()
        changed[place] ^= 1 << draw.randrange(8)
        damaged.write_bytes(changed)
        with pytest.raises(SliceError, match=r"damaged\.mslice"), SliceReader(damaged) as reader:
            list(reader.content())


def test_what_trails_a_slice_and_blocks_that_were_moved_are_refused(tmp_path, small):
    content = small.read_bytes()
    blocks = _blocks(content)
    for changed in (content + b"\0", content[:12] + blocks[0] + blocks[1] + blocks[1] + blocks[2]):
        strange = tmp_path / "strange.mslice"
        strange.write_bytes(changed)
        with pytest.raises(
            SliceError, match=r"its parts are not those that it was made of|is out of its place"
        ):
            opened(strange, tmp_path / "run")
        shutil.rmtree(tmp_path / "run")


def _blocks(content: bytes) -> list[bytes]:
    found, at = [], 12
    while at < len(content):
        size = 13 + struct.unpack_from("<BIII", content, at)[1]
        found.append(content[at : at + size])
        at += size
    return found


def test_a_newer_format_says_what_to_do(tmp_path, small):
    content = bytearray(small.read_bytes())
    struct.pack_into("<H", content, 8, 2)
    small.write_bytes(content)
    with pytest.raises(
        SliceError, match=r"has slice format 2\.0, this version reads up to 1\.x: update millstream"
    ):
        SliceReader(small)


def test_another_file_is_no_slice(tmp_path):
    (tmp_path / "x.mslice").write_text("hello, I am a text")
    with pytest.raises(SliceError, match=r"x\.mslice is no slice of a run"):
        SliceReader(tmp_path / "x.mslice")


def manifest(**changes: Any) -> Manifest:
    topics = {word: [(0, 0)] for word in ALL_TOPICS}
    fields = {
        "run": "run",
        "partitions": 1,
        "schema": "1.1",
        "source": "file",
        "made_ms": 1,
        "chosen": "",
        "config": "",
        "fingerprint": "",
        "topics": topics,
    }
    return Manifest(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"schema": "2.0"}, r"holds events of schema 2\.0, this version knows 1\.x: update millstream"),
        ({"topics": {"tasks": [(0, 0), (0, 0)]}}, "its manifest gives tasks the stretches"),
        ({"topics": {"tasks": [(5, 4)]}}, "its manifest gives tasks the stretches"),
        ({"topics": {"../../x": [(0, 0)]}}, "gives '../../x', which is no topic"),
        ({"run": "../.."}, "topic name '../...tasks'"),
    ],
)
def test_a_manifest_that_cannot_be_followed_is_refused(tmp_path, changes, text):
    with SliceWriter(tmp_path / "s", manifest(**changes)):
        pass
    with pytest.raises(SliceError, match=text):
        opened(tmp_path / "s", tmp_path / "run")
    assert not list(tmp_path.glob("x*"))


def test_a_run_whose_name_is_a_path_leads_nowhere(tmp_path):
    with SliceWriter(tmp_path / "s", manifest(run="../../../../evil", topics={"ledger": [(7, 7)]})):
        pass
    (tmp_path / "deep").mkdir()
    with pytest.raises(SliceError, match=r"topic name '../../../../evil\.ledger'"):
        opened(tmp_path / "s", tmp_path / "deep" / "run")
    assert not list(tmp_path.rglob("*evil*"))


def test_a_file_that_cannot_be_written_is_the_slices_fault(tmp_path):
    (tmp_path / "content").write_text("x")
    with SliceWriter(tmp_path / "s", manifest()) as writer:
        writer.file("model/a", tmp_path / "content")
        writer.file("model/a/b", tmp_path / "content")
    with pytest.raises(SliceError, match="its file 'model/a/b' cannot be written"):
        opened(tmp_path / "s", tmp_path / "run")


@pytest.mark.parametrize(
    "name", ["/etc/x", "../x", "config.toml", "log/x", "LOG/x", "model/../../x", "model/\0", ""]
)
def test_a_file_is_only_written_below_the_run_directory(tmp_path, name):
    (tmp_path / "content").write_text("x")
    with SliceWriter(tmp_path / "s", manifest()) as writer:
        writer.file(name, tmp_path / "content")
    with pytest.raises(SliceError, match="that does not belong into a run directory"):
        opened(tmp_path / "s", tmp_path / "run")


def test_a_slice_is_there_whole_or_not_at_all(tmp_path):
    with pytest.raises(KeyError), SliceWriter(tmp_path / "s", manifest()):
        raise KeyError
    assert not list(tmp_path.iterdir())
    (tmp_path / "s").write_text("mine")
    with pytest.raises(SliceError, match="exists: name a new file"):
        SliceWriter(tmp_path / "s", manifest())


def test_a_damaged_record_is_left_out_and_told(tmp_path):
    topics = Topics("run", 1)
    with EmbeddedLog(tmp_path / "log") as log:
        topics.create(log)
        for number in range(3):
            put(log, topics, "tasks", run.task(number))
        segment = next((tmp_path / "log/topics/run.tasks/0").glob("*.log"))
        content = segment.read_bytes()
        at = content.index(b"0-1")
        segment.write_bytes(content[:at] + b"9" + content[at + 1 :])
        said: list[str] = []
        path = made(tmp_path / "s", log, topics, select.everything(log, topics), say=said.append)
    assert "run.tasks/0: record 1 is damaged" in said[0]
    with opened(path, tmp_path / "run") as imported:
        found = list(entries(imported, "run.tasks", 0))
    assert [entry.unknown.type if entry.unknown else group_of(entry.event) for entry in found] == [
        "0-0",
        LEFT_OUT,
        "0-2",
    ]


# ---------------------------------------------------------------- from Kafka
def test_a_slice_from_kafka_opens_as_an_embedded_log(tmp_path, kafka, prefix):
    source, topics = run.recorded()
    with open_log(f"kafka://{kafka}/{prefix}.") as log:
        topics.create(log)
        for (word, partition), there in records(source, topics).items():
            if there:
                log.append(
                    topics.name(word),
                    partition,
                    [NewRecord(each.value, each.headers, each.timestamp_ms) for each in there],
                )
        path = made(tmp_path / "s", log, topics, select.of_steps(log, topics, 2, 2), source="kafka")
        whole = records(log, topics)
    with opened(path, tmp_path / "run") as imported:
        assert verify(imported, topics).holds
        for place, there in records(imported, topics).items():
            kept = [
                each for each in whole[place] if there and there[0].offset <= each.offset <= there[-1].offset
            ]
            assert there == kept
        assert imported.start("run.trajectories", 0) == 2


def decoded(path: Path) -> Manifest:
    with SliceReader(path) as reader:
        return reader.manifest


def test_the_manifest_says_what_was_chosen(small):
    found = decoded(small)
    assert (found.run, found.partitions, found.source) == ("run", 2, "memory")
    assert found.topics["tasks"] == [(0, 3), (0, 3)] and found.topics["ledger"] == [(0, 11)]
