"""From [log] and [log.kafka] to what a log's constructor takes (streams.open.open_log)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from engine.config import Config, secret
from engine.settings import KafkaConfig
from streams.kafka.settings import KafkaSettings, Secret, Security
from streams.open import kafka_address


def log_settings(
    config: Config,
    *,
    readonly: bool = False,
    role: str = "",
    member: str = "",
    interrupted: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Arguments of `open_log` after the URL. `role` and `member` say whose log it is; "" for a command.

    `interrupted` is looked at by a log on Kafka in every wait. Raises ConfigError for a secret that is not there.
    """
    log = config.log
    sizes: dict[str, Any] = {
        "claims": Path(config.run.dir) / "claims",
        "max_claim_bytes": log.max_claim_bytes,
        "max_record_bytes": log.max_record_bytes,
    }
    if log.url.startswith("kafka:"):
        return sizes | _kafka(config, role, member) | {"readonly": readonly, "interrupted": interrupted}
    if not log.url.startswith("file:"):
        return sizes
    if readonly:
        return sizes | {"readonly": True}
    return sizes | {"fsync": log.fsync, "segment_bytes": log.segment_bytes}


def kafka_settings(config: Config, role: str = "") -> KafkaSettings:
    """What a daemon of this role talks to Kafka with, for people: secrets are not asked for."""
    servers, prefix = kafka_address(config.log.url)
    return KafkaSettings(
        servers=servers,
        prefix=prefix,
        max_record_bytes=config.log.max_record_bytes,
        **_kafka(config, role, role and f"{role}-0", ask=False),
    )


def _kafka(config: Config, role: str, member: str, *, ask: bool = True) -> dict[str, Any]:
    """The fields of KafkaSettings, without those that the URL or the caller gives."""
    log, kafka = config.log, config.log.kafka
    return {
        "client": kafka.client,
        "client_id": f"millstream.{config.run.name}.{member or 'command'}",
        "security": _security(kafka, ask),
        "replication_factor": kafka.replication_factor,
        "min_insync_replicas": kafka.min_insync_replicas,
        "retention": None if log.retention_s is None else timedelta(seconds=log.retention_s),
        "retention_bytes": log.retention_bytes,
        "bytes_in_flight": kafka.bytes_in_flight,
        "request_timeout": timedelta(seconds=kafka.request_timeout_s),
        "delivery_timeout": timedelta(seconds=kafka.delivery_timeout_s),
        "session_timeout": timedelta(seconds=kafka.session_timeout_s),
        "max_silence": timedelta(seconds=kafka.max_silence_s),
        "ingest": _ingest(kafka, role),
    }


def _ingest(kafka: KafkaConfig, role: str) -> Literal["thread", "process"]:
    """confluent-kafka parses outside the interpreter lock; and only the trainer computes under it."""
    if kafka.ingest == "auto":
        return "process" if role == "trainer" and kafka.client == "kafka-python" else "thread"
    return kafka.ingest


def _security(kafka: KafkaConfig, ask: bool) -> Security:
    def reader(name: str) -> Secret | None:
        reference = getattr(kafka, name)
        if reference is None:
            return None
        opened = _Opened(reference, f"log.kafka.{name}")
        if ask:
            opened()  # a secret that is missing is a matter of now, not of some thread's later
        return opened

    return Security(
        protocol=kafka.security_protocol,
        mechanism=kafka.sasl_mechanism,
        username=kafka.sasl_username,
        password=reader("sasl_password"),
        token=reader("sasl_oauth_token"),
        cafile=kafka.ssl_cafile,
        certfile=kafka.ssl_certfile,
        keyfile=kafka.ssl_keyfile,
        key_password=reader("ssl_key_password"),
        check_hostname=kafka.ssl_check_hostname,
    )


class _Opened:
    """Reads a secret each time it is asked, so that one that was renewed is seen. A class, and not a closure: it goes
    along to a process that does the fetching."""

    def __init__(self, reference: str, key: str) -> None:
        self.reference, self.key = reference, key

    def __call__(self, environ: Mapping[str, str] = os.environ) -> str:
        return secret(self.reference, self.key, environ)
