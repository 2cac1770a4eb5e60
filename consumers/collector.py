"""The collector: members join into groups; what is missing becomes visible, is asked for again, then given up.

    tasks p ───► open groups ◄─── rewards p            waits for: the members of open groups
                     │
         all there ──┼── failed or late member ──────────► MembersMissing (→ feeder, once an attempt)
                     │        └ no attempts left ────────► GroupDropped(reason), or trained with what is there
                     └── filters ────────────────────────► GroupCompleted | GroupDropped(reason)

Closed is closed (DESIGN §4.3): `frontier` is an offset of `tasks`, below which every first dispatch is closed, and
`closed_above` are the closed ones above it; every output carries both, so a restarted collector never opens a group
twice, and a late twin is counted and passed over. A reward from beyond what has been read of `tasks` is held.

Where the run has a teacher, a member is there once its reward and the teacher's scores of the same sample are.

Deadlines run on progress: each partition has a clock that stands still while the run is paused, while this stage is
behind in its input, and while the owner of the partition (engine, reward replica) gives no sign of life.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from consumers.filters import Filter
from consumers.lanes import Lanes
from consumers.ledger import Ledger
from consumers.losses import Losses, OnLost
from consumers.outbox import Outbox
from consumers.runner import (
    NEARLY,
    Clock,
    Inputs,
    Patience,
    ProgressClock,
    Reader,
    Stop,
    exit_code,
    now_ms,
    recover,
    stamp,
)
from streams import codec
from streams.errors import CorruptRecord, LogUnavailable, OffsetOutOfRange
from streams.events import (
    Event,
    GroupCompleted,
    GroupDropped,
    Member,
    MembersMissing,
    Metrics,
    Progress,
    RewardAssigned,
    RewardEvent,
    ScoringFailed,
    TaskDispatched,
    TaskSkipped,
    TeacherFailed,
    TeacherScored,
)
from streams.log import EventLog, Record, TopicPartition
from streams.ranges import as_ranges, from_ranges
from streams.topics import Topics

logger = logging.getLogger(__name__)

# Reasons that end the whole group at once. What is too large for the log is what is long: asking for it again until it
# is short, or training the group without it, would teach the policy that long answers do not exist.
WHOLE_GROUP = frozenset({"record_too_large"})

Alive = Callable[[int], bool]  # does the owner of this partition give signs of life?


class _OpenGroup:
    """A group that has no outcome yet. `failed` holds members that have no attempt left."""

    def __init__(self, event: TaskDispatched, offset: int, opened_at: float) -> None:
        self.group_id, self.seq, self.n_samples = event.group_id, event.seq, event.n_samples
        self.task_offset, self.dispatched_ms = offset, event.dispatched_ms
        self.members: dict[int, RewardAssigned] = {}
        self.teacher_offsets: dict[str, int] | None = None  # uid → TeacherScored; None: no teacher
        self.failed: dict[int, str] = {}  # index → reason
        self.attempts: dict[int, int] = {}  # index → attempt that is awaited now (0 unless re-dispatched)
        self.reward_offsets: list[int] = []
        self.judged: set[str] = set()  # uids with a verdict: the first one wins
        self.unscored: set[str] = set()  # uids that the teacher cannot score
        self.moved_at = opened_at  # on the partition's progress clock

    @property
    def missing(self) -> list[int]:
        return [index for index in range(self.n_samples) if index not in self.failed and not self.has(index)]

    def has(self, index: int) -> bool:
        """Its reward is there, and the teacher's scores of the same sample where there is a teacher."""
        member = self.members.get(index)
        return member is not None and (self.teacher_offsets is None or member.uid in self.teacher_offsets)

    def keeps(self, index: int, attempt: int) -> bool:
        """The place is taken: by a whole member, or by one that waits for the teacher and is no older attempt."""
        return self.has(index) or (index in self.members and self.members[index].attempt >= attempt)

    @property
    def is_settled(self) -> bool:
        """Every member is there or is given up."""
        return not self.missing

    def member_of(self, index: int) -> Member:
        event = self.members[index]
        return _member_of(event, -1 if self.teacher_offsets is None else self.teacher_offsets[event.uid])


class _Lane:
    """One partition: both inputs, the open groups, the frontier."""

    def __init__(self, stage: Collector, partition: int) -> None:
        place = recover(
            stage.log, stage.topics, "groups", partition, ["tasks", "rewards"], losses=stage.losses
        )
        self.partition = partition
        self.tasks = Inputs(place.positions["tasks"], place.reached["tasks"])
        self.rewards = Inputs(place.positions["rewards"], place.reached["rewards"])
        self.outbox = Outbox(stage.log, stage.topics.name("groups"), partition)
        self.open: dict[str, _OpenGroup] = {}
        self.clock = ProgressClock(stage.monotonic)
        self.held: list[tuple[int, RewardEvent]] = []  # from beyond what tasks we have read
        self.closed_ids: dict[
            str, int
        ] = {}  # group id → first dispatch's offset, closed at or above frontier
        self.frontier = place.positions["tasks"]
        self.requested: dict[
            str, dict[int, int]
        ] = {}  # group → index → attempts asked for, from our own output
        for event in place.done:
            if isinstance(event, (GroupCompleted, GroupDropped)):
                self.closed_ids.setdefault(event.group_id, event.task_offset)
            elif isinstance(event, MembersMissing):
                asked = self.requested.setdefault(event.group_id, {})
                for index in event.indices:
                    asked[index] = max(asked.get(index, 0), event.attempt)
        last = place.done[-1] if place.done else None
        self.closed_above = from_ranges(getattr(last, "closed_above", [])) | set(self.closed_ids.values())

    def progress(self) -> Progress:
        return {"tasks": self.tasks.progress(), "rewards": self.rewards.progress()}

    def is_closed(self, task_offset: int) -> bool:
        return task_offset < self.frontier or task_offset in self.closed_above

    def close(self, task_offset: int) -> None:
        self.closed_above.add(task_offset)
        # open groups are in the order of their tasks, so the first one is the oldest
        oldest = next(iter(self.open.values()), None)
        frontier = self.tasks.read_to if oldest is None else oldest.task_offset
        if frontier > self.frontier:
            self.frontier = frontier
            self.closed_above = {offset for offset in self.closed_above if offset >= frontier}
            self.closed_ids = {name: at for name, at in self.closed_ids.items() if at >= frontier}


class Collector:
    """`Collector(log, topics, ...).run(stop)` collects its share of partitions until the run is finished."""

    def __init__(
        self,
        log: EventLog,
        topics: Topics,
        *,
        filters: Sequence[Filter] = (),
        member_deadline: timedelta = timedelta(seconds=600),
        max_redispatch: int = 1,
        min_group_size: int | None = None,
        with_teacher: bool = False,
        owner_alive: Alive = lambda partition: True,
        on_lost: OnLost = "stop",
        replica: int = 0,
        replicas: int = 1,
        clock: Clock = now_ms,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.log, self.topics, self.filters = log, topics, list(filters)
        self.member_deadline_s = member_deadline.total_seconds()
        self.max_redispatch, self.min_group_size = max_redispatch, min_group_size
        self.with_teacher, self.owner_alive = with_teacher, owner_alive
        self.replica, self.replicas, self.clock, self.monotonic = replica, replicas, clock, monotonic
        self.name = f"collector-{replica}"
        self.reader = Reader(log, topics, self.name, clock)
        self.losses = Losses(self.name, on_lost)
        self.ledger = Ledger(log, topics)
        self.counts: dict[str, int] = {"completed_total": 0, "duplicates_total": 0, "missing_total": 0}
        self._lanes: Lanes[_Lane] = Lanes(lambda partition: _Lane(self, partition))
        self._patience = Patience(self.name)
        self._closing: list[tuple[str, int]] = []  # inputs of groups closed in this round, not yet sent
        self._reported = 0

    # -- life
    def start(self) -> None:
        """Take this replica's share of the partitions."""
        self._lanes.join(
            self.log,
            self.topics.group("collector"),
            self.topics.name("rewards"),
            replica=self.replica,
            replicas=self.replicas,
            member=self.name,
        )

    def close(self) -> int:
        """Wait a moment for what was sent, then give the share back. Returns how many events are not delivered."""
        return self._lanes.close()

    def run(self, stop: Stop) -> int:
        """0 when the run is finished or `stop()` is true; 1 if outcomes that were made could not be delivered."""
        self.start()
        undelivered = 0
        try:
            self._rounds(stop)
        except LogUnavailable as error:
            if not stop():
                raise
            logger.warning("%s: stopped before the log had answered: %s", self.name, error)
        finally:
            undelivered = self.close()
        return exit_code(self.name, 0 if self.ledger.finished is not None else undelivered)

    def _rounds(self, stop: Stop) -> None:
        while not stop():
            if self.round():
                self._patience.reset()
                continue
            if self.ledger.finished is not None:
                return
            self._patience.waiting(self._waits_for)
            self.log.wait(self._watched(), timedelta(milliseconds=20 if self._lanes.is_sending else 100))

    def round(self) -> bool:
        """Read both inputs to the end, then judge what is late; True if anything moved."""
        self._lanes.rebalance()
        self.ledger.catch_up()
        moved = False
        for lane in self._lanes.values():
            moved = lane.outbox.poll() > 0 or moved
            if lane.outbox.stuck:
                lane.clock.tick(running=False)
                continue
            read = self._read(lane, "tasks", lane.tasks) | self._read(lane, "rewards", lane.rewards)
            caught_up = self._is_at_end(lane, "tasks", lane.tasks) and self._is_at_end(
                lane, "rewards", lane.rewards
            )
            lane.clock.tick(running=caught_up and not self.ledger.paused and self.owner_alive(lane.partition))
            if caught_up:
                self._judge_late(lane)
            moved = read or moved
        self._report()
        return moved

    def _watched(self) -> dict[TopicPartition, int]:
        watched = {TopicPartition(self.topics.name("ledger"), 0): self.ledger.position}
        for partition, lane in self._lanes.items():
            watched[TopicPartition(self.topics.name("tasks"), partition)] = lane.tasks.read_to
            watched[TopicPartition(self.topics.name("rewards"), partition)] = lane.rewards.read_to
        return watched

    def _waits_for(self) -> str:
        if not self._lanes:
            return "a share of the partitions"
        missing = [
            f"{group.group_id}[{','.join(map(str, group.missing))}]"
            for lane in self._lanes.values()
            for group in lane.open.values()
        ]
        shown = ", ".join(missing[:8]) + (" …" if len(missing) > 8 else "")
        return f"members of {len(missing)} open groups: {shown}" if missing else "tasks"

    # -- input
    def _read(self, lane: _Lane, word: str, inputs: Inputs) -> bool:
        batch = self.losses.read(self.log, self.topics.name(word), lane.partition, inputs.read_to)
        outputs: list[Event] = []
        for record in batch.records:
            event = self.reader.decode(record)
            inputs.started(record.offset)
            if isinstance(event, TaskDispatched):
                self._task(lane, record, event)
            elif isinstance(event, TaskSkipped):
                outputs.extend(self._skipped(lane, record, event))
            elif isinstance(event, self._awaited):
                outputs.extend(self._member(lane, record.offset, event))
            else:
                inputs.finished(record.offset)
        inputs.advance(batch.next_position)
        if word == "tasks":
            outputs.extend(self._release_held(lane))
        self._send(lane, outputs)
        return bool(batch.records)

    @property
    def _awaited(self) -> tuple[type[RewardEvent], ...]:
        verdicts = (RewardAssigned, ScoringFailed)
        return (*verdicts, TeacherScored, TeacherFailed) if self.with_teacher else verdicts

    def _is_at_end(self, lane: _Lane, word: str, inputs: Inputs) -> bool:
        """Nothing that could still make a member come in time lies unread (a few records on their way do not count)."""
        return self.log.recent_end(self.topics.name(word), lane.partition) - inputs.read_to < NEARLY

    def _task(self, lane: _Lane, record: Record, event: TaskDispatched) -> None:
        first = event.first_offset < 0
        twin = event.group_id in lane.open or event.group_id in lane.closed_ids
        if not first or twin or lane.is_closed(record.offset):
            if first and event.group_id in lane.open:
                self.counts["duplicates_total"] += 1
            lane.tasks.finished(record.offset)
            return
        group = _OpenGroup(event, record.offset, lane.clock.seconds)
        group.attempts.update(lane.requested.pop(event.group_id, {}))
        group.teacher_offsets = {} if self.with_teacher else None
        lane.open[event.group_id] = group

    def _skipped(self, lane: _Lane, record: Record, event: TaskSkipped) -> list[Event]:
        if lane.is_closed(record.offset):
            lane.tasks.finished(record.offset)
            return []
        lane.close(record.offset)
        self._count_drop("task_skipped")
        return [
            GroupDropped(
                group_id=event.group_id,
                seq=event.seq,
                task_offset=record.offset,
                reason="task_skipped",
                detail=f"{event.reason}: {event.detail}",
            )
        ]

    def _release_held(self, lane: _Lane) -> list[Event]:
        held, lane.held = lane.held, []
        outputs: list[Event] = []
        for offset, event in held:
            outputs.extend(self._member(lane, offset, event))
        return outputs

    def _member(self, lane: _Lane, offset: int, event: RewardEvent) -> list[Event]:
        """What came of one sample. The first verdict on a uid wins; one that is not awaited (any more) is a copy."""
        if event.task_offset >= lane.tasks.read_to:
            lane.held.append((offset, event))
            return []
        group = lane.open.get(event.group_id)
        if group is None or group.task_offset != event.task_offset:
            self.counts["duplicates_total"] += 1
            lane.rewards.finished(offset)
            return []
        group.reward_offsets.append(offset)
        if isinstance(event, (TeacherScored, TeacherFailed)):
            return self._teacher(lane, group, offset, event)
        twin = event.uid in group.judged
        group.judged.add(event.uid)
        if twin or event.index >= group.n_samples or group.keeps(event.index, event.attempt):
            self.counts["duplicates_total"] += 1
            return []
        if isinstance(event, RewardAssigned):
            group.members[event.index] = event
            group.failed.pop(event.index, None)
            group.moved_at = lane.clock.seconds
            return self._complete(lane, group)
        if event.attempt < group.attempts.get(event.index, 0) or event.index in group.failed:
            return []  # an old attempt failed late; a newer one is awaited or has failed too
        group.moved_at = lane.clock.seconds
        return self._missing(lane, group, {event.index: event.reason}, event.detail)

    def _teacher(
        self, lane: _Lane, group: _OpenGroup, offset: int, event: TeacherScored | TeacherFailed
    ) -> list[Event]:
        """What the teacher made of one sample: as with rewards, the first of a uid wins."""
        assert group.teacher_offsets is not None
        twin = event.uid in group.teacher_offsets or event.uid in group.unscored
        if twin or event.index >= group.n_samples:
            self.counts["duplicates_total"] += 1
            return []
        if isinstance(event, TeacherScored):
            group.teacher_offsets[event.uid] = offset
            group.moved_at = lane.clock.seconds
            return self._complete(lane, group)
        group.unscored.add(event.uid)
        group.judged.add(event.uid)  # its reward, if that is still to come, does not count
        member = group.members.get(event.index)
        if member is not None and member.uid != event.uid:
            return []  # another sample has the place
        group.members.pop(event.index, None)
        if event.attempt < group.attempts.get(event.index, 0) or event.index in group.failed:
            return []  # an old attempt failed late
        group.moved_at = lane.clock.seconds
        return self._missing(lane, group, {event.index: f"teacher_{event.reason}"}, event.detail)

    # -- outcomes
    def _missing(self, lane: _Lane, group: _OpenGroup, why: dict[int, str], detail: str) -> list[Event]:
        """Members without a verdict: ask again while attempts are left, else give them up."""
        ends = WHOLE_GROUP.intersection(why.values())
        if ends:
            return [self._drop(lane, group, min(ends), detail[:500])]
        again: dict[int, list[int]] = {}
        for index, reason in why.items():
            attempt = group.attempts.get(index, 0)
            if attempt < self.max_redispatch:
                group.attempts[index] = attempt + 1
                again.setdefault(attempt + 1, []).append(index)
            else:
                group.failed[index] = reason
                group.members.pop(index, None)  # one whose teacher never spoke
        outputs: list[Event] = []
        for attempt, indices in again.items():
            reason = why[indices[0]]
            self.counts["missing_total"] += len(indices)
            logger.warning(
                "%s: group %s: members %s missing (%s), asked for again as attempt %d",
                self.name,
                group.group_id,
                indices,
                reason,
                attempt,
            )
            outputs.append(
                MembersMissing(
                    group_id=group.group_id,
                    seq=group.seq,
                    task_offset=group.task_offset,
                    indices=indices,
                    attempt=attempt,
                    reason=reason,
                    detail=detail[:500],
                )
            )
        return outputs + (self._complete(lane, group) if group.failed else [])

    def _complete(self, lane: _Lane, group: _OpenGroup) -> list[Event]:
        """The group's outcome, if it has one now."""
        if group.failed and self.min_group_size is None:
            reason = next(iter(group.failed.values()))
            return [self._drop(lane, group, reason, f"members {sorted(group.failed)} failed: {reason}")]
        if not group.is_settled:
            return []
        if group.failed and len(group.members) < (self.min_group_size or 0):
            detail = (
                f"{len(group.members)} of {group.n_samples} members, at least {self.min_group_size} needed"
            )
            return [self._drop(lane, group, "incomplete", detail)]
        members = [group.member_of(index) for index in sorted(group.members)]
        for keep in self.filters:
            verdict = keep(members)
            if not verdict.keep:
                return [self._drop(lane, group, verdict.reason, "dynamic filter")]
        self._close(lane, group)
        self.counts["completed_total"] += 1
        return [
            GroupCompleted(
                group_id=group.group_id,
                seq=group.seq,
                task_offset=group.task_offset,
                n_samples=group.n_samples,
                members=members,
                dispatched_ms=group.dispatched_ms,
            )
        ]

    def _drop(self, lane: _Lane, group: _OpenGroup, reason: str, detail: str) -> GroupDropped:
        self._close(lane, group)
        self._count_drop(reason)
        logger.info("%s: group %s dropped: %s %s", self.name, group.group_id, reason, detail)
        return GroupDropped(
            group_id=group.group_id,
            seq=group.seq,
            task_offset=group.task_offset,
            reason=reason,
            detail=detail,
        )

    def _close(self, lane: _Lane, group: _OpenGroup) -> None:
        del lane.open[group.group_id]
        lane.closed_ids[group.group_id] = group.task_offset
        lane.close(group.task_offset)
        # its inputs are finished once the outcome is acknowledged
        self._closing.extend(
            [("tasks", group.task_offset), *(("rewards", at) for at in group.reward_offsets)]
        )

    def _count_drop(self, reason: str) -> None:
        key = f"dropped/{reason}"
        self.counts[key] = self.counts.get(key, 0) + 1

    def _judge_late(self, lane: _Lane) -> None:
        """Runs only when both inputs are read to the end."""
        outputs: list[Event] = []
        for group in list(lane.open.values()):
            waited = lane.clock.seconds - group.moved_at
            if waited < self.member_deadline_s:
                continue
            group.moved_at = lane.clock.seconds
            missing = {
                index: "teacher_missing" if index in group.members else "member_missing"
                for index in group.missing
            }
            outputs.extend(self._missing(lane, group, missing, f"nothing came for {waited:.1f} s"))
        self._send(lane, outputs)

    def _send(self, lane: _Lane, outputs: Sequence[Event]) -> None:
        closing, self._closing = self._closing, []
        if not outputs:
            return
        stamped = stamp(
            outputs, lane.progress(), frontier=lane.frontier, closed_above=as_ranges(lane.closed_above)
        )
        records = [codec.encode(event, producer=self.name) for event in stamped]
        skipped = [
            each for each in outputs if isinstance(each, GroupDropped) and each.reason == "task_skipped"
        ]
        closing.extend(("tasks", event.task_offset) for event in skipped)

        def acknowledged(_: int) -> None:
            for word, offset in closing:
                (lane.tasks if word == "tasks" else lane.rewards).finished(offset)

        lane.outbox.send(records, acknowledged)

    # -- metrics
    def _report(self) -> None:
        now = self.clock()
        if now - self._reported < 1000:
            return
        self._reported = now
        values = {key: float(value) for key, value in self.counts.items()}
        values["open"] = float(sum(len(lane.open) for lane in self._lanes.values()))
        values["held"] = float(sum(len(lane.held) for lane in self._lanes.values()))
        values["dead_letters"] = float(self.reader.dead_letters)
        values["unknown_types"] = float(self.reader.unknown_types)
        values["lost"] = float(self.losses.count)
        metrics = Metrics(source=self.name, values=values, at_ms=now)
        self.log.submit(self.topics.name("metrics"), 0, [codec.encode(metrics, producer=self.name)])
        self.log.commit_hint(self.topics.group("collector"), self._watched())


def _member_of(event: RewardAssigned, teacher_offset: int) -> Member:
    return Member(
        uid=event.uid,
        index=event.index,
        trajectory_offset=event.trajectory_offset,
        reward=event.reward,
        components=event.components,
        n_response_tokens=event.n_response_tokens,
        payload_digest=event.payload_digest,
        trainable_versions=event.trainable_versions,
        started_ms=event.started_ms,
        finished_ms=event.finished_ms,
        teacher_offset=teacher_offset,
    )


class Heartbeats:
    """Signs of life of engines, reward and teacher replicas, read from `metrics`: the owners of a partition.

    Partition p belongs to replica p % replicas of each stage (streams.log.share); where the log moves shares, to any
    replica that lives, also one that was added later. Until a stage has given its first sign, it counts as not alive:
    nothing can be late before anybody works on it. So does an engine that holds no weights (metric `version` −1): a
    server may take minutes to start, and nothing is generated meanwhile.
    """

    def __init__(
        self,
        log: EventLog,
        topics: Topics,
        stages: dict[str, int],
        *,
        fresh: timedelta = timedelta(seconds=5),
    ) -> None:
        self.log, self.topic = log, topics.name("metrics")
        self.stages, self.fresh_s = stages, fresh.total_seconds()
        self._position = log.end(self.topic, 0)
        self._seen: dict[
            str, float
        ] = {}  # "<stage>-<replica>", and "<stage>" for whichever was the last → when

    def __call__(self, partition: int) -> bool:
        self._catch_up()
        now = time.monotonic()
        owners = (
            stage if self.log.moves_shares else f"{stage}-{partition % replicas}"
            for stage, replicas in self.stages.items()
        )
        return all(now - self._seen.get(owner, float("-inf")) <= self.fresh_s for owner in owners)

    def _catch_up(self) -> None:
        try:
            batch = self.log.read(self.topic, 0, self._position)
        except OffsetOutOfRange as gone:  # metrics may be pruned under us; only the newest matter
            self._position = gone.start
            return
        except CorruptRecord as damage:
            self._position = damage.next_offset
            return
        for record in batch.records:
            producer = (record.header("by") or b"").decode()
            if producer.startswith("rollout-") and _serves_nobody(record):
                continue
            self._seen[producer] = self._seen[producer.rpartition("-")[0]] = time.monotonic()
        self._position = batch.next_position


def _serves_nobody(record: Record) -> bool:
    try:
        event = getattr(codec.decode(record), "event", None)
    except codec.CodecError:
        return False
    return isinstance(event, Metrics) and event.values.get("version", 0) < 0
