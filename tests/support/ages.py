"""Runs with times of their own, written by hand into an in-memory log, whose ages and shares a test can work out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from consumers.telemetry import SUMS
from streams import codec
from streams.events import (
    BatchCut,
    CutGroup,
    CutMember,
    Drop,
    EngineReady,
    EpochStarted,
    Event,
    GroupCompleted,
    GroupDropped,
    GroupsDropped,
    Metrics,
    RewardAssigned,
    RunStarted,
    StepMeasured,
    TaskDispatched,
    WeightsPublished,
)
from streams.log import EventLog
from streams.memory import MemoryLog
from streams.topics import Topics

EPOCH = 1  # offset of EpochStarted in the ledger
START_MS = 1_000_000  # what a test calls 0


class Made(NamedTuple):
    """One sample: seconds since the start, the version that made it, tokens of the policy."""

    started_s: float
    finished_s: float
    version: int = 0
    n_tokens: int = 10


class AgedRun:
    """Write events in any order of time, ledger records in theirs; `log` and `topics` are what a reader is given."""

    def __init__(
        self,
        *,
        batch: int = 2,
        n_samples: int = 2,
        partitions: int = 1,
        fingerprint: str = "f",
        log: EventLog | None = None,
    ) -> None:
        self.log: EventLog = log or MemoryLog()
        self.topics = Topics("run", partitions)
        self.topics.create(self.log)
        self.partitions, self.n_samples = partitions, n_samples
        self._tokens: dict[int, list[int]] = {}
        started = RunStarted(
            run="run",
            config_fingerprint=fingerprint,
            partitions=partitions,
            rollout_batch_size=batch,
            n_samples_per_prompt=n_samples,
            seed=0,
            started_ms=START_MS,
        )
        self.write("ledger", started, 0)
        self.write("ledger", EpochStarted(producer="trainer-1", started_ms=START_MS), 0)

    def write(self, word: str, event: Event, at_s: float, partition: int = 0) -> None:
        record = codec.encode(event, producer="test", timestamp_ms=_ms(at_s))
        self.log.append(self.topics.name(word), partition, [record])

    def published(self, version: int, at_s: float, *, held_s: float | None = None) -> None:
        """`held_s`: when the engine has it; None: never told."""
        event = WeightsPublished(
            epoch=EPOCH, version=version, step=version, digest="d", uris={}, published_ms=_ms(at_s)
        )
        self.write("ledger", event, at_s)
        if held_s is not None:
            ready = EngineReady(
                engine="rollout-0", epoch=EPOCH, version=version, digest="d", at_ms=_ms(held_s)
            )
            self.write("fleet", ready, held_s)

    def group(
        self,
        seq: int,
        dispatched_s: float,
        samples: Sequence[Made],
        complete_s: float | None,
        *,
        row: int | None = None,
        min_version: int = 0,
        refused: str = "",
    ) -> None:
        """A dispatched group, its scored samples and, if `complete_s` is given, the collector's word on it."""
        partition = seq % self.partitions
        which = {"group_id": f"0-{seq}", "seq": seq}
        task = TaskDispatched(
            **which,
            data_epoch=0,
            row=seq if row is None else row,
            n_samples=self.n_samples,
            prompt="p",
            min_version=min_version,
            next_seq=seq + 1,
            dispatched_ms=_ms(dispatched_s),
        )
        self.write("tasks", task, dispatched_s, partition)
        self._tokens[seq] = [each.n_tokens for each in samples]
        for index, made in enumerate(samples):
            scored = RewardAssigned(
                **which,
                uid=f"0-{seq}/{index}/0",
                index=index,
                attempt=0,
                n_samples=self.n_samples,
                task_offset=seq // self.partitions,
                reward=float(index % 2),
                trajectory_offset=0,
                n_prompt_tokens=1,
                n_response_tokens=made.n_tokens,
                trainable_versions=[(EPOCH, made.version, made.n_tokens)],
                started_ms=_ms(made.started_s),
                finished_ms=_ms(made.finished_s),
            )
            self.write("rewards", scored, made.finished_s, partition)
        if complete_s is not None and refused:
            self.write("groups", GroupDropped(**which, task_offset=0, reason=refused), complete_s, partition)
        elif complete_s is not None:
            done = GroupCompleted(**which, task_offset=0, n_samples=self.n_samples, members=[])
            self.write("groups", done, complete_s, partition)

    def cut(
        self,
        step: int,
        ages: Mapping[int, Sequence[int]],
        at_s: float,
        *,
        ended_s: float | None = None,
        limit: int = 1,
        on_stale: str = "drop",
        drops: Sequence[Drop] = (),
        reward: float | None = None,
        moved: float | None = None,
    ) -> None:
        """A step on groups with the staleness of their samples.

        `ended_s`: the trainer's metrics of it arrived; `reward`: of each sample, else 0 and 1 in turn; `moved`: |log
        ratio| of each token, and the step is measured.
        """
        groups = []
        for seq, staleness in ages.items():
            members = [
                CutMember(
                    f"0-{seq}/{index}/0", 0, float(index % 2) if reward is None else reward, age, tokens
                )
                for index, (age, tokens) in enumerate(zip(staleness, self._tokens[seq], strict=True))
            ]
            groups.append(CutGroup(f"0-{seq}", seq, seq % self.partitions, 0, members))
        record = BatchCut(
            epoch=EPOCH,
            version=step - 1,
            step=step,
            groups=groups,
            positions=[0] * self.partitions,
            drops=list(drops),
            frontier=0,
            limit=limit,
            on_stale=on_stale,
            seed=step,
            ledger_read_to=0,
            cut_ms=_ms(at_s),
        )
        self.write("ledger", record, at_s)
        if ended_s is not None:
            values = {"step_s": ended_s - at_s, "wait_s": 0.0}
            event = Metrics(source="trainer", step=step, values=values, at_ms=_ms(ended_s))
            self.write("metrics", event, ended_s)
        if moved is not None:
            self._measured(record, moved)

    def dropped(self, version: int, drops: Sequence[Drop], at_s: float) -> None:
        event = GroupsDropped(epoch=EPOCH, version=version, drops=list(drops), frontier=0)
        self.write("ledger", event, at_s)

    def _measured(self, cut: BatchCut, moved: float) -> None:
        """Every token moved by `moved` a version of its age, upwards."""
        rows = []
        for group in cut.groups:
            for member in group.members:
                n, ratio = member.n_trainable_tokens, moved * max(0, member.staleness)
                w = float(np.exp(ratio))
                outside = float(w > 1.2) * n
                row = dict.fromkeys(SUMS, 0.0) | {
                    "n_tokens": n,
                    "sum_log_ratio": n * ratio,
                    "sum_abs_log_ratio": n * ratio,
                    "sum_log_ratio_squared": n * ratio**2,
                    "sum_ratio": n * w,
                    "sum_ratio_squared": n * w * w,
                    "n_ratio_above": outside,
                    "max_ratio": w,
                    "max_abs_log_ratio": ratio,
                }
                rows.append([row[name] for name in SUMS])
        event = StepMeasured(
            step=cut.step,
            epoch=cut.epoch,
            version=cut.version,
            names=list(SUMS),
            n_samples=len(rows),
            sums=np.array(rows).astype("<f8").tobytes(),
        )
        self.write("metrics", event, 0)


def synchronous(
    steps: int,
    *,
    generation_s: float,
    collect_s: float,
    train_s: float,
    publish_s: float,
    sync_s: float,
    limit: int = 0,
    log: EventLog | None = None,
) -> AgedRun:
    """A run in which one thing comes after the other, each in its own time: a step every `generation + … + sync`
    seconds. `limit` is what the cuts say."""
    run = AgedRun(log=log)
    now = 0.0
    run.published(0, now, held_s=now + sync_s)
    for step in range(1, steps + 1):
        dispatched = now
        start, end = now + sync_s, now + sync_s + generation_s
        for seq in (2 * step - 2, 2 * step - 1):
            made = [Made(start, end, step - 1)] * 2
            run.group(seq, dispatched, made, end + collect_s, min_version=step - 1)
        cut = end + collect_s
        ages = {2 * step - 2: [0, 0], 2 * step - 1: [0, 0]}
        run.cut(step, ages, cut, ended_s=cut + train_s, limit=limit, moved=0.1)
        now = cut + train_s + publish_s
        run.published(step, now, held_s=now + sync_s)
    return run


def _ms(seconds: float) -> int:
    return START_MS + round(1000 * seconds)
