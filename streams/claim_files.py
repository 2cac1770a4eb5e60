"""The files of claim-checked values (streams/claims.py): where they lie, how they get there, how they are checked.

    <claims>/claims.id                     says that this is a folder of claims, and which one
    <claims>/<topic>/<partition>/<sha256>  one value, named by the SHA-256 of its bytes
    <claims>/<topic>/<partition>/lock      flock: shared while appends that refer to files here are on their way, alone
                                           while files are removed

A file is written under another name, synced, renamed, and the folder synced, before anything refers to it. So a file
is there whole or not at all, a value that is written again (a retry) is found and not written twice, and a full disk
leaves nothing that a record refers to.

A reference carries the id of its folder: a machine on which the run directory is not mounted, or on which another
folder lies in its place, is told apart (LogUnavailable, an outage) from a file that is gone (ClaimLost, a loss).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import threading
import time
import uuid
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from streams.checks import MOST_CLAIM_BYTES
from streams.embedded.files import storage_error, sync_folder
from streams.errors import ClaimLost, LogFull, LogUnavailable
from streams.log import Headers, TopicPartition

CLAIM = (
    "claim"  # header of a reference, always the last one: "<size> <folder id> <topic>/<partition>/<sha256>"
)
LOST = "claim-lost"  # header that a reader is given after it, when the value cannot be had: why

_HEADER = re.compile(
    rb"(?P<size>[0-9]{1,12}) (?P<folder>[0-9a-f]{16}) (?P<path>[A-Za-z0-9_][A-Za-z0-9._-]*/[0-9]+/[0-9a-f]{64})"
)
_ID = re.compile(r"[0-9a-f]{16}")
_VALUE = re.compile(r"[0-9a-f]{64}")
_UNFINISHED = ".new"
# What another try cannot mend. Everything else that a disk or a network file system answers may pass.
_LASTING = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EINVAL}

_open_folders: weakref.WeakSet[ClaimFolder] = weakref.WeakSet()  # only for the hook after a fork


class Claim(NamedTuple):
    """Where a value lies. The last part of `path` is the SHA-256 of its bytes, in hex."""

    size: int  # bytes
    folder: str  # id of the claims folder
    path: str  # relative to the claims folder

    def header(self) -> tuple[str, bytes]:
        return CLAIM, f"{self.size} {self.folder} {self.path}".encode()


def claim_of(headers: Headers) -> bytes | None:
    """The reference in the headers of a record of the log; None when the record holds its value itself."""
    return headers[-1][1] if headers and headers[-1][0] == CLAIM else None


def parse(header: bytes) -> Claim:
    """Raises ClaimLost for what is no reference, or one to more bytes than there may be."""
    found = _HEADER.fullmatch(header)
    if found is None or int(found["size"]) > MOST_CLAIM_BYTES:
        raise ClaimLost(
            f"reference to a claims file {header[:300]!r}: needs a size, a folder's id and a path"
        )
    return Claim(int(found["size"]), found["folder"].decode(), found["path"].decode())


class ClaimFolder:
    """The files of one log, shared by all processes that use it. Safe to use from several threads.

    >>> claims = ClaimFolder("/tmp/run/claims")                     # doctest: +SKIP
    >>> claims.hold(place)                                          # doctest: +SKIP
    >>> (claim,) = claims.write(place, [b"a large value"])          # doctest: +SKIP
    >>> log.append(*place, [NewRecord(b"", (claim.header(),))])     # doctest: +SKIP
    >>> claims.release(place)                                       # doctest: +SKIP
    >>> claims.read(claim)                                          # doctest: +SKIP
    b'a large value'
    """

    def __init__(
        self, root: str | os.PathLike[str], *, lock_timeout: timedelta = timedelta(seconds=30)
    ) -> None:
        self.root = Path(root)
        self._lock_timeout_s = lock_timeout.total_seconds()
        self._id = ""
        self._guard = threading.Lock()
        self._held: dict[TopicPartition, tuple[int, int]] = {}  # place → (descriptor of its lock, appends)
        _open_folders.add(self)

    # -- writing

    def write(self, place: TopicPartition, values: Sequence[bytes]) -> list[Claim]:
        """Store the values. They are durable when this returns; the caller holds the place.

        Raises LogFull, LogUnavailable for what may pass, LogError for what will not.
        """
        folder = self._folder(place)
        with _storage(folder, f"writing {sum(map(len, values))} bytes that are too large for the log"):
            names = [self._write(folder, value) for value in values]
            sync_folder(folder)  # also for a file that was found: its writer may have died before this
            return [
                Claim(len(value), self._id, f"{place.topic}/{place.partition}/{name}")
                for value, name in zip(values, names, strict=True)
            ]

    def _write(self, folder: Path, value: bytes) -> str:
        name = hashlib.sha256(value).hexdigest()
        path = folder / name
        try:
            _checked(path, len(value))
            os.utime(path)  # wanted again: it is as young as this try
            return name
        except (FileNotFoundError, ClaimLost):
            pass
        unfinished = folder / f"{name}.{uuid.uuid4().hex}{_UNFINISHED}"
        try:
            with open(unfinished, "wb") as file:
                file.write(value)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise
        return name

    def hold(self, place: TopicPartition) -> None:
        """No file of this place is removed until `release`. Raises LogUnavailable when the lock cannot be had."""
        if self._hold_again(place):
            return
        folder = self._folder(place)
        with _storage(folder, "making the folder of values that are too large for the log"):
            self._make(folder)
            fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._share(fd, folder / "lock")
        except BaseException:
            os.close(fd)
            raise
        with self._guard:
            if place not in self._held:
                self._held[place] = (fd, 1)
                return
        _let_go(fd)
        if not self._hold_again(place):
            self.hold(place)

    def _hold_again(self, place: TopicPartition) -> bool:
        with self._guard:
            if place in self._held:
                fd, appends = self._held[place]
                self._held[place] = (fd, appends + 1)
            return place in self._held

    def release(self, place: TopicPartition) -> None:
        with self._guard:
            fd, appends = self._held.get(place, (-1, 0))
            if appends > 1:
                self._held[place] = (fd, appends - 1)
            elif appends:
                del self._held[place]
                _let_go(fd)

    def _share(self, fd: int, path: Path) -> None:
        deadline = time.monotonic() + self._lock_timeout_s
        while not _try_lock(fd, fcntl.LOCK_SH):
            if time.monotonic() >= deadline:
                raise LogUnavailable(
                    f"waited {self._lock_timeout_s:g} s for {path}: another process removes files there"
                )
            time.sleep(0.002)

    def _make(self, folder: Path) -> None:
        """The folder and all above it, durable, and the id of the root."""
        missing = []
        at = folder
        while not at.is_dir():
            missing.append(at)
            at = at.parent
        for each in reversed(missing):
            each.mkdir(exist_ok=True)
            sync_folder(each.parent)
        if not self._id:
            self._id = self._read_id() or self._make_id()

    def _make_id(self) -> str:
        unfinished = self.root / f"claims.id.{uuid.uuid4().hex}{_UNFINISHED}"
        with open(unfinished, "w", encoding="ascii") as file:
            file.write(uuid.uuid4().hex[:16] + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(unfinished, self.root / "claims.id")  # the first of several processes wins
        except OSError:
            if not self._read_id():  # damaged, or a file system without hard links
                os.replace(unfinished, self.root / "claims.id")
        unfinished.unlink(missing_ok=True)
        sync_folder(self.root)
        return self._read_id()

    def _read_id(self) -> str:
        """Empty when there is none (or none that could be ours)."""
        try:
            found = (self.root / "claims.id").read_text(encoding="ascii", errors="replace").strip()
        except FileNotFoundError:
            return ""
        return found if _ID.fullmatch(found) else ""

    # -- reading

    def read(self, claim: Claim) -> bytes:
        """The value, checked by size and digest.

        Raises ClaimLost when the file is gone or damaged, LogUnavailable when the folder cannot be looked into.
        """
        path = self.root / claim.path
        try:
            return _checked(path, claim.size)
        except FileNotFoundError:
            raise self._absent(path, claim) from None
        except OSError as error:
            raise LogUnavailable(f"{path} cannot be read: {error.strerror or error}") from error

    def _absent(self, path: Path, claim: Claim) -> ClaimLost | LogUnavailable:
        try:
            here = self._read_id()
        except OSError as error:
            return LogUnavailable(f"{self.root} cannot be read: {error.strerror or error}")
        if here == claim.folder:
            return ClaimLost(f"{path} is missing ({claim.size} bytes)")
        what = f"is another one (id {here})" if here else "is not there"
        return LogUnavailable(
            f"{path} is needed, and the claims folder {self.root} {what}, not the one that was written to (id "
            f"{claim.folder}): all machines of a run must share its run directory"
        )

    # -- removing

    def old(self, place: TopicPartition, age: timedelta) -> list[str]:
        """Names of the files that nobody has written or wanted again for so long, by the file system's own clock."""
        folder = self._folder(place)
        found = []
        try:
            os.utime(folder / "lock")
            newest = (folder / "lock").stat().st_mtime - age.total_seconds()
            with os.scandir(folder) as entries:
                for entry in entries:
                    known = _VALUE.fullmatch(entry.name) or entry.name.endswith(_UNFINISHED)
                    if known and entry.stat().st_mtime <= newest:
                        found.append(entry.name)
        except FileNotFoundError:
            return []  # nothing was ever written here
        return found

    @contextmanager
    def alone(self, place: TopicPartition) -> Iterator[bool]:
        """Gives True while no append that refers to a file of this place is on its way, in any live process."""
        fd = os.open(self._folder(place) / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            yield _try_lock(fd, fcntl.LOCK_EX, without=False)
        finally:
            _let_go(fd)

    def remove(self, place: TopicPartition, names: Sequence[str]) -> int:
        """Remove these files; the caller is alone and has seen that no kept record refers to them."""
        for name in names:
            (self._folder(place) / name).unlink(missing_ok=True)
        return len(names)

    # -- life

    def _folder(self, place: TopicPartition) -> Path:
        return self.root / place.topic / str(place.partition)

    def close(self) -> None:
        """Give up what is still held. Twice is harmless."""
        with self._guard:
            for fd, _ in self._held.values():
                _let_go(fd)
            self._held = {}
        _open_folders.discard(self)

    def _after_fork(self) -> None:
        """In the child: its parent's appends are not its own. Closing the copies leaves the parent's locks alone."""
        for fd, _ in self._held.values():
            os.close(fd)
        self._held = {}
        self._guard = threading.Lock()


def _checked(path: Path, size: int) -> bytes:
    """The bytes of a file that should hold so many, and be named by their digest.

    Raises ClaimLost for one that does not, and FileNotFoundError.
    """
    with open(path, "rb") as file:
        found = os.fstat(file.fileno()).st_size
        value = file.read() if found == size else b""
    if len(value) != size:
        raise ClaimLost(f"{path} has {found} bytes, {size} were written")
    digest = hashlib.sha256(value).hexdigest()
    if digest != path.name:
        raise ClaimLost(f"{path} is damaged: the SHA-256 of its {size} bytes is {digest[:16]}…, not its name")
    return value


def _try_lock(fd: int, kind: int, *, without: bool = True) -> bool:
    """False when another process has it. `without`: the answer on a file system that has no locks."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        return without if error.errno not in (errno.EWOULDBLOCK, errno.EACCES) else False
    return True


def _let_go(fd: int) -> None:
    """Unlock by name before closing: a process that was forked meanwhile has a copy of the descriptor."""
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)
    except OSError:
        pass  # a file system without locks
    os.close(fd)


@contextmanager
def _storage(folder: Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        known = storage_error(error, folder, what)
        if isinstance(known, LogFull) or error.errno in _LASTING:
            raise known from error
        raise LogUnavailable(str(known)) from error


def _renew_after_fork() -> None:
    for folder in list(_open_folders):
        folder._after_fork()


os.register_at_fork(after_in_child=_renew_after_fork)
