"""What belongs into a slice: of each partition a start, an end, and which records between them.

    everything                      all that is kept
    some steps                      the ledger from its beginning to the last of them, and of every other topic the
                                    stretch from the first to the last record that is about a group closed in them:
                                    what happened at that time, whole
    some groups                     the ledger, and the records about these groups alone (others' prompts stay at home)

The ledger is always there from its beginning, since half of it is another run's story, and `fleet` is whole. What a
valid cut in the slice refers to lies between start and end or below start, so an audit of the imported run takes what
is missing for removed, not for lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches
from typing import NamedTuple

from replay.evidence import kept
from replay.export.choice import check_steps
from replay.export.outcomes import Outcomes, ledger_entries, read_outcomes
from replay.records import Entry, entries, entry_of
from streams.errors import ConfigError
from streams.events import BatchCut, Closing, DeadLetter, Metrics, StepMeasured, WeightsPublished
from streams.log import EventLog, read_all
from streams.topics import ALL_TOPICS, DATA_TOPICS, Topics

LEDGER, FLEET, METRICS, DEAD = "ledger", "fleet", "metrics", "dead"
LOOKED_AT = (DEAD, LEDGER, *reversed(DATA_TOPICS), FLEET, METRICS)


class Stretch(NamedTuple):
    """Of one partition: [start, end), or only some offsets in it."""

    start: int
    end: int
    only: frozenset[int] | None = None

    def wants(self, offset: int) -> bool:
        return self.start <= offset < self.end and (self.only is None or offset in self.only)


Stretches = dict[tuple[str, int], Stretch]  # (topic word, partition) → what of it


def everything(log: EventLog, topics: Topics) -> Stretches:
    """All that is kept now. Where a live run goes on meanwhile, no record refers to one beyond an end: what refers is
    looked at before what it refers to."""
    found = {
        (word, partition): Stretch(*kept(log, topics.name(word), partition))
        for word in LOOKED_AT
        for partition in range(topics.count(word))
    }
    return {place: found[place] for place in _places(topics)}


def of_topics(stretches: Stretches, words: Collection[str]) -> Stretches:
    """Without the other topics' records; their offsets count as removed. The ledger and the fleet stay."""
    wanted = {*words, LEDGER, FLEET}
    return {
        place: stretch if place[0] in wanted else Stretch(stretch.end, stretch.end)
        for place, stretch in stretches.items()
    }


def of_steps(log: EventLog, topics: Topics, first: int | None, last: int | None) -> Stretches:
    """Raises ConfigError for steps that there are not."""
    outcomes = read_outcomes(log, topics)
    begin, end = check_steps(first, last, outcomes)
    ledger_end = outcomes.end if end == outcomes.last_step else _end_of_step(log, topics, outcomes, end)
    found = _read_references(log, topics, outcomes, begin, ledger_end)
    earlier = _read_references(log, topics, outcomes, 1, ledger_end)
    stretches = everything(log, topics)
    stretches[LEDGER, 0] = stretches[LEDGER, 0]._replace(end=ledger_end)
    offsets = _offsets_of(log, topics, found.groups)
    for word, partition in offsets:
        whole = stretches[word, partition]
        from_beginning = whole.start if begin == 1 else None
        around = _around(whole, offsets[word, partition], from_beginning)
        # an earlier step may have taken what came later: nothing that is referred to may lie beyond an end
        referred = min(whole.end, earlier.ends.get((word, partition), 0))
        stretches[word, partition] = around._replace(end=max(around.end, referred))
    in_steps = [offset for offset, step in _measured_steps(log, topics) if begin <= step <= end]
    stretches[METRICS, 0] = _around(stretches[METRICS, 0], in_steps, 0 if begin == 1 else None)
    stretches[DEAD, 0] = _only(stretches[DEAD, 0], _letters(log, topics, stretches, None))
    return stretches


def of_groups(log: EventLog, topics: Topics, ids: Sequence[str]) -> Stretches:
    """Raises ConfigError naming a group that the run does not have."""
    wanted = frozenset(ids)
    offsets = _offsets_of(log, topics, wanted)
    _check_ids(log, topics, wanted, offsets)
    outcomes = read_outcomes(log, topics)
    steps, is_closed = _steps_of(log, topics, outcomes, wanted)
    ledger_end = outcomes.end
    if is_closed and steps and max(steps) < outcomes.last_step:
        ledger_end = _end_of_step(log, topics, outcomes, max(steps))
    references = _read_references(log, topics, outcomes, 1, ledger_end)
    stretches = everything(log, topics)
    stretches[LEDGER, 0] = stretches[LEDGER, 0]._replace(end=ledger_end)
    for place, found in offsets.items():
        whole = stretches[place]
        if not found:
            stretches[place] = Stretch(whole.end, whole.end)
            continue
        end = max(found[-1] + 1, references.ends.get(place, 0))
        stretches[place] = Stretch(found[0], min(end, whole.end), frozenset(found))
    measured = [offset for offset, step in _measured_steps(log, topics) if step in steps]
    stretches[METRICS, 0] = _only(stretches[METRICS, 0], measured)
    stretches[DEAD, 0] = _only(stretches[DEAD, 0], _letters(log, topics, stretches, wanted))
    return stretches


# ---------------------------------------------------------------- the ledger
class _References(NamedTuple):
    groups: frozenset[str]  # that were closed
    ends: dict[
        tuple[str, int], int
    ]  # (topic word, partition) → position after the last place that a cut refers to


def _read_references(
    log: EventLog, topics: Topics, outcomes: Outcomes, first: int, ledger_end: int
) -> _References:
    """What valid records from the cut before step `first` on close and refer to."""
    groups: set[str] = set()
    ends: dict[tuple[str, int], int] = {}
    step = 0
    for _, event in _closings(log, topics, outcomes, ledger_end):
        if isinstance(event, BatchCut):
            step = event.step
        if step < first - (not isinstance(event, BatchCut)):
            continue
        groups.update(drop.group_id for drop in event.drops)
        for group in event.groups if isinstance(event, BatchCut) else ():
            groups.add(group.group_id)
            last = max((member.trajectory_offset for member in group.members), default=-1)
            for word, offset in (("groups", group.group_offset), ("trajectories", last)):
                place = (word, group.partition)
                ends[place] = max(ends.get(place, 0), offset + 1)
    return _References(frozenset(groups), ends)


def _end_of_step(log: EventLog, topics: Topics, outcomes: Outcomes, step: int) -> int:
    """Position after everything that the ledger says of a step: its cut, and the weights that it made."""
    end = 0
    for entry in _valid(log, topics, outcomes, outcomes.end):
        if isinstance(entry.event, (BatchCut, WeightsPublished)) and entry.event.step == step:
            end = entry.offset + 1
    return end


def _steps_of(
    log: EventLog, topics: Topics, outcomes: Outcomes, wanted: frozenset[str]
) -> tuple[set[int], bool]:
    """Steps that closed these groups (for a drop: the step after which it was named), and whether all are closed."""
    steps: set[int] = set()
    closed: set[str] = set()
    step = 0
    for _, event in _closings(log, topics, outcomes, outcomes.end):
        used = [group.group_id for group in event.groups] if isinstance(event, BatchCut) else []
        step = event.step if isinstance(event, BatchCut) else step
        named = wanted.intersection([*used, *(drop.group_id for drop in event.drops)])
        closed |= named
        if named:
            steps.add(step if isinstance(event, BatchCut) else step + 1)
    return steps, closed == wanted


def _closings(
    log: EventLog, topics: Topics, outcomes: Outcomes, ledger_end: int
) -> Iterator[tuple[int, Closing]]:
    for entry in _valid(log, topics, outcomes, ledger_end):
        if isinstance(entry.event, Closing):
            yield entry.offset, entry.event


def _valid(log: EventLog, topics: Topics, outcomes: Outcomes, end: int) -> Iterator[Entry]:
    for entry in ledger_entries(log, topics):
        if entry.offset >= end:
            return
        if not outcomes.is_void(entry):
            yield entry


# ---------------------------------------------------------------- the other topics
def _offsets_of(log: EventLog, topics: Topics, groups: Collection[str]) -> dict[tuple[str, int], list[int]]:
    """Where each data topic has something about these groups, ascending. Looks at headers; opens few values."""
    found: dict[tuple[str, int], list[int]] = {}
    for word in DATA_TOPICS:
        for partition in range(topics.partitions):
            topic = topics.name(word)
            start, end = kept(log, topic, partition)
            found[word, partition] = [
                record.offset
                for record in read_all(log, topic, partition, start, end)
                if _group_of(record.header("id") or b"") in groups
                or (record.header("id") is None and getattr(entry_of(record).event, "group_id", "") in groups)
            ]
    return found


def _group_of(identity: bytes) -> str:
    """The group of an `id` header: a group id, or a uid `group_id/index/attempt`."""
    return identity.decode("utf-8", "replace").split("/")[0]


def _check_ids(
    log: EventLog,
    topics: Topics,
    wanted: frozenset[str],
    offsets: dict[tuple[str, int], list[int]],
) -> None:
    there: set[str] = set()
    for (word, partition), places in offsets.items():
        for offset in places:
            record = log.read(topics.name(word), partition, offset, max_records=1).records[0]
            there.add(_group_of(record.header("id") or b""))
    for missing in sorted(wanted - there):
        known = {
            _group_of(record.header("id") or b"")
            for partition in range(topics.partitions)
            for record in read_all(
                log, topics.name("tasks"), partition, log.start(topics.name("tasks"), partition)
            )
        }
        near = get_close_matches(missing, known, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"--groups {missing}: the run has no such group{hint}")


def _measured_steps(log: EventLog, topics: Topics) -> Iterator[tuple[int, int]]:
    """(offset, step) of what the trainer said of its steps."""
    for entry in entries(log, topics.name(METRICS), 0):
        event = entry.event
        if isinstance(event, StepMeasured) or (isinstance(event, Metrics) and event.source == "trainer"):
            yield entry.offset, event.step


def _letters(
    log: EventLog, topics: Topics, stretches: Stretches, groups: Collection[str] | None
) -> list[int]:
    """Offsets of dead letters about these groups (None: all) whose refused record does not lie beyond the slice."""
    found: list[int] = []
    for entry in entries(log, topics.name(DEAD), 0):
        if not isinstance(entry.event, DeadLetter):
            continue
        letter = entry.event
        stretch = stretches.get((topics.word(letter.topic), letter.partition))
        is_beyond = stretch is not None and letter.offset >= stretch.end
        about = _group_of(dict(letter.raw_headers).get("id", b""))
        if not is_beyond and (groups is None or about in groups):
            found.append(entry.offset)
    return found


def _around(whole: Stretch, offsets: Sequence[int], start: int | None) -> Stretch:
    """From the first to the last of these offsets; from `start`, if it is given."""
    if not offsets and start is None:
        return Stretch(whole.end, whole.end)
    begin = offsets[0] if start is None else max(start, whole.start)
    return Stretch(begin, max([begin, *(offset + 1 for offset in offsets)]))


def _only(whole: Stretch, offsets: Sequence[int]) -> Stretch:
    """These offsets alone, from the first to the last of them."""
    return _around(whole, offsets, None)._replace(only=frozenset(offsets))


def _places(topics: Topics) -> list[tuple[str, int]]:
    return [(word, partition) for word in ALL_TOPICS for partition in range(topics.count(word))]
