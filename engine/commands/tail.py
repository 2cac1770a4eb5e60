"""`millstream tail`: the records of one topic, readable."""

from __future__ import annotations

import argparse
import logging
import sys
from typing import TYPE_CHECKING

from engine.commands import common
from streams.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from replay.records import Entry
    from streams.topics import Topics

NAME = "tail"
HELP = "show the records of a topic, as kcat does"
DESCRIPTION = """Show the events of one topic, oldest first, and wait for more (-e: stop at the end). Each is one
line; long arrays are abbreviated (--json has them whole); unknown types, dead letters and records
that cannot be read are shown verbatim. Reads by position: it commits nothing and joins no group, so
it is safe beside a live run.

topics: tasks, trajectories, rewards, groups, ledger, fleet, metrics, dead"""
EXAMPLE = """  millstream tail runs/demo ledger -o -20 -e
  millstream tail runs/demo rewards -g 0-3 -e
  millstream tail runs/demo trajectories -c 1 --json
  millstream tail runs/demo tasks -e -f '%p:%o %T %k\\n'"""

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_config(parser)
    parser.add_argument("topic", metavar="TOPIC", help="tasks, ledger, … or the full name")
    parser.add_argument(
        "-o",
        "--offset",
        metavar="WHERE",
        default="beginning",
        help="beginning (default), end, N, -N for the last N of each partition, @time (milliseconds or RFC 3339)",
    )
    parser.add_argument(
        "-e", "--exit", action="store_true", help="exit at the end instead of waiting for more"
    )
    parser.add_argument("-c", "--count", metavar="N", type=_count, help="exit after N records")
    parser.add_argument("-p", "--partition", metavar="P", type=int, help="only this partition")
    parser.add_argument("-g", "--group", metavar="ID", help="only records that name this group")
    parser.add_argument("-k", "--uid", metavar="UID", help="only records that name this sample")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "-f",
        "--format",
        metavar="FORMAT",
        help="%%t topic, %%p partition, %%o offset, %%k id, %%s event, %%S size, %%T time, %%h headers, \\n newline",
    )
    how.add_argument("--json", action="store_true", help="one JSON object per record")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of records")
    return int(text)


def execute(args: argparse.Namespace) -> int:
    from replay.tail import Tail, parse_start

    config = common.load(args)
    common.setup_logging("warning")
    topics = common.topics_of(config)
    start, show = parse_start(args.offset), _shower(args, topics)
    with common.open_for_reading(config) as log:
        topic, count = _find(args.topic, topics, log.topics())
        partitions = range(count) if args.partition is None else [args.partition]
        if args.partition is not None and not 0 <= args.partition < count:
            raise ConfigError(f"-p {args.partition}: {topic} has partitions 0 to {count - 1}")
        tail = Tail(
            log,
            topic,
            partitions,
            start,
            until_end=args.exit,
            count=args.count,
            group_id=args.group,
            uid=args.uid,
        )
        try:
            for partition, entry in tail:
                sys.stdout.write(show(topic, partition, entry))
                if not args.exit:
                    sys.stdout.flush()
        finally:
            if tail.lost:
                logger.warning("%d records were removed by retention before they could be shown", tail.lost)
    return 0


def _shower(args: argparse.Namespace, topics: Topics) -> Callable[[str, int, Entry], str]:
    from replay import render

    if args.format is not None:
        return render.formatter(args.format)
    if args.json:
        return lambda topic, partition, entry: render.as_json(topic, partition, entry) + "\n"
    return lambda topic, partition, entry: render.line(topics.word(topic), partition, entry) + "\n"


def _find(asked: str, topics: Topics, known: dict[str, int]) -> tuple[str, int]:
    """Full name and partitions of a topic given by its word or its full name."""
    for name in (asked, f"{topics.run}.{asked}"):
        if name in known:
            return name, known[name]
    words = ", ".join(topics.word(name) for name in sorted(known)) or "none yet"
    raise ConfigError(f"no topic {asked!r} in this run; it has {words}")
