"""`millstream run`: all daemons of a run, supervised."""

from __future__ import annotations

import argparse

from engine.commands import common
from streams.errors import ConfigError

NAME = "run"
HELP = "start and supervise all daemons of a run"
DESCRIPTION = """Start every daemon of the run, restart those that die, and stay until the run has finished. Started
again on a run directory, it goes on where the run had stopped. Each daemon writes its own file under
<run.dir>/logs. SIGTERM and Ctrl-C end all of them cleanly. When a daemon keeps dying, the run fails
with the first cause (exit code 1).

The daemons are processes of this machine, or with --launcher ray of the nodes of a Ray cluster, placed
by the settings of [placement]. All that they need is reserved before anything starts; when it does not
come in time, the run fails (exit code 1) and says what was needed and what there was. All nodes must
see run.dir under the same path; over several machines the log must be on Kafka. When this command
itself is lost there, the daemons go on for placement.unattended_s, and the same command attaches to
them again (docs/cluster.md)."""
EXAMPLE = """  millstream run my.toml --set run.steps=200
  millstream run runs/my-run
  millstream run my.toml --launcher ray --address 10.0.0.5:6379"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_config(parser)
    parser.add_argument(
        "--launcher",
        choices=("local", "ray"),
        default="local",
        help="where the daemons run: this machine, or a Ray cluster (default local)",
    )
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="with --launcher ray: the head node; auto: the cluster that this machine is part of (default); local: "
        "one of this command alone",
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
    if args.address and args.launcher != "ray":
        raise ConfigError(f"--address {args.address}: goes with --launcher ray; add that, or remove it")
    config = common.load(args)
    common.setup_logging(config.run.log_level)

    from engine.commands import rundir
    from engine.commands.demo import run_and_report
    from engine.config import check_paths
    from engine.launch.preflight import check_functions

    if args.launcher == "ray":
        from engine.launch.daemon import DaemonSpec
        from engine.launch.on_ray import cluster, placement

        cluster.load_ray()
        placement.plan(config, [DaemonSpec("trainer")])  # before the directory is taken
    check_paths(config)
    rundir.refuse_other_run(config)
    check_functions(config)  # before the directory is taken: a typo is no reason to need another one
    rundir.adopt(config)
    return run_and_report(
        config,
        plain=args.plain,
        title=config.run.name,
        threads=args.threads,
        ray_address=(args.address or "auto") if args.launcher == "ray" else None,
    )
