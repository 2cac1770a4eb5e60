"""Where a replay writes: a new folder, never the run's own. The guarantee "the old run stays as it is" lives here."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from engine.commands.common import log_folder
from engine.settings import Config
from streams.errors import ConfigError


def new_folder(asked: str | None, config: Config, now: datetime) -> Path:
    """Make it (default: runs/replay-NAME-TIME). Raises ConfigError for one that holds anything, or lies in the run."""
    folder = Path(asked) if asked else Path("runs") / f"replay-{config.run.name}-{now:%Y%m%d-%H%M%S}"
    place = folder.resolve()
    for own in (Path(config.run.dir), log_folder(config)):
        if own is not None and place.is_relative_to(own.resolve()):
            raise ConfigError(
                f"--out {folder}: lies in {own}, which is the run's own; nothing is written there, name another folder"
            )
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"--out {folder}: is not empty; name a new folder, or remove what is in it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise ConfigError(f"--out {folder}: is a file; name a folder") from error
    except OSError as error:
        raise ConfigError(f"--out {folder}: cannot be made ({error.strerror})") from error
    return folder
