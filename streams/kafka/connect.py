"""Opening kafka-python's clients so that six of its habits do no harm.

  - A client whose constructor fails (broker absent) leaves a thread behind: it is ended here.
  - A connection that is refused leaves its socket to the garbage collector: it is closed here.
  - What a broker says before it hangs up is not read when both come at once, as with a refused login: here it is.
  - A refused login is tried again in silence, and told as a timeout: it is remembered, and raised, here.
  - A consumer's or producer's request for metadata creates the topics it names, where the broker allows that: here
    it never does.
  - A consumer does not say when the group's coordinator last answered, which its session hangs on, and goes on as
    if nothing had happened when another process took its static membership: `Heard` is told of every answer.

Uses kafka-python's `kafka_client` option, which takes the class of the network client.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from kafka.errors import (
    ClusterAuthorizationFailedError,
    GroupAuthorizationFailedError,
    GroupMaxSizeReachedError,
    InconsistentGroupProtocolError,
    InvalidReplicationFactorError,
    InvalidSessionTimeoutError,
    InvalidTopicError,
    KafkaError,
    SaslAuthenticationFailedError,
    TopicAuthorizationFailedError,
    UnsupportedSaslMechanismError,
)
from kafka.future import Future
from kafka.net.compat import KafkaNetClient
from kafka.net.inet import KafkaNetSocket
from kafka.net.manager import KafkaConnectionManager
from kafka.net.selector import NetworkSelector
from kafka.protocol.consumer import HeartbeatRequest, SyncGroupRequest

from streams.errors import LogError
from streams.kafka.errors import from_client
from streams.kafka.settings import KafkaSettings

Heard = Callable[
    [float, int], None
]  # (when the question was sent, by `alive_clock`; error code of the answer)
_Client = TypeVar("_Client")


def alive_clock() -> float:
    """Seconds of a clock that also runs while the machine sleeps: a broker's session timeout runs then, too."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


class _Socket(KafkaNetSocket):
    """How kafka-python opens a connection, given as if it were a proxy: the place that it has for such classes."""

    SCHEMES = ("direct",)
    new_socket: Callable[..., socket.socket] = socket.socket

    async def connect(self, net: Any, addrinfo: Any, socket_options: Any = (), timeout_at: Any = None) -> Any:
        family, kind, protocol, _, address = addrinfo
        connection = self.new_socket(family, kind, protocol)
        try:
            connection.setblocking(False)
            for option in socket_options:
                connection.setsockopt(*option)
            return await self.sock_connect(net, connection, address, timeout_at=timeout_at)
        except BaseException:
            connection.close()
            raise


class _Listening(socket.socket):
    """Tells the end of a connection by itself, not along with what was said before it."""

    _has_said = False

    def recv(self, *arguments: Any) -> bytes:
        said = super().recv(*arguments)
        if not said and self._has_said:
            self._has_said = False
            raise BlockingIOError  # the end is still there when what was said has been read
        self._has_said = bool(said)
        return said


class _LoginSocket(_Socket):
    SCHEMES = ("login",)
    new_socket = _Listening


_DIRECT, _LOGIN = "direct://", "login://"  # with TLS, streams/kafka/security.py does it


class Network(KafkaNetClient):
    """The network client of one KafkaAdminClient or KafkaConsumer; everything on it runs on a thread of its own."""

    def __init__(self, heard: Heard | None, configs: Mapping[str, Any]) -> None:
        how = _LOGIN if configs.get("security_protocol") == "SASL_PLAINTEXT" else _DIRECT
        configs = {**configs, "proxy_url": how}
        self._selector = NetworkSelector(**configs)
        super().__init__(net=self._selector, manager=_Manager(self._selector, heard, **configs))
        self.cluster.config["allow_auto_create_topics"] = False

    @property
    def refused(self) -> Exception | None:
        """Why a broker did not let this client in, if one did not."""
        manager = self._manager
        return manager.refused if isinstance(manager, _Manager) else None

    def sleep(self, seconds: float) -> Awaitable[None]:
        """For coroutines on that thread."""
        return self._selector.sleep(seconds)


def connect(
    make: Callable[..., _Client],
    options: Mapping[str, Any],
    *,
    heard: Heard | None = None,
    opened: Callable[[Network], object] = lambda network: None,
) -> tuple[_Client, Network]:
    """`make(**options)`, where `make` is one of kafka-python's clients; raises what that raises, but the refused login
    where that is the reason.

    `heard` is called on the network's thread, for each answered heartbeat and for each assignment received. `opened`
    is given the network before it connects: closing it ends the attempt.
    """
    networks: list[Network] = []

    def network(**configs: Any) -> Network:
        networks.append(Network(heard, configs))
        opened(networks[-1])
        return networks[-1]

    try:
        return make(kafka_client=network, **options), networks[0]
    except BaseException as error:
        refused = [left.refused for left in networks if left.refused is not None]
        for left in networks:
            left.close()
        if refused and isinstance(error, KafkaError):
            raise refused[0] from error
        raise


def explained(error: BaseException, what: str, settings: KafkaSettings | None = None) -> LogError:
    """An error of the client as one of ours, with what to do about it: of topics and groups here, of all else in
    streams/kafka/errors.py."""
    mend = next((mend for kind, mend in _MENDS.items() if isinstance(error, kind)), None)
    if mend is None and settings is not None:
        return from_client(error, settings, what)
    said = str(error).strip()
    reason = said if said and said != "None" else type(error).__name__
    return LogError(f"{what}: {reason}{'; ' + mend if mend else ''}")


_MENDS: dict[type[BaseException], str] = {
    TopicAuthorizationFailedError: "grant this user DESCRIBE, CREATE, DESCRIBE_CONFIGS, READ and WRITE on the topic",
    GroupAuthorizationFailedError: "grant this user READ on the group",
    ClusterAuthorizationFailedError: "grant this user CREATE on the cluster, or let an administrator do it",
    InvalidReplicationFactorError: "set log.kafka.replication_factor to at most the number of brokers",
    InvalidTopicError: "to Kafka '.' and '_' are the same in topic names: use another run name or prefix",
    InvalidSessionTimeoutError: "set log.kafka.session_timeout_s to what the broker allows"
    " (its group.min.session.timeout.ms and group.max.session.timeout.ms)",
    InconsistentGroupProtocolError: "the group is in use by other consumers than this program's: use another prefix",
    GroupMaxSizeReachedError: "raise the broker's group.max.size",
}


class _Manager(KafkaConnectionManager):
    """Tells `heard` when the group's coordinator answered, and to a question of when; remembers a refused login."""

    def __init__(self, net: NetworkSelector, heard: Heard | None, **configs: Any) -> None:
        super().__init__(net, **configs)
        self._heard = heard
        self.refused: Exception | None = None

    def get_connection(self, *args: Any, **options: Any) -> Any:
        connection = super().get_connection(*args, **options)
        if not connection.init_future.is_done:
            connection.init_future.add_errback(self._not_opened)
        return connection

    def _not_opened(self, error: Exception) -> None:
        # A token that cannot be had is a LogError.
        if isinstance(error, (SaslAuthenticationFailedError, UnsupportedSaslMechanismError, LogError)):
            self.refused = error

    def send(self, request: Any, node_id: Any = None, request_timeout_ms: float | None = None) -> Future:
        # The moment before sending: the broker's timer cannot have started earlier, however late the answer is read.
        sent_at = alive_clock()
        answer = super().send(request, node_id=node_id, request_timeout_ms=request_timeout_ms)
        heard = self._heard
        if heard is not None and isinstance(request, (HeartbeatRequest, SyncGroupRequest)):
            answer.add_callback(lambda response: heard(sent_at, response.error_code))
        return answer
