"""The child that reads for ProcessConsumer: `python -m streams.kafka.consumer_process FD`, started by nobody else.

    parent's messages ──► a thread ──► queue ─┐
    brokers ──► Consumer.poll ◄── main thread ◄┘ ──► Came, Lost, … ──► parent

When the parent does not read, the main thread stands still in send(), and so nothing more is fetched. It ends with its
parent, however that ends, and is in a session of its own and deaf to a supervisor's SIGTERM: the parent may still want
what it has.
"""

from __future__ import annotations

import itertools
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from streams.errors import CorruptRecord, LogError, LogUnavailable, OffsetOutOfRange
from streams.kafka.clients import Consumer, Fetched, new_consumer
from streams.kafka.frames import (
    AskOffsets,
    AskSecret,
    Assign,
    Begin,
    Came,
    Damaged,
    Lost,
    Offsets,
    Pause,
    Pipe,
    Place,
    Resume,
    Run,
    Secret,
    ToChild,
    Trouble,
)
from streams.kafka.settings import KafkaSettings, Security
from streams.log import TopicPartition

_POLL_S = 0.02  # a new message from the parent waits for so long at most;
_QUICK_POLL_S = (
    0.002  # for so long within _SOON_S of the last one: who seeks says more as soon as he is answered
)
_SOON_S = 0.1
_LOOK_S = 1.0  # how often it is looked up whether the parent is still the same
_RETRY_S = 0.2
_SECRET_S = 30.0
_DAMAGE = "its record batch fails its checksum"


class Child:
    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._parent = os.getppid()
        self._messages: queue.Queue[Any] = queue.Queue()
        self._secrets: dict[int, queue.Queue[Secret]] = {}
        self._numbers = itertools.count(1)
        self._consumer: Consumer | None = None
        self._at: dict[TopicPartition, int] = {}  # behind what was sent
        self._told_at = 0.0

    def run(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()
        begin = self._messages.get()
        settings = settings_of(begin, self._ask_secret)
        while True:
            try:
                if self._consumer is None:
                    self._consumer = new_consumer(settings)
                    self._consumer.assign(self._at)
                self._obey(self._consumer)
                is_soon = time.monotonic() - self._told_at < _SOON_S
                self._send(self._consumer.poll(_QUICK_POLL_S if is_soon else _POLL_S))
            except OffsetOutOfRange as error:
                place = TopicPartition(error.topic, error.partition)
                self._pipe.send(Lost(place, self._at.pop(place, -1)))
            except CorruptRecord as error:
                place = TopicPartition(error.topic, error.partition)
                self._pipe.send(Damaged(place, self._at.pop(place, -1), error.offset, _DAMAGE))
            except LogError as error:
                self._pipe.send(Trouble(type(error).__name__, str(error)))
                time.sleep(_RETRY_S)

    # -- the parent's messages

    def _listen(self) -> None:
        try:
            while os.getppid() == self._parent:
                message = self._pipe.receive(_LOOK_S)
                if isinstance(message, Secret):
                    waiting = self._secrets.get(message.number)
                    if waiting is not None:
                        waiting.put(message)
                elif message is not None:
                    self._messages.put(message)
        finally:
            os._exit(0)  # also out of a send() that nobody reads

    def _obey(self, consumer: Consumer) -> None:
        """Do what has been said; wait for something to be said while there is nothing to read."""
        while not (self._messages.empty() and self._at):
            message = self._messages.get()
            self._told_at = time.monotonic()
            if isinstance(message, Assign):
                for place in message.dropped:
                    self._at.pop(TopicPartition(*place), None)
                self._at.update({TopicPartition(*place): at for place, at in message.positions})
                consumer.assign(self._at)
            elif isinstance(message, Pause):
                consumer.pause([TopicPartition(*place) for place in message.places])
            elif isinstance(message, Resume):
                consumer.resume([TopicPartition(*place) for place in message.places])
            elif isinstance(message, AskOffsets):
                self._answer(consumer, message)

    def _answer(self, consumer: Consumer, question: AskOffsets) -> None:
        places = [TopicPartition(*place) for place in question.places]
        try:
            offsets = consumer.offsets(places, question.at, question.timeout_s)
        except LogError as error:
            self._pipe.send(Trouble(type(error).__name__, str(error), question.number))
        else:
            self._pipe.send(Offsets(question.number, [(_place(place), at) for place, at in offsets.items()]))

    def _ask_secret(self, name: str) -> str:
        """From any thread: the parent knows it, and what it is now."""
        number = next(self._numbers)
        self._secrets[number] = queue.Queue()
        self._pipe.send(AskSecret(number, name))
        try:
            answer = self._secrets[number].get(timeout=_SECRET_S)
        except queue.Empty:
            raise LogUnavailable(
                f"{name}: the process that knows it did not say it in {_SECRET_S:.0f} s"
            ) from None
        finally:
            self._secrets.pop(number, None)
        if answer.value is None:
            raise LogError(answer.error)
        return answer.value

    # -- to the parent

    def _send(self, fetched: list[Fetched]) -> None:
        runs: list[Run] = []
        for place, records, next_position, high_watermark in fetched:
            begin = self._at.get(place)
            if begin is not None:
                rows = [
                    (record.offset, record.timestamp_ms, record.headers, record.value) for record in records
                ]
                runs.append(Run(_place(place), begin, next_position, high_watermark, rows))
                self._at[place] = next_position
        if runs:
            self._pipe.send(Came(runs))


def settings_of(begin: Begin, secret: Callable[[str], str]) -> KafkaSettings:
    """The parent's settings, with secrets that are asked for when they are needed."""
    plain: dict[str, Any] = dict(begin.settings)
    for name, field in KafkaSettings.__dataclass_fields__.items():
        if "timedelta" in str(field.type) and plain.get(name) is not None:
            plain[name] = timedelta(seconds=plain[name])
    plain["servers"] = tuple(plain["servers"])
    secrets: dict[str, Any] = {name: _asker(secret, name) for name in begin.secrets}
    return KafkaSettings(**plain, ingest="thread", security=Security(**begin.security, **secrets))


def _asker(secret: Callable[[str], str], name: str) -> Callable[[], str]:
    return lambda: secret(name)


def _place(place: TopicPartition) -> Place:
    return (place.topic, place.partition)


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        Child(Pipe(socket.socket(fileno=int(sys.argv[1])), ToChild)).run()
    except OSError:
        os._exit(0)  # the parent is gone


if __name__ == "__main__":
    main()
