"""The seams of the engine: what a rollout backend, a trainer backend and a weight transport must answer.

These few methods are the whole surface; nothing above them knows which backend it drives. This module imports no
torch, so that `--help` and the log tools stay instant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from streams.columns import VersionRun
from streams.events import TransferGroupFormed, WeightsPublished
from streams.trajectory import Payload


class WeightsId(NamedTuple):
    """Identity of one set of weights. `digest` as in engine/weights/store.py."""

    epoch: int
    version: int
    digest: str


# ---------------------------------------------------------------- rollout
class Sampling(NamedTuple):
    max_tokens: int  # most new tokens of this request
    temperature: float = 1.0  # log-probs are those of the tempered policy, the one that sampled
    stop_ids: tuple[int, ...] = ()  # any of these ends the request and is part of its output


class Completion(NamedTuple):
    """What one request gave. Lengths agree: L ids, L log-probs, runs that sum to L."""

    ids: NDArray[np.int32]  # [L]
    logprobs: NDArray[np.float32]  # [L]
    versions: list[VersionRun]
    finish_reason: str  # "stop" (a stop id), "length", "aborted" (ids so far)


class EngineError(Exception):
    """The engine could not serve; `reason` is a fixed word for RolloutFailed."""

    is_of_request = False  # it was never sent, since it could not be right: no fault of the engine

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


class RolloutEngine(Protocol):
    """One engine that holds one set of weights and serves token-in-token-out requests."""

    name: str
    n_ranks: int  # that it brings to a transfer group; 0: it takes versions from files alone
    device: str  # of those ranks: "cpu", "cuda", "musa"

    @property
    def held(self) -> WeightsId | None:
        """The weights it serves now; None until the first update is whole."""
        ...

    @property
    def tokenizer(self) -> Any:
        """Hugging Face tokenizer, or an object with encode(text) → list[int] and decode(ids) → str."""
        ...

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Completion:
        """Sample after `prompt_ids`. Raises EngineError."""
        ...

    async def update(self, published: WeightsPublished, path: Path) -> float:
        """Take these weights, whole or not at all, and return the seconds for which generation stood still.

        `path`: a full file, or a delta with its chain beside it (engine/rollout/loading.py reads both). Verifies the
        digest of what it now holds. Raises EngineError("weights_mismatch" | "weights_unreadable");
        then `held` is None or what it was before, never a mixture. Running requests go on by the pause mode.
        """
        ...

    async def join_group(self, formed: TransferGroupFormed, first_rank: int) -> None:
        """Become `n_ranks` ranks of this group, from `first_rank` on; returns when all of its ranks have met.

        Called while the engine serves. Raises EngineError("transfer_failed") by the group's deadline at the latest.
        """
        ...

    async def leave_group(self, group: str) -> None:
        """Leave now, also in the middle of a broadcast; a group that is not known is no error."""
        ...

    async def receive(self, published: WeightsPublished, group: str, bucket_bytes: int) -> float:
        """Take the version that is sent to a group that was joined, as `update` takes a file, with its promises.

        Every version of a group is received, in order. Raises EngineError("transfer_failed"), after which the group
        is of no use any more, or EngineError("weights_mismatch"), after which it is.
        """
        ...

    def checksum(self) -> str:
        """The inference server's own, over the weights as it holds them; "" if it has none."""
        ...

    async def abort(self, request_id: str) -> None:
        """End one request soon; its generate() returns with finish_reason "aborted"."""
        ...

    async def close(self) -> None:
        """Give everything back; waiting requests fail with EngineError("engine_closed")."""
        ...

    def stats(self) -> dict[str, float]:
        """Counters since the start: tokens, requests, busy_s, …"""
        ...


# ---------------------------------------------------------------- trainer
class Inputs(NamedTuple):
    """What a backend wants its samples to carry."""

    estimator: str = "grpo"  # of advantages: a name in consumers.advantages.ESTIMATORS
    with_ages: bool = False  # whether it looks at TrainSample.ages
    with_teacher: bool = False  # whether it looks at TrainSample.teacher


class TrainSample(NamedTuple):
    uid: str
    payload: Payload
    loss_mask: NDArray[np.bool_]  # [L]: payload.loss_mask less what staleness masks
    advantage: float  # of every token, as the estimator gives it from rewards alone
    group: int = 0  # place of its group in the batch
    reward: float = 0.0
    ages: NDArray[np.int32] | None = None  # [L] staleness of each token, in versions; None: not asked for
    teacher: NDArray[np.float32] | None = None  # [L] a teacher's log-probs, 0 where nothing was sampled


class TrainBatch(NamedTuple):
    """The inputs of one step, in the order that the ledger recorded."""

    step: int
    version: int  # of the weights that the step starts from
    seed: int
    samples: list[TrainSample]


class BadStep(Exception):
    """The step must not count: non-finite loss or gradient, or nothing to train on.

    The backend has put its state back, bit for bit, before it raises. `reason`: "nonfinite_loss",
    "nonfinite_gradient", "no_trainable_tokens"; "bad_token_id" and "too_long" for a batch that was not asked about.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


class TrainerBackend(Protocol):
    """A model with its optimizer. Deterministic: the same state and batch give the same bits."""

    @property
    def inputs(self) -> Inputs:
        """What its samples must carry. Live run, recovery and replay ask it alike, and so build the same batches."""
        ...

    def refuses(self, payload: Payload) -> str:
        """Why this sample can never be trained on (too long, a token the model lacks); "" if it can.

        Asked before a batch is cut, so that the group is dropped by name and no cut is ever impossible to replay.
        """
        ...

    def step(self, batch: TrainBatch) -> dict[str, float]:
        """Take one step (all its minibatches) and return its metrics. Raises BadStep."""
        ...

    @property
    def trajectory_sums(self) -> NDArray[np.float64]:
        """Of the last step: [S, 12] in the order of consumers.telemetry.SUMS and of batch.samples.

        [0, 12] of a backend that has no log-probs to compare.
        """
        ...

    def weights(self) -> Mapping[str, Any]:
        """Named tensors for publication: numpy arrays or torch tensors, in a fixed order."""
        ...

    def snapshot(self) -> Callable[[Path], None]:
        """Copy everything that the next step depends on (weights, optimizer, schedule, RNG).

        The function returned writes the copies into a folder, later and on any thread: training goes on meanwhile.
        """
        ...

    def load(self, folder: Path, *, fresh_optimizer: bool = False) -> None:
        """Put that state back. Raises CheckpointError when a part is missing or does not fit; without an optimizer
        only `fresh_optimizer` takes the weights alone."""
        ...


class CheckpointError(Exception):
    """A checkpoint that cannot be used; the message names the part and the reason."""
