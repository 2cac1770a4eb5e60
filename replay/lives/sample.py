"""The life of one sample: its group's trail, its own payload, the trainer's row about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from replay.evidence import entries_at
from replay.lives.ages import ages_of
from replay.lives.facts import Ages, Failure, Letter, Measured, Moment, Reward, SampleLife, Span
from replay.lives.group import counting, members_of, runs_of, scores_of, seq_of, trainable_of
from replay.lives.ids import no_group, no_sample, parse_sample
from replay.lives.measured import measured_row, numbers_of, row_of
from replay.lives.moments import (
    dispatches_of,
    failure_moments,
    group_moments,
    in_order,
    ledger_moments,
    letter_moments,
    reward_moments,
    task_moments,
    trajectory_moments,
)
from replay.lives.run import Mention, RunFacts
from replay.lives.seek import place
from replay.lives.tokens import Words, spans_of, trained_mask
from replay.lives.trail import Trail, attempt_of, follow, index_of
from replay.lives.trouble import copies_of, failures_of, letters_of
from replay.lives.verdict import TRAINED, sample_verdict, void_cuts
from replay.records import Entry, entry_of
from streams import columns
from streams.columns import VersionRun
from streams.errors import CodecError, InvalidEvent
from streams.events import CutMember, RewardAssigned, TrajectoryFinished
from streams.trajectory import Payload, open_payload


class _Opened(NamedTuple):
    """A trajectory as far as it can be opened."""

    event: TrajectoryFinished | None = None
    payload: Payload | None = None
    place: str = ""
    entry: Entry | None = None


def show_sample(run: RunFacts, text: str, words: Words | None = None) -> SampleLife:
    """Raises ConfigError for a malformed id, NotFound for one that the run does not have."""
    asked = parse_sample(text)
    trail = follow(run, asked.group_id)
    if trail is None:
        raise no_group(run, asked.group_id)
    known = trail.uids()
    matching = [
        uid for uid in known if index_of(uid) == asked.index and asked.attempt in (None, attempt_of(uid))
    ]
    if not matching:
        raise no_sample(text, known)
    return _life(run, trail, counting(trail, matching), words)


def _life(run: RunFacts, trail: Trail, uid: str, words: Words | None) -> SampleLife:
    notes = list(trail.notes)
    index, attempt = index_of(uid), attempt_of(uid)
    opened, used, scores = _open(run, trail, uid, notes), trail.cut_member(uid), scores_of(run, trail)
    scored = _reward(trail, uid)
    runs = _trainable(trail, uid, opened, scored)
    spans = _spans(run, trail, opened, used, words)
    verdict = sample_verdict(run, trail, uid, runs, scores.of(uid))
    dispatch = next((each for each in dispatches_of(trail, index) if each.attempt == attempt), None)
    failures, letters = failures_of(trail, uid=uid), letters_of(trail, uid)
    event, task = opened.event, trail.first
    entry, reward = scored if scored is not None else (None, None)
    return SampleLife(
        run=run.topics.run,
        notes=notes,
        timeline=in_order(_moments(run, trail, uid, opened, failures, letters)),
        uid=uid,
        group_id=trail.group_id,
        index=index,
        attempt=attempt,
        seq=seq_of(trail),
        partition=trail.partition if trail.partition >= 0 else None,
        verdict=verdict,
        dispatch=dispatch,
        engine=event.engine if event is not None else "",
        started_ms=event.started_ms if event is not None else 0,
        finished_ms=event.finished_ms if event is not None else 0,
        finish_reason=event.finish_reason if event is not None else reward.finish_reason if reward else "",
        temperature=event.temperature if event is not None else None,
        prompt=event.prompt if event is not None else task.prompt if task is not None else None,
        label=event.label if event is not None else task.label if task is not None else None,
        metadata=event.metadata if event is not None else task.metadata if task is not None else {},
        response=event.response if event is not None else "",
        prompt_ids=opened.payload.prompt_ids.tolist() if opened.payload is not None else [],
        prompt_text=words(opened.payload.prompt_ids.tolist())
        if words and opened.payload is not None
        else None,
        n_response_tokens=event.n_response_tokens
        if event is not None
        else reward.n_response_tokens
        if reward
        else 0,
        versions=runs_of(event.versions if event is not None else ()),
        spans=spans,
        n_trained_tokens=_trained_tokens(verdict.outcome, used),
        reward=_said(trail, entry, reward),
        group_mean=scores.spread.mean if uid in scores.uids else None,
        group_std=scores.spread.std if uid in scores.uids else None,
        advantage=scores.of(uid),
        advantage_estimator=run.estimator,
        ages=_ages(run, trail, uid, runs, opened, dispatch.at_ms if dispatch is not None else 0),
        measured=_measured(run, trail, uid, notes),
        failures=failures,
        letters=letters,
        copies=copies_of(trail, uid),
        void_cuts=void_cuts(run, trail),
        other_attempts=[each for each in trail.uids() if index_of(each) == index and each != uid],
        claims={name: uri for name, (uri, _, _) in event.claims.items()} if event is not None else {},
        place=opened.place,
    )


# ---------------------------------------------------------------- the payload
def _open(run: RunFacts, trail: Trail, uid: str, notes: list[str]) -> _Opened:
    """The trajectory that counts: where the group's records refer to, else the first of this uid."""
    offset = _reference(trail, uid)
    topic = run.topics.name("trajectories")
    if offset is None:
        records = trail.trajectories_of(uid)
        if not records:
            return _Opened()
        offset, entry = records[0].offset, entry_of(records[0])
    else:
        ((_, entry),) = entries_at(run.log, topic, trail.partition, [offset])
    at = place("trajectories", trail.partition, offset)
    if entry is None:
        notes.append(f"its payload at {at} is gone: retention has removed it, so its tokens cannot be shown")
        return _Opened(place=at)
    event = entry.event
    if not isinstance(event, TrajectoryFinished):
        if not hasattr(event, "reason"):  # else a RolloutFailed, which has no payload
            notes.append(f"its payload at {at} cannot be read: {entry.problem or type(event).__name__}")
        return _Opened(place=at)
    if event.uid != uid:
        notes.append(f"{at} holds {event.uid}, not {uid}: the log it was referred to in has changed since")
        return _Opened(place=at)
    try:
        return _Opened(event, open_payload(event), at, entry)
    except (CodecError, InvalidEvent) as error:
        notes.append(f"its payload at {at} must not be trained on: {error}")
        return _Opened(event, None, at, entry)


def _reference(trail: Trail, uid: str) -> int | None:
    used, member = trail.cut_member(uid), members_of(trail).get(uid)
    if used is not None:
        return used.trajectory_offset
    if member is not None:
        return member.trajectory_offset
    verdicts = trail.verdicts_of(uid)
    return verdicts[0][1].trajectory_offset if verdicts else None


def _trainable(
    trail: Trail, uid: str, opened: _Opened, scored: tuple[Entry, RewardAssigned] | None
) -> Sequence[VersionRun]:
    runs = trainable_of(members_of(trail).get(uid), scored[1] if scored is not None else None)
    if runs or opened.payload is None:
        return runs
    return columns.trainable_runs(opened.payload.versions, opened.payload.loss_mask)


def _spans(
    run: RunFacts, trail: Trail, opened: _Opened, used: CutMember | None, words: Words | None
) -> list[Span]:
    if opened.event is None or opened.payload is None:
        return []
    decided, trained = trail.decided, None
    if used is not None and decided is not None and run.is_skipped(decided.cut) is None:
        trained = trained_mask(opened.payload, decided.cut, run.lineage(decided.entry.offset))
    return spans_of(opened.event, opened.payload, trained, words)


def _trained_tokens(outcome: str, used: CutMember | None) -> int | None:
    return used.n_trainable_tokens if used is not None and outcome == TRAINED else None


# ---------------------------------------------------------------- reward, ages, measures
def _reward(trail: Trail, uid: str) -> tuple[Entry, RewardAssigned] | None:
    """The verdict that counts, if it is a reward: the first of a uid wins."""
    verdicts = trail.verdicts_of(uid)
    if not verdicts:
        return None
    entry, event = verdicts[0]
    return (entry, event) if isinstance(event, RewardAssigned) else None


def _said(trail: Trail, entry: Entry | None, event: RewardAssigned | None) -> Reward | None:
    if entry is None or event is None:
        return None
    at = place("rewards", trail.partition, entry.offset)
    return Reward(
        value=event.reward,
        components=event.components,
        scoring_s=event.scoring_s,
        at_ms=entry.timestamp_ms,
        place=at,
    )


def _ages(
    run: RunFacts, trail: Trail, uid: str, runs: Sequence[VersionRun], opened: _Opened, dispatched_ms: int
) -> Ages | None:
    scored = _reward(trail, uid)
    said = opened.event or (scored[1] if scored is not None else None) or members_of(trail).get(uid)
    decided = trail.decided
    if decided is None or said is None:
        return None
    return ages_of(
        run,
        decided,
        _not_too_old(run, decided, runs) if trail.cut_member(uid) is not None else runs,
        dispatched_ms=dispatched_ms,
        started_ms=said.started_ms,
        finished_ms=said.finished_ms,
    )


def _not_too_old(run: RunFacts, decided: Mention, runs: Sequence[VersionRun]) -> list[VersionRun]:
    """Runs that the limit let train; with on_stale = mask the others do not count for the sample's age."""
    cut, lineage = decided.cut, run.lineage(decided.entry.offset)
    known = [(each, lineage.effective(each[0], each[1])) for each in runs]
    return [each for each, version in known if version is not None and cut.version - version <= cut.limit]


def _measured(run: RunFacts, trail: Trail, uid: str, notes: list[str]) -> Measured | None:
    decided = trail.decided
    if decided is None or decided.group is None or run.is_skipped(decided.cut) is not None:
        return None
    row = row_of(decided.cut, uid)
    if row is None:
        return None
    numbers = numbers_of(run, decided.cut, decided.entry.timestamp_ms)
    if numbers.note:
        notes.append(numbers.note)
    return measured_row(numbers, row)


def _moments(
    run: RunFacts,
    trail: Trail,
    uid: str,
    opened: _Opened,
    failures: Sequence[Failure],
    letters: Sequence[Letter],
) -> list[Moment]:
    index = index_of(uid)
    record = opened.entry.record if opened.entry is not None else None
    own = trajectory_moments(opened.event, record) if opened.event is not None and record is not None else ()
    return [
        *task_moments(trail, index),
        *own,
        *reward_moments(trail, uid),
        *failure_moments(failures),
        *letter_moments(letters),
        *group_moments(trail, index),
        *ledger_moments(run, trail),
    ]
