"""What an audit needs from the log, gathered in one pass over each topic. Reads only.

Memory: a few hundred bytes for each trained sample; payloads are opened one at a time and not kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from consumers.losses import DAMAGED
from replay.ledger import LedgerEntry, RunView, read_ledger
from replay.records import Entry, entries, entry_of
from replay.slices.filler import is_left_out
from streams import columns
from streams.columns import VersionRun
from streams.errors import CodecError, CorruptRecord, InvalidEvent, UnknownTopic
from streams.events import (
    DeadLetter,
    EngineReady,
    GroupCompleted,
    GroupDropped,
    TaskDispatched,
    TaskSkipped,
    TrajectoryFinished,
)
from streams.log import EventLog
from streams.topics import Topics
from streams.trajectory import open_payload, payload_digest

Place = tuple[int, int]  # (partition, offset) in the topic that the context names


class Dispatch(NamedTuple):
    group_id: str
    seq: int
    partition: int
    offset: int


class Sample(NamedTuple):
    """A referenced trajectory. Either `problem` says why it cannot be judged, or the rest is there."""

    uid: str = ""
    group_id: str = ""
    trainable: Sequence[VersionRun] = ()
    engine: str = ""
    incarnation: str = ""  # of the engine's daemon; "": not said
    n_response_tokens: int = 0
    digest: str = ""
    problem: str = ""
    gone: bool = False  # removed by retention, or not in the slice: nothing can be said of it any more


class Source(NamedTuple):
    """What made a token."""

    engine: str
    incarnation: str
    epoch: int
    version: int


class Completed(NamedTuple):
    group_id: str
    members: dict[str, tuple[int, float]]  # uid → (trajectory offset, reward)
    lengths: dict[str, int]  # uid → response tokens; 0: not said
    digests: dict[str, str]  # uid → digest of the payload that was scored; "": not said


class Letter(NamedTuple):
    """A dead letter, without its bytes."""

    at: int  # its own offset in `dead`
    topic: str
    partition: int
    offset: int  # of the refused record; -1: it never came to the log
    stage: str
    reason: str
    is_faithful: bool | None  # it holds the refused record's very bytes; None: that is no longer kept


class Evidence(NamedTuple):
    ledger: list[LedgerEntry]
    view: RunView
    dispatches: list[Dispatch]  # first dispatches and skipped rows, copies included
    dispatches_whole: bool  # retention has removed none of them, and the slice has them all
    samples: dict[Place, Sample]  # every trajectory that a valid cut refers to
    sources: dict[
        Source, str
    ]  # of the trainable tokens of every kept trajectory, trained or not → the first's uid
    completed: dict[Place, Completed | None]  # every group record that a valid cut refers to; None: gone
    terminal: list[list[tuple[int, int]]]  # per partition of `groups`: (offset, seq) of completed and dropped
    ready: dict[
        str, dict[tuple[int, int], str]
    ]  # engine → (epoch, version) that it reported → digest it held
    ready_by: dict[str, set[tuple[int, int]]]  # incarnation → (epoch, version) that it reported
    ready_whole: bool  # retention has removed no fleet event
    dead: Counter[str]  # "stage: reason" → letters
    letters: list[Letter]
    unreadable: Counter[str]  # topic word → records that nobody can read
    unknown: Counter[str]  # event type → records


def gather(log: EventLog, topics: Topics) -> Evidence:
    """Read the whole run once."""
    ledger, view = read_ledger(log, topics)
    wanted_samples: dict[int, set[int]] = {}
    wanted_groups: dict[int, set[int]] = {}
    for _, group in view.groups_trained():
        wanted_groups.setdefault(group.partition, set()).add(group.group_offset)
        wanted_samples.setdefault(group.partition, set()).update(m.trajectory_offset for m in group.members)
    found = Evidence(
        ledger=ledger,
        view=view,
        dispatches=[],
        dispatches_whole=_whole(log, topics),
        samples={},
        sources={},
        completed={},
        terminal=[],
        ready={},
        ready_by={},
        ready_whole=kept(log, topics.name("fleet"), 0)[0] == 0,
        dead=Counter(),
        letters=[],
        unreadable=Counter(),
        unknown=Counter(),
    )
    for partition in range(topics.partitions):
        if not _read_tasks(log, topics, partition, found):
            found = found._replace(dispatches_whole=False)
        _read_groups(log, topics, partition, wanted_groups.get(partition, set()), found)
    for partition in sorted({*range(topics.partitions), *wanted_samples}):
        _read_trajectories(log, topics, partition, wanted_samples.get(partition, set()), found)
    for entry in entries(log, topics.name("dead"), 0):
        if isinstance(entry.event, DeadLetter):
            found.dead[f"{entry.event.stage}: {entry.event.reason}"] += 1
            found.letters.append(_letter(log, entry.offset, entry.event))
    for entry in entries(log, topics.name("fleet"), 0):
        if isinstance(entry.event, EngineReady):
            held = found.ready.setdefault(entry.event.engine, {})
            held[entry.event.epoch, entry.event.version] = entry.event.digest
            if entry.event.incarnation:
                told = found.ready_by.setdefault(entry.event.incarnation, set())
                told.add((entry.event.epoch, entry.event.version))
    for entry in ledger:
        _count_problem("ledger", entry.problem, entry.unknown_type, found)
    return found


def entries_at(
    log: EventLog, topic: str, partition: int, offsets: Collection[int]
) -> Iterator[tuple[int, Entry | None]]:
    """The entries at these offsets, ascending, reading what lies close together in one go.

    None for an offset below the start: retention has removed it. One that is not there at all has a problem.
    """
    start, end = kept(log, topic, partition)
    left = sorted(offsets, reverse=True)
    while left:
        offset = left[-1]
        if 0 <= offset < start:
            yield left.pop(), None
            continue
        if not 0 <= offset < end:
            yield left.pop(), Entry(offset, 0, None, f"{topic}/{partition} ends at {end}")
            continue
        try:
            batch = log.read(topic, partition, offset, max_records=256)
        except CorruptRecord as damage:
            yield left.pop(), Entry(offset, 0, None, str(damage))
            continue
        for record in batch.records:
            while left and left[-1] < record.offset:
                missing = left.pop()
                yield missing, Entry(missing, 0, None, f"{topic}/{partition} has no record {missing}")
            if left and left[-1] == record.offset:
                yield left.pop(), entry_of(record)
        if left and left[-1] == offset:
            yield left.pop(), Entry(offset, 0, None, f"{topic}/{partition} has no record {offset}")


def kept(log: EventLog, topic: str, partition: int) -> tuple[int, int]:
    """(start, end) of a partition; (0, 0) when it does not exist."""
    try:
        return log.start(topic, partition), log.end(topic, partition)
    except UnknownTopic:
        return 0, 0


def _whole(log: EventLog, topics: Topics) -> bool:
    return all(kept(log, topics.name("tasks"), partition)[0] == 0 for partition in range(topics.partitions))


def _read_tasks(log: EventLog, topics: Topics, partition: int, found: Evidence) -> bool:
    """False when some are left out of the slice that this log was made from."""
    is_whole = True
    for entry in entries(log, topics.name("tasks"), partition):
        event = entry.event
        is_whole = is_whole and not is_left_out(entry)
        if isinstance(event, TaskSkipped) or (isinstance(event, TaskDispatched) and event.attempt == 0):
            found.dispatches.append(Dispatch(event.group_id, event.seq, partition, entry.offset))
        _count_problem("tasks", entry.problem, entry.unknown.type if entry.unknown else "", found)
    return is_whole


def _read_groups(log: EventLog, topics: Topics, partition: int, wanted: set[int], found: Evidence) -> None:
    topic = topics.name("groups")
    terminal: list[tuple[int, int]] = []
    found.terminal.append(terminal)
    for entry in entries(log, topic, partition):
        event = entry.event
        if isinstance(event, (GroupCompleted, GroupDropped)):
            terminal.append((entry.offset, event.seq))
        if isinstance(event, GroupCompleted) and entry.offset in wanted:
            members = {member.uid: (member.trajectory_offset, member.reward) for member in event.members}
            lengths = {member.uid: member.n_response_tokens for member in event.members}
            digests = {member.uid: member.payload_digest for member in event.members}
            found.completed[partition, entry.offset] = Completed(event.group_id, members, lengths, digests)
        elif is_left_out(entry) and entry.offset in wanted:
            found.completed[partition, entry.offset] = None
        _count_problem("groups", entry.problem, entry.unknown.type if entry.unknown else "", found)
    start, _ = kept(log, topic, partition)
    found.completed.update({(partition, offset): None for offset in wanted if 0 <= offset < start})


def _read_trajectories(
    log: EventLog, topics: Topics, partition: int, wanted: set[int], found: Evidence
) -> None:
    """Each of them once; those that a cut refers to and that are not there are asked for by their place."""
    topic = topics.name("trajectories")
    for entry in entries(log, topic, partition):
        sample = None
        if entry.offset in wanted:
            sample = found.samples[partition, entry.offset] = _sample(entry)
        event = entry.event
        if isinstance(event, TrajectoryFinished):
            for epoch, version, _ in sample.trainable if sample is not None else _trainable(event):
                source = Source(event.engine, event.incarnation, epoch, version)
                found.sources.setdefault(source, event.uid)
    missing = [offset for offset in wanted if (partition, offset) not in found.samples]
    for offset, entry in entries_at(log, topic, partition, missing):
        found.samples[partition, offset] = _sample(entry)


def _trainable(event: TrajectoryFinished) -> Sequence[VersionRun]:
    try:
        return columns.trainable_runs(event.versions, columns.decode_mask(event.loss_mask))
    except (CodecError, InvalidEvent):
        return ()  # it is refused wherever it is opened


def _sample(entry: Entry | None) -> Sample:
    if entry is None:
        return Sample(problem="removed by retention", gone=True)
    if is_left_out(entry):
        return Sample(problem="left out of the slice", gone=True)
    if not isinstance(entry.event, TrajectoryFinished):
        return Sample(problem=entry.problem or f"a {type(entry.event).__name__}, not a TrajectoryFinished")
    event = entry.event
    try:
        payload = open_payload(event)
        trainable = columns.trainable_runs(payload.versions, payload.loss_mask)
    except (CodecError, InvalidEvent) as error:
        return Sample(event.uid, event.group_id, problem=str(error))
    length, digest = len(payload.response_ids), payload_digest(event)
    return Sample(event.uid, event.group_id, trainable, event.engine, event.incarnation, length, digest)


def _letter(log: EventLog, at: int, event: DeadLetter) -> Letter:
    is_faithful: bool | None = None
    if event.offset >= 0 and event.reason != DAMAGED:  # such a letter holds nothing that could be compared
        ((_, entry),) = entries_at(log, event.topic, event.partition, [event.offset])
        if entry is not None and not is_left_out(entry):  # else removed by retention, or not in the slice
            is_faithful = entry.record is not None and entry.record.value == event.raw
    return Letter(at, event.topic, event.partition, event.offset, event.stage, event.reason, is_faithful)


def _count_problem(word: str, problem: str, unknown_type: str, found: Evidence) -> None:
    if unknown_type:
        found.unknown[unknown_type] += 1
    elif problem:
        found.unreadable[word] += 1
