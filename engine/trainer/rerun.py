"""The steps of a ledger made again, on this machine: one code path for recovery, replay and lost versions.

    valid records ─► cuts after the checkpoint, in order ─► payloads by reference ─► backend.step ─► StepRedone each
                                                   └─ recorded as skipped: not taken again

What makes a step again is what made it live (`train_batch`, `backend.step`), so weights come out with the same bits
on the same kind of machine (DESIGN §1.4). Reads only: neither the log nor a checkpoint is written to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from consumers.staleness import Lineage
from engine.interfaces import BadStep, TrainerBackend
from engine.trainer.checkpoint import CheckpointFound, open_checkpoint
from engine.trainer.payloads import BadPayload, Payloads, train_batch
from streams.errors import LogError
from streams.events import BatchCut, CheckpointSaved, Event, StepSkipped, WeightsPublished
from streams.log import EventLog, Record
from streams.topics import Topics

logger = logging.getLogger(__name__)

History = Sequence[tuple[Record, Event]]  # valid ledger records in order, as `Ledger.catch_up` returns them
Change = Callable[[BatchCut], "BatchCut | None"]  # the cut to train on instead; None: leave the step out

LEFT_OUT = "left_out"  # why a step was skipped: `change` wanted none


class StepRedone(NamedTuple):
    """What came of one cut. The backend now holds the weights after it."""

    cut: BatchCut  # as it was trained on
    version: int  # of the weights after it
    metrics: dict[str, float]  # the backend's; empty for a skipped step
    skipped: str = ""  # why it changed nothing: the recorded reason, LEFT_OUT, or what `unrecorded` says
    unrecorded: BadStep | None = None  # it could not be taken here, and no record says so


def unchanged(cut: BatchCut) -> BatchCut:
    return cut


def rerun(
    log: EventLog,
    topics: Topics,
    backend: TrainerBackend,
    history: History,
    *,
    after: CheckpointFound | None,
    until_step: int | None = None,
    change: Change = unchanged,
) -> Iterator[StepRedone]:
    """Load `after` into the backend at once (None: it holds the initial weights), then make a step for each item taken.

        for redone in rerun(log, topics, backend, Ledger(log, topics).catch_up(), after=None, until_step=7): ...

    Args:
        history: all valid records from the ledger's beginning on, since they say which versions are which.
        until_step: the last step to make; None: up to the last cut.

    Raises CheckpointError at once, and LogError when a payload is no longer in the log.
    """
    if after is not None:
        backend.load(after.state)
    return _steps(log, topics, backend, history, after, until_step, change)


def _steps(
    log: EventLog,
    topics: Topics,
    backend: TrainerBackend,
    history: History,
    after: CheckpointFound | None,
    until_step: int | None,
    change: Change,
) -> Iterator[StepRedone]:
    begin, done = (0, 0) if after is None else (after.ledger_position, after.step)
    skipped = {event.step: event.reason for _, event in history if isinstance(event, StepSkipped)}
    payloads, lineage = Payloads(log, topics), Lineage()
    for record, event in history:
        if isinstance(event, WeightsPublished):
            lineage.published(event.epoch, event.version, event.forked_at)
        if not isinstance(event, BatchCut) or record.offset < begin or event.step <= done:
            continue
        if until_step is not None and event.step > until_step:
            return
        done = event.step
        if event.step in skipped:  # the record decides, whatever this machine would make of the step
            yield StepRedone(event, event.version, {}, skipped[event.step])
            continue
        cut = change(event)
        if cut is None:
            yield StepRedone(event, event.version, {}, LEFT_OUT)
            continue
        yield _step(cut, payloads, lineage, backend)


def _step(cut: BatchCut, payloads: Payloads, lineage: Lineage, backend: TrainerBackend) -> StepRedone:
    try:
        metrics = backend.step(train_batch(cut, payloads, lineage, backend.inputs))
    except BadPayload as gone:
        raise LogError(
            f"step {cut.step} cannot be made again from the log: {gone}. The log must keep trajectories at least since "
            "the checkpoint that one starts from (log.retention_s, log.retention_bytes, checkpoint.every)"
        ) from gone
    except BadStep as bad:
        return StepRedone(cut, cut.version, {}, bad.reason, bad)
    return StepRedone(cut, cut.version + 1, metrics)


def nearest_checkpoint(
    saved: Sequence[CheckpointSaved], folder: Path, step: int | None = None
) -> CheckpointFound | None:
    """The newest checkpoint not after `step` (None: at all) that a valid record names and whose files verify.

    `saved` are the valid records in ledger order, `folder` is the run's checkpoints. A damaged one costs one warning;
    one that is no longer there is common (checkpoint.keep_last) and said at level info.
    """
    for record in reversed(saved):
        if step is not None and record.step > step:
            continue
        path = folder / Path(record.path).name
        found = open_checkpoint(path)
        if isinstance(found, CheckpointFound) and found.digest == record.digest:
            return found
        reason = found if isinstance(found, str) else "its digest is not the recorded one"
        level = logging.WARNING if path.exists() else logging.INFO
        logger.log(level, "checkpoint %s of step %d passed over: %s", record.path, record.step, reason)
    return None
