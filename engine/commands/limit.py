"""Change the staleness limit of a live run: `millstream staleness CONFIG --set K [--from-step N]`.

The command appends one `LimitChanged` to the ledger and is done: trainer and feeder read it there, as they read
everything. Any number of processes may append to a topic, of the embedded log too (each append takes the partition's
lock for itself), so nothing of the run is held up.
"""

from __future__ import annotations

import argparse
import socket
import time
from typing import TYPE_CHECKING

from engine.commands import common
from streams.errors import ConfigError, UnknownTopic

if TYPE_CHECKING:
    from consumers.ledger import Ledger
    from engine.settings import Config
    from streams.events import LimitChanged
    from streams.log import EventLog

_LIMIT = "staleness.max_weight_staleness"
_CAP = "rollout.max_open_groups"  # above what a limit allows it asks for nothing: the feeder takes the lower of both


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        metavar="K",
        type=common.natural,
        dest="limit",
        help="change the staleness limit of the live run to K versions",
    )
    parser.add_argument(
        "--from-step",
        metavar="N",
        type=common.natural,
        help="with --set: not before step N (default: from the next batch that is cut)",
    )


def change_limit(config: Config, limit: int, from_step: int = 0) -> str:
    """Append the change (`from_step` 0: for the next batch that is cut); returns the sentence that says what holds.

    A newer change replaces one that still waits for its step. Raises ConfigError when the run has not begun or has
    ended, when the step is past, or when the limit cannot hold with the run's other settings; LogError, and then it is
    not known whether the change was written.
    """
    from consumers.ledger import Ledger
    from engine.commands import rundir
    from engine.roles import open_run_log

    common.require_shared_log(config)
    _refuse_limit(config, limit)
    if not common.has_log(config):
        raise ConfigError(f"no log at {common.log_folder(config)}: this run has not been started")
    rundir.refuse_imported(config)
    rundir.refuse_other_run(config, patient=False)
    with open_run_log(config) as log:
        try:
            ledger = Ledger(log, common.topics_of(config), limit=config.staleness.max_weight_staleness)
        except UnknownTopic as error:
            raise ConfigError(f"{error} ({config.log.url}): this run has not been started") from error
        ledger.catch_up()
        _refuse_run(config, ledger)
        _refuse_step(config, ledger, from_step)
        before, waited = ledger.limit, ledger.waiting_limit
        if limit == before and waited is None:
            return f"The staleness limit is {limit} already (the next step is {ledger.step + 1}): nothing was written."
        _append(config, log, limit, from_step)
        ledger.catch_up()
        _refuse_run(config, ledger)
        return _sentence(config, ledger, limit, before, waited)


def _refuse_limit(config: Config, limit: int) -> None:
    """The checks of a configuration file hold for a limit that is set later, too."""
    from engine.config_checks import find_problems
    from engine.config_fields import replaced

    problems = [
        problem.text
        for problem in find_problems(replaced(config, _LIMIT, limit))
        if _LIMIT in problem.keys and _CAP not in problem.keys
    ]
    if problems:
        raise ConfigError(f"--set {limit}: this run cannot have that limit: {'; '.join(problems)}")


def _refuse_run(config: Config, ledger: Ledger) -> None:
    name = config.run.name
    if ledger.run is None:
        raise ConfigError(
            f"run {name} has not begun (its ledger is empty): set {_LIMIT} in its configuration instead"
        )
    if ledger.finished is not None:
        raise ConfigError(
            f"run {name} has finished, at step {ledger.finished.step}: no batch will be cut any more"
        )
    if ledger.ending is not None:
        raise ConfigError(f"run {name} is ending, at step {ledger.step}: no batch will be cut any more")


def _refuse_step(config: Config, ledger: Ledger, from_step: int) -> None:
    if 0 < from_step <= ledger.step:
        raise ConfigError(
            f"--from-step {from_step} is past: step {ledger.step} has been cut, the next is {ledger.step + 1}; name "
            "that one or a later one, or leave --from-step out"
        )
    last = config.run.steps
    if last is not None and from_step > last:
        raise ConfigError(
            f"--from-step {from_step}: this run ends with step {last} (run.steps); name an earlier one"
        )


def _append(config: Config, log: EventLog, limit: int, from_step: int) -> None:
    from streams import codec
    from streams.events import LimitChanged

    change = LimitChanged(
        limit=limit,
        from_step=from_step,
        by=f"millstream staleness on {socket.gethostname()}",
        at_ms=time.time_ns() // 1_000_000,
    )
    log.append(
        common.topics_of(config).name("ledger"), 0, [codec.encode(change, producer="millstream staleness")]
    )


def _sentence(config: Config, ledger: Ledger, limit: int, before: int, waited: LimitChanged | None) -> str:
    """What holds from when on, as the ledger says it now that it has the change."""
    step, waits = ledger.step + 1, ledger.waiting_limit
    if waits is not None:
        text = (
            f"The staleness limit will be {limit} from step {waits.from_step} on; it is {before} until then, "
        )
        text += f"and the next step is {step}."
    else:
        text = f"The staleness limit is {limit} (it was {before}) from the next batch on that is cut: step {step}, or "
        text += f"{step + 1} if {step} is being cut just now."
    if waited is not None:
        text += (
            f" The change to {waited.limit} from step {waited.from_step} on, which still waited, is replaced."
        )
    if limit < before:
        fate = "dropped" if config.staleness.on_stale == "drop" else "masked"
        text += f" What was generated before and is older than that when it is cut is {fate}."
    cap = config.rollout.max_open_groups
    if limit > before and cap is not None and cap < (limit + 1) * config.trainer.rollout_batch_size:
        text += f" {_CAP} = {cap} still bounds how far generation runs ahead."
    return text
