"""Published versions of the tests' SGLang model: its own weights, moved a little by each version."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from engine.weights.store import DeltaPolicy, WeightStore
from streams.events import WeightsPublished


class Published(NamedTuple):
    event: WeightsPublished
    path: Path
    tensors: dict[str, NDArray[np.float32]]


class Versions:
    """`Versions(model, run_dir).publish(3)`: version 3 of epoch 1."""

    def __init__(self, model: Path, run_dir: Path, *, deltas: DeltaPolicy | None = None) -> None:
        self.run_dir = run_dir
        self._base = load_file(model / "model.safetensors")
        self._store = WeightStore(run_dir / "weights", keep=100, deltas=deltas)

    def tensors(self, version: int) -> dict[str, NDArray[np.float32]]:
        """All of version 0; of later ones every matrix moved by noise of a quarter of its size."""
        if version == 0:
            return dict(self._base)
        draw = np.random.default_rng(version)
        return {
            name: (tensor + 0.025 * draw.standard_normal(tensor.shape)).astype(np.float32)
            for name, tensor in self._base.items()
        }

    def publish(
        self, version: int, tensors: dict[str, NDArray[np.float32]] | None = None, *, epoch: int = 1
    ) -> Published:
        given = self.tensors(version) if tensors is None else tensors
        event = self._store.publish(given, epoch=epoch, version=version, step=version)
        return Published(event, self.run_dir / event.uris["disk"], given)
