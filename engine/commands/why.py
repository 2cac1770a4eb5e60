"""`millstream why`: the first process that failed, with its own traceback, and what followed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from engine.commands import common
from streams.errors import ConfigError

if TYPE_CHECKING:
    from engine.why.events import Trouble
    from engine.why.story import Failed, Story

NAME = "why"
HELP = "the first process of a run that failed, and what followed from it"
DESCRIPTION = """Name the first daemon that failed, with its own traceback, then the failures that followed, then
what the log says of trouble: failed engines and samples, dropped groups, skipped steps, dead letters.
Failures that a restart got over are counted and not blamed. Sources: the supervisor's record
(failures.jsonl), the daemons' logs, the event log. Reads, never writes: safe beside a live run.
Without RUN: the newest run directory under runs/."""
EXAMPLE = """  millstream why
  millstream why runs/my-run
  millstream why runs/my-run --json | jq -r .first.reason"""
_MOST_FOLLOWED, _MOST_TROUBLES = 10, 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="RUN", nargs="?", help="run directory, or its TOML file")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides", help="override a setting"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object with every fact")


def execute(args: argparse.Namespace) -> int:
    import msgspec

    from engine.why.story import tell

    args.config = args.config or str(_newest())
    config = common.load(args)
    common.setup_logging("error")
    story = tell(config)
    if args.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(story)).decode() + "\n")
    else:
        sys.stdout.write(as_text(story))
    return 0


def _newest() -> Path:
    from engine.config import CONFIG_FILE

    found = [file for file in Path("runs").glob(f"*/{CONFIG_FILE}") if file.is_file()]
    if not found:
        raise ConfigError(f"no run directory under {Path('runs').absolute()}; name one: millstream why RUN")
    return max(found, key=lambda file: file.stat().st_mtime).parent


def as_text(story: Story) -> str:
    lines = [f"run {story.run} ({story.run_dir}): {story.state}"]
    first = story.first
    if first is None and story.got_over:
        times = "failure" if story.got_over == 1 else "failures"
        lines += [
            "",
            f"{story.got_over} {times} of daemons, all got over by restarts ({story.run_dir}/failures.jsonl)",
        ]
    elif first is None:
        lines += ["", "no daemon has failed, by its logs and the supervisor's record"]
    else:
        lines += ["", *_first(story, first)]
    if story.followed:
        lines += ["", "what followed"]
        lines += [f"  {_after(each, first)}  {_sentence(each)}" for each in story.followed[:_MOST_FOLLOWED]]
        if len(story.followed) > _MOST_FOLLOWED:
            lines.append(f"  and {len(story.followed) - _MOST_FOLLOWED} more")
    if story.said.troubles:
        lines += ["", "what the event log says"]
        lines += [f"  {_trouble(each, first)}" for each in story.said.troubles[:_MOST_TROUBLES]]
        if len(story.said.troubles) > _MOST_TROUBLES:
            lines.append(f"  and {len(story.said.troubles) - _MOST_TROUBLES} more kinds (--json has all)")
    elif story.said.problem:
        lines += ["", story.said.problem]
    return "\n".join(lines) + "\n"


def _first(story: Story, first: Failed) -> list[str]:
    from engine.why.story import when

    lines = [f"first: {_sentence(first)}", f"  {when(first.at)}, by {story.order}; {first.log}"]
    if story.may_be_first:
        lines.append(f"  in the same moment, so perhaps before it: {', '.join(story.may_be_first)}")
    if story.got_over:
        noun = "failure" if story.got_over == 1 else "failures"
        lines.append(f"  {story.got_over} earlier {noun} of this supervision had been got over by restarts")
    lines += ["", *(f"    {line}" for line in first.lines)]
    if story.hint:
        lines += ["", f"  → {story.hint}"]
    return lines


def _sentence(failed: Failed) -> str:
    how = f" ended: {failed.how}" if failed.how else " failed"
    return f"{failed.daemon}{how}" + (f", {failed.reason}" if failed.reason else "")


def _after(failed: Failed, first: Failed | None) -> str:
    """`+12.3 s`."""
    if first is None or not failed.at or not first.at:
        return f"{'':>10}"
    return f"{failed.at - first.at:+9.1f} s"


def _trouble(trouble: Trouble, first: Failed | None) -> str:
    since = ""
    if first is not None and first.at:
        since = f", the first {abs(trouble.first - first.at):.1f} s {'after' if trouble.first > first.at else 'before'}"
    times = f"{trouble.count}×" if trouble.count > 1 else "once"
    example = f" ({trouble.example.strip()[:160]})" if trouble.example.strip(": ") else ""
    return f"{trouble.kind}: {trouble.reason}, {times}{since}{example}"
