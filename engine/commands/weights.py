"""`millstream weights`: the published versions of a run, and any of them as a Hugging Face folder."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from engine.commands import common

if TYPE_CHECKING:
    from engine.interfaces import TrainerBackend
    from engine.settings import Config
    from engine.weights.published import Publications, Version
    from streams.log import EventLog

NAME = "weights"
HELP = "list the published versions; rebuild any of them as a Hugging Face folder"
DESCRIPTION = """list: every published version with what became of its weights: file (on disk), chain (rebuilt from a
full version and deltas), replay (made again from a checkpoint and the recorded steps), gone. A void
version was published by a trainer that had been replaced; an abandoned one was made anew, with other
weights, by a later trainer.

materialize V OUT: the version (7, e3-v7 or latest) as a new folder OUT with model.safetensors,
config.json and the tokenizer, as AutoModelForCausalLM.from_pretrained loads it. Its digest is compared
with the one in the ledger, however it was rebuilt. OUT appears whole or not at all; the run is only read."""
EXAMPLE = """  millstream weights runs/demo list
  millstream weights runs/demo list --json | jq '.versions[] | select(.source == "gone")'
  millstream weights runs/demo materialize 120 /tmp/model-120"""

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_config(parser)
    actions = parser.add_subparsers(dest="action", metavar="list|materialize", required=True)
    listing = actions.add_parser("list", help="every published version and where it can be had from")
    listing.add_argument("--json", action="store_true", help="one JSON object")
    making = actions.add_parser("materialize", help="one version as a Hugging Face folder")
    making.add_argument("version", metavar="V", help="a number, an epoch and a number as in e3-v7, or latest")
    making.add_argument("out", metavar="OUT", help="new folder, or an empty one")


def execute(args: argparse.Namespace) -> int:
    from engine.weights.published import Publications

    config = common.load(args)
    common.setup_logging("info")
    with common.open_for_reading(config) as log:
        publications = Publications(log, common.topics_of(config), Path(config.run.dir))
        if args.action == "list":
            versions = publications.list()
            sys.stdout.write(_as_json(config, versions) if args.json else _as_table(versions))
        else:
            _materialize(args, config, log, publications)
    return 0


def _materialize(args: argparse.Namespace, config: Config, log: EventLog, publications: Publications) -> None:
    from engine.commands.rundir import refuse_other_run
    from engine.config import load_config
    from engine.weights.materialize import Run, check_out, materialize

    # with other settings, steps made again give other weights; where the model lies does not matter
    refuse_other_run(load_config(args.config, _without_places(args.overrides)), patient=False)
    out = Path(args.out)
    check_out(out, Path(config.run.dir))
    found = publications.find(args.version)
    if found.warning:
        logger.warning("%s; its weights are written all the same", found.warning)
    run = Run(
        log,
        common.topics_of(config),
        Path(config.run.dir),
        Path(config.model.path) if config.trainer.backend == "torch" else None,
        lambda: _backend(config),
    )
    made = materialize(run, publications, found, out)
    name = f"e{made.published.epoch}-v{made.published.version}"
    sys.stdout.write(
        f"{made.folder}: {name}, the weights after step {made.published.step}, from {made.source}; "
        f"{made.nbytes:,} bytes, digest {made.published.digest} as in the ledger\n"
    )


def _backend(config: Config) -> TrainerBackend:
    from engine.commands.replay import require_model
    from engine.replaying.steps import build

    require_model(config)
    return build(config)


def _without_places(overrides: list[str]) -> list[str]:
    from engine.replaying.settings import PLACES

    return [item for item in overrides if item.partition("=")[0].strip() not in PLACES]


def _as_json(config: Config, versions: list[Version]) -> str:
    import msgspec

    return msgspec.json.encode({"run": config.run.name, "versions": versions}).decode() + "\n"


def _as_table(versions: list[Version]) -> str:
    from replay.topics import columns

    head = ("VERSION", "STEP", "KIND", "BYTES", "DIGEST", "STATE", "WEIGHTS", "SERVED BY", "FROM")
    rows = [
        (
            each.name,
            str(each.step),
            each.kind if each.base_version is None else f"{each.kind} on v{each.base_version}",
            str(each.nbytes),
            each.digest[:12],
            each.state,
            each.source,
            ", ".join(each.served_by) or "-",
            each.detail,
        )
        for each in versions
    ]
    return columns([head, *rows])
