"""The cuts of a run under another staleness rule: who would have been left out, judged as the trainer judges.

Each group of a cut is judged again by `consumers.batches.refused` with the version and the lineage of that cut; those
that the new rule refuses are left out of the step. The other way round nothing can be had: what the run dropped was
never put into a batch, and what a looser limit would have let pass is in no cut. Only tokens that were masked in a
group that trained come back.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from consumers.batches import Rule, cut_group, refused
from consumers.staleness import Lineage
from engine.replaying.settings import LIMIT, ON_STALE, Plan
from engine.trainer.rerun import History
from streams import codec
from streams.codec import Known
from streams.errors import CodecError, LogError, LogUnavailable, MillstreamError
from streams.events import BatchCut, CutGroup, GroupCompleted, WeightsPublished
from streams.log import EventLog
from streams.topics import Topics


class Rejudged(NamedTuple):
    cuts: dict[int, BatchCut | None]  # step → the cut under the new rule; None: no group is left
    left_out: dict[int, int]  # step → groups that the new rule refuses
    masked: int  # tokens that trained in the record and are over the new limit
    looser: int  # steps whose recorded limit was below the new one

    @property
    def groups(self) -> int:
        return sum(self.left_out.values())

    @property
    def emptied(self) -> list[int]:
        return [step for step, cut in self.cuts.items() if cut is None]

    def of(self, cut: BatchCut) -> BatchCut | None:
        """The cut to train on instead: what `rerun` asks for."""
        return self.cuts.get(cut.step, cut)


def rejudge(log: EventLog, topics: Topics, history: History, plan: Plan, first: int, last: int) -> Rejudged:
    """Judge the cuts of steps `first` to `last` by the plan's limit and mode.

    Raises MillstreamError when a group's record is no longer in the log.
    """
    found, lineage = Rejudged({}, {}, 0, 0), Lineage()
    for _, event in history:
        if isinstance(event, WeightsPublished):
            lineage.published(event.epoch, event.version, event.forked_at)
        if not isinstance(event, BatchCut) or not first <= event.step <= last:
            continue
        limit = plan.asked.staleness.max_weight_staleness if plan.changed(LIMIT) else event.limit
        on_stale = plan.asked.staleness.on_stale if plan.changed(ON_STALE) else event.on_stale
        rule = Rule(event.version, limit, on_stale, lineage)
        groups = [
            each for each in (_judged(log, topics, group, rule) for group in event.groups) if each is not None
        ]
        found.left_out[event.step] = len(event.groups) - len(groups)
        changed = msgspec.structs.replace(event, groups=groups, limit=limit, on_stale=on_stale)
        found.cuts[event.step] = changed if groups else None
        found = found._replace(
            masked=found.masked + _tokens_lost(event, groups), looser=found.looser + (limit > event.limit)
        )
    return found


def _judged(log: EventLog, topics: Topics, group: CutGroup, rule: Rule) -> CutGroup | None:
    """The group as a cut under this rule has it; None if the rule refuses it."""
    event = _completed(log, topics, group)
    if refused(event, rule) is not None:
        return None
    return cut_group(group.partition, group.group_offset, event, rule)


def _completed(log: EventLog, topics: Topics, group: CutGroup) -> GroupCompleted:
    topic, partition, offset = topics.name("groups"), group.partition, group.group_offset
    where = f"group {group.group_id} ({topic}/{partition}:{offset})"
    try:
        records = log.read(topic, partition, offset, max_records=1).records
        decoded = codec.decode(records[0]) if records and records[0].offset == offset else None
    except LogUnavailable:
        raise
    except (CodecError, LogError) as error:
        raise MillstreamError(
            f"{where} cannot be judged again: {error}. A replay with another limit needs the topic of groups as far "
            "back as its first step (log.retention_s, log.retention_bytes)"
        ) from error
    if not isinstance(decoded, Known) or not isinstance(decoded.event, GroupCompleted):
        raise MillstreamError(f"{where} cannot be judged again: there is no completed group at this place")
    return decoded.event


def _tokens_lost(cut: BatchCut, groups: list[CutGroup]) -> int:
    """Tokens of the groups that stay which trained in the record and do not under the new rule (below 0: come back)."""
    then = {member.uid: member.n_trainable_tokens for group in cut.groups for member in group.members}
    return sum(
        then[member.uid] - member.n_trainable_tokens
        for group in groups
        for member in group.members
        if member.uid in then
    )


def rule_changed(plan: Plan) -> bool:
    return plan.changed(LIMIT, ON_STALE)


def words(rejudged: Rejudged, steps: int) -> list[str]:
    """What the new rule did to the data, in sentences."""
    touched, emptied = sum(1 for count in rejudged.left_out.values() if count), len(rejudged.emptied)
    lines = [
        f"the new rule leaves out {_counted(rejudged.groups, 'group')} that the run trained on, in {touched} of "
        f"{_counted(steps, 'step')}"
    ]
    if emptied:
        lines[0] += f"; {_counted(emptied, 'step')} without any group left, skipped by B"
    if rejudged.masked > 0:
        lines.append(f"in the groups that stay, {rejudged.masked} tokens more are masked")
    if rejudged.masked < 0:
        lines.append(f"in the groups that stay, {-rejudged.masked} masked tokens train after all")
    if rejudged.looser:
        lines.append(
            f"for {_counted(rejudged.looser, 'step')} the new limit is looser than the recorded one: what the run "
            "dropped as stale is in no batch and does not come back"
        )
    return lines


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
