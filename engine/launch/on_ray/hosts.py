"""The driver's side of a host: it is asked without waiting, and what it said last is kept. Nothing here blocks long.

HostHandle    one actor: made (pending) ─► answers ─► lost (its node is gone, it is silent, it found no room)
RayDaemon     one process under it: begin ─► running ─► ended
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.launch.daemon import last_words
from engine.launch.on_ray.host import About, Begun, Predecessor, Seen
from engine.launch.on_ray.placement import Member

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.25
SILENT_S = 60.0  # without an answer from a host that has answered before
_SHORT_S = 5.0  # for one answer that is waited for
_SAY_AGAIN_S = 10.0
LOST = 1  # as the exit code of a daemon whose host is gone


class HostHandle:
    """One host actor. `refresh` often; then `seen` is what its processes are, and `lost` why there are none.

    Args:
        why_lost: says in words why it does not begin, or where it was, given what Ray said.
        refuse: why daemons of this run must not be on this host's node; "": they may.
    """

    def __init__(
        self,
        ray: Any,
        actor: Any,
        name: str,
        *,
        start_timeout_s: float,
        why_lost: Callable[[HostHandle, str], str],
        refuse: Callable[[About], str],
    ) -> None:
        self.actor, self.name = actor, name
        self.seen: dict[str, Seen] = {}
        self.about: About | None = None
        self.lost = ""
        self.refused = ""  # lost for this reason
        self.has_answered = False
        self._ray, self._why_lost, self._refuse = ray, why_lost, refuse
        self._told: Any = actor.about.remote("", "")
        self._start_timeout_s = start_timeout_s
        self._look: Any = None
        self._asked_at = time.monotonic()
        self._answered_at = time.monotonic()
        self._made_at = time.monotonic()
        self._say_at = self._made_at + _SAY_AGAIN_S

    def has_room(self) -> None:
        """Its bundle is reserved: from now on it has the time of a start."""
        self._made_at = time.monotonic()
        self._say_at = self._made_at + _SAY_AGAIN_S

    def refresh(self) -> None:
        """Take an answer that has come, and ask again when it is time to."""
        now = time.monotonic()
        if self.lost:
            return
        if self.about is None and self.is_ready(self._told):
            self._take_about()
        if self._look is None:
            if now - self._asked_at >= LOOK_EVERY_S or not self.has_answered:
                self._look, self._asked_at = self.actor.look.remote(), now
            return
        if not self.is_ready(self._look):
            self._check_patience(now)
            return
        answer, self._look = self._look, None
        try:
            self.seen = self._ray.get(answer)
        except self._ray.exceptions.ActorUnavailableError:  # it may come back
            self._check_patience(now)
        except self._ray.exceptions.RayError as error:
            self.lose(str(error))
        else:
            self.has_answered, self._answered_at = True, now

    def _take_about(self) -> None:
        try:
            self.about = about = self._ray.get(self._told)
        except self._ray.exceptions.RayError:  # the next look says why
            return
        self.refused = self._refuse(about)
        if self.refused:
            self.lost = self.refused
            self.end()

    def is_ready(self, reference: Any) -> bool:
        return bool(self._ray.wait([reference], timeout=0)[0])

    def lose(self, error: str) -> None:
        """It is of no use any more: whatever of it may be left is ended."""
        if not self.lost:
            self.lost = self._why_lost(self, error)
            self.end()

    def end(self) -> None:
        """End the actor, and by that its daemons."""
        try:
            self._ray.kill(self.actor, no_restart=True)
        except (self._ray.exceptions.RayError, ValueError):  # it has ended
            pass

    def ask(self, reference: Any, otherwise: Any) -> Any:
        """An answer that is worth a short wait."""
        try:
            return self._ray.get(reference, timeout=_SHORT_S)
        except self._ray.exceptions.RayError:
            return otherwise

    def _check_patience(self, now: float) -> None:
        if not self.has_answered:
            if now - self._made_at > self._start_timeout_s:
                self.lose(f"it did not begin within {self._start_timeout_s:g} s")
            elif now > self._say_at:
                self._say_at += _SAY_AGAIN_S
                logger.warning("%s waits for room on a node: %s", self.name, self._why_lost(self, ""))
        elif now - self._answered_at > SILENT_S:
            self.lose(f"no answer for {SILENT_S:.0f} s")
        elif now - self._answered_at > _SAY_AGAIN_S and now > self._say_at:
            self._say_at = now + _SAY_AGAIN_S
            logger.warning("%s: no answer from its node for %.0f s", self.name, now - self._answered_at)


class RayDaemon:
    """One process under a host (engine/launch/supervisor.py, Running)."""

    def __init__(
        self,
        host: HostHandle,
        member: Member,
        arguments: Sequence[str],
        given: Mapping[str, str],
        log_file: Path,
        predecessor: Predecessor | None = None,
    ) -> None:
        self.started = time.monotonic()
        self.pid = 0
        self.host, self.name, self.log_file = host, member.name, log_file
        self._code: int | None = None
        self._how = ""
        self._begin = host.actor.begin.remote(
            self.name, list(arguments), dict(given), member.devices, str(log_file), predecessor
        )

    def exit_code(self) -> int | None:
        if self._code is None:
            self.host.refresh()
            if self.host.lost:
                self._code, self._how = LOST, self.host.lost
            elif not self.pid:
                self._take_begun()
            else:
                self._take_seen()
        return self._code

    def left_behind(self) -> Predecessor | None:
        """What may still run of it, because nobody saw it end: its host is gone."""
        if not self.host.lost or not self.pid or self.host.about is None:
            return None
        return Predecessor(self.host.about.machine, self.pid)

    def how_it_ended(self) -> str:
        return self._how

    def last_words(self) -> str:
        """From its node while that is there: a shared folder may show the end of a file late."""
        if not self.host.lost:
            said = self.host.ask(self.host.actor.words.remote(self.name), "")
            if said:
                return said
        return last_words(self.log_file)

    def terminate(self) -> None:
        if self._code is None:
            self.host.actor.terminate.remote(self.name)

    def kill(self) -> None:
        if self._code is None and self.host.ask(self.host.actor.kill.remote(self.name), self) is self:
            self.host.lose("it does not answer")  # and with the host goes the daemon

    def _take_begun(self) -> None:
        host = self.host
        if not host.is_ready(self._begin):
            return
        try:
            begun: Begun = host._ray.get(self._begin)
        except host._ray.exceptions.RayError as error:
            host.lose(str(error))
            self._code, self._how = LOST, host.lost
            return
        if begun.problem:
            self._code, self._how = 2, begun.problem  # no restart can help
            return
        self.pid, self.started = begun.pid, time.monotonic() - begun.age_s
        where = host.about.ip if host.about else "its node"
        verb = "is running already" if begun.age_s else "started"
        logger.info("%s %s as process %d on %s", self.name, verb, self.pid, where)

    def _take_seen(self) -> None:
        seen = self.host.seen.get(self.name)
        if seen is not None and seen.pid == self.pid and seen.code is not None:
            self._code, self._how = seen.code, seen.how


class Gang:
    """The ranks of a trainer over several nodes: they begin together, and one that ends is the end of all.

    meeting point of rank 0's host ─► all begin ─► one ends ─► the others follow by themselves, or are killed ─► ended
    """

    END_S = 20.0  # for the others to follow
    SETTLE_S = 1.0  # hosts are looked at each by itself: who ended first may be seen to have a little later

    def __init__(self, hosts: Sequence[HostHandle], begin: Callable[[int, str, int], RayDaemon]) -> None:
        self.started = time.monotonic()
        self._hosts, self._begin = hosts, begin
        self._meeting = hosts[0].actor.meeting_point.remote()
        self._ranks: list[RayDaemon] = []
        self._first: tuple[int, RayDaemon] | None = None  # that ended
        self._end_by = self._seen_at = 0.0
        self._code: int | None = None
        self._how = ""
        self._is_stopping = False

    @property
    def pid(self) -> int:
        return self._ranks[0].pid if self._ranks else 0

    def exit_code(self) -> int | None:
        if self._code is None:
            if not self._ranks:
                self._begin_all()
            else:
                self._look_at_all()
        return self._code

    def how_it_ended(self) -> str:
        return self._how

    def last_words(self) -> str:
        return self._first[1].last_words() if self._first else ""

    def terminate(self) -> None:
        """Rank 0 alone hears it, and ends the others."""
        self._is_stopping = True
        for rank in self._ranks[:1]:
            rank.terminate()

    def kill(self) -> None:
        for rank in self._ranks:
            rank.kill()

    def _begin_all(self) -> None:
        for host in self._hosts:
            host.refresh()
        lost = next((host.lost for host in self._hosts if host.lost), "")
        if lost or self._is_stopping:
            self._code, self._how = LOST, lost or "stopped before it began"
        elif self._hosts[0].is_ready(self._meeting):
            point = self._hosts[0].ask(self._meeting, None)
            if point is None:
                self._hosts[0].lose("it does not say where the ranks can meet")
                return
            self._ranks = [self._begin(rank, *point) for rank in range(len(self._hosts))]

    def _look_at_all(self) -> None:
        now = time.monotonic()
        codes = [rank.exit_code() for rank in self._ranks]
        ended = [at for at, code in enumerate(codes) if code is not None]
        if not ended:
            return
        self._seen_at = self._seen_at or now
        if self._first is None and len(ended) < len(self._ranks) and now - self._seen_at < self.SETTLE_S:
            return
        if self._first is None:
            # of those that ended at about the same time: one that a signal ended, or whose host is gone, is the cause
            first = min(ended, key=lambda at: (codes[at] == 0, (codes[at] or 0) > 0, at))
            self._first, self._end_by = (first, self._ranks[first]), now + self.END_S
        if len(ended) < len(self._ranks):
            if now > self._end_by:
                self.kill()
            return
        first, rank = self._first
        of_rank_zero = codes[0] or 0
        failed = of_rank_zero if of_rank_zero in (2, 3) else (codes[first] or of_rank_zero)
        self._code, self._how = failed, f"rank {first}: {rank.how_it_ended()}"
