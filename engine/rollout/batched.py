"""Engine for small models: plain batches in this process, decoded on one thread, so that the event loop stays free.

    generate() ─► collected until the loop has run every callback that is due ─► inbox ─► thread
                                                                                   │ update, abort
                                                                                   ▼
    futures ◄── one callback a round ◄── start(new) + step(running) ◄── between rounds

All requests that are made in one turn of the event loop go into one forward: a wave of short turns costs one
hand-over to the thread and one back, not one each. New requests join those that are running at the next round.

States: no weights ─ update ─► serving(v) ─ update ─► serving(w) ─ close, or an error of the model ─► closed.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from engine.interfaces import Completion, EngineError, Sampling, WeightsId
from engine.rollout.loading import (
    ENGINE_CLOSED,
    ENGINE_DIED,
    NO_WEIGHTS,
    Loader,
    PauseMode,
    weights_id,
)
from engine.rollout.receiving import GroupReceiver, on_a_thread
from engine.rollout.torch_decoder import Decoder, Outcome, Request
from engine.rollout.torch_model import ServedModel
from engine.weights.lora import Base
from streams.events import TransferGroupFormed, WeightsPublished

logger = logging.getLogger(__name__)

_Command = Callable[[], None]


class BatchedEngine:
    """Serves the model of a local Hugging Face folder (config, weights, tokenizer).

    It takes versions from files and, as one rank of a transfer group, by broadcast: both into new memory, while it
    goes on generating with what it holds; only the exchange of the two holds it up.

    `pause_mode`: running requests at an update keep their tokens and have their cache recomputed ("retract"), keep
    both ("in_place"), or end as "aborted". `threads`: torch's intra-op threads (of the whole process).
    """

    n_ranks = 1

    def __init__(
        self,
        folder: Path,
        *,
        name: str = "batched-0",
        dtype: str = "float32",
        device: str = "cpu",
        attn_implementation: str = "sdpa",
        seed: int = 0,
        pause_mode: PauseMode = "retract",
        max_forward_tokens: int = 16_384,
        threads: int | None = None,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.name, self.seed = name, seed
        self.pause_mode: PauseMode = pause_mode
        self._model = ServedModel(folder, dtype=dtype, device=device, attn_implementation=attn_implementation)
        self._loader = Loader("torch", Base(folder))
        self.device = self._model.device.type
        self._receiver = GroupReceiver(str(self._model.device))
        self._decoder = Decoder(self._model, max_forward_tokens=max_forward_tokens)
        self._inbox: queue.SimpleQueue[list[Request] | _Command | None] = queue.SimpleQueue()
        self._fresh: list[Request] = []  # made in this turn of the event loop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: EngineError | None = None
        self._busy_s = self._stall_s = 0.0
        self._rounds = 0
        self._thread = threading.Thread(target=self._serve, name=f"{name} decoder", daemon=True)
        self._thread.start()

    # -- the interface, on the event loop
    @property
    def held(self) -> WeightsId | None:
        return self._decoder.held

    @property
    def tokenizer(self) -> Any:
        return self._model.tokenizer

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Completion:
        self._check_open()
        if self._decoder.held is None:
            raise EngineError(NO_WEIGHTS, f"{self.name} holds no weights yet")
        self._loop = loop = asyncio.get_running_loop()
        # a copy: the caller's list grows while this request may have to be recomputed
        request = Request(list(prompt_ids), sampling, request_id, self.seed)
        request.future = loop.create_future()
        if not self._fresh:
            loop.call_soon(self._hand_over)
        self._fresh.append(request)
        try:
            return await request.future
        except asyncio.CancelledError:
            request.is_cancelled = True
            raise

    def _hand_over(self) -> None:
        fresh, self._fresh = self._fresh, []
        self._inbox.put(fresh)

    async def update(self, published: WeightsPublished, path: Path) -> float:
        self._check_open()
        self._loop = loop = asyncio.get_running_loop()
        checked = await loop.run_in_executor(None, self._read, published, path)
        stall_s = await self._exchange(published, checked)
        self._receiver.in_service(from_disk=True)
        return stall_s

    async def _exchange(self, published: WeightsPublished, checked: dict[str, torch.Tensor]) -> float:
        done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._inbox.put(functools.partial(self._swap, checked, weights_id(published), done))
        return await done

    async def join_group(self, formed: TransferGroupFormed, first_rank: int) -> None:
        self._check_open()
        await on_a_thread(self._receiver.join, formed, first_rank, name=f"{self.name} joins")

    async def leave_group(self, group: str) -> None:
        self._receiver.leave(group)

    async def receive(self, published: WeightsPublished, group: str, bucket_bytes: int) -> float:
        self._check_open()
        self._loop = asyncio.get_running_loop()
        checked = await on_a_thread(
            self._received, published, group, bucket_bytes, name=f"{self.name} receives"
        )
        self._check_open()
        stall_s = await self._exchange(published, checked)
        self._receiver.in_service(from_disk=False)
        return stall_s

    def _received(
        self, published: WeightsPublished, group: str, bucket_bytes: int
    ) -> dict[str, torch.Tensor]:
        tensors = self._receiver.receive(published, group, bucket_bytes)
        checked = self._model.check(self._loader.whole(published, tensors))
        self._loader.took(published, tensors)
        return checked

    def checksum(self) -> str:
        return ""

    def _read(self, published: WeightsPublished, path: Path) -> dict[str, torch.Tensor]:
        return self._model.check(self._loader.load(published, path))

    async def abort(self, request_id: str) -> None:
        for request in self._fresh:
            if request.request_id == request_id:
                request.is_cancelled = True
        self._inbox.put(lambda: self._deliver(self._decoder.abort(request_id)))

    async def close(self) -> None:
        self._error = self._error or EngineError(ENGINE_CLOSED, f"{self.name} was closed")
        self._receiver.close()
        self._inbox.put(None)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join, 5.0)
        for request in self._fresh:
            self._settle(request.future, self._error)
        self._fresh = []

    def stats(self) -> dict[str, float]:
        return {
            "tokens": float(self._decoder.tokens),
            "requests": float(self._decoder.requests),
            "busy_s": self._busy_s,
            "stall_s": self._stall_s,
            "rounds": float(self._rounds),
            "running": float(self._decoder.n_running),
        }

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error

    # -- the thread
    def _serve(self) -> None:
        in_hand: list[Request] = []
        try:
            with torch.inference_mode():
                while self._round(in_hand):
                    pass
        except Exception as error:
            logger.exception("%s: decoding failed", self.name)
            self._error = EngineError(ENGINE_DIED, f"{type(error).__name__}: {error}")
        closed = self._error or EngineError(ENGINE_CLOSED, f"{self.name} was closed")
        self._deliver([(request, closed) for request in (*in_hand, *self._decoder.running())])
        while not self._inbox.empty():
            item = self._inbox.get_nowait()
            if isinstance(item, list):
                self._deliver([(request, closed) for request in item])

    def _round(self, in_hand: list[Request]) -> bool:
        """Commands, then first tokens of new requests, then one token of every running one. False: close."""
        waits = not self._decoder.n_running
        while waits or not self._inbox.empty():
            item = self._inbox.get()
            if item is None:
                return False
            if isinstance(item, list):
                in_hand += item
            else:
                item()
            waits = False
        if not in_hand and not self._decoder.n_running:
            return True
        began = time.monotonic()
        outcomes = self._decoder.start(in_hand)
        in_hand.clear()
        if self._decoder.n_running:
            outcomes += self._decoder.step()
        self._rounds += 1
        self._busy_s += time.monotonic() - began
        self._deliver(outcomes)
        return True

    def _swap(self, checked: dict[str, torch.Tensor], held: WeightsId, done: asyncio.Future[float]) -> None:
        began = time.monotonic()
        ended = self._decoder.swap(checked, held, self.pause_mode)
        stall_s = time.monotonic() - began
        self._stall_s += stall_s
        self._deliver(ended)
        self._call(self._settle, done, stall_s)

    def _deliver(self, outcomes: list[Outcome]) -> None:
        if outcomes:
            self._call(self._settle_all, outcomes)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            pass  # the loop has ended: nobody waits any more

    def _settle_all(self, outcomes: list[Outcome]) -> None:
        for request, outcome in outcomes:
            self._settle(request.future, outcome)

    @staticmethod
    def _settle(future: asyncio.Future[Any], outcome: Any) -> None:
        if future.done():
            return
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
