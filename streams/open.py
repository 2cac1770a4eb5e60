"""Open a log by its URL. The only place that knows which implementations there are."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import unquote, urlsplit

from streams.checks import MAX_CLAIM_BYTES, MAX_RECORD_BYTES
from streams.claims import ClaimCheck
from streams.errors import LogError
from streams.log import EventLog
from streams.memory import MemoryLog, MemoryStore

_memory_stores: dict[str, MemoryStore] = {}  # memory://<name>: one per name and process, until it ends


def open_log(
    url: str,
    *,
    claims: str | os.PathLike[str] | None = None,
    max_claim_bytes: int = MAX_CLAIM_BYTES,
    **settings: Any,
) -> EventLog:
    """A log by its URL; `settings` go to its constructor.

    `claims`: the folder for values of more than `max_record_bytes`, up to `max_claim_bytes` (streams/claims.py).

    memory://NAME      in this process only; the same name gives the same records
    file:///PATH       embedded log in that folder, made if there is none (`readonly=True`: never)
    kafka://HOST:PORT[,HOST:PORT…][/PREFIX]
                       Apache Kafka; PREFIX stands before the names of all topics and groups
                       (`settings`: the fields of streams.kafka.settings.KafkaSettings)
    """
    log = _open(url, settings)
    if claims is None:
        return log
    return ClaimCheck(
        log,
        claims,
        max_record_bytes=settings.get("max_record_bytes", MAX_RECORD_BYTES),
        max_claim_bytes=max_claim_bytes,
        readonly=settings.get("readonly", False),
    )


def _open(url: str, settings: dict[str, Any]) -> EventLog:
    parts = urlsplit(url)
    if parts.scheme == "memory":
        store = _memory_stores.setdefault(parts.netloc + parts.path, MemoryStore())
        return MemoryLog(store, **settings)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise LogError(
                f"log url {url!r}: a file log needs an absolute path, such as file:///var/runs/log"
            )
        from streams.embedded.log import EmbeddedLog

        return EmbeddedLog(unquote(parts.path), **settings)
    if parts.scheme == "kafka":
        from streams.kafka.log import KafkaLog

        servers, prefix = kafka_address(url)
        return KafkaLog(servers, prefix, **settings)
    raise LogError(f"log url {url!r}: unknown scheme {parts.scheme!r}; known: memory, file, kafka")


def kafka_address(url: str) -> tuple[tuple[str, ...], str]:
    """`kafka://a:9092,b:9092/team.` → (("a:9092", "b:9092"), "team."). Raises LogError for what is no such URL."""
    parts = urlsplit(url)
    prefix = unquote(parts.path.removeprefix("/"))
    if parts.query or parts.fragment or "@" in parts.netloc:
        raise LogError(
            f"log url {url!r}: holds only brokers and a prefix; login and other settings go to [log.kafka]"
        )
    servers = tuple(server for server in parts.netloc.split(",") if server)
    for server in servers:
        host, colon, port = server.rpartition(":")
        if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
            raise LogError(f"log url {url!r}: {server!r} is not HOST:PORT, as in kafka://127.0.0.1:9092")
    if not servers:
        raise LogError(f"log url {url!r}: needs a broker, as in kafka://127.0.0.1:9092")
    return servers, prefix
