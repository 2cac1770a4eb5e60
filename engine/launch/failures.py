"""Each failure of a daemon that a supervisor saw, in the order in which it saw them: `<run.dir>/failures.jsonl`.

For people and `millstream why` alone; no daemon reads it, and a run without it goes on as well.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

logger = logging.getLogger(__name__)

FILE = "failures.jsonl"
_LONGEST = 64 << 10  # characters of last words


class Failure(Protocol):
    """What a launcher knows of one."""

    @property
    def name(self) -> str: ...
    @property
    def code(self) -> int: ...
    @property
    def how(self) -> str: ...
    @property
    def last_words(self) -> str: ...


class Recorded(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One failure. A field that is added later has a default."""

    at: float  # seconds since 1970
    daemon: str
    code: int  # exit code, or minus the number of the signal
    how: str = ""  # it ended, in words: "killed by SIGKILL", "its node host-b was lost"
    last_words: str = ""
    supervisor: int = 0  # process id: failures of one supervision belong together
    log_bytes: int = 0  # size of the daemon's log then: it ends with this failure
    unsettled: list[str] = []  # daemons whose failures nobody had got over, in order, this one included


def record(run_dir: Path, failure: Failure, unsettled: Sequence[Failure]) -> None:
    """Append it. What cannot be written is said in the log and costs nothing else."""
    log_file = run_dir / "logs" / f"{failure.name}.log"
    try:
        size = log_file.stat().st_size if log_file.exists() else 0
        line = msgspec.json.encode(
            Recorded(
                at=time.time(),
                daemon=failure.name,
                code=failure.code,
                how=failure.how,
                last_words=failure.last_words[-_LONGEST:],
                supervisor=os.getpid(),
                log_bytes=size,
                unsettled=[each.name for each in unsettled],
            )
        )
        with (run_dir / FILE).open("ab") as file:
            file.write(line + b"\n")  # one write: a kill leaves a whole line, or a torn last one
    except OSError as error:
        logger.warning("%s: the failure of %s is not recorded: %s", run_dir / FILE, failure.name, error)


def read(run_dir: Path) -> list[Recorded]:
    """In order; [] where there are none. A torn line is passed over."""
    try:
        lines = (run_dir / FILE).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            found.append(msgspec.json.decode(line, type=Recorded))
        except msgspec.DecodeError:
            continue
    return found
