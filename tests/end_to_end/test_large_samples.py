"""Samples that are larger than the log's records (O04): nothing about them changes, or their group ends by name.

The real publisher, reward stage, collector and payload reader, on every log of LOGS; one more log is one more line.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from consumers.collector import Collector
from consumers.reward import RewardStage
from consumers.rewards.pool import ScoringPool
from engine.roles import open_run_log
from engine.rollout.publisher import Lane, Publisher
from engine.settings import Config, LogConfig, RunConfig
from engine.trainer.payloads import BadPayload, Payloads
from replay.evidence import gather
from replay.render import line
from replay.tail import Tail, parse_start
from replay.verify import verify
from streams import trajectory
from streams.claims import ClaimCheck
from streams.events import DeadLetter, GroupCompleted, GroupDropped, RewardAssigned, RolloutFailed
from streams.log import EventLog
from streams.memory import MemoryLog
from streams.topics import Topics
from streams.trajectory import SampleData
from tests.support.events import events, finished, put, task
from tests.support.world import World

LOGS: dict[str, Callable[[pytest.FixtureRequest, Path], str]] = {
    "memory": lambda request, folder: f"memory://{folder}",
    "file": lambda request, folder: f"file://{folder}/log",
    "kafka": lambda r, f: f"kafka://{r.getfixturevalue('kafka')}/{r.getfixturevalue('prefix')}",
}
N = 300_000  # tokens
SOON_S = 60.0
LIMIT = 220  # bytes: references fit, and little else


class Loop:
    """One partition of a run: a publisher, the reward stage and the collector, moved until nothing moves."""

    def __init__(self, log: EventLog, *, workers: int = 0, **collecting) -> None:
        self.log, self.topics = log, Topics("run", 1)
        self.topics.create(log)
        self.pool = ScoringPool("exact", {}, workers=workers, timeout=timedelta(seconds=SOON_S), group=False)
        self.publisher = Publisher(log, self.topics, "rollout-0")
        self.publisher.start()
        self.lane = Lane(0, 0)
        self.reward = RewardStage(log, self.topics, self.pool)  # hands the token ids to the scorer, too
        self.reward.start()
        self.collector = Collector(log, self.topics, **collecting)
        self.collector.start()

    def dispatch(self, seq: int, n_samples: int = 1) -> int:
        offset = put(self.log, self.topics, "tasks", task(seq, n_samples))
        self.lane.started(offset, n_samples)
        return offset

    def until(self, done: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + SOON_S
        while not done():
            assert time.monotonic() < deadline and self.publisher.error is None, what
            if not (self.reward.round() or self.collector.round()):
                time.sleep(0.002)

    def outcomes(self) -> list:
        return [
            each
            for each in events(self.log, self.topics, "groups")
            if isinstance(each, (GroupCompleted, GroupDropped))
        ]

    def close(self) -> None:
        self.publisher.close()
        self.collector.close()
        self.reward.close()
        self.pool.close()


@pytest.fixture(params=LOGS)
def make_loop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Loop]]:
    made: list[Loop] = []

    def make(log: dict[str, Any], **loop) -> Loop:
        url = LOGS[request.param](request, tmp_path)
        config = Config(run=RunConfig(dir=str(tmp_path)), log=LogConfig(url=url, **log))
        made.append(Loop(open_run_log(config), **loop))
        return made[-1]

    yield make
    for loop in made:
        loop.close()
        loop.log.close()


def big_sample(seq: int, index: int, task_offset: int, n_samples: int, n_tokens: int = N) -> SampleData:
    """As a model makes it: ids of a large vocabulary and log-probs that compress hardly at all."""
    chance = np.random.default_rng(seq)
    return SampleData(
        uid=f"0-{seq}/{index}/0", group_id=f"0-{seq}", seq=seq, index=index, attempt=0, n_samples=n_samples,
        task_offset=task_offset, prompt_ids=[1, 2], response_ids=chance.integers(0, 150_000, n_tokens),
        logprobs=-chance.exponential(1.0, n_tokens).astype(np.float32), loss_mask=np.ones(n_tokens, bool),
        versions=[(1, 0, n_tokens)], finish_reason="stop", response="7", label="7",
    )  # fmt: skip


def claims(folder: Path) -> list[Path]:
    return [path for path in (folder / "claims").rglob("*") if len(path.name) == 64]


# -- O04


@pytest.mark.parametrize("workers", [0, 1], ids=["scored inside", "scored by a worker process"])
@pytest.mark.parametrize(
    ("settings", "n_files"), [({}, 0), ({"max_record_bytes": 1_000_000}, 1)], ids=["default limits", "1 MB"]
)
def test_a_sample_of_300_000_tokens_arrives_whole_between_two_small_ones(
    make_loop: Callable[..., Loop], tmp_path: Path, settings: dict[str, int], n_files: int, workers: int
) -> None:
    loop = make_loop(settings, workers=workers)
    for seq in range(3):
        offset = loop.dispatch(seq)
        sample = (
            trajectory.pack(big_sample(1, 0, offset, 1))
            if seq == 1
            else finished(seq, 0, offset, n_samples=1)
        )
        loop.publisher.put(loop.lane, offset, sample)
    loop.until(lambda: len(loop.outcomes()) == 3, "three groups")
    assert [(group.group_id, type(group)) for group in loop.outcomes()] == [
        (f"0-{seq}", GroupCompleted) for seq in range(3)
    ]
    assert [each.uid for each in events(loop.log, loop.topics, "trajectories")] == [
        f"0-{seq}/0/0" for seq in range(3)
    ]
    verdicts = {each.uid: each for each in events(loop.log, loop.topics, "rewards")}
    assert [verdicts[f"0-{seq}/0/0"].reward for seq in range(3)] == [1.0, 1.0, 1.0]
    big = verdicts["0-1/0/0"]
    assert isinstance(big, RewardAssigned)
    assert (big.n_response_tokens, big.trainable_versions) == (N, [(1, 0, N)])
    payload = Payloads(loop.log, loop.topics).fetch(0, big.trajectory_offset, big.uid)
    sent = big_sample(1, 0, 0, 1)
    assert len(payload.response_ids) == len(payload.logprobs) == N
    assert np.array_equal(payload.response_ids, sent.response_ids)
    assert np.array_equal(payload.logprobs, sent.logprobs)
    assert len(claims(tmp_path)) == n_files


def test_a_sample_beyond_the_hard_cap_is_refused_by_name_and_ends_its_whole_group(
    make_loop: Callable[..., Loop], tmp_path: Path
) -> None:
    loop = make_loop({"max_record_bytes": 500_000, "max_claim_bytes": 1_000_000}, min_group_size=1)
    offsets = [loop.dispatch(0, 2), loop.dispatch(1, 2), loop.dispatch(2, 2)]
    for seq, offset in enumerate(offsets):
        for index in range(2):
            sample = finished(seq, index, offset, n_samples=2)
            if (seq, index) == (1, 1):
                sample = trajectory.pack(big_sample(1, 1, offset, 2))
            loop.publisher.put(loop.lane, offset, sample)
    loop.until(lambda: len(loop.outcomes()) == 3, "an outcome of each group")
    outcomes = {each.group_id: each for each in loop.outcomes()}
    assert [len(outcomes[f"0-{seq}"].members) for seq in (0, 2)] == [2, 2]
    dropped = outcomes["0-1"]
    assert isinstance(dropped, GroupDropped), "not cut to N-1, though min_group_size would allow it"
    assert dropped.reason == "record_too_large"
    (failure,) = [
        each for each in events(loop.log, loop.topics, "trajectories") if isinstance(each, RolloutFailed)
    ]
    assert (failure.uid, failure.reason) == ("0-1/1/0", "record_too_large")
    for text in (failure.detail, dropped.detail):
        assert "0-1/1/0" in text and "the limit of this log is 1000000 (log.max_claim_bytes)" in text
        assert int(text.split(" bytes")[0].rpartition(" ")[2]) > 1_500_000
    assert len(events(loop.log, loop.topics, "groups")) == 3, "nothing was asked for again until it is short"
    assert not claims(tmp_path)


def test_an_event_that_no_log_would_take_ends_its_group_the_same_way(
    make_loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make_loop({})
    monkeypatch.setattr("streams.codec.MAX_EVENT_BYTES", 100_000)
    offset = loop.dispatch(0)
    loop.publisher.put(loop.lane, offset, trajectory.pack(big_sample(0, 0, offset, 1)))
    loop.until(loop.outcomes, "its outcome")
    (dropped,) = loop.outcomes()
    assert dropped.reason == "record_too_large" and "0-0/0/0: the event has" in dropped.detail


# -- a value that is lost


def test_a_lost_value_is_a_dead_letter_of_the_reward_stage_and_its_group_is_asked_for_again(
    make_loop: Callable[..., Loop], tmp_path: Path
) -> None:
    now = [0.0]
    loop = make_loop(
        {"max_record_bytes": 100_000}, member_deadline=timedelta(seconds=5), monotonic=lambda: now[0]
    )
    offset = loop.dispatch(0)
    loop.publisher.put(loop.lane, offset, trajectory.pack(big_sample(0, 0, offset, 1)))
    assert loop.publisher.flush(timedelta(seconds=SOON_S))
    (path,) = claims(tmp_path)
    path.unlink()
    loop.until(lambda: events(loop.log, loop.topics, "dead"), "the dead letter")
    (letter,) = events(loop.log, loop.topics, "dead")
    assert isinstance(letter, DeadLetter)
    assert (letter.stage, letter.reason, letter.offset) == ("reward-0", "claim_lost", 0)
    assert str(path) in letter.detail
    assert dict(letter.raw_headers)["id"] == b"0-0/0/0"

    def asked() -> list:
        now[0] += 0.5
        return events(loop.log, loop.topics, "groups")

    loop.until(asked, "the member is asked for again")
    (missing,) = events(loop.log, loop.topics, "groups")
    assert (missing.group_id, missing.indices, missing.reason) == ("0-0", [0], "member_missing")


def test_the_trainer_refuses_a_lost_value_by_name_and_the_tail_shows_it(
    make_loop: Callable[..., Loop], tmp_path: Path
) -> None:
    loop = make_loop({"max_record_bytes": 100_000})
    offset = loop.dispatch(0)
    loop.publisher.put(loop.lane, offset, trajectory.pack(big_sample(0, 0, offset, 1)))
    loop.until(loop.outcomes, "the group")
    (path,) = claims(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BadPayload, match=f"0-0/0/0: {path} has"):
        Payloads(loop.log, loop.topics).fetch(0, 0, "0-0/0/0")
    topic = loop.topics.name("trajectories")
    ((partition, entry),) = Tail(loop.log, topic, [0], parse_start("beginning"), until_end=True)
    shown = line("trajectories", partition, entry)
    assert "UNREADABLE" in shown and str(path) in shown


# -- a whole run


def test_a_run_that_claim_checks_nearly_everything_keeps_its_promises_and_an_audit_finds_a_lost_value(
    tmp_path: Path,
) -> None:
    log = ClaimCheck(MemoryLog(max_record_bytes=LIMIT), tmp_path / "claims", max_record_bytes=LIMIT)
    world = World(tmp_path, log=log)
    ledger = world.run(random.Random(3), crash_rate=0.02)
    assert ledger.finished is not None
    assert len(claims(tmp_path)) > 60
    report = verify(log, world.topics)
    assert report.holds, report.as_table()
    assert report.notes["groups trained"] > 0
    world.close()
    place = next(iter(gather(log, world.topics).samples))
    (record,) = log.inner.read(world.topics.name("trajectories"), *place, max_records=1).records
    reference = record.header("claim")
    assert reference is not None
    path = tmp_path / "claims" / reference.decode().split(" ")[2]
    path.unlink()
    found = {check.name: check.violations for check in verify(log, world.topics).checks if check.violations}
    assert list(found) == ["references name what was trained"]
    assert all(
        f"{path} is missing" in violation.text for violation in found["references name what was trained"]
    )
