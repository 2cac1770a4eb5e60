"""The two parts of an age: in flight (dispatch to finish) and in queue (finish to cut), in seconds and in versions.

dispatched ──────────── finished ─────────── decided (cut or drop)
oldest token's version ─ newest published ─── the trainer's version       differences: the versions of each part
"""

from __future__ import annotations

from collections.abc import Sequence

from consumers.staleness import Lineage
from replay.lives.facts import Ages
from replay.lives.run import Mention, RunFacts
from streams.columns import VersionRun


def ages_of(
    run: RunFacts,
    decided: Mention,
    runs: Sequence[VersionRun],
    *,
    dispatched_ms: int,
    started_ms: int,
    finished_ms: int,
) -> Ages:
    """`runs` are over trainable tokens. A part that nothing says anything of is None."""
    in_flight_versions, in_queue_versions = _in_versions(run, decided, runs, finished_ms)
    return Ages(
        in_flight_s=between(dispatched_ms, finished_ms),
        in_queue_s=between(finished_ms, decided.at_ms),
        in_flight_versions=in_flight_versions,
        in_queue_versions=in_queue_versions,
        generating_s=between(started_ms, finished_ms),
    )


def _in_versions(
    run: RunFacts, decided: Mention, runs: Sequence[VersionRun], finished_ms: int
) -> tuple[int | None, int | None]:
    oldest = oldest_version(runs, run.lineage(decided.entry.offset))
    newest = run.version_at(finished_ms, decided.entry.offset) if finished_ms else None
    now = decided.record.version
    if oldest is None or newest is None or oldest > now:
        return None, None
    at_finish = min(max(newest, oldest), now)
    return at_finish - oldest, now - at_finish


def oldest_version(runs: Sequence[VersionRun], lineage: Lineage) -> int | None:
    """The oldest version of the present epoch that the tokens are as old as; None if one is unknown."""
    found = [lineage.effective(epoch, version) for epoch, version, n_tokens in runs if n_tokens > 0]
    known = [version for version in found if version is not None]
    return min(known) if known and len(known) == len(found) else None


def between(begin_ms: int, end_ms: int) -> float | None:
    """Seconds; None when either moment is not said, never below 0 (clocks of two machines differ)."""
    return max(0, end_ms - begin_ms) / 1000 if begin_ms > 0 and end_ms > 0 else None
