"""How far the policy has moved from the one that sampled, per trajectory and per step.

Twelve numbers per trajectory, over its trained tokens, are enough to work out every measure below later for any subset
of trajectories ("what if the limit had been 2"). lr = log π − log μ at the forward that trains the token, so
before the update that uses it; w = exp(lr). The trainer records them with each step (`StepMeasured`, topic metrics).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streams.events import SamplesProbed, StepMeasured

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
    "n_clipped",  # tokens whose gradient the clip range or a cap took away
    "max_abs_log_ratio",  # since schema 1.2
    "n_masked",  # those of n_clipped that a mask took away whole, whatever their own ratio; since schema 1.2
)
BAND = (0.8, 1.2)
_SINCE_1_0 = SUMS[:10]
_MAX_RATIO, _N_CLIPPED, _MAX_ABS, _N_MASKED = (
    SUMS.index(name) for name in ("max_ratio", "n_clipped", "max_abs_log_ratio", "n_masked")
)


def trajectory_sums(
    log_ratios: NDArray[np.floating],
    sample: NDArray[np.integer],
    n_samples: int,
    is_clipped: NDArray[np.bool_] | None = None,
    is_masked: NDArray[np.bool_] | None = None,
) -> NDArray[np.float64]:
    """The sums of each sample, float64 [n_samples, 12] in the order of SUMS; zeros where nothing was trained.

    Args:
        log_ratios: [N] of trained tokens.
        sample: [N] the sample of each token, ascending.
        is_clipped, is_masked: [N]; None: no token was.
    """
    lr = log_ratios.astype(np.float64)
    w = np.exp(np.minimum(lr, 300.0))  # its square must stay finite
    below, above = (w < BAND[0]).astype(np.float64), (w > BAND[1]).astype(np.float64)
    parts = (np.ones_like(lr), lr, abs(lr), lr * lr, w, w * w, below, above)
    sums = np.zeros((n_samples, len(SUMS)))
    for place, part in enumerate(parts):
        sums[:, place] = np.bincount(sample, part, n_samples)
    np.maximum.at(sums[:, _MAX_RATIO], sample, w)
    np.maximum.at(sums[:, _MAX_ABS], sample, abs(lr))
    if is_clipped is not None:
        sums[:, _N_CLIPPED] = np.bincount(sample, is_clipped, n_samples)
    if is_masked is not None:
        sums[:, _N_MASKED] = np.bincount(sample, is_masked, n_samples)
    return sums


def recorded_sums(event: StepMeasured | SamplesProbed) -> NDArray[np.float64] | None:
    """The table of such an event, float64 [S, 12] in the order of SUMS, NaN in a column that its writer did not know.

    None where the bytes do not fit, or the columns are of a schema that this reader does not know.
    """
    if not set(_SINCE_1_0) <= set(event.names) or len(event.sums) != 8 * event.n_samples * len(event.names):
        return None
    recorded = np.frombuffer(event.sums, "<f8").reshape(event.n_samples, len(event.names))
    sums = np.full((event.n_samples, len(SUMS)), np.nan)
    for place, name in enumerate(SUMS):
        if name in event.names:
            sums[:, place] = recorded[:, event.names.index(name)]
    return sums


def summarize(sums: NDArray[np.float64]) -> dict[str, float]:
    """Measures of a set of trajectories from their sums [S, 12]; empty without a trained token.

    mean_abs_log_ratio   mean |lr|, nat per token: the drift
    max_abs_log_ratio    largest |lr|
    max_ratio            largest w
    kl_k1, kl_k3         mean of −lr and of (w − 1) − lr: estimators of KL(μ ‖ π) from samples of μ
                         (Schulman 2020, "Approximating KL divergence")
    ess_token            (Σw)² / (n Σw²), Kish's effective sample size as a share of the tokens
    ess_sequence         the same with one weight per trajectory, exp(Σ lr)
    ratio_outside        share of tokens with w outside [0.8, 1.2]
    clip_fraction        share of tokens whose gradient the loss took away
    masked_fraction      share of tokens that a mask took away whole; they count as clipped too

    Measures of columns that the writer of some trajectory did not know are left out.
    """
    used = sums[sums[:, 0] > 0]
    if not len(used):
        return {}
    n, lr, abs_lr, _, w, w2, below, above, _, clipped, _, masked = used.sum(axis=0)
    sequence = np.exp(
        used[:, 1] - used[:, 1].max()
    )  # the measure does not change with the scale of the weights
    measures = {
        "mean_abs_log_ratio": float(abs_lr / n),
        "max_abs_log_ratio": float(used[:, _MAX_ABS].max()),
        "max_ratio": float(used[:, _MAX_RATIO].max()),
        "kl_k1": float(-lr / n),
        "kl_k3": float((w - n - lr) / n),
        "ess_token": float(w * w / (n * w2)) if w2 > 0 else 0.0,
        "ess_sequence": float(sequence.sum() ** 2 / (len(used) * (sequence**2).sum())),
        "ratio_outside": float((below + above) / n),
        "clip_fraction": float(clipped / n),
        "masked_fraction": float(masked / n),
    }
    later = ("max_abs_log_ratio", "masked_fraction")
    return {name: value for name, value in measures.items() if name not in later or not np.isnan(value)}
