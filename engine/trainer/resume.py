"""Where a trainer starts: the newest checkpoint that a valid record names, then the ledger after it, replayed.

Recovery is the same code as the live step (`train_batch`, `backend.step`), so the weights come out as if nothing
had happened. Versions that are made again are compared by digest with the published ones: as far as they agree they
are the same versions; from the first that differs on, the old ones count as the fork point (DESIGN §7).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from consumers.ledger import Frontier, Ledger
from consumers.staleness import Lineage
from engine.interfaces import BadStep, TrainerBackend
from engine.trainer.checkpoint import CheckpointFound, open_checkpoint
from engine.trainer.payloads import BadPayload, Payloads, train_batch
from streams.errors import LogError
from streams.events import BatchCut, CheckpointSaved, Event, StepSkipped, WeightsPublished
from streams.log import EventLog, Record
from streams.topics import Topics

logger = logging.getLogger(__name__)

History = Sequence[tuple[Record, Event]]


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
    """Bring the backend to the state after the last valid cut. `history` holds the valid ledger records so far."""
    found = _newest(ledger.checkpoints, checkpoints)
    step = version = 0
    after = 0
    if found is not None:
        backend.load(found.state)
        step, version, after = found.step, found.version, found.ledger_position
        logger.info("trainer: checkpoint of step %d (version %d) loaded", step, version)
    published = {
        event.version: event.digest for record, event in history if isinstance(event, WeightsPublished)
    }
    forked_at = _agreed(backend, digest, version, published, version) if published else -1
    agrees = forked_at == version or not published
    skipped = {event.step for _, event in history if isinstance(event, StepSkipped)}
    payloads, lineage, replayed = Payloads(log, topics), Lineage(), 0
    unrecorded: list[tuple[BatchCut, BadStep]] = []
    for record, event in history:
        if isinstance(event, WeightsPublished):
            lineage.published(event.epoch, event.version, event.forked_at)
        if not isinstance(event, BatchCut) or record.offset < after or event.step <= step:
            continue
        beat()
        step = event.step
        replayed += 1
        if step in skipped:  # the record decides, whatever this machine would make of the step
            continue
        try:
            backend.step(train_batch(event, payloads, lineage))
        except BadPayload as gone:
            raise LogError(
                f"trainer: step {step} cannot be made again from the log: {gone}. The log must keep trajectories at "
                "least since the newest checkpoint (log.retention_s, log.retention_bytes, checkpoint.every)"
            ) from gone
        except BadStep as bad:
            logger.warning("trainer: replay skips step %d (%s); the record does not say so", step, bad)
            unrecorded.append((event, bad))
            continue
        version = event.version + 1
        if agrees and version in published:
            agrees = published[version] == digest(backend.weights())
            if not agrees:
                logger.warning("trainer: version %d made again differs from the published one", version)
        if agrees:
            forked_at = version if published else -1
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


def _newest(saved: Sequence[CheckpointSaved], folder: Path) -> CheckpointFound | None:
    """The newest checkpoint that a valid record names and whose files verify; a bad one costs one warning."""
    for record in reversed(saved):
        found = open_checkpoint(folder / Path(record.path).name)
        if isinstance(found, CheckpointFound) and found.digest == record.digest:
            return found
        reason = found if isinstance(found, str) else "its digest is not the recorded one"
        logger.warning("trainer: checkpoint %s of step %d passed over: %s", record.path, record.step, reason)
    return None
