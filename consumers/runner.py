"""What every stage shares: where it was (from its own output), what it has in flight, when it must stop.

    read input p ──► Inputs.started(offset) ──► work ──► output carries Inputs.progress() ──► append acknowledged
                                                                     Inputs.finished(offset) ◄──┘

After a crash `recover` takes `low_water` from the stage's last output in partition p, and the stage re-reads its
input from there; what it had already done is found by scanning its own output back to the first event whose
`read_to` is not above that low water (DESIGN §4.1). Work is bounded by what was in flight. No side files, no
committed offset is trusted.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec

from consumers.losses import Losses
from streams import codec
from streams.codec import Known, Unknown
from streams.errors import CodecError, CorruptRecord, OffsetOutOfRange, RecordTooLarge
from streams.events import DeadLetter, Event, InputProgress, Progress, TaskDispatched, TaskSkipped
from streams.log import EventLog, Record
from streams.ranges import from_ranges
from streams.topics import Topics

logger = logging.getLogger(__name__)

Clock = Callable[[], int]  # milliseconds since 1970
Stop = Callable[[], bool]

CUT_RAW_BYTES = 64 << 10  # of a record that is too large for a dead letter
NEARLY = 64  # records: a stage this close to the end of its input is not behind


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Inputs:
    """In-flight bookkeeping of one input partition.

    >>> inputs = Inputs(0)
    >>> inputs.started(0); inputs.started(1); inputs.started(2); inputs.finished(1); inputs.finished(2)
    >>> inputs.progress()
    InputProgress(read_to=3, low_water=0, finished=[(1, 3)])
    >>> inputs.finished(0); inputs.progress()
    InputProgress(read_to=3, low_water=3, finished=[])

    `reached` is how far earlier incarnations had read: it is what progress says until this one is past it. So
    `read_to` never falls along an output, and a scan that ends at the first `read_to` ≤ L has seen everything
    that was written about inputs at or above L, also after several crashes in a row.
    """

    def __init__(self, position: int, reached: int = 0) -> None:
        self.read_to, self._reached = position, reached
        self._open: list[int] = []  # started and not finished, sorted
        self._finished: list[tuple[int, int]] = []  # ranges [begin, end) above the lowest open one, sorted

    def started(self, offset: int) -> None:
        bisect.insort(self._open, offset)
        self.read_to = max(self.read_to, offset + 1)

    def advance(self, position: int) -> None:
        """Everything below `position` has been read (also holes and records that need no work)."""
        self.read_to = max(self.read_to, position)

    def finished(self, offset: int) -> None:
        """Its output is acknowledged, or it needs none. Unknown offsets are passed over."""
        at = bisect.bisect_left(self._open, offset)
        if at == len(self._open) or self._open[at] != offset:
            return
        del self._open[at]
        self._add(offset)
        low = self.low_water
        while self._finished and self._finished[0][1] <= low:
            del self._finished[0]

    def _add(self, offset: int) -> None:
        """One more finished offset: ranges that now touch become one, so their number is that of the gaps."""
        ranges = self._finished
        at = bisect.bisect_left(ranges, (offset, offset))
        begin, end = offset, offset + 1
        if at < len(ranges) and ranges[at][0] == end:
            end = ranges.pop(at)[1]
        if at and ranges[at - 1][1] == begin:
            at -= 1
            begin = ranges.pop(at)[0]
        ranges.insert(at, (begin, end))

    @property
    def low_water(self) -> int:
        return self._open[0] if self._open else self.read_to

    @property
    def in_flight(self) -> int:
        return len(self._open)

    def progress(self) -> InputProgress:
        return InputProgress(max(self.read_to, self._reached), self.low_water, list(self._finished))


class Recovered(NamedTuple):
    """Where a stage goes on. `done` are its own outputs that may belong to inputs at or above the low waters."""

    positions: dict[str, int]  # input topic word → low water (0 if there is no output yet)
    finished: dict[str, set[int]]  # input topic word → finished offsets at or above the low water
    done: list[Event]  # oldest first
    reached: dict[str, int]  # input topic word → the furthest that any of those outputs had read


def recover(
    log: EventLog,
    topics: Topics,
    output: str,
    partition: int,
    inputs: Sequence[str],
    losses: Losses | None = None,
    *,
    of: tuple[type[Event], ...] = (Event,),
) -> Recovered:
    """Rebuild a stage's place in its inputs of one partition from its own output, and nothing else.

    `of`: the events that the stage writes, where another one writes to the same topic.
    Raises RecordsLost when retention has removed inputs from that place on, unless `losses` let it continue.
    """
    losses = losses or Losses(f"the writer of {topics.name(output)}")
    starts = {word: log.start(topics.name(word), partition) for word in inputs}
    low: dict[str, int] | None = None
    finished: dict[str, set[int]] = {word: set() for word in inputs}
    reached = dict(starts)
    done: list[Event] = []
    for event in events_backwards(log, topics.name(output), partition, losses):
        progress: Progress = getattr(event, "progress", {})
        if not progress or not isinstance(event, of):
            continue
        if low is None:
            low = {word: progress[word].low_water if word in progress else starts[word] for word in inputs}
            finished = {
                word: from_ranges(progress[word].finished) if word in progress else set() for word in inputs
            }
        if all(word not in progress or progress[word].read_to <= low[word] for word in inputs):
            break
        reached = {
            word: max(reached[word], progress[word].read_to) if word in progress else reached[word]
            for word in inputs
        }
        done.append(event)
    done.reverse()
    why = "" if low is not None or not log.start(topics.name(output), partition) else _NO_PLACE
    low = low or dict.fromkeys(inputs, 0)
    positions = {
        word: losses.position(
            topics.name(word), partition, wanted=low[word], start=starts[word], done=finished[word], why=why
        )
        for word in inputs
    }
    return Recovered(positions, finished, done, reached)


_NO_PLACE = "at most, for its own output, which says where it was, was removed too"


def records_backwards(
    log: EventLog, topic: str, partition: int, losses: Losses | None = None, *, window: int = 256
) -> Iterator[Record]:
    """Records from the end to the start, read in windows. Ends early where retention catches up with it.

    Damaged records raise RecordsLost, unless `losses` let it continue.
    """
    losses = losses or Losses(f"a scan of {topic}")
    start, end = log.start(topic, partition), log.end(topic, partition)
    while end > start:
        begin = max(start, end - window)
        records: list[Record] = []
        position = begin
        while position < end:
            try:
                batch = log.read(topic, partition, position, max_records=end - position)
            except OffsetOutOfRange as outside:
                if position >= outside.start:
                    raise
                start = position = outside.start
                continue
            except CorruptRecord as error:
                position = losses.damaged(log, error)
                continue
            records.extend(record for record in batch.records if record.offset < end)
            if batch.next_position <= position:
                break
            position = batch.next_position
        yield from reversed(records)
        end = begin


def events_backwards(
    log: EventLog, topic: str, partition: int, losses: Losses | None = None
) -> Iterator[Event]:
    """Known events from the end to the start; records that cannot be decoded are passed over."""
    for record in records_backwards(log, topic, partition, losses):
        try:
            decoded = codec.decode(record)
        except CodecError:
            continue
        if isinstance(decoded, Known):
            yield decoded.event


def task_event(record: Record) -> TaskDispatched | TaskSkipped | None:
    """What a record of `tasks` says; None for one that cannot be read."""
    try:
        decoded = codec.decode(record)
    except CodecError:
        return None
    if isinstance(decoded, Known) and isinstance(decoded.event, (TaskDispatched, TaskSkipped)):
        return decoded.event
    return None


class Reader:
    """Decodes records for one stage; what cannot be read becomes a dead letter, what is unknown is counted.

    The guarantee "a poison record stops nobody and is not lost" lives here: `decode` returns None only after the
    dead letter is durable; if that append fails it raises, and the stage must not move past the record.
    """

    def __init__(self, log: EventLog, topics: Topics, stage: str, clock: Clock = now_ms) -> None:
        self.log, self.topics, self.stage, self.clock = log, topics, stage, clock
        self.unknown_types = 0
        self.dead_letters = 0

    def decode(self, record: Record) -> Event | None:
        """The event, or None for a record that was refused (dead letter written) or is of an unknown type."""
        try:
            decoded = codec.decode(record)
        except CodecError as error:
            self.refuse(record, reason=_reason(error), detail=str(error))
            return None
        if isinstance(decoded, Unknown):
            self.unknown_types += 1
            logger.warning(
                "%s: passed over unknown event type %r at %s/%d:%d",
                self.stage,
                decoded.type,
                record.topic,
                record.partition,
                record.offset,
            )
            return None
        return decoded.event

    def refuse(self, record: Record, *, reason: str, detail: str) -> None:
        """Write the record, whole if it fits, to `dead`. Returns once that is durable."""
        letter = DeadLetter(
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            raw=record.value,
            raw_headers=list(record.headers),
            stage=self.stage,
            reason=reason,
            detail=detail[:2000],
            at_ms=self.clock(),
        )
        try:
            self.log.append(self.topics.name("dead"), 0, [codec.encode(letter, producer=self.stage)])
        except (
            RecordTooLarge
        ):  # a record at the limit, and what the letter says of it: it must stop nobody all the same
            cut = cut_letter(letter)
            self.log.append(self.topics.name("dead"), 0, [codec.encode(cut, producer=self.stage)])
        self.dead_letters += 1
        logger.warning(
            "%s: refused %s/%d:%d: %s: %s",
            self.stage,
            record.topic,
            record.partition,
            record.offset,
            reason,
            detail,
        )


def cut_letter(letter: DeadLetter) -> DeadLetter:
    """A dead letter that is too large for the log, with the beginning of the record alone."""
    raw = letter.raw[:CUT_RAW_BYTES]
    detail = f"cut from {len(letter.raw)} bytes; {letter.detail}"
    return msgspec.structs.replace(letter, raw=raw, detail=detail)


_REASONS = {"SchemaTooNew": "schema_too_new", "OverCap": "over_cap", "ClaimLost": "claim_lost"}


def _reason(error: CodecError) -> str:
    return _REASONS.get(type(error).__name__, "undecodable")


def exit_code(who: str, undelivered: int) -> int:
    """Of a stage that was asked to stop: 0, unless events that it had made are not in the log.

    They are no loss: the next one makes them again from the same inputs. But nobody may take them for delivered.
    """
    if undelivered:
        logger.error(
            "%s: stopped with %d events undelivered; the next one makes them again", who, undelivered
        )
    return 1 if undelivered else 0


class Patience:
    """Says what a loop waits for after 10 s, and again at growing intervals: nothing waits silently."""

    def __init__(self, what: str, first: timedelta = timedelta(seconds=10)) -> None:
        self.what, self._first = what, first.total_seconds()
        self.reset()

    def reset(self) -> None:
        self._since = time.monotonic()
        self._next = self._first

    def waiting(self, detail: Callable[[], str]) -> None:
        """Call once per idle round; logs when the wait has become long."""
        waited = time.monotonic() - self._since
        if waited >= self._next:
            logger.warning("%s has waited %.0f s for %s", self.what, waited, detail())
            self._next = min(self._next * 2, self._next + 60)


class ProgressClock:
    """Seconds that count only while somebody could have made progress. Never counts more than 1 s a tick."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.seconds = 0.0
        self._monotonic = monotonic
        self._last = monotonic()

    def tick(self, running: bool) -> None:
        now = self._monotonic()
        if running:
            self.seconds += min(now - self._last, 1.0)
        self._last = now


def slim(progress: Progress) -> Progress:
    """The same progress without its lists."""
    return {word: InputProgress(each.read_to, each.low_water) for word, each in progress.items()}


def stamp(outputs: Sequence[Event], progress: Progress, **closing: Any) -> list[Event]:
    """The outputs of one append, carrying the stage's progress.

    Lists (`finished`, and what is in `closing`) go on the last one alone: they can hold hundreds of numbers, and
    a recovery reads them from the stage's last output only. If a crash tears the append before its last record,
    the scan for what is done finds the rest (`recover`).
    """
    shared = slim(progress)
    stamped = [with_progress(event, shared) for event in outputs[:-1]]
    return stamped + [with_progress(event, progress, **closing) for event in outputs[-1:]]


def with_progress(event: Event, progress: Progress, **changes: Any) -> Event:
    """The same event carrying this progress and these other changes (events are frozen)."""
    return msgspec.structs.replace(event, progress=progress, **changes)
