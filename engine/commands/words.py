"""`--tokenizer`: the text of token ids, for commands that show trajectories.

A Hugging Face folder is read with the tokenizers library alone; neither torch nor the model is loaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from streams.errors import ConfigError

if TYPE_CHECKING:
    from engine.settings import Config

Decoder = Callable[[Sequence[int]], str]

OF_THE_RUN = ""  # what `--tokenizer` without a path means
FILE = "tokenizer.json"


def add_tokenizer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        nargs="?",
        const=OF_THE_RUN,
        help="show tokens as text, with this Hugging Face folder's tokenizer; without PATH (then write it last): "
        "with that of the run's model.path",
    )


def decoder(args: argparse.Namespace, config: Config) -> Decoder | None:
    """Text of token ids, special tokens kept; None when no tokenizer was asked for. Raises ConfigError."""
    if args.tokenizer is None:
        return None
    if args.tokenizer != OF_THE_RUN:
        return _from_folder(Path(args.tokenizer), f"--tokenizer {args.tokenizer}")
    if config.model.path:
        return _from_folder(Path(config.model.path), f"--tokenizer: model.path = {config.model.path!r}")
    if config.rollout.backend == "scripted":
        return _of_script(config)
    raise ConfigError(
        "--tokenizer: this run has no model.path; name a Hugging Face folder, as in --tokenizer PATH"
    )


def _from_folder(path: Path, said: str) -> Decoder:
    """The tokenizer of a folder that holds a tokenizer.json, or of that file."""
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"{said}: no {FILE} there; save one with AutoTokenizer.from_pretrained(…).save_pretrained(PATH)"
        )
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError(f"{said}: needs the tokenizers library; pip install 'millstream[train]'") from None
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library has no class of its own for what it cannot read
        raise ConfigError(f"{said}: {file} is no tokenizer: {error}") from None
    size = tokenizer.get_vocab_size()
    return _every_id(lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False), size)


def _of_script(config: Config) -> Decoder:
    """The tokenizer of the scripted engine (engine/rollout/scripted.py)."""
    from engine.rollout.text import ByteTokenizer, WordTokenizer

    words = config.rollout.options.get("words")
    tokenizer = ByteTokenizer() if words is None else WordTokenizer(words)
    return _every_id(tokenizer.decode, 257 if words is None else len(words))


def _every_id(decode: Decoder, size: int) -> Decoder:
    """`decode` for ids of a vocabulary of `size`; others are shown as numbers, `<123>`, instead of left out."""

    def text(ids: Sequence[int]) -> str:
        if not len(ids) or max(ids) < size:
            return decode(ids)
        parts: list[str] = []
        known: list[int] = []
        for each in ids:
            if each < size:
                known.append(each)
                continue
            parts += [decode(known)] * bool(known) + [f"<{each}>"]
            known = []
        return "".join(parts + [decode(known)] * bool(known))

    return text
