"""What a slot and its worker process agree on: the messages, how they are framed, and the layout of the board.

Each way goes one pipe of frames, a little-endian uint32 size and that many bytes of msgpack. The board is a file
that both hold open: a page with three int64, then what faulthandler wrote last. Neither end's own business is here.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from consumers.rewards.types import NotScored, Scored, encode_hook

START_S = 120.0  # for a worker to import the function's module
NOBODY = -1
# The board: int64 call whose code runs, int64 last revoked message, int64 call of it that is wanted all the same, and
# from 4096 on the worker's last stack.
TURN, REVOKED, KEPT, TRACE_AT = slice(0, 8), slice(8, 16), slice(16, 24), 4096

encoder = msgspec.msgpack.Encoder(enc_hook=encode_hook)


class Setup(msgspec.Struct, array_like=True):
    """First message to a worker."""

    path: str
    options: dict[str, Any]
    config: dict[str, Any]
    group: bool
    timeout_s: float


class Report(msgspec.Struct, array_like=True):
    """Worker to slot. `call` ≥ 0: outcomes of that call. `call` −1: how the start went."""

    call: int
    outcomes: list[Scored | NotScored] = []
    is_async: bool = False
    error: str = ""


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body
