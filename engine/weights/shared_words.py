"""What the ranks of an `ipc` group say to one another, over a Unix socket: short words, and descriptors of memory.

A word is msgpack of one of the types below, one a packet, and is decoded as one of them or refused: nothing that comes
is ever unpickled. A rank that dies is noticed at once, since its connection closes.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from engine.weights.collective import GiveUp, TransferError

_WORD_BYTES = 1 << 16
_MOST_DESCRIPTORS = 2
_SLICE_S = 0.05  # of a wait, between two questions whether to give up

_Word = TypeVar("_Word")


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    group: str
    rank: int


class Met(msgspec.Struct, frozen=True, tag="met"):
    """All ranks are there."""


class Rooms(msgspec.Struct, frozen=True, tag="rooms"):
    """Instead of those before, which are closed first."""

    nbytes: int  # of each
    device: str  # identity of the device; "": main memory, and a file descriptor of each comes along
    handles: list[bytes] = []


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    refusal: str = ""


class Filled(msgspec.Struct, frozen=True, tag="filled"):
    number: int  # of the bucket, over the life of the group; its room is number % 2
    nbytes: int


class Copied(msgspec.Struct, frozen=True, tag="copied"):
    number: int


_WORDS = msgspec.msgpack.Decoder(Hello | Met | Rooms | Opened | Filled | Copied)


class Line:
    """One connection. Every wait ends by its deadline, when `give_up` has a reason, or when the other end is gone."""

    def __init__(self, connection: socket.socket, who: str) -> None:
        connection.setblocking(False)
        self.socket, self.who = connection, who

    def say(self, word: msgspec.Struct, descriptors: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self.socket, [msgspec.msgpack.encode(word)], descriptors)
        except OSError as error:
            raise TransferError(f"{self.who} cannot be reached ({error.strerror or error})") from None

    def hear(self, deadline: float, give_up: GiveUp) -> tuple[Any, list[int]]:
        """(word, descriptors that came along)."""
        wait_for_any([self], deadline, give_up, f"{self.who} did not answer within the deadline")
        try:
            content, descriptors, _, _ = socket.recv_fds(
                self.socket, _WORD_BYTES, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise TransferError(f"{self.who} is gone ({error.strerror or error})") from None
        if not content:
            raise TransferError(f"{self.who} is gone: it closed the connection")
        try:
            return _WORDS.decode(content), descriptors
        except msgspec.MsgspecError as error:
            for each in descriptors:
                os.close(each)
            raise TransferError(f"{self.who} said what is no word of this protocol ({error})") from None

    def expect(
        self, kind: type[_Word], deadline: float, give_up: GiveUp = lambda: ""
    ) -> tuple[_Word, list[int]]:
        word, descriptors = self.hear(deadline, give_up)
        if not isinstance(word, kind):
            raise TransferError(f"{self.who} said {type(word).__name__}, {kind.__name__} was due")
        return word, descriptors


def wait_for_any(lines: Sequence[Line], deadline: float, give_up: GiveUp, late: str) -> list[Line]:
    """Those that have something to say, or are gone."""
    poll, by_number = select.poll(), {}
    for line in lines:
        number = line.socket.fileno()
        if number < 0:
            raise TransferError(f"the connection to {line.who} was closed meanwhile")
        poll.register(number, select.POLLIN)
        by_number[number] = line
    while True:
        left_s = deadline - time.monotonic()
        ready = poll.poll(1000 * max(0.0, min(_SLICE_S, left_s)))
        if ready:
            return [by_number[number] for number, _ in ready]
        if left_s <= 0:
            raise TransferError(late)
        if why := give_up():
            raise TransferError(why)
