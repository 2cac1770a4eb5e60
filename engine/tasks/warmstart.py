"""The warm start: a few seconds of supervised training on demonstrations of an imperfect player.

It gives the policy the rules of the task (RL from scratch learns little) but not the skill. Same seed, same
torch, same machine: the same weights.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedTokenizerFast

from engine.tasks import tiny
from engine.tasks.base import PAD, Demonstration, Task

WARMUP_STEPS = 20
_IGNORED = -100


def make_demo_model(task: Task, folder: Path, seed: int, architecture: tiny.Architecture = "gpt2") -> Path:
    """Build the tiny model of `task`, warm it up with the recommended settings, save it; returns `folder`."""
    tokenizer = tiny.build_tokenizer(task)
    model = tiny.build_model(task, seed, architecture)
    warm_start(model, tokenizer, task, seed)
    tiny.save(folder, model, tokenizer)
    return folder


def warm_start(
    model: nn.Module, tokenizer: PreTrainedTokenizerFast, task: Task, seed: int, steps: int | None = None
) -> list[float]:
    """Train `model` in place on fresh demonstrations; `steps` overrides the recommended number.

    AdamW (betas .9/.98, weight decay .01), gradient norm clipped at 1, linear warm-up over 20 steps. Returns
    the loss of every step, in nats per token of the policy.
    """
    settings = task.recommended
    rng = random.Random(f"{task.name}-warm-start-{seed}")
    lr = settings.warm_start_lr
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    losses = []
    model.train()
    with _one_thread():
        for step in range(1, (settings.warm_start_steps if steps is None else steps) + 1):
            for group in optimizer.param_groups:
                group["lr"] = lr * min(1.0, step / WARMUP_STEPS)
            demonstrations = task.demonstrations(
                settings.warm_start_batch_size, rng, settings.warm_start_noise
            )
            input_ids, targets = _as_batch(demonstrations, tokenizer)
            logits = model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids)).logits
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=_IGNORED)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    model.eval()
    return losses


def _as_batch(
    demonstrations: Sequence[Demonstration], tokenizer: PreTrainedTokenizerFast
) -> tuple[torch.Tensor, torch.Tensor]:
    """Input ids and next-token targets, both int64 [B, L-1].

    Padded on the right, where a causal model never looks: the attention mask can be all ones, the fast path.
    """
    vocabulary = tokenizer.get_vocab()
    pad = vocabulary[PAD]
    longest = max(len(demo.words) for demo in demonstrations)
    ids, targets = [], []
    for demo in demonstrations:
        tokens = [vocabulary[word] for word in demo.words]
        fill = longest - len(tokens)
        ids.append(tokens + [pad] * fill)
        targets.append(
            [token if on else _IGNORED for token, on in zip(tokens, demo.loss_mask, strict=True)]
            + [_IGNORED] * fill
        )
    return torch.tensor(ids)[:, :-1], torch.tensor(targets)[:, 1:]


@contextmanager
def _one_thread() -> Iterator[None]:
    """One torch thread: faster for matrices this small, and the sums do not depend on the machine's cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
