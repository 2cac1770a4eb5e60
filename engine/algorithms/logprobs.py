"""Log-probs of trained tokens, for little memory: short forwards, and logits only where a token is trained.

    samples ──► FlatBatch ──► rows sorted by length ──► MicroBatch [B, T] ──► hidden [B, T, H]
                                                                                   │ only the n trained positions
                                                                                   ▼
                                                             log-probs [n] ◄── logits [n, V] in float32

Rows are padded on the right. The models are causal, so no token sees the padding and no attention mask is needed.
Or they are packed, without any padding (engine/algorithms/packing.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from engine.algorithms import packing
from engine.algorithms.lean import lean_logprobs
from engine.devices.moving import on_device
from engine.interfaces import TrainSample

# Padding to a common length is taken for cheaper than one more forward up to this many padded tokens.
FORWARD_OVERHEAD_TOKENS = 256


class FlatBatch(NamedTuple):
    """S samples side by side, N trained tokens in all.

    Position c of a row predicts the token at c + 1, so a row is fed only up to its last trained token.
    """

    ids: NDArray[np.int64]  # prompt and response of each sample, one after the other
    row_starts: NDArray[np.int64]  # [S+1] into ids
    fed: NDArray[np.int64]  # [S] tokens of each row to feed; 0: nothing to train
    token_starts: NDArray[np.int64]  # [S+1] into the arrays below
    sample: NDArray[np.int64]  # [N] which sample
    column: NDArray[np.int64]  # [N] position whose logits predict the token
    targets: NDArray[np.int64]  # [N]
    behaviour: NDArray[np.float32]  # [N]
    advantages: NDArray[np.float32]  # [N]
    ages: NDArray[np.int32]  # [N] staleness, in versions
    weights: NDArray[np.float32] | None  # [N] in the sum that is a minibatch's loss; None: all 1
    teacher: NDArray[np.float32] | None  # [N] log-probs; None: there is no teacher


# Every field but ids and the starts: what a share of the samples takes along.
PER_SAMPLE = ("fed",)
PER_TOKEN = ("column", "targets", "behaviour", "advantages", "ages", "weights", "teacher")


class MicroBatch(NamedTuple):
    """One forward: B rows of T tokens, n of them trained. Packed: B is 1, and T the sum of the rows."""

    ids: Tensor  # int64 [B, T], padded on the right with the row's first token
    positions: Tensor  # int64 [n] into B·T
    targets: Tensor  # int64 [n]
    tokens: NDArray[np.int64]  # [n] places in the FlatBatch
    packed: PackedRows | None = None


class PackedRows(NamedTuple):
    """Where the R rows of a packed forward lie."""

    position_ids: Tensor  # int64 [1, T], from 0 in each row
    starts: Tensor  # int32 [R+1]
    bounds: list[int]  # the same, on the host
    longest: int  # tokens of the longest row


class TokenLogprobs(NamedTuple):
    logprobs: Tensor  # float32 [n]
    entropy: Tensor  # float32 [n], of the whole distribution at each position


def flatten(samples: Sequence[TrainSample]) -> FlatBatch:
    """Lay samples side by side. A token is trained where `loss_mask` says so."""
    payloads = [sample.payload for sample in samples]
    n_prompt = np.array([len(payload.prompt_ids) for payload in payloads], np.int64)
    n_response = np.array([len(payload.response_ids) for payload in payloads], np.int64)
    row_starts = starts_of(n_prompt + n_response)
    ids = _concatenate([part for payload in payloads for part in payload[:2]], np.int64)
    mask = _concatenate([sample.loss_mask for sample in samples], np.bool_)
    of_response = np.repeat(np.arange(len(samples)), n_response)
    sample = of_response[mask]
    place = (np.arange(len(mask)) - np.repeat(starts_of(n_response)[:-1], n_response))[mask]
    column = n_prompt[sample] + place - 1
    fed = np.zeros(len(samples), np.int64)
    np.maximum.at(fed, sample, column + 1)
    return FlatBatch(
        ids=ids,
        row_starts=row_starts,
        fed=fed,
        token_starts=starts_of(np.bincount(sample, minlength=len(samples))),
        sample=sample,
        column=column,
        targets=ids[row_starts[sample] + column + 1],
        behaviour=_concatenate([payload.logprobs for payload in payloads], np.float32)[mask],
        advantages=np.array([each.advantage for each in samples], np.float32)[sample],
        ages=_concatenate([_ages(each) for each in samples], np.int32)[mask],
        weights=None,
        teacher=_teacher(samples, mask),
    )


def micro_batches(
    flat: FlatBatch, chosen: NDArray[np.int64], max_tokens: int, device: torch.device
) -> Iterator[MicroBatch]:
    """The chosen samples in forwards of at most `max_tokens` padded tokens; a longer row goes alone.

    Rows of like length go together. Samples without a trained token are left out.
    """
    rows = chosen[flat.fed[chosen] > 0]
    rows = rows[np.argsort(flat.fed[rows], kind="stable")]
    for begin, end in _runs(flat.fed[rows].tolist(), max_tokens):
        yield _micro_batch(flat, rows[begin:end], device)


def packed_micro_batches(
    flat: FlatBatch, chosen: NDArray[np.int64], max_tokens: int, device: torch.device, count: int = 0
) -> list[MicroBatch]:
    """The chosen samples packed in forwards of at most `max_tokens`, as even as can be; a longer row goes alone.

    `count`: spread over as many forwards, if they would fit in fewer. Samples without a trained token are left out.
    """
    rows = chosen[flat.fed[chosen] > 0]
    together = (rows[places] for places in packing.bins(flat.fed[rows], max_tokens, count))
    return [_packed(flat, each, device) for each in together if len(each)]


def token_logprobs(
    model: Any, batch: MicroBatch, *, temperature: float = 1.0, with_entropy_gradient: bool = False
) -> TokenLogprobs:
    """Log-probs of the trained tokens under the tempered policy softmax(logits / temperature).

    Logits are widened to float32 first, whatever the model computes in. Memory grows with n · V, not with B · T · V:
    the model's output layer is given the trained positions only.
    """
    logits = logits_at(model, batch)
    if logits.dtype in (torch.bfloat16, torch.float16):
        if not with_entropy_gradient:
            return TokenLogprobs(*lean_logprobs(logits, batch.targets, temperature))
        logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    logp = functional.log_softmax(logits, dim=-1)
    logprobs = -functional.nll_loss(logp, batch.targets, reduction="none")
    with torch.set_grad_enabled(with_entropy_gradient and torch.is_grad_enabled()):
        # −Σ p log p; a forbidden token has log p = −inf, and 0 · −inf would be NaN
        entropy = -(logp.exp() * logp.clamp(min=torch.finfo(logp.dtype).min)).sum(-1)
    return TokenLogprobs(logprobs, entropy)


def forward_arguments(batch: MicroBatch) -> dict[str, Any]:
    """What a Hugging Face model is called with: ids, and where rows begin if they are packed."""
    arguments: dict[str, Any] = {"input_ids": batch.ids, "use_cache": False}
    rows = batch.packed
    if rows is None:
        return arguments
    return arguments | packing.row_arguments(rows.position_ids, rows.starts, rows.bounds, rows.longest)


def logits_at(model: Any, batch: MicroBatch) -> Tensor:
    """Logits [n, V] of the trained positions, from a Hugging Face causal language model (a critic's have V = 1)."""

    def keep_trained(module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden = inputs[0]  # [B, T, H]
        return (
            hidden.reshape(-1, hidden.shape[-1]).index_select(0, batch.positions).unsqueeze(0),
            *inputs[1:],
        )

    hook = model.get_output_embeddings().register_forward_pre_hook(keep_trained)
    try:
        logits = model(**forward_arguments(batch)).logits
    finally:
        hook.remove()
    if logits.shape[:2] != (1, len(batch.positions)):
        raise ValueError(
            f"{type(model).__name__} gave logits {list(logits.shape)} for {len(batch.positions)} positions: "
            "its output layer is not applied to each position by itself"
        )
    return logits[0]


def _runs(lengths: list[int], max_tokens: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of the rows that go together; `lengths` ascend."""
    begin = 0
    for at in range(1, len(lengths)):
        count = at - begin
        padding = count * (lengths[at] - lengths[at - 1])
        if (count + 1) * lengths[at] > max_tokens or padding > FORWARD_OVERHEAD_TOKENS:
            yield begin, at
            begin = at
    if lengths:
        yield begin, len(lengths)


def _micro_batch(flat: FlatBatch, rows: NDArray[np.int64], device: torch.device) -> MicroBatch:
    length = int(flat.fed[rows].max())
    columns = np.arange(length)
    is_fed = columns < flat.fed[rows][:, None]
    ids = flat.ids[flat.row_starts[rows][:, None] + columns * is_fed]
    row_of_token, tokens = _trained(flat, rows)
    return MicroBatch(
        ids=on_device(ids, device),
        positions=on_device(row_of_token * length + flat.column[tokens], device),
        targets=on_device(flat.targets[tokens], device),
        tokens=tokens,
    )


def _packed(flat: FlatBatch, rows: NDArray[np.int64], device: torch.device) -> MicroBatch:
    fed = flat.fed[rows]
    starts = starts_of(fed)
    columns = ranges(np.zeros_like(fed), fed)
    ids = flat.ids[columns + np.repeat(flat.row_starts[rows], fed)]
    row_of_token, tokens = _trained(flat, rows)
    return MicroBatch(
        ids=on_device(ids, device)[None],
        positions=on_device(starts[row_of_token] + flat.column[tokens], device),
        targets=on_device(flat.targets[tokens], device),
        tokens=tokens,
        packed=PackedRows(
            on_device(columns, device)[None],
            on_device(starts.astype(np.int32), device),
            starts.tolist(),
            int(fed.max()),
        ),
    )


def _trained(flat: FlatBatch, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """([n] which of the rows, [n] place in the FlatBatch) of their trained tokens."""
    counts = flat.token_starts[rows + 1] - flat.token_starts[rows]
    return np.repeat(np.arange(len(rows)), counts), ranges(flat.token_starts[rows], counts)


def ranges(begins: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """begin, begin + 1, …, `count` of them, for each pair, one after the other."""
    return np.arange(counts.sum()) + np.repeat(begins - starts_of(counts)[:-1], counts)


def _teacher(samples: Sequence[TrainSample], mask: NDArray[np.bool_]) -> NDArray[np.float32] | None:
    """Its log-probs [N]; None unless every sample has them."""
    if not samples or any(each.teacher is None for each in samples):
        return None
    return _concatenate([each.teacher for each in samples if each.teacher is not None], np.float32)[mask]


def _ages(sample: TrainSample) -> NDArray[np.int32]:
    return np.zeros(len(sample.loss_mask), np.int32) if sample.ages is None else sample.ages


def starts_of(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each part begins, and the end of the last: int64 [len + 1]."""
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int64)


def _concatenate(parts: Sequence[NDArray[Any]], dtype: type) -> NDArray[Any]:
    return np.concatenate(parts).astype(dtype) if parts else np.empty(0, dtype)
