"""Published weights on disk: one file per (epoch, version), whole or not there at all.

    publish: digest ─► .e3-v7.safetensors.tmp ─► fsync ─► rename to e3-v7.safetensors ─► fsync of the folder
    engine:  read(path) ─► load ─► digest of what it now holds = digest in the WeightsPublished record

The name carries the epoch, so a trainer that was fenced off overwrites nothing of its successor (DESIGN §4). A
file is used only because a valid ledger record names its digest; the one in its metadata only helps to repair.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from consumers.runner import Clock, now_ms
from engine.weights import tensors as files
from engine.weights.tensors import Framework, NoRoom, RawTensor, WeightsError, digest, snapshot
from streams.events import TensorInfo, WeightsPublished

__all__ = ["NoRoom", "WeightStore", "WeightsConflict", "WeightsError", "digest", "read", "snapshot", "verify"]

logger = logging.getLogger(__name__)

_NAME = re.compile(r"e(\d+)-v(\d+)\.safetensors")
_TEMPORARY = re.compile(r"\.e(\d+)-v(\d+)\.safetensors\.tmp")


class WeightsConflict(WeightsError):
    """A whole file with other weights has this epoch and version already. It is never overwritten."""


class WeightStore:
    """The folder of a run's published weights, written by its trainer.

    >>> import numpy as np, tempfile
    >>> store = WeightStore(Path(tempfile.mkdtemp()) / "weights", keep=2)
    >>> event = store.publish({"w": np.ones(3)}, epoch=4, version=7, step=7)
    >>> event.uris, event.nbytes
    ({'disk': 'weights/e4-v7.safetensors'}, 24)
    >>> store.read(store.path(4, 7), "numpy")["w"]
    array([1., 1., 1.])
    """

    def __init__(
        self, folder: Path, *, keep: int, run_dir: Path | None = None, clock: Clock = now_ms
    ) -> None:
        """`keep`: files that `prune` leaves. URIs are relative to `run_dir` (default: the parent folder)."""
        self.folder, self.keep, self._clock = folder, keep, clock
        self._run_dir = folder.parent if run_dir is None else run_dir
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, epoch: int, version: int) -> Path:
        return self.folder / f"e{epoch}-v{version}.safetensors"

    def publish(self, tensors: Mapping[str, Any], *, epoch: int, version: int, step: int) -> WeightsPublished:
        """Store these weights and return the fact, ready for the ledger. They are on disk when this returns.

        Publishing the same weights under the same name again writes nothing. Raises WeightsConflict when the
        name holds other weights, NoRoom on a full disk and WeightsError when they cannot be written; then nothing is
        left behind.
        """
        contents = {name: files.raw(tensor) for name, tensor in tensors.items()}
        identity = files.digest_raw(contents)
        path = self.path(epoch, version)
        if not self._holds(path, identity):
            metadata = {"format": "pt", "epoch": str(epoch), "version": str(version), "digest": identity}
            write_durably(path, lambda file: files.write_file(file, contents, metadata))
        stored, _ = files.split_tied(contents)
        return WeightsPublished(
            epoch=epoch,
            version=version,
            step=step,
            digest=identity,
            uris={"disk": self._uri(path)},
            tensors=[_info(name, tensor) for name, tensor in contents.items()],
            nbytes=sum(tensor.data.nbytes for tensor in stored.values()),
            published_ms=self._clock(),
        )

    def read(self, path: Path, framework: Framework) -> dict[str, Any]:
        """As the function `read`."""
        return read(path, framework)

    def verify(self, path: Path, digest: str) -> None:
        """As the function `verify`."""
        verify(path, digest)

    def versions(self) -> list[tuple[int, int]]:
        """(epoch, version) of every stored file, oldest first."""
        matches = [_NAME.fullmatch(entry.name) for entry in self.folder.iterdir()]
        return sorted((int(match[1]), int(match[2])) for match in matches if match)

    def prune(self, *, pinned: Collection[str] = ()) -> list[Path]:
        """Remove all but the newest `keep` files, and return what was removed.

        `pinned` names files that stay (names or URIs): what an engine still loads, what a delta builds on, …
        Leftovers of trainers that were killed while they wrote go too.
        """
        spared = {Path(name).name for name in pinned}
        versions = self.versions()
        old = [self.path(*version) for version in versions[: max(len(versions) - self.keep, 0)]]
        removed = [path for path in old if path.name not in spared]
        newest_epoch = versions[-1][0] if versions else -1
        leftovers = [
            entry
            for entry in self.folder.iterdir()
            # one of the newest epoch may be in the making
            if (match := _TEMPORARY.fullmatch(entry.name)) and int(match[1]) < newest_epoch
        ]
        for path in removed + leftovers:
            path.unlink(missing_ok=True)
        return removed

    def _uri(self, path: Path) -> str:
        if path.is_relative_to(self._run_dir):
            return path.relative_to(self._run_dir).as_posix()
        return path.absolute().as_posix()

    def _holds(self, path: Path, identity: str) -> bool:
        """Whether these weights are stored there already; a damaged file counts as absent.

        The guarantee "a published file is never overwritten by other weights" lives here.
        """
        if not path.exists():
            return False
        try:
            held = files.digest_raw(files.read_raw(path))
            said = files.read_metadata(path).get("digest")
        except WeightsError as error:
            logger.warning("%s; it is written again", error)
            return False
        if held == identity:
            return True
        if held == said:
            raise WeightsConflict(f"{path} holds other weights: digest {held}, to be published {identity}")
        logger.warning("%s: damaged (digest %s, should be %s); it is written again", path, held, said)
        return False


def read(path: Path, framework: Framework) -> dict[str, Any]:
    """All tensors of a file by name, as they were published; tied ones share memory. Changing them changes no file.

    Does not verify: an engine digests what it holds *after* loading. Raises WeightsError.
    """
    return files.to_framework(files.read_raw(path), framework)


def verify(path: Path, digest: str) -> None:
    """Raise WeightsError unless the file holds exactly the weights of this digest."""
    held = files.digest_raw(files.read_raw(path))
    if held != digest:
        raise WeightsError(f"{path}: digest {held}, expected {digest}")


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


def _info(name: str, tensor: RawTensor) -> TensorInfo:
    return TensorInfo(name, list(tensor.shape), tensor.dtype, tensor.data.nbytes)
