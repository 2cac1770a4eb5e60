"""`millstream replay`: make a run's steps again, offline."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.commands import common
from streams.errors import ConfigError

if TYPE_CHECKING:
    from engine.config import Config
    from engine.replaying.ab import VersusReport
    from engine.replaying.comparison import Comparison
    from engine.replaying.settings import Plan
    from engine.replaying.shown import Machines
    from engine.replaying.steps import Record

NAME = "replay"
HELP = "make a run's steps again from its log; compare, or change a setting"
DESCRIPTION = """Make the recorded steps again on this machine, from the newest checkpoint before --from (or from
the initial weights), in the recorded order and with the recorded seeds. No engine, no reward function
and no GPU are needed, and the run is only read: the results go to a new folder.

Without --set the weights of each published version and every metric that does not depend on a clock
are compared with the record, bit for bit: exits with 1 and names the first difference if there is one.

With --set of the loss, the clip range, the learning rate or the staleness limit (…) the steps are made
with the changed setting (B) beside the recorded ones (A), on identical data: a table, a picture and
JSON. A stricter limit leaves groups out; a looser one cannot bring back what the run dropped. Which
reward B would have earned cannot be known from a log."""
EXAMPLE = """  millstream replay runs/demo
  millstream replay runs/demo --from 51 --to 100
  millstream replay runs/demo --set trainer.loss=tis --out runs/demo-tis
  millstream replay runs/demo --set staleness.max_weight_staleness=0 --json | jq .means"""

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_config(parser)
    parser.add_argument(
        "--from", metavar="STEP", type=common.positive, dest="first", help="first step (default: 1)"
    )
    parser.add_argument(
        "--to", metavar="STEP", type=common.positive, dest="last", help="last step (default: all)"
    )
    parser.add_argument(
        "--out", metavar="DIR", help="new folder for the results (default: runs/replay-NAME-TIME)"
    )
    parser.add_argument(
        "--save", action="store_true", help="write the last weights too, as a Hugging Face folder DIR/model"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")


def execute(args: argparse.Namespace) -> int:
    from datetime import datetime

    from engine.commands.rundir import refuse_other_run
    from engine.replaying.folder import new_folder
    from engine.replaying.settings import make_plan
    from engine.replaying.shown import encode
    from engine.replaying.steps import read_record

    plan = make_plan(args)
    common.setup_logging("info")
    if args.overrides and not plan.changes:
        logger.info("no --set changes how the run was trained: the steps are compared with the record")
    if args.save and plan.recorded.trainer.backend != "torch":
        raise ConfigError(
            f'--save: trainer.backend = "{plan.recorded.trainer.backend}" has no Hugging Face folder to write'
        )
    refuse_other_run(plan.own, patient=False)
    require_model(plan.recorded)
    with common.open_for_reading(plan.recorded) as log:
        record = read_record(log, common.topics_of(plan.recorded), args.first, args.last)
        folder = new_folder(args.out, plan.recorded, datetime.now())
        report, backend, code = (_versus if plan.changes else _compare)(plan, record, folder)
    text = encode(report.as_dict())
    (folder / "replay.json").write_text(text, encoding="utf-8")
    written = ["replay.json", *_picture(report, folder / "replay.png")]
    if args.save:
        from engine.replaying.save import save_model

        save_model(backend, plan.recorded, folder / "model")
        written.append("model")
    sys.stdout.write(text if args.json else report.as_table())
    logger.info("written to %s: %s", folder, ", ".join(written))
    return code


def require_model(config: Config) -> None:
    """Raise ConfigError if the model that the steps begin with is not on this machine."""
    from engine.commands.rundir import IMPORTED_FILE

    if config.trainer.backend == "scalar" or (Path(config.model.path) / "config.json").is_file():
        return
    why = ""
    if (Path(config.run.dir) / IMPORTED_FILE).is_file():
        why = "the slice was made without it: export these steps again with --with-model, or "
    raise ConfigError(
        f"model.path = {config.model.path!r}: not a Hugging Face folder (no config.json in it), and the steps are "
        f"made again from that model; {why}name it with --set model.path=DIR"
    )


def _compare(plan: Plan, record: Record, folder: Path) -> tuple[Comparison, Any, int]:
    from engine.replaying.comparison import Comparison
    from engine.replaying.steps import again, build, find_origin, weights_at

    origin = find_origin(record, Path(plan.own.run.dir) / "checkpoints")
    machines = _machines(plan, record)
    backend = build(plan.recorded)
    report = Comparison(record, origin, weights_at(backend, origin), machines)
    for step in again(record, backend, origin):
        report.add(step)
    return report, backend, 0 if report.is_equal else 1


def _versus(plan: Plan, record: Record, folder: Path) -> tuple[VersusReport, Any, int]:
    from engine.replaying.ab import VersusReport
    from engine.replaying.steps import find_origin, versus
    from engine.weights.tensors import digest

    origin = find_origin(record, Path(plan.own.run.dir) / "checkpoints")
    machines = _machines(plan, record)
    found, backend = versus(record, plan, origin, folder)
    return VersusReport(record, origin, plan, found, digest(backend.weights()), machines), backend, 0


def _machines(plan: Plan, record: Record) -> Machines:
    """The run's machine and this one, on as many threads."""
    from engine.replaying.machine import here, made_with, set_threads
    from engine.replaying.shown import Machines

    then = made_with(record.checkpoints, Path(plan.own.run.dir) / "checkpoints")
    set_threads(plan.recorded, then)
    return Machines(then, here(plan.recorded))


def _picture(report: Comparison | VersusReport, path: Path) -> list[str]:
    """Draw it, if there is something to draw and to draw with: the figures themselves are in replay.json."""
    from engine.picture import lines

    panels = report.panels()
    if not panels:
        return []
    try:
        lines(path, panels, title=report.title)
    except ConfigError as error:
        logger.warning("no picture: %s", error)
        return []
    return [path.name]
