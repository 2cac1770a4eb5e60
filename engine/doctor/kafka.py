"""The log on Kafka: reachable, topics, retention, sizes; with --deep also producing and a round through a topic of our
own. Nothing is ever written to a topic of the run.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from engine.doctor.network import refusal
from engine.doctor.result import Request, Result, failed, passed, warned
from engine.log_settings import log_settings
from engine.settings import Config
from streams.errors import LogError, TopicMismatch, UnknownTopic
from streams.log import EventLog, NewRecord, TopicPartition
from streams.open import kafka_address, open_log
from streams.topics import Topics

_CONNECT_S = 3.0
_ROUND_S = 20.0
_MENDS = "docs/kafka.md lists what each message means, under 'What errors mean'"


def not_kafka(request: Request) -> str:
    """Why these are skipped; ""."""
    return "" if request.config.log.url.startswith("kafka:") else "the log is not on Kafka"


def not_deep(request: Request) -> str:
    return not_kafka(request) or (
        "" if request.deep else "with --deep (makes a topic of its own, and removes it)"
    )


def reachable(request: Request) -> Result:
    servers, _ = kafka_address(request.config.log.url)
    silent = [f"{server}: {why}" for server in servers if (why := refusal(server, _CONNECT_S))]
    if len(silent) == len(servers):
        return failed(
            f"no broker takes connections: {'; '.join(silent)}",
            "the address in log.url, the broker, a firewall; for one on this machine: millstream broker start",
        )
    with _open(request.config) as log:
        began = time.monotonic()
        try:
            log.partitions(f"{request.config.run.name}.ledger")
        except LogError as error:
            return failed(str(error), f"advertised.listeners must be reachable from here; {_MENDS}")
        took = time.monotonic() - began
    if silent:
        return warned(
            f"answers ({took:.2f} s), but not every broker: {'; '.join(silent)}",
            "start it, or take it out of log.url",
        )
    return passed(f"{', '.join(servers)} answered within {took:.2f} s", seconds=took)


def topics(request: Request) -> Result:
    """As the run needs them: partitions, retention, compaction, sizes, replicas."""
    config = request.config
    with _open(config) as log:
        try:
            _topics(config).check(log)
        except UnknownTopic as error:
            return warned(
                str(error),
                "nothing to do before a first `millstream run`; for daemons by hand: millstream topics CONFIG --create",
            )
        except TopicMismatch as error:
            return failed(
                str(error), "change the topic as said, or choose another run.name, prefix or log.url"
            )
        except LogError as error:
            return failed(str(error), _MENDS)
    return passed(
        f"all topics of {config.run.name!r} are there, with {config.log.partitions} partitions and settings as needed"
    )


def retention(request: Request) -> Result:
    """How long records are kept, against how long the run takes at the pace that it has had so far."""
    log_config, run = request.config.log, request.config.run
    kept_s, kept_bytes = log_config.retention_s, log_config.retention_bytes
    if kept_s is None and kept_bytes is None:
        return passed("everything is kept (log.retention_s and log.retention_bytes are unset)")
    said = " and ".join(
        text
        for text in (
            f"{kept_s:g} s" if kept_s is not None else "",
            f"{kept_bytes} bytes a partition" if kept_bytes is not None else "",
        )
        if text
    )
    pace = _pace(request.config)
    if pace is None or run.steps is None or kept_s is None:
        return warned(
            f"records are removed after {said}; how long the run takes is not known"
            + ("" if run.steps is not None else " (run.steps is unset)"),
            "must be longer than any pause of the run, and than the time between two checkpoints; ask again once the "
            "run has made steps",
        )
    between = pace * request.config.checkpoint.every
    whole = pace * run.steps
    if kept_s < 2 * between:
        return failed(
            f"records are removed after {said}, but at {pace:.1f} s a step a checkpoint comes every {between:.0f} s",
            "raise log.retention_s to several times that, or lower checkpoint.every: what lies after the newest "
            "checkpoint is needed for recovery",
        )
    if kept_s < whole:
        return warned(
            f"records are removed after {said}; the run takes {whole:.0f} s at {pace:.1f} s a step",
            "its first steps can then neither be replayed nor audited; raise log.retention_s, or export in time",
        )
    return passed(f"records are kept for {said}; the run takes {whole:.0f} s at {pace:.1f} s a step")


def sizes(request: Request) -> Result:
    """Does the broker take a record as large as we may send? That of its topics is `topics`' business."""
    from kafka.admin import ConfigResource, ConfigResourceType

    from engine.log_settings import kafka_settings
    from streams.kafka.asking import Asker

    largest = request.config.log.max_record_bytes
    asker = Asker(kafka_settings(request.config))

    def ask(client: Any, _: float) -> dict[str, Any]:
        broker = str(client.describe_cluster()["brokers"][0]["broker_id"])
        resource = ConfigResource(ConfigResourceType.BROKER, broker)
        return client.describe_configs([resource], config_filter="all")["broker"][broker]

    try:
        found = asker.ask("read the settings of a broker", ask)
    except (LogError, KeyError, IndexError) as error:
        return warned(
            f"the broker's settings cannot be read ({error})",
            "grant DESCRIBE_CONFIGS on the cluster, or ask whoever runs it for message.max.bytes",
        )
    finally:
        asker.close()
    values = {
        name: int(found[name]["value"])
        for name in ("message.max.bytes", "socket.request.max.bytes")
        if name in found
    }
    frame = largest + 4096  # a batch's own header and ours
    small = {name: value for name, value in values.items() if value < frame}
    if "socket.request.max.bytes" in small:
        return failed(
            f"socket.request.max.bytes is {small['socket.request.max.bytes']}, a record may have {largest}",
            "raise it on the brokers, or lower log.max_record_bytes: what is larger goes to <run.dir>/claims",
        )
    if small:
        return passed(
            f"message.max.bytes of the broker is {small['message.max.bytes']}, below log.max_record_bytes = {largest}; "
            "the run's topics are made with a max.message.bytes of their own"
        )
    return passed(
        f"a record of log.max_record_bytes = {largest} fits ({', '.join(f'{k}={v}' for k, v in values.items())})"
    )


def producing(request: Request) -> Result:
    """Idempotent, acks=all; the largest record; read back in order, byte for byte."""
    config = request.config
    largest = config.log.max_record_bytes - 1024
    sent = [b"first", os.urandom(largest), b"last"]
    with _open(config) as log, _own_topic(log, config) as topic:
        began = time.monotonic()
        for value in sent:
            log.append(topic, 0, [NewRecord(value)], timeout=timedelta(seconds=_ROUND_S))
        wrote = time.monotonic() - began
        came, position, until = [], 0, time.monotonic() + _ROUND_S
        while len(came) < len(sent) and time.monotonic() < until:
            batch = log.read(topic, 0, position, max_bytes=32 << 20)
            came += [record.value for record in batch.records]
            position = batch.next_position
            if not batch.records:
                log.wait({TopicPartition(topic, 0): position}, timedelta(seconds=1))
        read = time.monotonic() - began - wrote
    if came != sent:
        return failed(
            f"{len(sent)} records were acknowledged, {len(came)} came back, "
            f"{sum(a == b for a, b in zip(came, sent, strict=False))} of them as they were sent",
            "this broker does not keep what it acknowledges: use Apache Kafka >= 3.0",
        )
    return passed(
        f"3 records, one of {largest} bytes, by an idempotent producer with acks=all in {wrote:.2f} s, read back in "
        f"{read:.2f} s",
        write_s=wrote,
        read_s=read,
    )


def membership(request: Request) -> Result:
    """A group of our own: a member is given its partitions, a second holder of the same share is refused."""
    from streams.errors import ShareHeld

    config = request.config
    group = f"{config.run.name}.doctor-{uuid.uuid4().hex[:8]}"
    with _open(config) as log, _own_topic(log, config) as topic:
        member = log.join(group, topic, replica=0, replicas=1, member="doctor-0")
        try:
            until, mine = time.monotonic() + _ROUND_S, frozenset[int]()
            while not mine and time.monotonic() < until:
                mine = member.partitions()
                time.sleep(0.1)
            if mine != frozenset({0}):
                return failed(
                    f"a member of a new group got {sorted(mine)} within {_ROUND_S:g} s, needed [0]",
                    "the group coordinator does not work: look at __consumer_offsets and the brokers' logs",
                )
            try:
                log.join(group, topic, replica=0, replicas=1, member="doctor-1").close()
            except ShareHeld:
                return passed(
                    f"a member of the group got its partition, a second holder was refused ({group})"
                )
        finally:
            member.close()
    return failed(
        "two members held one share of a group at once",
        "static members (group.instance.id) are needed: use Apache Kafka >= 3.0",
    )


@contextmanager
def _own_topic(log: EventLog, config: Config) -> Iterator[str]:
    """A topic that nobody else knows; removed at the end."""
    topic = f"{config.run.name}.doctor-{uuid.uuid4().hex[:8]}"
    log.create_topic(topic, 1)
    try:
        yield topic
    finally:
        _delete(config, topic)


def _delete(config: Config, topic: str) -> None:
    from engine.log_settings import kafka_settings
    from streams.kafka.asking import Asker

    settings = kafka_settings(config)
    asker = Asker(settings)
    try:
        asker.ask("remove doctor's topic", lambda client, _: client.delete_topics([settings.full(topic)]))
    except LogError:
        pass  # a right that is missing; the topic is empty but for three records
    finally:
        asker.close()


def _open(config: Config, *, readonly: bool = False) -> EventLog:
    """Without the claims' folder: nothing here goes there."""
    settings = log_settings(config, readonly=readonly, member="doctor")
    settings.pop("claims", None)
    settings.pop("max_claim_bytes", None)
    return open_log(config.log.url, **settings)


def _topics(config: Config) -> Topics:
    return Topics(config.run.name, config.log.partitions)


def _pace(config: Config) -> float | None:
    """Seconds of one step, by the times of the ledger's cuts; None before the second."""
    topics = _topics(config)
    with _open(config, readonly=True) as log:
        try:
            topic = topics.name("ledger")
            if not log.partitions(topic):
                return None
            position, end, cuts = log.start(topic, 0), log.end(topic, 0), []
            while position < end:
                batch = log.read(topic, 0, position)
                cuts += [r.timestamp_ms for r in batch.records if r.header("type") == b"batch_cut"]
                if batch.next_position <= position:
                    break
                position = batch.next_position
        except LogError:
            return None
    return None if len(cuts) < 2 else (cuts[-1] - cuts[0]) / 1000 / (len(cuts) - 1)
