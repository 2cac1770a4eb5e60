"""The run of tests/support/recorded.py with what an export joins: times, labels and rewards."""

from __future__ import annotations

from typing import Any

from streams.events import Event, RewardAssigned, TaskDispatched, TrajectoryFinished
from streams.log import EventLog
from streams.topics import Topics
from tests.support import recorded as run
from tests.support.events import put


def recorded(alter: run.Alter = lambda event: event) -> tuple[EventLog, Topics]:
    """Tasks were dispatched at 100 ms; samples finished at 400 + index."""

    def timed(event: Event) -> Event | None:
        if isinstance(event, TaskDispatched):
            event = changed(event, dispatched_ms=100, label=str(event.seq), metadata={"level": event.seq % 3})
        if isinstance(event, TrajectoryFinished):
            event = changed(event, started_ms=200, finished_ms=400 + event.index)
        return alter(event)

    log, topics = run.recorded(timed)
    for seq in range(6):
        for index in range(2):
            put(log, topics, "rewards", reward(seq, index), seq % 2)
    return log, topics


def changed(event: Any, **changes: Any) -> Any:
    """The event with other values in some fields."""
    return type(event)(**{name: getattr(event, name) for name in event.__struct_fields__} | changes)


def reward(seq: int, index: int, **changes: Any) -> RewardAssigned:
    fields: dict[str, Any] = {
        "uid": run.uid(seq, index),
        "group_id": f"0-{seq}",
        "seq": seq,
        "index": index,
        "attempt": 0,
        "n_samples": 2,
        "task_offset": seq // 2,
        "reward": float(index),
        "components": {"format": 0.5},
        "trajectory_offset": run.offset(seq, index),
        "n_prompt_tokens": 2,
        "n_response_tokens": 5,
        "trainable_versions": [(1, 0, 2), (1, 1, 2)],
        "scoring_s": 0.25,
    }
    return RewardAssigned(**fields | changes)
