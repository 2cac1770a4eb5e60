"""Ask a port whether a Kafka broker answers there, with two requests of its protocol over a plain socket.

Layout and numbers of the requests are those of https://kafka.apache.org/protocol: ApiVersions (18) version 0, which
every broker has, and Metadata (3) version 2, the lowest that names the cluster.
"""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

from streams.broker.ports import HOST

METADATA, METADATA_VERSION, API_VERSIONS = 3, 2, 18
MOST_BYTES = 1 << 20  # of an answer; anything longer is not from a broker


class Answer(NamedTuple):
    """What a broker says of its cluster."""

    cluster_id: str
    brokers: tuple[str, ...]  # "host:port" of those that take part; empty until the first has registered


def ask(port: int, timeout_s: float) -> Answer:
    """Raises OSError when nobody answers in time, ValueError when it is not Kafka that answers."""
    with socket.create_connection((HOST, port), timeout_s) as connection:
        if connection.getsockname() == connection.getpeername():
            raise ConnectionRefusedError("the socket was connected to itself: nobody listens")
        connection.settimeout(timeout_s)
        versions = _Reader(_exchange(connection, API_VERSIONS, 0, b""))
        error = versions.int16()
        ranges = {versions.int16(): (versions.int16(), versions.int16()) for _ in range(versions.int32())}
        lowest, highest = ranges.get(METADATA, (0, -1))
        if error or not lowest <= METADATA_VERSION <= highest:
            raise ValueError(
                f"it has Metadata versions {lowest} to {highest}, not {METADATA_VERSION} (error {error})"
            )
        no_topics = struct.pack(">i", 0)
        metadata = _Reader(_exchange(connection, METADATA, METADATA_VERSION, no_topics))
        brokers = []
        for _ in range(metadata.int32()):
            metadata.int32()  # node id
            brokers.append(f"{metadata.string()}:{metadata.int32()}")
            metadata.string()  # rack
        return Answer(metadata.string() or "", tuple(brokers))


def _exchange(connection: socket.socket, api: int, version: int, body: bytes) -> bytes:
    client = b"millstream-probe"
    request = (
        struct.pack(">hhih", api, version, api, len(client)) + client + body
    )  # api is the correlation id too
    connection.sendall(struct.pack(">i", len(request)) + request)
    (size,) = struct.unpack(">i", _receive(connection, 4))
    if not 4 <= size <= MOST_BYTES:
        raise ValueError(f"its answer claims a length of {size} bytes")
    answer = _receive(connection, size)
    (correlation,) = struct.unpack_from(">i", answer)
    if correlation != api:
        raise ValueError(f"it answered request {correlation}, {api} was asked")
    return answer[4:]


def _receive(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        part = connection.recv(size - len(received))
        if not part:
            raise ConnectionResetError("the connection was closed before the answer was complete")
        received += part
    return received


class _Reader:
    """Takes the fields of an answer one after another."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def int16(self) -> int:
        return self._take(">h", 2)

    def int32(self) -> int:
        return self._take(">i", 4)

    def string(self) -> str | None:
        size = self.int16()
        if size < 0:
            return None
        self._at += size
        return self._data[self._at - size : self._at].decode()

    def _take(self, layout: str, size: int) -> int:
        try:
            (value,) = struct.unpack_from(layout, self._data, self._at)
        except struct.error as error:
            raise ValueError("its answer is too short") from error
        self._at += size
        return value
