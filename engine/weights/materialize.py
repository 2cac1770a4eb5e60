"""One published version as a folder that any Hugging Face reader opens.

    its file, if it verifies ─► else its chain of deltas ─► else a checkpoint and the steps after it, made again
                                        │
        .OUT.xxxx.tmp/model.safetensors ┴─► digest = the ledger's? ─► configuration, tokenizer ─► one rename to OUT

Whatever the way, what was written is compared with the digest that the ledger recorded (an adapter before it is merged
into its base). Nothing is written into the run's directory.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from consumers.ledger import Ledger
from engine.interfaces import CheckpointError, TrainerBackend
from engine.trainer.rerun import nearest_checkpoint, rerun
from engine.weights import chain, lora
from engine.weights import tensors as files
from engine.weights.delta import SUFFIX
from engine.weights.durable import sync_folder, write_durably
from engine.weights.published import Found, Publications, counted, made_from, stored_file
from engine.weights.tensors import NoRoom, WeightsError
from streams.errors import ConfigError, MillstreamError
from streams.events import WeightsPublished
from streams.log import EventLog
from streams.topics import Topics

logger = logging.getLogger(__name__)

MODEL_FILE = "model.safetensors"
_COMPANIONS = (
    ".json",
    ".txt",
    ".model",
    ".jinja",
    ".tiktoken",
    ".py",
)  # configuration, tokenizer, code of its own
_NOT = ".index.json"  # of weights in several files; these are in one
_SAY_EVERY_S = 10.0


class Run(NamedTuple):
    """What is read."""

    log: EventLog
    topics: Topics
    run_dir: Path
    model: Path | None  # folder with configuration and tokenizer; None: the model is no Hugging Face one
    build: Callable[[], TrainerBackend]  # the run's trainer backend with its initial weights


class Made(NamedTuple):
    folder: Path
    published: WeightsPublished
    source: str  # in words
    nbytes: int  # of the weights' file


def check_out(out: Path, run_dir: Path) -> None:
    """Raise ConfigError unless OUT is free, and outside of the run's directory."""
    if out.resolve().is_relative_to(run_dir.resolve()):
        raise ConfigError(f"OUT = {out} lies in {run_dir}, the run's own directory; nothing is written there")
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"OUT = {out} is not empty; name a new folder, or remove what is in it")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"OUT = {out} is a file; name a new folder")


def materialize(run: Run, publications: Publications, found: Found, out: Path) -> Made:
    """Make the folder, whole or not at all.

    Raises ConfigError for an OUT that is not free, and MillstreamError when no way gives the published weights.
    """
    check_out(out, run.run_dir)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = out.parent / f".{out.name}.{secrets.token_hex(4)}.tmp"
        temporary.mkdir()
    except OSError as error:
        raise ConfigError(f"OUT = {out} cannot be made ({error.strerror})") from error
    try:
        source = _write_weights(run, publications, found, temporary / MODEL_FILE)
        if found.published.kind == lora.KIND:
            source += _merge(run, found.published, temporary / MODEL_FILE)
        copy_companions(run.model, temporary)
        sync_folder(temporary)
        try:
            temporary.rename(out)
        except OSError as error:
            raise MillstreamError(f"{out}: was made by somebody else meanwhile ({error.strerror})") from error
        sync_folder(out.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return Made(out, found.published, source, (out / MODEL_FILE).stat().st_size)


def _write_weights(run: Run, publications: Publications, found: Found, path: Path) -> str:
    """The first way that gives the published digest, in words."""
    published = found.published
    stored, reasons = stored_file(published, run.run_dir), []
    if stored is None:
        reasons.append("its file was removed (weights.keep)")
    for candidate in _candidates(stored):
        try:
            return _from_file(candidate, published, path)
        except NoRoom:
            raise
        except WeightsError as error:
            logger.warning("%s", error)
            reasons.append(str(error))
    origin = publications.origin(published, found.is_void)
    if isinstance(origin, str):
        reasons.append(origin)
        raise MillstreamError(
            f"e{published.epoch}-v{published.version} can no longer be had: {'; '.join(reasons)}. "
            "`millstream weights … list` says which versions can"
        )
    return _made_again(run, published, path)


def _candidates(stored: Path | None) -> list[Path]:
    """The full file, then the delta that lies beside it."""
    if stored is None:
        return []
    beside = stored.with_suffix(SUFFIX)
    return [stored, beside] if beside != stored and beside.is_file() else [stored]


def _from_file(stored: Path, published: WeightsPublished, path: Path) -> str:
    chain.materialize_to_file(stored, path, digest=published.digest)
    links = chain.resolve(stored)
    if links.full is None or not links.deltas:
        return f"the file {stored.name}"
    return f"the chain of {links.full.name} and {counted(len(links.deltas), 'delta')}"


def _made_again(run: Run, published: WeightsPublished, path: Path) -> str:
    """From the newest checkpoint before it, or the initial weights, and the steps that the ledger recorded."""
    ledger = Ledger(run.log, run.topics)
    history = ledger.catch_up()
    after = nearest_checkpoint(ledger.checkpoints, run.run_dir / "checkpoints", published.step)
    start = "the initial weights" if after is None else f"the checkpoint of step {after.step}"
    logger.info("steps up to %d are made again, from %s", published.step, start)
    backend, version, steps, said = (
        run.build(),
        after.version if after is not None else 0,
        0,
        time.monotonic(),
    )
    try:
        for redone in rerun(run.log, run.topics, backend, history, after=after, until_step=published.step):
            version, steps = redone.version, steps + 1
            if time.monotonic() - said > _SAY_EVERY_S:
                said = time.monotonic()
                logger.info("step %d of %d", redone.cut.step, published.step)
    except CheckpointError as error:
        raise MillstreamError(f"{start} cannot be loaded with these settings: {error}") from error
    way = made_from(start, steps)
    weights = {name: files.raw(tensor) for name, tensor in backend.weights().items()}
    digest = files.digest_raw(weights)
    if (version, digest) != (published.version, published.digest):
        raise MillstreamError(
            f"{way} give version {version} of digest {digest}, published was version {published.version} of digest "
            f"{published.digest}: another machine, library or number of threads rounds otherwise; "
            "`millstream replay` names the first step that differs"
        )
    notes = {"epoch": str(published.epoch), "version": str(version), "digest": digest}
    write_durably(path, lambda file: files.write_file(file, weights, {"format": "pt", **notes}))
    return way


def _merge(run: Run, published: WeightsPublished, path: Path) -> str:
    """Make the adapter in `path` the whole model that engines made of it; returns what to add to its source."""
    if run.model is None:
        raise MillstreamError("an adapter needs its base model; model.path names none")
    lora.Base(run.model).write_merged(published, path, path)
    return f", merged into {run.model.name}"


def copy_companions(model: Path | None, folder: Path) -> None:
    """Configuration, tokenizer and code: whatever the weights need that is no weight."""
    if model is None:
        return
    if not (model / "config.json").is_file():
        logger.warning("model.path = %s has no config.json: only %s is written", model, MODEL_FILE)
        return
    for path in sorted(model.iterdir()):
        if path.is_file() and path.suffix in _COMPANIONS and not path.name.endswith(_NOT):
            shutil.copyfile(path, folder / path.name)
