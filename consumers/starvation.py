"""Prompts that never get trained, because their answers take longer than the staleness limit allows.

    dispatched → generated → too old at the cut → dropped as `stale`; the row comes again in the next pass → …

Each such drop looks harmless, and together they bend the data towards short answers without a word. So the feeder,
which knows the rows, follows the outcomes in the ledger: a row that was dropped as stale three times since it was last
trained is *starved*, and is named.

The length of a group is that of its longest sample, for which it waits. Classes are powers of two of response tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from consumers.dataset import row_of
from streams.events import BatchCut, Closing, CutGroup, Drop, GroupCompleted

TRIES = 3  # drops as stale since the row was last trained
_SHOWN = 3  # rows of one warning


def length_class(n_tokens: int) -> str:
    """The class of a sample by its number of response tokens.

    >>> [length_class(n) for n in (0, 1, 2, 3, 4, 5, 64, 65)]
    ['0', '1', '2', '3-4', '3-4', '5-8', '33-64', '65-128']
    """
    if n_tokens <= 2:
        return str(n_tokens)
    top = 1 << (n_tokens - 1).bit_length()
    return f"{top // 2 + 1}-{top}"


class Starvation:
    """Give it each completed group (`finished`) and then each closing record of the ledger (`closed`); ask for
    `warning` after that.

    Everything but the lengths of groups that were dropped comes from the ledger alone, so it outlives a restart.

    >>> starvation = Starvation()
    >>> starvation.starved, starvation.trained_shares(), starvation.warning(str)
    ({}, {}, '')
    """

    def __init__(self) -> None:
        self._lengths: dict[int, int] = {}  # seq of a group without an outcome → response tokens
        self._stale: dict[int, list[str]] = {}  # row → its groups dropped as stale since it was last trained
        self._length_of: dict[int, int] = {}  # those rows → response tokens, where known
        self._trained: Counter[str] = Counter()  # length class → groups
        self._unsaid: list[int] = []  # rows that starve since the last warning
        self._said = 0  # rows that were starved then

    def finished(self, event: GroupCompleted) -> None:
        """A group that has no outcome yet."""
        self._lengths[event.seq] = max((member.n_response_tokens for member in event.members), default=0)

    def closed(self, event: Closing) -> None:
        for drop in event.drops:
            self._dropped(drop)
        if isinstance(event, BatchCut):
            for group in event.groups:
                self._used(group)

    def _dropped(self, drop: Drop) -> None:
        """Other reasons than age say nothing about starving: they neither count nor make up for a drop."""
        length, row = self._lengths.pop(drop.seq, None), row_of(drop.group_id)
        if drop.reason != "stale" or row is None:
            return
        groups = self._stale.setdefault(row, [])
        groups.append(drop.group_id)
        if length is not None:
            self._length_of[row] = length
        if len(groups) == TRIES:
            self._unsaid.append(row)

    def _used(self, group: CutGroup) -> None:
        trainable = max((member.n_trainable_tokens for member in group.members), default=0)
        self._trained[length_class(self._lengths.pop(group.seq, trainable))] += 1
        row = row_of(group.group_id)
        if row is not None and self._stale.pop(row, None) is not None:
            self._length_of.pop(row, None)

    def forget(self, is_closed: Callable[[int], bool]) -> None:
        """Lengths of groups (by seq) whose outcome came before them."""
        self._lengths = {seq: length for seq, length in self._lengths.items() if not is_closed(seq)}

    @property
    def starved(self) -> dict[int, list[str]]:
        """Row → its groups that were dropped as stale since it was last trained."""
        return {row: groups for row, groups in self._stale.items() if len(groups) >= TRIES}

    def trained_shares(self) -> dict[str, float]:
        """Length class → share of all trained groups, shortest first."""
        total = sum(self._trained.values())
        classes = sorted(self._trained, key=lambda name: int(name.split("-")[0]))
        return {name: self._trained[name] / total for name in classes}

    def warning(self, prompt_of: Callable[[int], str]) -> str:
        """What to tell people now; "" for nothing. The first rows that starve, and again when they have doubled.

        `prompt_of` is asked for the text of a row.
        """
        starved = self.starved
        rows = [row for row in self._unsaid if row in starved]
        if not rows or len(starved) < 2 * self._said:
            return ""
        self._unsaid, self._said = [], len(starved)
        named = "; ".join(
            f"row {row} ({prompt_of(row)}), answers of {self._class_of(row)}, "
            f"groups {', '.join(starved[row][-TRIES:])}"
            for row in rows[:_SHOWN]
        )
        more = f"; and {len(starved) - len(rows[:_SHOWN])} more" if len(starved) > len(rows[:_SHOWN]) else ""
        shares = ", ".join(f"{name} tokens {share:.0%}" for name, share in self.trained_shares().items())
        return (
            f"prompts are starved, each dropped as stale {TRIES} times or more since it was last trained: "
            f"{named}{more}. What is trained leans to what is quick (groups by their longest answer: "
            f"{shares or 'none yet'}). Raise the limit (millstream staleness CONFIG --set K), let fewer groups be open "
            "(rollout.max_open_groups, down to trainer.rollout_batch_size), or shorten answers "
            "(rollout.rollout_max_response_len)"
        )

    def _class_of(self, row: int) -> str:
        length = self._length_of.get(row)
        return "unknown length" if length is None else f"{length_class(length)} tokens"
