"""Checks of the audit about weights, checkpoints and refused records. As in replay/checks.py, one promise each."""

from __future__ import annotations

from collections.abc import Iterator

from replay.checks import Check, Violation
from replay.evidence import Evidence, Letter
from streams.events import BatchCut, StepSkipped, WeightsPublished

# Why a stage may refuse a record (consumers/runner.Reader, consumers/losses, consumers/reward,
# engine/rollout/outcomes).
EXPLAINED = frozenset(
    {
        "undecodable",
        "schema_too_new",
        "over_cap",
        "claim_lost",
        "conflict",
        "damaged",
        "bad_mask",
        "bad_sample",
        "bad_token_id",
        "length_mismatch",
        "missing_logprob",
        "no_tokens",
        "nonfinite_logprob",
        "positive_logprob",
        "unknown_version",
    }
)


def versions_never_go_back(evidence: Evidence) -> Check:
    """Published numbers grow; a new epoch may publish the newest one again, and none below it."""
    found: list[Violation] = []
    newest: WeightsPublished | None = None
    for event in evidence.view.versions:
        if newest is not None:
            if event.version < newest.version:
                text = f"published after e{newest.epoch}-v{newest.version}"
                found.append(
                    Violation(
                        [f"e{event.epoch}-v{event.version}"],
                        f"version e{event.epoch}-v{event.version}: {text}",
                    )
                )
            if event.epoch < newest.epoch:
                text = f"of epoch {event.epoch}, published after one of epoch {newest.epoch}"
                found.append(
                    Violation([f"e{event.epoch}-v{event.version}"], f"version {event.version}: {text}")
                )
        newest = event
    return Check("versions and epochs never go back", len(evidence.view.versions), found)


def trained_versions_were_served(evidence: Evidence) -> Check:
    """The engine of each trained sample had said that it holds each of the sample's versions, with the digest that
    was published for it."""
    published = _published(evidence)
    found, examined = [], 0
    for uid, engine, versions in _generated(evidence):
        examined += 1
        for version in versions:
            held = evidence.ready.get(engine, {}).get(version)
            name = "e{}-v{}".format(*version)
            if held is None and evidence.ready_whole:
                found.append(
                    Violation([uid], f"{uid}: {engine} generated with {name} and never said that it holds it")
                )
            elif held is not None and held not in published.get(version, {held}):
                wanted = ", ".join(sorted(digest[:12] for digest in published[version]))
                found.append(
                    Violation([uid], f"{uid}: {engine} held {held[:12]} as {name}, published was {wanted}")
                )
    return Check("every served version was acknowledged with the published digest", examined, found)


def versions_were_acknowledged(evidence: Evidence) -> Check:
    """No sample carries a version that the very process which made it had not acknowledged.

    Over every kept sample, trained or not, whose process says its incarnation: such a one sends no sample before its
    EngineReady is in the log. A version that was never published is the trainer's to refuse. By incarnation, since what
    an engine's former process held says nothing of a restarted one.
    """
    published = _published(evidence)
    found, examined = [], 0
    for source, uid in evidence.sources.items():
        version = (source.epoch, source.version)
        if not source.incarnation or version not in published or not evidence.ready_whole:
            continue
        examined += 1
        if version not in evidence.ready_by.get(source.incarnation, ()):
            who = f"{source.engine} (incarnation {source.incarnation})"
            text = f"{uid}: {who} had not acknowledged e{source.epoch}-v{source.version}, with which it generated"
            found.append(Violation([uid], text))
    return Check("no sample carries a version that was not acknowledged", examined, found)


def quarantined_engines_train_no_more(evidence: Evidence) -> Check:
    """No cut after a quarantine holds a sample of that incarnation."""
    quarantines = evidence.view.quarantines
    found, examined = [], 0
    for offset, cut in evidence.view.cuts if quarantines else ():
        banned = {(each.engine, each.incarnation) for at, each in quarantines if at < offset}
        for group in cut.groups if banned else ():
            for member in group.members:
                sample = evidence.samples[group.partition, member.trajectory_offset]
                examined += 1
                if not sample.problem and (sample.engine, sample.incarnation) in banned:
                    text = f"{member.uid}: trained in step {cut.step} though {sample.engine} was quarantined before"
                    found.append(Violation([member.uid, group.group_id], text))
    return Check("nothing of a quarantined engine is trained", examined, found)


def _published(evidence: Evidence) -> dict[tuple[int, int], set[str]]:
    """(epoch, version) → digests, of every record: what an epoch published before it was fenced was served too."""
    found: dict[tuple[int, int], set[str]] = {}
    for entry in evidence.ledger:
        if isinstance(entry.event, WeightsPublished):
            found.setdefault((entry.event.epoch, entry.event.version), set()).add(entry.event.digest)
    return found


def _generated(evidence: Evidence) -> Iterator[tuple[str, str, list[tuple[int, int]]]]:
    for _, group in evidence.view.groups_trained():
        for member in group.members:
            sample = evidence.samples[group.partition, member.trajectory_offset]
            if not sample.problem and sample.engine:
                yield member.uid, sample.engine, [(epoch, version) for epoch, version, _ in sample.trainable]


def checkpoints_follow_the_ledger(evidence: Evidence) -> Check:
    """A checkpoint's step was cut, its version is what that step made, and replay from its position misses no later
    step and repeats none."""
    found, examined = [], 0
    made: dict[int, tuple[int, int]] = {0: (-1, 0)}  # step → (offset of its cut, version after it)
    for entry in evidence.ledger:
        event = None if entry.void else entry.event
        if isinstance(event, BatchCut):
            made[event.step] = (entry.offset, event.version + 1)
        elif isinstance(event, StepSkipped):
            offset, _ = made.get(event.step, (entry.offset, 0))
            made[event.step] = (offset, event.version)
    for saved in evidence.view.checkpoints:
        examined += 1
        text = ""
        if saved.step not in made:
            text = f"is of step {saved.step}, which was never cut"
        elif saved.version != made[saved.step][1]:
            text = f"has version {saved.version}, step {saved.step} made {made[saved.step][1]}"
        elif saved.ledger_position <= made[saved.step][0]:
            text = f"would replay step {saved.step}, which it holds (ledger position {saved.ledger_position})"
        elif saved.step + 1 in made and made[saved.step + 1][0] < saved.ledger_position:
            text = f"would not replay step {saved.step + 1} (ledger position {saved.ledger_position})"
        if text:
            found.append(Violation([saved.path], f"checkpoint {saved.path}: {text}"))
    return Check("checkpoints follow the ledger", examined, found)


def dead_letters_are_explained(evidence: Evidence) -> Check:
    """Each letter says a known reason, and holds the very record that it names, if that is still kept."""
    found = [
        Violation([f"dead:{letter.at}"], f"dead:{letter.at}: {text}")
        for letter in evidence.letters
        if (text := _unexplained(letter))
    ]
    return Check("dead letters are explained", len(evidence.letters), found)


def _unexplained(letter: Letter) -> str:
    where = f"{letter.topic}/{letter.partition}:{letter.offset}"
    if letter.reason not in EXPLAINED:
        return (
            f"{letter.stage} refused {where} for {letter.reason!r}, a reason that this version does not know"
        )
    if letter.is_faithful is False:
        return f"does not hold what lies at {where}"
    return ""
