"""A run as tables: the joins, what is chosen, and that neither a kill nor a run that goes on costs or doubles a row."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replay.export.choice import Choice, check_topics
from replay.export.export import Export, Exported
from replay.export.files import JsonLinesTable
from streams import codec
from streams.embedded.log import EmbeddedLog
from streams.errors import ConfigError
from streams.events import (
    BatchCut,
    DataEnded,
    DeadLetter,
    EngineJoined,
    EpochStarted,
    Event,
    GroupCompleted,
    LimitChanged,
    MembersMissing,
    Metrics,
    RolloutFailed,
    RunFinished,
    RunStarted,
    ScoringFailed,
    StepMeasured,
    StepSkipped,
    TrajectoryFinished,
)
from streams.log import EventLog, NewRecord, read_all
from streams.memory import MemoryLog
from streams.topics import ALL_TOPICS, Topics
from tests.support import recorded as run
from tests.support.events import put
from tests.support.exported import changed, recorded, reward

ROOT = Path(__file__).parents[2]
LONGEST_S = 60.0
EVERYTHING = Choice()


def unfinished(event: Event) -> Event | None:
    return None if isinstance(event, (RunFinished, DataEnded)) else event


def export(
    log: EventLog,
    topics: Topics,
    folder: Path,
    choice: Choice = EVERYTHING,
    *,
    open_table: Callable[..., Any] = JsonLinesTable,
    **options: Any,
) -> Exported:
    return Export(log, topics, folder, to="jsonl", choice=choice, open_table=open_table, **options).run()


def rows(folder: Path, table: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{table}.jsonl").read_text().splitlines()]


def by(name: str, found: list[dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    assert len({row[name] for row in found}) == len(found), f"{name} is not unique"
    return {row[name]: row for row in found}


# ---------------------------------------------------------------- joins
def test_a_sample_is_joined_with_its_reward_its_group_and_its_step(tmp_path):
    log, topics = recorded()
    export(log, topics, tmp_path / "out")
    row = by("uid", rows(tmp_path / "out", "samples"))["0-3/1/0"]
    assert row == {
        "uid": "0-3/1/0",
        "group_id": "0-3",
        "seq": 3,
        "index": 1,
        "attempt": 0,
        "partition": 1,
        "offset": 3,
        "outcome": "trained",
        "step": 2,
        "reason": None,
        "closed_ms": 2000,
        "reward": 1.0,
        "components": '{"format":0.5}',
        "scoring_failure": None,
        "advantage": 1.0,
        "staleness": 0,
        "n_trainable_tokens": 4,
        "prompt": '""',
        "prompt_ids": [1, 2],
        "response": "7",
        "response_ids": [3, 4, 5, 6, 7],
        "logprobs": [pytest.approx(each) for each in (-0.1, -0.2, 0.0, -0.4, -0.5)],
        "loss_mask": [1, 1, 0, 1, 1],
        "versions": [{"epoch": 1, "version": 1, "n_tokens": 5}],
        "turns": [],
        "n_prompt_tokens": 2,
        "n_response_tokens": 5,
        "finish_reason": "stop",
        "label": None,
        "metadata": "{}",
        "temperature": 1.0,
        "engine": "rollout-0",
        "claims": None,
        "dispatched_ms": 100,
        "started_ms": 200,
        "finished_ms": 401,
        "scored_ms": row["scored_ms"],
        "in_flight_s": 0.301,
        "in_queue_s": 1.599,
        "scoring_s": 0.25,
    }
    assert row["scored_ms"] > 0


def test_dropped_doubled_unused_and_open_samples_are_told_apart(tmp_path):
    """Group 4 is dropped. 0-1/0/0 lies twice in the log. Group 6 has no outcome. Group 2 was trained with 0-2/1/0,
    and its second attempt came too late."""
    log, topics = recorded(unfinished)
    put(log, topics, "trajectories", run.finished(1, 0), 1)
    late = changed(run.finished(2, 1), uid="0-2/1/1", attempt=1)
    late_offset = put(log, topics, "trajectories", late, 0)
    put(log, topics, "rewards", reward(2, 1, uid="0-2/1/1", attempt=1, trajectory_offset=late_offset), 0)
    put(log, topics, "tasks", run.task(6), 0)
    put(log, topics, "trajectories", changed(run.finished(5, 0), uid="0-6/0/0", group_id="0-6", seq=6), 0)
    done = export(log, topics, tmp_path / "out")
    found = rows(tmp_path / "out", "samples")
    assert len(found) == 15 == done.rows["samples"]
    outcomes = {(row["uid"], row["partition"], row["offset"]): row["outcome"] for row in found}
    assert outcomes["0-1/0/0", 1, 0] == "trained"
    assert outcomes["0-1/0/0", 1, 6] == "duplicate"
    assert outcomes["0-2/1/1", 0, late_offset] == "unused"
    assert outcomes["0-6/0/0", 0, late_offset + 1] == "open"
    dropped = [row for row in found if row["outcome"] == "dropped"]
    assert [(row["uid"], row["reason"], row["step"]) for row in dropped] == [
        ("0-4/0/0", "zero_variance", None),
        ("0-4/1/0", "zero_variance", None),
    ]
    assert {row["group_id"]: row["outcome"] for row in rows(tmp_path / "out", "groups")} == {
        **{f"0-{seq}": "trained" for seq in (0, 1, 2, 3, 5)},
        "0-4": "dropped",
        "0-6": "open",
    }


def test_groups_steps_and_drops_are_joined_with_what_they_became(tmp_path):
    log, topics = recorded()
    export(log, topics, tmp_path / "out")
    group = by("group_id", rows(tmp_path / "out", "groups"))["0-2"]
    assert (group["step"], group["outcome"], group["n_members"], group["reward_mean"]) == (
        2,
        "trained",
        2,
        0.5,
    )
    assert (group["reward_std"], group["label"], group["metadata"]) == (0.5, '"2"', '{"level":2}')
    step = by("step", rows(tmp_path / "out", "steps"))[2]
    assert (step["n_groups"], step["n_samples"], step["n_trainable_tokens"]) == (2, 4, 16)
    assert (step["staleness_max"], step["staleness_mean"], step["n_dropped"]) == (1, 0.5, 1)
    (drop,) = rows(tmp_path / "out", "drops")
    assert (drop["group_id"], drop["reason"], drop["step"], drop["staleness"]) == (
        "0-4",
        "zero_variance",
        2,
        None,
    )
    versions = by("version", rows(tmp_path / "out", "versions"))
    assert versions[3]["digest"] == "digest of 3" and len(versions) == 4


def test_a_step_that_changed_nothing_trains_nobody(tmp_path):
    log, topics = recorded(unfinished)
    put(log, topics, "ledger", StepSkipped(epoch=1, step=3, version=2, reason="nonfinite_loss"))
    put(log, topics, "ledger", RunFinished(epoch=1, step=3, version=2, reason="data_ended", finished_ms=1))
    export(log, topics, tmp_path / "out")
    assert by("step", rows(tmp_path / "out", "steps"))[3]["skipped"] == "nonfinite_loss"
    row = by("uid", rows(tmp_path / "out", "samples"))["0-5/0/0"]
    assert (row["outcome"], row["step"], row["reason"]) == ("skipped", 3, "nonfinite_loss")


def test_measures_of_a_step_stand_in_its_row(tmp_path):
    log, topics = recorded()
    measured = StepMeasured(
        step=1, epoch=1, version=0, names=["n_tokens"], n_samples=0, sums=b"", values={"loss": 0.5}
    )
    put(log, topics, "metrics", measured)
    put(log, topics, "metrics", Metrics(source="trainer", values={"loss": 0.5, "lr": 0.1}, step=1, at_ms=7))
    export(log, topics, tmp_path / "out")
    assert json.loads(by("step", rows(tmp_path / "out", "steps"))[1]["metrics"]) == {"loss": 0.5}
    gauges = [(row["name"], row["value"], row["step"]) for row in rows(tmp_path / "out", "metrics")]
    assert gauges == [("loss", 0.5, 1), ("lr", 0.1, 1)]


def test_everything_that_is_no_row_elsewhere_is_a_failure(tmp_path):
    log, topics = recorded()
    member = {
        name: getattr(reward(0, 0), name) for name in ("seq", "index", "attempt", "n_samples", "task_offset")
    }
    member |= {"uid": "0-0/0/0", "group_id": "0-0"}
    put(log, topics, "trajectories", RolloutFailed(**member, reason="aborted", engine="rollout-0"))
    failed = ScoringFailed(**member, stage="reward", reason="timeout", detail="10 s", trajectory_offset=6)
    put(log, topics, "rewards", failed)
    put(log, topics, "rewards", reward(0, 0))
    put(log, topics, "groups", MembersMissing(**_group(0), indices=[1], attempt=1, reason="member_missing"))
    put(log, topics, "ledger", EpochStarted(producer="other", started_ms=1))
    put(log, topics, "ledger", run.cut(4, [0], [3, 3]))
    letter = DeadLetter(
        topic="run.trajectories",
        partition=0,
        offset=6,
        raw=b"",
        stage="reward",
        reason="conflict",
        detail="another body",
        raw_headers=[("id", b"0-0/0/0")],
    )
    put(log, topics, "dead", letter)
    put(log, topics, "tasks", run.task(0))
    log.append("run.fleet", 0, [NewRecord(b"not an event")])
    unknown = NewRecord(b"\x81\xa4type\xa6teapot", (("type", b"teapot"),))
    log.append("run.groups", 1, [unknown])
    export(log, topics, tmp_path / "out")
    found = rows(tmp_path / "out", "failures")
    assert [(row["topic"], row["type"], row["reason"]) for row in found] == [
        ("tasks", "task_dispatched", "duplicate"),
        ("trajectories", "rollout_failed", "aborted"),
        ("rewards", "scoring_failed", "timeout"),
        ("rewards", "reward_assigned", "duplicate"),
        ("groups", "members_missing", "member_missing"),
        ("groups", "teapot", "unknown type"),
        ("ledger", "batch_cut", "void"),
        ("fleet", None, "unreadable"),
        ("dead", "dead_letter", "conflict"),
    ]
    assert len(rows(tmp_path / "out", "steps")) == 3
    assert (found[-1]["uid"], found[-1]["detail"]) == ("0-0/0/0", "run.trajectories/0:6: another body")


def _group(seq: int) -> dict[str, Any]:
    return {"group_id": f"0-{seq}", "seq": seq, "task_offset": 0}


def test_a_sample_whose_columns_do_not_agree_is_a_failure(tmp_path):
    broken = changed(run.finished(0, 0), n_response_tokens=4)
    log, topics = recorded(
        lambda event: (
            broken
            if getattr(event, "uid", "") == "0-0/0/0" and "finish" in str(type(event)).lower()
            else event
        )
    )
    export(log, topics, tmp_path / "out")
    (row,) = rows(tmp_path / "out", "failures")
    assert (row["uid"], row["reason"]) == ("0-0/0/0", "unreadable")
    assert "length_mismatch" in row["detail"]
    assert len(rows(tmp_path / "out", "samples")) == 11


def test_a_damaged_record_and_one_of_a_newer_schema_cost_one_row_each(tmp_path):
    topics = Topics("run", 1)
    with EmbeddedLog(tmp_path / "log") as log:
        topics.create(log)
        for index in range(4):
            put(log, topics, "trajectories", run.finished(0, index))
        newer = (("schema", b"9.0"), ("type", b"trajectory_finished"), ("id", b"0-7/0/0"))
        log.append("run.trajectories", 0, [NewRecord(b"?", newer)])
    (segment,) = (tmp_path / "log/topics/run.trajectories/0").glob("*.log")
    content = bytearray(segment.read_bytes())
    content[content.rindex(b"0-0/1/0")] ^= 1
    segment.write_bytes(content)
    with EmbeddedLog(tmp_path / "log", readonly=True) as log:
        export(log, topics, tmp_path / "out")
    assert uids(tmp_path / "out") == ["0-0/0/0", "0-0/2/0", "0-0/3/0"]
    damaged, newer_row = rows(tmp_path / "out", "failures")
    assert (damaged["offset"], damaged["reason"], damaged["type"]) == (1, "unreadable", None)
    assert "run.trajectories/0: record 1 is damaged" in damaged["detail"]
    assert (newer_row["offset"], newer_row["type"]) == (4, "trajectory_finished")
    assert "schema 9.0 is newer than this reader's 1." in newer_row["detail"]


def test_engines_have_a_table(tmp_path):
    log, topics = recorded()
    put(log, topics, "fleet", EngineJoined(engine="rollout-1", replica=1, host="h", pid=3, at_ms=5))
    export(log, topics, tmp_path / "out")
    found = rows(tmp_path / "out", "fleet")
    assert [(row["type"], row["engine"], row["version"]) for row in found[:2]] == [
        ("engine_ready", "rollout-0", 0),
        ("engine_ready", "rollout-0", 1),
    ]
    assert (found[-1]["type"], found[-1]["replica"], found[-1]["at_ms"]) == ("engine_joined", 1, 5)


# ---------------------------------------------------------------- what is chosen
def uids(folder: Path) -> list[str]:
    return [row["uid"] for row in rows(folder, "samples")]


def test_a_condition_sees_the_joined_columns_also_inside_json_and_arrays(tmp_path):
    log, topics = recorded(
        lambda event: (
            changed(event, metadata={"level": event.seq % 3})
            if isinstance(event, TrajectoryFinished)
            else event
        )
    )
    where = 'outcome == "trained" and reward > 0.5 and metadata.level == 2 and 7 in response_ids'
    done = export(log, topics, tmp_path / "out", Choice(where=where))
    assert uids(tmp_path / "out") == ["0-2/1/0", "0-5/1/0"]
    assert done.rows == {**dict.fromkeys(done.rows, 0), "samples": 2}


def test_an_array_equals_the_list_that_is_written_in_the_condition(tmp_path):
    log, topics = recorded()
    export(log, topics, tmp_path / "out", Choice(where="response_ids == [3, 4, 5, 6, 7] and index == 0"))
    assert len(uids(tmp_path / "out")) == 6


def test_rows_of_a_step_belong_to_it_and_the_others_to_its_time(tmp_path):
    log, topics = recorded(
        lambda event: changed(event, finished_ms=1500) if isinstance(event, TrajectoryFinished) else event
    )
    export(log, topics, tmp_path / "out", Choice(from_step=2, to_step=2))
    assert [row["step"] for row in rows(tmp_path / "out", "steps")] == [2]
    assert {row["group_id"] for row in rows(tmp_path / "out", "samples")} == {"0-2", "0-3", "0-4"}
    assert [row["version"] for row in rows(tmp_path / "out", "versions")] == [2]


def test_time_is_a_half_open_stretch(tmp_path):
    log, topics = recorded()
    export(log, topics, tmp_path / "out", Choice(since_ms=401, until_ms=402))
    assert [row["index"] for row in rows(tmp_path / "out", "samples")] == [1] * 6


def test_a_topic_gives_its_own_tables_and_its_failures(tmp_path):
    log, topics = recorded()
    done = export(log, topics, tmp_path / "out", Choice(topics=("ledger",)))
    assert {name: count for name, count in done.rows.items() if count} == {
        "steps": 3,
        "drops": 1,
        "versions": 4,
    }
    assert sorted(done.rows) == ["drops", "failures", "steps", "versions"]
    done = export(log, topics, tmp_path / "groups", Choice(topics=("groups",)))
    assert done.rows == {"groups": 6, "failures": 0}


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        (Choice(where="rewrad > 1"), "no field 'rewrad' in these tables; did you mean 'reward'"),
        (Choice(where="reward >"), "--where 'reward >', character 9"),
        (Choice(from_step=9), "--from-step 9: the run has steps 1 to 3"),
        (Choice(to_step=4), "--to-step 4: the run has steps 1 to 3"),
        (Choice(from_step=3, to_step=2), "--from-step 3 is after --to-step 2"),
        (Choice(since_ms=5, until_ms=5), "--since 5 is not before --until 5"),
    ],
)
def test_a_choice_that_cannot_be_met_is_refused_before_anything_is_written(tmp_path, choice, text):
    log, topics = recorded()
    with pytest.raises(ConfigError, match=text.replace(">", r"\>")):
        export(log, topics, tmp_path / "out", choice)
    assert not (tmp_path / "out").exists()


def test_a_topic_that_there_is_not_is_refused_by_name():
    assert check_topics(["rewards", "tasks"]) == ("tasks", "rewards")
    with pytest.raises(ConfigError, match=r"--topic reward: no such topic; there are tasks, trajectories"):
        check_topics(["reward"])


def test_a_run_without_a_record_gives_empty_tables(tmp_path):
    log, topics = MemoryLog(), Topics("run", 2)
    topics.create(log)
    done = export(log, topics, tmp_path / "out")
    assert set(done.rows.values()) == {0}
    assert (tmp_path / "out" / "samples.jsonl").read_bytes() == b""


# ---------------------------------------------------------------- going on
def contents(folder: Path) -> dict[str, list[str]]:
    """Table → its rows, in no order: open rows come last."""
    return {path.name: sorted(path.read_text().splitlines()) for path in folder.glob("*.jsonl")}


def test_a_run_that_went_on_adds_what_is_new_and_settles_what_was_open(tmp_path):
    late: list[Event] = []

    def early(event: Event) -> Event | None:
        is_late = isinstance(event, BatchCut) and event.step == 3
        if is_late or late:
            late.append(event)
        return None if is_late or late else event

    log, topics = recorded(early)
    first = export(log, topics, tmp_path / "out")
    assert first.open_rows["samples"] == 6, "groups 2 and 3 are of the newest step, 5 has no outcome"
    assert by("uid", rows(tmp_path / "out", "samples"))["0-5/0/0"]["outcome"] == "open"
    again = export(log, topics, tmp_path / "out")
    assert again.goes_on and not any(again.added.values())
    assert again.rows == first.rows
    for event in [event for event in late if not isinstance(event, type(run.ready(0)))]:
        put(log, topics, "ledger", event)
    for event in [event for event in late if isinstance(event, type(run.ready(0)))]:
        put(log, topics, "fleet", event)
    second = export(log, topics, tmp_path / "out")
    assert second.goes_on and second.added["samples"] == 6 and not any(second.open_rows.values())
    export(log, topics, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    third = export(log, topics, tmp_path / "out")
    assert third.rows == second.rows and not any(third.added.values())


class Killed(Exception):
    pass


@pytest.mark.parametrize("at", range(0, 60, 3))
def test_a_crash_at_any_moment_loses_and_doubles_nothing(tmp_path, at):
    """Ends the first export at its `at`-th call of a table; the second goes on."""
    log, topics = recorded(unfinished)
    put(log, topics, "trajectories", run.finished(1, 0), 1)
    calls = 0

    class Mortal(JsonLinesTable):
        def add(self, row: Any) -> None:
            self._call()
            super().add(row)

        def keep(self) -> int:
            self._call()
            return super().keep()

        def _call(self) -> None:
            nonlocal calls
            calls += 1
            if calls > at:
                raise Killed

    with pytest.raises(Killed):
        export(log, topics, tmp_path / "out", open_table=Mortal, part_bytes=1)
    export(log, topics, tmp_path / "out")
    export(log, topics, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


DRIVER = """
import sys, time
from pathlib import Path
from replay.export.choice import Choice
from replay.export.export import Export
from replay.export.files import JsonLinesTable
from engine.parquet import ParquetTable
from streams.embedded.log import EmbeddedLog
from streams.topics import Topics

kind = {"jsonl": JsonLinesTable, "parquet": ParquetTable}[sys.argv[3]]

class Slow(kind):
    def keep(self):
        time.sleep(0.01)
        return super().keep()

with EmbeddedLog(sys.argv[1], readonly=True) as log:
    Export(log, Topics("run", 2), Path(sys.argv[2]), to=sys.argv[3], choice=Choice(), open_table=Slow,
           part_bytes=20_000).run()
"""


@pytest.fixture(scope="module")
def long_log(tmp_path_factory) -> Path:
    """An embedded log of a finished run with 2400 samples, 400 of them copies."""
    path = tmp_path_factory.mktemp("long") / "log"
    with EmbeddedLog(path, fsync="never") as log:
        topics = Topics("run", 2)
        topics.create(log)
        for partition in range(2):
            found = [
                run.finished(number // 2 * 2 + partition, number % 2, version=0) for number in range(1000)
            ]
            records = [codec.encode(event, producer="test") for event in [*found, *found[:200]]]
            log.append("run.trajectories", partition, records)
        for event in (run.ledger()[1], run.ledger()[-1]):
            put(log, topics, "ledger", changed(event, epoch=0) if isinstance(event, RunFinished) else event)
    return path


@pytest.mark.parametrize("to", ["jsonl", "parquet"])
def test_an_export_that_was_killed_goes_on_where_it_was(tmp_path, long_log, to):
    if to == "parquet":
        pytest.importorskip("pyarrow")
    out = tmp_path / "out"
    command = [sys.executable, "-c", DRIVER, str(long_log), str(out), to]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + LONGEST_S
    try:
        while _positions(out) < 1000:
            assert time.monotonic() < deadline and process.poll() is None, (
                "it ended before it could be killed"
            )
            time.sleep(0.001)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(LONGEST_S)
    state = json.loads((out / "export.json").read_text())
    assert not state["finished"] and 500 <= state["rows"]["samples"] < 2400
    subprocess.run(command, cwd=ROOT, check=True, timeout=LONGEST_S)
    state = json.loads((out / "export.json").read_text())
    assert state["finished"]
    places = _places(out, to)
    assert len(places) == 2400 and len(set(places)) == 2400
    assert sum(outcome == "duplicate" for *_, outcome in places) == 400


def _positions(folder: Path) -> int:
    try:
        return sum(json.loads((folder / "export.json").read_text())["positions"].values())
    except FileNotFoundError:
        return 0


def _places(folder: Path, to: str) -> list[tuple[int, int, str]]:
    if to == "jsonl":
        found = rows(folder, "samples")
    else:
        import pyarrow.parquet as parquet

        assert not list(folder.rglob("*.new"))
        found = parquet.read_table(folder / "samples").to_pylist()
    return [(row["partition"], row["offset"], row["outcome"]) for row in found]


# ---------------------------------------------------------------- the folder
def test_another_choice_goes_to_another_folder(tmp_path):
    log, topics = recorded()
    export(log, topics, tmp_path / "out")
    with pytest.raises(
        ConfigError, match=r"holds another export \(where was '', is 'seq > 1'\): name a new folder"
    ):
        export(log, topics, tmp_path / "out", Choice(where="seq > 1"))


def test_a_folder_with_other_things_is_left_alone(tmp_path):
    log, topics = recorded()
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty and holds no export"):
        export(log, topics, tmp_path)
    with pytest.raises(ConfigError, match="is a file; name a folder"):
        export(log, topics, tmp_path / "notes.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_state_that_cannot_be_read_is_refused(tmp_path):
    log, topics = recorded()
    (tmp_path / "export.json").write_text('{"format": 1')
    with pytest.raises(ConfigError, match=r"export\.json is not the state of an export"):
        export(log, topics, tmp_path)
    (tmp_path / "export.json").write_text('{"format": 9, "run": "run", "to": "jsonl", "choice": {}}')
    with pytest.raises(ConfigError, match="has format 9, this version knows 1"):
        export(log, topics, tmp_path)


def test_two_exports_do_not_write_to_one_folder(tmp_path):
    log, topics = recorded()

    class Nested(JsonLinesTable):
        def finish(self) -> None:
            with pytest.raises(ConfigError, match="another export is writing to it"):
                export(log, topics, tmp_path / "out")
            super().finish()

    done = export(log, topics, tmp_path / "out", open_table=Nested)
    assert done.rows["samples"] == 12


def test_records_that_retention_removed_are_counted(tmp_path):
    log, topics = recorded()
    log.truncate_before("run.trajectories", 0, 2)
    done = export(log, topics, tmp_path / "out")
    assert (done.rows["samples"], done.lost) == (10, 0), "what was gone before is no loss of this export"


def test_an_export_writes_nothing_into_the_log(tmp_path):
    log, topics = recorded()
    put(log, topics, "ledger", LimitChanged(limit=3))
    before = {word: list(read_all(log, topics.name(word), 0, 0)) for word in ALL_TOPICS}
    export(log, topics, tmp_path / "out")
    assert {word: list(read_all(log, topics.name(word), 0, 0)) for word in ALL_TOPICS} == before
    assert log.groups() == []


def test_completed_groups_are_read_once_each(tmp_path):
    """A second collector's copy of a completion changes no row."""
    log, topics = recorded()
    copy = GroupCompleted(
        group_id="0-0", seq=0, task_offset=0, n_samples=2, members=run.completed(1).members[:1]
    )
    put(log, topics, "groups", copy, 0)
    export(log, topics, tmp_path / "out")
    assert by("group_id", rows(tmp_path / "out", "groups"))["0-0"]["n_members"] == 2


def test_another_run_of_the_same_name_is_not_taken_for_more_of_this_one(tmp_path):
    def later(event: Event) -> Event:
        return changed(event, started_ms=2000) if isinstance(event, RunStarted) else event

    log, topics = recorded()
    export(log, topics, tmp_path / "out")
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    another, _ = recorded(later)
    with pytest.raises(ConfigError, match="holds an export of another run that is called run, too"):
        export(another, topics, tmp_path / "out")
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
