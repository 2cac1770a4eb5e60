"""Rows of a JSONL dataset, in an order that depends only on the seed.

`seq` counts dispatched groups over all passes: data_epoch = seq // rows, place = seq % rows, and the row at that
place is `permutation(seed, data_epoch)[place]`. So a group's identity survives every restart of the feeder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from streams.errors import ConfigError


class Row(NamedTuple):
    prompt: Any  # str, or a list of chat messages
    label: Any
    metadata: dict[str, Any]


class BadRow(NamedTuple):
    """A row that cannot become a task; the feeder publishes a TaskSkipped for it."""

    reason: str  # "bad_json", "missing_prompt", "bad_metadata"
    detail: str


class Dataset(Protocol):
    def __len__(self) -> int: ...

    def row(self, index: int) -> Row | BadRow: ...


class JsonLines:
    """One JSON object a line. Lines are found once (byte offsets) and read when asked for.

    Raises ConfigError when the file is missing or has no lines.
    """

    def __init__(
        self,
        path: Path,
        *,
        prompt_key: str = "prompt",
        label_key: str = "label",
        metadata_key: str = "metadata",
    ) -> None:
        self.path, self.prompt_key, self.label_key, self.metadata_key = (
            path,
            prompt_key,
            label_key,
            metadata_key,
        )
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise ConfigError(f"data.path = {str(path)!r}: cannot be opened ({error.strerror})") from error
        self._starts: list[int] = []
        at = 0
        for line in self._file:
            if line.strip():
                self._starts.append(at)
            at += len(line)
        if not self._starts:
            self._file.close()
            raise ConfigError(f"data.path = {str(path)!r}: the file has no rows")

    def __len__(self) -> int:
        return len(self._starts)

    def close(self) -> None:
        self._file.close()

    def row(self, index: int) -> Row | BadRow:
        self._file.seek(self._starts[index])
        line = self._file.readline()
        where = f"{self.path.name} row {index}"
        try:
            fields = msgspec.json.decode(line)
        except msgspec.DecodeError as error:
            return BadRow("bad_json", f"{where}: {error}")
        if not isinstance(fields, dict) or fields.get(self.prompt_key) in (None, "", []):
            present = ", ".join(sorted(fields)) if isinstance(fields, dict) else type(fields).__name__
            return BadRow("missing_prompt", f"{where}: needs a key {self.prompt_key!r}, has: {present}")
        metadata = fields.get(self.metadata_key, {})
        if not isinstance(metadata, dict):
            return BadRow("bad_metadata", f"{where}: {self.metadata_key!r} must be an object")
        return Row(fields[self.prompt_key], fields.get(self.label_key), metadata)


class Order:
    """Where a seq lies in the data: (data_epoch, row)."""

    def __init__(self, rows: int, *, seed: int, shuffle: bool) -> None:
        self.rows, self.seed, self.shuffle = rows, seed, shuffle
        self._epoch = -1
        self._places: np.ndarray = np.arange(rows)

    def __call__(self, seq: int) -> tuple[int, int]:
        data_epoch, place = divmod(seq, self.rows)
        if self.shuffle and data_epoch != self._epoch:
            # RandomState's streams are frozen by numpy's promise, so the order outlives upgrades
            state = np.random.RandomState((self.seed * 1_000_003 + data_epoch) % (1 << 32))
            self._places, self._epoch = state.permutation(self.rows), data_epoch
        return data_epoch, int(self._places[place])


def group_id(data_epoch: int, row: int) -> str:
    return f"{data_epoch}-{row}"


def row_of(group_id: str) -> int | None:
    """The dataset row of a group; None for an id that no feeder gave."""
    _, _, row = group_id.partition("-")
    return int(row) if row.isdecimal() else None
