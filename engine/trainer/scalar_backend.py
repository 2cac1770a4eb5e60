"""A trainer of one number, to run the whole loop without torch.

It learns nothing. Its one weight is a witness: every byte of every sample, in the order of the batch, goes into
it, so two runs end with the same bits only if they trained on the same samples in the same order.
"""

from __future__ import annotations

import json
import math
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from consumers.telemetry import SUMS
from engine.interfaces import BadStep, CheckpointError, Inputs, TrainBatch, TrainSample
from streams.trajectory import Payload

STATE_FILE = "scalar.json"
_FIELDS = ("w", "mean", "square")


class ScalarBackend:
    """w ← w + lr · m / (√v + 1), with running means m of g and v of g² as in Adam.

        g = 1/S Σ_i (advantage_i + 1/8) · (1/2 + h_i),   h_i in [0, 1) a checksum of samples 0 … i

    Adam divides by √v + tiny, which makes its first step blind to the size of g; the 1 keeps it sighted. Only
    plain Python floats and a checksum, so the bits are the same on every machine.

    >>> backend = ScalarBackend(lr=0.5)
    >>> backend.weights()
    {'w': array([0.])}
    """

    def __init__(
        self,
        *,
        lr: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.95,
        initial: float = 0.0,
        estimator: str = "grpo",
    ) -> None:
        self.inputs = Inputs(estimator)
        self._lr, self._beta1, self._beta2 = lr, beta1, beta2
        self._w, self._mean, self._square = float(initial), 0.0, 0.0
        self._steps = 0
        self.trajectory_sums = np.zeros((0, len(SUMS)))

    def refuses(self, payload: Payload) -> str:
        return ""

    def step(self, batch: TrainBatch) -> dict[str, float]:
        started = time.perf_counter()
        n_tokens = sum(int(np.count_nonzero(sample.loss_mask)) for sample in batch.samples)
        if n_tokens == 0:
            raise BadStep("no_trainable_tokens", f"{len(batch.samples)} samples, all masked")
        gradient = _gradient(batch)
        if not math.isfinite(gradient):
            raise BadStep("nonfinite_loss", "an advantage is not finite")
        self._mean = self._beta1 * self._mean + (1 - self._beta1) * gradient
        self._square = self._beta2 * self._square + (1 - self._beta2) * gradient * gradient
        self._w += self._lr * self._mean / (math.sqrt(self._square) + 1.0)
        self._steps += 1
        return {
            "loss": -gradient,
            "grad_norm": abs(gradient),
            "n_tokens": float(n_tokens),
            "seconds": time.perf_counter() - started,
        }

    def weights(self) -> Mapping[str, Any]:
        """{"w": float64 [1]}."""
        return {"w": np.array([self._w])}

    def snapshot(self) -> Callable[[Path], None]:
        """What is returned writes scalar.json; hexadecimal floats, so that no bit is lost."""
        numbers = zip(_FIELDS, (self._w, self._mean, self._square), strict=True)
        text = json.dumps({name: number.hex() for name, number in numbers} | {"steps": self._steps}, indent=1)

        def write(folder: Path) -> None:
            (folder / STATE_FILE).write_text(text + "\n", encoding="utf-8")

        return write

    def load(self, folder: Path, *, fresh_optimizer: bool = False) -> None:
        path = folder / STATE_FILE
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            w, mean, square = (float.fromhex(state[name]) for name in _FIELDS)
            steps = int(state["steps"])
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: not the state of a scalar trainer ({error!r})") from None
        self._w, self._steps = w, steps
        self._mean, self._square = (0.0, 0.0) if fresh_optimizer else (mean, square)


def _gradient(batch: TrainBatch) -> float:
    checksum, total = zlib.crc32(str(batch.seed).encode()), 0.0
    for sample in batch.samples:
        checksum = _chained(checksum, sample)
        total += (float(sample.advantage) + 0.125) * (0.5 + checksum / 2**32)
    return total / len(batch.samples)


def _chained(checksum: int, sample: TrainSample) -> int:
    """Checksum of everything up to and with this sample; little-endian, so that all machines agree."""
    payload = sample.payload
    checksum = zlib.crc32(sample.uid.encode(), checksum)
    checksum = zlib.crc32(np.float64(sample.advantage).astype("<f8").tobytes(), checksum)
    for ids in (payload.prompt_ids, payload.response_ids):
        checksum = zlib.crc32(ids.astype("<i4").tobytes(), checksum)
    checksum = zlib.crc32(payload.logprobs.astype("<f4").tobytes(), checksum)
    return zlib.crc32(sample.loss_mask.astype(np.uint8).tobytes(), checksum)
