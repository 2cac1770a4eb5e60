"""The demo tasks that ship with the engine. Importing this package does not import torch."""

from engine.tasks.base import Recommended, Task
from engine.tasks.guess import GUESS
from engine.tasks.reverse import REVERSE

TASKS: dict[str, Task] = {task.name: task for task in (GUESS, REVERSE)}


def get_task(name: str) -> Task:
    """The task of that name. Raises ValueError, naming the known ones."""
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}: expected one of {', '.join(sorted(TASKS))}")
    return TASKS[name]


__all__ = ["GUESS", "REVERSE", "TASKS", "Recommended", "Task", "get_task"]
