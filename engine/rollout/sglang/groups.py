"""The transfer groups of one SGLang server.

    join:  the trainer's listener answers? ─► /init_weights_update_group, until all ranks have met ─► joined
    leave: said at once to a receive that waits for it ─► /destroy_weights_update_group, when the server hears

A server that joins or receives hears nothing else meanwhile: its scheduler waits in the collective, and only the other
side can end that. So nothing is begun without a listener, calls never overlap (`lock`), and a server that does not
answer some seconds after the trainer's own deadline has passed is stuck for good: `Died`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any, NamedTuple

from engine.interfaces import EngineError
from engine.rollout.loading import TRANSFER_FAILED
from engine.rollout.sglang.client import SGLangClient
from engine.rollout.sglang.errors import Died, Refused, SGLangError, TimedOut
from engine.weights.collective import group_backend
from streams.events import TransferGroupFormed

SPARE_S = 3.0  # after the trainer's deadline, for it to close the group and for Gloo to notice
_LEAVE_S = 2.0  # `leave` waits no longer; the group is destroyed in the background
_CLOSE_S = 1.0


class Joined(NamedTuple):
    formed: TransferGroupFormed
    left: asyncio.Event


class Groups:
    """Of one server. `lock`: held while it is in a call that nothing may overlap. `stuck`: told of one that is."""

    def __init__(
        self, client: SGLangClient, lock: asyncio.Lock, stuck: Callable[[EngineError], object]
    ) -> None:
        self._client, self._lock, self._stuck = client, lock, stuck
        self._joined: dict[str, Joined] = {}
        self._left: set[str] = set()
        self._background: set[asyncio.Task[Any]] = set()

    def joined(self, group: str) -> Joined:
        """Raises EngineError("transfer_failed") when the server is no member."""
        found = self._joined.get(group)
        if found is None:
            raise EngineError(TRANSFER_FAILED, f"group {group} is not joined")
        return found

    async def join(self, formed: TransferGroupFormed, first_rank: int) -> None:
        """As RolloutEngine.join_group. A caller that is cancelled must `leave`: the server cannot be called back."""
        await asyncio.shield(self._in_background(self._join(formed, first_rank)))

    async def leave(self, group: str) -> None:
        self._left.add(group)
        joined = self._joined.pop(group, None)
        if joined is not None:
            joined.left.set()
            await asyncio.wait({self._in_background(self._destroy(group))}, timeout=_LEAVE_S)

    async def close(self) -> None:
        """Leave all of them, as far as the server hears within a second."""
        self._left.update(self._joined)
        rest = [self._in_background(self._destroy(group)) for group in self._joined]
        self._joined.clear()
        if rest:
            await asyncio.wait(rest, timeout=_CLOSE_S)
        for task in self._background:
            task.cancel()

    async def _join(self, formed: TransferGroupFormed, first_rank: int) -> None:
        end = time.monotonic() + formed.deadline_s
        async with self._lock:
            if formed.group in self._left:
                raise _failed(formed, "it was over before it was joined")
            await _check_listener(formed, end)
            try:
                await self._client.init_group(
                    formed.address,
                    formed.port,
                    first_rank,
                    formed.world_size,
                    formed.group,
                    group_backend(formed.backend),
                    deadline=timedelta(seconds=max(0.0, end - time.monotonic()) + SPARE_S),
                )
            except TimedOut as error:
                raise self._is_stuck(formed.group, error) from error
            except SGLangError as error:
                raise _failed(formed, str(error)) from error
            if formed.group not in self._left:
                self._joined[formed.group] = Joined(formed, asyncio.Event())
                return
        await self._destroy(formed.group)
        raise _failed(formed, "it was left while it was joined")

    async def _destroy(self, group: str) -> None:
        async with self._lock:
            try:
                await self._client.destroy_group(group)
            except Refused:
                pass  # it was never whole, or the server is another by now
            except TimedOut as error:
                raise self._is_stuck(group, error) from error

    def _is_stuck(self, group: str, error: SGLangError) -> EngineError:
        found = Died(f"{self._client.url} is stuck in transfer group {group}: {error}")
        self._stuck(found)
        return found

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waited for it has it


async def _check_listener(formed: TransferGroupFormed, end: float) -> None:
    """A server that is told to meet at an address where nobody listens blocks for half an hour."""
    left_s = end - time.monotonic()
    try:
        if left_s <= 0:
            raise TimeoutError("its deadline has passed")
        opening = asyncio.open_connection(formed.address, formed.port)
        _, writer = await asyncio.wait_for(opening, left_s)
    except (OSError, asyncio.TimeoutError) as error:
        why = str(error) or "no answer within its deadline"
        raise _failed(formed, f"nobody listens at {formed.address}:{formed.port} ({why})") from None
    writer.close()


def _failed(formed: TransferGroupFormed, why: str) -> EngineError:
    return EngineError(TRANSFER_FAILED, f"group {formed.group}: {why}")
