"""Faults and formats of the embedded log that no other log has: torn files, full disks, stopped processes.

What every log must do is in tests/contracts/test_event_log.py.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

import streams.embedded.writer
from streams.embedded import segment
from streams.embedded.log import EmbeddedLog
from streams.embedded.mark import Mark
from streams.errors import (
    CorruptRecord,
    LogClosed,
    LogError,
    LogFull,
    LogUnavailable,
    OffsetOutOfRange,
    RecordTooLarge,
    UnknownTopic,
)
from streams.log import EventLog, NewRecord, TopicPartition, read_all
from streams.open import open_log

ROOT = Path(__file__).resolve().parents[2]
SOON_S = 20.0
T0 = TopicPartition("t", 0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log"


def make(path: Path, *values: bytes, topic: str = "t", **settings: object) -> None:
    """A log with one record per append in partition 0."""
    with EmbeddedLog(path, **settings) as log:  # type: ignore[arg-type]
        log.create_topic(topic, 1)
        for value in values:
            log.append(topic, 0, [NewRecord(value, (("h", b"1"),))])


def folder(path: Path) -> Path:
    return path / "topics" / "t" / "0"


def segments(path: Path) -> list[Path]:
    return sorted(folder(path).glob("*.log"))


def values(log: EventLog) -> list[bytes]:
    return [record.value for record in read_all(log, "t", 0, log.start("t", 0))]


def salvaged(log: EventLog) -> tuple[dict[int, bytes], list[int]]:
    """Readable records by offset, and the offsets that reading had to give up."""
    found: dict[int, bytes] = {}
    lost: list[int] = []
    position = log.start("t", 0)
    while position < log.end("t", 0):
        try:
            batch = log.read("t", 0, position)
        except CorruptRecord as error:
            assert error.offset == position < error.next_offset
            lost += range(position, error.next_offset)
            position = error.next_offset
            continue
        found.update((record.offset, record.value) for record in batch.records)
        position = batch.next_position
    return found, lost


def eventually(claim: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SOON_S
    while not claim():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.002)


@contextmanager
def python(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        with process:
            yield process
    finally:
        process.kill()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


# -- opening


def test_a_folder_that_is_not_a_log_and_not_empty_is_refused_and_left_alone(path: Path) -> None:
    path.mkdir()
    (path / "thesis.txt").write_text("mine")
    with pytest.raises(LogError, match=r"not a log and not empty.*thesis\.txt"):
        EmbeddedLog(path)
    assert os.listdir(path) == ["thesis.txt"]


def test_an_empty_folder_becomes_a_log(path: Path) -> None:
    path.mkdir()
    EmbeddedLog(path).close()
    assert json.loads((path / "format.json").read_text()) == {"format": "millstream-log", "version": "1.0"}


@pytest.mark.parametrize("readonly", [False, True])
def test_a_log_of_a_newer_major_format_is_refused_naming_both_versions(path: Path, readonly: bool) -> None:
    make(path, b"a")
    (path / "format.json").write_text('{"format": "millstream-log", "version": "2.3"}')
    with pytest.raises(LogError, match=r"format 2\.3.*up to 1\.x"):
        EmbeddedLog(path, readonly=readonly)


def test_a_log_of_a_newer_minor_format_is_opened(path: Path) -> None:
    make(path, b"a")
    (path / "format.json").write_text('{"format": "millstream-log", "version": "1.7", "more": 1}')
    with EmbeddedLog(path) as log:
        assert values(log) == [b"a"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": "other", "version": "1.0"}', '{"format": 1}'])
def test_an_unreadable_format_file_is_refused(path: Path, content: str) -> None:
    make(path, b"a")
    (path / "format.json").write_text(content)
    with pytest.raises(LogError, match=r"format\.json"):
        EmbeddedLog(path)


def test_a_segment_of_a_newer_major_format_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr(segment, "MAJOR", 2)
        make(path, b"a")
    with (
        EmbeddedLog(path, readonly=True) as log,
        pytest.raises(LogError, match=r"has format 2\.0; this version reads up to 1\.x"),
    ):
        log.read("t", 0, 0)
    with pytest.raises(LogError, match=r"has format 2\.0"):
        EmbeddedLog(path)


@pytest.mark.parametrize(
    "settings", [{"fsync": "sometimes"}, {"segment_bytes": 10}, {"segment_bytes": 1 << 31}]
)
def test_a_setting_that_cannot_be_used_is_named(path: Path, settings: dict[str, object]) -> None:
    (name,) = settings
    with pytest.raises(LogError, match=f"{name} = "):
        EmbeddedLog(path, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("kafka://localhost", "not HOST:PORT"),
        ("redis://x", "unknown scheme 'redis'; known: memory, file, kafka"),
        ("file://relative/path", "absolute path"),
        ("/just/a/path", "unknown scheme ''"),
    ],
)
def test_a_url_that_no_log_has_is_refused(url: str, message: str) -> None:
    with pytest.raises(LogError, match=message):
        open_log(url)


def test_a_path_with_spaces_can_be_a_url(tmp_path: Path) -> None:
    with open_log(f"file://{tmp_path}/my%20log"):
        assert (tmp_path / "my log" / "format.json").exists()


# -- reading without side effects


def everything(path: Path) -> dict[str, tuple[int, int, bytes]]:
    return {
        str(file.relative_to(path)): (
            file.stat().st_mtime_ns,
            file.stat().st_ino,
            b"" if file.is_dir() else file.read_bytes(),
        )
        for file in sorted(path.rglob("*"))
    }


def test_a_readonly_log_reads_all_and_changes_nothing(path: Path) -> None:
    make(path, *(b"%d" % i * 200 for i in range(30)), segment_bytes=2048)
    with EmbeddedLog(path) as log:
        log.commit_hint("g", {T0: 7})
    with open(segments(path)[-1], "ab") as file:
        file.write(b"a torn tail, which a writer would cut")
    before = everything(path)
    with EmbeddedLog(path, readonly=True) as log:
        assert log.topics() == {"t": 1}
        assert len(values(log)) == 30
        assert log.offset_at("t", 0, 0) == 0
        assert (log.hints("g"), log.groups()) == ({T0: 7}, ["g"])
        assert not log.wait({T0: 30}, timedelta(seconds=0.02))
        log.create_topic("t", 1)
        for use in (
            lambda: log.append("t", 0, [NewRecord(b"x")]),
            lambda: log.create_topic("u", 1),
            lambda: log.join("g", "t", replica=0, replicas=1),
            lambda: log.commit_hint("g", {T0: 8}),
            lambda: log.truncate_before("t", 0, 20),
        ):
            with pytest.raises(LogError, match="read-only"):
                use()
    assert everything(path) == before


def test_a_readonly_open_of_nothing_creates_nothing(path: Path) -> None:
    with pytest.raises(LogError, match=r"not a log: it has no format\.json"):
        EmbeddedLog(path, readonly=True)
    assert not path.exists()


def test_a_readonly_log_follows_a_live_writer(path: Path) -> None:
    make(path, b"a")
    with EmbeddedLog(path, readonly=True) as reader, EmbeddedLog(path) as writer:
        writer.append("t", 0, [NewRecord(b"b")])
        assert values(reader) == [b"a", b"b"]
        writer.create_topic("later", 1)
        writer.append("later", 0, [NewRecord(b"c")])
        assert reader.read("later", 0, 0).records[0].value == b"c"


# -- crashes


def test_records_that_were_written_but_never_committed_are_not_visible(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader obeys the mark: it must not see bytes whose fdatasync has not returned."""
    make(path, b"a")
    entered, go_on = threading.Event(), threading.Event()
    real = streams.embedded.writer.fdatasync

    def slow(fd: int) -> None:
        entered.set()
        assert go_on.wait(SOON_S)
        real(fd)

    with EmbeddedLog(path) as log, EmbeddedLog(path, readonly=True) as reader:
        monkeypatch.setattr(streams.embedded.writer, "fdatasync", slow)
        size = segments(path)[0].stat().st_size
        future = log.submit("t", 0, [NewRecord(b"b")])
        assert entered.wait(SOON_S)
        assert segments(path)[0].stat().st_size > size, "the bytes are in the file"
        assert (reader.end("t", 0), log.end("t", 0), future.done()) == (1, 1, False)
        go_on.set()
        assert future.result(SOON_S) == 1
        assert reader.end("t", 0) == 2


def test_a_tail_torn_at_any_byte_is_cut_and_whole_appends_are_taken_over(path: Path, tmp_path: Path) -> None:
    """As after a power cut: the mark is old, and the file ends anywhere."""
    make(path, b"first")
    old_mark = (folder(path) / "mark").read_bytes()
    begin = segments(path)[0].stat().st_size
    with EmbeddedLog(path) as log:
        log.append("t", 0, [NewRecord(b"one")])
        ends = [segments(path)[0].stat().st_size]
        log.append("t", 0, [NewRecord(b"two a"), NewRecord(b"two b")])
        ends.append(segments(path)[0].stat().st_size)
    whole = segments(path)[0].read_bytes()
    for size in range(begin, len(whole) + 1):
        (folder(path) / "mark").write_bytes(old_mark)
        segments(path)[0].write_bytes(whole[:size])
        with EmbeddedLog(path, readonly=True) as reader:
            assert values(reader) == [b"first"]
        expected = [b"first"]
        if size >= ends[0]:
            expected += [b"one"]
        if size >= ends[1]:
            expected += [b"two a", b"two b"]  # one append: never half of it
        with EmbeddedLog(path) as log:
            assert values(log) == expected, size
            assert log.append("t", 0, [NewRecord(b"next")]) == len(expected)
        with EmbeddedLog(path) as log:
            assert values(log) == [*expected, b"next"]


def test_a_bit_flipped_in_an_uncommitted_tail_is_cut(path: Path) -> None:
    make(path, b"first")
    old_mark = (folder(path) / "mark").read_bytes()
    begin = segments(path)[0].stat().st_size
    with EmbeddedLog(path) as log:
        log.append("t", 0, [NewRecord(b"second", (("a", b"b"),))])
    whole = segments(path)[0].read_bytes()
    for at in range(begin, len(whole)):
        (folder(path) / "mark").write_bytes(old_mark)
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        segments(path)[0].write_bytes(damaged)
        with EmbeddedLog(path) as log:
            assert values(log) == [b"first"], at
        assert segments(path)[0].stat().st_size == begin


def test_zeros_at_the_tail_are_not_records(path: Path) -> None:
    make(path, b"a")
    with open(segments(path)[0], "ab") as file:
        file.write(bytes(10_000))
    with EmbeddedLog(path) as log:
        assert values(log) == [b"a"]
        assert log.append("t", 0, [NewRecord(b"b")]) == 1
        assert values(log) == [b"a", b"b"]


def test_an_old_mark_loses_nothing_also_when_segments_were_rolled_since(path: Path) -> None:
    make(path, b"0" * 700, segment_bytes=1024)
    old_mark = (folder(path) / "mark").read_bytes()
    with EmbeddedLog(path, segment_bytes=1024) as log:
        for i in range(1, 10):
            log.append("t", 0, [NewRecord(b"%d" % i * 700, (), 5000 * i)])
    assert len(segments(path)) > 5
    (folder(path) / "mark").write_bytes(old_mark)
    with EmbeddedLog(path, segment_bytes=1024) as log:
        assert values(log) == [b"%d" % i * 700 for i in range(10)]
        assert log.append("t", 0, [NewRecord(b"next")]) == 10
        assert log.offset_at("t", 0, 1 << 50) == 11


@pytest.mark.parametrize("damage", ["zeros", "noise", "short", "missing"])
def test_a_damaged_mark_is_rebuilt_from_the_segments(path: Path, damage: str) -> None:
    make(path, *(b"%d" % i * 500 for i in range(10)), segment_bytes=2048)
    mark = folder(path) / "mark"
    content = {"zeros": bytes(4096), "noise": os.urandom(4096), "short": b"MSMK"}.get(damage)
    mark.unlink() if content is None else mark.write_bytes(content)
    if damage != "missing":
        with EmbeddedLog(path, readonly=True) as log, pytest.raises(LogError, match="cannot be opened"):
            log.end("t", 0)
    with EmbeddedLog(path, segment_bytes=2048) as log:
        assert values(log) == [b"%d" % i * 500 for i in range(10)]
        assert log.append("t", 0, [NewRecord(b"next")]) == 10


def test_a_mark_with_one_torn_slot_falls_back_to_the_other(path: Path) -> None:
    make(path, b"a", b"b")
    mark = folder(path) / "mark"
    content = mark.read_bytes()
    state = Mark(mark, readonly=True).load()
    newest = 64 + 64 * (state.sequence & 1)
    for at in range(newest, newest + 56):
        torn = bytearray(content)
        torn[at] ^= 0x10
        mark.write_bytes(torn)
        assert Mark(mark, readonly=True).load().end == 1  # the mark before
        with EmbeddedLog(path) as log:
            assert values(log) == [b"a", b"b"]  # taken over again


def test_a_crash_between_naming_and_making_a_segment_is_harmless(path: Path) -> None:
    make(path, b"a" * 600, b"b" * 600, segment_bytes=1024)
    with EmbeddedLog(path, segment_bytes=1024) as log:
        log.append("t", 0, [NewRecord(b"c" * 600, (), 1 << 45)])
    mark = Mark(folder(path) / "mark", readonly=False)
    state = mark.load()
    mark.store(state._replace(sequence=state.sequence + 1, segment=state.end, position=segment.RECORDS_AT))
    with EmbeddedLog(path, readonly=True) as log:
        assert log.end("t", 0) == 3
        assert log.offset_at("t", 0, 1 << 45) == 2
    with EmbeddedLog(path, segment_bytes=1024) as log:
        assert log.append("t", 0, [NewRecord(b"d")]) == 3
        assert values(log) == [b"a" * 600, b"b" * 600, b"c" * 600, b"d"]


def test_index_entries_of_a_cut_append_do_not_answer_for_its_successor(path: Path) -> None:
    make(path, b"first")
    old_mark = (folder(path) / "mark").read_bytes()
    size = segments(path)[0].stat().st_size
    with EmbeddedLog(path) as log:
        for i in range(20):
            log.append("t", 0, [NewRecord(bytes(1000), (), (1 << 45) + i)])
    (folder(path) / "mark").write_bytes(old_mark)
    os.truncate(segments(path)[0], size + 10)
    with EmbeddedLog(path) as log:
        for i in range(20):
            log.append("t", 0, [NewRecord(bytes(1000), (), (1 << 46) + i)])
        assert log.offset_at("t", 0, (1 << 45) + 100) == 1


# -- damage below the mark


def test_a_damaged_record_is_reported_with_the_next_readable_one(path: Path) -> None:
    make(path, *(b"value %d" % i for i in range(5)))
    file = segments(path)[0]
    content = bytearray(file.read_bytes())
    content[content.index(b"value 2")] ^= 1
    file.write_bytes(content)
    with EmbeddedLog(path) as log:
        batch = log.read("t", 0, 0)
        assert [record.value for record in batch.records] == [b"value 0", b"value 1"]
        with pytest.raises(CorruptRecord, match=r"t/0: record 2 is damaged .*go on at 3") as damaged:
            log.read("t", 0, batch.next_position)
        assert damaged.value.next_offset == 3
        assert [record.value for record in log.read("t", 0, 3).records] == [b"value 3", b"value 4"]
        assert log.append("t", 0, [NewRecord(b"goes on")]) == 5
    assert file.stat().st_size > len(content), "nothing committed is ever cut"


def test_any_flipped_bit_costs_at_most_its_own_record(path: Path) -> None:
    written = [b"%d-" % i * (i + 1) for i in range(6)]
    make(path, *written)
    file = segments(path)[0]
    content = file.read_bytes()
    for at in range(segment.RECORDS_AT, len(content)):
        damaged = bytearray(content)
        damaged[at] ^= 1 << at % 8
        file.write_bytes(damaged)
        with EmbeddedLog(path, readonly=True) as log:
            found, lost = salvaged(log)
        assert len(lost) == 1, at
        assert found == {i: value for i, value in enumerate(written) if i != lost[0]}


def test_a_record_behind_a_damaged_one_can_be_read_first(path: Path) -> None:
    written = [b"%d" % i * 100 for i in range(20)]
    make(path, *written)
    file = segments(path)[0]
    content = bytearray(file.read_bytes())
    at = content.index(b"10" * 100)
    content[at - 60 : at + 20] = bytes(80)  # head and all
    file.write_bytes(content)
    for offset in [11, 15, 19]:
        with EmbeddedLog(path, readonly=True) as log:
            assert log.read("t", 0, offset).records[0].value == written[offset]
    with EmbeddedLog(path, readonly=True) as log, pytest.raises(CorruptRecord):
        log.read("t", 0, 10)


@pytest.mark.parametrize("index", ["missing", "zeros", "noise", "cut", "of another"])
def test_a_useless_index_costs_speed_only(path: Path, index: str) -> None:
    written = [b"%04d" % i * 100 for i in range(120)]
    with EmbeddedLog(path, segment_bytes=16_384) as log:
        log.create_topic("t", 1)
        for i, value in enumerate(written):
            log.append("t", 0, [NewRecord(value, (), 1000 + i)])
    files = sorted(folder(path).glob("*.idx"))
    contents = [file.read_bytes() for file in files]
    assert all(contents[:-1])
    for file, content in zip(files, contents, strict=True):
        bad = {
            "missing": None,
            "zeros": bytes(len(content)),
            "noise": os.urandom(len(content)),
            "cut": content[:-5],
            "of another": contents[0][:16] * 3,
        }[index]
        file.unlink() if bad is None else file.write_bytes(bad)
    for readonly in (True, False):
        for offset in range(0, 120, 7):
            with EmbeddedLog(path, readonly=readonly, segment_bytes=16_384) as log:
                assert log.read("t", 0, offset).records[0].value == written[offset]
                assert log.offset_at("t", 0, 1000 + offset) == offset or index == "of another"
    with EmbeddedLog(path, segment_bytes=16_384) as log:
        assert log.append("t", 0, [NewRecord(b"x")]) == 120


def test_acknowledged_records_that_are_gone_are_an_error_and_their_offsets_are_not_used_again(
    path: Path,
) -> None:
    make(path, *(b"value %d" % i for i in range(5)))
    file = segments(path)[0]
    os.truncate(file, file.read_bytes().index(b"value 3") + 2)
    with EmbeddedLog(path, readonly=True) as log:
        assert salvaged(log) == ({i: b"value %d" % i for i in range(3)}, [3, 4])
    with EmbeddedLog(path) as log:
        assert log.append("t", 0, [NewRecord(b"later")]) == 5
        assert salvaged(log) == ({0: b"value 0", 1: b"value 1", 2: b"value 2", 5: b"later"}, [3, 4])


def test_a_missing_segment_in_the_middle_is_an_error_not_a_gap(path: Path) -> None:
    make(path, *(b"%d" % i * 700 for i in range(6)), segment_bytes=1024)
    segments(path)[2].unlink()
    with EmbeddedLog(path, segment_bytes=1024) as log:
        found, lost = salvaged(log)
        assert lost == [2]
        assert sorted(found) == [0, 1, 3, 4, 5]


# -- full disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB; needs the right to mount. The injected fault below works everywhere."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("cannot mount a small tmpfs here")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)  # lazy: also after a test that failed


def fill(log: EventLog, size: int) -> int:
    """Append until the log says that it is full; the number of records that fitted."""
    for count in range(10_000):
        try:
            log.append("t", 0, [NewRecord(count.to_bytes(4, "big") * (size // 4))])
        except LogFull as error:
            assert "nothing was appended" in str(error)
            return count
    raise AssertionError("never full")


@pytest.mark.parametrize("segment_bytes", [64 << 10, 64 << 20])
@pytest.mark.parametrize("size", [1000, 50_000])
def test_a_full_disk_takes_nothing_and_appends_go_on_once_there_is_room(
    small_disk: Path, segment_bytes: int, size: int
) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(200_000))
    expected = []
    with EmbeddedLog(small_disk / "log", segment_bytes=segment_bytes) as log:
        log.create_topic("t", 1)
        count = fill(log, size)
        assert count > 5
        expected = [i.to_bytes(4, "big") * (size // 4) for i in range(count)]
        assert values(log) == expected
        for _ in range(3):
            with pytest.raises(LogFull):
                log.append("t", 0, [NewRecord(bytes(300_000))])
            assert values(log) == expected
        ballast.unlink()
        assert log.append("t", 0, [NewRecord(b"room again" * 5000)]) == count
        expected.append(b"room again" * 5000)
        assert values(log) == expected
    with EmbeddedLog(small_disk / "log", segment_bytes=segment_bytes) as log:
        assert values(log) == expected


def test_a_full_disk_is_said_also_by_topics_hints_and_shares(small_disk: Path) -> None:
    with EmbeddedLog(small_disk / "log") as log:
        log.create_topic("t", 1)
        ballast = os.open(small_disk / "ballast", os.O_WRONLY | os.O_CREAT)
        with pytest.raises(OSError, match="No space"):
            while True:
                os.write(ballast, bytes(4096))
        os.close(ballast)
        for use in (
            lambda: log.create_topic("u", 1),
            lambda: log.commit_hint("g", {T0: 1}),
            lambda: log.join("h", "t", replica=0, replicas=1),
            lambda: log.append("t", 0, [NewRecord(b"x" * 5000)]),
        ):
            with pytest.raises(LogFull):
                use()
        os.unlink(small_disk / "ballast")
        log.create_topic("u", 1)
        log.commit_hint("g", {T0: 1})
        log.join("h", "t", replica=0, replicas=1)
        assert log.append("t", 0, [NewRecord(b"x" * 5000)]) == 0


FILE_SIZE_LIMIT = """
import resource, sys
from streams.embedded.log import EmbeddedLog
from streams.errors import LogFull
from streams.log import NewRecord, read_all
with EmbeddedLog(sys.argv[1]) as log:
    log.create_topic("t", 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, -1))
    count = 0
    try:
        while True:
            log.append("t", 0, [NewRecord(b"x" * 3000)])
            count += 1
    except LogFull as error:
        print(error)
    assert count == 33 == len(list(read_all(log, "t", 0, 0))), count
    resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
    assert log.append("t", 0, [NewRecord(b"x" * 3000)]) == 33
"""


def test_a_limit_on_the_size_of_files_is_a_full_disk(path: Path) -> None:
    """Writes up to the limit and fails beyond it: the short write of a full disk, on any file system."""
    with python(FILE_SIZE_LIMIT, path) as process:
        assert "File too large; nothing was appended" in said(process)
        assert process.wait(SOON_S) == 0
    with EmbeddedLog(path) as log:
        assert len(values(log)) == 34


@pytest.mark.parametrize(
    ("code", "error"),
    [(errno.ENOSPC, LogFull), (errno.EDQUOT, LogFull), (errno.EFBIG, LogFull), (errno.EIO, LogError)],
)
@pytest.mark.parametrize("step", ["write", "short write", "fdatasync"])
def test_a_failing_disk_fails_the_append_and_no_other(
    path: Path, monkeypatch: pytest.MonkeyPatch, code: int, error: type[LogError], step: str
) -> None:
    make(path, b"before")
    size = segments(path)[0].stat().st_size

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    def write_half(fd: int, parts: list[bytes], size: int, position: int) -> None:
        os.pwrite(fd, b"".join(parts)[: size // 2], position)
        fail()

    with EmbeddedLog(path) as log, EmbeddedLog(path, readonly=True) as reader:
        with monkeypatch.context() as fault:
            if step == "fdatasync":
                fault.setattr(streams.embedded.writer, "fdatasync", fail)
            else:
                fault.setattr(streams.embedded.writer, "write_parts", fail if step == "write" else write_half)
            with pytest.raises(error, match="nothing was appended") as failed:
                log.append("t", 0, [NewRecord(b"never"), NewRecord(b"seen")])
            assert type(failed.value) is error
            assert segments(path)[0].stat().st_size == size
            assert values(log) == values(reader) == [b"before"]
        assert log.append("t", 0, [NewRecord(b"after")]) == 1
        assert values(log) == values(reader) == [b"before", b"after"]


def test_a_failed_append_that_cannot_be_taken_back_is_still_never_adopted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    make(path, b"before")
    with EmbeddedLog(path) as log:
        with monkeypatch.context() as fault:
            fault.setattr(streams.embedded.writer, "fdatasync", fail)
            fault.setattr(os, "ftruncate", fail)
            with pytest.raises(LogError):
                log.append("t", 0, [NewRecord(b"never")])
        assert log.append("t", 0, [NewRecord(b"after")]) == 1
        assert values(log) == [b"before", b"after"]


# -- durability and groups


def counted(monkeypatch: pytest.MonkeyPatch, gate: threading.Event | None = None) -> list[int]:
    """The calls of fdatasync from here on; each waits for the gate."""
    calls: list[int] = []
    real = streams.embedded.writer.fdatasync

    def sync(fd: int) -> None:
        calls.append(fd)
        if gate:
            assert gate.wait(SOON_S)
        real(fd)

    monkeypatch.setattr(streams.embedded.writer, "fdatasync", sync)
    return calls


@pytest.mark.parametrize(("mode", "expected"), [("group", 2), ("always", 101), ("never", 0)])
def test_fsync_modes_sync_per_group_per_append_or_never(
    path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, expected: int
) -> None:
    make(path)
    gate = threading.Event()
    calls = counted(monkeypatch, gate)
    with EmbeddedLog(path, fsync=mode) as log:
        first = log.submit("t", 0, [NewRecord(b"first")])
        if expected:
            eventually(lambda: len(calls) == 1, "the first append waits for the disk")
        futures = [log.submit("t", 0, [NewRecord(b"%d" % i)]) for i in range(100)]
        gate.set()
        assert [future.result(SOON_S) for future in [first, *futures]] == list(range(101))
        assert len(calls) == expected


def test_submit_blocks_while_the_bytes_in_flight_are_spent_and_says_what_it_waits_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(path)
    gate = threading.Event()
    calls = counted(monkeypatch, gate)
    with EmbeddedLog(path, bytes_in_flight=10_000, timeout=timedelta(seconds=0.2)) as log:
        first = log.submit("t", 0, [NewRecord(bytes(20_000))])  # over the budget, but alone
        eventually(lambda: len(calls) == 1, "the first append waits for the disk")
        with pytest.raises(LogUnavailable, match=r"t/0: no room for .* bytes for 0.2 s; 20028 of 10000"):
            log.submit("t", 0, [NewRecord(b"x")]).result(0)

        unblocked: list[Future[int]] = []
        thread = threading.Thread(target=lambda: unblocked.append(log.submit("t", 0, [NewRecord(b"y")])))
        thread.start()
        gate.set()
        thread.join(SOON_S)
        assert first.result(SOON_S) == 0
        assert unblocked[0].result(SOON_S) == 1


HOLD_LOCK = """
import fcntl, os, sys, time
fd = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(fd, fcntl.LOCK_EX)
print(os.getpid(), flush=True)
time.sleep(600)
"""


def test_a_lock_that_a_stopped_process_holds_is_waited_for_with_a_deadline(path: Path) -> None:
    make(path, b"a")
    with python(HOLD_LOCK, folder(path) / "lock") as holder:
        pid = said(holder)
        with EmbeddedLog(path, timeout=timedelta(seconds=0.2)) as log:
            with pytest.raises(LogUnavailable, match=rf"waited 0.\d s for the lock .*/lock, .*{pid}"):
                log.append("t", 0, [NewRecord(b"b")])
            assert values(log) == [b"a"], "reading needs no lock"
            holder.send_signal(signal.SIGKILL)
            holder.wait(SOON_S)
            assert log.append("t", 0, [NewRecord(b"b")]) == 1


def test_an_append_that_is_not_durable_in_time_is_unavailable(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(path)
    gate = threading.Event()
    counted(monkeypatch, gate)
    with EmbeddedLog(path) as log:
        with pytest.raises(LogUnavailable, match=r"not durable after 0\.05 s"):
            log.append("t", 0, [NewRecord(b"x")], timedelta(seconds=0.05))
        gate.set()


def test_headers_over_their_limit_are_refused(path: Path) -> None:
    make(path)
    with EmbeddedLog(path) as log, pytest.raises(RecordTooLarge, match="headers"):
        log.append("t", 0, [NewRecord(b"", (("h", bytes(70_000)),))])


@pytest.mark.parametrize(
    "record",
    [
        NewRecord("text"),  # type: ignore[arg-type]
        NewRecord(bytearray(3)),  # type: ignore[arg-type]
        NewRecord(b"", (("n", "text"),)),  # type: ignore[arg-type]
        NewRecord(b"", ((b"n", b""),)),  # type: ignore[arg-type]
        NewRecord(b"", (), 1 << 70),
    ],
)
def test_a_value_that_could_not_be_read_back_is_refused_before_it_is_queued(
    path: Path, record: NewRecord
) -> None:
    make(path)
    with EmbeddedLog(path) as log:
        with pytest.raises((TypeError, ValueError), match="record 0"):
            log.submit("t", 0, [record])
        assert log.append("t", 0, [NewRecord(b"fine")]) == 0


# -- segments and retention


def test_segments_roll_by_size_and_an_append_is_never_split(path: Path) -> None:
    with EmbeddedLog(path, segment_bytes=4096) as log:
        log.create_topic("t", 1)
        for i in range(12):
            log.append("t", 0, [NewRecord(b"%d" % i * 100), NewRecord(bytes(1500)), NewRecord(b"end")])
        log.append("t", 0, [NewRecord(bytes(20_000))])  # larger than a segment: one of its own
        log.append("t", 0, [NewRecord(b"x")])
        assert len(values(log)) == 38
    bases = segment.list_segments(folder(path))
    assert bases == [0, 6, 12, 18, 24, 30, 36, 37]
    assert all(file.stat().st_size <= 4096 for file in segments(path) if file.name != f"{36:020d}.log")


def test_retention_unlinks_whole_segments_while_readers_are_in_them(path: Path) -> None:
    make(path, *(b"%d" % i * 1000 for i in range(30)), segment_bytes=4096)
    with EmbeddedLog(path, segment_bytes=4096) as log, EmbeddedLog(path, readonly=True) as reader:
        assert reader.read("t", 0, 0, max_records=1).next_position == 1
        before = len(segments(path))
        start = log.truncate_before("t", 0, 20)
        assert 10 < start <= 20
        assert len(segments(path)) < before
        assert segment.list_segments(folder(path))[0] == start
        with pytest.raises(OffsetOutOfRange, match=rf"\[{start}, 30\]; {start - 1} records were removed"):
            reader.read("t", 0, 1)
        assert len(values(reader)) == 30 - start
        assert log.truncate_before("t", 0, 30) <= 30
        assert log.append("t", 0, [NewRecord(b"x")]) == 30
    with EmbeddedLog(path) as log:
        assert values(log)[-1] == b"x"


def test_a_crash_in_the_middle_of_retention_is_harmless(path: Path) -> None:
    make(path, *(b"%d" % i * 1000 for i in range(30)), segment_bytes=4096)
    old_mark = (folder(path) / "mark").read_bytes()
    with EmbeddedLog(path, segment_bytes=4096) as log:
        start = log.truncate_before("t", 0, 20)
    (folder(path) / "mark").write_bytes(old_mark)  # the power cut lost the new start, not the unlinks
    with EmbeddedLog(path, segment_bytes=4096) as log:
        assert log.start("t", 0) == start
        assert len(values(log)) == 30 - start


def test_readers_follow_while_a_writer_rolls_and_removes_segments(path: Path) -> None:
    make(path, segment_bytes=2048)
    with EmbeddedLog(path, segment_bytes=2048) as log, EmbeddedLog(path, readonly=True) as reader:
        failures: list[BaseException] = []
        seen: list[int] = []
        done = threading.Event()

        def follow() -> None:
            position = 0
            try:
                while not done.is_set() or position < reader.end("t", 0):
                    try:
                        batch = reader.read("t", 0, position, max_records=7)
                    except OffsetOutOfRange as error:
                        assert position < error.start
                        position = error.start
                        continue
                    for record in batch.records:
                        assert int(record.value.split()[0]) == record.offset
                        seen.append(record.offset)
                    position = batch.next_position
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=follow)
        thread.start()
        for i in range(400):
            log.append("t", 0, [NewRecord(b"%d " % i + b"x" * (i % 7 * 90))])
            if i % 20 == 19:
                log.truncate_before("t", 0, i - 10)
        done.set()
        thread.join(SOON_S)
        assert not failures, failures
        assert seen == sorted(set(seen))
        assert seen[-1] == 399


# -- processes and threads


FORK = """
import os, sys
from datetime import timedelta
from streams.embedded.log import EmbeddedLog
from streams.log import NewRecord, TopicPartition
log = EmbeddedLog(sys.argv[1])
log.create_topic("t", 1)
log.append("t", 0, [NewRecord(b"parent")])
log.join("g", "t", replica=0, replicas=1)
child = os.fork()
if child == 0:
    assert log.read("t", 0, 0).records[0].value == b"parent"
    log.append("t", 0, [NewRecord(b"child")])
    assert log.wait({TopicPartition("t", 0): 2}, timedelta(seconds=20))
    sys.stdin.readline()  # outlives the parent
    os._exit(0)
log.wait({TopicPartition("t", 0): 1}, timedelta(seconds=20))
log.append("t", 0, [NewRecord(b"parent again")])
print(os.getpid(), flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_forked_child_uses_the_log_on_its_own_and_does_not_keep_the_parents_share(path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", FORK, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with process:
        assert said(process) == str(process.pid)
        assert process.wait(SOON_S) == -signal.SIGKILL
        with EmbeddedLog(path) as log:
            assert log.wait({T0: 2}, timedelta(seconds=SOON_S))
            assert sorted(values(log)) == [b"child", b"parent", b"parent again"]
            assert log.join("g", "t", replica=0, replicas=1).partitions() == {0}
        assert process.stdin
        process.stdin.close()


def test_two_processes_that_create_one_log_at_once_agree(path: Path) -> None:
    code = (
        "import sys; from streams.embedded.log import EmbeddedLog\n"
        "with EmbeddedLog(sys.argv[1]) as log: log.create_topic('t', 3); print(log.topics())"
    )
    with python(code, path) as one, python(code, path) as two, python(code, path) as three:
        assert [said(process) for process in (one, two, three)] == ["{'t': 3}"] * 3


def test_a_topic_whose_creation_was_cut_short_does_not_exist_and_can_be_made(path: Path) -> None:
    make(path, b"a")
    (path / "topics" / "t" / "topic.json").unlink()
    with EmbeddedLog(path) as log:
        assert log.topics() == {}
        with pytest.raises(UnknownTopic):
            log.end("t", 0)
        log.create_topic("t", 2)
        assert values(log) == [b"a"]


def test_closing_while_others_append_fails_them_cleanly(path: Path) -> None:
    make(path)
    log = EmbeddedLog(path)
    acknowledged: list[int] = []
    failed: list[BaseException] = []

    def write() -> None:
        try:
            while True:
                acknowledged.append(log.append("t", 0, [NewRecord(b"x")]))
        except LogClosed as error:
            failed.append(error)

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(acknowledged) > 20, "appends are under way")
    log.close()
    for thread in threads:
        thread.join(SOON_S)
    assert len(failed) == 3
    with EmbeddedLog(path) as log:
        assert sorted(acknowledged) == list(range(log.end("t", 0)))


def test_a_closed_log_leaves_no_file_open(path: Path) -> None:
    def open_files() -> list[str]:
        links = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                links.append(os.readlink(f"/proc/self/fd/{fd}"))
            except FileNotFoundError:
                pass  # the folder's own
        return [link for link in links if link.startswith(str(path))]

    make(path, *(bytes(900) for _ in range(9)), segment_bytes=2048)
    with EmbeddedLog(path) as log:
        values(log)
        log.join("g", "t", replica=0, replicas=1)
        log.commit_hint("g", {T0: 1})
        log.append("t", 0, [NewRecord(b"x")])
        assert open_files()
    assert open_files() == []


def test_the_format_of_a_record_is_what_the_module_says(path: Path) -> None:
    """A golden record: a change of these bytes is a change of the format."""
    with EmbeddedLog(path) as log:
        log.create_topic("t", 1)
        log.append("t", 0, [NewRecord(b"value", (("h", b"v"),), 1_700_000_000_000), NewRecord(b"", (), 7)])
    raw = segments(path)[0].read_bytes()
    assert raw[: segment.RECORDS_AT].hex() == GOLDEN_HEADER
    assert raw[segment.RECORDS_AT :].hex() == GOLDEN


GOLDEN_HEADER = "4d534c4701000000000000000000000000000000000000801ab41bf700000000"
GOLDEN = (
    "200000001e8eeb4900000000000000000068e5cf8b010000070001009192a168c4017676616c7565"  # MORE is set
    "1400000044492a1e0100000000000000070000000000000000000000"
)
