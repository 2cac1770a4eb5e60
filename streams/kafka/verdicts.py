"""What the owner of an append is told that was not acknowledged, or refused along with others."""

from __future__ import annotations

from streams.errors import LogClosed, LogError, LogUnavailable, UnknownTopic
from streams.kafka.link import Append
from streams.kafka.security import who
from streams.kafka.settings import KafkaSettings
from streams.log import TopicPartition


def not_sent(append: Append, settings: KafkaSettings, when: str, why: str) -> LogError:
    """`why`: the brokers cannot be reached; "" when they can."""
    why = why or f"{', '.join(settings.servers)} did not take what was before it"
    return LogUnavailable(f"{append}: could not be sent {when}: {why}; nothing of it was appended")


def not_acknowledged(append: Append, settings: KafkaSettings, when: str) -> LogError:
    return LogUnavailable(
        f"{append}: {', '.join(settings.servers)} did not acknowledge it {when}; it may still be appended"
    )


def within(settings: KafkaSettings) -> str:
    """The `when` of an append whose deadline has passed."""
    return f"within {settings.delivery_timeout.total_seconds():g} s"


def closed(append: Append) -> LogError:
    return LogClosed(f"{append}: the log was closed; open it again to go on")


def unknown_topic(place: TopicPartition, settings: KafkaSettings) -> LogError:
    return UnknownTopic(
        f"Kafka knows no partition {place.partition} of a topic {settings.full(place.topic)!r}, or hides it "
        f"from {who(settings.security)}; make it with `millstream topics CONFIG --create`"
    )


def failed_with(append: Append, culprit: TopicPartition) -> LogError:
    """The client that had it is thrown away for an error at another place."""
    return LogUnavailable(
        f"{append}: the client was made anew after an error at {culprit.topic}/{culprit.partition}; it may "
        "still be appended"
    )


def refused_together(append: Append, error: LogError) -> LogError:
    return LogUnavailable(
        f"{append}: sent together with others, of which one was refused ({error}); tried again, each goes alone"
    )
