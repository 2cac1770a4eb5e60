"""`millstream tail`: the records of one topic, readable."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from typing import TYPE_CHECKING, NamedTuple

from engine.commands import common, words
from streams.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.settings import Config
    from replay.picks import Pick
    from replay.render import Look, Shower
    from replay.tail import Start, Tail
    from streams.log import EventLog
    from streams.topics import Topics

NAME = "tail"
HELP = "show the records of a topic, as kcat does"
DESCRIPTION = """Show the events of one topic, oldest first, and wait for more (-e: stop at the end). Each is one
line; long arrays are abbreviated (--json has them whole); unknown types, dead letters and records
that cannot be read are shown verbatim. Reads by position: it commits nothing and joins no group, so
it is safe beside a live run.

topics: tasks, trajectories, rewards, groups, ledger, fleet, metrics, dead

--where EXPR compares fields of the event, as --json shows them, and of its record (partition, offset,
timestamp_ms, type, headers.by, problem):
  == != < <= > >=  =~ (regular expression)  in  not in  and  or  not  len(…)  null  [lists]  'texts'
A field that is missing is null; null compares false. metadata.level and members.reward reach inside."""
EXAMPLE = """  millstream tail runs/demo ledger -o -20 -e
  millstream tail runs/demo rewards -g 0-3 -e
  millstream tail runs/demo rewards -e --where 'reward > 0.5 and finish_reason == "length"'
  millstream tail runs/demo ledger -e --where 'type == "batch_cut" and "0-7" in drops.group_id'
  millstream tail runs/demo trajectories -c 1 --json
  millstream tail runs/demo trajectories -o @2026-11-01T10:00:00Z -p 1 --tokenizer
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
    until = parser.add_mutually_exclusive_group()
    until.add_argument(
        "-e", "--exit", action="store_true", help="exit at the end instead of waiting for more"
    )
    until.add_argument("--follow", action="store_true", help="wait for more at the end (the default)")
    parser.add_argument("-c", "--count", metavar="N", type=_count, help="exit after N records")
    parser.add_argument(
        "-p", "--partition", metavar="P", type=_partitions, help="only these partitions, as in 3 or 0,2"
    )
    parser.add_argument("-g", "--group", metavar="ID", help="only records that name this group, as in 0-3")
    parser.add_argument(
        "-k", "--uid", metavar="UID", help="only records that name this sample, as in 0-3/1/0"
    )
    parser.add_argument("--where", metavar="EXPR", help="only records that meet a condition, see above")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "-f",
        "--format",
        metavar="FORMAT",
        help="%%t topic, %%p partition, %%o offset, %%k id, %%s event, %%S size, %%T time, %%h headers, \\n newline",
    )
    how.add_argument("--json", action="store_true", help="one JSON object per record")
    words.add_tokenizer(parser)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of records")
    return int(text)


def _partitions(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no partition and no list of them, such as 0,2")
    return sorted({int(part) for part in parts})


class _Place(NamedTuple):
    """What is looked at."""

    topic: str  # full name
    word: str
    partitions: list[int]


def execute(args: argparse.Namespace) -> int:
    from replay.tail import Tail, parse_start

    if args.format is not None and args.tokenizer is not None:
        raise ConfigError("--tokenizer goes with lines and with --json, not with -f; remove one of them")
    config = common.load(args)
    common.setup_logging("warning")
    topics, start = common.topics_of(config), parse_start(args.offset)
    picks = _picks(args)
    with common.open_for_reading(config) as log:
        place = _find(args, topics, log.topics())
        _check_fields(picks, place)
        show, opens = _shower(args, config, log, place)
        waits = _Waits(place, args)
        tail = Tail(
            log,
            place.topic,
            place.partitions,
            start,
            until_end=args.exit,
            count=args.count,
            picks=picks,
            opens=opens,
            on_wait=lambda: waits(tail),
        )
        _say_where_it_starts(log, place, start, args)
        _show_all(tail, place, show)
        if args.exit and not tail.shown:
            _say_why_nothing(tail, log, place, start, args)
    return 0


def _show_all(tail: Tail, place: _Place, show: Shower) -> None:
    write, topic = sys.stdout.write, place.topic
    try:
        for partition, entry in tail:
            write(show(topic, partition, entry))
    finally:
        if tail.lost:
            logger.warning("%d records were removed by retention before they could be shown", tail.lost)


# ---------------------------------------------------------------- what is looked at
def _find(args: argparse.Namespace, topics: Topics, known: dict[str, int]) -> _Place:
    """The topic given by its word or its full name, and its partitions."""
    for name in (args.topic, f"{topics.run}.{args.topic}"):
        if name in known:
            break
    else:
        names = ", ".join(topics.word(name) for name in sorted(known)) or "none yet"
        raise ConfigError(f"no topic {args.topic!r} in this run; it has {names}")
    count = known[name]
    partitions = list(range(count)) if args.partition is None else args.partition
    if partitions[-1] >= count:
        has = "partition 0 alone" if count == 1 else f"partitions 0 to {count - 1}"
        raise ConfigError(f"-p {partitions[-1]}: {name} has {has}")
    return _Place(name, topics.word(name), partitions)


def _picks(args: argparse.Namespace) -> list[Pick]:
    from replay.picks import Meets, NamesGroup, NamesSample
    from replay.where import parse_where

    picks: list[Pick] = []
    if args.group is not None:
        if "/" in args.group:
            raise ConfigError(
                f"-g {args.group}: a group is data epoch and row, as in 0-3; did you mean "
                f"-g {args.group.partition('/')[0]}, or -k for the sample?"
            )
        picks.append(NamesGroup(args.group))
    if args.uid is not None:
        if re.fullmatch(r"[^/]+/\d+/\d+", args.uid) is None:
            hint = {0: f"-g {args.uid} for its group", 1: f"-k {args.uid}/0"}.get(args.uid.count("/"))
            raise ConfigError(
                f"-k {args.uid}: a sample is group, index and attempt, as in 0-3/1/0"
                + (f"; did you mean {hint}?" if hint else "")
            )
        picks.append(NamesSample(args.uid))
    if args.where is not None:
        picks.append(Meets(parse_where(args.where)))
    return picks


def _check_fields(picks: Sequence[Pick], place: _Place) -> None:
    """Refuse a field that no event of the topic has. What an event of an unknown type holds is `event.name`."""
    from typing import get_args

    from replay.picks import Meets
    from replay.where import names_of
    from streams.catalogue import TOPICS

    if place.word not in TOPICS:
        return
    union = TOPICS[place.word][1]
    for pick in picks:
        if isinstance(pick, Meets):
            pick.where.check(names_of(get_args(union) or (union,)), place.word)


# ---------------------------------------------------------------- how it is shown
def _shower(args: argparse.Namespace, config: Config, log: EventLog, place: _Place) -> tuple[Shower, bool]:
    """What makes the text of an entry, and whether it needs the event."""
    from replay import render

    if args.format is not None:
        return render.formatter(args.format)
    text = words.decoder(args, config)
    if args.json:
        return lambda topic, partition, entry: render.as_json(topic, partition, entry, text) + "\n", True
    look, word = _look(log, place) if _is_terminal() else render.PLAIN, place.word
    if text is not None:
        look = look._replace(text=text)
    return lambda topic, partition, entry: render.line(word, partition, entry, look) + "\n", True


def _look(log: EventLog, place: _Place) -> Look:
    """Columns as wide as the longest place and the usual type; colours unless they are unwanted."""
    from replay.render import Look

    longest = max(len(f"{place.word}/{p}:{log.end(place.topic, p)}") for p in place.partitions)
    is_coloured = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return Look(longest, len("trajectory_finished"), is_coloured)


def _is_terminal() -> bool:
    return sys.stdout.isatty()


# ---------------------------------------------------------------- what is said beside it, on stderr
def _say_where_it_starts(log: EventLog, place: _Place, start: Start, args: argparse.Namespace) -> None:
    """A time after the last record is no error: the record may come."""
    from replay.render import time_text
    from replay.tail import TIME, newest_ms

    if start.kind != TIME or any(
        start.position(log, place.topic, p) < log.end(place.topic, p) for p in place.partitions
    ):
        return
    newest = newest_ms(log, place.topic, place.partitions)
    last = "it is empty" if newest is None else f"its newest is of {time_text(newest)}"
    logger.warning(
        "%s has no record of %s or later, %s%s",
        place.word,
        time_text(start.value),
        last,
        "" if args.exit else "; waiting for one",
    )


def _say_why_nothing(
    tail: Tail, log: EventLog, place: _Place, start: Start, args: argparse.Namespace
) -> None:
    from replay.tail import TIME

    where = _where(args)
    if tail.looked_at:
        logger.warning("%s", _none_of(tail, place, args))
    elif all(log.end(place.topic, p) == log.start(place.topic, p) for p in place.partitions):
        logger.warning("%s%s is empty", where, place.word)
    elif start.kind != TIME:
        logger.warning("%s%s has no record from %s on", where, place.word, args.offset)


class _Waits:
    """Called before each wait for more; the first time it says so if nothing was wanted of what is there."""

    def __init__(self, place: _Place, args: argparse.Namespace) -> None:
        self._place, self._args, self._is_first = place, args, True

    def __call__(self, tail: Tail) -> None:
        sys.stdout.flush()
        picky = any(each is not None for each in (self._args.group, self._args.uid, self._args.where))
        if self._is_first and picky and tail.looked_at and not tail.shown:
            logger.warning(
                "%s; waiting for one (-e: stop at the end)", _none_of(tail, self._place, self._args)
            )
        self._is_first = False


def _none_of(tail: Tail, place: _Place, args: argparse.Namespace) -> str:
    wanted = [f"names {what} {name}" for what, name in (("group", args.group), ("sample", args.uid)) if name]
    wanted += [f"meets {args.where!r}"] if args.where is not None else []
    return (
        f"none of the {tail.looked_at} records of {_where(args)}{place.word} that were looked at "
        f"{' and '.join(wanted)}"
    )


def _where(args: argparse.Namespace) -> str:
    return f"partition {','.join(map(str, args.partition))} of " if args.partition is not None else ""
