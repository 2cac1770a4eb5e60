"""The daemons' log files: one incarnation after another, each begun by a line of its own, and what it ended with."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from engine.launch.daemon import START_MARK

_LINES = 15  # shown of a log that ends without a traceback
_TRACEBACK = "Traceback (most recent call last)"
# Python writes these between the tracebacks of one chain of exceptions.
_LINKS = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_STAMP = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) ")
_CHUNK = 8 << 20  # bytes read at most before the end of one incarnation


class Incarnation(NamedTuple):
    """One process of a daemon, as its log shows it."""

    daemon: str
    file: Path
    started: str  # as the first line says, 2026-11-30T05:00:00+0000
    lines: list[str]
    is_last: bool

    @property
    def last_stamp(self) -> float:
        """Seconds since 1970 of the last line that has a time; 0.0 without one."""
        for line in reversed(self.lines):
            if found := _STAMP.match(line):
                return time.mktime(time.strptime(found[1], "%Y-%m-%d %H:%M:%S")) + int(found[2]) / 1000
        return 0.0

    def traceback(self) -> list[str]:
        """The last one, with all exceptions that it was raised from; [] when there is none."""
        return traceback_in(self.lines)

    def last_lines(self) -> list[str]:
        """Its traceback, else the last lines."""
        return self.traceback() or [line for line in self.lines if line.strip()][-_LINES:]


def traceback_in(lines: list[str]) -> list[str]:
    starts = [at for at, line in enumerate(lines) if line.lstrip().startswith(_TRACEBACK)]
    if not starts:
        return []
    begin = starts[-1]
    for start in reversed(starts[:-1]):
        between = [line.strip() for line in lines[start:begin]]
        if not between or not any(link in between[-3:] for link in _LINKS):
            break
        begin = start
    end = _end_of(lines, starts[-1])
    return lines[begin:end]


def _end_of(lines: list[str], start: int) -> int:
    """Behind the exception's own line, and what it says over several: until the next line of the log itself."""
    at = start + 1
    while at < len(lines) and (lines[at].startswith((" ", "\t")) or not lines[at].strip()):
        at += 1
    at += 1  # the line `Error: message`
    while at < len(lines) and not _STAMP.match(lines[at]) and not lines[at].startswith(START_MARK):
        at += 1
    return min(at, len(lines))


def reason(lines: list[str]) -> str:
    """The one line that says most: `ValueError: no such thing` of a traceback, else the last line."""
    trace = traceback_in(lines)
    if not trace:
        said = [line for line in lines if line.strip()]
        return said[-1].strip() if said else ""
    starts = [at for at, line in enumerate(trace) if line.lstrip().startswith(_TRACEBACK)]
    for line in trace[starts[-1] + 1 :]:
        if line.strip() and not line.startswith((" ", "\t")):
            return line.strip()
    return trace[-1].strip()


def ending_at(file: Path, size: int) -> Incarnation | None:
    """The incarnation that had written last when the file had `size` bytes. None where the log is gone or empty."""
    found = list(_incarnations(file, size))
    return found[-1] if found else None


def all_in(folder: Path) -> list[Incarnation]:
    """Every incarnation of every daemon, in the order of the files' names."""
    return [each for file in sorted(folder.glob("*.log")) for each in _incarnations(file, None)]


def _incarnations(file: Path, size: int | None) -> Iterator[Incarnation]:
    try:
        with file.open("rb") as opened:
            end = opened.seek(0, 2) if size is None or size <= 0 else size
            opened.seek(max(0, end - _CHUNK))
            text = opened.read(min(end, _CHUNK)).decode("utf-8", "replace")
    except OSError:
        return
    lines = text.splitlines()
    marks = [at for at, line in enumerate(lines) if line.startswith(START_MARK)]
    for at, mark in enumerate(marks):
        is_last = at + 1 == len(marks)
        end_line = len(lines) if is_last else marks[at + 1]
        started = lines[mark][len(START_MARK) :].strip().partition(": ")[0]
        yield Incarnation(file.stem, file, started, lines[mark + 1 : end_line], is_last)
