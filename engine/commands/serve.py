"""`millstream serve`: one daemon in this process."""

from __future__ import annotations

import argparse
import os
import sys

from engine.commands import common

NAME = "serve"
HELP = "run one daemon in this process"
DESCRIPTION = """Run one daemon until the run has finished, or until SIGTERM or SIGINT, which ends it cleanly after
the current unit of work. All state is rebuilt from the log and the checkpoints, so a daemon may be
killed and started again at any time. Replicas of a role share its partitions by index; a second
holder of one share is refused. On Kafka the share of a replica that is gone goes to the others, and
the run's topics must be there (millstream topics CONFIG --create, or millstream run). A log that
does not answer is waited for, also at the start.

Exits with 1 also when it was asked to stop and what it had made could not be delivered any more,
and with 3 when a newer trainer has taken over the run: do not start this one again while the other
lives, for that one would be the next to be taken over from."""
EXAMPLE = """  millstream serve trainer my.toml
  millstream serve rollout my.toml --replica 0/2"""

FENCED = 3  # exit code of a trainer whose run another trainer has taken over

ROLES = ("feeder", "rollout", "reward", "teacher", "collector", "trainer", "evaluator")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("role", metavar="ROLE", choices=ROLES, help=", ".join(ROLES))
    common.add_config(parser)
    parser.add_argument(
        "--replica",
        metavar="I/N",
        type=parse_replica,
        default=(0, 1),
        help="take share I of N of the partitions (default 0/1)",
    )
    parser.add_argument("--with-parent", type=int, default=0, help=argparse.SUPPRESS)


def parse_replica(text: str) -> tuple[int, int]:
    """`1/3` → (1, 3): share 1 of the shares 0, 1, 2."""
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N, as in 0/2")
    if int(count) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: there is at least 1 replica, as in 0/1")
    if int(index) >= int(count):
        raise argparse.ArgumentTypeError(
            f"{text!r}: of {count} replicas the last is {int(count) - 1}/{count}"
        )
    return int(index), int(count)


def execute(args: argparse.Namespace) -> int:
    stop = common.StopFlag(exits_at_start=True).install()  # before anything slow: a stop counts there too
    if args.with_parent:
        from engine.launch.child import die_with_parent

        die_with_parent(args.with_parent)
    from engine.devices import visible

    visible.check(os.environ)  # before torch
    config = common.load(args)
    common.setup_logging(config.run.log_level)

    from engine.commands import rundir
    from streams.errors import Fenced

    rundir.adopt(config, rewrite=False)

    from engine.roles import serve

    replica, replicas = args.replica
    try:
        code = serve(
            args.role,
            config,
            replica=replica,
            replicas=replicas,
            stop=stop.is_set,
            interrupted=stop.was_asked,
        )
    except Fenced as error:
        print(f"millstream: {error}", file=sys.stderr)
        return FENCED
    return 130 if code == 0 and stop.interrupted else code
