"""Sheets of steps and versions: which facts a reader sees, in which order and under which words."""

from __future__ import annotations

from collections.abc import Sequence

from replay.lives.facts import StepLife, VersionLife
from replay.lives.phrases import number, seconds, size, stamp
from replay.lives.sheet import (
    GOOD,
    WAITING,
    Bar,
    Bars,
    Facts,
    Moments,
    Section,
    Sheet,
    Stretch,
    Stretches,
    Table,
)
from replay.lives.sheet_parts import (
    GAUGES,
    filled,
    tallied,
    tone,
    trouble,
)


# ---------------------------------------------------------------- step
def step_sheet(life: StepLife) -> Sheet:
    sections: list[Section] = [
        Facts("Step", _step_facts(life)),
        Bars(
            "Staleness of its samples",
            [
                Bar(str(each.staleness), each.n_samples, f"{each.n_samples} samples, {each.n_tokens} tokens")
                for each in life.buckets
            ],
        ),
        Table("By staleness", *_buckets(life)),
        Facts("Metrics", [(name, number(amount, 6)) for name, amount in sorted(life.values.items())]),
        Table("Groups", *_step_groups(life)),
        Table(
            "Dropped since the cut before",
            ["group", "reason", "staleness", "detail", "record"],
            [[d.group_id, d.reason, number(d.staleness), d.detail or "-", d.place] for d in life.drops],
        ),
        *trouble([], [], [], life.void_cuts),
        Moments("Timeline", life.timeline),
    ]
    explanations = [life.skipped_meaning] if life.skipped_meaning else []
    return Sheet(
        title=f"step {life.step}",
        run=life.run,
        tone=tone(life.outcome),
        verdict=life.sentence,
        explanations=explanations,
        notes=life.notes,
        sections=filled(sections),
    )


def _step_facts(life: StepLife) -> list[tuple[str, str]]:
    limit = f"{life.limit}, on_stale = {life.on_stale}" + (
        f", set by {life.limit_set_by}" if life.limit_set_by else ""
    )
    made = (
        "-"
        if life.version_made is None
        else f"{life.version_made}, digest {life.digest_made or 'not published'}"
    )
    reasons = tallied(each.reason for each in life.drops)
    return [
        ("cut", f"{stamp(life.cut_ms)} at {life.place}" + (", the last one" if life.is_last else "")),
        ("version", f"epoch {life.epoch}, started from {life.version}"),
        ("version made", made),
        ("limit on staleness", limit),
        ("samples", f"{life.n_trained_samples} trained of {life.n_samples}, {life.n_trained_tokens} tokens"),
        ("mean reward", number(life.reward_mean)),
        (
            "dropped since the cut before",
            ", ".join(f"{reason} {count}" for reason, count in reasons) or "none",
        ),
        ("copies passed over", str(life.duplicates)),
        ("seed", str(life.seed)),
        (
            "positions in groups",
            f"{life.positions}, ledger read to {life.ledger_read_to}, frontier {life.frontier}",
        ),
        ("checkpoint", life.checkpoint or "none of this step"),
    ]


def _buckets(life: StepLife) -> tuple[list[str], list[list[str]]]:
    """Each staleness and all together."""
    names = [name for name in GAUGES if any(name in each.gauges for each in life.buckets)]
    rows = [
        [
            str(each.staleness),
            str(each.n_samples),
            str(each.n_tokens),
            number(each.reward_mean),
            *[number(each.gauges.get(name)) for name in names],
        ]
        for each in life.buckets
    ]
    if rows:
        whole = [number(life.gauges.get(name)) for name in names]
        samples, tokens = str(life.n_trained_samples), str(life.n_trained_tokens)
        rows.append(["all", samples, tokens, number(life.reward_mean), *whole])
    return ["staleness", "samples", "tokens", "reward", *[GAUGES[name] for name in names]], rows


def _step_groups(life: StepLife) -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            each.group_id,
            f"{each.mean:.3g} ± {each.std:.3g}",
            " ".join(f"{reward:g}" for reward in each.rewards[:16])
            + (" …" if len(each.rewards) > 16 else ""),
            _span(each.staleness),
            str(each.n_trained_tokens),
            seconds(each.in_flight_s),
            seconds(each.in_queue_s),
            number(each.gauges.get("mean_abs_log_ratio")),
            number(each.gauges.get("clip_fraction")),
        ]
        for each in life.groups
    ]
    head = [
        "group",
        "reward",
        "rewards",
        "staleness",
        "tokens",
        "in flight",
        "in queue",
        "mean |log ratio|",
        "clipped",
    ]
    return head, rows


def _span(ages: Sequence[int]) -> str:
    known = [each for each in ages if each >= 0]
    if not known:
        return "-"
    return str(min(known)) if min(known) == max(known) else f"{min(known)}..{max(known)}"


# ---------------------------------------------------------------- version
def version_sheet(life: VersionLife) -> Sheet:
    name = f"version {life.version}" if life.epoch is None else f"version e{life.epoch}-v{life.version}"
    made = f"step {life.made_by_step}, cut {stamp(life.made_at_ms)}" if life.made_by_step is not None else "-"
    sections: list[Section] = [
        Facts(
            "Version",
            [
                ("digest", life.digest or "-"),
                ("made by", made),
                (
                    "trained on by",
                    f"step {life.trained_by_step}" if life.trained_by_step is not None else "no step yet",
                ),
                ("checkpoint", life.checkpoint or "none of this version"),
            ],
        ),
        Table("Publications", *_publications(life)),
        Table("What it generated", *_generated(life)),
        Table("Held by", *_holders(life)),
        Table("Begun, and not taken that way", *_attempts(life)),
        Stretches("Held by, in time", _held(life)),
        Moments("Timeline", life.timeline),
    ]
    return Sheet(
        title=name,
        run=life.run,
        tone=GOOD if life.epoch is not None else WAITING,
        verdict=life.sentence,
        explanations=[],
        notes=life.notes,
        sections=filled(sections),
    )


def _publications(life: VersionLife) -> tuple[list[str], list[list[str]]]:
    head = ["name", "at", "weights", "size", "digest", "base", "fork", "counts as", "where", "record"]
    rows = [
        [
            f"e{each.epoch}-v{each.version}" + (" (void)" if each.is_void else ""),
            stamp(each.at_ms),
            each.weights,
            size(each.nbytes),
            each.digest[:16],
            "-" if each.base_version is None else f"{each.base_version} {each.base_digest[:12]}",
            "-" if each.forked_at is None else f"after {each.forked_at}",
            "-" if each.counts_as is None else f"v{each.counts_as}",
            ", ".join(f"{way}: {uri}" for way, uri in each.uris.items()),
            each.place,
        ]
        for each in life.publications
    ]
    return head, rows


def _generated(life: VersionLife) -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            f"e{each.epoch}-v{life.version}",
            str(each.n_samples),
            str(each.n_pure),
            str(each.n_tokens),
            number(each.reward_mean),
            ", ".join(f"{word} {count}" for word, count in each.outcomes.items()),
        ]
        for each in life.generated
    ]
    return ["version", "samples", "of it alone", "tokens", "mean reward", "what became of them"], rows


def _holders(life: VersionLife) -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            each.engine,
            f"e{each.epoch}-v{life.version}",
            stamp(each.from_ms),
            stamp(each.until_ms) if each.until_ms is not None else "now",
            seconds((each.until_ms - each.from_ms) / 1000) if each.until_ms is not None else "-",
            each.ended_by or "-",
            each.transport or "-",
            f"{each.load_s:.3g} s, stood still {each.stall_s:.3g} s",
            "the published one" if each.is_published_digest else f"ANOTHER: {each.digest[:16]}",
        ]
        for each in life.holders
    ]
    return ["engine", "version", "from", "until", "for", "then", "by", "loading", "digest"], rows


def _attempts(life: VersionLife) -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            each.engine,
            f"e{each.epoch}-v{life.version}",
            each.transport or "-",
            stamp(each.from_ms),
            stamp(each.until_ms) if each.until_ms is not None else "-",
            each.outcome or "under way, or not heard of again",
        ]
        for each in life.attempts
    ]
    return ["engine", "version", "by", "from", "until", "what came of it"], rows


def _held(life: VersionLife) -> list[Stretch]:
    last = max((each.at_ms for each in life.timeline), default=0)
    return [
        Stretch(each.engine, each.from_ms, max(each.from_ms, each.until_ms or last)) for each in life.holders
    ]
