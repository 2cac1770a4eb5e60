"""Where the rows of one table go. Two implementations: JSON Lines here, Parquet in engine/parquet.py.

    add, add, … ──► keep ──► add, … ──► keep ──► begin_open ──► add the open rows ──► finish

What was kept survives a kill: `keep` returns one number, which the state of the export remembers and which opens the
table again. What came after the last `keep`, the open rows too, is gone when the table is opened again.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from replay.export.tables import JSON, RUNS, TURNS, Row, Table
from streams.embedded.files import sync_folder
from streams.errors import LogError


class TableFile(abc.ABC):
    """One table. `written` is about the bytes of rows that were added since the last `keep`."""

    written = 0

    @abc.abstractmethod
    def add(self, row: Row) -> None: ...

    @abc.abstractmethod
    def keep(self) -> int:
        """Make everything added so far durable; returns what the state must remember."""

    def begin_open(self) -> None:  # noqa: B027 - a table in one file has nothing to do
        """After the last `keep`: the rows to come may still change, and the next export writes them anew."""

    @abc.abstractmethod
    def finish(self) -> None:
        """Leave whole files only."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of the files without keeping anything; harmless after `finish`."""


class JsonLinesTable(TableFile):
    """`<folder>/<table>.jsonl`, called `.partial` while it is being written. `keep` gives its size in bytes."""

    def __init__(self, folder: Path, table: Table, kept: int) -> None:
        """Raises LogError when the file does not have what was kept."""
        self._path = folder / f"{table.name}.jsonl"
        self._partial = folder / f"{table.name}.jsonl.partial"
        self._table = table
        self._encoder = msgspec.json.Encoder(enc_hook=_as_list)
        if self._path.exists():
            self._path.replace(self._partial)
        size = self._partial.stat().st_size if self._partial.exists() else 0
        if size < kept:
            raise LogError(f"{self._partial} has {size} bytes, {kept} were kept: name a new folder")
        self._file = open(self._partial, "ab")  # noqa: SIM115 - lives as long as the table
        self._file.truncate(kept)

    def add(self, row: Row) -> None:
        values = {column.name: cell(column.kind, row.get(column.name)) for column in self._table.columns}
        self.written += self._file.write(self._encoder.encode(values) + b"\n")

    def keep(self) -> int:
        self._file.flush()
        os.fsync(self._file.fileno())
        self.written = 0
        return os.fstat(self._file.fileno()).st_size

    def finish(self) -> None:
        self.keep()
        self.close()
        self._partial.replace(self._path)
        sync_folder(self._path.parent)

    def close(self) -> None:
        self._file.close()


def cell(kind: str, value: Any) -> Any:
    """A value as a file of plain types holds it."""
    if value is None:
        return None
    if kind == JSON:
        return msgspec.json.encode(value).decode()
    if kind == RUNS:
        return [{"epoch": epoch, "version": version, "n_tokens": n} for epoch, version, n in value]
    if kind == TURNS:
        return [{"start": start, "end": end, "who": who} for start, end, who in value]
    return value


def size_of(row: Row, heavy: Sequence[str]) -> int:
    """About as many bytes as the row takes in memory; `heavy` are its columns of arrays and texts."""
    size = 32 * len(row)
    for name in heavy:
        value = row.get(name)
        if isinstance(value, np.ndarray):
            size += value.nbytes
        elif isinstance(value, str):
            size += len(value)
    return size


def _as_list(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.astype(np.uint8).tolist() if value.dtype == np.bool_ else value.tolist()
    raise TypeError(f"a {type(value).__name__} has no form in JSON")
