"""The steps of a run made again from its log: as recorded, or with other settings beside the recorded ones.

    checkpoint before --from (else the initial weights) ─► lead-in up to --from, as recorded ─┬─► as recorded: compare
                                                                                             └─► changed: B beside A

The run is only read. One process, no rollout stack: the trainer's backend and the log are all that is needed.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from consumers.ledger import Ledger
from consumers.telemetry import SUMS
from engine.interfaces import CheckpointError, TrainerBackend
from engine.replaying.rejudge import Rejudged, rejudge, rule_changed
from engine.replaying.settings import Plan
from engine.settings import Config
from engine.trainer.checkpoint import CheckpointFound, open_checkpoint, save_checkpoint
from engine.trainer.rerun import LEFT_OUT, Change, History, StepRedone, nearest_checkpoint, rerun, unchanged
from engine.weights.tensors import digest
from replay.compare import MadeAgain, RecordedStep, published_digests, recorded_steps
from replay.versus import Compared, Taken, compare
from streams.errors import ConfigError, MillstreamError
from streams.events import CheckpointSaved
from streams.log import EventLog
from streams.topics import Topics

logger = logging.getLogger(__name__)

SAY_EVERY_S = 10.0


class Record(NamedTuple):
    """The part of a run that is made again: steps `first` to `last`, inclusive."""

    log: EventLog
    topics: Topics
    history: History
    checkpoints: list[CheckpointSaved]
    epoch: int
    first: int
    last: int


class Origin(NamedTuple):
    """Where the steps begin."""

    checkpoint: CheckpointFound | None  # None: the initial weights
    step: int
    version: int
    published: str  # digest under which that version was published; "" if it was not


class Again(NamedTuple):
    """One step as recorded and as made again."""

    recorded: RecordedStep
    redone: MadeAgain


class Versus(NamedTuple):
    """Both sides of a changed replay."""

    steps: list[Compared]
    a_was_made_again: bool  # the record lacks what A's figures need
    rejudged: Rejudged | None  # None: the staleness rule is as it was
    skipped: dict[int, str]  # steps that B alone did not take, and why


def read_record(log: EventLog, topics: Topics, first: int | None, last: int | None) -> Record:
    """The valid ledger records, and the steps asked for. Raises ConfigError for steps that are not in it."""
    ledger = Ledger(log, topics)
    history = ledger.catch_up()
    if not ledger.step:
        raise ConfigError(f"run {topics.run} has no step yet: there is nothing to replay")
    begin, end = 1 if first is None else first, ledger.step if last is None else last
    if end > ledger.step:
        raise ConfigError(f"--to {end}: the ledger holds steps 1 to {ledger.step}")
    if begin > end:
        raise ConfigError(f"--from {begin}: must be at most the last step, {end}")
    return Record(log, topics, history, ledger.checkpoints, ledger.epoch, begin, end)


def find_origin(record: Record, checkpoints: Path) -> Origin:
    """The newest verified checkpoint before the first step asked for."""
    found = nearest_checkpoint(record.checkpoints, checkpoints, record.first - 1)
    step, version = (0, 0) if found is None else (found.step, found.version)
    return Origin(found, step, version, published_digests(record.history).get(version, ""))


def build(config: Config) -> TrainerBackend:
    """The run's own trainer backend, with its initial weights. Raises ConfigError when the model is not there."""
    from engine import roles

    if config.trainer.backend != "scalar":
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()  # stderr is a log here
    return roles.trainer_backend(config)


def weights_at(backend: TrainerBackend, origin: Origin) -> str:
    """Digest of the weights that the steps begin with; they are in the backend then."""
    if origin.checkpoint is not None:
        _load(backend, origin.checkpoint)
    return digest(backend.weights())


def again(record: Record, backend: TrainerBackend, origin: Origin) -> Iterator[Again]:
    """Every step from the origin to the last, made again as recorded; the lead-in too, since it is checked as well."""
    recorded = recorded_steps(record.log, record.topics, record.history, origin.step + 1, record.last)
    for redone in _made(record, backend, origin.checkpoint, record.last):
        held = digest(backend.weights())
        yield Again(recorded.pop(redone.cut.step), _made_again(redone, backend, held))


def versus(record: Record, plan: Plan, origin: Origin, folder: Path) -> tuple[Versus, TrainerBackend]:
    """A as recorded and B as changed, from the same weights; returns B's backend with its last weights.

    A's steps are made again only where the record lacks their figures. `folder` holds the state at the first step
    meanwhile, when no checkpoint does.
    """
    recorded = recorded_steps(record.log, record.topics, record.history, record.first, record.last)
    rejudged = _rejudge(record, plan)
    is_whole = all(each.skipped or each.sums is not None for each in recorded.values())
    start = folder / ".start"
    try:
        begin = _lead_in(record, plan, origin, start)
        if is_whole:
            sides = {
                step: Taken(each.cut, each.metrics or {}, _sums(each)) for step, each in recorded.items()
            }
        else:
            logger.info("the record lacks measurements: A is made again too")
            backend = build(plan.recorded)
            sides = {each.cut.step: _taken(each, backend) for each in _made(record, backend, begin)}
            del backend  # two models at a time are one too many
        changed = build(plan.asked)
        steps, skipped = [], {}
        for redone in _made(record, changed, begin, change=rejudged.of if rejudged else unchanged):
            step = redone.cut.step
            if redone.unrecorded is not None or redone.skipped == LEFT_OUT:
                skipped[step] = redone.skipped
            steps.append(compare(sides.pop(step), _taken(redone, changed)))
    finally:
        shutil.rmtree(start, ignore_errors=True)
    return Versus(steps, not is_whole, rejudged, skipped), changed


def _rejudge(record: Record, plan: Plan) -> Rejudged | None:
    if not rule_changed(plan):
        return None
    return rejudge(record.log, record.topics, record.history, plan, record.first, record.last)


def _lead_in(record: Record, plan: Plan, origin: Origin, folder: Path) -> CheckpointFound | None:
    """The state just before the first step: a checkpoint of the run, or one made here by the steps before it."""
    if origin.step == record.first - 1:
        return origin.checkpoint
    backend, version = build(plan.recorded), origin.version
    for redone in _made(record, backend, origin.checkpoint, record.first - 1):
        version = redone.version
    path, _ = save_checkpoint(
        folder,
        epoch=record.epoch,
        step=record.first - 1,
        version=version,
        ledger_position=0,
        write=backend.snapshot(),
    )
    found = open_checkpoint(path)
    if isinstance(found, str):
        raise MillstreamError(f"{path}, written a moment ago, cannot be used: {found}")
    return found


def _made(
    record: Record,
    backend: TrainerBackend,
    after: CheckpointFound | None,
    until_step: int | None = None,
    *,
    change: Change = unchanged,
) -> Iterator[StepRedone]:
    """`rerun`, which says now and then how far it is."""
    last = record.last if until_step is None else until_step
    try:
        steps = rerun(
            *(record.log, record.topics, backend, record.history), after=after, until_step=last, change=change
        )
    except CheckpointError as error:
        raise _unloadable(after, error) from error
    said = time.monotonic()
    for redone in steps:
        if time.monotonic() - said > SAY_EVERY_S:
            said = time.monotonic()
            logger.info("replay: step %d, up to %d", redone.cut.step, last)
        yield redone


def _made_again(redone: StepRedone, backend: TrainerBackend, held: str) -> MadeAgain:
    sums = backend.trajectory_sums if not redone.skipped else backend.trajectory_sums[:0]
    return MadeAgain(redone.cut, redone.version, held, redone.metrics, sums, redone.skipped)


def _taken(redone: StepRedone, backend: TrainerBackend) -> Taken:
    sums = backend.trajectory_sums if not redone.skipped else backend.trajectory_sums[:0]
    return Taken(redone.cut, redone.metrics, sums)


def _sums(recorded: RecordedStep) -> NDArray[np.float64]:
    return recorded.sums if recorded.sums is not None else np.zeros((0, len(SUMS)))


def _load(backend: TrainerBackend, checkpoint: CheckpointFound) -> None:
    try:
        backend.load(checkpoint.state)
    except CheckpointError as error:
        raise _unloadable(checkpoint, error) from error


def _unloadable(checkpoint: CheckpointFound | None, error: CheckpointError) -> MillstreamError:
    name = "" if checkpoint is None else checkpoint.path.name
    return MillstreamError(f"checkpoint {name} is whole, but cannot be loaded with these settings: {error}")
