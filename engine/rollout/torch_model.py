"""A causal language model that an engine serves: loading, whole swaps of its weights, forwards, sampling."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from engine import devices
from engine.algorithms import norms
from engine.devices.moving import moved
from engine.interfaces import EngineError
from engine.rollout.loading import WEIGHTS_MISMATCH

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ServedModel:
    """The model of a local Hugging Face folder, in evaluation mode. One thread at a time may use it.

    Its weights are placeholders until the first `swap`.
    """

    def __init__(
        self, folder: Path, *, dtype: str = "float32", device: str = "cpu", attn_implementation: str = "sdpa"
    ) -> None:
        self.device = devices.ready(device).torch
        transformers_logging.disable_progress_bar()  # stderr is a log here
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=_DTYPES[dtype], attn_implementation=attn_implementation, local_files_only=True
        )
        moved(self.model.requires_grad_(False).eval(), self.device)
        norms.use_in(self.model, self.device)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        config = self.model.config.get_text_config()
        self.vocab_size = int(config.vocab_size)
        # most tokens of prompt and response together
        self.max_length = int(getattr(config, "max_position_embeddings", None) or 1 << 20)
        parameters = inspect.signature(self.model.forward).parameters
        self._takes_logits_to_keep = "logits_to_keep" in parameters
        # transformers renames past_key_values to cache; either spelling warns on the other side of the change
        self._cache_word = "cache" if "cache" in parameters else "past_key_values"

    def forward(self, input_ids: torch.Tensor, **inputs: Any) -> Any:
        """One forward; `cache` (input) and `logits_to_keep` by the names that this transformers wants."""
        if "cache" in inputs:
            inputs[self._cache_word] = inputs.pop("cache")
        if not self._takes_logits_to_keep:
            inputs.pop("logits_to_keep", None)
        return self.model(input_ids=input_ids, **inputs)

    def cache_of(self, output: Any) -> Any:
        return getattr(output, self._cache_word)

    def last_logits(self, output: Any, kept: NDArray[np.int64], ends: NDArray[np.int64]) -> torch.Tensor:
        """Logits [B, V] at position `ends[i] - 1` of row i, from a forward with `logits_to_keep` = `kept`."""
        places = np.searchsorted(kept, ends - 1) if self._takes_logits_to_keep else ends - 1
        rows = torch.arange(len(ends), device=self.device)
        return output.logits[rows, torch.from_numpy(places).to(self.device)]

    def most_tokens(self, prompt_ids: Sequence[int], max_tokens: int) -> int:
        """How many tokens may follow this prompt, at most `max_tokens`. Raises EngineError if it cannot be served."""
        if not prompt_ids or max_tokens < 1:
            raise EngineError("bad_request", f"{len(prompt_ids)} prompt tokens, max_tokens {max_tokens}")
        if min(prompt_ids) < 0 or max(prompt_ids) >= self.vocab_size:
            raise EngineError("bad_request", f"prompt ids must be in [0, {self.vocab_size})")
        room = self.max_length - len(prompt_ids)
        if room < 1:
            raise EngineError(
                "prompt_too_long", f"{len(prompt_ids)} prompt tokens, the model takes {self.max_length}"
            )
        return min(max_tokens, room)

    # -- weights
    def check(self, tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """These weights on the model's device and in its type, ready for `swap`.

        They must be all of the model's and nothing else: a tied weight may come under one of its names.
        Raises EngineError("weights_mismatch") naming what is missing, unknown or of another shape.
        """
        state = self.model.state_dict(keep_vars=True)
        unknown = sorted(set(tensors) - set(state))
        given = {id(state[name]) for name in tensors if name in state}
        missing = sorted(name for name, held in state.items() if id(held) not in given)
        wrong = sorted(
            f"{name} {list(tensor.shape)}≠{list(state[name].shape)}"
            for name, tensor in tensors.items()
            if name in state and tensor.shape != state[name].shape
        )
        for what, names in (("has no", unknown), ("also needs", missing), ("has other shapes for", wrong)):
            if names:
                more = f" and {len(names) - 4} more" if len(names) > 4 else ""
                raise EngineError(WEIGHTS_MISMATCH, f"the model {what} {', '.join(names[:4])}{more}")
        return {
            name: tensor.to(device=self.device, dtype=state[name].dtype) for name, tensor in tensors.items()
        }

    def swap(self, checked: Mapping[str, torch.Tensor]) -> None:
        """Hold these weights from the next forward on. Pointers change, nothing is copied: it cannot stop halfway."""
        state = self.model.state_dict(keep_vars=True)
        for name, tensor in checked.items():
            state[name].data = tensor


class Sampled(NamedTuple):
    ids: NDArray[np.int32]  # [B]
    logprobs: NDArray[np.float32]  # [B]


def sample(logits: torch.Tensor, temperatures: NDArray[np.float32], uniforms: NDArray[np.float32]) -> Sampled:
    """One token of each row of `logits` [B, V] by inverting its cumulative distribution at `uniforms` [B].

    Log-probs are those of the tempered distribution, in float32. Temperature 0 takes the likeliest token, whose
    log-prob then is 0. (torch.multinomial is 20 times slower with a vocabulary of 32,000.)
    """
    logits = logits.float()
    is_greedy = temperatures == 0.0
    if (temperatures != 1.0).any():
        safe = np.where(is_greedy, np.float32(1.0), temperatures)
        logits = logits / torch.from_numpy(safe).to(logits.device)[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)
    cumulative = logprobs.exp().cumsum(dim=-1)
    # the first id whose cumulative share lies above u; one of no probability never is
    marks = torch.from_numpy(uniforms).to(logits.device)[:, None] * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, marks, right=True).clamp_(max=logits.shape[-1] - 1)
    chosen = logprobs.gather(1, ids)
    out_ids = ids[:, 0].to(torch.int32).cpu().numpy()
    out_logprobs = chosen[:, 0].cpu().numpy()
    if is_greedy.any():
        out_ids = np.where(is_greedy, logits.argmax(dim=-1).to(torch.int32).cpu().numpy(), out_ids)
        out_logprobs = np.where(is_greedy, np.float32(0.0), out_logprobs)
    return Sampled(out_ids, out_logprobs)


def uniforms(keys: NDArray[np.uint64], counts: NDArray[np.int64]) -> NDArray[np.float32]:
    """Random numbers in [0, 1) that depend on a request's key and on how many tokens it has, and on nothing else.

    So what a request samples does not depend on which others happened to share its batch. splitmix64 (Steele, Lea
    and Flood, "Fast splittable pseudorandom number generators", 2014): the mix of key + count × golden ratio.
    """
    with np.errstate(over="ignore"):
        z = keys + (counts.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return (z >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def padded(rows: Sequence[Sequence[int]], fill: int = 0) -> NDArray[np.int64]:
    """Rows of different lengths as one array [B, longest], padded on the right, where a causal model never looks."""
    longest = max(map(len, rows))
    return np.array([[*row, *([fill] * (longest - len(row)))] for row in rows], dtype=np.int64)


def in_chunks(lengths: Sequence[int], most_tokens: int) -> Iterator[list[int]]:
    """Places of rows that go through one forward: of like lengths, at most `most_tokens` with padding."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    chunk: list[int] = []
    for place in order:
        if chunk and lengths[chunk[0]] * (len(chunk) + 1) > most_tokens:
            yield chunk
            chunk = []
        chunk.append(place)
    if chunk:
        yield chunk
