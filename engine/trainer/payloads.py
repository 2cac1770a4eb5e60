"""Payloads by reference: fetched and checked before a batch is cut, so that every cut can be replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from consumers.advantages import group_advantages
from consumers.staleness import MASK, Lineage, fresh_mask
from engine.interfaces import TrainBatch, TrainSample
from streams import codec
from streams.codec import Known
from streams.errors import CodecError, InvalidEvent, LogError, LogUnavailable
from streams.events import BatchCut, GroupCompleted, TrajectoryFinished
from streams.log import EventLog
from streams.topics import Topics
from streams.trajectory import Payload, open_payload


class BadPayload(Exception):
    """A referenced trajectory that cannot be trained on."""


class Payloads:
    """Reads trajectories by (partition, offset) and keeps those that were asked for ahead of their step."""

    def __init__(
        self, log: EventLog, topics: Topics, refuses: Callable[[Payload], str] = lambda payload: ""
    ) -> None:
        self.log, self.topic, self._refuses = log, topics.name("trajectories"), refuses
        self._kept: dict[tuple[int, int], Payload] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def prepare(self, partition: int, event: GroupCompleted) -> None:
        """Fetch and check every member of a group. Raises BadPayload naming the sample and what is wrong."""
        for member in event.members:
            key = (partition, member.trajectory_offset)
            if key not in self._kept:
                payload = self.fetch(partition, member.trajectory_offset, member.uid)
                if refusal := self._refuses(payload):
                    raise BadPayload(f"{member.uid}: {refusal}")
                self._kept[key] = payload

    def fetch(self, partition: int, offset: int, uid: str) -> Payload:
        """One payload from the log. Raises BadPayload, and LogUnavailable: an outage is no fault of the sample."""
        try:
            records = self.log.read(self.topic, partition, offset, max_records=1).records
            if not records or records[0].offset != offset:
                raise BadPayload(f"{uid}: {self.topic}/{partition}:{offset} does not exist")
            decoded = codec.decode(records[0])
            if not isinstance(decoded, Known) or not isinstance(decoded.event, TrajectoryFinished):
                raise BadPayload(f"{uid}: {self.topic}/{partition}:{offset} is no trajectory")
            if decoded.event.uid != uid:
                raise BadPayload(f"{uid}: {self.topic}/{partition}:{offset} holds {decoded.event.uid}")
            return open_payload(decoded.event)
        except LogUnavailable:
            raise
        except (CodecError, InvalidEvent, LogError) as error:
            raise BadPayload(f"{uid}: {error}") from error

    def take(self, partition: int, offset: int, uid: str) -> Payload:
        kept = self._kept.pop((partition, offset), None)
        return kept if kept is not None else self.fetch(partition, offset, uid)

    def forget(self, partition: int, offsets: Iterable[int]) -> None:
        for offset in offsets:
            self._kept.pop((partition, offset), None)

    def keep_only(self, wanted: set[tuple[int, int]]) -> None:
        """Forget everything that waits no longer."""
        if len(self._kept) > len(wanted):
            self._kept = {key: payload for key, payload in self._kept.items() if key in wanted}


def train_batch(cut: BatchCut, payloads: Payloads, lineage: Lineage) -> TrainBatch:
    """The inputs of a step, from its ledger record and the log alone: the live run and its replay build the same.

    Advantages are within the group, over the members that have a reward. Raises BadPayload.
    """
    samples: list[TrainSample] = []
    for group in cut.groups:
        advantages = group_advantages([member.reward for member in group.members]).values
        for member, advantage in zip(group.members, advantages, strict=True):
            payload = payloads.take(group.partition, member.trajectory_offset, member.uid)
            mask = payload.loss_mask
            if cut.on_stale == MASK:
                mask = fresh_mask(
                    mask,
                    payload.versions,
                    trainer_version=cut.version,
                    limit=cut.limit,
                    lineage=lineage,
                )
            samples.append(TrainSample(member.uid, payload, mask, float(advantage)))
    return TrainBatch(cut.step, cut.version, cut.seed, samples)
