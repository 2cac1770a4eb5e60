"""New weights for one SGLang server: whole and verified, or the old ones again, or nobody is served.

    folder made and verified          nothing is touched before
      └► pause(mode) ─► load ─► label = ours? checksum as it must be? ─► held ─► continue
            │ failed       │ failed, or not as it must be
            │              └► load what was held before ─► checksum = its checksum ─► continue, and the error
            │                    │ failed
            └► continue          └► lost: what the server holds is not known, and it must serve nobody any more

`continue` is sent on every path. What is lost is marked so before that, so that no token made afterwards counts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from engine.interfaces import EngineError, WeightsId
from engine.rollout.loading import WEIGHTS_MISMATCH, PauseMode, weights_id
from engine.rollout.sglang.client import SGLangClient
from engine.rollout.sglang.errors import Died, SGLangError
from engine.rollout.sglang.folders import VersionFolders
from engine.rollout.sglang.spans import label
from streams.events import WeightsPublished

logger = logging.getLogger(__name__)

_REMEMBERED = 1000  # versions


class Held(NamedTuple):
    """What the server holds for certain."""

    id: WeightsId
    folder: Path  # it was loaded from there
    checksum: str  # the server's own


class Updates:
    """The weights of one server. One `take` at a time.

    `held` is what the server serves; None: it must serve nobody. Once `lost` is set that stays so.
    """

    def __init__(
        self, client: SGLangClient, folders: VersionFolders, *, mode: PauseMode, deadline: timedelta
    ) -> None:
        """`deadline`: for one load; every other call has the client's own."""
        self.held: Held | None = None
        self.lost: EngineError | None = None
        self.is_running = False  # the server may be paused
        self._verified: dict[tuple[int, int], None] = {}  # (epoch, version) of what it has held, oldest first
        self.server_dtype = ""  # as /server_info tells it
        self._client, self._folders, self._deadline = client, folders, deadline
        self._mode: PauseMode = mode
        self._checksums: dict[str, str] = {}  # digest → checksum, of all that were taken

    def has_held(self, epoch: int, version: int) -> bool:
        return (epoch, version) in self._verified

    async def take(self, published: WeightsPublished, path: Path) -> float:
        """Returns the seconds from pause to continue. Raises EngineError; a fatal one is in `lost` too."""
        loop = asyncio.get_running_loop()
        folder = await loop.run_in_executor(None, self._folders.make, published, path)
        self.is_running, began = True, time.monotonic()
        try:
            await self._swap(weights_id(published), folder)
        finally:
            try:
                await self._resume()
            finally:
                self.is_running = False
                self._folders.keep_only(self.held.folder if self.held is not None else None)
        return time.monotonic() - began

    async def _swap(self, target: WeightsId, folder: Path) -> None:
        await self._client.pause(self._mode)  # a failure has changed no weights
        before = self.held
        try:
            self.held = await self._load(target, folder)
        except EngineError as error:
            await self._go_back(before, error)
            raise
        except BaseException:  # the engine is being closed
            self.held = None
            raise
        self._verified[target.epoch, target.version] = None
        _forget_oldest(self._verified)

    async def _load(self, target: WeightsId, folder: Path) -> Held:
        """The guarantee that a version is served only if the server holds it, as far as a server can be asked."""
        client, name = self._client, label(target.epoch, target.version)
        flush = (
            self._mode != "in_place"
        )  # it would be refused, and with reason: running requests need the cache
        await client.update_from_disk(str(folder), name, flush=flush, deadline=self._deadline)
        checksum = await client.checksum(deadline=self._deadline)
        shown = await client.label()
        if shown != name:
            raise EngineError(WEIGHTS_MISMATCH, f"the server took {name}, but says that it holds {shown!r}")
        self._compare(target, checksum, folder)
        self._checksums[target.digest] = checksum
        _forget_oldest(self._checksums)
        return Held(target, folder, checksum)

    def _compare(self, target: WeightsId, checksum: str, folder: Path) -> None:
        """Equal digests must have equal checksums, and others must not, unless the server rounds them to the same."""
        known = self._checksums.get(target.digest)
        if known is not None and known != checksum:
            detail = f"the server's checksum is {checksum[:16]}, and was {known[:16]} for the same weights"
            raise EngineError(WEIGHTS_MISMATCH, f"version {target.version}: {detail}")
        twins = [digest for digest, other in self._checksums.items() if other == checksum]
        if known is not None or not twins:
            return
        detail = (
            f"version {target.version}: the server's checksum is {checksum[:16]} as with the weights of digest "
            f"{twins[0][:16]}, though these are of {target.digest[:16]}"
        )
        if self._folders.is_lossless(self.server_dtype, folder):
            raise EngineError(WEIGHTS_MISMATCH, f"{detail}: they were not loaded")
        logger.warning(
            "%s; it holds %s, which may round both to the same", detail, self.server_dtype or "another type"
        )

    async def _go_back(self, before: Held | None, cause: EngineError) -> None:
        """After a failed load: the server may hold anything, a mixture too."""
        self.held = None
        if before is None:
            return  # it serves nobody, and the next attempt loads all of it again
        logger.warning("%s: goes back to version %d, since: %s", self._client.url, before.id.version, cause)
        try:
            again = await self._load(before.id, before.folder)
        except EngineError as error:
            detail = f"it could not go back to version {before.id.version} ({error}), after: {cause}"
            self.lost = Died(f"{self._client.url} holds unknown weights: {detail}")
            raise self.lost from error
        self.held = again

    async def _resume(self) -> None:
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
