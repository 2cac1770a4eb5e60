"""What one training step is made of, worked out before any device is asked.

    TrainBatch ─► flatten ─► minibatches (optimizer steps) ─► Plan: rows, and what their losses are divided by

Pure and deterministic: the same batch and settings give the same plan, on one rank or on many. A rank's own plan holds
its rows alone, and the divisors of the whole minibatch, so that the ranks' losses and gradients add up to the ones
that a single process would have.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.algorithms.logprobs import FlatBatch, flatten
from engine.interfaces import BadStep, TrainBatch


class Part(NamedTuple):
    """One minibatch: the rows of one optimizer step."""

    rows: NDArray[np.int64]  # places in the plan's FlatBatch, ascending
    n_tokens: int  # trained, of the whole minibatch over all ranks
    divisor: float  # of the sum of its weighted token losses, over all ranks


class Plan(NamedTuple):
    """One rank's share of a step. On a single rank `flat` is the whole batch, in its order."""

    flat: FlatBatch
    parts: list[Part]


def plan_step(batch: TrainBatch, num_steps_per_rollout: int) -> Plan:
    """Raises BadStep("no_trainable_tokens")."""
    flat = flatten(batch.samples)
    if not len(flat.targets):
        raise BadStep("no_trainable_tokens", f"{len(batch.samples)} samples, all masked")
    parts = []
    for rows in minibatches(flat, num_steps_per_rollout, batch.seed):
        n_tokens = int((flat.token_starts[rows + 1] - flat.token_starts[rows]).sum())
        parts.append(Part(rows, n_tokens, float(n_tokens)))
    return Plan(flat, parts)


def minibatches(flat: FlatBatch, count: int, seed: int) -> list[NDArray[np.int64]]:
    """Samples of each optimizer step, sizes equal to within one; those without a trained token are left out.

    One minibatch keeps the order of the batch. Several are dealt in the order of random numbers drawn from `seed`:
    `Random.random` is the one source whose sequence Python promises not to change.
    """
    order = np.arange(len(flat.fed))
    if count > 1:
        draw = random.Random(seed)
        keys = [draw.random() for _ in order]
        order = np.argsort(np.array(keys), kind="stable")
    parts = [np.sort(part) for part in np.array_split(order, count)]
    return [part for part in parts if flat.fed[part].any()]
