"""The engine of a rollout daemon whose model runs in an SGLang server: one that it starts, or one that runs already.

    construct ─► server starts ─┐
                                └► first update: ready? right kind? ─► verified ─► serving(v) ─ update ──► serving(w)
    transfer group ─ join ─► member ─────────────────────────────────────────────┘  ─ receive ─► serving(w)
    any ─► dead: its process ended, it answers no more, it holds other weights than it was given, or unknown ones

A server serves nobody before it was given a published version: what it was started with may be anything. Once dead,
every call raises a fatal EngineError, so that the daemon ends and its supervisor starts both anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Sequence
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

from engine.interfaces import Completion, EngineError, Sampling, WeightsId
from engine.rollout.loading import (
    ENGINE_CLOSED,
    FATAL,
    NO_WEIGHTS,
    TRANSFER_FAILED,
    Locate,
    PauseMode,
    weights_id,
)
from engine.rollout.sglang import guard
from engine.rollout.sglang.api import Generated
from engine.rollout.sglang.client import SGLangClient, new_rid
from engine.rollout.sglang.errors import (
    BadAnswer,
    BadRequest,
    Died,
    Refused,
    SGLangError,
    TimedOut,
    Unreachable,
)
from engine.rollout.sglang.folders import VersionFolders, vocab_size
from engine.rollout.sglang.fused import Proof
from engine.rollout.sglang.groups import SPARE_S, Groups
from engine.rollout.sglang.server import Server
from engine.rollout.sglang.spans import label
from engine.rollout.sglang.updates import Held, Updates
from engine.weights import bucketing
from engine.weights.tensors import WeightsError
from streams.errors import ConfigError
from streams.events import TransferGroupFormed, WeightsPublished

logger = logging.getLogger(__name__)

_LOOK_S = 2.0  # between two looks at the server
_SILENCE_S = 60.0  # without an answer it is dead
_GONE_S = 5.0  # after a broken connection: for the process to end, or the server to answer again
_ABORT_AGAIN_S, _ABORT_S = 0.2, 5.0  # an abort that comes before its request has no effect
_CLOSE_S = 3.0
_LEFT_S = 4.0  # after a group was left in the middle of a broadcast: for the server to notice, and to go back
_ENDED = "the server's process has ended"


class SGLangEngine:
    """Serves the model of a local Hugging Face folder by one server.

        engine = SGLangEngine(
            model, server=Server(model, …), folder=run_dir / "weights/served/rollout-0", locate=on_disk(run_dir)
        )
        await engine.update(published, path)        # waits until the server is ready
        done = await engine.generate(ids, sampling, request_id="0-7/3/0")

    `server`: this engine's own, ended with it; None: that of `url`, which must see `folder` by the same path, hold the
    same model, and take weights from nobody else. `locate`: finds the files of versions that come by broadcast.
    `n_ranks`: of the server, as far as it is known before it is ready. `start_timeout`: for the server to be ready;
    `request_timeout`: for a control call, a load of weights included; `generate_timeout`: a bound on one request, for
    a caller that has none.
    """

    def __init__(
        self,
        model: Path,
        *,
        server: Server | None = None,
        url: str = "",
        folder: Path,
        name: str = "sglang-0",
        device: str = "cpu",
        n_ranks: int = 1,
        locate: Locate,
        pause_mode: PauseMode = "retract",
        api_key: str | None = None,
        admin_key: str | None = None,
        start_timeout: timedelta = timedelta(seconds=600),
        request_timeout: timedelta = timedelta(seconds=120),
        generate_timeout: timedelta = timedelta(seconds=1200),
    ) -> None:
        self.name, self.model, self.device = name, model, device.partition(":")[0]
        self.n_ranks = n_ranks  # what the server says, once it is ready
        self.pause_mode: PauseMode = pause_mode
        self._server = server
        self._client = SGLangClient(
            server.url if server is not None else url,
            api_key=api_key,
            admin_key=admin_key,
            vocab_size=vocab_size(model),
            control_timeout=request_timeout,
        )
        self._folders = VersionFolders(model, folder)
        self._locate = locate
        self._updates = Updates(self._client, self._folders, mode=pause_mode, deadline=request_timeout)
        self._groups = Groups(self._client, self._updates.lock, self._die)
        self._ready_by = time.monotonic() + start_timeout.total_seconds()
        self._generate_timeout = generate_timeout
        self._max_length: int | None = None
        self._is_ready = False
        self._error: EngineError | None = None
        self._live: dict[str, tuple[str, asyncio.Task[Generated]]] = {}  # request id → (rid, its call)
        self._update: asyncio.Task[float] | None = None
        self._told: WeightsId | None = None  # of which its caller knows that it is held
        self._is_given_up = False  # who asked for that update gave up waiting, and has not asked again
        self._watch: asyncio.Task[None] | None = None
        self._tokens = self._requests = self._cached_tokens = 0
        self._stall_s = self._last_stall_s = self._busy_s = self._busy_since = 0.0

    # -- the interface, on the event loop
    @property
    def held(self) -> WeightsId | None:
        held = self._served
        return held.id if held is not None else None

    @cached_property
    def tokenizer(self) -> Any:
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise ConfigError(
                "rollout.backend = 'sglang' needs transformers for the tokenizer, which is not installed: "
                "pip install 'millstream[train]'"
            ) from None
        return AutoTokenizer.from_pretrained(self.model, local_files_only=True)

    def checksum(self) -> str:
        """The server's own, of the weights that it serves: equal on all servers of one kind that hold them; "" if
        none."""
        held = self._served
        return held.checksum if held is not None else ""

    @property
    def _served(self) -> Held | None:
        is_open = self._is_given_up and self._update is not None and not self._update.done()
        return None if self._fatal is not None or is_open or self._untold is not None else self._updates.held

    @property
    def _untold(self) -> WeightsId | None:
        """Brought by an update that was given up: its caller may never ask for it, and so never tell of it."""
        held = self._updates.held
        return held.id if self._is_given_up and held is not None and held.id != self._told else None

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Completion:
        self._check_alive()
        if self._served is None:
            raise EngineError(NO_WEIGHTS, f"{self.name} holds no weights yet")
        if request_id in self._live:
            raise BadRequest("bad_request", f"request id {request_id} is in use")
        rid, sampling = new_rid(), self._fitted(prompt_ids, sampling)
        call = self._client.generate(rid, prompt_ids, sampling, deadline=self._generate_timeout)
        task = asyncio.ensure_future(call)
        self._began(request_id, rid, task)
        try:
            done = await task
        except asyncio.CancelledError:
            self._check_alive()  # it was us who ended it
            raise
        except SGLangError as error:
            raise await self._explained(error) from error
        finally:
            self._ended(request_id)
        self._check_alive()  # the server may hold unknown weights since
        self._check_versions(done)
        self._requests += 1
        self._tokens += len(done.ids)
        self._cached_tokens += done.cached_tokens
        return Completion(done.ids, done.logprobs, done.versions, done.finish_reason)

    async def update(self, published: WeightsPublished, path: Path) -> float:
        """As RolloutEngine.update; the first one waits until the server is ready.

        One that its caller gives up goes on to its end, which has deadlines of its own: a server is never left paused.
        Nobody is served then until it has failed, or the caller has asked again and so knows what is held.
        """
        if await self._has_taken(published):
            self._is_given_up, self._told = False, weights_id(published)
            return self._last_stall_s
        if not self._is_ready:
            await self._become_ready()
        task = self._begin_update(self._updates.take(published, path))
        try:
            stall_s = await asyncio.shield(task)
        except asyncio.CancelledError:
            self._is_given_up = True
            self._check_alive()
            raise
        self._told = weights_id(published)
        return stall_s

    async def join_group(self, formed: TransferGroupFormed, first_rank: int) -> None:
        self._check_alive()
        await self._groups.join(formed, first_rank)

    async def leave_group(self, group: str) -> None:
        await self._groups.leave(group)

    async def receive(self, published: WeightsPublished, group: str, bucket_bytes: int) -> float:
        """As RolloutEngine.receive. One whose group is left goes on to its end, as an update that is given up: the
        server waits in the broadcast until the trainer has closed it."""
        if await self._has_taken(published):
            raise EngineError(TRANSFER_FAILED, f"version {published.version} came before, and not by {group}")
        formed, left = self._groups.joined(group)
        try:
            bucketing.check_layout(published.tensors)
        except WeightsError as error:
            raise EngineError(TRANSFER_FAILED, str(error)) from error
        buckets = [
            each for each in bucketing.plan(published.tensors, bucket_bytes) if bucketing.size_of(each)
        ]
        end = time.monotonic() + formed.deadline_s + SPARE_S
        task = self._begin_update(
            self._updates.receive(published, self._locate(published), buckets, group, end)
        )
        leaving = asyncio.ensure_future(left.wait())
        try:
            await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({task}, timeout=_LEFT_S)
            if task.done():
                stall_s = task.result()
                self._told = weights_id(published)
                return stall_s
            self._is_given_up = True
            detail = f"version {published.version}: group {group} was left, and the server still waits for the trainer"
            raise EngineError(TRANSFER_FAILED, detail)
        except asyncio.CancelledError:
            self._is_given_up = True
            self._check_alive()
            raise
        finally:
            leaving.cancel()

    async def abort(self, request_id: str) -> None:
        end = time.monotonic() + _ABORT_S
        while time.monotonic() < end or self._updates.is_running:
            entry = self._live.get(request_id)
            if entry is None or entry[1].done():
                return
            if (
                not self._updates.is_running
            ):  # a paused server forgets an abort, and every later one of the request
                await self._client.abort(entry[0])
            await asyncio.wait({entry[1]}, timeout=_ABORT_AGAIN_S)

    async def close(self) -> None:
        self._error = self._error or EngineError(ENGINE_CLOSED, f"{self.name} was closed")
        own = {task for task in (self._watch, self._update) if task is not None}
        if self._server is not None:
            self._server.kill()
        tasks = own | self._end_live()
        for task in own:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_S)
        await self._groups.close()
        await self._client.close()
        self._folders.keep_only(None)

    def stats(self) -> dict[str, float]:
        busy_s = self._busy_s + (time.monotonic() - self._busy_since if self._live else 0.0)
        return {
            "tokens": float(self._tokens),
            "requests": float(self._requests),
            "cached_tokens": float(self._cached_tokens),
            "busy_s": busy_s,
            "stall_s": self._stall_s,
            "running": float(len(self._live)),
        }

    # -- requests
    def _fitted(self, prompt_ids: Sequence[int], sampling: Sampling) -> Sampling:
        """As many tokens as there is room for after this prompt."""
        if self._max_length is None:
            return sampling
        room = self._max_length - len(prompt_ids)
        if room < 1:
            detail = f"{len(prompt_ids)} prompt tokens, the server takes {self._max_length}"
            raise BadRequest("prompt_too_long", detail)
        return sampling._replace(max_tokens=min(sampling.max_tokens, room))

    def _check_versions(self, done: Generated) -> None:
        """The guarantee that no token counts whose weights were not verified on this server, and told of."""
        untold = self._untold
        for epoch, version, _ in done.versions:
            if untold is not None and (epoch, version) == untold[:2]:
                detail = f"version {version} was taken by an update that was given up, and may be of no use"
                raise EngineError(NO_WEIGHTS, detail)
            if not self._updates.has_held(epoch, version):
                raise BadAnswer(
                    "unknown_version",
                    "meta_info.weight_versions",
                    f"{label(epoch, version)!r} was never given to this server by this daemon, or in an update "
                    f"that was given up; else someone else updates it",
                )

    def _began(self, request_id: str, rid: str, task: asyncio.Task[Generated]) -> None:
        if not self._live:
            self._busy_since = time.monotonic()
        self._live[request_id] = (rid, task)

    def _ended(self, request_id: str) -> None:
        del self._live[request_id]
        if not self._live:
            self._busy_s += time.monotonic() - self._busy_since

    def _end_live(self) -> set[asyncio.Task[Any]]:
        tasks: set[asyncio.Task[Any]] = {task for _, task in self._live.values()}
        for task in tasks:
            task.cancel()
        return tasks

    # -- weights
    async def _has_taken(self, published: WeightsPublished) -> bool:
        """Whether an update that its caller gave up has brought this version; waits for one that is under way.

        What such an update brought instead of it is held no longer: nobody told of it, and nobody will.
        """
        self._check_alive()
        if self._update is not None and not self._update.done():
            await asyncio.wait({self._update})
            self._check_alive()
        untold = self._untold
        if untold is not None and untold == weights_id(published):
            return True
        if untold is not None:
            self._updates.disown()
        self._is_given_up = False
        return False

    def _begin_update(self, work: Coroutine[Any, Any, float]) -> asyncio.Task[float]:
        self._update = task = asyncio.ensure_future(self._take(work))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # its caller may be gone
        return task

    async def _take(self, work: Coroutine[Any, Any, float]) -> float:
        try:
            stall_s = await work
        except SGLangError as error:
            raise await self._explained(error) from error
        self._last_stall_s = stall_s
        self._stall_s += stall_s
        return stall_s

    async def _become_ready(self) -> None:
        """Wait for the server, and refuse one that cannot be driven. Raises a fatal error."""
        left_s = max(0.0, self._ready_by - time.monotonic())
        try:
            if self._server is not None:
                await self._server.ready(timedelta(seconds=left_s))
            else:
                await self._join(left_s)
            info = await self._client.server_info()
            guard.check_server(info, self.pause_mode)
        except SGLangError as error:
            raise self._die(error if error.reason in FATAL else Died(str(error))) from error
        dtype = info.raw.get("dtype")
        self._updates.server_dtype = dtype if isinstance(dtype, str) else ""
        self._updates.proof = Proof(info)
        self.n_ranks = guard.group_ranks(info)
        self._max_length = info.context_length
        self._folders.keep_only(None)  # of a daemon that was killed
        self._is_ready = True
        self._watch = asyncio.ensure_future(self._look_after())
        logger.info(
            "%s: %s is ready: SGLang %s", self.name, self._client.url, ".".join(map(str, info.version))
        )

    async def _join(self, seconds: float) -> None:
        """Wait for a server that somebody else runs. A daemon that was killed may have left it paused."""
        end = time.monotonic() + seconds
        while True:
            with contextlib.suppress(Unreachable, TimedOut, Refused):  # Unsupported is not worth waiting for
                await self._client.resume()
                if await self._client.is_ready():
                    return
            if time.monotonic() + 1.0 > end:
                raise TimedOut(f"{self._client.url} was not ready within {seconds:g} s")
            await asyncio.sleep(1.0)

    # -- is it alive?
    async def _look_after(self) -> None:
        """Ends the engine when its server has ended, answers no more, or holds other weights than it was given."""
        heard = time.monotonic()
        while self._fatal is None:
            await asyncio.sleep(_LOOK_S)
            if self._server is not None and self._server.exited is not None:
                self._die(Died(_ENDED))
                return
            held = self._updates.held
            try:
                shown = await self._client.label()
            except SGLangError as error:
                if time.monotonic() - heard > _SILENCE_S:
                    self._die(Died(f"no answer for {_SILENCE_S:g} s: {error}"))
                continue
            heard = time.monotonic()
            is_same = held is not None and held is self._updates.held and not self._updates.is_running
            if is_same and held is not None and shown != (given := label(held.id.epoch, held.id.version)):
                detail = f"holds {shown!r}, and was given {given!r}: it was started anew, or someone else updates it"
                self._die(Died(f"{self._client.url} {detail}"))

    async def _explained(self, error: SGLangError) -> EngineError:
        """The error to raise: the end of the server, if that is behind it."""
        if error.reason in FATAL:
            return self._die(error)
        if not isinstance(error, Unreachable):
            return self._fatal or error
        end = time.monotonic() + _GONE_S
        while self._fatal is None and time.monotonic() < end:
            if self._server is not None and self._server.exited is not None:
                return self._die(Died(_ENDED))
            with contextlib.suppress(SGLangError):
                await self._client.label()
                return error
            await asyncio.sleep(0.2)
        return self._die(Died(str(error)))

    @property
    def _fatal(self) -> EngineError | None:
        return self._error or self._updates.lost

    def _check_alive(self) -> None:
        if self._fatal is not None:
            raise self._fatal

    def _die(self, error: EngineError) -> EngineError:
        """Serve nobody from here on. Returns the first error of this kind."""
        if self._error is None:
            server = self._server
            if server is not None and server.exited is not None:
                cause = server.cause()
                error = error if cause in error.detail else Died(f"{error.detail}; {cause}")
            logger.error("%s: %s", self.name, error)
            self._error = error
            if server is not None:
                server.kill()
            self._end_live()
        return self._error
