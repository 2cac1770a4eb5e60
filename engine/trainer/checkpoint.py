"""Checkpoints: everything the next step depends on, whole in one folder or not there at all.

    save   .e3-s00000040.tmp/state/… ─► digests into manifest.json ─► fsync of all ─► one rename ─► e3-s00000040/
    open   manifest whole? ─► every file there, with its size and digest? ─► CheckpointFound, else the reason

The rename is the guarantee: killed before it, a run finds the checkpoints it had; after it, one more, complete. A
checkpoint is used only if a valid ledger record names its digest (DESIGN §4): the newest whole one may be a zombie's.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from engine.interfaces import CheckpointError
from engine.weights.store import sync_folder

logger = logging.getLogger(__name__)

MANIFEST, STATE = "manifest.json", "state"
_FORMAT = 1
_NAME = re.compile(r"e(\d+)-s(\d+)")
_LEFTOVER = re.compile(r"\.e(\d+)-s(\d+)\.(tmp|old)")


class CheckpointFound(NamedTuple):
    """A whole checkpoint. `digest` is that of its CheckpointSaved record."""

    path: Path
    epoch: int
    step: int
    version: int
    ledger_position: int  # replay starts here
    positions: list[int]  # next offset to read, per partition of `groups`
    frontier: int
    closed_above: list[int]
    digest: str

    @property
    def state(self) -> Path:
        """The folder that the backend wrote."""
        return self.path / STATE


def save_checkpoint(
    folder: Path,
    *,
    epoch: int,
    step: int,
    version: int,
    ledger_position: int,
    write: Callable[[Path], None],
    positions: Iterable[int] = (),
    frontier: int = 0,
    closed_above: Iterable[int] = (),
) -> tuple[Path, str]:
    """Let `write` fill a folder and make it a checkpoint. Returns (its path, digest of its manifest).

    Saving the same state under the same name again is harmless. Raises CheckpointError when it cannot be written
    (disk full, …) or the name holds another whole checkpoint; then nothing is left behind.
    """
    path = folder / f"e{epoch}-s{step:08d}"
    temporary = folder / f".{path.name}.tmp"
    values = {
        "format": _FORMAT,
        "epoch": epoch,
        "step": step,
        "version": version,
        "ledger_position": ledger_position,
        "positions": list(positions),
        "frontier": frontier,
        "closed_above": list(closed_above),
    }
    try:
        _remove(temporary)
        (temporary / STATE).mkdir(parents=True)
        write(temporary / STATE)
        digest = _seal(temporary, values)
        _move_into_place(temporary, path, digest)
    except OSError as error:
        _remove(temporary)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(f"{path}: no room on the disk; nothing was left behind") from error
        raise CheckpointError(f"{path}: cannot be written ({error.strerror or error})") from error
    except BaseException:
        _remove(temporary)
        raise
    return path, digest


def open_checkpoint(path: Path) -> CheckpointFound | str:
    """The checkpoint in this folder once every byte of it is verified, or the reason why it cannot be used."""
    try:
        manifest = _read_manifest(path)
        _check_files(path, manifest["files"])
        found = CheckpointFound(
            path=path,
            **{name: manifest[name] for name in CheckpointFound._fields if name not in ("path", "digest")},
            digest=manifest["digest"],
        )
    except CheckpointError as error:
        return str(error)
    except (KeyError, TypeError, ValueError) as error:
        return f"{MANIFEST} is damaged ({error!r})"
    return found


def find_checkpoints(folder: Path) -> Iterator[CheckpointFound]:
    """The whole checkpoints of a run, newest first; one warning, with the reason, for each that is passed over.

    Files are verified as the iterator gets to them, so `next()` costs one checkpoint, not all.
    """
    for path in reversed(_in_order(folder)):
        found = open_checkpoint(path)
        if isinstance(found, CheckpointFound):
            yield found
        else:
            logger.warning("checkpoint %s passed over: %s", path, found)


def prune_checkpoints(folder: Path, *, keep_last: int, keep_every: int | None = None) -> list[Path]:
    """Remove old checkpoints and return them: the newest `keep_last` stay, and each whose step `keep_every` divides.

    What lacks a readable manifest does not count as kept, and goes once it is older than all that is. Leftovers of
    epochs before the newest are removed too.
    """
    paths = _in_order(folder)
    usable = [path for path in paths if _has_manifest(path)]
    newest = usable[-keep_last:]
    kept = {*newest, *(path for path in usable if keep_every and _step_of(path) % keep_every == 0)}
    if not newest:
        return []
    removed = [path for path in paths if path not in kept and _order_of(path) < _order_of(newest[0])]
    for path in removed:
        # renamed first: a kill in the middle must not leave half a checkpoint under a good name
        aside = folder / f".{path.name}.old"
        path.rename(aside)
        _remove(aside)
    _remove_leftovers(folder, before_epoch=_order_of(paths[-1])[0])
    return removed


def _seal(folder: Path, values: dict[str, Any]) -> str:
    """Write the manifest over what is in the folder, sync everything, and return the manifest's digest."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    values["files"] = {path.relative_to(folder).as_posix(): _measure(path, sync=True) for path in files}
    digest = _digest_of(values)
    with open(folder / MANIFEST, "w", encoding="utf-8") as file:
        file.write(json.dumps(values | {"digest": digest}, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    for inner in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        sync_folder(inner)
    return digest


def _move_into_place(temporary: Path, path: Path, digest: str) -> None:
    """The one rename. A whole checkpoint that is there already is never overwritten by another."""
    if path.exists():
        held = open_checkpoint(path)
        if isinstance(held, CheckpointFound):
            if held.digest != digest:
                raise CheckpointError(
                    f"{path} holds another checkpoint: digest {held.digest}, to be saved {digest}"
                )
            _remove(temporary)
            return
        logger.warning("checkpoint %s is damaged (%s); it is written again", path, held)
        aside = path.with_name(f".{path.name}.old")
        _remove(aside)
        path.rename(aside)
        temporary.rename(path)
        _remove(aside)
    else:
        temporary.rename(path)
    sync_folder(path.parent)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        text = (path / MANIFEST).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"no {MANIFEST}" if path.is_dir() else "it is not there") from None
    except OSError as error:
        raise CheckpointError(f"{MANIFEST} cannot be read ({error.strerror})") from None
    try:
        manifest = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{MANIFEST} is truncated or damaged ({error})") from None
    if not isinstance(manifest, dict):
        raise CheckpointError(f"{MANIFEST} is damaged: {type(manifest).__name__} instead of an object")
    if manifest.get("format") != _FORMAT:
        raise CheckpointError(
            f"{MANIFEST} has format {manifest.get('format')!r}, this version reads {_FORMAT}"
        )
    values = {name: value for name, value in manifest.items() if name != "digest"}
    if _digest_of(values) != manifest.get("digest"):
        raise CheckpointError(f"{MANIFEST} does not have its own digest: it was changed")
    return manifest


def _check_files(path: Path, files: dict[str, list[Any]]) -> None:
    for name, (size, digest) in files.items():
        try:
            found = _measure(path / name)
        except OSError as error:
            reason = (
                "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
            )
            raise CheckpointError(f"{name} {reason}") from None
        if found[0] != size:
            raise CheckpointError(f"{name} has {found[0]} bytes, saved were {size}")
        if found[1] != digest:
            raise CheckpointError(f"{name} has digest {found[1][:16]}…, saved was {digest[:16]}…")


def _measure(path: Path, *, sync: bool = False) -> list[Any]:
    """[bytes, sha256] of a file."""
    content, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            content.update(chunk)
            size += len(chunk)
        if sync:
            os.fsync(file.fileno())
    return [size, content.hexdigest()]


def _digest_of(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _in_order(folder: Path) -> list[Path]:
    """Folders with the name of a checkpoint, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), key=_order_of)


def _order_of(path: Path) -> tuple[int, int]:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2])


def _step_of(path: Path) -> int:
    return _order_of(path)[1]


def _has_manifest(path: Path) -> bool:
    try:
        _read_manifest(path)
    except CheckpointError:
        return False
    return True


def _remove_leftovers(folder: Path, *, before_epoch: int) -> None:
    """What killed trainers left; one of the newest epoch may be in the making."""
    for path in folder.iterdir():
        match = _LEFTOVER.fullmatch(path.name)
        if match and (int(match[1]) < before_epoch or match[3] == "old"):
            _remove(path)


def _remove(path: Path) -> None:
    # gone between two looks, or removed by a successor: the outcome is the same
    shutil.rmtree(path, ignore_errors=True)
