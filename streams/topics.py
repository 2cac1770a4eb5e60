"""Names and partitions of a run's topics (DESIGN §3)."""

from __future__ import annotations

from typing import NamedTuple

from streams.log import EventLog

DATA_TOPICS = ("tasks", "trajectories", "rewards", "groups")
SINGLE_TOPICS = ("ledger", "fleet", "metrics", "dead")
ALL_TOPICS = DATA_TOPICS + SINGLE_TOPICS


class Topics(NamedTuple):
    """A run's topics: `<run>.<word>`. Data topics have `partitions` partitions, the others one."""

    run: str
    partitions: int

    def name(self, word: str) -> str:
        if word not in ALL_TOPICS:
            raise ValueError(f"no topic {word!r}; known: {', '.join(ALL_TOPICS)}")
        return f"{self.run}.{word}"

    def count(self, word: str) -> int:
        return self.partitions if word in DATA_TOPICS else 1

    def word(self, topic: str) -> str:
        """The bare word of a full topic name."""
        return topic[len(self.run) + 1 :] if topic.startswith(self.run + ".") else topic

    def create(self, log: EventLog) -> None:
        """Create every topic, or check that it is there with the right number of partitions.

        A producer that would spread one group over two partitionings is refused here (TopicMismatch).
        """
        for word in ALL_TOPICS:
            log.create_topic(self.name(word), self.count(word))
