"""How one process talks to Kafka: every setting that matters is ours and stated here, none is left to a client.

    TOML [log], [log.kafka] ──► engine.roles ──► KafkaSettings ──► kafka-python's or confluent-kafka's own names

`effective` lists what is really handed to the client; `millstream config` prints it, secrets redacted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

from streams.checks import MAX_RECORD_BYTES

Secret = Callable[[], str]  # asked for whenever a connection needs it, so that a renewed token file is seen


@dataclass(frozen=True)
class Security:
    """Encryption and login. The default is none of both."""

    protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"] = "SCRAM-SHA-512"
    username: str | None = None
    password: Secret | None = field(default=None, repr=False)
    token: Secret | None = field(default=None, repr=False)  # OAUTHBEARER: a bearer token (JWT)
    cafile: str | None = None  # the system's certificates when None
    certfile: str | None = None  # client certificate, for mutual TLS
    keyfile: str | None = None
    key_password: Secret | None = field(default=None, repr=False)
    check_hostname: bool = True


@dataclass(frozen=True)
class KafkaSettings:
    """One process's view of a Kafka cluster.

    `prefix` stands before the name of every topic and group, so that several logs can share a cluster
    (kafka://host:port/PREFIX); what the log hands out is always without it.
    """

    servers: tuple[str, ...]  # "host:port", at least one
    prefix: str = ""
    client: Literal["kafka-python", "confluent"] = "kafka-python"
    client_id: str = "millstream"
    security: Security = Security()
    readonly: bool = False

    # topics that this log creates, and what it demands of those that exist
    replication_factor: int = 1
    min_insync_replicas: int | None = None  # None: the broker's default
    retention: timedelta | None = None  # of data topics; None: for ever. `kept` topics: always for ever
    retention_bytes: int | None = None  # of one partition of a data topic; None: no limit
    max_record_bytes: int = MAX_RECORD_BYTES  # value and headers of one record

    # writing
    bytes_in_flight: int = 64 << 20  # not acknowledged yet, over all topics; submit() waits beyond it
    linger: timedelta = timedelta(milliseconds=5)  # of bulk topics; control topics never linger
    batch_bytes: int = 1 << 20  # never more than max_record_bytes
    request_timeout: timedelta = timedelta(seconds=10)
    delivery_timeout: timedelta = timedelta(seconds=30)  # from submit to acknowledged, or LogUnavailable

    # reading
    timeout: timedelta = timedelta(seconds=10)  # most that one call waits for the broker
    prefetch_bytes: int = 32 << 20  # read ahead, over all partitions of one channel
    fetch_max_wait: timedelta = timedelta(milliseconds=100)  # longest the broker holds an empty fetch
    ingest: Literal["thread", "process"] = "thread"  # process: parsing does not take this interpreter's lock

    # groups
    session_timeout: timedelta = timedelta(seconds=10)  # a member silent for so long has lost its partitions
    max_silence: timedelta = timedelta(seconds=300)  # a stage that has not asked for its partitions is stuck

    is_control: Callable[[str], bool] = lambda topic: topic.rpartition(".")[2] in ("ledger", "fleet")
    interrupted: Callable[[], bool] = lambda: (
        False
    )  # looked at in every wait: True ends it with LogUnavailable

    def __post_init__(self) -> None:
        # So that one limit is enough to agree on with a cluster: no batch needs more room than one record may take.
        object.__setattr__(self, "batch_bytes", min(self.batch_bytes, self.max_record_bytes))

    def full(self, name: str) -> str:
        """The name on the broker of a topic or group."""
        return self.prefix + name

    def bare(self, name: str) -> str | None:
        """The log's name of a topic or group on the broker; None for one that is not this log's."""
        if not name.startswith(self.prefix) or name.startswith("__"):
            return None
        return name[len(self.prefix) :]
