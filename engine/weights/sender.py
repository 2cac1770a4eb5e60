"""The trainer's side of broadcasts: a thread that feeds the engines beside training, and never holds it up.

    publisher: file written ─► prepare ─► WeightsPublished(uris + group) appended ─► send ──► returns at once
                                  │ members changed: old group ended, new one: listen ─► TransferGroupFormed
    thread:                       └─────────────── join (first version) ─► buckets ─► idle
                                        │ failed or too late: group closed ─► who was lost? ─► TransferGroupEnded

States: no group ─ prepare ─► forming ─ joined ─► formed ─ send ─► sending ─► formed
        any of them ─ failure, or other members at the next prepare ─► no group.

A version that is published while another is still on its way goes by the file alone, so the trainer waits for nobody.
A failure costs the version nothing: its file was there before. A broadcast is given up at its deadline, and as soon as
an engine that it waits for gives no sign of life. Who was lost is that one, or who did not come to the meeting place,
or says nothing any more; the next publication forms a new group, of a new name, without them.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec

from consumers.runner import Clock, now_ms
from engine import devices
from engine.weights import broadcasts, bucketing, collective
from engine.weights.collective import Listener, TransferError
from engine.weights.membership import Candidate, Members
from engine.weights.snapshots import raw_tensors
from streams.errors import LogFull, LogUnavailable
from streams.events import Event, TransferGroupEnded, TransferGroupFormed, WeightsPublished

logger = logging.getLogger(__name__)

IPC = "ipc"  # both a backend and the transport's name
BLAME_S = 3.0  # after a failure: how long a member that lives has time for a sign of it
_SLICE_S = 0.1  # of the wait for a group to come together
_LOOK_S = 0.5  # between two looks at the fleet while there is nothing to send

Append = Callable[[Event], object]  # to the topic `fleet`


class Sent(NamedTuple):
    """How the last broadcast ended."""

    published: WeightsPublished
    group: str
    receivers: list[str]
    error: str  # "": every bucket was sent
    lost: list[str]
    seconds: float
    nbytes: int = 0


class _Formed(NamedTuple):
    event: TransferGroupFormed
    candidates: list[Candidate]
    listener: Listener

    @property
    def engines(self) -> list[str]:
        return [each.engine for each in self.candidates]


class _Job(NamedTuple):
    published: WeightsPublished
    tensors: Mapping[str, Any]  # RawTensor, or torch's on the device (a DeviceSnapshot stays one)


class Sender:
    """`prepare` and `send` from one thread, the publisher's; `close` from any. The thread is the sender's own.

    `address` "" is found by the members' hosts, `port` as in Listener. `device`: where buckets are sent from.
    `backend`: of torch.distributed, or "ipc": members of this host alone, on the same kind of device.
    """

    def __init__(
        self,
        members: Members,
        append: Append,
        *,
        epoch: int,
        bucket_bytes: int,
        deadline: timedelta,
        backend: str = "gloo",
        address: str = "",
        port: int = 0,
        device: str = "cpu",
        clock: Clock = now_ms,
        blame: timedelta = timedelta(seconds=BLAME_S),
    ) -> None:
        self._members, self._append, self._epoch, self._clock = members, append, epoch, clock
        self._bucket_bytes, self._deadline, self._backend = bucket_bytes, deadline, backend
        self._address, self._port, self._buffers = address, port, bucketing.Buffers(device)
        self.transport = IPC if backend == IPC else "distributed"
        self._blame_s = blame.total_seconds()
        self.sent: Sent | None = None
        self._n_sent = self._n_failed = 0
        self._gone: list[str] = []  # for whose sake a broadcast was given up
        self._formed: _Formed | None = None
        self._group: Any = None  # of collective.join
        self._said = ""
        self._n_groups, self._life = 0, secrets.token_hex(3)
        self._job: _Job | None = None  # waits or is under way
        self._closing = False
        self._changed = threading.Condition()
        self._fleet = threading.Lock()  # the fold of the fleet is one thread's at a time
        self._thread = threading.Thread(target=self._run, name="sender", daemon=True)
        self._thread.start()

    # -- the publisher's thread
    def prepare(self, published: WeightsPublished) -> WeightsPublished:
        """The record to append: it names the group by which the version will come, if there is one to send it to."""
        with self._changed:
            if self._job is not None or self._closing:
                return published  # the one before is still on its way
        try:
            bucketing.check_layout(published.tensors)
            self._form()
        except (LogFull, LogUnavailable):
            raise
        except Exception as error:
            self._say(f"no group for broadcasts: {error}")
        if self._formed is None:
            return published
        uris = {**published.uris, self.transport: self._formed.event.group}
        return msgspec.structs.replace(published, uris=uris)

    def send(self, published: WeightsPublished, tensors: Mapping[str, Any]) -> None:
        """Begin to broadcast a version whose record is in the ledger. `tensors` must be a snapshot.

        Tensors on the device from which buckets are sent do not pass through main memory.
        """
        if self._formed is None or published.uris.get(self.transport) != self._formed.event.group:
            return
        job = _Job(published, self._at_hand(tensors))
        with self._changed:
            self._job = job
            self._changed.notify_all()

    def _at_hand(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        there = self._buffers.device.partition(":")[0]
        if there == "cpu" or any(_device_of(tensor) != there for tensor in tensors.values()):
            return raw_tensors(tensors)
        return tensors

    def gauges(self) -> dict[str, float]:
        """Of the last transfer that ended, and counts of all."""
        sent = self.sent
        found = {"transfers_total": float(self._n_sent), "transfers_failed_total": float(self._n_failed)}
        if sent is None:
            return found
        return found | {
            "transfer_s": sent.seconds,
            "transfer_bytes": float(sent.nbytes),
            "transfer_receivers": float(len(sent.receivers)),
        }

    def wait(self, timeout: timedelta) -> bool:
        """Until nothing is under way; False when the time is over. For tests and measurements: training never waits."""
        with self._changed:
            return self._changed.wait_for(lambda: self._job is None, timeout.total_seconds())

    def close(self, timeout: timedelta = timedelta(seconds=2)) -> None:
        """End the group. A version on its way has `timeout` to arrive, else its engines take it from disk."""
        self.wait(timeout)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        was_idle = self._job is None
        self._close_group()
        if was_idle:
            self._end("finished", "the trainer ends")
        self._thread.join(timeout.total_seconds())

    # -- forming
    def _form(self) -> None:
        """Keep the group if its members are those that may be counted on now; else another takes its place."""
        with self._fleet:
            self._members.catch_up()
            candidates = self._members.candidates()
        candidates = self._fitting(candidates)
        if self._formed is not None:
            if candidates == self._formed.candidates:
                return
            self._close_group()
            self._end("membership", _difference(self._formed.engines, [each.engine for each in candidates]))
        if not candidates:
            return
        address = self._address or collective.own_address([each.host for each in candidates])
        world_size = 1 + sum(each.n_ranks for each in candidates)
        listener = Listener(address, self._port, world_size, self._deadline)
        event = self._event(listener, candidates)
        try:
            self._append(event)
        except BaseException:
            listener.close()
            raise
        self._formed = _Formed(event, candidates, listener)
        self._said = self._said if self._backend == IPC else ""
        logger.info("trainer: group %s for broadcasts to %s", event.group, ", ".join(self._formed.engines))

    def _fitting(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those that can be ranks of this kind of group."""
        wanted = devices.with_collectives(self._backend)
        if self._backend != IPC:
            return [each for each in candidates if wanted is None or each.device == wanted.kind]
        here, device = socket.gethostname(), self._buffers.device.partition(":")[0]
        fitting = [each for each in candidates if (each.host, each.device) == (here, device)]
        if len(fitting) < len(candidates):
            others = [
                f"{each.engine} (on {each.host}, {each.device})" for each in candidates if each not in fitting
            ]
            self._say(
                f"ipc reaches only engines on this host ({here}) and this kind of device ({device}), not "
                + ", ".join(others)
            )
        return fitting

    def _event(self, listener: Listener, candidates: Sequence[Candidate]) -> TransferGroupFormed:
        self._n_groups += 1
        members, rank = [], 1
        for each in candidates:
            members.append((each.engine, rank, each.n_ranks))
            rank += each.n_ranks
        return TransferGroupFormed(
            epoch=self._epoch,
            group=f"e{self._epoch}-g{self._n_groups}-{self._life}",
            backend=self._backend,
            address=listener.address,
            port=listener.port,
            world_size=listener.world_size,
            members=members,
            bucket_bytes=self._bucket_bytes,
            deadline_s=self._deadline.total_seconds(),
            at_ms=self._clock(),
        )

    def _close_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()
        if self._formed is not None:
            self._formed.listener.close()

    def _end(self, reason: str, detail: str, lost: Sequence[str] = ()) -> None:
        formed, self._formed = self._formed, None
        if formed is None:
            return
        ended = TransferGroupEnded(
            epoch=self._epoch,
            group=formed.event.group,
            reason=reason,
            detail=detail[:2000],
            lost=list(lost),
            at_ms=self._clock(),
        )
        try:
            self._append(ended)
        except (LogFull, LogUnavailable) as error:  # its members have seen the connection close
            logger.warning("trainer: the end of group %s is not in the log: %s", formed.event.group, error)

    # -- the sender's thread
    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._job is not None or self._closing, _LOOK_S)
                job = self._job
                if job is None and self._closing:
                    return
            if job is None:
                self._look()
                continue
            self._broadcast(job)
            with self._changed:
                self._job = None
                self._changed.notify_all()

    def _look(self) -> None:
        try:
            with self._fleet:
                self._members.catch_up()
        except Exception as error:
            self._say(f"the fleet cannot be followed: {error}")

    def _broadcast(self, job: _Job) -> None:
        formed = self._formed
        assert formed is not None
        began, error, self._gone = time.monotonic(), "", []
        nbytes, is_own = 0, False
        try:
            group = self._joined(formed)
            buckets = bucketing.plan(job.published.tensors, self._bucket_bytes)
            deadline = time.monotonic() + self._deadline.total_seconds()
            give_up = self._give_up(formed)
            nbytes = broadcasts.send_all(group, job.tensors, buckets, self._buffers, deadline, give_up).nbytes
        except Exception as failure:
            error = str(failure) or type(failure).__name__
            is_own = _is_out_of_memory(failure) and self._bucket_bytes > bucketing.BUCKET_BYTES
        seconds, lost = time.monotonic() - began, []
        if is_own:
            self._out_of_memory(formed, error)
        elif error:
            lost = self._failed(formed, job.published, error)
        else:
            with self._fleet:
                self._members.took_part(formed.engines)
        self._n_sent, self._n_failed = self._n_sent + 1, self._n_failed + bool(error)
        self.sent = Sent(job.published, formed.event.group, formed.engines, error, lost, seconds, nbytes)

    def _joined(self, formed: _Formed) -> Any:
        """On a thread of its own, so that it can be given up before its deadline."""
        if self._group is not None:
            return self._group
        event, joined = formed.event, Future()
        arguments = (event, self._deadline, formed.listener, self._buffers.device, joined)
        threading.Thread(target=_join, args=arguments, daemon=True).start()
        give_up = self._give_up(formed)
        while True:
            try:
                self._group = group = joined.result(_SLICE_S)
                return group
            except FutureTimeout:
                if why := give_up():
                    joined.add_done_callback(_close_what_came)
                    raise TransferError(f"group {event.group}: {why}") from None

    def _give_up(self, formed: _Formed) -> collective.GiveUp:
        """No use to wait for an engine that gives no sign of life: the others take the version from disk meanwhile."""
        looked = 0.0

        def why() -> str:
            nonlocal looked
            if self._closing:
                return "the trainer ends"
            if time.monotonic() - looked < _LOOK_S:
                return ""
            looked = time.monotonic()
            with self._fleet:
                self._members.catch_up()
                self._gone = self._members.gone(formed.candidates)
            return f"no sign of life of {', '.join(self._gone)}" if self._gone else ""

        return why

    def _failed(self, formed: _Formed, published: WeightsPublished, error: str) -> list[str]:
        """Close the group on all sides, find out who was lost, and say so."""
        if self._closing:  # nobody was lost
            self._close_group()
            self._end("finished", f"the trainer ends; version {published.version} was still on its way")
            return []
        absent = self._absent(formed) if self._group is None and not self._gone else []
        if self._gone:  # say so first: Gloo may hold the others' connections until the deadline
            self._end("failed", error, self._gone)
        self._close_group()
        formed.listener.close()
        try:
            lost = self._gone or absent or self._silent(formed)
            with self._fleet:
                self._members.lost(lost or formed.engines)  # nobody in particular: none is tried for ever
        except Exception as failure:
            self._say(f"the fleet cannot be followed: {failure}")
            lost = absent
        logger.warning(
            "trainer: version %d was not broadcast to %s (%s); lost: %s. Engines take it from disk", published.version,
            ", ".join(formed.engines), error, ", ".join(lost) or "nobody in particular",
        )  # fmt: skip
        self._end("failed", error, lost)
        return lost

    def _out_of_memory(self, formed: _Formed, error: str) -> None:
        """No engine's fault: the next group has smaller buckets."""
        self._buffers.clear()
        self._bucket_bytes = bucketing.BUCKET_BYTES
        self._close_group()
        self._end("failed", error)
        logger.warning(
            "trainer: no room on %s for buckets of weights.bucket_bytes (%s); they have %d bytes from now on. Engines "
            "take this version from disk", self._buffers.device, error.partition("\n")[0][:200], self._bucket_bytes,
        )  # fmt: skip

    def _absent(self, formed: _Formed) -> list[str]:
        """Members that never came to the meeting place; [] where that cannot be seen (SGLang servers with NCCL)."""
        came, absent = False, []
        for engine, first, n_ranks in formed.event.members:
            ranks = range(first, first + n_ranks)
            if len(formed.listener.arrived(formed.event.group, ranks, self._backend)) < n_ranks:
                absent.append(engine)
            else:
                came = True
        return absent if came or self._backend == "gloo" else []

    def _silent(self, formed: _Formed) -> list[str]:
        """Members without a sign of life since the failure, which every daemon that lives gives within a second."""
        with self._fleet:
            self._members.catch_up()
        moment = time.monotonic()
        while True:
            with self._fleet:
                self._members.catch_up()
                silent = self._members.silent_since(formed.engines, moment)
            if not silent or self._closing or time.monotonic() - moment >= self._blame_s:
                return silent
            time.sleep(0.1)

    def _say(self, problem: str) -> None:
        """Once, until a group is formed again."""
        if problem != self._said:
            self._said = problem
            logger.warning("trainer: %s; engines take versions from disk", problem)


def _join(
    event: TransferGroupFormed, deadline: timedelta, listener: Listener, device: str, joined: Future[Any]
) -> None:
    try:
        joined.set_result(
            collective.join(
                event.address,
                event.port,
                0,
                event.world_size,
                event.group,
                event.backend,
                deadline,
                listener=listener,
                device=device,
            )
        )
    except BaseException as error:
        joined.set_exception(error)


def _close_what_came(joined: Future[Any]) -> None:
    if joined.exception() is None:
        joined.result().close()


def _is_out_of_memory(error: Exception) -> bool:
    import torch

    return isinstance(error, torch.OutOfMemoryError)


def _device_of(tensor: Any) -> str:
    return str(getattr(getattr(tensor, "device", None), "type", "cpu"))


def _difference(before: Sequence[str], now: Sequence[str]) -> str:
    came = [name for name in now if name not in before]
    gone = [name for name in before if name not in now]
    words = [f"{word}: {', '.join(names)}" for word, names in (("new", came), ("gone", gone)) if names]
    return "; ".join(words) or "an engine joined anew"
