"""Steps that were made again, beside what the run recorded of them: equal, or what differs and where it begins.

    ledger  ─► digest of each published version, StepSkipped ─┐
    metrics ─► StepMeasured (else Metrics) of each step ──────┴─► RecordedStep ─┬─► differences, step by step
    the same step, made again from the log ───────────────────────────────────┘

Everything is compared bit for bit. What depends on a clock is left out, and so is what the record does not hold: a step
whose trainer was killed before it measured has no metrics, and with `weights.update_weights_interval` above 1 not every
version was published.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from consumers.telemetry import SUMS, recorded_sums
from replay.records import entries
from streams.events import BatchCut, Event, Metrics, StepMeasured, StepSkipped, WeightsPublished
from streams.log import EventLog, Record
from streams.topics import Topics

History = Sequence[tuple[Record, Event]]  # valid ledger records in order

CLOCK = frozenset({"seconds", "step_s", "wait_s", "busy"})  # metrics of time, which no two runs share
WEIGHTS, SKIPPED, SAMPLES = "weights", "skipped", "samples"  # names of differences beside those of metrics
_SHOWN = 12  # digits of a digest


class RecordedStep(NamedTuple):
    """What the log says of one step."""

    cut: BatchCut
    digest: str = ""  # of the weights after it; "" where this version was not published
    metrics: Mapping[str, float] | None = None  # None: the step was not measured
    sums: NDArray[np.float64] | None = (
        None  # [S, 12], columns of consumers.telemetry.SUMS; None: not recorded
    )
    skipped: str = ""  # why it changed nothing

    @property
    def uids(self) -> list[str]:
        return uids_of(self.cut)


class MadeAgain(NamedTuple):
    """The same step, made again."""

    cut: BatchCut  # as it was trained on
    version: int  # of the weights after it
    digest: str  # of the weights after it; "" where nobody asked
    metrics: Mapping[str, float]
    sums: NDArray[np.float64]  # [S, 12]; [0, 12] of a backend without log-probs
    skipped: str = ""


class Difference(NamedTuple):
    step: int
    name: str  # of a metric, or one of the words above
    recorded: str  # as text, every digit of it
    redone: str
    text: str

    def sentence(self) -> str:
        return f"step {self.step}: {self.text}"


def uids_of(cut: BatchCut) -> list[str]:
    """The samples of a cut, in the order of its StepMeasured."""
    return [member.uid for group in cut.groups for member in group.members]


def recorded_steps(
    log: EventLog, topics: Topics, history: History, first: int, last: int
) -> dict[int, RecordedStep]:
    """What the log says of the steps `first` to `last`; reads the topic of metrics once."""
    cuts = {event.step: event for _, event in history if isinstance(event, BatchCut)}
    skipped = {event.step: event.reason for _, event in history if isinstance(event, StepSkipped)}
    digests = published_digests(history)
    wanted = {step: cut for step, cut in cuts.items() if first <= step <= last}
    measured, plain = _measurements(log, topics, wanted)
    found = {}
    for step, cut in wanted.items():
        event = measured.get(step)
        found[step] = RecordedStep(
            cut,
            digest="" if step in skipped else digests.get(cut.version + 1, ""),
            metrics=event.values if event is not None else plain.get(step),
            sums=None if event is None else recorded_sums(event),
            skipped=skipped.get(step, ""),
        )
    return found


def published_digests(history: History) -> dict[int, str]:
    """version → digest of the weights that the run went on from; versions that a later epoch abandoned are left out.

    When a trainer recovered on other weights than those published (a fork, DESIGN §7), the older epoch's versions above
    the fork are nobody's ancestors any more.
    """
    published = [event for _, event in history if isinstance(event, WeightsPublished)]
    forks: dict[int, int] = {}
    for event in published:
        if event.forked_at >= 0:
            forks.setdefault(event.epoch, event.forked_at)
    return {
        event.version: event.digest
        for event in published
        if not any(epoch > event.epoch and event.version > forked_at for epoch, forked_at in forks.items())
    }


def differences(recorded: RecordedStep, redone: MadeAgain) -> list[Difference]:
    """Everything in which the step made again is not the recorded one: metrics first, the weights it leads to last."""
    step = recorded.cut.step
    if recorded.skipped != redone.skipped:
        then, now = (f"skipped ({each.skipped})" if each.skipped else "taken" for each in (recorded, redone))
        return [Difference(step, SKIPPED, then, now, f"recorded as {then}, made again it was {now}")]
    found = [
        Difference(step, name, repr(then), repr(now), f"{name} was {then!r}, made again it is {now!r}")
        for name, then, now in _shared(recorded.metrics or {}, redone.metrics)
        if float(then).hex() != float(now).hex()
    ]
    found += _sample_differences(recorded, redone)
    if recorded.digest and redone.digest and recorded.digest != redone.digest:
        text = (
            f"the weights of version {redone.version} had digest {recorded.digest[:_SHOWN]}…, made again they have "
            f"{redone.digest[:_SHOWN]}…"
        )
        found.append(Difference(step, WEIGHTS, recorded.digest, redone.digest, text))
    return found


def compared_metrics(recorded: RecordedStep, redone: MadeAgain) -> list[str]:
    """Names of the metrics that both sides have and that do not depend on a clock."""
    return [name for name, _, _ in _shared(recorded.metrics or {}, redone.metrics)]


def _shared(then: Mapping[str, float], now: Mapping[str, float]) -> list[tuple[str, float, float]]:
    return [(name, then[name], now[name]) for name in now if name in then and name not in CLOCK]


def _sample_differences(recorded: RecordedStep, redone: MadeAgain) -> list[Difference]:
    """Samples whose sums differ, as one difference: they say which payload, or that it is all of them."""
    then, now = recorded.sums, redone.sums
    if then is None or then.shape != now.shape:
        return []
    differ = then.view(np.uint64) != now.view(np.uint64)
    differ[:, np.isnan(then).all(axis=0)] = False  # a column that the writer did not know
    rows = np.flatnonzero(differ.any(axis=1))
    if not len(rows):
        return []
    row = rows[0]
    column = int(np.flatnonzero(differ[row])[0])
    more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
    text = (
        f"sample {recorded.uids[row]}{more}: {SUMS[column]} was {float(then[row, column])!r}, "
        f"made again it is {float(now[row, column])!r}"
    )
    return [
        Difference(
            recorded.cut.step, SAMPLES, repr(float(then[row, column])), repr(float(now[row, column])), text
        )
    ]


def _measurements(
    log: EventLog, topics: Topics, cuts: Mapping[int, BatchCut]
) -> tuple[dict[int, StepMeasured], dict[int, dict[str, float]]]:
    """(step → StepMeasured, step → values of the trainer's Metrics).

    A fenced trainer may have measured a void cut of the same number: StepMeasured says whose it is. Metrics do not, so
    they count only where a step has one of them.
    """
    measured: dict[int, StepMeasured] = {}
    plain: dict[int, list[dict[str, float]]] = {}
    for entry in entries(log, topics.name("metrics"), 0):
        event = entry.event
        if isinstance(event, StepMeasured):
            cut = cuts.get(event.step)
            if cut is not None and (cut.epoch, cut.version) == (event.epoch, event.version):
                measured[event.step] = event
        elif isinstance(event, Metrics) and event.source == "trainer" and event.step in cuts:
            plain.setdefault(event.step, []).append(event.values)
    return measured, {step: values[0] for step, values in plain.items() if len(values) == 1}
