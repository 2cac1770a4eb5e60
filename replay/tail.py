"""Following a topic, with kcat's habits: where to start, when to stop, what to show.

    parse_start("-10") ──► Tail(log, topic, …) ──► iterate: (partition, Entry), merged by timestamp

By position: nothing is committed, no group is joined, the live run does not notice. Memory is bounded by one read of
each partition. A damaged or unreadable record is an entry with its problem; it stops nothing.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from replay.records import Entry, TopicReader
from streams.errors import ConfigError
from streams.events import BatchCut, Closing, DeadLetter, GroupCompleted
from streams.log import EventLog, TopicPartition

READ_RECORDS = 200
PATIENCE = timedelta(milliseconds=200)  # between two looks at a topic that has nothing new
BEGINNING, END, OFFSET, LAST, TIME = "beginning", "end", "offset", "last", "time"

_WORDS = {"beginning": BEGINNING, "earliest": BEGINNING, "start": BEGINNING, "end": END, "latest": END}
_LEAST_MS = 10**11  # 1973 in milliseconds; a smaller number may be seconds
_HOW = "write milliseconds since 1970 (13 digits) or RFC 3339, as in @2026-11-01T10:00:00Z"


class Start(NamedTuple):
    kind: str
    value: int = 0  # an offset, a number of records, or milliseconds since 1970

    def position(self, log: EventLog, topic: str, partition: int) -> int:
        if self.kind == BEGINNING:
            return log.start(topic, partition)
        if self.kind == END:
            return log.end(topic, partition)
        if self.kind == LAST:
            return max(log.start(topic, partition), log.end(topic, partition) - self.value)
        if self.kind == TIME:
            return log.offset_at(topic, partition, self.value)
        return self.value


def parse_start(text: str) -> Start:
    """`beginning`, `end`, an offset, `-N` (the last N of each partition), or `@time`. Raises ConfigError.

    >>> parse_start("-10")
    Start(kind='last', value=10)
    >>> parse_start("@2026-11-01T10:00:00Z")
    Start(kind='time', value=1793527200000)
    """
    if text in _WORDS:
        return Start(_WORDS[text])
    if text.startswith("@"):
        return Start(TIME, parse_time(text[1:]))
    if re.fullmatch(r"-[0-9]+", text):
        return Start(LAST, int(text[1:]))
    if re.fullmatch(r"[0-9]+", text):
        return Start(OFFSET, int(text))
    raise ConfigError(f"-o {text}: must be beginning, end, an offset, -N for the last N, or @time")


def parse_time(text: str) -> int:
    """Milliseconds since 1970. A number that may be seconds, and a time without a zone, are refused by name."""
    if re.fullmatch(r"[0-9]+", text):
        if int(text) < _LEAST_MS:
            raise ConfigError(f"-o @{text}: seconds or milliseconds? {_HOW}")
        return int(text)
    try:
        moment = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text))
    except ValueError:
        raise ConfigError(f"-o @{text}: not a time; {_HOW}") from None
    if moment.tzinfo is None:
        raise ConfigError(f"-o @{text}: in which time zone? {_HOW}")
    return round(moment.timestamp() * 1000)


class Tail:
    """Iterates over entries of some partitions of a topic, oldest first among those that are there.

    Args:
        until_end: stop at the ends as they were when this was made; otherwise wait for more, for ever.
        count: stop after this many shown entries.
        group_id, uid: show only what names this group, this sample.
    """

    def __init__(
        self,
        log: EventLog,
        topic: str,
        partitions: Sequence[int],
        start: Start,
        *,
        until_end: bool = False,
        count: int | None = None,
        group_id: str | None = None,
        uid: str | None = None,
    ) -> None:
        self._log, self._topic = log, topic
        self._readers = {p: TopicReader(log, topic, p, start.position(log, topic, p)) for p in partitions}
        self._ends = {p: log.end(topic, p) for p in partitions} if until_end else None
        self._waiting: dict[int, deque[Entry]] = {p: deque() for p in partitions}
        self._count, self._group_id, self._uid = count, group_id, uid
        self.shown = 0

    @property
    def lost(self) -> int:
        """Records that retention removed before they could be shown."""
        return sum(reader.lost for reader in self._readers.values())

    def __iter__(self) -> Iterator[tuple[int, Entry]]:
        for partition, entry in self._merged():
            if self._count is not None and self.shown >= self._count:
                return
            if self._is_wanted(entry):
                self.shown += 1
                yield partition, entry
                if self.shown == self._count:
                    return

    def _merged(self) -> Iterator[tuple[int, Entry]]:
        while True:
            moved = self._refill()
            ready = [(queue[0].timestamp_ms, p) for p, queue in self._waiting.items() if queue]
            if ready:
                _, partition = min(ready)
                yield partition, self._waiting[partition].popleft()
            elif self._ends is not None and all(
                r.position >= self._ends[p] for p, r in self._readers.items()
            ):
                return
            elif not moved:
                positions = {TopicPartition(self._topic, p): r.position for p, r in self._readers.items()}
                self._log.wait(positions, PATIENCE)

    def _refill(self) -> bool:
        """Read on where nothing waits; True if a position moved."""
        moved = False
        for partition, reader in self._readers.items():
            end = self._log.end(self._topic, partition) if self._ends is None else self._ends[partition]
            if self._waiting[partition] or reader.position >= end:
                continue
            before = reader.position
            self._waiting[partition].extend(reader.read(end, READ_RECORDS))
            moved = moved or reader.position > before
        return moved

    def _is_wanted(self, entry: Entry) -> bool:
        wanted = True
        if self._group_id is not None:
            wanted = self._group_id in _groups_in(entry)
        if self._uid is not None:
            wanted = wanted and self._uid in _uids_in(entry)
        return wanted


def _groups_in(entry: Entry) -> set[str]:
    """Ids of the groups that an entry names."""
    event = entry.event
    found = {_field(entry, "group_id")}
    if isinstance(event, BatchCut):
        found.update(group.group_id for group in event.groups)
    if isinstance(event, Closing):
        found.update(drop.group_id for drop in event.drops)
    if isinstance(event, DeadLetter):
        found.add(_id_of_letter(event).split("/")[0])
    return found


def _uids_in(entry: Entry) -> set[str]:
    """Ids of the samples that an entry names."""
    event = entry.event
    found = {_field(entry, "uid")}
    if isinstance(event, GroupCompleted):
        found.update(member.uid for member in event.members)
    if isinstance(event, BatchCut):
        found.update(member.uid for group in event.groups for member in group.members)
    if isinstance(event, DeadLetter):
        found.add(_id_of_letter(event))
    return found


def _field(entry: Entry, name: str) -> str:
    if entry.unknown is not None:
        return str(entry.unknown.fields.get(name, ""))
    return getattr(entry.event, name, "")


def _id_of_letter(letter: DeadLetter) -> str:
    """The uid or group id that the refused record carried in its headers."""
    return dict(letter.raw_headers).get("id", b"").decode("utf-8", "replace")
