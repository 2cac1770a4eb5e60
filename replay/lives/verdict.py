"""What became of a group, and of one sample of it, in plain sentences: the first valid mention in the ledger says."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from replay.lives.ages import oldest_version
from replay.lives.facts import Verdict, VoidCut
from replay.lives.phrases import counted
from replay.lives.reasons import explain
from replay.lives.run import Mention, RunFacts
from replay.lives.trail import Trail, events, index_of
from replay.lives.waiting import waits_for
from streams.columns import VersionRun
from streams.events import (
    BatchCut,
    CutMember,
    Drop,
    GroupCompleted,
    GroupDropped,
    RewardAssigned,
    ScoringFailed,
)

TRAINED, SKIPPED, DROPPED, NOT_USED, OPEN = "trained", "skipped", "dropped", "not_used", "open"


# ---------------------------------------------------------------- a group
def group_verdict(run: RunFacts, trail: Trail) -> Verdict:
    decided = trail.decided
    if decided is None:
        return Verdict(outcome=OPEN, sentence=f"Not finished. {waits_for(run, trail)}{_was_void(trail)}")
    if decided.group is not None:
        return _cut(run, decided)
    return _dropped(run, trail, decided)


def _cut(run: RunFacts, decided: Mention) -> Verdict:
    cut = decided.cut
    skipped = run.is_skipped(cut)
    found = _verdict(
        run, decided, TRAINED, f"Trained by step {cut.step}: version {cut.version} → {cut.version + 1}."
    )
    if skipped is not None:
        reason = explain(skipped.reason)
        return _changed(
            found,
            outcome=SKIPPED,
            sentence=f"Taken by step {cut.step}, which was skipped ({skipped.reason}): nothing was trained.",
            reason=skipped.reason,
            explanation=reason.meaning,
            setting=reason.setting,
            detail=skipped.detail,
        )
    if not run.is_done(cut):
        return _changed(
            found, sentence=f"Taken by step {cut.step}, which is under way: its version is not published yet."
        )
    return found


def _dropped(run: RunFacts, trail: Trail, decided: Mention) -> Verdict:
    drop = decided.drop
    assert drop is not None
    reason = explain(drop.reason)
    version = decided.record.version
    found = _verdict(run, decided, DROPPED, f"Dropped by {_dropper(trail, drop)}: {drop.reason}.")
    if drop.reason == "stale":
        limit = (
            "" if found.limit is None else f", {drop.staleness - found.limit} over the limit of {found.limit}"
        )
        found = _changed(
            found,
            sentence="Dropped by the trainer as stale: its oldest trainable token was "
            f"{counted(drop.staleness, 'version')} behind the trainer, which was at version {version}{limit}.",
        )
    return _changed(
        found,
        reason=drop.reason,
        explanation=reason.meaning,
        setting=reason.setting,
        detail=_detail(trail, drop),
    )


def _dropper(trail: Trail, drop: Drop) -> str:
    event = trail.terminal[1] if trail.terminal is not None else None
    by_collector = isinstance(event, GroupDropped) and event.reason == drop.reason
    return "the collector" if by_collector else "the trainer"


def _detail(trail: Trail, drop: Drop) -> str:
    """The ledger keeps 200 characters; the collector's record has more."""
    for _, event in events(trail.groups, GroupDropped):
        if event.reason == drop.reason:
            return event.detail
    return drop.detail


def _verdict(run: RunFacts, decided: Mention, outcome: str, sentence: str) -> Verdict:
    record, drop = decided.record, decided.drop
    return Verdict(
        outcome=outcome,
        sentence=sentence,
        step=record.step if isinstance(record, BatchCut) and decided.group is not None else None,
        epoch=record.epoch,
        version=record.version,
        limit=run.limit_at(record, decided.entry.offset),
        staleness=drop.staleness if drop is not None and drop.staleness >= 0 else None,
        at_ms=decided.at_ms,
        place=decided.place,
    )


def _changed(verdict: Verdict, **fields) -> Verdict:
    return msgspec.structs.replace(verdict, **fields)


def _was_void(trail: Trail) -> str:
    void = [each for each in trail.mentions if each.entry.void and each.group is not None]
    if not void:
        return ""
    steps = ", ".join(f"step {each.cut.step} of epoch {each.record.epoch}" for each in void)
    return f" It was cut by {steps}, but a newer epoch was in charge by then, so that counts for nobody."


def void_cuts(run: RunFacts, trail: Trail) -> list[VoidCut]:
    return [
        VoidCut(
            step=each.cut.step,
            epoch=each.record.epoch,
            place=each.place,
            at_ms=each.at_ms,
            since_epoch=run.epoch_in_charge(each.entry.offset),
        )
        for each in trail.mentions
        if each.entry.void and each.group is not None
    ]


# ---------------------------------------------------------------- a sample
def sample_verdict(
    run: RunFacts, trail: Trail, uid: str, runs: Sequence[VersionRun], advantage: float | None
) -> Verdict:
    """`runs`: its version runs over trainable tokens; empty when they are not known."""
    whole, decided = group_verdict(run, trail), trail.decided
    if decided is None:
        own = f"Not finished. {_own_state(trail, uid)}Of its group: {waits_for(run, trail)}{_was_void(trail)}"
        return _changed(whole, sentence=own)
    if decided.group is None:
        own = _own_share(run, decided, uid, runs, trail)
        sentence = whole.sentence.replace("Dropped by", "Dropped with its whole group by", 1) + own
        return _changed(whole, sentence=sentence)
    member = trail.cut_member(uid)
    if member is None:
        return _not_used(trail, whole, decided, uid)
    return _used(whole, decided.cut, member, advantage)


def _used(whole: Verdict, cut: BatchCut, member: CutMember, advantage: float | None) -> Verdict:
    if member.staleness < 0:
        return _changed(
            whole,
            outcome=NOT_USED if whole.outcome == TRAINED else whole.outcome,
            sentence=f"In the batch of step {cut.step}, but none of its tokens trained: all were over the limit of "
            f"{cut.limit} (staleness.on_stale = mask). Its reward still counts in the mean of its group.",
            setting="staleness.max_weight_staleness, staleness.on_stale",
        )
    if whole.outcome != TRAINED:
        return _changed(whole, staleness=member.staleness)
    said = "" if advantage is None else f" with advantage {advantage:+.4g}"
    begin = whole.sentence.removesuffix(".")
    return _changed(
        whole,
        sentence=f"{begin}, {counted(member.n_trainable_tokens, 'token')}{said}; its oldest trained token was "
        f"{counted(member.staleness, 'version')} old, the limit {cut.limit}.",
        staleness=member.staleness,
    )


def _not_used(trail: Trail, whole: Verdict, decided: Mention, uid: str) -> Verdict:
    assert decided.group is not None
    taken = [each.uid for each in decided.group.members if index_of(each.uid) == index_of(uid)]
    failed = [event for _, event in trail.verdicts_of(uid) if isinstance(event, ScoringFailed)]
    if failed:
        reason = explain(failed[0].reason)
        sentence = f"Not used: it failed ({failed[0].reason}) in {failed[0].stage}."
        whole = _changed(
            whole,
            reason=failed[0].reason,
            explanation=reason.meaning,
            setting=reason.setting,
            detail=failed[0].detail,
        )
    else:
        sentence = "Not used: it came when its place was taken or its group was closed (a late twin)."
    if taken:
        sentence += f" Step {decided.cut.step} took {taken[0]} in its place."
    else:
        sentence += f" Step {decided.cut.step} took its group without it."
    return _changed(whole, outcome=NOT_USED, sentence=sentence)


def _own_share(run: RunFacts, decided: Mention, uid: str, runs: Sequence[VersionRun], trail: Trail) -> str:
    """Whether this sample was itself the cause."""
    drop = decided.drop
    if drop is None:
        return ""
    failed = [event for _, event in trail.verdicts_of(uid) if isinstance(event, ScoringFailed)]
    if failed:
        return f" This sample failed ({failed[0].reason}) in {failed[0].stage}."
    if drop.reason != "stale" or not runs:
        return ""
    version, lineage = decided.record.version, run.lineage(decided.entry.offset)
    oldest = oldest_version(runs, lineage)
    if oldest is None:
        return ""
    own = version - oldest
    if own >= drop.staleness:
        return " This sample was as old as that."
    terminal = trail.terminal
    members = terminal[1].members if terminal is not None and isinstance(terminal[1], GroupCompleted) else []
    ages = {each.uid: oldest_version(each.trainable_versions, lineage) for each in members}
    older = [name for name, known in ages.items() if known is not None and version - known == drop.staleness]
    because = f"; {older[0]} was the oldest" if older else ""
    return f" This sample itself was {counted(own, 'version')} old{because}."


def _own_state(trail: Trail, uid: str) -> str:
    verdict = next((event for _, event in trail.verdicts_of(uid)), None)
    if isinstance(verdict, RewardAssigned):
        return f"It has its reward, {verdict.reward:g}. "
    if verdict is not None:
        return f"It failed ({verdict.reason}). "
    if trail.trajectories_of(uid):
        return "It is generated and waits for its reward. "
    return "It is dispatched and not generated yet. "
