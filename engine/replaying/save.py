"""The weights that a replay ended with, as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from engine.interfaces import TrainerBackend
from engine.settings import Config
from engine.weights.materialize import copy_companions
from engine.weights.tensors import raw, write_file


def save_model(backend: TrainerBackend, config: Config, folder: Path) -> None:
    """model.safetensors in `model.dtype`, with the configuration and the tokenizer of `model.path`."""
    folder.mkdir()
    copy_companions(Path(config.model.path), folder)
    with open(folder / "model.safetensors", "wb") as file:
        write_file(file, {name: raw(tensor) for name, tensor in backend.weights().items()}, {"format": "pt"})
