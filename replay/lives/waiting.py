"""Where a group is that has no outcome yet, and what it waits for."""

from __future__ import annotations

from replay.lives.phrases import counted
from replay.lives.run import RunFacts
from replay.lives.trail import Trail, asked_of, events, index_of
from streams.events import (
    GroupCompleted,
    MembersMissing,
    RewardAssigned,
    ScoringFailed,
    TaskDispatched,
)


def waits_for(run: RunFacts, trail: Trail) -> str:
    """One or two plain sentences. Of a run that has ended, what is wrong."""
    if run.view.finished is not None:
        return "The run has finished without an outcome for it, which must not be: see `millstream verify`."
    paused = "The run is paused: it waits for a Resumed. " if run.view.paused else ""
    return paused + _stage(run, trail)


def _stage(run: RunFacts, trail: Trail) -> str:
    terminal = trail.terminal
    if terminal is not None:
        entry, event = terminal
        if isinstance(event, GroupCompleted):
            return _in_queue(run, entry.timestamp_ms, event)
        return f"The collector has dropped it ({event.reason}); it waits for the trainer to write that into the ledger."
    if trail.skipped is not None:
        return "Its row cannot be used; it waits for the collector to close it."
    first = trail.first
    if first is None:
        return "Its dispatch is not in the log any more; the feeder dispatches it anew if log.on_lost = continue."
    return _members(run, trail, first)


def _in_queue(run: RunFacts, completed_ms: int, event: GroupCompleted) -> str:
    waited = max(0, run.now_ms - completed_ms) / 1000
    lineage, version = run.lineage(), run.view.version
    known = [
        lineage.effective(epoch, number)
        for member in event.members
        for epoch, number, n_tokens in member.trainable_versions
        if n_tokens > 0
    ]
    ages = [version - each for each in known if each is not None]
    age = f" Its oldest token is {counted(max(ages), 'version')} old now." if ages else ""
    size = counted(run.view.run.rollout_batch_size, "group") if run.view.run is not None else "groups"
    return (
        f"It is complete and has waited {waited:.1f} s (by the log's newest record) in the trainer's queue, for a "
        f"batch of {size}.{age}"
    )


def _members(run: RunFacts, trail: Trail, first: TaskDispatched) -> str:
    scored = {event.index for _, event in events(trail.rewards, RewardAssigned)}
    generated = {index_of(each) for each in trail.uids() if trail.trajectories_of(each)} - scored
    missing = [index for index in range(first.n_samples) if index not in scored and index not in generated]
    parts = [f"{len(scored)} of {first.n_samples} members have a reward."]
    if generated:
        parts.append(f"{_named(sorted(generated))} generated and waiting for the reward stage.")
    if missing:
        parts.append(
            f"{_named(missing)} not there yet. {_engines(run, first)}{_again(trail, missing)}".rstrip()
        )
    if not generated and not missing:
        parts.append("It waits for the collector to join them.")
    return " ".join(parts)


def _engines(run: RunFacts, first: TaskDispatched) -> str:
    if not run.view.versions:
        return "No engine may start it: the trainer has not published a version yet. "
    if run.view.version < first.min_version:
        return f"Engines start it from version {first.min_version} on; the newest published is {run.view.version}. "
    return "It waits for an engine. "


def _again(trail: Trail, missing: list[int]) -> str:
    """Members asked for again whose dispatch has not come, and those that have failed."""
    dispatched = {
        (index, event.attempt)
        for _, event in events(trail.tasks, TaskDispatched)
        for index in asked_of(event)
    }
    for _, event in events(trail.groups, MembersMissing):
        waiting = [each for each in event.indices if (each, event.attempt) not in dispatched]
        if waiting:
            return (
                f"The collector has asked for members {waiting} again (attempt {event.attempt}, {event.reason}); "
                "the feeder has not dispatched that yet."
            )
    failed = {event.index: event.reason for _, event in events(trail.rewards, ScoringFailed)}
    told = [f"{index} ({failed[index]})" for index in missing if index in failed]
    return f"Failed so far: {', '.join(told)}." if told else ""


def _named(indices: list[int]) -> str:
    shown = ", ".join(map(str, indices[:8])) + (" …" if len(indices) > 8 else "")
    return f"Member {shown} is" if len(indices) == 1 else f"Members {shown} are"
