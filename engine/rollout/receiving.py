"""The engines' side of broadcasts: what an engine is to join and to receive, and how one of ours does it.

    fleet:  TransferGroupFormed(names this engine) ─► Join      TransferGroupEnded ─► Leave
    ledger: WeightsPublished(of a group it is in)  ─► Receive   a newer epoch      ─► Leave (another trainer's)

Every version of its group is received, in order: what the trainer sends is one stream of bytes, and an engine that
left one out would take the next for it. The digest is the judge of what came. Whatever goes wrong, the engine leaves
the group, for good, and takes its versions from disk until the trainer names it in another.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from engine.interfaces import EngineError
from engine.rollout.loading import TRANSFER_FAILED, WEIGHTS_MISMATCH
from streams import codec
from streams.codec import Known
from streams.errors import CodecError, CorruptRecord, OffsetOutOfRange
from streams.events import (
    Event,
    TransferGroupEnded,
    TransferGroupFormed,
    WeightsPublished,
)
from streams.log import Batch, EventLog, TopicPartition
from streams.topics import Topics

logger = logging.getLogger(__name__)

TRANSPORTS = ("distributed", "ipc")

_T = TypeVar("_T")


# ---------------------------------------------------------------- what is to be done
def sent_by(published: WeightsPublished) -> tuple[str, str]:
    """(transport, group) by which a version is sent beside its file; ("", ""): by the file alone."""
    for transport in TRANSPORTS:
        if group := published.uris.get(transport, ""):
            return transport, group
    return "", ""


class Join(NamedTuple):
    formed: TransferGroupFormed
    first_rank: int


class Receive(NamedTuple):
    published: WeightsPublished
    group: str

    @property
    def transport(self) -> str:
        return sent_by(self.published)[0]


class Leave(NamedTuple):
    group: str
    is_over: bool  # the trainer has given it up: nothing more comes, not even of a version that is on its way


Action = Join | Receive | Leave


class Transfers:
    """Folds `fleet` and the ledger's news for one engine. Not for several threads at once.

    Only groups that are formed after this was constructed count: an older one names an earlier life of the engine.
    """

    def __init__(self, log: EventLog, topics: Topics, engine: str) -> None:
        self._log, self._topic, self._engine = log, topics.name("fleet"), engine
        self._position = log.end(self._topic, 0)
        self._groups: dict[str, TransferGroupFormed] = {}
        self._told: set[tuple[str, int, int]] = set()  # (group, epoch, version): a record may be there twice
        self._epoch = -1

    @property
    def watched(self) -> dict[TopicPartition, int]:
        return {TopicPartition(self._topic, 0): self._position}

    def catch_up(self, ledger_news: Iterable[Event], epoch: int) -> list[Action]:
        """What is new to do, in this order: groups to join, versions to receive, groups to leave.

        `ledger_news`: valid records, read before this call, so a group that one of them names is known by now.
        `epoch`: the ledger's. Groups of an older one have no trainer any more.
        """
        self._epoch = max(self._epoch, epoch)
        joins: list[Action] = []
        receives: list[Action] = []
        leaves: list[Action] = []
        ended: dict[str, bool] = {}  # group → is it over
        for event in self._fleet_news():
            if isinstance(event, TransferGroupFormed):
                joins += self._formed(event)
            elif isinstance(event, TransferGroupEnded) and event.group in self._groups:
                ended[event.group] = event.reason == "failed"
        for event in ledger_news:
            if isinstance(event, WeightsPublished):
                receives += self._published(event)
        ended |= {name: True for name, group in self._groups.items() if group.epoch < self._epoch}
        for name, is_over in ended.items():
            del self._groups[name]
            self._told = {key for key in self._told if key[0] != name}
            leaves.append(Leave(name, is_over))
        return [*joins, *receives, *leaves]

    def _formed(self, event: TransferGroupFormed) -> list[Action]:
        for engine, first_rank, _ in event.members:
            if engine == self._engine and event.epoch >= self._epoch and event.group not in self._groups:
                self._groups[event.group] = event
                return [Join(event, first_rank)]
        return []

    def _published(self, event: WeightsPublished) -> list[Action]:
        _, group = sent_by(event)
        key = (group, event.epoch, event.version)
        if group not in self._groups or key in self._told:
            return []
        self._told.add(key)
        return [Receive(event, group)]

    def _fleet_news(self) -> Iterable[Event]:
        while True:
            batch = self._read()
            for record in batch.records:
                try:
                    decoded = codec.decode(record)
                except CodecError:
                    continue  # the audit shows it; a group that is not known is not joined
                if isinstance(decoded, Known):
                    yield decoded.event
            if batch.next_position <= self._position:
                return
            self._position = batch.next_position

    def _read(self) -> Batch:
        try:
            return self._log.read(self._topic, 0, self._position)
        except OffsetOutOfRange as gone:
            return Batch([], max(self._position, gone.start))
        except CorruptRecord as damage:
            return Batch([], damage.next_offset)


# ---------------------------------------------------------------- how it is done
class GroupReceiver:
    """The groups of one engine in this process, one rank each. Every call blocks, at most to the group's deadline.

    `join` and `receive` run on threads of the caller's; `leave` and `close` may come from another at any time.

    In main memory the buffers of the version before the one in service are kept for the next one, since fresh pages
    cost as much as the broadcast: so the engine says with `in_service` what it has exchanged its weights for.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._groups: dict[str, _Joined] = {}
        self._closed: set[str] = set()
        self._arrived: list[Any] = []  # buffers of the last version that came whole
        self._serving: list[Any] = []  # of the one in service; none: it came from disk
        self._spare: list[Any] = []

    def join(self, formed: TransferGroupFormed, first_rank: int) -> None:
        """Raises EngineError("transfer_failed") when the group does not come together within its deadline."""
        from engine.weights import collective

        try:
            group = collective.join(
                formed.address,
                formed.port,
                first_rank,
                formed.world_size,
                formed.group,
                formed.backend,
                timedelta(seconds=formed.deadline_s),
                device=self._device,
            )
        except collective.TransferError as error:
            raise EngineError(TRANSFER_FAILED, str(error)) from error
        with self._lock:
            if formed.group not in self._closed:
                self._groups[formed.group] = _Joined(group, formed.deadline_s)
                return
        group.close()
        raise EngineError(TRANSFER_FAILED, f"group {formed.group} was over before it was joined")

    def receive(self, published: WeightsPublished, group: str, bucket_bytes: int) -> dict[str, Any]:
        """A version's tensors in memory that is not in service, whole and as they were published.

        Raises EngineError("transfer_failed"), or EngineError("weights_mismatch") when the digest is another; after
        the first the group is left, after the second it is as good as before.
        """
        from engine.weights import broadcasts, bucketing, snapshots

        with self._lock:
            joined = self._groups.get(group)
        if joined is None:
            raise EngineError(TRANSFER_FAILED, f"group {group} is not joined")
        deadline = time.monotonic() + joined.deadline_s
        try:
            buckets = bucketing.plan(published.tensors, bucket_bytes)
            self._spare = memory = bucketing.memory_for(buckets, self._device, self._spare)
            received = broadcasts.receive_all(
                joined.group,
                buckets,
                memory,
                deadline,
                lambda: "the group was left meanwhile" if group in self._closed else "",
            )
            tensors = bucketing.with_tied(published.tensors, received)
        except Exception as error:  # of the group, or of this machine, as when there is no memory for it
            self.leave(group)
            self._spare = []  # a broadcast that was given up may write into it until its own deadline
            raise EngineError(TRANSFER_FAILED, f"version {published.version}: {error}") from error
        digest = snapshots.digest(tensors)
        if digest != published.digest:
            raise EngineError(
                WEIGHTS_MISMATCH,
                f"what came by group {group} has digest {digest[:16]}, version {published.version} was published as "
                f"{published.digest[:16]}",
            )
        self._spare, self._arrived = [], memory
        return tensors

    def in_service(self, *, from_disk: bool) -> None:
        """The engine serves what was received last (or a version from disk), and nothing of the one before."""
        if self._device == "cpu":
            self._spare = self._serving or self._spare
        self._serving, self._arrived = ([] if from_disk else self._arrived), []

    def leave(self, group: str) -> None:
        with self._lock:
            self._closed.add(group)
            joined = self._groups.pop(group, None)
        if joined is not None:
            joined.group.close()

    def close(self) -> None:
        for group in list(self._groups):
            self.leave(group)


class _Joined(NamedTuple):
    group: Any
    deadline_s: float


async def on_a_thread(function: Callable[..., _T], *arguments: Any, name: str = "transfer") -> _T:
    """Await a call that may block long. A thread of its own, which never keeps a process from ending."""
    done: Future[_T] = Future()

    def run() -> None:
        try:
            result = function(*arguments)
        except BaseException as error:
            if not done.cancelled():
                done.set_exception(error)
        else:
            if not done.cancelled():
                done.set_result(result)

    done.set_running_or_notify_cancel()
    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(done)
