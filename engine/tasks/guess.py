"""Guess the secret number: a multi-turn game with a tool, small enough to learn on one core.

The secret is one of 0..15. Each turn the policy says one word; the tool answers LOW (the guess is too low),
HIGH, HIT, or ? (not a number). The reward is 1 iff the secret is hit within 5 turns, else 0:

    policy  7        3       5       4
    tool       HIGH     LOW     HIGH    HIT        secret 4: reward 1

A player that guesses at random among the numbers still possible, and wildly one time in four, gets about 0.5;
bisection gets 1.0. No demonstration bisects on purpose: that is left for RL to find.
"""

import random

import msgspec

from engine.tasks.base import SPECIAL_WORDS, Demonstration, Recommended, Row, response_words

NUMBERS = 16
TURNS = 5
PROMPT = "guess"
LOW, HIGH, HIT, NOT_A_NUMBER = "LOW", "HIGH", "HIT", "?"
_NUMBER_WORDS = tuple(str(n) for n in range(NUMBERS))


def environment_reply(label: str | int, guess_token_text: str) -> str:
    """The tool's answer to one word of the policy. `label` is the secret."""
    secret, word = int(label), guess_token_text.strip()
    if word not in _NUMBER_WORDS:
        return NOT_A_NUMBER
    guess = int(word)
    return HIT if guess == secret else LOW if guess < secret else HIGH


def is_over(label: str | int, guesses: int, last_guess: str) -> bool:
    """True once the secret was hit or all turns are used. `guesses` counts `last_guess` too."""
    return guesses >= TURNS or environment_reply(label, last_guess) == HIT


def score(label: str | int, response: str) -> float:
    """1.0 iff one of the first 5 guesses hit. Guesses and replies take turns in `response`, a guess first.

    Judged by the guesses alone: a policy that says HIT itself gains nothing.
    """
    guesses = response_words(response)[0::2][:TURNS]
    return float(any(environment_reply(label, guess) == HIT for guess in guesses))


class GuessTask(msgspec.Struct, frozen=True):
    """The game as a task (see engine.tasks.base.Task). It has no state and no options."""

    @property
    def name(self) -> str:
        return "guess"

    @property
    def words(self) -> tuple[str, ...]:
        return (*SPECIAL_WORDS, PROMPT, LOW, HIGH, HIT, NOT_A_NUMBER, *_NUMBER_WORDS)

    @property
    def max_length(self) -> int:
        return 1 + 2 * TURNS

    @property
    def recommended(self) -> Recommended:
        return Recommended(
            rollout_max_response_len=2 * TURNS,
            num_steps=300,
            lr=3e-3,
            lr_end=3e-4,
            num_layers=1,
            warm_start_steps=200,
            warm_start_lr=3e-3,
            warm_start_noise=0.25,
        )

    def rows(self, n: int | None = None, seed: int = 0) -> list[Row]:
        """The 16 secrets in order, over and over if `n` is larger.

        The feeder shuffles every data epoch, so each 16 tasks hold every secret once; `seed` changes nothing.
        """
        return [_row(i % NUMBERS) for i in range(NUMBERS if n is None else n)]

    def held_out(self, n: int, seed: int = 0) -> list[Row]:
        """Every secret equally often, if `n` is a multiple of 16. Sample them at temperature 1.

        What is held out is the sampled episode: there are no further secrets.
        """
        return [_row(i % NUMBERS) for i in range(n)]

    def demonstrations(self, n: int, rng: random.Random, noise: float) -> list[Demonstration]:
        """Games of a naive player: any number still possible, or with probability `noise` any number."""
        return [_naive_game(rng, noise) for _ in range(n)]

    def score(self, label: str, response: str) -> float:
        return score(label, response)


GUESS = GuessTask()


def _row(secret: int) -> Row:
    return {"prompt": PROMPT, "label": str(secret), "metadata": {"task": "guess"}}


def _naive_game(rng: random.Random, noise: float) -> Demonstration:
    secret, lowest, highest = rng.randrange(NUMBERS), 0, NUMBERS - 1
    words, mask = [PROMPT], [0]
    for turn in range(1, TURNS + 1):
        is_wild = rng.random() < noise
        guess = rng.randrange(NUMBERS) if is_wild else rng.randint(lowest, highest)
        words.append(str(guess))
        mask.append(1)
        if is_over(secret, turn, str(guess)):
            break
        words.append(environment_reply(secret, str(guess)))
        mask.append(0)
        if guess < secret:
            lowest = max(lowest, guess + 1)
        else:
            highest = min(highest, guess - 1)
    return Demonstration(tuple(words), tuple(mask))
