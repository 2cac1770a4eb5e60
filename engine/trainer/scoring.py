"""Measuring samples under the published weights that sampled them, beside the training that has gone on since."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from consumers.telemetry import trajectory_sums
from engine.algorithms.logprobs import flatten
from engine.interfaces import EngineError, TrainSample
from engine.rollout.loading import Loader, Locate
from engine.trainer.probe import Score
from engine.trainer.torch_backend import TorchBackend
from streams.events import WeightsPublished


def scorer(backend: TorchBackend, locate: Locate) -> Score:
    """Reads a version from its file and scores with the backend's own model, whose state is afterwards what it was,
    bit for bit. Raises EngineError for a file that is gone or is not what was published, or when scoring it failed."""

    def score(published: WeightsPublished, samples: Sequence[TrainSample]) -> NDArray[np.float64]:
        tensors = Loader("torch").load(published, locate(published))
        held = backend.model.state_dict()
        with _may_fail(published):
            before = {name: tensor.to("cpu", copy=True) for name, tensor in held.items()}
        try:
            with _may_fail(published):
                _copy_over(held, tensors)
                return _sums(backend, samples)
        finally:
            _copy_over(held, before)  # a failure of this one is the trainer's end

    return score


@contextlib.contextmanager
def _may_fail(published: WeightsPublished) -> Iterator[None]:
    """Other names than the model's, no memory for it: training does not depend on it."""
    try:
        yield
    except (KeyError, RuntimeError) as error:
        detail = f"version {published.version} could not be put in place or scored: {error!r}"[:1000]
        raise EngineError("probe_failed", detail) from error


@torch.no_grad()
def _copy_over(held: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in held.items():
        tensor.copy_(tensors[name])


def _sums(backend: TorchBackend, samples: Sequence[TrainSample]) -> NDArray[np.float64]:
    flat = flatten(samples)
    logprobs = np.empty(len(flat.targets), np.float32)
    for micro, found in backend.policy.score(backend.policy.micro_batches(flat, np.arange(len(samples)))):
        logprobs[micro.tokens] = found.cpu().numpy()
    return trajectory_sums(logprobs.astype(np.float64) - flat.behaviour, flat.sample, len(samples))
