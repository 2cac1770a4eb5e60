"""The export itself: every record once, rows into tables, and a state from which a killed export goes on.

    for each partition:  rows that were open ─┐
                         records from there on ┴─► Source.look ─► RowFilter ─► TableFile.add ─┐
                                                   every PART_BYTES: keep all, store the state ◄┘
    at the end:          rows that are still open go into a part of their own, which the next export replaces

A row is never written twice and none is left out, wherever the export was killed: the state changes after the rows
that it stands for are durable, and what is not in the state is thrown away when the tables are opened again. Memory: a
part's rows at most, and what replay/export/outcomes.py and lookups.py say; it does not grow with the payloads.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from replay.evidence import entries_at, kept
from replay.export.choice import Choice, RowFilter
from replay.export.files import TableFile
from replay.export.outcomes import Outcomes, read_outcomes
from replay.export.sources import SOURCES, Rows, Source
from replay.export.state import Locked, State, open_state
from replay.export.tables import Table
from replay.records import TopicReader
from streams.log import EventLog
from streams.topics import Topics

PART_BYTES = 64 << 20  # of rows between two states
SAY_EVERY_S = 2.0

OpenTable = Callable[[Path, Table, int], TableFile]  # (folder, table, what `keep` gave last)
Say = Callable[[str], None]


class Exported(NamedTuple):
    rows: dict[str, int]  # table → rows in its files, the open ones too
    added: dict[str, int]  # table → rows that this export wrote for good
    open_rows: dict[str, int]  # table → rows that the next export writes anew
    lost: int  # records that retention removed before they were read
    goes_on: bool  # there was an earlier export in the folder


class Export:
    """`Export(log, topics, folder, to=…, choice=…, open_table=…).run()`.

    Raises ConfigError when the folder holds another export or something else, and for a choice that the run cannot
    meet.
    """

    def __init__(
        self,
        log: EventLog,
        topics: Topics,
        folder: Path,
        *,
        to: str,
        choice: Choice,
        open_table: OpenTable,
        estimator: str = "grpo",
        part_bytes: int = PART_BYTES,
        say: Say = lambda text: None,
    ) -> None:
        self._log, self._topics, self._folder = log, topics, folder
        self._to, self._choice, self._open_table = to, choice, open_table
        self._estimator = estimator  # of the run's advantages
        self._part_bytes, self._progress = part_bytes, _Progress(say)
        self._tables: dict[str, TableFile] = {}
        self._added: Counter[str] = Counter()  # rows of this export, by table
        self._unkept: Counter[str] = Counter()  # those since the last `keep`
        self._open: Counter[str] = Counter()
        self._lost = 0

    def run(self) -> Exported:
        outcomes = read_outcomes(self._log, self._topics, self._estimator)
        self._filter = RowFilter(self._choice, outcomes)
        with Locked(self._folder):
            state, goes_on = open_state(
                self._folder, self._topics.run, self._to, self._choice, outcomes.began
            )
            try:
                for table in self._choice.tables:
                    self._tables[table.name] = self._open_table(
                        self._folder, table, state.kept.get(table.name, 0)
                    )
                state.finished = False
                state.store(self._folder)
                self._write(state, outcomes)
            finally:
                for table in self._tables.values():
                    table.close()
        rows = {name: state.rows.get(name, 0) + self._open[name] for name in self._tables}
        added = {name: self._added[name] for name in self._tables}
        open_rows = {name: self._open[name] for name in self._tables}
        return Exported(rows, added, open_rows, self._lost, goes_on)

    def _write(self, state: State, outcomes: Outcomes) -> None:
        ends = self._ends(outcomes)
        sources = {
            word: SOURCES[word](self._log, self._topics, outcomes, word) for word in self._choice.words
        }
        self._progress.begin(sum(end - start for start, end in ends.values()))
        for (word, partition), (start, end) in ends.items():
            self._lane(state, sources[word], partition, start, end)
        self._keep(state)
        self._finish(state, sources)
        state.finished = True
        state.store(self._folder)

    def _ends(self, outcomes: Outcomes) -> dict[tuple[str, int], tuple[int, int]]:
        """(topic word, partition) → (start, end) of what is read: the ledger as far as the outcomes know it."""
        ends = {
            (word, partition): kept(self._log, self._topics.name(word), partition)
            for word in self._choice.words
            for partition in range(self._topics.count(word))
        }
        if "ledger" in self._choice.words:
            ends["ledger", 0] = (ends["ledger", 0][0], max(ends["ledger", 0][0], outcomes.end))
        return ends

    # -- rows

    def _lane(self, state: State, source: Source, partition: int, start: int, end: int) -> None:
        """What one partition has to say since the state, in order."""
        name, topic = f"{source.word}/{partition}", self._topics.name(source.word)
        position = state.positions.get(name, start)
        waiting = state.open.get(name, [])
        self._lost += max(0, start - position)
        position = max(start, position)
        self._progress.passed(position - start, name)
        if position >= end and not waiting:
            return
        source.begin(partition, position)
        state.open[name] = self._settle(source, partition, topic, waiting)
        reader = TopicReader(self._log, topic, partition, position)
        while reader.position < end:
            before = reader.position
            for entry in reader.read(end):
                look = source.look(partition, entry)
                self._add(look.rows)
                if look.open:
                    state.open[name].append(entry.offset)
            if reader.position <= before:
                break
            state.positions[name] = reader.position
            self._progress.passed(reader.position - before, name)
            if sum(table.written for table in self._tables.values()) >= self._part_bytes:
                self._keep(state)
        self._lost += reader.lost

    def _settle(self, source: Source, partition: int, topic: str, waiting: Sequence[int]) -> list[int]:
        """Write what an earlier export left open and is settled now; returns the offsets of the rest."""
        still_open = []
        for offset, entry in entries_at(self._log, topic, partition, waiting):
            if entry is None:  # removed by retention
                self._lost += 1
                continue
            look = source.look(partition, entry, again=True)
            self._add(look.rows)
            if look.open:
                still_open.append(offset)
        return still_open

    def _add(self, rows: Rows) -> None:
        for table, row in rows:
            if self._filter.keeps(table, row):
                self._tables[table].add(row)
                self._added[table] += 1
                self._unkept[table] += 1
        self._progress.rows = self._added.total()

    def _keep(self, state: State) -> None:
        for name, table in self._tables.items():
            state.kept[name] = table.keep()
            state.rows[name] = state.rows.get(name, 0) + self._unkept[name]
        self._unkept.clear()
        state.store(self._folder)

    def _finish(self, state: State, sources: dict[str, Source]) -> None:
        for table in self._tables.values():
            table.begin_open()
        for name, offsets in state.open.items():
            word, _, partition = name.partition("/")
            if offsets:
                self._write_open(sources[word], int(partition), offsets)
        for table in self._tables.values():
            table.finish()

    def _write_open(self, source: Source, partition: int, offsets: Sequence[int]) -> None:
        source.begin(partition, 0)
        topic = self._topics.name(source.word)
        for _, entry in entries_at(self._log, topic, partition, offsets):
            look = source.look(partition, entry, again=True) if entry is not None else None
            for table, row in look.open if look is not None else ():
                if self._filter.keeps(table, row):
                    self._tables[table].add(row)
                    self._open[table] += 1


class _Progress:
    """Says now and then how far the export has come."""

    def __init__(self, say: Say) -> None:
        self._say, self._total, self._done = say, 0, 0
        self._said = time.monotonic()
        self.rows = 0

    def begin(self, total: int) -> None:
        self._total = total

    def passed(self, records: int, where: str) -> None:
        self._done += records
        if time.monotonic() - self._said >= SAY_EVERY_S:
            self._said = time.monotonic()
            share = 100 * self._done // max(1, self._total)
            self._say(f"{share} % of {self._total} records, {self.rows} rows written, now at {where}")
