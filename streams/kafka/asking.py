"""Asking the cluster through kafka-python's admin client, with a deadline and an interrupt.

    caller ──► ask ──► a thread of its own: question(client) ──ok──► answer
      ▲  looks up every 100 ms      │ ▲
      └── deadline · stop ──────────┘ └── connection lost: a new client, a longer pause, the same question again

A broker that was restarted meanwhile is not noticed; one that stays away is LogUnavailable.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar

from kafka import KafkaAdminClient
from kafka.errors import (
    CoordinatorLoadInProgressError,
    KafkaError,
    KafkaTimeoutError,
    LeaderNotAvailableError,
    UnknownBrokerIdError,  # pyright: ignore[reportAttributeAccessIssue]
    UnknownTopicOrPartitionError,
)

from streams.errors import LogClosed, LogUnavailable
from streams.kafka.connect import Network, connect, explained
from streams.kafka.errors import unreachable
from streams.kafka.options import python_admin_options
from streams.kafka.settings import KafkaSettings

_SLICE_S = 0.1  # how often a wait looks whether it is still wanted

Answer = TypeVar("Answer")
Client = Any  # a KafkaAdminClient; the stubs that pyright brings are of an older one
Question = Callable[[Client, float], Answer]  # (client, seconds left)


class Asker:
    """Connects at the first question. Both methods may be called from any thread."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._timeout_s = settings.timeout.total_seconds()
        self._connecting = threading.Lock()
        self._client: Client | None = None
        self._network: Network | None = None
        self._closed = False

    def ask(
        self,
        what: str,
        question: Question[Answer],
        *,
        timeout_s: float | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> Answer:
        """Raises LogUnavailable ("could not <what> within …") at the deadline or when `stop()` says so (default: when
        this process is interrupted), LogClosed, and what the cluster refuses as a LogError."""
        if self._closed:
            raise self._is_closed()
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        stop = stop or self._settings.interrupted
        asked = _Asked(question, time.monotonic() + timeout_s)
        threading.Thread(target=self._work, args=(asked,), daemon=True, name="kafka-admin").start()
        stopped = False
        while not wait([asked.answer], _SLICE_S).done:
            stopped = stop()
            if stopped or self._closed or time.monotonic() > asked.deadline + _SLICE_S:
                asked.answer.cancel()
                break
        if not asked.answer.cancelled():
            try:
                return asked.answer.result(1)
            except (KafkaError, RuntimeError) as error:
                if not _may_pass(error):
                    raise explained(error, f"could not {what}", self._settings) from error
                asked.last = error
        if self._closed:
            raise self._is_closed()
        if stopped:
            raise LogUnavailable(f"could not {what}: interrupted")
        raise LogUnavailable(
            f"could not {what} within {timeout_s:g} s: {self._why(asked.last)}"
        ) from asked.last

    def close(self) -> None:
        """Ends what is being asked, too. Twice is harmless."""
        self._closed = True
        client, self._client = self._client, None
        if client is not None:
            client.close()
        elif self._network is not None:  # still connecting
            try:
                self._network.close()
            except RuntimeError:  # the thread that connects has closed it in the same moment
                pass

    def _is_closed(self) -> LogClosed:
        return LogClosed(f"the log {self._settings.servers[0]} was closed")

    def _why(self, error: BaseException | None) -> str:
        servers = ", ".join(self._settings.servers)
        if self._client is None:
            return f"no Kafka broker at {servers} ({unreachable(self._settings, 0.5)})"
        return f"{servers}: {str(error) or type(error).__name__}" if error else f"{servers} did not answer"

    # -- the thread of one question

    def _work(self, asked: _Asked[Any]) -> None:
        try:
            answer, error = self._insist(asked), None
        except BaseException as raised:
            answer, error = None, raised
        if asked.answer.set_running_or_notify_cancel():
            if error is None:
                asked.answer.set_result(answer)
            else:
                asked.answer.set_exception(error)

    def _insist(self, asked: _Asked[Answer]) -> Answer:
        pause_s = 0.05
        while True:
            client = None
            try:
                client = self._connected(asked.deadline)
                return asked.question(client, max(asked.deadline - time.monotonic(), 0.1))
            except (KafkaError, RuntimeError) as error:
                asked.last = error
                if not _may_pass(error):
                    raise
                is_settling = isinstance(error, (CoordinatorLoadInProgressError, LeaderNotAvailableError))
                if client is not None and not is_settling:
                    self._disconnect(client)  # it may also know brokers and coordinators that are no more
                if asked.answer.cancelled() or self._closed or time.monotonic() + pause_s > asked.deadline:
                    raise
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.5)

    def _connected(self, deadline: float) -> Client:
        if not self._connecting.acquire(timeout=max(deadline - time.monotonic(), 0.1)):
            raise KafkaTimeoutError("another thread is still connecting")
        try:
            if self._client is None:
                left_ms = max(int((deadline - time.monotonic()) * 1000), 100)
                options = {**python_admin_options(self._settings), "bootstrap_timeout_ms": left_ms}
                client, _ = connect(KafkaAdminClient, options, opened=self._opened)
                if self._closed:
                    client.close()
                    raise self._is_closed()
                self._client = client
            return self._client
        finally:
            self._connecting.release()

    def _opened(self, network: Network) -> None:
        self._network = network

    def _disconnect(self, client: Client) -> None:
        with self._connecting:
            if self._client is not client:
                return
            self._client = None
        client.close()


class _Asked(Generic[Answer]):
    """One question on its way: `last` is what went wrong most recently."""

    def __init__(self, question: Question[Answer], deadline: float) -> None:
        self.question = question
        self.deadline = deadline  # time.monotonic
        self.answer: Future[Answer] = Future()
        self.last: BaseException | None = None


def _may_pass(error: BaseException) -> bool:
    """Whether asking again, on a new connection, can help. (RuntimeError: the client was closed under us.)"""
    if isinstance(error, UnknownTopicOrPartitionError):
        return False
    return isinstance(error, (UnknownBrokerIdError, RuntimeError)) or getattr(error, "retriable", False)
