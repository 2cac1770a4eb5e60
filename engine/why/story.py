"""Puts together what is on disk: the supervisor's record, the daemons' logs, the event log.

failures.jsonl ─┬─ of the newest supervision: the first failure that nobody had got over, then the later ones
logs/*.log ─────┤  the traceback of exactly that incarnation; without a record, the order of the logs' own times
the event log ──┴─ finished or not, what failed there, and how long before or after
"""

from __future__ import annotations

import fcntl
import re
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine.launch import failures
from engine.launch.daemon import describe_exit
from engine.launch.failures import Recorded
from engine.launch.supervisor import FENCED, LONGEST_PAUSE_S, SETTLED_S, WRONG_CONFIG
from engine.settings import Config
from engine.why import events, logs
from engine.why.events import Said

TIE_S = 0.2  # a supervisor looks ten times a second: of what is nearer than this it cannot tell the order
_OUR_WORDS = "millstream: "  # how a command of ours ends that raised an error of ours


class Failed(msgspec.Struct, kw_only=True):
    """One failure, told."""

    daemon: str
    at: float  # seconds since 1970; 0.0: not known
    how: str  # "exit code 1", "killed by SIGKILL"; "": only its log tells
    reason: str  # one line
    log: str
    started: str = ""
    lines: list[str] = []  # of the first failure: its traceback, or its last lines


class Story(msgspec.Struct, kw_only=True):
    """All that `millstream why` tells."""

    run: str
    run_dir: str
    state: str
    first: Failed | None = None
    may_be_first: list[str] = []  # daemons that failed in the same moment
    followed: list[Failed] = []
    got_over: int = 0  # failures of the same supervision before the first: restarts mended them
    order: str = ""  # how the order is known
    said: Said = msgspec.field(default_factory=Said)
    hint: str = ""


def tell(config: Config) -> Story:
    run_dir = Path(config.run.dir)
    said = events.look(config)
    supervisor = _supervisor(run_dir)
    story = Story(run=config.run.name, run_dir=str(run_dir), state=_state(said, supervisor), said=said)
    recorded = failures.read(run_dir)
    if recorded:
        _from_record(
            story, run_dir, [each for each in recorded if each.supervisor == recorded[-1].supervisor]
        )
    else:
        _from_logs(story, run_dir, is_running=supervisor is not None)
    if story.first is not None and _is_over(said, supervisor, recorded):
        story.first, story.followed, story.may_be_first = None, [], []
        story.got_over = sum(each.supervisor == recorded[-1].supervisor for each in recorded)
    if story.first is not None:
        story.hint = _hint(story.first)
    return story


def _is_over(said: Said, supervisor: int | None, recorded: Sequence[Recorded]) -> bool:
    """The run has finished, or goes on and has done so for longer than a restarted daemon takes to fail again."""
    if not recorded or recorded[-1].code in (WRONG_CONFIG, FENCED):
        return False
    goes_on = supervisor is not None and time.time() - recorded[-1].at > SETTLED_S + LONGEST_PAUSE_S
    return bool(said.finished) or goes_on


def _from_record(story: Story, run_dir: Path, recorded: Sequence[Recorded]) -> None:
    """The newest failure says which ones were open then: the oldest of these is the first cause."""
    newest = recorded[-1]
    begin = max(0, len(recorded) - max(1, len(newest.unsettled)))
    # The unsettled ones are not always the last in the file: others, which were got over, may stand between.
    names, picked = list(newest.unsettled) or [newest.daemon], []
    for each in reversed(recorded):
        if names and each.daemon == names[-1]:
            names.pop()
            picked.append(each)
        if not names:
            break
    picked.reverse()
    begin = recorded.index(picked[0]) if picked else begin
    told = [_told(run_dir, each) for each in (picked or recorded[begin:])]
    first = picked[0] if picked else recorded[begin]
    story.first, story.followed, story.got_over = told[0], told[1:], begin
    story.first.lines = _lines(run_dir, first)
    story.may_be_first = sorted(
        {each.daemon for each in picked[1:] if each.at - first.at < TIE_S and each.daemon != first.daemon}
    )
    story.order = "the supervisor's record"


def _told(run_dir: Path, recorded: Recorded) -> Failed:
    log = run_dir / "logs" / f"{recorded.daemon}.log"
    words = recorded.last_words.splitlines()
    return Failed(
        daemon=recorded.daemon,
        at=recorded.at,
        how=recorded.how or describe_exit(recorded.code),
        reason=logs.reason(words) if recorded.code >= 0 else "",
        log=str(log),
    )


def _lines(run_dir: Path, recorded: Recorded) -> list[str]:
    """From the log, whole; from the record where the log is gone."""
    found = logs.ending_at(run_dir / "logs" / f"{recorded.daemon}.log", recorded.log_bytes)
    words = recorded.last_words.splitlines()
    if found is None or (words and words[-1] not in found.lines):  # another rank's, or on another node's disk
        return words
    return found.last_lines() if recorded.code >= 0 else [line for line in found.lines if line.strip()][-8:]


def _from_logs(story: Story, run_dir: Path, *, is_running: bool) -> None:
    """No supervisor has recorded anything: daemons were started by hand, or by an older release."""
    told = []
    for each in logs.all_in(run_dir / "logs"):
        ended_badly = each.traceback() or (each.lines and each.lines[-1].startswith(_OUR_WORDS))
        if not ended_badly or (each.is_last and is_running):
            continue
        told.append(
            Failed(
                daemon=each.daemon,
                at=each.last_stamp,
                how="",
                reason=logs.reason(each.lines),
                log=str(each.file),
                started=each.started,
                lines=each.last_lines(),
            )
        )
    told.sort(key=lambda failed: failed.at)
    if told:
        story.first, story.followed = told[0], told[1:]
        for failed in story.followed:
            failed.lines = []
        story.order = "the times in the logs (no supervisor has recorded it)"


def _state(said: Said, supervisor: int | None) -> str:
    steps = f"after step {said.steps}" if said.steps else "before its first step"
    if said.finished:
        return f"finished ({said.finished}) {steps}"
    if not said.has_begun:
        return f"begun by process {supervisor}, no log yet" if supervisor else "stopped before it had a log"
    if said.problem:
        ending = f"process {supervisor} supervises it" if supervisor else "nobody supervises it"
        return f"not known: {said.problem}; {ending}"
    if supervisor:
        return f"going on {steps}, supervised by process {supervisor}"
    return f"stopped {steps}, not finished"


def _supervisor(run_dir: Path) -> int | None:
    """The process that holds the run's lock; None when nobody does."""
    try:
        with (run_dir / "supervisor.lock").open("r", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                holder = lock.read().strip()
                return int(holder) if holder.isdecimal() else 0
    except OSError:
        pass
    return None


def _hint(first: Failed) -> str:
    """Which command tells more, for what a traceback cannot say."""
    text = first.reason + "\n" + "\n".join(first.lines)
    if first.how == "killed by SIGKILL":
        return "SIGKILL comes from the kernel when memory is out, or from a person: dmesg | grep -i 'killed process'"
    if "out of memory" in text.lower():
        return "memory: lower trainer.micro_batch_tokens or rollout.max_concurrency (docs/troubleshooting.md)"
    if "No space left" in text or "LogFull" in text:
        return "the disk: millstream doctor CONFIG --only disk"
    if "LogUnavailable" in text:
        return "the broker: millstream doctor CONFIG --only broker"
    if found := re.search(r"importing ([\w.]+) failed", text):
        return f"its whole traceback: python -c 'import {found[1]}'"
    if first.how == "exit code 2":
        return "a wrong setting: millstream config CONFIG"
    if first.how == "exit code 3":
        return "another trainer has the run: end it, or leave the run to it"
    if "sglang" in text.lower():
        return f"the server's own log: {Path(first.log).parent}/sglang-*.log"
    return ""


def when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) if at else "at an unknown time"
