"""Remembering how far each group has come, for lag display: committed offsets of its Kafka group, now and then.

Never the truth about what was done (DESIGN §4.1), so nothing here is waited for and nothing that fails is an error.
A group with members takes commits from its members only: hints then go through this process's membership in it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from kafka.structs import OffsetAndMetadata
from kafka.structs import TopicPartition as Place

from streams.errors import LogUnavailable
from streams.kafka.admin import Admin
from streams.kafka.commits import Committed
from streams.kafka.membership import KafkaMembership
from streams.log import TopicPartition

logger = logging.getLogger(__name__)

_EVERY_S = 0.5
_COMMIT_S = 2.0


class HintWriter:
    """Groups and topics by their names on the broker. `remember` never waits."""

    def __init__(self, admin: Admin, member_of: Callable[[str], KafkaMembership | None]) -> None:
        self._admin = admin
        self._member_of = member_of
        self._changed = threading.Condition()
        self._writing = threading.Lock()  # one at a time: an older position must not arrive after a newer one
        self._pending: dict[str, dict[Place, int]] = {}  # to be written
        self._unwritten: dict[str, dict[Place, int]] = {}  # that, and what is on its way
        self._in_flight = 0
        self._closing = False
        self._thread: threading.Thread | None = None

    def remember(self, group: str, positions: Mapping[Place, int]) -> None:
        with self._changed:
            if self._closing:
                return
            self._pending.setdefault(group, {}).update(positions)
            self._unwritten.setdefault(group, {}).update(positions)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kafka-hints", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def unwritten(self) -> dict[str, dict[Place, int]]:
        with self._changed:
            return {group: dict(positions) for group, positions in self._unwritten.items()}

    def hand_over(self, membership: KafkaMembership) -> None:
        """Give a membership that is about to leave what only a member can commit."""
        with self._changed:
            positions = self._pending.pop(membership.group, None)
            self._in_flight += bool(positions)
        if positions and not membership.commit(
            _offsets(positions), self._reporting(membership.group, positions)
        ):
            self._written(membership.group, positions, None)

    def close(self, timeout_s: float) -> None:
        """Write what is left, within that time; memberships are to be closed thereafter."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._write(deadline)
        with self._changed:
            self._changed.wait_for(lambda: not self._in_flight, max(deadline - time.monotonic(), 0))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._pending)
                if self._closing:
                    return
            self._write(time.monotonic() + _COMMIT_S)
            with self._changed:
                self._changed.wait_for(lambda: self._closing, _EVERY_S)

    def _write(self, deadline: float) -> None:
        if not self._writing.acquire(timeout=max(deadline - time.monotonic(), 0)):
            return
        try:
            self._write_pending(deadline)
        finally:
            self._writing.release()

    def _write_pending(self, deadline: float) -> None:
        with self._changed:
            pending, self._pending = self._pending, {}
            self._in_flight += len(pending)
        for group, positions in pending.items():
            membership = self._member_of(group)
            if membership is not None and membership.commit(
                _offsets(positions), self._reporting(group, positions)
            ):
                continue
            try:
                self._admin.commit(group, _offsets(positions), max(deadline - time.monotonic(), 0.01))
            except LogUnavailable as error:
                self._written(group, positions, error, again=True)
            except Exception as error:  # a LogError when it has members, elsewhere
                self._written(group, positions, error, again=False)
            else:
                self._written(group, positions, None)

    def _reporting(self, group: str, positions: dict[Place, int]) -> Committed:
        # What a member's commit meets is most likely its group's rebalancing.
        return lambda _, error: self._written(group, positions, error, again=True)

    def _written(
        self, group: str, positions: dict[Place, int], error: Exception | None, again: bool = False
    ) -> None:
        with self._changed:
            self._in_flight -= 1
            if error is not None:
                logger.debug("hints of the group %r were not written: %r", group, error)
            if error is not None and again and not self._closing:
                newest = self._unwritten.get(group, {})
                still = {place: at for place, at in positions.items() if newest.get(place) == at}
                if still:
                    self._pending.setdefault(group, {}).update(still)
            else:
                self._done(group, positions)
            self._changed.notify_all()

    def _done(self, group: str, positions: dict[Place, int]) -> None:
        """Written, or given up; what was remembered since is not."""
        left = {p: at for p, at in self._unwritten.get(group, {}).items() if positions.get(p) != at}
        if left:
            self._unwritten[group] = left
        else:
            self._unwritten.pop(group, None)


def _offsets(positions: Mapping[Place, int]) -> dict[Place, OffsetAndMetadata]:
    return {place: OffsetAndMetadata(position, "", -1) for place, position in positions.items()}


def places(positions: Mapping[TopicPartition, int], full: Callable[[str], str]) -> dict[Place, int]:
    """The same positions under the broker's names."""
    return {Place(full(place.topic), place.partition): position for place, position in positions.items()}
