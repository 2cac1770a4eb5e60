"""Equal bits need equal arithmetic: the threads the run trained with, and what else was another machine's.

The launcher gives every daemon one thread unless the environment says otherwise (engine/launch/local.py). What it came
to is in each checkpoint of the torch trainer (`made_with`), and the replay takes the number from there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.launch.local import THREAD_VARIABLES
from engine.settings import Config
from streams.events import CheckpointSaved

_STATE = Path("state") / "trainer.json"


def made_with(saved: Sequence[CheckpointSaved], folder: Path) -> dict[str, Any]:
    """torch, device and threads of the run, from its newest checkpoint that still says so; {} if none does."""
    for record in reversed(saved):
        try:
            text = (folder / Path(record.path).name / _STATE).read_text(encoding="utf-8")
            found = json.loads(text)["made_with"]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # pruned, damaged, or of a trainer without torch
        if isinstance(found, dict):
            return found
    return {}


def set_threads(config: Config, then: Mapping[str, Any]) -> None:
    """Have torch compute with as many threads as the run did; for the whole process, before the backend is made."""
    if config.trainer.backend == "scalar":
        return
    threads = then.get("threads")
    if not isinstance(threads, int) or threads < 1:  # no checkpoint, or a run on an accelerator
        own = os.environ.get(THREAD_VARIABLES[0], "")
        threads = int(own) if own.isdecimal() and int(own) else 1
    import torch

    torch.set_num_threads(threads)


def here(config: Config) -> dict[str, Any]:
    """The same facts of this process; {} without torch."""
    if config.trainer.backend == "scalar":
        return {}
    from engine import devices
    from engine.trainer.torch_state import environment

    facts = environment(devices.ready(config.model.device).torch)
    if config.trainer.backend != "torch":
        facts["ranks"] = config.trainer.n_ranks
    return facts | {"torch": str(facts["torch"])}  # it is a subclass of str


def other_machine(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What was otherwise when the run was made, in words; "" when nothing is known to be."""
    return ", ".join(
        f"{key} {then[key]} (here {now[key]})" for key in now if key in then and then[key] != now[key]
    )
