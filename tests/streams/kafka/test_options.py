"""What the clients are really given: every setting of the log reaches both of them, and no secret leaves by it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from streams.errors import LogError

pytest.importorskip("kafka")
pytest.importorskip("confluent_kafka")

from confluent_kafka import Consumer as RdConsumer
from confluent_kafka import Producer as RdProducer
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer

from streams.kafka import options
from streams.kafka.settings import KafkaSettings, Security
from streams.kafka.topic_settings import largest_batch
from streams.kafka.writer import Writer

SECRETS = ["s3cret-password", "s3cret-key", "s3cret-token"]


def never() -> str:
    raise AssertionError("a secret was asked for, to be shown")


def secured(**changes: Any) -> Security:
    given: dict[str, Any] = {
        "protocol": "SASL_SSL",
        "username": "ann",
        "password": lambda: SECRETS[0],
        "key_password": lambda: SECRETS[1],
        "token": lambda: SECRETS[2],
        "cafile": "/etc/ca.pem",
    }
    return Security(**{**given, **changes})


def settings(**changes: Any) -> KafkaSettings:
    return KafkaSettings(**{"servers": ("a:9092", "b:9092"), **changes})


def test_kafka_pythons_producer_can_neither_lose_order_nor_wait_without_end() -> None:
    given = options.python_producer_options(
        settings(delivery_timeout=timedelta(seconds=7), request_timeout=timedelta(seconds=3)), control=True
    )
    assert given["bootstrap_servers"] == ["a:9092", "b:9092"]
    assert given["acks"] == "all"
    assert given["enable_idempotence"] is True
    assert given["max_in_flight_requests_per_connection"] <= 5
    assert given["delivery_timeout_ms"] == 14_000  # the log itself tells after seven seconds
    assert given["request_timeout_ms"] == 3000
    assert given["max_block_ms"] <= 1000
    assert given["compression_type"] is None
    assert given["linger_ms"] == 0
    assert given["allow_auto_create_topics"] is False
    assert given["reconnect_backoff_max_ms"] <= 1000


def test_kafka_pythons_consumer_neither_commits_nor_resets_and_sees_only_what_is_committed() -> None:
    given = options.python_consumer_options(settings(fetch_max_wait=timedelta(milliseconds=70)))
    assert given["enable_auto_commit"] is False
    assert given["auto_offset_reset"] == "none"
    assert given["isolation_level"] == "read_committed"
    assert given["check_crcs"] is True
    assert given["allow_auto_create_topics"] is False
    assert given["fetch_max_wait_ms"] == 70
    assert given["reconnect_backoff_max_ms"] <= 1000


def test_librdkafka_is_given_the_same_in_its_own_words() -> None:
    chosen = settings(
        delivery_timeout=timedelta(seconds=7),
        request_timeout=timedelta(seconds=3),
        linger=timedelta(milliseconds=5),
    )
    bulk = options.confluent_producer_options(chosen, control=False)
    assert bulk["bootstrap.servers"] == "a:9092,b:9092"
    assert (bulk["acks"], bulk["enable.idempotence"]) == ("all", True)
    assert (bulk["message.timeout.ms"], bulk["request.timeout.ms"]) == (14_000, 3000)
    assert (bulk["compression.type"], bulk["linger.ms"]) == ("none", 5)
    assert bulk["queue.buffering.max.kbytes"] << 10 > chosen.bytes_in_flight
    assert bulk["allow.auto.create.topics"] is False
    assert options.confluent_producer_options(chosen, control=True)["linger.ms"] == 0
    consumer = options.confluent_consumer_options(chosen)
    assert consumer["enable.auto.commit"] is False
    assert consumer["auto.offset.reset"] == "error"
    assert consumer["isolation.level"] == "read_committed"
    assert consumer["check.crcs"] is True
    assert consumer["reconnect.backoff.max.ms"] <= 1000


@pytest.mark.parametrize("max_record_bytes", [1000, 1 << 20, 16 << 20, 64 << 20])
def test_sizes_agree_along_the_whole_path(max_record_bytes: int) -> None:
    chosen = settings(max_record_bytes=max_record_bytes)
    batch = largest_batch(chosen)  # what topics are made for
    assert batch > max_record_bytes
    python = options.python_producer_options(chosen, control=False)
    assert python["max_request_size"] == python["batch_size"] == batch
    reading = options.python_consumer_options(chosen)
    assert reading["receive_message_max_bytes"] >= reading["fetch_max_bytes"] + batch
    rd = options.confluent_producer_options(chosen, control=False)
    assert rd["message.max.bytes"] == batch >= rd["batch.size"]
    rd_reading = options.confluent_consumer_options(chosen)
    assert rd_reading["receive.message.max.bytes"] >= rd_reading["fetch.max.bytes"] + 512
    assert rd_reading["fetch.max.bytes"] >= batch
    # Both clients check such things themselves.
    RdProducer(rd).flush(0)
    RdConsumer(rd_reading).close()


@pytest.mark.parametrize("protocol", ["PLAINTEXT", "SASL_PLAINTEXT"])
def test_the_clients_know_every_option_that_they_are_given(protocol: Any) -> None:
    chosen = settings(security=secured(protocol=protocol))
    for client, given in (
        (KafkaProducer, options.python_producer_options(chosen, control=False)),
        (KafkaConsumer, options.python_consumer_options(chosen)),
        (KafkaAdminClient, options.python_admin_options(chosen)),
    ):
        assert set(given) <= set(client.DEFAULT_CONFIG)
    RdProducer(options.confluent_producer_options(chosen, control=True)).flush(0)
    RdConsumer(options.confluent_consumer_options(chosen)).close()


@pytest.mark.parametrize("client", ["kafka-python", "confluent"])
@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-512", "OAUTHBEARER"])
def test_what_is_shown_to_people_is_what_is_handed_over_less_the_secrets(client: Any, mechanism: Any) -> None:
    security = secured(mechanism=mechanism, password=never, token=never, key_password=never)
    chosen = settings(client=client, security=security)
    shown = options.effective(chosen)
    assert list(shown) == ["producer", "control_producer", "consumer", "admin", "log"]
    text = json.dumps(shown)  # of plain values
    assert "ann" in text or mechanism == "OAUTHBEARER"
    assert "/etc/ca.pem" in text and "***" in text
    plain = settings(client=client)
    build: Callable[..., dict[str, Any]] = (
        options.confluent_producer_options if client == "confluent" else options.python_producer_options
    )
    assert options.effective(plain)["producer"] == build(plain, control=False)
    assert options.effective(plain)["log"]["bytes_in_flight"] == 64 << 20


def test_no_secret_is_part_of_a_repr() -> None:
    text = (
        repr(settings(security=secured()))
        + repr(secured())
        + str(options.effective(settings(security=secured())))
    )
    assert not any(secret in text for secret in SECRETS)
    assert "ann" in text


def test_secrets_are_asked_for_when_a_client_is_made() -> None:
    passwords = iter(["first", "second"])
    chosen = settings(security=secured(protocol="SASL_PLAINTEXT", password=lambda: next(passwords)))
    assert options.python_consumer_options(chosen)["sasl_plain_password"] == "first"
    assert options.confluent_consumer_options(chosen)["sasl.password"] == "second"


# -- libraries


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in names else find(name))


def test_a_missing_client_is_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "kafka", "confluent_kafka")
    with pytest.raises(LogError, match=r"kafka-python.*pip install 'millstream\[kafka\]'"):
        Writer(settings(), lambda *_: None)
    with pytest.raises(LogError, match=r"kafka-python.*pip install 'millstream\[kafka\]'"):
        options.python_admin_options(settings())
    without(monkeypatch, "confluent_kafka")
    with pytest.raises(LogError, match=r"confluent-kafka.*millstream\[kafka-fast\]"):
        options.confluent_consumer_options(settings())


@pytest.mark.parametrize("library", ["crc32c", "zstandard"])
def test_kafka_python_without_its_c_library_is_refused_unless_that_is_wanted(
    monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    without(monkeypatch, library)
    with pytest.raises(LogError, match=rf"without {library}: .*10 to 38 times slower.*millstream\[kafka\]"):
        options.require(settings())
    monkeypatch.setenv(options.SLOW_ALLOWED, "1")
    options.require(settings())
