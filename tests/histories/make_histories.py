"""Makes the golden histories (*.mslice). From the repository root: `python -m tests.histories.make_histories [NAME …]`

    scripted   real daemons, scripted answers, the trainer of one number: failed samples, re-dispatches, dropped groups,
               the trainer and the reward stage killed on the way
    fenced     all stages in one process (tests/support/world.py): lost and doubled samples, and a trainer that wakes up
               after another has taken over and appends a cut, which is void
    torch      real daemons and a model of a few thousand parameters, five steps

A history that is there is never made again: it stands for what a version once wrote. A new one gets a new name.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.cli import main
from engine.config import Config, build_config, fingerprint
from streams.embedded.log import EmbeddedLog
from streams.events import BatchCut
from tests.faults.harness import begin, read_view, supervised
from tests.support.world import World

FOLDER = Path(__file__).parent
LONGEST_S = 120.0


def scripted(folder: Path) -> Config:
    run_dir = folder / "run"
    run_dir.mkdir()
    rows = [json.dumps({"prompt": f"q{i}", "label": "yes", "metadata": {"row": i}}) for i in range(16)]
    (run_dir / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    config = build_config(
        {
            "run": {"name": "scripted", "dir": str(run_dir), "steps": 12},
            "log": {"partitions": 2},
            "data": {"path": str(run_dir / "prompts.jsonl")},
            "rollout": {
                "backend": "scripted",
                "replicas": 2,
                "n_samples_per_prompt": 4,
                "max_concurrency": 8,
                "rollout_max_response_len": 16,
                "options": {
                    "policy": "coin",
                    "heads": "yes",
                    "tails": "no",
                    "token_s": 0.02,
                    "fault": "error",
                    "fault_share": 0.1,
                },
            },
            "reward": {"function": "exact"},
            "collector": {"filters": ["zero_variance"], "member_deadline_s": 10.0},
            "trainer": {"backend": "scalar", "rollout_batch_size": 2},
            "staleness": {"max_weight_staleness": 1},
            "checkpoint": {"every": 4},
            "supervisor": {"max_restarts": 10, "window_s": 60.0},
        }
    )
    begin(config)
    kills = {3: "reward-0", 6: "trainer-0"}
    deadline = time.monotonic() + LONGEST_S
    with supervised(config) as launcher:
        while not launcher.ended:
            assert time.monotonic() < deadline, f"the run does not end; logs in {run_dir}/logs"
            step = read_view(config).step
            for at in [at for at in kills if step >= at]:
                pid = launcher.pid(kills.pop(at))
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
    return config


def fenced(folder: Path) -> Config:
    run_dir = folder / "run"
    config = build_config(
        {
            "run": {"name": "run", "dir": str(run_dir), "seed": 3},
            "log": {"partitions": 2},
            "data": {"path": str(run_dir / "prompts.jsonl"), "epochs": 2},
            "rollout": {"backend": "scripted", "n_samples_per_prompt": 2},
            "reward": {"function": "exact"},
            # what ScalarBackend() of the world takes
            "trainer": {
                "backend": "scalar",
                "rollout_batch_size": 2,
                "lr": 0.01,
                "adam_beta1": 0.9,
                "adam_beta2": 0.95,
            },
            "staleness": {"max_weight_staleness": 1},
            "checkpoint": {"every": 2},
        }
    )
    begin(config)
    with EmbeddedLog(run_dir / "log") as log:
        world = World(
            run_dir,
            rows=8,
            log=log,
            loses=lambda uid: uid.endswith(("1/0", "3/1/0")) and uid.startswith(("0-1", "0-3", "1-2")),
            doubles=lambda uid: uid.startswith(("0-2", "1-5")),
            config_fingerprint=fingerprint(config),
        )
        choose = random.Random(7)
        try:
            while world.stages.get("trainer") is None or world.stages["trainer"].step < 3:
                world.move(choose.choice(world.names))
            _take_over(world, choose)
            world.run(choose)
        finally:
            world.close()
    return config


def _take_over(world: World, choose: random.Random) -> None:
    """Another trainer begins just before this one appends its next cut."""
    zombie = world.stages["trainer"]
    append: Callable[[Any], Any] = zombie._append

    def late(event: Any) -> Any:
        if isinstance(event, BatchCut):
            zombie._append = append
            world.crash("trainer")  # its share of the run is free; it does not know
            world.move("trainer")
        return append(event)

    zombie._append = late
    with pytest.raises(Exception, match="has taken over"):
        for _ in range(10_000):
            world.move(choose.choice(world.names))


def torch(folder: Path) -> Config:
    from engine.demo import demo_config, write_rows
    from engine.tasks import get_task, tiny

    run_dir = folder / "run"
    task = get_task("guess")
    small = msgspec.structs.replace(task.recommended, hidden_size=16, num_layers=1, num_heads=2)
    kind = type("SmallGuess", (type(task),), {"recommended": property(lambda self: small)})
    overrides = [
        "run.name=torch",
        "trainer.rollout_batch_size=4",
        "rollout.n_samples_per_prompt=4",
        "log.partitions=2",
        "eval.every=1000",
        "eval.final=0",
        "checkpoint.every=2",
    ]
    config = demo_config(task, run_dir, max_steps=5, overrides=overrides)
    run_dir.mkdir()
    write_rows(run_dir / "prompts.jsonl", task.rows(seed=0))
    write_rows(run_dir / "held_out.jsonl", task.held_out(16, 0))
    tiny.save(Path(config.model.path), tiny.build_model(kind(), 0), tiny.build_tokenizer(task))
    begin(config)
    deadline = time.monotonic() + LONGEST_S
    with supervised(config) as launcher:
        while not launcher.ended:
            assert time.monotonic() < deadline, f"the run does not end; logs in {run_dir}/logs"
            time.sleep(0.1)
    return config


MAKERS: dict[str, tuple[Callable[[Path], Config], list[str]]] = {
    "scripted": (scripted, []),
    "fenced": (fenced, []),
    "torch": (torch, ["--with-model"]),
}


def make(name: str) -> None:
    maker, options = MAKERS[name]
    path = FOLDER / f"{name}.mslice"
    if path.exists():
        raise SystemExit(f"{path.name} is there already; a golden history is never written again")
    with tempfile.TemporaryDirectory() as folder:
        config = maker(Path(folder))
        code = main(["export", config.run.dir, "--slice", str(path), *options])
    if code:
        raise SystemExit(code)
    print(path.name, path.stat().st_size, "bytes")


if __name__ == "__main__":
    for wanted in sys.argv[1:] or list(MAKERS):
        make(wanted)
