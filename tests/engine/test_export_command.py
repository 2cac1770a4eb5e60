"""`millstream export` and `millstream import` as their users meet them."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import pytest

from engine.cli import DONE, FAILED, WRONG_USAGE, main
from engine.commands import rundir
from engine.config import Config, build_config, fingerprint, load_config
from engine.config_fields import replaced
from engine.portable import model_files, portable_config
from engine.roles import open_run_log, topics_of
from replay.ledger import RunView, read_run
from replay.slices.format import Manifest, SliceReader, SliceWriter
from streams.errors import ConfigError
from streams.events import CheckpointSaved
from streams.log import EventLog, read_all
from streams.topics import ALL_TOPICS
from tests.histories.make_histories import fenced


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    """A finished run of 6 or 7 steps on the embedded log, with a checkpoint after every second; it keeps two."""
    for _ in range(12):  # stages on real clocks: now and then the run ends before its second trainer begins
        with contextlib.suppress(pytest.fail.Exception):
            return fenced(tmp_path_factory.mktemp("exported"))
    raise AssertionError("no run came to its takeover in 12 tries")


@pytest.fixture
def run_dir(config) -> str:
    return config.run.dir


@pytest.fixture(scope="module")
def view(config) -> RunView:
    with open_run_log(config, readonly=True) as log:
        return read_run(log, topics_of(config))


@pytest.fixture(scope="module")
def checkpoint(config, view) -> CheckpointSaved:
    """The oldest that is kept."""
    return next(each for each in view.checkpoints if (Path(config.run.dir) / each.path).is_dir())


def told(capsys) -> str:
    return capsys.readouterr().err


# ---------------------------------------------------------------- tables
def test_tables_are_written_told_and_written_once(run_dir, view, tmp_path, capsys):
    command = ["export", run_dir, "--to", "jsonl", "--out", str(tmp_path / "out")]
    assert main(command) == DONE
    out, err = capsys.readouterr()
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["TABLE", "ROWS", "NEW", "OPEN"]
    assert {line[0]: line[1:] for line in lines}["steps"] == [str(view.step), str(view.step), "0"]
    assert f"written to {tmp_path}/out" in err
    assert main(command) == DONE
    out, err = capsys.readouterr()
    assert "was whole already: nothing is new" in err
    assert {line.split()[0]: line.split()[1:] for line in out.splitlines()}["steps"] == [
        str(view.step),
        "0",
        "0",
    ]


def test_the_folder_is_called_by_run_and_format_unless_it_is_named(run_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["export", run_dir, "--to", "jsonl", "--topic", "fleet"]) == DONE
    assert sorted(path.name for path in (tmp_path / "run-jsonl").iterdir()) == [
        "export.json",
        "failures.jsonl",
        "fleet.jsonl",
    ]


def test_a_time_after_the_end_says_that_there_is_nothing(run_dir, tmp_path, capsys):
    command = ["export", run_dir, "--to", "jsonl", "--since", "2400-01-01T00:00:00Z"]
    assert main([*command, "--out", str(tmp_path / "out")]) == DONE
    assert "no record of the run is in this choice" in told(capsys)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--to", "jsonl", "--groups", "0-1"], "--groups does not go with --to"),
        (["--to", "jsonl", "--with-model"], "--with-model does not go with --to"),
        (["--slice", "x", "--where", "reward > 1"], "--where does not go with --slice"),
        (["--slice", "x", "--since", "@1"], "--since does not go with --slice"),
        (["--slice", "x", "--groups", "0-1", "--from-step", "2"], "name groups or steps"),
        (["--to", "jsonl", "--topic", "reward"], "--topic reward: no such topic; there are tasks"),
        (["--to", "jsonl", "--since", "1700000000"], "--since 1700000000: seconds or milliseconds?"),
        (["--to", "jsonl", "--until", "yesterday"], "--until yesterday: not a time"),
        (["--to", "jsonl", "--from-step", "90"], "--from-step 90: the run has steps 1 to "),
        (["--slice", "x", "--to-step", "90"], "--to-step 90: the run has steps 1 to "),
        (["--slice", "x", "--groups", "7-7"], "--groups 7-7: the run has no such group"),
        (["--slice", "x", "--groups", "0-1, 7-7"], "--groups 7-7: the run has no such group"),
        (["--slice", "none/x"], "--slice none/x: none is no folder"),
        (["--slice", "x", "--where", "reward > 1"], "name them with --groups, or --from-step and --to-step"),
        (["--to", "jsonl", "--groups", "0-1"], "choose rows with --where"),
    ],
)
def test_what_cannot_be_done_is_refused_before_a_file_is_made(
    run_dir, tmp_path, monkeypatch, capsys, options, text
):
    monkeypatch.chdir(tmp_path)
    assert main(["export", run_dir, *options]) == WRONG_USAGE
    assert text in told(capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [[], ["--to", "jsonl", "--slice", "x"], ["--to", "csv"]])
def test_one_kind_of_export_is_chosen(run_dir, options, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["export", run_dir, *options])
    assert ended.value.code == WRONG_USAGE


def test_a_run_that_has_not_been_started_has_nothing_to_export(config, tmp_path, capsys):
    (tmp_path / "my.toml").write_text(portable_config(config).replace("/slice", str(tmp_path / "none")))
    assert (
        main(["export", str(tmp_path / "my.toml"), "--to", "jsonl", "--out", str(tmp_path / "out")])
        == WRONG_USAGE
    )
    assert "this run has not been started" in told(capsys)


# ---------------------------------------------------------------- slices
def records(log: EventLog, config: Config) -> list:
    topics = topics_of(config)
    return [
        record
        for word in ALL_TOPICS
        for partition in range(topics.count(word))
        for record in read_all(log, topics.name(word), partition, log.start(topics.name(word), partition))
    ]


def test_a_slice_becomes_a_run_directory_that_every_reader_takes(config, tmp_path, capsys):
    path, again = tmp_path / "all.mslice", tmp_path / "deep" / "again"
    assert main(["export", config.run.dir, "--slice", str(path)]) == DONE
    assert main(["import", str(path), str(again)]) == DONE
    out = capsys.readouterr().out
    assert f"{again}: run 'run' from a file log, sliced" in out and "everything" in out
    imported = load_config(again, environ={})
    with open_run_log(imported, readonly=True) as log, open_run_log(config, readonly=True) as source:
        assert records(log, config) == records(source, config)
    assert sorted(each.name for each in again.iterdir()) == ["config.toml", "imported.json", "log"]
    note = json.loads((again / "imported.json").read_text())
    assert (note["run"], note["fingerprint"]) == ("run", fingerprint(config))
    assert main(["verify", str(again)]) == DONE
    assert main(["tail", str(again), "ledger", "-e", "-c", "1"]) == DONE
    assert "run_started" in capsys.readouterr().out


def test_an_imported_run_is_replayed_to_the_same_weights(run_dir, tmp_path, capsys):
    path = tmp_path / "some.mslice"
    assert main(["export", run_dir, "--slice", str(path), "--to-step", "4"]) == DONE
    assert main(["import", str(path), str(tmp_path / "again")]) == DONE
    capsys.readouterr()
    assert main(["replay", str(tmp_path / "again"), "--to", "4", "--out", str(tmp_path / "replay")]) == DONE
    assert "equal: the replay gives what was recorded" in capsys.readouterr().out


def test_a_slice_with_its_checkpoint_is_replayed_from_there(run_dir, checkpoint, tmp_path, capsys):
    path, again = tmp_path / "late.mslice", tmp_path / "again"
    first = str(checkpoint.step + 2)
    command = ["export", run_dir, "--slice", str(path), "--from-step", first, "--to-step", first]
    assert main([*command, "--with-model"]) == DONE
    assert f"the slice begins with step {checkpoint.step + 1}, from where it can be replayed" in told(capsys)
    assert main(["import", str(path), str(again)]) == DONE
    assert [each.name for each in (again / "checkpoints").iterdir()] == [Path(checkpoint.path).name]
    assert main(["verify", str(again)]) == DONE
    capsys.readouterr()
    assert (
        main(["replay", str(again), "--from", first, "--to", first, "--out", str(tmp_path / "replay")])
        == DONE
    )
    out = capsys.readouterr().out
    assert "equal: the replay gives what was recorded" in out and "checkpoint" in out


def test_a_bad_import_says_why_and_leaves_nothing(run_dir, tmp_path, capsys):
    path = tmp_path / "all.mslice"
    assert main(["export", run_dir, "--slice", str(path)]) == DONE
    content = path.read_bytes()
    (tmp_path / "short.mslice").write_bytes(content[: len(content) - 50])
    assert main(["import", str(tmp_path / "short.mslice"), str(tmp_path / "new")]) == FAILED
    assert "short.mslice" in (err := told(capsys)) and "truncated" in err
    (tmp_path / "there").mkdir()
    assert main(["import", str(path), str(tmp_path / "there")]) == WRONG_USAGE
    assert "there exists: name a directory to be made" in told(capsys)
    assert main(["import", str(tmp_path / "nowhere.mslice"), str(tmp_path / "new")]) == FAILED
    assert "nowhere.mslice: No such file or directory" in told(capsys)
    assert main(["import", str(path), str(path / "new")]) == WRONG_USAGE
    assert "cannot be made" in told(capsys)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["all.mslice", "short.mslice", "there"]


def test_a_configuration_of_another_version_names_the_slice_and_the_setting(tmp_path, capsys):
    topics = {word: [(0, 0)] for word in ALL_TOPICS}
    manifest = Manifest(
        run="run",
        partitions=1,
        schema="1.0",
        source="file",
        made_ms=1,
        chosen="",
        config='[run]\ndir = "/slice"\nnmae = "x"\n',
        fingerprint="",
        topics=topics,
    )
    with SliceWriter(tmp_path / "odd.mslice", manifest):
        pass
    assert main(["import", str(tmp_path / "odd.mslice"), str(tmp_path / "new")]) == WRONG_USAGE
    err = told(capsys)
    assert "odd.mslice: this version cannot read its configuration" in err and "run.nmae" in err
    assert [each.name for each in tmp_path.iterdir()] == ["odd.mslice"]


@pytest.mark.parametrize(
    ("line", "instead", "key"),
    [
        ('url = "file:///slice/log"', 'url = "file:///tmp/another/log"', "log.url"),
        ('url = "file:///slice/log"', 'url = "kafka://broker.example:9092"', "log.url"),
        ('dir = "/slice"', 'dir = "/tmp/another"', "log.url"),
        ('name = "run"', 'name = "other"', "run.name"),
    ],
)
def test_a_slice_cannot_lead_to_another_log(config, tmp_path, capsys, line, instead, key):
    text = portable_config(config)
    assert text.count(line) == 1
    manifest = Manifest(
        run="run",
        partitions=config.log.partitions,
        schema="1.0",
        source="file",
        made_ms=1,
        chosen="",
        config=text.replace(line, instead),
        fingerprint="",
        topics={"ledger": [(0, 0)]},
    )
    with SliceWriter(tmp_path / "odd.mslice", manifest):
        pass
    assert main(["import", str(tmp_path / "odd.mslice"), str(tmp_path / "new")]) == WRONG_USAGE
    assert f"odd.mslice: its configuration has {key} = " in told(capsys)
    assert [each.name for each in tmp_path.iterdir()] == ["odd.mslice"]


def test_nothing_goes_on_with_an_imported_run(run_dir, tmp_path, capsys):
    path, again = tmp_path / "some.mslice", tmp_path / "again"
    assert main(["export", run_dir, "--slice", str(path), "--to-step", "4"]) == DONE
    assert main(["import", str(path), str(again)]) == DONE
    for command in (["serve", "feeder", str(again)], ["staleness", str(again), "--set", "3"]):
        assert main(command) == WRONG_USAGE
        assert f"{again} was made by millstream import" in told(capsys)
    with pytest.raises(ConfigError, match="was made by millstream import"):
        rundir.adopt(load_config(again, environ={}))


def test_a_slice_never_takes_the_place_of_a_file(run_dir, tmp_path, capsys):
    (tmp_path / "mine").write_text("mine")
    assert main(["export", run_dir, "--slice", str(tmp_path / "mine")]) == WRONG_USAGE
    assert "mine exists: name a new file" in told(capsys)
    assert (tmp_path / "mine").read_text() == "mine"


# ---------------------------------------------------------------- what comes along
def kafka_config(folder: Path, **run: object) -> Config:
    return build_config(
        {
            "run": {"name": "k", "dir": str(folder / "run"), **run},
            "log": {
                "url": "kafka://broker.example:9092/team.",
                "retention_s": 864000.0,
                "kafka": {
                    "security_protocol": "SASL_SSL",
                    "sasl_username": "me",
                    "sasl_password": "env:KAFKA_PASSWORD",
                },
            },
            "data": {"path": str(folder / "run" / "prompts.jsonl")},
            "model": {"path": str(folder / "models" / "m")},
            "reward": {"function": "exact", "options": {"api_key": "env:KEY"}},
        }
    )


def test_a_configuration_comes_along_without_broker_and_secrets(tmp_path):
    config = kafka_config(tmp_path)
    text = portable_config(config)
    assert "broker.example" not in text and "KAFKA_PASSWORD" not in text and "sasl_username = " not in text
    assert 'api_key = "env:KEY"' in text, "a reference is no secret"
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "config.toml").write_text(text)
    again = load_config(tmp_path / "again", environ={})
    assert again.log.url == f"file://{tmp_path}/again/log"
    assert again.data.path == f"{tmp_path}/again/prompts.jsonl"
    assert again.model.path == config.model.path, "what lies elsewhere stays where it is"
    assert fingerprint(again) == fingerprint(config)


def test_a_model_that_comes_along_lies_in_the_run_directory(tmp_path):
    config = kafka_config(tmp_path)
    model = Path(config.model.path)
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    found = model_files(config, [], 1)
    assert found.files == {"model/config.json": model / "config.json"} and found.first_step == 1
    assert 'path = "/slice/model"' in portable_config(config, with_model=True)


def test_a_model_that_is_too_large_or_not_there_is_refused(tmp_path, monkeypatch):
    config = kafka_config(tmp_path)
    with pytest.raises(ConfigError, match=r"--with-model: model\.path = .*models/m is not there"):
        model_files(config, [], 1)
    model = Path(config.model.path)
    model.mkdir(parents=True)
    with open(model / "weights", "wb") as file:
        file.truncate(65 << 20)
    with pytest.raises(ConfigError, match="have 65 MiB, a slice takes 64 MiB: hand them over beside it"):
        model_files(config, [], 1)


def test_a_checkpoint_whose_files_changed_does_not_come_along(config, view, checkpoint, tmp_path):
    copy = replaced(config, "run.dir", str(tmp_path / "copy"))
    shutil.copytree(config.run.dir, tmp_path / "copy")
    first = checkpoint.step + 2
    assert model_files(copy, view.checkpoints, first).first_step == checkpoint.step + 1
    (state,) = (tmp_path / "copy" / checkpoint.path).rglob("scalar.json")
    state.write_text(state.read_text().replace("steps", "steps "))
    found = model_files(copy, view.checkpoints, first)
    assert found == ({}, 1), "the run keeps no older one, so the slice begins at the beginning"


def test_the_manifest_says_what_the_slice_was_made_from(run_dir, config, tmp_path):
    path = tmp_path / "some.mslice"
    assert main(["export", run_dir, "--slice", str(path), "--topic", "tasks", "--to-step", "2"]) == DONE
    with SliceReader(path) as reader:
        manifest = reader.manifest
    assert (manifest.chosen, manifest.source) == ("topics tasks, to step 2", "file")
    assert manifest.fingerprint == fingerprint(config)
    assert all(start == end for start, end in manifest.topics["trajectories"])
