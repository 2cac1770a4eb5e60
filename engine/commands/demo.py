"""`millstream demo`: learn a small task end to end on this machine."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from engine.commands import common
from streams.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.launch.daemon import DaemonSpec
    from engine.launch.supervisor import Supervisor
    from engine.settings import Config

NAME = "demo"
HELP = "learn a small task end to end on this machine"
DESCRIPTION = """Train a tiny model with reinforcement learning through the whole loop: feeder, rollout, reward,
collector and trainer as processes of this machine, on an embedded log, asynchronously. Takes a few
minutes on two cores. Writes everything into a run directory, which every other command takes.
With --kafka the log is Apache Kafka instead, shared by two engines and two reward daemons; without
an address it is the node of `millstream broker start`, which is started if it does not run.
With --engine sglang an SGLang server generates the samples, started by the rollout daemon.

tasks:
  guess    find a number from 16 in at most 5 turns, from "too high" and "too low" (default)
  reverse  reverse a string of 3 to 6 digits"""
EXAMPLE = """  millstream demo
  millstream demo --task reverse --seed 1 --plain
  millstream demo --slow-tools 0.9 --max-weight-staleness 3 --dir runs/slow
  millstream demo --engine sglang --sglang-python .venv-sglang/bin/python
  millstream demo --kafka
  millstream demo --kafka 10.0.0.5:9092,10.0.0.6:9092"""

LOCAL_BROKER = "local"
MOST_SIGMA = 3.0  # of the logarithm: beyond it single calls outlast any deadline

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--task", choices=("guess", "reverse"), help="default: guess; with --engine sglang: reverse"
    )
    parser.add_argument("--plain", action="store_true", help="log lines instead of the live view")
    parser.add_argument("--max-steps", metavar="N", type=common.positive, help="stop after N training steps")
    parser.add_argument("--seed", metavar="S", type=common.natural, default=0, help="default: 0")
    parser.add_argument("--dir", metavar="DIR", type=Path, help="run directory (default runs/demo-TASK-TIME)")
    parser.add_argument(
        "--max-weight-staleness",
        metavar="K",
        type=common.natural,
        default=2,
        help="oldest version trained on; 0: synchronous (default 2)",
    )
    parser.add_argument(
        "--slow-tools",
        metavar="SIGMA",
        type=float,
        default=0.0,
        help="guess: tools answer after a lognormal time of this sigma, as in 0.9",
    )
    parser.add_argument(
        "--kafka",
        metavar="HOST:PORT[,…]",
        nargs="?",
        const=LOCAL_BROKER,
        help="log on Apache Kafka; without an address: on this machine's own node",
    )
    parser.add_argument(
        "--engine",
        choices=("torch", "sglang"),
        default="torch",
        help="where samples are generated: in the rollout daemon, or by an SGLang server (default torch)",
    )
    parser.add_argument(
        "--sglang-python",
        metavar="PYTHON",
        default="",
        help="interpreter that has SGLang, as in .venv-sglang/bin/python (make sglang); default: this one",
    )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="overrides",
        help="override a setting of the run, as in --set trainer.lr=1e-3; may be repeated",
    )


def execute(args: argparse.Namespace) -> int:
    from engine.commands import rundir
    from engine.demo import default_dir, demo_config, prepare
    from engine.tasks import get_task

    if not 0 <= args.slow_tools <= MOST_SIGMA:
        raise ConfigError(
            f"--slow-tools {args.slow_tools:g}: must be between 0 and {MOST_SIGMA:g}, usually 0.9"
        )
    if args.sglang_python and args.engine != "sglang":
        raise ConfigError(
            f"--sglang-python {args.sglang_python}: goes with --engine sglang; add that, or remove it"
        )
    task_name = args.task or ("reverse" if args.engine == "sglang" else "guess")
    if args.slow_tools and task_name != "guess":
        raise ConfigError(
            f"--slow-tools {args.slow_tools:g}: only --task guess uses tools; remove one of them"
        )
    task, run_dir = get_task(task_name), args.dir or default_dir(task_name)
    config = demo_config(
        task,
        run_dir,
        seed=args.seed,
        max_steps=args.max_steps,
        max_weight_staleness=args.max_weight_staleness,
        slow_tools=args.slow_tools,
        log_url=_kafka_url(run_dir, args.kafka) if args.kafka else "",
        engine=args.engine,
        sglang_python=args.sglang_python,
        overrides=args.overrides,
    )
    common.setup_logging(config.run.log_level)
    rundir.refuse_other_run(config)
    rundir.make_run_dir(Path(config.run.dir))
    prepare(config, task)
    rundir.adopt(config)
    return run_and_report(config, plain=args.plain, title=f"millstream demo · {task_name}")


def _kafka_url(run_dir: Path, servers: str) -> str:
    """The URL of the run's log on these brokers; on this machine's own node, started if it does not run."""
    from engine.demo import kafka_url

    if servers != LOCAL_BROKER:
        return kafka_url(run_dir, servers)
    from streams.broker.node import Node
    from streams.broker.prepare import prepare

    node = Node()
    if node.pid is None:
        prepare(lambda line: print(line, file=sys.stderr))
    if node.start():
        print(f"started Apache Kafka at {node.address}; to end it: millstream broker stop", file=sys.stderr)
    return kafka_url(run_dir, node.address)


def run_and_report(
    config: Config, *, plain: bool, title: str, threads: int = 1, ray_address: str | None = None
) -> int:
    """Run all daemons with a view, then write and show what came of it, also after an interruption.

    `ray_address`: the Ray cluster to run on; None: this machine.
    """
    from engine.launch.local import daemons_of, finished_at
    from engine.report import write_report
    from engine.roles import create_topics
    from engine.view import watch

    stop = common.StopFlag().install()
    create_topics(config, stop.is_set)
    finished = finished_at(config)
    if finished is not None:
        logger.info(
            "the run is finished already, at step %d; it takes no more steps, whatever run.steps says",
            finished,
        )
    launcher = make_launcher(config, daemons_of(config), threads=threads, ray_address=ray_address)
    outcome = watch(launcher, config, stop.is_set, plain=plain, title=title)
    if outcome.code == 130:
        there = "" if ray_address is None else f" --launcher ray --address {ray_address}"
        logger.warning(
            "interrupted; all daemons have ended. To go on: millstream run %s%s", config.run.dir, there
        )
    elif outcome.code:
        logger.error("the run failed: %s", outcome.cause)
    sys.stdout.write(write_report(config, title))
    return outcome.code


def make_launcher(
    config: Config, daemons: Sequence[DaemonSpec], *, threads: int, ray_address: str | None
) -> Supervisor:
    if ray_address is None:
        from engine.launch.local import LocalLauncher

        return LocalLauncher(config, daemons, threads=threads)
    from engine.launch.on_ray.launcher import RayLauncher

    return RayLauncher(config, daemons, threads=threads, address=ray_address)
