"""Everything that the log holds of one group, in the order of the data path, found by header and by reference.

ledger ─► partition of a group that was cut ─┐
tasks  ─► else: the header of its dispatch ──┴─► its partition ─► tasks, trajectories, rewards, groups
                                                                   within the time in which it lived
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from replay.evidence import entries_at
from replay.lives.run import Mention, RunFacts
from replay.lives.seek import (
    AFTERWARDS_MS,
    CLOCKS_MS,
    EVER,
    FAILED,
    Window,
    around,
    id_of,
    of_group,
    place,
    records_where,
    type_of,
)
from replay.records import Entry, entry_of
from streams.events import (
    CutMember,
    DeadLetter,
    Event,
    GroupCompleted,
    GroupDropped,
    RewardAssigned,
    ScoringFailed,
    TaskDispatched,
    TaskSkipped,
)
from streams.log import Record

_Kind = TypeVar("_Kind", bound=Event)


class Trail(NamedTuple):
    group_id: str
    partition: int  # -1: only the ledger knows it any more
    tasks: list[Entry]
    trajectories: list[Record]  # not opened: a payload is heavy
    rewards: list[Entry]
    groups: list[Entry]
    letters: list[tuple[Entry, DeadLetter]]
    mentions: list[Mention]
    notes: list[str]

    # -- tasks
    @property
    def first(self) -> TaskDispatched | None:
        """The first dispatch; None for a skipped row, or when retention has removed it."""
        return next((each for _, each in events(self.tasks, TaskDispatched) if each.first_offset < 0), None)

    @property
    def skipped(self) -> TaskSkipped | None:
        return next((each for _, each in events(self.tasks, TaskSkipped)), None)

    def dispatch_of(self, index: int, attempt: int) -> tuple[Entry, TaskDispatched] | None:
        for entry, event in events(self.tasks, TaskDispatched):
            if event.attempt == attempt and (not event.indices or index in event.indices):
                return entry, event
        return None

    # -- outcomes
    @property
    def terminal(self) -> tuple[Entry, GroupCompleted | GroupDropped] | None:
        """The collector's: the first one wins for every reader."""
        found = [*events(self.groups, GroupCompleted), *events(self.groups, GroupDropped)]
        return min(found, key=lambda each: each[0].offset, default=None)

    @property
    def decided(self) -> Mention | None:
        """The group's outcome: its first mention in a valid ledger record."""
        return next((each for each in self.mentions if not each.entry.void), None)

    # -- samples
    def cut_member(self, uid: str) -> CutMember | None:
        """The sample in the cut that took its group."""
        decided = self.decided
        members = decided.group.members if decided is not None and decided.group is not None else []
        return next((each for each in members if each.uid == uid), None)

    def trajectories_of(self, uid: str) -> list[Record]:
        return [each for each in self.trajectories if id_of(each) == uid and type_of(each) != FAILED]

    def verdicts_of(self, uid: str) -> list[tuple[Entry, RewardAssigned | ScoringFailed]]:
        """First the one that counts."""
        found = [*events(self.rewards, RewardAssigned), *events(self.rewards, ScoringFailed)]
        return sorted((each for each in found if each[1].uid == uid), key=lambda each: each[0].offset)

    def uids(self) -> list[str]:
        """Of every attempt that anything is known of, by index and attempt."""
        found = {id_of(each) for each in self.trajectories}
        for _, event in [*events(self.rewards, RewardAssigned), *events(self.rewards, ScoringFailed)]:
            found.add(event.uid)
        for _, event in events(self.groups, GroupCompleted):
            found.update(member.uid for member in event.members)
        for _, event in events(self.tasks, TaskDispatched):
            found.update(f"{self.group_id}/{index}/{event.attempt}" for index in asked_of(event))
        for mention in self.mentions:
            if mention.group is not None:
                found.update(member.uid for member in mention.group.members)
        return sorted((uid for uid in found if uid.count("/") == 2), key=_order)


def events(entries: Sequence[Entry], kind: type[_Kind]) -> Iterator[tuple[Entry, _Kind]]:
    for entry in entries:
        if isinstance(entry.event, kind):
            yield entry, entry.event


def asked_of(task: TaskDispatched) -> Sequence[int]:
    """The members that a dispatch asks for."""
    return task.indices or range(task.n_samples)


def attempt_of(uid: str) -> int:
    return _order(uid)[1]


def index_of(uid: str) -> int:
    return _order(uid)[0]


def _order(uid: str) -> tuple[int, int]:
    _, index, attempt = uid.rsplit("/", 2)
    return (
        int(index) if index.isdecimal() else -1,
        int(attempt) if attempt.isdecimal() else -1,
    )


# ---------------------------------------------------------------- finding
def follow(run: RunFacts, group_id: str) -> Trail | None:
    """The trail of a group; None when nothing in the log names it."""
    notes = list(run.notes)
    mentions = run.mentions(group_id)
    partition = _partition_by_reference(mentions)
    if partition is None:
        partition = _partition_by_header(run, group_id)
    if partition is None:
        if not mentions:
            return None
        notes.append("retention has removed everything but the ledger's record of it")
        return Trail(group_id, -1, [], [], [], [], [], mentions, notes)
    window, near = _windows(run, group_id, partition, mentions)

    def of_topic(word: str, within: Window = window) -> list[Record]:
        found = records_where(
            *(run.log, run.topics.name(word), partition, of_group(group_id)), window=within, tell=notes.append
        )
        return list(found)

    trajectories = of_topic("trajectories", near)
    rewards = [entry_of(each) for each in of_topic("rewards")]
    tasks = [entry_of(each) for each in of_topic("tasks")]
    groups = [entry_of(each) for each in of_topic("groups")]
    letters = _letters(run, group_id, partition, window, [*trajectories, *_records(tasks, rewards, groups)])
    _tell(run, window, {"tasks": tasks, "rewards": rewards, "groups": groups}, notes)
    return Trail(group_id, partition, tasks, trajectories, rewards, groups, letters, mentions, notes)


def _partition_by_reference(mentions: Sequence[Mention]) -> int | None:
    return next((each.group.partition for each in mentions if each.group is not None), None)


def _partition_by_header(run: RunFacts, group_id: str) -> int | None:
    """Where its dispatch lies, or, when that is gone, the collector's record or a reward of it."""
    wanted = of_group(group_id)
    for word in ("tasks", "groups", "rewards"):
        for partition in range(run.topics.partitions):
            if next(records_where(run.log, run.topics.name(word), partition, wanted), None) is not None:
                return partition
    return None


def _windows(
    run: RunFacts, group_id: str, partition: int, mentions: Sequence[Mention]
) -> tuple[Window, Window]:
    """From the first dispatch to the outcome, with room on both sides; the second, for the heavy topic, with less."""
    decided = next((each for each in mentions if not each.entry.void), None)
    end = None if decided is None else decided.entry.timestamp_ms
    begin = _dispatched_ms(run, group_id, partition, mentions)
    if begin is None:
        return EVER, EVER
    return around(begin, end, AFTERWARDS_MS), around(begin, end, CLOCKS_MS)


def _dispatched_ms(run: RunFacts, group_id: str, partition: int, mentions: Sequence[Mention]) -> int | None:
    """When the first dispatch was appended: by reference where the group was cut, else by header."""
    log, topics = run.log, run.topics
    for mention in mentions:
        if mention.group is None:
            continue
        ((_, entry),) = entries_at(log, topics.name("groups"), partition, [mention.group.group_offset])
        completed = entry.event if entry is not None else None
        if isinstance(completed, GroupCompleted) and completed.group_id == group_id:
            ((_, task),) = entries_at(log, topics.name("tasks"), partition, [completed.task_offset])
            if task is not None and getattr(task.event, "group_id", "") == group_id:
                return task.timestamp_ms
    first = next(records_where(log, topics.name("tasks"), partition, of_group(group_id)), None)
    return first.timestamp_ms if first is not None else None


def _records(*lists: Sequence[Entry]) -> list[Record]:
    return [each.record for entries in lists for each in entries if each.record is not None]


def _letters(
    run: RunFacts, group_id: str, partition: int, window: Window, records: Sequence[Record]
) -> list[tuple[Entry, DeadLetter]]:
    """Dead letters that hold one of its records, or that name it."""
    places = {(each.topic, each.offset) for each in records}
    found = []
    for record in records_where(run.log, run.topics.name("dead"), 0, lambda _: True, window=window):
        entry = entry_of(record)
        if not isinstance(entry.event, DeadLetter):
            continue
        letter = entry.event
        named = id_of_letter(letter)
        is_here = letter.partition == partition and (letter.topic, letter.offset) in places
        if is_here or named == group_id or named.startswith(group_id + "/"):
            found.append((entry, letter))
    return found


class _Named(msgspec.Struct):
    uid: str = ""
    group_id: str = ""


_named: Any = msgspec.msgpack.Decoder(_Named)


def id_of_letter(letter: DeadLetter) -> str:
    """The id in the refused record's headers; a sample that never came to the log has it in its fields."""
    identity = dict(letter.raw_headers).get("id")
    if identity is not None:
        return identity.decode("utf-8", "replace")
    try:
        named = _named.decode(letter.raw)
        return named.uid or named.group_id
    except (msgspec.MsgspecError, ValueError):
        return ""


def _tell(run: RunFacts, window: Window, read: dict[str, list[Entry]], notes: list[str]) -> None:
    """What of it could not be read, and how far copies were looked for."""
    for word, entries in read.items():
        for entry in entries:
            if entry.event is None:
                where = place(
                    run.topics.name(word), entry.record.partition if entry.record else 0, entry.offset
                )
                notes.append(f"{where} cannot be read: {entry.problem}")
    if window.end_ms is not None and window.end_ms < run.now_ms:
        notes.append(
            "copies were looked for until ten minutes after its outcome, those of its payloads until one minute after"
        )
    if not any(True for _ in events(read["tasks"], TaskDispatched)) and not any(
        True for _ in events(read["tasks"], TaskSkipped)
    ):
        notes.append("its dispatch is gone from `tasks` (retention)")
