"""What one node does for another's doctor, and nothing else. Both ways to reach a node carry exactly these.

    hello, clock, listen, connect, reach, place, see, remove, digest

It connects to nobody but who asks and the addresses in its own configuration, and touches no file but its own nonces in
folders that its own configuration names.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from engine.doctor.about import versions
from engine.doctor.embedded import PREFIX, existing, write_synced
from engine.doctor.network import interfaces, refusal
from engine.settings import Config
from streams.open import kafka_address

SEEN_S = 5.0  # a file of one node must be seen by the others within this
LISTEN_S = 15.0
CONNECT_S = 5.0
_NONCE = re.compile(re.escape(PREFIX) + r"[0-9a-f]{8,32}")
_SMALL = (
    64 << 20
)  # files of a model folder up to this size are compared by their bytes, the others by their size


class Refused(Exception):
    """Asked for something that this node does not do."""


class Operations:
    """`folders`: those of the configuration, by name; files are touched in them alone. `addresses` (HOST:PORT): of the
    services that the configuration names."""

    def __init__(self, folders: Mapping[str, str], addresses: Collection[str] = ()) -> None:
        self._folders = {name: Path(folder) for name, folder in folders.items() if folder}
        self._addresses = frozenset(addresses)

    def ask(self, operation: str, asker: str = "", **arguments: Any) -> Any:
        """One operation by its name; `asker` is the address that asks. Raises Refused, OSError."""
        known: dict[str, Callable[..., Any]] = {
            "hello": self.hello,
            "clock": time.time,
            "listen": self.listen,
            "reach": self.reach,
            "place": self.place,
            "see": self.see,
            "remove": self.remove,
            "digest": self.digest,
        }
        if operation == "connect":
            return self.connect(asker=asker, **arguments)
        if operation not in known:
            raise Refused(f"no operation {operation!r}; known: connect, {', '.join(known)}")
        return known[operation](**arguments)

    def hello(self) -> dict[str, Any]:
        return {
            "host": socket.gethostname(),
            "interfaces": interfaces(),
            "versions": versions(),
            "folders": {name: str(folder) for name, folder in self._folders.items()},
        }

    def listen(self, port: int = 0, at: str = "") -> int:
        """Take one connection within LISTEN_S, then close; returns the port at once. Raises OSError when it is taken.

        `at`: the address at which it will be sought; only a loopback one narrows where it listens.
        """
        server = socket.create_server((at if at.startswith("127.") else "", port))
        server.settimeout(LISTEN_S)

        def accept() -> None:
            with server:
                try:
                    connection, _ = server.accept()
                    connection.close()
                except OSError:
                    pass  # nobody came

        threading.Thread(target=accept, daemon=True).start()
        return int(server.getsockname()[1])

    def connect(self, host: str, port: int, asker: str = "") -> str:
        """ "" when the connection was taken, else why not."""
        if asker and host != asker:
            raise Refused(f"connects to whoever asks ({asker}) alone, asked for {host}")
        return refusal(f"{host}:{port}", CONNECT_S)

    def reach(self, address: str) -> str:
        """ "" when a service of its own configuration takes a connection, else why not."""
        if address not in self._addresses:
            named = ", ".join(sorted(self._addresses)) or "none"
            raise Refused(f"{address} is no address in this node's configuration; it has {named}")
        return refusal(address, CONNECT_S)

    def place(self, folder: str, name: str, text: str) -> None:
        write_synced(self._nonce(folder, name), text.encode())

    def see(self, folder: str, name: str) -> tuple[str, float]:
        """(text, seconds until it was there); ("", SEEN_S) when it is not seen in time."""
        file, began = self._nonce(folder, name), time.monotonic()
        while (waited := time.monotonic() - began) < SEEN_S:
            try:
                return file.read_text(), waited
            except OSError:
                time.sleep(0.05)
        return "", SEEN_S

    def remove(self, folder: str, name: str) -> None:
        self._nonce(folder, name).unlink(missing_ok=True)

    def digest(self, folder: str, skip: Sequence[str] = ()) -> dict[str, str]:
        """File name → SHA-256 of the small ones, size of the others; {} when the folder is not there."""
        place = self._folder(folder)
        if not place.is_dir():
            return {}
        return {
            file.name: _digest(file)
            for file in sorted(place.iterdir())
            if file.is_file() and file.name not in skip and not file.name.startswith(".")
        }

    def _folder(self, folder: str) -> Path:
        if folder not in self._folders:
            raise Refused(
                f"no folder {folder!r} in this node's configuration; it has {', '.join(self._folders) or 'none'}"
            )
        return self._folders[folder]

    def _nonce(self, folder: str, name: str) -> Path:
        if not _NONCE.fullmatch(name):
            raise Refused(f"{name!r} is no nonce of millstream doctor")
        return existing(self._folder(folder)) / name


def _digest(file: Path) -> str:
    size = file.stat().st_size
    if size > _SMALL:
        return f"{size} bytes"
    return hashlib.sha256(file.read_bytes()).hexdigest()


def operations_of(config: Config) -> Operations:
    return Operations(folders_of(config.run.dir, config.model.path), services_of(config).values())


def services_of(config: Config) -> dict[str, str]:
    """Setting → HOST:PORT of what runs already: the servers that engines join, and the brokers."""
    found: dict[str, str] = {}
    if config.rollout.backend == "sglang" and config.rollout.sglang.url:
        for replica in range(config.rollout.replicas):
            url = urlsplit(config.rollout.sglang.url.replace("{replica}", str(replica)))
            port = url.port or (443 if url.scheme == "https" else 80)
            found[f"rollout.sglang.url of replica {replica}"] = f"{url.hostname}:{port}"
    if config.log.url.startswith("kafka:"):
        servers, _ = kafka_address(config.log.url)
        found |= {f"log.url, broker {place}": server for place, server in enumerate(servers)}
    return found


def folders_of(run_dir: str, model: str) -> dict[str, str]:
    """What two nodes must share or have alike."""
    return {"run.dir": os.path.abspath(run_dir), "model.path": os.path.abspath(model) if model else ""}
