"""A generate function whose log-probs are wrong in the first process of one engine, and right ever after.

The other engines stop after some samples until the second process is there: a run cannot end before it has come.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from pathlib import Path
from typing import Any

from engine.rollout.generate import single_turn
from streams.events import TaskDispatched
from streams.trajectory import SampleData

BENT, SHIFT = "rollout-1", -0.7  # nat per token
ALONE = 150  # samples that the other engines make by themselves

_numbers = itertools.count()


async def generate(context: Any, task: TaskDispatched, index: int) -> SampleData:
    """Option `folder`: where the bent engine's processes leave their numbers."""
    folder = Path(context.options["folder"])
    if context.engine.name == BENT:
        is_first = _is_first(folder / "first")
        if not is_first:
            (folder / "second").touch()
    else:
        is_first, number = False, next(_numbers)
        while number >= ALONE and not (folder / "second").exists():
            await asyncio.sleep(0.05)  # the sample's own deadline ends it
    sample = await single_turn(context, task, index)
    if is_first:
        sample.logprobs = sample.logprobs + SHIFT
    return sample


def _is_first(marker: Path) -> bool:
    try:
        with marker.open("x", encoding="utf-8") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        pass
    return marker.read_text("utf-8") == str(os.getpid())
