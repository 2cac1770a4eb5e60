"""What ran beside what, and how much slower things went for it: measured, not assumed.

    pace of a block of samples = a × (1 + b × samples in flight on its engine) × (1 + c × share of time in training)

by least squares over blocks of samples, and over steps for the trainer. A slope counts only where it is positive and
twice its standard error. All daemons of a laptop share its cores, so there it shows; on a cluster it is mostly the
engine's batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from replay.ages.history import GroupLife, History, Sample, Step

_MOST_SIGMA = 2.0  # a slope counts from so many standard errors
_LEAST_BLOCKS = 8  # and from so many blocks


class Crowding(msgspec.Struct, frozen=True):
    """How much slower things go beside others: seconds = work × (1 + slope × how much of it)."""

    per_sample: float = 0.0  # generation, for each sample in flight on the same engine
    beside_training: float = 0.0  # generation, while the trainer is in a step
    beside_generation: float = 0.0  # a training step, while samples are in flight


class Load:
    """How many of some intervals are under way at a time, and its integral."""

    def __init__(self, begins: Sequence[int], ends: Sequence[int]) -> None:
        times = np.concatenate([np.asarray(begins, float), np.asarray(ends, float)]) / 1000
        change = np.concatenate([np.ones(len(begins)), -np.ones(len(ends))])
        order = np.argsort(times, kind="stable")
        self._times = times[order]
        self._count = np.cumsum(change[order])
        steps = np.diff(self._times)
        self._area = np.concatenate([[0.0], np.cumsum(self._count[:-1] * steps)])
        self._any = np.concatenate([[0.0], np.cumsum((self._count[:-1] > 0) * steps)])

    @property
    def most(self) -> int:
        return int(self._count.max(initial=0))

    def mean(self, begins: NDArray[np.float64], ends: NDArray[np.float64]) -> NDArray[np.float64]:
        """Mean count over [begin, end) in seconds."""
        return self._over(self._area, begins, ends)

    def share(self, begins: NDArray[np.float64], ends: NDArray[np.float64]) -> NDArray[np.float64]:
        """Share of [begin, end) in which at least one was under way."""
        return self._over(self._any, begins, ends)

    def _over(self, area: NDArray[np.float64], begins: NDArray[np.float64], ends: NDArray[np.float64]):
        if not len(self._times):
            return np.zeros(len(begins))
        difference = np.interp(ends, self._times, area) - np.interp(begins, self._times, area)
        return difference / np.maximum(ends - begins, 1e-6)


class Busy(NamedTuple):
    generation: Load
    training: Load
    begin_s: float  # the steady part
    end_s: float

    @property
    def most(self) -> int:
        return self.generation.most


def busy_times(history: History, steps: Sequence[Step]) -> Busy:
    samples = [sample for group in history.groups.values() for sample in group.samples.values()]
    return Busy(
        Load([each.started_ms for each in samples], [each.finished_ms for each in samples]),
        Load([step.cut.cut_ms for step in steps], [step.ended_ms for step in steps]),
        steps[0].cut.cut_ms / 1000,
        steps[-1].cut.cut_ms / 1000,
    )


def surroundings(samples: Sequence[Sample], busy: Busy) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(samples in flight, share of time in training) beside each sample, over the typical time from its start.

    Not over its own life: a long sample outlives the others of its wave, so it would look as if being alone made it
    slow.
    """
    begins = np.array([each.started_ms for each in samples]) / 1000
    typical = float(np.median([each.finished_ms - each.started_ms for each in samples])) / 1000
    ends = begins + max(typical, 1e-3)
    return busy.generation.mean(begins, ends), busy.training.share(begins, ends)


def measure_crowding(
    groups: Sequence[GroupLife], steps: Sequence[Step], busy: Busy, engines: int
) -> Crowding:
    samples = [sample for group in groups for sample in group.samples.values()]
    in_flight, training = surroundings(samples, busy)
    seconds = np.array([each.finished_ms - each.started_ms for each in samples]) / 1000
    tokens = np.array([max(1, each.n_tokens) for each in samples])
    pace = seconds / tokens  # seconds a token, so that longer samples are not slower ones
    block = max(1, len(samples) // max(1, len(steps)))
    rows = np.stack([pace, in_flight / engines, training], axis=1)
    per_sample, beside_training = _slopes(_block_means(rows, block))
    begins = np.array([step.cut.cut_ms for step in steps]) / 1000
    ends = np.array([step.ended_ms for step in steps]) / 1000
    share = busy.generation.share(begins, ends)
    (beside_generation,) = _slopes(np.stack([ends - begins, share], axis=1))
    return Crowding(per_sample, beside_training, beside_generation)


def _block_means(rows: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    count = len(rows) // size
    return rows[: count * size].reshape(count, size, -1).mean(axis=1)


def _slopes(rows: NDArray[np.float64]) -> list[float]:
    """Relative slopes of column 0 on each of the others: b / a of a + b₁x₁ + …; 0 where it cannot be told from 0."""
    n_slopes = rows.shape[1] - 1
    if len(rows) < _LEAST_BLOCKS:
        return [0.0] * n_slopes
    x = np.concatenate([np.ones((len(rows), 1)), rows[:, 1:]], axis=1)
    keeps = [0, *(place for place in range(1, x.shape[1]) if np.std(x[:, place]) > 1e-6)]
    while len(keeps) > 1:
        coefficients, errors = _least_squares(x[:, keeps], rows[:, 0])
        ratios = coefficients[1:] / np.maximum(errors[1:], 1e-12)
        if coefficients[0] > 0 and ratios.min() >= _MOST_SIGMA:
            slopes = dict(zip(keeps[1:], coefficients[1:] / coefficients[0], strict=True))
            return [float(slopes.get(place, 0.0)) for place in range(1, n_slopes + 1)]
        keeps.pop(1 + int(ratios.argmin()))
    return [0.0] * n_slopes


def _least_squares(x: NDArray[np.float64], y: NDArray[np.float64]):
    """Coefficients and their standard errors."""
    coefficients, *_ = np.linalg.lstsq(x, y, rcond=None)
    left = y - x @ coefficients
    variance = float(left @ left) / max(1, len(y) - x.shape[1])
    return coefficients, np.sqrt(np.maximum(0.0, np.diag(np.linalg.pinv(x.T @ x)) * variance))
