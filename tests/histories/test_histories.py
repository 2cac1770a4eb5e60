"""What earlier versions recorded is read, audited and replayed to the same weights by this one."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from consumers.ledger import Ledger
from engine.cli import main
from engine.commands.import_ import import_slice
from engine.config import Config, fingerprint, load_config
from engine.roles import open_run_log, topics_of
from engine.trainer.rerun import rerun
from engine.trainer.scalar_backend import ScalarBackend
from engine.weights.tensors import digest
from replay.ledger import read_run
from replay.records import entries
from replay.render import as_json
from replay.verify import verify
from streams.events import StepMeasured, WeightsPublished
from streams.topics import ALL_TOPICS

FOLDER = Path(__file__).parent
HISTORIES = sorted(FOLDER.glob("*.mslice"))
NAMES = [path.stem for path in HISTORIES]
MOST_BYTES = 200_000
CLOSE = 1e-3  # relative: another torch or processor rounds otherwise


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Config]:
    """Every history, imported: name → its configuration."""
    folder = tmp_path_factory.mktemp("histories")
    for path in HISTORIES:
        import_slice(path, folder / path.stem)
    return {path.stem: load_config(folder / path.stem, environ={}) for path in HISTORIES}


def test_there_are_histories_and_they_are_small():
    assert {"scripted", "fenced", "torch"} <= set(NAMES)
    assert all(path.stat().st_size < MOST_BYTES for path in HISTORIES)


@pytest.mark.parametrize("name", NAMES)
def test_an_audit_of_the_history_finds_nothing(runs, name):
    history = runs[name]
    with open_run_log(history, readonly=True) as log:
        report = verify(log, topics_of(history))
        view = read_run(log, topics_of(history))
    assert report.holds, report.as_table()
    assert view.finished is not None and report.notes["steps"] == len(view.cuts) > 0
    assert view.run is not None and view.run.config_fingerprint == fingerprint(history)


@pytest.mark.parametrize("name", NAMES)
def test_no_history_names_the_machine_that_it_was_made_on(runs, name):
    history = runs[name]
    topics = topics_of(history)
    with open_run_log(history, readonly=True) as log:
        for word in ALL_TOPICS:
            for partition in range(topics.count(word)):
                for entry in entries(log, topics.name(word), partition):
                    text = as_json(word, partition, entry)
                    assert not any(place in text for place in ("/tmp/", "/home/", "/root/", "/work/")), text


@pytest.mark.parametrize("name", ["scripted", "fenced"])
def test_a_history_replays_to_the_published_weights(runs, name):
    history = runs[name]
    trainer = history.trainer
    backend = ScalarBackend(lr=trainer.lr, beta1=trainer.adam_beta1, beta2=trainer.adam_beta2)
    topics = topics_of(history)
    with open_run_log(history, readonly=True) as log:
        past = Ledger(log, topics).catch_up()
        published = {event.version: event.digest for _, event in past if isinstance(event, WeightsPublished)}
        made = {}
        for redone in rerun(log, topics, backend, past, after=None):
            assert not redone.skipped
            made[redone.version] = digest(backend.weights())
    assert len(made) > 5
    assert made == {version: published[version] for version in made}


def test_a_history_of_a_model_replays_to_the_recorded_metrics(runs):
    """Not to the weights' bits: those are of one torch and one processor."""
    history = runs["torch"]
    pytest.importorskip("torch")
    from engine.replaying.steps import build

    topics = topics_of(history)
    with open_run_log(history, readonly=True) as log:
        recorded = {
            entry.event.step: entry.event.values
            for entry in entries(log, topics.name("metrics"), 0)
            if isinstance(entry.event, StepMeasured)
        }
        past = Ledger(log, topics).catch_up()
        steps = 0
        for redone in rerun(log, topics, build(history), past, after=None):
            steps += 1
            for name in ("loss", "grad_norm", "entropy", "ess_token"):
                was = recorded[redone.cut.step][name]
                assert redone.metrics[name] == pytest.approx(was, rel=CLOSE, abs=1e-5), (
                    name,
                    redone.cut.step,
                )
    assert steps == 5


@pytest.mark.parametrize(
    ("name", "outcomes"),
    [
        ("scripted", {"trained": 96, "generate_error": 60, "zero_variance": 16, "surplus": 6}),
        ("torch", {"trained": 80, "surplus": 32}),
    ],
)
def test_the_tables_of_a_history_tell_what_became_of_each_sample(runs, tmp_path, capsys, name, outcomes):
    assert main(["export", runs[name].run.dir, "--to", "jsonl", "--out", str(tmp_path / "out")]) == 0
    found = [json.loads(line) for line in (tmp_path / "out/samples.jsonl").read_text().splitlines()]
    assert Counter(row["reason"] or row["outcome"] for row in found) == outcomes
    rewards = {row["uid"]: row["reward"] for row in found}
    table = [json.loads(line) for line in (tmp_path / "out/rewards.jsonl").read_text().splitlines()]
    assert {row["uid"]: row["reward"] for row in table} == rewards


def test_the_fenced_history_has_a_void_cut_a_redispatch_and_copies(runs, tmp_path, capsys):
    assert main(["export", runs["fenced"].run.dir, "--to", "jsonl", "--out", str(tmp_path / "out")]) == 0
    failures = [json.loads(line) for line in (tmp_path / "out/failures.jsonl").read_text().splitlines()]
    assert [row["type"] for row in failures if row["reason"] == "void"] == ["batch_cut"]
    groups = [json.loads(line) for line in (tmp_path / "out/groups.jsonl").read_text().splitlines()]
    assert any(row["redispatches"] and row["outcome"] == "trained" for row in groups)
    samples = [json.loads(line) for line in (tmp_path / "out/samples.jsonl").read_text().splitlines()]
    assert {row["outcome"] for row in samples} >= {"trained", "dropped", "duplicate"}
    steps = [json.loads(line) for line in (tmp_path / "out/steps.jsonl").read_text().splitlines()]
    assert len({row["epoch"] for row in steps}) == 2
