"""Random histories of the embedded log against a model of it.

The model is a list. Whatever is torn, flipped or cut, a log keeps a prefix of whole appends (beyond the mark) or
says which records are damaged (below it): it never invents, never reorders, never skips silently.
"""

from __future__ import annotations

import shutil
import tempfile
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from streams.embedded.log import EmbeddedLog
from streams.embedded.mark import Mark
from streams.errors import CorruptRecord, OffsetOutOfRange
from streams.log import EventLog, Headers, NewRecord, read_all

SEGMENT_BYTES = 2048

names = st.text(st.characters(codec="utf-8"), max_size=5)
headers = st.lists(st.tuples(names, st.binary(max_size=8)), max_size=3).map(tuple)
bodies = st.binary(max_size=40) | st.integers(0, 3000).map(lambda size: bytes(range(256)) * (size // 256 + 1))
stamps = st.integers(0, 60)
new_records = st.builds(NewRecord, bodies, headers, stamps)
appends = st.lists(new_records, min_size=1, max_size=5)
quick = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


class Kept(NamedTuple):
    """What the model remembers of a record."""

    offset: int
    timestamp_ms: int
    headers: Headers
    value: bytes


@contextmanager
def fresh_folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="millstream-"))
    try:
        yield path / "log"
    finally:
        shutil.rmtree(path)


def open_at(path: Path, *, readonly: bool = False) -> EmbeddedLog:
    return EmbeddedLog(path, fsync="never", segment_bytes=SEGMENT_BYTES, readonly=readonly)


def partition(path: Path) -> Path:
    return path / "topics" / "t" / "0"


def kept(log: EventLog, position: int | None = None) -> list[Kept]:
    first = log.start("t", 0) if position is None else position
    return [
        Kept(record.offset, record.timestamp_ms, record.headers, record.value)
        for record in read_all(log, "t", 0, first)
    ]


def modelled(history: list[list[NewRecord]]) -> list[Kept]:
    flat = [record for append in history for record in append]
    return [Kept(i, r.timestamp_ms or 0, r.headers, r.value) for i, r in enumerate(flat)]


class LogMachine(RuleBasedStateMachine):
    """Appends, reopens, crashes, retention and look-ups in any order."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="millstream-"))
        self.path = self.folder / "log"
        self.log = open_at(self.path)
        self.log.create_topic("t", 1)
        self.model: list[Kept] = []
        self.start = 0

    def teardown(self) -> None:
        if hasattr(self, "log"):
            self.log.close()
            shutil.rmtree(self.folder)

    @rule(records=appends)
    def append(self, records: list[NewRecord]) -> None:
        assert self.log.append("t", 0, records) == len(self.model)
        for value, name, stamp in records:
            self.model.append(Kept(len(self.model), stamp or 0, name, value))

    @rule(calls=st.lists(appends, min_size=1, max_size=8))
    def pipeline(self, calls: list[list[NewRecord]]) -> None:
        futures = [self.log.submit("t", 0, records) for records in calls]
        for future, records in zip(futures, calls, strict=True):
            assert future.result(20) == len(self.model)
            for value, name, stamp in records:
                self.model.append(Kept(len(self.model), stamp or 0, name, value))

    @rule()
    def reopen(self) -> None:
        self.log.close()
        self.log = open_at(self.path)

    @rule(garbage=st.binary(min_size=1, max_size=100))
    def crash_with_garbage_at_the_tail(self, garbage: bytes) -> None:
        """What a killed writer, or a power cut, may leave beyond the mark. The open log meets it unprepared."""
        last = max(partition(self.path).glob("*.log"), default=None)
        if last is not None and Mark(partition(self.path) / "mark", readonly=True).load().segment == int(
            last.stem
        ):
            with open(last, "ab") as file:
                file.write(garbage)

    @rule(records=appends, data=st.data())
    def crash_in_an_append(self, records: list[NewRecord], data: st.DataObject) -> None:
        """The next append reaches the disk in part, or whole but without its mark."""
        self.log.close()
        mark = (partition(self.path) / "mark").read_bytes()
        before = Mark(partition(self.path) / "mark", readonly=True).load()
        with open_at(self.path) as log:
            log.append("t", 0, records)
        after = Mark(partition(self.path) / "mark", readonly=True).load()
        (partition(self.path) / "mark").write_bytes(mark)
        begin = before.position if before.segment == after.segment else 32
        cut = data.draw(st.integers(begin, after.position), label="bytes that reached the disk")
        with open(partition(self.path) / f"{after.segment:020d}.log", "r+b") as file:
            file.truncate(cut)
        if cut == after.position:
            for value, name, stamp in records:
                self.model.append(Kept(len(self.model), stamp or 0, name, value))
        self.log = open_at(self.path)

    @rule(fraction=st.floats(0, 1))
    def retention(self, fraction: float) -> None:
        offset = int(fraction * len(self.model))
        start = self.log.truncate_before("t", 0, offset)
        assert self.start <= start <= max(offset, self.start)
        self.start = start

    @rule(data=st.data(), max_records=st.integers(1, 30), max_bytes=st.integers(1, 9000))
    def read_anywhere(self, data: st.DataObject, max_records: int, max_bytes: int) -> None:
        position = data.draw(st.integers(-1, len(self.model) + 1), label="position")
        if not self.start <= position <= len(self.model):
            with pytest.raises(OffsetOutOfRange):
                self.log.read("t", 0, position)
            return
        batch = self.log.read("t", 0, position, max_records=max_records, max_bytes=max_bytes)
        count = len(batch.records)
        assert batch.next_position == position + count
        assert 1 <= count <= max_records or position == len(self.model)
        assert [r.value for r in batch.records] == [r.value for r in self.model[position : position + count]]

    @rule(stamp=st.integers(-1, 61))
    def look_up_by_time(self, stamp: int) -> None:
        """The first record at or after it, among those that retention kept."""
        expected = next((r.offset for r in self.model[self.start :] if r.timestamp_ms >= stamp), None)
        assert self.log.offset_at("t", 0, stamp) == (len(self.model) if expected is None else expected)

    @invariant()
    def all_of_it_is_there_in_order(self) -> None:
        if hasattr(self, "log"):
            assert (self.log.start("t", 0), self.log.end("t", 0)) == (self.start, len(self.model))
            assert kept(self.log) == self.model[self.start :]


LogMachine.TestCase.settings = settings(quick, max_examples=40, stateful_step_count=20)
test_any_history_matches_the_model = LogMachine.TestCase


def write(path: Path, history: list[list[NewRecord]]) -> None:
    with open_at(path) as log:
        log.create_topic("t", 1)
        for records in history:
            log.append("t", 0, records)


damages = st.lists(
    st.tuples(st.integers(0, 1 << 30), st.integers(0, 7), st.integers(0, 60)), min_size=1, max_size=4
)


@quick
@given(history=st.lists(appends, min_size=1, max_size=10), damage=damages)
def test_damage_below_the_mark_is_reported_and_costs_nothing_else(
    history: list[list[NewRecord]], damage: list[tuple[int, int, int]]
) -> None:
    """Flip bits (and zero runs of bytes) anywhere in the segments, heads and headers included."""
    with fresh_folder() as path:
        write(path, history)
        expected = modelled(history)
        files = sorted(partition(path).glob("*.log"))
        for at, bit, zeros in damage:
            file = files[at % len(files)]
            content = bytearray(file.read_bytes())
            at %= len(content)
            content[at] ^= 1 << bit
            content[at + 1 : at + 1 + zeros] = bytes(len(content[at + 1 : at + 1 + zeros]))
            file.write_bytes(content)
        found: dict[int, Kept] = {}
        lost: set[int] = set()
        with open_at(path) as log:
            position, end = log.start("t", 0), log.end("t", 0)
            assert (position, end) == (0, len(expected))
            while position < end:
                try:
                    batch = log.read("t", 0, position)
                except CorruptRecord as error:
                    assert error.offset == position < error.next_offset <= end
                    lost.update(range(position, error.next_offset))
                    position = error.next_offset
                    continue
                assert batch.next_position > position
                for r in batch.records:
                    found[r.offset] = Kept(r.offset, r.timestamp_ms, r.headers, r.value)
                position = batch.next_position
            assert list(found) == sorted(found)
            assert all(expected[offset] == record for offset, record in found.items())
            assert found.keys() | lost == set(range(end))
            assert not found.keys() & lost
            assert log.append("t", 0, [NewRecord(b"goes on")]) == end
            assert log.read("t", 0, end).records[0].value == b"goes on"


@quick
@given(
    history=st.lists(appends, min_size=2, max_size=8),
    committed=st.integers(0, 7),
    damage=damages,
    cut=st.floats(0, 1),
)
def test_damage_beyond_the_mark_leaves_a_prefix_of_whole_appends(
    history: list[list[NewRecord]], committed: int, damage: list[tuple[int, int, int]], cut: float
) -> None:
    """As after a power cut: only some appends are under the mark, and the rest of the last segment is anything."""
    committed %= len(history)
    with fresh_folder() as path:
        write(path, history[:committed])
        mark = (partition(path) / "mark").read_bytes()
        write(path, history[committed:])
        after = Mark(partition(path) / "mark", readonly=True).load()
        (partition(path) / "mark").write_bytes(mark)
        before = Mark(partition(path) / "mark", readonly=True).load()
        begin = before.position if before.segment == after.segment else 32
        last = partition(path) / f"{after.segment:020d}.log"
        content = bytearray(last.read_bytes())
        del content[begin + int(cut * (len(content) - begin)) :]
        for at, bit, zeros in damage:
            if len(content) > begin:
                at = begin + at % (len(content) - begin)
                content[at] ^= 1 << bit
                content[at + 1 : at + 1 + zeros] = bytes(len(content[at + 1 : at + 1 + zeros]))
        last.write_bytes(content)
        ends = [0]
        for records in history:
            ends.append(ends[-1] + len(records))
        durable = max(ends[committed], after.segment)  # a roll makes the segment before it durable
        with open_at(path) as log:
            end = log.end("t", 0)
            assert end >= durable
            assert ends[bisect_left(ends, end)] == end, "an append is there as a whole or not at all"
            assert kept(log) == modelled(history)[:end]
            assert log.append("t", 0, [NewRecord(b"goes on")]) == end
        with open_at(path) as log:
            assert [record.value for record in kept(log, end)] == [b"goes on"]


@quick
@given(
    history=st.lists(appends, min_size=1, max_size=10),
    noise=st.binary(max_size=200),
    wanted=st.lists(st.integers(-1, 61), min_size=1, max_size=5),
)
def test_an_index_of_noise_changes_no_answer(
    history: list[list[NewRecord]], noise: bytes, wanted: list[int]
) -> None:
    with fresh_folder() as path:
        write(path, history)
        for file in partition(path).glob("*.idx"):
            file.write_bytes(noise)
        expected = modelled(history)
        with open_at(path, readonly=True) as log:
            for offset in range(len(expected)):
                assert log.read("t", 0, offset, max_records=1).records[0].value == expected[offset].value
        with open_at(path, readonly=True) as log:
            for stamp in wanted:
                first = next((r.offset for r in expected if r.timestamp_ms >= stamp), len(expected))
                assert log.offset_at("t", 0, stamp) == first
