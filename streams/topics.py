"""Names, partitions and groups of a run's topics (DESIGN §3). Runs may share a log, so every name holds the run's."""

from __future__ import annotations

from typing import NamedTuple

from streams.errors import UnknownTopic
from streams.log import EventLog

DATA_TOPICS = ("tasks", "trajectories", "rewards", "groups")
SINGLE_TOPICS = ("ledger", "fleet", "metrics", "dead")
ALL_TOPICS = DATA_TOPICS + SINGLE_TOPICS
KEPT_TOPICS = ("ledger", "fleet")  # no retention ever applies: they are what the run is


def beside(topic: str, word: str) -> str:
    """The topic `word` of the same run as `topic` (a full name).

    >>> beside("demo.tasks", "dead")
    'demo.dead'
    """
    return f"{topic.rpartition('.')[0]}.{word}"


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

    def group(self, role: str) -> str:
        """The name of a role's group of readers, for shares and hints: `<run>.<role>`."""
        return f"{self.run}.{role}"

    def role(self, group: str) -> str | None:
        """The role of a group's name; None for a group of another run."""
        role = group.removeprefix(self.run + ".")
        return None if role == group or "." in role else role

    def create(self, log: EventLog) -> list[str]:
        """Create every topic, or check that it is there as it should be; returns the names of those that were made.

        A producer that would spread one group over two partitionings is refused here (TopicMismatch).
        """
        made = []
        for word in ALL_TOPICS:
            if not log.partitions(self.name(word)):
                made.append(self.name(word))
            log.create_topic(self.name(word), self.count(word), kept=word in KEPT_TOPICS)
        return made

    def check(self, log: EventLog) -> None:
        """Raise UnknownTopic naming every topic that does not exist, or TopicMismatch for the first that is not as it
        should be. Creates nothing."""
        missing = []
        for word in ALL_TOPICS:
            try:
                log.check_topic(self.name(word), self.count(word), kept=word in KEPT_TOPICS)
            except UnknownTopic:
                missing.append(self.name(word))
        if missing:
            noun = "topic" if len(missing) == 1 else "topics"
            verb = "does not exist" if len(missing) == 1 else "do not exist"
            raise UnknownTopic(f"{noun} {', '.join(missing)} {verb}")
