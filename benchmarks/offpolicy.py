"""Which loss learns at which lag: the demo task `guess` with samples that are exactly so many versions old.

    versions 0 … v ──► the weights of version max(v − lag, 0) ──► decoder ──► episodes ──► TorchBackend.step ──► v + 1

All parts are the product's own (tiny model and warm start, decoder, advantages, trainer); only the daemons are left
out, since a live run has a mixture of ages and not one. Each step is one optimizer step and one version. The final
reward is the mean of the last five evaluations of the current policy. A cell takes some 20 CPU-seconds; finished ones
are kept in OUT/cells.jsonl and not run again, so that it may be stopped at any time.

    python benchmarks/offpolicy.py [--out runs/offpolicy]        a look: three losses, lags 1 and 8, one seed
    python benchmarks/offpolicy.py --full                         the table: 144 cells
    … [--losses ppo,m2po] [--lags 1,4] [--seeds 0,1,2] [--table]  others; print what is there, run nothing

Reference: a simulation of its own writing, with other code in every part, that this table is held against. It had the
same size of model, warm start, learning rate and number of steps.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from transformers.utils import logging as transformers_logging

from consumers.advantages import ESTIMATORS, Group
from engine.interfaces import Completion, EngineError, Sampling, TrainBatch, TrainSample, WeightsId
from engine.rollout.torch_decoder import Decoder, Request
from engine.rollout.torch_model import ServedModel
from engine.tasks import guess as game
from engine.tasks.base import Recommended
from engine.tasks.guess import GuessTask
from engine.tasks.warmstart import make_demo_model
from engine.trainer.torch_backend import TorchBackend
from engine.trainer.torch_settings import TorchSettings
from streams.trajectory import Payload

GROUPS, SAMPLES = 32, 8  # of one step
STEPS, LR = 240, 3e-3
EVALUATE_EVERY, EPISODES, LAST = 10, 512, 5

# what each row of the table is: settings of the trainer, and the estimator of its advantages
LOSSES: dict[str, dict[str, Any]] = {
    "none": {"loss": "ppo", "use_rollout_logprobs": False},
    "tis": {"loss": "tis", "tis_clip": 2.0},
    "decoupled_ppo": {"loss": "decoupled_ppo", "tis_clip": 5.0, "tis_mode": "mask"},
    "cispo": {"loss": "cispo", "eps_clip_high": 0.28},
    "ppo": {"loss": "ppo"},
    "reinforce++": {"loss": "ppo", "estimator": "reinforce_plus_plus_baseline"},
    "gspo": {"loss": "gspo", "eps_clip_high": 0.28},
    "m2po": {"loss": "m2po"},
    "interpolated": {
        "loss": "decoupled_ppo",
        "proximal_policy": "interpolated",
        "tis_clip": 5.0,
        "tis_mode": "mask",
    },
    "ppo+opsm": {"loss": "ppo", "use_opsm": True, "opsm_delta": 0.05},
    "icepop": {"loss": "decoupled_ppo", "tis_clip": 5.0, "tis_clip_low": 0.5, "tis_mode": "mask"},
    "geometric": {"loss": "tis", "tis_level": "geometric", "tis_clip": 2.0},
}
USUAL = ("none", "tis", "decoupled_ppo", "cispo", "ppo", "reinforce++", "gspo", "m2po")
LAGS = (1, 2, 4, 8, 16, 0)
LOOK, LOOK_LAGS = ("none", "ppo", "gspo"), (1, 8)
REFERENCE = {
    "none": {1: 0.33, 2: 0.17, 4: 0.10, 8: 0.02, 16: 0.02},
    "tis": {1: 0.63, 2: 0.54, 4: 0.34, 8: 0.21, 16: 0.10},
    "decoupled_ppo": {1: 0.88, 2: 0.59, 4: 0.29, 8: 0.14, 16: 0.06},
    "cispo": {1: 0.62, 2: 0.37, 4: 0.16, 8: 0.16, 16: 0.12},
    "ppo": {0: 0.99, 1: 0.99, 2: 0.98, 4: 0.90, 8: 0.57, 16: 0.40},
    "reinforce++": {0: 0.99, 1: 0.99, 2: 0.98, 4: 0.91, 8: 0.58, 16: 0.40},
    "gspo": {0: 0.99, 1: 0.90, 2: 0.95, 4: 0.90, 8: 0.81, 16: 0.59},
    "m2po": {1: 0.99, 2: 0.98, 4: 0.96, 8: 0.74, 16: 0.48},
}


class Game(GuessTask, frozen=True):
    """`guess` with the reference's warm start: every second guess of its player is wild, not every fourth."""

    @property
    def recommended(self) -> Recommended:
        return msgspec.structs.replace(super().recommended, warm_start_noise=0.5)


class Played(NamedTuple):
    """One episode."""

    payload: Payload
    reward: float


class Player:
    """Plays the game with given weights, all episodes side by side, one forward a turn."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.model = ServedModel(folder)
        self.decoder, self.seed = Decoder(self.model), seed
        words = game.GUESS.words
        self._prompt, self._hit = words.index(game.PROMPT), words.index(game.HIT)
        replies = [
            [words.index(game.environment_reply(n, said)) for said in words] for n in range(game.NUMBERS)
        ]
        self._replies = np.array(replies, np.int32)  # [secret, token that was said]

    def play(
        self, weights: dict[str, torch.Tensor], version: int, secrets: NDArray[np.int64], name: str
    ) -> list[Played]:
        self.decoder.swap(self.model.check(weights), WeightsId(0, version, ""), "retract")
        n = len(secrets)
        ids = np.full((n, 1 + 2 * game.TURNS), self._prompt, np.int32)
        logprobs = np.zeros((n, 2 * game.TURNS), np.float32)
        ends, is_hit = np.ones(n, np.int64), np.zeros(n, bool)
        going = np.arange(n)
        for turn in range(1, game.TURNS + 1):
            at = 2 * turn - 1
            for place, completion in self._say(ids[:, :at], going, f"{name}/{{}}/{turn}"):
                ids[place, at], logprobs[place, at - 1] = completion.ids[0], completion.logprobs[0]
            replies = self._replies[secrets[going], ids[going, at]]
            is_hit[going] = replies == self._hit
            ends[going] = at + 1
            going, replies = going[replies != self._hit], replies[replies != self._hit]
            if turn < game.TURNS:
                ids[going, at + 1] = replies
        return [
            Played(_payload(ids[place], logprobs[place], ends[place], version), float(is_hit[place]))
            for place in range(n)
        ]

    def _say(
        self, contexts: NDArray[np.int32], going: NDArray[np.int64], name: str
    ) -> Iterator[tuple[int, Completion]]:
        """One token after each context in `going`."""
        one_token = Sampling(max_tokens=1)
        asked = {
            Request(contexts[place].tolist(), one_token, name.format(place), self.seed): place
            for place in going
        }
        for request, completion in self.decoder.start(list(asked)) if asked else []:
            if isinstance(completion, EngineError):
                raise completion
            yield asked[request], completion


def _payload(ids: NDArray[np.int32], logprobs: NDArray[np.float32], end: int, version: int) -> Payload:
    """Guesses and replies take turns, a guess first and last."""
    length = end - 1
    return Payload(ids[:1], ids[1:end], logprobs[:length], np.arange(length) % 2 == 0, [(0, version, length)])


def run_cell(model: Path, name: str, lag: int, seed: int, steps: int) -> dict[str, Any]:
    """Train once; what came of it, as it is kept."""
    began = time.process_time()
    settings = dict(LOSSES[name])
    estimator = ESTIMATORS[settings.pop("estimator", "grpo")]
    backend = TorchBackend(model, TorchSettings(lr=LR, threads=1, **settings))
    player, order = Player(model, seed), _secrets(seed)
    history = deque([_copy(backend)], maxlen=lag + 1)  # of the newest versions, the oldest first
    curve: list[tuple[int, float]] = []
    measures: list[dict[str, float]] = []
    for step in range(1, steps + 1):
        made_by = max(step - 1 - lag, 0)
        secrets = [next(order) for _ in range(GROUPS)]
        episodes = player.play(history[0], made_by, np.repeat(secrets, SAMPLES), f"train/{seed}/{step}")
        measures.append(backend.step(_batch(episodes, step, step - 1 - made_by, estimator)))
        history.append(_copy(backend))
        if step % EVALUATE_EVERY == 0:
            held_out = np.arange(EPISODES) % game.NUMBERS
            played = player.play(history[-1], step, held_out, f"eval/{seed}/{step}")
            curve.append((step, float(np.mean([each.reward for each in played]))))
    names = ("mean_abs_log_ratio", "kl_k3", "ess_token", "ess_sequence", "ratio_outside", "clip_fraction")
    return {
        "loss": name,
        "lag": lag,
        "seed": seed,
        "steps": steps,
        "final": float(np.mean([reward for _, reward in curve[-LAST:]])),
        "to80": next((step for step, reward in curve if reward >= 0.8), None),
        "curve": curve,
        "measures": {key: float(np.mean([each[key] for each in measures])) for key in names},
        "cpu_s": time.process_time() - began,
    }


def _secrets(seed: int) -> Iterator[int]:
    """Every secret once in each pass, in a new order, as the feeder shuffles a dataset."""
    draw = random.Random(f"offpolicy-{seed}")
    while True:
        yield from draw.sample(range(game.NUMBERS), game.NUMBERS)


def _batch(episodes: Sequence[Played], step: int, age: int, estimator: Any) -> TrainBatch:
    groups = [
        Group(
            [each.reward for each in episodes[first : first + SAMPLES]],
            [int(each.payload.loss_mask.sum()) for each in episodes[first : first + SAMPLES]],
        )
        for first in range(0, len(episodes), SAMPLES)
    ]
    advantages = np.concatenate(estimator(groups))
    samples = [
        TrainSample(
            f"{step}-{place // SAMPLES}/{place % SAMPLES}/0",
            each.payload,
            each.payload.loss_mask,
            float(advantages[place]),
            place // SAMPLES,
            each.reward,
            np.full(len(each.payload.loss_mask), age, np.int32),
        )
        for place, each in enumerate(episodes)
    ]
    return TrainBatch(step, step - 1, step, samples)


def _copy(backend: TorchBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in backend.weights().items()}


def table(cells: Sequence[dict[str, Any]], steps: int) -> str:
    """Final reward by loss and lag: mean over the seeds, their spread, and the reference in brackets."""
    lags = sorted({cell["lag"] for cell in cells})
    lines = [f"| final reward, {steps} steps | " + " | ".join(f"lag {lag}" for lag in lags) + " |"]
    lines.append("|---" * (len(lags) + 1) + "|")
    for name in LOSSES:
        row = []
        for lag in lags:
            finals = [cell["final"] for cell in cells if (cell["loss"], cell["lag"]) == (name, lag)]
            reference = REFERENCE.get(name, {}).get(lag)
            beside = "" if reference is None else f" ({reference:.2f})"
            spread = f" ±{np.std(finals):.2f}" if len(finals) > 1 else ""
            row.append(f"{np.mean(finals):.2f}{spread}{beside}" if finals else "–")
        if any(each != "–" for each in row):
            lines.append(f"| {name} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def read_cells(path: Path, steps: int) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    cells = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    return [cell for cell in cells if cell["steps"] == steps]


def _numbers(text: str | None) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(",")) if text else ()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/offpolicy"), help="folder of the finished cells and the models"
    )
    parser.add_argument("--full", action="store_true", help="every usual loss, every lag, three seeds")
    parser.add_argument("--losses", help="of " + ", ".join(LOSSES))
    parser.add_argument("--lags", help="in versions")
    parser.add_argument("--seeds")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--table", action="store_true", help="print what is there, run nothing")
    args = parser.parse_args()
    transformers_logging.disable_progress_bar()
    args.out.mkdir(parents=True, exist_ok=True)
    kept = args.out / "cells.jsonl"
    done = {(cell["loss"], cell["lag"], cell["seed"]) for cell in read_cells(kept, args.steps)}
    losses = args.losses.split(",") if args.losses else USUAL if args.full else LOOK
    lags = _numbers(args.lags) or (LAGS if args.full else LOOK_LAGS)
    seeds = _numbers(args.seeds) or ((0, 1, 2) if args.full else (0,))
    wanted = [(name, lag, seed) for seed in seeds for lag in lags for name in losses]
    for name, lag, seed in [] if args.table else wanted:
        if (name, lag, seed) in done:
            continue
        model = args.out / f"model-{seed}"
        if not (model / "model.safetensors").exists():
            make_demo_model(Game(), model, seed)
        cell = run_cell(model, name, lag, seed, args.steps)
        with open(kept, "a", encoding="utf-8") as file:
            file.write(json.dumps(cell) + "\n")
        print(
            f"{name} lag {lag} seed {seed}: {cell['final']:.3f} in {cell['cpu_s']:.0f} CPU-s", file=sys.stderr
        )
    print(table(read_cells(kept, args.steps), args.steps))
    return 0


if __name__ == "__main__":
    sys.exit(main())
