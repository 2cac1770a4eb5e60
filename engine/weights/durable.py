"""Files that are whole or not there at all, also after a power failure."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from engine.weights.tensors import NoRoom, WeightsError


def write_durably(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Make `path` appear whole: temporary name, fsync, rename, fsync of the folder. Raises WeightsError."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoRoom(f"{path}: no room on the disk; nothing was left behind") from error
        raise WeightsError(f"{path}: cannot be written ({error.strerror or error})") from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """fsync of a folder: a rename in it survives power loss."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
