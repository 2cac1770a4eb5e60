"""Open a log by its URL. The only place that knows which implementations there are."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urlsplit

from streams.errors import LogError
from streams.log import EventLog
from streams.memory import MemoryLog, MemoryStore

_memory_stores: dict[str, MemoryStore] = {}  # memory://<name>: one per name and process, until it ends


def open_log(url: str, **settings: Any) -> EventLog:
    """A log by its URL; `settings` go to its constructor.

    memory://NAME      in this process only; the same name gives the same records
    file:///PATH       embedded log in that folder, made if there is none (`readonly=True`: never)
    kafka://HOST:PORT  Apache Kafka
    """
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
        raise LogError(
            f"log url {url!r}: this build has no Kafka log yet; it will need the extra: "
            "pip install 'millstream[kafka]'. Use file:///PATH or memory://NAME"
        )
    raise LogError(f"log url {url!r}: unknown scheme {parts.scheme!r}; known: memory, file, kafka")
