"""What the log of a run under faults of its engines says: figures, and the promises that were broken.

Beyond `millstream verify`, which judges what was trained, every sample of the log is judged here, trained or not:
the daemon that made it had acknowledged each of its versions before, in that very life, with the trainer's digest.
And what the trainer measured on samples of its own version tells whether the weights were the ones of that name.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from replay.records import Entry, entries
from replay.verify import verify
from streams.events import (
    BatchCut,
    EngineFailed,
    EngineJoined,
    EngineReady,
    EpochStarted,
    Metrics,
    Paused,
    Resumed,
    StepMeasured,
    TrajectoryFinished,
    TransferGroupEnded,
    TransferGroupFormed,
    WeightsPublished,
)
from streams.log import EventLog
from streams.topics import Topics

MOST_LOG_RATIO = 1e-3  # mean over a sample's tokens, in float32, of the same weights in two processes
SPARE_S = 8.0  # beyond the deadline: what a busy machine may add to a step

Version = tuple[int, int]  # (epoch, version)


class Figures(NamedTuple):
    steps: int
    versions: int
    epochs: int
    acknowledged: int  # EngineReady
    by_transport: dict[str, int]  # of them
    groups_formed: int
    broadcast_versions: int  # that named a group
    broadcasts_failed: int
    engines_failed: dict[str, int]  # reason → EngineFailed
    longest_gap_s: float  # from one cut to the next in one life of the trainer
    longest_step_s: float  # of a step, with what publishing held it up
    longest_to_publish_s: float  # from the cut until the version is published
    longest_takeover_s: float  # from one cut to the next over a killed trainer
    samples: int
    samples_of_many_versions: int
    largest_log_ratio: float  # of samples of the trainer's own version
    log_ratios: int  # samples of which that was measured


def audit(
    log: EventLog, topics: Topics, *, deadline_s: float, is_exact: bool = True
) -> tuple[Figures, list[str]]:
    """Figures and problems. `is_exact`: the weights are float32, so log-probs of the same version agree closely."""
    ledger, fleet = _read(log, topics, "ledger"), _read(log, topics, "fleet")
    times, problems = _steps(ledger, _read(log, topics, "metrics"), deadline_s)
    lives, found = lives_of(fleet, ledger)
    problems += found
    problems += unacknowledged(log, topics, lives, counts := Counter())
    largest, measured = _log_ratios(ledger, _read(log, topics, "metrics"))
    if is_exact and largest > MOST_LOG_RATIO:
        problems.append(
            f"samples of the trainer's own version differ from it by up to {largest:.2g} nat a token"
        )
    report = verify(log, topics)
    problems += [violation.text for check in report.checks for violation in check.violations]
    ready = [entry.event for entry in fleet if isinstance(entry.event, EngineReady)]
    ended = [entry.event for entry in fleet if isinstance(entry.event, TransferGroupEnded)]
    published = [entry.event for entry in ledger if isinstance(entry.event, WeightsPublished)]
    failed = [entry.event for entry in fleet if isinstance(entry.event, EngineFailed)]
    figures = Figures(
        **times,
        versions=len(published),
        acknowledged=len(ready),
        by_transport=dict(Counter(event.transport for event in ready)),
        groups_formed=sum(isinstance(entry.event, TransferGroupFormed) for entry in fleet),
        broadcast_versions=sum("distributed" in event.uris for event in published),
        broadcasts_failed=sum(event.reason == "failed" for event in ended),
        engines_failed=dict(Counter(event.reason for event in failed)),
        samples=counts["samples"],
        samples_of_many_versions=counts["of many versions"],
        largest_log_ratio=float(f"{largest:.2g}"),
        log_ratios=measured,
    )
    return figures, problems


def _read(log: EventLog, topics: Topics, word: str) -> list[Entry]:
    return list(entries(log, topics.name(word), 0))


# ---------------------------------------------------------------- the trainer's time
def _steps(ledger: list[Entry], metrics: list[Entry], deadline_s: float) -> tuple[dict[str, Any], list[str]]:
    """The fields of Figures about steps, and what took too long."""
    gap_ms = publish_ms = takeover_ms = steps = epochs = 0
    last_ms, is_takeover = 0, False
    cut_of: dict[Version, int] = {}  # (epoch, step) → when it was cut
    problems: list[str] = []
    for entry in ledger:
        event = entry.event
        if isinstance(event, EpochStarted):
            epochs, is_takeover = epochs + 1, True
        elif isinstance(event, (Paused, Resumed)):
            last_ms = 0
        elif isinstance(event, BatchCut):
            steps, cut_of[event.epoch, event.step] = steps + 1, event.cut_ms
            passed = event.cut_ms - last_ms if last_ms else 0  # 0: the run was paused, or just begins
            if is_takeover:
                takeover_ms = max(takeover_ms, passed)
            elif passed > gap_ms:
                gap_ms = passed
                if passed > 1000 * (deadline_s + SPARE_S):
                    problems.append(f"step {event.step} came {passed / 1000:.1f} s after the one before")
            last_ms, is_takeover = event.cut_ms, False
        elif isinstance(event, WeightsPublished) and (event.epoch, event.step) in cut_of:
            publish_ms = max(publish_ms, event.published_ms - cut_of[event.epoch, event.step])
    step_s = max(
        (
            entry.event.values.get("step_s", 0.0)
            for entry in metrics
            if isinstance(entry.event, Metrics) and entry.event.source == "trainer"
        ),
        default=0.0,
    )
    if step_s > deadline_s:
        problems.append(f"a step took {step_s:.1f} s, longer than the deadline of a transfer")
    found = {
        "steps": steps,
        "epochs": epochs,
        "longest_gap_s": round(gap_ms / 1000, 2),
        "longest_step_s": round(step_s, 2),
        "longest_to_publish_s": round(publish_ms / 1000, 2),
        "longest_takeover_s": round(takeover_ms / 1000, 2),
    }
    return found, problems


# ---------------------------------------------------------------- who held what
class Life(NamedTuple):
    """Of one engine, from its EngineJoined on."""

    incarnation: str
    joined_ms: int
    acks: dict[Version, int]  # version → when its acknowledgement came to the log


def lives_of(fleet: list[Entry], ledger: list[Entry]) -> tuple[dict[str, list[Life]], list[str]]:
    """Engine → its lives; and acknowledgements of weights that the trainer did not publish."""
    digests: dict[Version, set[str]] = {}
    for entry in ledger:
        if isinstance(entry.event, WeightsPublished):
            digests.setdefault((entry.event.epoch, entry.event.version), set()).add(entry.event.digest)
    lives: dict[str, list[Life]] = {}
    problems: list[str] = []
    for entry in fleet:
        event = entry.event
        if isinstance(event, EngineJoined):
            life = Life(getattr(event, "incarnation", ""), entry.timestamp_ms, {})
            lives.setdefault(event.engine, []).append(life)
        elif isinstance(event, EngineReady):
            version = (event.epoch, event.version)
            if event.digest not in digests.get(version, set()):
                problems.append(
                    f"{event.engine} acknowledged {version} with a digest that was never published: {event.digest}"
                )
            if event.engine not in lives:
                problems.append(f"{event.engine} acknowledged {version} before it had joined")
            else:
                lives[event.engine][-1].acks.setdefault(version, entry.timestamp_ms)
    return lives, problems


def unacknowledged(
    log: EventLog, topics: Topics, lives: dict[str, list[Life]], counts: Counter[str]
) -> list[str]:
    """Samples of a version that their daemon had not acknowledged in that life when they came to the log."""
    missing: list[str] = []
    early: list[str] = []
    for partition in range(topics.count("trajectories")):
        for entry in entries(log, topics.name("trajectories"), partition):
            event = entry.event
            if not isinstance(event, TrajectoryFinished):
                continue
            counts["samples"] += 1
            counts["of many versions"] += len(event.versions) > 1
            life = _life(lives.get(event.engine, []), event, entry.timestamp_ms)
            for epoch, version, _ in event.versions:
                acked_ms = None if life is None else life.acks.get((epoch, version))
                what = f"{event.uid} of {event.engine} carries {(epoch, version)}"
                if acked_ms is None:
                    missing.append(f"{what}, which it never acknowledged in that life")
                elif acked_ms > entry.timestamp_ms:
                    early.append(f"{what} {acked_ms - entry.timestamp_ms} ms before it acknowledged that")
    found = [f"{len(each)} samples: {each[0]}" for each in (missing, early) if each]
    return found


def _life(lives: list[Life], event: TrajectoryFinished, at_ms: int) -> Life | None:
    incarnation = getattr(event, "incarnation", "")
    if incarnation:
        return next((life for life in lives if life.incarnation == incarnation), None)
    return next((life for life in reversed(lives) if life.joined_ms <= at_ms), None)


def _log_ratios(ledger: list[Entry], metrics: list[Entry]) -> tuple[float, int]:
    """Of samples all of whose tokens are of the version that the step started from: the largest mean |log π − log μ|,
    and how many there are."""
    measured = {
        (entry.event.epoch, entry.event.step): entry.event
        for entry in metrics
        if isinstance(entry.event, StepMeasured)
    }
    largest, count = 0.0, 0
    for entry in ledger:
        cut = entry.event
        if not isinstance(cut, BatchCut) or (rows := measured.get((cut.epoch, cut.step))) is None:
            continue
        sums = np.frombuffer(rows.sums, "<f8").reshape(rows.n_samples, -1)
        members = [member for group in cut.groups for member in group.members]
        for member, row in zip(members, sums, strict=True):
            values = dict(zip(rows.names, row, strict=True))
            if member.staleness == 0 and values["n_tokens"]:
                count += 1
                largest = max(largest, values["sum_abs_log_ratio"] / values["n_tokens"])
    return largest, count
