"""Where a trainer starts: the newest checkpoint that a valid record names, then the ledger after it, replayed.

Recovery is the same code as replay (`engine.trainer.rerun`) and as the live step, so the weights come out as if nothing
had happened. Versions that are made again are compared by digest with the published ones: as far as they agree they
are the same versions; from the first that differs on, the old ones count as the fork point (DESIGN §7).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from consumers.ledger import Frontier, Ledger
from engine.interfaces import BadStep, TrainerBackend
from engine.trainer.rerun import History, nearest_checkpoint, rerun
from streams.events import BatchCut, WeightsPublished
from streams.log import EventLog
from streams.topics import Topics

__all__ = ["History", "Start", "resume"]

logger = logging.getLogger(__name__)


class Start(NamedTuple):
    """State of the trainer loop when it goes live."""

    step: int
    version: int
    positions: list[int]
    frontier: Frontier
    forked_at: int  # -1: nothing was published before
    replayed: int  # steps
    unrecorded: list[tuple[BatchCut, BadStep]]  # steps that could not be taken, and no record says so


def resume(
    log: EventLog,
    topics: Topics,
    ledger: Ledger,
    history: History,
    backend: TrainerBackend,
    checkpoints: Path,
    *,
    digest: Callable[[Any], str],
    beat: Callable[[], None] = lambda: None,
) -> Start:
    """Bring the backend to the state after the last valid cut. `history` holds the valid ledger records so far.

    Raises LogError when the log no longer holds what a step was made from.
    """
    found = nearest_checkpoint(ledger.checkpoints, checkpoints)
    steps = rerun(log, topics, backend, history, after=found)
    step = version = 0
    if found is not None:
        step, version = found.step, found.version
        logger.info("trainer: checkpoint of step %d (version %d) loaded", step, version)
    published = {
        event.version: event.digest for record, event in history if isinstance(event, WeightsPublished)
    }
    forked_at = _agreed(backend, digest, version, published, version) if published else -1
    agrees = forked_at == version or not published
    replayed = 0
    unrecorded: list[tuple[BatchCut, BadStep]] = []
    beat()
    for redone in steps:
        step = redone.cut.step
        replayed += 1
        if redone.unrecorded is not None:
            logger.warning(
                "trainer: replay skips step %d (%s); the record does not say so", step, redone.unrecorded
            )
            unrecorded.append((redone.cut, redone.unrecorded))
        elif not redone.skipped:
            version = redone.version
            if agrees and version in published:
                agrees = published[version] == digest(backend.weights())
                if not agrees:
                    logger.warning("trainer: version %d made again differs from the published one", version)
            if agrees:
                forked_at = version if published else -1
        beat()
    if replayed:
        logger.info("trainer: replayed %d steps, now at step %d, version %d", replayed, step, version)
    positions = ledger.last_cut.positions if ledger.last_cut is not None else [0] * topics.partitions
    frontier = Frontier(ledger.frontier, ledger.closed_above)
    return Start(step, version, list(positions), frontier, forked_at, replayed, unrecorded)


def _agreed(
    backend: TrainerBackend, digest: Callable[[Any], str], version: int, published: dict[int, str], base: int
) -> int:
    """The base version itself must be what was published under its number."""
    if version in published and published[version] != digest(backend.weights()):
        logger.warning("trainer: version %d differs from the published one", version)
        return max(0, base - 1)
    return base
