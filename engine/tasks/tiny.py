"""A causal language model small enough for one core, as an ordinary Hugging Face folder.

`AutoModelForCausalLM.from_pretrained(folder)` and `AutoTokenizer.from_pretrained(folder)` load it; nothing in
the engine treats it differently from a real model.
"""

from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from engine.tasks.base import BOS, EOS, PAD, UNK, Task

HEAD_STD = 0.02  # a small head starts the policy near uniform
WEIGHT_STD = 0.08
SLACK = 16  # positions beyond the longest episode: servers keep a few for themselves

# GPT-2 is the quicker one. Inference servers want the other: SGLang ties GPT-2's head to its embeddings.
Architecture = Literal["gpt2", "qwen3"]
_INTO_RESIDUAL = ("c_proj", "o_proj", "down_proj")


def build_tokenizer(task: Task) -> PreTrainedTokenizerFast:
    """One word, one token; a word's id is its place in `task.words`. Adds no special tokens by itself."""
    vocabulary = {word: token_id for token_id, word in enumerate(task.words)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,  # it would glue "?" to the word before it
        model_max_length=task.max_length,
    )


def build_model(task: Task, seed: int, architecture: Architecture = "gpt2") -> PreTrainedModel:
    """A model with fresh weights, head not tied to the embeddings. float32, on the CPU.

    The weights depend on `seed` alone, and torch's global random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        model = _gpt2(task) if architecture == "gpt2" else _qwen3(task)
    _initialise(model, torch.Generator().manual_seed(seed))
    return model.eval()


def _gpt2(task: Task) -> PreTrainedModel:
    size = task.recommended
    config = GPT2Config(
        n_positions=task.max_length,
        n_embd=size.hidden_size,
        n_layer=size.num_layers,
        n_head=size.num_heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        activation_function="gelu_pytorch_tanh",  # one kernel; GPT-2's usual one is five
        **_common(task),
    )
    return GPT2LMHeadModel(config)


def _qwen3(task: Task) -> PreTrainedModel:
    size = task.recommended
    config = Qwen3Config(
        max_position_embeddings=task.max_length + SLACK,
        hidden_size=size.hidden_size,
        intermediate_size=3 * size.hidden_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_heads,
        head_dim=size.hidden_size // size.num_heads,
        **_common(task),
    )
    return Qwen3ForCausalLM(config)


def _common(task: Task) -> dict[str, Any]:
    return {
        "vocab_size": len(task.words),
        "tie_word_embeddings": False,
        "use_cache": False,
        "pad_token_id": task.words.index(PAD),
        "bos_token_id": task.words.index(BOS),
        "eos_token_id": task.words.index(EOS),
    }


def save(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write config, weights (safetensors) and tokenizer into `folder`, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def _initialise(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Normal weights, zero biases; projections into the residual stream shrink with depth, as in GPT-2."""
    residual_scale = (2 * model.config.num_hidden_layers) ** -0.5
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            weight.zero_()
        elif weight.dim() > 1:
            std = HEAD_STD if "lm_head" in name else WEIGHT_STD
            std *= residual_scale if any(part in name for part in _INTO_RESIDUAL) else 1.0
            weight.normal_(0.0, std, generator=generator)
