"""A small finished run, written by hand into an in-memory log, in which a test changes one fact.

six groups of two samples, seq on partition seq % 2, batches of two, limit 1:
step 1 trains 0 and 1 (version 0), step 2 trains 2 and 3 (versions 0 and 1) and drops 4, step 3 trains 5
"""

from __future__ import annotations

from collections.abc import Callable

from streams import codec, trajectory
from streams.events import (
    BatchCut,
    CutGroup,
    CutMember,
    DataEnded,
    Drop,
    EngineReady,
    EpochStarted,
    Event,
    GroupCompleted,
    GroupDropped,
    Member,
    RunFinished,
    RunStarted,
    TaskDispatched,
    WeightsPublished,
)
from streams.log import EventLog
from streams.memory import MemoryLog
from streams.topics import Topics
from streams.trajectory import SampleData

PARTITIONS = 2
EPOCH = 1  # offset of EpochStarted in the ledger
VERSION_OF = {0: 0, 1: 0, 2: 0, 3: 1, 4: 1, 5: 2}  # seq → version that generated it
LIMIT = 1

Alter = Callable[[Event], "Event | None"]  # the event to write instead, or None for none


def recorded(alter: Alter = lambda event: event) -> tuple[EventLog, Topics]:
    """The run, each event of it as `alter` wants it."""
    log, topics = MemoryLog(), Topics("run", PARTITIONS)
    topics.create(log)

    def write(word: str, event: Event, partition: int = 0) -> None:
        changed = alter(event)
        if changed is not None:
            log.append(topics.name(word), partition, [codec.encode(changed, producer="test")])

    for seq in range(6):
        write("tasks", task(seq), seq % 2)
        for index in range(2):
            write("trajectories", finished(seq, index), seq % 2)
        write("groups", dropped(seq) if seq == 4 else completed(seq), seq % 2)
    for event in ledger():
        write("ledger", event)
    for version in range(3):
        write("fleet", ready(version))
    return log, topics


def ledger() -> list[Event]:
    return [
        RunStarted(
            run="run",
            config_fingerprint="f",
            partitions=PARTITIONS,
            rollout_batch_size=2,
            n_samples_per_prompt=2,
            seed=0,
            started_ms=1000,
        ),
        EpochStarted(producer="trainer-1", started_ms=1000),
        published(0),
        cut(1, [0, 1], [1, 1]),
        published(1),
        cut(2, [2, 3], [3, 2], drops=[Drop("0-4", 4, "zero_variance")], frontier=5),
        published(2),
        DataEnded(count=6),
        cut(3, [5], [3, 3], frontier=6, last=True),
        published(3),
        RunFinished(epoch=EPOCH, step=3, version=3, reason="data_ended", finished_ms=9000),
    ]


def task(seq: int) -> TaskDispatched:
    return TaskDispatched(
        group_id=f"0-{seq}", seq=seq, data_epoch=0, row=seq, n_samples=2, prompt="p", next_seq=seq + 1
    )


def finished(seq: int, index: int, *, version: int | None = None):
    """Five response tokens, of which the middle one is the environment's."""
    version = VERSION_OF[seq] if version is None else version
    return trajectory.pack(
        SampleData(
            uid=uid(seq, index),
            group_id=f"0-{seq}",
            seq=seq,
            index=index,
            attempt=0,
            n_samples=2,
            task_offset=seq // 2,
            prompt_ids=[1, 2],
            response_ids=[3, 4, 5, 6, 7],
            logprobs=[-0.1, -0.2, 0.0, -0.4, -0.5],
            loss_mask=[1, 1, 0, 1, 1],
            versions=[(EPOCH, version, 5)],
            finish_reason="stop",
            response="7",
            engine="rollout-0",
        )
    )


def completed(seq: int) -> GroupCompleted:
    members = [
        Member(uid=uid(seq, index), index=index, trajectory_offset=offset(seq, index), reward=float(index))
        for index in range(2)
    ]
    return GroupCompleted(group_id=f"0-{seq}", seq=seq, task_offset=seq // 2, n_samples=2, members=members)


def dropped(seq: int) -> GroupDropped:
    return GroupDropped(group_id=f"0-{seq}", seq=seq, task_offset=seq // 2, reason="zero_variance")


def published(version: int) -> WeightsPublished:
    return WeightsPublished(
        epoch=EPOCH,
        version=version,
        step=version,
        digest=f"digest of {version}",
        uris={"disk": f"weights/e{EPOCH}-v{version}.safetensors"},
    )


def ready(version: int) -> EngineReady:
    return EngineReady(engine="rollout-0", epoch=EPOCH, version=version, digest=f"digest of {version}")


def cut(step: int, seqs: list[int], positions: list[int], **changes) -> BatchCut:
    groups = [cut_group(seq, step - 1) for seq in seqs]
    fields = {
        "epoch": EPOCH,
        "version": step - 1,
        "step": step,
        "groups": groups,
        "positions": positions,
        "frontier": max(seqs) + 1,
        "limit": LIMIT,
        "on_stale": "drop",
        "seed": step,
        "ledger_read_to": 3,
        "cut_ms": 1000 * step,
    }
    return BatchCut(**{**fields, **changes})


def cut_group(seq: int, version: int) -> CutGroup:
    members = [
        CutMember(uid(seq, index), offset(seq, index), float(index), version - VERSION_OF[seq], 4)
        for index in range(2)
    ]
    return CutGroup(f"0-{seq}", seq, seq % 2, seq // 2, members)


def uid(seq: int, index: int) -> str:
    return f"0-{seq}/{index}/0"


def offset(seq: int, index: int) -> int:
    """Of the sample in `trajectories`."""
    return seq // 2 * 2 + index
