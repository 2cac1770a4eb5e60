"""Exact answer: the whole response equals the label, or one of a list of labels."""

from __future__ import annotations

from typing import Literal

from consumers.rewards.types import RewardInput, option

Whitespace = Literal["strip", "collapse", "remove", "keep"]


def reward(sample: RewardInput, *, whitespace: Whitespace = "strip", ignore_case: bool = False) -> float:
    """1.0 iff the response equals a label.

    `whitespace`: "strip" ignores it at both ends, "collapse" also makes each run inside one blank, "remove"
    takes all of it out, "keep" compares as it is. Raises ValueError without a label.
    """
    whitespace = option(sample, "whitespace", whitespace)
    ignore_case = option(sample, "ignore_case", ignore_case)
    if sample.label is None or sample.label == []:
        raise ValueError(f"{sample.uid}: the exact reward needs a label; this task has none")
    labels = sample.label if isinstance(sample.label, (list, tuple)) else [sample.label]
    answer = _plain(sample.response, whitespace, ignore_case)
    return float(any(answer == _plain(str(label), whitespace, ignore_case) for label in labels))


def _plain(text: str, whitespace: str, ignore_case: bool) -> str:
    if whitespace == "strip":
        text = text.strip()
    elif whitespace == "collapse":
        text = " ".join(text.split())
    elif whitespace == "remove":
        text = "".join(text.split())
    elif whitespace != "keep":
        raise ValueError(f"whitespace = {whitespace!r}: expected strip, collapse, remove or keep")
    return text.casefold() if ignore_case else text
