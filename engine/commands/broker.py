"""`millstream broker`: a real Apache Kafka on this machine, for development."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streams.broker.node import Node

NAME = "broker"
HELP = "a single-node Apache Kafka for development: start, stop, status"
DESCRIPTION = """Run a real Apache Kafka on this machine: one node, reachable from this machine only. Needs Java 17 or
newer, and the first time Maven, which fetches Kafka into a cache. `start` prints the URL for log.url
when the broker answers, and leaves it running in the background; `stop` and `status` find it by its
data folder. Topics outlive a stop, and a kill. It is for development: one copy of everything, no
encryption, no login. Apache Kafka's image does the same in a container: see compose.yaml.

environment:
  KAFKA_HEAP_OPTS    memory of the broker, default "-Xms128m -Xmx512m"; larger: "-Xmx2g"
  JAVA_HOME          which Java, when the one on PATH is not wanted
  MILLSTREAM_CACHE   where Kafka is kept, default ~/.cache/millstream (100 MB)"""
EXAMPLE = """  millstream broker start
  millstream broker start --data runs/kafka --port 0
  millstream broker status
  millstream broker stop"""

HIGHEST_PORT = 65535


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="start|stop|status", dest="action", required=True)
    start = actions.add_parser("start", help="start it, and print its URL when it answers")
    stop = actions.add_parser("stop", help="end it; its topics are kept")
    status = actions.add_parser("status", help="exit code 0 when it runs and answers, else 1")
    for action in (start, stop, status):
        action.add_argument(
            "--data",
            metavar="DIR",
            type=Path,
            help="its topics, log and pid file (default ~/.local/state/millstream/broker)",
        )
    start.add_argument(
        "--port",
        metavar="N",
        type=_port,
        help="0: a free one (default: the one that DIR had last, 9092 at first)",
    )


def execute(args: argparse.Namespace) -> int:
    from streams.broker.node import Node

    if args.action == "start":
        return _start(Node(args.data, port=args.port), f" --data {args.data}" if args.data else "")
    if args.action == "stop":
        return _stop(Node(args.data))
    return _status(Node(args.data))


def _start(node: Node, named: str) -> int:
    from streams.broker.prepare import prepare

    if node.pid is None:  # one that runs needs no Java to be found
        prepare(_say)
    started = node.start()
    print(node.url)
    _say(
        f"{'started' if started else 'it runs already'} (pid {node.pid}); data {node.data}, log {node.log}\n"
        f'to use it: log.url = "{node.url}"; to end it: millstream broker stop{named}'
    )
    return 0


def _stop(node: Node) -> int:
    stopped = node.stop()
    _say(f"the broker of {node.data} {'has ended' if stopped else 'does not run'}")
    return 0


def _status(node: Node) -> int:
    status = node.status()
    if status.pid is None:
        print(f"no broker runs on {node.data}")
    elif status.answers:
        print(f"{node.url} runs (pid {status.pid}); data {node.data}")
    else:
        print(f"{node.url} does not answer, though pid {status.pid} is there; see {node.log}")
    return 0 if status.answers else 1


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > HIGHEST_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to {HIGHEST_PORT}")
    return int(text)
