"""What sheets of all kinds share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from replay.lives.facts import Ages, Copy, Failure, Letter, Verdict, VoidCut
from replay.lives.phrases import counted, number, seconds, stamp, value
from replay.lives.sheet import BAD, GOOD, WAITING, Section, Stretch, Table

_TONES = {"trained": GOOD, "skipped": BAD, "dropped": BAD, "not_used": BAD, "void": BAD}

# gauges of consumers/telemetry.summarize, in the order in which they are shown
GAUGES = {
    "mean_abs_log_ratio": "mean |log ratio|",
    "kl_k3": "KL (k3)",
    "ess_token": "ESS",
    "clip_fraction": "clipped",
    "max_ratio": "max ratio",
}


def tone(outcome: str) -> str:
    return _TONES.get(outcome, WAITING)


def explanations(verdict: Verdict) -> list[str]:
    found = [verdict.explanation] if verdict.explanation else []
    if verdict.detail:
        found.append(f"In the record's words: {verdict.detail}")
    if verdict.setting:
        found.append(f"Governed by {verdict.setting}.")
    return found


def prompt_facts(prompt: object, label: object, metadata: dict) -> list[tuple[str, str]]:
    pairs = [("prompt", value(prompt)), ("label", value(label))]
    return pairs + ([("metadata", value(metadata))] if metadata else [])


def trouble(
    failures: Sequence[Failure], letters: Sequence[Letter], copies: Sequence[Copy], void: Sequence[VoidCut]
) -> list[Section]:
    return [
        Table(
            "Failed attempts",
            ["at", "stage", "sample", "reason", "what it means", "governed by", "detail", "record"],
            [
                [
                    stamp(f.at_ms),
                    f.stage,
                    f.uid,
                    f.reason,
                    f.meaning,
                    f.setting or "-",
                    f.detail or "-",
                    f.place,
                ]
                for f in failures
            ],
        ),
        Table(
            "Refused records (dead letters)",
            ["at", "stage", "reason", "what it means", "detail", "refused record", "letter"],
            [
                [stamp(x.at_ms), x.stage, x.reason, x.meaning, x.detail or "-", x.record or "-", x.place]
                for x in letters
            ],
        ),
        Table(
            "Copies, passed over",
            ["at", "what", "body", "record"],
            [[stamp(c.at_ms), c.what, _sameness(c.is_same), c.place] for c in copies],
        ),
        Table(
            "Void cuts (they count for nobody)",
            ["at", "step", "epoch", "in charge then", "record"],
            [[stamp(v.at_ms), str(v.step), str(v.epoch), f"epoch {v.since_epoch}", v.place] for v in void],
        ),
    ]


def _sameness(is_same: bool | None) -> str:
    return {True: "the same", False: "ANOTHER: a conflict", None: "-"}[is_same]


def indices(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices)) or "all"


def tallied(words: Iterable[str]) -> list[tuple[str, int]]:
    found: dict[str, int] = {}
    for word in words:
        found[word] = found.get(word, 0) + 1
    return sorted(found.items())


def filled(sections: Sequence[Section]) -> list[Section]:
    """Without those that have nothing to show, and without columns in which no row says anything."""
    shown = [_without_empty(each) if isinstance(each, Table) else each for each in sections]
    return [each for each in shown if each[-1]]


def _without_empty(table: Table) -> Table:
    kept = [at for at in range(len(table.head)) if any(row[at] != "-" for row in table.rows)]
    rows = [[row[at] for at in kept] for row in table.rows]
    return Table(table.title, [table.head[at] for at in kept], rows)


def ages_facts(ages: Ages, verdict: Verdict) -> list[tuple[str, str]]:
    flight, queue = _versions(ages.in_flight_versions), _versions(ages.in_queue_versions)
    age, limit = "" if verdict.staleness is None else f"{verdict.staleness}, ", number(verdict.limit)
    return [
        ("staleness", f"{age}limit {limit}, trainer at version {number(verdict.version)}"),
        ("in flight", f"{seconds(ages.in_flight_s)}, {flight} (dispatch to finish)"),
        ("… generating", seconds(ages.generating_s)),
        ("in queue", f"{seconds(ages.in_queue_s)}, {queue} (finish to outcome)"),
    ]


def _versions(count: int | None) -> str:
    return "versions not known" if count is None else counted(count, "version")


def stretches(*parts: tuple[str, int, int]) -> list[Stretch]:
    """Those whose both ends are known; clocks of two machines may put an end before its beginning."""
    return [Stretch(name, begin, max(begin, end)) for name, begin, end in parts if begin > 0 and end > 0]
