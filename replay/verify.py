"""The audit: does the log itself show that the run kept its promises (DESIGN §1)?

    log ──► evidence.gather ──► each check of CHECKS ──► Report (a table, the ids of every violation)

From the log alone: nothing that the run recorded about itself is believed where it can be recomputed. The staleness
of every trained token comes from the payload that was trained on, judged by the one rule
(consumers/staleness.py) with the epochs and the limit that were known at its cut. Reads only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from replay import checks, checks_versions
from replay.checks import Check
from replay.evidence import Evidence, gather
from replay.topics import columns
from streams.events import CheckpointSaved, WeightsPublished
from streams.log import EventLog
from streams.topics import Topics

SHOWN = 20  # violations of one check in the table's appendix; --json has all

# What the file of a published version, or of a checkpoint, holds now; None when it is no longer there.
DigestOfWeights = Callable[[WeightsPublished], str | None]
DigestOfCheckpoint = Callable[[CheckpointSaved], str | None]

CHECKS: Sequence[Callable[[Evidence], Check]] = (
    checks.ledger_is_readable,
    checks.groups_are_dispatched_once,
    checks.outcomes_are_unique,
    checks.outcomes_are_complete,
    checks.groups_are_trained_once,
    checks.samples_are_trained_once,
    checks.staleness_is_within_the_limit,
    checks.recorded_staleness_is_right,
    checks.limit_is_the_one_in_force,
    checks.references_resolve,
    checks.steps_and_versions_follow,
    checks.frontier_is_right,
    checks.positions_pass_over_nothing,
    checks_versions.versions_never_go_back,
    checks_versions.trained_versions_were_served,
    checks_versions.versions_were_acknowledged,
    checks_versions.quarantined_engines_train_no_more,
    checks_versions.checkpoints_follow_the_ledger,
    checks_versions.dead_letters_are_explained,
)


class Report(NamedTuple):
    checks: list[Check]
    notes: dict[str, int]  # counted, not judged

    @property
    def holds(self) -> bool:
        return not any(check.violations for check in self.checks)

    def as_table(self) -> str:
        rows = [("CHECK", "EXAMINED", "VIOLATIONS")]
        rows += [(check.name, str(check.examined), str(len(check.violations))) for check in self.checks]
        parts = [columns(rows)]
        for check in self.checks:
            if check.violations:
                lines = [f"  {violation.text}" for violation in check.violations[:SHOWN]]
                more = len(check.violations) - SHOWN
                lines += [f"  … and {more} more (--json lists all)"] if more > 0 else []
                parts.append("\n".join([f"VIOLATED: {check.name}", *lines]) + "\n")
        if self.notes:
            parts.append(
                columns([("COUNTED", ""), *((name, str(count)) for name, count in self.notes.items())])
            )
        return "\n".join(parts)

    def as_json(self) -> str:
        found = [
            {
                "check": check.name,
                "examined": check.examined,
                "violations": [{"ids": each.ids, "text": each.text} for each in check.violations],
            }
            for check in self.checks
        ]
        return (
            msgspec.json.encode({"holds": self.holds, "checks": found, "counted": self.notes}).decode() + "\n"
        )


def verify(
    log: EventLog,
    topics: Topics,
    *,
    weights_digest: DigestOfWeights | None = None,
    checkpoint_digest: DigestOfCheckpoint | None = None,
) -> Report:
    """Audit a run, finished or not. Files are looked at only through the two functions."""
    evidence = gather(log, topics)
    results = [check(evidence) for check in CHECKS]
    if weights_digest is not None:
        results.append(checks.weights_files_match(evidence, weights_digest))
    if checkpoint_digest is not None:
        results.append(checks.checkpoints_match(evidence, checkpoint_digest))
    return Report(results, _notes(evidence))


def _notes(evidence: Evidence) -> dict[str, int]:
    view = evidence.view
    notes = {
        "groups trained": sum(len(cut.event.groups) for cut in view.cuts),
        "groups open": checks.open_groups(evidence),
        "steps": len(view.cuts),
        "steps skipped": len(view.skipped),
        "epochs of the trainer": len(view.epochs),
        "engines quarantined": len({(each.engine, each.incarnation) for _, each in view.quarantines}),
        "void ledger records": len(view.void),
        "copies of groups passed over": view.duplicates,
        "copies of dispatches": len(evidence.dispatches) - len({d.group_id for d in evidence.dispatches}),
        "samples no longer kept": sum(sample.gone for sample in evidence.samples.values()),
        "dead letters": sum(evidence.dead.values()),
    }
    notes |= _counted("  dead: ", evidence.dead)
    notes |= _counted("groups dropped: ", Counter(each.drop.reason for each in view.drops))
    notes |= _counted("unreadable records in ", evidence.unreadable)
    notes |= _counted("records of unknown type ", evidence.unknown)
    return notes


def _counted(prefix: str, counter: Counter[str]) -> dict[str, int]:
    return {prefix + name: count for name, count in sorted(counter.items())}
