"""Who holds a share: what a member says of itself to its group, and whether that process still lives.

A member's `Holder` travels as the user data of its Kafka group membership, so that every newcomer can name the one
who is in its way, and can tell a holder that died on this machine (replaced at once) from one that it cannot see
(waited for).
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
import uuid
from datetime import datetime, timezone
from functools import lru_cache

import msgspec


class Holder(msgspec.Struct, frozen=True, omit_defaults=True):
    """One member's share of one topic."""

    nonce: str  # one membership of one process
    topic: str  # as it is called on the broker
    partitions: int  # of the topic
    replica: int
    replicas: int
    elastic: bool = False
    member: str = ""
    host: str = ""  # for people; `machine` is what is compared
    machine: str = ""
    pid: int = 0
    started: str = ""  # when the process began, as its machine counts it: a pid alone is used again
    session_ms: int = 0
    since_ms: int = 0  # when this membership began, milliseconds since 1970

    @property
    def instance(self) -> str:
        """Its static member id: unique within the group, since no number holds a dot."""
        return f"{self.topic}.{self.replica}"

    @property
    def share(self) -> str:
        return f"{self.replica}/{self.replicas}"

    @property
    def is_of_this_machine(self) -> bool:
        return self.machine == _machine()

    @property
    def is_dead(self) -> bool:
        """Known for certain to hold nothing more: its process on this machine, or its membership here, has ended."""
        if not self.is_of_this_machine:
            return False
        if self.pid == os.getpid() and self.started == process_start(self.pid):
            return self.nonce not in _open_here
        return not self.started or process_start(self.pid) != self.started

    def describe(self) -> str:
        """Names pid, host and member, then the share: the sentence of a ShareHeld."""
        since = datetime.fromtimestamp(self.since_ms / 1000, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
        name = f" ({self.member})" if self.member else ""
        return f"process {self.pid} on {self.host}{name}, since {since}, holds share {self.share}"


# Memberships of this process that were not closed. A share left behind by a closed one (its farewell did not reach
# the broker) is nobody's, though its process lives.
_open_here: set[str] = set()
_lock = threading.Lock()


def new_holder(
    topic: str, partitions: int, replica: int, replicas: int, *, elastic: bool, member: str, session_ms: int
) -> Holder:
    """This process as a holder; `gone` ends it."""
    holder = Holder(
        nonce=uuid.uuid4().hex,
        topic=topic,
        partitions=partitions,
        replica=replica,
        replicas=replicas,
        elastic=elastic,
        member=member,
        host=socket.gethostname(),
        machine=_machine(),
        pid=os.getpid(),
        started=process_start(os.getpid()),
        session_ms=session_ms,
        since_ms=time.time_ns() // 1_000_000,
    )
    with _lock:
        _open_here.add(holder.nonce)
    return holder


def gone(holder: Holder) -> None:
    with _lock:
        _open_here.discard(holder.nonce)


def process_start(pid: int) -> str:
    """When that process of this machine began, in some unit of the system's; "" when there is none, or it only
    waits to be reaped."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()  # the name before it may hold anything
        return "" if fields[0] in (b"Z", b"X") else fields[19].decode()
    except (FileNotFoundError, ProcessLookupError):
        if os.path.exists("/proc/self/stat"):
            return ""
    told = subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return told.stdout.strip()


@lru_cache(maxsize=1)
def _machine() -> str:
    """Where a pid means the same process: this boot of this machine, and this container's view of its processes.

    Two machines never share it, also where their host names do.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()}/{uuid.getnode():x}"
