"""What a replay with the run's own settings found: equal, or where it begins to differ."""

from __future__ import annotations

from typing import Any

from engine.picture import Panel
from engine.replaying.machine import other_machine
from engine.replaying.shown import Machines, origin_dict, origin_words, panels
from engine.replaying.steps import Again, Origin, Record
from replay.compare import Difference, compared_metrics, differences
from replay.versus import Compared

_IN_PICTURE = ("loss", "grad_norm", "entropy", "mean_abs_log_ratio", "kl_k3", "clip_fraction")


class Comparison:
    """Fed with each step made again; keeps figures of each, and of samples nothing but their differences."""

    def __init__(self, record: Record, origin: Origin, held: str, machines: Machines) -> None:
        """`held`: digest of the weights that the steps begin with, as they are here."""
        self._record, self._origin, self._held, self._machines = record, origin, held, machines
        self._rows: list[dict[str, Any]] = []
        self._curves: list[Compared] = []
        self._found: list[Difference] = []
        self._metrics: set[str] = set()
        self._n_digests = self._n_measured = self._n_samples = self._n_skipped = 0
        if origin.published and origin.published != held:
            text = (
                f"the weights to begin with (version {origin.version}) were published with digest "
                f"{origin.published[:12]}…, here they have {held[:12]}…"
            )
            self._found.append(Difference(origin.step, "weights", origin.published, held, text))

    def add(self, step: Again) -> None:
        recorded, redone = step
        found = differences(recorded, redone)
        self._found += found
        names = compared_metrics(recorded, redone)
        self._metrics.update(names)
        self._n_measured += bool(names)
        self._n_digests += bool(recorded.digest)
        self._n_samples += 0 if recorded.sums is None else len(recorded.sums)
        self._n_skipped += bool(redone.skipped)
        self._rows.append(
            {
                "step": recorded.cut.step,
                "version": redone.version,
                "digest": redone.digest,
                "recorded_digest": recorded.digest or None,
                "metrics": redone.metrics,
                "recorded_metrics": recorded.metrics,
                "skipped": redone.skipped or None,
                "equal": not found,
                "differences": [each._asdict() for each in found],
            }
        )
        self._curves.append(Compared(recorded.cut.step, dict(recorded.metrics or {}), dict(redone.metrics)))

    @property
    def is_equal(self) -> bool:
        return not self._found

    def as_table(self) -> str:
        n = len(self._rows)
        lines = [
            f"run {self._record.topics.run}, steps {self._record.first} to {self._record.last}, made again from "
            f"{origin_words(self._origin)}",
            f"  weights  compared by digest after {self._n_digests} of {n} steps",
            f"  metrics  {len(self._metrics)} figures compared bit for bit in {self._n_measured} of {n} steps"
            + (f", and the sums of {self._n_samples} samples" if self._n_samples else ""),
        ]
        if self._n_skipped:
            lines.append(f"  skipped  {self._n_skipped} of {n} steps, as in the run")
        if self.is_equal:
            return "\n".join([*lines, "equal: the replay gives what was recorded"]) + "\n"
        return "\n".join([*lines, *self._difference_lines()]) + "\n"

    def _difference_lines(self) -> list[str]:
        first = self._found[0]
        same_step = [each for each in self._found[1:] if each.step == first.step]
        steps = {each.step for each in self._found}
        lines = [f"DIFFERS first at {first.sentence()}"]
        lines += [f"  also at step {first.step}: {each.text}" for each in same_step]
        lines.append(f"  {len(steps)} of {len(self._rows)} steps differ (replay.json has all)")
        other = other_machine(*self._machines)
        if other:
            lines.append(f"  the record was made with {other}: bits may differ for that reason alone")
        elif not self._machines.then and self._machines.here:
            lines.append(
                "  no checkpoint of the run is left to say with which torch and how many threads it was made"
            )
        return lines

    def as_dict(self) -> dict[str, Any]:
        return {
            "run": self._record.topics.run,
            "kind": "comparison",
            "first": self._record.first,
            "last": self._record.last,
            "origin": origin_dict(self._origin) | {"digest": self._held},
            "made_with": self._machines.then,
            "replayed_with": self._machines.here,
            "equal": self.is_equal,
            "first_difference": self._found[0]._asdict() if self._found else None,
            "steps": self._rows,
        }

    @property
    def title(self) -> str:
        return f"{self._record.topics.run}: as recorded, and made again"

    def panels(self) -> list[Panel]:
        return panels(self._curves, ("recorded", "made again"), _IN_PICTURE)
