"""The one rule for "too old". Every use of a sample's age goes through this module.

    staleness = trainer version when the batch is cut - version of the token
    of a sample: that of its OLDEST trainable token
    accepted exactly when 0 <= staleness <= limit

Trainer at 10, limit 2: versions 8, 9, 10 have staleness 2, 1, 0 and train; 7 is `stale`; 11 is `future`; a version
that is missing, not a whole number, or was never published is `unknown_version`. Nothing is ever "fresh by default".
With `on_stale = "drop"` a stale sample is refused whole; with "mask" its stale tokens are masked and the rest trains.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

DROP, MASK = "drop", "mask"


class Lineage:
    """Which versions are the same weights, over the incarnations (epochs) of the trainer.

    When a new epoch resumes, versions that it re-made with equal digests stay what they were; every older epoch's
    version above `forked_at` belongs to an abandoned future and counts as `forked_at` (DESIGN §7).
    """

    def __init__(self) -> None:
        self._epochs: list[int] = []  # started, ascending
        self._forks: list[tuple[int, int]] = []  # (epoch, forked_at), ascending by epoch
        self._published: set[tuple[int, int]] = set()

    def started(self, epoch: int) -> None:
        if not self._epochs or epoch > self._epochs[-1]:
            self._epochs.append(epoch)

    def published(self, epoch: int, version: int, forked_at: int = -1) -> None:
        self.started(epoch)
        self._published.add((epoch, version))
        if forked_at >= 0 and not any(known == epoch for known, _ in self._forks):
            bisect.insort(self._forks, (epoch, forked_at))

    def effective(self, epoch: Any, version: Any) -> int | None:
        """The version of the present epoch that these weights are as old as; None if they are unknown."""
        if isinstance(version, bool) or not isinstance(version, int) or not isinstance(epoch, int):
            return None
        if version < 0 or (epoch, version) not in self._published:
            return None
        for later, forked_at in self._forks:
            if later > epoch:
                version = min(version, forked_at)
        return version


class Judgement(msgspec.Struct, frozen=True):
    """What the rule says of one sample. Lags are over its trainable tokens, in versions."""

    reason: str  # "" accepted, else "stale", "future", "unknown_version" or "no_trainable_tokens"
    staleness: int  # of the oldest trainable token that trains (of the oldest at all, if refused); -1 unknown
    n_trainable: int  # tokens that train
    n_stale: int = 0  # tokens over the limit
    min_lag: int = 0
    mean_lag: float = math.nan
    max_lag: int = 0

    @property
    def accepted(self) -> bool:
        return not self.reason


def judge(
    trainable_versions: Sequence[Sequence[Any]],
    *,
    trainer_version: int,
    limit: int,
    lineage: Lineage,
    on_stale: str = DROP,
) -> Judgement:
    """Judge one sample by its version runs (epoch, version, n_tokens) over trainable tokens."""
    lags: list[tuple[int, int]] = []
    for run in trainable_versions:
        version = lineage.effective(run[0], run[1]) if len(run) == 3 else None
        if version is None:
            return Judgement("unknown_version", -1, 0)
        if version > trainer_version:
            return Judgement("future", -1, 0)
        if run[2] > 0:
            lags.append((trainer_version - version, run[2]))
    total = sum(n_tokens for _, n_tokens in lags)
    if not total:
        return Judgement("no_trainable_tokens", -1, 0)
    oldest = max(lag for lag, _ in lags)
    mean = sum(lag * n_tokens for lag, n_tokens in lags) / total
    youngest = min(lag for lag, _ in lags)
    n_stale = sum(n_tokens for lag, n_tokens in lags if lag > limit)
    if not n_stale:
        return Judgement("", oldest, total, 0, youngest, mean, oldest)
    if on_stale == DROP or n_stale == total:
        return Judgement("stale", oldest, 0, n_stale, youngest, mean, oldest)
    kept = max(lag for lag, _ in lags if lag <= limit)
    return Judgement("", kept, total - n_stale, n_stale, youngest, mean, oldest)


def token_ages(
    versions: Sequence[Sequence[int]], trainer_version: int, lineage: Lineage
) -> NDArray[np.int32]:
    """Staleness of each token, int32 [L], from version runs over all L; −1 where the version is unknown."""
    known = [lineage.effective(epoch, version) for epoch, version, _ in versions]
    ages = [-1 if version is None else trainer_version - version for version in known]
    return np.repeat(np.array(ages, np.int32), [n_tokens for _, _, n_tokens in versions])


def fresh_mask(
    loss_mask: NDArray[np.bool_],
    versions: Sequence[Sequence[int]],
    *,
    trainer_version: int,
    limit: int,
    lineage: Lineage,
) -> NDArray[np.bool_]:
    """The loss mask (bool [L]) less every token over the limit. `versions` are runs over all L response tokens."""
    fresh = loss_mask.copy()
    at = 0
    for epoch, version, n_tokens in versions:
        known = lineage.effective(epoch, version)
        if known is None or not 0 <= trainer_version - known <= limit:
            fresh[at : at + n_tokens] = False
        at += n_tokens
    return fresh
