"""The settings of a small single node, as the text of a server.properties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from streams.broker.ports import HOST
from streams.checks import MAX_RECORD_BYTES

NODE_ID = 1
CLIENT = "PLAINTEXT"  # name of the listener for clients
CONTROLLER = "CONTROLLER"

# A batch is larger than the record in it, by its own header and the record's lengths and names.
MAX_BATCH_BYTES = MAX_RECORD_BYTES + (1 << 20)

SMALL_AND_QUICK = {
    # One node: internal topics have factor 3 by default and would never become available.
    "default.replication.factor": 1,
    "min.insync.replicas": 1,
    "offsets.topic.replication.factor": 1,
    "offsets.topic.num.partitions": 1,
    "transaction.state.log.replication.factor": 1,
    "transaction.state.log.min.isr": 1,
    "transaction.state.log.num.partitions": 1,
    "share.coordinator.state.topic.replication.factor": 1,
    "share.coordinator.state.topic.min.isr": 1,
    "share.coordinator.state.topic.num.partitions": 1,
    # Topics exist because somebody made them, with the settings they need.
    "auto.create.topics.enable": "false",
    "num.partitions": 1,
    # One size along the whole path.
    "message.max.bytes": MAX_BATCH_BYTES,
    "replica.fetch.max.bytes": MAX_BATCH_BYTES,
    "socket.request.max.bytes": 64 << 20,
    "queued.max.request.bytes": 128 << 20,  # of requests waiting to be handled: a quarter of the heap
    # Groups form at once, and tests may ask for short sessions.
    "group.initial.rebalance.delay.ms": 0,
    "group.min.session.timeout.ms": 1000,
    # Threads and buffers for two cores and a small heap.
    "num.network.threads": 2,
    "num.io.threads": 4,
    "background.threads": 2,
    "log.cleaner.threads": 1,
    "log.cleaner.dedupe.buffer.size": 2 << 20,  # 128 MiB by default; at least 1 MiB a thread
    "log.segment.bytes": 64 << 20,
    "log.retention.check.interval.ms": 30_000,
    # A node that comes back is let in only when its earlier self has left, or has been silent for a session: 9 s by
    # default, after a crash as after a stop without this farewell.
    "controlled.shutdown.enable": "true",
    "broker.session.timeout.ms": 2000,
    "broker.heartbeat.interval.ms": 500,
}


@dataclass(frozen=True)
class Listener:
    """One more port for clients, for tests of encryption and login.

    `properties` are Kafka's listener settings without their `listener.name.NAME.` prefix, as in
    `scram-sha-512.sasl.jaas.config` or `ssl.keystore.location`.
    """

    name: str  # capital letters, as in "SASL"
    protocol: str  # SSL, SASL_PLAINTEXT, SASL_SSL or PLAINTEXT
    properties: Mapping[str, str] = field(default_factory=dict)


def server_properties(
    log_dir: Path,
    ports: Mapping[str, int],
    listeners: Sequence[Listener] = (),
    extra: Mapping[str, object] | None = None,
) -> str:
    """`ports` has one for each listener, `CLIENT` and `CONTROLLER` included; `extra` wins over everything here."""
    protocols = {
        CLIENT: "PLAINTEXT",
        CONTROLLER: "PLAINTEXT",
        **{each.name: each.protocol for each in listeners},
    }
    addresses = {name: f"{name}://{HOST}:{ports[name]}" for name in protocols}
    settings: dict[str, object] = {
        "process.roles": "broker,controller",
        "node.id": NODE_ID,
        # The quorum is named here and not in the data, so that a node can come back with another controller port.
        "controller.quorum.voters": f"{NODE_ID}@{HOST}:{ports[CONTROLLER]}",
        "controller.listener.names": CONTROLLER,
        "inter.broker.listener.name": CLIENT,
        "listeners": ",".join(addresses.values()),
        "advertised.listeners": ",".join(
            address for name, address in addresses.items() if name != CONTROLLER
        ),
        "listener.security.protocol.map": ",".join(f"{name}:{kind}" for name, kind in protocols.items()),
        "log.dirs": log_dir,
        **SMALL_AND_QUICK,
    }
    for listener in listeners:
        for key, value in listener.properties.items():
            settings[f"listener.name.{listener.name.lower()}.{key}"] = value
    settings.update(extra or {})
    return "".join(f"{_escaped(key)}={_escaped(str(value))}\n" for key, value in settings.items())


def _escaped(text: str) -> str:
    """As Java reads a properties file: ISO 8859-1, with a backslash before what would end a line or mean more."""
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return "".join(c if " " <= c <= "~" else "".join(f"\\u{unit:04x}" for unit in _utf16(c)) for c in text)


def _utf16(character: str) -> list[int]:
    raw = character.encode("utf-16-be")
    return [int.from_bytes(raw[at : at + 2], "big") for at in range(0, len(raw), 2)]
