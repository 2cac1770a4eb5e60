"""How fast `millstream tail -e` goes through a finished topic, beside bare reads of the log below it, in what memory.

    python benchmarks/replay.py [--gib G] [--tokens N …] [--rounds R] [--json] [--folder FOLDER]

A topic of trajectories is made in an embedded log (4 partitions; ids and log-probs as in benchmarks/codec.py, and four
letters of text a token), then read to its end in turns:

    raw         EventLog.read of every partition, nothing looked at: read, checksum, headers; the log's own read sizes
    raw 512 KB  the same in reads of 512 KB, which stay in the processor's cache: what `tail` asks for
    tail FORM   the command itself, in this process, into /dev/null

The ratio is the median over rounds of raw time ÷ tail time, for the quicker of the two raws (`of raw`) and for the
log's own (`of default`): ≥ 0.60 is the aim. The time of a tail is without its start (`start`: configuration, opening
the log), which does not grow with the topic. Forms that show only a record's place and headers (any of %t %p %o %k %T
%S %h) decode nothing, and can reach it. A line opens every event, which by itself costs more than reading it did:
zstandard must decompress ids and text of the whole sample for the first four ids. JSON and %s write every token as
text. Both are far from the aim, and the rows `opened` and `decoded` say how near they could come: the same reads
with nothing but zstandard, and with nothing but the codec, after them.

Last, the peak memory of a process that goes through the whole topic, against one that shows its last 10 records.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from codec import samples  # noqa: E402 - benchmarks/codec.py
from msgspec.structs import replace  # noqa: E402

from engine import cli  # noqa: E402
from replay.tail import READ_BYTES  # noqa: E402
from streams import codec, trajectory  # noqa: E402
from streams.embedded.log import EmbeddedLog  # noqa: E402
from streams.log import NewRecord, Record  # noqa: E402

Row = dict[str, Any]
MB = 1e6
AIM = 0.60
PARTITIONS = 4
TOPIC = "bench.trajectories"
FORMS = {
    "-f '%o'": ("-f", "%o\\n"),
    "-f '%t/%p:%o %T %k %S'": ("-f", "%t/%p:%o %T %k %S\\n"),
    "-f '… %h'": ("-f", "%t/%p:%o %T %k %S %h\\n"),
    "-k UID": ("-k", "0-1/0/0"),
    "--where on headers": ("--where", "headers.by == 'nobody'"),
    "lines": (),
    "--json": ("--json",),
}


# -- the topic


def make_run(folder: Path, tokens: int, nbytes: int) -> Path:
    """A run directory whose log holds one large topic, as trajectories of `tokens` in the median."""
    run = folder / f"run-{tokens}"
    run.mkdir()
    (run / "rows.jsonl").write_text('{"prompt": "p", "label": "l"}\n')
    (run / "config.toml").write_text(
        f'[run]\nname = "bench"\ndir = "{run}"\n[log]\npartitions = {PARTITIONS}\n'
        f'[data]\npath = "{run}/rows.jsonl"\n[reward]\nfunction = "exact"\n'
        '[rollout]\nbackend = "scripted"\n[trainer]\nbackend = "scalar"\n'
    )
    source = inspect.getsource(argparse) * 8
    records = [
        codec.encode(
            trajectory.pack(replace(each, response=source[: 4 * len(each.response_ids)])), producer="bench"
        )
        for each in samples(64, 151_936, tokens)
    ]
    with EmbeddedLog(run / "log", fsync="never") as log:
        log.create_topic(TOPIC, PARTITIONS)
        written = count = 0
        while written < nbytes:
            group = [_stamped(records[(count + each) % len(records)], count + each) for each in range(16)]
            log.append(TOPIC, count // 16 % PARTITIONS, group)
            written += sum(len(record.value) for record in group)
            count += len(group)
    return run


def _stamped(record: NewRecord, index: int) -> NewRecord:
    return record._replace(timestamp_ms=1_793_527_200_000 + index)


# -- the sides


def each_record(log: EmbeddedLog, look: Callable[[Record], Any] | None = None, **sizes: int) -> None:
    for partition in range(PARTITIONS):
        position, end = 0, log.end(TOPIC, partition)
        while position < end:
            batch = log.read(TOPIC, partition, position, **sizes)
            position = batch.next_position
            if look is not None:
                for record in batch.records:
                    look(record)


def unzip(record: Record) -> None:
    raw = record.header("raw")
    codec.decompress(record.value[: len(record.value) - int(raw or 0)])


def tail(run: Path, form: tuple[str, ...]) -> None:
    said = io.StringIO()  # "none of the records names …"
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(said),
    ):
        code = cli.main(["tail", str(run), "trajectories", "-e", *form])
    if code:
        sys.exit(said.getvalue())


def timed(work: Callable[[], None]) -> float:
    """Seconds of this process, which is all that any side uses: other work on the machine disturbs less."""
    started = time.process_time()
    work()
    return time.process_time() - started


def speed_rows(run: Path, tokens: int, rounds: int) -> list[Row]:
    with EmbeddedLog(run / "log", readonly=True) as log:
        count = sum(log.end(TOPIC, partition) for partition in range(PARTITIONS))
        size = sum(path.stat().st_size for path in (run / "log").rglob("*.log"))
        sides: dict[str, Callable[[], None]] = {
            "raw": lambda: each_record(log),
            "raw 512 KB": lambda: each_record(log, max_bytes=READ_BYTES),
            "opened": lambda: each_record(log, unzip, max_bytes=READ_BYTES),
            "decoded": lambda: each_record(log, codec.decode, max_bytes=READ_BYTES),
            **{f"tail {name}": lambda form=form: tail(run, form) for name, form in FORMS.items()},
        }
        starts: list[float] = []
        times: dict[str, list[float]] = {name: [] for name in sides}
        for index in range(rounds + 1):
            start = timed(lambda: tail(run, ("-o", "end")))
            starts.append(start)
            for name, side in sides.items():
                took = timed(side) - (start if name.startswith("tail") else 0.0)
                if index:  # the first warms up
                    times[name].append(took)
    raws = [min(pair) for pair in zip(times["raw"], times["raw 512 KB"], strict=True)]
    rows: list[Row] = [{"bench": f"{tokens} tokens", "case": "start", "ms": round(1e3 * median(starts), 1)}]
    for name, took in times.items():
        of_raw = median(raw / ours for raw, ours in zip(raws, took, strict=True))
        of_default = median(raw / ours for raw, ours in zip(times["raw"], took, strict=True))
        row = {
            "bench": f"{tokens} tokens",
            "case": name,
            "mb_s": round(size / MB / median(took), 1),
            "us_record": round(1e6 * median(took) / count, 1),
            "of_raw": round(of_raw, 2),
            "of_default": round(of_default, 2),
        }
        rows.append(row | ({"reaches_aim": of_raw >= AIM} if name.startswith("tail") else {}))
    return rows


# -- memory

CHILD = """
import sys
from engine import cli
code = cli.main(sys.argv[1:])
(peak,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(peak.split()[1], file=sys.stderr)
sys.exit(code)
"""


def memory_row(run: Path, tokens: int, form: tuple[str, ...], name: str) -> Row:
    """Peak of a process that shows all, and of one that shows the last 10, MiB."""

    def peak(*more: str) -> float:
        command = [sys.executable, "-c", CHILD, "tail", str(run), "trajectories", "-e", *form, *more]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        if done.returncode:
            sys.exit(done.stderr)
        return int(done.stderr.split()[-1]) / 1024

    whole, last = peak(), peak("-o", "-10")
    size = sum(path.stat().st_size for path in (run / "log").rglob("*.log"))
    return {
        "bench": f"{tokens} tokens",
        "case": f"memory, {name}",
        "topic_mib": round(size / (1 << 20)),
        "peak_mib": round(whole, 1),
        "peak_of_last_10_mib": round(last, 1),
        "growth_mib": round(whole - last, 1),
    }


def shown(row: Row) -> str:
    figures = "  ".join(f"{name} {value}" for name, value in row.items() if name not in ("bench", "case"))
    return f"{row['bench']:<12} {row['case']:<30} {figures}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--gib", type=float, default=0.125, help="size of each topic (default 0.125; 2 for the full one)"
    )
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1800, 8000], help="medians of the response lengths"
    )
    parser.add_argument("--rounds", type=int, default=3, help="after one that warms up (default 3)")
    parser.add_argument("--json", action="store_true", help="one JSON list instead of the table")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where to write; it is cleaned up")
    options = parser.parse_args()
    done: list[Row] = []

    def add(row: Row) -> None:
        done.append(row)
        if not options.json:
            print(shown(row), flush=True)

    folder = Path(tempfile.mkdtemp(prefix="bench-replay-", dir=options.folder))
    try:
        add({"bench": "machine", "case": f"{os.cpu_count()} cores", "load": round(os.getloadavg()[0], 2)})
        for tokens in options.tokens:
            run = make_run(folder, tokens, int(options.gib * (1 << 30)))
            for row in speed_rows(run, tokens, options.rounds):
                add(row)
            for name in ("-f '%o'", "lines", "--json"):
                add(memory_row(run, tokens, FORMS[name], name))
            shutil.rmtree(run)
    finally:
        shutil.rmtree(folder)
    if options.json:
        print(json.dumps(done, indent=1))


if __name__ == "__main__":
    main()
