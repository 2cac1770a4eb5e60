"""Payloads by reference: fetched and checked before a batch is cut, so that every cut can be replayed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from consumers.advantages import of_cut
from consumers.staleness import MASK, Lineage, fresh_mask, token_ages
from engine.interfaces import Inputs, TrainBatch, TrainSample
from streams import codec, columns
from streams.codec import Known
from streams.errors import CodecError, InvalidEvent, LogError, LogUnavailable
from streams.events import (
    BatchCut,
    CutMember,
    GroupCompleted,
    Member,
    MemberOf,
    TeacherScored,
    TrajectoryFinished,
)
from streams.log import EventLog
from streams.topics import Topics
from streams.trajectory import Payload, open_payload

PLAIN = Inputs()
_E = TypeVar("_E", bound=MemberOf)


class BadPayload(Exception):
    """A referenced trajectory that cannot be trained on."""


class _Kept(NamedTuple):
    """One sample, read."""

    payload: Payload
    teacher: NDArray[np.float32] | None  # [L]; None: not asked for


class Payloads:
    """Reads trajectories by (partition, offset) and keeps those that were asked for ahead of their step."""

    def __init__(
        self,
        log: EventLog,
        topics: Topics,
        refuses: Callable[[Payload], str] = lambda payload: "",
        *,
        with_teacher: bool = False,
    ) -> None:
        self.log, self.topic, self._refuses = log, topics.name("trajectories"), refuses
        self._scores, self._with_teacher = topics.name("rewards"), with_teacher
        self._kept: dict[tuple[int, int], _Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def prepare(self, partition: int, event: GroupCompleted) -> set[tuple[str, str]]:
        """Fetch and check every member of a group; returns who made them, as (engine, incarnation).

        Raises BadPayload naming the sample and what is wrong.
        """
        makers = set()
        for member in event.members:
            key = (partition, member.trajectory_offset)
            kept = self._kept.get(key)
            if kept is None:
                kept = self._fetch(partition, member, with_teacher=self._with_teacher)
                if refusal := self._refuses(kept.payload):
                    raise BadPayload(f"{member.uid}: {refusal}")
                self._kept[key] = kept
            makers.add((kept.payload.engine, kept.payload.incarnation))
        return makers

    def _fetch(self, partition: int, member: Member | CutMember, *, with_teacher: bool) -> _Kept:
        payload = self.fetch(partition, member.trajectory_offset, member.uid)
        return _Kept(payload, self._teacher(partition, member, payload) if with_teacher else None)

    def fetch(self, partition: int, offset: int, uid: str) -> Payload:
        """One payload from the log. Raises BadPayload, and LogUnavailable: an outage is no fault of the sample."""
        event = self._read(self.topic, partition, offset, uid, TrajectoryFinished, "trajectory")
        try:
            return open_payload(event)
        except (CodecError, InvalidEvent) as error:
            raise BadPayload(f"{uid}: {error}") from error

    def _teacher(self, partition: int, member: Member | CutMember, payload: Payload) -> NDArray[np.float32]:
        """The teacher's log-probs of one sample, [L]. Raises BadPayload, as `fetch`."""
        uid, offset = member.uid, member.teacher_offset
        if offset < 0:
            raise BadPayload(f"{uid}: its record names no scores of a teacher, and the loss needs them")
        event = self._read(self._scores, partition, offset, uid, TeacherScored, "scores of a teacher")
        try:
            scores = columns.decode_logprobs(event.logprobs)
        except CodecError as error:
            raise BadPayload(f"{uid}: {error}") from error
        count = int(np.count_nonzero(payload.loss_mask))
        if event.trajectory_offset != member.trajectory_offset or len(scores) != count:
            raise BadPayload(
                f"{uid}: the teacher scored {len(scores)} tokens of offset {event.trajectory_offset}, the sample has "
                f"{count} at {member.trajectory_offset}"
            )
        if not np.isfinite(scores).all():
            raise BadPayload(f"{uid}: a log-prob of the teacher is not finite")
        teacher = np.zeros(len(payload.loss_mask), np.float32)
        teacher[payload.loss_mask] = scores
        return teacher

    def _read(self, topic: str, partition: int, offset: int, uid: str, kind: type[_E], what: str) -> _E:
        """The event of this kind and uid at this place. Raises BadPayload, and LogUnavailable."""
        place = f"{topic}/{partition}:{offset}"
        try:
            records = self.log.read(topic, partition, offset, max_records=1).records
            if not records or records[0].offset != offset:
                raise BadPayload(f"{uid}: {place} does not exist")
            decoded = codec.decode(records[0])
        except LogUnavailable:
            raise
        except (CodecError, InvalidEvent, LogError) as error:
            raise BadPayload(f"{uid}: {error}") from error
        if not isinstance(decoded, Known) or not isinstance(decoded.event, kind):
            raise BadPayload(f"{uid}: {place} is no {what}")
        if decoded.event.uid != uid:
            raise BadPayload(f"{uid}: {place} holds {decoded.event.uid}")
        return decoded.event

    def take(self, partition: int, member: CutMember, *, with_teacher: bool) -> _Kept:
        """What a step needs of one sample. Raises BadPayload, as `fetch`."""
        kept = self._kept.pop((partition, member.trajectory_offset), None)
        if kept is not None and (kept.teacher is not None or not with_teacher):
            return kept
        return self._fetch(partition, member, with_teacher=with_teacher)

    def forget(self, partition: int, offsets: Iterable[int]) -> None:
        for offset in offsets:
            self._kept.pop((partition, offset), None)

    def keep_only(self, wanted: set[tuple[int, int]]) -> None:
        """Forget everything that waits no longer."""
        if len(self._kept) > len(wanted):
            self._kept = {key: kept for key, kept in self._kept.items() if key in wanted}


def train_batch(cut: BatchCut, payloads: Payloads, lineage: Lineage, inputs: Inputs = PLAIN) -> TrainBatch:
    """The inputs of a step, from its ledger record and the log alone: the live run and its replay build the same.

    `inputs` is the backend's. A sample without a reward trains nothing. Raises BadPayload.
    """
    samples: list[TrainSample] = []
    for place, (group, advantages) in enumerate(zip(cut.groups, of_cut(cut, inputs.estimator), strict=True)):
        for member, advantage in zip(group.members, advantages, strict=True):
            payload, teacher = payloads.take(group.partition, member, with_teacher=inputs.with_teacher)
            mask = payload.loss_mask if not math.isnan(member.reward) else np.zeros_like(payload.loss_mask)
            if cut.on_stale == MASK:
                mask = fresh_mask(
                    mask,
                    payload.versions,
                    trainer_version=cut.version,
                    limit=cut.limit,
                    lineage=lineage,
                )
            ages = token_ages(payload.versions, cut.version, lineage) if inputs.with_ages else None
            samples.append(
                TrainSample(member.uid, payload, mask, float(advantage), place, member.reward, ages, teacher)
            )
    return TrainBatch(cut.step, cut.version, cut.seed, samples)
