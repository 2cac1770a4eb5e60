"""The file-system steps that the embedded log needs: locks with a deadline, durable names, whole writes."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from streams.errors import LogError, LogFull, LogUnavailable

fdatasync = getattr(os, "fdatasync", os.fsync)  # macOS has none

_MAX_PARTS = 1024  # IOV_MAX of Linux and macOS
_JOINED_BYTES = 128 << 10
_SMALL_PART = 2048
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def sync_folder(folder: Path) -> None:
    """Make created, renamed and removed names of the folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_new(path: Path, content: bytes) -> None:
    """Create or replace a file so that it is there whole or not at all, also after a power cut."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_at(fd: int, data: bytes, position: int) -> None:
    """Write all of it; a short write (disk nearly full) goes on until it is done or fails."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, position)
        if written == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        view, position = view[written:], position + written


def write_parts(fd: int, parts: Sequence[bytes], size: int, position: int) -> None:
    """Write the parts one after the other: small ones as one copy, large ones from where they are."""
    if size < max(_JOINED_BYTES, _SMALL_PART * len(parts)):
        write_at(fd, b"".join(parts), position)
        return
    for first in range(0, len(parts), _MAX_PARTS):
        some = parts[first : first + _MAX_PARTS]
        wanted = sum(map(len, some))
        written = os.pwritev(fd, some, position)
        if written < wanted:
            write_at(fd, b"".join(some)[written:], position + written)
        position += wanted


@contextmanager
def storage(path: Path, what: str) -> Iterator[None]:
    """Turn an OSError of the block into a LogError that says what was tried and where."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, path, what) from error


def storage_error(error: OSError, path: Path, what: str) -> LogError:
    """LogFull when there is no room, LogError for every other failure of the disk."""
    kind = LogFull if error.errno in _NO_ROOM else LogError
    return kind(f"{what} in {path} failed: {error.strerror or error}; nothing was appended")


def try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def lock(fd: int, path: Path, timeout_s: float) -> None:
    """Take the lock, or raise LogUnavailable with the process that holds it.

    A killed process lets go at once; a stopped one is why there is a deadline, and so polling: a blocking
    flock cannot be given one in a thread.
    """
    started = time.monotonic()
    while not try_lock(fd):
        waited = time.monotonic() - started
        if waited > timeout_s:
            raise LogUnavailable(f"waited {waited:.1f} s for the lock {path}, held by {lock_holder(fd)}")
        time.sleep(min(0.001, 0.0001 + waited / 10))


def unlock(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_UN)


def lock_holder(fd: int) -> str:
    """ "process 123" from the kernel's table, for messages only."""
    inode = f":{os.fstat(fd).st_ino}"
    try:
        with open("/proc/locks") as table:
            for line in table:
                words = line.split()
                if "FLOCK" in words and "->" not in words and words[5].endswith(inode):
                    return f"process {words[4]}"
    except OSError:
        pass
    return "another process"
