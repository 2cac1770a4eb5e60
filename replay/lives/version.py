"""The life of a version: how it was made and published, who held it, what it generated and what became of that."""

from __future__ import annotations

from collections.abc import Sequence

from replay.ledger import LedgerEntry
from replay.lives.facts import Generated, Holder, Moment, Publication, VersionLife
from replay.lives.fleet import attempts_on, fleet_entries, holders_of
from replay.lives.ids import VersionId, no_version, parse_version
from replay.lives.moments import in_order
from replay.lives.phrases import counted
from replay.lives.run import RunFacts
from replay.lives.seek import CLOCKS_MS, Window, place, records_where, type_of
from replay.records import entry_of
from streams.events import BatchCut, CheckpointSaved, Closing, RewardAssigned, WeightsPublished, tag_of
from streams.log import Record

_REWARD = tag_of(RewardAssigned)
_IN_FLIGHT_MS = 900_000  # after the last engine let go of it, its samples may still come


def show_version(run: RunFacts, text: str) -> VersionLife:
    """Raises ConfigError for a malformed id, NotFound for one that the run has neither made nor published."""
    asked = parse_version(text)
    entries = [each for each in run.publications(asked.version) if _is_of(each, asked.epoch)]
    made = _made_by(run, asked.version) if asked.epoch is None or entries else None
    if not entries and made is None:
        raise no_version(run, asked)
    valid = [each.event for each in entries if not each.void and isinstance(each.event, WeightsPublished)]
    newest = valid[-1] if valid else None
    holders = _holders(run, asked, entries)
    notes = list(run.notes)
    return VersionLife(
        run=run.topics.run,
        notes=notes,
        version=asked.version,
        epoch=newest.epoch if newest is not None else None,
        sentence=_sentence(run, asked, entries, newest, made),
        digest=newest.digest if newest is not None else "",
        publications=[_publication(run, each) for each in entries],
        made_by_step=made.step if made is not None else None,
        made_at_ms=made.cut_ms if made is not None else 0,
        trained_by_step=_trained_by(run, asked.version),
        checkpoint=next((each.path for each in run.view.checkpoints if each.version == asked.version), ""),
        holders=holders,
        attempts=attempts_on(fleet_entries(run), asked.version, asked.epoch),
        generated=_generated(run, asked, entries, holders, notes),
        timeline=in_order(_moments(run, asked.version, entries, holders, made)),
    )


def _is_of(entry: LedgerEntry, epoch: int | None) -> bool:
    return epoch is None or getattr(entry.event, "epoch", None) == epoch


def _made_by(run: RunFacts, version: int) -> BatchCut | None:
    """The step that made it: the newest valid cut that started from the version below and was not skipped."""
    found = [
        cut.event
        for cut in run.view.cuts
        if cut.event.version == version - 1 and run.is_skipped(cut.event) is None and run.is_done(cut.event)
    ]
    return found[-1] if found else None


def _trained_by(run: RunFacts, version: int) -> int | None:
    found = [
        cut.event.step
        for cut in run.view.cuts
        if cut.event.version == version and run.is_skipped(cut.event) is None
    ]
    return found[-1] if found else None


def _sentence(
    run: RunFacts,
    asked: VersionId,
    entries: Sequence[LedgerEntry],
    newest: WeightsPublished | None,
    made: BatchCut | None,
) -> str:
    origin = (
        f"Made by step {made.step} from version {made.version}"
        if made is not None
        else "What the run began with"
    )
    if made is None and asked.version > 0:
        origin = "Made by a step that the ledger does not name"
    if newest is None and not entries:
        return f"{origin}; never published by itself (weights.update_weights_interval)."
    if newest is None:
        return (
            f"{origin}; published only by an epoch that was no longer in charge, so no valid record names it."
        )
    epochs = sorted({each.event.epoch for each in entries if isinstance(each.event, WeightsPublished)})
    again = f"; published by epochs {', '.join(map(str, epochs))}" if len(epochs) > 1 else ""
    digests = {each.event.digest for each in entries if isinstance(each.event, WeightsPublished)}
    fork = ", with different digests: they are different weights" if len(digests) > 1 else ""
    present = (
        f" It is the newest version of run {run.topics.run}." if asked.version == run.view.version else ""
    )
    published = f"published as e{newest.epoch}-v{newest.version}, {newest.kind}, {newest.nbytes} bytes"
    return f"{origin}; {published}{again}{fork}.{present}"


# ---------------------------------------------------------------- publications and holders
def _publication(run: RunFacts, entry: LedgerEntry) -> Publication:
    event = entry.event
    assert isinstance(event, WeightsPublished)
    is_delta = event.base_version >= 0
    return Publication(
        epoch=event.epoch,
        version=event.version,
        digest=event.digest,
        step=event.step,
        weights=event.kind,
        base_version=event.base_version if is_delta else None,
        base_digest=event.base_digest,
        n_tensors=len(event.tensors),
        nbytes=event.nbytes,
        uris=dict(event.uris),
        forked_at=event.forked_at if event.forked_at >= 0 else None,
        at_ms=event.published_ms or entry.timestamp_ms,
        place=place("ledger", 0, entry.offset),
        is_void=entry.void,
        counts_as=run.lineage().effective(event.epoch, event.version),
    )


def _holders(run: RunFacts, asked: VersionId, entries: Sequence[LedgerEntry]) -> list[Holder]:
    published: dict[int, set[str]] = {}
    for entry in entries:
        if isinstance(entry.event, WeightsPublished):
            published.setdefault(entry.event.epoch, set()).add(entry.event.digest)
    return holders_of(fleet_entries(run), asked.version, asked.epoch, published)


# ---------------------------------------------------------------- what it generated
def _generated(
    run: RunFacts,
    asked: VersionId,
    entries: Sequence[LedgerEntry],
    holders: Sequence[Holder],
    notes: list[str],
) -> list[Generated]:
    """By epoch, from the scored samples; each uid once."""
    if not entries:
        return []
    window = _window(entries, holders)
    if window.end_ms is not None and window.end_ms < run.now_ms:
        notes.append("its samples were looked for until 15 minutes after the last engine let go of it")
    outcomes, seen = _outcomes(run), set()
    found: dict[int, list[RewardAssigned]] = {}
    for partition in range(run.topics.partitions):
        topic = run.topics.name("rewards")
        for record in records_where(run.log, topic, partition, _is_reward, window=window, tell=notes.append):
            event = entry_of(record).event
            if not isinstance(event, RewardAssigned) or event.uid in seen:
                continue
            seen.add(event.uid)
            for epoch in {
                run_[0] for run_ in event.trainable_versions if run_[1] == asked.version and run_[2] > 0
            }:
                if asked.epoch in (None, epoch):
                    found.setdefault(epoch, []).append(event)
    return [_counted(epoch, asked.version, found[epoch], outcomes) for epoch in sorted(found)]


def _epochs_of(event: RewardAssigned, version: int) -> set[int]:
    return {epoch for epoch, number, count in event.trainable_versions if number == version and count > 0}


def _is_reward(record: Record) -> bool:
    return type_of(record) == _REWARD


def _window(entries: Sequence[LedgerEntry], holders: Sequence[Holder]) -> Window:
    begin = max(0, min(each.timestamp_ms for each in entries) - CLOCKS_MS)
    ends = [each.until_ms for each in holders]
    last = max((each for each in ends if each is not None), default=None)
    return Window(begin, None if last is None or None in ends else last + _IN_FLIGHT_MS)


def _outcomes(run: RunFacts) -> dict[str, str]:
    """Group id or uid → what became of it: the first valid mention wins."""
    found: dict[str, str] = {}
    for entry in run.ledger:
        event = entry.event
        if entry.void or not isinstance(event, Closing):
            continue
        if isinstance(event, BatchCut):
            word = "skipped" if run.is_skipped(event) is not None else "trained"
            for group in event.groups:
                if found.setdefault(group.group_id, "not used") == "not used":
                    found.update({m.uid: word if m.staleness >= 0 else "all too old" for m in group.members})
        for drop in event.drops:
            found.setdefault(drop.group_id, f"dropped: {drop.reason}")
    return found


def _counted(
    epoch: int, version: int, events: Sequence[RewardAssigned], outcomes: dict[str, str]
) -> Generated:
    tokens = [
        sum(
            count
            for run_epoch, number, count in event.trainable_versions
            if (run_epoch, number) == (epoch, version)
        )
        for event in events
    ]
    pure = [
        all((e, v) == (epoch, version) for e, v, count in event.trainable_versions if count)
        for event in events
    ]
    counts: dict[str, int] = {}
    for event in events:
        word = outcomes.get(event.uid) or outcomes.get(event.group_id, "open")
        counts[word] = counts.get(word, 0) + 1
    return Generated(
        epoch=epoch,
        n_samples=len(events),
        n_tokens=sum(tokens),
        n_pure=sum(pure),
        reward_mean=sum(event.reward for event in events) / len(events) if events else None,
        outcomes=dict(sorted(counts.items())),
    )


# ---------------------------------------------------------------- timeline
def _moments(
    run: RunFacts,
    version: int,
    entries: Sequence[LedgerEntry],
    holders: Sequence[Holder],
    made: BatchCut | None,
) -> list[Moment]:
    found = []
    for each in run.ledger:
        event, at = each.event, place("ledger", 0, each.offset)
        if isinstance(event, BatchCut) and event is made:
            what = f"step {event.step} cut, which makes it"
            found.append(
                Moment(at_ms=event.cut_ms, place=at, what=what, detail=counted(len(event.groups), "group"))
            )
        elif isinstance(event, BatchCut) and event.version == version and not each.void:
            what = f"step {event.step} cut, which starts from it"
            found.append(
                Moment(at_ms=event.cut_ms, place=at, what=what, detail=counted(len(event.groups), "group"))
            )
        elif isinstance(event, CheckpointSaved) and event.version == version:
            at_ms = event.saved_ms or each.timestamp_ms
            found.append(
                Moment(at_ms=at_ms, place=at, what="checkpoint saved", detail=event.path, is_void=each.void)
            )
    for each in entries:
        event = each.event
        assert isinstance(event, WeightsPublished)
        fork = f", forks at {event.forked_at}" if event.forked_at >= 0 else ""
        found.append(
            Moment(
                at_ms=event.published_ms or each.timestamp_ms,
                place=place("ledger", 0, each.offset),
                what="published",
                detail=f"epoch {event.epoch}, {event.kind}, {event.digest[:16]}{fork}",
                is_void=each.void,
            )
        )
    for each in holders:
        detail = f"{each.engine}, loaded in {each.load_s:.3g} s"
        found.append(Moment(at_ms=each.from_ms, place="fleet", what="engine ready", detail=detail))
        if each.until_ms is not None:
            detail = f"{each.engine} {each.ended_by}"
            found.append(Moment(at_ms=each.until_ms, place="fleet", what="no longer held", detail=detail))
    return found
