"""One connection between rank 0 and a follower: messages, heartbeats, and word of its end.

    frame    8 bytes, its length ─► MessagePack of one message; length 0 is a heartbeat
    end      the other side closed it, or was silent for SILENT ─► `on_end(reason)`, once

A connection of its own, since a collective says neither who is gone nor that anybody is: a killed process closes its
connection at once, a stopped one or a lost host falls silent. Arrays travel as their raw bytes; nothing is pickled.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import numpy as np

from streams.errors import MillstreamError

BEAT = timedelta(seconds=2)
SILENT = timedelta(seconds=60)  # without a byte: the process is stopped, or its host is gone
_SLICE = 1 << 20  # bytes of one send, each with a deadline of its own
_HEAD = 8
_MOST = 1 << 40  # bytes of a frame; more is not ours

M = TypeVar("M")


class LinkLost(MillstreamError):
    """The other process is gone, or does not answer."""


class Link:
    """`send` from any thread; `on_message` and `on_end` are called on the reader's.

    `close` ends it without a word to `on_end`.
    """

    def __init__(
        self,
        connection: socket.socket,
        kind: Any,
        on_message: Callable[[Any], None],
        on_end: Callable[[str], None],
        *,
        beat: timedelta | None = None,
        silent: timedelta | None = None,
    ) -> None:
        beat, silent = beat or BEAT, silent or SILENT
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(silent.total_seconds())
        self._connection, self._silent = connection, silent
        self._decoder = msgspec.msgpack.Decoder(kind, dec_hook=_array_of)
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_parts_of)
        self._on_message, self._on_end = on_message, on_end
        self._sending, self._ending = threading.Lock(), threading.Lock()
        self._is_over = False
        self._closed = threading.Event()
        self._beat_s = beat.total_seconds()
        for run in (self._read, self._beat):
            threading.Thread(target=run, name="link", daemon=True).start()

    def send(self, message: Any) -> None:
        """Raises LinkLost."""
        self._send(self._encoder.encode(message))

    def wait(self, timeout_s: float) -> bool:
        """Whether the connection is over by then, whoever ended it."""
        return self._closed.wait(timeout_s)

    def close(self) -> None:
        with self._ending:
            self._is_over = True
        self._closed.set()
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._connection.close()

    def _send(self, body: bytes) -> None:
        try:
            with self._sending:
                self._connection.sendall(len(body).to_bytes(_HEAD, "little"))
                view = memoryview(body)
                for at in range(0, len(body), _SLICE):
                    self._connection.sendall(view[at : at + _SLICE])
        except OSError as error:
            reason = self._reason(error)
            self._end(reason)
            raise LinkLost(reason) from error

    def _read(self) -> None:
        try:
            while True:
                length = int.from_bytes(self._receive(_HEAD), "little")
                if length > _MOST:
                    raise ValueError(f"a frame of {length} bytes")
                if length:
                    self._on_message(self._decoder.decode(self._receive(length)))
        except OSError as error:
            self._end(self._reason(error))
        except (ValueError, msgspec.MsgspecError) as error:
            self._end(f"it sent what is no message ({error})")

    def _receive(self, count: int) -> bytearray:
        room = bytearray(count)
        view, at = memoryview(room), 0
        while at < count:
            received = self._connection.recv_into(view[at:])
            if not received:
                raise ConnectionResetError("closed")
            at += received
        return room

    def _beat(self) -> None:
        while not self._closed.wait(self._beat_s):
            try:
                self._send(b"")
            except LinkLost:
                return

    def _reason(self, error: OSError) -> str:
        if isinstance(error, TimeoutError):
            return f"no sign of life for {self._silent.total_seconds():.0f} s"
        return "it ended: its connection is closed"

    def _end(self, reason: str) -> None:
        with self._ending:
            if self._is_over:
                return
            self._is_over = True
        self._closed.set()
        self._on_end(reason)


def connect(host: str, port: int, deadline: timedelta) -> socket.socket:
    """Raises LinkLost."""
    try:
        return socket.create_connection((host, port), timeout=deadline.total_seconds())
    except OSError as error:
        raise LinkLost(f"rank 0 cannot be reached at {host}:{port} ({error})") from error


def _parts_of(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, list(value.shape), value.tobytes()]
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be sent to another rank")


def _array_of(kind: Any, value: Any) -> Any:
    if getattr(kind, "__origin__", kind) is not np.ndarray:
        raise TypeError(f"{kind} cannot be received from another rank")
    dtype, shape, data = value
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape).copy()  # bytes are read-only
