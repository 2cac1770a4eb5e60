"""Measuring samples under the published weights that sampled them, beside the training that has gone on since."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from consumers.telemetry import trajectory_sums
from engine.algorithms.logprobs import flatten
from engine.interfaces import TrainSample
from engine.rollout.loading import Loader, Locate
from engine.trainer.probe import Score
from engine.trainer.torch_backend import TorchBackend
from streams.events import WeightsPublished


def scorer(backend: TorchBackend, locate: Locate) -> Score:
    """Reads a version from its file and scores with the backend's own model, whose state is afterwards what it was,
    bit for bit. Raises EngineError for a file that is gone or is not what was published."""

    def score(published: WeightsPublished, samples: Sequence[TrainSample]) -> NDArray[np.float64]:
        tensors = Loader("torch").load(published, locate(published))
        put_back = _exchange(backend.model.state_dict(), tensors)
        try:
            return _sums(backend, samples)
        finally:
            put_back()

    return score


@torch.no_grad()
def _exchange(held: dict[str, Tensor], tensors: dict[str, Tensor]) -> Callable[[], None]:
    """Copy `tensors` over `held`, in place. What is returned puts the old values back; they wait in main memory."""
    before = {name: tensor.to("cpu", copy=True) for name, tensor in held.items()}

    @torch.no_grad()
    def put_back() -> None:
        for name, tensor in held.items():
            tensor.copy_(before[name])

    try:
        for name, tensor in held.items():
            tensor.copy_(tensors[name])
    except BaseException:
        put_back()
        raise
    return put_back


def _sums(backend: TorchBackend, samples: Sequence[TrainSample]) -> NDArray[np.float64]:
    flat = flatten(samples)
    logprobs = np.empty(len(flat.targets), np.float32)
    for micro, found in backend.policy.score(backend.policy.micro_batches(flat, np.arange(len(samples)))):
        logprobs[micro.tokens] = found.cpu().numpy()
    return trajectory_sums(logprobs.astype(np.float64) - flat.behaviour, flat.sample, len(samples))
