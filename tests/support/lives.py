"""A short run with one group for each fate, written by hand with its times, for tests of replay/lives.

limit 1, one group a step, two samples a group, one partition; times are seconds after START
0-0  trained by step 1 (version 0): environment token in the middle, measured
0-1  waited too long: dropped as stale at version 2
0-2  trained by step 2 (version 1): its first sample has tokens of two versions
0-3  member 1 failed in rollout, was asked for again, failed in reward: dropped by the collector
0-4  two copies of a sample, one of them with another body; cut into step 3 by epoch 1 after epoch 10 had begun
     (void), then by epoch 10
0-5  trained by step 4 (version 3) with on_stale = mask: two tokens are too old
0-6  open: one sample generated, the other not there
0-7  open: complete, in the trainer's queue
"""

from __future__ import annotations

import numpy as np

from consumers.telemetry import SUMS
from streams import codec, columns, trajectory
from streams.events import (
    BatchCut,
    CheckpointSaved,
    CutGroup,
    CutMember,
    DeadLetter,
    Drop,
    EngineJoined,
    EngineLeft,
    EngineReady,
    EpochStarted,
    Event,
    GroupCompleted,
    GroupDropped,
    GroupsDropped,
    Member,
    MembersMissing,
    Metrics,
    RewardAssigned,
    RolloutFailed,
    RunStarted,
    ScoringFailed,
    StepMeasured,
    TaskDispatched,
    TrajectoryFinished,
    WeightsPublished,
)
from streams.log import EventLog
from streams.memory import MemoryLog
from streams.topics import Topics
from streams.trajectory import SampleData, payload_digest

START = 1_700_000_000_000  # ms; long ago, since Kafka 4 refuses records from the future
FIRST, SECOND = 1, 10  # epochs: offsets of their EpochStarted


def ms(seconds: float) -> int:
    return START + round(1000 * seconds)


class Story:
    """Writes events with their times and remembers where they came to lie."""

    def __init__(self, log: EventLog | None = None, run: str = "run") -> None:
        self.log, self.topics = log or MemoryLog(), Topics(run, 1)
        self.topics.create(self.log)
        self.offset_of: dict[str, int] = {}  # uid → its trajectory; group id → its GroupCompleted

    def write(self, word: str, seconds: float, event: Event) -> int:
        record = codec.encode(event, producer="trainer" if word in ("ledger", "metrics") else "test")
        record = record._replace(timestamp_ms=ms(seconds))
        return self.log.append(self.topics.name(word), 0, [record])

    # -- the data path
    def task(self, seq: int, seconds: float, **changes) -> None:
        fields = {
            "group_id": f"0-{seq}",
            "seq": seq,
            "data_epoch": 0,
            "row": seq,
            "n_samples": 2,
            "prompt": f"prompt {seq} <script>alert(1)</script>",
            "label": "7",
            "next_seq": seq + 1,
            "dispatched_ms": ms(seconds),
        }
        self.write("tasks", seconds, TaskDispatched(**{**fields, **changes}))

    def sample(
        self, uid: str, begin: float, end: float, versions, *, response: str = "seven"
    ) -> TrajectoryFinished:
        """Five tokens: two of the policy, one of the environment, two of the policy."""
        event = trajectory.pack(
            SampleData(
                **who(uid),
                prompt_ids=[1, 2],
                response_ids=[10, 11, 12, 13, 14],
                logprobs=[-0.5, -1.5, 0.0, -0.25, -0.75],
                loss_mask=[1, 1, 0, 1, 1],
                turns=[(0, 2, "policy"), (2, 3, "environment"), (3, 5, "policy")],
                versions=versions,
                finish_reason="stop",
                response=response,
                prompt="prompt <script>alert(1)</script>",
                label="7",
                engine="rollout-0",
                started_ms=ms(begin),
                finished_ms=ms(end),
            )
        )
        self.offset_of.setdefault(uid, self.write("trajectories", end, event))
        return event

    def reward(self, event: TrajectoryFinished, seconds: float, reward: float) -> None:
        scored = RewardAssigned(
            **who(event.uid),
            reward=reward,
            components={"format": 1.0, "answer": reward - 1.0},
            trajectory_offset=self.offset_of[event.uid],
            n_prompt_tokens=2,
            n_response_tokens=5,
            trainable_versions=trainable(event),
            payload_digest=payload_digest(event),
            finish_reason="stop",
            scoring_s=0.125,
            started_ms=event.started_ms,
            finished_ms=event.finished_ms,
        )
        self.write("rewards", seconds, scored)

    def completed(
        self, seq: int, seconds: float, events: list[TrajectoryFinished], rewards: list[float]
    ) -> None:
        members = [
            Member(
                uid=event.uid,
                index=event.index,
                trajectory_offset=self.offset_of[event.uid],
                reward=reward,
                n_response_tokens=5,
                trainable_versions=trainable(event),
                started_ms=event.started_ms,
                finished_ms=event.finished_ms,
            )
            for event, reward in zip(events, rewards, strict=True)
        ]
        group = GroupCompleted(
            group_id=f"0-{seq}", seq=seq, task_offset=self._task_of(seq), n_samples=2, members=members,
            dispatched_ms=ms(seq / 10),
        )  # fmt: skip
        self.offset_of[f"0-{seq}"] = self.write("groups", seconds, group)

    def whole(self, seq: int, begin: float, end: float, versions: list, rewards: list[float]) -> None:
        """Dispatch to GroupCompleted: finished at `end`, scored 0.5 s later, joined 1 s later."""
        self.task(seq, seq / 10)
        samples = [self.sample(f"0-{seq}/{index}/0", begin, end, versions[index]) for index in range(2)]
        for event, reward in zip(samples, rewards, strict=True):
            self.reward(event, end + 0.5, reward)
        self.completed(seq, end + 1, samples, rewards)

    def _task_of(self, seq: int) -> int:
        return seq if seq < 4 else seq + 1  # 0-3 was dispatched twice

    # -- the ledger
    def cut(
        self, step: int, seq: int, seconds: float, ages: list[int], *, rewards: list[float], **changes
    ) -> int:
        tokens = changes.pop("tokens", [4, 4])
        members = [
            CutMember(uid, self.offset_of[uid], rewards[index], ages[index], tokens[index])
            for index, uid in enumerate((f"0-{seq}/0/0", f"0-{seq}/1/0"))
        ]
        fields = {
            "epoch": FIRST,
            "version": step - 1,
            "step": step,
            "groups": [CutGroup(f"0-{seq}", seq, 0, self.offset_of[f"0-{seq}"], members)],
            "positions": [self.offset_of[f"0-{seq}"] + 1],
            "frontier": seq + 1,
            "limit": 1,
            "on_stale": "drop",
            "seed": 100 + step,
            "ledger_read_to": 3,
            "cut_ms": ms(seconds),
        }
        return self.write("ledger", seconds, BatchCut(**{**fields, **changes}))

    def published(self, version: int, seconds: float, epoch: int = FIRST, **changes) -> None:
        event = WeightsPublished(
            epoch=epoch,
            version=version,
            step=version,
            digest=f"digest of {version}",
            uris={"disk": f"weights/e{epoch}-v{version}.safetensors"},
            nbytes=2048,
            published_ms=ms(seconds),
            **changes,
        )
        self.write("ledger", seconds, event)

    def ready(self, version: int, seconds: float, epoch: int = FIRST) -> None:
        event = EngineReady(
            engine="rollout-0",
            epoch=epoch,
            version=version,
            digest=f"digest of {version}",
            load_s=0.25,
            at_ms=ms(seconds),
        )
        self.write("fleet", seconds, event)


def who(uid: str) -> dict:
    group_id, index, attempt = uid.rsplit("/", 2)
    seq = int(group_id.rpartition("-")[2])
    return {
        "uid": uid,
        "group_id": group_id,
        "seq": seq,
        "index": int(index),
        "attempt": int(attempt),
        "n_samples": 2,
        "task_offset": seq if seq < 4 else seq + 1,
    }


def trainable(event: TrajectoryFinished):
    """Runs over the four policy tokens; the middle one of five is the environment's."""
    return columns.trainable_runs(event.versions, columns.decode_mask(event.loss_mask))


def sums(*rows: dict[str, float]) -> bytes:
    return np.array([[row.get(name, 0.0) for name in SUMS] for row in rows]).astype("<f8").tobytes()


def story(log: EventLog | None = None, run: str = "run") -> Story:
    """All of it."""
    it = Story(log, run)
    started = RunStarted(
        run="run", config_fingerprint="f", partitions=1, rollout_batch_size=1, n_samples_per_prompt=2, seed=0,
        started_ms=ms(0),
    )  # fmt: skip
    it.write("ledger", 0, started)
    it.write("ledger", 0, EpochStarted(producer="trainer-1", started_ms=ms(0), limit=1))
    it.published(0, 0)
    it.write("fleet", 0, EngineJoined(engine="rollout-0", replica=0, at_ms=ms(0)))
    it.ready(0, 0.25)
    v0, v1 = [(FIRST, 0, 5)], [(FIRST, 1, 5)]
    it.whole(0, 1, 3, [v0, v0], [1.0, 0.0])
    it.whole(1, 1, 3, [v0, v0], [1.0, 1.0])
    it.cut(1, 0, 5, [0, 0], rewards=[1.0, 0.0])  # ledger 3
    rows = sums(
        {"n_tokens": 4, "sum_log_ratio": 2.0, "sum_abs_log_ratio": 2.0, "sum_ratio": 6.6, "sum_ratio_squared": 11.0,
         "n_ratio_above": 4, "max_ratio": 1.65, "n_clipped": 3},
        {"n_tokens": 4, "sum_log_ratio": 0.0, "sum_abs_log_ratio": 0.4, "sum_ratio": 4.0, "sum_ratio_squared": 4.0,
         "max_ratio": 1.1},
    )  # fmt: skip
    it.write(
        "metrics", 5.5,
        StepMeasured(step=1, epoch=FIRST, version=0, names=list(SUMS), n_samples=2, sums=rows,
                     values={"loss": 0.25, "grad_norm": 2.0}, at_ms=ms(5.5)),
    )  # fmt: skip
    it.write("metrics", 5.5, Metrics(source="trainer", step=1, values={"wait_s": 4.5}, at_ms=ms(5.5)))
    it.published(1, 6)  # ledger 4
    it.ready(1, 6.5)
    it.whole(2, 6, 8, [[(FIRST, 0, 2), (FIRST, 1, 3)], v1], [3.0, 1.0])
    it.cut(2, 2, 10, [1, 0], rewards=[3.0, 1.0])  # ledger 5
    it.published(2, 11, kind="delta", base_version=1, base_digest="digest of 1")  # ledger 6
    dropped = GroupsDropped(epoch=FIRST, version=2, drops=[Drop("0-1", 1, "stale", 2)], frontier=3)
    it.write("ledger", 12, dropped)  # 7
    failed_member(it)  # ledger 8
    checkpoint = CheckpointSaved(
        epoch=FIRST,
        version=2,
        step=2,
        path="checkpoints/e1-s00000002",
        digest="c",
        ledger_position=7,
        saved_ms=ms(14),
    )
    it.write("ledger", 14, checkpoint)  # 9
    twins(it)
    it.write("ledger", 19, EpochStarted(producer="trainer-2", started_ms=ms(19), limit=1))  # 10
    it.cut(3, 4, 20, [0, 0], rewards=[0.0, 2.0])  # 11, void
    it.published(2, 21, SECOND, forked_at=2)  # 12
    it.cut(3, 4, 22, [0, 0], rewards=[0.0, 2.0], epoch=SECOND)  # 13
    it.published(3, 23, SECOND)  # 14
    it.ready(3, 23.5, SECOND)
    it.whole(5, 24, 26, [[(FIRST, 1, 2), (SECOND, 2, 3)], [(SECOND, 3, 5)]], [1.0, 0.0])
    it.cut(4, 5, 28, [1, 0], rewards=[1.0, 0.0], epoch=SECOND, on_stale="mask", tokens=[2, 4])  # 15
    it.published(4, 29, SECOND)  # 16
    it.task(6, 29.5, min_version=3)
    it.sample("0-6/0/0", 30, 31, [(SECOND, 4, 5)])
    it.whole(7, 30, 31, [[(SECOND, 4, 5)], [(SECOND, 4, 5)]], [1.0, 0.0])
    it.write("fleet", 33, EngineLeft(engine="rollout-0", at_ms=ms(33)))
    return it


def failed_member(it: Story) -> None:
    """0-3: sample 1 fails twice, and its group with it."""
    it.task(3, 0.3)
    good = it.sample("0-3/0/0", 8, 9, [(FIRST, 1, 5)])
    it.reward(good, 9.5, 1.0)
    broken = RolloutFailed(
        **who("0-3/1/0"), reason="generate_error", detail="ValueError: tool", engine="rollout-0"
    )
    at = it.write("trajectories", 9, broken)
    it.write(
        "rewards", 9.5,
        ScoringFailed(**who("0-3/1/0"), stage="rollout", reason="generate_error", detail="ValueError: tool",
                      trajectory_offset=at),
    )  # fmt: skip
    it.write(
        "groups", 10,
        MembersMissing(group_id="0-3", seq=3, task_offset=3, indices=[1], attempt=1, reason="generate_error",
                       detail="ValueError: tool"),
    )  # fmt: skip
    it.task(3, 10.5, attempt=1, indices=[1], first_offset=3)
    again = it.sample("0-3/1/1", 11, 12, [(FIRST, 1, 5)])
    it.write(
        "rewards", 12.5,
        ScoringFailed(**who("0-3/1/1"), stage="reward", reason="reward_timeout", detail="over 30 s",
                      trajectory_offset=it.offset_of[again.uid]),
    )  # fmt: skip
    it.write(
        "groups", 13,
        GroupDropped(group_id="0-3", seq=3, task_offset=3, reason="reward_timeout", detail="members [1] failed"),
    )  # fmt: skip
    drop = Drop("0-3", 3, "reward_timeout", -1, "members [1] failed")
    it.write("ledger", 13.5, GroupsDropped(epoch=FIRST, version=2, drops=[drop], frontier=4))


def twins(it: Story) -> None:
    """0-4: sample 0 comes three times, the third time with another body, which the reward stage refuses."""
    v2 = [(FIRST, 2, 5)]
    it.whole(4, 15, 17, [v2, v2], [0.0, 2.0])
    it.sample("0-4/0/0", 15, 17, v2)
    it.sample("0-4/0/0", 15, 17, v2, response="eight")
    end = it.log.end(it.topics.name("trajectories"), 0)
    refused = it.log.read(it.topics.name("trajectories"), 0, end - 1).records[0]
    it.write(
        "dead", 19,
        DeadLetter(topic=refused.topic, partition=0, offset=end - 1, raw=refused.value,
                   raw_headers=list(refused.headers), stage="reward-0", reason="conflict", detail="another body",
                   at_ms=ms(19)),
    )  # fmt: skip
