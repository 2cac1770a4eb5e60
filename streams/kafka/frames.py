"""What a process and its reading child say to each other: frames on a pair of sockets.

    8 bytes, little-endian: length of the body │ body: one MessagePack message

A frame is read with two calls, however large it is, and the interpreter lock is free during both: beside a busy
thread each call costs a switch of up to 5 ms, so there must be few of them.
"""

from __future__ import annotations

import socket
import struct
import threading
from typing import Any

import msgspec

from streams.log import Headers

LENGTH = struct.Struct("<Q")
_MOST_BYTES = 1 << 31  # of a frame
_KEPT_BYTES = 32 << 20  # of the buffer for them
_SMALL = 4096

Place = tuple[str, int]  # topic, partition


class _Message(msgspec.Struct, array_like=True, tag=True):
    pass


# -- to the child


class Begin(_Message):
    """The first message. Durations are seconds; `secrets` says which of Security's there are."""

    settings: dict[str, Any]
    security: dict[str, Any]
    secrets: list[str]


class Assign(_Message):
    """`positions` are new, or moved; what is in neither list stays as it is."""

    positions: list[tuple[Place, int]]
    dropped: list[Place]


class Pause(_Message):
    places: list[Place]


class Resume(_Message):
    places: list[Place]


class AskOffsets(_Message):
    number: int
    places: list[Place]
    at: int
    timeout_s: float


class Secret(_Message):
    number: int
    value: str | None
    error: str = ""


# -- from the child


class Run(_Message):
    """Everything of one partition in [begin, next_position)."""

    place: Place
    begin: int
    next_position: int
    high_watermark: int
    records: list[tuple[int, int, Headers, bytes]]  # offset, milliseconds, headers, value


class Came(_Message):
    runs: list[Run]


class Lost(_Message):
    """The position is out of range. The child reads the partition no more."""

    place: Place
    position: int


class Damaged(_Message):
    """The batch beginning at `offset` is. The child reads the partition no more."""

    place: Place
    position: int
    offset: int
    where: str


class Trouble(_Message):
    """The child goes on by itself, if it can."""

    error: str  # name of the class
    text: str
    number: int = 0  # of the question that it answers


class Offsets(_Message):
    number: int
    offsets: list[tuple[Place, int]]


class AskSecret(_Message):
    number: int
    name: str


ToChild = Begin | Assign | Pause | Resume | AskOffsets | Secret
FromChild = Came | Lost | Damaged | Trouble | Offsets | AskSecret


class Pipe:
    """One end. Sending is safe for threads; receiving is for one of them."""

    def __init__(self, end: socket.socket, receives: Any) -> None:
        """`receives`: the messages that may come."""
        self._end = end
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._sending = threading.Lock()
        self._head = bytearray()
        self._body = bytearray()  # used for every frame: what is decoded is copied out of it
        self._timeout_us = 0
        end.setblocking(True)

    def send(self, message: _Message) -> None:
        """Blocks while the other end does not read. Raises OSError when it is gone."""
        body = self._encoder.encode(message)
        head = LENGTH.pack(len(body))
        with self._sending:
            if len(body) < _SMALL:
                self._end.sendall(head + body)
            else:
                self._end.sendall(head)
                self._end.sendall(body)

    def receive(self, timeout_s: float) -> Any:
        """The next message, or None when none begins to come in time. Raises EOFError when the other end is gone."""
        flags = socket.MSG_DONTWAIT  # the system's shortest time limit is some milliseconds
        if timeout_s > 0:
            flags = socket.MSG_WAITALL
            self._allow(timeout_s)
        while len(self._head) < LENGTH.size:
            part = self._receive(LENGTH.size - len(self._head), flags)
            if part is None:
                return None
            self._head += part
        (length,) = LENGTH.unpack(self._head)
        if length > _MOST_BYTES:
            raise EOFError(f"a frame of {length} bytes: that is none of ours")
        if len(self._body) < length or len(self._body) > _KEPT_BYTES:
            self._body = bytearray(max(length, _SMALL))
        with memoryview(self._body)[:length] as body:
            self._fill(body)
            self._head.clear()
            return self._decoder.decode(body)

    def close(self) -> None:
        self._end.close()

    def _allow(self, timeout_s: float) -> None:
        """The system's own time limit of a read: so the wait and the read are one call."""
        timeout_us = max(1000, round(timeout_s * 1e6))
        if timeout_us != self._timeout_us:
            limit = struct.pack("@ll", *divmod(timeout_us, 1_000_000))
            self._end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._timeout_us = timeout_us

    def _receive(self, size: int, flags: int) -> bytes | None:
        try:
            part = self._end.recv(size, flags)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            raise EOFError(str(error)) from error
        if not part:
            raise EOFError("the other end is gone")
        return part

    def _fill(self, body: memoryview) -> None:
        got = 0
        while got < len(body):
            try:
                count = self._end.recv_into(body[got:], len(body) - got, socket.MSG_WAITALL)
            except (BlockingIOError, InterruptedError):
                continue  # begun is half done: it ends, or its sender does
            except OSError as error:
                raise EOFError(str(error)) from error
            if not count:
                raise EOFError("the other end is gone")
            got += count
