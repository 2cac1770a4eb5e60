"""The demo: a run directory with a small task, a tiny model and a configuration that is known to learn.

    prepare ─► prompts.jsonl, held_out.jsonl, model/ (warm-started), config.toml ─► an ordinary run

After that nothing knows that it is a demo: the launcher, the daemons and every command take the run directory as
they take any other.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from consumers.rewards.types import RewardInput
from engine.config import CONFIG_FILE, build_config
from engine.settings import Config
from engine.tasks import Task, get_task
from engine.tasks.base import Row
from replay.summary import LAST_STEPS
from streams.errors import ConfigError

logger = logging.getLogger(__name__)

EVALUATE_EVERY = 5  # versions
HELD_OUT_ROWS = 256  # a multiple of 16: every secret of `guess` equally often
GENERATE = {"guess": "guess", "reverse": "single_turn"}


def reward(sample: RewardInput) -> float:
    """The reward function of every demo task (`reward.function = "engine.demo:reward"`)."""
    return get_task(str(sample.metadata["task"])).score(str(sample.label), sample.response)


def default_dir(task: str) -> Path:
    return Path("runs") / f"demo-{task}-{time.strftime('%Y%m%d-%H%M%S')}"


def kafka_url(run_dir: Path, servers: str) -> str:
    """A log of the run's own on these brokers: the run directory's name stands before its topics, so that every demo
    begins with an empty log and an interrupted one finds its own again."""
    prefix = re.sub(r"[^A-Za-z0-9_-]", "-", run_dir.resolve().name)[-40:].lstrip("-")
    return f"kafka://{servers}/{prefix}."


def demo_config(
    task: Task,
    run_dir: Path,
    *,
    seed: int = 0,
    max_steps: int | None = None,
    max_weight_staleness: int = 2,
    slow_tools: float = 0.0,
    log_url: str = "",
    engine: str = "torch",
    sglang_python: str = "",
    overrides: Sequence[str] = (),
) -> Config:
    """The configuration of a demo run. `slow_tools` is the σ of the tools' lognormal latency; 0: no latency.

    With a `log_url` of Kafka there are two engines and two reward daemons, so that consumer groups have something to
    share. `engine` is rollout.backend; `sglang_python` its rollout.sglang.python.
    """
    use = task.recommended
    options: dict[str, Any] = {"slow_tools_sigma": slow_tools} if slow_tools else {}
    samples = use.rollout_batch_size * use.n_samples_per_prompt
    replicas = 2 if log_url.startswith("kafka:") else 1
    # episodes that wait for tools cost nothing, so every group that admission allows may be under way
    concurrency = samples * (max_weight_staleness + 1) if slow_tools else samples
    table: dict[str, Any] = {
        "run": {
            "name": f"demo-{task.name}",
            "dir": str(run_dir),
            "seed": seed,
            "steps": use.num_steps if max_steps is None else max_steps,
        },
        "log": {"partitions": 2 * replicas, "url": log_url},
        "data": {"path": str(run_dir / "prompts.jsonl")},
        "model": {"path": str(run_dir / "model")},
        "rollout": {
            "backend": engine,
            "replicas": replicas,
            "generate": GENERATE[task.name],
            "n_samples_per_prompt": use.n_samples_per_prompt,
            "rollout_max_response_len": use.rollout_max_response_len,
            "rollout_temperature": use.rollout_temperature,
            "max_concurrency": concurrency,
            "options": options,
            "sglang": {"python": sglang_python},
        },
        "reward": {"function": "engine.demo:reward", "timeout_s": 10.0, "replicas": replicas},
        "trainer": {
            "rollout_batch_size": use.rollout_batch_size,
            "lr": use.lr,
            "lr_schedule": "linear",
            "lr_hold": 0.5,
            "lr_end": use.lr_end,
            "adam_beta1": use.adam_beta1,
            "adam_beta2": use.adam_beta2,
            "weight_decay": use.weight_decay,
            "eps_clip": use.eps_clip,
            "clip_grad": use.clip_grad,
        },
        "staleness": {"max_weight_staleness": max_weight_staleness},
        "weights": {"keep": LAST_STEPS + 10},  # the evaluator may be a few versions behind the trainer
        "checkpoint": {"every": 50},
        "eval": {"path": str(run_dir / "held_out.jsonl"), "every": EVALUATE_EVERY, "final": LAST_STEPS},
    }
    return build_config(table, overrides, os.environ)


def prepare(config: Config, task: Task) -> None:
    """Make what the configuration refers to: prompts, held-out prompts and the warm-started model.

    A run directory that is complete already is left as it is, so that an interrupted demo can go on.
    """
    run_dir, seed = Path(config.run.dir), config.run.seed
    if (run_dir / CONFIG_FILE).is_file():
        logger.info("going on with the run in %s", run_dir)
        return
    if run_dir.is_dir() and any(run_dir.iterdir()) and not (run_dir / "prompts.jsonl").is_file():
        raise ConfigError(f"--dir {run_dir}: holds other files and is no run directory; name another one")
    run_dir.mkdir(parents=True, exist_ok=True)
    write_rows(run_dir / "prompts.jsonl", task.rows(seed=seed))
    write_rows(run_dir / "held_out.jsonl", task.held_out(HELD_OUT_ROWS, seed))
    logger.info("making the model: a few seconds of supervised training on an imperfect player")
    began = time.monotonic()

    from transformers.utils import logging as transformers_logging

    from engine.tasks.warmstart import make_demo_model

    transformers_logging.disable_progress_bar()
    architecture = "qwen3" if _needs_qwen3(config) else "gpt2"
    make_demo_model(task, Path(config.model.path), seed, architecture)
    logger.info("the model is ready after %.1f s", time.monotonic() - began)


def _needs_qwen3(config: Config) -> bool:
    """SGLang ties GPT-2's head to its embeddings, Megatron has no such model, and adapters go on linear layers."""
    trainer = config.trainer
    return config.rollout.backend == "sglang" or trainer.backend == "megatron" or trainer.lora.rank > 0


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
