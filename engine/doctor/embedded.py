"""The embedded log: its folder, how long a sync takes, room, and whether locks hold on that file system."""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from engine.doctor.result import Request, Result, failed, passed, warned
from engine.settings import Config, samples_per_step

PREFIX = ".millstream-doctor-"  # of everything that a probe leaves in a folder for a moment
_SYNCS, _BYTES, _SLOW_S = 20, 32 << 10, 0.05
_SYNC_BUDGET_S = 5.0
_LEAST_BYTES = 256 << 20
_BYTES_A_TOKEN, _BYTES_A_SAMPLE = {"float32": 5.0, "fixed1024": 2.2}, 1024  # docs/kafka.md
_CHECKPOINT = 3  # a checkpoint holds weights and two moments of the optimizer
_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse", "lustre", "ceph", "glusterfs", "beegfs", "gpfs")
_LOCKS = (
    "put log.url on a local disk, or on a file system with POSIX locks; or use Kafka (log.url = kafka://…)"
)

# Answers whether another process holds the lock on the file that it is given.
_RIVAL = """
import fcntl, sys
try:
    fcntl.flock(open(sys.argv[1], "rb+"), fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    sys.exit(0)
sys.exit(9)
"""


def folder_of(request: Request) -> Path:
    """Where the log lies, or will lie."""
    url = request.config.log.url
    if url.startswith("file:"):
        return Path(unquote(urlsplit(url).path))
    return Path(request.config.run.dir) / "log"


def existing(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that is there."""
    folder = folder.absolute()
    while not os.path.lexists(folder):
        folder = folder.parent
    return folder


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A folder of our own, for a moment, where `folder` lies or will lie. Raises OSError."""
    place = Path(tempfile.mkdtemp(prefix=PREFIX, dir=existing(folder)))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def write_synced(file: Path, content: bytes) -> None:
    """As the log, weights and checkpoints are written: whole and synced under another name, then renamed."""
    draft = file.with_name(file.name + ".tmp")
    with draft.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    draft.replace(file)


def writable(request: Request) -> Result:
    folder = folder_of(request)
    try:
        with scratch(folder) as place:
            write_synced(place / "whole", b"x" * _BYTES)
            if (place / "whole").read_bytes() != b"x" * _BYTES:
                return failed(
                    f"{folder}: reads back other bytes than were written", "take another file system"
                )
    except OSError as error:
        return failed(
            f"{folder}: cannot be written: {error.strerror} ({error.filename})",
            "name a folder that you may write to: run.dir, or log.url = file:///path",
        )
    return passed(
        f"{folder}: written, synced, renamed, read back ({existing(folder)}, {file_system(folder)})"
    )


def sync_time(request: Request) -> Result:
    folder, times = folder_of(request), []
    try:
        with scratch(folder) as place, (place / "synced").open("wb") as out:
            began = time.monotonic()
            for _ in range(_SYNCS):
                at = time.monotonic()
                out.write(os.urandom(_BYTES))
                out.flush()
                os.fsync(out.fileno())
                times.append(time.monotonic() - at)
                if at - began > _SYNC_BUDGET_S:
                    break
    except OSError as error:
        return failed(f"{folder}: {error.strerror}", "as log-folder says")
    middle, longest = statistics.median(times), max(times)
    said = f"32 KiB and a sync: median {middle * 1e3:.1f} ms, longest {longest * 1e3:.1f} ms of {len(times)}"
    facts = {"median_s": middle, "longest_s": longest}
    if middle > _SLOW_S:
        return warned(
            f"{said}: each group of appends waits for it",
            "a faster disk for log.url; log.fsync = never loses the last records in a power cut, not in a crash",
            **facts,
        )
    return passed(said, **facts)


def room(request: Request) -> Result:
    """Free bytes and inodes, against what the run may write at most."""
    place = existing(Path(request.config.run.dir))
    try:
        disk = os.statvfs(place)
    except OSError as error:
        return failed(f"{place}: {error.strerror}", "name a folder on a disk that answers (run.dir)")
    free, inodes = disk.f_bavail * disk.f_frsize, disk.f_favail
    said = f"{place}: {_size(free)} free"
    if free < _LEAST_BYTES or (disk.f_files and inodes < 1000):
        return failed(
            f"{said}, {inodes} inodes: a run would stop for want of room",
            "make room (a stopped run goes on where it was), or move run.dir",
            free=free,
        )
    most, how = needed(request.config)
    if request.has_config and most > free:
        return warned(
            f"{said}; the run may write up to {_size(most)} ({how})",
            "watch it with df; lower weights.keep or checkpoint.keep_last, set rollout.logprob_format = fixed1024, or "
            "make room: a full disk pauses the run and loses nothing",
            free=free,
            needed=most,
        )
    return passed(
        f"{said}, {inodes} inodes" + (f"; at most {_size(most)} needed ({how})" if most else ""), free=free
    )


def needed(config: Config) -> tuple[int, str]:
    """Bytes at most: samples of full length, the kept versions and checkpoints. 0 for what has no bound."""
    model = model_bytes(config)
    files = model * (config.weights.keep + 1) + _CHECKPOINT * model * (config.checkpoint.keep_last + 1)
    log = 0
    if config.run.steps is not None and not config.log.url.startswith("kafka:"):
        tokens = config.rollout.rollout_max_response_len
        sample = tokens * _BYTES_A_TOKEN[config.rollout.logprob_format] + _BYTES_A_SAMPLE
        log = int(config.run.steps * samples_per_step(config) * sample)
    return files + log, f"log {_size(log)} if every sample is full, weights and checkpoints {_size(files)}"


def model_bytes(config: Config) -> int:
    folder = Path(config.model.path) if config.model.path else None
    if folder is None or not folder.is_dir():
        return 0
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def locks(request: Request) -> Result:
    """Two processes, one lock; and SQLite's write-ahead log, which needs shared memory beside the file."""
    folder = folder_of(request)
    kind = file_system(folder)
    try:
        with scratch(folder) as place:
            lock = place / "lock"
            lock.touch()
            with lock.open("rb+") as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                rival = subprocess.run([sys.executable, "-c", _RIVAL, str(lock)], timeout=30, check=False)
            if rival.returncode == 9:
                return failed(f"{folder} ({kind}): a second process took a lock that the first holds", _LOCKS)
            if rival.returncode:
                return failed(f"{folder} ({kind}): the second process ended with {rival.returncode}", _LOCKS)
            if (mode := _sqlite_mode(place / "catalog")) != "wal":
                return failed(f"{folder} ({kind}): SQLite gives journal mode {mode!r}, needed 'wal'", _LOCKS)
    except (OSError, sqlite3.Error) as error:
        return failed(f"{folder} ({kind}): {error}", _LOCKS)
    if kind in _REMOTE or kind.startswith("fuse"):
        return warned(
            f"{folder} is on {kind}: locks hold between processes of this machine; between machines SQLite's do not",
            "run every daemon of an embedded log on one machine, or use Kafka",
        )
    return passed(f"{folder} ({kind}): a held lock is refused to a second process; SQLite runs in WAL mode")


def _sqlite_mode(file: Path) -> str:
    connection = sqlite3.connect(file, timeout=5)
    try:
        (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
        connection.execute("CREATE TABLE seen (at INTEGER)")
        connection.execute("INSERT INTO seen VALUES (1)")
        connection.commit()
        return str(mode)
    finally:
        connection.close()


def file_system(folder: Path) -> str:
    """Its type by /proc/mounts; "unknown" where that does not tell."""
    place = existing(folder)
    best, kind = "", "unknown"
    try:
        mounts = Path("/proc/mounts").read_text("utf-8", "replace").splitlines()
    except OSError:
        return kind
    for mount in mounts:
        fields = mount.split()
        point = fields[1].replace("\\040", " ")
        if (place == Path(point) or Path(point) in place.parents) and len(point) >= len(best):
            best, kind = point, fields[2]
    return kind


def not_embedded(request: Request) -> str:
    """Why these are skipped; ""."""
    return "" if _is_embedded(request) else f"the log is {request.config.log.url.partition(':')[0]}"


def _is_embedded(request: Request) -> bool:
    return request.config.log.url.startswith("file:") or not request.config.log.url


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
