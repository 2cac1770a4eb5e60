"""Topics and groups of the cluster, as one process asks for them: list, create, check, truncate, commit, evict.

How it asks, with deadlines and across restarts of the broker, is in streams/kafka/asking.py; what a topic must be like
in streams/kafka/topic_settings.py.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kafka.admin import (
    ConfigResource,
    ConfigResourceType,
    MemberToRemove,  # pyright: ignore[reportAttributeAccessIssue]
    OffsetSpec,  # pyright: ignore[reportAttributeAccessIssue]
)
from kafka.errors import KafkaError, for_code
from kafka.protocol.consumer import IsolationLevel
from kafka.structs import OffsetAndMetadata
from kafka.structs import TopicPartition as Place

from streams.checks import check_name, check_partitions, no_such
from streams.errors import LogError, LogUnavailable, OffsetOutOfRange, TopicMismatch, UnknownTopic
from streams.kafka.asking import Asker, Client
from streams.kafka.connect import explained
from streams.kafka.settings import KafkaSettings
from streams.kafka.topic_settings import Topic, disagreements, settings_of_new_topic
from streams.log import TopicPartition

logger = logging.getLogger(__name__)

_UNKNOWN_TOPIC, _LEADER_NOT_AVAILABLE, _REQUEST_TIMED_OUT, _TOPIC_EXISTS = 3, 5, 7, 36  # Kafka's error codes
_NO_SUCH_GROUP = "GroupIdNotFoundError"


class GroupMember(NamedTuple):
    """One member of a group, as the broker shows it."""

    member_id: str
    instance: str | None  # static members: their group.instance.id
    user_data: str  # what it said of itself; "" while the group is rebalancing


class Admin:
    """Connects at the first question. All methods may be called from any thread; all raise LogUnavailable when the
    cluster does not answer in time, LogClosed after close()."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._asker = Asker(settings)
        self._known: dict[str, int] = {}  # topics never change their number of partitions during a run

    # -- topics

    def topics(self) -> dict[str, int]:
        """This log's topics: name → number of partitions. The broker tells of every topic that it has: thousands, on a
        cluster that many share. All else here asks for the topics that it is about."""
        found: dict[str, int] = {}
        for described in self._asker.ask("list the topics", lambda client, _: client.describe_topics()):
            name = self._settings.bare(described["name"])
            if name is not None and not described["is_internal"] and _exists(described):
                found[name] = len(described["partitions"])
        self._known.update(found)
        return found

    def partitions(self, topic: str) -> int:
        """Number of partitions. Raises UnknownTopic, naming those that there are."""
        known = self.count(topic)
        if not known:
            raise no_such(topic, 0, self.topics())
        return known

    def count(self, topic: str) -> int:
        """Number of partitions, asked for until the topic exists; 0 before."""
        known = self._known.get(topic)
        if known is not None:
            return known
        described = self._describe(topic)
        return 0 if described is None else self._known.setdefault(topic, len(described.partitions))

    def create_topic(self, topic: str, partitions: int, kept: bool) -> None:
        """Create it and wait until it can be used, or check one that exists, whoever made it.

        Raises TopicMismatch, LogError when the cluster refuses (name, policy, rights, replication).
        """
        check_name("topic", topic)
        check_partitions(topic, partitions)
        found = self._describe(topic)
        if found is None:
            self._create(topic, partitions, kept)
            found = self._usable(topic)
        self._check(found, topic, partitions, kept)

    def check_topic(self, topic: str, partitions: int, kept: bool) -> None:
        """Raises UnknownTopic, and TopicMismatch naming each setting that disagrees and how to mend it."""
        found = self._describe(topic)
        if found is None:
            raise UnknownTopic(f"topic {topic!r} does not exist")
        self._check(found, topic, partitions, kept)

    def truncate_before(self, topic: str, partition: int, offset: int) -> int:
        """Remove records below `offset`; returns the new start, which never goes back. Raises OffsetOutOfRange
        beyond the end."""
        if not 0 <= partition < self.partitions(topic):
            raise no_such(topic, partition, {topic: self.partitions(topic)})
        place = Place(self._settings.full(topic), partition)

        def truncate(client: Client, left_s: float) -> tuple[int, int | None]:
            """(start, None), or (start, end) when the offset is beyond the end."""
            start = client.list_partition_offsets({place: OffsetSpec.EARLIEST})[place].offset
            if offset <= start:
                return start, None
            committed = IsolationLevel.READ_COMMITTED  # the end that readers see
            end = client.list_partition_offsets({place: OffsetSpec.LATEST}, committed)[place].offset
            if offset > end:
                return start, end
            return client.delete_records({place: offset}, timeout_ms=left_s * 1000)[place][
                "low_watermark"
            ], None

        start, end = self._asker.ask(f"remove records of {topic}/{partition}", truncate)
        if end is not None:
            raise OffsetOutOfRange(topic, partition, offset, start, end)
        return start

    # -- groups; names as the broker has them

    def group(self, group: str, *, stop: Callable[[], bool] | None = None) -> list[GroupMember]:
        """Its members now; none when there is no such group."""

        def describe(client: Client, _: float) -> dict[str, Any]:
            described = client.describe_groups([group])[group]
            error = described["error"] or ""
            if error and _NO_SUCH_GROUP not in error:
                raise _error_in(error)
            return described

        described = self._asker.ask(f"describe the group {group!r}", describe, stop=stop)
        return [
            GroupMember(
                member["member_id"],
                member["group_instance_id"],
                (member["member_metadata"] or {}).get("user_data") or "",
            )
            for member in described["members"]
        ]

    def remove_members(
        self,
        group: str,
        members: Sequence[tuple[str, str | None]],  # (member id, static id)
        *,
        timeout_s: float | None = None,
        stop: Callable[[], bool],
    ) -> None:
        """Make them leave. One that has been replaced under its static id in the meantime is left alone."""
        leaving = [
            MemberToRemove(member_id=member, group_instance_id=instance) for member, instance in members
        ]
        self._asker.ask(
            f"leave the group {group!r}",
            lambda client, _: client.remove_group_members(group, leaving),
            timeout_s=timeout_s,
            stop=stop,
        )

    def commit(self, group: str, offsets: Mapping[Place, OffsetAndMetadata], timeout_s: float) -> None:
        """Commit for a group without members, also when interrupted. Raises LogError when it has some."""
        outcome = self._asker.ask(
            f"commit offsets of the group {group!r}",
            lambda client, _: client.alter_group_offsets(group, dict(offsets)),
            timeout_s=timeout_s,
            stop=_never,
        )
        for place, error in outcome.items():
            if error.errno:
                raise LogError(f"group {group!r}: {place.topic}/{place.partition}: {error.__name__}")

    def committed(self, groups: Sequence[str]) -> dict[str, dict[TopicPartition, int]]:
        """Committed offsets of each group, of this log's topics."""
        if not groups:
            return {}
        answer = self._asker.ask(
            "read committed offsets", lambda client, _: client.list_group_offsets(list(groups))
        )
        found: dict[str, dict[TopicPartition, int]] = {}
        for group, offsets in answer.items():
            found[group] = {}
            for place, committed in offsets.items():
                topic = self._settings.bare(place.topic)
                if topic is not None and committed.offset >= 0:
                    found[group][TopicPartition(topic, place.partition)] = committed.offset
        return found

    def groups(self, beginning: str = "") -> list[str]:
        """Names on the broker of this log's consumer groups that begin so, also of those without offsets."""
        full = self._settings.full(beginning)
        return [
            group["group_id"]
            for group in self._asker.ask("list the groups", lambda client, _: client.list_groups())
            if group["group_id"].startswith(full)
            and self._settings.bare(group["group_id"]) is not None
            and group.get("protocol_type", "") in ("", "consumer")
            and (group.get("group_type") or "classic").lower() in ("classic", "consumer")
        ]

    def close(self) -> None:
        """Twice is harmless."""
        self._asker.close()

    # -- inside

    def _describe(self, topic: str) -> Topic | None:
        full = self._settings.full(topic)
        (described,) = self._asker.ask(
            f"describe the topic {topic!r}", lambda client, _: client.describe_topics([full])
        )
        if described["error_code"] == _UNKNOWN_TOPIC:
            return None
        if not _exists(described):
            what = f"topic {topic!r} (on the broker: {full})"
            raise explained(for_code(described["error_code"])(), what, self._settings)
        return Topic.of(described)

    def _create(self, topic: str, partitions: int, kept: bool) -> None:
        new = {
            "num_partitions": partitions,
            "replication_factor": self._settings.replication_factor,
            "configs": settings_of_new_topic(self._settings, kept),
        }
        full = self._settings.full(topic)
        answer = self._asker.ask(
            f"create the topic {topic!r}",
            lambda client, left_s: client.create_topics(
                {full: new}, timeout_ms=int(left_s * 1000), raise_errors=False
            ),
        )
        (created,) = answer["topics"]
        code = created["error_code"]
        # Another process was faster, or the cluster is still at it: then what came of it is checked.
        if code not in (0, _TOPIC_EXISTS, _REQUEST_TIMED_OUT):
            what = f"topic {topic!r} cannot be created as {full}"
            raise explained(for_code(code)(created["error_message"]), what, self._settings)

    def _usable(self, topic: str) -> Topic:
        """Wait until every partition of a topic that was just created has a leader that knows of it."""
        timeout_s = self._settings.timeout.total_seconds()
        deadline = time.monotonic() + timeout_s
        while True:
            found = self._describe(topic)
            if found is not None and found.is_usable and self._leaders_answer(topic, len(found.partitions)):
                return found
            if time.monotonic() >= deadline or self._settings.interrupted():
                raise LogUnavailable(
                    f"topic {topic!r} was created, but after {timeout_s:.0f} s "
                    + ("not all of its partitions have a leader" if found else "the cluster does not show it")
                )
            time.sleep(0.02)

    def _leaders_answer(self, topic: str, partitions: int) -> bool:
        """Brokers name a leader a moment before it takes records."""
        full = self._settings.full(topic)
        ends = {Place(full, partition): OffsetSpec.LATEST for partition in range(partitions)}
        try:
            self._asker.ask(
                f"reach the leaders of the topic {topic!r}",
                lambda client, left_s: client.list_partition_offsets(dict(ends), timeout_ms=left_s * 1000),
            )
        except UnknownTopic:
            return False
        return True

    def _check(self, found: Topic, topic: str, partitions: int, kept: bool) -> None:
        full = self._settings.full(topic)
        if len(found.partitions) != partitions:
            raise TopicMismatch(
                f"topic {topic!r} has {len(found.partitions)} partitions, {partitions} were asked for; the number is "
                f"fixed for a run: use another run name, or remove the topic and all its records with\n"
                f"  python -m kafka.admin -b {self._settings.servers[0]} topics delete -t {full}"
            )
        resource = ConfigResource(ConfigResourceType.TOPIC, full)
        described = self._asker.ask(
            f"read the settings of the topic {topic!r}",
            lambda client, _: client.describe_configs([resource], config_filter="all"),
        )
        values = {name: value["value"] for name, value in described.get("topic", {}).get(full, {}).items()}
        if not values:
            logger.warning(
                "topic %r: its settings cannot be read, so they are not checked; grant DESCRIBE_CONFIGS on it",
                topic,
            )
        wrong = disagreements(self._settings, full, found, values, kept)
        if wrong:
            raise TopicMismatch(f"topic {topic!r} is not as this run needs it:\n" + "\n".join(wrong))
        self._known[topic] = partitions


def _never() -> bool:
    return False


def _exists(described: Mapping[str, Any]) -> bool:
    """Also while its leaders are being elected."""
    return described["error_code"] in (0, _LEADER_NOT_AVAILABLE) and bool(described["partitions"])


def _error_in(text: str) -> KafkaError:
    """The error that kafka-python hands out as a text only."""
    number = re.match(r"\[Error (-?\d+)\]", text)
    return for_code(int(number[1]))(text) if number else KafkaError(text)
