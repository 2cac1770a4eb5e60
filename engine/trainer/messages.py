"""What rank 0 and its followers say to each other. Every command has a number and gets one answer from each follower.

Begin ─► Answer          the part is made
Take  ─► Answer          one training step: log-probs and flags of the follower's tokens, or the BadStep of all
Snapshot, Load, Weights ─► Answer
Write ─► Answer          on a thread of its own: training goes on meanwhile
Close                    the follower ends
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.trainer.parts import PartSettings
from engine.trainer.plan import Plan


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A follower's first message."""

    rank: int
    token: str
    host: str
    pid: int


class Begin(msgspec.Struct, frozen=True, tag=True):
    number: int
    part: PartSettings


class Take(msgspec.Struct, frozen=True, tag=True):
    number: int
    plan: Plan  # the follower's share


class Snapshot(msgspec.Struct, frozen=True, tag=True):
    number: int


class Write(msgspec.Struct, frozen=True, tag=True):
    """Older snapshots are forgotten: they were never asked for."""

    number: int
    snapshot: int  # number of its command
    folder: str


class Load(msgspec.Struct, frozen=True, tag=True):
    number: int
    folder: str
    fresh_optimizer: bool
    optimizer_steps: int


class Weights(msgspec.Struct, frozen=True, tag=True):
    number: int


class Close(msgspec.Struct, frozen=True, tag=True):
    pass


Command = Begin | Take | Snapshot | Write | Load | Weights | Close


class Answer(msgspec.Struct, frozen=True, tag=True):
    number: int
    error: str = ""  # what kind: "bad_step", "checkpoint", "config"; "failed": of the process, which ends
    reason: str = ""
    detail: str = ""
    arrays: dict[str, NDArray[Any]] = {}  # of a step: [n] in the order of the share's tokens


FromRankZero = Command
FromFollower = Hello | Answer


def arrays_of(measured: Any, n_tokens: int) -> dict[str, NDArray[Any]]:
    """The fields of a Measured that hold one value for each trained token."""
    fields = measured._asdict().items()
    return {name: value for name, value in fields if isinstance(value, np.ndarray) and len(value) == n_tokens}
