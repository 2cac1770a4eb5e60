"""What the other topics of a partition say of a sample or a group, found by offset and read when it is asked for.

A first pass over a topic keeps 8 bytes a record (an offset); `Nearby` then reads the record itself, in stretches, so
that neighbours, which are asked for one after the other, cost one read together.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from replay.evidence import kept
from replay.records import Entry, TopicReader, entries
from streams.events import (
    GroupCompleted,
    RewardAssigned,
    ScoringFailed,
    StepMeasured,
    TaskDispatched,
    TaskSkipped,
)
from streams.log import EventLog
from streams.topics import Topics

STRETCH = 256  # records of one read
STRETCHES = 16  # that are kept


class Nearby:
    """Entries of one partition by offset."""

    def __init__(self, log: EventLog, topic: str, partition: int, stretch: int = STRETCH) -> None:
        self._log, self._topic, self._partition = log, topic, partition
        self._start, self._end = kept(log, topic, partition)
        self._stretch = stretch
        self._found: OrderedDict[int, dict[int, Entry]] = OrderedDict()

    def at(self, offset: int) -> Entry | None:
        number = offset // self._stretch
        if number not in self._found:
            if len(self._found) >= STRETCHES:
                self._found.popitem(last=False)
            self._found[number] = self._read(number)
        self._found.move_to_end(number)
        return self._found[number].get(offset)

    def _read(self, number: int) -> dict[int, Entry]:
        begin, end = number * self._stretch, min((number + 1) * self._stretch, self._end)
        reader = TopicReader(self._log, self._topic, self._partition, max(begin, self._start))
        found: dict[int, Entry] = {}
        while reader.position < end:
            before = reader.position
            found.update((entry.offset, entry) for entry in reader.read(end, self._stretch))
            if reader.position <= before:
                break
        return found


class Verdicts:
    """Of one partition: the first verdict on the trajectory at an offset."""

    def __init__(self, log: EventLog, topics: Topics, partition: int) -> None:
        self._nearby = Nearby(log, topics.name("rewards"), partition)
        start, end = kept(log, topics.name("trajectories"), partition)
        self._start, self._first = start, array("q", [-1]) * (end - start)
        for entry in entries(log, topics.name("rewards"), partition):
            if isinstance(entry.event, (RewardAssigned, ScoringFailed)):
                self._note(entry.event.trajectory_offset - start, entry.offset)

    def _note(self, place: int, offset: int) -> None:
        if place >= len(self._first):  # written since this began
            self._first.extend([-1] * (place + 1 - len(self._first)))
        if place >= 0 and self._first[place] < 0:
            self._first[place] = offset

    def place(self, trajectory_offset: int) -> int | None:
        """Offset of the verdict in `rewards`."""
        place = trajectory_offset - self._start
        found = self._first[place] if 0 <= place < len(self._first) else -1
        return None if found < 0 else found

    def of(self, trajectory_offset: int) -> Entry | None:
        place = self.place(trajectory_offset)
        return None if place is None else self._nearby.at(place)


class Dispatches:
    """Of one partition: when each attempt of a group went out, by the offset of the group's first dispatch."""

    def __init__(self, log: EventLog, topics: Topics, partition: int) -> None:
        topic = topics.name("tasks")
        start, end = kept(log, topic, partition)
        self._start, self._first_ms = start, array("q", [0]) * (end - start)
        self._again_ms: dict[tuple[int, int], int] = {}  # (first offset, attempt)
        self._seqs: dict[int, int] = {}  # seq → offset of its first record
        self._redispatches: dict[int, int] = {}  # first offset → how many
        for entry in entries(log, topic, partition):
            if isinstance(entry.event, TaskDispatched):
                self._note(entry, entry.event)
            elif isinstance(entry.event, TaskSkipped):
                self._seqs.setdefault(entry.event.seq, entry.offset)

    def _note(self, entry: Entry, event: TaskDispatched) -> None:
        at_ms = event.dispatched_ms or entry.timestamp_ms
        first = entry.offset if event.first_offset < 0 else event.first_offset
        if event.attempt:
            self._again_ms.setdefault((first, event.attempt), at_ms)
            self._redispatches[first] = self._redispatches.get(first, 0) + 1
            return
        self._seqs.setdefault(event.seq, entry.offset)
        if entry.offset - self._start < len(self._first_ms):
            self._first_ms[entry.offset - self._start] = at_ms

    def is_first(self, seq: int, offset: int) -> bool:
        """Whether the record at this offset is the first of that group: two feeders may have written copies."""
        return self._seqs.get(seq) == offset

    def redispatches(self, offset: int) -> int:
        return self._redispatches.get(offset, 0)

    def at_ms(self, task_offset: int, attempt: int) -> int | None:
        if attempt:
            return self._again_ms.get((task_offset, attempt))
        place = task_offset - self._start
        return (self._first_ms[place] or None) if 0 <= place < len(self._first_ms) else None


class Completion(NamedTuple):
    """A completed group, by its numbers."""

    at_ms: int
    n_members: int
    reward_mean: float
    reward_std: float  # population
    n_response_tokens: int


def completions(log: EventLog, topics: Topics, partition: int) -> dict[int, Completion]:
    """seq → the group's first completion."""
    found: dict[int, Completion] = {}
    for entry in entries(log, topics.name("groups"), partition):
        event = entry.event
        if isinstance(event, GroupCompleted) and event.seq not in found and event.members:
            rewards = np.array([member.reward for member in event.members])
            n_tokens = sum(member.n_response_tokens for member in event.members)
            found[event.seq] = Completion(
                entry.timestamp_ms, len(rewards), float(rewards.mean()), float(rewards.std()), n_tokens
            )
    return found


class Measurements:
    """What the trainer measured of a step."""

    def __init__(self, log: EventLog, topics: Topics) -> None:
        topic = topics.name("metrics")
        self._nearby = Nearby(log, topic, 0, stretch=16)  # one has tens of kilobytes
        self._places = {
            (entry.event.epoch, entry.event.step): entry.offset
            for entry in entries(log, topic, 0)
            if isinstance(entry.event, StepMeasured)
        }

    def of(self, epoch: int, step: int) -> StepMeasured | None:
        place = self._places.get((epoch, step))
        entry = None if place is None else self._nearby.at(place)
        return entry.event if entry is not None and isinstance(entry.event, StepMeasured) else None
