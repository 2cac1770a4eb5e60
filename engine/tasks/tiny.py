"""A causal language model small enough for one core, as an ordinary Hugging Face folder.

`AutoModelForCausalLM.from_pretrained(folder)` and `AutoTokenizer.from_pretrained(folder)` load it; nothing in
the engine treats it differently from a real model.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from engine.tasks.base import BOS, EOS, PAD, UNK, Task

HEAD_STD = 0.02  # a small head starts the policy near uniform
WEIGHT_STD = 0.08


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


def build_model(task: Task, seed: int) -> GPT2LMHeadModel:
    """A GPT-2 with fresh weights: learned positions, head not tied to the embeddings. float32, on the CPU.

    The weights depend on `seed` alone, and torch's global random state is left as it was.
    """
    size = task.recommended
    config = GPT2Config(
        vocab_size=len(task.words),
        n_positions=task.max_length,
        n_embd=size.hidden_size,
        n_layer=size.num_layers,
        n_head=size.num_heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=False,
        activation_function="gelu_pytorch_tanh",  # one kernel; GPT-2's usual one is five
        use_cache=False,
        pad_token_id=task.words.index(PAD),
        bos_token_id=task.words.index(BOS),
        eos_token_id=task.words.index(EOS),
    )
    with torch.random.fork_rng(devices=[]):
        model = GPT2LMHeadModel(config)
    _initialise(model, torch.Generator().manual_seed(seed))
    return model.eval()


def save(folder: Path, model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write config, weights (safetensors) and tokenizer into `folder`, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def _initialise(model: GPT2LMHeadModel, generator: torch.Generator) -> None:
    """Normal weights, zero biases; projections into the residual stream shrink with depth, as in GPT-2."""
    residual_scale = (2 * model.config.n_layer) ** -0.5
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            weight.zero_()
        elif weight.dim() > 1:
            std = HEAD_STD if "lm_head" in name else WEIGHT_STD
            std *= residual_scale if "c_proj" in name else 1.0
            weight.normal_(0.0, std, generator=generator)
