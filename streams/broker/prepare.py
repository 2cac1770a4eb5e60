"""All that a first start needs and that is kept for later ones: Java found, jars fetched, their classes archived."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from streams.broker.archive import archive_of, making_options
from streams.broker.errors import BrokerFailed
from streams.broker.folders import locked
from streams.broker.java import Java, find_java
from streams.broker.maven import KAFKA_VERSION, is_whole, kafka_dir, kafka_jars
from streams.broker.node import Node

TIMEOUT = timedelta(minutes=2)

logger = logging.getLogger(__name__)


def prepare(say: Callable[[str], None] = lambda _: None) -> None:
    """Done once for a machine's user, then at once. `say` hears of each step that takes longer, before it begins.

    Raises ToolMissing without Java or Maven, BrokerFailed when the download fails.
    """
    java = find_java()
    if not is_whole(kafka_dir()):
        say(f"fetching Apache Kafka {KAFKA_VERSION} with Maven into {kafka_dir()} (44 MB, once) …")
    kafka_jars()
    archive = archive_of(java)
    if archive.exists() or not os.access(kafka_dir(), os.W_OK):
        return
    say("archiving its classes, which halves the time of every start (once, some seconds) …")
    with locked(
        kafka_dir().parent / f".{kafka_dir().name}.classes.lock", TIMEOUT, "archiving Kafka's classes"
    ):
        if not archive.exists():
            _make(java, archive)


def _make(java: Java, archive: Path) -> None:
    """Let a node that nobody will use load what a node loads. Without an archive a start takes longer, no more."""
    with tempfile.TemporaryDirectory(prefix=f".{archive.stem}.", dir=archive.parent) as folder:
        draft = Path(folder, "classes.jsa")
        node = Node(Path(folder, "node"), port=0, java_options=making_options(draft))
        try:
            node.start()
            node.stop(TIMEOUT)
        except BrokerFailed as error:
            logger.warning("no archive of Kafka's classes could be made: %s", error)
            return  # perhaps the next time
        finally:
            node.kill()
        if not draft.exists():
            logger.info("this Java (%s) makes no archive of classes", java.build)
            draft.touch()
        draft.replace(archive)
