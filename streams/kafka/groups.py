"""Shares and hints of groups: one process's view of them, for streams/kafka/log.py.

    join ──► KafkaMembership (a thread and a consumer each; streams/kafka/membership.py)
    commit_hint ──► HintWriter (one thread; streams/kafka/hints.py) ──► a member of the group, or none if it has none

Memberships and hints of a group share one Kafka group, `settings.full(group)`, so that Kafka's own tools show members
and lag together.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from streams.checks import check_name
from streams.errors import LogClosed
from streams.kafka.admin import Admin
from streams.kafka.hints import HintWriter, places
from streams.kafka.holder import gone, new_holder
from streams.kafka.membership import KafkaMembership
from streams.kafka.options import python_consumer_options
from streams.kafka.settings import KafkaSettings
from streams.log import TopicPartition, share

_FLUSH_S = 1.0  # for hints, when closing; memberships leave meanwhile


class Groups:
    """Lifecycle: join, commit_hint, hints, groups → close, which gives all shares back."""

    def __init__(self, settings: KafkaSettings, admin: Admin) -> None:
        self._settings = settings
        self._admin = admin
        self._lock = threading.Lock()
        self._memberships: list[KafkaMembership] = []
        self._closed = False
        self._hints = HintWriter(admin, self._member_of)

    def join(
        self, group: str, topic: str, replica: int, replicas: int, member: str = "", elastic: bool = False
    ) -> KafkaMembership:
        """Take a share; returns once its partitions are this member's. See EventLog.join.

        Raises ShareHeld naming process, machine and member; ValueError, UnknownTopic, LogUnavailable, LogError. A
        holder on this machine that is dead is replaced at once; one on another machine, which cannot be told from a
        live one, is waited for until its session would be over.
        """
        check_name("group", group)
        partitions = self._admin.partitions(topic)
        share(partitions, replica, replicas)
        session_s = self._settings.session_timeout.total_seconds()
        me = new_holder(
            self._settings.full(topic),
            partitions,
            replica,
            replicas,
            elastic=elastic,
            member=member,
            session_ms=int(session_s * 1000),
        )
        with self._lock:
            if self._closed:
                gone(me)
                raise LogClosed(f"the log {self._settings.servers[0]} was closed")
            membership = KafkaMembership(
                self._settings,
                python_consumer_options(self._settings),
                self._admin,
                self._settings.full(group),
                me,
                farewell=self._hints.hand_over,
            )
            self._memberships = [*(each for each in self._memberships if each.is_open), membership]
        try:
            # One session for a holder elsewhere to be gone, one for a dead member that the others wait for.
            membership.settle(self._settings.timeout.total_seconds() + 2 * session_s + 2)
        except BaseException:
            self._forget(membership)
            membership.close()
            raise
        return membership

    def commit_hint(self, group: str, positions: Mapping[TopicPartition, int]) -> None:
        """Never waits, except for the number of a topic's partitions when it is first heard of."""
        check_name("group", group)
        for topic, _ in positions:
            self._admin.partitions(topic)
        self._hints.remember(self._settings.full(group), places(positions, self._settings.full))

    def hints(self, group: str) -> dict[TopicPartition, int]:
        """What the broker remembers, and what this process has not written yet."""
        full = self._settings.full(group)
        unwritten = self._hints.unwritten().get(
            full, {}
        )  # before asking: what is written meanwhile counts twice
        found = self._admin.committed([full]).get(full, {})
        for place, position in unwritten.items():
            topic = self._settings.bare(place.topic)
            if topic is not None:
                found[TopicPartition(topic, place.partition)] = position
        return found

    def groups(self, beginning: str = "") -> list[str]:
        """Groups with hints whose names begin so."""
        unwritten = {
            group for group in self._hints.unwritten() if group.startswith(self._settings.full(beginning))
        }
        committed = self._admin.committed(self._admin.groups(beginning))
        full = {group for group, offsets in committed.items() if offsets} | unwritten
        return sorted(bare for group in full if (bare := self._settings.bare(group)) is not None)

    def close(self) -> None:
        """Write hints and give all shares back; about two seconds at most. Twice is harmless."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            memberships, self._memberships = self._memberships, []
        for membership in memberships:
            membership.begin_to_leave()  # each takes its group's hints along
        self._hints.close(_FLUSH_S)
        for membership in memberships:
            membership.close()

    def _member_of(self, group: str) -> KafkaMembership | None:
        with self._lock:
            return next((m for m in self._memberships if m.group == group and m.is_open), None)

    def _forget(self, membership: KafkaMembership) -> None:
        with self._lock:
            if membership in self._memberships:
                self._memberships.remove(membership)
