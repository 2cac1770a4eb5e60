"""Measuring a few samples under the weights that sampled them, for engines of which nothing newer compares.

In a run that is asynchronous nearly every sample is a version old when it is trained: at a limit of 2, one in a hundred
is of the trainer's own version. So now and then a few of a step's samples are measured once more, with the file of
their version. Policy lag is zero there too, and the rows go to the mismatch watch like those of the step itself.

An incarnation is due for it until there is enough to judge it by, and then after every 16 steps without a comparison.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.interfaces import EngineError, TrainBatch, TrainSample
from engine.trainer.mismatch import Maker, MismatchWatch, as_columns, trained_versions
from streams.events import SamplesProbed, WeightsPublished

logger = logging.getLogger(__name__)

PROBED = 16  # samples of each incarnation that is due

# Sums [S, 12] of these samples under the weights of this version. Raises EngineError when they cannot be had.
Score = Callable[[WeightsPublished, Sequence[TrainSample]], NDArray[np.float64]]


class Probed(NamedTuple):
    published: WeightsPublished
    samples: list[TrainSample]
    makers: list[Maker]
    sums: NDArray[np.float64]  # [S, 12]

    def record(self, *, epoch: int, step: int, names: Sequence[str], at_ms: int) -> SamplesProbed:
        engines, compared = as_columns(self.makers)
        return SamplesProbed(
            epoch=epoch,
            step=step,
            weights_epoch=self.published.epoch,
            version=self.published.version,
            uids=[sample.uid for sample in self.samples],
            engines=engines,
            compared=compared,
            names=list(names),
            n_samples=len(self.sums),
            sums=self.sums.astype("<f8").tobytes(),
            at_ms=at_ms,
        )


def probe(
    score: Score, batch: TrainBatch, watch: MismatchWatch, recent: Sequence[WeightsPublished]
) -> Probed | None:
    """Measure what is due of this batch; None when nothing is, or when the weights are gone.

    `recent` are versions whose files may still be there. All samples of one probe are of one version: its weights are
    put in place once.
    """
    known = {(each.epoch, each.version): each for each in recent}
    due: dict[tuple[int, int], list[tuple[TrainSample, Maker]]] = {}
    for sample in batch.samples:
        maker = (sample.payload.engine, sample.payload.incarnation)
        versions = trained_versions(sample)
        if maker[0] and len(versions) == 1 and versions[0] in known and watch.is_due(maker, batch.step):
            due.setdefault(versions[0], []).append((sample, maker))
    if not due:
        return None
    version = max(due, key=lambda each: (len(due[each]), each))
    taken: Counter[Maker] = Counter()
    chosen = []
    for sample, maker in due[version]:
        taken[maker] += 1
        if taken[maker] <= PROBED:
            chosen.append((sample, maker))
    samples, makers = [sample for sample, _ in chosen], [maker for _, maker in chosen]
    try:
        return Probed(known[version], samples, makers, score(known[version], samples))
    except EngineError as error:
        logger.info("trainer: no samples of version %d are measured again: %s", version[1], error)
        return None
