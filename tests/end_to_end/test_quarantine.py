"""A run of real processes in which one of two engines records log-probs that are not its own.

The trainer is killed with SIGKILL as soon as the quarantine is in the ledger: whoever comes after it judges the same.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from engine.commands import rundir
from engine.config import Config
from engine.demo import demo_config, write_rows
from engine.launch.local import LocalLauncher, daemons_of
from engine.roles import create_topics, open_run_log, topics_of
from engine.tasks import get_task, tiny
from replay.fleet import fleet_rows
from replay.ledger import read_run
from replay.verify import verify
from streams.events import EngineFailed, EngineJoined, Event, Metrics, TrajectoryFinished
from streams.log import EventLog
from tests.support.bent import BENT, SHIFT
from tests.support.events import events

STEPS, LIMIT = 20, 0.2
DEADLINE_S = 900.0  # on a machine that many share a torch process takes a minute to start


def configuration(folder: Path) -> Config:
    settings: dict[str, Any] = {
        "rollout.replicas": 2,
        "log.partitions": 2,
        "rollout.generate": '"tests.support.bent:generate"',
        "rollout.options.folder": json.dumps(str(folder)),
        "rollout.max_logprob_mismatch": LIMIT,
        "trainer.rollout_batch_size": 8,
        "checkpoint.every": 5,
        "eval.path": '""',
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    return demo_config(
        get_task("reverse"), folder / "run", max_steps=STEPS, max_weight_staleness=1, overrides=overrides
    )


def make_run_dir(config: Config) -> None:
    """Prompts and a model that knows nothing yet: what it says is of no matter here."""
    task, folder = get_task("reverse"), Path(config.run.dir)
    folder.mkdir()
    write_rows(folder / "prompts.jsonl", task.rows(seed=0))
    tiny.save(Path(config.model.path), tiny.build_model(task, 0), tiny.build_tokenizer(task))
    rundir.adopt(config)


def of(log: EventLog, config: Config, word: str, kind: type[Event]) -> list[Any]:
    topics = topics_of(config)
    return [
        event
        for partition in range(topics.count(word))
        for event in events(log, topics, word, partition)
        if isinstance(event, kind)
    ]


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_one_of_two_engines_is_quarantined_its_samples_go_no_further_and_the_run_finishes(
    tmp_path: Path,
) -> None:
    config = configuration(tmp_path)
    make_run_dir(config)
    create_topics(config)
    launcher = LocalLauncher(config, daemons_of(config))
    end, killed = time.monotonic() + DEADLINE_S, False
    try:
        launcher.start()
        with open_run_log(config, readonly=True) as log:
            while (outcome := launcher.poll()) is None:
                assert time.monotonic() < end, f"the run has not ended; logs in {config.run.dir}/logs"
                if not killed and read_run(log, topics_of(config)).quarantines:
                    os.kill(launcher.processes()["trainer-0"], signal.SIGKILL)
                    killed = True
                time.sleep(0.05)
    finally:
        launcher.close()
    assert outcome.code == 0, outcome
    assert killed, "nobody was quarantined"
    with open_run_log(config, readonly=True) as log:
        topics, view = topics_of(config), read_run(log, topics_of(config))
        assert view.finished is not None and view.step == STEPS and len(view.epochs) == 2
        joined = [each.incarnation for each in of(log, config, "fleet", EngineJoined) if each.engine == BENT]
        assert len(joined) == 2, "it was started anew, once"
        [(offset, record)] = view.quarantines
        assert (record.engine, record.incarnation) == (BENT, joined[0])
        assert record.mismatch == pytest.approx(-SHIFT, abs=0.02)
        assert "quarantined" in [each.reason for each in of(log, config, "fleet", EngineFailed)]
        # whether a group of its was waiting in that moment is chance; that such a one is dropped is for
        # tests/engine/test_trainer_quarantine.py
        made = {each.uid: each.incarnation for each in of(log, config, "trajectories", TrajectoryFinished)}
        after = [cut.event for cut in view.cuts if cut.offset > offset]
        trained = {made[member.uid] for cut in after for group in cut.groups for member in group.members}
        assert joined[0] not in trained and trained
        own = [each.values for each in of(log, config, "metrics", Metrics) if each.source == "trainer"]
        assert joined[1] in trained, "its next incarnation is trusted"
        good = [values["mismatch/rollout-0"] for values in own if "mismatch/rollout-0" in values]
        assert good and max(good) < 0.01
        assert {row.engine: row.state for row in fleet_rows(log, topics)} == {
            "rollout-0": "left",
            BENT: "left",
        }
        report = verify(log, topics)
        assert report.holds, report.as_table()
        assert report.notes["engines quarantined"] == 1
