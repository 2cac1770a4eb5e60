"""What a log folder holds besides records: its format, topics, group hints and shares. Plain files.

    format.json                                {"format": "millstream-log", "version": "1.0"}
    topics/<topic>/topic.json                  {"partitions": 4}; a topic exists once this file does
    topics/<topic>/<partition>/                see writer.py
    groups/<group>/<topic>.hints               one i64 per partition: position + 1, 0 for none
    groups/<group>/<topic>.<replica>.share     who holds the share; the holder keeps a flock on it
    groups/<group>/lock                        taken for the moment in which a share is checked and taken

There is no database here: a hint is one aligned store into a mapped file, which cannot wait for a disk or a
lock and survives a fork, and everything can be read without changing anything (SQLite in WAL mode cannot).
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import threading
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from struct import iter_unpack, pack_into
from typing import Any

from streams.checks import check_name, check_partitions
from streams.embedded.files import lock, sync_folder, try_lock, unlock, write_at, write_new
from streams.embedded.writer import create_partition
from streams.errors import LogError, ShareHeld, TopicMismatch
from streams.log import Membership, TopicPartition, share

logger = logging.getLogger(__name__)

FORMAT_NAME = "millstream-log"
MAJOR, MINOR = 1, 0


class Catalog:
    """The folder of one log."""

    def __init__(self, root: Path, *, readonly: bool, lock_timeout_s: float) -> None:
        self.root = root
        self._readonly = readonly
        self._lock_timeout_s = lock_timeout_s
        self._hints: dict[tuple[str, str], mmap.mmap] = {}
        if not readonly:
            self._create()
        self._check_format()

    def close(self) -> None:
        for words in self._hints.values():
            words.close()
        self._hints.clear()

    # -- format

    def _create(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        path = self.root / "format.json"
        if path.exists():
            return
        strangers = [name for name in os.listdir(self.root) if not name.startswith("format.json.")]
        if strangers and not path.exists():  # another process may have made it in between
            raise LogError(
                f"{self.root} is not a log and not empty (it has {strangers[0]!r}): name a new folder"
            )
        write_new(path, json.dumps({"format": FORMAT_NAME, "version": f"{MAJOR}.{MINOR}"}).encode() + b"\n")

    def _check_format(self) -> None:
        path = self.root / "format.json"
        try:
            content = json.loads(path.read_bytes())
            name, version = content["format"], str(content["version"])
            major = int(version.split(".")[0])
        except FileNotFoundError:
            raise LogError(f"{self.root} is not a log: it has no format.json") from None
        except (ValueError, KeyError, TypeError) as error:
            raise LogError(f"{path} cannot be read as a log's format: {error!r}") from error
        if name != FORMAT_NAME:
            raise LogError(f"{path} names the format {name!r}, not {FORMAT_NAME!r}")
        if major > MAJOR:
            raise LogError(
                f"{self.root} has log format {version}; this version of millstream reads up to {MAJOR}.x: "
                "use the version that wrote it, or a newer one"
            )

    # -- topics

    def topics(self) -> dict[str, int]:
        found: dict[str, int] = {}
        try:
            names = os.listdir(self.root / "topics")
        except FileNotFoundError:
            return {}
        for name in sorted(names):
            partitions = self.partitions(name)
            if partitions is not None:
                found[name] = partitions
        return found

    def partitions(self, topic: str) -> int | None:
        """Number of partitions, or None when there is no such topic."""
        path = self.root / "topics" / topic / "topic.json"
        try:
            return int(json.loads(path.read_bytes())["partitions"])
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise LogError(f"{path} cannot be read: {error!r}") from error

    def create_topic(self, topic: str, partitions: int) -> None:
        """Make every partition, then the file that makes the topic exist; safe against a racing process."""
        check_name("topic", topic)
        check_partitions(topic, partitions)
        known = self.partitions(topic)
        if known is None:
            if self._readonly:
                raise LogError(f"no topic {topic!r}, and {self.root} is open read-only: it cannot be created")
            folder = self.root / "topics" / topic
            folder.mkdir(parents=True, exist_ok=True)
            with _Locked(folder / "lock", self._lock_timeout_s):
                known = self.partitions(topic)
                if known is None:
                    for partition in range(partitions):
                        create_partition(folder / str(partition))
                    sync_folder(self.root)
                    sync_folder(folder.parent)
                    write_new(folder / "topic.json", json.dumps({"partitions": partitions}).encode() + b"\n")
                    return
        if known != partitions:
            raise TopicMismatch(f"topic {topic!r} has {known} partitions, {partitions} were asked for")

    def partition_folder(self, topic: str, partition: int) -> Path:
        return self.root / "topics" / topic / str(partition)

    # -- hints

    def commit_hint(
        self, group: str, positions: Mapping[TopicPartition, int], topics: dict[str, int]
    ) -> None:
        for place, position in positions.items():
            words = self._hints_of(group, place.topic, topics[place.topic])
            pack_into("<q", words, 8 * place.partition, position + 1)

    def _hints_of(self, group: str, topic: str, partitions: int) -> mmap.mmap:
        words = self._hints.get((group, topic))
        if words is None:
            check_name("group", group)
            path = self.root / "groups" / group / f"{topic}.hints"
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                with _Locked(path.parent / "lock", self._lock_timeout_s):
                    size = os.fstat(fd).st_size
                    if size < 8 * partitions:  # written out: a hole could not be filled on a full disk
                        write_at(fd, bytes(8 * partitions - size), size)
                words = mmap.mmap(fd, 8 * partitions)
            finally:
                os.close(fd)
            self._hints[group, topic] = words
        return words

    def hints(self, group: str) -> dict[TopicPartition, int]:
        found: dict[TopicPartition, int] = {}
        for path in sorted((self.root / "groups" / group).glob("*.hints")):
            topic = path.name[: -len(".hints")]
            raw = path.read_bytes()
            for partition, (word,) in enumerate(iter_unpack("<q", raw[: len(raw) // 8 * 8])):
                if word:
                    found[TopicPartition(topic, partition)] = word - 1
        return found

    def groups(self, beginning: str = "") -> list[str]:
        try:
            names = os.listdir(self.root / "groups")
        except FileNotFoundError:
            return []
        return sorted(name for name in names if name.startswith(beginning) and self.hints(name))

    # -- shares

    def join(
        self, group: str, topic: str, partitions: int, replica: int, replicas: int, member: str
    ) -> FileMembership:
        check_name("group", group)
        mine = share(partitions, replica, replicas)
        if self._readonly:
            raise LogError(f"{self.root} is open read-only: a share of group {group!r} cannot be taken")
        folder = self.root / "groups" / group
        folder.mkdir(parents=True, exist_ok=True)
        with _Locked(folder / "lock", self._lock_timeout_s):
            for path in folder.glob(f"{topic}.*.share"):
                other = path.name[len(topic) + 1 : -len(".share")]
                if not other.isdigit():
                    continue  # of another topic, whose name begins with this one's
                holder = _live_holder(path)
                if holder and (int(other) == replica or holder.get("replicas") != replicas):
                    raise ShareHeld(
                        f"group {group!r} on {topic!r}: share {replica}/{replicas} was asked for, but "
                        f"{_described(holder)} holds share {other}/{holder.get('replicas')}"
                    )
            return FileMembership(folder / f"{topic}.{replica}.share", mine, replicas, member)


class FileMembership(Membership):
    """A share, held by a flock on its file: it ends with the process, however that ends."""

    def __init__(self, path: Path, partitions: frozenset[int], replicas: int, member: str) -> None:
        self._partitions = partitions
        self._thread_lock = threading.Lock()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if not try_lock(self._fd):  # cannot happen under the group's lock, unless files were moved by hand
            os.close(self._fd)
            raise ShareHeld(f"{path} is held by {_described(_content(path))}")
        holder = {
            "member": member,
            "pid": os.getpid(),
            "since_ms": time.time_ns() // 1_000_000,
            "replicas": replicas,
        }
        try:
            os.ftruncate(self._fd, 0)
            write_at(self._fd, json.dumps(holder).encode(), 0)
        except OSError:
            self.close()
            raise

    def partitions(self) -> frozenset[int]:
        return self._partitions

    @property
    def generation(self) -> int:
        return 1  # a share never changes while it is held

    def close(self) -> None:
        with self._thread_lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def forget(self) -> None:
        """In a forked child: the share is the parent's, and must not outlive it here."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _Locked:
    """A file lock for the length of a with block."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._fd = -1

    def __enter__(self) -> None:
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            lock(self._fd, self._path, self._timeout_s)
        except BaseException:
            os.close(self._fd)
            raise

    def __exit__(self, *_: object) -> None:
        unlock(self._fd)
        os.close(self._fd)


def _content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _live_holder(path: Path) -> dict[str, Any] | None:
    """What the holder wrote; None when nobody holds the share now."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if try_lock(fd):
            return None
        return _content(path) or {"replicas": None}
    finally:
        os.close(fd)


def _described(holder: dict[str, Any]) -> str:
    since = holder.get("since_ms")
    moment = (
        datetime.fromtimestamp(since / 1000, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC") if since else "?"
    )
    name = f" ({holder['member']})" if holder.get("member") else ""
    return f"process {holder.get('pid', '?')}{name}, since {moment},"
