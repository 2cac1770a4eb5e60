"""What each topic holds and how far each group of readers has come. Reads only."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from streams.log import EventLog, TopicPartition
from streams.topics import ALL_TOPICS, Topics


class PartitionRow(msgspec.Struct, frozen=True):
    """One partition. `records` counts offsets, so holes of a Kafka transaction count too."""

    topic: str
    partition: int
    start: int  # first kept offset
    end: int  # position after the last record
    groups: dict[str, int] = {}  # role of the group → position that it last hinted

    @property
    def records(self) -> int:
        return self.end - self.start

    def lag(self, group: str) -> int:
        """Records that the group has not read; a hint may be older than retention."""
        return max(0, self.end - max(self.start, self.groups[group]))


def partition_rows(log: EventLog, topics: Topics) -> list[PartitionRow]:
    """Every partition of the run's topics, in the order of the data path; topics that do not exist are left out.

    Groups of other runs on the same log are left out too, and those of this one are called by their roles.
    """
    ours = log.groups(topics.group(""))
    hints = {role: log.hints(group) for group in ours if (role := topics.role(group)) is not None}
    rows = []
    for topic in map(topics.name, ALL_TOPICS):
        for partition in range(log.partitions(topic)):
            place = TopicPartition(topic, partition)
            groups = {group: positions[place] for group, positions in hints.items() if place in positions}
            rows.append(PartitionRow(topic, partition, log.start(*place), log.end(*place), groups))
    return rows


def waiting(log: EventLog, topics: Topics, word: str, role: str) -> int:
    """Records of a topic that its readers have not read, as they hinted: quick, for display beside a live run."""
    hints, topic = log.hints(topics.group(role)), topics.name(word)
    places = [TopicPartition(topic, partition) for partition in range(log.partitions(topic))]
    begins = [hints[place] if place in hints else log.start(*place) for place in places]
    return sum(max(0, log.recent_end(*place) - begin) for place, begin in zip(places, begins, strict=True))


def as_json(rows: Sequence[PartitionRow]) -> str:
    """One JSON object a line, with the lag of each group."""
    return "".join(
        msgspec.json.encode(
            {
                **msgspec.structs.asdict(row),
                "records": row.records,
                "lag": {name: row.lag(name) for name in row.groups},
            }
        ).decode()
        + "\n"
        for row in rows
    )


def as_table(rows: Sequence[PartitionRow]) -> str:
    """Two tables: partitions, then the groups that read them (columns as kafka-consumer-groups has them)."""
    partitions = [("TOPIC", "PARTITION", "START", "END", "RECORDS")]
    partitions += [
        (row.topic, str(row.partition), str(row.start), str(row.end), str(row.records)) for row in rows
    ]
    groups = [("GROUP", "TOPIC", "PARTITION", "CURRENT-OFFSET", "LOG-END-OFFSET", "LAG")]
    for name in sorted({name for row in rows for name in row.groups}):
        groups += [
            (name, row.topic, str(row.partition), str(row.groups[name]), str(row.end), str(row.lag(name)))
            for row in rows
            if name in row.groups
        ]
    text = columns(partitions)
    return text if len(groups) == 1 else f"{text}\n{columns(groups)}"


def columns(table: Sequence[Sequence[str]]) -> str:
    """Cells in aligned columns, numbers to the right; the first row is the head."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    numeric = [
        len(table) > 1
        and all(cell.lstrip("-").replace(".", "", 1).isdecimal() or cell == "-" for cell in column[1:])
        for column in zip(*table, strict=True)
    ]
    lines = []
    for row in table:
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"
