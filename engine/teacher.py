"""The teacher of on-policy distillation: a local Hugging Face model that says how likely it finds a sample's tokens.

Log-probs are those of its plain distribution, at temperature 1: a teacher is not sampled, it is listened to. With
rollout.rollout_temperature other than 1 the policy's tempered distribution is what moves towards it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from consumers.enrichers.teacher import Refused
from engine import devices
from engine.algorithms.logprobs import flatten, micro_batches, token_logprobs
from engine.devices.moving import moved
from engine.interfaces import TrainSample
from engine.trainer.torch_backend import Limits, load_model
from engine.trainer.torch_settings import TorchSettings
from streams.errors import ConfigError
from streams.trajectory import Payload


class TorchTeacher:
    """`TorchTeacher(folder, model_folder).score(payloads)` → log-probs of each sample, or why it cannot be scored.

    Raises ConfigError when it is made, if a token id does not mean the same to both models.
    """

    def __init__(
        self,
        folder: Path,
        policy_folder: Path,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        attn_implementation: str = "sdpa",
        micro_batch_tokens: int = 8192,
    ) -> None:
        check_tokens(folder, policy_folder)
        self.name, self.device = folder.name, devices.ready(device, key="teacher.device").torch
        settings = TorchSettings(device=device, attn_implementation=attn_implementation)
        model = load_model(folder, settings, key="teacher.path").requires_grad_(False)
        self._model = moved(model, self.device, getattr(torch, dtype))
        self._limits, self._most = Limits.of(model), micro_batch_tokens

    @torch.no_grad()
    def score(self, payloads: Sequence[Payload]) -> list[NDArray[np.float32] | Refused]:
        refusals = [self._limits.refuses(payload) for payload in payloads]
        fit = [payload for payload, refusal in zip(payloads, refusals, strict=True) if not refusal]
        scored = iter(self._logprobs(fit))
        return [_refused(refusal) if refusal else next(scored) for refusal in refusals]

    def _logprobs(self, payloads: Sequence[Payload]) -> list[NDArray[np.float32]]:
        flat = flatten([TrainSample("", payload, payload.loss_mask, 0.0) for payload in payloads])
        found = np.zeros(len(flat.targets), np.float32)
        for micro in micro_batches(flat, np.arange(len(payloads)), self._most, self.device):
            found[micro.tokens] = token_logprobs(self._model, micro).logprobs.float().cpu().numpy()
        return np.split(found, flat.token_starts[1:-1]) if payloads else []


def check_tokens(teacher: Path, policy: Path) -> None:
    """Both folders' tokenizers must give every token the same id: log-probs are compared token by token."""
    own, other = _vocabulary(policy, "model.path"), _vocabulary(teacher, "teacher.path")
    if own == other:
        return
    token = min(token for token in own.keys() | other.keys() if own.get(token) != other.get(token))
    raise ConfigError(
        f"teacher.path = {str(teacher)!r}: its tokens are not those of model.path ({token!r} is "
        f"{_id(other, token)} there and {_id(own, token)} here); a teacher must have the very tokenizer of the policy"
    )


def _vocabulary(folder: Path, key: str) -> dict[str, int]:
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key} = {str(folder)!r}: its tokenizer cannot be loaded ({error})") from error
    return tokenizer.get_vocab()


def _id(vocabulary: dict[str, int], token: str) -> str:
    return f"id {vocabulary[token]}" if token in vocabulary else "unknown"


def _refused(refusal: str) -> Refused:
    return Refused("bad_token_id" if refusal.startswith("token") else "too_long", refusal)
