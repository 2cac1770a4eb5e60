"""Daemons over a log that does not answer, or has no topics: they wait, or say what is missing, and end in time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engine import roles
from engine.config import Config, build_config, fingerprint
from engine.log_settings import kafka_settings, log_settings
from engine.weights.store import WeightStore
from streams.errors import ConfigError, LogUnavailable
from streams.events import EpochStarted, Metrics, RunStarted, TrajectoryFinished, WeightsPublished
from streams.memory import MemoryLog, MemoryStore
from streams.topics import ALL_TOPICS, Topics
from tests.support.events import events, finished, put, task

KAFKA = "kafka://127.0.0.1:9092/team."
ROLES = ("feeder", "rollout", "reward", "collector", "trainer")


def config_of(tmp_path: Path, **changes: dict[str, Any]) -> Config:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"q{i}", "label": "7"}) + "\n" for i in range(8)))
    table: dict[str, dict[str, Any]] = {
        "run": {"name": "run", "dir": str(tmp_path / "run"), "steps": 3},
        "log": {"partitions": 2},
        "data": {"path": str(rows)},
        "rollout": {"backend": "scripted", "options": {"policy": "coin", "heads": "7", "tails": "8"}},
        "reward": {"function": "exact", "workers": 0},
        "trainer": {"backend": "scalar", "rollout_batch_size": 2},
    }
    for section, values in changes.items():
        table.setdefault(section, {}).update(values)
    return build_config(table)


class Broker(MemoryLog):
    """A handle on a store; `is_down` and `loses` are asked at every call."""

    is_down: Callable[[], bool] = staticmethod(lambda: False)

    def _check_open(self) -> None:
        """Every question comes by here."""
        super()._check_open()
        if self.is_down():
            raise LogUnavailable("127.0.0.1:9092: no broker answers")

    def submit(self, topic, partition, records):
        if self.is_down():
            future: Future[int] = Future()
            future.set_exception(LogUnavailable("not acknowledged within 5 s"))
            return future
        return super().submit(topic, partition, records)


class Daemon:
    """`serve` on a thread, over a store that this test can take away."""

    def __init__(self, role: str, config: Config, monkeypatch: pytest.MonkeyPatch, **log: Any) -> None:
        self.store, self.down = MemoryStore(), threading.Event()
        self.stop, self.result = threading.Event(), None
        self.logs: list[Broker] = []
        monkeypatch.setattr(roles, "open_log", self._open)
        self._kind, self._config = log.get("kind", Broker), config
        self._thread = threading.Thread(target=self._run, args=(role,), daemon=True)

    def _open(self, url: str, **settings: Any) -> MemoryLog:
        log = self._kind(self.store)
        log.is_down = self.down.is_set
        self.logs.append(log)
        return log

    def _run(self, role: str) -> None:
        try:
            self.result = roles.serve(role, self._config, replica=0, replicas=1, stop=self.stop.is_set)
        except BaseException as error:
            self.result = error

    def __enter__(self) -> Daemon:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self, within_s: float = 20.0) -> Any:
        self.stop.set()
        self._thread.join(within_s)
        assert not self._thread.is_alive(), f"it has not ended within {within_s} s"
        return self.result


def until(condition: Callable[[], Any], what: str, within_s: float = 20.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, f"not within {within_s} s: {what}"
        time.sleep(0.01)


def begin(store: MemoryStore, config: Config) -> tuple[MemoryLog, Topics]:
    """What a trainer and its first version leave in the ledger."""
    log, topics = MemoryLog(store), roles.topics_of(config)
    topics.create(log)
    put(
        log,
        topics,
        "ledger",
        RunStarted(
            run="run",
            config_fingerprint=fingerprint(config),
            partitions=2,
            rollout_batch_size=2,
            n_samples_per_prompt=8,
            seed=0,
            started_ms=1,
        ),
    )
    put(log, topics, "ledger", EpochStarted(producer="t", started_ms=1))
    return log, topics


@pytest.mark.parametrize("role", ROLES)
def test_a_daemon_that_is_started_before_its_log_begins_when_that_is_there(
    role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    config = config_of(tmp_path)
    daemon = Daemon(role, config, monkeypatch)
    daemon.down.set()
    with daemon:
        time.sleep(1.0)
        assert daemon.result is None and not daemon.store.topics
        daemon.down.clear()
        until(lambda: len(daemon.store.topics) == len(ALL_TOPICS), "its topics")
        reader = MemoryLog(daemon.store)
        word = {"feeder": "tasks", "rollout": "fleet", "trainer": "ledger"}.get(role, "metrics")
        until(lambda: any(reader.end(f"run.{word}", p) for p in range(1)), f"its first {word}")
        assert daemon.end(3.0) == 0
    assert [f"{role}-0: waits for" in each.message for each in caplog.records].count(True) == 1


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("when", ["at its start", "while it works"])
def test_a_daemon_that_waits_for_its_log_ends_within_two_seconds_when_it_is_asked_to(
    role: str, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    daemon = Daemon(role, config_of(tmp_path), monkeypatch)
    if when == "at its start":
        daemon.down.set()
    with daemon:
        if when == "while it works":
            until(lambda: len(daemon.store.topics) == len(ALL_TOPICS), "its topics")
            time.sleep(0.5)
            daemon.down.set()
        time.sleep(0.7)
        result = daemon.end(2.0)
    # What is left undelivered (a gauge, that an engine has left) is an exit code of its own; nothing else is one.
    assert result in (0, 1) or "undelivered" in str(result)
    if when == "at its start":
        assert result == 0


@pytest.mark.parametrize("role", ROLES)
def test_topics_that_are_not_there_on_kafka_are_named_with_the_command_that_makes_them(
    role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = config_of(tmp_path, log={"partitions": 2, "url": KAFKA})
    daemon = Daemon(role, config, monkeypatch)
    MemoryLog(daemon.store).create_topic("run.ledger", 1)
    began = time.monotonic()
    with daemon:
        until(lambda: daemon.result is not None, "its end", 5.0)
    assert time.monotonic() - began < 5
    assert isinstance(daemon.result, ConfigError)
    text = str(daemon.result)
    assert "run.tasks, run.trajectories, run.rewards, run.groups, run.fleet, run.metrics, run.dead" in text
    assert f"millstream topics {tmp_path}/run --create" in text
    assert set(daemon.store.topics) == {"run.ledger"}, "looking makes none"


def test_a_topic_with_other_partitions_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = config_of(tmp_path, log={"partitions": 2, "url": KAFKA})
    daemon = Daemon("collector", config, monkeypatch)
    Topics("run", 3).create(MemoryLog(daemon.store))
    with daemon:
        until(lambda: daemon.result is not None, "its end", 5.0)
    assert isinstance(daemon.result, ConfigError)
    assert "'run.tasks' has 3 partitions, 2 were asked for; change the topic" in str(daemon.result)


def test_topics_are_made_once_and_then_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = config_of(tmp_path, log={"partitions": 2, "url": KAFKA})
    store = MemoryStore()
    made: dict[str, bool] = {}

    class Noting(MemoryLog):
        def create_topic(self, topic, partitions, *, kept=False) -> None:
            made[topic] = kept
            super().create_topic(topic, partitions, kept=kept)

    monkeypatch.setattr(roles, "open_log", lambda url, **settings: Noting(store))
    roles.create_topics(config)
    assert {topic for topic, is_kept in made.items() if is_kept} == {"run.ledger", "run.fleet"}
    assert Topics("run", 2).create(MemoryLog(store)) == []
    Topics("run", 2).check(MemoryLog(store))


def test_verdicts_that_never_reached_the_log_are_counted_and_the_exit_code_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Case O03: ten events emitted to a broker that is gone, then the daemon is asked to stop."""

    class Swallowing(Broker):
        def submit(self, topic, partition, records):
            if topic != "run.rewards":
                return super().submit(topic, partition, records)
            future: Future[int] = Future()
            future.set_exception(LogUnavailable("not acknowledged within 5 s"))
            return future

    config = config_of(tmp_path)
    daemon = Daemon("reward", config, monkeypatch, kind=Swallowing)
    log, topics = begin(daemon.store, config)
    for seq in range(10):
        put(log, topics, "trajectories", finished(seq, 0, seq, n_samples=1), partition=seq % 2)
    with daemon:
        until(lambda: "cannot append" in caplog.text, "the first refusal")
        time.sleep(0.3)
        assert daemon.end(8.0) == 1
    assert "reward-0: stopped with 10 events undelivered" in caplog.text
    assert events(log, topics, "rewards") == events(log, topics, "rewards", 1) == []


def test_the_same_verdicts_arrive_once_each_when_the_log_is_back_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = config_of(tmp_path)
    daemon = Daemon("reward", config, monkeypatch)
    log, topics = begin(daemon.store, config)
    with daemon:
        until(lambda: log.end(topics.name("metrics"), 0), "it works")
        daemon.down.set()
        for seq in range(10):
            put(log, topics, "trajectories", finished(seq, 0, seq, n_samples=1))
        time.sleep(1.0)
        daemon.down.clear()
        until(lambda: len(events(log, topics, "rewards")) == 10, "ten verdicts")
        assert daemon.end(3.0) == 0
    assert [event.seq for event in events(log, topics, "rewards")] == list(range(10))


def test_an_engine_goes_on_after_an_outage_and_nothing_of_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = config_of(tmp_path)
    daemon = Daemon("rollout", config, monkeypatch)
    log, topics = begin(daemon.store, config)
    store = WeightStore(tmp_path / "run" / "weights", keep=9)
    version = store.publish({"w": np.array([0.0])}, epoch=1, version=0, step=0)
    assert isinstance(version, WeightsPublished)
    put(log, topics, "ledger", version)
    with daemon:
        put(log, topics, "tasks", task(0, n_samples=2))
        until(lambda: len(events(log, topics, "trajectories")) == 2, "two samples")
        daemon.down.set()
        put(log, topics, "tasks", task(1, n_samples=2))
        time.sleep(1.2)
        daemon.down.clear()
        until(lambda: len(events(log, topics, "trajectories")) == 4, "two more")
        assert daemon.end(3.0) == 0
    found = [e for e in events(log, topics, "trajectories") if isinstance(e, TrajectoryFinished)]
    assert sorted(event.uid for event in found) == ["0-0/0/0", "0-0/1/0", "0-1/0/0", "0-1/1/0"]


# ---------------------------------------------------------------------------------------- settings of the log
def test_every_setting_of_kafka_reaches_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "key").write_text("open sesame\n")
    monkeypatch.setenv("KAFKA_PASSWORD", "hunter2")
    config = config_of(
        tmp_path,
        log={
            "partitions": 2,
            "url": "kafka://a:9092,b:9093/team.",
            "retention_s": 86400.0,
            "retention_bytes": 1 << 30,
            "max_record_bytes": 1 << 20,
            "kafka": {
                "security_protocol": "SASL_SSL",
                "sasl_mechanism": "SCRAM-SHA-256",
                "sasl_username": "me",
                "sasl_password": "env:KAFKA_PASSWORD",
                "ssl_cafile": str(tmp_path / "ca.pem"),
                "ssl_certfile": str(tmp_path / "cert.pem"),
                "ssl_keyfile": str(tmp_path / "key.pem"),
                "ssl_key_password": f"file:{tmp_path}/key",
                "ssl_check_hostname": False,
                "replication_factor": 3,
                "min_insync_replicas": 2,
                "bytes_in_flight": 5 << 20,
                "request_timeout_s": 4.0,
                "delivery_timeout_s": 9.0,
                "session_timeout_s": 7.0,
                "max_silence_s": 70.0,
            },
        },
    )
    settings = kafka_settings(config, "reward")
    assert (settings.servers, settings.prefix) == (("a:9092", "b:9093"), "team.")
    assert settings.client_id == "millstream.run.reward-0"
    assert (settings.replication_factor, settings.min_insync_replicas) == (3, 2)
    assert (settings.retention, settings.retention_bytes) == (timedelta(days=1), 1 << 30)
    assert (settings.max_record_bytes, settings.bytes_in_flight) == (1 << 20, 5 << 20)
    assert settings.request_timeout == timedelta(seconds=4)
    assert settings.delivery_timeout == timedelta(seconds=9)
    assert settings.session_timeout == timedelta(seconds=7)
    assert settings.max_silence == timedelta(seconds=70)
    security = settings.security
    assert (security.protocol, security.mechanism, security.username) == ("SASL_SSL", "SCRAM-SHA-256", "me")
    assert security.password is not None and security.password() == "hunter2"
    assert security.key_password is not None and security.key_password() == "open sesame"
    assert security.token is None and security.check_hostname is False
    assert security.cafile == str(tmp_path / "ca.pem")
    assert "hunter2" not in repr(settings) and "sesame" not in repr(settings)
    monkeypatch.setenv("KAFKA_PASSWORD", "hunter3")
    assert security.password() == "hunter3", "it is read again each time"


@pytest.mark.parametrize(
    ("ingest", "client", "role", "expected"),
    [
        ("auto", "kafka-python", "trainer", "process"),
        ("auto", "kafka-python", "rollout", "thread"),
        ("auto", "confluent", "trainer", "thread"),
        ("thread", "kafka-python", "trainer", "thread"),
        ("process", "confluent", "collector", "process"),
    ],
)
def test_only_a_trainer_has_its_records_fetched_by_another_process(
    ingest: str, client: str, role: str, expected: str, tmp_path: Path
):
    config = config_of(
        tmp_path, log={"partitions": 2, "url": KAFKA, "kafka": {"ingest": ingest, "client": client}}
    )
    assert kafka_settings(config, role).ingest == expected


def test_a_secret_that_is_not_there_is_said_before_anything_is_opened(tmp_path: Path):
    config = config_of(
        tmp_path,
        log={
            "partitions": 2,
            "url": KAFKA,
            "kafka": {
                "security_protocol": "SASL_SSL",
                "sasl_mechanism": "OAUTHBEARER",
                "sasl_oauth_token": "env:NO_SUCH_TOKEN",
            },
        },
    )
    with pytest.raises(ConfigError, match=r"log\.kafka\.sasl_oauth_token = .* NO_SUCH_TOKEN is not set"):
        log_settings(config)
    assert kafka_settings(config).security.token is not None, "for people it is not asked for"


def test_the_embedded_log_is_opened_as_before(tmp_path: Path):
    config = config_of(tmp_path)
    writing = log_settings(config, role="reward", member="reward-0")
    assert {"fsync", "segment_bytes"} <= set(writing) and "interrupted" not in writing
    assert log_settings(config, readonly=True)["readonly"] is True


def test_metrics_say_how_much_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = config_of(tmp_path, log={"partitions": 2, "url": KAFKA, "on_lost": "continue"})
    daemon = Daemon("reward", config, monkeypatch)
    log, topics = begin(daemon.store, config)
    for seq in range(6):
        put(log, topics, "trajectories", finished(seq, 0, seq, n_samples=1))
    log.truncate_before(topics.name("trajectories"), 0, 4)
    with daemon:
        until(lambda: len(events(log, topics, "rewards")) == 2, "the verdicts on what is left")
        until(
            lambda: any(
                isinstance(event, Metrics) and event.values.get("lost") == 4.0
                for event in events(log, topics, "metrics")
            ),
            "its metric",
        )
        assert daemon.end(3.0) == 0


def test_by_default_a_loss_ends_the_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = config_of(tmp_path)
    daemon = Daemon("reward", config, monkeypatch)
    log, topics = begin(daemon.store, config)
    for seq in range(6):
        put(log, topics, "trajectories", finished(seq, 0, seq, n_samples=1))
    log.truncate_before(topics.name("trajectories"), 0, 4)
    with daemon:
        until(lambda: daemon.result is not None, "its end", 10.0)
    assert "reward-0: 4 events of run.trajectories/0 are lost" in str(daemon.result)


@pytest.mark.parametrize(
    ("weights", "device", "right"),
    [
        ({}, "cpu", 64 << 20),
        ({}, "cuda", 512 << 20),
        ({"backend": "nccl"}, "cpu", 512 << 20),
        ({}, "musa", 512 << 20),
        ({"backend": "gloo"}, "cuda", 64 << 20),
        ({"transport": "ipc"}, "cuda", 64 << 20),
        ({"bucket_bytes": 1 << 20}, "cuda", 1 << 20),
    ],
    ids=["Gloo", "NCCL of the device", "NCCL", "MCCL", "Gloo as it is set", "ipc", "as it is set"],
)
def test_broadcasts_between_gpus_have_larger_buckets_unless_a_size_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: dict[str, Any], device: str, right: int
):
    config = config_of(tmp_path)
    config = msgspec.structs.replace(
        config,
        weights=msgspec.structs.replace(config.weights, **{"transport": "distributed"} | weights),
        trainer=msgspec.structs.replace(config.trainer, backend="torch"),
        model=msgspec.structs.replace(config.model, device=device),
    )
    given: list[int] = []
    monkeypatch.setattr(
        "engine.weights.sender.Sender", lambda *_, bucket_bytes, **__: given.append(bucket_bytes)
    )
    log, topics = MemoryLog(MemoryStore()), Topics("run", 2)
    topics.create(log)
    make = roles._make_sender(config, log, topics, lambda: False)
    assert make is not None
    make(0)
    assert given == [right]
