"""Ten readers beside a run that goes on: no record, no commit and no share of it is theirs (case O25).

The run is the real stages over the embedded log, moved one by one; the readers are threads with a handle of their own.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from replay.tail import Tail, parse_start
from streams.embedded.log import EmbeddedLog
from streams.log import NewRecord, TopicPartition
from streams.topics import DATA_TOPICS
from tests.support.world import World

DEADLINE_S = 60.0
TAILS = 10


class OfTheRun(EmbeddedLog):
    """The run's own handle; remembers what the stages append and commit."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, fsync="never")
        self.appended: Counter[tuple[str, int]] = Counter()
        self.committed: dict[tuple[str, TopicPartition], list[int]] = {}

    def submit(self, topic: str, partition: int, records: Sequence[NewRecord]) -> Future[int]:
        self.appended[topic, partition] += len(records)
        return super().submit(topic, partition, records)

    def commit_hint(self, group, positions) -> None:
        for place, position in positions.items():
            self.committed.setdefault((group, TopicPartition(*place)), []).append(position)
        super().commit_hint(group, positions)


class Watchers:
    """Ten tails that follow, each with a handle of its own on the log, as ten processes have."""

    def __init__(self, folder: Path, run: World) -> None:
        self.shown = [0] * TAILS
        self.failed: list[BaseException] = []
        self._stopped = threading.Event()
        words, topics = (*DATA_TOPICS, "ledger"), run.topics
        self._threads = [
            threading.Thread(
                target=self._follow, args=(index, folder, topics.name(words[index % len(words)]))
            )
            for index in range(TAILS)
        ]

    def __enter__(self) -> Watchers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(DEADLINE_S)

    def _follow(self, index: int, folder: Path, topic: str) -> None:
        try:
            with EmbeddedLog(folder, readonly=True) as log:
                partitions = range(log.topics()[topic])
                tail = Tail(log, topic, partitions, parse_start("beginning"), on_wait=self._end_if_stopped)
                for _ in tail:
                    self.shown[index] += 1
        except StopFollowing:
            pass
        except BaseException as error:
            self.failed.append(error)

    def _end_if_stopped(self) -> None:
        if self._stopped.is_set():
            raise StopFollowing


class StopFollowing(Exception):
    """How a tail that would follow for ever is ended."""


def test_ten_tails_beside_a_run_leave_its_records_commits_and_groups_its_own(tmp_path: Path):
    log = OfTheRun(tmp_path / "log")
    world = World(tmp_path, rows=8, log=log)
    try:
        with Watchers(tmp_path / "log", world) as watchers:
            ledger = world.run(random.Random(7))
        assert watchers.failed == []
        assert min(watchers.shown) > 0, "every tail has seen something"
        assert ledger.finished is not None

        ends = {(topic, p): log.end(topic, p) for topic, count in log.topics().items() for p in range(count)}
        assert ends == {place: log.appended[place] for place in ends}, "nobody else wrote"
        assert log.committed and all(each == sorted(each) for each in log.committed.values()), (
            "none moved back"
        )
        last = {key: each[-1] for key, each in log.committed.items()}
        found = {(group, place): at for group in log.groups() for place, at in log.hints(group).items()}
        assert found == last, "nobody else committed, and no group is new"
    finally:
        world.close()
        log.close()
