"""One share of one topic, held through Kafka's group protocol by a thread of its own.

    thread: is the share free? ──► join (static member, our assignor) ──► poll, while the stage is alive
                 ▲                                                         │
                 └────── fenced · refused · stuck stage asks again ◄───────┘
    client's own thread: heartbeats, whatever the stage is doing ──► `_heard`, `_assigned`, `lose`
    stage's thread: partitions(), generation

Nothing is ever fetched by this consumer: its partitions are paused, reading is the log's own business. What makes a
member alive is therefore its process, not the pace of the stage's work; only a stage that has not asked for its
partitions for `max_silence` is taken for stuck, and leaves.

The guarantee is in `partitions()`: a partition is reported only while the broker cannot have given it to another,
which is for one session timeout from the moment at which the last answered heartbeat was *sent*, by our own clock;
and after joining, not before a heartbeat has shown that nobody took our place at the same moment.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from kafka import (
    AsyncConsumerRebalanceListener,  # pyright: ignore[reportAttributeAccessIssue]
    KafkaConsumer,
)
from kafka.errors import FencedInstanceIdError, KafkaError
from kafka.structs import MemberState  # pyright: ignore[reportAttributeAccessIssue]
from kafka.structs import TopicPartition as Place

from streams.errors import LogError, LogUnavailable
from streams.kafka.admin import Admin
from streams.kafka.assignor import Claim, Given, ShareAssignor
from streams.kafka.commits import Commits, Committed, Offsets
from streams.kafka.connect import Network, alive_clock, connect, explained
from streams.kafka.entry import Entry
from streams.kafka.holder import Holder, gone
from streams.kafka.settings import KafkaSettings
from streams.log import Membership

logger = logging.getLogger(__name__)

_IDLE_POLL_S = 0.5  # while nothing is going on; every word of the broker that matters wakes the thread
_JOIN_POLL_MS = 100
_PROOF_S = 0.2  # less than the time between two heartbeats
_SAY_AGAIN_S = 60.0
_HAND_OVER_S = 0.5  # most that a revoked partition waits for the stage to notice before others get it
_LEAVE_S = 0.4
_ILLEGAL_GENERATION, _UNKNOWN_MEMBER, _REBALANCING, _FENCED = 22, 25, 27, 82  # Kafka's error codes

_Consumer = Any  # a KafkaConsumer; the stubs that pyright brings are of an older one


class KafkaMembership(Membership):
    """Lifecycle: constructed (its thread starts) → `settle` → partitions(), generation → close."""

    def __init__(
        self,
        settings: KafkaSettings,
        options: Mapping[str, Any],
        admin: Admin,
        group: str,
        me: Holder,
        farewell: Callable[[KafkaMembership], None] = lambda membership: None,
    ) -> None:
        """`options`: KafkaConsumer's, for brokers and security. `group`: its name on the broker. `farewell`: called
        when it is closed, while it can still commit."""
        self.group = group
        self.me = me
        self.joins = 0  # assignments received: how often the group was rebalanced, this member being in it
        self._settings = settings
        self._options = options
        self._admin = admin
        self._farewell = farewell
        self._what = f"group {settings.bare(group)!r} on {settings.bare(me.topic)!r}, share {me.share}"
        self._session_s = settings.session_timeout.total_seconds()
        self._leaving = threading.Event()
        self._entry = Entry(settings, admin, group, me, self._leaving)
        self._commits = Commits()
        self._wake = threading.Event()
        self._changed = threading.Condition()  # guards all below
        self._held: frozenset[int] = frozenset()  # ours, as far as the broker has told
        self._dropped: frozenset[int] = frozenset()  # lost since the last answer; may be back by now
        self._alive_until = 0.0  # alive_clock
        self._given: Given | None = None
        self._group_generation = -1
        self._confirmed = False  # what was given is meant for us
        self._came_at: float | None = None  # alive_clock of the first gift since it joined
        self._proved = False  # and nobody has taken our place since
        self._again = False  # leave, and join anew
        self._fenced = False
        self._answer: frozenset[int] = frozenset()
        self._generation = 0
        self._last_asked = time.monotonic()
        self._failure: Exception | None = None
        self._has_settled = False
        self._logged = ("", 0.0)  # what, and when to say it again
        self._waits_for = f"{', '.join(settings.servers)} to answer"
        self._thread = threading.Thread(target=self._run, name=f"kafka-member-{me.instance}", daemon=True)
        self._thread.start()

    # -- the stage's side

    def partitions(self) -> frozenset[int]:
        """Asking also says that the stage is alive.

        A partition that was lost and came back in the meantime is missing from one answer, so that its owner forgets
        what it knew of it.
        """
        with self._changed:
            answer = frozenset() if not self._is_ours() else self._held - self._dropped
            self._dropped = frozenset()
            self._last_asked = time.monotonic()
            self._changed.notify_all()
            if answer != self._answer:
                self._answer = answer
                self._generation += 1
            return answer

    @property
    def generation(self) -> int:
        """Of the last answer of `partitions()`."""
        return self._generation

    def settle(self, timeout_s: float) -> None:
        """Wait until the share is ours as it will stay. Raises ShareHeld, LogError and LogUnavailable; then close."""
        started = time.monotonic()
        warned = False
        with self._changed:
            while not (self._given and self._given.final and self._is_ours()):
                if self._failure is not None:
                    raise self._failure
                waited = time.monotonic() - started
                if self._settings.interrupted():
                    raise LogUnavailable(f"{self._what}: interrupted while waiting for {self._waits_for}")
                if waited >= timeout_s:
                    raise LogUnavailable(
                        f"{self._what}: not within {timeout_s:.0f} s; was waiting for {self._waits_for}"
                    )
                if waited > 10 and not warned:
                    warned = True
                    logger.warning("%s: waiting for %s", self._what, self._waits_for)
                self._changed.wait(min(timeout_s - waited, 0.1))
            self._has_settled = True

    def commit(self, offsets: Offsets, committed: Committed) -> bool:
        """Commit as this member, without waiting; `committed` is called later, from the thread. False: it is gone."""
        with self._changed:
            if self._leaving.is_set():
                return False
            self._commits.add(offsets, committed)
        self._wake.set()
        return True

    def close(self) -> None:
        """Give the share back at once. Takes about a second at most, also without a broker; twice is harmless."""
        self.begin_to_leave()
        self._thread.join(2 * _LEAVE_S + 0.5)

    def begin_to_leave(self) -> None:
        if not self._leaving.is_set():
            self._farewell(self)
        with self._changed:
            self._leaving.set()
            self._changed.notify_all()
        self._wake.set()

    @property
    def is_open(self) -> bool:
        return not self._leaving.is_set()

    def _is_ours(self) -> bool:
        is_meant = self._confirmed and self._proved and not self._again
        return is_meant and alive_clock() < self._alive_until

    # -- the thread's side

    def _run(self) -> None:
        pause_s = 0.1
        try:
            while not self._leaving.is_set():
                try:
                    self._be_member()
                    pause_s = 0.1
                except Exception as error:
                    if not self._may_pass(error):
                        return
                    pause_s = min(2 * pause_s, 2.0)
                    self._leaving.wait(pause_s)
        finally:
            self.lose("it was closed")
            gone(self.me)

    def _may_pass(self, error: Exception) -> bool:
        """False ends the thread: nobody relies on the share yet, so `settle` reports what is wrong."""
        if self._leaving.is_set():
            return True
        if self._has_settled:
            now = time.monotonic()
            if str(error) != self._logged[0] or now >= self._logged[1]:  # not at each new attempt
                self._logged = (str(error), now + _SAY_AGAIN_S)
                expected = isinstance(error, (LogError, KafkaError))
                logger.warning("%s: %s; trying again", self._what, error, exc_info=not expected)
            return True
        if isinstance(error, KafkaError) and error.retriable:
            return True
        with self._changed:
            self._failure = (
                error if isinstance(error, LogError) else explained(error, self._what, self._settings)
            )
            self._changed.notify_all()
        return False

    # - as a member

    def _be_member(self) -> None:
        """Join, and stay until closing, or until it has to be done anew."""
        self._waits_for = f"{', '.join(self._settings.servers)} to answer"
        consumer, network = connect(KafkaConsumer, self._consumer_options(), heard=self._heard)
        try:
            consumer.subscribe([self.me.topic], listener=_Listener(consumer, self, network))
            # A leader that learns of the topic only after it has divided it would have all members join once more.
            deadline = time.monotonic() + 1
            while network.cluster.partitions_for_topic(self.me.topic) is None and time.monotonic() < deadline:
                self._leaving.wait(0.005)
            if not self._entry.wait(was_fenced=self._fenced, say=self._say):
                return
            with self._changed:
                self._fenced = self._again = False
            self._waits_for = "the group's other members to join again"
            self._poll(consumer)
        except FencedInstanceIdError:
            self._fence()
        finally:
            self.lose("it left")
            self._leave(consumer)
            consumer.close(autocommit=False, timeout_ms=int(_LEAVE_S * 1000))
        if not self._leaving.is_set() and not self._fenced and not self._again:
            self._wait_until_asked()

    def _say(self, waits_for: str) -> None:
        self._waits_for = waits_for

    def _poll(self, consumer: _Consumer) -> None:
        is_wanted = True
        while not (self._leaving.is_set() or self._fenced or self._again):
            # While joining, without a pause between two polls: kafka-python forgets an answer that comes meanwhile.
            consumer.poll(timeout_ms=_JOIN_POLL_MS if is_wanted or self._is_busy(consumer) else 0)
            self._look_at_given()
            self._commits.send(consumer)
            if self._is_stuck():
                return
            is_wanted = self._is_busy(consumer) or self._wake.wait(_IDLE_POLL_S)
            self._wake.clear()

    def _is_busy(self, consumer: _Consumer) -> bool:
        owes = self._given is not None and self._given.owed
        return (
            bool(owes or self._commits.are_unanswered)
            or consumer.group_metadata().state != MemberState.STABLE
        )

    def _look_at_given(self) -> None:
        """Raises ShareHeld when the group's leader, or the one whom we replaced, is against it."""
        given = self._given
        if given is None:
            return
        if given.refused_by is not None:
            raise self._entry.held_by(given.refused_by)
        if not self._confirmed:
            # The broker replaced a static member by us without a rebalance. That is what we want after a crash;
            # but if that one joined between our look and our joining, it was here first: leaving, we let it back.
            if not given.to.is_dead:
                raise self._entry.held_by(given.to)
            with self._changed:
                self._confirmed = self._given is given
                self._changed.notify_all()

    def _is_stuck(self) -> bool:
        silent_s = time.monotonic() - self._last_asked
        if not self._has_settled or silent_s < self._settings.max_silence.total_seconds():
            return False
        logger.warning(
            "%s: the stage has not asked for its partitions for %.0f s, so it is taken for stuck and they go to "
            "others; raise log.kafka.max_silence_s if its work takes so long",
            self._what,
            silent_s,
        )
        return True

    def _wait_until_asked(self) -> None:
        left = self._last_asked
        with self._changed:
            self._changed.wait_for(lambda: self._leaving.is_set() or self._last_asked > left)
        if not self._leaving.is_set():
            logger.warning("%s: the stage asks for its partitions again", self._what)

    def _leave(self, consumer: _Consumer) -> None:
        """Commit what is still to be committed, then give the share back now rather than at the session's end."""
        self._commits.finish(consumer, _LEAVE_S)
        member_id = consumer.group_metadata().member_id
        if not member_id or self._fenced:  # without its own id, it would remove whoever holds the share now
            return
        try:
            self._admin.remove_members(
                self.group, [(member_id, self.me.instance)], timeout_s=_LEAVE_S, stop=lambda: False
            )
        except LogError as error:
            logger.info("%s: left, and others learn of it when its session is over: %s", self._what, error)

    def _consumer_options(self) -> dict[str, Any]:
        session_ms = int(self._session_s * 1000)
        return {
            **self._options,
            "group_id": self.group,
            "group_instance_id": self.me.instance,
            "partition_assignment_strategy": [ShareAssignor(self._claim, self._assigned)],
            "session_timeout_ms": session_ms,
            # Others see who joins when they next beat.
            "heartbeat_interval_ms": min(session_ms // 4, 300),
            # Also the time that the broker lets a member take to join again. Longer than a session: one that has not
            # joined by then is gone, and no leader divides by what a silent member said of itself long ago.
            "max_poll_interval_ms": 2 * session_ms + 10_000,
            "request_timeout_ms": max(
                min(int(self._settings.request_timeout.total_seconds() * 1000), session_ms), 1000
            ),
            "bootstrap_timeout_ms": 2000,
            "enable_auto_commit": False,
            "auto_offset_reset": "none",
            "fetch_max_wait_ms": 100,
            "metrics_enabled": False,
        }

    # -- the client's side: none of these waits

    def _claim(self) -> Claim:
        with self._changed:
            return Claim(self.me, tuple(sorted(self._held)), self._group_generation)

    def _assigned(self, partitions: frozenset[int], given: Given, generation: int) -> None:
        with self._changed:
            owes_of_another = bool(given.owed) and not self._held.intersection(given.owed)
            # A dead member's debt: nobody but us can start the round in which others get what it had.
            self._again = owes_of_another or given.to.elastic != self.me.elastic
            self._dropped |= self._held - partitions
            self._held = partitions
            self._given = given
            self._came_at = self._came_at or alive_clock()
            self._group_generation = generation
            self._confirmed = given.to.nonce == self.me.nonce and given.refused_by is None
            self.joins += 1
            self._changed.notify_all()

    def _heard(self, sent_at: float, error_code: int) -> None:
        """The group's coordinator answered a question sent at that time."""
        if error_code in (0, _REBALANCING):
            with self._changed:
                if alive_clock() >= self._alive_until:  # had run out in between, or never began
                    self._dropped |= self._held
                self._alive_until = max(self._alive_until, sent_at + self._session_s)
                # Of several who come at the same moment the broker lets each take the place of the one before; only
                # the last is still a member a little later, and by then those before it have been told.
                if self._came_at is not None and sent_at > self._came_at + _PROOF_S:
                    self._proved = True
                    self._changed.notify_all()
        elif error_code in (_ILLEGAL_GENERATION, _UNKNOWN_MEMBER):
            self.lose("its session is over")
        elif error_code == _FENCED:
            self._fence()
        if error_code:
            self._wake.set()

    def _fence(self) -> None:
        with self._changed:
            self._fenced = True
        self.lose("another process took its place")

    def is_handing_over(self) -> bool:
        """Whether something was taken from us, and the stage does not know yet."""
        with self._changed:
            return bool(self._given and self._given.owed and self._dropped and not self._leaving.is_set())

    def lose(self, why: str) -> None:
        with self._changed:
            if self._held and not self._leaving.is_set() and self._has_settled:
                logger.warning("%s: lost %s: %s", self._what, sorted(self._held), why)
            self._dropped |= self._held
            self._held = frozenset()
            self._given = None
            self._came_at = None
            self._confirmed = self._proved = False
            self._changed.notify_all()


class _Listener(AsyncConsumerRebalanceListener):
    """Called on the client's own thread, after the assignor."""

    def __init__(self, consumer: _Consumer, membership: KafkaMembership, network: Network) -> None:
        self._consumer = consumer
        self._membership = membership
        self._network = network

    async def on_partitions_assigned(self, assigned: set[Place]) -> None:
        """Keep the consumer from fetching, and from looking for positions, of what it was given."""
        self._consumer.pause(*assigned)
        for place in assigned:
            self._consumer.seek(place, 0)

    async def on_partitions_revoked(self, revoked: set[Place]) -> None:
        """Let the stage notice before others are given what it had; heartbeats go on meanwhile."""
        deadline = time.monotonic() + _HAND_OVER_S
        while self._membership.is_handing_over() and time.monotonic() < deadline:
            await self._network.sleep(0.01)

    async def on_partitions_lost(self, lost: set[Place]) -> None:
        self._membership.lose("its session is over")
