"""What a critic learns from, and how well it foresees: the value loss and the explained variance."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class ValueLoss(NamedTuple):
    loss: Tensor  # [n]
    is_clipped: Tensor  # bool [n]: the clip range took the gradient away


def value_loss(values: Tensor, before: Tensor, returns: Tensor, clip: float) -> ValueLoss:
    """½ max((V − R)², (V' − R)²), V' = V kept within ±clip of what it was before the step; clip 0: ½ (V − R)².

    The squared error of PPO, arXiv 1707.06347, equation 9, with the clipping of its first implementation (OpenAI
    baselines; Engstrom et al. 2020, "Implementation Matters in Deep Policy Gradients", arXiv 2005.12729, section 3).
    Everything is float [n]; only `values` carries a gradient.
    """
    plain = (values - returns) ** 2
    if not clip > 0:
        return ValueLoss(plain / 2, torch.zeros_like(values, dtype=torch.bool))
    near = before + (values - before).clamp(-clip, clip)
    clipped = (near - returns) ** 2
    is_clipped = (clipped > plain) & ((values - before).abs() > clip)
    return ValueLoss(torch.maximum(plain, clipped) / 2, is_clipped.detach())


def explained_variance(values: NDArray[np.floating], returns: NDArray[np.floating]) -> float:
    """1 − Var(R − V) / Var(R): 1 of a critic that knows every return, 0 of one that says the same of all of them.

    0 also where all returns are equal.
    """
    spread = float(np.var(returns, dtype=np.float64))
    return 1.0 - float(np.var(returns - values, dtype=np.float64)) / spread if spread > 0 else 0.0
