"""`millstream replay` of a run of the torch trainer: its digests, its sums, its threads, and another loss beside it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.cli import main
from engine.weights.tensors import digest
from streams import columns
from streams.events import StepMeasured, TrajectoryFinished
from tests.engine.trainer_support import folder_of, tiny_gpt2
from tests.support.rundirs import RunDir, copy_run


@pytest.fixture
def one_thread(monkeypatch):
    """The run's threads; the process gets its own number back."""
    monkeypatch.setattr("engine.commands.common.setup_logging", lambda level: None)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def four_steps(tmp_path: Path, one_thread):
    """Steps 1 to 4 of a tiny model, checkpoints of steps 2 and 4."""
    model = folder_of(tiny_gpt2(), tmp_path / "model")
    with RunDir(
        tmp_path / "run", model={"path": str(model)}, trainer={"backend": "torch", "lr": 0.01}
    ) as run:
        run.steps(4)
        yield run


def replay(path: Path, out: Path, *more: str) -> tuple[int, dict]:
    """(exit code, replay.json)."""
    code = main(["replay", str(path), "--out", str(out), *more])
    return code, json.loads((out / "replay.json").read_text())


def test_weights_metrics_and_the_sums_of_samples_come_out_again(four_steps, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("engine.picture.lines", lambda path, panels, title: None)
    torch.set_num_threads(2)  # as a shell without OMP_NUM_THREADS would have it
    code, report = replay(four_steps.path, tmp_path / "out", "--save")
    assert code == 0 and report["equal"]
    assert (
        torch.get_num_threads() == 1 == report["made_with"]["threads"] == report["replayed_with"]["threads"]
    )
    held = digest(four_steps.trainer.backend.weights())
    assert report["steps"][-1]["digest"] == held
    said = capsys.readouterr().out
    assert "compared by digest after 4 of 4 steps" in said
    assert "16 figures compared bit for bit in 4 of 4 steps, and the sums of 16 samples" in said
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    assert digest(saved.state_dict()) == held


def test_a_slice_without_its_model_says_how_to_get_it(four_steps, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("engine.picture.lines", lambda path, panels, title: None)
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(four_steps.path), "--slice", "s.mslice"]) == 0
    assert main(["import", "s.mslice", "again"]) == 0
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    model = f"model.path={tmp_path / 'elsewhere'}"
    for command in (
        ["replay", "again", "--out", "out"],
        ["weights", "again", "materialize", "0", "out"],
    ):
        capsys.readouterr()
        assert main(command) == 2
        said = capsys.readouterr().err
        assert "the slice was made without it: export these steps again with --with-model, or name it" in said
    assert main(["replay", "again", "--out", "out", "--set", model]) == 0
    assert main(["weights", "--set", model, "again", "materialize", "0", "weights"]) == 0
    assert (tmp_path / "weights" / "config.json").is_file()


def test_a_planted_log_prob_names_its_sample(four_steps, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("engine.picture.lines", lambda path, panels, title: None)

    def alter(event):
        if not isinstance(event, TrajectoryFinished) or event.uid != "0-3/1/0":
            return event
        changed = columns.decode_logprobs(event.logprobs).copy()
        changed[2] -= 0.0625
        return msgspec.structs.replace(event, logprobs=columns.encode_logprobs(changed))

    copy_run(four_steps, tmp_path / "changed", alter)
    code, report = replay(tmp_path / "changed", tmp_path / "out", "--from", "2", "--to", "2")
    assert code == 1
    assert report["first_difference"]["step"] == 2
    assert "samples" in [each["name"] for each in report["steps"][1]["differences"]]
    assert "also at step 2: sample 0-3/1/0: sum_log_ratio was" in capsys.readouterr().out


def test_a_record_of_another_machine_is_said_to_be_one(four_steps, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("engine.picture.lines", lambda path, panels, title: None)
    state = four_steps.path / "checkpoints" / f"e{four_steps.epoch}-s00000004" / "state" / "trainer.json"
    state.write_text(json.dumps({"made_with": {"torch": "1.0", "threads": 1}}))
    first = next(event for _, event in four_steps.history() if getattr(event, "version", -1) == 0)

    def alter(event):
        return msgspec.structs.replace(event, digest="0" * 64) if event == first else event

    copy_run(four_steps, tmp_path / "changed", alter)
    (tmp_path / "changed" / "checkpoints").symlink_to(four_steps.path / "checkpoints")
    assert replay(tmp_path / "changed", tmp_path / "out")[0] == 1
    assert f"the record was made with torch 1.0 (here {torch.__version__})" in capsys.readouterr().out


def test_another_loss_gives_a_table_and_a_picture_of_both(four_steps, tmp_path, capsys):
    code, report = replay(four_steps.path, tmp_path / "out", "--set", "trainer.loss=tis", "--from", "3")
    assert code == 0 and report["a"] == "recorded"
    third, fourth = report["steps"]
    assert third["a"]["kl_k3"] == third["b"]["kl_k3"], "B begins with A's weights"
    assert third["a"]["learnt"] == third["b"]["learnt"]
    assert third["a"]["loss"] != third["b"]["loss"]
    assert fourth["a"]["kl_k3"] != fourth["b"]["kl_k3"], "and has gone its own way after one step"
    said = capsys.readouterr().out
    assert 'B: the same data with trainer.loss = "tis" instead of "ppo"' in said
    assert "advantage-weighted log-ratio (nat)" in said
    assert (tmp_path / "out" / "replay.png").read_bytes().startswith(b"\x89PNG")


def test_where_the_record_lacks_measurements_a_is_made_again_too(four_steps, tmp_path, monkeypatch):
    monkeypatch.setattr("engine.picture.lines", lambda path, panels, title: None)
    _, whole = replay(four_steps.path, tmp_path / "whole", "--set", "trainer.eps_clip=0.1")
    copy_run(four_steps, tmp_path / "old", lambda event: None if isinstance(event, StepMeasured) else event)
    _, again = replay(tmp_path / "old", tmp_path / "again", "--set", "trainer.eps_clip=0.1")
    assert (whole["a"], again["a"]) == ("recorded", "made again")
    assert again["steps"] == whole["steps"] and again["digest_of_b"] == whole["digest_of_b"]


def test_without_matplotlib_there_is_no_picture_and_all_the_rest(four_steps, tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert replay(four_steps.path, tmp_path / "out", "--to", "1")[0] == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["replay.json"]
    assert "no picture: a picture needs matplotlib" in caplog.text
