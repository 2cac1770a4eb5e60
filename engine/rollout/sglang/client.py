"""One SGLang server over HTTP: generation that runs once, and the control calls of a weight update.

    generate(rid) ─► checked here ─► open? ─► POST /generate ──────────────────────► checked answer
                          │            │ paused: waits here        │ connection broke: abort, and only if that was
                          │            │ (nothing is sent)         │ heard, once more under a new rid
                          ▼            ▼                           ▼ deadline, or the caller was cancelled:
                      BadRequest    TimedOut                         abort, until the server has answered the call

SGLang holds a request that arrives during a pause, and forgets an abort of one that it holds; so `pause` closes a
gate here before it pauses the server, and `resume` opens it after the server goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Coroutine, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np

from engine.interfaces import Sampling
from engine.rollout.loading import ENGINE_CLOSED, PauseMode
from engine.rollout.sglang.api import (
    Answer,
    Generated,
    GenerateRequest,
    decode_answer,
    generate_request,
    read_generated,
)
from engine.rollout.sglang.control import Control
from engine.rollout.sglang.errors import (
    BadAnswer,
    BadRequest,
    SGLangError,
    TimedOut,
    Unreachable,
    Unsupported,
)
from engine.rollout.sglang.streaming import Accumulator, Events
from engine.rollout.sglang.wire import Wire

_GRACE_S = 5.0  # after a deadline: for the answer of the request that was aborted
_AGAIN_S = 0.5  # between two aborts: one that comes before its request has no effect
_NOTHING = Generated(np.empty(0, np.int32), np.empty(0, np.float32), [], "aborted", 0, True)
_RETRIES = 1  # after a broken connection
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0  # between attempts to connect; doubles


def new_rid() -> str:
    """A request id. All are of one length, since an abort ends every request whose id begins with the one given."""
    return uuid.uuid4().hex


class _Call:
    """One generate() that has not returned."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.waiting: asyncio.Future[Any] | None = None  # for the end of a pause
        self.task: asyncio.Task[Answer] | None = None


class SGLangClient(Control):
    """Made anywhere, then used on one event loop until `close()`.

        client = SGLangClient("http://127.0.0.1:30000")
        info = await client.server_info()           # refuses releases that are too old
        done = await client.generate(new_rid(), [1, 2, 3], Sampling(16), deadline=timedelta(seconds=60))

    `vocab_size`: of the model, where its folder cannot be read from here. `connect_timeout`: how long a server that
    is not there is tried; `control_timeout`: for a control call that has no deadline of its own. Every method raises
    the errors of engine/rollout/sglang/errors.py.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        admin_key: str | None = None,
        vocab_size: int | None = None,
        connect_timeout: timedelta = timedelta(seconds=10),
        control_timeout: timedelta = timedelta(seconds=60),
    ) -> None:
        self._connect_s = connect_timeout.total_seconds()
        wire = Wire(url, key=api_key, admin_key=admin_key, connect_s=self._connect_s)
        super().__init__(wire, vocab_size=vocab_size, control_timeout=control_timeout)
        self._gate = asyncio.Event()
        self._gate.set()
        self._live: dict[str, _Call] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    # -- generation
    async def generate(
        self,
        rid: str,
        input_ids: Sequence[int],
        sampling: Sampling,
        *,
        deadline: timedelta,
        stream: bool = False,
    ) -> Generated:
        """Sample after `input_ids`; one response, whose every token carries its log-prob and its weights.

        After the deadline the request is aborted; that may take 5 s more, and TimedOut carries what it had. One that
        is aborted while an update has retracted it tells all of its tokens only with `stream` (else full fifties);
        but every part of a stream tells all tokens again, unless the server has --incremental-streaming-output.
        """
        end = time.monotonic() + deadline.total_seconds()
        self._check_open()
        if rid in self._live:
            raise BadRequest("bad_request", f"request id {rid} is in use")
        vocab_size, max_length = await self._sizes()
        request = generate_request(
            rid, input_ids, sampling, vocab_size=vocab_size, max_length=max_length, stream=stream
        )
        call = self._live[rid] = _Call(request)
        try:
            for attempt in range(_RETRIES + 1):
                try:
                    if not await self._until_open(call, end):
                        return _NOTHING
                    answer = await self._attempt(call, end)
                    self._check_open()  # closing may have aborted it
                    return read_generated(answer, call.request, vocab_size)
                except Unreachable as error:
                    # what was sent may run on: its end must be certain before there is a second one
                    again = error.was_sent and attempt < _RETRIES and time.monotonic() < end
                    if not again or not await self._abort_quietly(call.request.rid):
                        raise
                    call.request = msgspec.structs.replace(call.request, rid=new_rid())
            raise AssertionError("the last attempt returns or raises")
        finally:
            del self._live[rid]

    async def _attempt(self, call: _Call, end: float) -> Answer:
        call.task = task = asyncio.ensure_future(self._post(call, end))
        try:
            await asyncio.wait({task}, timeout=max(0.0, end - time.monotonic()))
        except asyncio.CancelledError:
            self._in_background(self._finish(call, task))
            raise
        if not task.done():
            # in the background too: whoever cancels us now must not stop the abort
            await asyncio.shield(self._in_background(self._finish(call, task)))
            if not _is_whole(task):
                detail = f"request {call.request.rid} was aborted at its deadline"
                raise TimedOut(detail, self._partial(call, task))
        if task.cancelled():
            raise SGLangError(ENGINE_CLOSED, f"the client of {self.url} was closed")
        return task.result()

    async def _post(self, call: _Call, end: float) -> Answer:
        """One POST, tried until something listens there or `connect_timeout` has passed."""
        body = msgspec.json.encode(call.request)
        give_up, pause = min(end, time.monotonic() + self._connect_s), _FIRST_PAUSE_S
        while True:
            try:
                if call.request.stream:
                    return await self._post_stream(body)
                return decode_answer(await self._wire.ask("POST", "/generate", body, seconds=None))
            except Unreachable as error:
                if error.was_sent or time.monotonic() + pause > give_up:
                    raise
            await asyncio.sleep(pause)
            pause = min(_LONGEST_PAUSE_S, 2 * pause)

    async def _post_stream(self, body: bytes) -> Answer:
        events, accumulator = Events(), Accumulator()
        async with contextlib.aclosing(self._wire.stream("POST", "/generate", body, seconds=None)) as pieces:
            async for piece in pieces:
                for data in events.add(piece):
                    accumulator.add(data)
        if not accumulator.is_whole:
            raise Unreachable(f"{self.url}: the stream ended before its request did", was_sent=True)
        return accumulator.answer()

    async def _finish(self, call: _Call, task: asyncio.Task[Answer]) -> None:
        """Abort a request until its call is answered, for a few seconds at most."""
        rid, end = call.request.rid, time.monotonic() + _GRACE_S
        while not task.done() and time.monotonic() < end:
            if not await self._abort_quietly(rid):
                break
            await asyncio.wait({task}, timeout=_AGAIN_S)
        task.cancel()  # without effect on one that is done
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # nobody else may ask for it

    def _partial(self, call: _Call, task: asyncio.Task[Answer]) -> Generated | None:
        """What a request had when it was aborted; None when the server did not tell, or told what cannot be used."""
        if task.cancelled() or task.exception() is not None:
            return None
        try:
            return read_generated(task.result(), call.request, self._vocab_size or 0)
        except BadAnswer:
            return None

    async def _until_open(self, call: _Call, end: float) -> bool:
        """Wait for the end of a pause; False when the call was aborted meanwhile. Raises TimedOut."""
        if not self._gate.is_set():
            call.waiting = waiting = asyncio.ensure_future(self._gate.wait())
            try:
                await asyncio.wait({waiting}, timeout=max(0.0, end - time.monotonic()))
                if waiting.cancelled():
                    return False
                if not waiting.done():
                    detail = f"{self.url} was paused until the deadline of request {call.request.rid}; it was not sent"
                    raise TimedOut(detail)
            finally:
                waiting.cancel()
        self._check_open()
        return True

    async def _sizes(self) -> tuple[int, int | None]:
        info = self._info or await self.server_info()
        if info.vocab_size is None:
            raise Unsupported(
                f"the vocabulary of {info.model_path!r} is not known, and an id beyond it would end the server: needed "
                f"a model folder that can be read here too, or the size"
            )
        return info.vocab_size, info.context_length

    async def abort(self, rid: str) -> None:
        """End one request soon: its generate() returns what it has, as "aborted". Of an unknown one, nothing."""
        call = self._live.get(rid)
        if call is not None and call.waiting is not None and call.waiting.cancel():
            return  # nothing was sent
        await super().abort(call.request.rid if call is not None else rid)

    async def _abort_quietly(self, rid: str) -> bool:
        """Whether the server has heard it."""
        try:
            await super().abort(rid)
        except SGLangError:
            return False
        return True

    # -- pausing
    async def pause(self, mode: PauseMode) -> None:
        """As Control.pause; from here on generate() sends nothing. `resume` must follow, also after a failure."""
        await self._require_worker()
        self._gate.clear()
        await super().pause(mode)

    async def resume(self) -> None:
        await super().resume()
        self._gate.set()

    # -- ends
    async def close(self) -> None:
        """Abort what runs; every generate() raises SGLangError("engine_closed"). Takes a few seconds at most."""
        self._is_closed = True
        self._gate.set()
        calls = [call for call in self._live.values() if call.task is not None]
        if calls:
            ending = [asyncio.ensure_future(self._abort_quietly(call.request.rid)) for call in calls]
            await asyncio.wait(ending)
        for call in calls:
            if call.task is not None:
                call.task.cancel()
        if self._background:
            await asyncio.wait(set(self._background), timeout=_GRACE_S)
        await self._close_wires()

    def _check_open(self) -> None:
        if self._is_closed:
            raise SGLangError(ENGINE_CLOSED, f"the client of {self.url} was closed")

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


def _is_whole(task: asyncio.Task[Answer]) -> bool:
    """Whether the request came to its own end, before an abort reached it."""
    if task.cancelled() or task.exception() is not None:
        return False
    reason = task.result().meta_info.finish_reason
    return reason is not None and reason.type != "abort"
