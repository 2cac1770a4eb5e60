"""How tensors get from the trainer to the engines. Two questions are the whole surface.

Every transport moves what the store has published already: the file is the truth, and an engine that joins late
or missed a transfer catches up from it. Whatever the way, the engine verifies the digest of what it then holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from engine.weights.tensors import WeightsError
from streams.errors import ConfigError
from streams.events import WeightsPublished


class WeightTransport(Protocol):
    def send(self, published: WeightsPublished, tensors: Mapping[str, Any]) -> None:
        """Trainer: make these weights available. When it returns, the record may be appended to the ledger.

        Raises WeightsError when no receiver could get them; a receiver that is gone never makes it wait.
        """
        ...

    def fetch(self, published: WeightsPublished, run_dir: Path) -> Path:
        """Engine: a local file with these weights, full or a delta with its chain beside it (engine/weights/chain.py).

        It may still be damaged. Raises WeightsError.
        """
        ...


class DiskTransport:
    """A folder that trainer and engines share, in memory or on disk: the store's own file is the transfer."""

    def send(self, published: WeightsPublished, tensors: Mapping[str, Any]) -> None:
        if "disk" not in published.uris:
            raise WeightsError(f"version {published.version} has no file to share: {sorted(published.uris)}")

    def fetch(self, published: WeightsPublished, run_dir: Path) -> Path:
        uri = published.uris.get("disk")
        if uri is None:
            ways = ", ".join(sorted(published.uris)) or "no way at all"
            raise WeightsError(f"version {published.version} was not published on disk but by {ways}")
        path = run_dir / uri
        if not path.is_file():
            raise WeightsError(f"{path}: version {published.version} is not there (removed, or not shared)")
        return path


def make_transport(name: str) -> WeightTransport:
    """The transport of this name (`weights.transport`)."""
    if name == "disk":
        return DiskTransport()
    if name in ("distributed", "ipc"):
        raise ConfigError(f'weights.transport = "{name}": this version has only "disk"')
    raise ConfigError(f'weights.transport = "{name}": no such transport; known: "disk"')
