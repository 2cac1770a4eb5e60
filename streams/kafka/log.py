"""The log on Apache Kafka: `kafka://host:port[,host:port…][/PREFIX]`.

    submit ──► Writer ──► producer of control topics · producer of bulk topics ──► Kafka
    read, wait ◄── Reader ◄── a follower each for control and bulk topics (ahead) · a seeker (anywhere)
    join, commit_hint ──► Groups (static members, our own assignor)      create_topic, … ──► Admin

Exactly-once does not rest on broker transactions (DESIGN §4): what it needs is an idempotent producer, acks=all and
order within a partition. Two guarantees are this class's own:
  - what was acknowledged to this process is seen by its next read, and `end` is always asked of the broker;
  - no call waits longer than its deadline, and an absent broker is LogUnavailable, never a silent loss.
Reads may lag behind another process's acknowledgement by the time that one fetch takes (a few milliseconds).

Example:
    >>> log = KafkaLog(("127.0.0.1:9092",), "demo.")            # doctest: +SKIP
    >>> log.create_topic("tasks", 2)                              # doctest: +SKIP
    >>> log.append("tasks", 0, [NewRecord(b"hello")])             # doctest: +SKIP
    0
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

from streams.checks import check_name, check_partitions, no_such
from streams.errors import LogClosed, LogError, LogUnavailable
from streams.kafka.admin import Admin
from streams.kafka.groups import Groups
from streams.kafka.reader import Reader
from streams.kafka.settings import KafkaSettings
from streams.kafka.writer import Writer
from streams.log import DEFAULT_TIMEOUT, Batch, EventLog, Membership, NewRecord, TopicPartition, share

logger = logging.getLogger(__name__)

_CLOSE_S = 5.0  # for what is still on its way when the log is closed, unless it is interrupted
_INTERRUPTED_S = 0.5
LONGEST_PREFIX = 48  # Kafka's topic names have at most 249 characters, ours 200


class KafkaLog(EventLog):
    """Lifecycle: open (connects to nothing yet) → create_topic, append, read, … → close.

    Safe to use from several threads; not across a fork.
    """

    moves_shares = True

    def __init__(self, servers: Sequence[str], prefix: str = "", **settings: Any) -> None:
        """`settings` are the fields of KafkaSettings. Raises LogError for a missing client library."""
        if prefix:
            check_name("prefix", prefix)
            if len(prefix) > LONGEST_PREFIX:
                raise LogError(f"prefix {prefix!r}: must have at most {LONGEST_PREFIX} characters")
        self.settings = KafkaSettings(servers=tuple(servers), prefix=prefix, **settings)
        self._admin = Admin(self.settings)
        self._reader = Reader(self.settings)
        self._writer = Writer(self.settings, acked=self._reader.acked)
        self._groups = Groups(self.settings, self._admin)
        self._lock = threading.Lock()
        self._closed = False

    # -- topics

    def create_topic(self, topic: str, partitions: int, *, kept: bool = False) -> None:
        self._check_writable()
        check_name("topic", topic)
        check_partitions(topic, partitions)
        self._admin.create_topic(topic, partitions, kept)

    def check_topic(self, topic: str, partitions: int, *, kept: bool = False) -> None:
        self._check_open()
        self._admin.check_topic(topic, partitions, kept)

    def topics(self) -> dict[str, int]:
        self._check_open()
        return self._admin.topics()

    def partitions(self, topic: str) -> int:
        self._check_open()
        return self._admin.count(topic)

    # -- writing

    def submit(self, topic: str, partition: int, records: Sequence[NewRecord]) -> Future[int]:
        try:
            self._check_writable()
            self._check_place(topic, partition)
        except LogError as error:
            failed: Future[int] = Future()
            failed.set_exception(error)
            return failed
        return self._writer.submit(topic, partition, records)

    def flush(self, timeout: timedelta = DEFAULT_TIMEOUT) -> dict[TopicPartition, int]:
        return self._writer.flush(timeout)

    def settle(self, topic: str, partition: int) -> None:
        self._check_place(topic, partition)
        self._writer.settle(topic, partition)

    # -- reading

    def start(self, topic: str, partition: int) -> int:
        self._check_place(topic, partition)
        return self._reader.start(topic, partition)

    def end(self, topic: str, partition: int) -> int:
        self._check_place(topic, partition)
        return self._reader.end(topic, partition)

    def recent_end(self, topic: str, partition: int) -> int:
        self._check_place(topic, partition)
        return self._reader.recent_end(topic, partition)

    def read(
        self,
        topic: str,
        partition: int,
        position: int,
        *,
        max_records: int = 500,
        max_bytes: int = 8 << 20,
    ) -> Batch:
        self._check_place(topic, partition)
        return self._reader.read(topic, partition, position, max_records, max_bytes)

    def wait(self, positions: Mapping[TopicPartition, int], timeout: timedelta) -> bool:
        for place in positions:
            self._check_place(*place)
        return self._reader.wait(positions, timeout)

    def offset_at(self, topic: str, partition: int, timestamp_ms: int) -> int:
        self._check_place(topic, partition)
        return self._reader.offset_at(topic, partition, timestamp_ms)

    # -- groups

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
        self._check_writable()
        check_name("group", group)
        share(1, replica, replicas)  # refuses a replica outside [0, replicas)
        self._check_place(topic, 0)
        return self._groups.join(group, topic, replica, replicas, member, elastic)

    def commit_hint(self, group: str, positions: Mapping[TopicPartition, int]) -> None:
        self._check_writable()
        check_name("group", group)
        for place in positions:
            self._check_place(*place)
        self._groups.commit_hint(group, positions)

    def hints(self, group: str) -> dict[TopicPartition, int]:
        self._check_open()
        return self._groups.hints(group)

    def groups(self, beginning: str = "") -> list[str]:
        self._check_open()
        return self._groups.groups(beginning)

    # -- retention

    def truncate_before(self, topic: str, partition: int, offset: int) -> int:
        self._check_writable()
        self._check_place(topic, partition)
        start = self._admin.truncate_before(topic, partition, offset)
        self._reader.truncated(TopicPartition(topic, partition), start)
        return start

    # -- life

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        timeout = timedelta(seconds=_INTERRUPTED_S if self.settings.interrupted() else _CLOSE_S)
        undelivered = self._writer.close(timeout)
        self._groups.close()
        self._reader.close()
        self._admin.close()
        if undelivered:
            places = ", ".join(f"{count} of {t}/{p}" for (t, p), count in sorted(undelivered.items()))
            raise LogUnavailable(
                f"closed with {sum(undelivered.values())} records undelivered ({places}): "
                f"{', '.join(self.settings.servers)} did not acknowledge them; they may still have been appended"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise LogClosed(f"the log {self.settings.servers[0]} was closed; open it again to go on")

    def _check_writable(self) -> None:
        self._check_open()
        if self.settings.readonly:
            raise LogError(f"the log {self.settings.servers[0]} is open read-only")

    def _check_place(self, topic: str, partition: int) -> None:
        """Costs a look into a dictionary once the topic is known."""
        self._check_open()
        if not 0 <= partition < self._admin.partitions(topic):
            raise no_such(topic, partition, {topic: self._admin.partitions(topic)})
