"""Log-probs of a completion against a forward pass under the weights that its spans name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.interfaces import Completion

TEMPERATURE = 0.8
TOLERANCE = 1e-4  # nats, float32; other weights differ by whole nats


def forward_logprobs(
    model: Path, tensors: Mapping[str, Any], ids: list[int], n_prompt: int
) -> NDArray[np.float64]:
    """Log-prob of each response token [L] at the sampling temperature, under these weights."""
    import torch
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    reference.load_state_dict({name: torch.from_numpy(tensor) for name, tensor in tensors.items()})
    with torch.inference_mode():
        logits = reference(torch.tensor([ids])).logits[0, n_prompt - 1 : -1].double() / TEMPERATURE
    chosen = torch.tensor(ids[n_prompt:])[:, None]
    return torch.log_softmax(logits, -1).gather(1, chosen)[:, 0].numpy()


def differences(
    model: Path, tensors: Mapping[str, Any], prompt: list[int], done: Completion
) -> NDArray[np.float64]:
    """Of every token [L], if all of them had been made by these weights."""
    expected = forward_logprobs(model, tensors, prompt + done.ids.tolist(), len(prompt))
    return np.abs(expected - done.logprobs)


def worst_difference(
    model: Path, weights: Mapping[tuple[int, int], Mapping[str, Any]], prompt: list[int], done: Completion
) -> float:
    """`weights`: (epoch, version) → tensors."""
    at, worst = 0, 0.0
    for epoch, version, count in done.versions:
        found = differences(model, weights[epoch, version], prompt, done)[at : at + count]
        worst = max(worst, float(found.max(initial=0.0)))
        at += count
    assert at == len(done.ids)
    return worst
