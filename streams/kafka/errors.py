"""What went wrong in a client, as one of our errors with a sentence for people.

Both clients give the broker's own error codes, and negative ones (librdkafka) or classes (kafka-python) for what
happened on this side. Callers of the log never see a client's exception.

    LogUnavailable   tried again by those who write: nothing is wrong with what was asked
    Refused          the broker will never take this record; RecordTooLarge is the common case
    LoginRefused     user, password, token or mechanism
    LogError         rights, names, versions: a person must mend it, as with the two above
"""

from __future__ import annotations

import socket
import ssl
from typing import Any

from streams.errors import LogError, LogUnavailable, RecordTooLarge, UnknownTopic
from streams.kafka import security as logins
from streams.kafka.settings import KafkaSettings


class Refused(LogError):
    """The broker refuses this record whenever it is sent, for what it holds."""


class LoginRefused(LogError):
    """The broker does not let this user in; one that is starting may do so later."""


# Kafka's error codes: https://kafka.apache.org/protocol, "Error Codes"
_CORRUPT, UNKNOWN_TOPIC, LEADER_NOT_AVAILABLE = 2, 3, 5
_TOO_LARGE, _LIST_TOO_LARGE = 10, 18
_INVALID_TOPIC = 17
_TOPIC_RIGHTS, _GROUP_RIGHTS, _CLUSTER_RIGHTS = 29, 30, 31
_INVALID_TIMESTAMP, _INVALID_RECORD = 32, 87
_NO_MECHANISM, _SASL_STATE, _NO_SECURITY, _LOGIN_REFUSED = 33, 34, 54, 58
_OLD_BROKER = 35
_POLICY = 44
_OUT_OF_ORDER, _DUPLICATE, _OLD_EPOCH, _UNKNOWN_PRODUCER, _FENCED = 45, 46, 47, 59, 90
_FEW_REPLICAS = (19, 20)

_TRY_AGAIN = {5, 6, 7, 8, 9, 13, 14, 15, 16, 41, 51, 56, 72, 74, 75, 76, 89, 100}
_PRODUCER_STATE = {_OUT_OF_ORDER, _DUPLICATE, _OLD_EPOCH, _UNKNOWN_PRODUCER, _FENCED}

# librdkafka's own: code → the broker's code that says the same
_LIKE_BROKERS = {
    -188: UNKNOWN_TOPIC,
    -190: UNKNOWN_TOPIC,  # unknown partition
    -169: _LOGIN_REFUSED,
    -199: _CORRUPT,
    -144: _FENCED,
}
_RD_TLS = -181
_RD_NOT_REACHED = {-195, -193, -192, -187, -185, -184, -180, -167, -166, -152, -151}


def code_of(error: BaseException) -> int | None:
    """The broker's code of it, or librdkafka's negative one; None for one that has none."""
    code = getattr(error, "errno", None)  # kafka-python
    if isinstance(code, int) and not isinstance(error, OSError):
        return code
    detail = error.args[0] if getattr(error, "args", None) else None
    ask = getattr(detail, "code", None) or getattr(error, "code", None)  # confluent-kafka
    if not callable(ask):
        return None
    code = ask()
    return _LIKE_BROKERS.get(code, code) if isinstance(code, int) else None


def from_client(
    error: BaseException, settings: KafkaSettings, doing: str, *, size: int | None = None
) -> LogError:
    """`doing` is what was asked, as in "appending to run.tasks/0"; `size`, in bytes, of what was to be appended."""
    if isinstance(error, LogError):
        return error
    code, said = code_of(error), _said(error)
    if code in (_TOO_LARGE, _LIST_TOO_LARGE):
        return RecordTooLarge(
            f"{doing}: {'a record' if size is None else f'{size} bytes'} is more than the broker takes at once "
            f"({said}); log.max_record_bytes = {settings.max_record_bytes}: lower it, or raise the topic's "
            "max.message.bytes and the broker's message.max.bytes"
        )
    if code in (_INVALID_TIMESTAMP, _INVALID_RECORD):
        return Refused(
            f"{doing}: the broker refuses the record ({said}); see the topic's cleanup.policy and "
            "message.timestamp.before.max.ms, message.timestamp.after.max.ms"
        )
    if code == UNKNOWN_TOPIC:
        return UnknownTopic(
            f"{doing}: the broker knows no such topic or partition, or hides it from {logins.who(settings.security)}; "
            "make it with `millstream topics CONFIG --create`"
        )
    if code == _INVALID_TOPIC:
        return LogError(f"{doing}: Kafka does not allow this topic's name ({said})")
    if code in _RIGHTS:
        return LogError(f"{doing}: {logins.who(settings.security)} lacks rights ({said}); {_RIGHTS[code]}")
    if code in _LOGINS or type(error).__name__ in _LOGIN_CLASSES:
        return refused_login(settings, doing, said)
    if code == _OLD_BROKER or type(error).__name__ in (
        "IncompatibleBrokerVersion",
        "UnrecognizedBrokerVersion",
    ):
        return LogError(
            f"{doing}: {_servers(settings)} is too old or no Kafka broker ({said}); needed is Kafka 2.5 or newer"
        )
    if code == _POLICY:
        return LogError(f"{doing}: a policy of the cluster is against it ({said}); ask its administrator")
    if code in _PRODUCER_STATE:
        return LogUnavailable(
            f"{doing}: the broker no longer knows what this producer sent before ({said}): nothing of this append "
            "may be trusted; the producer was made anew, try again"
        )
    if code in _FEW_REPLICAS:
        return LogUnavailable(
            f"{doing}: too few replicas are in sync ({said}); start the brokers that are missing, or see the topic's "
            "min.insync.replicas"
        )
    if code == _RD_TLS:
        return LogUnavailable(f"{doing}: {unreachable(settings)} ({said})")
    if code in _TRY_AGAIN or code in _RD_NOT_REACHED or _is_retriable(error):
        return LogUnavailable(f"{doing}: {_servers(settings)} did not answer in time ({said})")
    return LogError(f"{doing}: {said}")


def refused_login(settings: KafkaSettings, doing: str, said: str) -> LoginRefused:
    security = settings.security
    if security.mechanism == "OAUTHBEARER":
        mend = "see what log.kafka.sasl_oauth_token is read from, and what the broker's validator expects"
    else:
        mend = "see log.kafka.sasl_username, sasl_password and sasl_mechanism, and that the broker knows this user"
    return LoginRefused(
        f"{doing}: {_servers(settings)} does not let in {logins.who(security)} ({said}); {mend}"
    )


def unreachable(settings: KafkaSettings, timeout_s: float = 1.0) -> str:
    """Why the brokers cannot be spoken to, as one sentence: asks each of the first four, in `timeout_s` together."""
    asked = settings.servers[:4]
    return "; ".join(_probe(settings, server, timeout_s / len(asked)) for server in asked)


def _probe(settings: KafkaSettings, server: str, timeout_s: float) -> str:
    host, _, port = server.rpartition(":")
    host = host.strip("[]")
    try:
        with socket.create_connection((host, int(port)), timeout_s) as connection:
            if not logins.has_tls(settings.security):
                login = (
                    f" or hangs up on {logins.who(settings.security)}"
                    if logins.has_login(settings.security)
                    else ""
                )
                return (
                    f"{server} takes connections but does not answer as Kafka does{login} (still starting, or stuck? "
                    f'another security protocol than log.kafka.security_protocol = "{settings.security.protocol}"?)'
                )
            with logins.tls_context(settings.security).wrap_socket(
                connection, server_hostname=host
            ) as wrapped:
                return (
                    f"{server} speaks {wrapped.version()} but does not answer as Kafka does (still starting? does it "
                    "demand a client certificate: log.kafka.ssl_certfile?)"
                )
    except ssl.SSLCertVerificationError as error:
        return f"{server} shows a certificate that is not trusted ({error.verify_message}); see log.kafka.ssl_cafile"
    except ssl.SSLError as error:
        return f"{server} does not speak TLS with us ({error.reason}); see log.kafka.security_protocol, ssl_certfile"
    except TimeoutError:
        return f"{server} does not answer"
    except OSError as error:
        return f"{server}: {error.strerror or error}"


def _servers(settings: KafkaSettings) -> str:
    return ", ".join(settings.servers)


def _said(error: BaseException) -> str:
    """The client's own words, or the name of its error."""
    detail: Any = error.args[0] if getattr(error, "args", None) else None
    if callable(getattr(detail, "str", None)):  # a confluent_kafka.KafkaError in its exception
        return detail.str()
    if callable(getattr(error, "str", None)):
        return error.str()  # pyright: ignore[reportAttributeAccessIssue]
    text = str(error).strip()
    name = type(error).__name__
    return name if not text or text.endswith("None") else f"{name}: {text}"


def _is_retriable(error: BaseException) -> bool:
    """kafka-python's classes say it of themselves; closed and unready clients are tried again, too."""
    told = getattr(error, "retriable", False)
    return told is True or type(error).__name__ in (
        "IllegalStateError",
        "UnknownBrokerIdError",
        "NoBrokersAvailable",
    )


_RIGHTS = {
    _TOPIC_RIGHTS: "grant DESCRIBE, READ and WRITE on the topic",
    _GROUP_RIGHTS: "grant READ on the group",
    _CLUSTER_RIGHTS: "grant IDEMPOTENT_WRITE on the cluster, or WRITE on the topic",
    53: "grant WRITE on the transactional id",
}
_LOGINS = {_NO_MECHANISM, _SASL_STATE, _NO_SECURITY, _LOGIN_REFUSED}
_LOGIN_CLASSES = {"AuthenticationError", "SaslAuthenticationFailedError"}
