"""What a topic on the broker must be like for the log's promises to hold: made so, and demanded of those that exist.

    acknowledged is kept       replication, min.insync.replicas, no unclean election
    nothing goes too early     cleanup.policy, retention.ms, retention.bytes
    what is appended fits      max.message.bytes
    timestamps are the events' message.timestamp.type

Settings that can only refuse a record aloud (such as how far a clock may be ahead) are set but not demanded.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

from streams.kafka.settings import KafkaSettings

FOR_EVER = -1  # of retention.ms and retention.bytes
BATCH_OVERHEAD = (
    16 << 10
)  # of one record that fills its limit: batch header, and lengths of values and headers
_NO_LIMIT = (1 << 63) - 1


class Topic(NamedTuple):
    """What the cluster says of a topic."""

    partitions: list[int]  # replicas of each
    is_usable: bool  # every partition has a leader

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> Topic:
        """From kafka-python's description."""
        partitions = described["partitions"]
        return cls(
            [len(partition["replica_nodes"]) for partition in partitions],
            bool(partitions)
            and all(partition["leader_id"] >= 0 and not partition["error_code"] for partition in partitions),
        )


def largest_batch(settings: KafkaSettings) -> int:
    """Bytes of the largest batch that a producer of ours may send: one record at the limit, or many small ones."""
    return max(settings.max_record_bytes, settings.batch_bytes) + BATCH_OVERHEAD


def settings_of_new_topic(settings: KafkaSettings, kept: bool) -> dict[str, str]:
    """Every setting that matters, whatever the cluster's defaults are."""
    wanted = {
        "cleanup.policy": "delete",
        "retention.ms": str(_retention_ms(settings, kept)),
        "retention.bytes": str(_retention_bytes(settings, kept)),
        "max.message.bytes": str(largest_batch(settings)),
        "message.timestamp.type": "CreateTime",
        # Kafka's default of one hour would refuse the records of a machine whose clock is ahead.
        "message.timestamp.after.max.ms": str(_NO_LIMIT),
        "message.timestamp.before.max.ms": str(_NO_LIMIT),
    }
    if settings.min_insync_replicas is not None:
        wanted["min.insync.replicas"] = str(settings.min_insync_replicas)
    return wanted


def disagreements(
    settings: KafkaSettings, full: str, found: Topic, values: Mapping[str, str | None], kept: bool
) -> list[str]:
    """One sentence for each setting of an existing topic under which a promise would not hold, ending with the command
    that mends it. `values`: what the broker lets us read of the topic's settings; what it hides is passed over."""
    wrong: list[str] = []

    def demand(name: str, is_fine: bool, needed: str, why: str, mended: str) -> None:
        if not is_fine:
            wrong.append(
                f"  {name} is {values[name]}, needed is {needed}: {why}; mend it with\n{alter(name, mended)}"
            )

    def alter(name: str, value: str) -> str:
        return f"    python -m kafka.admin -b {settings.servers[0]} configs alter -r topic -n {full} -c {name}={value}"

    def number(name: str) -> int | None:
        value = values.get(name)
        return None if value is None else int(value)

    few = min(found.partitions, default=0)
    if few < settings.replication_factor:
        wrong.append(
            f"  it has {few} replicas, log.kafka.replication_factor is {settings.replication_factor}: a lost broker "
            "would lose acknowledged records; mend it with kafka-reassign-partitions.sh, or lower the setting"
        )
    if (policy := values.get("cleanup.policy")) is not None:
        demand(
            "cleanup.policy", policy == "delete", "delete", "compaction removes records of a run", "delete"
        )
    for name, wanted, unit in (
        ("retention.ms", _retention_ms(settings, kept), _milliseconds),
        ("retention.bytes", _retention_bytes(settings, kept), _bytes),
    ):
        if (kept_for := number(name)) is not None:
            enough = kept_for < 0 or (wanted != FOR_EVER and kept_for >= wanted)
            why = "records would go while the run needs them"
            demand(name, enough, f"at least {unit(wanted)}", why, str(wanted))
    if (limit := number("max.message.bytes")) is not None:
        needed = largest_batch(settings)
        demand(
            "max.message.bytes", limit >= needed, f"{needed}", "large records would be refused", str(needed)
        )
    if (stamped := values.get("message.timestamp.type")) is not None:
        why = "records would be stamped by the broker"
        demand("message.timestamp.type", stamped == "CreateTime", "CreateTime", why, "CreateTime")
    if (unclean := values.get("unclean.leader.election.enable")) is not None:
        why = "an election could lose acknowledged records"
        demand("unclean.leader.election.enable", unclean == "false", "false", why, "false")
    least = settings.min_insync_replicas
    if least is not None and (in_sync := number("min.insync.replicas")) is not None:
        why = "records would be acknowledged with fewer copies"
        demand("min.insync.replicas", in_sync >= least, f"{least}", why, str(least))
    return wrong


def _retention_ms(settings: KafkaSettings, kept: bool) -> int:
    if kept or settings.retention is None:
        return FOR_EVER
    return settings.retention // timedelta(milliseconds=1)


def _retention_bytes(settings: KafkaSettings, kept: bool) -> int:
    return FOR_EVER if kept or settings.retention_bytes is None else settings.retention_bytes


def _milliseconds(value: int) -> str:
    return "-1 (for ever)" if value == FOR_EVER else f"{value} ({timedelta(milliseconds=value)})"


def _bytes(value: int) -> str:
    return "-1 (no limit)" if value == FOR_EVER else str(value)
