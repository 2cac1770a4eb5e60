"""New weights for one SGLang server: whole and verified, or the old ones again, or nobody is served.

    folder made and verified          nothing is touched before
      └► pause(mode) ─► load ─► label = ours? weights as published? ─► held ─► continue
            │ failed       │ failed, or not as it must be
            │              └► load what was held before ─► checksum = its checksum ─► continue, and the error
            │                    │ failed
            └► continue          └► lost: what the server holds is not known, and it must serve nobody any more

    load, from its file:  update_weights_from_disk
    load, by broadcast:   begin ─► every bucket of the plan, label and flush with the last alone ─► end

`continue` is sent on every path, but to a server that is stuck in a broadcast and hears nothing. What is lost is
marked so before that, so that no token made afterwards counts. The file of a version that is broadcast is linked and
verified too: it says what the server must hold afterwards, and is the way back to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from engine.interfaces import EngineError, WeightsId
from engine.rollout.loading import (
    FATAL,
    TRANSFER_FAILED,
    WEIGHTS_MISMATCH,
    WEIGHTS_UNREADABLE,
    PauseMode,
    weights_id,
)
from engine.rollout.sglang.client import SGLangClient
from engine.rollout.sglang.errors import Died, Refused, SGLangError, TimedOut
from engine.rollout.sglang.folders import MODEL_FILE, VersionFolders
from engine.rollout.sglang.fused import Proof
from engine.rollout.sglang.spans import label
from engine.weights import tensors as files
from engine.weights.tensors import WeightsError
from streams.events import TensorInfo, WeightsPublished

logger = logging.getLogger(__name__)

_REMEMBERED = 1000  # versions
_END_S = 5.0  # to end the session of a broadcast that failed; then the server is stuck in it


class Held(NamedTuple):
    """What the server holds for certain."""

    id: WeightsId
    folder: Path  # it can be loaded from there
    checksum: str  # the server's own


class _Target(NamedTuple):
    id: WeightsId
    folder: Path
    expected: dict[str, str]  # parameter → hash that the server must show; {}: cannot be told

    @property
    def label(self) -> str:
        return label(self.id.epoch, self.id.version)


_Load = Callable[[_Target], Awaitable[None]]


class Updates:
    """The weights of one server. One `take` or `receive` at a time.

    `held` is what the server serves; None: it must serve nobody. Once `lost` is set that stays so. `lock` is held
    while the server takes weights: other calls that block its scheduler wait for it.
    """

    def __init__(
        self, client: SGLangClient, folders: VersionFolders, *, mode: PauseMode, deadline: timedelta
    ) -> None:
        """`deadline`: for one load from a file; every other call has the client's own."""
        self.held: Held | None = None
        self.lost: EngineError | None = None
        self.is_running = False  # the server may be paused
        self.lock = asyncio.Lock()
        self._verified: dict[tuple[int, int], None] = {}  # (epoch, version) of what it has held, oldest first
        self.server_dtype = ""  # as /server_info tells it
        self.proof = Proof()
        self._client, self._folders, self._deadline = client, folders, deadline
        self._mode: PauseMode = mode
        self._flush = mode != "in_place"  # refused there, and with reason: running requests need the cache
        self._checksums: dict[str, str] = {}  # digest → checksum, of all that were taken
        self._is_stuck = False
        self._came_whole = False  # every bucket of the last broadcast, whatever became of it

    def has_held(self, epoch: int, version: int) -> bool:
        return (epoch, version) in self._verified

    def disown(self) -> None:
        """Nobody was told that the version which is held was taken: tokens of it must not count, and it is nothing to
        go back to."""
        if self.held is not None:
            self._verified.pop((self.held.id.epoch, self.held.id.version), None)
            self.held = None

    async def take(self, published: WeightsPublished, path: Path) -> float:
        """Returns the seconds from pause to continue. Raises EngineError; a fatal one is in `lost` too."""
        return await self._exchange(await self._prepared(published, path), self._from_disk)

    async def receive(
        self,
        published: WeightsPublished,
        path: Path,
        buckets: Sequence[Sequence[TensorInfo]],
        group: str,
        end: float,
    ) -> float:
        """As `take`, by broadcast to a group that was joined. `end`: of the broadcast, by time.monotonic.

        Raises EngineError("transfer_failed") when not all of it came, "weights_mismatch" when all did and the server
        does not hold, for certain, what was published.
        """
        self._came_whole = False
        try:
            target = await self._prepared(published, path)
            return await self._exchange(target, functools.partial(self._from_group, buckets, group, end))
        except EngineError as error:
            if error.reason in FATAL:
                raise
            reason = WEIGHTS_MISMATCH if self._came_whole else TRANSFER_FAILED
            came = "came whole" if self._came_whole else "did not come"
            raise EngineError(
                reason, f"version {published.version} {came} by group {group}: {error}"
            ) from error

    async def _exchange(self, target: _Target, load: _Load) -> float:
        try:
            async with self.lock:
                self.is_running, began = True, time.monotonic()
                try:
                    await self._swap(target, load)
                finally:
                    try:
                        await self._resume()
                    finally:
                        self.is_running = False
        finally:
            self._folders.keep_only(self.held.folder if self.held is not None else None)
        return time.monotonic() - began

    async def _prepared(self, published: WeightsPublished, path: Path) -> _Target:
        return await asyncio.get_running_loop().run_in_executor(None, self._prepare, published, path)

    def _prepare(self, published: WeightsPublished, path: Path) -> _Target:
        folder = self._folders.make(published, path)
        try:
            expected = self.proof.expected(files.read_raw(folder / MODEL_FILE))
        except WeightsError as error:
            raise EngineError(WEIGHTS_UNREADABLE, f"version {published.version}: {error}") from error
        return _Target(weights_id(published), folder, expected)

    async def _swap(self, target: _Target, load: _Load) -> None:
        await self._client.pause(self._mode)  # a failure has changed no weights
        before = self.held
        try:
            await load(target)
            self.held = await self._verify(target)
        except EngineError as error:
            await self._go_back(before, error)
            raise
        except BaseException:  # the engine is being closed
            self.held = None
            raise
        self._verified[target.id.epoch, target.id.version] = None
        _forget_oldest(self._verified)

    # -- loads
    async def _from_disk(self, target: _Target) -> None:
        await self._client.update_from_disk(
            str(target.folder), target.label, flush=self._flush, deadline=self._deadline
        )

    async def _from_group(
        self, buckets: Sequence[Sequence[TensorInfo]], group: str, end: float, target: _Target
    ) -> None:
        await self._begin()
        try:
            for bucket in buckets:
                left_s, is_last = end - time.monotonic(), bucket is buckets[-1]
                if left_s <= 0:
                    raise TimedOut("its deadline has passed")
                await self._client.update_from_distributed(
                    [info.name for info in bucket],
                    [files.dtype_name(info.dtype) for info in bucket],
                    [info.shape for info in bucket],
                    group,
                    label=target.label if is_last else None,
                    flush=self._flush and is_last,
                    deadline=timedelta(seconds=left_s),
                )
            self._came_whole = True
            await self._client.end_update()
        except SGLangError as error:
            await self._end_after(error, group)
            raise

    async def _begin(self) -> None:
        try:
            await self._client.begin_update()
        except Refused:  # a daemon that was killed has left its session open
            with contextlib.suppress(Refused):
                await self._client.end_update()
            await self._client.begin_update()

    async def _end_after(self, error: SGLangError, group: str) -> None:
        """End the session of a broadcast that failed. A server that does not hear that waits in the broadcast."""
        try:
            if isinstance(error, TimedOut):
                await self._client.end_update(deadline=timedelta(seconds=_END_S))
            else:
                await self._client.end_update()
        except Refused:
            pass  # it had ended
        except TimedOut:
            self._is_stuck = True
            self.lost = Died(f"{self._client.url} is stuck in a broadcast of group {group}: {error}")
            raise self.lost from error

    # -- what it holds
    async def _verify(self, target: _Target) -> Held:
        """The guarantee that a version is served only if the server holds it, as far as a server can be asked."""
        found = await self._client.checksums(deadline=self._deadline)
        shown = await self._client.label()
        if shown != target.label:
            raise EngineError(
                WEIGHTS_MISMATCH, f"the server took {target.label}, but says that it holds {shown!r}"
            )
        verdict = self.proof.compare(target.expected, found.parameters)
        if verdict.differing:
            some = ", ".join(verdict.differing[:5]) + (", …" if len(verdict.differing) > 5 else "")
            detail = f"{len(verdict.differing)} parameters of the server are not those published: {some}"
            raise EngineError(WEIGHTS_MISMATCH, f"version {target.id.version}: {detail}")
        if not verdict.is_whole:
            self._compare(target, found.whole)
        self._checksums[target.id.digest] = found.whole
        _forget_oldest(self._checksums)
        return Held(target.id, target.folder, found.whole)

    def _compare(self, target: _Target, checksum: str) -> None:
        """Equal digests must have equal checksums, and others must not, unless the server rounds them to the same."""
        version, digest = target.id.version, target.id.digest
        known = self._checksums.get(digest)
        if known is not None and known != checksum:
            detail = f"the server's checksum is {checksum[:16]}, and was {known[:16]} for the same weights"
            raise EngineError(WEIGHTS_MISMATCH, f"version {version}: {detail}")
        twins = [other for other, its in self._checksums.items() if its == checksum]
        if known is not None or not twins:
            return
        detail = (
            f"version {version}: the server's checksum is {checksum[:16]} as with the weights of digest "
            f"{twins[0][:16]}, though these are of {digest[:16]}"
        )
        if self._folders.is_lossless(self.server_dtype, target.folder):
            raise EngineError(WEIGHTS_MISMATCH, f"{detail}: they were not loaded")
        logger.warning(
            "%s; it holds %s, which may round both to the same", detail, self.server_dtype or "another type"
        )

    async def _go_back(self, before: Held | None, cause: EngineError) -> None:
        """After a failed load: the server may hold anything, a mixture too."""
        self.held = None
        if before is None or self.lost is not None:
            return  # it serves nobody, and the next attempt loads all of it again
        logger.warning("%s: goes back to version %d, since: %s", self._client.url, before.id.version, cause)
        target = _Target(before.id, before.folder, {})
        try:
            await self._from_disk(target)
            again = await self._verify(target)
        except EngineError as error:
            detail = f"it could not go back to version {before.id.version} ({error}), after: {cause}"
            self.lost = Died(f"{self._client.url} holds unknown weights: {detail}")
            raise self.lost from error
        self.held = again

    async def _resume(self) -> None:
        if self._is_stuck:
            return
        try:
            await self._client.resume()
        except SGLangError as error:
            self.held = None
            self.lost = self.lost or Died(
                f"{self._client.url} was paused for an update and does not go on: {error}"
            )
            raise self.lost from error


def _forget_oldest(remembered: dict[Any, Any]) -> None:
    if len(remembered) > _REMEMBERED:
        del remembered[next(iter(remembered))]
