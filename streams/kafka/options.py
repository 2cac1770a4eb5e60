"""KafkaSettings in the words of kafka-python and of librdkafka. Nothing that matters is left to a client's default.

What is decided here, and why:
  - acks=all and an idempotent producer, demanded: a client that cannot have both must say so, not go without.
  - A client gives an append up after twice `delivery_timeout`. The log tells the caller after once (lanes.py); until
    the client gives up it goes on trying, so that a broker that comes back late finds the partition in order.
  - No compression: values are compressed once, by us (streams/codec.py).
  - A batch holds at most what one record may take, so one limit of a topic serves both.
  - Offsets are never committed or reset by a consumer, and only what is committed is read.
  - Reconnecting never pauses for more than a second: the default of 30 s outlives most restarts of a broker.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

from streams.errors import LogError
from streams.kafka import security as logins
from streams.kafka.settings import KafkaSettings
from streams.kafka.topic_settings import largest_batch

SLOW_ALLOWED = (
    "MILLSTREAM_ALLOW_SLOW_KAFKA"  # environment variable: "1" runs kafka-python without its C library
)

_RECONNECT_MS = 50
_RECONNECT_MAX_MS = 1000
_RETRY_MS = 100
_METADATA_AGE_MS = 60_000  # how long a moved partition may go unnoticed when nothing fails
_BOOTSTRAP_MS = 3000  # of one attempt; the log tries again
_MAX_BLOCK_MS = 500  # of one look for a topic; the log tries again
_IDLE_MS = 9 * 60 * 1000  # below the brokers' ten minutes: who closes first does not lose a request
_FETCH_OF_PARTITION = 4 << 20  # a larger batch is still returned whole (KIP-74)


# -- kafka-python


def python_producer_options(settings: KafkaSettings, *, control: bool) -> dict[str, Any]:
    """For kafka.KafkaProducer. Raises LogError for a missing library and for a login that cannot work."""
    require_kafka_python()
    return _python(settings, _python_producer(settings, control), shown=False)


def python_consumer_options(settings: KafkaSettings) -> dict[str, Any]:
    """For kafka.KafkaConsumer without a group. Raises as python_producer_options."""
    require_kafka_python()
    return _python(settings, _python_consumer(settings), shown=False)


def python_admin_options(settings: KafkaSettings) -> dict[str, Any]:
    """For kafka.KafkaAdminClient. Raises as python_producer_options."""
    require_kafka_python()
    return _python(settings, {}, shown=False)


def _python_producer(settings: KafkaSettings, control: bool) -> dict[str, Any]:
    return {
        "acks": "all",
        "enable_idempotence": True,
        "max_in_flight_requests_per_connection": 5,
        "retries": float("inf"),  # bounded by delivery_timeout_ms
        "delivery_timeout_ms": 2 * _delivery_ms(settings),
        "compression_type": None,
        "batch_size": largest_batch(settings),  # lanes.py says what goes into one
        "linger_ms": 0,  # lanes.py lingers, for bulk topics
        "max_request_size": largest_batch(settings),
        "max_block_ms": _MAX_BLOCK_MS,
        "allow_auto_create_topics": False,
        "metrics_enabled": False,
    }


def _python_consumer(settings: KafkaSettings) -> dict[str, Any]:
    return {
        "group_id": None,
        "enable_auto_commit": False,
        "auto_offset_reset": "none",
        "isolation_level": "read_committed",
        "check_crcs": True,
        "allow_auto_create_topics": False,
        "fetch_min_bytes": 1,
        "fetch_max_wait_ms": _ms(settings.fetch_max_wait),
        "fetch_max_bytes": _fetch_bytes(settings),
        "max_partition_fetch_bytes": min(_FETCH_OF_PARTITION, _fetch_bytes(settings)),
        "receive_message_max_bytes": _response_bytes(settings),
        "max_poll_records": 1 << 20,  # memory is bounded by bytes
        "metrics_enabled": False,
    }


def _python(settings: KafkaSettings, own: Mapping[str, Any], *, shown: bool) -> dict[str, Any]:
    return {
        "bootstrap_servers": list(settings.servers),
        "client_id": settings.client_id,
        **own,
        "request_timeout_ms": _request_ms(settings),
        "bootstrap_timeout_ms": _BOOTSTRAP_MS,
        "reconnect_backoff_ms": _RECONNECT_MS,
        "reconnect_backoff_max_ms": _RECONNECT_MAX_MS,
        "retry_backoff_ms": _RETRY_MS,
        "metadata_max_age_ms": _METADATA_AGE_MS,
        "connections_max_idle_ms": _IDLE_MS,
        "socket_options": [
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        ],
        **_python_security(settings, shown),
    }


def _python_security(settings: KafkaSettings, shown: bool) -> dict[str, Any]:
    security = settings.security
    logins.check(security)
    options: dict[str, Any] = {"security_protocol": security.protocol}
    if logins.has_tls(security):
        if shown:
            options |= {
                "ssl_check_hostname": security.check_hostname,
                "ssl_cafile": security.cafile,
                "ssl_certfile": security.certfile,
                "ssl_keyfile": security.keyfile,
                "ssl_password": logins.REDACTED if security.key_password else None,
            }
        else:
            options["ssl_context"] = logins.tls_context(security)
            options["ssl_check_hostname"] = security.check_hostname
    if logins.has_login(security):
        logins.hush()
        options["sasl_mechanism"] = security.mechanism
        if security.mechanism == "OAUTHBEARER":
            assert security.token is not None  # logins.check
            options["sasl_oauth_token_provider"] = (
                logins.REDACTED if shown else logins.python_token_provider(security.token)
            )
        else:
            assert security.password is not None
            options["sasl_plain_username"] = security.username
            options["sasl_plain_password"] = (
                logins.REDACTED if shown else logins.ask(security.password, "log.kafka.sasl_password")
            )
    return options


# -- confluent-kafka (librdkafka)


def confluent_producer_options(settings: KafkaSettings, *, control: bool) -> dict[str, Any]:
    """For confluent_kafka.Producer. Raises LogError for a missing library and for a login that cannot work."""
    require_confluent()
    return _confluent(settings, _confluent_producer(settings, control), shown=False)


def confluent_consumer_options(settings: KafkaSettings) -> dict[str, Any]:
    """For confluent_kafka.Consumer, which needs a group's name but joins none. Raises as the producer's."""
    require_confluent()
    return _confluent(settings, _confluent_consumer(settings), shown=False)


def _confluent_producer(settings: KafkaSettings, control: bool) -> dict[str, Any]:
    return {
        "acks": "all",
        "enable.idempotence": True,
        "max.in.flight.requests.per.connection": 5,
        "retries": (1 << 31) - 1,  # bounded by message.timeout.ms
        "message.timeout.ms": 2 * _delivery_ms(settings),
        "request.timeout.ms": _request_ms(settings),
        "compression.type": "none",
        "batch.size": settings.batch_bytes,
        "batch.num.messages": 100_000,
        "linger.ms": 0 if control else _ms(settings.linger),
        "message.max.bytes": largest_batch(settings),
        # The budget is the writer's: the client's own limits must never be met.
        "queue.buffering.max.messages": 0,
        "queue.buffering.max.kbytes": (1 << 31) - 1,
        "delivery.report.only.error": False,
        "topic.metadata.propagation.max.ms": 5000,
    }


def _confluent_consumer(settings: KafkaSettings) -> dict[str, Any]:
    return {
        "group.id": settings.full("millstream-reads-without-a-group"),
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "error",
        "isolation.level": "read_committed",
        "check.crcs": True,
        "enable.partition.eof": False,
        "fetch.min.bytes": 1,
        "fetch.wait.max.ms": _ms(settings.fetch_max_wait),
        "fetch.max.bytes": max(_fetch_bytes(settings), largest_batch(settings)),
        "max.partition.fetch.bytes": min(_FETCH_OF_PARTITION, _fetch_bytes(settings)),
        "message.max.bytes": largest_batch(settings),
        "receive.message.max.bytes": _response_bytes(settings),
        "queued.max.messages.kbytes": max(1024, settings.prefetch_bytes >> 10),
        "queued.min.messages": 100_000,  # memory is bounded by bytes
        "fetch.queue.backoff.ms": 2,
        "fetch.error.backoff.ms": _RETRY_MS,
    }


def _confluent(settings: KafkaSettings, own: Mapping[str, Any], *, shown: bool) -> dict[str, Any]:
    return {
        "bootstrap.servers": ",".join(settings.servers),
        "client.id": settings.client_id,
        **own,
        "allow.auto.create.topics": False,
        "socket.timeout.ms": _request_ms(settings),
        "socket.nagle.disable": True,
        "socket.keepalive.enable": True,
        "reconnect.backoff.ms": _RECONNECT_MS,
        "reconnect.backoff.max.ms": _RECONNECT_MAX_MS,
        "retry.backoff.ms": _RETRY_MS,
        "retry.backoff.max.ms": _RECONNECT_MAX_MS,
        "topic.metadata.refresh.interval.ms": _METADATA_AGE_MS,
        "metadata.max.age.ms": 3 * _METADATA_AGE_MS,
        "connections.max.idle.ms": _IDLE_MS,
        "enable.metrics.push": False,
        **_confluent_security(settings, shown),
    }


def _confluent_security(settings: KafkaSettings, shown: bool) -> dict[str, Any]:
    security = settings.security
    logins.check(security)
    options: dict[str, Any] = {"security.protocol": security.protocol}
    if logins.has_tls(security):
        if not shown:
            logins.tls_context(security)  # says which file is wrong, as librdkafka does not
        files = {
            "ssl.ca.location": security.cafile,
            "ssl.certificate.location": security.certfile,
            "ssl.key.location": security.keyfile or security.certfile,
        }
        options |= {name: path for name, path in files.items() if path}
        options["enable.ssl.certificate.verification"] = True
        options["ssl.endpoint.identification.algorithm"] = "https" if security.check_hostname else "none"
        if security.key_password:
            options["ssl.key.password"] = (
                logins.REDACTED if shown else logins.ask(security.key_password, "log.kafka.ssl_key_password")
            )
    if logins.has_login(security):
        options["sasl.mechanism"] = security.mechanism
        if security.mechanism == "OAUTHBEARER":
            assert security.token is not None  # logins.check
            options["oauth_cb"] = (
                logins.REDACTED if shown else logins.confluent_token_callback(security.token)
            )
        else:
            assert security.password is not None
            options["sasl.username"] = security.username
            options["sasl.password"] = (
                logins.REDACTED if shown else logins.ask(security.password, "log.kafka.sasl_password")
            )
    return options


# -- for people


def effective(settings: KafkaSettings) -> dict[str, dict[str, object]]:
    """What the clients of this process are given, by client and option, in the order in which they are built.

    Secrets are redacted and not asked for; no file is opened and no library needed. Raises LogError for a login that
    cannot work.
    """
    build: Callable[..., dict[str, Any]]
    if settings.client == "confluent":
        build, producer, consumer = _confluent, _confluent_producer, _confluent_consumer
    else:
        build, producer, consumer = _python, _python_producer, _python_consumer
    return {
        "producer": build(settings, producer(settings, False), shown=True),
        "control_producer": build(settings, producer(settings, True), shown=True),
        "consumer": build(settings, consumer(settings), shown=True),
        "admin": _python(settings, {}, shown=True),
        "log": {
            "bytes_in_flight": settings.bytes_in_flight,
            "batch_bytes": settings.batch_bytes,
            "linger_ms": _ms(settings.linger),
            "delivery_timeout_ms": _delivery_ms(settings),
            "max_record_bytes": settings.max_record_bytes,
            "prefetch_bytes": settings.prefetch_bytes,
            "ingest": settings.ingest,
            "session_timeout_ms": _ms(settings.session_timeout),
        },
    }


# -- libraries


def require(settings: KafkaSettings) -> None:
    """Raise LogError naming the extra when a library that these settings need is not installed."""
    require_kafka_python()
    if settings.client == "confluent":
        require_confluent()


def require_kafka_python() -> None:
    """Raise LogError naming the extra when kafka-python, or what makes it usable, is not installed."""
    if importlib.util.find_spec("kafka") is None:
        raise LogError(
            "a kafka:// log needs the library kafka-python, which is not installed: pip install 'millstream[kafka]'"
        )
    missing = [name for name in ("crc32c", "zstandard") if importlib.util.find_spec(name) is None]
    if missing and os.environ.get(SLOW_ALLOWED) != "1":
        raise LogError(
            f"kafka-python is installed without {' and '.join(missing)}: without crc32c it is 10 to 38 times slower, "
            "without zstandard it cannot read what others compressed. Install them with pip install "
            f"'millstream[kafka]', or set {SLOW_ALLOWED}=1 to go on without"
        )


def require_confluent() -> None:
    """Raise LogError naming the extra when confluent-kafka is not installed."""
    if importlib.util.find_spec("confluent_kafka") is None:
        raise LogError(
            'log.kafka.client = "confluent" needs the library confluent-kafka, which is not installed: '
            "pip install 'millstream[kafka-fast]', or set log.kafka.client = \"kafka-python\""
        )


# -- sizes and times


def _fetch_bytes(settings: KafkaSettings) -> int:
    """Of one answer to a fetch, over all partitions: half of what is read ahead, so that the next one can be on its
    way. A first batch that is larger is still returned whole."""
    return max(1 << 20, settings.prefetch_bytes // 2)


def _response_bytes(settings: KafkaSettings) -> int:
    """More than any answer that a broker may give to such a fetch."""
    return _fetch_bytes(settings) + 2 * largest_batch(settings) + (1 << 20)


def _delivery_ms(settings: KafkaSettings) -> int:
    return _ms(settings.delivery_timeout)


def _request_ms(settings: KafkaSettings) -> int:
    """Never more than an append may take altogether."""
    return max(1, min(_ms(settings.request_timeout), _delivery_ms(settings)))


def _ms(duration: Any) -> int:
    return round(duration.total_seconds() * 1000)
