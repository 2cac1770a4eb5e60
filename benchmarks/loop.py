"""What the loop itself carries: all five daemons, the scripted engine, the trainer of one number, the embedded log.

No model computes anything, so every second that this takes is the loop's own: events, log, staleness, ledger. It
prints samples/s, the CPU time of each daemon per 1,000 samples (where the time goes), and each daemon's memory a
quarter of the way and at the end (what must stay flat). A short write-and-read of the same number of records by one
process, in the same run, is printed beside it for scale.

    python benchmarks/loop.py [--samples 200000] [--fsync group|never] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

from engine.commands import rundir
from engine.config import build_config
from engine.launch.local import LocalLauncher, daemons_of
from engine.roles import open_run_log, topics_of
from replay.summary import summarize
from streams.log import NewRecord
from streams.open import open_log

GROUPS, SAMPLES = 64, 8  # of one step
TICKS = os.sysconf("SC_CLK_TCK")


def configuration(folder: Path, steps: int, fsync: str):
    rows = folder / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": f"question {i}", "label": "yes"}) + "\n" for i in range(1000))
    )
    return build_config(
        {
            "run": {"name": "loop", "dir": str(folder / "run"), "steps": steps},
            "log": {"partitions": 2, "fsync": fsync},
            "data": {"path": str(rows)},
            "rollout": {
                "backend": "scripted",
                "n_samples_per_prompt": SAMPLES,
                "max_concurrency": 512,
                "rollout_max_response_len": 16,
                "options": {"policy": "coin", "heads": "yes", "tails": "no"},
            },
            "reward": {"function": "exact"},
            "trainer": {"backend": "scalar", "rollout_batch_size": GROUPS},
            "checkpoint": {"every": 100},
        }
    )


class Usage:
    """CPU seconds and resident bytes of each daemon, with all that it started, read from /proc."""

    def __init__(self) -> None:
        self.cpu_s: dict[str, float] = {}
        self.rss: dict[str, list[int]] = {}

    def sample(self, launcher: LocalLauncher) -> None:
        tree = children_of_all()
        for name, pid in launcher.processes().items():
            cpu, rss = 0.0, 0
            for member in descendants(pid, tree):
                seconds, resident = process(member)
                cpu, rss = cpu + seconds, rss + resident
            if rss:
                self.cpu_s[name] = max(cpu, self.cpu_s.get(name, 0.0))
                self.rss.setdefault(name, []).append(rss)


def children_of_all() -> dict[int, list[int]]:
    tree: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            tree.setdefault(parent, []).append(int(entry.name))
    return tree


def descendants(pid: int, tree: dict[int, list[int]]) -> list[int]:
    found = [pid]
    for each in found:
        found.extend(tree.get(each, []))
    return found


def process(pid: int) -> tuple[float, int]:
    """(CPU seconds, resident bytes of its own: pages of mapped files are the system's); zeros once it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0, 0
    own = next((line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")), "0")
    return (int(fields[11]) + int(fields[12])) / TICKS, int(own) * 1024


def bare_log(folder: Path, count: int, fsync: str) -> float:
    """Records/s of one process that appends `count` records of 300 bytes in batches of 64 and reads them back."""
    with open_log(f"file://{folder / 'bare'}", fsync=fsync) as log:
        log.create_topic("bare", 1)
        began = time.perf_counter()
        batch = [NewRecord(bytes(300))] * 64
        futures = [log.submit("bare", 0, batch) for _ in range(count // 64)]
        for future in futures:
            future.result(60)
        position = 0
        while position < log.end("bare", 0):
            position = log.read("bare", 0, position).next_position
        return count / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--fsync", default="group", choices=("group", "always", "never"))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    steps = max(4, -(-args.samples // (GROUPS * SAMPLES)))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = configuration(folder, steps, args.fsync)
        rundir.adopt(config)
        launcher, usage = LocalLauncher(config, daemons_of(config)), Usage()
        try:
            launcher.start()
            while (outcome := launcher.poll()) is None:
                usage.sample(launcher)
                time.sleep(0.25)
        finally:
            launcher.close()
        if outcome.code:
            raise SystemExit(f"the run failed: {outcome.cause}")
        with open_run_log(config, readonly=True) as log:
            summary = summarize(log, topics_of(config))
        bare = bare_log(folder, min(args.samples, 100_000), args.fsync)
    report(args, steps, summary, usage, bare)


def report(args, steps: int, summary: dict, usage: Usage, bare: float) -> None:
    samples = summary["groups_trained"] * SAMPLES
    rate = samples / summary["wall_s"]
    rows = {
        name: {
            "cpu_ms_per_1000_samples": 1000 * usage.cpu_s[name] / (samples / 1000),
            "rss_quarter_mb": each[len(each) // 4] / 1e6,
            "rss_half_mb": each[len(each) // 2] / 1e6,
            "rss_end_mb": max(each[-3:]) / 1e6,
        }
        for name, each in usage.rss.items()
    }
    result = {
        "samples": samples,
        "steps": steps,
        "wall_s": summary["wall_s"],
        "samples_per_s": rate,
        "dropped": summary["groups_dropped"],
        "bare_log_records_per_s": bare,
        "daemons": rows,
    }
    if args.json:
        print(json.dumps(result))
        return
    print(f"{samples} samples in {steps} steps, {summary['wall_s']:.1f} s: {rate:,.0f} samples/s", end="")
    print(f"   (bare log, one process: {bare:,.0f} records/s)")
    print(
        f"dropped: {summary['groups_dropped'] or 'none'}; duplicates trained: {summary['duplicates_trained']}"
    )
    print(f"{'daemon':14s} {'CPU ms / 1000 samples':>22s} {'MB at 1/4':>10s} {'at 1/2':>10s} {'at end':>10s}")
    for name, row in rows.items():
        print(
            f"{name:14s} {row['cpu_ms_per_1000_samples']:22.1f} {row['rss_quarter_mb']:10.1f} "
            f"{row['rss_half_mb']:10.1f} {row['rss_end_mb']:10.1f}"
        )


if __name__ == "__main__":
    main()
