"""Engine for models of any size: transformers' continuous batching, in this process.

    generate() ─► manager.add_request ─► its thread: paged cache, prefill and decode mixed ─► one callback at the end
    update()   ─► manager.pause(): the thread stands between two steps
                    retract    running requests are taken out with their tokens and put back behind them as prompts,
                               so that their cache is computed anew under the new weights (the default)
                    in_place   they go on with the cache that they have
                    abort      they end as "aborted"
                  weights swapped ─► the thread goes on

Each token carries the weights that it was sampled with: the number of tokens of every running request is read while
the thread stands still, and everything that it had delivered before is taken in first. Prefix sharing is off, since
blocks of an older version would be reused under a newer one, and so is double buffering, since a token would be in
the making while the weights change.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from engine import devices
from engine.interfaces import Completion, EngineError, Sampling, WeightsId
from engine.rollout.loading import (
    ENGINE_CLOSED,
    ENGINE_DIED,
    NO_WEIGHTS,
    DiskOnly,
    Loader,
    PauseMode,
    weights_id,
)
from engine.rollout.torch_model import ServedModel
from engine.weights.lora import Base
from streams.columns import VersionRun
from streams.errors import ConfigError
from streams.events import WeightsPublished

_CLOSE_S = 5.0
_CPU_PAGE, _CPU_BATCH_TOKENS = 32, 2048
_CPU_CACHED_TOKENS = 65_536  # where the manager cannot measure how much memory there is


class _Live:
    """One call of generate(). With every retraction it becomes another request of the manager."""

    __slots__ = (
        "future",
        "ids",
        "logprobs",
        "max_tokens",
        "n_in_runs",
        "prompt_ids",
        "runs",
        "sampling",
        "sub_id",
    )

    def __init__(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        max_tokens: int,
        future: asyncio.Future[Completion],
    ) -> None:
        self.prompt_ids, self.sampling, self.max_tokens, self.future = (
            list(prompt_ids),
            sampling,
            max_tokens,
            future,
        )
        self.ids: list[int] = []  # of earlier requests of the manager
        self.logprobs: list[float] = []
        self.runs: list[VersionRun] = []
        self.n_in_runs = 0
        self.sub_id = ""

    def close_run(self, held: WeightsId, n_tokens: int) -> None:
        if n_tokens > self.n_in_runs:
            self.runs.append((held.epoch, held.version, n_tokens - self.n_in_runs))
            self.n_in_runs = n_tokens

    def settle(self, outcome: Completion | EngineError) -> None:
        if self.future.done():
            return
        if isinstance(outcome, EngineError):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


class ContinuousEngine(DiskOnly):
    """Serves the model of a local Hugging Face folder. All its requests have one `temperature`.

    `max_cached_tokens`: size of the key-value cache; None: what the device has room for (on a CPU 65,536).
    """

    device = "cpu"

    def __init__(
        self,
        folder: Path,
        *,
        name: str = "continuous-0",
        dtype: str = "float32",
        device: str = "cpu",
        attn_implementation: str = "sdpa",
        temperature: float = 1.0,
        seed: int = 0,
        pause_mode: PauseMode = "retract",
        max_concurrency: int = 256,
        max_cached_tokens: int | None = None,
        threads: int | None = None,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.name, self.pause_mode, self._temperature = name, pause_mode, temperature
        self._model = ServedModel(folder, dtype=dtype, device=device, attn_implementation=attn_implementation)
        self._loader = Loader("torch", Base(folder))
        self._manager = _manager(self._model, temperature, seed, max_concurrency, max_cached_tokens)
        self._held: WeightsId | None = None
        self._closed = False
        self._live: dict[str, _Live] = {}
        self._numbers = itertools.count()
        self._stats = {"tokens": 0.0, "requests": 0.0, "busy_s": 0.0, "stall_s": 0.0}
        self._busy_since: float | None = None

    # -- the interface
    @property
    def held(self) -> WeightsId | None:
        return self._held

    @property
    def tokenizer(self) -> Any:
        return self._model.tokenizer

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Completion:
        self._check_open()
        if self._held is None:
            raise EngineError(NO_WEIGHTS, f"{self.name} holds no weights yet")
        if sampling.temperature != self._temperature:
            raise EngineError(
                "bad_request",
                f"temperature {sampling.temperature}, this engine samples at {self._temperature}",
            )
        most = self._model.most_tokens(prompt_ids, sampling.max_tokens)
        live = _Live(prompt_ids, sampling, most, asyncio.get_running_loop().create_future())
        if not self._live:
            self._busy_since = time.monotonic()
        self._live[request_id] = live
        try:
            self._submit(live)
            completion = await live.future
        except asyncio.CancelledError:
            self._manager.cancel_request(live.sub_id)
            raise
        finally:
            del self._live[request_id]
            self._forget(live.sub_id)
            if not self._live and self._busy_since is not None:
                self._stats["busy_s"] += time.monotonic() - self._busy_since
        self._stats["tokens"] += len(completion.ids)
        self._stats["requests"] += 1
        return completion

    async def update(self, published: WeightsPublished, path: Path) -> float:
        self._check_open()
        loop = asyncio.get_running_loop()
        checked = await loop.run_in_executor(None, self._read, published, path)
        began = time.monotonic()
        if self._held is None:
            self._model.swap(checked)
            self._held = weights_id(published)
            self._manager.start()
        else:
            exchange = functools.partial(self._exchange, checked, weights_id(published))
            await loop.run_in_executor(None, self._while_paused, exchange, loop)
        stall_s = time.monotonic() - began
        self._stats["stall_s"] += stall_s
        return stall_s

    def _read(self, published: WeightsPublished, path: Path) -> dict[str, torch.Tensor]:
        return self._model.check(self._loader.load(published, path))

    async def abort(self, request_id: str) -> None:
        if request_id in self._live and self._held is not None:
            loop = asyncio.get_running_loop()
            take_out = functools.partial(self._take_out, self._live[request_id], "aborted")
            await loop.run_in_executor(None, self._while_paused, take_out, loop)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await asyncio.get_running_loop().run_in_executor(None, self._stop)
        for live in self._live.values():
            live.settle(EngineError(ENGINE_CLOSED, f"{self.name} was closed"))

    def _stop(self) -> None:
        if self._manager.is_running():
            self._manager.stop(block=True, timeout=_CLOSE_S, hard_stop=True)
        self._manager.destroy()

    def stats(self) -> dict[str, float]:
        busy = time.monotonic() - self._busy_since if self._live and self._busy_since is not None else 0.0
        return {**self._stats, "busy_s": self._stats["busy_s"] + busy, "running": float(len(self._live))}

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError(ENGINE_CLOSED, f"{self.name} was closed")
        fatal = self._manager.background_thread_status.fatal_error
        if fatal is not None:
            raise EngineError(ENGINE_DIED, f"{type(fatal).__name__}: {fatal}")

    # -- requests of the manager
    def _submit(self, live: _Live) -> None:
        live.sub_id = f"m{next(self._numbers)}"
        self._manager.register_result_handler(live.sub_id, functools.partial(self._ended, live, live.sub_id))
        added = self._manager.add_request(
            [*live.prompt_ids, *live.ids],
            request_id=live.sub_id,
            max_new_tokens=live.max_tokens - len(live.ids),
            eos_token_id=list(live.sampling.stop_ids) or -1,
        )
        if added is None:
            self._check_open()
            raise EngineError(ENGINE_DIED, "the generation loop takes no requests")

    def _ended(self, live: _Live, sub_id: str, output: Any) -> None:
        """Callback of the manager, on the event loop. A request that was taken out meanwhile is passed over."""
        if sub_id != live.sub_id:
            return
        if output.error is not None:
            reason = ENGINE_CLOSED if self._closed else ENGINE_DIED
            live.settle(EngineError(reason, str(output.error)))
            return
        self._complete(live, output, "")

    def _complete(self, live: _Live, output: Any, finish_reason: str) -> None:
        assert self._held is not None
        if output is not None:
            live.ids += output.generated_tokens
            live.logprobs += output.logprobs
        live.close_run(self._held, len(live.ids))
        reason = finish_reason or ("stop" if live.ids[-1] in live.sampling.stop_ids else "length")
        ids, logprobs = np.array(live.ids, np.int32), np.array(live.logprobs, np.float32)
        live.settle(Completion(ids, logprobs, live.runs, reason))

    def _forget(self, sub_id: str) -> None:
        """The manager forgets a handler only when its request ends by itself."""
        router = self._manager.output_router
        with router._lock:
            router.result_handlers.pop(sub_id, None)

    # -- while the manager's thread stands still
    def _while_paused(self, change: Any, loop: asyncio.AbstractEventLoop) -> None:
        """Run `change` on the event loop between two steps of the manager.

        What the manager delivered before it paused lies in the loop's queue before `change`, so it is taken in first
        and stamped with the weights that made it.
        """

        async def on_loop() -> None:
            change()

        try:
            with self._manager.pause():
                asyncio.run_coroutine_threadsafe(on_loop(), loop).result(60)
        except RuntimeError as error:
            raise EngineError(ENGINE_CLOSED if self._closed else ENGINE_DIED, str(error)) from error

    def _exchange(self, checked: dict[str, torch.Tensor], held: WeightsId) -> None:
        assert self._held is not None
        again: list[_Live] = []
        for live in self._live.values():
            if live.future.done():
                continue
            if self.pause_mode == "abort":
                self._take_out(live, "aborted")
            elif self.pause_mode == "retract":
                if self._take_out(live, ""):
                    again.append(live)
            else:
                live.close_run(self._held, len(live.ids) + len(self._tokens_of(live)))
        self._model.swap(checked)
        self._held = held
        for live in again:
            self._submit(live)

    def _state(self, live: _Live) -> Any:
        processor = self._manager.batch_processor
        if processor is None:
            return None
        scheduler = processor.scheduler
        return scheduler.active_requests.get(live.sub_id) or scheduler.waiting_requests.get(live.sub_id)

    def _tokens_of(self, live: _Live) -> list[int]:
        state = self._state(live)
        return state.to_generation_output().generated_tokens if state is not None else []

    def _take_out(self, live: _Live, finish_reason: str) -> bool:
        """End a request of the manager and keep its tokens. False: the manager has not begun it, it may stay."""
        state = self._state(live)
        if state is None and not finish_reason:
            return False
        output = state.to_generation_output() if state is not None else None
        processor = self._manager.batch_processor
        if state is not None and processor is not None:
            processor.scheduler.set_request_cancellation(live.sub_id)
        else:
            self._manager.cancel_request(live.sub_id)
        self._forget(live.sub_id)
        live.sub_id = ""
        if finish_reason:
            self._complete(live, output, finish_reason)
            return True
        assert self._held is not None and output is not None
        live.ids += output.generated_tokens
        live.logprobs += output.logprobs
        live.close_run(self._held, len(live.ids))
        return True


def _manager(
    model: ServedModel, temperature: float, seed: int, max_concurrency: int, max_cached_tokens: int | None
) -> Any:
    """A manager of continuous batching that returns log-probs and can be paused. Raises ConfigError without one."""
    import transformers
    from transformers.generation import continuous_batching

    if not hasattr(getattr(continuous_batching, "ContinuousBatchingManager", None), "pause"):
        raise ConfigError(
            'rollout.decode = "continuous": needs a transformers whose continuous batching returns log-probs and can '
            'pause (5.24 does); update it, or set rollout.decode = "batched"'
        )
    if temperature <= 0:
        raise ConfigError(f'rollout.rollout_temperature = {temperature}: "continuous" needs one above 0')
    sizes: dict[str, Any] = {}
    if not devices.named(model.device).captures_graphs:
        sizes["use_cuda_graph"] = False
    if model.device.type == "cpu":
        sizes |= {"page_size": _CPU_PAGE, "max_batch_tokens": _CPU_BATCH_TOKENS}
        max_cached_tokens = max_cached_tokens or max(_CPU_CACHED_TOKENS, 2 * model.max_length)
    config = transformers.ContinuousBatchingConfig(
        return_logprobs=True,
        allow_block_sharing=False,
        use_async_batching=False,
        max_requests_per_batch=max_concurrency,
        auto_switch_to_flash=False,  # the configuration chooses the attention
        seed=seed,
        **sizes,
    )
    if max_cached_tokens is not None:
        config.num_blocks = -(-max_cached_tokens // config.page_size)
    generation = GenerationConfig(
        do_sample=True, temperature=temperature, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0
    )
    return model.model.init_continuous_batching(
        generation_config=generation, continuous_batching_config=config
    )
