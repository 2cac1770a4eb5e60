"""Decoding of a changing set of requests, one token of each at a time. Knows nothing of asyncio and of threads.

    start(requests)   one-token requests: one forward, no cache;  others: prefill, first token, a row in the slots
    step()            one token for every row
    swap(weights)     between steps: rows go on ("in_place"), have their cache recomputed ("retract") or end ("abort")

Log-probs are float32 and equal those of a forward without cache to about 4e-6 (tests/engine/test_rollout_batched.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.interfaces import Completion, EngineError, Sampling, WeightsId
from engine.rollout.loading import PauseMode
from engine.rollout.torch_model import ServedModel, in_chunks, padded, sample, uniforms
from engine.rollout.torch_slots import Slots
from streams.columns import VersionRun
from streams.errors import ConfigError


class Request:
    """One call of generate(), on its way through the decoder."""

    __slots__ = (
        "future",
        "is_cancelled",
        "key",
        "max_tokens",
        "n_in_runs",
        "prompt_ids",
        "request_id",
        "runs",
        "sampling",
    )

    def __init__(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str, seed: int) -> None:
        self.prompt_ids, self.sampling, self.request_id = prompt_ids, sampling, request_id
        self.key = int.from_bytes(
            hashlib.blake2b(f"{seed}/{request_id}".encode(), digest_size=8).digest(), "little"
        )
        self.max_tokens = sampling.max_tokens
        self.runs: list[VersionRun] = []  # closed ones: of weights that were swapped out meanwhile
        self.n_in_runs = 0
        self.is_cancelled = False
        self.future: Any = None


Outcome = tuple[Request, Completion | EngineError]


class _Rows:
    """What is known of each row beside its cache; arrays [capacity, …], rows 0 … n-1 in use."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.keys: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self.temperatures: NDArray[np.float32] = np.zeros(0, np.float32)
        self.counts: NDArray[np.int64] = np.zeros(0, np.int64)  # tokens so far
        self.most: NDArray[np.int64] = np.zeros(0, np.int64)  # max_tokens
        self.stops: NDArray[np.int32] = np.full((0, 1), -1, np.int32)  # stop ids, filled up with -1
        self.ids: NDArray[np.int32] = np.zeros((0, 16), np.int32)
        self.logprobs: NDArray[np.float32] = np.zeros((0, 16), np.float32)

    _ARRAYS = ("keys", "temperatures", "counts", "most", "stops", "ids", "logprobs")

    def add(self, requests: Sequence[Request], ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> None:
        """New rows with their first token."""
        first, last = len(self.requests), len(self.requests) + len(requests)
        width = max(len(each.sampling.stop_ids) for each in requests)
        self._fit(last, width, 1)
        self.requests += requests
        self.stops[first:last] = -1
        for row, request in enumerate(requests, first):
            self.keys[row], self.temperatures[row] = request.key, request.sampling.temperature
            self.most[row] = request.max_tokens
            self.stops[row, : len(request.sampling.stop_ids)] = request.sampling.stop_ids
        self.counts[first:last] = 1
        self.ids[first:last, 0], self.logprobs[first:last, 0] = ids, logprobs

    def append(self, ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> NDArray[np.int64]:
        """One more token for every row; returns the rows that are done now."""
        n = len(self.requests)
        counts = self.counts[:n]
        self._fit(n, 0, int(counts.max()) + 1)
        rows = np.arange(n)
        self.ids[rows, counts], self.logprobs[rows, counts] = ids, logprobs
        counts += 1
        done = (counts >= self.most[:n]) | (self.stops[:n] == ids[:, None]).any(axis=1)
        return np.flatnonzero(done)

    def last_ids(self) -> NDArray[np.int64]:
        n = len(self.requests)
        return self.ids[np.arange(n), self.counts[:n] - 1].astype(np.int64)

    def move(self, source: NDArray[np.int64], target: NDArray[np.int64], n_left: int) -> None:
        for name in self._ARRAYS:
            array = getattr(self, name)
            array[target] = array[source]
        for here, there in zip(source.tolist(), target.tolist(), strict=True):
            self.requests[there] = self.requests[here]
        del self.requests[n_left:]

    def _fit(self, rows: int, stops: int, tokens: int) -> None:
        rows = self._grown(rows, len(self.counts))
        widths = {
            "stops": self._grown(stops, self.stops.shape[1]),
            "ids": self._grown(tokens, self.ids.shape[1]),
        }
        widths["logprobs"] = widths["ids"]
        for name in self._ARRAYS:
            array = getattr(self, name)
            shape = (rows, widths[name]) if name in widths else (rows,)
            if array.shape != shape:
                grown = np.full(shape, -1 if name == "stops" else 0, array.dtype)
                grown[tuple(slice(0, size) for size in array.shape)] = array
                setattr(self, name, grown)

    @staticmethod
    def _grown(needed: int, held: int) -> int:
        return held if needed <= held else max(needed, 2 * held)


class Decoder:
    """Lifecycle: `swap` in the first weights, then `start` and `step` as long as `n_running`."""

    def __init__(self, model: ServedModel, *, max_forward_tokens: int = 16_384) -> None:
        _check_attention(model)
        self.model, self.max_forward_tokens = model, max_forward_tokens
        self.held: WeightsId | None = None
        config = model.model.config.get_text_config()
        is_eager = model.model.config._attn_implementation == "eager"
        self._slots = Slots(config.num_hidden_layers, model.device, use_bool_mask=not is_eager)
        self._rows = _Rows()
        self.tokens = self.requests = 0  # given out

    @property
    def n_running(self) -> int:
        return self._slots.n_rows

    def running(self) -> list[Request]:
        return list(self._rows.requests)

    # -- weights
    def swap(self, checked: Mapping[str, Any], held: WeightsId, mode: PauseMode) -> list[Outcome]:
        """Hold other weights from the next token on. Returns what "abort" ended."""
        for row, request in enumerate(self._rows.requests):
            self._close_run(request, int(self._rows.counts[row]))
        self.model.swap(checked)
        self.held = held
        if mode == "abort":
            return self._end(np.arange(self.n_running), "aborted")
        if mode == "retract" and self.n_running:
            self._recompute()
        return []

    def _close_run(self, request: Request, n_tokens: int) -> None:
        if self.held is not None and n_tokens > request.n_in_runs:
            request.runs.append((self.held.epoch, self.held.version, n_tokens - request.n_in_runs))
            request.n_in_runs = n_tokens

    def _recompute(self) -> None:
        """The cache of every running row, under the weights held now. Its last token is not in the cache yet."""
        rows = self._rows
        sequences = [
            [*request.prompt_ids, *rows.ids[row, : rows.counts[row] - 1].tolist()]
            for row, request in enumerate(rows.requests)
        ]
        for places in in_chunks([len(each) for each in sequences], self.max_forward_tokens):
            output = self._prefill([sequences[place] for place in places], kept=np.zeros(1, np.int64))
            chosen = np.array(places)
            self._slots.overwrite(chosen, self.model.cache_of(output), np.arange(len(places)))

    # -- requests
    def start(self, requests: Sequence[Request]) -> list[Outcome]:
        """First token of each. What is not finished by it joins the running rows.

        Requests with the same prompt, such as the members of a group, share one row of the forward.
        """
        outcomes: list[Outcome] = []
        single: dict[tuple[int, ...], list[Request]] = {}
        several: dict[tuple[int, ...], list[Request]] = {}
        for request in requests:
            if request.is_cancelled:
                continue
            try:
                request.max_tokens = self.model.most_tokens(request.prompt_ids, request.max_tokens)
            except EngineError as error:
                outcomes.append((request, error))
                continue
            prompts = single if request.max_tokens == 1 else several
            prompts.setdefault(tuple(request.prompt_ids), []).append(request)
        for prompts in (single, several):
            found = list(prompts)
            for places in in_chunks([len(each) for each in found], self.max_forward_tokens):
                chunk = [found[place] for place in places]
                outcomes += self._first_tokens(
                    chunk, [prompts[each] for each in chunk], join=prompts is several
                )
        return outcomes

    def _prefill(
        self, sequences: Sequence[Sequence[int]], kept: NDArray[np.int64], use_cache: bool = True
    ) -> Any:
        input_ids = torch.from_numpy(padded(sequences)).to(self.model.device)
        return self.model.forward(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            use_cache=use_cache,
            logits_to_keep=torch.from_numpy(kept).to(self.model.device),
        )

    def _first_tokens(
        self, prompts: Sequence[Sequence[int]], asked: Sequence[Sequence[Request]], join: bool
    ) -> list[Outcome]:
        """One forward over distinct prompts, one token for each of the requests that asked with it."""
        held = self.held
        assert held is not None
        requests = [request for group in asked for request in group]
        row_of = np.repeat(np.arange(len(prompts)), [len(group) for group in asked])
        ends = np.array([len(each) for each in prompts])
        kept = np.unique(ends - 1)
        output = self._prefill(prompts, kept, use_cache=join)
        logits = self.model.last_logits(output, kept, ends)[torch.from_numpy(row_of).to(self.model.device)]
        keys = np.array([each.key for each in requests], np.uint64)
        temperatures = np.array([each.sampling.temperature for each in requests], np.float32)
        ids, logprobs = sample(logits, temperatures, uniforms(keys, np.zeros(len(keys), np.int64)))
        self.tokens += len(requests)
        outcomes: list[Outcome] = []
        going: list[int] = []
        for place, (request, token) in enumerate(zip(requests, ids.tolist(), strict=True)):
            is_stop = token in request.sampling.stop_ids
            if join and not is_stop:
                going.append(place)
                continue
            span = slice(place, place + 1)
            run = (held.epoch, held.version, 1)
            finish_reason = "stop" if is_stop else "length"
            outcomes.append((request, Completion(ids[span], logprobs[span], [run], finish_reason)))
        self.requests += len(outcomes)
        if going:
            rows = row_of[going]
            self._slots.join(self.model.cache_of(output), rows, ends[rows])
            self._rows.add([requests[place] for place in going], ids[going], logprobs[going])
        return outcomes

    def step(self) -> list[Outcome]:
        """One token for every running row."""
        cancelled = [row for row, request in enumerate(self._rows.requests) if request.is_cancelled]
        if cancelled:
            self._end(np.array(cancelled), "aborted")
            if not self.n_running:
                return []
        rows, n = self._rows, self.n_running
        positions, mask = self._slots.begin()
        output = self.model.forward(
            torch.from_numpy(rows.last_ids()).to(self.model.device)[:, None],
            position_ids=positions,
            attention_mask=mask,
            cache=self._slots,
            use_cache=True,
        )
        self._slots.end()
        ids, logprobs = sample(
            output.logits[:, -1], rows.temperatures[:n], uniforms(rows.keys[:n], rows.counts[:n])
        )
        self.tokens += n
        done = rows.append(ids, logprobs)
        return self._end(done, "") if len(done) else []

    def abort(self, request_id: str) -> list[Outcome]:
        found = [row for row, request in enumerate(self._rows.requests) if request.request_id == request_id]
        return self._end(np.array(found), "aborted") if found else []

    def _end(self, gone: NDArray[np.int64], finish_reason: str) -> list[Outcome]:
        """Take rows out. Without a reason they ended by themselves."""
        rows = self._rows
        outcomes: list[Outcome] = []
        for row in gone.tolist():
            request, count = rows.requests[row], int(rows.counts[row])
            self._close_run(request, count)
            ids = rows.ids[row, :count].copy()
            reason = finish_reason or ("stop" if ids[-1] in request.sampling.stop_ids else "length")
            outcomes.append(
                (request, Completion(ids, rows.logprobs[row, :count].copy(), request.runs, reason))
            )
        rows.move(*self._slots.leave(gone), self._slots.n_rows)
        self.requests += len(outcomes)
        return outcomes


def _check_attention(model: ServedModel) -> None:
    """Slots hold whole rows behind one mask: full attention only, and an implementation that takes a mask."""
    config = model.model.config.get_text_config()
    attention = model.model.config._attn_implementation
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    window = getattr(config, "sliding_window", None) if not getattr(config, "layer_types", None) else None
    if kinds or (window and window < model.max_length):
        raise ConfigError(
            f'rollout.decode = "batched": {config.model_type} has {", ".join(sorted(kinds)) or "sliding"} layers; set '
            'rollout.decode = "continuous"'
        )
    if attention not in ("sdpa", "eager"):
        raise ConfigError(
            f'rollout.decode = "batched": model.attn_implementation = "{attention}" takes no mask per row; set it to '
            '"sdpa" or "eager", or set rollout.decode = "continuous"'
        )
