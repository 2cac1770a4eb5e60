"""What is left after a run: summary.json, curve.png, and a few lines with the next commands to try."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from engine.commands import common
from engine.settings import Config
from replay.progress import RunProgress
from replay.summary import summary_of
from replay.topics import columns
from streams.errors import ConfigError, LogUnavailable
from streams.log import EventLog

logger = logging.getLogger(__name__)

SHOWN = (
    "steps",
    "wall_s",
    "first_reward",
    "last_reward",
    "seconds_to_0.8",
    "tokens_per_s",
    "groups_trained",
    "groups_dropped",
    "max_staleness_trained",
    "duplicates_trained",
    "trainer_busy",
    "engine_busy",
)


def write_report(config: Config, title: str) -> str:
    """Write summary.json and curve.png into the run directory, from the log alone; returns the text to show."""
    run_dir = Path(config.run.dir)
    try:
        return _written(common.open_for_reading(config), config, run_dir, title)
    except ConfigError as error:  # it ended before anything was written
        return f"{error}\n"
    except LogUnavailable as error:
        return f"no summary, for the log does not answer: {error}\n"


def _written(log: EventLog, config: Config, run_dir: Path, title: str) -> str:
    with log:
        progress = RunProgress(log, common.topics_of(config))
        progress.catch_up()
        summary = summary_of(progress)
        draft = run_dir / ".summary.json"
        draft.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        draft.replace(run_dir / "summary.json")
        _draw(progress, run_dir / "curve.png", title)
    return _text(summary, run_dir)


def _draw(progress: RunProgress, path: Path, title: str) -> None:
    try:
        from engine.curve import write_curve

        write_curve(progress, path, title)
    except ImportError as error:
        logger.warning("no curve.png: %s (it comes with the extra: pip install 'millstream[train]')", error)


def _text(summary: dict[str, Any], run_dir: Path) -> str:
    shown = os.path.relpath(run_dir) if run_dir.is_relative_to(Path.cwd()) else str(run_dir)
    if not summary["steps"]:
        return f"no step was made; the daemons' own words are in {shown}/logs/\n"
    command = called_as()
    table = columns([("SUMMARY", ""), *((name, _value(summary[name])) for name in SHOWN)])
    return f"""
{table}
{shown}: summary.json, curve.png, config.toml, logs/

next:
  {command} tail {shown} ledger -o -5 -e
  {command} verify {shown}
  {command} topics {shown}
"""


def called_as() -> str:
    """How this program is called from here: its name, or its path where it is not on PATH (`make demo`)."""
    called = Path(sys.argv[0])
    if called.name != "millstream":
        return "millstream"
    found = shutil.which("millstream")
    if found is not None and Path(found).resolve() == called.resolve():
        return "millstream"
    return os.path.relpath(called) if called.resolve().is_relative_to(Path.cwd()) else str(called)


def _value(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in value.items()) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
