"""Tiny random models and batches for tests of the trainer, and a plain float64 reference of a forward."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from engine.interfaces import TrainBatch, TrainSample
from streams.trajectory import Payload

VOCABULARY = 23


def tiny_gpt2(seed: int = 0, *, tied: bool = False) -> GPT2LMHeadModel:
    """Dropout is on in its configuration, as in the published one: a trainer must switch it off."""
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=12,
        n_layer=2,
        n_head=2,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return _random(GPT2LMHeadModel, config, seed)


def tiny_qwen3(seed: int = 0) -> Qwen3ForCausalLM:
    """Rotary positions, grouped keys, tied embeddings."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return _random(Qwen3ForCausalLM, config, seed)


def folder_of(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def batch_of(n_samples: int, seed: int = 0, *, step: int = 1, longest: int = 6) -> TrainBatch:
    """Samples of 1-3 prompt and 1 … `longest` response tokens, some masked, some with nothing to train."""
    rng = np.random.default_rng(seed)
    samples = []
    for number in range(n_samples):
        length = int(rng.integers(1, longest + 1))
        mask = rng.random(length) < 0.8
        payload = Payload(
            rng.integers(3, VOCABULARY, int(rng.integers(1, 4))).astype(np.int32),
            rng.integers(3, VOCABULARY, length).astype(np.int32),
            np.where(mask, -3.1 + rng.normal(0, 0.4, length), 0).astype(np.float32),
            mask,
            [(0, step - 1, length)],
        )
        samples.append(TrainSample(f"0-{number}/0/0", payload, mask, float(rng.normal())))
    return TrainBatch(step, step - 1, seed, samples)


def reference_logprobs(
    model: Any, sample: TrainSample, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs, entropies) of one sample's trained tokens: no padding, no batch, every formula spelled out."""
    ids = [*sample.payload.prompt_ids.tolist(), *sample.payload.response_ids.tolist()]
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0] / temperature
    probabilities = torch.exp(logits) / torch.exp(logits).sum(-1, keepdim=True)
    start = len(sample.payload.prompt_ids)
    places = [start + place for place, trained in enumerate(sample.loss_mask) if trained]
    logprobs = [torch.log(probabilities[place - 1, ids[place]]) for place in places]
    entropies = [-(probabilities[place - 1] * torch.log(probabilities[place - 1])).sum() for place in places]
    empty = torch.zeros(0, dtype=torch.float64)
    return (torch.stack(logprobs), torch.stack(entropies)) if places else (empty, empty)


def in_float64(model: Any) -> Any:
    """A copy in float64, in evaluation mode, with eager attention (plain matrix products and a softmax)."""
    other = copy.deepcopy(model).double().eval()
    other.set_attn_implementation("eager")
    return other


def _random(kind: Any, config: Any, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model
