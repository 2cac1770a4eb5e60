"""The life of a group: its members side by side, and what became of them together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from consumers.advantages import ESTIMATORS, OF_BATCH, OF_CRITIC, Advantages, Group, group_advantages
from replay.lives.ages import ages_of
from replay.lives.facts import Ages, Failure, GroupLife, Letter, MemberRow, Moment, Verdict, VersionTokens
from replay.lives.ids import no_group, parse_group
from replay.lives.moments import (
    dispatches_of,
    failure_moments,
    group_moments,
    in_order,
    ledger_moments,
    letter_moments,
    record_moments,
    reward_moments,
    task_moments,
)
from replay.lives.run import RunFacts
from replay.lives.seek import place
from replay.lives.trail import Trail, attempt_of, events, follow, index_of
from replay.lives.trouble import copies_of, failures_of, letters_of
from replay.lives.verdict import OPEN, TRAINED, group_verdict, void_cuts
from replay.lives.waiting import waits_for
from replay.records import entry_of
from streams.columns import VersionRun
from streams.events import (
    CutMember,
    Member,
    RewardAssigned,
    RolloutFailed,
    ScoringFailed,
    TrajectoryFinished,
)


class Scores(NamedTuple):
    """Of the members that count: those of the cut, else those of the collector's record, else all with a reward."""

    uids: list[str]
    rewards: list[float]
    spread: Advantages  # of their group
    values: list[float | None]  # their advantages by the run's estimator, as far as they are known

    def of(self, uid: str) -> float | None:
        """The advantage of a member; None for one that does not count."""
        return self.values[self.uids.index(uid)] if uid in self.uids else None


def show_group(run: RunFacts, text: str) -> GroupLife:
    """Raises ConfigError for a malformed id, NotFound for one that the run does not have."""
    group_id = parse_group(text)
    trail = follow(run, group_id)
    if trail is None:
        raise no_group(run, group_id)
    return life_of(run, trail)


def life_of(run: RunFacts, trail: Trail) -> GroupLife:
    verdict, scores = group_verdict(run, trail), scores_of(run, trail)
    task = trail.first or trail.skipped
    failures, letters = failures_of(trail), letters_of(trail)
    members = _rows(trail, verdict, scores)
    known = scores.spread if scores.uids else None
    return GroupLife(
        run=run.topics.run,
        notes=trail.notes,
        timeline=in_order(_moments(run, trail, failures, letters)),
        group_id=trail.group_id,
        seq=seq_of(trail),
        data_epoch=task.data_epoch if task is not None else None,
        row=task.row if task is not None else None,
        partition=trail.partition if trail.partition >= 0 else None,
        verdict=verdict,
        waits_for=waits_for(run, trail) if verdict.outcome == OPEN else "",
        prompt=trail.first.prompt if trail.first is not None else None,
        label=trail.first.label if trail.first is not None else None,
        metadata=trail.first.metadata if trail.first is not None else {},
        n_samples=trail.first.n_samples if trail.first is not None else None,
        members=members,
        reward_mean=known.mean if known is not None else None,
        reward_std=known.std if known is not None else None,
        is_flat=known.is_flat if known is not None else None,
        ages=_slowest(run, trail, members),
        dispatches=dispatches_of(trail),
        failures=failures,
        letters=letters,
        copies=copies_of(trail),
        void_cuts=void_cuts(run, trail),
    )


def _moments(
    run: RunFacts, trail: Trail, failures: Sequence[Failure], letters: Sequence[Letter]
) -> list[Moment]:
    return [
        *task_moments(trail),
        *record_moments(trail),
        *reward_moments(trail),
        *failure_moments(failures),
        *letter_moments(letters),
        *group_moments(trail),
        *ledger_moments(run, trail),
    ]


def seq_of(trail: Trail) -> int | None:
    task = trail.first or trail.skipped
    if task is not None:
        return task.seq
    for each in trail.mentions:
        named = each.group or each.drop
        if named is not None:
            return named.seq
    return None


# ---------------------------------------------------------------- rewards
def scores_of(run: RunFacts, trail: Trail) -> Scores:
    """Advantages as the trainer forms them (engine/trainer/payloads.py): over the members of the cut."""
    decided, completed = trail.decided, members_of(trail)
    if decided is not None and decided.group is not None:
        found = [(member.uid, member.reward) for member in decided.group.members]
    elif completed:
        found = [(member.uid, member.reward) for member in completed.values()]
    else:
        first: dict[int, RewardAssigned] = {}
        for _, event in events(trail.rewards, RewardAssigned):
            first.setdefault(event.index, event)
        found = [(first[index].uid, first[index].reward) for index in sorted(first)]
    rewards = [reward for _, reward in found]
    return Scores([uid for uid, _ in found], rewards, spread_of(rewards), _values(run, trail, rewards))


def spread_of(rewards: Sequence[float]) -> Advantages:
    """Mean and spread of a group. A reward that is not finite, which no stage of ours writes, is left out."""
    return group_advantages(_finite(rewards))


def _values(run: RunFacts, trail: Trail, rewards: Sequence[float]) -> list[float | None]:
    decided = trail.decided
    if run.estimator in OF_CRITIC or run.estimator not in ESTIMATORS:
        return [None] * len(rewards)
    if run.estimator not in OF_BATCH:
        [values] = ESTIMATORS[run.estimator]([Group(_finite(rewards), [1] * len(rewards))])
        return [float(each) for each in values]
    if decided is None or decided.group is None:
        return [None] * len(rewards)  # it depends on the groups that it will be cut with
    groups = [
        Group(
            _finite([member.reward for member in each.members]),
            [member.n_trainable_tokens for member in each.members],
        )
        for each in decided.cut.groups
    ]
    return [
        float(each) for each in ESTIMATORS[run.estimator](groups)[decided.cut.groups.index(decided.group)]
    ]


def _finite(rewards: Sequence[float]) -> list[float | None]:
    return [each if math.isfinite(each) else None for each in rewards]


def members_of(trail: Trail) -> dict[str, Member]:
    """uid → member of the collector's record; empty before it or when there is none."""
    terminal = trail.terminal
    members: Sequence[Member] = getattr(terminal[1], "members", []) if terminal is not None else []
    return {member.uid: member for member in members}


# ---------------------------------------------------------------- members
def _rows(trail: Trail, verdict: Verdict, scores: Scores) -> list[MemberRow]:
    by_index: dict[int, list[str]] = {}
    for uid in trail.uids():
        by_index.setdefault(index_of(uid), []).append(uid)
    return [_row(trail, verdict, scores, counting(trail, uids)) for _, uids in sorted(by_index.items())]


def counting(trail: Trail, uids: Sequence[str]) -> str:
    """Of several attempts at one member, the one that counts: cut, joined, scored; else the newest."""
    decided = trail.decided
    cut = [each.uid for each in decided.group.members] if decided is not None and decided.group else []
    scored = [event.uid for _, event in events(trail.rewards, RewardAssigned)]
    for known in (cut, members_of(trail), scored):
        found = [uid for uid in uids if uid in known]
        if found:
            return found[0]
    return max(uids, key=attempt_of)


def _row(trail: Trail, verdict: Verdict, scores: Scores, uid: str) -> MemberRow:
    member, used = members_of(trail).get(uid), trail.cut_member(uid)
    event, at = _trajectory(trail, uid)
    reward = next((each for _, each in trail.verdicts_of(uid) if isinstance(each, RewardAssigned)), None)
    runs = trainable_of(member, reward)
    value = member.reward if member is not None else reward.reward if reward is not None else None
    value = used.reward if used is not None else value
    return MemberRow(
        uid=uid,
        index=index_of(uid),
        state=_state(trail, verdict, uid, used),
        reward=value,
        components=member.components
        if member is not None
        else reward.components
        if reward is not None
        else {},
        advantage=scores.of(uid),
        staleness=used.staleness if used is not None and used.staleness >= 0 else None,
        n_response_tokens=event.n_response_tokens if event is not None else _length(member, reward),
        n_trained_tokens=used.n_trainable_tokens if used is not None and verdict.outcome == TRAINED else None,
        versions=runs_of(runs),
        engine=event.engine if event is not None else "",
        finish_reason=event.finish_reason if event is not None else "",
        started_ms=event.started_ms if event is not None else member.started_ms if member is not None else 0,
        finished_ms=event.finished_ms
        if event is not None
        else member.finished_ms
        if member is not None
        else 0,
        place=at,
    )


def _trajectory(trail: Trail, uid: str) -> tuple[TrajectoryFinished | None, str]:
    records = trail.trajectories_of(uid)
    if not records:
        return None, ""
    event = entry_of(records[0]).event
    at = place("trajectories", records[0].partition, records[0].offset)
    return (event if isinstance(event, TrajectoryFinished) else None), at


def trainable_of(member: Member | None, reward: RewardAssigned | None) -> Sequence[VersionRun]:
    """Version runs over trainable tokens, as the records that carry them say."""
    if member is not None and member.trainable_versions:
        return member.trainable_versions
    return reward.trainable_versions if reward is not None else []


def runs_of(runs: Sequence[VersionRun]) -> list[VersionTokens]:
    return [VersionTokens(epoch=epoch, version=version, n_tokens=count) for epoch, version, count in runs]


def _length(member: Member | None, reward: RewardAssigned | None) -> int | None:
    if reward is not None:
        return reward.n_response_tokens
    return member.n_response_tokens or None if member is not None else None


def _state(trail: Trail, verdict: Verdict, uid: str, used: CutMember | None) -> str:
    if used is not None:
        if used.staleness < 0:
            return "all tokens too old"
        return "trained" if verdict.outcome == TRAINED else "step skipped"
    verdicts = trail.verdicts_of(uid)
    failed = next((each for _, each in verdicts if isinstance(each, ScoringFailed)), None)
    if failed is not None:
        return f"failed: {failed.reason}"
    if verdicts:
        return "scored"
    if trail.trajectories_of(uid):
        return "generated"
    broken = [entry_of(each).event for each in trail.trajectories]
    lost = [each for each in broken if isinstance(each, RolloutFailed) and each.uid == uid]
    return f"failed: {lost[0].reason}" if lost else "dispatched"


def _slowest(run: RunFacts, trail: Trail, members: Sequence[MemberRow]) -> Ages | None:
    """Ages by the member that finished last; versions by the oldest token of all."""
    decided, task = trail.decided, trail.first
    done = [each for each in members if each.finished_ms]
    if decided is None or not done:
        return None
    last = max(done, key=lambda each: each.finished_ms)
    runs = [(each.epoch, each.version, each.n_tokens) for member in members for each in member.versions]
    return ages_of(
        run,
        decided,
        runs,
        dispatched_ms=task.dispatched_ms if task is not None else 0,
        started_ms=last.started_ms,
        finished_ms=last.finished_ms,
    )
