"""Writing a slice: the chosen records as they lie in the log, byte for byte, and the files that go with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from replay.slices.format import Manifest, SliceWriter
from replay.slices.select import Stretch, Stretches
from streams.errors import CorruptRecord, LogError, OffsetOutOfRange
from streams.events import SCHEMA_MAJOR, SCHEMA_MINOR
from streams.log import EventLog, Record
from streams.topics import ALL_TOPICS, Topics


class Written(NamedTuple):
    n_records: int
    n_bytes: int  # of the file


def write_slice(
    path: Path,
    log: EventLog,
    topics: Topics,
    stretches: Stretches,
    *,
    source: str,
    chosen: str,
    config: str,
    fingerprint: str,
    made_ms: int,
    files: Mapping[str, Path] = {},
    say: Callable[[str], None] = lambda text: None,
) -> Written:
    """Raises SliceError when the file exists, and LogError when retention has removed a record meanwhile.

    A damaged record cannot be taken along: the slice is made without it, and `say` is told.
    """
    manifest = Manifest(
        run=topics.run,
        partitions=topics.partitions,
        schema=f"{SCHEMA_MAJOR}.{SCHEMA_MINOR}",
        source=source,
        made_ms=made_ms,
        chosen=chosen,
        config=config,
        fingerprint=fingerprint,
        topics={
            word: [stretches[word, partition][:2] for partition in range(topics.count(word))]
            for word in ALL_TOPICS
        },
        files={name: file.stat().st_size for name, file in files.items()},
    )
    with SliceWriter(path, manifest) as writer:
        for (word, partition), stretch in stretches.items():
            for record in _records(log, topics.name(word), partition, stretch, say):
                writer.record(word, record)
        for name, file in files.items():
            writer.file(name, file)
    return Written(writer.n_records, path.stat().st_size)


def _records(
    log: EventLog, topic: str, partition: int, stretch: Stretch, say: Callable[[str], None]
) -> Iterator[Record]:
    position = stretch.start
    while position < stretch.end:
        try:
            batch = log.read(topic, partition, position)
        except CorruptRecord as damage:
            say(f"left out: {damage}")
            position = damage.next_offset
            continue
        except OffsetOutOfRange as error:
            raise LogError(
                f"{error}; retention is at work: choose later steps, or stop it for a moment"
            ) from error
        yield from (record for record in batch.records if stretch.wants(record.offset))
        if batch.next_position <= position:
            return
        position = batch.next_position
