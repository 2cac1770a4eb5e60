"""Which rows an export wants: by topic, by step, by time, by condition."""

from __future__ import annotations

from typing import Any, NamedTuple

from replay.export.outcomes import Outcomes
from replay.export.sources import GIVES, READ
from replay.export.tables import ARRAYS, FAILURES, TABLES, Row, Table
from replay.where import Where, parse_where
from streams.errors import ConfigError
from streams.topics import ALL_TOPICS

_FOREVER_MS = 1 << 62


class Choice(NamedTuple):
    """As the user wrote it; the state of an export keeps it, so that one folder never holds two choices."""

    topics: tuple[str, ...] = ()  # words; (): all
    where: str = ""
    from_step: int | None = None
    to_step: int | None = None
    since_ms: int | None = None
    until_ms: int | None = None

    @property
    def words(self) -> list[str]:
        """Topics to be read, in the order of the data path."""
        wanted = {word for topic in self.topics or ALL_TOPICS for word in READ[topic]}
        return [word for word in ALL_TOPICS if word in wanted]

    @property
    def tables(self) -> list[Table]:
        wanted = {name for topic in self.topics or ALL_TOPICS for name in GIVES[topic]} | {FAILURES}
        return [table for name, table in TABLES.items() if name in wanted]


def check_topics(words: list[str]) -> tuple[str, ...]:
    """Raises ConfigError naming a word that is no topic."""
    for word in words:
        if word not in ALL_TOPICS:
            raise ConfigError(f"--topic {word}: no such topic; there are {', '.join(ALL_TOPICS)}")
    return tuple(word for word in ALL_TOPICS if word in words)


class RowFilter:
    """`keeps` is asked of every row. A row of a step belongs to that step, every other to its time."""

    def __init__(self, choice: Choice, outcomes: Outcomes) -> None:
        """Raises ConfigError for a condition on a column that there is not, and for steps that there are not."""
        self._where = _checked(choice)
        self._arrays = _arrays_in(self._where)
        self._steps, self._step_ms = _steps_of(choice, outcomes)
        since, until = choice.since_ms, choice.until_ms
        if since is not None and until is not None and since >= until:
            raise ConfigError(f"--since {since} is not before --until {until}")
        self._since = 0 if since is None else since
        self._until = _FOREVER_MS if until is None else until
        self._tables = {table.name for table in choice.tables}

    def keeps(self, table: str, row: Row) -> bool:
        if table not in self._tables:
            return False
        at_ms = row.get(TABLES[table].time) or 0
        if not self._since <= at_ms < self._until:
            return False
        if self._steps is not None and not self._in_steps(table, row, at_ms):
            return False
        return self._where is None or self._where.matches_row(self._plain(row))

    def _in_steps(self, table: str, row: Row, at_ms: int) -> bool:
        assert self._steps is not None
        step = row.get("step")
        if step is None:
            return self._step_ms[0] < at_ms <= self._step_ms[1]
        return self._steps[0] <= step <= self._steps[1]

    def _plain(self, row: Row) -> Row:
        """Arrays that the condition looks at, as the lists that it can compare."""
        if not self._arrays:
            return row
        lists: dict[str, Any] = {name: row[name].tolist() for name in self._arrays if name in row}
        return {**row, **lists}


def _checked(choice: Choice) -> Where | None:
    if not choice.where:
        return None
    where = parse_where(choice.where)
    names = {name for table in choice.tables for name in table.names}
    where.check(names, "these tables")
    return where


def _arrays_in(where: Where | None) -> list[str]:
    if where is None:
        return []
    arrays = {column.name for table in TABLES.values() for column in table.columns if column.kind in ARRAYS}
    return sorted(arrays & {field.path[0] for field in where.fields})


def _steps_of(choice: Choice, outcomes: Outcomes) -> tuple[tuple[int, int] | None, tuple[int, int]]:
    """First and last step, and the time after the cut before the first up to the cut of the last."""
    if choice.from_step is None and choice.to_step is None:
        return None, (0, _FOREVER_MS)
    first, last = check_steps(choice.from_step, choice.to_step, outcomes)
    begin = outcomes.cut_ms.get(first - 1, 0)
    return (first, last), (begin, outcomes.cut_ms[last] if choice.to_step is not None else _FOREVER_MS)


def check_steps(first: int | None, last: int | None, outcomes: Outcomes) -> tuple[int, int]:
    """Raises ConfigError for a range that holds no step of the run."""
    newest = outcomes.last_step
    there = f"the run has steps 1 to {newest}" if newest else "the run has no steps yet"
    begin, end = 1 if first is None else first, newest if last is None else last
    if not 1 <= begin <= newest:
        raise ConfigError(f"--from-step {begin}: {there}")
    if not 1 <= end <= newest:
        raise ConfigError(f"--to-step {end}: {there}")
    if begin > end:
        raise ConfigError(f"--from-step {begin} is after --to-step {end}")
    return begin, end
