"""What a replay with changed settings found: A as recorded, B with the change, step by step and at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from engine.picture import Panel
from engine.replaying.rejudge import words
from engine.replaying.settings import Plan
from engine.replaying.shown import Machines, has, number, origin_dict, origin_words, panels
from engine.replaying.steps import Origin, Record, Versus
from engine.trainer.rerun import LEFT_OUT
from replay.topics import columns
from replay.versus import LEARNT, LEAST_ESS, MEASURES, averages, end_of, far_from

ROWS = 20  # of the table of steps
_IN_TABLE = {  # figure → head of its column
    "grad_norm": "GRAD",
    "mean_abs_log_ratio": "|LOG RATIO|",
    "kl_k3": "KL",
    "clip_fraction": "CLIPPED",
    LEARNT: "LEARNT",
}


class VersusReport:
    """The two sides of a replay with changed settings."""

    def __init__(
        self, record: Record, origin: Origin, plan: Plan, found: Versus, digest: str, machines: Machines
    ) -> None:
        """`digest`: of B's last weights."""
        self._record, self._origin, self._plan, self._found = record, origin, plan, found
        self._digest, self._machines = digest, machines
        self._far_from = far_from(found.steps)
        self._end = end_of(found.steps)

    def as_table(self) -> str:
        record, found = self._record, self._found
        changes = ", ".join(change.words() for change in self._plan.changes)
        lines = [
            f"run {record.topics.run}, steps {record.first} to {record.last}, from {origin_words(self._origin)}",
            f"A: as recorded{' (made again for its figures)' if found.a_was_made_again else ''}",
            f"B: the same data with {changes}",
        ]
        if found.rejudged is not None:
            lines += [f"   {line}" for line in words(found.rejudged, len(found.steps))]
        unable = {step: why for step, why in found.skipped.items() if why != LEFT_OUT}
        if unable:
            step, why = next(iter(unable.items()))
            lines.append(f"   B skipped {len(unable)} steps, the first is {step}: {why}")
        parts = ["\n".join(lines) + "\n", columns(self._step_rows())]
        if self._end:
            parts.append(columns(self._end_rows()))
        return "\n".join(parts) + self._caution()

    def _step_rows(self) -> list[Sequence[str]]:
        names = [name for name in _IN_TABLE if any(has(step, name) for step in self._found.steps)]
        rows: list[Sequence[str]] = [
            ("STEP", *(f"{_IN_TABLE[name]} {side}" for name in names for side in ("A", "B")))
        ]
        steps = self._found.steps
        every = max(1, math.ceil(len(steps) / ROWS))
        shown = [step for place, step in enumerate(steps, 1) if place % every == 0 or place == len(steps)]
        for step in shown:
            rows.append(
                (str(step.step), *(number(side[name]) for name in names for side in (step.a, step.b)))
            )
        return rows

    def _end_rows(self) -> list[Sequence[str]]:
        rows: list[Sequence[str]] = [
            (f"MEAN OF THE LAST {len(self._end)} STEPS THAT BOTH TOOK", "A", "B", "B - A")
        ]
        for name, values in averages(self._end).items():
            rows.append((MEASURES[name], *(number(value, 6) for value in values)))
        return rows

    def _caution(self) -> str:
        text = (
            "\nEach step is measured before its update, so LEARNT (advantage-weighted log-ratio) is how far a policy "
            "prefers the\nbetter of samples that it has not trained on. The reward that B would have had is not known: "
            "it never sampled.\n"
        )
        if self._far_from is not None:
            text += (
                f"From step {self._far_from} on, B's effective sample size falls below {LEAST_ESS:g}: it has left the "
                "policy that drew the data,\nand its figures from there on say little else. Compare fewer steps, from "
                "a checkpoint on (--from, --to).\n"
            )
        return text

    def as_dict(self) -> dict[str, Any]:
        found = self._found
        rule = None
        if found.rejudged is not None:
            rule = {
                "groups_left_out": found.rejudged.groups,
                "steps_without_groups": found.rejudged.emptied,
                "more_tokens_masked": found.rejudged.masked,
                "steps_with_a_looser_limit": found.rejudged.looser,
            }
        return {
            "run": self._record.topics.run,
            "kind": "a/b",
            "first": self._record.first,
            "last": self._record.last,
            "origin": origin_dict(self._origin),
            "changes": [change._asdict() for change in self._plan.changes],
            "a": "made again" if found.a_was_made_again else "recorded",
            "rule": rule,
            "skipped_by_b": found.skipped,
            "made_with": self._machines.then,
            "replayed_with": self._machines.here,
            "digest_of_b": self._digest,
            "b_far_from_the_data_from_step": self._far_from,
            "means_over_last_steps": len(self._end),
            "means": {
                name: {"a": a, "b": b, "difference": difference}
                for name, (a, b, difference) in averages(self._end).items()
            },
            "steps": [step._asdict() for step in found.steps],
        }

    @property
    def title(self) -> str:
        return f"{self._record.topics.run}: identical data, other settings"

    def panels(self) -> list[Panel]:
        changed = ", ".join(f"{change.key.partition('.')[2]} {change.now}" for change in self._plan.changes)
        marks = [] if self._far_from is None else [(self._far_from, "B leaves the data")]
        return panels(self._found.steps, ("A: recorded", f"B: {changed}"), MEASURES, marks)
