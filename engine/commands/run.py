"""`millstream run`: all daemons of a run, supervised."""

from __future__ import annotations

import argparse

from engine.commands import common

NAME = "run"
HELP = "start and supervise all daemons of a run"
DESCRIPTION = """Start every daemon of the run on this machine, restart those that die, and stay until the run has
finished. Started again on a run directory, it goes on where the run had stopped. Each daemon writes
its own file under <run.dir>/logs. SIGTERM and Ctrl-C end all of them cleanly. When a daemon keeps
dying, the run fails with the first cause (exit code 1)."""
EXAMPLE = """  millstream run my.toml --set run.steps=200
  millstream run runs/my-run"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_config(parser)
    parser.add_argument(
        "--launcher", choices=("local",), default="local", help="where the daemons run (default local)"
    )
    parser.add_argument("--plain", action="store_true", help="log lines instead of the live view")
    parser.add_argument(
        "--threads",
        metavar="N",
        type=common.positive,
        default=1,
        help="CPU threads of each daemon, unless OMP_NUM_THREADS is set (default 1)",
    )


def execute(args: argparse.Namespace) -> int:
    config = common.load(args)
    common.setup_logging(config.run.log_level)

    from engine.commands import rundir
    from engine.commands.demo import run_and_report
    from engine.config import check_paths
    from engine.launch.preflight import check_functions

    check_paths(config)
    rundir.refuse_other_run(config)
    check_functions(config)  # before the directory is taken: a typo is no reason to need another one
    rundir.adopt(config)
    return run_and_report(config, plain=args.plain, title=config.run.name, threads=args.threads)
