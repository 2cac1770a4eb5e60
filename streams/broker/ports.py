"""Free ports of the loopback address, and who holds a taken one."""

from __future__ import annotations

import errno
import os
import random
import socket
from pathlib import Path

from streams.broker.errors import BrokerFailed

HOST = "127.0.0.1"
LOWEST = 10_240
TRIES = 200
_LISTENING = "0A"  # state in /proc/net/tcp


def free_ports(count: int) -> list[int]:
    """Different ports on which nobody listens now.

    They lie below those that the system hands to outgoing connections. A client that keeps dialling the port of a
    dead broker could otherwise be given that very port as its own, be connected to itself, and keep the broker from
    coming back.
    """
    highest = _first_of_outgoing()
    chosen: list[int] = []
    for _ in range(TRIES):
        port = random.randrange(LOWEST, highest)
        if port not in chosen and is_free(port):
            chosen.append(port)
            if len(chosen) == count:
                return chosen
    raise BrokerFailed(f"no {count} free ports found between {LOWEST} and {highest} in {TRIES} tries")


def is_free(port: int) -> bool:
    return why_not(port) is None


def why_not(port: int) -> str | None:
    """Why a broker could not listen there; None when it could.

    Connections of an earlier listener that are still winding down are no obstacle.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the broker binds
        try:
            probe.bind((HOST, port))
            probe.listen(1)
        except PermissionError:
            return "is for programs of root only"
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return f"cannot be had ({error.strerror})"
            return f"is taken by {who_listens(port) or 'a process that this user may not look into'}"
    return None


def who_listens(port: int) -> str | None:
    """`pid 12 (java -cp …)`; None where the system does not tell, as for the processes of another user."""
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    if not sockets:
        return None
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(link) in sockets for link in (process / "fd").iterdir()):
                command = (
                    (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                )
                return f"pid {process.name} ({command if len(command) <= 60 else command[:59] + '…'})"
        except OSError:
            continue  # it ended, or is not ours to look into
    return None


def _listening_inodes(port: int) -> list[str]:
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = Path(table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for fields in (row.split() for row in rows):
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                found.append(fields[9])
    return found


def _first_of_outgoing() -> int:
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError):
        first = 32_768  # Linux's default
    return first if first > LOWEST + 1000 else 65_536  # no room below: better a risky port than none
