"""Records that are too large for the log: their value goes to a file, the log keeps a reference to it.

    submit: value over the limit ──► file, synced ──► record: no value, the same headers + `claim` ──► log
    read:   record with `claim` ──► file, size and SHA-256 checked ──► the record as it was submitted

`ClaimCheck` stands before any log and is one itself: it keeps every promise of streams/log.py, and what it does not
change goes through. Limits (streams/checks.py): up to `max_record_bytes` a record goes to the log as it is; up to
`max_claim_bytes` its value goes to a file; beyond that it is refused (RecordTooLarge).

Order. The file is written by the thread that submits, before the reference is submitted, so no later append of that
thread overtakes it. Only a record over the limit waits for the disk.

What a reader gets when the file is gone or damaged: the record as the log has it, without its value, and the reason in
a header (`claim-lost`). The codec raises ClaimLost, which names the file; so a stage writes a dead letter and goes on,
the trainer drops the group (`bad_payload`), tail shows the record with its problem and verify reports it. The log
itself is not damaged. A claims folder that is not there at all is an outage, LogUnavailable, and no loss; a read-only
log, which is for people, shows that like a loss.

Removing. A file is removed (streams/claim_sweep.py) when all of this holds:
  - no kept record of its partition refers to it: all of them were read up to an end that was asked for while no live
    process had an append to the partition's files on its way (a lock says so) and those of dead ones were settled;
  - nobody has written it or wanted it again for an hour, by the file system's clock: an append that failed as
    LogUnavailable may still land, and must find its file;
  - the log is open for writing, and its file system has locks.
It happens on `truncate_before`, and now and then in the background of a process that writes such files, when retention
has removed records of their partition or an append has failed. What a crash leaves stays until one of these.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta

from streams.checks import MAX_CLAIM_BYTES, MAX_RECORD_BYTES, check_records
from streams.claim_files import CLAIM, LOST, ClaimFolder, claim_of, parse
from streams.claim_sweep import GRACE, Sweeper
from streams.errors import ClaimLost, LogClosed, LogError, LogUnavailable, OffsetOutOfRange
from streams.log import DEFAULT_TIMEOUT, Batch, EventLog, Membership, NewRecord, Record, TopicPartition

logger = logging.getLogger(__name__)


class ClaimCheck(EventLog):
    """`ClaimCheck(log, folder)`: the log, for records of any size up to `max_claim_bytes`.

    The folder must be the same for all processes that use the log, on whatever machine. `max_record_bytes` is the
    limit of the log inside; `readonly` promises that nothing in the folder is made, changed or removed.

    >>> from streams.memory import MemoryLog
    >>> log = ClaimCheck(MemoryLog(), "/tmp/run/claims", max_record_bytes=1000)     # doctest: +SKIP
    >>> log.create_topic("demo", 1)                                               # doctest: +SKIP
    >>> log.append("demo", 0, [NewRecord(bytes(5000))])                           # doctest: +SKIP
    0
    >>> len(log.read("demo", 0, 0).records[0].value)                              # doctest: +SKIP
    5000
    """

    def __init__(
        self,
        log: EventLog,
        folder: str | os.PathLike[str],
        *,
        max_record_bytes: int = MAX_RECORD_BYTES,
        max_claim_bytes: int = MAX_CLAIM_BYTES,
        readonly: bool = False,
        grace: timedelta = GRACE,
    ) -> None:
        """Raises LogError when the limits do not go together."""
        if max_claim_bytes < max_record_bytes:
            raise LogError(
                f"max_claim_bytes = {max_claim_bytes} is below max_record_bytes = {max_record_bytes}: "
                "it is the larger limit"
            )
        self.inner = log
        self.moves_shares = log.moves_shares
        self._limit, self._cap, self._readonly = max_record_bytes, max_claim_bytes, readonly
        self._files = ClaimFolder(folder)
        self._sweeper = Sweeper(log, self._files, grace)
        self._lock = threading.Lock()  # guards the two below
        self._written: set[TopicPartition] = set()  # places with files of this process, so known to exist
        self._ahead: dict[TopicPartition, Batch] = {}  # read from the log and not yet handed out
        self._closed = False

    # -- writing

    def submit(self, topic: str, partition: int, records: Sequence[NewRecord]) -> Future[int]:
        if self._readonly or not any(map(self._is_large, records)):
            return self.inner.submit(topic, partition, records)
        place = TopicPartition(topic, partition)
        try:
            if self._closed:
                raise LogClosed("this log was closed; open it again to go on")
            check_records(records, self._cap, "log.max_claim_bytes")
            self._check_place(place)
            self._files.hold(place)
            try:
                future = self.inner.submit(topic, partition, self._with_references(place, records))
            except BaseException:
                self._settled(place, failed=True)
                raise
        except LogError as error:
            refused: Future[int] = Future()
            refused.set_exception(error)
            return refused
        future.add_done_callback(lambda done: self._settled(place, failed=done.exception() is not None))
        return future

    def _is_large(self, record: NewRecord) -> bool:
        size = len(record.value)
        for name, content in record.headers:
            size += len(name) + len(content)
            if name == CLAIM:  # ours; a reader must not take this record for a reference
                return True
        return size > self._limit

    def _with_references(self, place: TopicPartition, records: Sequence[NewRecord]) -> list[NewRecord]:
        large = [record.value for record in records if self._is_large(record)]
        claims = iter(self._files.write(place, large))
        return [
            record._replace(value=b"", headers=(*record.headers, next(claims).header()))
            if self._is_large(record)
            else record
            for record in records
        ]

    def _check_place(self, place: TopicPartition) -> None:
        """Only a topic that exists gets a folder. Raises UnknownTopic, LogUnavailable."""
        if place in self._written:
            return
        self.inner.end(*place)
        with self._lock:
            if not self._written:
                logger.info(
                    "records of more than %d bytes (log.max_record_bytes) go to files in %s",
                    self._limit,
                    self._files.root,
                )
            self._written.add(place)

    def _settled(self, place: TopicPartition, *, failed: bool) -> None:
        self._files.release(place)
        if failed:
            self._sweeper.failed(place)
        self._sweeper.look(place)

    def flush(self, timeout: timedelta = DEFAULT_TIMEOUT) -> dict[TopicPartition, int]:
        return self.inner.flush(timeout)

    # -- reading

    def read(
        self,
        topic: str,
        partition: int,
        position: int,
        *,
        max_records: int = 500,
        max_bytes: int = 8 << 20,
    ) -> Batch:
        place = TopicPartition(topic, partition)
        batch = self._taken_ahead(place, position)
        if batch is None:
            batch = self.inner.read(topic, partition, position, max_records=max_records, max_bytes=max_bytes)
            if all(claim_of(record.headers) is None for record in batch.records):
                return batch
        return self._opened(place, position, batch, max(1, max_records), max_bytes)

    def _opened(
        self, place: TopicPartition, position: int, batch: Batch, max_records: int, max_bytes: int
    ) -> Batch:
        """As many records of the batch as the limits allow, with their values; the others wait for the next read.

        A batch of references is small, whatever their values are, and these count.
        """
        records: list[Record] = []
        size = 0
        for record in batch.records:
            size += _size(record)
            if records and (size > max_bytes or len(records) == max_records):
                break
            try:
                records.append(self._with_value(record))
            except (LogUnavailable, OffsetOutOfRange):
                if not records:
                    raise
                break
        else:
            return Batch(records, batch.next_position)
        left = batch.records[len(records) :]
        with self._lock:
            self._ahead[place] = Batch(left, batch.next_position)
        return Batch(records, left[0].offset)

    def _taken_ahead(self, place: TopicPartition, position: int) -> Batch | None:
        if not self._ahead:
            return None
        with self._lock:
            ahead = self._ahead.pop(place, None)
        if ahead is None or ahead.records[0].offset != position or self._closed:
            return None
        return ahead

    def _with_value(self, record: Record) -> Record:
        header = claim_of(record.headers)
        if header is None:
            return record
        try:
            value = self._files.read(parse(header))
        except ClaimLost as lost:
            start = self.inner.start(record.topic, record.partition)
            if record.offset < start:  # retention was quicker than this read
                end = self.inner.end(record.topic, record.partition)
                raise OffsetOutOfRange(record.topic, record.partition, record.offset, start, end) from lost
            return _lost(record, lost)
        except LogUnavailable as outage:
            if not self._readonly:
                raise
            return _lost(record, outage)
        return record._replace(value=value, headers=record.headers[:-1])

    # -- retention

    def truncate_before(self, topic: str, partition: int, offset: int) -> int:
        start = self.inner.truncate_before(topic, partition, offset)
        with self._lock:
            self._ahead.pop(TopicPartition(topic, partition), None)
        self.sweep(topic, partition)
        return start

    def sweep(self, topic: str, partition: int) -> int:
        """Remove the files of a partition that no record refers to any more; returns how many.

        It removes nothing, and says why in the log of the process, when that is not safe (see above).
        """
        return 0 if self._readonly else self._sweeper.sweep(TopicPartition(topic, partition))

    # -- life

    def close(self) -> None:
        self._closed = True
        self._sweeper.close()
        try:
            self.inner.close()
        finally:
            with self._lock:
                self._ahead.clear()
            self._files.close()

    # -- what goes through

    def create_topic(self, topic: str, partitions: int, *, kept: bool = False) -> None:
        self.inner.create_topic(topic, partitions, kept=kept)

    def check_topic(self, topic: str, partitions: int, *, kept: bool = False) -> None:
        self.inner.check_topic(topic, partitions, kept=kept)

    def topics(self) -> dict[str, int]:
        return self.inner.topics()

    def partitions(self, topic: str) -> int:
        return self.inner.partitions(topic)

    def start(self, topic: str, partition: int) -> int:
        return self.inner.start(topic, partition)

    def end(self, topic: str, partition: int) -> int:
        return self.inner.end(topic, partition)

    def recent_end(self, topic: str, partition: int) -> int:
        return self.inner.recent_end(topic, partition)

    def wait(self, positions: Mapping[TopicPartition, int], timeout: timedelta) -> bool:
        return self.inner.wait(positions, timeout)

    def settle(self, topic: str, partition: int) -> None:
        self.inner.settle(topic, partition)

    def offset_at(self, topic: str, partition: int, timestamp_ms: int) -> int:
        return self.inner.offset_at(topic, partition, timestamp_ms)

    def join(
        self,
        group: str,
        topic: str,
        *,
        replica: int,
        replicas: int,
        member: str = "",
        elastic: bool = False,
    ) -> Membership:
        return self.inner.join(
            group, topic, replica=replica, replicas=replicas, member=member, elastic=elastic
        )

    def commit_hint(self, group: str, positions: Mapping[TopicPartition, int]) -> None:
        self.inner.commit_hint(group, positions)

    def hints(self, group: str) -> dict[TopicPartition, int]:
        return self.inner.hints(group)

    def groups(self, beginning: str = "") -> list[str]:
        return self.inner.groups(beginning)


def _size(record: Record) -> int:
    """Bytes of the value, also of one that lies in a file."""
    header = claim_of(record.headers)
    if header is None:
        return len(record.value)
    try:
        return parse(header).size
    except ClaimLost:
        return 0


def _lost(record: Record, reason: Exception) -> Record:
    return record._replace(headers=(*record.headers, (LOST, str(reason).encode())))
