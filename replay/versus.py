"""Two ways of training on identical data, measured side by side: A as recorded, B with other settings.

What the reward would have become under B cannot be known from the log: B's policy never sampled. What can be known is
how B's policy sees samples that it has not trained on yet, since every step is measured before its update:

    learnt = 1/N Σ_i A_i Σ_t (log π(token t of sample i) − log μ(the same)),    A_i by GRPO

the advantage-weighted log-ratio in nat per token. It is above 0 when the policy has, since these samples were drawn,
come to prefer the better ones of each group to the worse, which is what training is for. It compares A with B on the
same samples; it says nothing about samples that B would have drawn itself. A's policy is never far from its data, since
its predecessors drew them; nothing holds B near to them. Once B's effective sample size (`ess_token`) is below one
half, the data are hardly B's any more, and its figures only say that it went away.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from consumers.advantages import group_advantages
from consumers.telemetry import SUMS, summarize
from replay.compare import uids_of
from streams.events import BatchCut

LEARNT = "learnt"
MEASURES = {  # name → what it is, for tables and pictures
    "loss": "loss",
    "grad_norm": "gradient norm",
    "entropy": "entropy (nat)",
    "mean_abs_log_ratio": "mean |log ratio| (nat)",
    "kl_k3": "KL(data ‖ policy), k3 (nat)",
    "ess_token": "effective sample size (share of tokens)",
    "clip_fraction": "share of clipped tokens",
    LEARNT: "advantage-weighted log-ratio (nat)",
}
LEAST_ESS = 0.5
_N_TOKENS, _LOG_RATIO = SUMS.index("n_tokens"), SUMS.index("sum_log_ratio")


class Taken(NamedTuple):
    """One step as one side took it."""

    cut: BatchCut  # as it was trained on
    metrics: Mapping[str, float]  # empty: it was skipped
    sums: NDArray[np.float64]  # [S, 12]; [0, 12] where nothing was measured


class Compared(NamedTuple):
    """One step of both sides; nan where a side has no such figure."""

    step: int
    a: dict[str, float]
    b: dict[str, float]


def compare(a: Taken, b: Taken) -> Compared:
    """Both sides of one step. Gauges of A count the samples that B trained on, so that both speak of the same data."""
    kept = set(uids_of(b.cut))
    return Compared(a.cut.step, measures(a, kept), measures(b, kept))


def measures(side: Taken, uids: Collection[str]) -> dict[str, float]:
    """The MEASURES of one side over these samples; loss, gradient and entropy are those of its whole step."""
    values = {name: float(side.metrics.get(name, math.nan)) for name in MEASURES}
    if not len(side.sums) or not side.metrics:
        return values
    chosen = np.array([uid in uids for uid in uids_of(side.cut)], dtype=bool)
    gauges = summarize(side.sums[chosen])
    values.update({name: gauges[name] for name in gauges if name in MEASURES})
    values[LEARNT] = learnt(side.sums[chosen], advantages(side.cut)[chosen])
    return values


def learnt(sums: NDArray[np.float64], advantages: NDArray[np.float64]) -> float:
    """Σ advantage · log-ratio over all tokens, by their number: nat per token; nan without a trained token."""
    n_tokens = float(sums[:, _N_TOKENS].sum())
    return float(advantages @ sums[:, _LOG_RATIO]) / n_tokens if n_tokens else math.nan


def advantages(cut: BatchCut) -> NDArray[np.float64]:
    """[S] of a cut's samples by GRPO, whatever the estimators of the run and of B: one yardstick for both sides."""
    parts = [group_advantages([member.reward for member in group.members]).values for group in cut.groups]
    return np.concatenate(parts).astype(np.float64) if parts else np.zeros(0)


def averages(steps: Sequence[Compared]) -> dict[str, tuple[float, float, float]]:
    """name → (mean of A, mean of B, mean of B − A) over these steps; figures that a side lacks are left out."""
    found = {}
    for name in MEASURES:
        pairs = [(step.a[name], step.b[name]) for step in steps]
        pairs = [pair for pair in pairs if not any(map(math.isnan, pair))]
        if pairs:
            mean_a, mean_b = (sum(side) / len(pairs) for side in zip(*pairs, strict=True))
            found[name] = (mean_a, mean_b, mean_b - mean_a)
    return found


def end_of(steps: Sequence[Compared], share: int = 4) -> list[Compared]:
    """The last quarter (1 / share) of the steps that both sides took."""
    taken = [step for step in steps if not any(math.isnan(side["grad_norm"]) for side in (step.a, step.b))]
    return taken[-math.ceil(len(taken) / share) :] if taken else []


def far_from(steps: Sequence[Compared]) -> int | None:
    """The first step at which B's effective sample size is below LEAST_ESS; None: the data still speak of B."""
    return next((step.step for step in steps if step.b["ess_token"] < LEAST_ESS), None)
