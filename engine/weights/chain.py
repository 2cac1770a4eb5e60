"""The files of a version that was published as a delta: the newest full one before it, then deltas in order.

    e3-v4.safetensors ◄─base─ e3-v5.delta ◄─base─ e3-v6.delta ◄─base─ e3-v7.delta
    resolve(e3-v7.delta)                    → Chain(full = e3-v4.safetensors, deltas = [5, 6, 7])
    resolve(…, held = digest of version 6)  → Chain(full = None, deltas = [7])

At every link the digest that a delta was made on must be the one that the file before it says it holds, and every
block has its own; so the last digest, which the caller compares with the ledger's, holds for all of them. A full file
that lies beside a delta of the same version shortens every chain that goes through it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.weights import tensors as files
from engine.weights.delta import SUFFIX, Delta, WrongBase, changed_in, copy, in_order, open_delta, overlay
from engine.weights.durable import write_durably
from engine.weights.tensors import Framework, RawTensor, WeightsError

FULL_SUFFIX = ".safetensors"

_NAME = re.compile(r"e(\d+)-v(\d+)(\.safetensors|\.delta)")
_TEMPORARY = re.compile(r"\.e(\d+)-v(\d+)(\.safetensors|\.delta)\.tmp")


class StoredFile(NamedTuple):
    """A published file, by its name."""

    epoch: int
    version: int
    suffix: str


class Chain(NamedTuple):
    full: Path | None  # None: it begins with the weights that the caller holds
    deltas: list[Delta]  # oldest first; none: the full file is the version


def file_name(epoch: int, version: int, suffix: str = FULL_SUFFIX) -> str:
    return f"e{epoch}-v{version}{suffix}"


def parse_name(name: str, *, temporary: bool = False) -> StoredFile | None:
    """What a file name says; None for one that is no published file's (or no unfinished one's)."""
    match = (_TEMPORARY if temporary else _NAME).fullmatch(name)
    return StoredFile(int(match[1]), int(match[2]), match[3]) if match else None


def resolve(path: Path, *, held: str = "") -> Chain:
    """What must be read for the version in `path`, a full file or a delta.

    `held`: digest of weights at hand; the chain then begins with them if it goes through them. Raises WeightsError
    naming the file that is missing, damaged, or not the one that the next delta was made on.
    """
    deltas: list[Delta] = []
    while path.suffix == SUFFIX:
        delta = open_delta(path)
        if deltas and delta.head.digest != deltas[-1].head.base_digest:
            raise _broken(deltas[-1], path, delta.head.digest)
        deltas.append(delta)
        if held and delta.head.base_digest == held:
            return Chain(None, deltas[::-1])
        path = _base_of(delta)
    if deltas:
        said = files.read_metadata(path).get("digest", "")
        if said != deltas[-1].head.base_digest:
            raise _broken(deltas[-1], path, said)
    return Chain(path, deltas[::-1])


def load(
    path: Path, framework: Framework, *, held: Mapping[str, Any] | None = None, digest: str = ""
) -> dict[str, Any]:
    """The tensors of a version by name, in memory of their own; tied ones share it.

    `held`: verified weights of this `digest` in main memory, from which a delta on them starts; they stay as they are,
    and what did not change is shared with them. Verifies nothing but the links: the caller digests what it got. Raises
    WeightsError.
    """
    chain = resolve(path, held=digest if held is not None else "")
    if chain.full is None:
        assert held is not None
        changed = {name for delta in chain.deltas for name in changed_in(delta)}
        begin = held
    else:
        begin = files.to_framework(files.read_raw(chain.full), framework)
        changed = set(begin)  # the file is mapped: what is digested must be what is kept
    layouts = {name: files.raw(tensor) for name, tensor in begin.items()}
    for delta in chain.deltas:
        delta.check_base(layouts)
    distinct = {id(tensor): tensor for name, tensor in begin.items() if name in changed}
    copies = dict(zip(distinct, in_order(copy, [(tensor,) for tensor in distinct.values()]), strict=True))
    tensors = {name: copies.get(id(tensor), tensor) for name, tensor in begin.items()}
    overlay(tensors, chain.deltas)
    return tensors


def materialize_to_file(path: Path, out: Path, *, digest: str) -> None:
    """Make `out` the full safetensors file of the version in `path`; whole or not there at all.

    One tensor at a time: memory holds the largest, whatever the model. Raises WeightsError when the chain is broken or
    gives weights of another digest than this, and NoRoom.
    """
    chain = resolve(path)
    name = parse_name(path.name)
    notes = {"format": "pt", "digest": digest}
    if name is not None:
        notes |= {"epoch": str(name.epoch), "version": str(name.version)}

    def write(file: BinaryIO) -> None:
        found = write_chain(file, chain, notes)
        if found != digest:
            raise WeightsError(f"{path}: gives weights of digest {found}, expected {digest}{blame(chain)}")

    write_durably(out, write)


def write_chain(file: BinaryIO, chain: Chain, metadata: Mapping[str, str]) -> str:
    """Write the version at the end of the chain as one safetensors file; returns the digest of what was written."""
    base, stored, tied = _base_for(chain)
    contents: dict[str, bytes] = {}

    def data_of(name: str) -> NDArray[np.uint8]:
        data = _at_the_end(base[name], name, chain.deltas)
        contents[name] = hashlib.sha256(data.data).digest()
        return data

    files.write_parts(file, stored, tied, metadata, data_of)
    return _digest(base, tied, contents)


def digest_of(path: Path) -> str:
    """Of the weights that a published file, with its chain, gives; tensor by tensor. Raises WeightsError."""
    chain = resolve(path)
    base, stored, tied = _base_for(chain)
    contents = {
        name: hashlib.sha256(_at_the_end(base[name], name, chain.deltas).data).digest() for name in stored
    }
    return _digest(base, tied, contents)


def blame(chain: Chain) -> str:
    """Why a chain whose links fit gives the wrong digest, for a message: the full file's bytes; "" if they are good."""
    if chain.full is None or not chain.deltas:
        return ""
    said, found = chain.deltas[0].head.base_digest, files.digest_raw(files.read_raw(chain.full))
    return "" if said == found else f"; {chain.full.name} is damaged: it has digest {found}, should be {said}"


# ---------------------------------------------------------------- which files belong together
def needed_by(folder: Path, names: Collection[str]) -> set[str]:
    """Names of the files in the folder without which these could not be read, themselves included.

    The guarantee "no base is removed that a kept delta needs" lives here. Where a delta cannot be read, nobody knows
    what it needs: then every older file of its epoch counts as needed.
    """
    needed: set[str] = set()
    for name in names:
        path = folder / name
        while path.name not in needed and path.exists():
            needed.add(path.name)
            if path.suffix != SUFFIX:
                break
            try:
                path = _base_of(open_delta(path))
            except WeightsError:
                needed |= _older_of_its_epoch(path)
                break
    return needed


def link_chain(path: Path, folder: Path) -> Path:
    """Hard links, in a folder of their own, of all files that this version needs, so that retention may take them.

    Returns the version's path there. Raises WeightsError for a broken chain and OSError on another file system.
    """
    chain = resolve(path)
    assert chain.full is not None
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for each in (chain.full, *(delta.path for delta in chain.deltas)):
            os.link(each, folder / each.name)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder / path.name


def _base_of(delta: Delta) -> Path:
    """The file of the version that a delta was made on. Raises WeightsError when there is none."""
    head, folder = delta.head, delta.path.parent
    if (head.base_epoch, head.base_version) >= (head.epoch, head.version):
        raise WeightsError(
            f"{delta.path}: says that it is a delta on version {head.base_version}, a later one"
        )
    for suffix in (FULL_SUFFIX, SUFFIX):
        path = folder / file_name(head.base_epoch, head.base_version, suffix)
        if path.is_file():
            return path
    raise WeightsError(
        f"{delta.path}: is a delta on version {head.base_version} of epoch {head.base_epoch}, which is not in "
        f"{folder} (removed, or not shared)"
    )


def _older_of_its_epoch(path: Path) -> set[str]:
    own = parse_name(path.name)
    if own is None:
        return set()
    found = ((entry.name, parse_name(entry.name)) for entry in path.parent.iterdir())
    return {name for name, each in found if each and each.epoch == own.epoch and each.version <= own.version}


def _broken(delta: Delta, base: Path, digest: str) -> WeightsError:
    return WeightsError(
        f"{delta.path}: was made on digest {delta.head.base_digest}, but {base.name} holds {digest or 'no digest'}"
    )


def _base_for(chain: Chain) -> tuple[dict[str, RawTensor], dict[str, RawTensor], dict[str, str]]:
    """The full file at the beginning: (all tensors, those that it stores, {tied name: stored name}).

    Raises WrongBase unless its deltas were made on such tensors.
    """
    assert chain.full is not None
    base = files.read_raw(chain.full)
    for delta in chain.deltas:
        delta.check_base(base)
    stored, tied = files.split_tied(base)
    for delta in chain.deltas:
        if delta.head.tied != tied:
            raise WrongBase(f"{delta.path.name}: other tensors share their memory than in {chain.full.name}")
    return base, stored, tied


def _digest(base: Mapping[str, RawTensor], tied: Mapping[str, str], contents: Mapping[str, bytes]) -> str:
    return files.digest_of_parts(base, {**contents, **{name: contents[of] for name, of in tied.items()}})


def _at_the_end(tensor: RawTensor, name: str, deltas: Sequence[Delta]) -> NDArray[np.uint8]:
    """Bytes of one tensor after all deltas; the mapped file's own where none of them touches it."""
    touching = [delta for delta in deltas if delta.head.tensors[name].n_changed]
    if not touching:
        return tensor.data
    data = np.array(tensor.data)
    for delta in touching:
        delta.overwrite({name: data})
    return data
