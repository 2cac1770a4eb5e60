"""One training step on one rank: minibatches, losses, bad steps, measures. The same code for every backend.

[log-probs as the step begins] ─► for each minibatch:
                                    micro-batches: log-probs ─► loss / divisor ─► backward
                                    loss and gradient finite, on all ranks? ─► clip ─► optimizer
anything not finite ─► every bit as before the step, on every rank, and BadStep
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.algorithms.logprobs import FlatBatch, MicroBatch, TokenLogprobs
from engine.algorithms.losses import LOSSES, LossSettings, TokenInputs
from engine.interfaces import BadStep
from engine.trainer.plan import Part, Plan
from engine.trainer.policy import Policy, Ranks
from engine.trainer.torch_settings import TorchSettings


class Measured(NamedTuple):
    """Of one rank's rows; the numbers at the end are of the whole step, the same on every rank."""

    logprobs: NDArray[
        np.float32
    ]  # [N] in the order of the plan's FlatBatch, each at the forward that trained it
    is_clipped: NDArray[np.bool_]  # [N]
    loss: float  # mean over the trained tokens of the step
    grad_norm: float  # before clipping; of several minibatches the largest
    lr: float  # of the last minibatch
    entropy: float  # mean over the trained tokens
    n_tokens: int
    n_padded_tokens: int


class Stepper:
    """Takes steps on a policy. `rate(n)` is the learning rate of optimizer step n = 1, 2, …

    `optimizer_steps` counts those taken; a checkpoint keeps it.
    """

    def __init__(
        self, policy: Policy, ranks: Ranks, settings: TorchSettings, rate: Callable[[int], float]
    ) -> None:
        self.policy, self.ranks, self.settings, self._rate = policy, ranks, settings, rate
        self._loss = LOSSES[settings.loss_function]
        self._loss_settings = LossSettings(
            eps_clip=settings.eps_clip,
            eps_clip_high=settings.eps_clip_high,
            tis_clip=settings.tis_clip,
            tis_mode=settings.tis_mode,
        )
        self.optimizer_steps = 0

    def take(self, plan: Plan) -> Measured:
        """Raises BadStep, on all ranks alike."""
        several = len(plan.parts) > 1
        before = self.optimizer_steps
        put_back = (
            self.policy.copy_state() if several else None
        )  # one part changes nothing before it is judged
        try:
            proximal = self._score(plan) if several and self.settings.needs_proximal else None
            results = [self._minibatch(plan.flat, part, proximal) for part in plan.parts]
        except BaseException:
            if put_back is not None:
                put_back()
                self.optimizer_steps = before
            raise
        finally:
            self.policy.forget_gradient()
        return _measured(plan.flat, results)

    def _minibatch(self, flat: FlatBatch, part: Part, proximal: Tensor | None) -> _Result:
        """Gradient of one minibatch's loss, then one optimizer step. Raises BadStep."""
        seen: list[_Seen] = []

        def loss_of(micro: MicroBatch, now: TokenLogprobs) -> Tensor:
            loss, each = self._loss_of(flat, micro, now, proximal, part.divisor)
            seen.append(each)
            return loss

        self.policy.backward(self.policy.micro_batches(flat, part.rows), loss_of)
        loss, entropy, n_padded = self.ranks.sum(_totals(seen))
        if not math.isfinite(loss):
            raise BadStep("nonfinite_loss", f"loss {loss} over {part.n_tokens} tokens")
        norm = self.policy.clip_gradient(self.settings.clip_grad or math.inf)
        if not math.isfinite(norm):
            raise BadStep("nonfinite_gradient", f"gradient norm {norm} over {part.n_tokens} tokens")
        self.optimizer_steps += 1
        rate = self._rate(self.optimizer_steps)
        self.policy.apply(rate)
        self.policy.forget_gradient()
        return _Result(seen, loss, norm, rate, entropy, part.n_tokens, int(n_padded))

    def _loss_of(
        self, flat: FlatBatch, micro: MicroBatch, now: TokenLogprobs, proximal: Tensor | None, divisor: float
    ) -> tuple[Tensor, _Seen]:
        """One micro-batch's share of the loss, and what is kept of it."""
        frozen = now.logprobs.detach()
        inputs = TokenInputs(
            now.logprobs,
            behaviour=self._of(flat.behaviour, micro),
            # with one minibatch the step begins with these very weights
            proximal=frozen if proximal is None else proximal[self._places(micro)],
            advantages=self._of(flat.advantages, micro),
        )
        per_token, is_clipped = self._loss(inputs, self._loss_settings)
        if self.settings.entropy_coef > 0:
            per_token = per_token - self.settings.entropy_coef * now.entropy
        loss = per_token.sum() / divisor
        entropy = now.entropy.detach().sum()
        return loss, _Seen(micro.tokens, frozen, loss.detach(), is_clipped, entropy, micro.ids.numel())

    def _score(self, plan: Plan) -> Tensor:
        """Log-probs [N] of the policy as it is now."""
        result = torch.empty(len(plan.flat.targets), device=self.policy.device)
        rows = np.sort(np.concatenate([part.rows for part in plan.parts]))
        for micro, logprobs in self.policy.score(self.policy.micro_batches(plan.flat, rows)):
            result[self._places(micro)] = logprobs
        return result

    def _of(self, values: NDArray[np.float32], micro: MicroBatch) -> Tensor:
        return torch.from_numpy(values[micro.tokens]).to(self.policy.device)

    def _places(self, micro: MicroBatch) -> Tensor:
        return torch.from_numpy(micro.tokens).to(self.policy.device)


class _Seen(NamedTuple):
    """What is kept of one micro-batch of n trained tokens; tensors stay on the device until the step is over."""

    tokens: NDArray[np.int64]  # [n] places in the FlatBatch
    logprobs: Tensor  # [n]
    loss: Tensor  # this micro-batch's share
    is_clipped: Tensor  # bool [n]
    entropy: Tensor  # sum
    n_padded: int


class _Result(NamedTuple):
    """One minibatch; all but `seen` is over all ranks."""

    seen: list[_Seen]
    loss: float
    grad_norm: float  # before clipping
    lr: float
    entropy: float  # sum
    n_tokens: int
    n_padded: int


def _totals(seen: Sequence[_Seen]) -> list[float]:
    """Of this rank: loss, sum of the entropies, padded tokens."""
    loss = float(torch.stack([each.loss for each in seen]).sum()) if seen else 0.0
    return [loss, sum(float(each.entropy) for each in seen), float(sum(each.n_padded for each in seen))]


def _measured(flat: FlatBatch, results: Sequence[_Result]) -> Measured:
    logprobs = np.empty(len(flat.targets), np.float32)
    is_clipped = np.zeros(len(flat.targets), bool)
    for each in (each for result in results for each in result.seen):
        logprobs[each.tokens] = each.logprobs.cpu().numpy()
        is_clipped[each.tokens] = each.is_clipped.cpu().numpy()
    n_tokens = sum(result.n_tokens for result in results)
    return Measured(
        logprobs,
        is_clipped,
        loss=sum(result.loss * result.n_tokens for result in results) / n_tokens,
        grad_norm=max(result.grad_norm for result in results),
        lr=results[-1].lr,
        entropy=sum(result.entropy for result in results) / n_tokens,
        n_tokens=n_tokens,
        n_padded_tokens=sum(result.n_padded for result in results),
    )
