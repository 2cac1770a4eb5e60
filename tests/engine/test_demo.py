"""The demo prepares an ordinary run; what it prepares is checked here, the run itself under tests/end_to_end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from consumers.rewards.types import RewardInput
from engine import demo
from engine.cli import main
from engine.commands import rundir
from engine.config import load_config
from engine.settings import open_groups_cap
from engine.tasks import get_task
from streams.errors import ConfigError


@pytest.mark.parametrize("name", ["guess", "reverse"])
def test_the_configuration_is_the_recommended_one(name: str, tmp_path: Path):
    task = get_task(name)
    config = demo.demo_config(task, tmp_path / "run", seed=3)
    assert config.run.steps == task.recommended.num_steps
    assert config.run.seed == 3
    assert config.trainer.lr == task.recommended.lr
    assert config.trainer.loss == "ppo" and config.trainer.use_rollout_logprobs
    assert config.staleness.max_weight_staleness == 2
    assert open_groups_cap(config) == 3 * task.recommended.rollout_batch_size


def test_options_reach_the_configuration(tmp_path: Path):
    config = demo.demo_config(
        get_task("guess"),
        tmp_path / "run",
        max_steps=5,
        max_weight_staleness=0,
        slow_tools=0.9,
        overrides=["trainer.lr=0.5"],
    )
    assert (config.run.steps, config.staleness.max_weight_staleness, config.trainer.lr) == (5, 0, 0.5)
    assert config.rollout.options == {"slow_tools_sigma": 0.9}


def test_with_sglang_the_rollout_daemon_is_told_the_interpreter(tmp_path: Path):
    config = demo.demo_config(
        get_task("reverse"), tmp_path / "run", engine="sglang", sglang_python=str(tmp_path / "python")
    )
    assert config.rollout.backend == "sglang"
    assert config.rollout.sglang.python == str(tmp_path / "python")


def test_an_interpreter_for_sglang_needs_that_engine(capsys: pytest.CaptureFixture[str]):
    assert main(["demo", "--sglang-python", "python"]) == 2
    assert "goes with --engine sglang" in capsys.readouterr().err


def test_preparing_leaves_a_run_directory_that_stands_for_its_configuration(tmp_path: Path):
    pytest.importorskip("torch")
    task = get_task("guess")
    config = demo.demo_config(task, tmp_path / "run")
    demo.prepare(config, task)
    rundir.adopt(config)
    assert load_config(tmp_path / "run") == config
    rows = [json.loads(line) for line in (tmp_path / "run" / "prompts.jsonl").read_text().splitlines()]
    assert sorted(int(row["label"]) for row in rows) == list(range(16))
    held_out = (tmp_path / "run" / "held_out.jsonl").read_text().splitlines()
    assert len(held_out) == demo.HELD_OUT_ROWS
    weights = tmp_path / "run" / "model" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    demo.prepare(config, task)
    assert weights.stat().st_mtime_ns == before, "a prepared directory is left as it is"


def test_a_directory_with_other_files_is_refused(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("precious")
    config = demo.demo_config(get_task("guess"), tmp_path)
    with pytest.raises(ConfigError, match="holds other files"):
        demo.prepare(config, get_task("guess"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thesis.tex"]


def test_the_reward_is_the_tasks_own():
    def sample(response: str, task: str, label: str) -> RewardInput:
        return RewardInput(
            uid="0-0/0/0", group_id="0-0", index=0, response=response, label=label, metadata={"task": task}
        )

    assert demo.reward(sample("3 LOW 7", "guess", "7")) == 1.0
    assert demo.reward(sample("3 LOW 8 HIGH", "guess", "7")) == 0.0
    assert demo.reward(sample("4 1 3 <eos>", "reverse", "4 1 3")) == 1.0


@pytest.mark.parametrize(
    "args",
    [["--max-steps", "0"], ["--max-weight-staleness", "-1"], ["--seed", "x"], ["--task", "chess"]],
)
def test_wrong_options_exit_with_2(args: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        main(["demo", *args])
    assert end.value.code == 2


def test_slow_tools_need_a_task_with_tools(capsys: pytest.CaptureFixture[str]):
    assert main(["demo", "--task", "reverse", "--slow-tools", "0.9"]) == 2
    assert "--slow-tools 0.9" in capsys.readouterr().err
