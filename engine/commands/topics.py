"""`millstream topics`: what lies in each topic, and how far each group of readers has come."""

from __future__ import annotations

import argparse
import sys

from engine.commands import common

NAME = "topics"
HELP = "topics, offsets and the lag of each group"
DESCRIPTION = """List the run's topics with the offsets they keep, then what each group of readers has read and its
lag. A group's positions are hints that it leaves now and then, for display only. Reads, never
writes: safe beside a live run."""
EXAMPLE = """  millstream topics runs/demo
  millstream topics runs/demo --json | jq 'select(.topic == "rewards")'"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_config(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object per partition")


def execute(args: argparse.Namespace) -> int:
    from replay import topics as view

    config = common.load(args)
    with common.open_for_reading(config) as log:
        rows = view.partition_rows(log, common.topics_of(config))
    sys.stdout.write(view.as_json(rows) if args.json else view.as_table(rows))
    return 0
