"""The single checks of the audit. Each is one promise: evidence in, what was examined and what violates it out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from consumers.ledger import Frontier
from consumers.staleness import MASK, Judgement, Lineage, judge
from replay.evidence import Evidence
from replay.ledger import Cut
from streams.errors import MillstreamError
from streams.events import (
    BatchCut,
    CheckpointSaved,
    Closing,
    CutGroup,
    CutMember,
    EpochStarted,
    StepSkipped,
    WeightsPublished,
)
from streams.ranges import from_ranges


class Violation(NamedTuple):
    ids: list[str]  # groups, samples, steps or versions concerned
    text: str


class Check(NamedTuple):
    name: str
    examined: int
    violations: list[Violation]


def _violation(identity: object, text: str) -> Violation:
    return Violation([str(identity)], f"{identity}: {text}")


# ---------------------------------------------------------------- groups and their outcomes
def ledger_is_readable(evidence: Evidence) -> Check:
    """An outcome that cannot be read must never count as absent."""
    found = [
        _violation(f"ledger:{entry.offset}", entry.problem)
        for entry in evidence.view.problems
        if not entry.unknown_type
    ]
    return Check("every ledger record can be read", len(evidence.ledger), found)


def groups_are_dispatched_once(evidence: Evidence) -> Check:
    """One group id, one seq, one partition. An exact copy of a dispatch (two feeders) is counted, not judged."""
    found, by_group, by_seq = [], {}, {}
    for each in evidence.dispatches:
        first = by_group.setdefault(each.group_id, each)
        if (first.seq, first.partition) != (each.seq, each.partition):
            found.append(
                _violation(
                    each.group_id,
                    f"dispatched as seq {first.seq} at tasks/{first.partition}:{first.offset} and as seq {each.seq} at "
                    f"tasks/{each.partition}:{each.offset}",
                )
            )
        other = by_seq.setdefault(each.seq, each)
        if other.group_id != each.group_id:
            found.append(_violation(each.group_id, f"has seq {each.seq}, and so has group {other.group_id}"))
    return Check(
        "each group is dispatched under one number, to one partition", len(evidence.dispatches), found
    )


def outcomes_are_unique(evidence: Evidence) -> Check:
    """At most one outcome a group, over all valid ledger records, and only of groups that were dispatched."""
    dispatched = {each.group_id: each.seq for each in evidence.dispatches}
    outcomes: dict[str, list[str]] = {}
    found = []
    for group_id, seq, outcome in _outcomes(evidence):
        outcomes.setdefault(group_id, []).append(outcome)
        if evidence.dispatches_whole and dispatched.get(group_id) != seq:
            was = (
                f"was dispatched as seq {dispatched[group_id]}"
                if group_id in dispatched
                else "was never dispatched"
            )
            found.append(_violation(group_id, f"{outcome} as seq {seq}, but {was}"))
    found += [
        _violation(group_id, f"has {len(several)} outcomes: {', '.join(several)}")
        for group_id, several in outcomes.items()
        if len(several) > 1
    ]
    return Check("each group has at most one outcome", len(outcomes), found)


def outcomes_are_complete(evidence: Evidence) -> Check:
    """Once the run has finished, every dispatched group has its outcome and no seq is missing."""
    if evidence.view.finished is None:
        return Check("each group of a finished run has an outcome", 0, [])
    closed = {group_id for group_id, _, _ in _outcomes(evidence)}
    dispatched = {each.group_id: each for each in evidence.dispatches}
    found = [
        _violation(each.group_id, f"has no outcome (seq {each.seq}, tasks/{each.partition}:{each.offset})")
        for each in dispatched.values()
        if each.group_id not in closed
    ]
    ended = evidence.view.data_ended
    if ended is not None and evidence.dispatches_whole:
        seqs = {each.seq for each in dispatched.values()}
        found += [
            _violation(f"seq {seq}", f"of {ended.count} that DataEnded counts, was never dispatched")
            for seq in range(ended.count)
            if seq not in seqs
        ]
    return Check("each group of a finished run has an outcome", len(dispatched), found)


def groups_are_trained_once(evidence: Evidence) -> Check:
    steps: dict[str, list[int]] = {}
    for cut, group in evidence.view.groups_trained():
        steps.setdefault(group.group_id, []).append(cut.step)
    return Check("no group is trained twice", len(steps), _repeated(steps))


def samples_are_trained_once(evidence: Evidence) -> Check:
    steps: dict[str, list[int]] = {}
    for cut, _, member in _trained(evidence):
        steps.setdefault(member.uid, []).append(cut.step)
    return Check("no sample is trained twice", len(steps), _repeated(steps))


def open_groups(evidence: Evidence) -> int:
    closed = {group_id for group_id, _, _ in _outcomes(evidence)}
    return len({each.group_id for each in evidence.dispatches} - closed)


def _repeated(steps: dict[str, list[int]]) -> list[Violation]:
    return [
        _violation(identity, f"trained in steps {', '.join(map(str, several))}")
        for identity, several in steps.items()
        if len(several) > 1
    ]


def _outcomes(evidence: Evidence) -> Iterator[tuple[str, int, str]]:
    """(group id, seq, what) of every mention in a valid ledger record."""
    for cut, group in evidence.view.groups_trained():
        yield group.group_id, group.seq, f"used by step {cut.step}"
    for offset, drop in evidence.view.drops:
        yield drop.group_id, drop.seq, f"dropped as {drop.reason} at ledger:{offset}"


def _trained(evidence: Evidence) -> Iterator[tuple[BatchCut, CutGroup, CutMember]]:
    for cut, group in evidence.view.groups_trained():
        for member in group.members:
            yield cut, group, member


# ---------------------------------------------------------------- staleness
def staleness_is_within_the_limit(evidence: Evidence) -> Check:
    """No trained token is older than the limit of its cut, nor of an unknown or a future version."""
    found, examined = [], 0
    for cut, group, member, verdict in _judged(evidence):
        examined += 1
        if verdict.accepted or _is_masked_whole(cut, member, verdict):
            continue
        text = f"trained in step {cut.step} though {verdict.reason}"
        if verdict.reason == "stale":
            text = f"trained in step {cut.step} at staleness {verdict.staleness}, over the limit {cut.limit}"
        found.append(Violation([member.uid, group.group_id], f"{member.uid}: {text}"))
    return Check("no trained token is older than the limit", examined, found)


def recorded_staleness_is_right(evidence: Evidence) -> Check:
    """What the cut says of each sample is what its payload says."""
    found, examined = [], 0
    for cut, group, member, verdict in _judged(evidence):
        examined += 1
        trains = verdict.accepted
        right = (verdict.staleness if trains else -1, verdict.n_trainable if trains else 0)
        if (member.staleness, member.n_trainable_tokens) != right and (trains or member.n_trainable_tokens):
            text = (
                f"step {cut.step} records staleness {member.staleness} over {member.n_trainable_tokens} tokens, "
                f"its payload says {right[0]} over {right[1]}"
            )
            found.append(Violation([member.uid, group.group_id], f"{member.uid}: {text}"))
    return Check("recorded staleness is that of the payload", examined, found)


def limit_is_the_one_in_force(evidence: Evidence) -> Check:
    """A change binds from the first cut that had read it and whose step it is for; without one, the limit of an epoch
    stays what it was as the epoch began."""
    found = []
    base = {number: epoch.limit for number, epoch in evidence.view.epochs if epoch.limit >= 0}
    for offset, cut in evidence.view.cuts:
        if cut.ledger_read_to > offset:
            found.append(
                _violation(f"step {cut.step}", f"cut at ledger:{offset} had read to {cut.ledger_read_to}")
            )
        changed = evidence.view.limit_changed_before(cut.ledger_read_to, cut.step)
        limit = base.setdefault(cut.epoch, cut.limit) if changed is None else changed.limit
        if cut.limit != limit:
            found.append(
                _violation(f"step {cut.step}", f"was cut at limit {cut.limit}, {limit} was in force")
            )
    return Check("each cut keeps the limit in force", len(evidence.view.cuts), found)


def _judged(evidence: Evidence) -> Iterator[tuple[BatchCut, CutGroup, CutMember, Judgement]]:
    """Every trained sample whose payload is still kept, judged with what was known at its cut's own offset."""
    lineage = Lineage()
    for entry in evidence.ledger:
        event = None if entry.void else entry.event
        if isinstance(event, EpochStarted):
            lineage.started(entry.offset)
        elif isinstance(event, WeightsPublished):
            lineage.published(event.epoch, event.version, event.forked_at)
        elif isinstance(event, BatchCut):
            for group in event.groups:
                for member in group.members:
                    sample = evidence.samples[group.partition, member.trajectory_offset]
                    if not sample.problem:
                        yield event, group, member, _verdict(event, sample.trainable, lineage)


def _verdict(cut: BatchCut, trainable: Sequence[tuple[int, int, int]], lineage: Lineage) -> Judgement:
    return judge(
        trainable, trainer_version=cut.version, limit=cut.limit, lineage=lineage, on_stale=cut.on_stale
    )


def _is_masked_whole(cut: BatchCut, member: CutMember, verdict: Judgement) -> bool:
    """A sample that lost every token to the mask stays in its group for the mean of the rewards alone."""
    return cut.on_stale == MASK and verdict.reason == "stale" and member.n_trainable_tokens == 0


# ---------------------------------------------------------------- references
def references_resolve(evidence: Evidence) -> Check:
    """Each trained sample is the one at the referenced place, in its group's own record, with the same reward."""
    found, examined = [], 0
    for cut, group, member in _trained(evidence):
        examined += 1
        texts = [_wrong_sample(evidence, group, member), _wrong_group(evidence, group, member)]
        found += [
            Violation([member.uid, group.group_id], f"{member.uid}: step {cut.step}: {text}")
            for text in texts
            if text
        ]
    return Check("references name what was trained", examined, found)


def _wrong_sample(evidence: Evidence, group: CutGroup, member: CutMember) -> str:
    where = f"trajectories/{group.partition}:{member.trajectory_offset}"
    sample = evidence.samples[group.partition, member.trajectory_offset]
    if sample.gone:
        return ""
    if sample.problem:
        return f"{where}: {sample.problem}"
    if (sample.uid, sample.group_id) != (member.uid, group.group_id):
        return f"{where} holds {sample.uid} of group {sample.group_id}"
    completed = evidence.completed.get((group.partition, group.group_offset))
    scored = 0 if completed is None else completed.lengths.get(member.uid, 0)
    if scored not in (0, sample.n_response_tokens):
        return f"{where} has {sample.n_response_tokens} response tokens, {scored} were scored"
    digest = "" if completed is None else completed.digests.get(member.uid, "")
    if digest not in ("", sample.digest):
        return f"{where} holds another payload ({sample.digest[:12]}) than was scored ({digest[:12]})"
    return ""


def _wrong_group(evidence: Evidence, group: CutGroup, member: CutMember) -> str:
    where = f"groups/{group.partition}:{group.group_offset}"
    try:
        completed = evidence.completed[group.partition, group.group_offset]
    except KeyError:
        return f"{where} is no GroupCompleted"
    if completed is None:
        return ""
    if completed.group_id != group.group_id:
        return f"{where} is about group {completed.group_id}"
    if member.uid not in completed.members:
        return f"{where} does not name it"
    offset, reward = completed.members[member.uid]
    if (offset, reward) != (member.trajectory_offset, member.reward):
        return (
            f"{where} has trajectory {offset} with reward {reward}, the cut {member.trajectory_offset} with "
            + str(member.reward)
        )
    return ""


# ---------------------------------------------------------------- order
def steps_and_versions_follow(evidence: Evidence) -> Check:
    """Steps count 1, 2, 3, … over all epochs; each one that was taken makes one version; none is published twice
    under different digests."""
    found, digests = [], {}
    previous: BatchCut | None = None
    skipped: set[tuple[int, int]] = set()
    for entry in evidence.ledger:
        event = None if entry.void else entry.event
        if isinstance(event, StepSkipped):
            skipped.add((event.epoch, event.step))
        elif isinstance(event, BatchCut):
            found += _out_of_step(previous, event, skipped)
            previous = event
        elif isinstance(event, WeightsPublished):
            digest = digests.setdefault((event.epoch, event.version), event.digest)
            if digest != event.digest:
                text = f"published as {digest[:12]} and as {event.digest[:12]}"
                found.append(_violation(f"version e{event.epoch}-v{event.version}", text))
    examined = len(evidence.view.cuts) + len(evidence.view.versions)
    return Check("steps and versions follow each other", examined, found)


def _out_of_step(previous: BatchCut | None, cut: BatchCut, skipped: set[tuple[int, int]]) -> list[Violation]:
    step, version = (0, -1) if previous is None else (previous.step, previous.version)
    found = []
    if cut.step != step + 1:
        found.append(_violation(f"step {cut.step}", f"follows step {step}"))
    if previous is not None and previous.epoch == cut.epoch:
        made = version + (0 if (previous.epoch, step) in skipped else 1)
        if cut.version != made:
            found.append(
                _violation(f"step {cut.step}", f"starts from version {cut.version}, {made} was the newest")
            )
    return found


def frontier_is_right(evidence: Evidence) -> Check:
    """Every closing record carries exactly the set of groups that are closed after it."""
    frontier, found, examined = Frontier(), [], 0
    for entry in evidence.ledger:
        event = None if entry.void else entry.event
        if not isinstance(event, Closing):
            continue
        examined += 1
        for seq in _closes(event):
            frontier.close(seq)
        recorded = (event.frontier, sorted(from_ranges(event.closed_above)))
        right = (frontier.low, sorted(frontier.above))
        if recorded != right:
            text = f"says that all below {recorded[0]} and {recorded[1]} are closed; it is {right[0]} and {right[1]}"
            found.append(_violation(f"ledger:{entry.offset}", text))
            frontier = Frontier(event.frontier, from_ranges(event.closed_above))  # report each jump once
    return Check("the frontier is the set of closed groups", examined, found)


def positions_pass_over_nothing(evidence: Evidence) -> Check:
    """Positions never go back, and below them no group is left without an outcome."""
    found: list[Violation] = []
    closed: set[int] = set()
    pending = [iter(partition) for partition in evidence.terminal]
    ahead = [next(partition, None) for partition in pending]
    last: Cut | None = None
    for entry in evidence.ledger:
        event = None if entry.void else entry.event
        if isinstance(event, Closing):
            closed.update(_closes(event))
        if not isinstance(event, BatchCut):
            continue
        step = f"step {event.step}"
        if len(event.positions) != len(pending):
            found.append(
                _violation(step, f"has {len(event.positions)} positions for {len(pending)} partitions")
            )
            continue
        for partition, position in enumerate(event.positions):
            if last is not None and position < last.event.positions[partition]:
                before = last.event.positions[partition]
                found.append(_violation(step, f"groups/{partition} went back from {before} to {position}"))
            while (place := ahead[partition]) is not None and place[0] < position:
                if place[1] not in closed:
                    text = (
                        f"groups/{partition}:{place[0]} (seq {place[1]}) was passed over without an outcome"
                    )
                    found.append(_violation(step, text))
                ahead[partition] = next(pending[partition], None)
        last = Cut(entry.offset, event)
    return Check("positions pass over no group", len(evidence.view.cuts), found)


def _closes(event: Closing) -> list[int]:
    used = [group.seq for group in event.groups] if isinstance(event, BatchCut) else []
    return used + [drop.seq for drop in event.drops]


# ---------------------------------------------------------------- files
def weights_files_match(evidence: Evidence, digest_of: Callable[[WeightsPublished], str | None]) -> Check:
    """A file that a valid record names and that still exists holds the published weights."""
    found, examined = [], 0
    for event in evidence.view.versions:
        text, there = _wrong_digest(event.digest, lambda event=event: digest_of(event))
        examined += there
        if text:
            found.append(_violation(f"version e{event.epoch}-v{event.version}", text))
    return Check("weights files hold what was published", examined, found)


def checkpoints_match(evidence: Evidence, digest_of: Callable[[CheckpointSaved], str | None]) -> Check:
    """A checkpoint that a valid record names and that still exists is the recorded one."""
    found, examined = [], 0
    for event in evidence.view.checkpoints:
        text, there = _wrong_digest(event.digest, lambda event=event: digest_of(event))
        examined += there
        if text:
            found.append(_violation(f"checkpoint {event.path}", text))
    return Check("checkpoints hold what was saved", examined, found)


def _wrong_digest(recorded: str, look: Callable[[], str | None]) -> tuple[str, bool]:
    """(what is wrong, whether there was anything to look at)."""
    try:
        held = look()
    except (OSError, ValueError, MillstreamError) as error:
        return f"cannot be read: {error}", True
    if held is None:
        return "", False
    return ("" if held == recorded else f"holds {held[:12]}, {recorded[:12]} was recorded"), True
