"""Hand-written events and small readers for tests of the stages."""

from __future__ import annotations

from typing import Any

from streams import codec, trajectory
from streams.codec import Known
from streams.events import (
    Event,
    GroupCompleted,
    Member,
    RewardAssigned,
    ScoringFailed,
    TaskDispatched,
    TrajectoryFinished,
)
from streams.log import EventLog, Record, read_all
from streams.memory import MemoryLog
from streams.topics import Topics
from streams.trajectory import SampleData

EPOCH = 1


def decoded(record: Record) -> Any:
    """The event of a record that must be readable; Any, since a test knows which it is."""
    found = codec.decode(record)
    assert isinstance(found, Known), found
    return found.event


def run_log(partitions: int = 1) -> tuple[EventLog, Topics]:
    log, topics = MemoryLog(), Topics("run", partitions)
    topics.create(log)
    return log, topics


def put(log: EventLog, topics: Topics, word: str, event: Event, partition: int = 0) -> int:
    return log.append(topics.name(word), partition, [codec.encode(event, producer="test")])


def events(log: EventLog, topics: Topics, word: str, partition: int = 0) -> list[Any]:
    found: list[Any] = []
    for record in read_all(log, topics.name(word), partition, log.start(topics.name(word), partition)):
        each = codec.decode(record)
        if isinstance(each, Known):
            found.append(each.event)
    return found


def task(seq: int, n_samples: int = 4, **changes) -> TaskDispatched:
    fields = {
        "group_id": f"0-{seq}",
        "seq": seq,
        "data_epoch": 0,
        "row": seq,
        "n_samples": n_samples,
        "prompt": f"prompt {seq}",
        "label": str(seq),
        "next_seq": seq + 1,
    }
    return TaskDispatched(**{**fields, **changes})


def member_fields(seq: int, index: int, task_offset: int, n_samples: int = 4, attempt: int = 0) -> dict:
    return {
        "uid": f"0-{seq}/{index}/{attempt}",
        "group_id": f"0-{seq}",
        "seq": seq,
        "index": index,
        "attempt": attempt,
        "n_samples": n_samples,
        "task_offset": task_offset,
    }


def rewarded(
    seq: int, index: int, task_offset: int, reward: float, *, version: int = 0, **changes
) -> RewardAssigned:
    return RewardAssigned(
        **member_fields(seq, index, task_offset, **changes),
        reward=reward,
        trajectory_offset=seq * 10 + index,
        n_prompt_tokens=2,
        n_response_tokens=3,
        trainable_versions=[(EPOCH, version, 3)],
    )


def failed(seq: int, index: int, task_offset: int, reason: str, **changes) -> ScoringFailed:
    return ScoringFailed(
        **member_fields(seq, index, task_offset, **changes),
        stage="reward",
        reason=reason,
        trajectory_offset=seq * 10 + index,
    )


def finished(
    seq: int, index: int, task_offset: int, *, version: int = 0, response: str = "7", **changes
) -> TrajectoryFinished:
    return trajectory.pack(
        SampleData(
            **member_fields(seq, index, task_offset, **changes),
            prompt_ids=[1, 2],
            response_ids=[3, 4, 5],
            logprobs=[-0.1, -0.2, -0.3],
            loss_mask=[1, 1, 1],
            versions=[(EPOCH, version, 3)],
            finish_reason="stop",
            response=response,
            label="7",
        )
    )


def completed(
    seq: int, version: int = 0, n_samples: int = 2, offsets: list[int] | None = None, **changes
) -> GroupCompleted:
    offsets = offsets or [seq * n_samples + index for index in range(n_samples)]
    members = [
        Member(
            uid=f"0-{seq}/{index}/0",
            index=index,
            trajectory_offset=offsets[index],
            reward=float(index % 2),
            n_response_tokens=3,
            trainable_versions=[(EPOCH, version, 3)],
        )
        for index in range(n_samples)
    ]
    return GroupCompleted(
        group_id=f"0-{seq}", seq=seq, task_offset=seq, n_samples=n_samples, members=members, **changes
    )
