"""Tiny random models of the families that the megatron trainer knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

_COMMON: dict[str, Any] = {
    "vocab_size": 23,  # no multiple of 2: the last row of a rank stands for no token
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

_OWN: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "llama": {"rope_parameters": _LLAMA3, "rms_norm_eps": 1e-5},
    "qwen2": {"num_key_value_heads": 4},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "norm_topk_prob": True,
        "head_dim": 8,
    },
}


def configuration(name: str, **other: Any) -> Any:
    kinds: dict[str, Any] = {
        "qwen3": Qwen3Config,
        "llama": LlamaConfig,
        "qwen2": Qwen2Config,
        "qwen3_moe": Qwen3MoeConfig,
    }
    return kinds[name](**_COMMON | _OWN[name] | other)


FAMILIES = {
    "qwen3": Qwen3ForCausalLM,
    "llama": LlamaForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "qwen3_moe": Qwen3MoeForCausalLM,
}


def saved(name: str, folder: Path, *, seed: int = 0, **other: Any) -> Path:
    """A model folder, with weights far from their initial values (norms and biases too)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = FAMILIES[name](configuration(name, **other))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.2)
    model.save_pretrained(folder)
    return folder
