"""Changing the limit of a live run from the command line: what is written, what is said, what is refused."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from engine import cli
from engine.commands import rundir
from engine.commands.limit import change_limit
from engine.config import Config, build_config, fingerprint
from engine.roles import open_run_log, topics_of
from streams.errors import ConfigError
from streams.events import (
    BatchCut,
    EpochStarted,
    Event,
    LimitChanged,
    RunEnding,
    RunFinished,
    RunStarted,
)
from tests.support import recorded
from tests.support.events import events, put


def config_of(folder: Path, **changes: dict[str, Any]) -> Config:
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "q", "label": "a"}) + "\n")
    table: dict[str, dict[str, Any]] = {
        "run": {"name": "run", "dir": str(folder / "run"), "steps": 40},
        "log": {"partitions": 2},
        "data": {"path": str(rows)},
        "rollout": {"backend": "scripted", "n_samples_per_prompt": 2},
        "reward": {"function": "exact"},
        "trainer": {"backend": "scalar", "rollout_batch_size": 2},
    }
    for section, values in changes.items():
        table.setdefault(section, {}).update(values)
    return build_config(table)


def begun(config: Config, *more: Event) -> Config:
    """A run of which two steps are cut, and what else is in its ledger."""
    rundir.adopt(config)
    ledger: list[Event] = [
        RunStarted(
            run="run",
            config_fingerprint=fingerprint(config),
            partitions=2,
            rollout_batch_size=2,
            n_samples_per_prompt=2,
            seed=0,
            started_ms=1,
        ),
        EpochStarted(producer="trainer", started_ms=1),
        recorded.cut(1, [0, 1], [1, 1]),
        recorded.cut(2, [2, 3], [3, 2]),
        *more,
    ]
    with open_run_log(config) as log:
        topics_of(config).create(log)
        for event in ledger:
            put(log, topics_of(config), "ledger", event)
    return config


def changes(config: Config) -> list[tuple[int, int]]:
    with open_run_log(config, readonly=True) as log:
        ledger = events(log, topics_of(config), "ledger")
    return [(event.limit, event.from_step) for event in ledger if isinstance(event, LimitChanged)]


def test_a_change_is_appended_and_the_sentence_says_from_which_step_it_holds(tmp_path):
    config = begun(config_of(tmp_path))
    assert change_limit(config, 4) == (
        "The staleness limit is 4 (it was 2) from the next batch on that is cut: step 3, or 4 if 3 is being cut just "
        "now."
    )
    assert change_limit(config, 1, 9) == (
        "The staleness limit will be 1 from step 9 on; it is 4 until then, and the next step is 3. What was generated "
        "before and is older than that when it is cut is dropped."
    )
    assert changes(config) == [(4, 0), (1, 9)]
    with open_run_log(config, readonly=True) as log:
        change = events(log, topics_of(config), "ledger")[-1]
    assert change.by.startswith("millstream staleness on ") and change.at_ms > 1_600_000_000_000


def test_a_change_that_waits_is_replaced_and_that_is_said(tmp_path):
    config = begun(config_of(tmp_path, rollout={"max_open_groups": 5}))
    change_limit(config, 5, 9)
    said = change_limit(config, 3)
    assert "The change to 5 from step 9 on, which still waited, is replaced." in said
    assert said.endswith("rollout.max_open_groups = 5 still bounds how far generation runs ahead.")
    assert "nothing was written" in change_limit(config, 3)
    assert changes(config) == [(5, 9), (3, 0)]


def test_the_limit_of_now_cancels_a_change_that_waits(tmp_path):
    config = begun(config_of(tmp_path))
    change_limit(config, 5, 9)
    assert "replaced" in change_limit(config, 2)
    assert changes(config) == [(5, 9), (2, 0)]


@pytest.mark.parametrize(
    ("more", "from_step", "says"),
    [
        ([], 2, "--from-step 2 is past: step 2 has been cut, the next is 3"),
        ([], 41, "this run ends with step 40"),
        ([RunEnding(epoch=1, step=2, reason="steps_reached")], 0, "is ending, at step 2"),
        (
            [RunFinished(epoch=1, step=2, version=2, reason="data_ended", finished_ms=1)],
            0,
            "has finished, at step 2",
        ),
    ],
)
def test_a_step_that_is_past_and_a_run_that_has_ended_are_refused(tmp_path, more, from_step, says):
    config = begun(config_of(tmp_path), *more)
    with pytest.raises(ConfigError, match=says):
        change_limit(config, 4, from_step)
    assert changes(config) == []


def test_a_run_that_has_not_begun_is_refused_and_no_log_is_made(tmp_path):
    config = config_of(tmp_path)
    with pytest.raises(ConfigError, match="has not been started"):
        change_limit(config, 4)
    assert not (tmp_path / "run").exists()
    rundir.adopt(config)
    with open_run_log(config) as log:
        with pytest.raises(ConfigError, match="has not been started"):
            change_limit(config, 4)
        topics_of(config).create(log)
    with pytest.raises(ConfigError, match="has not begun"):
        change_limit(config, 4)


@pytest.mark.parametrize(
    ("settings", "limit", "says"),
    [
        (
            {"weights": {"update_weights_interval": 3}},
            1,
            r"--set 1: .* is below weights.update_weights_interval - 1 = 2",
        ),
        (
            {"trainer": {"use_rollout_logprobs": False}, "staleness": {"max_weight_staleness": 0}},
            1,
            r"--set 1: .* ignores the policy that sampled",
        ),
    ],
)
def test_a_limit_that_the_settings_cannot_hold_is_refused_as_in_a_configuration(
    tmp_path, settings, limit, says
):
    config = begun(config_of(tmp_path, **settings))
    with pytest.raises(ConfigError, match=says):
        change_limit(config, limit)
    assert changes(config) == []


def test_a_cap_above_what_a_lower_limit_allows_is_no_obstacle(tmp_path):
    """The feeder takes the lower of both."""
    config = begun(config_of(tmp_path, rollout={"max_open_groups": 6}))
    change_limit(config, 0)
    assert changes(config) == [(0, 0)]


def test_another_runs_configuration_is_refused(tmp_path):
    begun(config_of(tmp_path))
    other = config_of(tmp_path, rollout={"n_samples_per_prompt": 4})
    with pytest.raises(ConfigError, match="is a run of another configuration"):
        change_limit(other, 4)


def test_a_change_lands_between_the_appends_of_a_live_trainer(tmp_path):
    """Both processes have the ledger open for writing; neither waits for the other to close."""
    config = begun(config_of(tmp_path))
    written = threading.Event()
    with open_run_log(config) as log:
        topics = topics_of(config)

        def trainer() -> None:
            for step in range(3, 203):
                put(log, topics, "ledger", recorded.cut(step, [0], [3, 2]))
                if step == 20:
                    written.set()

        thread = threading.Thread(target=trainer, daemon=True)
        thread.start()
        assert written.wait(60)
        for limit in (4, 3):
            change_limit(config, limit)
        thread.join(60)
        ledger = events(log, topics, "ledger")
    assert [event.step for event in ledger if isinstance(event, BatchCut)] == list(range(1, 203))
    assert [event.limit for event in ledger if isinstance(event, LimitChanged)] == [4, 3]


def test_a_change_is_appended_to_a_log_on_kafka(tmp_path, kafka, prefix):
    config = config_of(tmp_path, log={"url": f"kafka://{kafka}/{prefix}"})
    with pytest.raises(ConfigError, match="has not been started"):
        change_limit(config, 4)
    begun(config)
    assert "from step 9 on" in change_limit(config, 4, 9)
    assert changes(config) == [(4, 9)]


def test_the_command_prints_the_sentence_and_refuses_with_exit_code_2(tmp_path, capsys):
    config = begun(config_of(tmp_path))
    assert cli.main(["staleness", config.run.dir, "--set", "4", "--from-step", "9"]) == 0
    assert capsys.readouterr().out.startswith("The staleness limit will be 4 from step 9 on")
    assert cli.main(["staleness", config.run.dir, "--set", "4", "--from-step", "1"]) == 2
    assert "is past" in capsys.readouterr().err
