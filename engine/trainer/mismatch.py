"""The mismatch watch: are an engine's recorded log-probs those that the trainer works out for the same weights?

    step ─► samples whose trained tokens are all of the version that the step starts from ─► |lr| by engine ─► metrics
    probe ─► a few others, measured under the file of their own version (probe.py) ─────────────┤
    the last 64 of one incarnation, less the quarter that differs most: mean over the limit ───┴─► EngineQuarantined

Policy lag is zero for those samples, so what is left is the mismatch of two implementations: kernels, precision,
sampling settings, or weights that are not what the engine says they are. With several optimizer steps a batch only
the samples of the first one are compared: the later ones are measured against weights that have moved.

The rule is made so that no odd sample, nor a few of them, can quarantine an engine: a quarter of the window is left
out, nothing is judged before 16 samples and 128 tokens are there (or a whole window, of samples that are very short),
and each incarnation is judged by its own samples alone. A restarted trainer takes the evidence of the last steps from
`StepMeasured`, where it is recorded, and comes to the same judgement.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from consumers.losses import Losses
from consumers.runner import records_backwards
from consumers.staleness import Lineage
from consumers.telemetry import SUMS, recorded_sums
from engine.interfaces import TrainBatch, TrainSample
from engine.trainer.dealing import deal
from streams import codec
from streams.codec import Known
from streams.errors import CodecError
from streams.events import EngineQuarantined, SamplesProbed, StepMeasured, tag_of
from streams.log import EventLog, Record
from streams.topics import Topics

Maker = tuple[str, str]  # (engine, incarnation of its daemon)
Compared = StepMeasured | SamplesProbed

WINDOW = 64  # samples of one incarnation that are judged together
LEAST_SAMPLES, LEAST_TOKENS = 16, 128  # before which nothing is judged, unless the window is full
LEFT_OUT = 4  # one in so many of the window: those that differ most
DUE_AFTER = 16  # steps without a comparison, after which an incarnation that was judged is due for one
REMEMBERED_STEPS = 32  # that a restarted trainer looks back

_TAGS = {tag_of(kind).encode() for kind in (StepMeasured, SamplesProbed)}
_N_TOKENS, _SUM_ABS, _MAX_ABS = (
    SUMS.index(name) for name in ("n_tokens", "sum_abs_log_ratio", "max_abs_log_ratio")
)


class Mismatch(NamedTuple):
    """What the rule makes of one incarnation."""

    maker: Maker
    mean: float  # nat per token, of what the rule keeps
    limit: float
    n_samples: int  # in the window
    n_tokens: int

    def sentence(self) -> str:
        return (
            f"engine {self.maker[0]} (incarnation {self.maker[1] or 'not said'}) is quarantined: its log-probs are "
            f"{self.mean:.4g} nat per token from the trainer's under the same weights, over "
            f"rollout.max_logprob_mismatch = {self.limit:g} ({self.n_samples} samples, {self.n_tokens} tokens)"
        )

    def record(self, *, epoch: int, step: int, at_ms: int) -> EngineQuarantined:
        engine, incarnation = self.maker
        return EngineQuarantined(
            epoch=epoch,
            engine=engine,
            incarnation=incarnation,
            step=step,
            mismatch=self.mean,
            limit=self.limit,
            n_samples=self.n_samples,
            n_tokens=self.n_tokens,
            at_ms=at_ms,
        )


class _Row(NamedTuple):
    """One compared sample."""

    n_tokens: float
    sum_abs: float  # nat

    @property
    def mean(self) -> float:
        return self.sum_abs / self.n_tokens


def compared_makers(batch: TrainBatch, lineage: Lineage, num_steps_per_rollout: int) -> list[Maker | None]:
    """Who made each sample, for those whose log-probs compare without any policy lag; None for the others, and for
    what no engine made.

    The number of the version must be the trainer's own: one of an abandoned future counts as its fork point's age, but
    it is other weights.
    """
    first = set(deal(len(batch.samples), num_steps_per_rollout, batch.seed)[0].tolist())
    return [
        (sample.payload.engine, sample.payload.incarnation)
        if place in first and sample.payload.engine and _is_of(batch.version, sample, lineage)
        else None
        for place, sample in enumerate(batch.samples)
    ]


def _is_of(version: int, sample: TrainSample, lineage: Lineage) -> bool:
    versions = trained_versions(sample)
    return bool(versions) and all(
        number == version and lineage.effective(epoch, number) == version for epoch, number in versions
    )


def trained_versions(sample: TrainSample) -> list[tuple[int, int]]:
    """(epoch, version) of the tokens that train, each once, in order."""
    found: dict[tuple[int, int], None] = {}
    at = 0
    for epoch, number, n_tokens in sample.payload.versions:
        if sample.loss_mask[at : at + n_tokens].any():
            found[epoch, number] = None
        at += n_tokens
    return list(found)


def as_columns(makers: Sequence[Maker | None]) -> tuple[list[Maker], bytes]:
    """`StepMeasured.engines` and `.compared`."""
    engines = sorted({maker for maker in makers if maker is not None})
    places = {maker: place for place, maker in enumerate(engines)}
    compared = np.array([-1 if maker is None else places[maker] for maker in makers], "<i2")
    return engines, compared.tobytes()


def from_columns(event: Compared) -> list[Maker | None]:
    """The same, read back; all None where nothing was compared, or where the bytes do not fit."""
    places = np.frombuffer(event.compared, "<i2") if len(event.compared) == 2 * event.n_samples else []
    if not len(places) or max(places) >= len(event.engines):
        return [None] * event.n_samples
    return [None if place < 0 else (event.engines[place][0], event.engines[place][1]) for place in places]


class MismatchWatch:
    """`add` the rows of each step; `over` says who must be quarantined.

    >>> watch = MismatchWatch(limit=0.1)
    >>> rows = np.zeros((16, len(SUMS))); rows[:, 0], rows[:, 2] = 10, 5.0  # 16 samples of 10 tokens, 0.5 nat each
    >>> watch.add(1, [("rollout-0", "a1")] * 16, rows)
    {'mismatch/rollout-0': 0.5, 'mismatch_max/rollout-0': 0.0}
    >>> [(found.maker, found.mean) for found in watch.over()]
    [(('rollout-0', 'a1'), 0.5)]
    """

    def __init__(self, limit: float | None) -> None:
        self._limit = limit
        self._windows: dict[Maker, deque[_Row]] = {}
        self._compared: dict[Maker, int] = {}  # the newest step that had a row of it

    def is_due(self, maker: Maker, step: int) -> bool:
        """There is too little to judge it by, or nothing new."""
        return self._judge(maker) is None or step - self._compared[maker] >= DUE_AFTER

    def _judge(self, maker: Maker) -> Mismatch | None:
        return judge(maker, self._windows.get(maker, ()), 0.0 if self._limit is None else self._limit)

    def add(self, step: int, makers: Sequence[Maker | None], sums: NDArray[np.float64]) -> dict[str, float]:
        """Take the rows [S, 12] of a step. Returns its metrics: mean and largest |lr| of each engine, nat per token."""
        rows: dict[str, list[NDArray[np.float64]]] = {}
        for maker, row in zip(makers, sums, strict=False):  # no rows from a backend without log-probs
            if maker is not None and row[_N_TOKENS] > 0:
                rows.setdefault(maker[0], []).append(row)
                window = self._windows.setdefault(maker, deque(maxlen=WINDOW))
                window.append(_Row(float(row[_N_TOKENS]), float(row[_SUM_ABS])))
                self._compared[maker] = step
        values = {}
        for engine, found in sorted(rows.items()):
            table = np.array(found)
            values[f"mismatch/{engine}"] = float(table[:, _SUM_ABS].sum() / table[:, _N_TOKENS].sum())
            values[f"mismatch_max/{engine}"] = float(table[:, _MAX_ABS].max())
        return values

    def over(self) -> list[Mismatch]:
        """Incarnations over the limit, by name."""
        if self._limit is None:
            return []
        judged = (self._judge(maker) for maker in sorted(self._windows))
        return [each for each in judged if each is not None and each.mean > each.limit]

    def forget(self, maker: Maker) -> None:
        self._windows.pop(maker, None)


def judge(maker: Maker, window: Collection[_Row], limit: float) -> Mismatch | None:
    """None while there is too little to judge by."""
    n_tokens = int(sum(row.n_tokens for row in window))
    if len(window) < WINDOW and (len(window) < LEAST_SAMPLES or n_tokens < LEAST_TOKENS):
        return None
    kept = sorted(window, key=lambda row: row.mean)[: len(window) - len(window) // LEFT_OUT]
    mean = sum(row.sum_abs for row in kept) / sum(row.n_tokens for row in kept)
    return Mismatch(maker, mean, limit, len(window), n_tokens)


def recall(log: EventLog, topics: Topics, cuts: Iterable[tuple[int, int]], watch: MismatchWatch) -> None:
    """Give the watch what was compared in the newest steps, as it was then. `cuts` are (epoch, step) of valid ones."""
    wanted = set(sorted(cuts, key=lambda cut: cut[1])[-REMEMBERED_STEPS:])
    if not wanted:
        return
    first = min(step for _, step in wanted)
    found: dict[tuple[int, int, bool], Compared] = {}
    losses = Losses("the mismatch watch", "continue")  # a damaged record is evidence lost, no more
    for record in records_backwards(log, topics.name("metrics"), 0, losses):
        event = _compared(record) if record.header("type") in _TAGS else None
        if event is None:
            continue
        is_probe = isinstance(event, SamplesProbed)
        if (event.epoch, event.step) in wanted:
            found[event.epoch, event.step, is_probe] = event
        if event.step < first:
            break
    for event in sorted(found.values(), key=lambda each: (each.step, isinstance(each, SamplesProbed))):
        if (sums := recorded_sums(event)) is not None:
            watch.add(event.step, from_columns(event), sums)


def _compared(record: Record) -> Compared | None:
    try:
        decoded = codec.decode(record)
    except CodecError:
        return None  # evidence lost; the audit shows it
    event = decoded.event if isinstance(decoded, Known) else None
    return event if isinstance(event, (StepMeasured, SamplesProbed)) else None
