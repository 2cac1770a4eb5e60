"""What the settings of Kafka must hold together. [log.kafka] is judged as it stands, wherever the log is now.

Each problem is one sentence with the fix, as in engine.config_checks.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.config_problems import Problem
from engine.settings import Config, KafkaConfig
from streams.errors import LogError
from streams.kafka.settings import KafkaSettings
from streams.open import kafka_address

_LINGER_S = KafkaSettings(servers=()).linger.total_seconds()
_PASSWORD = 'log.kafka.sasl_password = "env:NAME"'
_TOKEN = 'log.kafka.sasl_oauth_token = "file:/path" (or "env:NAME")'


def find_kafka_problems(config: Config) -> Iterator[Problem]:
    yield from _login(config.log.kafka)
    yield from _encryption(config.log.kafka)
    yield from _sizes_and_times(config)
    if config.log.url.startswith("kafka:"):
        yield from _address(config)
        yield from _retention(config)
    else:
        yield from _no_retention(config)


def _no_retention(config: Config) -> Iterator[Problem]:
    """Its segments could be removed by hand alone, and nothing yet knows below which offset nobody needs them."""
    for name in ("retention_s", "retention_bytes"):
        value = getattr(config.log, name)
        if value is not None:
            yield Problem(
                (f"log.{name}", "log.url"),
                f"log.{name} = {value:g}: only a log on Kafka removes records; the embedded log keeps everything. "
                f"Remove {name}",
            )


def _address(config: Config) -> Iterator[Problem]:
    if "@" in config.log.url:
        return  # said without showing it, in engine.config_checks
    try:
        kafka_address(config.log.url)
    except LogError as error:
        yield Problem(("log.url",), str(error).replace("log url", "log.url =", 1))


def _login(kafka: KafkaConfig) -> Iterator[Problem]:
    protocol, key = kafka.security_protocol, "log.kafka.security_protocol"
    given = [
        name
        for name in ("sasl_username", "sasl_password", "sasl_oauth_token")
        if getattr(kafka, name) is not None
    ]
    if not protocol.startswith("SASL"):
        if given:
            yield Problem(
                (key, *(f"log.kafka.{name}" for name in given)),
                f'log.kafka.{given[0]} is set, but {key} = "{protocol}" never logs in; set it to "SASL_SSL", or remove '
                f"{given[0]}",
            )
        return
    if kafka.sasl_mechanism == "OAUTHBEARER":
        if kafka.sasl_oauth_token is None:
            yield Problem(
                (key, "log.kafka.sasl_mechanism", "log.kafka.sasl_oauth_token"),
                f'log.kafka.sasl_mechanism = "OAUTHBEARER" needs {_TOKEN}',
            )
    elif not (kafka.sasl_username and kafka.sasl_password):
        yield Problem(
            (key, "log.kafka.sasl_username", "log.kafka.sasl_password"),
            f'{key} = "{protocol}" needs log.kafka.sasl_username and {_PASSWORD}',
        )


def _encryption(kafka: KafkaConfig) -> Iterator[Problem]:
    protocol, key = kafka.security_protocol, "log.kafka.security_protocol"
    given = [
        name
        for name in ("ssl_cafile", "ssl_certfile", "ssl_keyfile", "ssl_key_password")
        if getattr(kafka, name) is not None
    ]
    if given and not protocol.endswith("SSL"):
        secured = "SASL_SSL" if protocol.startswith("SASL") else "SSL"
        yield Problem(
            (key, f"log.kafka.{given[0]}"),
            f'log.kafka.{given[0]} is set, but {key} = "{protocol}" encrypts nothing; set it to "{secured}", or remove '
            f"{given[0]}",
        )
    elif kafka.ssl_certfile is None and (kafka.ssl_keyfile or kafka.ssl_key_password):
        name = "ssl_keyfile" if kafka.ssl_keyfile else "ssl_key_password"
        yield Problem(
            (f"log.kafka.{name}", "log.kafka.ssl_certfile"),
            f"log.kafka.{name} is set without log.kafka.ssl_certfile, the certificate that it belongs to; name it too",
        )


def _sizes_and_times(config: Config) -> Iterator[Problem]:
    kafka, largest = config.log.kafka, config.log.max_record_bytes
    if kafka.min_insync_replicas is not None and kafka.min_insync_replicas > kafka.replication_factor:
        yield Problem(
            ("log.kafka.min_insync_replicas", "log.kafka.replication_factor"),
            f"log.kafka.min_insync_replicas = {kafka.min_insync_replicas} is above log.kafka.replication_factor = "
            f"{kafka.replication_factor}: no append could ever be acknowledged; raise the second or lower the first",
        )
    if kafka.bytes_in_flight < largest:
        yield Problem(
            ("log.kafka.bytes_in_flight", "log.max_record_bytes"),
            f"log.kafka.bytes_in_flight = {kafka.bytes_in_flight} is below log.max_record_bytes = {largest}: the "
            f"largest record could never be sent; raise the first to at least {largest}",
        )
    least = kafka.request_timeout_s + _LINGER_S
    if kafka.delivery_timeout_s < least:
        yield Problem(
            ("log.kafka.delivery_timeout_s", "log.kafka.request_timeout_s"),
            f"log.kafka.delivery_timeout_s = {kafka.delivery_timeout_s:g} is below one request's time and the linger, "
            f"log.kafka.request_timeout_s + {_LINGER_S:g} = {least:g}: an append would be given up before it was "
            "tried once; raise the first or lower the second",
        )
    if kafka.max_silence_s < kafka.session_timeout_s:
        yield Problem(
            ("log.kafka.max_silence_s", "log.kafka.session_timeout_s"),
            f"log.kafka.max_silence_s = {kafka.max_silence_s:g} is below log.kafka.session_timeout_s = "
            f"{kafka.session_timeout_s:g}: a stage that works would lose its partitions sooner than one that died; "
            "raise the first or lower the second",
        )


def _retention(config: Config) -> Iterator[Problem]:
    """As far as it can be told: whatever is removed while a group is open is lost to it."""
    log, collector = config.log, config.collector
    longest = (
        config.rollout.task_deadline_s
        + config.reward.timeout_s
        + collector.member_deadline_s * (collector.max_redispatch + 1)
    )
    if log.retention_s is not None and log.retention_s < longest:
        yield Problem(
            (
                "log.retention_s",
                "rollout.task_deadline_s",
                "reward.timeout_s",
                "collector.member_deadline_s",
                "collector.max_redispatch",
            ),
            f"log.retention_s = {log.retention_s:g} is below the time that one group may be open, {longest:g} s = "
            "rollout.task_deadline_s + reward.timeout_s + collector.member_deadline_s × (max_redispatch + 1): its "
            "records could be removed while they are needed; raise it, best to longer than the run",
        )
    if log.retention_bytes is not None and log.retention_bytes < log.max_record_bytes:
        yield Problem(
            ("log.retention_bytes", "log.max_record_bytes"),
            f"log.retention_bytes = {log.retention_bytes} is below log.max_record_bytes = {log.max_record_bytes}: not "
            "one large record would be kept; raise it to what a partition gets in the life of a run",
        )
