"""The group of `ipc`: ranks of one host, buckets in memory that all of them have mapped.

    rank 0                                                    rank r
    bucket ─► room 0 ─► Filled(n)   ────────────────────────► copies the room ─► Copied(n)
    bucket ─► room 1 ─► Filled(n+1) ─► waits for Copied(n) of all, then fills room 0 again

The ranks meet in the group's TCPStore, where rank 0 leaves the name of a Unix socket; everything after that is short
words on this socket (engine/weights/shared_words.py), so a rank that dies is noticed at once, by its closed connection,
and each wait has a deadline.

Two rooms are all the memory there is beside the weights, and nothing of them outlives its processes, not even after
kill -9: in main memory they are memfds (engine/weights/shared_memory.py), on a CUDA device what the driver exports
(engine/weights/cuda_ipc.py).
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from engine import devices
from engine.weights import bucketing
from engine.weights.collective import GiveUp, TransferError
from engine.weights.shared_memory import HostRooms, HostView
from engine.weights.shared_words import Copied, Filled, Hello, Line, Met, Opened, Rooms, wait_for_any
from streams.events import TensorInfo

BACKEND = "ipc"

_ROOMS = 2
_HELLO_S = 5.0  # from a connection to its first word
_GOODBYE_S = 600.0  # how long rooms on a device are kept for a rank that may still read them


# ---------------------------------------------------------------- ranks
class _Rank:
    """What both sides share: `close` may come from any thread, and frees nothing that another one is using."""

    backend = BACKEND

    def __init__(self, name: str, lines: Sequence[Line]) -> None:
        self.name = name
        self._lines = list(lines)
        self._state = threading.Lock()
        self._is_busy = self._is_closed = False

    def _use(self, function: Callable[[], None]) -> None:
        """Run it unless the group is closed; who closes it meanwhile leaves the memory to be freed here."""
        with self._state:
            if self._is_closed:
                raise TransferError(f"group {self.name} is closed")
            self._is_busy = True
        try:
            function()
        except TransferError as error:
            raise TransferError(f"group {self.name}: {error}") from error
        except Exception as error:  # of the device, or of its memory
            detail = str(error).strip().partition("\n")[0][:300] or type(error).__name__
            raise TransferError(f"group {self.name}: {detail}") from error
        finally:
            with self._state:
                self._is_busy, is_over = False, self._is_closed
            if is_over:
                self._free()

    def _stop(self, give_up: GiveUp) -> GiveUp:
        return lambda: "it was left meanwhile" if self._is_closed else give_up()

    def close(self) -> None:
        """Leave: the others notice at once. Never raises, may be called twice."""
        with self._state:
            if self._is_closed:
                return
            self._is_closed, is_busy = True, self._is_busy
        for line in self._lines:
            try:
                line.socket.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # the other end was first
        if not is_busy:
            self._free()

    def _free(self) -> None:
        raise NotImplementedError


class Owner(_Rank):
    """Rank 0: fills the rooms. For one thread at a time, but `close` may come from another."""

    def __init__(self, name: str, lines: Sequence[Line], device: str) -> None:
        super().__init__(name, lines)
        self._device = device
        self._rooms: Any = None
        self._old_rooms: Any = None  # while the ranks go over to larger ones
        self._number = 0  # of the next bucket
        self._copied = dict.fromkeys(range(len(lines)), -1)

    def send(
        self,
        tensors: Mapping[str, Any],
        buckets: Sequence[Sequence[TensorInfo]],
        deadline: float,
        give_up: GiveUp,
    ) -> None:
        """All buckets in order; returns when every rank has copied the last. Raises TransferError."""
        self._use(lambda: self._send(tensors, buckets, deadline, self._stop(give_up)))

    def _send(
        self,
        tensors: Mapping[str, Any],
        buckets: Sequence[Sequence[TensorInfo]],
        deadline: float,
        give_up: GiveUp,
    ) -> None:
        largest = bucketing.largest(buckets)
        if largest and (self._rooms is None or self._rooms.nbytes < largest):
            self._make_rooms(largest, deadline, give_up)
        for bucket in buckets:
            if bucketing.size_of(bucket):
                self._wait_until_copied(self._number - _ROOMS, deadline, give_up)
                self._post(bucket, tensors)
        self._wait_until_copied(self._number - 1, deadline, give_up)

    def _post(self, bucket: Sequence[TensorInfo], tensors: Mapping[str, Any]) -> None:
        number, self._number = self._number, self._number + 1
        self._rooms.fill(number, bucket, tensors)
        for line in self._lines:
            line.say(Filled(number, bucketing.size_of(bucket)))

    def _make_rooms(self, nbytes: int, deadline: float, give_up: GiveUp) -> None:
        """The old ones are freed when all ranks have closed them, or with the group."""
        rooms = _make_rooms(self.name, nbytes, self._device)
        self._old_rooms, self._rooms = self._rooms, rooms
        try:
            for line in self._lines:
                line.say(Rooms(rooms.nbytes, rooms.device, rooms.handles), rooms.descriptors)
            for line in self._lines:
                opened, _ = line.expect(Opened, deadline, give_up)
                if opened.refusal:
                    raise TransferError(f"{line.who} cannot read the shared memory: {opened.refusal}")
        finally:
            rooms.handed_over()
        old, self._old_rooms = self._old_rooms, None
        if old is not None:
            old.close()

    def _wait_until_copied(self, number: int, deadline: float, give_up: GiveUp) -> None:
        while waiting := {place for place, copied in self._copied.items() if copied < number}:
            lines = [self._lines[place] for place in waiting]
            names = ", ".join(line.who for line in lines)
            for line in wait_for_any(lines, deadline, give_up, f"{names} did not copy within the deadline"):
                word, _ = line.expect(Copied, deadline, give_up)
                self._copied[self._lines.index(line)] = word.number

    def _free(self) -> None:
        lines, self._lines = self._lines, []
        rooms = [each for each in (self._old_rooms, self._rooms) if each is not None]
        self._old_rooms = self._rooms = None
        if any(
            each.device for each in rooms
        ):  # who still reads there must be waited for, and nobody waits for that
            threading.Thread(
                target=_free_when_all_left, args=(lines, rooms), name="close", daemon=True
            ).start()
            return
        for each in rooms:
            each.close()
        for line in lines:
            line.socket.close()


def _free_when_all_left(lines: Sequence[Line], rooms: Sequence[Any]) -> None:
    """A rank closes its view of the rooms before its connection. One that is frozen for ever costs this memory."""
    deadline = time.monotonic() + _GOODBYE_S
    left = True
    for line in lines:
        try:
            while True:  # what it had still to say
                line.hear(deadline, lambda: "")
        except TransferError:
            left = left and time.monotonic() < deadline
        line.socket.close()
    for each in rooms if left else ():
        each.close()


class Reader(_Rank):
    """Rank ≥ 1: copies what is in the rooms. For one thread at a time, but `close` may come from another."""

    def __init__(self, name: str, line: Line, device: str) -> None:
        super().__init__(name, [line])
        self._device = device
        self._view: Any = None
        self._number = 0

    def start(self, tensor: Any, deadline: float, give_up: GiveUp) -> Callable[[], None]:
        """As Group.start: what is returned waits until the next bucket is in `tensor`."""
        number, self._number = self._number, self._number + 1
        return lambda: self._use(lambda: self._take(number, tensor, deadline, self._stop(give_up)))

    def _take(self, number: int, tensor: Any, deadline: float, give_up: GiveUp) -> None:
        (line,) = self._lines
        word, descriptors = line.hear(deadline, give_up)
        if isinstance(word, Rooms):
            self._open(line, word, descriptors)
            word, _ = line.expect(Filled, deadline, give_up)
        if not isinstance(word, Filled):
            raise TransferError(f"{line.who} said {type(word).__name__}, a bucket was due")
        if (word.number, word.nbytes) != (number, tensor.numel()) or self._view is None:
            raise TransferError(
                f"bucket {word.number} of {word.nbytes} bytes came, bucket {number} of {tensor.numel()} was due"
            )
        self._view.copy_to(tensor, number)
        line.say(Copied(number))

    def _open(self, line: Line, rooms: Rooms, descriptors: Sequence[int]) -> None:
        view, self._view = self._view, None
        try:
            if view is not None:
                view.close()
            self._view = _open_rooms(rooms, descriptors, self._device)
        except Exception as error:
            line.say(Opened(str(error)[:1000]))
            raise
        finally:
            for each in descriptors:
                os.close(each)
        line.say(Opened())

    def _free(self) -> None:
        view, self._view = self._view, None
        try:
            if view is not None:
                view.close()
        finally:
            for line in self._lines:
                line.socket.close()


def _make_rooms(name: str, nbytes: int, device: str) -> Any:
    found = devices.named(device)
    if found.kind == "cpu":
        return HostRooms(name, nbytes, _ROOMS)
    if found.has_ipc:
        from engine.weights.cuda_ipc import DeviceRooms

        return DeviceRooms(nbytes, device, _ROOMS)
    raise TransferError(
        f"ipc is between processes on CPUs or on CUDA devices; this trainer's device is {device}"
    )


def _open_rooms(rooms: Rooms, descriptors: Sequence[int], device: str) -> Any:
    if not rooms.device:
        return HostView(rooms.nbytes, descriptors)
    from engine.weights.cuda_ipc import DeviceView

    return DeviceView(rooms.device, rooms.nbytes, rooms.handles, device)


# ---------------------------------------------------------------- meeting
def lead(store: Any, group: str, world_size: int, timeout: timedelta, device: str) -> Owner:
    """Rank 0 of a group; returns when all others are there. Raises TransferError by `timeout`, naming who is not."""
    deadline = time.monotonic() + timeout.total_seconds()
    address = f"\0millstream/{group}/{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(address)
        server.listen(world_size)
        store.set(_place(group), address)
        lines: dict[int, Line] = {}
        try:
            while len(lines) < world_size - 1:
                absent = sorted(set(range(1, world_size)) - lines.keys())
                late = f"ranks {', '.join(map(str, absent))} of {world_size} did not come within the deadline"
                wait_for_any([Line(server, "nobody")], deadline, lambda: "", late)
                try:
                    connection, _ = server.accept()
                except OSError:  # it is gone again
                    continue
                _greet(connection, group, world_size, lines, deadline)
            for line in lines.values():
                line.say(Met())
        except BaseException:
            for line in lines.values():
                line.socket.close()
            raise
    return Owner(group, [lines[rank] for rank in sorted(lines)], device)


def _greet(
    connection: socket.socket, group: str, world_size: int, lines: dict[int, Line], deadline: float
) -> None:
    """Only a process of this user that knows the group becomes a rank; each rank is taken once."""
    line = Line(connection, "a caller")
    try:
        size = struct.calcsize("3i")
        _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        if user != os.getuid():  # it is not waited for
            raise TransferError("it is another user's")
        hello, _ = line.expect(Hello, min(deadline, time.monotonic() + _HELLO_S))
        is_one = hello.group == group and 0 < hello.rank < world_size
        if is_one and hello.rank not in lines:
            line.who = f"rank {hello.rank}"
            lines[hello.rank] = line
            return
    except TransferError:
        pass
    connection.close()


def follow(store: Any, group: str, rank: int, timeout: timedelta, device: str) -> Reader:
    """Rank ≥ 1; returns when all are there. Raises TransferError by `timeout`."""
    deadline = time.monotonic() + timeout.total_seconds()
    address = store.get(
        _place(group)
    ).decode()  # the store has the timeout, and ends this when rank 0 gives up
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(address)
    except OSError as error:
        connection.close()
        raise TransferError(
            f"the trainer is not reached on this host ({error.strerror}): ipc wants trainer and engines on one host, "
            "in one network namespace"
        ) from None
    line = Line(connection, "the trainer")
    try:
        line.say(Hello(group, rank))
        line.expect(Met, deadline)
    except BaseException:
        connection.close()
        raise
    return Reader(group, line, device)


def _place(group: str) -> str:
    return f"millstream/ipc/{group}"
