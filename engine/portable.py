"""What a slice takes along besides the log: the configuration, and, if asked, what a replay starts from.

Paths in the run directory count from PLACEHOLDER, which `load_config` replaces by wherever the slice was imported.
Other paths stay as they are: they are part of the run's fingerprint. Secrets are references and stay references; where
Kafka was, and how one logs in there, is left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from engine.config import dump_toml
from engine.config_fields import get, marked, replaced
from engine.settings import Config, KafkaConfig
from engine.trainer.checkpoint import CheckpointFound, open_checkpoint
from streams.errors import ConfigError
from streams.events import CheckpointSaved

PLACEHOLDER = "/slice"
MODEL_FOLDER = "model"
MOST_MODEL_BYTES = 64 << 20  # a slice goes with a bug report


def portable_config(config: Config, *, with_model: bool = False) -> str:
    """TOML of the configuration as an imported run has it, with an embedded log. `with_model`: and with the model that
    comes along."""
    run_dir = Path(config.run.dir)
    moved = config
    for key, _ in marked("path"):
        value = get(config, key)
        if value and Path(value).is_relative_to(run_dir):
            moved = replaced(moved, key, str(_moved(Path(value), run_dir)))
        elif value and key == "model.path" and with_model:
            moved = replaced(moved, key, str(_moved(run_dir / MODEL_FOLDER, run_dir)))
    moved = replaced(moved, "run.dir", PLACEHOLDER)
    moved = replaced(moved, "log.url", f"file://{PLACEHOLDER}/log")
    moved = replaced(moved, "log.kafka", KafkaConfig())
    for key in ("log.retention_s", "log.retention_bytes"):  # the embedded log keeps everything
        moved = replaced(moved, key, None)
    return dump_toml(moved)


def _moved(path: Path, run_dir: Path) -> Path:
    return Path(PLACEHOLDER) / path.relative_to(run_dir)


class ModelFiles(NamedTuple):
    files: dict[str, Path]  # path in the run directory → where it lies now
    first_step: int  # that can be replayed from them


def model_files(config: Config, saved: list[CheckpointSaved], first_step: int) -> ModelFiles:
    """The files that a replay of `first_step` starts from: the nearest checkpoint before it that verifies, or the
    model that the run began with (nothing for the `scalar` trainer, which begins with a number).

    Raises ConfigError when they are too large, or not there.
    """
    run_dir = Path(config.run.dir)
    files: dict[str, Path] = {}
    begins = 1
    for record in reversed(saved):
        folder = run_dir / record.path
        if record.step < first_step and _is_whole(folder, record):
            files |= {f"{record.path}/{name}": path for name, path in _below(folder)}
            begins = record.step + 1
            break
    if config.model.path:
        folder = Path(config.model.path)
        if not folder.is_dir():
            raise ConfigError(f"--with-model: model.path = {folder} is not there")
        is_inside = folder.is_relative_to(run_dir)
        place = folder.relative_to(run_dir).as_posix() if is_inside else MODEL_FOLDER
        files |= {f"{place}/{name}": path for name, path in _below(folder)}
    size = sum(path.stat().st_size for path in files.values())
    if size > MOST_MODEL_BYTES:
        raise ConfigError(
            f"--with-model: model and checkpoint have {size >> 20} MiB, a slice takes {MOST_MODEL_BYTES >> 20} MiB: "
            "hand them over beside it"
        )
    return ModelFiles(files, begins)


def _is_whole(folder: Path, record: CheckpointSaved) -> bool:
    found = open_checkpoint(folder) if folder.is_dir() else None
    return isinstance(found, CheckpointFound) and found.digest == record.digest


def _below(folder: Path) -> list[tuple[str, Path]]:
    return [
        (path.relative_to(folder).as_posix(), path) for path in sorted(folder.rglob("*")) if path.is_file()
    ]
