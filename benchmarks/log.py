"""How fast the logs are, beside raw files and bare Kafka clients that carry the same bytes in the same run.

    python benchmarks/log.py [--kafka-only | --no-kafka] [--quick] [--json] [--folder FOLDER]

The embedded log; Kafka's rows are explained in benchmarks/log_kafka.py:

    append   log.append per group, against write + fdatasync of the same groups into a raw file
    read     log.read from the first record to the last, against reads of 1 MiB of the same bytes
    tail     from the append in one process to the record in another, paced writer
    crowd    4 writer processes and 2 readers, each record's way from append to both readers
    idle     processor time of a process that waits for records, against one that only sleeps 5 ms each time

Rounds of the two sides take turns and the ratio is the median of the rounds' ratios, because the speed of a
disk changes by the second. The folder should lie on the disk in question (default: the current folder).

Kafka's rows are measured on a broker that is started in that folder and ended with the run (it needs Java 17 and
Maven), or on the one at MILLSTREAM_TEST_KAFKA=host:port. What cannot be measured says why in a row of its own, and
what failed makes the exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median, quantiles
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import log_kafka  # noqa: E402

from streams.embedded.log import EmbeddedLog  # noqa: E402
from streams.log import NewRecord, TopicPartition  # noqa: E402

Row = dict[str, Any]
MB = 1e6
HEADERS = (("schema", b"1.0"), ("type", b"trajectory_finished"), ("id", b"0-17/3/0"), ("by", b"rollout-0"))


def timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


# -- append


def append_row(folder: Path, size: int, group: int, total: int, rounds: int, fsync: str, mode: str) -> Row:
    """One side by side of `total` bytes in records of `size`, `group` records per append.

    mode "wait": each append waits for the one before it, as the raw side does. "pipeline": all are submitted,
    and the log makes its own groups.
    """
    count = max(1, total // (size * group))
    value = os.urandom(size)
    records = [NewRecord(value, HEADERS) for _ in range(group)]
    log = EmbeddedLog(folder / "log", fsync=fsync)
    log.create_topic("t", 1)
    sync = getattr(os, "fdatasync", os.fsync)
    log.append("t", 0, records)
    raw_bytes = (folder / "log/topics/t/0" / f"{0:020d}.log").read_bytes()[32:]  # the bytes of one append

    def with_log() -> None:
        if mode == "wait":
            for _ in range(count):
                log.append("t", 0, records)
        else:
            futures = [log.submit("t", 0, records) for _ in range(count)]
            for future in futures:
                future.result(60)

    def with_file() -> None:
        with open(raw, "wb", buffering=0) as file:
            for _ in range(count):
                file.write(raw_bytes)
                if fsync != "never":
                    sync(file.fileno())

    speeds: list[tuple[float, float]] = []
    for index in range(rounds + 1):
        raw = folder / f"raw-{index}"
        first, second = (with_log, with_file) if index % 2 else (with_file, with_log)
        took = {first: timed(first), second: timed(second)}
        raw.unlink()
        log.truncate_before("t", 0, log.end("t", 0))
        if index:  # the first warms up
            speeds.append((took[with_log], took[with_file]))
    log.close()
    shutil.rmtree(folder / "log")
    done = count * len(raw_bytes) / MB
    return {
        "bench": "append",
        "case": f"{size >> 10} KB x {group}, fsync {fsync}, {mode}",
        "log_mb_s": round(median(done / ours for ours, _ in speeds), 1),
        "raw_mb_s": round(median(done / theirs for _, theirs in speeds), 1),
        "ratio": round(median(theirs / ours for ours, theirs in speeds), 2),
    }


# -- read


def read_row(folder: Path, size: int, total: int, rounds: int, headers: bool) -> Row:
    log = EmbeddedLog(folder / "log", fsync="never")
    log.create_topic("t", 1)
    value = os.urandom(size)
    group = max(1, (1 << 20) // size)
    for _ in range(total // (size * group)):
        log.append("t", 0, [NewRecord(value, HEADERS if headers else ())] * group)
    end = log.end("t", 0)
    files = sorted((folder / "log/topics/t/0").glob("*.log"))

    def with_log() -> None:
        position = 0
        while position < end:
            position = log.read("t", 0, position).next_position

    def with_file() -> None:
        for path in files:
            with open(path, "rb", buffering=0) as file:
                while file.read(1 << 20):
                    pass

    pairs = [(timed(with_log), timed(with_file)) for _ in range(rounds + 1)][1:]
    log.close()
    shutil.rmtree(folder / "log")
    return {
        "bench": "read",
        "case": f"{size >> 10} KB" + (", 4 headers" if headers else ""),
        "log_mb_s": round(median(end * size / MB / ours for ours, _ in pairs), 1),
        "raw_mb_s": round(median(end * size / MB / theirs for _, theirs in pairs), 1),
        "ratio": round(median(theirs / ours for ours, theirs in pairs), 2),
        "records_s": round(median(end / ours for ours, _ in pairs)),
    }


def fetch_row(folder: Path, size: int, total: int) -> Row:
    """Single records by offset in random order: how a trainer fetches payloads by reference."""
    log = EmbeddedLog(folder / "log", fsync="never")
    log.create_topic("t", 1)
    value = os.urandom(size)
    for _ in range(total // (size * 16)):
        log.append("t", 0, [NewRecord(value, HEADERS)] * 16)
    end = log.end("t", 0)
    offsets = [index * 7919 % end for index in range(min(end, 1000))]
    times: list[float] = []
    for offset in offsets:
        times.append(timed(lambda offset=offset: log.read("t", 0, offset, max_records=1) and None))
    log.close()
    shutil.rmtree(folder / "log")
    return {"bench": "fetch", "case": f"{size >> 10} KB, random", **in_ms(times)}


# -- latency


def in_ms(seconds: list[float]) -> Row:
    cuts = quantiles(seconds, n=100)
    return {"p50_ms": round(cuts[49] * 1e3, 3), "p99_ms": round(cuts[98] * 1e3, 3)}


CHILD = """
import sys, time
from streams.embedded.log import EmbeddedLog
from streams.log import NewRecord
path, fsync, partition, size, count, pause, group = sys.argv[1:]
log = EmbeddedLog(path, fsync=fsync)
body = b"x" * (int(size) - 8)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(int(count) // int(group)):
    time.sleep(float(pause))
    log.append("t", int(partition), [NewRecord(time.monotonic_ns().to_bytes(8, "big") + body)] * int(group))
log.close()
"""

READER = """
import json, sys, time
from datetime import timedelta
from streams.embedded.log import EmbeddedLog
from streams.log import TopicPartition
log = EmbeddedLog(sys.argv[1])
left = [int(sys.argv[2])] * int(sys.argv[3])
positions = {TopicPartition("t", partition): 0 for partition in range(len(left))}
took = []
print("ready", flush=True)
while any(place_end > positions["t", partition] for partition, place_end in enumerate(left)):
    if not log.wait(positions, timedelta(seconds=60)):
        sys.exit("nothing came")
    for place, position in positions.items():
        batch = log.read(*place, position)
        now = time.monotonic_ns()
        took += [(now - int.from_bytes(record.value[:8], "big")) / 1e9 for record in batch.records]
        positions[place] = batch.next_position
print(json.dumps(took))
"""


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout and process.stdout.readline() == "ready\n"
    return process


def say(process: subprocess.Popen[str], words: str) -> None:
    assert process.stdin
    process.stdin.write(words)
    process.stdin.flush()


def latency_row(
    folder: Path, bench: str, fsync: str, size: int, count: int, pause: float, writers: int, readers: int
) -> Row:
    """`writers` processes on a partition each; every reader reads all partitions."""
    path = folder / "log"
    group = 1 if pause else 16
    with EmbeddedLog(path) as log:
        log.create_topic("t", writers)
    following = [start(READER, path, count, writers) for _ in range(readers)]
    writing = [start(CHILD, path, fsync, index, size, count, pause, group) for index in range(writers)]
    started = time.perf_counter()
    for process in writing:
        say(process, "go\n")
    for process in writing:
        process.communicate()
    took = time.perf_counter() - started
    seconds: list[float] = []
    for process in following:
        seconds += json.loads(process.communicate()[0])
    shutil.rmtree(path)
    row = {
        "bench": bench,
        "case": f"{size >> 10} KB, fsync {fsync}, {writers} to {readers}",
        **in_ms(seconds),
    }
    if not pause:
        row["log_mb_s"] = round(writers * count * size / MB / took, 1)
    return row


def idle_row(folder: Path, seconds: float, partitions: int) -> Row:
    with EmbeddedLog(folder / "log") as log:
        log.create_topic("t", partitions)
        positions = {TopicPartition("t", partition): 0 for partition in range(partitions)}
        log.wait(positions, timedelta(seconds=0.2))  # past its quick start
        before = time.process_time()
        log.wait(positions, timedelta(seconds=seconds))
        used = time.process_time() - before
        before = time.process_time()
        for _ in range(int(seconds / 0.005)):
            time.sleep(0.005)
        bare = time.process_time() - before
    shutil.rmtree(folder / "log")
    return {
        "bench": "idle",
        "case": f"waits on {partitions} partitions",
        "core_percent": round(100 * used / seconds, 2),
        "sleep_percent": round(100 * bare / seconds, 2),
    }


# -- the table


def rows(folder: Path, quick: bool, add: Callable[[Row], None]) -> None:
    rounds = 3 if quick else 7
    scale = 1 if quick else 4
    small, large = 4 << 20, 24 << 20
    cases = [(1 << 10, 64), (32 << 10, 1), (32 << 10, 16), (256 << 10, 16)]
    if not quick:
        cases += [(1 << 10, 1), (32 << 10, 64), (256 << 10, 1)]
    for size, group in cases:
        total = small if size * group < 1 << 19 else large
        add(append_row(folder, size, group, total * scale, rounds, "group", "wait"))
    add(append_row(folder, 32 << 10, 16, large * scale, rounds, "group", "pipeline"))
    add(append_row(folder, 32 << 10, 16, large * scale, rounds, "never", "wait"))
    for size, headers in [(1 << 10, False), (1 << 10, True), (32 << 10, True), (256 << 10, True)]:
        add(read_row(folder, size, large * scale, rounds, headers))
    add(fetch_row(folder, 32 << 10, large))
    for fsync in ("never", "group"):
        for size in (1 << 10, 32 << 10):
            add(latency_row(folder, "tail", fsync, size, 150 * scale, 0.01, 1, 1))
    add(latency_row(folder, "crowd", "group", 32 << 10, 480 * scale, 0.0, 4, 2))
    add(idle_row(folder, 1.0 * scale, 8))


def shown(row: Row) -> str:
    figures = "  ".join(f"{name} {value}" for name, value in row.items() if name not in ("bench", "case"))
    return f"{row['bench']:<7} {row['case']:<40} {figures}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="smaller: 20 s, with Kafka 3 minutes")
    parser.add_argument("--json", action="store_true", help="one JSON list instead of the table")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where to write; it is cleaned up")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--kafka-only", action="store_true", help="without the embedded log's own rows")
    which.add_argument("--no-kafka", action="store_true", help="the embedded log alone")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the broker ends and the folder goes
    done: list[Row] = []

    def add(row: Row) -> None:
        done.append(row)
        if not options.json:
            print(shown(row), flush=True)

    folder = Path(tempfile.mkdtemp(prefix="bench-log-", dir=options.folder))
    try:
        add({"bench": "machine", "case": f"{os.cpu_count()} cores", "load": round(os.getloadavg()[0], 2)})
        if not options.kafka_only:
            rows(folder, options.quick, add)
        if not options.no_kafka:
            log_kafka.rows(folder, options.quick, add)
    finally:
        shutil.rmtree(folder)
    if options.json:
        print(json.dumps(done, indent=1))
    sys.exit(any(row["case"] == "failed" for row in done))


if __name__ == "__main__":
    main()
