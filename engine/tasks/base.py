"""What a demo task is: data, a vocabulary, noisy demonstrations, a reward, and the settings it learns with.

Nothing here imports torch: the feeder and the reward stage use tasks too.
"""

import random
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
SPECIAL_WORDS = (PAD, BOS, EOS, UNK)  # ids 0..3 in every demo vocabulary

# One line of the dataset file: {"prompt": str, "label": str, "metadata": dict}. Plain JSON values only.
Row = dict[str, Any]


class Demonstration(msgspec.Struct, frozen=True):
    """One complete episode for the warm start, as words. Both tuples have the same length."""

    words: tuple[str, ...]
    loss_mask: tuple[int, ...]  # 1 where the policy spoke, 0 on the prompt and on what the environment said


class Recommended(msgspec.Struct, frozen=True, kw_only=True):
    """Settings with which a task was seen to learn on a CPU, for lags of 0 to 4 versions.

    GRPO advantages (group mean and std), PPO clip on the behaviour log-probs, mean over tokens, one optimizer
    step per batch, no KL and no entropy term.
    """

    # rollout
    rollout_batch_size: int = 32  # groups per step
    n_samples_per_prompt: int = 8
    rollout_temperature: float = 1.0
    rollout_max_response_len: int  # tokens, what the environment says included
    # optimizer
    num_steps: int
    lr: float  # at the start
    lr_end: float  # `lr` holds for half of the steps, then falls in a line to `lr_end`
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    weight_decay: float = 0.0
    eps_clip: float = 0.2
    clip_grad: float = 1.0  # global norm
    # model
    num_layers: int
    hidden_size: int = 64
    num_heads: int = 4
    # warm start
    warm_start_steps: int
    warm_start_batch_size: int = 128  # demonstrations
    warm_start_lr: float
    warm_start_noise: float  # share of spoiled guesses (guess) or of spoiled demonstrations (reverse)

    def lr_at(self, step: int) -> float:
        """Learning rate of step 1..num_steps; `lr_end` for every later one.

        Old samples cost in proportion to how far one step moves the policy, so the fall at the end is what keeps
        a finished policy from being shaken again when the lag is 2 or 4.
        """
        half = self.num_steps / 2
        fallen = min(max((step - half) / half, 0.0), 1.0)
        return self.lr + (self.lr_end - self.lr) * fallen


class Task(Protocol):
    """All that the engine asks of a demo task. Every method is a pure function of its arguments."""

    @property
    def name(self) -> str: ...

    @property
    def words(self) -> tuple[str, ...]:
        """The vocabulary; the place of a word is its token id."""
        ...

    @property
    def max_length(self) -> int:
        """Tokens of the longest prompt with the longest response."""
        ...

    @property
    def recommended(self) -> Recommended: ...

    def rows(self, n: int | None = None, seed: int = 0) -> list[Row]:
        """Training rows; `n=None` gives the usual number."""
        ...

    def held_out(self, n: int, seed: int = 0) -> list[Row]:
        """Rows to evaluate on."""
        ...

    def demonstrations(self, n: int, rng: random.Random, noise: float) -> list[Demonstration]:
        """Episodes of an imperfect player for the warm start; never of a held-out prompt."""
        ...

    def score(self, label: str, response: str) -> float:
        """Reward in [0, 1] of a response, decoded to words with special tokens kept."""
        ...


def response_words(response: str | Sequence[str]) -> list[str]:
    """The words of a response given as text (separated by blanks) or as words."""
    return response.split() if isinstance(response, str) else list(response)
