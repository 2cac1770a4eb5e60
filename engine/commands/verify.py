"""`millstream verify`: audit a run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from engine.commands import common

if TYPE_CHECKING:
    from streams.events import CheckpointSaved, WeightsPublished

NAME = "verify"
HELP = "audit a run: outcomes, staleness, references, files"
DESCRIPTION = """Read the whole log, without writing to it, and check what a run promises: each group ended exactly
once, no sample was trained twice, no trained token was older than the limit in force (judged again
from the payloads), references name what was trained, and the weights and checkpoints that still exist
hold what was published. Works on a live run too. Prints a table and the ids of every violation; exits
with 1 if there is one."""
EXAMPLE = """  millstream verify runs/demo
  millstream verify runs/demo --json | jq '.checks[] | select(.violations != [])'"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_config(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object, with every violation")


def execute(args: argparse.Namespace) -> int:
    from replay.verify import verify

    config = common.load(args)
    files = RunFiles(Path(config.run.dir))
    with common.open_for_reading(config) as log:
        report = verify(
            log,
            common.topics_of(config),
            weights_digest=files.weights_digest,
            checkpoint_digest=files.checkpoint_digest,
        )
    sys.stdout.write(report.as_json() if args.json else report.as_table())
    return 0 if report.holds else 1


class RunFiles:
    """What the files of a run directory hold now; None for one that is no longer there."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def weights_digest(self, published: WeightsPublished) -> str | None:
        from engine.weights import chain

        uri = published.uris.get("disk")
        if uri is None or not (self._run_dir / uri).exists():
            return None
        return chain.digest_of(self._run_dir / uri)

    def checkpoint_digest(self, saved: CheckpointSaved) -> str | None:
        from engine.trainer.checkpoint import CheckpointFound, open_checkpoint

        folder = self._run_dir / saved.path
        if not folder.exists():
            return None
        found = open_checkpoint(folder)
        if not isinstance(found, CheckpointFound):
            raise ValueError(found)
        return found.digest
