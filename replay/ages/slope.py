"""A straight line through a few points, with how sure its slope is."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np


class Slope(msgspec.Struct, frozen=True):
    """Least squares; `error` is the standard error, None with fewer than three points."""

    per_step: float
    error: float | None


def slope(xs: Sequence[float], ys: Sequence[float]) -> Slope:
    """The slope of y over x; 0 with fewer than two points.

    >>> slope([1, 2, 3], [2.0, 4.0, 6.0])
    Slope(per_step=2.0, error=0.0)
    """
    x, y = np.asarray(xs, dtype=float), np.asarray(ys, dtype=float)
    away = x - x.mean() if len(x) else x
    spread = float(away @ away)
    if spread <= 0:
        return Slope(0.0, None)
    per_step = float(away @ (y - y.mean())) / spread
    left = y - y.mean() - per_step * away
    if len(x) < 3:
        return Slope(per_step, None)
    return Slope(per_step, float(np.sqrt(left @ left / (len(x) - 2) / spread)))
