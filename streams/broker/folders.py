"""Where things lie that belong to a user and not to a run, and what must happen whole or not at all in them."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from streams.broker.errors import BrokerFailed


def cache_dir() -> Path:
    """For what can be fetched again: $MILLSTREAM_CACHE, or `millstream` in $XDG_CACHE_HOME or ~/.cache."""
    named = os.environ.get("MILLSTREAM_CACHE")
    return Path(named).expanduser().absolute() if named else _home("XDG_CACHE_HOME", ".cache") / "millstream"


def default_data_dir() -> Path:
    """For the topics of the development broker: `millstream/broker` in $XDG_STATE_HOME or ~/.local/state."""
    return _home("XDG_STATE_HOME", ".local/state") / "millstream" / "broker"


@contextmanager
def locked(file: Path, timeout: timedelta, doing: str) -> Iterator[None]:
    """Hold the lock of `file`, which is made if need be. The system gives it up when this process dies.

    Raises BrokerFailed when another process still holds it after `timeout`.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BrokerFailed(
                        f"another process has been {doing} for {timeout.total_seconds():.0f} s (it holds {file}); "
                        "let it end, or end it, and try again"
                    ) from None
                time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


def write_whole(file: Path, text: str) -> None:
    """Write `text` so that a reader, or a crash, finds either the old content or all of the new one."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    with draft.open("w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    draft.replace(file)


def _home(variable: str, fallback: str) -> Path:
    named = Path(os.environ.get(variable, ""))
    return named if named.is_absolute() else Path.home() / fallback  # the standard has relative ones ignored
