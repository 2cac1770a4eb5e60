"""`millstream show`: the life of one group, sample, step or version across all topics."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from engine.commands import common, words

if TYPE_CHECKING:
    from engine.settings import Config
    from replay.lives.facts import Life
    from replay.lives.sheet import Sheet

NAME = "show"
HELP = "the life of one group, sample, step or version"
DESCRIPTION = """Tell what became of one thing, across all topics and in time order: when it was dispatched, by which
engine and which versions it was generated, its tokens with the loss mask made visible, its reward, and
whether it was trained or dropped, by which step, at which age, for which reason and by which setting.
Reads by position: it commits nothing and joins no group, so it is safe beside a live run.

ids:
  group    0-3         data epoch and row of the dataset
  sample   0-3/1/0     group, index, attempt; 0-3/1 is the attempt that counts
  step     12
  version  7 or e3-v7  the number, or epoch and number"""
EXAMPLE = """  millstream show runs/demo group 0-3
  millstream show runs/demo sample 0-3/1/0 --tokenizer
  millstream show runs/demo step 12 --html step12.html
  millstream show runs/demo version 7 --json | jq .holders"""

logger = logging.getLogger(__name__)

# what the styles of replay/lives/text.py look like on a terminal
STYLES = {
    "title": "bold",
    "heading": "bold underline",
    "name": "cyan",
    "dim": "dim",
    "void": "strike dim",
    "good": "bold green",
    "bad": "bold red",
    "waiting": "bold yellow",
    "trained": "green",
    "trainable": "default",
    "too_old": "strike red",
    "masked": "dim",
    "environment": "italic magenta",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_config(parser)
    parser.add_argument(
        "kind", metavar="KIND", choices=["group", "sample", "step", "version"], help="%(choices)s"
    )
    parser.add_argument("id", metavar="ID", help="see above")
    parser.add_argument("--json", action="store_true", help="one JSON object with every fact")
    parser.add_argument(
        "--html",
        metavar="FILE",
        type=Path,
        help="write one self-contained page (the text is not printed then)",
    )
    words.add_tokenizer(parser)


def execute(args: argparse.Namespace) -> int:
    from replay.lives.tell import life

    config = common.load(args)
    common.setup_logging("warning")
    decode = words.decoder(args, config)
    with common.open_for_reading(config) as log:
        topics, estimator = common.topics_of(config), _estimator(config)
        found = life(log, topics, args.kind, args.id, decode, estimator=estimator)
    if args.html is not None:
        _write_page(args.html, found)
    if args.json:
        _print_json(found)
    elif args.html is None:
        _print(found)
    return 0


def _estimator(config: Config) -> str:
    from engine.config_effects import WITHOUT_ADVANTAGES

    return "" if config.trainer.loss in WITHOUT_ADVANTAGES else config.trainer.advantage_estimator


def _write_page(file: Path, found: Life) -> None:
    from replay.lives.page import as_page
    from replay.lives.sheets import sheet_of

    file.write_text(as_page(sheet_of(found)), encoding="utf-8")
    print(f"millstream: wrote {file}", file=sys.stderr)


def _print_json(found: Life) -> None:
    import msgspec

    sys.stdout.write(msgspec.json.encode(found, enc_hook=repr).decode() + "\n")


def _print(found: Life) -> None:
    """Coloured on a terminal, plain text elsewhere."""
    from replay.lives.sheets import sheet_of
    from replay.lives.text import as_text

    sheet = sheet_of(found)
    if sys.stdout.isatty():
        _print_styled(sheet)
    else:
        sys.stdout.write(as_text(sheet))


def _print_styled(sheet: Sheet) -> None:
    from rich.console import Console
    from rich.text import Text

    from replay.lives.text import lines_of

    console = Console(highlight=False, soft_wrap=True)
    for line in lines_of(sheet):
        console.print(Text.assemble(*((piece.text, STYLES.get(piece.style, "")) for piece in line)))
