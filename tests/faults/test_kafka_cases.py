"""What happens to stages on a real broker: slow work, crashes, poison, retention (cases O01, O02, O05, O06)."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kafka")

from kafka import KafkaAdminClient
from kafka.admin import ConfigResource, ConfigResourceType

from consumers.reward import RewardStage
from consumers.rewards.pool import ScoringPool
from engine.config import Config
from engine.log_settings import kafka_settings
from engine.roles import open_run_log, topics_of
from replay.ledger import read_run
from replay.verify import verify
from streams import codec
from streams.events import (
    DataEnded,
    DeadLetter,
    GroupCompleted,
    InputProgress,
    RewardAssigned,
)
from streams.kafka.log import KafkaLog
from streams.kafka.options import effective
from streams.kafka.topic_settings import largest_batch
from streams.log import EventLog, NewRecord, Record, TopicPartition, read_all
from streams.topics import Topics
from tests.support.events import completed, decoded, events, finished, put, rewarded, task
from tests.support.kafka_runs import (
    Daemon,
    Daemons,
    calls_in,
    eventually,
    newest_metrics,
    put_all,
    put_groups,
    run_on,
    scoring,
)

SESSION = timedelta(seconds=2)
SCORING = "tests.support.scoring:reward"


def uids(log: EventLog, topics: Topics, partition: int = 0) -> list[str]:
    """Of all verdicts, in the order of the log."""
    return [e.uid for e in events(log, topics, "rewards", partition) if isinstance(e, RewardAssigned)]


# -- O01: liveness is not the pace of the work


class Stage:
    """A reward stage with a log of its own, on a thread."""

    def __init__(
        self, address: str, prefix: str, topics: Topics, replica: str, workers: int, **options
    ) -> None:
        self.log = KafkaLog((address,), prefix, session_timeout=SESSION)
        self.pool = ScoringPool(SCORING, options, workers=workers, timeout=timedelta(seconds=60))
        index, _, count = replica.partition("/")
        self.stage = RewardStage(self.log, topics, self.pool, replica=int(index), replicas=int(count))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"reward-{index}", daemon=True)
        self.error: BaseException | None = None

    @property
    def joins(self) -> int:
        """How often its group was divided anew while it was a member."""
        membership: Any = self.stage._lanes.membership
        return 0 if membership is None else membership.joins

    def _run(self) -> None:
        try:
            self.stage.run(self._stop.is_set)
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Stage:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)
        self.pool.close()
        self.log.close()
        assert self.error is None and not self._thread.is_alive(), self.error


@pytest.fixture
def log(kafka: str, prefix: str) -> Iterator[KafkaLog]:
    with KafkaLog((kafka,), prefix) as log:
        yield log


def test_scoring_far_slower_than_a_session_lets_nobody_out_of_the_group(
    kafka: str, prefix: str, log: KafkaLog, tmp_path: Path
) -> None:
    """Case O01. There is no poll limit here: what is alive is the process, so the 8 s of one round, in the stage's own
    thread, are worth no word, though they are four sessions."""
    topics = Topics("run", 1)
    topics.create(log)
    put_groups(log, topics, 0, 5)
    calls = tmp_path / "calls"
    with Stage(kafka, prefix, topics, "0/1", 0, calls=str(calls), seconds=0.4) as stage:
        eventually(lambda: len(uids(log, topics)) >= 20, "twenty verdicts")
        trajectories = TopicPartition(topics.name("trajectories"), 0)
        eventually(
            lambda: log.hints(topics.group("reward")).get(trajectories) == 20, "the committed offset 20"
        )
        assert stage.joins == 1
    assert len(uids(log, topics)) == len(set(uids(log, topics))) == 20
    assert len(calls_in(calls)) == 20


@pytest.mark.parametrize("workers", [0, 2], ids=["in the stage's own thread", "by workers"])
def test_a_rebalance_in_the_middle_of_a_long_scoring_call_loses_nothing_and_doubles_nothing(
    kafka: str, prefix: str, log: KafkaLog, tmp_path: Path, workers: int
) -> None:
    """The 30 s call, shortened together with the session; in its true length it is the slow test below."""
    topics = Topics("run", 2)
    topics.create(log)
    moves, stays = "0-0/0/0", "0-1/0/0"
    for seq in range(2):
        put(log, topics, "trajectories", finished(seq, 0, 0), partition=seq)
    calls, gate = tmp_path / "calls", tmp_path / "gate"
    with Stage(kafka, prefix, topics, "1/2", workers, calls=str(calls), gate=str(gate)) as first:
        in_hand = [moves, stays] if workers else [moves]
        eventually(lambda: sorted(calls_in(calls)) == in_hand, "the long calls to begin")
        began = time.monotonic()
        with Stage(kafka, prefix, topics, "0/2", 1, calls=str(calls)) as second:
            eventually(lambda: uids(log, topics, 0) == [moves], "its new owner's verdict")
            joins = first.joins, second.joins
            assert joins[0] > 1, "it was there when the newcomer came"
            time.sleep(max(0.0, began + 2 * SESSION.total_seconds() - time.monotonic()))
            gate.touch()
            for seq in range(2):
                put(log, topics, "trajectories", finished(seq, 1, 0), partition=seq)
                eventually(lambda p=seq: f"0-{p}/1/0" in uids(log, topics, p), f"the next verdict of {seq}")
            assert (first.joins, second.joins) == joins, "and nobody has joined anew meanwhile"
    assert uids(log, topics, 0) == [moves, "0-0/1/0"]
    assert uids(log, topics, 1) == [stays, "0-1/1/0"]
    assert Counter(calls_in(calls)) == {moves: 2, stays: 1, "0-0/1/0": 1, "0-1/1/0": 1}


@pytest.mark.slow
def test_a_scoring_call_of_30_s_outlives_five_sessions_and_a_rebalance_in_the_middle(
    kafka: str, prefix: str, tmp_path: Path
) -> None:
    """As above, with daemons, at its true length."""
    moves, stays = "0-0/0/0", "0-1/0/0"
    calls = tmp_path / "calls"
    reward = scoring(calls, slow=f"{moves},{stays}", slow_s=30.0) | {"workers": 2, "timeout_s": 60.0}
    config = run_on(tmp_path, kafka, prefix, log={"partitions": 2}, reward=reward)
    topics = topics_of(config)
    with open_run_log(config) as log, Daemons(config) as daemons:
        for seq in range(2):
            put(log, topics, "trajectories", finished(seq, 0, 0), partition=seq)
        first = daemons.start("reward", "1/2")
        eventually(lambda: len(calls_in(calls)) == 2, "both calls to begin", first)
        began = time.monotonic()
        time.sleep(10)
        second = daemons.start("reward", "0/2")
        eventually(lambda: uids(log, topics, 1), "the call that stays", first, second)
        assert 28 < time.monotonic() - began < 40
        eventually(lambda: uids(log, topics, 0), "the call that went to the other", first, second)
        for seq in range(2):
            put(log, topics, "trajectories", finished(seq, 1, 0), partition=seq)
            eventually(lambda p=seq: len(uids(log, topics, p)) >= 2, f"the next of {seq}", first, second)
        for daemon in (first, second):
            daemon.terminate()
            assert daemon.exit_code() == 0
        assert [uids(log, topics, p) for p in range(2)] == [[moves, "0-0/1/0"], [stays, "0-1/1/0"]]
    assert Counter(calls_in(calls)) == {moves: 2, stays: 1, "0-0/1/0": 1, "0-1/1/0": 1}


# -- O02: what was done is read from the output


def test_a_reward_daemon_killed_between_its_verdict_and_its_commit_loses_nothing_and_trains_nothing_twice(
    kafka: str, prefix: str, tmp_path: Path
) -> None:
    """Case O02. A restart finds in the log what was done, so it doubles nothing by itself; what a zombie's late append
    would do is done here by hand: the verdicts of 30 to 37 land a second time, and again behind all others."""
    calls = tmp_path / "calls"
    config = run_on(
        tmp_path, kafka, prefix, reward=scoring(calls, seconds=0.03),
        trainer={"rollout_batch_size": 5}, staleness={"max_weight_staleness": 30},
    )  # fmt: skip
    topics = topics_of(config)
    assert effective(kafka_settings(config, "reward"))["consumer"]["enable_auto_commit"] is False
    with open_run_log(config) as log, Daemons(config) as daemons:
        put_groups(log, topics, 0, 25)
        reward, collector, trainer = (daemons.start(role) for role in ("reward", "collector", "trainer"))
        _until_scored(log, topics, 37, reward)
        reward.kill()
        killed_at = len(uids(log, topics))
        assert killed_at < 100, "killed in the middle"
        twice = [record for record in _records(log, topics, "rewards") if 30 <= _input(record) <= 37]
        assert len(twice) == 8
        _append_again(log, topics, twice)

        reward = daemons.start("reward")
        eventually(lambda: len(set(uids(log, topics))) == 100, "all verdicts", reward, collector, trainer)
        _append_again(log, topics, twice[:2])
        count = Counter(uids(log, topics))
        assert sum(count.values()) == 110, "no duplicates but those made by hand"
        eventually(
            lambda: newest_metrics(log, topics, "collector-0").get("duplicates_total") == 10,
            "the metric",
            collector,
        )
        put(log, topics, "ledger", DataEnded(count=25))
        assert [daemon.exit_code() for daemon in (trainer, collector, reward)] == [0, 0, 0]
        report = verify(log, topics)
        assert report.holds, report.as_table()
        trained = Counter(
            member.uid for _, group in read_run(log, topics).groups_trained() for member in group.members
        )
    assert trained == Counter(f"0-{seq}/{index}/0" for seq in range(25) for index in range(4))
    assert 100 <= len(calls_in(calls)) <= 120, "what was in hand, or on its way to the log, is scored again"


def _until_scored(log: EventLog, topics: Topics, offset: int, daemon: Daemon) -> None:
    """Returns right after the verdict on that trajectory has come."""
    place = TopicPartition(topics.name("rewards"), 0)
    position, deadline = 0, time.monotonic() + 60
    while time.monotonic() < deadline and daemon.is_running():
        batch = log.read(*place, position)
        if any(_input(record) == offset for record in batch.records):
            return
        position = batch.next_position
        log.wait({place: position}, timedelta(seconds=0.1))
    raise AssertionError(f"no verdict on trajectory {offset}:\n{daemon.text()}")


def _records(log: EventLog, topics: Topics, word: str) -> list[Record]:
    return list(read_all(log, topics.name(word), 0, 0))


def _input(record: Record) -> int:
    """Offset of the trajectory that a verdict is about."""
    return decoded(record).trajectory_offset


def _append_again(log: EventLog, topics: Topics, records: list[Record]) -> None:
    log.append(topics.name("rewards"), 0, [NewRecord(record.value, record.headers) for record in records])


# -- O05: a poison record stops nobody, and is not lost


def test_a_record_that_is_no_event_becomes_a_dead_letter_and_the_other_nine_are_scored(
    kafka: str, prefix: str, tmp_path: Path
) -> None:
    """Case O05; and when the letter itself is refused, by a `dead` that takes no records now, the stage stops before
    the poison and passes over nothing: the next one handles all ten again."""
    config = run_on(tmp_path, kafka, prefix, reward=scoring(tmp_path / "calls"))
    topics = topics_of(config)
    trajectories = TopicPartition(topics.name("trajectories"), 0)
    with open_run_log(config) as log, Daemons(config) as daemons:
        reward = daemons.start("reward")
        eventually(lambda: log.hints(topics.group("reward")), "the daemon to be at work", reward)
        _take_at_most(config, "dead", 10)
        _put_poisoned(log, topics, 0)
        assert reward.exit_code() == 1
        assert "dead" in reward.text() and "max.message.bytes" in reward.text()
        assert log.hints(topics.group("reward"))[trajectories] <= 4
        assert events(log, topics, "dead") == []

        _take_at_most(config, "dead", largest_batch(kafka_settings(config)))
        reward = daemons.start("reward")
        eventually(lambda: len(uids(log, topics)) >= 9, "nine verdicts", reward)
        eventually(lambda: log.hints(topics.group("reward"))[trajectories] == 10, "the commit of 10", reward)
        _put_poisoned(log, topics, 10)  # and the same while it runs
        eventually(lambda: len(uids(log, topics)) >= 18, "nine more verdicts", reward)
        reward.terminate()
        assert reward.exit_code() == 0
        assert sorted(uids(log, topics)) == sorted(f"0-{seq}/0/0" for seq in range(20) if seq not in (4, 14))
        letters = events(log, topics, "dead")
    assert [(letter.topic, letter.partition, letter.offset, letter.raw) for letter in letters] == [
        (trajectories.topic, 0, offset, POISON) for offset in (4, 14)
    ]
    for letter in letters:
        assert isinstance(letter, DeadLetter)
        assert (letter.stage, letter.reason) == ("reward-0", "undecodable") and letter.detail


POISON = bytes.fromhex("c16761")


def _put_poisoned(log: EventLog, topics: Topics, first: int) -> None:
    """Ten records from offset `first` on; the fifth is no event."""
    records = [
        codec.encode(finished(seq, 0, seq, n_samples=1), producer="test") for seq in range(first, first + 10)
    ]
    records[4] = NewRecord(POISON)
    assert log.append(topics.name("trajectories"), 0, records) == first


def _take_at_most(config: Config, word: str, most_bytes: int) -> None:
    """Set max.message.bytes of one of the run's topics, as an administrator could at any time."""
    settings = kafka_settings(config)
    resource = ConfigResource(
        ConfigResourceType.TOPIC,
        settings.full(topics_of(config).name(word)),
        configs={"max.message.bytes": str(most_bytes)},
    )
    admin = KafkaAdminClient(bootstrap_servers=settings.servers[0])
    try:
        admin.alter_configs([resource])
    finally:
        admin.close()


# -- O06: what retention has removed is missed aloud


def test_a_collector_that_comes_back_after_retention_stops_naming_what_is_lost_or_counts_it_if_told_to(
    kafka: str, prefix: str, tmp_path: Path
) -> None:
    """Case O06: committed 30, earliest 50, end 80. The place is read from the collector's own output."""
    config = run_on(tmp_path, kafka, prefix)
    topics = topics_of(config)
    rewards = topics.name("rewards")
    with open_run_log(config) as log, Daemons(config) as daemons:
        put_all(log, topics, "tasks", [task(seq, n_samples=1) for seq in range(80)])
        put_all(log, topics, "rewards", [rewarded(seq, 0, seq, 1.0, n_samples=1) for seq in range(80)])
        progress = {"tasks": InputProgress(80, 30, []), "rewards": InputProgress(30, 30, [])}
        put(log, topics, "groups", completed(29, n_samples=1, frontier=30, progress=progress))
        log.commit_hint(topics.group("collector"), {TopicPartition(rewards, 0): 30})
        assert log.truncate_before(rewards, 0, 50) == 50

        collector = daemons.start("collector")
        assert collector.exit_code() == 1
        said = collector.text()
        assert f"20 events of {rewards}/0 are lost (offsets 30 to 49)" in said
        assert 'log.on_lost = "continue"' in said
        assert log.end(topics.name("groups"), 0) == 1, "it has written nothing"

        collector = daemons.start("collector", "0/1", "--set", "log.on_lost=continue")
        eventually(
            lambda: newest_metrics(log, topics, "collector-0").get("completed_total") == 30,
            "30 groups",
            collector,
        )
        collector.terminate()
        assert collector.exit_code() == 0
        outcomes = [e for e in events(log, topics, "groups") if isinstance(e, GroupCompleted)]
        assert [event.seq for event in outcomes[1:]] == list(range(50, 80)), "from 50 on, never from the end"
        assert newest_metrics(log, topics, "collector-0")["lost"] == 20
        assert log.hints(topics.group("collector"))[TopicPartition(rewards, 0)] == 80
