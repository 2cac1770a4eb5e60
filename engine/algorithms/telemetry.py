"""How far the policy has moved from the one that sampled, per trajectory and per step.

Nine sums per trajectory, over its trained tokens, are enough to work out every measure below later for any subset
of trajectories ("what if the limit had been 2"). lr = log π − log μ at the forward that trains the token, so
before the update that uses it; w = exp(lr).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SUMS = (
    "n_tokens",
    "sum_log_ratio",
    "sum_abs_log_ratio",
    "sum_log_ratio_squared",
    "sum_ratio",
    "sum_ratio_squared",
    "n_ratio_below",  # w < 0.8
    "n_ratio_above",  # w > 1.2
    "max_ratio",
)
BAND = (0.8, 1.2)


def trajectory_sums(
    log_ratios: NDArray[np.floating], sample: NDArray[np.integer], n_samples: int
) -> NDArray[np.float64]:
    """The nine sums of each sample, float64 [n_samples, 9] in the order of SUMS; zeros where nothing was trained.

    Args:
        log_ratios: [N] of trained tokens.
        sample: [N] the sample of each token, ascending.
    """
    lr = log_ratios.astype(np.float64)
    w = np.exp(np.minimum(lr, 300.0))  # its square must stay finite
    below, above = (w < BAND[0]).astype(np.float64), (w > BAND[1]).astype(np.float64)
    parts = (np.ones_like(lr), lr, abs(lr), lr * lr, w, w * w, below, above)
    sums = np.zeros((n_samples, len(SUMS)))
    for place, part in enumerate(parts):
        sums[:, place] = np.bincount(sample, part, n_samples)
    np.maximum.at(sums[:, -1], sample, w)
    return sums


def summarize(sums: NDArray[np.float64]) -> dict[str, float]:
    """Measures of a set of trajectories from their nine sums [S, 9]; empty without a trained token.

    mean_abs_log_ratio   mean |lr|, nat per token: the drift
    max_ratio            largest w
    kl_k1, kl_k3         mean of −lr and of (w − 1) − lr: estimators of KL(μ ‖ π) from samples of μ
                         (Schulman 2020, "Approximating KL divergence")
    ess_token            (Σw)² / (n Σw²), Kish's effective sample size as a share of the tokens
    ess_sequence         the same with one weight per trajectory, exp(Σ lr)
    ratio_outside        share of tokens with w outside [0.8, 1.2]
    """
    used = sums[sums[:, 0] > 0]
    if not len(used):
        return {}
    n, lr, abs_lr, _, w, w2, below, above, _ = used.sum(axis=0)
    sequence = np.exp(
        used[:, 1] - used[:, 1].max()
    )  # the measure does not change with the scale of the weights
    return {
        "mean_abs_log_ratio": float(abs_lr / n),
        "max_ratio": float(used[:, 8].max()),
        "kl_k1": float(-lr / n),
        "kl_k3": float((w - n - lr) / n),
        "ess_token": float(w * w / (n * w2)) if w2 > 0 else 0.0,
        "ess_sequence": float(sequence.sum() ** 2 / (len(used) * (sequence**2).sum())),
        "ratio_outside": float((below + above) / n),
    }
