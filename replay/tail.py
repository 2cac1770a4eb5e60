"""Following a topic, with kcat's habits: where to start, when to stop, what to show.

    parse_start("-10") ──► Tail(log, topic, …) ──► iterate: (partition, Entry), merged by timestamp

    read ahead, one batch a partition ─► oldest first ─► picked by place and headers ─► decoded ─► picked by fields

By position: nothing is committed, no group is joined, the live run does not notice. Memory is bounded by one read of
each partition. A damaged or unreadable record is an entry with its problem; it stops nothing. Records are decoded one
by one as they are shown, and not at all where their place and headers are enough.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from heapq import heappop, heappush, heapreplace
from typing import NamedTuple

from replay.picks import Pick
from replay.records import Entry, TopicReader, entry_of, sealed
from streams.errors import ConfigError
from streams.log import EventLog, TopicPartition

READ_RECORDS = 500
READ_BYTES = (
    512 << 10
)  # of one partition: what is read should still lie in the processor's cache when it is shown
PATIENCE = timedelta(milliseconds=200)  # between two looks at a topic that has nothing new
BEGINNING, END, OFFSET, LAST, TIME = "beginning", "end", "offset", "last", "time"

_WORDS = {"beginning": BEGINNING, "earliest": BEGINNING, "start": BEGINNING, "end": END, "latest": END}
_FAR = 1 << 62  # further than any offset
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
        return min(self.value, log.end(topic, partition))

    def is_reached(self, entry: Entry) -> bool:
        """Whether an entry lies at this place or after it."""
        if self.kind == TIME:
            return entry.timestamp_ms >= self.value
        return self.kind != OFFSET or entry.offset >= self.value


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
    micros = re.sub(
        r"(?<=:\d\d)\.(\d+)", lambda found: f".{found[1][:6]:0<6}", text
    )  # all that Python 3.10 takes
    try:
        moment = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", micros))
    except ValueError:
        raise ConfigError(f"-o @{text}: not a time; {_HOW}") from None
    if moment.tzinfo is None:
        raise ConfigError(f"-o @{text}: in which time zone? {_HOW}")
    return round(moment.timestamp() * 1000)


def newest_ms(log: EventLog, topic: str, partitions: Sequence[int]) -> int | None:
    """The timestamp of the last record of these partitions; None when there is none (or it cannot be read)."""
    found: list[int] = []
    for partition in partitions:
        start, end = log.start(topic, partition), log.end(topic, partition)
        reader = TopicReader(log, topic, partition, max(start, end - 1), decode=sealed)
        found += [entry.timestamp_ms for entry in reader.catch_up() if entry.record is not None]
    return max(found, default=None)


class Tail:
    """Iterates over entries of some partitions of a topic, oldest first among those that are there.

    Args:
        until_end: stop at the ends as they were when this was made; otherwise wait for more, for ever.
        count: stop after this many shown entries.
        picks: show only what all of them want.
        opens: False leaves entries sealed (replay/records.py) unless a pick needs their event.
        on_wait: called before each wait for more.

    Raises ConfigError for an offset beyond the end of every partition.
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
        picks: Sequence[Pick] = (),
        opens: bool = True,
        on_wait: Callable[[], None] | None = None,
    ) -> None:
        self._log, self._topic, self._start = log, topic, start
        places = {p: start.position(log, topic, p) for p in partitions}
        ends = {p: log.end(topic, p) for p in partitions}
        _check_start(topic, start, ends)
        # began at their end because what was asked for is not there yet
        self._early = {p for p, place in places.items() if start.kind in (OFFSET, TIME) and place >= ends[p]}
        self._readers = {p: TopicReader(log, topic, p, place, decode=sealed) for p, place in places.items()}
        self._ends = ends if until_end else None
        self._waiting: dict[int, deque[Entry]] = {p: deque() for p in partitions}
        self._count, self._on_wait = count, on_wait
        self._sealed_picks = [pick for pick in picks if not pick.needs_event]
        self._open_picks = [pick for pick in picks if pick.needs_event]
        self._opens = opens or bool(self._open_picks)
        self.shown = 0
        self.looked_at = 0

    @property
    def lost(self) -> int:
        """Records that retention removed before they could be shown."""
        return sum(reader.lost for reader in self._readers.values())

    def __iter__(self) -> Iterator[tuple[int, Entry]]:
        is_picky = bool(self._sealed_picks or self._open_picks or self._early)
        for partition, waiting in self._merged():
            self.looked_at += 1
            if is_picky:
                entry = self._picked(partition, waiting)
                if entry is None:
                    continue
            else:
                entry = self._opened(waiting)
            self.shown += 1
            yield partition, entry
            if self.shown == self._count:
                return

    def _picked(self, partition: int, entry: Entry) -> Entry | None:
        """The entry as it is shown; None when it is not wanted."""
        if partition in self._early:
            if not self._start.is_reached(entry):
                return None
            self._early.discard(partition)
        for pick in self._sealed_picks:
            if not pick.matches(entry):
                return None
        for pick in self._open_picks:
            if not pick.may_match(entry):
                return None
        entry = self._opened(entry)
        for pick in self._open_picks:
            if not pick.matches(entry):
                return None
        return entry

    def _opened(self, entry: Entry) -> Entry:
        return entry_of(entry.record) if self._opens and entry.record is not None else entry

    def _merged(self) -> Iterator[tuple[int, Entry]]:
        """Entries as they were read, oldest first."""
        dry = dict.fromkeys(self._readers)  # partitions of which nothing waits, in order
        heads: list[tuple[int, int]] = []  # heap of (timestamp of what waits first, partition) of the others
        while True:
            moved = False
            for partition in list(dry):
                moved = self._refill(partition) or moved
                if self._waiting[partition]:
                    del dry[partition]
                    heappush(heads, (self._waiting[partition][0].timestamp_ms, partition))
            if heads:
                partition = yield from self._until_dry(heads)
                dry[partition] = None
            elif self._ends is not None:
                return
            elif not moved:
                self._wait()

    def _until_dry(self, heads: list[tuple[int, int]]) -> Iterator[tuple[int, Entry]]:
        """Entries until nothing more of one partition waits: which one."""
        while True:
            partition = heads[0][1]
            waiting = self._waiting[partition]
            yield partition, waiting.popleft()
            if not waiting:
                heappop(heads)
                return partition
            heapreplace(heads, (waiting[0].timestamp_ms, partition))

    def _refill(self, partition: int) -> bool:
        """Read on until something waits or nothing is left; True if the position moved."""
        reader, waiting = self._readers[partition], self._waiting[partition]
        end = _FAR if self._ends is None else self._ends[partition]
        begin = reader.position
        while not waiting and reader.position < end:
            before = reader.position
            waiting.extend(reader.read(end, READ_RECORDS, READ_BYTES))
            if reader.position == before:
                break
        return reader.position > begin

    def _wait(self) -> None:
        if self._on_wait is not None:
            self._on_wait()
        positions = {TopicPartition(self._topic, p): r.position for p, r in self._readers.items()}
        self._log.wait(positions, PATIENCE)


def _check_start(topic: str, start: Start, ends: dict[int, int]) -> None:
    if start.kind != OFFSET or any(start.value <= end for end in ends.values()):
        return
    held = ", ".join(f"{end} in partition {p}" for p, end in ends.items())
    raise ConfigError(
        f"-o {start.value}: beyond the end of {topic}, whose next offset is {held}; "
        "-o -10 shows the last 10, -o end waits for what comes"
    )
