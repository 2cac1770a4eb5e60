"""The appends of one partition on their way to Kafka. No lock and no thread: lanes.py has them.

add ──► waiting ── take, hand ──► handed ── leave ──►
           ▲                        │
           └─────── put_back ───────┘
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from streams.kafka.link import Append
from streams.log import TopicPartition


class Lane:
    """In both places the appends are in the order in which they came."""

    def __init__(self, place: TopicPartition) -> None:
        self.place = place
        self.waiting: deque[Append] = deque()
        self.waiting_bytes = 0
        self.handed: dict[Append, None] = {}  # in order
        self.handed_bytes = 0
        self.kind = 0  # of what is handed
        self.alone = 0  # appends that must go without others
        self.refused_together = False  # what is handed is failing, and it was several appends

    def add(self, append: Append) -> None:
        self.waiting.append(append)
        self.waiting_bytes += append.size

    def take(self) -> Append:
        """The next one that waits."""
        append = self.waiting.popleft()
        self.waiting_bytes -= append.size
        return append

    def hand(self, append: Append) -> None:
        self.handed[append] = None
        self.handed_bytes += append.size

    def leave(self, append: Append) -> None:
        del self.handed[append]
        self.handed_bytes -= append.size

    def put_back(self, append: Append) -> None:
        """The client did not take it after all."""
        self.leave(append)
        self.waiting.appendleft(append)
        self.waiting_bytes += append.size

    def forget_handed(self) -> None:
        self.handed.clear()
        self.handed_bytes = 0
        self.refused_together = False

    def keep_waiting(self, appends: Iterable[Append] = ()) -> None:
        """Only these wait from now on."""
        self.waiting = deque(appends)
        self.waiting_bytes = sum(append.size for append in self.waiting)


class Overview(NamedTuple):
    """Of all lanes at one moment. Who was told how his append ended counts no more, unless as `wedged`."""

    expired: list[tuple[Append, bool]]  # (append, whether the client has it): its deadline has passed
    next_deadline: float  # of the others; infinite without any
    oldest: Append | None  # of the others
    wedged: Append | None  # the client has it, and should long have given it up


def overview(lanes: Iterable[Lane], now: float, grace_s: float) -> Overview:
    """`grace_s`: how long after its deadline a client may still have an append."""
    expired: list[tuple[Append, bool]] = []
    open_: list[Append] = []
    wedged = None
    for lane in lanes:
        for append in (*lane.waiting, *lane.handed):
            is_handed = append in lane.handed
            if append.told:
                if is_handed and append.deadline + grace_s <= now:
                    wedged = append
            elif append.deadline <= now:
                expired.append((append, is_handed))
            else:
                open_.append(append)
    return Overview(
        expired,
        min((append.deadline for append in open_), default=float("inf")),
        min(open_, key=lambda append: append.since, default=None),
        wedged,
    )
