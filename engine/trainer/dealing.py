"""Which samples of a batch make which optimizer step."""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray


def deal(n_samples: int, count: int, seed: int) -> list[NDArray[np.int64]]:
    """Places of the samples of each of `count` optimizer steps, sizes equal to within one, each ascending.

    One step keeps the order of the batch. Several are dealt in the order of random numbers drawn from `seed`:
    `Random.random` is the one source whose sequence Python promises not to change.
    """
    order = np.arange(n_samples)
    if count > 1:
        draw = random.Random(seed)
        keys = [draw.random() for _ in order]
        order = np.argsort(np.array(keys), kind="stable")
    return [np.sort(part) for part in np.array_split(order, count)]
