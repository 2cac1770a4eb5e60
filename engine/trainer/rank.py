"""What every rank of a trainer is made of, rank 0 and followers alike: its part of the model, and a stepper."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from engine.interfaces import CheckpointError
from engine.trainer.parts import PartSettings, RankPart, make_part
from engine.trainer.ranks import DataParallelRanks, ProcessGroup
from engine.trainer.stepper import Stepper
from engine.trainer.torch_backend import STATE_FILE, set_up_torch
from engine.trainer.torch_settings import learning_rate
from engine.trainer.torch_state import environment, read_json


class Rank:
    """Made on all ranks together (collective), and every method but `counters` is called on all of them too."""

    def __init__(self, settings: PartSettings, processes: ProcessGroup) -> None:
        torch_settings = msgspec.structs.replace(settings.torch, device=str(processes.device))
        set_up_torch(torch_settings)
        settings = msgspec.structs.replace(settings, torch=torch_settings)
        self.processes = processes
        self.part: RankPart = make_part(settings, processes)
        self.ranks = DataParallelRanks(processes, self.part)
        self.stepper = Stepper(
            self.part.policy, self.ranks, torch_settings, partial(learning_rate, torch_settings)
        )

    def load(self, folder: Path, *, fresh_optimizer: bool, optimizer_steps: int) -> None:
        """Raises CheckpointError."""
        self.part.load(folder, fresh_optimizer=fresh_optimizer)
        self.stepper.optimizer_steps = optimizer_steps

    def snapshot(self) -> Callable[[Path], None]:
        write = self.part.snapshot()
        return lambda folder: write(folder, self.processes.saving)

    def made_with(self) -> dict[str, Any]:
        """What must be equal for equal bits."""
        return environment(self.processes.device) | {"ranks": self.processes.size}


def write_counters(folder: Path, optimizer_steps: int, made_with: dict[str, Any]) -> None:
    """What is the same on all ranks, beside what each has written."""
    state = {"optimizer_steps": optimizer_steps, "made_with": made_with}
    (folder / STATE_FILE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")


def read_counters(folder: Path, *, fresh_optimizer: bool) -> tuple[int, dict[str, Any]]:
    """(optimizer steps, made with). Raises CheckpointError."""
    if fresh_optimizer:
        return 0, {}
    state = read_json(folder / STATE_FILE)
    steps = state.get("optimizer_steps")
    if not isinstance(steps, int) or steps < 0:
        raise CheckpointError(f"{folder / STATE_FILE}: optimizer_steps is {steps!r}, a count is needed")
    return steps, state.get("made_with", {})
