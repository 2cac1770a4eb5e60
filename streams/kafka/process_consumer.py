"""The reading seam with the client in a child process: sockets, protocol and checksums do not take this process's
interpreter lock, only the copying of what has come does.

    assign, pause, … ──► frames ──► child: Consumer.poll in a loop ──► frames ──► poll()

A child that dies is replaced by one that goes on at the same positions: a position moves when its records are handed
out, so nothing is lost, and what comes twice does not begin where the position is and is passed over.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import streams
from streams.errors import CorruptRecord, LogError, LogUnavailable, OffsetOutOfRange, UnknownTopic
from streams.kafka import security as logins
from streams.kafka.clients import Consumer, Fetched
from streams.kafka.frames import (
    AskOffsets,
    AskSecret,
    Assign,
    Begin,
    Came,
    Damaged,
    FromChild,
    Lost,
    Offsets,
    Pause,
    Pipe,
    Place,
    Resume,
    Run,
    Secret,
    Trouble,
)
from streams.kafka.settings import KafkaSettings, Security
from streams.log import Record, TopicPartition

logger = logging.getLogger(__name__)

_DEATHS = 5  # in a row, without anything having come between them
_LEAST_PAUSE_S = 0.1  # before the next child; doubled with each death
_MORE = 4  # messages that one poll takes beyond the first, if they are there
_END_S = 2.0
_ANSWER_S = 1.0  # on top of what the child may take to answer
_LONG_LIFE_S = 60.0  # a child that lived for so long was no failure
_NOT_SENT = {"security", "is_control", "interrupted", "ingest"}
_SECRETS = {
    "password": "log.kafka.sasl_password",
    "token": "log.kafka.sasl_oauth_token",
    "key_password": "log.kafka.ssl_key_password",
}
_ERRORS = {kind.__name__: kind for kind in (LogError, LogUnavailable, UnknownTopic)}


class ProcessConsumer(Consumer):
    """The child is there from the start and connects by itself. Raises LogError when children keep dying."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._positions: dict[TopicPartition, int] = {}  # next offsets, as this object's caller knows them
        self._expected: dict[TopicPartition, int] = {}  # next offsets that the child is to bring
        self._paused: set[TopicPartition] = set()
        self._ready: list[Fetched] = []  # for the next poll
        self._failures: list[LogError] = []  # for the polls after it
        self._answers: dict[int, Offsets | Trouble] = {}
        self._numbers = itertools.count(1)
        self._deaths = 0
        self._start()

    @property
    def pid(self) -> int:
        """The child's."""
        return self._process.pid

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        """A place that was not wanted before, or was elsewhere, is not paused."""
        moved = {place: at for place, at in positions.items() if self._positions.get(place) != at}
        dropped = [place for place in self._positions if place not in positions]
        if not moved and not dropped:
            return
        self._ready = [each for each in self._ready if each.place in positions and each.place not in moved]
        self._failures = [failure for failure in self._failures if _place_of(failure) not in moved]
        self._expected = {
            place: moved.get(place, self._expected.get(place, at)) for place, at in positions.items()
        }
        self._paused = {place for place in self._paused if place in positions}.difference(moved)
        self._positions = dict(positions)
        self._send(
            Assign([(_plain(place), at) for place, at in moved.items()], [_plain(place) for place in dropped])
        )

    def pause(self, places: Sequence[TopicPartition]) -> None:
        self._paused.update(place for place in places if place in self._positions)
        self._send(Pause([_plain(place) for place in places]))

    def resume(self, places: Sequence[TopicPartition]) -> None:
        self._paused.difference_update(places)
        self._send(Resume([_plain(place) for place in places]))

    def poll(self, timeout_s: float) -> list[Fetched]:
        deadline = time.monotonic() + timeout_s
        while not (self._ready or self._failures):
            left = deadline - time.monotonic()
            if not self._receive(max(0.0, left)) and left <= 0:
                break
        for _ in range(_MORE):
            if self._failures or not self._ready or not self._receive(0.0):
                break
        if not self._ready and self._failures:
            failure = self._failures.pop(0)
            if (place := _place_of(failure)) is not None:
                self._positions.pop(place, None)
            raise failure
        ready, self._ready = self._ready, []
        self._positions.update(
            {each.place: each.next_position for each in ready if each.place in self._positions}
        )
        return ready

    def offsets(
        self, places: Sequence[TopicPartition], at: Literal[-2, -1] | int, timeout_s: float
    ) -> dict[TopicPartition, int]:
        number = next(self._numbers)
        deadline = time.monotonic() + timeout_s + _ANSWER_S
        self._send(AskOffsets(number, [_plain(place) for place in places], at, timeout_s))
        while number not in self._answers:
            if time.monotonic() >= deadline:
                raise LogUnavailable(
                    f"the reading process {self.pid} did not say an offset in {timeout_s:.1f} s"
                )
            self._receive(0.1)
        answer = self._answers.pop(number)
        if isinstance(answer, Trouble):
            raise _ERRORS.get(answer.error, LogError)(answer.text)
        return {TopicPartition(*place): offset for place, offset in answer.offsets}

    def close(self) -> None:
        self._end()

    # -- messages

    def _send(self, message: Assign | Pause | Resume | AskOffsets | Secret) -> None:
        try:
            self._pipe.send(message)
        except OSError:
            self._replace()  # the next child is told of all that matters

    def _receive(self, timeout_s: float) -> bool:
        """Take one message if one comes."""
        try:
            message = self._pipe.receive(timeout_s)
        except EOFError:
            self._replace()
            return False
        if message is None:
            return False
        if isinstance(message, Came):
            self._deaths = 0
            for run in message.runs:
                self._take(run)
        elif isinstance(message, AskSecret):
            self._send(self._secret(message))
        elif isinstance(message, Offsets) or (isinstance(message, Trouble) and message.number):
            self._answers[message.number] = message
        elif isinstance(message, Trouble):
            self._hear(message)
        else:
            self._lose(message)
        return True

    def _take(self, run: Run) -> None:
        place = TopicPartition(*run.place)
        if self._expected.get(place) != run.begin:
            return  # from before a move, or told twice by two children
        self._expected[place] = run.next_position
        topic, partition = place
        records = [Record(topic, partition, *row) for row in run.records]
        self._ready.append(Fetched(place, records, run.next_position, run.high_watermark))

    def _hear(self, trouble: Trouble) -> None:
        if trouble.error == LogUnavailable.__name__:
            logger.debug(
                "reading process %d: %s", self.pid, trouble.text
            )  # an absent broker is no error here
        else:
            self._failures.append(_ERRORS.get(trouble.error, LogError)(trouble.text))

    def _lose(self, message: Lost | Damaged) -> None:
        place = TopicPartition(*message.place)
        if self._expected.get(place) != message.position:
            return
        del self._expected[place]
        if isinstance(message, Lost):
            self._failures.append(OffsetOutOfRange(*place, message.position, -1, -1))
        else:
            self._failures.append(CorruptRecord(*place, message.offset, -1, message.where))

    def _secret(self, question: AskSecret) -> Secret:
        secret = getattr(self._settings.security, question.name, None)
        try:
            if secret is None:
                raise LogError(f"{_SECRETS.get(question.name, question.name)} is not set")
            return Secret(question.number, logins.ask(secret, _SECRETS[question.name]))
        except LogError as error:
            return Secret(question.number, None, str(error))

    # -- the child

    def _start(self) -> None:
        ours, its = socket.socketpair()
        folder = str(Path(streams.__file__).parents[1])
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "streams.kafka.consumer_process", str(its.fileno())],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # what it has to say to people goes to our stderr
                start_new_session=True,  # a Ctrl-C is for the parent, which may still want what has been read
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
        except OSError as error:
            ours.close()
            raise LogError(f'log.kafka.ingest = "process": no process can be started: {error}') from error
        finally:
            its.close()
        self._started_at = time.monotonic()
        self._pipe = Pipe(ours, FromChild)
        try:
            self._pipe.send(_begin(self._settings))
            if self._expected:
                self._pipe.send(Assign([(_plain(place), at) for place, at in self._expected.items()], []))
            if self._paused:
                self._pipe.send(Pause([_plain(place) for place in self._paused]))
        except OSError:  # it is gone already: the next receive sees it
            pass

    def _replace(self) -> None:
        status = self._end()
        if time.monotonic() - self._started_at > _LONG_LIFE_S:
            self._deaths = 0
        self._deaths += 1
        if self._deaths > _DEATHS:
            raise LogError(
                f"the process that reads for this one ended {self._deaths} times in a row, the last time with "
                f'{_said(status)}; see what it wrote to stderr, or set log.kafka.ingest = "thread"'
            )
        logger.warning(
            "the process %d that reads for this one ended with %s; starting another", self.pid, _said(status)
        )
        time.sleep(_LEAST_PAUSE_S * 2 ** (self._deaths - 1))
        self._start()

    def _end(self) -> int:
        """The exit status."""
        self._pipe.close()  # which ends it
        try:
            return self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait(_END_S)


def _begin(settings: KafkaSettings) -> Begin:
    """The settings without what is asked for later (secrets) or concerns the parent alone."""
    security = settings.security
    return Begin(
        {name: _seconds(value) for name, value in _fields(settings) if name not in _NOT_SENT},
        {name: value for name, value in _fields(security) if name not in _SECRETS},
        [name for name in _SECRETS if getattr(security, name) is not None],
    )


def _fields(settings: KafkaSettings | Security) -> list[tuple[str, Any]]:
    return [(field.name, getattr(settings, field.name)) for field in dataclasses.fields(settings)]


def _seconds(value: Any) -> Any:
    return value.total_seconds() if isinstance(value, timedelta) else value


def _place_of(failure: LogError) -> TopicPartition | None:
    is_of_one = isinstance(failure, (OffsetOutOfRange, CorruptRecord))
    return TopicPartition(failure.topic, failure.partition) if is_of_one else None


def _plain(place: TopicPartition) -> Place:
    return (place.topic, place.partition)


def _said(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
