"""`millstream topics`: what lies in each topic, how far each group of readers has come, and which engine holds what;
or make the topics."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from engine.commands import common

if TYPE_CHECKING:
    from engine.settings import Config

NAME = "topics"
HELP = "topics, offsets, the lag of each group, and the engines"
DESCRIPTION = """List the run's topics with the offsets they keep, then what each group of readers has read and its
lag. A group's positions are hints that it leaves now and then, for display only. Then the engines:
the state of each, the version and digest that it acknowledged, by which transport it came, since
when, and when its daemon was last heard of (one that was killed says nothing any more). Reads,
never writes: safe beside a live run.

With --create, make the run's topics instead, with the partitions, retention, record size and
replication of the configuration, and say which were made and which were there. A topic that is
there and not as the run needs it is refused by name. `millstream run` does the same; a daemon that
is started by itself on Kafka does not, and auto-creation is never relied upon."""
EXAMPLE = """  millstream topics runs/demo
  millstream topics runs/demo --json | jq 'select(.topic == "rewards")'
  millstream topics runs/demo --json | jq 'select(.engine) | {engine, state, version, digest}'
  millstream topics my.toml --create"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_config(parser)
    parser.add_argument(
        "--json", action="store_true", help="one JSON object per partition and per engine (or topic made)"
    )
    parser.add_argument("--create", action="store_true", help="make the topics that are not there")


def execute(args: argparse.Namespace) -> int:
    from replay import fleet
    from replay import topics as view

    config = common.load(args)
    if args.create:
        sys.stdout.write(_created(config, as_json=args.json))
        return 0
    with common.open_for_reading(config) as log:
        rows = view.partition_rows(log, common.topics_of(config))
        engines = fleet.fleet_rows(log, common.topics_of(config))
    if args.json:
        sys.stdout.write(view.as_json(rows) + fleet.as_json(engines))
    else:
        sys.stdout.write("\n".join(filter(None, (view.as_table(rows), fleet.as_table(engines)))))
    return 0


def _created(config: Config, *, as_json: bool) -> str:
    """Make what is missing; returns what to print. Raises ConfigError for a topic that is there and is not right."""
    from engine.commands import rundir
    from engine.roles import open_run_log
    from replay.topics import columns
    from streams.errors import ConfigError, TopicMismatch
    from streams.topics import ALL_TOPICS, KEPT_TOPICS

    common.require_shared_log(config)
    rundir.refuse_other_run(config, patient=False)
    topics = common.topics_of(config)
    with open_run_log(config) as log:
        try:
            made = set(topics.create(log))
        except TopicMismatch as error:
            raise ConfigError(f"{error}; change the topic, or choose another run.name or log.url") from error
    rows = [
        (
            topics.name(word),
            topics.count(word),
            "kept" if word in KEPT_TOPICS else "by retention",
            "made" if topics.name(word) in made else "was there",
        )
        for word in ALL_TOPICS
    ]
    head = ("topic", "partitions", "records", "result")
    if as_json:
        return "".join(json.dumps(dict(zip(head, row, strict=True))) + "\n" for row in rows)
    return columns([tuple(map(str.upper, head)), *(tuple(map(str, row)) for row in rows)])
