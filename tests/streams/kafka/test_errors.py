"""What callers of the log hear of an error in a client: never the client's own exception."""

from __future__ import annotations

import socket
import threading

import pytest

from streams.errors import LogError, LogUnavailable, RecordTooLarge, UnknownTopic

pytest.importorskip("kafka")
pytest.importorskip("confluent_kafka")

import kafka.errors as kp
from confluent_kafka import KafkaError, KafkaException

from streams.kafka.errors import LoginRefused, Refused, code_of, from_client, unreachable
from streams.kafka.settings import KafkaSettings, Security

PLAIN = KafkaSettings(("broker-a:9092", "broker-b:9092"))
LOGIN = KafkaSettings(
    ("broker-a:9092",),
    security=Security(protocol="SASL_SSL", username="ann", password=lambda: "s3cret"),
)


@pytest.mark.parametrize(
    ("python", "confluent", "ours", "words"),
    [
        (
            kp.MessageSizeTooLargeError(),
            KafkaError.MSG_SIZE_TOO_LARGE,
            RecordTooLarge,
            "log.max_record_bytes",
        ),
        (kp.RecordListTooLargeError(), KafkaError.RECORD_LIST_TOO_LARGE, RecordTooLarge, "max.message.bytes"),
        (
            kp.UnknownTopicOrPartitionError(),
            KafkaError._UNKNOWN_TOPIC,
            UnknownTopic,
            "topics CONFIG --create",
        ),
        (kp.UnknownTopicOrPartitionError(), KafkaError._UNKNOWN_PARTITION, UnknownTopic, "partition"),
        (kp.InvalidTimestampError(), KafkaError.INVALID_TIMESTAMP, Refused, "message.timestamp"),
        (kp.InvalidRecordError(), KafkaError.INVALID_RECORD, Refused, "cleanup.policy"),
        (kp.InvalidTopicError(), KafkaError.TOPIC_EXCEPTION, LogError, "name"),
        (kp.TopicAuthorizationFailedError(), KafkaError.TOPIC_AUTHORIZATION_FAILED, LogError, "WRITE"),
        (
            kp.ClusterAuthorizationFailedError(),
            KafkaError.CLUSTER_AUTHORIZATION_FAILED,
            LogError,
            "IDEMPOTENT",
        ),
        (kp.SaslAuthenticationFailedError(), KafkaError._AUTHENTICATION, LoginRefused, "does not let in"),
        (
            kp.UnsupportedSaslMechanismError(),
            KafkaError.UNSUPPORTED_SASL_MECHANISM,
            LoginRefused,
            "mechanism",
        ),
        (kp.OutOfOrderSequenceNumberError(), KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, LogUnavailable, "anew"),
        (kp.InvalidProducerEpochError(), KafkaError.INVALID_PRODUCER_EPOCH, LogUnavailable, "trusted"),
        (kp.ProducerFencedError(), KafkaError._FENCED, LogUnavailable, "anew"),
        (kp.NotEnoughReplicasError(), KafkaError.NOT_ENOUGH_REPLICAS, LogUnavailable, "min.insync.replicas"),
        (kp.KafkaTimeoutError("late"), KafkaError._MSG_TIMED_OUT, LogUnavailable, "broker-a:9092"),
        (kp.KafkaConnectionError("gone"), KafkaError._TRANSPORT, LogUnavailable, "broker-b:9092"),
        (kp.NotLeaderForPartitionError(), KafkaError.NOT_LEADER_FOR_PARTITION, LogUnavailable, "in time"),
        (kp.IllegalStateError("closed"), KafkaError._ALL_BROKERS_DOWN, LogUnavailable, "in time"),
        (kp.PolicyViolationError("no"), KafkaError.POLICY_VIOLATION, LogError, "policy"),
        (kp.IncompatibleBrokerVersion("old"), KafkaError.UNSUPPORTED_VERSION, LogError, "Kafka 2.5"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_an_error_of_either_client_becomes_the_same_one_of_ours(
    python: Exception, confluent: int, ours: type[LogError], words: str
) -> None:
    for error in (python, KafkaException(KafkaError(confluent)), KafkaError(confluent)):
        mapped = from_client(error, PLAIN, "appending to t/0")  # pyright: ignore[reportArgumentType]
        assert type(mapped) is ours
        assert words in str(mapped)
        assert str(mapped).startswith("appending to t/0: ")


def test_an_error_of_ours_stays_what_it_is() -> None:
    error = UnknownTopic("t")
    assert from_client(error, PLAIN, "x") is error


def test_an_error_that_nobody_foresaw_still_says_what_was_done_and_what_the_client_said() -> None:
    for error in (ValueError("odd"), kp.InvalidRequestError("odd"), KafkaException(KafkaError(42, "odd"))):
        mapped = from_client(error, PLAIN, "appending to t/0")
        assert type(mapped) is LogError
        assert "appending to t/0" in str(mapped) and "odd" in str(mapped)


def test_missing_rights_and_a_refused_login_name_the_user_and_no_secret() -> None:
    for error in (kp.TopicAuthorizationFailedError("t"), kp.SaslAuthenticationFailedError("bad credentials")):
        text = str(from_client(error, LOGIN, "appending to t/0"))
        assert "'ann'" in text and "SCRAM-SHA-512" in text
        assert "s3cret" not in text


def test_a_system_error_is_no_code_of_a_broker() -> None:
    assert code_of(ConnectionRefusedError(111, "refused")) is None
    assert code_of(kp.RequestTimedOutError()) == 7
    assert code_of(KafkaException(KafkaError(KafkaError._TRANSPORT))) == -195


def test_why_a_broker_cannot_be_reached_is_one_sentence_for_each() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as closed:
        addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in (silent, closed)]
        closed.close()
        taking = threading.Thread(target=lambda: silent.accept()[0].close())
        taking.start()
        text = unreachable(KafkaSettings(tuple(addresses)))
        taking.join(10)
    assert f"{addresses[0]} takes connections but does not answer as Kafka does" in text
    assert f"{addresses[1]}: Connection refused" in text


def test_a_port_without_tls_is_told_apart_from_one_that_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            connection.recv(1000)
            connection.sendall(b"this is no TLS\n")
            connection.close()

        answering = threading.Thread(target=answer)
        answering.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        text = unreachable(KafkaSettings((address,), security=Security(protocol="SSL")))
        answering.join(10)
    assert f"{address} does not speak TLS with us" in text
    assert "log.kafka.security_protocol" in text
