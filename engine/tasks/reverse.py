"""Reverse a string of digits: single-turn, of varying length, with an exact-match reward.

    reverse 3 1 4 =   ->   4 1 3 <eos>      reward 1

The warm start shows answers of which two in five have one digit overwritten, so the first policy is right about
two times in three, and RL makes it reliable.
"""

import random
import zlib

import msgspec

from engine.tasks.base import EOS, SPECIAL_WORDS, Demonstration, Recommended, Row, response_words

PROMPT, EQUALS = "reverse", "="
SHORTEST, LONGEST = 3, 6  # digits
TRAINING_ROWS = 4096
HELD_OUT_SHARE = 8  # one string in 8 is never trained on
_DIGITS = tuple("0123456789")


def is_held_out(digits: str) -> bool:
    """Whether a string such as "314" belongs to the evaluation. Fixed by its digits, whatever the seeds."""
    return zlib.crc32(digits.encode()) % HELD_OUT_SHARE == 0


def score(label: str, response: str) -> float:
    """1.0 iff the response is the label, with one end-of-sequence word after it or none; else 0.0."""
    words = response_words(response)
    if words and words[-1] == EOS:
        words = words[:-1]
    return float(words == label.split())


class ReverseTask(msgspec.Struct, frozen=True):
    """Reversal as a task (see engine.tasks.base.Task). It has no state and no options."""

    @property
    def name(self) -> str:
        return "reverse"

    @property
    def words(self) -> tuple[str, ...]:
        return (*SPECIAL_WORDS, PROMPT, EQUALS, *_DIGITS)

    @property
    def max_length(self) -> int:
        return (1 + LONGEST + 1) + (LONGEST + 1)

    @property
    def recommended(self) -> Recommended:
        return Recommended(
            rollout_max_response_len=LONGEST + 1,
            num_steps=120,
            lr=7e-4,
            lr_end=1e-4,
            num_layers=2,
            warm_start_steps=300,
            warm_start_batch_size=64,
            warm_start_lr=2e-3,
            warm_start_noise=0.4,
        )

    def rows(self, n: int | None = None, seed: int = 0) -> list[Row]:
        """`n` (4096) random strings, lengths equally often, none of them held out. Repeats can occur."""
        rng = random.Random(f"reverse-rows-{seed}")
        return [_row(_draw(rng, held_out=False)) for _ in range(TRAINING_ROWS if n is None else n)]

    def held_out(self, n: int, seed: int = 0) -> list[Row]:
        """`n` random strings that no training rows and no demonstrations hold."""
        rng = random.Random(f"reverse-held-out-{seed}")
        return [_row(_draw(rng, held_out=True)) for _ in range(n)]

    def demonstrations(self, n: int, rng: random.Random, noise: float) -> list[Demonstration]:
        """Answers of which a share of `noise` has one digit overwritten by a random one."""
        return [_sloppy_answer(rng, noise) for _ in range(n)]

    def score(self, label: str, response: str) -> float:
        return score(label, response)


REVERSE = ReverseTask()


def _draw(rng: random.Random, held_out: bool) -> str:
    while True:
        length = rng.randint(SHORTEST, LONGEST)
        digits = "".join(rng.choice(_DIGITS) for _ in range(length))
        if is_held_out(digits) == held_out:
            return digits


def _prompt(digits: str) -> str:
    return " ".join((PROMPT, *digits, EQUALS))


def _row(digits: str) -> Row:
    metadata = {"task": "reverse", "length": len(digits)}
    return {"prompt": _prompt(digits), "label": " ".join(reversed(digits)), "metadata": metadata}


def _sloppy_answer(rng: random.Random, noise: float) -> Demonstration:
    digits = _draw(rng, held_out=False)
    answer = list(reversed(digits))
    if rng.random() < noise:
        answer[rng.randrange(len(answer))] = rng.choice(_DIGITS)
    prompt, response = _prompt(digits).split(), (*answer, EOS)
    return Demonstration((*prompt, *response), (0,) * len(prompt) + (1,) * len(response))
