"""The reading seam on kafka-python. Used by one thread; the library has a thread of its own for the network.

What is held against the library's habits (3.0.12):
  - It reads its sockets 4 KiB at a time, and every one of these calls gives the interpreter lock away: reading wider
    costs a third of the processor time and survives beside a busy thread (`_receive`).
  - After a damaged batch its next poll never returns, if the partition is still assigned: it is let go of first.
  - It forgets a topic's metadata, and asks for it again, as soon as none of the topic's partitions is assigned: the
    last one stays assigned, paused.
  - `poll` says nothing of transaction markers and aborted records that it passed over; `position` does.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
# (the stubs that come with pyright are those of kafka-python 2)

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Iterable, Mapping, Sequence
from types import MethodType
from typing import Any, Literal
from weakref import WeakSet

from kafka import KafkaConsumer
from kafka import TopicPartition as KafkaPlace
from kafka.errors import (
    CorruptRecordError,
    KafkaConnectionError,
    KafkaError,
    LogTruncationError,
    OffsetOutOfRangeError,
    RetriableError,
)

from streams.errors import CorruptRecord, LogError, LogUnavailable, OffsetOutOfRange
from streams.kafka.clients import EARLIEST, LATEST, Consumer, Fetched
from streams.kafka.connect import Network, connect
from streams.kafka.errors import from_client
from streams.kafka.options import python_consumer_options
from streams.kafka.settings import KafkaSettings
from streams.log import Record, TopicPartition

_CLOSE_MS = 500
_SETTLE_S = 0.3  # after a topic that is new to the client
_LOOK_MS = 3
_RECEIVE_BYTES = 256 << 10  # of one read of a socket
_RECEIVED_BYTES = 4 << 20  # of reads in a row, before what came is looked at
_DAMAGED = re.compile(
    r"partition TopicPartition\(topic='(?P<topic>[^']*)', partition=(?P<partition>\d+)\) at offset (\d+)"
)


class PythonConsumer(Consumer):
    """Connects when it is made. Raises LogUnavailable when no broker answers, LogError for what waiting cannot mend."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._positions: dict[TopicPartition, int] = {}  # next offsets, as this object's caller knows them
        self._paused: set[TopicPartition] = set()
        self._idle: dict[str, TopicPartition] = {}  # topic → the paused place that keeps its metadata
        self._ready: list[Fetched] = []  # for this poll
        self._errors: list[OffsetOutOfRange | CorruptRecord] = []  # for the polls after it
        self._truncated: list[KafkaPlace] = []  # to be lost after this poll
        self._settled_at = 0.0  # the leaders of what is assigned may not be known before
        self._transports: WeakSet[Any] = WeakSet()
        try:
            self._kafka, _ = connect(KafkaConsumer, python_consumer_options(settings), opened=self._opened)
        except KafkaError as error:
            raise self._explained(error, "connecting") from error

    def _opened(self, network: Network) -> None:
        """Before it connects: have all its connections read widely, and know them."""
        manager: Any = network._manager
        build = manager._build_transport

        async def build_wide(*args: Any, **named: Any) -> Any:
            transport = await build(*args, **named)
            transport._sock_recv = MethodType(_receive, transport)
            self._transports.add(transport)
            return transport

        manager._build_transport = build_wide

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        """A place that was not wanted before, or was elsewhere, is not paused."""
        moved = [place for place, position in positions.items() if self._positions.get(place) != position]
        dropped = [place for place in self._positions if place not in positions]
        if not moved and not dropped:
            return
        topics = {place.topic for place in positions}
        if not topics.issubset(place.topic for place in [*self._positions, *self._idle.values()]):
            self._settled_at = time.monotonic() + _SETTLE_S
        self._idle |= {place.topic: place for place in dropped}
        self._idle = {topic: place for topic, place in self._idle.items() if topic not in topics}
        self._errors = [error for error in self._errors if (error.topic, error.partition) not in moved]
        self._kafka.assign([self._there(place) for place in [*positions, *self._idle.values()]])
        self._kafka.pause(*(self._there(place) for place in self._idle.values()))
        for place in moved:
            self._kafka.seek(self._there(place), positions[place])
        self._kafka.resume(*(self._there(place) for place in moved))
        self._paused = {place for place in self._paused if place in positions}.difference(moved)
        self._positions = dict(positions)

    def pause(self, places: Sequence[TopicPartition]) -> None:
        known = [place for place in places if place in self._positions]
        self._kafka.pause(*map(self._there, known))
        self._paused.update(known)

    def resume(self, places: Sequence[TopicPartition]) -> None:
        known = [place for place in places if place in self._positions]
        self._kafka.resume(*map(self._there, known))
        self._paused.difference_update(known)

    def poll(self, timeout_s: float) -> list[Fetched]:
        if not self._errors:
            self._look(timeout_s)
        if self._errors and not self._ready:
            raise self._errors.pop(0)
        ready, self._ready = self._ready, []
        return ready

    def _look(self, timeout_s: float) -> None:
        try:
            found = self._poll(timeout_s)
        except OffsetOutOfRangeError as error:
            self._lose(error.args[0])
        except LogTruncationError as error:
            self._lose(error.divergent_offsets)
        except CorruptRecordError as error:
            self._damaged(error)
            self._look(0.0)  # so that the library sees it unassigned, and throws its rest away
        except RetriableError:
            pass
        except KafkaError as error:
            raise self._explained(error, "reading") from error
        else:
            self._ready += self._fetched(found) if found else self._passed_over()
            truncated, self._truncated = self._truncated, []
            self._lose(truncated)

    def _poll(self, timeout_s: float) -> Mapping[KafkaPlace, Sequence[Any]]:
        """The library's poll sleeps to the end of its time, or 100 ms, when it knows no leader to fetch from yet."""
        deadline = time.monotonic() + timeout_s
        found: Mapping[KafkaPlace, Sequence[Any]] = {}
        while not found and (now := time.monotonic()) < min(deadline, self._settled_at):
            found = self._kafka.poll(timeout_ms=_LOOK_MS)
        return found or self._kafka.poll(timeout_ms=max(0, round((deadline - now) * 1000)))

    def offsets(
        self, places: Sequence[TopicPartition], at: Literal[-2, -1] | int, timeout_s: float
    ) -> dict[TopicPartition, int]:
        there = {self._there(place): place for place in places}
        timeout_ms = max(1, round(timeout_s * 1000))
        try:
            if at == EARLIEST:
                found = self._kafka.beginning_offsets(list(there), timeout_ms)
            elif at == LATEST:
                found = self._kafka.end_offsets(list(there), timeout_ms)
            else:
                stamped = self._kafka.offsets_for_times(dict.fromkeys(there, max(0, at)), timeout_ms)
                found = {place: hit.offset for place, hit in stamped.items() if hit is not None}
                late = [place for place in there if place not in found]
                found |= self._kafka.end_offsets(late, timeout_ms) if late else {}
        except KeyError as error:
            raise LogUnavailable(f"{_named(places)}: {error} is not in the broker's answer") from error
        except KafkaError as error:
            raise self._explained(error, f"asking for offsets of {_named(places)}") from error
        return {there[place]: offset for place, offset in found.items()}

    def close(self) -> None:
        self._kafka.close(autocommit=False, timeout_ms=_CLOSE_MS)
        for transport in list(
            self._transports
        ):  # a connection that had something left to send was forgotten open
            if transport._sock is not None:
                transport._sock.close()

    def _explained(self, error: KafkaError, doing: str) -> LogError:
        return from_client(error, self._settings, doing)

    def _there(self, place: TopicPartition) -> KafkaPlace:
        return KafkaPlace(self._settings.full(place.topic), place.partition)

    def _here(self, there: KafkaPlace) -> TopicPartition:
        return TopicPartition(self._settings.bare(there.topic) or there.topic, there.partition)

    def _fetched(self, found: Mapping[KafkaPlace, Sequence[Any]]) -> list[Fetched]:
        fetched: list[Fetched] = []
        for there, records in found.items():
            place = self._here(there)
            if place not in self._positions:
                continue
            position, high = self._reached(there, records[-1].offset + 1)
            self._positions[place] = position
            topic, partition = place
            ours = [
                Record(
                    topic,
                    partition,
                    record.offset,
                    record.timestamp,
                    tuple((name, content or b"") for name, content in record.headers or ()),
                    record.value or b"",
                )
                for record in records
            ]
            fetched.append(Fetched(place, ours, position, high))
        return fetched

    def _passed_over(self) -> list[Fetched]:
        """Places whose position went on although no record came."""
        fetched: list[Fetched] = []
        for place, known in self._positions.items():
            if place not in self._paused:
                position, high = self._reached(self._there(place), known)
                if position > known:
                    self._positions[place] = position
                    fetched.append(Fetched(place, [], position, high))
        return fetched

    def _reached(self, there: KafkaPlace, known: int) -> tuple[int, int]:
        """(position, high watermark). The library's position is asked for only where something lies beyond."""
        high = self._kafka.highwater(there)
        if high is None or high <= known:
            return known, -1 if high is None else high
        try:
            return max(known, self._kafka.position(there, timeout_ms=0) or 0), high
        except LogTruncationError as error:
            self._truncated += error.divergent_offsets
        return known, high

    def _lose(self, places: Iterable[KafkaPlace]) -> None:
        for place in map(self._here, places):
            position = self._let_go(place)
            self._errors.append(OffsetOutOfRange(*place, position, -1, -1))

    def _damaged(self, error: CorruptRecordError) -> None:
        match = _DAMAGED.search(str(error))
        if match is None:
            raise self._explained(error, "reading") from error
        place = self._here(KafkaPlace(match["topic"], int(match["partition"])))
        self._let_go(place)
        self._errors.append(CorruptRecord(*place, int(match[3]), -1, "its record batch fails its checksum"))

    def _let_go(self, place: TopicPartition) -> int:
        """Unlike a place that is not wanted any more, it is unassigned for certain. Returns its position."""
        position = self._positions.get(place, -1)
        self.assign({other: at for other, at in self._positions.items() if other != place})
        if self._idle.get(place.topic) == place:
            del self._idle[place.topic]
            self._kafka.assign([self._there(left) for left in [*self._positions, *self._idle.values()]])
        return position


def _receive(transport: Any) -> tuple[bytes, KafkaConnectionError | None]:
    """What the library's own method of this name does, with wide reads. (what came, why the connection is over)"""
    encrypted = isinstance(transport._sock, ssl.SSLSocket)
    parts: list[bytes] = []
    received = 0
    error = None
    # What an SSL socket has decrypted already would not wake the selector: it is always read to the end.
    while encrypted or received < _RECEIVED_BYTES:
        try:
            part = transport._sock.recv(_RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            break
        except OSError as failure:
            error = KafkaConnectionError(failure)
            break
        if not part:
            error = KafkaConnectionError("socket disconnected")
            break
        parts.append(part)
        received += len(part)
        if not encrypted and len(part) < _RECEIVE_BYTES:
            break
    return parts[0] if len(parts) == 1 else b"".join(parts), error


def _named(places: Sequence[TopicPartition]) -> str:
    return ", ".join(f"{topic}/{partition}" for topic, partition in places[:8]) + (
        ", …" if len(places) > 8 else ""
    )
