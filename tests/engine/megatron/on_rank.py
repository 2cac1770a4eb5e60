"""What ranks do in tests of the megatron trainer (tests/engine/megatron/lab.py): the functions that are run there."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from transformers import AutoModelForCausalLM

from engine.algorithms.logprobs import MicroBatch
from engine.interfaces import BadStep, CheckpointError, TrainBatch
from engine.trainer.parts import PartSettings
from engine.trainer.plan import plan_step
from engine.trainer.rank import Rank
from engine.trainer.ranks import ProcessGroup
from engine.trainer.split import split
from engine.trainer.stepper import Measured
from engine.trainer.torch_settings import TorchSettings

Options = dict[str, Any]


def import_all() -> None:
    """What a rank would import otherwise, each for itself."""
    import importlib

    for name in ("qwen3", "llama", "qwen2", "qwen3_moe"):
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    importlib.import_module("torch.distributed.checkpoint")
    importlib.import_module("engine.trainer.megatron.part")


def make(processes: ProcessGroup, folder: str, options: Options, **settings: Any) -> Rank:
    of_torch = TorchSettings(**{"lr": 0.01, "threads": 1} | settings)
    return Rank(PartSettings(backend="megatron", model=folder, torch=of_torch, options=options), processes)


def take(rank: Rank, batch: TrainBatch) -> Measured:
    """This rank's share of one step."""
    shares = split(plan_step(batch, rank.stepper.settings), rank.ranks.size)
    return rank.stepper.take(shares[rank.ranks.rank].plan)


def whole_weights(rank: Rank) -> dict[str, torch.Tensor]:
    """As published: on rank 0."""
    came = {name: tensor.detach().clone() for name, tensor in rank.part.weights()}
    if rank.processes.rank:
        return {}
    layout = rank.part.layout
    shared = {id(layout[name]): tensor for name, tensor in came.items()}
    for name, meta in layout.items():
        assert (meta.shape, meta.dtype) == (shared[id(meta)].shape, shared[id(meta)].dtype), name
    return {name: shared[id(meta)] for name, meta in layout.items()}


def bits(rank: Rank) -> list[bytes]:
    """Of all that this rank's optimizer and model hold."""
    policy: Any = rank.part.policy
    state = [*policy._state(), *(s for s in [torch.tensor(_steps(policy))])]
    return [each.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for each in state]


def _steps(policy: Any) -> int:
    from engine.trainer.megatron.held import step_count

    return step_count(policy.optimizer)


# ---------------------------------------------------------------- run by tests
def logits_differ_by(processes: ProcessGroup, folder: str, options: Options, attention: str) -> float:
    """Largest difference from Hugging Face's logits."""
    rank = make(processes, folder, options, attn_implementation=attention)
    ids = torch.randint(0, 23, (3, 12), generator=torch.Generator().manual_seed(1))
    policy: Any = rank.part.policy
    model = policy.model
    group: Any = parallel_state.get_tensor_model_parallel_group()
    nobody = torch.zeros(36, dtype=torch.int64)
    micro = MicroBatch(ids, torch.arange(36), nobody, nobody.numpy())
    with torch.no_grad(), policy._trained_positions(model, micro):
        columns = model(ids, torch.arange(12).expand_as(ids), None)[0].contiguous()
        every = [torch.empty_like(columns) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, columns, group=group)
        logits = torch.cat(every, dim=-1)[:, :23].reshape(3, 12, 23)
        theirs: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)
        return float((logits - theirs.eval()(input_ids=ids).logits).abs().max())


def weights_out(
    processes: ProcessGroup, folder: str, options: Options, dtype: str
) -> dict[str, torch.Tensor]:
    return whole_weights(make(processes, folder, options, dtype=dtype))


def steps(
    processes: ProcessGroup,
    folder: str,
    options: Options,
    settings: dict[str, Any],
    batches: list[TrainBatch],
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """((loss, gradient norm) of each step, weights)."""
    rank = make(processes, folder, options, **settings)
    measured = [take(rank, batch) for batch in batches]
    return [(each.loss, each.grad_norm) for each in measured], whole_weights(rank)


def bad_step(
    processes: ProcessGroup,
    folder: str,
    options: Options,
    settings: dict[str, Any],
    batches: list[TrainBatch],
) -> tuple[str, bool, bool]:
    """A good step, a bad one, and the good one again: (reason, nothing was changed, the last was taken)."""
    rank = make(processes, folder, options, **settings)
    good, bad = batches
    take(rank, good)
    before, count, reason = bits(rank), rank.stepper.optimizer_steps, ""
    try:
        take(rank, bad)
    except BadStep as error:
        reason = error.reason
    unchanged = bits(rank) == before and rank.stepper.optimizer_steps == count
    loss = take(rank, good).loss
    other = bits(rank)
    return reason, unchanged, math.isfinite(loss) and other != before


def save(
    processes: ProcessGroup,
    folder: str,
    options: Options,
    settings: dict[str, Any],
    batches: list[TrainBatch],
    into: str,
) -> tuple[dict[str, torch.Tensor], list[tuple[float, float]], dict[str, torch.Tensor]]:
    """All but the last batch, saved; while the last is taken, the files are written on another thread."""
    import threading

    rank = make(processes, folder, options, **settings)
    for batch in batches[:-1]:
        take(rank, batch)
    write, then = rank.snapshot(), whole_weights(rank)
    thread = threading.Thread(target=write, args=(Path(into),))
    thread.start()
    last = take(rank, batches[-1])
    thread.join(60)
    assert not thread.is_alive()
    return then, [(last.loss, last.grad_norm)], whole_weights(rank)


def load(
    processes: ProcessGroup,
    folder: str,
    options: Options,
    settings: dict[str, Any],
    batches: list[TrainBatch],
    saved: str,
    fresh: bool = False,
) -> tuple[dict[str, torch.Tensor], list[tuple[float, float]], dict[str, torch.Tensor]]:
    rank = make(processes, folder, options, **settings)
    rank.load(Path(saved), fresh_optimizer=fresh, optimizer_steps=len(batches) - 1)
    then = whole_weights(rank)
    last = take(rank, batches[-1])
    return then, [(last.loss, last.grad_norm)], whole_weights(rank)


def load_fails(
    processes: ProcessGroup, folder: str, options: Options, saved: list[str]
) -> list[tuple[str, bool]]:
    """(message, nothing was changed) of each folder; rank 0 is given the first half of it in place of each file."""
    rank = make(processes, folder, options)
    answers = []
    for each in saved:
        before, message = bits(rank), ""
        try:
            rank.part.load(Path(each))
        except CheckpointError as error:
            message = str(error)
        answers.append((message, bits(rank) == before))
    return answers


def refusals(processes: ProcessGroup, cases: list[tuple[str, Options, dict[str, Any]]]) -> list[str]:
    from streams.errors import ConfigError

    answers = []
    for folder, options, settings in cases:
        try:
            make(processes, folder, options, **settings)
            answers.append("")
        except ConfigError as error:
            answers.append(str(error))
        finally:
            if parallel_state.model_parallel_is_initialized():
                parallel_state.destroy_model_parallel()
    return answers


def vocabulary_cut(processes: ProcessGroup, seed: int, with_entropy: bool) -> tuple[float, float, float]:
    """Largest differences of log-probs, entropies and gradients from those of one rank with all logits."""
    from engine.trainer.megatron.vocab import vocab_logprobs

    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(7, 11, generator=generator, dtype=torch.float64).float() * 3
    targets = torch.randint(0, 11, (7,), generator=generator)
    weights = torch.randn(7, generator=generator)

    whole = logits.clone().requires_grad_()
    logp = (whole / 0.7).log_softmax(-1)
    picked, entropy = logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    ((picked + with_entropy * entropy.cos()) * weights).sum().backward()

    per_rank = -(-11 // processes.size)
    first = processes.rank * per_rank
    own = torch.cat([logits, torch.full((7, per_rank * processes.size - 11), 55.0)], dim=1)
    own = own[:, first : first + per_rank].clone().requires_grad_()
    now = vocab_logprobs(
        own,
        targets,
        first=first,
        real=min(per_rank, 11 - first),
        group=dist.group.WORLD,
        temperature=0.7,
        with_entropy_gradient=with_entropy,
    )
    loss = now.logprobs + now.entropy.cos() if with_entropy else now.logprobs
    (loss * weights).sum().backward()
    assert own.grad is not None and whole.grad is not None
    real = min(per_rank, 11 - first)
    grad = (own.grad[:, :real] - whole.grad[:, first : first + real]).abs().max()
    assert not own.grad[:, real:].any()
    return (
        float((now.logprobs - picked).abs().max()),
        float((now.entropy - entropy).abs().max()),
        float(grad),
    )
