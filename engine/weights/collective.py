"""Groups for broadcasts of weights, as SGLang makes them.

    trainer: listen ─► (engines are told) ─► join(rank 0) ─► broadcast(bucket) … ─► close
    engine:            join(rank ≥ 1, blocks until all are there) ─► broadcast(bucket) … ─► close

A group stands beside the default one of torch.distributed and needs none: its ranks meet in a TCPStore, under the
group's name (as `init_custom_process_group` in SGLang's srt/utils/common.py does), so one trainer feeds our own
engines and SGLang servers in the same group. No call here waits longer than its deadline.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

from engine import devices
from streams.errors import MillstreamError

PORTS_TRIED = 100
_ARRIVED, _REFUSED = "millstream/arrived", "millstream/refused"
_LOOK_S = 0.1  # between two looks whether another rank cannot be a member, while NCCL connects
_SHORTEST_NAP_S, _LONGEST_NAP_S = 0.00005, 0.001  # between two looks at a broadcast that is under way
_NAP_SHARE = 1 / 16  # of the time that it has taken so far: the end is noticed no later than that
_WATCHDOG_S = 600.0  # beyond the deadline: by then the group has long been aborted
_ENVIRONMENT = threading.Lock()
_CLOSE_S = 0.5

GiveUp = Callable[[], str]  # why it is no use to wait any longer; "": it is


class TransferError(MillstreamError):
    """A group could not be formed, or a broadcast did not come to its end; the message says why."""


def never() -> str:
    return ""


class Listener:
    """The trainer's end of a group that is not formed yet: it listens when this is constructed.

    `port` is the first one that is tried (0: any free one). Raises TransferError when none of them can be had.
    """

    def __init__(self, address: str, port: int, world_size: int, timeout: timedelta) -> None:
        self.address, self.world_size = address, world_size
        server = _bind(address, port)
        self.port = int(server.getsockname()[1])
        try:
            self.store: Any = _c10d().TCPStore(
                address,
                self.port,
                world_size,
                is_master=True,
                timeout=timeout,
                wait_for_workers=False,
                master_listen_fd=server.detach(),
            )
        except Exception as error:
            raise TransferError(f"no store at {address}:{self.port}: {error}") from error

    def arrived(self, group: str, ranks: Sequence[int], backend: str) -> list[int]:
        """Those of these ranks that came to the meeting place. (SGLang's are seen with Gloo alone.)"""
        mesh, prefixed = self.store, _c10d().PrefixStore
        for prefix in (group, f"{group}/", "cpu/", "0"):  # where Gloo's own ranks leave their addresses
            mesh = prefixed(prefix, mesh)
        try:
            return [
                rank
                for rank in ranks
                if self.store.check([f"{_ARRIVED}/{group}/{rank}"])
                or (backend == "gloo" and mesh.check([str(rank)]))
            ]
        except Exception:  # the store itself is gone
            return []

    def close(self) -> None:
        """Ranks that still wait for others fail at once."""
        self.store = None


class _Queued(NamedTuple):
    """A broadcast on a device."""

    ended: Any  # its event
    wait: Callable[[], None]

    def __call__(self) -> None:
        self.wait()


class Group:
    """One rank of a group. Not for several threads at once, but `close` may be called from another."""

    def __init__(self, process_group: Any, store: Any, name: str, backend: str, rank: int) -> None:
        self.name, self.backend, self.rank = name, backend, rank
        self._group, self._store = process_group, store
        self._is_connected = backend == "gloo"  # NCCL's ranks connect in their first broadcast
        self._stream: Any = None

    def start(self, tensor: Any, deadline: float, give_up: GiveUp = never) -> Callable[[], None]:
        """Begin to send (rank 0) or to receive `tensor`; what is returned waits for the end.

        `deadline` by time.monotonic; `give_up` is asked all the while. Both raise TransferError; then the group is of
        no use any more.
        """
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        # on a device the deadline is kept here: what the watchdog says of a work that is late is of no use
        spare_s = 0.001 if self.backend == "gloo" else _WATCHDOG_S
        options.timeout = timedelta(seconds=max(0.0, deadline - time.monotonic()) + spare_s)
        options.asyncOp = True
        group = self._group
        if group is None:
            raise TransferError(f"group {self.name} is closed")
        try:
            work = self._begin(lambda: group.broadcast([tensor], options), tensor.device, deadline, give_up)
            ended: Any = (
                work.is_completed if tensor.device.type == "cpu" else self._end_of(work, tensor.device)
            )
        except Exception as error:
            raise TransferError(f"group {self.name}: {_first_line(error)}") from error
        if tensor.device.type == "cpu":
            return lambda: self._wait(work, ended, deadline, give_up)
        return _Queued(ended, lambda: self._wait(None, ended.query, deadline, give_up))

    def _begin(self, broadcast: Callable[[], Any], device: Any, deadline: float, give_up: GiveUp) -> Any:
        """The first broadcast of a group on a device waits for all ranks, without a limit: on a thread of its own."""
        if self._is_connected:
            return broadcast()
        import torch

        begun: Future[Any] = Future()
        module: Any = torch.get_device_module(device)
        stream = module.current_stream(device)  # it is each thread's own

        def broadcast_there() -> Any:
            with module.stream(stream):
                return broadcast()

        threading.Thread(target=_into, args=(begun, broadcast_there), name="connect", daemon=True).start()
        _until(begun.done, deadline, self._refusal(give_up), "the ranks did not connect within the deadline")
        work = begun.result()
        self._is_connected = True
        return work

    def _refusal(self, give_up: GiveUp) -> GiveUp:
        """A rank that was refused never connects: no use to wait for it. Rank 0 alone can look: the others' NCCL keeps
        the store to itself until it has the unique id."""
        if self.rank:
            return give_up
        store: Any = self._store
        key, looked = f"{_REFUSED}/{self.name}", 0.0

        def why() -> str:
            nonlocal looked
            if time.monotonic() - looked > _LOOK_S:
                looked = time.monotonic()
                if store.check([key]):
                    return store.get(key).decode()
            return give_up()

        return why

    def _end_of(self, work: Any, device: Any) -> Any:
        """The event at which the device has come to the end of a broadcast.

        (NCCL's work says "completed" after an error, too.)
        On a stream of its own, so that no other work on this device ever queues behind a broadcast.
        """
        import torch

        module: Any = torch.get_device_module(device)
        with module.device(device):
            if self._stream is None:
                self._stream = module.Stream()
            ended = module.Event()
            with module.stream(self._stream):
                work.wait()  # the stream's, not this thread's
                ended.record(self._stream)
        return ended

    def _wait(self, work: Any, has_ended: Callable[[], bool], deadline: float, give_up: GiveUp) -> None:
        """`work`: None on a device."""
        try:
            _until(has_ended, deadline, give_up, "the broadcast did not end within its deadline")
            if work is not None:
                work.wait()
            elif self._group is None:
                raise TransferError("it was left meanwhile")
        except Exception as error:
            raise TransferError(f"group {self.name}: {_first_line(error)}") from error

    def close(self) -> None:
        """Leave: the others' broadcasts that are under way fail. Never raises, may be called twice.

        A broadcast of Gloo that was given up holds its connections until its own deadline; nobody waits for that.
        """
        parts, self._group, self._store = [self._group, self._store], None, None
        if parts[0] is not None:
            thread = threading.Thread(target=_destroy, args=(parts, self.backend), name="close", daemon=True)
            thread.start()
            thread.join(_CLOSE_S)


def join(
    address: str,
    port: int,
    rank: int,
    world_size: int,
    group: str,
    backend: str,
    timeout: timedelta,
    *,
    listener: Listener | None = None,
    device: str = "cpu",
) -> Any:
    """Meet the other ranks at `address:port`; returns when all are there. Rank 0 passes its listener.

    What comes is a Group, or with "ipc" rank 0's Owner or another's Reader (engine/weights/shared.py). `device`: of
    this rank. Raises TransferError when they are not there by `timeout`, when rank 0 gives up, or when
    this rank cannot be a member where it is.
    """
    c10d = _c10d()
    private = c10d.distributed_c10d  # torch has no public way to a group beside the default one
    began = time.monotonic()
    try:
        if listener is not None:
            store = listener.store
        else:
            store = c10d.TCPStore(
                address, port, world_size, is_master=False, timeout=timeout, wait_for_workers=False
            )
            store.set(f"{_ARRIVED}/{group}/{rank}", "1")
        left = max(timedelta(milliseconds=1), timeout - timedelta(seconds=time.monotonic() - began))
        store.set_timeout(left)
        if backend == "ipc":
            from engine.weights import shared

            if rank == 0:
                return shared.lead(store, group, world_size, left, device)
            return shared.follow(store, group, rank, left, device)
        library = devices.with_collectives(backend)
        if library is not None:
            claim_device(store, group, rank, device)
        with _no_suicide(backend):
            made: Any = private._new_process_group_helper(
                world_size,
                rank,
                [],
                private.Backend(group_backend(backend)),
                c10d.PrefixStore(group, store),
                group_name=group,
                timeout=left,
            )[0]
        private._world.pg_group_ranks[made] = {each: each for each in range(world_size)}
    except Exception as error:
        raise TransferError(
            f"group {group} at {address}:{port}, rank {rank}: {_first_line(error)}"
        ) from error
    return Group(made, store, group, backend, rank)


def group_backend(backend: str) -> str:
    """What torch (and SGLang) is told, on all sides alike: the word of the record, or where its library takes tensors
    of devices alone, both halves of a group ("mccl" → "cpu:gloo,musa:mccl")."""
    library = devices.with_collectives(backend)
    return backend if library is None else library.weight_group


def claim_device(store: Any, group: str, rank: int, device: str, device_id: str = "") -> None:
    """Raise TransferError when another rank of the group has this very device: NCCL wants one for each.

    Only ranks that come here are known (SGLang's do not). `device_id`: in place of the device's own identity.
    """
    own = devices.named(device)
    device_id = device_id or own.identity()
    key = f"millstream/device/{group}/{device_id}"
    if device_id and store.add(key, 1) > 1:
        reason = (
            f"rank {rank} is on the same GPU ({device_id}) as another rank, and {own.collectives.upper()} needs one "
            f"GPU for each; give trainer and engines different ones ({own.visible_variables[0]}), or set "
            f'weights.transport = "{"ipc" if own.has_ipc else "disk"}"'
        )
        store.set(f"{_REFUSED}/{group}", reason)
        raise TransferError(reason)


def _until(is_done: Callable[[], bool], deadline: float, give_up: GiveUp, late: str) -> None:
    began = time.monotonic()
    while not is_done():
        now = time.monotonic()
        if now >= deadline:
            raise TimeoutError(late)
        if why := give_up():
            raise TimeoutError(why)
        time.sleep(min(_LONGEST_NAP_S, max(_SHORTEST_NAP_S, _NAP_SHARE * (now - began))))


def _into(future: Future[Any], function: Callable[[], Any]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


@contextmanager
def _no_suicide(backend: str) -> Iterator[None]:
    """Torch's watchdog ends the whole process after an error of NCCL (or MCCL); a broadcast is not worth a trainer.

    It reads this variable when a group is made.
    """
    library = devices.with_collectives(backend)
    if library is None:
        yield
        return
    variable = library.error_variable
    with _ENVIRONMENT:
        before = os.environ.get(variable)
        os.environ[variable] = "0"
        try:
            yield
        finally:
            if before is None:
                del os.environ[variable]
            else:
                os.environ[variable] = before


def _c10d() -> Any:
    import torch.distributed.distributed_c10d

    return torch.distributed


def _bind(address: str, port: int) -> socket.socket:
    tried = range(port, min(port + PORTS_TRIED, 65536)) if port else [0]
    failure: OSError | None = None
    for each in tried:
        try:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            return socket.create_server((address, each), family=family, backlog=128)
        except OSError as error:
            failure = error
    where = f"ports {tried[0]} to {tried[-1]}" if port else "any port"
    raise TransferError(
        f"the trainer cannot listen at {address}, {where} ({failure}); set weights.master_address to an address of "
        "this machine, and weights.master_port to a port that is free"
    )


def own_address(hosts: Sequence[str]) -> str:
    """Where engines on these hosts reach this machine: the loopback when all of them are here."""
    here = socket.gethostname()
    if all(host == here for host in hosts):
        return "127.0.0.1"
    try:
        return str(socket.getaddrinfo(here, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise TransferError(
            f"this machine's name {here!r} has no address ({error}); set weights.master_address"
        ) from None


def _first_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{text[:300] or type(error).__name__}"


def _destroy(parts: list[Any], backend: str) -> None:
    """`parts`: [group, store], the last references to them."""
    import torch.distributed as distributed

    library = devices.with_collectives(backend)
    if library is not None:  # a kernel that waits for a peer ends by this alone; Gloo's half has no such call
        own = parts[0] if library.weight_group == backend else parts[0]._get_backend(library.torch)
        _quietly(getattr(own, "abort", lambda: None))
    _quietly(lambda: distributed.destroy_process_group(parts[0]))
    parts.clear()


def _quietly(function: Callable[[], object]) -> None:
    try:
        function()
    except Exception:
        pass  # what is left behind ends with the process; the group is over in any case
