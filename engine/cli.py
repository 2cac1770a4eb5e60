"""`millstream`: the command line.

    argv ──► parser of the subcommand ──► execute(args) ──► exit code
                                               └─ ConfigError 2 · Fenced 3 · other errors of ours 1 · Ctrl-C 130

Data goes to stdout, everything else to stderr. Exit codes: 0 done, 1 the run failed or an audit found a violation,
2 wrong usage or configuration, 3 another trainer has taken over the run, 130 interrupted. A reader that closes our
stdout early (`| head`) is no error.
Nothing here imports torch: `--help` and the log tools are instant and work without it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import metadata

from engine.commands import (
    broker,
    config,
    demo,
    doctor,
    export,
    import_,
    replay,
    run,
    serve,
    show,
    staleness,
    tail,
    topics,
    verify,
    weights,
    why,
)
from streams.errors import ConfigError, MillstreamError

COMMANDS = (
    demo,
    run,
    serve,
    topics,
    tail,
    show,
    verify,
    replay,
    staleness,
    export,
    import_,
    weights,
    config,
    doctor,
    why,
    broker,
)

DONE, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (argparse itself exits with 2 on wrong usage)."""
    args = build_parser().parse_args(argv)
    try:
        code = args.execute(args)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        return _say(error, WRONG_USAGE)
    except MillstreamError as error:
        return _say(error, FAILED)
    except BrokenPipeError:
        _forget_stdout()
        return DONE
    except OSError as error:
        if error.filename is None:
            raise
        return _say(f"{error.filename}: {error.strerror}", FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="millstream",
        description="An event-sourced streaming RL engine for post-training language models.",
        epilog="start here:\n  millstream demo\n\nexit codes: 0 done, 1 the run failed or an audit found a violation,\n"
        "2 wrong usage or configuration, 3 another trainer has taken over the run, 130 interrupted",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"millstream {version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        sub = commands.add_parser(
            command.NAME,
            help=command.HELP,
            description=command.DESCRIPTION,
            epilog=f"example:\n{command.EXAMPLE}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(sub)
        sub.set_defaults(execute=command.execute)
    return parser


def version() -> str:
    try:
        return metadata.version("millstream")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _say(error: object, code: int) -> int:
    print(f"millstream: {error}", file=sys.stderr)
    return code


def _forget_stdout() -> None:
    """Keep the interpreter from complaining about the closed pipe when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
