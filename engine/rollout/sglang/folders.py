"""Published weights as model folders, which is what SGLang reads.

    served/rollout-0/
        e3-v16.4/   what the server holds; kept, so that a failed update can go back to it
        e3-v17.5/   config.json, tokenizer…: links to the model's own
                    model.safetensors: a hard link of the published file, or made from its chain of deltas, or the
                    model's own weights with the published adapter added

A published file is linked first and verified then: what was verified is what the server reads, whatever retention
does meanwhile. Names and shapes are compared with the model's own, since SGLang passes over a name that it does not
know and reports success.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.interfaces import EngineError
from engine.rollout.loading import WEIGHTS_MISMATCH, WEIGHTS_UNREADABLE
from engine.rollout.sglang.spans import label
from engine.weights import chain, lora
from engine.weights import tensors as files
from engine.weights.tensors import WeightsError
from streams.errors import ConfigError
from streams.events import WeightsPublished

MODEL_FILE = "model.safetensors"
_COMPANIONS = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
_NOT = ".index.json"  # of weights in several files; these are in one
_WORDS = {
    "float16": "F16",
    "half": "F16",
    "bfloat16": "BF16",
}  # SGLang's --dtype → word of a safetensors header
_MOST_NAMES = 5  # in a message


class VersionFolders:
    """The folders of one engine; `root` is its own, on the file system of the weights where possible.

    Raises ConfigError when the model's folder cannot be used.
    """

    def __init__(self, model: Path, root: Path) -> None:
        self.model, self.root = model, root
        self._own, self._base = _own_shapes(model), lora.Base(model)
        self._numbers = itertools.count()

    def make(self, published: WeightsPublished, path: Path) -> Path:
        """A folder with exactly the published weights, verified. Blocking.

        Raises EngineError("weights_unreadable" | "weights_mismatch"); then nothing is left behind.
        """
        if published.kind not in ("full", "delta", lora.KIND):
            detail = f"version {published.version} is of the unknown kind {published.kind!r}"
            raise EngineError(WEIGHTS_UNREADABLE, detail)
        name = f"{label(published.epoch, published.version)}.{next(self._numbers)}"
        folder = self.root / name
        try:
            shutil.rmtree(folder, ignore_errors=True)  # of a daemon that was killed
            folder.mkdir(parents=True)
            self._fill(folder, published, path)
        except (WeightsError, OSError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise EngineError(WEIGHTS_UNREADABLE, f"version {published.version}: {error}") from error
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder

    def keep_only(self, folder: Path | None) -> None:
        """Remove every other one."""
        if self.root.is_dir():
            for each in self.root.iterdir():
                if each != folder:
                    shutil.rmtree(each, ignore_errors=True)

    @staticmethod
    def is_lossless(server_dtype: str, folder: Path) -> bool:
        """Whether versions that differ must differ on the server too: it is known not to round what it is given."""
        if server_dtype in ("float32", "float"):
            return True
        words = {tensor.dtype for tensor in files.read_raw(folder / MODEL_FILE).values()}
        return words == {_WORDS.get(server_dtype)}

    def _fill(self, folder: Path, published: WeightsPublished, path: Path) -> None:
        file = folder / MODEL_FILE
        if published.kind == "full" and _link(path, file):
            found = chain.digest_of(file)
            if found != published.digest:
                raise EngineError(
                    WEIGHTS_MISMATCH,
                    f"{path.name} has digest {found[:16]}, version {published.version} was published as "
                    f"{published.digest[:16]}",
                )
        elif published.kind == lora.KIND:
            adapter = folder / "adapter"
            chain.materialize_to_file(path, adapter, digest=published.digest)
            self._base.write_merged(published, adapter, file)
            adapter.unlink()
        else:
            chain.materialize_to_file(path, file, digest=published.digest)
        self._check_names(file, published)
        for each in self.model.iterdir():
            if each.is_file() and each.suffix in _COMPANIONS and not each.name.endswith(_NOT):
                target = folder / each.name
                if not _link(each, target):
                    target.symlink_to(each.resolve())

    def _check_names(self, file: Path, published: WeightsPublished) -> None:
        """The guarantee that the server loads every tensor: those it would pass over are refused here."""
        given = files.read_raw(file)
        tied = set(json.loads(files.read_metadata(file).get(files.TIED_KEY, "{}")))
        unknown = sorted(set(given) - tied - set(self._own))
        missing = sorted(set(self._own) - set(given))
        wrong = sorted(
            f"{name} {list(tensor.shape)}≠{list(self._own[name])}"
            for name, tensor in given.items()
            if name in self._own and tensor.shape != self._own[name]
        )
        for what, names in (("unknown", unknown), ("missing", missing), ("wrong shape", wrong)):
            if names:
                some = ", ".join(names[:_MOST_NAMES]) + (", …" if len(names) > _MOST_NAMES else "")
                raise EngineError(
                    WEIGHTS_MISMATCH,
                    f"version {published.version} does not fit the model in {self.model}: {what}: {some}",
                )


def vocab_size(model: Path) -> int:
    """Of the model in this folder. Raises ConfigError."""
    config = _config(model)
    text = config.get("text_config")
    size = config.get("vocab_size", text.get("vocab_size") if isinstance(text, Mapping) else None)
    if not isinstance(size, int):
        raise ConfigError(f"model.path: {model / 'config.json'} tells no vocab_size")
    return size


def _config(model: Path) -> Mapping[str, Any]:
    file = model / "config.json"
    try:
        came = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path: needed a Hugging Face folder; {file} cannot be read: {error}"
        ) from None
    return came if isinstance(came, dict) else {}


def _own_shapes(model: Path) -> dict[str, tuple[int, ...]]:
    """Name → shape, of what the model's own files hold."""
    found: dict[str, tuple[int, ...]] = {}
    try:
        for file in sorted(model.glob("*.safetensors")):
            found |= {name: tensor.shape for name, tensor in files.read_raw(file).items()}
    except WeightsError as error:
        raise ConfigError(f"model.path: {error}") from None
    if not found:
        raise ConfigError(
            f"model.path: {model} has no *.safetensors file; SGLang engines need the model in that form"
        )
    return found


def _link(source: Path, target: Path) -> bool:
    """A hard link; False where there can be none, as on another file system."""
    try:
        os.link(source.resolve(), target)
    except FileNotFoundError:
        raise
    except OSError:
        return False
    return True
