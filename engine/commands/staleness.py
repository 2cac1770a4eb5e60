"""`millstream staleness`: how old what is trained is, what it costs, and what another limit would do."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from engine.commands import common, limit
from streams.errors import ConfigError, MillstreamError

if TYPE_CHECKING:
    from engine.settings import Config, TrainerConfig
    from replay.ages.history import History
    from replay.ages.measure import Report
    from replay.ages.sweep import Budget, Sweep

NAME = "staleness"
HELP = "how old the trained samples are, and what another limit would do"
DESCRIPTION = """Report, from the log alone: the age of what was trained and of what was dropped, in flight and in
queue; which groups are dropped, by length, and rows that never get trained; how long the trainer
waits and the engines idle; tokens wasted; and by staleness how far the policy had moved from the one
that sampled (ESS, mean |log ratio|, KL, clipping), with the slope of the reward beside it.

With --sweep, a model of the daemons, fed with the durations in the log, says what each limit would
have done: steps a second, trainer wait, age and waste; and which limit to take. Its prediction for
the recorded limit stands beside what really happened. Reads, never writes: safe beside a live run.

With --set, change the limit of the live run instead; without --from-step from the next cut on."""
EXAMPLE = """  millstream staleness runs/demo
  millstream staleness runs/demo --sweep 0,1,2,4,8 --picture limits.html
  millstream staleness runs/demo --sweep 1,2 --engines 2 --json | jq .sweep.advice
  millstream staleness runs/demo --set 3 --from-step 200"""

MOST_LIMIT = 64  # of a sweep: one that fills the pipeline for longer than most runs last says nothing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="TOML file, or a run directory")
    parser.set_defaults(overrides=[])  # `--set` is the limit here
    parser.add_argument("--sweep", metavar="K,…", help="limits to ask the model about, as in 0,1,2,4,8")
    parser.add_argument(
        "--engines", metavar="N", type=common.positive, help="with --sweep: so many engines, not as recorded"
    )
    parser.add_argument(
        "--pace",
        choices=("on", "off"),
        help="with --sweep: off lets engines generate without waiting, and drops what is too old (default on)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--picture", metavar="FILE", type=Path, help="with --sweep: .png, .svg or .html")
    limit.add_arguments(parser)


def execute(args: argparse.Namespace) -> int:
    limits = _checked(args)
    config = common.load(args)
    common.setup_logging("warning")
    if args.limit is not None:
        sys.stdout.write(limit.change_limit(config, args.limit, args.from_step or 0) + "\n")
        return 0
    return _report(args, config, limits)


def _checked(args: argparse.Namespace) -> list[int]:
    """The limits of --sweep; refuses what does not go together, before anything is read."""
    reports = {
        "--sweep": args.sweep,
        "--engines": args.engines,
        "--pace": args.pace,
        "--picture": args.picture,
    }
    if args.limit is not None:
        other = next((name for name, value in reports.items() if value is not None), None)
        if other is not None or args.json:
            raise ConfigError(
                f"--set changes the live run and reports nothing: leave {other or '--json'} out"
            )
    elif args.from_step is not None:
        raise ConfigError("--from-step says when --set begins to bind: add --set K, or leave it out")
    if args.sweep is None:
        alone = next((name for name, value in reports.items() if value is not None), None)
        if alone is not None:
            raise ConfigError(f"{alone} belongs to a sweep: add --sweep 0,1,2,4,8")
        return []
    if args.picture is not None:
        from engine.picture import require_picture

        require_picture(args.picture)
    return parse_limits(args.sweep)


def parse_limits(text: str) -> list[int]:
    """Ascending, each once.

    >>> parse_limits("2, 0,1,2")
    [0, 1, 2]
    """
    limits = set()
    for word in text.split(","):
        if not word.strip().isdecimal():
            raise ConfigError(
                f"--sweep {text}: {word.strip()!r} is no limit; give whole numbers from 0 on with commas between "
                "them, as in 0,1,2,4,8"
            )
        limits.add(int(word))
    if max(limits) > MOST_LIMIT:
        raise ConfigError(
            f"--sweep {text}: {max(limits)} is over {MOST_LIMIT}, the largest limit that is modelled"
        )
    return sorted(limits)


def _report(args: argparse.Namespace, config: Config, limits: list[int]) -> int:
    import msgspec

    from replay.ages.history import read_history
    from replay.ages.measure import measure
    from replay.ages.text import report_text, sweep_text

    with common.open_for_reading(config) as log:
        history = read_history(log, common.topics_of(config))
    require_steps(history)
    report = measure(history)
    found = _sweep(args, config, history, report, limits) if limits else None
    text = report_text(report) + (f"\n{sweep_text(found)}" if found is not None else "")
    if args.json:
        whole = {"report": report, "sweep": found}
        sys.stdout.write(msgspec.json.encode(whole).decode() + "\n")
    else:
        sys.stdout.write(text)
    if found is not None and args.picture is not None:
        _draw(args.picture, history, report, found, text)
    return 0


def require_steps(history: History) -> None:
    """Raises MillstreamError, which says how far the run has come, while no step has been made."""
    if history.steps:
        return
    run = history.view.run
    if history.view.problems:
        first = history.view.problems[0]
        raise MillstreamError(f"no step can be read; ledger record {first.offset}: {first.problem}")
    if run is None:
        raise MillstreamError("the log is empty: no trainer has begun this run yet")
    complete = sum(bool(group.decided_ms) for group in history.groups.values())
    raise MillstreamError(
        f"run {run.run} has made no step yet: {len(history.groups)} groups are dispatched and {complete} are complete, "
        f"a step needs {run.rollout_batch_size}; ask again after the first step"
    )


def _sweep(
    args: argparse.Namespace, config: Config, history: History, report: Report, limits: list[int]
) -> Sweep:
    from replay.ages.durations import measure_durations
    from replay.ages.sweep import sweep
    from replay.ages.whatif import Setting

    durations, recorded = measure_durations(history, slots=config.rollout.max_concurrency)
    setting = Setting(
        limit=recorded.limit,
        engines=args.engines or durations.engines,
        slots=durations.slots,
        batch=durations.batch,
        steps_per_version=config.weights.update_weights_interval,
        max_open_groups=config.rollout.max_open_groups,
        pace=args.pace != "off",
        on_stale=recorded.on_stale,
    )
    least = setting.steps_per_version - 1
    if limits[0] < least:
        raise ConfigError(
            f"--sweep {args.sweep}: with weights.update_weights_interval = {setting.steps_per_version} a limit below "
            f"{least} could never train; leave it out"
        )
    drift = report.drift.per_version if report.drift is not None else None
    return sweep(durations, recorded, limits, setting, budget=drift_budget(config.trainer), drift=drift)


def drift_budget(trainer: TrainerConfig) -> Budget:
    """How far a sample's policy may lie behind, by the kind of loss: rules of thumb from small tasks, in nats a token.

    They were read off several hundred runs of two small tasks at fixed lags; a mix of ages is milder. Calibrate on
    your own runs: the limit at which the reward's slope begins to fall, times the drift per version.
    """
    from replay.ages.sweep import Budget

    if trainer.loss in ("gspo", "m2po", "opd") or (trainer.loss == "ppo" and trainer.use_rollout_logprobs):
        return Budget(0.25, "a loss clipped against the policy that sampled")
    if trainer.loss in ("tis", "decoupled_ppo", "cispo") or trainer.use_tis:
        return Budget(0.06, "a loss that only weights by the policy that sampled")
    return Budget(0.0, "the loss does not look at the policy that sampled")


def _draw(path: Path, history: History, report: Report, found: Sweep, text: str) -> None:
    import html

    from engine.picture import lines, page
    from engine.staleness_picture import panels

    title = f"staleness limits · {report.run}"
    drawn = panels(history, report, found)
    if path.suffix.lower() != ".html":
        lines(path, drawn, title=title)
        return
    svg = lines(None, drawn, title=title) or ""
    path.write_text(page(title, svg, f"<pre>{html.escape(text)}</pre>"), encoding="utf-8")
