"""Who may join: the look around that every member takes before it takes a share.

Kafka lets a newcomer with the same static id take a member's place without a word, live or not. So nobody joins here
who has not seen that the share's last holder is gone:

    holder died on this machine                     replaced at once, without a rebalance
    holder lives on this machine                    ShareHeld at once
    holder on another machine, which nobody sees    waited for until its session would be over, then ShareHeld
    holders that split the topic otherwise          as above; dead ones of this machine are made to leave
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from streams.errors import LogUnavailable, ShareHeld
from streams.kafka.admin import Admin
from streams.kafka.assignor import claim_of
from streams.kafka.holder import Holder
from streams.kafka.settings import KafkaSettings

_LOOK_S = 0.1
_YIELD_S = 2.0  # for another that took our place without having seen us to withdraw


class Entry:
    """For one member. `leaving` ends its waits."""

    def __init__(
        self, settings: KafkaSettings, admin: Admin, group: str, me: Holder, leaving: threading.Event
    ) -> None:
        self._settings = settings
        self._admin = admin
        self._group = group
        self._me = me
        self._leaving = leaving

    def wait(self, *, was_fenced: bool, say: Callable[[str], None]) -> bool:
        """Wait until the share is free; False when leaving. `say` is told for what it waits.

        Raises ShareHeld naming the holder, LogUnavailable.
        """
        limits: dict[Holder | None, float] = {}
        while not self._leaving.is_set():
            other, allowed_s = self._in_the_way(was_fenced)
            if allowed_s is None:
                return True
            if time.monotonic() >= limits.setdefault(other, time.monotonic() + allowed_s):
                if other is not None:
                    raise self.held_by(other)
                raise LogUnavailable(
                    f"the group {self._settings.bare(self._group)!r} did not settle within {allowed_s:.0f} s"
                )
            say(f"a sign that {other.describe()}" if other else "the group to settle")
            self._leaving.wait(_LOOK_S)
        return False

    def held_by(self, other: Holder) -> ShareHeld:
        group, topic = self._settings.bare(self._group), self._settings.bare(self._me.topic)
        return ShareHeld(
            f"group {group!r} on {topic!r}: share {self._me.share} was asked for, but {other.describe()}"
        )

    def _in_the_way(self, was_fenced: bool) -> tuple[Holder | None, float | None]:
        """(who holds the share or splits the topic otherwise, seconds to wait for its end); (…, None): nobody."""
        is_rebalancing = False
        dead: list[tuple[str, str | None]] = []
        for member in self._admin.group(self._group, stop=self._leaving.is_set):
            claim = claim_of(member.user_data)
            if claim is None:  # the broker does not show it while the group is rebalancing
                is_rebalancing = is_rebalancing or member.instance == self._me.instance
                continue
            other = claim.holder
            if not self._is_against_us(other):
                continue
            if not other.is_dead:
                if other.is_of_this_machine:
                    return other, _YIELD_S if was_fenced else 0.0
                return other, other.session_ms / 1000 + 1
            if other.replicas != self._me.replicas:
                dead.append((member.member_id, member.instance))
        if dead:
            self._admin.remove_members(self._group, dead, stop=self._leaving.is_set)
        if is_rebalancing:
            allowed = self._settings.session_timeout + self._settings.timeout
            return None, allowed.total_seconds()
        return None, None

    def _is_against_us(self, other: Holder) -> bool:
        if other.topic != self._me.topic or other.nonce == self._me.nonce:
            return False
        return other.replica == self._me.replica or other.replicas != self._me.replicas
