"""What of an event is worth a place in a line: its fields in order, long ones abbreviated.

Of columns only the first few values are opened, or all of them as text when there is a tokenizer. Fields keep their
names, so that what a line shows can be asked for with `--where`; what only bookkeeping needs is left to JSON.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from consumers.telemetry import recorded_sums, summarize
from replay.fields import sums_of
from replay.texts import SHOWN_ITEMS, Shown, quoted, verbatim
from streams import columns
from streams.errors import CodecError
from streams.events import (
    BatchCut,
    DeadLetter,
    Event,
    GroupCompleted,
    Metrics,
    StepMeasured,
    TrajectoryFinished,
    WeightsPublished,
)

Fields = dict[str, Any]
Decoder = Callable[[Sequence[int]], str]  # text of token ids

SHOWN_CHARS = 400  # of the text of tokens: half of it from the start, half from the end
ENVIRONMENT = ("⟦", "⟧")  # around tokens that the loss mask leaves out
_LEFT_OUT = {"progress", "closed_above", "group_id", "seq", "index", "attempt", "n_samples", "task_offset"}
_GAUGES = ("mean_abs_log_ratio", "kl_k3", "ess_token", "clip_fraction")


def glance(event: Event, text: Decoder | None = None) -> Fields:
    """The fields of a line. `text`: shows tokens as text instead of ids."""
    if isinstance(event, TrajectoryFinished):
        return _trajectory(event, text)
    special = _SPECIAL.get(type(event))
    return special(event) if special else _said(event)


def _said(event: Event) -> Fields:
    """Every field that is not at its default."""
    fields: Fields = {}
    for name, default, is_required in _spec(type(event)):
        value = getattr(event, name)
        if is_required or value != default:
            fields[name] = value
    return fields


@functools.lru_cache(maxsize=64)
def _spec(kind: type[Event]) -> list[tuple[str, Any, bool]]:
    """(name, default, whether it must be given) of each field; a sample's uid says its group, index and attempt."""
    left_out = _LEFT_OUT if "uid" in kind.__struct_fields__ else {"progress", "closed_above"}
    spec: list[tuple[str, Any, bool]] = []
    for field in msgspec.structs.fields(kind):
        default = None if field.default is msgspec.NODEFAULT else field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        if field.name not in left_out:
            spec.append((field.name, default, field.required))
    return spec


# ---------------------------------------------------------------- trajectories
def _trajectory(event: TrajectoryFinished, text: Decoder | None) -> Fields:
    """Written out field by field: a topic has many of these, and a loop over names takes twice the time."""
    fields: Fields = {"uid": event.uid}
    if text is None:
        fields["prompt_ids"] = _abbreviated(columns.first_ids, event.prompt_ids, _as_ids)
        fields["response_ids"] = _abbreviated(columns.first_ids, event.response_ids, _as_ids)
    else:
        fields |= _as_text(event, text)
    fields["trained"] = _trained(event)
    fields["versions"] = _versions(event)
    fields["finish_reason"] = event.finish_reason
    if text is None and event.prompt:
        fields["prompt"] = event.prompt
    if text is None and event.response:
        fields["response"] = event.response
    if event.label is not None:
        fields["label"] = event.label
    if event.metadata:
        fields["metadata"] = event.metadata
    if event.claims:
        fields["claims"] = event.claims
    if event.turns:
        fields["turns"] = len(event.turns)
    if event.engine:
        fields["engine"] = event.engine
    if event.finished_ms:
        fields["took_ms"] = event.finished_ms - event.started_ms
    fields["logprobs"] = _abbreviated(columns.first_logprobs, event.logprobs, _as_logprobs)
    return fields


def _abbreviated(
    first: Callable[[bytes, int], tuple[list[Any], int]], column: bytes, as_text: Callable[[list[Any]], str]
) -> Shown:
    """The first few values of a column, as [1,2,3,4,…900]; one that cannot be read verbatim."""
    try:
        values, count = first(column, SHOWN_ITEMS)
    except CodecError as error:
        return Shown(f"<{error}> {verbatim(column)}")
    return Shown(f"[{as_text(values)}]" if count <= SHOWN_ITEMS else f"[{as_text(values)},…{count}]")


def _as_ids(values: list[int]) -> str:
    return ",".join(map(str, values))


def _as_logprobs(values: list[float]) -> str:
    return ",".join([f"{value:g}" for value in values])


def _trained(event: TrajectoryFinished) -> Shown:
    """Response tokens with loss mask 1, of how many."""
    try:
        runs = columns.decode_runs(event.loss_mask)
    except CodecError as error:
        return Shown(f"<{error}> {verbatim(event.loss_mask)}")
    return Shown(f"{sum(runs[1::2])}/{event.n_response_tokens}")


def _versions(event: TrajectoryFinished) -> Shown:
    return Shown(",".join([f"e{epoch}v{version}×{count}" for epoch, version, count in event.versions]))


def _as_text(event: TrajectoryFinished, text: Decoder) -> Fields:
    try:
        prompt = text(columns.decode_ids(event.prompt_ids).tolist())
        parts = spoken(event, text)
    except CodecError as error:
        return {"text": Shown(f"<{error}>")}
    begin, end = ENVIRONMENT
    response = "".join([said if is_policy else f"{begin}{said}{end}" for is_policy, said in parts])
    return {"prompt_text": _ends(prompt), "response_text": _ends(response)}


def spoken(event: TrajectoryFinished, text: Decoder) -> list[tuple[bool, str]]:
    """The response as text, in stretches: (whether the loss mask keeps it, text). Raises CodecError."""
    ids = columns.decode_ids(event.response_ids).tolist()
    parts: list[tuple[bool, str]] = []
    at = 0
    for index, run in enumerate(columns.decode_runs(event.loss_mask)):
        if run:
            parts.append((index % 2 == 1, text(ids[at : at + run])))
        at += run
    return parts


def _ends(text: str) -> Shown:
    """Quoted; of a long text its start and its end."""
    half = SHOWN_CHARS // 2
    if len(text) > SHOWN_CHARS:
        text = f"{text[:half]}…{len(text) - 2 * half} more…{text[-half:]}"
    return Shown(quoted(text))


# ---------------------------------------------------------------- the others
def _cut(event: BatchCut) -> Fields:
    members = [member for group in event.groups for member in group.members]
    ages = [member.staleness for member in members if member.staleness >= 0]
    return {
        "step": event.step,
        "version": event.version,
        "epoch": event.epoch,
        "limit": event.limit,
        "groups": [group.group_id for group in event.groups],
        "samples": len(members),
        "tokens": sum(member.n_trainable_tokens for member in members),
        "reward": round(sum(member.reward for member in members) / max(1, len(members)), 4),
        "staleness": f"{min(ages)}..{max(ages)}" if ages else "-",
        "drops": [f"{drop.group_id}:{drop.reason}" for drop in event.drops],
        "duplicates": event.duplicates,
        "frontier": event.frontier,
        "positions": event.positions,
    } | ({"last": True} if event.last else {})


def _completed(event: GroupCompleted) -> Fields:
    return {
        "group_id": event.group_id,
        "seq": event.seq,
        "members": f"{len(event.members)}/{event.n_samples}",
        "rewards": [member.reward for member in event.members],
        "tokens": sum(member.n_response_tokens for member in event.members),
        "frontier": event.frontier,
    }


def _published(event: WeightsPublished) -> Fields:
    return _said(event) | {"digest": event.digest[:16], "tensors": len(event.tensors)}


def _metrics(event: Metrics) -> Fields:
    step = {"step": event.step} if event.step >= 0 else {}
    return {"source": event.source, **step, **_rounded(event.values)}


def _measured(event: StepMeasured) -> Fields:
    fields: Fields = {
        "step": event.step,
        "epoch": event.epoch,
        "version": event.version,
        "samples": event.n_samples,
    }
    try:
        sums_of(event)
    except CodecError as error:
        return fields | {"sums": Shown(f"<{error}> {verbatim(event.sums)}")} | _rounded(event.values)
    if (sums := recorded_sums(event)) is not None:
        gauges = summarize(sums)
        fields |= {name: round(gauges[name], 6) for name in _GAUGES if name in gauges}
    return fields | _rounded(event.values)


def _rounded(values: dict[str, float]) -> Fields:
    return {name: round(value, 6) for name, value in sorted(values.items())}


def _letter(event: DeadLetter) -> Fields:
    return {
        "at": f"{event.topic}/{event.partition}:{event.offset}",
        "stage": event.stage,
        "reason": event.reason,
        "detail": event.detail,
        "headers": dict(event.raw_headers),
        "raw": Shown(verbatim(event.raw)),
    }


_SPECIAL: dict[type[Event], Callable[[Any], Fields]] = {
    BatchCut: _cut,
    GroupCompleted: _completed,
    WeightsPublished: _published,
    Metrics: _metrics,
    StepMeasured: _measured,
    DeadLetter: _letter,
}
