"""The life of a step: what went into it, what was dropped on the way to it, what it measured and what it made."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from consumers.telemetry import summarize
from replay.evidence import entries_at
from replay.ledger import LedgerEntry
from replay.lives.ages import between
from replay.lives.facts import Bucket, Moment, StepDrop, StepGroup, StepLife, VoidCut
from replay.lives.fleet import fleet_entries, ready_with
from replay.lives.group import spread_of
from replay.lives.ids import no_step, parse_step
from replay.lives.measured import StepNumbers, numbers_of
from replay.lives.moments import in_order
from replay.lives.phrases import counted
from replay.lives.reasons import explain
from replay.lives.run import RunFacts
from replay.lives.seek import place
from streams.events import (
    BatchCut,
    CheckpointSaved,
    Closing,
    CutMember,
    GroupCompleted,
    StepSkipped,
    WeightsPublished,
)

VOID, UNDER_WAY = "void", "under way"


def show_step(run: RunFacts, text: str) -> StepLife:
    """The valid cut of that step, else its newest void one. Raises ConfigError or NotFound."""
    step = parse_step(text)
    cuts = run.cuts_of_step(step)
    if not cuts:
        raise no_step(run, step)
    valid = [each for each in cuts if not each.void]
    return _life(run, valid[0] if valid else cuts[-1], [each for each in cuts if each.void])


def _life(run: RunFacts, entry: LedgerEntry, void: Sequence[LedgerEntry]) -> StepLife:
    cut = entry.event
    assert isinstance(cut, BatchCut)
    numbers = numbers_of(run, cut, entry.timestamp_ms)
    skipped, published = _skipped(run, entry), _published(run, entry, cut)
    members = [member for group in cut.groups for member in group.members]
    outcome = _outcome(run, entry, cut, skipped)
    trained = [each for each in members if each.staleness >= 0]
    tokens = sum(each.n_trainable_tokens for each in trained)
    notes = [*run.notes, *([numbers.note] if numbers.note else [])]
    groups = _groups(run, cut, numbers, notes)
    return StepLife(
        run=run.topics.run,
        notes=notes,
        timeline=in_order(_moments(run, entry, cut, numbers)),
        step=cut.step,
        epoch=cut.epoch,
        version=cut.version,
        sentence=_sentence(run, entry, cut, outcome, published, len(trained), tokens),
        outcome=outcome,
        limit=cut.limit,
        on_stale=cut.on_stale,
        limit_set_by=_limit_set_by(run, cut),
        seed=cut.seed,
        is_last=cut.last,
        cut_ms=cut.cut_ms,
        place=place("ledger", 0, entry.offset),
        positions=list(cut.positions),
        ledger_read_to=cut.ledger_read_to,
        frontier=cut.frontier,
        duplicates=cut.duplicates,
        n_samples=len(members),
        n_trained_samples=len(trained),
        n_trained_tokens=tokens,
        reward_mean=sum(each.reward for each in members) / len(members) if members else None,
        groups=groups,
        drops=_drops(run, entry),
        buckets=_buckets(members, numbers.sums),
        values={**numbers.metrics, **numbers.values},
        gauges=summarize(numbers.sums) if numbers.sums is not None else {},
        skipped_reason=skipped.reason if skipped is not None else "",
        skipped_meaning=explain(skipped.reason).meaning if skipped is not None else "",
        version_made=cut.version + 1 if outcome == "trained" else None,
        digest_made=published.digest if published is not None and outcome == "trained" else "",
        checkpoint=_checkpoint(run, cut),
        void_cuts=[_void_cut(run, each) for each in void],
    )


# ---------------------------------------------------------------- what became of it
def _outcome(run: RunFacts, entry: LedgerEntry, cut: BatchCut, skipped: StepSkipped | None) -> str:
    if entry.void:
        return VOID
    if skipped is not None:
        return "skipped"
    return "trained" if run.is_done(cut) else UNDER_WAY


def _sentence(
    run: RunFacts,
    entry: LedgerEntry,
    cut: BatchCut,
    outcome: str,
    published: WeightsPublished | None,
    n_trained: int,
    n_tokens: int,
) -> str:
    groups, samples = counted(len(cut.groups), "group"), counted(n_trained, "sample")
    size = f"{groups}, {samples}, {counted(n_tokens, 'token')}"
    if outcome == VOID:
        owner = run.epoch_in_charge(entry.offset)
        return (
            f"Void: epoch {cut.epoch} cut it after epoch {owner} had begun, so it counts for nobody ({size})."
        )
    if outcome == "skipped":
        return f"Skipped: it changed nothing and made no version; its groups stay closed ({size})."
    if outcome == UNDER_WAY:
        return f"Under way: cut from version {cut.version} and not published yet ({size})."
    made = f"Made version {cut.version + 1} from version {cut.version} ({size})."
    if published is None:
        made += f" Version {cut.version + 1} was not published by itself (weights.update_weights_interval)."
    return made


def _skipped(run: RunFacts, entry: LedgerEntry) -> StepSkipped | None:
    cut = entry.event
    return run.is_skipped(cut) if isinstance(cut, BatchCut) and not entry.void else None


def _published(run: RunFacts, entry: LedgerEntry, cut: BatchCut) -> WeightsPublished | None:
    """The first valid publication of the version that it made."""
    if entry.void:
        return None
    return next((each for each in run.view.versions if each.version == cut.version + 1), None)


def _limit_set_by(run: RunFacts, cut: BatchCut) -> str:
    """The newest LimitChanged that the cut had read and whose limit is in force."""
    for offset, event in reversed(run.view.limits):
        if offset < cut.ledger_read_to and event.limit == cut.limit and event.from_step <= cut.step:
            since = f", from step {event.from_step} on" if event.from_step else ""
            return f"{place('ledger', 0, offset)} by {event.by or 'somebody'}{since}"
    return ""


def _checkpoint(run: RunFacts, cut: BatchCut) -> str:
    found = [each for each in run.view.checkpoints if each.step == cut.step]
    return found[0].path if found else ""


def _void_cut(run: RunFacts, entry: LedgerEntry) -> VoidCut:
    cut = entry.event
    assert isinstance(cut, BatchCut)
    return VoidCut(
        step=cut.step,
        epoch=cut.epoch,
        place=place("ledger", 0, entry.offset),
        at_ms=cut.cut_ms,
        since_epoch=run.epoch_in_charge(entry.offset),
    )


# ---------------------------------------------------------------- what went into it
def _groups(run: RunFacts, cut: BatchCut, numbers: StepNumbers, notes: list[str]) -> list[StepGroup]:
    completed = _completed(run, cut, notes)
    found, row = [], 0
    for group in cut.groups:
        rewards = [member.reward for member in group.members]
        scores, event = spread_of(rewards), completed.get((group.partition, group.group_offset))
        rows = slice(row, row + len(rewards))
        row += len(rewards)
        finished = max((each.finished_ms for each in event.members), default=0) if event is not None else 0
        found.append(
            StepGroup(
                group_id=group.group_id,
                place=place("groups", group.partition, group.group_offset),
                rewards=rewards,
                mean=scores.mean,
                std=scores.std,
                staleness=[member.staleness for member in group.members],
                n_trained_tokens=sum(m.n_trainable_tokens for m in group.members if m.staleness >= 0),
                in_flight_s=between(event.dispatched_ms, finished) if event is not None else None,
                in_queue_s=between(finished, cut.cut_ms),
                gauges=summarize(numbers.sums[rows]) if numbers.sums is not None else {},
            )
        )
    return found


def _completed(run: RunFacts, cut: BatchCut, notes: list[str]) -> dict[tuple[int, int], GroupCompleted]:
    """The collector's records of its groups, by reference."""
    wanted: dict[int, list[int]] = {}
    for group in cut.groups:
        wanted.setdefault(group.partition, []).append(group.group_offset)
    found: dict[tuple[int, int], GroupCompleted] = {}
    for partition, offsets in wanted.items():
        for offset, entry in entries_at(run.log, run.topics.name("groups"), partition, offsets):
            if entry is not None and isinstance(entry.event, GroupCompleted):
                found[partition, offset] = entry.event
    missing = sum(len(offsets) for offsets in wanted.values()) - len(found)
    if missing:
        notes.append(
            f"{missing} of its group records are gone or cannot be read (retention, damage): their ages are not known"
        )
    return found


def _drops(run: RunFacts, entry: LedgerEntry) -> list[StepDrop]:
    return [
        StepDrop(
            group_id=drop.group_id,
            reason=drop.reason,
            staleness=drop.staleness if drop.staleness >= 0 else None,
            detail=drop.detail,
            place=place("ledger", 0, each.offset),
        )
        for each in _since_the_cut_before(run, entry)
        if isinstance(each.event, Closing)
        for drop in each.event.drops
    ]


def _since_the_cut_before(run: RunFacts, entry: LedgerEntry) -> list[LedgerEntry]:
    """Records with drops: of this cut, and valid ones since the valid cut before it."""
    begin = max((cut.offset for cut in run.view.cuts if cut.offset < entry.offset), default=-1)
    return [
        each
        for each in run.ledger
        if begin < each.offset <= entry.offset
        and isinstance(each.event, Closing)
        and each.event.drops
        and (not each.void or each.offset == entry.offset)
    ]


def _buckets(members: Sequence[CutMember], sums: NDArray[np.float64] | None) -> list[Bucket]:
    found = []
    ages = np.array([each.staleness for each in members], dtype=np.int64)
    for age in sorted(set(ages.tolist()) - {-1}):
        chosen = [each for each in members if each.staleness == age]
        found.append(
            Bucket(
                staleness=age,
                n_samples=len(chosen),
                n_tokens=sum(each.n_trainable_tokens for each in chosen),
                reward_mean=sum(each.reward for each in chosen) / len(chosen),
                gauges=summarize(sums[ages == age]) if sums is not None else {},
            )
        )
    return found


# ---------------------------------------------------------------- timeline
def _moments(run: RunFacts, entry: LedgerEntry, cut: BatchCut, numbers: StepNumbers) -> list[Moment]:
    detail = f"{counted(len(cut.groups), 'group')}, limit {cut.limit}, seed {cut.seed}"
    found = [
        Moment(
            at_ms=cut.cut_ms,
            place=place("ledger", 0, entry.offset),
            what="cut",
            detail=detail,
            is_void=entry.void,
        )
    ]
    if numbers.at_ms:
        said = f"loss {numbers.values['loss']:.6g}" if "loss" in numbers.values else ""
        found.append(
            Moment(at_ms=numbers.at_ms, place=numbers.place, what="trained and measured", detail=said)
        )
    found += [_drop_moment(each) for each in _since_the_cut_before(run, entry) if each.offset != entry.offset]
    if entry.void:
        return found
    for each in run.ledger:
        event, at = each.event, place("ledger", 0, each.offset)
        if each.offset <= entry.offset or each.void:
            continue
        if isinstance(event, WeightsPublished) and event.version == cut.version + 1:
            name = f"e{event.epoch}-v{event.version}, {event.kind}, {event.nbytes} bytes"
            found.append(
                Moment(
                    at_ms=event.published_ms or each.timestamp_ms,
                    place=at,
                    what="weights published",
                    detail=name,
                )
            )
        elif isinstance(event, StepSkipped) and event.step == cut.step:
            detail = f"{event.reason} {event.detail}".rstrip()
            found.append(Moment(at_ms=each.timestamp_ms, place=at, what="skipped", detail=detail))
        elif isinstance(event, CheckpointSaved) and event.step == cut.step:
            found.append(
                Moment(
                    at_ms=event.saved_ms or each.timestamp_ms,
                    place=at,
                    what="checkpoint saved",
                    detail=event.path,
                )
            )
    return found + _ready(run, cut)


def _drop_moment(entry: LedgerEntry) -> Moment:
    event = entry.event
    assert isinstance(event, Closing)
    reasons = sorted({drop.reason for drop in event.drops})
    return Moment(
        at_ms=entry.timestamp_ms,
        place=place("ledger", 0, entry.offset),
        what="groups dropped",
        detail=f"{len(event.drops)}: {', '.join(reasons)}",
    )


def _ready(run: RunFacts, cut: BatchCut) -> list[Moment]:
    """When the engines had the version that it made."""
    return [
        Moment(
            at_ms=event.at_ms or entry.timestamp_ms,
            place=place("fleet", 0, entry.offset),
            what="engine ready",
            detail=f"{event.engine} with e{event.epoch}-v{event.version}, loaded in {event.load_s:.3g} s",
        )
        for entry, event in ready_with(fleet_entries(run), cut.version + 1)
    ]
