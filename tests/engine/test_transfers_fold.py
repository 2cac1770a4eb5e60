"""What an engine is to join and receive, read from the log; and who refuses broadcasts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine.config import build_config
from engine.interfaces import EngineError
from engine.rollout.receiving import Join, Leave, Receive, Transfers, sent_by
from engine.rollout.scripted import ScriptedEngine
from streams.errors import ConfigError
from streams.events import TransferGroupEnded, TransferGroupFormed, WeightsPublished
from streams.memory import MemoryLog
from streams.topics import Topics
from tests.support.events import put

TOPICS = Topics("test", 1)


def formed(group: str, *engines: str, epoch: int = 0) -> TransferGroupFormed:
    members = [(engine, place + 1, 1) for place, engine in enumerate(engines)]
    return TransferGroupFormed(
        epoch=epoch, group=group, backend="gloo", address="127.0.0.1", port=1, world_size=1 + len(engines),
        members=members, bucket_bytes=1 << 16, deadline_s=1.0,
    )  # fmt: skip


def published(version: int, group: str = "", epoch: int = 0) -> WeightsPublished:
    uris = {"disk": f"v{version}"} | ({"distributed": group} if group else {})
    return WeightsPublished(epoch=epoch, version=version, step=version, digest="d", uris=uris)


def ended(group: str, reason: str) -> TransferGroupEnded:
    return TransferGroupEnded(epoch=0, group=group, reason=reason)


@pytest.fixture
def log() -> MemoryLog:
    made = MemoryLog()
    TOPICS.create(made)
    return made


def test_versions_of_its_groups_are_received_once_in_order_and_before_the_group_is_left(
    log: MemoryLog,
) -> None:
    put(log, TOPICS, "fleet", formed("old", "rollout-0"))  # names an earlier life of this engine
    transfers = Transfers(log, TOPICS, "rollout-0")
    for event in (formed("a", "rollout-1", "rollout-0"), formed("b", "rollout-1"), ended("a", "membership")):
        put(log, TOPICS, "fleet", event)
    first, second = published(1, "a"), published(2, "a")
    news: list[Any] = [published(0, "old"), first, published(3, "b"), first, second, published(4)]
    assert transfers.catch_up(news, 0) == [
        Join(formed("a", "rollout-1", "rollout-0"), 2),
        Receive(first, "a"),
        Receive(second, "a"),
        Leave("a", is_over=False),
    ]
    assert transfers.catch_up([published(5, "a")], 0) == []


def test_a_group_that_failed_or_whose_trainer_was_replaced_is_over(log: MemoryLog) -> None:
    transfers = Transfers(log, TOPICS, "rollout-0")
    for name in ("a", "b"):
        put(log, TOPICS, "fleet", formed(name, "rollout-0", epoch=3))
    put(log, TOPICS, "fleet", ended("a", "failed"))
    assert transfers.catch_up([], 3)[2:] == [Leave("a", is_over=True)]
    put(log, TOPICS, "fleet", formed("late", "rollout-0", epoch=3))
    assert transfers.catch_up([], 7) == [
        Leave("b", is_over=True)
    ]  # and a fenced trainer's group is not joined


def test_an_engine_of_no_ranks_refuses_and_a_configuration_that_asks_for_it_is_refused() -> None:
    engine = ScriptedEngine(lambda *_: ([], []), name="s")  # pyright: ignore[reportArgumentType]
    assert engine.n_ranks == 0
    with pytest.raises(EngineError, match="takes versions from disk"):
        asyncio.run(engine.receive(published(1, "a"), "a", 1 << 16))
    table = {"data": {"path": "x"}, "reward": {"function": "exact"}, "model": {"path": "m"}}
    for transport in ("distributed", "ipc"):
        for rollout, words in (
            ({"backend": "scripted"}, f'"{transport}".*a scripted engine takes versions from disk alone'),
            ({"backend": "torch", "decode": "continuous"}, f'"{transport}".*set rollout.decode = "batched"'),
        ):
            with pytest.raises(ConfigError, match=words):
                build_config({**table, "weights": {"transport": transport}, "rollout": rollout})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rollout": {"backend": "sglang"}}, "a server unpickles what comes that way"),
        ({"model": {"path": "m", "device": "musa"}}, "between processes on CPUs or on CUDA devices"),
        ({"weights": {"transport": "ipc", "backend": "gloo"}}, "no library of broadcasts is used there"),
    ],
)
def test_where_ipc_cannot_be_it_is_refused_with_what_to_set_instead(
    change: dict[str, Any], words: str
) -> None:
    table = {"data": {"path": "x"}, "reward": {"function": "exact"}, "model": {"path": "m"}}
    table["weights"] = {"transport": "ipc"}
    assert build_config(table).weights.transport == "ipc"
    with pytest.raises(ConfigError, match=words):
        build_config({**table, **change})


def test_a_version_sent_by_ipc_is_received_as_one_that_is_broadcast(log: MemoryLog) -> None:
    transfers = Transfers(log, TOPICS, "rollout-0")
    put(log, TOPICS, "fleet", formed("a", "rollout-0"))
    event = WeightsPublished(epoch=0, version=1, step=1, digest="d", uris={"disk": "v1", "ipc": "a"})
    (_, receive) = transfers.catch_up([event], 0)
    assert isinstance(receive, Receive) and receive == Receive(event, "a") and receive.transport == "ipc"
    assert sent_by(published(1)) == ("", "") and sent_by(published(1, "g")) == ("distributed", "g")
