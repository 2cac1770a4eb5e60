"""One training step on one rank: minibatches, losses, bad steps, measures. The same code for every backend.

[log-probs as the step begins,  ─► for each minibatch:
 under the reference model]         [log-probs now ─► tokens that m2po masks]
                                    micro-batches: log-probs ─► loss · weights / divisor ─► backward
                                    loss and gradient finite, on all ranks? ─► clip ─► optimizer
anything not finite ─► every bit as before the step, on every rank, and BadStep
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.algorithms.logprobs import FlatBatch, MicroBatch, TokenLogprobs, ranges
from engine.algorithms.losses import LossSettings, TokenInputs, token_loss
from engine.algorithms.proximal import interpolated
from engine.algorithms.ratios import Sequences
from engine.algorithms.reference_kl import reference_kl, unbiased
from engine.algorithms.returns import discounted_returns, kl_terms, normalized, token_rewards
from engine.algorithms.second_moment import outliers
from engine.devices.moving import on_device
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
    is_masked: NDArray[np.bool_]  # [N]
    loss: float  # of several minibatches the mean, by their divisors
    grad_norm: float  # before clipping; of several minibatches the largest
    lr: float  # of the last minibatch
    entropy: float  # mean over the trained tokens
    kl: float | None  # mean KL term to the reference model over the trained tokens; None: there is none
    n_tokens: int
    n_padded_tokens: int


class _Frozen(NamedTuple):
    """Log-probs [N] that the step does not change."""

    proximal: Tensor | None  # as the step begins; None: not asked for, or its only minibatch begins with them
    reference: Tensor | None  # None: no term to a reference model


class Stepper:
    """Takes steps on a policy. `rate(n)` is the learning rate of optimizer step n = 1, 2, …

    `optimizer_steps` counts those taken; a checkpoint keeps it.
    """

    def __init__(
        self, policy: Policy, ranks: Ranks, settings: TorchSettings, rate: Callable[[int], float]
    ) -> None:
        self.policy, self.ranks, self.settings, self._rate = policy, ranks, settings, rate
        self._loss_settings = loss_settings(settings)
        self.optimizer_steps = 0

    def take(self, plan: Plan, *, learn: bool = True) -> Measured:
        """Raises BadStep, on all ranks alike. Not to `learn` is to measure alone: the policy stays as it is."""
        several = len(plan.parts) > 1
        before = self.optimizer_steps
        put_back = (
            self.policy.copy_state() if several else None
        )  # one part changes nothing before it is judged
        try:
            plan = self._discounted(plan)
            frozen = self._frozen(plan)
            results = [self._minibatch(plan.flat, part, frozen, learn=learn) for part in plan.parts]
        except BaseException:
            if put_back is not None:
                put_back()
                self.optimizer_steps = before
            raise
        finally:
            self.policy.forget_gradient()
        return _measured(plan.flat, results, has_kl=self.settings.kl_loss_coef > 0)

    def _frozen(self, plan: Plan) -> _Frozen:
        proximal = reference = None
        rows = np.sort(np.concatenate([part.rows for part in plan.parts]))
        if len(plan.parts) > 1 and self.settings.needs_proximal:
            proximal = self._scored(plan.flat, self.policy.micro_batches(plan.flat, rows), self.policy.score)
        if self.settings.kl_loss_coef > 0:
            micros = self.policy.micro_batches(plan.flat, rows)
            reference = self._scored(plan.flat, micros, self.policy.score_reference)
        return _Frozen(proximal, reference)

    def penalties(self, plan: Plan) -> NDArray[np.float64] | None:
        """What is taken from the reward of each token [N], for its KL to the reference model; None: nothing.

        Of the policy that sampled, whose log-probs are recorded: a reward is no matter of what became of it since.
        """
        if not self.settings.kl_coef > 0:
            return None
        rows = np.sort(np.concatenate([part.rows for part in plan.parts]))
        micros = self.policy.micro_batches(plan.flat, rows)
        reference = self._scored(plan.flat, micros, self.policy.score_reference).cpu().numpy()
        return self.settings.kl_coef * kl_terms(plan.flat.behaviour - reference, self.settings.kl_reward_type)

    def _discounted(self, plan: Plan) -> Plan:
        """REINFORCE++ where the tokens of a sample differ: its advantages are made of rewards here, for all ranks."""
        if not self.settings.discounts:
            return plan
        flat = plan.flat
        rewards = token_rewards(flat.advantages, flat.token_starts, self.penalties(plan))
        returns = discounted_returns(rewards, flat.token_starts, self.settings.gamma)
        advantages = normalized(returns, self.ranks.sum).astype(np.float32)
        return plan._replace(flat=flat._replace(advantages=advantages))

    def _minibatch(self, flat: FlatBatch, part: Part, frozen: _Frozen, *, learn: bool) -> _Result:
        """Gradient of one minibatch's loss, then one optimizer step. Raises BadStep."""
        seen: list[_Seen] = []
        micros = self.policy.micro_batches(flat, part.rows)
        masked = self._outliers(flat, part, micros)

        def loss_of(micro: MicroBatch, now: TokenLogprobs) -> Tensor:
            loss, each = self._loss_of(flat, micro, now, frozen, masked, part.divisor)
            seen.append(each)
            return loss

        self.policy.backward(micros, loss_of)
        loss, entropy, kl, n_padded = self.ranks.sum(_totals(seen))
        if not math.isfinite(loss):
            raise BadStep("nonfinite_loss", f"loss {loss} over {part.n_tokens} tokens")
        norm = self.policy.clip_gradient(self.settings.clip_grad or math.inf)
        if not math.isfinite(norm):
            raise BadStep("nonfinite_gradient", f"gradient norm {norm} over {part.n_tokens} tokens")
        rate = 0.0
        if learn:
            self.optimizer_steps += 1
            rate = self._rate(self.optimizer_steps)
            self.policy.apply(rate)
        self.policy.forget_gradient()
        return _Result(seen, part, loss, norm, rate, entropy, kl, int(n_padded))

    def _outliers(self, flat: FlatBatch, part: Part, micros: Sequence[MicroBatch]) -> Tensor | None:
        """Bool [N]: what m2po masks of this minibatch; None: another loss, or its one forward can tell by itself."""
        if self.settings.loss != "m2po" or (self.ranks.size == 1 and len(micros) == 1):
            return None
        rows = _places_of(flat, part.rows)
        now = self._scored(flat, micros, self.policy.score)[on_device(rows, self.policy.device)]
        result = torch.zeros(len(flat.targets), dtype=torch.bool, device=self.policy.device)
        behaviour, advantages = self._of(flat.behaviour, rows), self._of(flat.advantages, rows)
        limit = self.settings.m2_threshold
        result[on_device(rows, self.policy.device)] = outliers(
            now - behaviour, advantages, limit, self.ranks.sum
        )
        return result

    def _loss_of(
        self,
        flat: FlatBatch,
        micro: MicroBatch,
        now: TokenLogprobs,
        frozen: _Frozen,
        masked: Tensor | None,
        divisor: float,
    ) -> tuple[Tensor, _Seen]:
        """One micro-batch's share of the loss, and what is kept of it."""
        settings = self.settings
        inputs = self._inputs(flat, micro, now.logprobs, frozen, masked)
        per_token, is_clipped, is_masked = token_loss(settings.loss_function, inputs, self._loss_settings)
        if settings.entropy_coef > 0:
            per_token = per_token - settings.entropy_coef * now.entropy
        kl = None
        if frozen.reference is not None:
            kl = reference_kl(now.logprobs, frozen.reference[self._places(micro)], settings.kl_loss_type)
            if settings.use_unbiased_kl:
                kl = unbiased(kl, now.logprobs, inputs.behaviour)
            per_token = per_token + settings.kl_loss_coef * kl
        if flat.weights is not None:
            per_token = per_token * self._of(flat.weights, micro.tokens)
        loss = per_token.sum() / divisor
        seen = _Seen(
            tokens=micro.tokens,
            logprobs=now.logprobs.detach(),
            loss=loss.detach(),
            is_clipped=is_clipped,
            is_masked=is_masked,
            entropy=now.entropy.detach().sum(),
            kl=None if kl is None else kl.detach().sum(),
            n_padded=micro.ids.numel(),
        )
        return loss, seen

    def _inputs(
        self, flat: FlatBatch, micro: MicroBatch, logprobs: Tensor, frozen: _Frozen, masked: Tensor | None
    ) -> TokenInputs:
        behaviour = self._of(flat.behaviour, micro.tokens)
        if self.settings.interpolates:
            proximal = interpolated(logprobs, behaviour, self._of(flat.ages, micro.tokens))
        elif frozen.proximal is not None:
            proximal = frozen.proximal[self._places(micro)]
        else:  # with one minibatch the step begins with these very weights
            proximal = logprobs.detach()
        _, of_token = np.unique(flat.sample[micro.tokens], return_inverse=True)
        return TokenInputs(
            logprobs,
            behaviour,
            proximal,
            advantages=self._of(flat.advantages, micro.tokens),
            sequences=Sequences(on_device(of_token, self.policy.device), int(of_token.max(initial=-1)) + 1),
            teacher=None if flat.teacher is None else self._of(flat.teacher, micro.tokens),
            outliers=None if masked is None else masked[self._places(micro)],
        )

    def _scored(self, flat: FlatBatch, micros: Sequence[MicroBatch], score: _Score) -> Tensor:
        """Log-probs [N], set where these micro-batches have a token."""
        result = torch.zeros(len(flat.targets), device=self.policy.device)
        for micro, logprobs in score(micros):
            result[self._places(micro)] = logprobs
        return result

    def _of(self, values: NDArray[Any], tokens: NDArray[np.int64]) -> Tensor:
        return on_device(values[tokens], self.policy.device)

    def _places(self, micro: MicroBatch) -> Tensor:
        return on_device(micro.tokens, self.policy.device)


def loss_settings(settings: TorchSettings) -> LossSettings:
    return LossSettings(
        eps_clip=settings.eps_clip,
        eps_clip_high=settings.eps_clip_high,
        eps_clip_c=settings.eps_clip_c,
        m2_threshold=settings.m2_threshold,
        tis_clip=settings.tis_clip,
        tis_clip_low=settings.tis_clip_low,
        tis_mode=settings.tis_mode,
        tis_level=settings.tis_level,
        tis_veto=settings.tis_veto,
        opsm_delta=settings.opsm_delta if settings.use_opsm else None,
    )


_Score = Callable[[Sequence[MicroBatch]], Iterator[tuple[MicroBatch, Tensor]]]


class _Seen(NamedTuple):
    """What is kept of one micro-batch of n trained tokens; tensors stay on the device until the step is over."""

    tokens: NDArray[np.int64]  # [n] places in the FlatBatch
    logprobs: Tensor  # [n]
    loss: Tensor  # this micro-batch's share
    is_clipped: Tensor  # bool [n]
    is_masked: Tensor  # bool [n]
    entropy: Tensor  # sum
    kl: Tensor | None  # sum
    n_padded: int


class _Result(NamedTuple):
    """One minibatch; all but `seen` is over all ranks."""

    seen: list[_Seen]
    part: Part
    loss: float
    grad_norm: float  # before clipping
    lr: float
    entropy: float  # sum
    kl: float  # sum; 0 without such a term
    n_padded: int


def _places_of(flat: FlatBatch, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places of the trained tokens of these rows."""
    return ranges(flat.token_starts[rows], flat.token_starts[rows + 1] - flat.token_starts[rows])


def _totals(seen: Sequence[_Seen]) -> list[float]:
    """Of this rank: loss, sums of the entropies and of the KL term, padded tokens."""
    loss = float(torch.stack([each.loss for each in seen]).sum()) if seen else 0.0
    entropy = sum(float(each.entropy) for each in seen)
    kl = sum(float(each.kl) for each in seen if each.kl is not None)
    return [loss, entropy, kl, float(sum(each.n_padded for each in seen))]


def _measured(flat: FlatBatch, results: Sequence[_Result], *, has_kl: bool) -> Measured:
    logprobs = np.empty(len(flat.targets), np.float32)
    is_clipped = np.zeros(len(flat.targets), bool)
    is_masked = np.zeros(len(flat.targets), bool)
    for each in (each for result in results for each in result.seen):
        logprobs[each.tokens] = each.logprobs.cpu().numpy()
        is_clipped[each.tokens] = each.is_clipped.cpu().numpy()
        is_masked[each.tokens] = each.is_masked.cpu().numpy()
    n_tokens = sum(result.part.n_tokens for result in results)
    divisor = sum(result.part.divisor for result in results)
    return Measured(
        logprobs,
        is_clipped,
        is_masked,
        loss=sum(result.loss * result.part.divisor for result in results) / divisor,
        grad_norm=max(result.grad_norm for result in results),
        lr=results[-1].lr,
        entropy=sum(result.entropy for result in results) / n_tokens,
        kl=sum(result.kl for result in results) / n_tokens if has_kl else None,
        n_tokens=n_tokens,
        n_padded_tokens=sum(result.n_padded for result in results),
    )
