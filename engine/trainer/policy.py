"""The seam between a training step and a model with its optimizer, sharded or not.

    stepper (one on each rank) ─► Policy: forward and backward of micro-batches, clip, apply, put back
                               └► Ranks: what the ranks must agree on

These few questions are the whole surface: losses, minibatches, bad steps and measures are written once, above it
(engine/trainer/stepper.py), and every backend gets them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.algorithms.logprobs import FlatBatch, MicroBatch, TokenLogprobs

MicroLoss = Callable[[MicroBatch, TokenLogprobs], Tensor]  # its share of the minibatch's loss, a scalar


class Policy(Protocol):
    """One rank's part of the model that is trained. Every rank makes the same calls in the same order."""

    device: torch.device

    def micro_batches(self, flat: FlatBatch, rows: NDArray[np.int64]) -> list[MicroBatch]:
        """The forwards of these rows. Equally many on every rank, some of them without a trained token if need be."""
        ...

    def backward(self, micros: Sequence[MicroBatch], loss: MicroLoss) -> None:
        """Forward and backward of each, adding to the gradient. Gradients of the ranks are summed, not averaged."""
        ...

    def score(self, micros: Sequence[MicroBatch]) -> Iterator[tuple[MicroBatch, Tensor]]:
        """Log-probs [n] of each micro-batch's trained tokens under the weights as they are now, without a gradient."""
        ...

    def score_reference(self, micros: Sequence[MicroBatch]) -> Iterator[tuple[MicroBatch, Tensor]]:
        """The same under the frozen weights of the reference model. Asked only where the loss has a KL term."""
        ...

    def clip_gradient(self, limit: float) -> float:
        """Scale the gradient to a norm of at most `limit`; returns the norm before, over all ranks."""
        ...

    def apply(self, rate: float) -> None:
        """One optimizer step at this learning rate."""
        ...

    def forget_gradient(self) -> None: ...

    def copy_state(self) -> Callable[[], None]:
        """Copies of weights and optimizer; what is returned puts them back, bit for bit."""
        ...


class Ranks(Protocol):
    """The data-parallel ranks of a step."""

    rank: int
    size: int

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over the ranks, the same on all of them: float64, added in the order of the ranks."""
        ...


class Alone:
    """The only rank."""

    rank, size = 0, 1

    def sum(self, values: Sequence[float]) -> list[float]:
        return list(values)
