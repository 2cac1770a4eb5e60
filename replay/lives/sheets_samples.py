"""Sheets of samples and groups: which facts a reader sees, in which order and under which words."""

from __future__ import annotations

from collections.abc import Sequence

from replay.lives.facts import GroupLife, MemberRow, SampleLife
from replay.lives.phrases import ids, number, runs, signed, stamp, value
from replay.lives.sheet import (
    Facts,
    Moments,
    Section,
    Sheet,
    Stretch,
    Stretches,
    Table,
    Tokens,
)
from replay.lives.sheet_parts import (
    GAUGES,
    ages_facts,
    explanations,
    filled,
    indices,
    prompt_facts,
    stretches,
    tone,
    trouble,
)


# ---------------------------------------------------------------- sample
def sample_sheet(life: SampleLife) -> Sheet:
    sections: list[Section] = [
        Facts("Generation", _generation(life)),
        Stretches("Where its time went", _sample_stretches(life)),
        Facts("Prompt", prompt_facts(life.prompt, life.label, life.metadata)),
    ]
    if life.spans:
        prompt = life.prompt_text if life.prompt_text is not None else f"ids {ids(life.prompt_ids)}"
        sections.append(Tokens("Response, with its loss mask", prompt, life.spans))
    elif life.response:
        sections.append(Facts("Response", [("text", value(life.response))]))
    sections.append(Facts("Reward and advantage", _reward(life)))
    if life.ages is not None:
        sections.append(Facts("Staleness, in its two parts", ages_facts(life.ages, life.verdict)))
    if life.measured is not None:
        sections.append(Facts(f"Measured when it was trained ({life.measured.place})", _measured(life)))
    sections += trouble(life.failures, life.letters, life.copies, life.void_cuts)
    sections.append(Moments("Timeline", life.timeline))
    return Sheet(
        title=f"sample {life.uid}",
        run=life.run,
        tone=tone(life.verdict.outcome),
        verdict=life.verdict.sentence,
        explanations=explanations(life.verdict),
        notes=life.notes,
        sections=filled(sections),
    )


def _generation(life: SampleLife) -> list[tuple[str, str]]:
    task = life.dispatch
    pairs = [
        ("group", f"{life.group_id}, member {life.index}, attempt {life.attempt}"),
        ("partition", f"{number(life.partition)}, dispatch number {number(life.seq)}"),
        ("engine", life.engine or "-"),
        ("may start from", f"version {task.min_version} on" if task is not None else "-"),
        ("finished by", life.finish_reason or "-"),
        ("response tokens", f"{life.n_response_tokens}, trained {number(life.n_trained_tokens)}"),
        ("versions", runs(life.versions)),
        ("temperature", number(life.temperature)),
        ("payload", life.place or "-"),
    ]
    if life.other_attempts:
        pairs.append(("other attempts", ", ".join(life.other_attempts)))
    pairs += [(f"claim {name}", uri) for name, uri in life.claims.items()]
    return pairs


def _sample_stretches(life: SampleLife) -> list[Stretch]:
    dispatched = life.dispatch.at_ms if life.dispatch is not None else 0
    scored = life.reward.at_ms if life.reward is not None else 0
    joined = next((each.at_ms for each in life.timeline if each.what == "group completed"), 0)
    end = life.verdict.at_ms
    made = next((each.at_ms for each in life.timeline if each.what == "weights published"), 0)
    return stretches(
        ("waiting for an engine", dispatched, life.started_ms),
        ("generating", life.started_ms, life.finished_ms),
        ("being scored", life.finished_ms, scored),
        ("waiting for its group", scored, joined),
        ("in the trainer's queue", joined, end),
        ("its step", end, made if life.verdict.outcome == "trained" else 0),
    )


def _reward(life: SampleLife) -> list[tuple[str, str]]:
    if life.reward is None:
        return [("reward", "none: a failure is never a reward of 0")]
    pairs = [("reward", number(life.reward.value))]
    pairs += [(f"component {name}", number(amount)) for name, amount in life.reward.components.items()]
    pairs.append(("scored in", f"{life.reward.scoring_s:.3g} s, {life.reward.place}"))
    if life.advantage is not None:
        used = "" if life.verdict.outcome == "trained" else " (as it would have been; nothing trained on it)"
        pairs.append(("advantage", f"{signed(life.advantage)}{_formula(life)}{used}"))
    elif life.advantage_estimator == "":
        pairs.append(("advantage", "none: the run's loss looks at no reward"))
    elif life.advantage_estimator == "ppo":
        pairs.append(("advantage", "one of each token, by the critic; the log does not hold them"))
    return pairs


def _formula(life: SampleLife) -> str:
    if life.advantage == 0 and life.reward is not None and life.reward.value == life.group_mean:
        return ", the reward is the mean of its group"
    centred = f"reward − {number(life.group_mean)}"
    if life.advantage_estimator == "dr_grpo":
        return f" = {centred}"
    if life.advantage_estimator == "rloo":
        return " = reward − mean of the others"
    if life.advantage_estimator == "reinforce_plus_plus":
        return " = (reward − mean) / std, of all trained tokens of the step"
    if life.advantage_estimator == "reinforce_plus_plus_baseline":
        return f" = ({centred}) / its root mean square over all trained tokens of the step"
    return f" = ({centred}) / {number(life.group_std)}"


def _measured(life: SampleLife) -> list[tuple[str, str]]:
    assert life.measured is not None
    sums, gauges = life.measured.sums, life.measured.gauges
    n_tokens = sums.get("n_tokens", 0.0)
    mean = sums["sum_log_ratio"] / n_tokens if n_tokens else None
    pairs = [
        ("tokens", number(int(n_tokens))),
        ("mean log ratio", signed(mean)),
        ("clipped tokens", f"{int(sums.get('n_clipped', 0))} of {int(n_tokens)}"),
    ]
    return pairs + [(word, number(gauges[name])) for name, word in GAUGES.items() if name in gauges]


# ---------------------------------------------------------------- group
def group_sheet(life: GroupLife) -> Sheet:
    sections: list[Section] = [
        Facts("Group", _group_facts(life)),
        Facts("Prompt", prompt_facts(life.prompt, life.label, life.metadata)),
        Table("Members", *_members(life.members)),
        Stretches(
            "Generation of each member", [_generating(each) for each in life.members if each.started_ms]
        ),
    ]
    if life.ages is not None:
        sections.append(
            Facts(
                "Staleness, in its two parts (slowest member, oldest token)",
                ages_facts(life.ages, life.verdict),
            )
        )
    if life.dispatches:
        rows = [
            [stamp(each.at_ms), str(each.attempt), indices(each.indices), str(each.min_version), each.place]
            for each in life.dispatches
        ]
        sections.append(Table("Dispatches", ["at", "attempt", "members", "min version", "record"], rows))
    sections += trouble(life.failures, life.letters, life.copies, life.void_cuts)
    sections.append(Moments("Timeline", life.timeline))
    return Sheet(
        title=f"group {life.group_id}",
        run=life.run,
        tone=tone(life.verdict.outcome),
        verdict=life.verdict.sentence,
        explanations=explanations(life.verdict),
        notes=life.notes,
        sections=filled(sections),
    )


def _group_facts(life: GroupLife) -> list[tuple[str, str]]:
    pairs = [
        ("partition", f"{number(life.partition)}, dispatch number {number(life.seq)}"),
        ("dataset", f"epoch {number(life.data_epoch)}, row {number(life.row)}"),
        (
            "samples",
            f"{len([each for each in life.members if each.reward is not None])} scored of {number(life.n_samples)}",
        ),
    ]
    if life.reward_mean is not None:
        flat = ", flat: every advantage is 0" if life.is_flat else ""
        pairs.append(("rewards", f"mean {number(life.reward_mean)}, std {number(life.reward_std)}{flat}"))
    return pairs


def _members(members: Sequence[MemberRow]) -> tuple[list[str], list[list[str]]]:
    head = [
        "sample",
        "state",
        "reward",
        "advantage",
        "tokens",
        "trained",
        "age",
        "finish",
        "versions",
        "engine",
    ]
    components = sorted({name for each in members for name in each.components})
    rows = [
        [
            each.uid,
            each.state,
            number(each.reward),
            signed(each.advantage),
            number(each.n_response_tokens),
            number(each.n_trained_tokens),
            number(each.staleness),
            each.finish_reason or "-",
            runs(each.versions),
            each.engine or "-",
            *[number(each.components.get(name)) for name in components],
        ]
        for each in members
    ]
    return [*head, *components], rows


def _generating(member: MemberRow) -> Stretch:
    return Stretch(member.uid, member.started_ms, max(member.started_ms, member.finished_ms))
