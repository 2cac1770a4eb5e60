"""`millstream export`: a run as tables, or a piece of its log as one file."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from engine.commands import common
from streams.errors import ConfigError

if TYPE_CHECKING:
    from engine.settings import Config
    from replay.export.choice import Choice
    from replay.export.export import Exported, OpenTable
    from replay.slices.select import Stretches
    from streams.log import EventLog
    from streams.topics import Topics

NAME = "export"
HELP = "write a run as tables (Parquet, JSON Lines), or a piece of its log as one file"
DESCRIPTION = """Tables: samples, rewards, groups, steps, drops, versions, fleet, metrics and failures, joined on uid,
group_id and step, for pandas, polars, DuckDB and Hugging Face datasets. Nothing is lost: what is no
sample is a row of failures. A killed export goes on where it was, and a new one into the same folder
adds what is new; rows that may still change are written last and replaced then.

A slice (--slice) is a piece of the log as it lies there, with the run's configuration but without
its secrets: something for a bug report, which `millstream import` opens again.

Reads by position, commits nothing and joins no group: safe beside a live run."""
EXAMPLE = """  millstream export runs/demo --to parquet
  millstream export runs/demo --to jsonl --out /tmp/demo --topic rewards --where 'reward > 0.5'
  millstream export runs/demo --to parquet --from-step 100 --where 'outcome == "dropped"'
  millstream export runs/demo --slice odd.mslice --groups 0-7,3-4
  millstream export runs/demo --slice start.mslice --to-step 5 --with-model"""

_INSTEAD = {
    "--groups": ': choose rows with --where, as in --where \'group_id in ["0-3", "3-4"]\'',
    "--where": ": a slice holds whole groups or whole steps; name them with --groups, or --from-step and --to-step",
    "--out": ": --slice names the file itself",
}

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_config(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--to", choices=("parquet", "jsonl"), help="write tables in this format")
    what.add_argument("--slice", metavar="FILE", help="write a slice of the log to this file")
    parser.add_argument("--out", metavar="DIR", help="folder for the tables (default: ./<run.name>-<format>)")
    parser.add_argument(
        "--topic",
        metavar="WORD",
        action="append",
        default=[],
        help="only what this topic tells; may be repeated",
    )
    parser.add_argument("--where", metavar="EXPR", default="", help="only rows that meet this condition")
    parser.add_argument("--from-step", metavar="N", type=common.natural, help="first step")
    parser.add_argument("--to-step", metavar="N", type=common.natural, help="last step")
    time_help = "only rows from this time on (milliseconds since 1970, or RFC 3339)"
    parser.add_argument("--since", metavar="TIME", help=time_help)
    parser.add_argument("--until", metavar="TIME", help="only rows before this time")
    parser.add_argument("--groups", metavar="ID,…", help="only these groups (for a slice)")
    parser.add_argument(
        "--with-model",
        action="store_true",
        help="take along what a replay starts from: the nearest checkpoint, and the model (for a slice)",
    )


def execute(args: argparse.Namespace) -> int:
    config = common.load(args)
    common.setup_logging("info")
    _refuse_mixtures(args)
    if args.slice is not None:
        return _slice(args, config)
    return _tables(args, config)


def _refuse_mixtures(args: argparse.Namespace) -> None:
    """Raises ConfigError for an option of the other kind of export."""
    for_tables = {"--out": args.out, "--where": args.where, "--since": args.since, "--until": args.until}
    for_slices = {"--groups": args.groups, "--with-model": args.with_model}
    strangers, kind = (for_tables, "--slice") if args.slice is not None else (for_slices, "--to")
    for name, value in strangers.items():
        if value:
            raise ConfigError(f"{name} does not go with {kind}{_INSTEAD.get(name, '')}")
    if args.groups and (args.from_step is not None or args.to_step is not None):
        raise ConfigError("--groups does not go with --from-step and --to-step: name groups or steps")


# ---------------------------------------------------------------- tables
def _tables(args: argparse.Namespace, config: Config) -> int:
    from replay.export.export import Export

    open_table = _format(args.to)
    folder = Path(args.out or f"{config.run.name}-{args.to}")
    with common.open_for_reading(config) as log:
        export = Export(
            log,
            common.topics_of(config),
            folder,
            to=args.to,
            choice=_choice(args),
            open_table=open_table,
            estimator=config.trainer.advantage_estimator,
            say=lambda text: logger.info("%s", text),
        )
        done = export.run()
    _report(done, folder)
    return 0


def _format(to: str) -> OpenTable:
    if to == "jsonl":
        from replay.export.files import JsonLinesTable

        return JsonLinesTable
    from engine.parquet import ParquetTable, require_pyarrow

    require_pyarrow()
    return ParquetTable


def _choice(args: argparse.Namespace) -> Choice:
    from replay.export.choice import Choice, check_topics

    return Choice(
        topics=check_topics(args.topic),
        where=args.where,
        from_step=args.from_step,
        to_step=args.to_step,
        since_ms=_moment("--since", args.since),
        until_ms=_moment("--until", args.until),
    )


def _moment(option: str, text: str | None) -> int | None:
    from replay.tail import parse_time

    if text is None:
        return None
    try:
        return parse_time(text)
    except ConfigError as error:
        raise ConfigError(
            str(error).replace(f"-o @{text}", f"{option} {text}").replace("as in @", "as in ")
        ) from None


def _report(done: Exported, folder: Path) -> None:
    from replay.topics import columns

    rows = [("TABLE", "ROWS", "NEW", "OPEN")]
    rows += [
        (name, str(count), str(done.added[name]), str(done.open_rows[name]))
        for name, count in done.rows.items()
    ]
    sys.stdout.write(columns(rows))
    if done.lost:
        logger.warning("%d records were removed by retention before they could be exported", done.lost)
    if not any(done.rows.values()):
        logger.info("%s: no record of the run is in this choice", folder)
    elif done.goes_on and not any(done.added.values()):
        logger.info("%s was whole already: nothing is new", folder)
    elif done.goes_on:
        logger.info("%s: an earlier export was continued", folder)
    else:
        logger.info("written to %s", folder)


# ---------------------------------------------------------------- a slice
def _slice(args: argparse.Namespace, config: Config) -> int:
    from engine.config import fingerprint
    from engine.portable import ModelFiles, model_files, portable_config
    from replay.export.choice import check_topics
    from replay.ledger import read_run
    from replay.slices.record import write_slice
    from replay.slices.select import of_topics

    path = Path(args.slice)
    if path.exists():
        raise ConfigError(f"--slice {path} exists: name a new file")
    if not path.parent.is_dir():
        raise ConfigError(f"--slice {path}: {path.parent} is no folder")
    words = check_topics(args.topic)
    with common.open_for_reading(config) as log:
        topics = common.topics_of(config)
        model = ModelFiles({}, 1)
        if args.with_model:
            model = model_files(config, read_run(log, topics).checkpoints, args.from_step or 1)
            if args.from_step and model.first_step != args.from_step:
                args.from_step = model.first_step
                logger.info("the slice begins with step %d, from where it can be replayed", model.first_step)
        stretches = _stretches(args, log, topics)
        if words:
            stretches = of_topics(stretches, words)
        written = write_slice(
            path,
            log,
            topics,
            stretches,
            source=config.log.url.partition(":")[0],
            chosen=_in_words(args),
            config=portable_config(config, with_model=args.with_model),
            fingerprint=fingerprint(config),
            made_ms=time.time_ns() // 1_000_000,
            files=model.files,
            say=lambda text: logger.warning("%s", text),
        )
    logger.info(
        "%s: %d records and %d files in %d bytes", path, written.n_records, len(model.files), written.n_bytes
    )
    if config.model.path and not args.with_model and not args.groups:
        logger.info("the model is not in it; --with-model takes it along, so that the slice can be replayed")
    return 0


def _stretches(args: argparse.Namespace, log: EventLog, topics: Topics) -> Stretches:
    from replay.slices import select

    if args.groups:
        ids = [each.strip() for each in args.groups.split(",") if each.strip()]
        return select.of_groups(log, topics, ids)
    if args.from_step is not None or args.to_step is not None:
        return select.of_steps(log, topics, args.from_step, args.to_step)
    return select.everything(log, topics)


def _in_words(args: argparse.Namespace) -> str:
    parts = [f"topics {', '.join(args.topic)}"] if args.topic else []
    if args.groups:
        parts.append(f"groups {args.groups}")
    if args.from_step is not None:
        parts.append(f"from step {args.from_step}")
    if args.to_step is not None:
        parts.append(f"to step {args.to_step}")
    return ", ".join(parts) or "everything"
