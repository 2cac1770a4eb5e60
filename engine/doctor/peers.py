"""The other nodes, in two ways: `millstream doctor --serve PORT` on each, or an actor on each node of a Ray cluster.

    node = Node("host-b", "10.0.0.2", ask)      node.ask("clock") → 1767000000.1

The first way: one JSON object a line, {"operation": …, arguments} → {"answer": …} or {"error": …}.
"""

from __future__ import annotations

import json
import socket
import socketserver
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from engine.doctor.operations import LISTEN_S, SEEN_S, Operations, Refused, operations_of
from engine.doctor.result import Request
from streams.errors import MillstreamError

_ASK_S = LISTEN_S + SEEN_S
_LONGEST_LINE = 1 << 20


class NoPeer(MillstreamError):
    """A node that was named does not answer, or refuses."""


class Node:
    """One node: its name, the address at which it is reached, and its operations.

    `seen_as`: other node's name → address, where that one reaches it by another. `ports`: what listens there always.
    """

    def __init__(
        self,
        name: str,
        address: str,
        ask: Callable[..., Any],
        *,
        is_here: bool = False,
        seen_as: Mapping[str, str] | None = None,
        ports: Mapping[str, int] | None = None,
    ) -> None:
        self.name, self.address, self.ask, self.is_here = name, address, ask, is_here
        self.ports = ports or {}
        self._seen_as = seen_as or {}

    def address_for(self, other: Node) -> str:
        """At which the other one is to seek it."""
        return self._seen_as.get(other.name, self.address)


@contextmanager
def nodes(request: Request) -> Iterator[list[Node]]:
    """This node first, then all others. Raises NoPeer naming the one that cannot be reached."""
    with ExitStack() as stack:
        if request.address:
            from engine.doctor.peers_ray import ray_nodes

            yield stack.enter_context(ray_nodes(request))
            return
        others = [stack.enter_context(_tcp_node(peer)) for peer in request.peers]
        yield [_here(request, {node.name: own for node, own in others}), *(node for node, _ in others)]


def pairs(found: list[Node], *, is_ray: bool) -> list[tuple[Node, Node]]:
    """Ordered (from, to). Nodes that serve by TCP connect to nobody but who asks, so they form a star; those of Ray
    all meet one another, up to eight of them, beyond that each its neighbours."""
    if not is_ray:
        return [pair for other in found[1:] for pair in ((found[0], other), (other, found[0]))]
    if len(found) <= 8:
        return [(a, b) for a in found for b in found if a is not b]
    ring = list(zip(found, [*found[1:], found[0]], strict=True))
    return ring + [(b, a) for a, b in ring]


def _here(request: Request, seen_as: Mapping[str, str]) -> Node:
    address = next(iter(seen_as.values()), "127.0.0.1")
    return Node(
        socket.gethostname(), address, operations_of(request.config).ask, is_here=True, seen_as=seen_as
    )


def split(peer: str) -> tuple[str, int]:
    """HOST:PORT. Raises NoPeer."""
    host, colon, port = peer.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
        raise NoPeer(f"--peer {peer}: needed HOST:PORT, as printed by millstream doctor --serve")
    return host, int(port)


@contextmanager
def _tcp_node(peer: str) -> Iterator[tuple[Node, str]]:
    """The node, and the address of this one from which it is reached: with several networks, each peer has its own."""
    host, port = split(peer)
    try:
        connection = socket.create_connection((host, port), timeout=5)
    except OSError as error:
        raise NoPeer(
            f"{peer}: {error.strerror or error}; start `millstream doctor CONFIG --serve {port}` there"
        ) from None
    with connection:
        connection.settimeout(_ASK_S)
        lines = connection.makefile("rwb")

        def ask(operation: str, **arguments: Any) -> Any:
            try:
                lines.write(json.dumps({"operation": operation, **arguments}).encode() + b"\n")
                lines.flush()
                line = lines.readline(_LONGEST_LINE)
            except OSError as error:
                raise NoPeer(f"{peer}: {operation}: {error}") from None
            if not line:
                raise NoPeer(f"{peer}: hung up at {operation!r}")
            answer = json.loads(line)
            if "error" in answer:
                raise NoPeer(f"{peer}: {operation}: {answer['error']}")
            return answer["answer"]

        yield Node(peer, host, ask), str(connection.getsockname()[0])


class _Handler(socketserver.StreamRequestHandler):
    timeout = 60  # of an asker that says nothing

    def handle(self) -> None:
        server = self.server
        assert isinstance(server, PeerServer)
        while True:
            try:
                line = self.rfile.readline(_LONGEST_LINE)
            except OSError:
                return
            if not line:
                return
            self.wfile.write(json.dumps(self._answer(server.operations, line)).encode() + b"\n")

    def _answer(self, operations: Operations, line: bytes) -> dict[str, Any]:
        try:
            asked = json.loads(line)
            asked.pop("asker", None)  # it is where the question comes from, not what it says
            return {"answer": operations.ask(**asked, asker=self.client_address[0])}
        except OSError as error:
            return {"error": f"{error.strerror or error} ({error.filename or 'socket'})"}
        except (Refused, ValueError, TypeError) as error:
            return {"error": str(error)}


class PeerServer(socketserver.ThreadingTCPServer):
    """`millstream doctor --serve PORT`."""

    allow_reuse_address, daemon_threads = True, True

    def __init__(self, host: str, port: int, operations: Operations) -> None:
        """`host` "": every address of this node. Raises OSError."""
        self.operations = operations
        super().__init__((host, port), _Handler)

    def serve(self, stop: Callable[[], bool], longest_s: float) -> None:
        """Answer until `stop()`, or for `longest_s` at most."""
        self.timeout = 0.5
        until = time.monotonic() + longest_s
        while not stop() and time.monotonic() < until:
            self.handle_request()
