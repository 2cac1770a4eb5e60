"""Log-probs and entropies over a vocabulary that is cut over tensor-parallel ranks, without gathering the logits.

With z the logits, m their largest, Z = Σ exp(z − m) over all ranks:

    log p(t) = z(t) − m − log Z            ∂/∂z = 1[t] − p
    H = log Z − Σ p · (z − m)              ∂/∂z = −p · (log p + H)

Three sums and one maximum of each position cross the ranks, as in Megatron-LM's vocab-parallel cross entropy
(Shoeybi et al., arXiv 1909.08053, section 3), with the entropy added.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.algorithms.logprobs import TokenLogprobs


def vocab_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    first: int,
    real: int,
    group: Any = None,
    temperature: float = 1.0,
    with_entropy_gradient: bool = False,
) -> TokenLogprobs:
    """Of the tempered policy softmax(logits / temperature), the same on every rank of `group` (None: there is one).

    logits [n, v]: this rank's columns, of tokens `first` … first + v; from column `real` on they stand for no token.
    targets [n]: of the whole vocabulary.
    """
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    if real < logits.shape[1]:
        logits = logits.masked_fill(torch.arange(logits.shape[1], device=logits.device) >= real, -torch.inf)
    logprobs, entropy = _VocabLogprobs.apply(logits, targets, first, group)  # pyright: ignore[reportGeneralTypeIssues]
    return TokenLogprobs(logprobs, entropy if with_entropy_gradient else entropy.detach())


class _VocabLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, group: Any) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        top = logits.amax(-1)
        if group is not None:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - top[:, None]
        place = targets - first
        is_here = (place >= 0) & (place < logits.shape[1])
        place = place.clamp(0, logits.shape[1] - 1)
        picked = shifted.gather(1, place[:, None])[:, 0].masked_fill(~is_here, 0.0)
        # a column that stands for no token has −inf, and 0 · −inf would be NaN
        weights = shifted.exp()
        weighted = (weights * shifted.clamp_(min=torch.finfo(shifted.dtype).min)).sum(-1)
        sums = torch.stack([picked, weights.sum(-1), weighted])
        if group is not None:
            dist.all_reduce(sums, group=group)
        picked, total, weighted = sums
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(weights.div_(total[:, None]), entropy, place, is_here)
        return picked - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        of_logprobs, of_entropy = grads
        p, entropy, place, is_here = ctx.saved_tensors
        grad = torch.zeros_like(p) if of_logprobs is None else p * -of_logprobs[:, None]
        if of_logprobs is not None:
            taken = torch.arange(len(place), device=place.device), place  # one of each row: no sums, no order
            grad[taken] = grad[taken] + of_logprobs * is_here
        if of_entropy is not None:
            log_p = p.log().clamp_(min=torch.finfo(p.dtype).min)
            grad -= of_entropy[:, None] * p * (log_p + entropy[:, None])
        return grad, None, None, None
