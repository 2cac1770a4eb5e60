"""A response in spans that share writer, use and version: the loss mask made visible."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from consumers.staleness import MASK, Lineage, fresh_mask
from replay.lives.facts import Span
from streams.events import BatchCut, TrajectoryFinished
from streams.trajectory import Payload

Words = Callable[[Sequence[int]], str]  # text of token ids

POLICY, ENVIRONMENT = "policy", "environment"
TRAINED, TRAINABLE, TOO_OLD, MASKED = "trained", "trainable", "too_old", "masked"
_USES = (MASKED, TOO_OLD, TRAINABLE, TRAINED)


def trained_mask(payload: Payload, cut: BatchCut, lineage: Lineage) -> NDArray[np.bool_]:
    """bool [L]: the tokens that the step trains, as the trainer makes it (engine/trainer/payloads.py)."""
    if cut.on_stale != MASK:
        return payload.loss_mask
    return fresh_mask(
        payload.loss_mask, payload.versions, trainer_version=cut.version, limit=cut.limit, lineage=lineage
    )


def spans_of(
    event: TrajectoryFinished, payload: Payload, trained: NDArray[np.bool_] | None, words: Words | None
) -> list[Span]:
    """The L response tokens in order. `trained` [L]: what a step trained; None: no step did."""
    length = len(payload.response_ids)
    writer = _writers(event, payload)
    use = np.where(payload.loss_mask, 2 if trained is None else 1, 0)
    if trained is not None:
        use = np.where(trained & payload.loss_mask, 3, use)
    run = np.repeat(np.arange(len(payload.versions)), [each[2] for each in payload.versions])
    changes = (np.diff(writer) != 0) | (np.diff(use) != 0) | (np.diff(run) != 0)
    edges = [0, *(np.flatnonzero(changes) + 1).tolist(), length]
    found = []
    for begin, end in itertools.pairwise(edges):
        epoch, version, _ = payload.versions[int(run[begin])]
        ids = payload.response_ids[begin:end].tolist()
        sampled = bool(payload.loss_mask[begin])
        found.append(
            Span(
                begin=begin,
                end=end,
                by=POLICY if writer[begin] else ENVIRONMENT,
                use=_USES[int(use[begin])],
                epoch=epoch,
                version=version,
                ids=ids,
                text=words(ids) if words is not None else None,
                mean_logprob=float(payload.logprobs[begin:end].mean()) if sampled else None,
            )
        )
    return found


def _writers(event: TrajectoryFinished, payload: Payload) -> NDArray[np.int64]:
    """int [L], 1: the policy's. By the turns where they say, else by the loss mask."""
    writer = payload.loss_mask.astype(np.int64)
    for begin, end, who in event.turns:
        writer[max(0, begin) : max(0, end)] = who == POLICY
    return writer
