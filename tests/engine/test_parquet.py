"""Parquet files of an export: the readers that people use get the values that the log holds."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from replay.export.choice import Choice
from replay.export.export import Export
from replay.export.files import JsonLinesTable
from replay.export.tables import ARRAYS, TABLES
from streams.errors import ConfigError, LogError
from streams.events import RunFinished
from tests.support import recorded as run
from tests.support.events import put
from tests.support.exported import changed, recorded

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as parquet

from engine import parquet as tables
from engine.parquet import ParquetTable, require_pyarrow

LOGPROBS = [pytest.approx(each) for each in (-0.1, -0.2, 0.0, -0.4, -0.5)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("parquet") / "out"
    export(out, *recorded())
    return out


def export(out: Path, log, topics, **options) -> None:
    Export(log, topics, out, to="parquet", choice=Choice(), open_table=ParquetTable, **options).run()


def test_columns_have_the_types_that_readers_expect(folder):
    schema = parquet.read_schema(folder / "samples" / "part-00000.parquet")
    plain = {"uid": pa.string(), "prompt": pa.string(), "metadata": pa.string(), "step": pa.int64()}
    assert {name: schema.field(name).type for name in plain} == plain
    lists = {"prompt_ids": pa.int32(), "logprobs": pa.float32(), "loss_mask": pa.uint8()}
    assert {name: schema.field(name).type.value_type for name in lists} == lists
    run_fields = [field.name for field in schema.field("versions").type.value_type]
    assert run_fields == ["epoch", "version", "n_tokens"]
    assert schema.field("advantage").metadata[b"meaning"] == (
        b"that the run's estimator gave it (`ppo`: its reward, before the critic)"
    )


def test_parquet_and_json_lines_hold_the_same(folder, tmp_path):
    log, topics = recorded()
    Export(log, topics, tmp_path / "out", to="jsonl", choice=Choice(), open_table=JsonLinesTable).run()
    for name, table in TABLES.items():
        found = parquet.read_table(folder / name).to_pylist()
        lines = [json.loads(line) for line in (tmp_path / "out" / f"{name}.jsonl").read_text().splitlines()]
        clock = {"scored_ms", "closed_ms", "published_ms", "completed_ms", "at_ms", "in_queue_s"}
        arrays = [column.name for column in table.columns if column.kind in ARRAYS]
        for one, other in zip(found, lines, strict=True):
            assert list(one) == list(other) == table.names
            assert {k: v for k, v in one.items() if k not in clock} == {
                k: v for k, v in other.items() if k not in clock
            }
        assert all(len(row[name]) for row in found for name in arrays)


def test_pandas_reads_it(folder):
    pandas = pytest.importorskip("pandas")
    samples = pandas.read_parquet(folder / "samples")
    joined = samples.merge(pandas.read_parquet(folder / "steps"), on="step", suffixes=("", "_of_step"))
    assert len(joined) == 10
    row = joined[joined.uid == "0-3/1/0"].iloc[0]
    assert (row.limit, list(row.response_ids), list(row.logprobs)) == (1, [3, 4, 5, 6, 7], LOGPROBS)


def test_polars_reads_it(folder):
    polars = pytest.importorskip("polars")
    samples = polars.read_parquet(folder / "samples" / "*.parquet")
    assert samples["response_ids"].list.len().to_list() == [5] * 12
    assert samples.filter(polars.col("outcome") == "dropped")["uid"].to_list() == ["0-4/0/0", "0-4/1/0"]


def test_duckdb_reads_it(folder):
    duckdb = pytest.importorskip("duckdb")
    sql = f"""select g.group_id, sum(s.reward), any_value(g.metadata->>'level'), max(versions[1].version)
              from '{folder}/samples/*.parquet' s join '{folder}/groups/*.parquet' g using (group_id)
              where s.outcome = 'trained' group by 1 order by 1 limit 2"""
    assert duckdb.sql(sql).fetchall() == [("0-0", 1.0, "0", 0), ("0-1", 1.0, "1", 0)]


def test_datasets_reads_it(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    found = datasets.load_dataset(
        "parquet",
        data_files=str(folder / "samples" / "*.parquet"),
        split="train",
        cache_dir=str(tmp_path / "cache"),
    )
    assert len(found) == 12 and found[0]["response_ids"] == [3, 4, 5, 6, 7]


def test_rows_that_may_still_change_have_a_part_of_their_own(tmp_path):
    log, topics = recorded(lambda event: None if isinstance(event, RunFinished) else event)
    put(log, topics, "trajectories", changed(run.finished(5, 0), uid="0-6/0/0", group_id="0-6", seq=6))
    export(tmp_path / "out", log, topics)
    parts = {path.name: parquet.read_table(path).num_rows for path in (tmp_path / "out/samples").iterdir()}
    assert parts == {"part-00000.parquet": 10, "open.parquet": 3}, "the newest step, and group 6"
    put(log, topics, "ledger", RunFinished(epoch=1, step=3, version=3, reason="data_ended", finished_ms=1))
    export(tmp_path / "out", log, topics)
    parts = {path.name: parquet.read_table(path).num_rows for path in (tmp_path / "out/samples").iterdir()}
    assert parts == {"part-00000.parquet": 10, "part-00001.parquet": 3}


def test_a_table_without_rows_still_has_its_columns(folder):
    (path,) = (folder / "failures").iterdir()
    assert parquet.read_table(path).column_names == TABLES["failures"].names


def test_row_groups_stay_small_whatever_the_part_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "GROUP_BYTES", 4000)
    export(tmp_path / "out", *recorded())
    metadata = parquet.read_metadata(tmp_path / "out/samples/part-00000.parquet")
    assert metadata.num_rows == 12 and metadata.num_row_groups > 3


def test_a_part_that_was_taken_away_is_missed_by_name(tmp_path):
    log, topics = recorded()
    export(tmp_path / "out", log, topics)
    (tmp_path / "out/samples/part-00000.parquet").unlink()
    with pytest.raises(LogError, match=r"part-00000\.parquet was written and is gone: name a new folder"):
        export(tmp_path / "out", log, topics)


def test_without_pyarrow_the_extra_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "pyarrow"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'millstream\[export\]', or choose --to jsonl"):
        require_pyarrow()


def test_the_folder_holds_nothing_unfinished(folder):
    assert not [name for _, _, names in os.walk(folder) for name in names if name.endswith(".new")]
