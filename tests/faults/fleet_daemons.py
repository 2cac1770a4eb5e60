"""Rollout daemons with one fault each, as the targets of processes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.rollout.batched import BatchedEngine
from engine.weights import collective
from tests.engine.transfer_daemons import rollout, serve_role


def room_for_half(folder: str, replica: int) -> None:
    """It has room for half of a bucket only: the second one of the first broadcast that it receives."""
    start: Callable[..., Any] = collective.Group.start
    count = itertools.count()

    def short(self: collective.Group, tensor: Any, *limits: Any) -> Any:
        return start(self, tensor[: len(tensor) // 2] if next(count) == 1 else tensor, *limits)

    replaced: Any = collective.Group
    replaced.start = short
    rollout(folder, replica, None)


def slow_to_load(folder: str, replica: int, replicas: int, gate: str) -> None:
    """Its engine takes no version before the file `gate` is there."""
    replaced: Any = BatchedEngine
    update = replaced.update

    async def waits(self: BatchedEngine, *arguments: Any) -> float:
        while not Path(gate).exists():
            await asyncio.sleep(0.02)
        return await update(self, *arguments)

    replaced.update = waits
    serve_role(folder, "rollout", replica, replicas)
