"""What a crash costs: the time until training goes on, and the work that is lost.

    python benchmarks/recovery.py [--quick] [--json] [--folder FOLDER]

    time   kill -9 of the trainer in steady state, until its next new step, in parts; samples that landed meanwhile
    work   kill -9 of every daemon at once, at five positions: trajectory-seconds that are lost, that is, generated
           and never judged. "memory" is what the same crash would have cost with the finished samples in a process's
           memory and model and data cursor in the checkpoint: everything that no step up to the newest checkpoint
           had used. Both sides lose what was in flight, which is estimated from above.

Both with real processes on the embedded log, scripted answers of 20 ms a token and the trainer of one number.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from engine.config import Config  # noqa: E402
from engine.roles import open_run_log, topics_of  # noqa: E402
from replay.ledger import RunView, read_run  # noqa: E402
from replay.records import entries  # noqa: E402
from streams.events import TaskDispatched, TrajectoryFinished  # noqa: E402
from streams.log import EventLog  # noqa: E402
from tests.faults.harness import Supervised, await_event, begin, configuration, read_view, supervised  # noqa: E402

CHECKPOINT_EVERY = 10  # steps
POSITIONS = (12, 15, 18, 24, 29)  # steps after which everything dies
LONGEST_S = 120.0
Row = dict[str, Any]


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def until_step(config: Config, step: int) -> None:
    deadline = time.monotonic() + LONGEST_S
    while read_view(config).step < step:
        if time.monotonic() > deadline:
            sys.exit(f"step {step} was not reached within {LONGEST_S:.0f} s; logs in {config.run.dir}/logs")
        time.sleep(0.02)


# -- time
def time_row(folder: Path, kills: int) -> Row:
    config = configuration(folder, checkpoint={"every": CHECKPOINT_EVERY})
    begin(config)
    parts: list[dict[str, float]] = []
    with supervised(config) as launcher:
        until_step(config, 15)
        for _ in range(kills):
            before = read_view(config)
            pid = launcher.pid("trainer-0")
            assert pid is not None
            killed_ms = now_ms()
            os.kill(pid, signal.SIGKILL)
            until_step(config, before.step + 3)
            parts.append(recovery_of(config, before.epoch, killed_ms))
            until_step(config, before.step + 8)
    return {"bench": "time", "case": f"trainer killed, {kills} times"} | {
        name: round(median(each[name] for each in parts), 2) for name in parts[0]
    }


def recovery_of(config: Config, old_epoch: int, killed_ms: int) -> dict[str, float]:
    """Seconds by part, from the stamps of the ledger."""
    topics = topics_of(config)
    with open_run_log(config, readonly=True) as log:
        view = read_run(log, topics)
        epoch, started = next(each for each in view.epochs if each[0] > old_epoch)
        published = next(each for each in view.versions if each.epoch == epoch)
        cut = next(each.event for each in view.cuts if each.event.epoch == epoch)
        landed = sum(
            killed_ms < each.finished_ms <= started.started_ms for _, each in trajectories(log, config)
        )
    return {
        "restart_s": (started.started_ms - killed_ms)
        / 1e3,  # the supervisor's pause of 0.5 s, Python, imports
        "load_and_replay_s": (published.published_ms - started.started_ms) / 1e3,
        "first_step_s": (cut.cut_ms - published.published_ms) / 1e3,
        "total_s": (cut.cut_ms - killed_ms) / 1e3,
        "samples_landed_meanwhile": float(landed),
    }


# -- work
def work_row(folder: Path, position: int) -> Row:
    config = configuration(folder, checkpoint={"every": CHECKPOINT_EVERY})
    begin(config)
    with supervised(config) as launcher:
        until_step(config, position)
        crashed_ms = kill_all(launcher)
        with open_run_log(config, readonly=True) as log:
            view = read_run(log, topics_of(config))
            finished = {each.uid: seconds(each) for _, each in trajectories(log, config)}
            flying = in_flight(log, config, set(finished), crashed_ms)
        until_step(config, view.step + 15)  # everything that was there is used or dropped by then
        await_event_quietly(config)
    with open_run_log(config, readonly=True) as log:
        used = {
            m.uid for _, group in read_run(log, topics_of(config)).groups_trained() for m in group.members
        }
        again = {uid for uid, count in copies(log, config).items() if count > 1}
    lost = sum(finished[uid] for uid in again & set(finished)) + sum(
        each for uid, each in finished.items() if uid not in used and uid not in again
    )
    kept = checkpointed(view)
    memory = sum(each for uid, each in finished.items() if uid not in kept)
    return {
        "bench": "work",
        "case": f"all killed after step {view.step}",
        "in_flight_s": round(flying, 1),
        "lost_s": round(lost + flying, 1),
        "memory_lost_s": round(memory + flying, 1),
        "ratio": round((memory + flying) / max(lost + flying, 1e-9), 1),
    }


def kill_all(launcher: Supervised) -> int:
    pids = [launcher.pid(name) for name in launcher.names()]
    for pid in pids:
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
    return now_ms()


def trajectories(log: EventLog, config: Config) -> Iterator[tuple[int, TrajectoryFinished]]:
    topics = topics_of(config)
    for partition in range(topics.partitions):
        for entry in entries(log, topics.name("trajectories"), partition):
            if isinstance(entry.event, TrajectoryFinished):
                yield partition, entry.event


def copies(log: EventLog, config: Config) -> dict[str, int]:
    counted: dict[str, int] = {}
    for _, each in trajectories(log, config):
        counted[each.uid] = counted.get(each.uid, 0) + 1
    return counted


def seconds(event: TrajectoryFinished) -> float:
    return (event.finished_ms - event.started_ms) / 1e3


def in_flight(log: EventLog, config: Config, finished: set[str], crashed_ms: int) -> float:
    """Seconds spent on samples that had not ended: the oldest tasks without one, as many as the engines can run,
    each from its dispatch on. Some had waited first, so this is too much rather than too little."""
    topics, room = topics_of(config), config.rollout.max_concurrency * config.rollout.replicas
    waiting: list[tuple[int, str]] = []
    for partition in range(topics.partitions):
        for entry in entries(log, topics.name("tasks"), partition):
            if isinstance(entry.event, TaskDispatched):
                uids = [f"{entry.event.group_id}/{index}/0" for index in range(entry.event.n_samples)]
                waiting += [(entry.event.dispatched_ms, uid) for uid in uids if uid not in finished]
    return sum(max(0, crashed_ms - since) / 1e3 for since, _ in sorted(waiting)[:room])


def checkpointed(view: RunView) -> set[str]:
    """Samples of steps that the newest checkpoint holds."""
    step = max((saved.step for saved in view.checkpoints), default=0)
    return {m.uid for cut, group in view.groups_trained() if cut.step <= step for m in group.members}


def await_event_quietly(config: Config) -> None:
    with open_run_log(config, readonly=True) as log:
        await_event(config, log, "batch_cut", "at the end")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two kills, two positions")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where to write; it is cleaned up")
    options = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="bench-recovery-", dir=options.folder))
    rows: list[Row] = []
    try:
        for index, position in enumerate(POSITIONS[:2] if options.quick else POSITIONS):
            (base / f"work-{index}").mkdir()
            rows.append(work_row(base / f"work-{index}", position))
        (base / "time").mkdir()
        rows.append(time_row(base / "time", 2 if options.quick else 5))
    finally:
        shutil.rmtree(base, ignore_errors=True)
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        figures = "  ".join(f"{name} {value}" for name, value in row.items() if name not in ("bench", "case"))
        print(f"{row['bench']:<5} {row['case']:<28} {figures}")


if __name__ == "__main__":
    main()
