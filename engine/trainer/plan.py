"""What one training step is made of, worked out before any device is asked.

    TrainBatch ─► flatten ─► minibatches (optimizer steps) ─► Plan: rows, and what their losses are divided by

Pure and deterministic: the same batch and settings give the same plan, on one rank or on many. A rank's own plan holds
its rows alone, and the weights and divisors of the whole minibatch, so that the ranks' losses and gradients add up to
the ones that a single process would have.

The loss of a minibatch is Σ weight · loss / divisor over its trained tokens t, with n_s those of a sample, n_g those of
a prompt's samples in the minibatch, S and G the numbers of samples and prompts with any:

    token     Σ_t / Σ_s n_s       every token counts alike (DAPO, arXiv 2503.14476, section 3.3)
    sample    Σ_t 1/n_s / S       every sample does (GRPO, arXiv 2402.03300, equation 3)
    prompt    Σ_t 1/n_g / G       every prompt does (ScaleRL, arXiv 2510.13786, section 3)
    constant  Σ_t / (S · L)       every token, in every batch: L is a constant (Dr. GRPO, arXiv 2503.20783, section 3)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.algorithms.logprobs import FlatBatch, flatten
from engine.interfaces import BadStep, TrainBatch
from engine.trainer.dealing import deal
from engine.trainer.torch_settings import TorchSettings


class Part(NamedTuple):
    """One minibatch: the rows of one optimizer step."""

    rows: NDArray[np.int64]  # places in the plan's FlatBatch, ascending
    n_tokens: int  # trained, of the whole minibatch over all ranks
    divisor: float  # of the sum of its weighted token losses, over all ranks


class Plan(NamedTuple):
    """One rank's share of a step. On a single rank `flat` is the whole batch, in its order."""

    flat: FlatBatch
    parts: list[Part]


def plan_step(batch: TrainBatch, settings: TorchSettings) -> Plan:
    """Raises BadStep("no_trainable_tokens")."""
    flat = flatten(batch.samples)
    if not len(flat.targets):
        raise BadStep("no_trainable_tokens", f"{len(batch.samples)} samples, all masked")
    groups = np.array([sample.group for sample in batch.samples], np.int64)
    weights = (
        np.zeros(len(flat.targets), np.float32) if settings.aggregation in ("sample", "prompt") else None
    )
    parts = []
    for rows in minibatches(flat, settings.num_steps_per_rollout, batch.seed):
        counts = flat.token_starts[rows + 1] - flat.token_starts[rows]
        n_tokens, n_samples = int(counts.sum()), int(np.count_nonzero(counts))
        divisor = float(n_tokens)
        if settings.aggregation == "constant":
            divisor = float(n_samples * settings.loss_constant_length)
        elif weights is not None:
            of_row = groups[rows] if settings.aggregation == "prompt" else rows
            divisor = _weigh(weights, flat, rows, counts, of_row)
        parts.append(Part(rows, n_tokens, divisor))
    return Plan(flat._replace(weights=weights), parts)


def _weigh(
    weights: NDArray[np.float32],
    flat: FlatBatch,
    rows: NDArray[np.int64],
    counts: NDArray[np.int64],
    of_row: NDArray[np.int64],
) -> float:
    """Weigh the tokens of `rows` (`counts` of each) by 1 / the tokens of their unit; returns how many units have any.

    `of_row` says which unit (a sample, a prompt) a row is of.
    """
    _, unit = np.unique(of_row, return_inverse=True)
    n_unit = np.bincount(unit, counts)
    for row, number in zip(rows, unit, strict=True):
        weights[flat.token_starts[row] : flat.token_starts[row + 1]] = 1.0 / max(n_unit[number], 1.0)
    return float(np.count_nonzero(n_unit))


def minibatches(flat: FlatBatch, count: int, seed: int) -> list[NDArray[np.int64]]:
    """Samples of each optimizer step (engine/trainer/dealing.py); a step without a trained token is left out."""
    return [part for part in deal(len(flat.fed), count, seed) if flat.fed[part].any()]
