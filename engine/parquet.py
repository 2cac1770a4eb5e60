"""A table of an export as Parquet files: `<folder>/<table>/part-00000.parquet`, … and `open.parquet`.

Each file appears whole, by rename. Rows are gathered into row groups of a few MiB, so memory stays small whatever a
part holds. pyarrow is asked for only here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from replay.export.files import TableFile, cell, size_of
from replay.export.tables import BOOL, FLOAT, FLOATS, IDS, INT, JSON, MASK, RUNS, TEXT, TURNS, Row, Table
from streams.embedded.files import sync_folder
from streams.errors import ConfigError, LogError

if TYPE_CHECKING:
    import pyarrow

GROUP_BYTES = 4 << 20  # of a row group in memory
OPEN = "open.parquet"  # rows that may still change
_EMPTY = "part-empty.parquet"  # a table without rows still says what its columns are


def require_pyarrow() -> None:
    """Raises ConfigError, which names the extra."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--to parquet needs pyarrow, which cannot be imported ({error}): pip install 'millstream[export]', "
            "or choose --to jsonl"
        ) from None


class ParquetTable(TableFile):
    """`keep` gives the number of parts."""

    def __init__(self, folder: Path, table: Table, kept: int) -> None:
        """Raises LogError when a part that was kept is missing."""
        self._folder, self._table, self._parts = folder / table.name, table, kept
        self._folder.mkdir(exist_ok=True)
        self._schema = schema_of(table)
        self._heavy = [
            column.name for column in table.columns if column.kind in (IDS, FLOATS, MASK, TEXT, JSON)
        ]
        self._rows: list[Row] = []
        self._bytes = 0  # of these
        self._writer: Any = None
        self._is_open_part = False
        wanted = {f"part-{number:05d}.parquet" for number in range(kept)}
        there = {path.name for path in self._folder.iterdir()}
        if missing := sorted(wanted - there):
            raise LogError(f"{self._folder / missing[0]} was written and is gone: name a new folder")
        for name in there - wanted:
            if name.endswith((".parquet", ".parquet.new")):
                (self._folder / name).unlink()

    def add(self, row: Row) -> None:
        size = size_of(row, self._heavy)
        self._rows.append(row)
        self._bytes += size
        self.written += size
        if self._bytes >= GROUP_BYTES:
            self._write_group()

    def keep(self) -> int:
        if self._end_part(f"part-{self._parts:05d}.parquet"):
            self._parts += 1
        self.written = 0
        return self._parts

    def begin_open(self) -> None:
        self._is_open_part = True

    def finish(self) -> None:
        if not self._end_part(OPEN) and not self._parts:
            self._open_writer()
            self._end_part(_EMPTY)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            self._unfinished.unlink(missing_ok=True)

    @property
    def _unfinished(self) -> Path:
        return self._folder / "unfinished.parquet.new"

    def _open_writer(self) -> None:
        import pyarrow.parquet as parquet

        if self._writer is None:
            self._writer = parquet.ParquetWriter(self._unfinished, self._schema, compression="zstd")

    def _write_group(self) -> None:
        import pyarrow

        self._open_writer()
        columns = [
            array_of(field.type, column.kind, [row.get(column.name) for row in self._rows])
            for field, column in zip(self._schema, self._table.columns, strict=True)
        ]
        self._writer.write_table(pyarrow.Table.from_arrays(columns, schema=self._schema))
        self._rows, self._bytes = [], 0

    def _end_part(self, name: str) -> bool:
        """Close the file and give it its name; False when there is none."""
        if self._rows:
            self._write_group()
        if self._writer is None:
            return False
        self._writer.close()
        self._writer = None
        with open(self._unfinished, "rb+") as file:
            os.fsync(file.fileno())
        self._unfinished.replace(self._folder / name)
        sync_folder(self._folder)
        return True


def schema_of(table: Table) -> pyarrow.Schema:
    """The columns of a table in Arrow's types; the meaning of each is kept with it."""
    import pyarrow as pa

    run = pa.struct([("epoch", pa.int64()), ("version", pa.int64()), ("n_tokens", pa.int64())])
    turn = pa.struct([("start", pa.int64()), ("end", pa.int64()), ("who", pa.string())])
    types = {
        TEXT: pa.string(),
        JSON: pa.string(),
        INT: pa.int64(),
        FLOAT: pa.float64(),
        BOOL: pa.bool_(),
        IDS: pa.list_(pa.int32()),
        FLOATS: pa.list_(pa.float32()),
        MASK: pa.list_(pa.uint8()),
        RUNS: pa.list_(run),
        TURNS: pa.list_(turn),
    }
    return pa.schema(
        [
            pa.field(
                column.name,
                types[column.kind],
                metadata={"meaning": column.meaning} if column.meaning else None,
            )
            for column in table.columns
        ]
    )


_DTYPES = {IDS: np.int32, FLOATS: np.float32, MASK: np.uint8}


def array_of(kind_type: pyarrow.DataType, kind: str, values: list[Any]) -> pyarrow.Array:
    """One column of a row group. Arrays go over as they are, without a Python object for each token."""
    import pyarrow as pa

    if kind in (JSON, RUNS, TURNS):
        values = [cell(kind, value) for value in values]
    if kind not in _DTYPES:
        return pa.array(values, kind_type)
    arrays = [np.asarray(value, _DTYPES[kind]) for value in values]
    offsets = np.zeros(len(arrays) + 1, np.int32)
    np.cumsum([len(array) for array in arrays], out=offsets[1:])
    flat = np.concatenate(arrays) if arrays else np.zeros(0, _DTYPES[kind])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))
