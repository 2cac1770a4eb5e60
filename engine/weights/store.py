"""Published weights on disk: one file per (epoch, version), whole or not there at all.

    publish: digest ─► .e3-v7.safetensors.tmp ─► fsync ─► rename to e3-v7.safetensors ─► fsync of the folder
             with deltas: e3-v7.delta, what changed since e3-v6; every n versions, and where more changed, in full
    engine:  read(path) ─► load ─► digest of what it now holds = digest in the WeightsPublished record

The name carries the epoch, so a trainer that was fenced off overwrites nothing of its successor (DESIGN §4). A
file is used only because a valid ledger record names its digest; the one in its metadata only helps to repair.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from consumers.runner import Clock, now_ms
from engine.weights import chain
from engine.weights import tensors as files
from engine.weights.delta import SUFFIX, open_delta
from engine.weights.delta_writer import DeltaPolicy, FullIsDue, State, state_of_bytes, write_delta
from engine.weights.durable import sync_folder, write_durably
from engine.weights.lora import KIND as LORA
from engine.weights.lora import Adapted
from engine.weights.snapshots import DeviceSnapshot, raw_tensors
from engine.weights.tensors import Framework, NoRoom, RawTensor, WeightsError, digest, snapshot
from streams.events import TensorInfo, WeightsPublished

__all__ = [
    "DeltaPolicy",
    "NoRoom",
    "WeightStore",
    "WeightsConflict",
    "WeightsError",
    "digest",
    "read",
    "snapshot",
    "sync_folder",
    "verify",
    "write_durably",
]

logger = logging.getLogger(__name__)

_LARGE = 32 << 20  # bytes: below this one more fsync costs more than what it overlaps


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
        self,
        folder: Path,
        *,
        keep: int,
        run_dir: Path | None = None,
        deltas: DeltaPolicy | None = None,
        adapted: Adapted | None = None,
        clock: Clock = now_ms,
    ) -> None:
        """`keep`: versions that `prune` leaves readable. URIs are relative to `run_dir` (default: the parent folder).

        `deltas`: publish as deltas where this allows it (None: always in full). The first version of an epoch is full.
        `adapted`: what is published are adapters, of this base (None: whole models).
        """
        self.folder, self.keep, self._deltas, self._clock = folder, keep, deltas, clock
        self._adapted = adapted
        self._run_dir = folder.parent if run_dir is None else run_dir
        self._last: _Last | None = None  # what the next delta is made on
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, epoch: int, version: int, suffix: str = chain.FULL_SUFFIX) -> Path:
        return self.folder / chain.file_name(epoch, version, suffix)

    def publish(self, tensors: Mapping[str, Any], *, epoch: int, version: int, step: int) -> WeightsPublished:
        """Store these weights and return the fact, ready for the ledger. They are on disk when this returns.

        Publishing the same weights under the same name again writes nothing. With deltas, `tensors` must be a snapshot:
        they are kept until the next version, which is made on them. Raises WeightsConflict when the name holds other
        weights, NoRoom on a full disk and WeightsError when they cannot be written; then nothing is left behind.
        """
        contents = raw_tensors(tensors)
        if self._is_new_and_large(contents, epoch, version):
            state = self._written_while_digested(contents, epoch, version)
            return self._full_event(state, epoch, version, step)
        on_device = tensors if isinstance(tensors, DeviceSnapshot) else None
        state = state_of_bytes(contents)._replace(on_device=on_device)
        last = self._last
        if last is not None and (last.event.epoch, last.event.version, last.state.digest) == (
            *(epoch, version),
            state.digest,
        ):
            return msgspec.structs.replace(last.event, step=step, published_ms=self._clock())
        self._refuse_another(epoch, version, state.digest)
        event = self._as_delta(last, state, epoch, version, step)
        since_full = 0 if event is None or last is None else last.since_full + 1
        event = event or self._in_full(state, epoch, version, step)
        if self._deltas is not None:
            self._last = _Last(event, state, since_full)
        return event

    def _in_full(self, state: State, epoch: int, version: int, step: int) -> WeightsPublished:
        path = self.path(epoch, version)
        if not self._holds(path, state.digest):
            metadata = {"format": "pt", "epoch": str(epoch), "version": str(version), "digest": state.digest}
            write_durably(path, lambda file: files.write_file(file, state.contents, metadata))
        return self._full_event(state, epoch, version, step)

    def _is_new_and_large(self, contents: Mapping[str, RawTensor], epoch: int, version: int) -> bool:
        """Nothing that has this name must be compared with these, nor is the next version made on them."""
        if self._deltas is not None or sum(each.data.nbytes for each in contents.values()) < _LARGE:
            return False
        return not (self.path(epoch, version).exists() or self.path(epoch, version, SUFFIX).exists())

    def _written_while_digested(self, contents: Mapping[str, RawTensor], epoch: int, version: int) -> State:
        """Both take about as long, and one waits for the disk while the other computes."""
        stored, tied = files.split_tied(contents)
        metadata = {"format": "pt", "epoch": str(epoch), "version": str(version), "digest": "0" * 64}
        with ThreadPoolExecutor(1, "digest") as pool:
            digesting = pool.submit(state_of_bytes, contents)

            def write(file: BinaryIO) -> None:
                files.write_parts(file, stored, tied, metadata, lambda name: stored[name].data)
                file.flush()
                os.fsync(file.fileno())
                file.seek(0)
                file.write(files.header(stored, tied, metadata | {"digest": digesting.result().digest}))

            write_durably(self.path(epoch, version), write)
            return digesting.result()

    def _full_event(self, state: State, epoch: int, version: int, step: int) -> WeightsPublished:
        path = self.path(epoch, version)
        stored, _ = files.split_tied(state.contents)
        nbytes = sum(tensor.data.nbytes for tensor in stored.values())
        event = self._event(state, path, nbytes, epoch=epoch, version=version, step=step)
        if self._adapted is None:
            return event
        base_digest, scaling = self._adapted
        return msgspec.structs.replace(event, kind=LORA, base_digest=base_digest, scaling=scaling)

    def _as_delta(
        self, last: _Last | None, state: State, epoch: int, version: int, step: int
    ) -> WeightsPublished | None:
        """None: a full version is due."""
        policy = self._deltas
        if policy is None or last is None or last.event.epoch != epoch or last.event.version >= version:
            return None
        if last.since_full + 1 >= policy.full_every:
            return None
        base, path = last.event.version, self.path(epoch, version, SUFFIX)
        try:
            write_durably(
                path,
                lambda file: write_delta(
                    file, last.state, state, epoch=epoch, version=version, base_version=base, policy=policy
                ),
            )
        except FullIsDue as due:
            logger.info("version %d is published in full: %s", version, due)
            return None
        event = self._event(state, path, path.stat().st_size, epoch=epoch, version=version, step=step)
        return msgspec.structs.replace(event, kind="delta", base_version=base, base_digest=last.state.digest)

    def _event(
        self, state: State, path: Path, nbytes: int, *, epoch: int, version: int, step: int
    ) -> WeightsPublished:
        return WeightsPublished(
            epoch=epoch,
            version=version,
            step=step,
            digest=state.digest,
            uris={"disk": self._uri(path)},
            tensors=_infos(state.contents),
            nbytes=nbytes,
            published_ms=self._clock(),
        )

    def read(self, path: Path, framework: Framework) -> dict[str, Any]:
        """As the function `read`."""
        return read(path, framework)

    def verify(self, path: Path, digest: str) -> None:
        """As the function `verify`."""
        verify(path, digest)

    def versions(self) -> list[tuple[int, int]]:
        """(epoch, version) of everything stored, oldest first."""
        return sorted({(each.epoch, each.version) for each in self._stored().values()})

    def prune(self, *, pinned: Collection[str] = ()) -> list[Path]:
        """Remove all but the newest `keep` versions and what they need, and return what was removed.

        A delta needs the files of its chain. `pinned` names more files that stay (names or URIs), with their chains:
        what an engine still loads, … Leftovers of trainers that were killed while they wrote go too.
        """
        stored, versions = self._stored(), self.versions()
        kept = set(versions[-self.keep :])
        spared = {name for name, each in stored.items() if (each.epoch, each.version) in kept}
        spared |= {Path(name).name for name in pinned}
        needed = chain.needed_by(self.folder, spared)
        removed = [
            self.folder / name for name in sorted(stored, key=stored.__getitem__) if name not in needed
        ]
        newest_epoch = versions[-1][0] if versions else -1
        leftovers = [
            entry
            for entry in self.folder.iterdir()
            # one of the newest epoch may be in the making
            if (named := chain.parse_name(entry.name, temporary=True)) and named.epoch < newest_epoch
        ]
        for path in removed + leftovers:
            path.unlink(missing_ok=True)
        return removed

    def _stored(self) -> dict[str, chain.StoredFile]:
        """Name → what it says, of every published file."""
        named = ((entry.name, chain.parse_name(entry.name)) for entry in self.folder.iterdir())
        return {name: each for name, each in named if each is not None}

    def _uri(self, path: Path) -> str:
        if path.is_relative_to(self._run_dir):
            return path.relative_to(self._run_dir).as_posix()
        return path.absolute().as_posix()

    def _refuse_another(self, epoch: int, version: int, identity: str) -> None:
        """Raise WeightsConflict when this version is a delta to other weights already; a damaged one does not count."""
        path = self.path(epoch, version, SUFFIX)
        if not path.exists():
            return
        try:
            held = open_delta(path).head.digest
        except WeightsError as error:
            logger.warning("%s; it is written again", error)
            return
        if held != identity:
            raise WeightsConflict(f"{path} leads to other weights: digest {held}, to be published {identity}")

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


class _Last(NamedTuple):
    """The version published before."""

    event: WeightsPublished
    state: State
    since_full: int  # deltas since the last full version, this one included


def read(path: Path, framework: Framework) -> dict[str, Any]:
    """All tensors of a full file by name, as they were published; tied ones share memory.

    Changing them changes no file. Does not verify: an engine digests what it holds *after* loading. Raises
    WeightsError.
    """
    return files.to_framework(files.read_raw(path), framework)


def verify(path: Path, digest: str) -> None:
    """Raise WeightsError unless the file (of a delta: with its chain) gives exactly the weights of this digest."""
    held = chain.digest_of(path)
    if held != digest:
        raise WeightsError(f"{path}: digest {held}, expected {digest}")


def _infos(tensors: Mapping[str, RawTensor]) -> list[TensorInfo]:
    _, tied = files.split_tied(tensors)
    return [
        TensorInfo(name, list(tensor.shape), tensor.dtype, tensor.data.nbytes, tied.get(name, ""))
        for name, tensor in tensors.items()
    ]
