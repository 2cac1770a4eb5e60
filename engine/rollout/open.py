"""Choosing an engine. The only place that knows which ones there are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.interfaces import RolloutEngine
from engine.rollout.loading import PauseMode
from streams.errors import ConfigError


def open_engine(
    backend: str,
    decode: str,
    model: Path | None,
    *,
    name: str,
    dtype: str = "float32",
    device: str = "cpu",
    attn_implementation: str = "sdpa",
    temperature: float = 1.0,
    seed: int = 0,
    pause_mode: PauseMode = "retract",
    max_concurrency: int = 256,
    threads: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> RolloutEngine:
    """The engine of `rollout.backend` and `rollout.decode`, with no weights yet. Imports torch only if it needs it.

    `model`: folder of a Hugging Face model. `options`: `rollout.options`, read by the scripted engine.
    Raises ConfigError.
    """
    if backend == "scripted":
        from engine.rollout.scripted import scripted_engine

        return scripted_engine(options or {}, name=name, seed=seed, pause_mode=pause_mode)
    if backend != "torch":
        raise ConfigError(f'rollout.backend = "{backend}": this build has torch and scripted')
    if model is None:
        raise ConfigError('model.path: rollout.backend = "torch" needs a Hugging Face folder')
    if decode == "batched":
        from engine.rollout.batched import BatchedEngine

        return BatchedEngine(
            model,
            name=name,
            dtype=dtype,
            device=device,
            attn_implementation=attn_implementation,
            seed=seed,
            pause_mode=pause_mode,
            threads=threads,
        )
    if decode == "continuous":
        from engine.rollout.continuous import ContinuousEngine

        return ContinuousEngine(
            model,
            name=name,
            dtype=dtype,
            device=device,
            attn_implementation=attn_implementation,
            temperature=temperature,
            seed=seed,
            pause_mode=pause_mode,
            max_concurrency=max_concurrency,
            threads=threads,
        )
    raise ConfigError(f'rollout.decode = "{decode}": must be batched or continuous')
