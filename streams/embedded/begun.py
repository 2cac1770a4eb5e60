"""A topic whose partitions begin above offset 0, in a log that nobody uses yet: for records that keep their offsets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from streams.checks import check_name, check_partitions
from streams.embedded.catalog import Catalog
from streams.embedded.mark import MarkState, create_mark


def create_topic_at(root: Path, topic: str, starts: Sequence[int], *, lock_timeout_s: float = 30.0) -> None:
    """Make the log if there is none, and in it a topic with one partition for each start.

    A partition is then as if retention had removed what lay below its start. The topic must not exist. Raises LogError
    for a name that is none, before anything is made: it may come from a file, and it is a path here.
    """
    check_name("topic", topic)
    check_partitions(topic, len(starts))
    catalog = Catalog(root, readonly=False, lock_timeout_s=lock_timeout_s)
    try:
        for partition, start in enumerate(starts):
            folder = catalog.partition_folder(topic, partition)
            folder.mkdir(parents=True)
            create_mark(folder / "mark", MarkState(end=start, segment=start, start=start))
        catalog.create_topic(topic, len(starts))
    finally:
        catalog.close()
