"""The trainer's own words on one step, from `metrics`: a row for each sample (StepMeasured) and its metrics."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from consumers.telemetry import SUMS, recorded_sums, summarize
from replay.lives.facts import Measured
from replay.lives.run import RunFacts
from replay.lives.seek import CLOCKS_MS, Window, place, records_where, type_of
from replay.records import entry_of
from streams.events import BatchCut, Metrics, StepMeasured, tag_of
from streams.log import Record

_WANTED = {tag_of(StepMeasured), tag_of(Metrics)}


class StepNumbers(NamedTuple):
    """`sums` is None where the backend measures nothing, or where the event does not fit its cut."""

    values: dict[str, float]  # the backend's, less what StepMeasured and Metrics both say
    metrics: dict[str, float]  # of the trainer's Metrics event
    sums: NDArray[np.float64] | None = None  # [S, 12], in the order of the cut's members
    place: str = ""
    at_ms: int = 0
    note: str = ""


def numbers_of(run: RunFacts, cut: BatchCut, appended_ms: int) -> StepNumbers:
    """What was measured of a step, looked for from the moment its cut was appended."""
    metrics: dict[str, float] = {}
    measured: tuple[Record, StepMeasured] | None = None
    window = Window(max(0, appended_ms - CLOCKS_MS))
    for record in records_where(run.log, run.topics.name("metrics"), 0, _is_trainers, window=window):
        event = entry_of(record).event
        if isinstance(event, StepMeasured) and event.epoch >= cut.epoch:
            if (event.epoch, event.step) == (cut.epoch, cut.step):
                measured = record, event
            elif event.step > cut.step:
                break
        elif isinstance(event, Metrics) and event.source == "trainer":
            if event.step == cut.step:
                metrics = event.values
            elif event.step > cut.step:
                break
        if measured is not None and metrics:
            break
    if measured is None:
        note = f"step {cut.step} was not measured: its trainer was stopped before it wrote that, or skipped the step"
        return StepNumbers({}, metrics, note=note)
    return _opened(cut, *measured, metrics)


def _is_trainers(record: Record) -> bool:
    return type_of(record) in _WANTED and (record.header("by") or b"trainer").startswith(b"trainer")


def _opened(cut: BatchCut, record: Record, event: StepMeasured, metrics: dict[str, float]) -> StepNumbers:
    at = place("metrics", 0, record.offset)
    n_members = sum(len(group.members) for group in cut.groups)
    if event.n_samples == 0:
        note = "the trainer's backend compares no log-probs, so there is no row for each sample"
        return StepNumbers(event.values, metrics, None, at, event.at_ms, note)
    sums = recorded_sums(event)
    if event.n_samples != n_members or sums is None:
        note = (
            f"{at} has {event.n_samples} rows of {len(event.names)} sums in {len(event.sums)} bytes; the cut has "
            f"{n_members} members, this reader knows {len(SUMS)} sums"
        )
        return StepNumbers(event.values, metrics, None, at, event.at_ms, note)
    return StepNumbers(event.values, metrics, sums, at, event.at_ms)


def row_of(cut: BatchCut, uid: str) -> int | None:
    """The row of a sample: groups in order, then their members."""
    uids = [member.uid for group in cut.groups for member in group.members]
    return uids.index(uid) if uid in uids else None


def measured_row(numbers: StepNumbers, row: int) -> Measured | None:
    if numbers.sums is None:
        return None
    sums = numbers.sums[row]
    named = {name: float(value) for name, value in zip(SUMS, sums, strict=True) if not np.isnan(value)}
    return Measured(place=numbers.place, sums=named, gauges=summarize(sums[None, :]))
